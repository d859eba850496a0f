//! Numbers of a group of calls: what cancelled requests cost the engines, and what uncancelled requests got.

use crate::disconnect::analyse::call_times;
use crate::disconnect::analyse::dist::{Dist, DurationSamples};
use crate::disconnect::analyse::run_data::{CancelledCall, RunData, Segment};
use crate::disconnect::analyse::summary::{CancelGroup, ServiceLevels};
use crate::disconnect::analyse::units::us_to_ms;
use crate::disconnect::record::raw::{CallRecord, EngineState};
use crate::disconnect::record::timeline::{AbortDelivery, LegTimeline};

/// The effect of these cancelled requests on the engines.
pub(super) fn cancel_group(cancelled: &[&CancelledCall<'_>], data: &RunData) -> CancelGroup {
    let exact = data.exact();
    let mut group = CancelGroup { exact, cancelled: cancelled.len() as u64, ..CancelGroup::default() };
    let (mut aborts, mut freed, mut freed_at_p) =
        (DurationSamples::default(), DurationSamples::default(), DurationSamples::default());
    for CancelledCall { call, timeline, cancelled_at, watched_until, .. } in cancelled {
        let Some(timeline) = timeline else { continue };
        // The time from the cancel to the last sample.
        let watched = us_to_ms(watched_until.saturating_sub(*cancelled_at));
        match timeline.abort_delivery(*cancelled_at) {
            AbortDelivery::NotNeeded => {}
            AbortDelivery::Received(at) => aborts.add_ended(us_to_ms(at.saturating_sub(*cancelled_at))),
            AbortDelivery::NotReceived => {
                group.abort_not_received += 1;
                aborts.add_unended(watched);
            }
        }
        match timeline.all_freed_at() {
            None => {
                group.never_freed += 1;
                // Blocks of a vanished client may be held for longer than the engines were watched.
                let soon = call.vanishes() && watched <= us_to_ms(data.stranded_after(call));
                group.stranded += u64::from(!soon);
                freed.add_unended(watched);
            }
            // The request held no blocks at its cancel.
            Some(freed_at) if freed_at <= *cancelled_at => {}
            Some(freed_at) => {
                freed.add_ended(us_to_ms(freed_at - cancelled_at));
                group.stranded += u64::from(freed_at - cancelled_at > data.stranded_after(call));
            }
        }
        let producing =
            timeline.legs.iter().filter(|leg| leg.produces && (leg.held() > 0 || leg.is_at_work()));
        let at_p: Vec<_> = producing.map(LegTimeline::freed_at).collect();
        if at_p.contains(&None) {
            freed_at_p.add_unended(watched);
        } else if let Some(at) = at_p.into_iter().flatten().max().filter(|at| at > cancelled_at) {
            freed_at_p.add_ended(us_to_ms(at - cancelled_at));
        }
        group.block_seconds += timeline.block_seconds_after(*cancelled_at, *watched_until);
        let (prompt, answer) = timeline.work_after(*cancelled_at, u64::from(call.generated));
        group.wasted_prompt_tokens += prompt;
        group.wasted_response_tokens += answer;
        group.expired += u64::from(timeline.expired());
    }
    (group.abort_ms, group.time_to_free_ms) = (aborts.dist(), freed.dist());
    group.time_to_free_at_prefill_ms = freed_at_p.dist();
    group.block_seconds_per_1000 = group.block_seconds * 1_000.0 / group.cancelled.max(1) as f64;
    group
}

/// The client stays to the end. A retry after a cancel does not count.
pub(super) fn is_uncancelled(call: &CallRecord) -> bool {
    call.leaves.is_none() && call.retries.is_none()
}

/// Service levels of the uncancelled requests of these segments; `None` without segments.
pub(super) fn service(data: &RunData, segments: &[&Segment]) -> Option<ServiceLevels> {
    let of = |segment: &&Segment| {
        data.calls
            .iter()
            .filter(|call| call.segment == segment.name)
            .filter(|call| is_uncancelled(call))
            .collect()
    };
    let parts: Vec<Vec<&CallRecord>> = segments.iter().map(of).collect();
    (!parts.is_empty()).then(|| service_of(&parts))
}

/// Service levels of these calls, grouped by segment.
pub(super) fn service_of(parts: &[Vec<&CallRecord>]) -> ServiceLevels {
    let (mut ttft, mut itl, mut tpot, mut e2e) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut service = ServiceLevels::default();
    let (mut tokens, mut lasted) = (0, 0);
    for calls in parts {
        let (mut first, mut last) = (u64::MAX, 0_u64);
        for call in calls {
            service.requests += 1;
            if call.outcome != "done" {
                service.errors += 1;
                continue;
            }
            (first, last) = (first.min(call.due_us), last.max(call.ended_us));
            tokens += u64::from(call.generated);
            e2e.push(us_to_ms(call.ended_us.saturating_sub(call.due_us)));
            ttft.extend(call_times::ttft(call));
            itl.extend(call_times::gaps(call));
            tpot.extend(call_times::tpot(call));
        }
        lasted += last.saturating_sub(first);
    }
    service.tokens_per_second = tokens as f64 * 1e6 / lasted.max(1) as f64;
    service.itl_within_one_read = call_times::within_one_read(&itl);
    (service.ttft_ms, service.itl_ms) = (Dist::of(&ttft), Dist::of(&itl));
    (service.tpot_ms, service.e2e_ms) = (Dist::of(&tpot), Dist::of(&e2e));
    service
}

/// The first moment from `at` to `end` after which no engine holds blocks.
pub(super) fn all_free_after(data: &RunData, at: u64, end: u64) -> Option<u64> {
    let mut free_at = at;
    for engine in &data.engines {
        let ours =
            |state: &&EngineState| state.engine == engine.engine && state.at_us >= at && state.at_us <= end;
        let samples: Vec<_> = data.engine_states.iter().filter(ours).collect();
        let quiet = samples.iter().rposition(|state| state.held > 0).map_or(0, |last| last + 1);
        free_at = free_at.max(samples.get(quiet)?.at_us);
    }
    Some(free_at)
}

pub(super) fn expired_during(data: &RunData, engine: usize, segment: &Segment) -> u64 {
    let ours = data.engine_states.iter().filter(|state| state.engine == engine);
    let within = ours.filter(|state| state.at_us >= segment.began && state.at_us <= segment.ended);
    // The counter of a restarted engine begins at zero.
    let pairs: Vec<u64> = within.map(|state| state.expired).collect();
    pairs.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).sum()
}

/// Tags of responses that differ from those without load. The part that a cancelled request received must be the
/// beginning of the expected response.
pub(crate) fn wrong_answers(data: &RunData) -> impl Iterator<Item = &str> {
    data.replays.iter().filter_map(|(tag, text, expected)| {
        let (text, expected) = (text.as_ref()?, expected.as_ref()?);
        let right = if is_whole(data, tag) { text == expected } else { expected.starts_with(text.as_str()) };
        (!right).then_some(tag.as_str())
    })
}

/// How many repetitions beside others differ from those without load, and how many there are. Of a cancelled request's
/// response only the part counts that it received in the run.
pub(crate) fn wrong_in_parallel(data: &RunData) -> (u64, u64) {
    let differ = data.parallel_replays.iter().filter_map(|(tag, repeated)| {
        let (_, text, expected) = data.replays.iter().find(|(of, ..)| of == tag)?;
        let (text, expected) = (text.as_ref()?, expected.as_ref()?);
        let compared = if is_whole(data, tag) { usize::MAX } else { text.len() };
        Some(!expected.bytes().take(compared).eq(repeated.bytes().take(compared)))
    });
    differ.fold((0, 0), |(wrong, all), differs| (wrong + u64::from(differs), all + 1))
}

fn is_whole(data: &RunData, tag: &str) -> bool {
    data.calls.iter().any(|call| call.tag == tag && call.outcome == "done")
}
