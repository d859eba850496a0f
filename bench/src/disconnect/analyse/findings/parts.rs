//! Findings of fault segments: stranded blocks and expired leases, except for excused ones ([`FaultSegment::excuses`]).

use crate::disconnect::analyse::faults::{FaultSegment, fault_segments};
use crate::disconnect::analyse::run_data::RunData;
use crate::disconnect::analyse::summary::{Finding, Summary};
use crate::disconnect::record::raw::{CallRecord, EngineState};
use crate::disconnect::record::timeline::{LegTimeline, RACE_US};

/// Blocks that were held too long after the recovery and the end of their request.
pub(super) fn stranded(data: &RunData, findings: &mut Vec<Finding>) {
    let limit = data.run.stranded_after_us;
    let seconds = limit as f64 / 1e6;
    // In a segment without an end it is unknown which blocks would have been freed.
    for broken in fault_segments(data).iter().filter(|broken| broken.segment.ended < u64::MAX) {
        let fault = broken.fault;
        let after =
            if broken.recovered_at.is_some() { format!("`{fault}` recovered") } else { format!("`{fault}`") };
        let behind = |call: &CallRecord, leg: &LegTimeline| {
            let freed_at = leg.freed_at().unwrap_or(data.watched_until());
            // After the end of a lease its engine has to free the blocks.
            let kept =
                leg.lease_ended.as_ref().is_some_and(|(ended, _)| freed_at.saturating_sub(*ended) > limit);
            // A request that waited for an engine to start held nothing meanwhile.
            let since = data.present_until(call).max(broken.recovered_us()).max(leg.queued.unwrap_or(0));
            (leg.held() > 0 || leg.is_at_work())
                && (kept || !broken.excuses(call, leg))
                && freed_at.saturating_sub(since) > limit
        };
        let of = broken.calls(data).filter(|(call, legs)| legs.iter().any(|leg| behind(call, leg)));
        let tags: Vec<_> = of.map(|(call, _)| call.tag.as_str()).collect();
        if !tags.is_empty() {
            let says = format!(
                "{} requests stranded their blocks for more than {seconds} s after {after} and their cancel",
                tags.len()
            );
            findings.push(Finding::new("fault_stranded", says, tags.len() as u64, &tags));
            continue;
        }
        for engine in &data.engines {
            if let Some(held) = still_held(data, broken, engine.engine) {
                let name = &engine.name;
                let says = format!(
                    "{name} still held {held} blocks {seconds} s after {after} and the end of the last request"
                );
                findings.push(Finding::new("fault_stranded", says, held, &[]));
            }
        }
    }
}

/// Blocks that an engine held too long after all requests had ended, without excused ones.
fn still_held(data: &RunData, broken: &FaultSegment<'_>, engine: usize) -> Option<u64> {
    let calls = data.calls.iter().filter(|call| call.segment == broken.segment.name);
    let last_present =
        calls.map(|call| data.present_until(call)).max().unwrap_or(0).max(broken.recovered_us());
    let held = |state: &EngineState| {
        state.held.saturating_sub(excused(data, broken, engine, state.at_us).map(LegTimeline::held).sum())
    };
    let late = data.engine_states.iter().filter(|state| {
        state.engine == engine
            && state.at_us > last_present + data.run.stranded_after_us
            && state.at_us <= broken.segment.ended
    });
    late.map(held).find(|held| *held > 0)
}

/// Legs whose blocks an engine holds at this moment and that are excused. A killed engine has no blocks in its state.
/// After the end of a lease its engine has to free the blocks.
fn excused<'a>(
    data: &'a RunData,
    broken: &'a FaultSegment<'a>,
    engine: usize,
    at: u64,
) -> impl Iterator<Item = &'a LegTimeline> {
    let legs = broken.calls(data).flat_map(|(call, legs)| legs.iter().map(move |leg| (call, leg)));
    let ours = move |leg: &LegTimeline| leg.engine == engine && !broken.killed(engine);
    let of_another = move |leg: &LegTimeline| {
        let since = leg.leased.map_or(0, |(leased_at, _)| leased_at);
        data.restarts.iter().any(|other| other.engine == engine && since <= other.seen && other.at <= at)
    };
    legs.filter(move |(call, leg)| ours(leg) && broken.excuses(call, leg))
        .map(|(_, leg)| leg)
        .filter(move |leg| leg.freed_at().is_none_or(|freed| freed >= at))
        .filter(move |leg| leg.lease_ended.as_ref().is_none_or(|(ended, _)| *ended + RACE_US > at))
        .filter(move |leg| !of_another(leg))
}

/// Blocks in the last state of an engine that belong to excused leases which had not expired yet.
pub(crate) fn excused_at_end(data: &RunData, engine: usize, at: u64) -> u64 {
    let legs = data.timelines.values().flat_map(|timeline| &timeline.legs);
    // The event of a lease that grows has no lease time. All leases of an engine have the same time.
    let lives = legs.filter(|leg| leg.engine == engine).filter_map(|leg| leg.lease_time);
    let Some(life) = lives.max() else { return 0 };
    let runs = |leg: &&LegTimeline| {
        let from = leg
            .leased
            .map_or(0, |(leased_at, _)| leased_at)
            .max(leg.ended.as_ref().map_or(0, |ended| ended.at));
        from.saturating_add(life).saturating_add(data.run.stranded_after_us) > at
    };
    let of = |broken: &FaultSegment<'_>| {
        excused(data, broken, engine, at).filter(runs).map(LegTimeline::held).sum::<u64>()
    };
    fault_segments(data).iter().map(of).sum()
}

/// Requests with expired leases: excused ones, and the others.
fn expired_leases(data: &RunData) -> (Vec<&str>, Vec<&str>) {
    let broken = fault_segments(data);
    let excused = |tag: &str| {
        let calls =
            broken.iter().flat_map(|broken| broken.calls(data).map(move |(call, legs)| (broken, call, legs)));
        calls
            .filter(|(_, call, _)| call.tag == tag)
            .any(|(broken, call, legs)| legs.iter().any(|leg| leg.produces && broken.excuses(call, leg)))
    };
    let all = data.timelines.iter().filter(|(_, timeline)| timeline.expired()).map(|(tag, _)| tag.as_str());
    all.partition(|tag| excused(tag))
}

/// The number of expired leases that are excused, by the event logs.
pub(crate) fn excused_leases(data: &RunData) -> u64 {
    expired_leases(data).0.len() as u64
}

/// Expired leases.
pub(super) fn expiries(data: &RunData, summary: &Summary, findings: &mut Vec<Finding>) {
    let counted: u64 = summary.engines.iter().map(|engine| engine.expired).sum();
    let (excused, tags) = expired_leases(data);
    // Without event logs it is unknown which engines were killed.
    let in_parts: u64 = summary.faults.iter().map(|fault| fault.expired).sum();
    let on_purpose = if summary.exact { excused.len() as u64 } else { in_parts };
    let expired = counted.saturating_sub(on_purpose).max(tags.len() as u64);
    if expired > 0 {
        // Event logs show the phase of each cancel, metrics do not.
        let hint = if summary.exact {
            ""
        } else {
            ". A reply that a stock server dropped has this effect (the reply window)"
        };
        let says = format!("{expired} leases expired: their blocks were neither read nor released{hint}");
        findings.push(Finding::new("leases_expired", says, expired, &tags));
    }
}
