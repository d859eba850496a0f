//! Whether engines with work for a cancelled request received its abort.
//!
//! | the leg, after the cancel | |
//! |---|---|
//! | received an abort or a release before it completed, or ended by an abort | aborted |
//! | completed (`length` or `stop`) without an abort | completed without abort |
//!
//! A leg that completes after the cancel was wasted, however short it was. But an abort takes time, and a leg may
//! complete first. A leg is not judged if it had less work left than aborts take in this run
//! ([`AbortDelays::min_remaining_us`]). Some of the longer legs are still lost races. A leg with `r` left completes
//! without an abort as often as aborts take longer than `r`. Only the legs beyond that share ([`WorkRow::by_chance`])
//! received no abort.

use crate::common::stats::percentile;
use crate::disconnect::analyse::run_data::CancelledCall;
use crate::disconnect::analyse::summary::{UnabortedCount, WorkRow};
use crate::disconnect::record::timeline::{LegTimeline, RACE_US};

/// The percentile of the abort delays that a leg has to exceed to be judged.
const TELLING: f64 = 90.0;
/// With fewer aborts the usual delay is unknown.
const TOLD_FEW: usize = 10;

/// The end of a leg that had work at the cancel, and the time after the cancel, microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LegOutcome {
    Aborted(u64),
    Completed(u64),
}

/// `None` if the leg had no work left, failed, or has no known end.
pub(crate) fn leg_outcome(leg: &LegTimeline, cancelled_at: u64) -> Option<LegOutcome> {
    let ended = leg.ended.as_ref();
    if leg.queued.is_none() || ended.is_some_and(|ended| ended.at <= cancelled_at) {
        return None;
    }
    let end = ended.map_or(u64::MAX, |ended| ended.at);
    // The clocks may show an abort shortly before the cancel.
    let aborted = leg.aborts.iter().find(|aborted| **aborted + RACE_US > cancelled_at && **aborted <= end);
    match (aborted, ended) {
        (Some(aborted), _) => Some(LegOutcome::Aborted(aborted.saturating_sub(cancelled_at))),
        (None, Some(ended)) if ended.outcome == "abort" => Some(LegOutcome::Aborted(ended.at - cancelled_at)),
        (None, Some(ended)) if matches!(ended.outcome.as_str(), "length" | "stop" | "lent") => {
            Some(LegOutcome::Completed(ended.at - cancelled_at))
        }
        (None, _) => None,
    }
}

/// The delays between cancels and their aborts, microseconds, sorted.
#[derive(Debug, Default)]
pub(crate) struct AbortDelays(Vec<f64>);

impl AbortDelays {
    /// Delays of legs with work and of open leases. The release of a lease whose leg completed after the cancel does
    /// not count: it comes late, and would hide the missing abort.
    pub(crate) fn of(cancelled: &[CancelledCall<'_>]) -> Self {
        let legs = cancelled.iter().flat_map(|request| {
            request
                .timeline
                .into_iter()
                .flat_map(|timeline| &timeline.legs)
                .map(|leg| (leg, request.cancelled_at))
        });
        let took = |(leg, cancelled_at): (&LegTimeline, u64)| match leg_outcome(leg, cancelled_at) {
            Some(LegOutcome::Aborted(took)) => Some(took),
            Some(LegOutcome::Completed(_)) => None,
            None => {
                let leased = leg.ended.as_ref().is_some_and(|ended| ended.at <= cancelled_at);
                leg.aborts
                    .iter()
                    .find(|aborted| leased && **aborted >= cancelled_at)
                    .map(|aborted| aborted - cancelled_at)
            }
        };
        let mut took: Vec<f64> = legs.filter_map(took).map(|took| took as f64).collect();
        took.sort_by(f64::total_cmp);
        Self(took)
    }

    /// The work that a leg has to have left to be judged, microseconds. At most [`RACE_US`]: slower aborts do not stop
    /// the work in time.
    pub(crate) fn min_remaining_us(&self) -> u64 {
        let usual = percentile(&self.0, TELLING).filter(|_| self.0.len() >= TOLD_FEW);
        usual.map_or(RACE_US, |usual| (usual as u64).min(RACE_US))
    }

    /// The share of aborts with a longer delay.
    fn share_slower_than(&self, us: u64) -> f64 {
        if us > RACE_US || self.0.len() < TOLD_FEW {
            return 0.0;
        }
        let quicker = self.0.partition_point(|took| *took <= us as f64);
        1.0 - quicker as f64 / self.0.len() as f64
    }
}

/// The legs of a cancelled request: prefill, decode, or both.
fn legs<'a>(request: &'a CancelledCall<'_>, produces: Option<bool>) -> impl Iterator<Item = &'a LegTimeline> {
    let legs = request.timeline.into_iter().flat_map(|timeline| &timeline.legs);
    legs.filter(move |leg| produces.is_none_or(|produces| leg.produces == produces))
}

/// The outcome of the legs of one cancelled request.
#[derive(Default)]
struct CancelOutcome {
    at_work: bool,
    judged: bool,
    /// How long a judged leg ran after the cancel.
    without_abort: Option<u64>,
    continued_after_abort: bool,
}

fn cancel_outcome(request: &CancelledCall<'_>, produces: Option<bool>, enough_us: u64) -> CancelOutcome {
    let mut outcome = CancelOutcome::default();
    for leg in legs(request, produces) {
        let Some(end) = leg_outcome(leg, request.cancelled_at) else { continue };
        outcome.at_work = true;
        match end {
            LegOutcome::Aborted(at) => {
                outcome.judged = true;
                // The leg should have stopped after the current step.
                let completed = leg.ended.as_ref().filter(|ended| ended.outcome != "abort");
                outcome.continued_after_abort |=
                    completed.is_some_and(|ended| ended.at > request.cancelled_at + at + RACE_US);
            }
            LegOutcome::Completed(left) if left > enough_us => {
                outcome.judged = true;
                outcome.without_abort = outcome.without_abort.max(Some(left));
            }
            LegOutcome::Completed(_) => {}
        }
    }
    outcome
}

/// Counts the requests that completed without an abort.
pub(crate) fn count_unaborted(
    cancelled: &[&CancelledCall<'_>],
    abort_delays: &AbortDelays,
) -> UnabortedCount {
    let mut ran_on = UnabortedCount::default();
    for request in cancelled {
        let outcome = cancel_outcome(request, None, abort_delays.min_remaining_us());
        ran_on.judged += u64::from(outcome.judged);
        ran_on.completed_without_abort += u64::from(outcome.without_abort.is_some());
    }
    ran_on
}

/// The same per leg, with the tags of these requests.
pub(crate) fn rows<'a>(
    cancelled: &'a [CancelledCall<'_>],
    abort_delays: &AbortDelays,
) -> Vec<(WorkRow, Vec<&'a str>)> {
    [(true, "prefill"), (false, "decode")]
        .into_iter()
        .map(|(produces, leg)| {
            let enough_us = abort_delays.min_remaining_us();
            let mut row = WorkRow { leg, abort_delivery_ms: enough_us as f64 / 1e3, ..WorkRow::default() };
            let (mut tags, mut chances) = (Vec::new(), 0.0);
            for request in cancelled {
                let outcome = cancel_outcome(request, Some(produces), enough_us);
                row.at_work += u64::from(outcome.at_work);
                row.judged += u64::from(outcome.judged);
                row.completed_without_abort += u64::from(outcome.without_abort.is_some());
                row.continued_after_abort +=
                    u64::from(outcome.continued_after_abort && outcome.without_abort.is_none());
                chances += outcome.without_abort.map_or(0.0, |left| abort_delays.share_slower_than(left));
                if outcome.without_abort.is_some() || outcome.continued_after_abort {
                    tags.push(request.call.tag.as_str());
                }
            }
            row.by_chance = chances / row.completed_without_abort.max(1) as f64;
            (row, tags)
        })
        .collect()
}
