//! What is found of a deployment in which a part was broken on purpose: blocks that stay behind, and leases that only time
//! has ended.
//!
//! Two kinds of blocks nobody can give back, and only these are excused: those of an engine that was itself killed, and of a
//! lease that was open when something that is no engine was (the router that owed its release is gone).

use super::super::analyse::{Act, Facts};
use super::super::raw::{ActKind, Books, CallRecord};
use super::super::summary::{Finding, Summary};
use super::super::timeline::Leg;
use super::finding;

/// A killed engine is known to be another process so soon after the part of the run, at the latest.
const NOTICED_WITHIN_US: u64 = 5_000_000;

/// A part of the run in which something was broken.
struct Broken<'a> {
    act: &'a Act,
    fault: &'a str,
    at: u64,
    mended: Option<u64>,
    /// Engines that were killed, or did not come back.
    engines: Vec<usize>,
}

fn broken(facts: &Facts) -> Vec<Broken<'_>> {
    let breaks = || facts.faults.iter().filter(|(.., mended)| !mended);
    let of = |act: &'_ Act| {
        let (_, fault, at, _) = breaks().find(|(name, ..)| *name == act.name)?;
        let mended = facts.faults.iter().rfind(|(name, .., mended)| *name == act.name && *mended);
        // The last that was broken before it was another process.
        let ours =
            |at: u64| breaks().rfind(|(_, _, of, _)| *of <= at).is_some_and(|(name, ..)| *name == act.name);
        let killed = facts
            .restarts
            .iter()
            .filter(|(_, at)| ours(*at) && *at <= act.ended.saturating_add(NOTICED_WITHIN_US));
        let mut engines: Vec<usize> = killed.map(|(engine, _)| *engine).collect();
        let looked_at = |engine: usize| {
            facts
                .books
                .iter()
                .any(|books| books.engine == engine && books.at_us > *at && books.at_us <= act.ended)
        };
        engines.extend(facts.engines.iter().map(|engine| engine.engine).filter(|engine| !looked_at(*engine)));
        Some((fault.as_str(), *at, mended.map(|(_, _, at, _)| *at), engines))
    };
    let acts = facts.acts.iter().filter(|act| act.what == ActKind::Fault);
    let broken = |act| {
        let (fault, at, mended, engines) = of(act)?;
        Some(Broken { act, fault, at, mended, engines })
    };
    acts.filter_map(broken).collect()
}

impl Broken<'_> {
    /// Nobody is left who could give back what this leg of a call in this part of the run holds.
    fn excuses(&self, call: &CallRecord, leg: &Leg) -> bool {
        if self.engines.contains(&leg.engine) {
            return leg.queued.is_none_or(|queued| self.mended.is_none_or(|mended| queued <= mended));
        }
        let Some((lent, _)) = leg.lent.filter(|_| self.engines.is_empty()) else { return false };
        let open_at = |at: u64| lent <= at && leg.lease_ended.as_ref().is_none_or(|(ended, _)| *ended > at);
        // A command that breaks takes its time; a client whose connection broke tells when it had done so.
        open_at(self.at) || (call.outcome == "broken" && call.ended_us >= self.at && open_at(call.ended_us))
    }

    fn calls<'a>(&self, facts: &'a Facts) -> impl Iterator<Item = (&'a CallRecord, &'a [Leg])> {
        let calls = facts.calls.iter().filter(|call| call.act == self.act.name);
        calls.filter_map(|call| Some((call, facts.timelines.get(&call.tag)?.legs.as_slice())))
    }

    fn mended_us(&self) -> u64 {
        self.mended.unwrap_or(self.at)
    }
}

/// Blocks that were still held long after the part was mended and their client was gone.
pub(super) fn stranded(facts: &Facts, findings: &mut Vec<Finding>) {
    let limit = facts.run.stranded_after_us;
    let seconds = limit as f64 / 1e6;
    // Of a part that did not come to its end nobody knows what would have come home.
    for broken in broken(facts).iter().filter(|broken| broken.act.ended < u64::MAX) {
        let fault = broken.fault;
        let after =
            if broken.mended.is_some() { format!("`{fault}` was mended") } else { format!("`{fault}`") };
        let behind = |call: &CallRecord, leg: &Leg| {
            let back = leg.freed.first().map_or(facts.watched_until(), |(at, _)| *at);
            (leg.held() > 0 || leg.is_at_work())
                && !broken.excuses(call, leg)
                && back.saturating_sub(call.ended_us.max(broken.mended_us())) > limit
        };
        let of = broken.calls(facts).filter(|(call, legs)| legs.iter().any(|leg| behind(call, leg)));
        let tags: Vec<_> = of.map(|(call, _)| call.tag.as_str()).collect();
        if !tags.is_empty() {
            let says = format!(
                "the blocks of {} requests were not back within {seconds} s after {after} and their clients had gone",
                tags.len()
            );
            findings.push(finding("fault_stranded", says, tags.len() as u64, &tags));
            continue;
        }
        for engine in &facts.engines {
            if let Some(held) = still_held(facts, broken, engine.engine) {
                let name = &engine.name;
                let says = format!(
                    "{name} still held {held} blocks {seconds} s after {after} and the last client had gone"
                );
                findings.push(finding("fault_stranded", says, held, &[]));
            }
        }
    }
}

/// Blocks that an engine's books had as held for too long after everybody had gone, but for those that are excused.
fn still_held(facts: &Facts, broken: &Broken<'_>, engine: usize) -> Option<u64> {
    let calls = facts.calls.iter().filter(|call| call.act == broken.act.name);
    let gone = calls.map(|call| call.ended_us).max().unwrap_or(0).max(broken.mended_us());
    let excused: Vec<_> = broken
        .calls(facts)
        .flat_map(|(call, legs)| {
            legs.iter().filter(move |leg| leg.engine == engine && broken.excuses(call, leg))
        })
        .collect();
    let held = |books: &Books| {
        let of = excused.iter().filter(|leg| leg.freed.first().is_none_or(|(at, _)| *at >= books.at_us));
        books.held.saturating_sub(of.map(|leg| leg.held()).sum())
    };
    let late = facts.books.iter().filter(|books| {
        books.engine == engine
            && books.at_us > gone + facts.run.stranded_after_us
            && books.at_us <= broken.act.ended
    });
    late.map(held).find(|held| *held > 0)
}

/// Leases that only time has ended.
pub(super) fn expiries(facts: &Facts, summary: &Summary, findings: &mut Vec<Finding>) {
    let counted: u64 = summary.engines.iter().map(|engine| engine.expired).sum();
    let broken = broken(facts);
    let excused = |tag: &str| {
        let ours = broken
            .iter()
            .flat_map(|broken| broken.calls(facts).map(move |(call, legs)| (broken, call, legs)));
        ours.filter(|(_, call, _)| call.tag == tag)
            .any(|(broken, call, legs)| legs.iter().any(|leg| leg.lends && broken.excuses(call, leg)))
    };
    let all = facts.timelines.iter().filter(|(_, timeline)| timeline.expired()).map(|(tag, _)| tag.as_str());
    let (excused, tags): (Vec<_>, Vec<_>) = all.partition(|tag| excused(tag));
    // Of engines that tell sums only nobody knows which were killed.
    let in_parts: u64 = summary.faults.iter().map(|fault| fault.expired).sum();
    let on_purpose = if summary.exact { excused.len() as u64 } else { in_parts };
    let expired = counted.saturating_sub(on_purpose).max(tags.len() as u64);
    if expired > 0 {
        let says = format!(
            "{expired} leases ended by time alone: nobody fetched their blocks, and nobody gave them back"
        );
        findings.push(finding("leases_expired", says, expired, &tags));
    }
}
