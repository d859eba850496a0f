//! Changes between two snapshots: leases ended per second, by cause.

use std::collections::{BTreeMap, HashMap, HashSet};

use baton_router::snapshot::{EngineView, Snapshot};

/// Maximum snapshots in the history, which is the width of a sparkline.
const KEPT: usize = 120;

/// Maximum number of causes.
const CAUSES_MAX: usize = 64;

/// Rates by cause.
#[derive(Debug, Default)]
pub(super) struct History {
    engines: HashMap<String, EngineHistory>,
    rates: BTreeMap<String, Rates>,
    looks: usize,
}

/// State of one engine. A router serves one observation for a while, and each router observes at other times.
#[derive(Debug, Default)]
struct EngineHistory {
    /// The time and the observer of the latest observation. The engine may not have responded.
    seen: Option<(u64, String)>,
    /// The latest observation that contains counts.
    counted: Option<(u64, String)>,
    epoch: Option<String>,
    releases: BTreeMap<String, u64>,
    /// Rates between the latest two observations.
    per_second: BTreeMap<String, f64>,
}

impl EngineHistory {
    /// Takes an observation. Returns false if it is the same one again.
    fn look(&mut self, engine: &EngineView) -> bool {
        let seen = (engine.at_us, engine.observed_by.clone());
        if self.seen.as_ref() == Some(&seen) {
            return false;
        }
        self.seen = Some(seen.clone());
        if engine.epoch.is_none() && engine.releases.is_empty() {
            // The engine did not respond. The next counts are compared with the latest known ones.
            self.per_second.clear();
            return true;
        }
        // The first counts cover more than one interval. Times of two observers are not comparable.
        let before = self.counted.take().filter(|(at, by)| *by == seen.1 && *at < seen.0);
        if let Some((at_us, _)) = before {
            let seconds = (seen.0 - at_us) as f64 / 1e6;
            // A restarted engine counts from zero.
            let restarted = engine.epoch.is_some() && self.epoch.is_some() && self.epoch != engine.epoch;
            let rate = |(cause, count): (&String, &u64)| {
                let then = if restarted { 0 } else { self.releases.get(cause).copied().unwrap_or(0) };
                (cause.clone(), count.saturating_sub(then) as f64 / seconds)
            };
            self.per_second = engine.releases.iter().map(rate).collect();
        }
        self.counted = Some(seen);
        self.epoch = engine.epoch.clone().or(self.epoch.take());
        self.releases.clone_from(&engine.releases);
        true
    }
}

/// Rates of one cause.
#[derive(Debug, Default)]
pub(super) struct Rates {
    /// Per second, the latest last.
    pub(super) per_second: Vec<f64>,
    /// Since the engines started.
    pub(super) total: u64,
}

impl History {
    /// Takes a snapshot. Engines without a new observation keep their rates.
    pub(super) fn look(&mut self, snapshot: &Snapshot) {
        let known = self.engines.len();
        let in_view: HashSet<&str> = snapshot.engines.iter().map(|engine| engine.engine.as_str()).collect();
        self.engines.retain(|name, _| in_view.contains(name.as_str()));
        let mut changed = self.engines.len() < known;
        for engine in &snapshot.engines {
            let first = !self.engines.contains_key(&engine.engine);
            // A first observation has no rate.
            changed |= self.engines.entry(engine.engine.clone()).or_default().look(engine) && !first;
        }
        let mut totals: BTreeMap<&str, u64> = BTreeMap::new();
        for (cause, count) in self.engines.values().flat_map(|engine| &engine.releases) {
            *totals.entry(cause).or_insert(0) += count;
        }
        for (cause, total) in totals {
            if self.rates.contains_key(cause) || self.rates.len() < CAUSES_MAX {
                self.rates.entry(cause.to_owned()).or_default().total = total;
            }
        }
        if !changed {
            return;
        }
        self.looks = (self.looks + 1).min(KEPT);
        for (cause, rates) in &mut self.rates {
            if rates.per_second.len() == KEPT {
                rates.per_second.remove(0);
            }
            // A new cause was zero before.
            rates.per_second.resize(self.looks - 1, 0.0);
            let of_all = self.engines.values().filter_map(|engine| engine.per_second.get(cause));
            rates.per_second.push(of_all.fold(0.0, |sum, rate| sum + rate));
        }
    }

    /// Causes that occurred, the most frequent recently first.
    pub(super) fn causes(&self) -> Vec<(&str, &Rates)> {
        let mut causes: Vec<_> =
            self.rates.iter().filter(|(_, rates)| rates.total > 0).map(|(c, r)| (c.as_str(), r)).collect();
        let latest = |rates: &Rates| rates.per_second.iter().sum::<f64>();
        causes.sort_by(|(_, a), (_, b)| latest(b).total_cmp(&latest(a)).then_with(|| b.total.cmp(&a.total)));
        causes
    }

    /// The sum over all causes in the latest snapshot.
    pub(super) fn ended_per_second(&self) -> f64 {
        self.rates.values().filter_map(|rates| rates.per_second.last()).fold(0.0, |sum, rate| sum + rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(at_us: u64, epoch: &str, done: u64, gone: u64) -> Snapshot {
        let releases = BTreeMap::from([("transfer_done".to_owned(), done), ("client_gone".to_owned(), gone)]);
        let engine = EngineView {
            engine: "p:1".to_owned(),
            at_us,
            epoch: Some(epoch.to_owned()),
            releases,
            ..EngineView::default()
        };
        Snapshot { engines: vec![engine], ..Snapshot::default() }
    }

    #[test]
    fn rates_are_the_difference_of_two_samples() {
        let mut history = History::default();
        history.look(&look(1_000_000, "a", 10, 0));
        assert_eq!(history.ended_per_second(), 0.0, "nothing is known of one look");
        history.look(&look(3_000_000, "a", 30, 1));
        let causes = history.causes();
        assert_eq!((causes[0].0, &causes[0].1.per_second[..]), ("transfer_done", &[10.0][..]));
        assert_eq!((causes[1].0, &causes[1].1.per_second[..]), ("client_gone", &[0.5][..]));
        history.look(&look(3_000_000, "a", 99, 9));
        assert_eq!(history.causes()[0].1.per_second.len(), 1, "the same look again");
        history.look(&look(4_000_000, "b", 3, 0));
        assert_eq!(history.causes()[0].1.per_second, [10.0, 3.0], "restarted, it counts from zero");
        let silent = EngineView { engine: "p:1".to_owned(), at_us: 5_000_000, ..EngineView::default() };
        history.look(&Snapshot { engines: vec![silent], ..Snapshot::default() });
        history.look(&look(6_000_000, "b", 5, 0));
        assert_eq!(history.causes()[0].1.per_second, [10.0, 3.0, 0.0, 1.0], "silence is no restart");
    }

    #[test]
    fn the_history_is_bounded() {
        let mut history = History::default();
        for at in 1..500 {
            history.look(&look(at * 1_000_000, "a", at, 0));
        }
        history.look(&look(502_000_000, "a", 559, 0));
        let kept = &history.causes()[0].1.per_second;
        assert_eq!((kept.len(), kept[0], &kept[KEPT - 2..]), (KEPT, 1.0, &[1.0, 20.0][..]));
        history.look(&look(503_000_000, "a", 559, 0));
        let kept = &history.causes()[0].1.per_second;
        assert_eq!((kept.len(), &kept[KEPT - 3..]), (KEPT, &[1.0, 20.0, 0.0][..]), "the oldest goes");
        let many = (0..500).map(|n| (format!("cause{n}"), 1)).collect();
        let engine = EngineView { engine: "p:2".to_owned(), releases: many, ..EngineView::default() };
        history.look(&Snapshot { engines: vec![engine], ..Snapshot::default() });
        assert!(history.rates.len() <= CAUSES_MAX);
    }
}
