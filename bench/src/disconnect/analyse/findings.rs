//! What is wrong with a deployment, by name, each with the calls that show it.

mod parts;

pub(crate) use self::parts::{excused_at_end, excused_leases};
use crate::disconnect::analyse::abort_delivery::{self, Telling};
use crate::disconnect::analyse::summary::{Finding, Measure, NOT_RECEIVED_FEW, Summary, WorkRow};
use crate::disconnect::analyse::uncancelled::{self, SLOWER};
use crate::disconnect::analyse::{Act, Facts, Victim, vanished, wrong};
use crate::disconnect::plan::phase::Phase;
use crate::disconnect::record::raw::{ActKind, CallRecord};
use crate::disconnect::record::timeline::Leg;

/// Calls that are named for each finding.
const SHOWN: usize = 5;

/// A share of clients below this is chance.
const RARE: f64 = 0.02;
/// Telling that came too late is not among what is known of telling: honest engines miss more than that says, and not twice
/// as many.
const MISSED: f64 = 2.0;
/// What is less likely than this is not chance.
const CHANCE: f64 = 0.01;
/// Fewer answers of the calm than this say nothing of what batching changes.
const COMPARED_FEW: u64 = 20;
/// So many wrong ones, and a tenth of all, are too many for any batch.
const GROSS: u64 = 5;

/// Errors of who stayed, as a share, above this many times the calm's are harm.
const MORE_ERRORS: f64 = 1.5;

/// Everything that was found.
pub(crate) fn of(
    facts: &Facts,
    victims: &[Victim<'_>],
    vanished: &[Victim<'_>],
    summary: &Summary,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    legs_not_aborted(victims, &mut findings);
    stranded(facts, victims, &mut findings);
    vanished::stranded(facts, vanished, &mut findings);
    refused(facts, &mut findings, summary);
    parts::stranded(facts, &mut findings);
    parts::expiries(facts, summary, &mut findings);
    freed_twice(facts, summary, &mut findings);
    wrong_texts(facts, summary, &mut findings);
    failures(facts, summary, &mut findings);
    harm(facts, summary, &mut findings);
    if !summary.exact {
        orphaned_blocks(facts, summary, &mut findings);
    }
    // Of a run that ended too soon nobody knows what would have come home.
    let at_the_end = summary.engines.iter().filter(|_| summary.failed.is_none());
    for engine in at_the_end {
        let excused = engine.excused_at_end + engine.ghosts_at_end;
        let held = engine.held_at_end.map(|held| held.saturating_sub(excused));
        if let Some(held) = held.filter(|held| *held > 0) {
            let says = format!(
                "{} still holds {} at the end, without an open request",
                engine.name,
                engine.told(held)
            );
            findings.push(finding("blocks_not_freed", says, held, &[]));
        }
    }
    for fault in summary.faults.iter().filter(|fault| fault.errors_after > 0) {
        let (name, errors) = (&fault.fault, fault.errors_after);
        let says = format!("{errors} requests that began after the recovery of `{name}` failed");
        findings.push(finding("not_recovered", says, errors, &[]));
    }
    findings
}

pub(crate) fn finding(name: &'static str, says: String, count: u64, tags: &[&str]) -> Finding {
    let shown_by = tags.iter().take(SHOWN).map(|tag| (*tag).to_owned()).collect();
    Finding { name, says, count, shown_by }
}

/// Legs that went on to their own end although their client had left, and more of them than honest telling misses.
fn legs_not_aborted(victims: &[Victim<'_>], findings: &mut Vec<Finding>) {
    for (row, tags) in abort_delivery::rows(victims, &Telling::of(victims)) {
        let name = if row.leg == "prefill" { "prefill_not_aborted" } else { "decode_not_aborted" };
        let (on, honest) = (
            row.completed_without_abort + row.continued_after_abort,
            MISSED * row.by_chance * row.judged as f64,
        );
        // Two standard deviations of what is counted.
        let at_most = RARE * row.judged as f64 + honest + 2.0 * honest.sqrt();
        if on >= NOT_RECEIVED_FEW && on as f64 > at_most {
            let WorkRow { leg, judged, completed_without_abort: without_abort, .. } = row;
            let says = format!(
                "the {leg} engine computed {on} of {judged} cancelled requests to their end, {without_abort} of them without an abort in its event log"
            );
            findings.push(finding(name, says, on, &tags));
        }
    }
}

/// Blocks that were held for long after their client had left.
fn stranded(facts: &Facts, victims: &[Victim<'_>], findings: &mut Vec<Finding>) {
    let limit = facts.run.stranded_after_us;
    let held = |victim: &&Victim<'_>| {
        victim.timeline.is_some_and(|timeline| match timeline.home_at() {
            None => true,
            Some(home) => home.saturating_sub(victim.gone) > limit,
        })
    };
    let own = [Some(Phase::Gap), Some(Phase::Reply)];
    for (phase, name) in [(own[0], "gap_stranded"), (own[1], "reply_stranded"), (None, "stranded")] {
        let is_of = |victim: &&Victim<'_>| match phase {
            Some(_) => victim.phase == phase,
            None => !own.contains(&victim.phase),
        };
        let all: Vec<_> = victims.iter().filter(is_of).collect();
        let held: Vec<_> = all.iter().copied().filter(|victim| held(victim)).collect();
        if held.is_empty() {
            continue;
        }
        let tags: Vec<_> = held.iter().map(|victim| victim.call.tag.as_str()).collect();
        let why = why_stranded(&held, limit);
        let (stranded, all, seconds) = (tags.len(), all.len(), limit as f64 / 1e6);
        let says = match phase {
            Some(Phase::Gap) => format!(
                "{stranded} of {all} requests cancelled between prefill and decode stranded their blocks for more than {seconds} s: {why}"
            ),
            Some(_) => format!(
                "{stranded} of {all} requests cancelled after the prefill and before its reply was written stranded their blocks for more than {seconds} s: the engine's server dropped the reply, the only copy of the handoff"
            ),
            None => format!(
                "{stranded} of {all} requests cancelled in the other phases stranded their blocks for more than {seconds} s: {why}"
            ),
        };
        findings.push(finding(name, says, stranded as u64, &tags));
    }
}

/// Of how many of these clients an engine was never told that they had gone, or too late to give the blocks back in time, or
/// was told and kept them.
pub(crate) fn why_stranded(held: &[&Victim<'_>], limit: u64) -> String {
    let (mut without_abort, mut late, mut kept) = (0, 0, 0);
    for Victim { timeline, gone, .. } in held.iter().copied() {
        let legs = timeline.iter().flat_map(|timeline| &timeline.legs);
        let back = |leg: &Leg| leg.freed.first().map_or(u64::MAX, |(at, _)| *at);
        let stranding = legs.filter(|leg| leg.holds_at(*gone) && back(leg).saturating_sub(*gone) > limit);
        let told: Vec<_> = stranding.map(|leg| (leg.told_after(*gone), back(leg))).collect();
        let soon =
            |(told, back): &(Option<u64>, u64)| told.is_some_and(|told| back.saturating_sub(told) <= limit);
        match () {
            () if told.iter().any(|(told, _)| told.is_none()) => without_abort += 1,
            () if told.iter().all(soon) => late += 1,
            () => kept += 1,
        }
    }
    let said = [
        (without_abort, "an engine's event log has no abort"),
        (late, "engines received the abort later and freed the blocks then"),
        (kept, "engines received the abort and did not free the blocks in time"),
    ];
    let said: Vec<_> =
        said.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count}: {what}")).collect();
    said.join("; ")
}

/// Answers that are not what the same prompt gives when all is quiet. Of engines in which batching may change texts (those
/// without an event log, and ours that say so) only where they are more, beyond chance, than in the calm.
fn wrong_texts(facts: &Facts, summary: &Summary, findings: &mut Vec<Finding>) {
    let tags: Vec<_> = wrong(facts).collect();
    let texts = &summary.texts;
    let steady = summary.exact && !facts.engines.iter().any(|engine| engine.batching_shows);
    if steady && texts.nondeterministic > 0 {
        let (unsteady, all) = (texts.nondeterministic, texts.compared + texts.nondeterministic);
        let says = format!(
            "{unsteady} of {all} prompts have two different responses without load, from engines that report exact batching"
        );
        let tags: Vec<_> = facts.unsteady.iter().map(String::as_str).collect();
        findings.push(finding("texts_nondeterministic", says, unsteady, &tags));
    }
    let (calm, compared) = ((texts.wrong_in_calm, texts.compared_in_calm), texts.compared);
    if steady && texts.wrong > 0 {
        return findings.push(finding(
            "wrong_texts",
            said_wrong(texts.wrong, compared, ""),
            texts.wrong,
            &tags,
        ));
    }
    let in_calm = |tag: &&str| {
        act_of(facts, tag).is_some_and(|act| matches!(act.what, ActKind::Calm | ActKind::Calibration))
    };
    let tags: Vec<_> = tags.into_iter().filter(|tag| !in_calm(tag)).collect();
    let others = (texts.wrong - calm.0, compared - calm.1);
    // Where too little of the calm can be compared, only what no batch does.
    let gross = calm.1 < COMPARED_FEW && others.0 >= GROSS && others.0 * 10 > others.1;
    if others.0 > 0 && (gross || by_chance(others, calm) < CHANCE) {
        return findings.push(finding("wrong_texts", said_wrong(others.0, others.1, ""), others.0, &tags));
    }
    // What is wrong after one kind of failure alone is lost among all others.
    for act in facts.acts.iter().filter(|act| act.what == ActKind::Fault) {
        let of_act = |tag: &str| act_of(facts, tag).is_some_and(|of| of.name == act.name);
        let compared = facts.replays.iter().filter(|(_, text, said)| text.is_some() && said.is_some());
        let all = compared.filter(|(tag, ..)| of_act(tag)).count() as u64;
        let tags: Vec<_> = tags.iter().copied().filter(|tag| of_act(tag)).collect();
        let wrong = tags.len() as u64;
        if wrong > 0 && by_chance((wrong, all), calm) < CHANCE {
            let says = said_wrong(wrong, all, &format!(" in segment {}", act.name));
            findings.push(finding("wrong_texts", says, wrong, &tags));
        }
    }
}

fn said_wrong(wrong: u64, compared: u64, part: &str) -> String {
    format!("{wrong} of {compared} responses{part} differ from the response to the same prompt without load")
}

fn act_of<'a>(facts: &'a Facts, tag: &str) -> Option<&'a Act> {
    facts.act(&facts.calls.iter().find(|call| call.tag == tag)?.act)
}

/// How likely as many or more of all wrong answers are among `others`, if nothing sets those apart: Fisher's exact test, one-sided.
/// Each is (wrong, all).
fn by_chance(others: (u64, u64), calm: (u64, u64)) -> f64 {
    let (wrong, all) = (others.0 + calm.0, others.1 + calm.1);
    let log_choose = |n: u64, k: u64| (1..=k).map(|i| ((n - k + i) as f64 / i as f64).ln()).sum::<f64>();
    let most = wrong.min(others.1);
    // Where the calm has fewer answers than that, some of them must be among the others.
    let least = others.0.max(wrong.saturating_sub(calm.1));
    let share =
        |k: u64| (log_choose(others.1, k) + log_choose(calm.1, wrong - k) - log_choose(all, wrong)).exp();
    (least..=most).map(share).sum()
}

/// Requests that failed although nothing was broken on purpose, and engines that went away.
fn failures(facts: &Facts, summary: &Summary, findings: &mut Vec<Finding>) {
    let in_phase = |call: &&CallRecord| facts.act(&call.act).is_some_and(|act| act.what == ActKind::Phase);
    let calls: Vec<_> = facts.calls.iter().filter(in_phase).collect();
    let failed: Vec<_> =
        calls.iter().filter(|call| !matches!(call.outcome.as_str(), "done" | "left")).collect();
    let calm = summary.calm.as_ref().map_or(0.0, |calm| calm.errors as f64 / calm.requests.max(1) as f64);
    if failed.len() as f64 > (2.0 * calm + RARE) * calls.len() as f64 {
        let tags: Vec<_> = failed.iter().map(|call| call.tag.as_str()).collect();
        let says = format!(
            "{} of {} requests failed in the segments with cancels by phase",
            failed.len(),
            calls.len()
        );
        findings.push(finding("requests_failed", says, failed.len() as u64, &tags));
    }
    for engine in facts.engines.iter() {
        let name = &engine.name;
        let on_purpose = |at: u64| {
            facts.acts.iter().any(|act| act.what == ActKind::Fault && act.began <= at && at <= act.ended)
        };
        let restarts =
            facts.restarts.iter().filter(|(of, at)| *of == engine.engine && !on_purpose(*at)).count();
        if restarts > 0 {
            let says = format!("{name} restarted {restarts} times without an injected fault");
            findings.push(finding("engine_restarted", says, restarts as u64, &[]));
        }
        let gone = summary.engines.iter().any(|row| row.name == *name && row.held_at_end.is_none());
        if gone {
            findings.push(finding("engine_gone", format!("{name} does not respond at the end"), 1, &[]));
        }
    }
}

fn refused(facts: &Facts, findings: &mut Vec<Finding>, summary: &Summary) {
    let Some(group) = summary.refused.as_ref().filter(|group| group.stranded > 0) else { return };
    let (stranded, all) = (group.stranded, group.cancelled);
    let seconds = facts.run.stranded_after_us as f64 / 1e6;
    let says = format!(
        "{stranded} of {all} requests that the decode engine refused stranded their blocks at the prefill engine for more than {seconds} s"
    );
    findings.push(finding("refused_stranded", says, stranded, &[]));
}

/// Where nobody tells of single requests: blocks that were held while no client was there at all.
fn orphaned_blocks(facts: &Facts, summary: &Summary, findings: &mut Vec<Finding>) {
    let held: f64 = summary.engines.iter().map(|engine| engine.idle_block_seconds).sum();
    let sizeless = summary.engines.iter().any(|engine| engine.blocks == 0);
    // As if one client in fifty had stranded one block for as long as strands.
    let chance = RARE * summary.cancelled as f64 * facts.run.stranded_after_us as f64 / 1e6;
    if held > chance {
        let says = format!(
            "{held:.1} block-seconds{} were held without an open request, after {} cancels",
            if sizeless {
                " (in thousandths of a pool, if an engine does not report its blocks)"
            } else {
                ""
            },
            summary.cancelled
        );
        findings.push(finding("orphaned_blocks", says, held as u64, &[]));
    }
}

fn freed_twice(facts: &Facts, summary: &Summary, findings: &mut Vec<Finding>) {
    let twice =
        facts.timelines.iter().filter(|(_, timeline)| timeline.legs.iter().any(|leg| leg.freed.len() > 1));
    let tags: Vec<_> = twice.map(|(tag, _)| tag.as_str()).collect();
    if !tags.is_empty() {
        let says = format!("the blocks of {} requests were freed more than once", tags.len());
        findings.push(finding("freed_twice", says, tags.len() as u64, &tags));
    }
    for engine in &summary.engines {
        let (name, pool) = (&engine.name, engine.blocks);
        if engine.too_many > 0 {
            let looks = engine.too_many;
            let says = format!(
                "{name} reported more blocks than the {pool} of its pool in {looks} samples: blocks were freed twice"
            );
            findings.push(finding("freed_twice", says, looks, &[]));
        }
        if engine.too_few > 0 {
            let looks = engine.too_few;
            let says = format!("{name} reported fewer blocks than the {pool} of its pool in {looks} samples");
            findings.push(finding("blocks_lost", says, looks, &[]));
        }
    }
}

fn harm(facts: &Facts, summary: &Summary, findings: &mut Vec<Finding>) {
    let (Some(calm), Some(storm)) = (&summary.calm, &summary.storm) else { return };
    let rate =
        |of: &crate::disconnect::analyse::summary::Service| of.errors as f64 / of.requests.max(1) as f64;
    if storm.errors > 0 && rate(storm) > rate(calm) * MORE_ERRORS {
        let (errors, all) = (storm.errors, storm.requests);
        let says = format!("{errors} of {all} uncancelled requests of the storms failed");
        let failed = |call: &&CallRecord| {
            call.leaves.is_none()
                && call.outcome != "done"
                && facts.act(&call.act).is_some_and(|act| act.what == ActKind::Storm)
        };
        let tags: Vec<_> = facts.calls.iter().filter(failed).map(|call| call.tag.as_str()).collect();
        findings.push(finding("uncancelled_failed", says, errors, &tags));
    }
    for measure in Measure::ALL {
        // Who waits at the end of the queue shows most; where that is lost in noise, the middle may not be.
        let numbers = summary.uncancelled.numbers.iter().rev();
        let Some(worst) = numbers.filter(|number| number.measure == measure).find(|number| number.slower)
        else {
            continue;
        };
        let (percentile, what, after) = (worst.percentile, measure.label(), worst.storm_ms);
        let says = format!(
            "uncancelled requests waited {after:.1} ms for the {what} at p{percentile} in the storm and {:.1} ms in the calm: {:.2} times as long (the target is {SLOWER}; noise between calms: {:.1} ms)",
            worst.calm_ms, worst.over.median, worst.noise_ms
        );
        let harmed = |call: &&CallRecord| {
            call.leaves.is_none()
                && call.retries.is_none()
                && facts.act(&call.act).is_some_and(|act| act.what == ActKind::Storm)
                && uncancelled::of(measure, call).iter().any(|sample| *sample >= after)
        };
        let tags: Vec<_> = facts.calls.iter().filter(harmed).map(|call| call.tag.as_str()).collect();
        findings.push(finding("uncancelled_slowed", says, 1, &tags));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_more_wrong_texts_may_be_chance_and_many_more_are_not() {
        // By whole numbers: sums of products of binomial coefficients, in Python.
        for (others, calm, p) in [
            ((2, 206), (0, 194), 0.264_599),
            ((8, 206), (0, 194), 0.004_626_9),
            ((30, 200), (10, 200), 0.000_642_47),
            ((5, 10), (0, 0), 1.0),
            ((0, 10), (3, 10), 1.0),
        ] {
            assert!(
                (by_chance(others, calm) / p - 1.0).abs() < 0.01,
                "{others:?} {calm:?}: {}",
                by_chance(others, calm)
            );
        }
    }
}
