//! Fault segments: the requests in flight at the fault, the outcome of uncancelled and cancelled requests, and the
//! excused blocks.
//!
//! Only two kinds of blocks are excused, because no component is left that could free them. The first are blocks of an
//! engine that was killed. The second are blocks of a lease that was open when the router was killed that had to
//! release it.

use crate::disconnect::analyse::groups::{
    all_free_after, cancel_group, expired_during, is_uncancelled, service, wrong_answers,
};
use crate::disconnect::analyse::run_data::{CancelledCall, Restart, RunData, Segment};
use crate::disconnect::analyse::summary::FaultRow;
use crate::disconnect::analyse::units::us_to_ms;
use crate::disconnect::record::in_flight::{FaultContext, InFlight};
use crate::disconnect::record::raw::{CallRecord, SegmentKind};
use crate::disconnect::record::retries::RetryCounts;
use crate::disconnect::record::timeline::{LegTimeline, RACE_US, Timeline};

/// A restart of an engine is detected at most this long after its segment.
const NOTICED_WITHIN_US: u64 = 5_000_000;

/// A segment with an injected fault.
pub(crate) struct FaultSegment<'a> {
    pub(crate) segment: &'a Segment,
    pub(crate) fault: &'a str,
    at: u64,
    pub(crate) recovered_at: Option<u64>,
    context: Option<&'a FaultContext>,
    /// Engines that were killed or did not respond again.
    engines: Vec<usize>,
    stranded_after: u64,
}

/// All fault segments, in order.
pub(crate) fn fault_segments(data: &RunData) -> Vec<FaultSegment<'_>> {
    let breaks = || data.faults.iter().filter(|fault| !fault.recovered);
    let of = |segment: &'_ Segment| {
        let broken = breaks().find(|fault| fault.segment == segment.name)?;
        let recovered = data.faults.iter().rfind(|fault| fault.segment == segment.name && fault.recovered);
        // The first fault after the last answer of the process before. A new process may be noticed after the next
        // fault. Without one, the last fault before the engine restarted.
        let ours = |Restart { at, seen, .. }: &Restart| {
            let after = breaks().find(|fault| *seen < fault.at && fault.at <= *at);
            let fault = after.or_else(|| breaks().rfind(|fault| fault.at <= *at));
            fault.is_some_and(|fault| fault.segment == segment.name)
        };
        let in_time = |restart: &Restart| restart.at <= segment.ended.saturating_add(NOTICED_WITHIN_US);
        let killed = data.restarts.iter().filter(|restart| ours(restart) && in_time(restart));
        let mut engines: Vec<usize> = killed.map(|restart| restart.engine).collect();
        let looked_at = |engine: usize| {
            data.engine_states.iter().any(|state| {
                state.engine == engine && state.at_us > broken.at && state.at_us <= segment.ended
            })
        };
        engines.extend(data.engines.iter().map(|engine| engine.engine).filter(|engine| !looked_at(*engine)));
        Some((broken, recovered.map(|fault| fault.at), engines))
    };
    let segments = data.segments.iter().filter(|segment| segment.what == SegmentKind::Fault);
    let broken = |segment| {
        let (broken, recovered, engines) = of(segment)?;
        let (fault, at, context) = (broken.fault.as_str(), broken.at, broken.context.as_ref());
        let stranded_after = data.run.stranded_after_us;
        Some(FaultSegment { segment, fault, at, recovered_at: recovered, context, engines, stranded_after })
    };
    segments.filter_map(broken).collect()
}

impl FaultSegment<'_> {
    /// Whether the blocks of this leg are excused.
    pub(crate) fn excuses(&self, call: &CallRecord, leg: &LegTimeline) -> bool {
        if self.killed(leg.engine) {
            return self.died(leg);
        }
        let Some((leased_at, _)) = leg.leased.filter(|_| self.engines.is_empty()) else { return false };
        let open_at =
            |at: u64| leased_at <= at && leg.lease_ended.as_ref().is_none_or(|(ended, _)| *ended > at);
        // A fault command takes time, and a broken connection shows when it had its effect. A cancel shows this only at
        // the moment of the fault.
        let cut = match call.outcome.as_str() {
            "broken" => call.ended_us >= self.at,
            "left" => call.ended_us >= self.at && call.ended_us <= self.at + RACE_US,
            _ => false,
        };
        // Blocks that were held for this long before the fault were stranded by a component that was still running.
        let stranded = call.ended_us.max(leased_at).saturating_add(self.stranded_after) < self.at;
        (open_at(self.at) && !stranded) || (cut && open_at(call.ended_us))
    }

    /// Whether the engine was killed or did not respond again.
    pub(crate) fn killed(&self, engine: usize) -> bool {
        self.engines.contains(&engine)
    }

    /// Whether the leg was on a killed engine before the recovery.
    fn died(&self, leg: &LegTimeline) -> bool {
        self.killed(leg.engine)
            && leg.queued.is_none_or(|queued| self.recovered_at.is_none_or(|recovered| queued <= recovered))
    }

    pub(crate) fn calls<'a>(
        &self,
        data: &'a RunData,
    ) -> impl Iterator<Item = (&'a CallRecord, &'a [LegTimeline])> {
        let calls = data.calls.iter().filter(|call| call.segment == self.segment.name);
        calls.filter_map(|call| Some((call, data.timelines.get(&call.tag)?.legs.as_slice())))
    }

    pub(crate) fn recovered_us(&self) -> u64 {
        self.recovered_at.unwrap_or(self.at)
    }

    /// The requests in flight at the fault, by all events until now. More is known now than at the fault.
    fn in_flight_at_fault<'a>(
        &self,
        data: &RunData,
        calls: &[&'a CallRecord],
    ) -> (InFlight, Vec<&'a CallRecord>) {
        let (mut flight, mut them) = (InFlight::default(), Vec::new());
        for call in calls.iter().filter(|call| call.began_us <= self.at && self.at < call.ended_us) {
            if data.exact() {
                let phase = data.phase_at(call, self.at);
                if phase.is_none() {
                    // The request had ended on its engines; its end was on the way to the client.
                    continue;
                }
                flight.add(phase);
            } else {
                flight.add(None);
            }
            them.push(*call);
        }
        (flight, them)
    }

    /// The timeline without the legs that ended with their engine: their blocks are gone.
    fn surviving_legs(&self, timeline: &Timeline) -> Timeline {
        let survives = |leg: &&LegTimeline| !(self.died(leg) && leg.freed.is_empty());
        Timeline { legs: timeline.legs.iter().filter(survives).cloned().collect() }
    }
}

/// Cancelled and broken calls of fault segments: the time of the cancel, and the remaining timeline.
pub(crate) fn cancelled_in_faults(data: &RunData) -> Vec<(u64, Timeline)> {
    let of = |broken: &FaultSegment<'_>| {
        let calls = data.calls.iter().filter(|call| call.segment == broken.segment.name);
        let left_at = |call: &CallRecord| match call.outcome.as_str() {
            "broken" => Some(call.ended_us),
            _ => Some(data.cancelled_call(call)?.cancelled_at),
        };
        let of =
            |call: &CallRecord| Some((left_at(call)?, broken.surviving_legs(data.timelines.get(&call.tag)?)));
        calls.filter_map(of).collect::<Vec<_>>()
    };
    fault_segments(data).iter().flat_map(of).collect()
}

/// The outcome of each fault segment.
pub(crate) fn rows(data: &RunData) -> Vec<FaultRow> {
    let broken = fault_segments(data);
    let segments = data.segments.iter().filter(|segment| segment.what == SegmentKind::Fault);
    segments
        .map(|segment| row(data, segment, broken.iter().find(|broken| broken.segment.name == segment.name)))
        .collect()
}

fn row(data: &RunData, segment: &Segment, broken: Option<&FaultSegment<'_>>) -> FaultRow {
    let calls: Vec<_> = data.calls.iter().filter(|call| call.segment == segment.name).collect();
    let failed = |calls: &mut dyn Iterator<Item = &&CallRecord>| {
        calls.filter(|call| is_uncancelled(call) && call.outcome != "done").count() as u64
    };
    let recovered = broken.and_then(|broken| broken.recovered_at);
    let later = |call: &&&CallRecord| recovered.is_some_and(|recovered| call.began_us > recovered);
    let met = broken.map(|broken| broken.in_flight_at_fault(data, &calls));
    let stayed_in_flight =
        met.as_ref().map_or(0, |(_, them)| them.iter().filter(|call| is_uncancelled(call)).count() as u64);
    let failed_in_flight = met.as_ref().map_or(0, |(_, them)| failed(&mut them.iter()));
    let met = met.map(|(flight, _)| flight);
    let wanted = broken.and_then(|broken| Some(broken.context?.wanted));
    let missed = wanted.zip(met.as_ref()).filter(|(wanted, met)| !wanted.is_met_by(met));
    let missed = missed.map(|(wanted, _)| wanted.missed_label());

    let left: Vec<_> = calls.iter().filter_map(|call| data.cancelled_call(call)).collect();
    let survive = |request: &CancelledCall<'_>| {
        let timeline = request.timeline?;
        Some(broken.map_or_else(|| timeline.clone(), |broken| broken.surviving_legs(timeline)))
    };
    let timelines: Vec<_> = left.iter().map(survive).collect();
    let pairs = left.iter().zip(&timelines);
    let left: Vec<_> =
        pairs.map(|(request, rest)| CancelledCall { timeline: rest.as_ref(), ..*request }).collect();
    let left = cancel_group(&left.iter().collect::<Vec<_>>(), data);

    let last_ended = calls.iter().map(|call| call.ended_us).max().unwrap_or(segment.began);
    let by_time = |call: &&&CallRecord| data.timelines.get(&call.tag).is_some_and(Timeline::expired);
    // A lease may expire long after its segment. Without event logs the requests of expired leases are unknown.
    let expired = if data.exact() {
        calls.iter().filter(by_time).count() as u64
    } else {
        data.engines.iter().map(|engine| expired_during(data, engine.engine, segment)).sum()
    };
    let in_segment = |tag: &str| calls.iter().any(|call| call.tag == tag);
    FaultRow {
        fault: broken.map_or_else(|| segment.name.clone(), |broken| broken.fault.to_owned()),
        waited_ms: broken.and_then(|broken| Some(us_to_ms(broken.context?.waited_us))),
        met,
        missed,
        stayed_in_flight,
        failed_in_flight,
        errors_after: failed(&mut calls.iter().filter(later)),
        stayed: service(data, &[segment]).unwrap_or_default(),
        retries: RetryCounts::of(calls.iter().copied()),
        cancelled: left,
        all_free_ms: all_free_after(data, last_ended, segment.ended).map(|at| us_to_ms(at - last_ended)),
        expired,
        wrong_texts: wrong_answers(data).filter(|tag| in_segment(tag)).count() as u64,
    }
}
