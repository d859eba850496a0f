//! Computes a summary from raw events. A pure function: the same events give the same numbers.

pub(crate) mod abort_delivery;
pub(crate) mod call_times;
pub(crate) mod dist;
pub(crate) mod faults;
pub(crate) mod findings;
pub(crate) mod groups;
pub(crate) mod load;
pub(crate) mod run_data;
pub(crate) mod sampled;
pub(crate) mod series;
pub(crate) mod summary;
pub(crate) mod uncancelled;
pub(crate) mod units;
pub(crate) mod vanished;

use std::collections::HashSet;

use self::abort_delivery::AbortDelays;
use self::dist::Dist;
use self::groups::{cancel_group, service, service_of, wrong_answers, wrong_in_parallel};
use self::load::RunLoad;
use self::run_data::{CancelledCall, RunData};
use self::summary::{
    CancelGroup, EngineRow, KindRow, PhaseRow, ServiceLevels, StormCancels, Summary, TextComparison,
};
use super::plan::phase::{CancelKind, Phase};
use super::record::raw::{CallRecord, EngineRecord, Record, SegmentKind};
use super::record::retries::RetryCounts;

/// The cancelled requests of a run, and the effect of groups of them on the engines.
struct RunCancels<'a> {
    data: &'a RunData,
    cancelled: Vec<CancelledCall<'a>>,
    /// Requests of vanished clients. A deployment cannot know at once that a host has vanished, so they are counted
    /// separately.
    vanished: Vec<CancelledCall<'a>>,
    abort_delays: AbortDelays,
}

impl<'a> RunCancels<'a> {
    fn of(data: &'a RunData) -> Self {
        let (vanished, cancelled): (Vec<_>, Vec<_>) =
            data.cancelled_calls().into_iter().partition(|request| request.call.vanishes());
        let abort_delays = AbortDelays::of(&cancelled);
        Self { data, cancelled, vanished, abort_delays }
    }

    fn group(&self, of: impl Fn(&CancelledCall<'_>) -> bool) -> CancelGroup {
        let all = self.cancelled.iter().chain(&self.vanished);
        let chosen: Vec<_> = all.filter(|request| of(request)).collect();
        let ran_on = Some(abort_delivery::count_unaborted(&chosen, &self.abort_delays));
        CancelGroup { ran_on, ..cancel_group(&chosen, self.data) }
    }

    /// A row for each phase in which these calls were cancelled or intended to be.
    fn phases(&self, of: impl Fn(&CallRecord) -> bool) -> Vec<PhaseRow> {
        let row = |phase: Phase| {
            let aims = |call: &CallRecord| call.leaves.and_then(|leaves| leaves.phase) == Some(phase);
            let aimed = self.data.calls.iter().filter(|call| of(call) && aims(call)).count() as u64;
            let group = self.group(|request| of(request.call) && request.phase == Some(phase));
            (aimed + group.cancelled > 0).then_some(PhaseRow { phase, aimed, group })
        };
        Phase::ALL.into_iter().filter_map(row).collect()
    }

    fn kinds(&self) -> Vec<KindRow> {
        CancelKind::ALL.into_iter().filter_map(|kind| self.kind(kind)).collect()
    }

    fn kind(&self, kind: CancelKind) -> Option<KindRow> {
        let data = self.data;
        let planned = |call: &CallRecord| call.leaves.is_some_and(|leaves| leaves.kind == kind);
        let count = |of: &dyn Fn(&CallRecord) -> bool| {
            data.calls.iter().filter(|call| planned(call) && of(call)).count() as u64
        };
        // Fault segments do not count here, neither for cancelled nor for completed requests.
        let served = count(&|call| call.outcome == "done" && call.left_us.is_some() && data.counts(call));
        let too_late = count(&|call| data.is_over_too_soon(call));
        let dropped_by_server = count(&|call| data.is_dropped_by_server(call));
        let of_kind = data.calls.iter().filter(|call| planned(call));
        let tags: HashSet<&str> = of_kind.map(|call| call.tag.as_str()).collect();
        let is_retry = |call: &&CallRecord| {
            call.retries.as_deref().is_some_and(|first| tags.contains(first)) && data.counts(call)
        };
        let retries = RetryCounts::of(data.calls.iter().filter(is_retry));
        let group = self.group(|request| planned(request.call));
        let row = KindRow { kind, served, too_late, dropped_by_server, retries, group };
        (row.group.cancelled + served + too_late > 0).then_some(row)
    }
}

/// Requests that were cancelled in one phase and in one way.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct CancelCell {
    pub(crate) phase: Phase,
    pub(crate) kind: CancelKind,
    #[serde(flatten)]
    pub(crate) group: CancelGroup,
}

/// The cancelled requests of a run, by phase and way. Vanished clients are a way of their own.
pub(crate) fn cells(records: &[Record]) -> Vec<CancelCell> {
    let data = RunData::of(records);
    let cancels = RunCancels::of(&data);
    let cell = |phase: Phase, kind: CancelKind| {
        let group = cancels.group(|request| {
            request.phase == Some(phase) && request.call.leaves.is_some_and(|leaves| leaves.kind == kind)
        });
        (group.cancelled > 0).then_some(CancelCell { phase, kind, group })
    };
    let all = Phase::ALL.into_iter().flat_map(|phase| CancelKind::ALL.map(|kind| (phase, kind)));
    all.filter_map(|(phase, kind)| cell(phase, kind)).collect()
}

/// The summary of a run.
pub(crate) fn summary(records: &[Record]) -> Summary {
    let data = RunData::of(records);
    let cancels = RunCancels::of(&data);
    let RunCancels { cancelled, vanished, abort_delays, .. } = &cancels;
    let vanished_group = cancels.group(|request| request.call.vanishes());
    let mut summary = Summary {
        load: RunLoad::of(&data),
        exact: data.exact(),
        requests: data.calls.len() as u64,
        cancelled: cancelled.len() as u64,
        all: cancels.group(|request| !request.call.vanishes()),
        phases: cancels.phases(|call| !call.vanishes()),
        kinds: cancels.kinds(),
        vanished: vanished::of(&data, vanished, vanished_group, cancels.phases(CallRecord::vanishes)),
        not_played: data.not_played.clone(),
        refused: refused(&data),
        calm: service(&data, &data.segments_of(SegmentKind::Calm)),
        storm: service(&data, &data.segments_of(SegmentKind::Storm)),
        storm_cancels: storm_cancels(&data),
        calm_paired: paired_service(&data),
        ttft_p99_over_calm_paired: uncancelled::ttft_p99_over_calm_paired(&data),
        uncancelled: uncancelled::compare(&data),
        work: abort_delivery::rows(cancelled, abort_delays).into_iter().map(|(row, _)| row).collect(),
        faults: faults::rows(&data),
        excused_leases: findings::excused_leases(&data),
        engines: data.engines.iter().map(|engine| engine_row(&data, engine)).collect(),
        texts: texts(&data),
        sampled: sampled::of(&data, cancelled.len() as u64).filter(|_| !data.exact()),
        compared_with: data.compared_with.clone(),
        events_lost: data.lost,
        interrupted: data.interrupted.is_some(),
        failed: data.failed.clone(),
        series: series::of(&data, cancelled, vanished),
        findings: Vec::new(),
        run: data.run.clone(),
    };
    summary.findings = findings::of(&data, cancelled, vanished, &summary);
    summary
}

/// Several samples of an engine lie in this time, microseconds.
const FRESH_US: u64 = 2_000_000;

/// Requests that the decode engine refused. The time to free counts from the refusal.
fn refused(data: &RunData) -> Option<CancelGroup> {
    let segment = data.segments.iter().find(|segment| segment.what == SegmentKind::Refused)?;
    let leased = |call: &CallRecord| {
        data.timelines
            .get(&call.tag)
            .is_some_and(|timeline| timeline.legs.iter().any(|leg| leg.leased.is_some()))
    };
    // A gateway that refuses a request itself has no blocks to free.
    let refused = data
        .calls
        .iter()
        .filter(|call| call.segment == segment.name && call.outcome == "refused" && leased(call));
    let cancelled: Vec<CancelledCall<'_>> = refused
        .map(|call| CancelledCall {
            call,
            timeline: data.timelines.get(&call.tag),
            cancelled_at: call.ended_us,
            phase: None,
            watched_until: data.watched_until(),
        })
        .collect();
    let mut group = cancel_group(&cancelled.iter().collect::<Vec<_>>(), data);
    // The request ends with the refusal: an abort is not needed.
    (group.abort_ms, group.abort_not_received) = (Dist::default(), 0);
    Some(group)
}

/// Selected and timely cancels in the storms of all rounds.
fn storm_cancels(data: &RunData) -> Option<StormCancels> {
    let storms: Vec<_> =
        data.segments_of(SegmentKind::Storm).into_iter().map(|segment| segment.name.as_str()).collect();
    let arrivals = |call: &&CallRecord| storms.contains(&call.segment.as_str()) && call.retries.is_none();
    let mut cancels = StormCancels::default();
    for call in data.calls.iter().filter(arrivals) {
        cancels.requests += 1;
        cancels.drawn += u64::from(call.leaves.is_some());
        cancels.in_time += u64::from(data.is_cancelled_in_time(call));
    }
    cancels.share_in_time = cancels.in_time as f64 / cancels.requests.max(1) as f64;
    (!storms.is_empty()).then_some(cancels)
}

/// Service levels of the calm requests whose paired requests in the storm are not cancelled.
fn paired_service(data: &RunData) -> Option<ServiceLevels> {
    let (rounds, _) = uncancelled::rounds(data);
    let parts: Vec<Vec<&CallRecord>> =
        rounds.iter().map(|round| round.pairs.iter().map(|(calm, _)| *calm).collect()).collect();
    (!parts.is_empty()).then(|| service_of(&parts))
}

fn engine_row(data: &RunData, engine: &EngineRecord) -> EngineRow {
    let state: Vec<_> = data.engine_states.iter().filter(|state| state.engine == engine.engine).collect();
    // Outside segments the benchmark makes requests that are not calls.
    let in_segment = |at: u64| data.segments.iter().any(|segment| segment.began <= at && at < segment.ended);
    let there: Vec<_> = data.calls.iter().map(|call| (call.began_us, data.present_until(call))).collect();
    let idle = |at: u64| in_segment(at) && !there.iter().any(|(began, until)| *began <= at && at < *until);
    let idle_block_us: u64 = state
        .windows(2)
        .filter(|pair| idle(pair[0].at_us) && idle(pair[1].at_us))
        .map(|pair| pair[0].held.min(pair[1].held) * (pair[1].at_us - pair[0].at_us))
        .sum();
    let counts: Vec<u64> = state.iter().map(|state| state.expired).collect();
    EngineRow {
        name: engine.name.clone(),
        role: engine.role.clone(),
        exact: engine.events,
        blocks: engine.blocks,
        held_at_most: state.iter().map(|state| state.held).max().unwrap_or(0),
        // An engine without recent samples has no state at the end.
        held_at_end: state
            .last()
            .filter(|last| last.at_us + FRESH_US > data.watched_until())
            .map(|last| last.held),
        excused_at_end: state
            .last()
            .map_or(0, |last| findings::excused_at_end(data, engine.engine, last.at_us).min(last.held)),
        ghosts_at_end: state
            .last()
            .map_or(0, |last| data.held_for_vanished(engine.engine, last.at_us, last.held)),
        expired: counts.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).sum(),
        too_many: state.iter().filter(|state| state.askew > 0).count() as u64,
        too_few: state.iter().filter(|state| state.askew < 0).count() as u64,
        idle_block_seconds: idle_block_us as f64 / 1e6,
        sampled: sampled::of_engine(data, engine.engine).filter(|_| !data.exact()),
    }
}

fn texts(data: &RunData) -> TextComparison {
    let calm = |tag: &str| {
        let call = data.calls.iter().find(|call| call.tag == tag);
        call.and_then(|call| data.segment(&call.segment))
            .is_some_and(|segment| matches!(segment.what, SegmentKind::Calm | SegmentKind::Calibration))
    };
    let (nondeterministic, unanswered) = (data.nondeterministic.len() as u64, data.unanswered);
    let mut texts = TextComparison { nondeterministic, unanswered, ..TextComparison::default() };
    for (tag, ..) in data.replays.iter().filter(|(_, text, expected)| text.is_some() && expected.is_some()) {
        texts.compared += 1;
        texts.compared_in_calm += u64::from(calm(tag));
    }
    for tag in wrong_answers(data) {
        texts.wrong += 1;
        texts.wrong_in_calm += u64::from(calm(tag));
    }
    (texts.wrong_in_parallel, texts.compared_in_parallel) = wrong_in_parallel(data);
    texts
}
