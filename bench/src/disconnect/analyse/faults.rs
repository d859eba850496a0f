//! Parts of a run in which something was broken on purpose: what it met, what became of who stayed and of who left, and
//! what nobody can give back.
//!
//! Two kinds of blocks nobody can give back, and only these are excused: those of an engine that was itself killed, and of a
//! lease that was open when something that is no engine was (the router that owed its release is gone).

use crate::disconnect::analyse::summary::FaultRow;
use crate::disconnect::analyse::{
    Act, Facts, Victim, expired_during, grouped, home_after, ms, service, stays, wrong,
};
use crate::disconnect::record::flight::{InFlight, Struck};
use crate::disconnect::record::raw::{ActKind, CallRecord};
use crate::disconnect::record::retries::Retries;
use crate::disconnect::record::timeline::{Leg, RACE_US, Timeline};

/// A killed engine is known to be another process so soon after the part of the run, at the latest.
const NOTICED_WITHIN_US: u64 = 5_000_000;

/// Something was broken, or mended.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) act: String,
    pub(crate) fault: String,
    pub(crate) at: u64,
    pub(crate) mended: bool,
    pub(crate) struck: Option<Struck>,
}

/// A part of the run in which something was broken.
pub(crate) struct Broken<'a> {
    pub(crate) act: &'a Act,
    pub(crate) fault: &'a str,
    at: u64,
    pub(crate) mended: Option<u64>,
    struck: Option<&'a Struck>,
    /// Engines that were killed, or did not come back.
    engines: Vec<usize>,
    stranded_after: u64,
}

/// Every one of them, in order.
pub(crate) fn broken(facts: &Facts) -> Vec<Broken<'_>> {
    let breaks = || facts.faults.iter().filter(|fault| !fault.mended);
    let of = |act: &'_ Act| {
        let broken = breaks().find(|fault| fault.act == act.name)?;
        let mended = facts.faults.iter().rfind(|fault| fault.act == act.name && fault.mended);
        // The last that was broken before it was another process.
        let ours =
            |at: u64| breaks().rfind(|fault| fault.at <= at).is_some_and(|fault| fault.act == act.name);
        let killed = facts
            .restarts
            .iter()
            .filter(|(_, at)| ours(*at) && *at <= act.ended.saturating_add(NOTICED_WITHIN_US));
        let mut engines: Vec<usize> = killed.map(|(engine, _)| *engine).collect();
        let looked_at = |engine: usize| {
            facts
                .books
                .iter()
                .any(|books| books.engine == engine && books.at_us > broken.at && books.at_us <= act.ended)
        };
        engines.extend(facts.engines.iter().map(|engine| engine.engine).filter(|engine| !looked_at(*engine)));
        Some((broken, mended.map(|fault| fault.at), engines))
    };
    let acts = facts.acts.iter().filter(|act| act.what == ActKind::Fault);
    let broken = |act| {
        let (broken, mended, engines) = of(act)?;
        let (fault, at, struck) = (broken.fault.as_str(), broken.at, broken.struck.as_ref());
        let stranded_after = facts.run.stranded_after_us;
        Some(Broken { act, fault, at, mended, struck, engines, stranded_after })
    };
    acts.filter_map(broken).collect()
}

impl Broken<'_> {
    /// Nobody is left who could give back what this leg of a call in this part of the run holds.
    pub(crate) fn excuses(&self, call: &CallRecord, leg: &Leg) -> bool {
        if self.killed(leg.engine) {
            return self.died(leg);
        }
        let Some((lent, _)) = leg.lent.filter(|_| self.engines.is_empty()) else { return false };
        let open_at = |at: u64| lent <= at && leg.lease_ended.as_ref().is_none_or(|(ended, _)| *ended > at);
        // A command that breaks takes its time; a client whose connection broke tells when it had done so. One that
        // left by itself says so only of the moment itself.
        let cut = match call.outcome.as_str() {
            "broken" => call.ended_us >= self.at,
            "left" => call.ended_us >= self.at && call.ended_us <= self.at + RACE_US,
            _ => false,
        };
        // What nobody gave back for so long before it struck was stranded by who was still there.
        let stranded = call.ended_us.max(lent).saturating_add(self.stranded_after) < self.at;
        (open_at(self.at) && !stranded) || (cut && open_at(call.ended_us))
    }

    /// This engine was killed, or did not come back.
    pub(crate) fn killed(&self, engine: usize) -> bool {
        self.engines.contains(&engine)
    }

    /// The leg was on an engine that was killed, before that was mended.
    fn died(&self, leg: &Leg) -> bool {
        self.killed(leg.engine)
            && leg.queued.is_none_or(|queued| self.mended.is_none_or(|mended| queued <= mended))
    }

    pub(crate) fn calls<'a>(&self, facts: &'a Facts) -> impl Iterator<Item = (&'a CallRecord, &'a [Leg])> {
        let calls = facts.calls.iter().filter(|call| call.act == self.act.name);
        calls.filter_map(|call| Some((call, facts.timelines.get(&call.tag)?.legs.as_slice())))
    }

    pub(crate) fn mended_us(&self) -> u64 {
        self.mended.unwrap_or(self.at)
    }

    /// What was in flight when it struck: by what clients and engines have told of that moment until now, which is more
    /// than was known then.
    fn met<'a>(&self, facts: &Facts, calls: &[&'a CallRecord]) -> (InFlight, Vec<&'a CallRecord>) {
        let (mut flight, mut them) = (InFlight::default(), Vec::new());
        for call in calls.iter().filter(|call| call.began_us <= self.at && self.at < call.ended_us) {
            if facts.exact() {
                let phase = facts.phase_at(call, self.at);
                if phase.is_none() {
                    // Over on the engines; its end was on its way to its client.
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

    /// What is left of a call without the legs that ended with their engine: what those held is gone with it.
    fn survives(&self, timeline: &Timeline) -> Timeline {
        let survives = |leg: &&Leg| !(self.died(leg) && leg.freed.is_empty());
        Timeline { legs: timeline.legs.iter().filter(survives).cloned().collect() }
    }
}

/// Clients of these parts that left, or whose connection broke, when they were gone, and what was left of their calls.
pub(crate) fn gone(facts: &Facts) -> Vec<(u64, Timeline)> {
    let of = |broken: &Broken<'_>| {
        let calls = facts.calls.iter().filter(|call| call.act == broken.act.name);
        let gone = |call: &CallRecord| match call.outcome.as_str() {
            "broken" => Some(call.ended_us),
            _ => Some(facts.victim(call)?.gone),
        };
        let of = |call: &CallRecord| Some((gone(call)?, broken.survives(facts.timelines.get(&call.tag)?)));
        calls.filter_map(of).collect::<Vec<_>>()
    };
    broken(facts).iter().flat_map(of).collect()
}

/// What became of the deployment in each of these parts.
pub(crate) fn rows(facts: &Facts) -> Vec<FaultRow> {
    let broken = broken(facts);
    let acts = facts.acts.iter().filter(|act| act.what == ActKind::Fault);
    acts.map(|act| row(facts, act, broken.iter().find(|broken| broken.act.name == act.name))).collect()
}

fn row(facts: &Facts, act: &Act, broken: Option<&Broken<'_>>) -> FaultRow {
    let calls: Vec<_> = facts.calls.iter().filter(|call| call.act == act.name).collect();
    let failed = |calls: &mut dyn Iterator<Item = &&CallRecord>| {
        calls.filter(|call| stays(call) && call.outcome != "done").count() as u64
    };
    let mended = broken.and_then(|broken| broken.mended);
    let later = |call: &&&CallRecord| mended.is_some_and(|mended| call.began_us > mended);
    let met = broken.map(|broken| broken.met(facts, &calls));
    let stayed_in_flight =
        met.as_ref().map_or(0, |(_, them)| them.iter().filter(|call| stays(call)).count() as u64);
    let failed_in_flight = met.as_ref().map_or(0, |(_, them)| failed(&mut them.iter()));
    let met = met.map(|(flight, _)| flight);
    let wanted = broken.and_then(|broken| Some(broken.struck?.wanted));
    let missed = wanted.zip(met.as_ref()).filter(|(wanted, met)| !wanted.is_in(met));
    let missed = missed.map(|(wanted, _)| wanted.missed());

    let left: Vec<_> = calls.iter().filter_map(|call| facts.victim(call)).collect();
    let survive = |victim: &Victim<'_>| {
        let timeline = victim.timeline?;
        Some(broken.map_or_else(|| timeline.clone(), |broken| broken.survives(timeline)))
    };
    let timelines: Vec<_> = left.iter().map(survive).collect();
    let pairs = left.iter().zip(&timelines);
    let left: Vec<_> = pairs.map(|(victim, rest)| Victim { timeline: rest.as_ref(), ..*victim }).collect();
    let left = grouped(&left.iter().collect::<Vec<_>>(), facts);

    let clients_gone = calls.iter().map(|call| call.ended_us).max().unwrap_or(act.began);
    let by_time = |call: &&&CallRecord| facts.timelines.get(&call.tag).is_some_and(Timeline::expired);
    // A lease's time may be over long after the part is; of engines that tell sums only nobody knows whose lease it was.
    let expired = if facts.exact() {
        calls.iter().filter(by_time).count() as u64
    } else {
        facts.engines.iter().map(|engine| expired_during(facts, engine.engine, act)).sum()
    };
    let in_act = |tag: &str| calls.iter().any(|call| call.tag == tag);
    FaultRow {
        fault: broken.map_or_else(|| act.name.clone(), |broken| broken.fault.to_owned()),
        waited_ms: broken.and_then(|broken| Some(ms(broken.struck?.waited_us))),
        met,
        missed,
        stayed_in_flight,
        failed_in_flight,
        errors_after: failed(&mut calls.iter().filter(later)),
        stayed: service(facts, &[act]).unwrap_or_default(),
        retries: Retries::of(calls.iter().copied()),
        cancelled: left,
        all_free_ms: home_after(facts, clients_gone, act.ended).map(|at| ms(at - clients_gone)),
        expired,
        wrong_texts: wrong(facts).filter(|tag| in_act(tag)).count() as u64,
    }
}
