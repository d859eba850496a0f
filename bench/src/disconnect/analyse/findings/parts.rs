//! What is found of a deployment in which a part was broken on purpose: blocks that stay behind, and leases that only time
//! has ended; but for what nobody can give back ([`Broken::excuses`]).

use super::finding;
use crate::disconnect::analyse::Facts;
use crate::disconnect::analyse::faults::{Broken, broken};
use crate::disconnect::analyse::summary::{Finding, Summary};
use crate::disconnect::record::raw::{Books, CallRecord};
use crate::disconnect::record::timeline::{Leg, RACE_US};

/// Blocks that were still held long after the part was mended and their client was gone.
pub(super) fn stranded(facts: &Facts, findings: &mut Vec<Finding>) {
    let limit = facts.run.stranded_after_us;
    let seconds = limit as f64 / 1e6;
    // Of a part that did not come to its end nobody knows what would have come home.
    for broken in broken(facts).iter().filter(|broken| broken.act.ended < u64::MAX) {
        let fault = broken.fault;
        let after =
            if broken.mended.is_some() { format!("`{fault}` recovered") } else { format!("`{fault}`") };
        let behind = |call: &CallRecord, leg: &Leg| {
            let back = leg.freed.first().map_or(facts.watched_until(), |(at, _)| *at);
            // A lease that is over is nobody's but the engine's.
            let kept = leg.lease_ended.as_ref().is_some_and(|(ended, _)| back.saturating_sub(*ended) > limit);
            (leg.held() > 0 || leg.is_at_work())
                && (kept || !broken.excuses(call, leg))
                && back.saturating_sub(facts.there_until(call).max(broken.mended_us())) > limit
        };
        let of = broken.calls(facts).filter(|(call, legs)| legs.iter().any(|leg| behind(call, leg)));
        let tags: Vec<_> = of.map(|(call, _)| call.tag.as_str()).collect();
        if !tags.is_empty() {
            let says = format!(
                "{} requests stranded their blocks for more than {seconds} s after {after} and their cancel",
                tags.len()
            );
            findings.push(finding("fault_stranded", says, tags.len() as u64, &tags));
            continue;
        }
        for engine in &facts.engines {
            if let Some(held) = still_held(facts, broken, engine.engine) {
                let name = &engine.name;
                let says = format!(
                    "{name} still held {held} blocks {seconds} s after {after} and the end of the last request"
                );
                findings.push(finding("fault_stranded", says, held, &[]));
            }
        }
    }
}

/// Blocks that an engine's books had as held for too long after everybody had gone, but for those that are excused.
fn still_held(facts: &Facts, broken: &Broken<'_>, engine: usize) -> Option<u64> {
    let calls = facts.calls.iter().filter(|call| call.act == broken.act.name);
    let gone = calls.map(|call| facts.there_until(call)).max().unwrap_or(0).max(broken.mended_us());
    let held = |books: &Books| {
        books.held.saturating_sub(excused(facts, broken, engine, books.at_us).map(Leg::held).sum())
    };
    let late = facts.books.iter().filter(|books| {
        books.engine == engine
            && books.at_us > gone + facts.run.stranded_after_us
            && books.at_us <= broken.act.ended
    });
    late.map(held).find(|held| *held > 0)
}

/// Legs whose blocks an engine holds at this moment, and nobody but time can give back. What an engine held that was killed is
/// in no books, and of a lease that has ended the engine itself has to give them back.
fn excused<'a>(
    facts: &'a Facts,
    broken: &'a Broken<'a>,
    engine: usize,
    at: u64,
) -> impl Iterator<Item = &'a Leg> {
    let legs = broken.calls(facts).flat_map(|(call, legs)| legs.iter().map(move |leg| (call, leg)));
    let ours = move |leg: &Leg| leg.engine == engine && !broken.killed(engine);
    let of_another = move |leg: &Leg| {
        let since = leg.lent.map_or(0, |(lent, _)| lent);
        facts.restarts.iter().any(|(other, when)| *other == engine && since <= *when && *when <= at)
    };
    legs.filter(move |(call, leg)| ours(leg) && broken.excuses(call, leg))
        .map(|(_, leg)| leg)
        .filter(move |leg| leg.freed.first().is_none_or(|(freed, _)| *freed >= at))
        .filter(move |leg| leg.lease_ended.as_ref().is_none_or(|(ended, _)| *ended + RACE_US > at))
        .filter(move |leg| !of_another(leg))
}

/// Blocks that an engine held when it was last looked at, of excused leases whose time was not over then.
pub(crate) fn excused_at_end(facts: &Facts, engine: usize, at: u64) -> u64 {
    let legs = facts.timelines.values().flat_map(|timeline| &timeline.legs);
    // A lease that grows does not say it; it is the engine's for all of them.
    let lives = legs.filter(|leg| leg.engine == engine).filter_map(|leg| leg.lease_life);
    let Some(life) = lives.max() else { return 0 };
    let runs = |leg: &&Leg| {
        let from = leg.lent.map_or(0, |(lent, _)| lent).max(leg.ended.as_ref().map_or(0, |ended| ended.at));
        from.saturating_add(life).saturating_add(facts.run.stranded_after_us) > at
    };
    let of =
        |broken: &Broken<'_>| excused(facts, broken, engine, at).filter(runs).map(Leg::held).sum::<u64>();
    broken(facts).iter().map(of).sum()
}

/// Requests with a lease that only time has ended: those that are excused, and the others.
fn by_time(facts: &Facts) -> (Vec<&str>, Vec<&str>) {
    let broken = broken(facts);
    let excused = |tag: &str| {
        let ours = broken
            .iter()
            .flat_map(|broken| broken.calls(facts).map(move |(call, legs)| (broken, call, legs)));
        ours.filter(|(_, call, _)| call.tag == tag)
            .any(|(broken, call, legs)| legs.iter().any(|leg| leg.lends && broken.excuses(call, leg)))
    };
    let all = facts.timelines.iter().filter(|(_, timeline)| timeline.expired()).map(|(tag, _)| tag.as_str());
    all.partition(|tag| excused(tag))
}

/// How many leases that only time has ended are excused, by the engines' own word.
pub(crate) fn excused_leases(facts: &Facts) -> u64 {
    by_time(facts).0.len() as u64
}

/// Leases that only time has ended.
pub(super) fn expiries(facts: &Facts, summary: &Summary, findings: &mut Vec<Finding>) {
    let counted: u64 = summary.engines.iter().map(|engine| engine.expired).sum();
    let (excused, tags) = by_time(facts);
    // Of engines that tell sums only nobody knows which were killed.
    let in_parts: u64 = summary.faults.iter().map(|fault| fault.expired).sum();
    let on_purpose = if summary.exact { excused.len() as u64 } else { in_parts };
    let expired = counted.saturating_sub(on_purpose).max(tags.len() as u64);
    if expired > 0 {
        let says = format!("{expired} leases expired: their blocks were neither read nor released");
        findings.push(finding("leases_expired", says, expired, &tags));
    }
}
