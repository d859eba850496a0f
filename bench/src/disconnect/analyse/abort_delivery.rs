//! Whether engines that worked for a client were told that it had left.
//!
//! | the leg, after its client had gone | |
//! |---|---|
//! | was told of it (an abort, or a release) before its own end, or ended by that | told |
//! | came to its own end, `length` or `stop`, and had not been told | untold |
//!
//! However short it was, a leg that nobody stops has run for nobody. But telling takes time, and a leg may be over first:
//! one that had less left to do than telling takes in this run ([`Telling::enough_us`]) cannot be judged. Of those that had
//! more, some are honest races still. A leg that had `r` left goes untold as often as telling takes longer than `r`; what
//! is untold beyond that ([`WorkRow::by_chance`]) was not told.

use crate::common::stats::percentile;
use crate::disconnect::analyse::Victim;
use crate::disconnect::analyse::summary::{RanOn, WorkRow};
use crate::disconnect::record::timeline::{Leg, RACE_US};

/// What telling takes, per cent of the time.
const TELLING: f64 = 90.0;
/// Fewer that were told do not show how long telling takes.
const TOLD_FEW: usize = 10;

/// What became of a leg that had work when its client was gone, and how long after, microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Told(u64),
    Untold(u64),
}

/// `None`: it had nothing to do any more, or its end was neither its own nor told (an error; not seen at all).
pub(crate) fn fate(leg: &Leg, gone: u64) -> Option<Fate> {
    let ended = leg.ended.as_ref();
    if leg.queued.is_none() || ended.is_some_and(|ended| ended.at <= gone) {
        return None;
    }
    let end = ended.map_or(u64::MAX, |ended| ended.at);
    // It may have been told before the clocks agree that it was.
    let told = leg.told.iter().find(|told| **told + RACE_US > gone && **told <= end);
    match (told, ended) {
        (Some(told), _) => Some(Fate::Told(told.saturating_sub(gone))),
        (None, Some(ended)) if ended.outcome == "abort" => Some(Fate::Told(ended.at - gone)),
        (None, Some(ended)) if matches!(ended.outcome.as_str(), "length" | "stop" | "lent") => {
            Some(Fate::Untold(ended.at - gone))
        }
        (None, _) => None,
    }
}

/// How long after a client's going its engines were told, of those that were, microseconds in order.
#[derive(Debug, Default)]
pub(crate) struct Telling(Vec<f64>);

impl Telling {
    /// Of legs at work, and of leases that were open. Not of a lease of which the leg had gone on to its end after its
    /// client was gone: that is told when it is too late, and would excuse what it shows.
    pub(crate) fn of(victims: &[Victim<'_>]) -> Self {
        let legs = victims.iter().flat_map(|victim| {
            victim.timeline.into_iter().flat_map(|timeline| &timeline.legs).map(|leg| (leg, victim.gone))
        });
        let took = |(leg, gone): (&Leg, u64)| match fate(leg, gone) {
            Some(Fate::Told(took)) => Some(took),
            Some(Fate::Untold(_)) => None,
            None => {
                let lent = leg.ended.as_ref().is_some_and(|ended| ended.at <= gone);
                leg.told.iter().find(|told| lent && **told >= gone).map(|told| told - gone)
            }
        };
        let mut took: Vec<f64> = legs.filter_map(took).map(|took| took as f64).collect();
        took.sort_by(f64::total_cmp);
        Self(took)
    }

    /// A leg that had so much left could have been told, microseconds. Never more than [`RACE_US`]: a deployment that needs
    /// longer does not stop what it should.
    pub(crate) fn enough_us(&self) -> u64 {
        let usual = percentile(&self.0, TELLING).filter(|_| self.0.len() >= TOLD_FEW);
        usual.map_or(RACE_US, |usual| (usual as u64).min(RACE_US))
    }

    /// The share of telling that takes longer than this.
    fn slower_than(&self, us: u64) -> f64 {
        if us > RACE_US || self.0.len() < TOLD_FEW {
            return 0.0;
        }
        let quicker = self.0.partition_point(|took| *took <= us as f64);
        1.0 - quicker as f64 / self.0.len() as f64
    }
}

/// Legs of a client that had left, of one kind or of both.
fn legs<'a>(victim: &'a Victim<'_>, lends: Option<bool>) -> impl Iterator<Item = &'a Leg> {
    let legs = victim.timeline.into_iter().flat_map(|timeline| &timeline.legs);
    legs.filter(move |leg| lends.is_none_or(|lends| leg.lends == lends))
}

/// What became of the legs of one client, together.
#[derive(Default)]
struct Course {
    at_work: bool,
    judged: bool,
    /// How long it ran on, where that is judged.
    without_abort: Option<u64>,
    continued_after_abort: bool,
}

fn course(victim: &Victim<'_>, lends: Option<bool>, enough_us: u64) -> Course {
    let mut course = Course::default();
    for leg in legs(victim, lends) {
        let Some(fate) = fate(leg, victim.gone) else { continue };
        course.at_work = true;
        match fate {
            Fate::Told(at) => {
                course.judged = true;
                // With the step that it was in it should have stopped.
                let own = leg.ended.as_ref().filter(|ended| ended.outcome != "abort");
                course.continued_after_abort |=
                    own.is_some_and(|ended| ended.at > victim.gone + at + RACE_US);
            }
            Fate::Untold(left) if left > enough_us => {
                course.judged = true;
                course.without_abort = course.without_abort.max(Some(left));
            }
            Fate::Untold(_) => {}
        }
    }
    course
}

/// How many of these were told by nobody.
pub(crate) fn ran_on(victims: &[&Victim<'_>], telling: &Telling) -> RanOn {
    let mut ran_on = RanOn::default();
    for victim in victims {
        let course = course(victim, None, telling.enough_us());
        ran_on.judged += u64::from(course.judged);
        ran_on.completed_without_abort += u64::from(course.without_abort.is_some());
    }
    ran_on
}

/// The same by engines, with the tags of those that show it.
pub(crate) fn rows<'a>(victims: &'a [Victim<'_>], telling: &Telling) -> Vec<(WorkRow, Vec<&'a str>)> {
    [(true, "prefill"), (false, "decode")]
        .into_iter()
        .map(|(lends, leg)| {
            let enough_us = telling.enough_us();
            let mut row = WorkRow { leg, abort_delivery_ms: enough_us as f64 / 1e3, ..WorkRow::default() };
            let (mut tags, mut chances) = (Vec::new(), 0.0);
            for victim in victims {
                let course = course(victim, Some(lends), enough_us);
                row.at_work += u64::from(course.at_work);
                row.judged += u64::from(course.judged);
                row.completed_without_abort += u64::from(course.without_abort.is_some());
                row.continued_after_abort +=
                    u64::from(course.continued_after_abort && course.without_abort.is_none());
                chances += course.without_abort.map_or(0.0, |left| telling.slower_than(left));
                if course.without_abort.is_some() || course.continued_after_abort {
                    tags.push(victim.call.tag.as_str());
                }
            }
            row.by_chance = chances / row.completed_without_abort.max(1) as f64;
            (row, tags)
        })
        .collect()
}
