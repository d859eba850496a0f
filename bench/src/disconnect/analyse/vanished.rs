//! Clients whose host has vanished: whether the deployment noticed in time.
//!
//! | the request of such a client | |
//! |---|---|
//! | ended by an abort or a release | noticed |
//! | completed within the limit | completed: it does not show whether the deployment would have noticed |
//! | held blocks beyond the limit | stranded, and a finding |
//!
//! A deployment cannot notice at once, so vanished clients are in no number of requests that are cancelled by FIN or
//! RST. The limit is the sum of three times: the configured time (`--vanish-noticed-ms`), the interval between two
//! probes (an eighth, at least a second), and the time to free after any cancel (`--stranded-after-ms`).

use crate::disconnect::analyse::dist::{Dist, DurationSamples};
use crate::disconnect::analyse::run_data::{CancelledCall, RunData};
use crate::disconnect::analyse::summary::{CancelGroup, PhaseRow, VanishedSummary};
use crate::disconnect::analyse::units::{format_ms, us_to_ms};

/// The outcome of the request of a vanished client.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum VanishOutcome {
    Noticed(u64),
    Completed(u64),
    Stranded,
}

pub(crate) fn vanish_outcome(data: &RunData, request: &CancelledCall<'_>) -> Option<VanishOutcome> {
    let (timeline, cancelled_at) = (request.timeline?, request.cancelled_at);
    let freed_at = timeline.all_freed_at();
    // The request held no blocks, or had not reached an engine.
    if freed_at.is_some_and(|freed_at| freed_at <= cancelled_at) {
        return None;
    }
    let limit = data.stranded_after(request.call);
    let Some(freed_at) = freed_at.filter(|freed_at| freed_at - cancelled_at <= limit) else {
        // The engines were not watched long enough.
        let unseen = freed_at.is_none() && request.watched_until.saturating_sub(cancelled_at) <= limit;
        return (!unseen).then_some(VanishOutcome::Stranded);
    };
    let aborted_at = timeline.legs.iter().filter(|leg| leg.holds_at(cancelled_at)).filter_map(|leg| {
        let aborted = leg.ended.as_ref().filter(|ended| ended.outcome == "abort").map(|ended| ended.at);
        leg.aborts.iter().copied().chain(aborted).filter(|at| *at >= cancelled_at).min()
    });
    Some(aborted_at.max().map_or(VanishOutcome::Completed(freed_at - cancelled_at), |at| {
        VanishOutcome::Noticed(at - cancelled_at)
    }))
}

/// `None` without vanished clients.
pub(crate) fn of(
    data: &RunData,
    vanished: &[CancelledCall<'_>],
    group: CancelGroup,
    phases: Vec<PhaseRow>,
) -> Option<VanishedSummary> {
    let (mut noticed, mut by_itself) = (DurationSamples::default(), DurationSamples::default());
    for outcome in vanished.iter().filter_map(|request| vanish_outcome(data, request)) {
        match outcome {
            VanishOutcome::Noticed(us) => noticed.add_ended(us_to_ms(us)),
            VanishOutcome::Completed(us) => by_itself.add_ended(us_to_ms(us)),
            VanishOutcome::Stranded => {}
        }
    }
    let (noticed_ms, by_itself_ms) = (noticed.dist(), by_itself.dist());
    let noticed_within_ms = us_to_ms(data.noticed_us());
    (!vanished.is_empty()).then_some(VanishedSummary {
        noticed_within_ms,
        noticed_ms,
        by_itself_ms,
        group,
        phases,
    })
}

impl VanishedSummary {
    /// The text for reports.
    pub(crate) fn describe(&self) -> String {
        let Self { noticed_within_ms, noticed_ms, by_itself_ms, group, .. } = self;
        let within = format_ms(*noticed_within_ms);
        let mut text = format!(
            "Vanished (in no other row): {} clients. The deployment has {within} to notice.",
            group.cancelled
        );
        if group.exact {
            let times = |dist: &Dist| match dist.n {
                0 => String::new(),
                _ => format!(" (median {}, longest {})", format_ms(dist.p50), format_ms(dist.max)),
            };
            text += &format!(
                " It aborted {} requests{}. {} completed on their own{}. {} held blocks for longer.",
                noticed_ms.n,
                times(noticed_ms),
                by_itself_ms.n,
                times(by_itself_ms),
                group.stranded
            );
        }
        text
    }
}
