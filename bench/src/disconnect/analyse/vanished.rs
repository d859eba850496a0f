//! Clients whose host has vanished: whether the deployment noticed, and when it had to.
//!
//! | the request of such a client | |
//! |---|---|
//! | ended because an engine was aborted, or a lease released | noticed |
//! | came to its own end within the bound | by itself: of the noticing it shows nothing |
//! | held blocks beyond the bound | stranded, and a finding |
//!
//! No deployment can know at once, so such clients are in no number of those that leave by a FIN or RST. The bound is what
//! was asked for (`--vanish-noticed-ms`), an eighth of it (a second at least) for the time between two probes, and what blocks may take to come
//! back after any leaving (`--stranded-after-ms`).

use serde::Serialize;

use crate::disconnect::analyse::dist::{Dist, Times};
use crate::disconnect::analyse::findings::{finding, why_stranded};
use crate::disconnect::analyse::summary::{Finding, Group, PhaseRow, Summary};
use crate::disconnect::analyse::{Facts, Victim, ms};
use crate::disconnect::plan::phase::Kind;
use crate::disconnect::record::raw::CallRecord;
use crate::disconnect::record::timeline::{Leg, Timeline};

/// As Baton's router notices by default.
pub(crate) const NOTICED_MS: u64 = 20_000;
/// Keepalive probes are so many parts of the bound apart, and a second at least (`router/src/engines/presence.rs`). The last of them
/// may just miss the bound.
const PROBES: u64 = 8;
const PROBES_APART_US: u64 = 1_000_000;

/// With the time between two probes, microseconds.
pub(crate) fn with_probes(noticed_us: u64) -> u64 {
    noticed_us.saturating_add((noticed_us / PROBES).max(PROBES_APART_US))
}

/// A way of leaving that was asked for and not possible where the benchmark was run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct NotPlayed {
    pub(crate) kind: Kind,
    pub(crate) why: String,
}

/// Clients that have vanished.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Vanished {
    /// A deployment has to notice within this time.
    pub(crate) noticed_within_ms: f64,
    /// Requests that engines were told to end, and how long after the vanishing.
    pub(crate) noticed_ms: Dist,
    /// Requests that came to their own end sooner, and how long after.
    pub(crate) by_itself_ms: Dist,
    #[serde(flatten)]
    pub(crate) group: Group,
    /// Where they were when they vanished.
    pub(crate) phases: Vec<PhaseRow>,
}

/// What became of a request whose client has vanished.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Noticed(u64),
    ByItself(u64),
    Stranded,
}

impl Facts {
    /// How long a deployment may take to notice that a host has vanished, microseconds.
    fn noticed_us(&self) -> u64 {
        let asked = self.run.options["vanish_noticed_ms"].as_u64().unwrap_or(NOTICED_MS);
        with_probes(asked.saturating_mul(1_000))
    }

    /// So long after its client was gone the blocks of a call are stranded, microseconds.
    pub(crate) fn stranded_after(&self, call: &CallRecord) -> u64 {
        let noticed = if call.vanishes() { self.noticed_us() } else { 0 };
        self.run.stranded_after_us.saturating_add(noticed)
    }

    /// Until when a deployment may take the client of a call to be there; of one that has vanished until its request is over
    /// or should be.
    pub(crate) fn there_until(&self, call: &CallRecord) -> u64 {
        let Some(victim) = self.victim(call).filter(|victim| victim.call.vanishes()) else {
            return call.ended_us;
        };
        let bound = victim.gone.saturating_add(self.stranded_after(call));
        let over = victim.timeline.and_then(Timeline::home_at).map(|home| home.max(victim.gone));
        over.map_or(bound, |over| over.min(bound))
    }

    /// Blocks that an engine held at this moment for clients that have vanished, and of which it need not know yet; of
    /// engines that tell metrics only all that it held.
    pub(crate) fn held_for_ghosts(&self, engine: usize, at: u64, held: u64) -> u64 {
        let ghosts = || self.calls.iter().filter(|call| call.vanishes() && self.there_until(call) > at);
        if !self.exact() {
            return if ghosts().next().is_some() { held } else { 0 };
        }
        let legs =
            ghosts().filter_map(|call| self.timelines.get(&call.tag)).flat_map(|timeline| &timeline.legs);
        let holds = |leg: &&Leg| leg.engine == engine && leg.holds_at(at);
        legs.filter(holds).map(Leg::held).sum::<u64>().min(held)
    }
}

fn fate(facts: &Facts, victim: &Victim<'_>) -> Option<Fate> {
    let (timeline, gone) = (victim.timeline?, victim.gone);
    let back = timeline.home_at();
    // It held nothing any more, or had come to no engine.
    if back.is_some_and(|back| back <= gone) {
        return None;
    }
    let limit = facts.stranded_after(victim.call);
    let Some(back) = back.filter(|back| back - gone <= limit) else {
        // The engines were not watched for long enough.
        let unseen = back.is_none() && victim.watched_until.saturating_sub(gone) <= limit;
        return (!unseen).then_some(Fate::Stranded);
    };
    let told = timeline.legs.iter().filter(|leg| leg.holds_at(gone)).filter_map(|leg| {
        let aborted = leg.ended.as_ref().filter(|ended| ended.outcome == "abort").map(|ended| ended.at);
        leg.told.iter().copied().chain(aborted).filter(|at| *at >= gone).min()
    });
    Some(told.max().map_or(Fate::ByItself(back - gone), |at| Fate::Noticed(at - gone)))
}

/// `None` where no client has vanished.
pub(crate) fn of(
    facts: &Facts,
    vanished: &[Victim<'_>],
    group: Group,
    phases: Vec<PhaseRow>,
) -> Option<Vanished> {
    let (mut noticed, mut by_itself) = (Times::default(), Times::default());
    for fate in vanished.iter().filter_map(|victim| fate(facts, victim)) {
        match fate {
            Fate::Noticed(us) => noticed.ended(ms(us)),
            Fate::ByItself(us) => by_itself.ended(ms(us)),
            Fate::Stranded => {}
        }
    }
    let (noticed_ms, by_itself_ms) = (noticed.dist(), by_itself.dist());
    let noticed_within_ms = ms(facts.noticed_us());
    (!vanished.is_empty()).then_some(Vanished { noticed_within_ms, noticed_ms, by_itself_ms, group, phases })
}

/// Blocks that were held beyond the bound.
pub(crate) fn stranded(facts: &Facts, vanished: &[Victim<'_>], findings: &mut Vec<Finding>) {
    let held: Vec<_> = vanished.iter().filter(|victim| fate(facts, victim) == Some(Fate::Stranded)).collect();
    let Some(first) = held.first() else { return };
    let limit = facts.stranded_after(first.call);
    let tags: Vec<_> = held.iter().map(|victim| victim.call.tag.as_str()).collect();
    let says = format!(
        "{} of {} vanished clients stranded their blocks for more than {} s: {}",
        tags.len(),
        vanished.len(),
        limit as f64 / 1e6,
        why_stranded(&held, limit)
    );
    findings.push(finding("vanished_stranded", says, tags.len() as u64, &tags));
}

/// What could not be judged of them.
pub(crate) fn unknown(summary: &Summary) -> Vec<String> {
    let not_played = summary
        .not_played
        .iter()
        .map(|NotPlayed { kind, why }| format!("cancel by {}: not possible here: {why}", kind.label()));
    let mut unknown: Vec<String> = not_played.collect();
    if let Some(Vanished { noticed_within_ms, noticed_ms, by_itself_ms, group, .. }) = &summary.vanished
        && group.exact
        && noticed_ms.n == 0
        && group.stranded == 0
    {
        let longest = if by_itself_ms.n == 0 {
            "none of them had reached an engine".to_owned()
        } else {
            format!("the longest completed after {}", crate::disconnect::report::ms(by_itself_ms.max))
        };
        unknown.push(format!(
            "detection of vanished clients: of {} requests {longest}, and the limit is {} (`--vanish-noticed-ms`)",
            group.cancelled,
            crate::disconnect::report::ms(*noticed_within_ms)
        ));
    }
    for engine in summary.engines.iter().filter(|engine| engine.ghosts_at_end > 0) {
        unknown.push(format!(
            "{} still holds {} at the end for vanished clients, within the limit for their detection",
            engine.name,
            engine.told(engine.ghosts_at_end)
        ));
    }
    unknown
}

impl Vanished {
    /// For people.
    pub(crate) fn said(&self) -> String {
        let Self { noticed_within_ms, noticed_ms, by_itself_ms, group, .. } = self;
        let within = crate::disconnect::report::ms(*noticed_within_ms);
        let mut said = format!(
            "Vanished (in no other row): {} clients. The deployment has {within} to notice.",
            group.cancelled
        );
        if group.exact {
            let times = |dist: &Dist| match dist.n {
                0 => String::new(),
                _ => format!(
                    " (median {}, longest {})",
                    crate::disconnect::report::ms(dist.p50),
                    crate::disconnect::report::ms(dist.max)
                ),
            };
            said += &format!(
                " It aborted {} requests{}. {} completed on their own{}. {} held blocks for longer.",
                noticed_ms.n,
                times(noticed_ms),
                by_itself_ms.n,
                times(by_itself_ms),
                group.stranded
            );
        }
        said
    }
}
