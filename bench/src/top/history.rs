//! What changed between two looks: leases ended per second, by cause.

use std::collections::{BTreeMap, HashMap};

use baton_router::snapshot::Snapshot;

/// Looks that are remembered: a sparkline is not wider.
const KEPT: usize = 120;

/// Causes that are told apart.
const CAUSES_MAX: usize = 64;

/// Rates by cause.
#[derive(Debug, Default)]
pub(super) struct History {
    /// When the last look was, and every engine's counts then.
    last: Option<(u64, Counts)>,
    rates: BTreeMap<String, Rates>,
    looks: usize,
}

type Counts = HashMap<String, (Option<String>, BTreeMap<String, u64>)>;

/// One cause.
#[derive(Debug, Default)]
pub(super) struct Rates {
    /// Per second, the latest last.
    pub(super) per_second: Vec<f64>,
    /// Since the engines started.
    pub(super) total: u64,
}

impl History {
    /// Takes one more look.
    pub(super) fn look(&mut self, snapshot: &Snapshot) {
        let of = |engine: &baton_router::snapshot::EngineView| {
            (engine.engine.clone(), (engine.epoch.clone(), engine.releases.clone()))
        };
        let mut counts: Counts = snapshot.engines.iter().map(of).collect();
        let mut totals: BTreeMap<String, u64> = BTreeMap::new();
        for (cause, count) in counts.values().flat_map(|(_, releases)| releases) {
            *totals.entry(cause.clone()).or_insert(0) += count;
        }
        let Some((at_us, before)) = self.last.take() else {
            self.last = Some((snapshot.at_us, counts));
            for (cause, total) in totals.into_iter().take(CAUSES_MAX) {
                self.rates.insert(cause, Rates { per_second: Vec::new(), total });
            }
            return;
        };
        let seconds = snapshot.at_us.saturating_sub(at_us) as f64 / 1e6;
        if seconds <= 0.0 {
            // The router has not looked again.
            self.last = Some((at_us, before));
            return;
        }
        let mut ended: BTreeMap<&str, u64> = BTreeMap::new();
        for (engine, (epoch, releases)) in &counts {
            // One that is seen for the first time has counted for longer than a look; one that was started anew has not.
            let Some((epoch_before, then)) = before.get(engine) else { continue };
            for (cause, count) in releases {
                let then = if epoch == epoch_before { then.get(cause).copied().unwrap_or(0) } else { 0 };
                *ended.entry(cause).or_insert(0) += count.saturating_sub(then);
            }
        }
        self.looks = (self.looks + 1).min(KEPT);
        for (cause, total) in &totals {
            if self.rates.contains_key(cause) || self.rates.len() < CAUSES_MAX {
                self.rates.entry(cause.clone()).or_default().total = *total;
            }
        }
        for (cause, rates) in &mut self.rates {
            // A cause that is new was nothing before.
            rates.per_second.resize(self.looks - 1, 0.0);
            rates.per_second.push(ended.get(cause.as_str()).copied().unwrap_or(0) as f64 / seconds);
            if rates.per_second.len() > KEPT {
                rates.per_second.remove(0);
            }
        }
        // What an engine that did not answer this time had counted is what it is compared with next time.
        for (engine, told) in before {
            match counts.get(&engine) {
                Some((None, releases)) if releases.is_empty() => drop(counts.insert(engine, told)),
                _ => {}
            }
        }
        self.last = Some((snapshot.at_us, counts));
    }

    /// Causes that ever occurred, the most frequent of late first.
    pub(super) fn causes(&self) -> Vec<(&str, &Rates)> {
        let mut causes: Vec<_> =
            self.rates.iter().filter(|(_, rates)| rates.total > 0).map(|(c, r)| (c.as_str(), r)).collect();
        let latest = |rates: &Rates| rates.per_second.iter().sum::<f64>();
        causes.sort_by(|(_, a), (_, b)| latest(b).total_cmp(&latest(a)).then_with(|| b.total.cmp(&a.total)));
        causes
    }

    /// All causes together, at the last look.
    pub(super) fn ended_per_second(&self) -> f64 {
        self.rates.values().filter_map(|rates| rates.per_second.last()).fold(0.0, |sum, rate| sum + rate)
    }
}

#[cfg(test)]
mod tests {
    use baton_router::snapshot::EngineView;

    use super::*;

    fn look(at_us: u64, epoch: &str, done: u64, gone: u64) -> Snapshot {
        let releases = BTreeMap::from([("transfer_done".to_owned(), done), ("client_gone".to_owned(), gone)]);
        let engine = EngineView {
            engine: "p:1".to_owned(),
            epoch: Some(epoch.to_owned()),
            releases,
            ..EngineView::default()
        };
        Snapshot { at_us, engines: vec![engine], ..Snapshot::default() }
    }

    #[test]
    fn rates_are_what_was_counted_between_two_looks() {
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
        assert_eq!(history.causes()[0].1.per_second, [10.0, 3.0], "started anew, it counts from nothing");
        let silent = EngineView { engine: "p:1".to_owned(), ..EngineView::default() };
        history.look(&Snapshot { at_us: 5_000_000, engines: vec![silent], ..Snapshot::default() });
        history.look(&look(6_000_000, "b", 5, 0));
        assert_eq!(history.causes()[0].1.per_second, [10.0, 3.0, 0.0, 2.0], "silence is no restart");
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut history = History::default();
        for at in 1..500 {
            history.look(&look(at * 1_000_000, "a", at, 0));
        }
        assert_eq!(history.causes()[0].1.per_second.len(), KEPT);
        let many = (0..500).map(|n| (format!("cause{n}"), 1)).collect();
        let engine = EngineView { engine: "p:2".to_owned(), releases: many, ..EngineView::default() };
        history.look(&Snapshot { at_us: 600_000_000, engines: vec![engine], ..Snapshot::default() });
        assert!(history.rates.len() <= CAUSES_MAX);
    }
}
