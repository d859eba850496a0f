//! The raw events of a run, sorted: its segments, calls, engines and faults.

use std::collections::{BTreeMap, HashSet};

use serde::Serialize;

use crate::disconnect::plan::phase::{CancelKind, Phase};
use crate::disconnect::plan::vanish::{NOTICED_MS, add_probe_interval};
use crate::disconnect::record::in_flight::FaultContext;
use crate::disconnect::record::rate::CalibratedRate;
use crate::disconnect::record::raw::{CallRecord, EngineRecord, EngineState, Record, RunRecord, SegmentKind};
use crate::disconnect::record::timeline::{LegTimeline, Timeline};

/// The raw events of a run, by kind.
#[derive(Default)]
pub(crate) struct RunData {
    pub(crate) run: RunRecord,
    pub(crate) engines: Vec<EngineRecord>,
    pub(crate) segments: Vec<Segment>,
    pub(crate) calls: Vec<CallRecord>,
    /// By tag.
    pub(crate) timelines: BTreeMap<String, Timeline>,
    /// Sorted by time.
    pub(crate) engine_states: Vec<EngineState>,
    pub(crate) faults: Vec<FaultEvent>,
    /// Tag, response in the run, and expected response.
    pub(crate) replays: Vec<(String, Option<String>, Option<String>)>,
    /// Tag, and the response of a repetition beside others.
    pub(crate) parallel_replays: Vec<(String, String)>,
    /// Tags of prompts with two different responses without load. `unanswered`: prompts without a response.
    pub(crate) nondeterministic: Vec<String>,
    pub(crate) unanswered: u64,
    pub(crate) lost: u64,
    pub(crate) rate: Option<CalibratedRate>,
    /// Kinds of cancels that were not possible, and the reasons.
    pub(crate) not_played: Vec<UnavailableKind>,
    pub(crate) compared_with: Option<serde_json::Value>,
    /// When the run was stopped.
    pub(crate) interrupted: Option<u64>,
    /// Why the run failed.
    pub(crate) failed: Option<String>,
    pub(crate) restarts: Vec<Restart>,
}

/// An engine runs in another process than before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Restart {
    pub(crate) engine: usize,
    /// When this was noticed.
    pub(crate) at: u64,
    /// The last answer of the process before, or `at` in older files. Its events are not later.
    pub(crate) seen: u64,
}

/// A segment of the run.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) name: String,
    pub(crate) what: SegmentKind,
    pub(crate) began: u64,
    pub(crate) ended: u64,
}

/// A fault was injected, or its recovery has ended.
#[derive(Clone, Debug)]
pub(crate) struct FaultEvent {
    pub(crate) segment: String,
    pub(crate) fault: String,
    pub(crate) at: u64,
    pub(crate) recovered: bool,
    pub(crate) context: Option<FaultContext>,
}

/// A configured kind of cancel that was not possible on this machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct UnavailableKind {
    pub(crate) kind: CancelKind,
    pub(crate) why: String,
}

/// A request that was cancelled before it ended.
pub(crate) struct CancelledCall<'a> {
    pub(crate) call: &'a CallRecord,
    /// The events of the request; `None` without event logs.
    pub(crate) timeline: Option<&'a Timeline>,
    pub(crate) cancelled_at: u64,
    pub(crate) phase: Option<Phase>,
    /// The time of the last engine sample.
    pub(crate) watched_until: u64,
}

impl RunData {
    /// Sorts raw events by kind.
    pub(crate) fn of(records: &[Record]) -> Self {
        let mut data = Self::default();
        // A second event with the same number is the same event.
        let mut seen = HashSet::new();
        for record in records {
            match record {
                Record::Run(run) => data.run = run.clone(),
                Record::Engine(engine) => {
                    // A later record of an engine replaces an earlier one.
                    data.engines.retain(|known| known.engine != engine.engine);
                    data.engines.push(engine.clone());
                }
                Record::SegmentBegan { segment, at_us, what } => {
                    let (name, what) = (segment.clone(), *what);
                    data.segments.push(Segment { name, what, began: *at_us, ended: u64::MAX });
                }
                Record::SegmentEnded { segment, at_us } => {
                    if let Some(known) = data.segments.iter_mut().rev().find(|known| known.name == *segment) {
                        known.ended = *at_us;
                    }
                }
                Record::Load(rate) => data.rate = Some(*rate),
                Record::Call(call) => data.calls.push(call.clone()),
                Record::Event(event) if !seen.insert((event.engine, event.seq)) => {}
                Record::Event(event) => data.timelines.entry(event.tag.clone()).or_default().apply(event),
                Record::EngineState(state) => data.engine_states.push(state.clone()),
                Record::Interrupted { at_us } => data.interrupted = Some(*at_us),
                Record::Failed { why, .. } => data.failed = Some(why.clone()),
                Record::Restarted { engine, at_us, seen_us } => {
                    // A restarted engine begins its event numbers again.
                    seen.retain(|(of, _)| of != engine);
                    let (engine, at) = (*engine, *at_us);
                    data.restarts.push(Restart { engine, at, seen: seen_us.unwrap_or(at) });
                }
                Record::NotPlayed { kind, why } => {
                    data.not_played.push(UnavailableKind { kind: *kind, why: why.clone() });
                }
                Record::ComparedWith { compared } => data.compared_with = Some(compared.clone()),
                Record::Lost { events, .. } => data.lost += events,
                Record::Fault { segment, fault, at_us, recovered, struck } => {
                    let (segment, fault, context) = (segment.clone(), fault.clone(), struck.clone());
                    data.faults.push(FaultEvent {
                        segment,
                        fault,
                        at: *at_us,
                        recovered: *recovered,
                        context,
                    });
                }
                Record::Replay { tag, text, said, unanswered, .. } => {
                    data.unanswered += u64::from(*unanswered);
                    if text.is_some() && said.is_none() && !unanswered {
                        data.nondeterministic.push(tag.clone());
                    }
                    data.replays.push((tag.clone(), text.clone(), said.clone()));
                }
                Record::ParallelReplay { tag, text } => {
                    data.parallel_replays.push((tag.clone(), text.clone()));
                }
            }
        }
        if let Some(at) = data.interrupted {
            // Calls that ended after the interruption do not count.
            data.calls.retain(|call| call.ended_us < at);
        }
        data.engines.sort_by_key(|engine| engine.engine);
        data.engine_states.sort_by_key(|state| state.at_us);
        data
    }

    /// Whether every engine has an event log.
    pub(crate) fn exact(&self) -> bool {
        !self.engines.is_empty() && self.engines.iter().all(|engine| engine.events)
    }

    pub(crate) fn segment(&self, name: &str) -> Option<&Segment> {
        self.segments.iter().find(|segment| segment.name == name)
    }

    /// Segments of one kind, sorted by time.
    pub(super) fn segments_of(&self, what: SegmentKind) -> Vec<&Segment> {
        self.segments.iter().filter(|segment| segment.what == what).collect()
    }

    /// The time of the last engine sample.
    pub(crate) fn watched_until(&self) -> u64 {
        self.engine_states.last().map_or(0, |state| state.at_us)
    }

    /// Whether cancels of this segment count: not in calibration, refused requests and faults.
    pub(super) fn counts(&self, call: &CallRecord) -> bool {
        let what = self.segment(&call.segment).map(|segment| segment.what);
        what.is_some_and(|what| {
            !matches!(what, SegmentKind::Calibration | SegmentKind::Fault | SegmentKind::Refused)
        })
    }

    /// Whether a planned cancel came too late: the response was complete, or the request had ended on its engines.
    pub(super) fn is_over_too_soon(&self, call: &CallRecord) -> bool {
        let over =
            |at| self.timelines.get(&call.tag).is_some_and(|timeline| phase_of(call, timeline, at).is_none());
        self.counts(call)
            && call.leaves.is_some()
            && match call.outcome.as_str() {
                "done" => call.left_us.is_none(),
                _ => cancelled_at(call).is_some_and(over),
            }
    }

    /// Whether the deployment aborted the request of a stalled client before the reset.
    pub(super) fn is_dropped_by_server(&self, call: &CallRecord) -> bool {
        let (Some(leaves), Some(stalled)) = (call.leaves, call.left_us) else { return false };
        let aborted = |timeline: &Timeline| {
            timeline.legs.iter().flat_map(|leg| &leg.aborts).any(|at| (stalled..call.ended_us).contains(at))
        };
        leaves.kind == CancelKind::Stall
            && self.is_over_too_soon(call)
            && self.timelines.get(&call.tag).is_some_and(aborted)
    }

    /// Whether a request was cancelled before it ended. Includes half-closed requests that were completed.
    pub(super) fn is_cancelled_in_time(&self, call: &CallRecord) -> bool {
        let left =
            cancelled_at(call).or(call.left_us.filter(|_| call.leaves.is_some() && call.outcome == "done"));
        left.is_some_and(|left| !self.exact() || self.phase_at(call, left).is_some())
    }

    /// Requests that were cancelled before they ended, in segments that count.
    pub(crate) fn cancelled_calls(&self) -> Vec<CancelledCall<'_>> {
        self.calls
            .iter()
            .filter(|call| self.counts(call))
            .filter_map(|call| self.cancelled_call(call))
            .collect()
    }

    /// The cancelled request of this call, if it was cancelled before it ended.
    pub(crate) fn cancelled_call<'a>(&'a self, call: &'a CallRecord) -> Option<CancelledCall<'a>> {
        let cancelled_at = cancelled_at(call)?;
        let timeline = self.timelines.get(&call.tag);
        let phase = match timeline {
            // Without event logs: the intended phase.
            None if !self.exact() => call.leaves.and_then(|leaves| leaves.phase),
            // `None` if the request had ended before the cancel.
            _ => Some(self.phase_at(call, cancelled_at)?),
        };
        Some(CancelledCall { call, timeline, cancelled_at, phase, watched_until: self.watched_until() })
    }

    /// The phase of a call at this moment, from engine events; `None` if it had ended.
    pub(crate) fn phase_at(&self, call: &CallRecord, at: u64) -> Option<Phase> {
        // Without events the request is on its way, or was never forwarded.
        self.timelines.get(&call.tag).map_or(Some(Phase::Queued), |timeline| phase_of(call, timeline, at))
    }

    /// The time in which a deployment has to detect a vanished host, microseconds.
    pub(super) fn noticed_us(&self) -> u64 {
        let asked = self.run.options["vanish_noticed_ms"].as_u64().unwrap_or(NOTICED_MS);
        add_probe_interval(asked.saturating_mul(1_000))
    }

    /// The time after a cancel from which blocks of the call are stranded, microseconds.
    pub(crate) fn stranded_after(&self, call: &CallRecord) -> u64 {
        let noticed = if call.vanishes() { self.noticed_us() } else { 0 };
        self.run.stranded_after_us.saturating_add(noticed)
    }

    /// Until when a deployment may assume that the client of a call is connected. For a vanished client: until the
    /// request has ended or should have ended.
    pub(crate) fn present_until(&self, call: &CallRecord) -> u64 {
        let Some(request) = self.cancelled_call(call).filter(|request| request.call.vanishes()) else {
            return call.ended_us;
        };
        let bound = request.cancelled_at.saturating_add(self.stranded_after(call));
        let over = request
            .timeline
            .and_then(Timeline::all_freed_at)
            .map(|freed_at| freed_at.max(request.cancelled_at));
        over.map_or(bound, |over| over.min(bound))
    }

    /// Blocks that an engine holds at this moment for vanished clients whose limit has not passed. Without event logs:
    /// all its held blocks.
    pub(crate) fn held_for_vanished(&self, engine: usize, at: u64, held: u64) -> u64 {
        let vanished = || self.calls.iter().filter(|call| call.vanishes() && self.present_until(call) > at);
        if !self.exact() {
            return if vanished().next().is_some() { held } else { 0 };
        }
        let legs =
            vanished().filter_map(|call| self.timelines.get(&call.tag)).flat_map(|timeline| &timeline.legs);
        let holds = |leg: &&LegTimeline| leg.engine == engine && leg.holds_at(at);
        legs.filter(holds).map(LegTimeline::held).sum::<u64>().min(held)
    }
}

/// The time of the cancel of a call; `None` if the client stayed or received the complete response.
pub(crate) fn cancelled_at(call: &CallRecord) -> Option<u64> {
    let leaves = call.leaves?;
    if call.outcome != "left" {
        return None;
    }
    match leaves.kind {
        // Until its reset a stalled client may continue to read.
        CancelKind::Stall => Some(call.ended_us),
        _ => call.left_us,
    }
}

/// The phase of a request at its cancel or at another moment; `None` if it had ended.
pub(crate) fn phase_of(call: &CallRecord, timeline: &Timeline, at: u64) -> Option<Phase> {
    // A request that an engine aborted because of the cancel had not ended before it, even if the clocks differ.
    let at = if cancelled_at(call) == Some(at) { timeline.cancel_before_abort(at) } else { at };
    let phase = timeline.phase_at(&call.client_times(), at)?;
    // A stalled client has received tokens without reading them.
    let stalls = call.leaves.is_some_and(|leaves| leaves.kind == CancelKind::Stall);
    let generates = |leg: &LegTimeline| !leg.produces && leg.first_token.is_some_and(|token| token <= at);
    if stalls && phase == Phase::FirstToken && timeline.legs.iter().any(generates) {
        return Some(Phase::Stream);
    }
    Some(phase)
}
