//! The findings: defects of a deployment by name, each with calls that show it.

mod parts;

pub(crate) use self::parts::{excused_at_end, excused_leases};
use crate::disconnect::analyse::abort_delivery::{self, AbortDelays};
use crate::disconnect::analyse::groups::wrong_answers;
use crate::disconnect::analyse::run_data::{CancelledCall, Restart, RunData, Segment};
use crate::disconnect::analyse::summary::{
    Finding, Measure, NOT_RECEIVED_FEW, SLOWER, ServiceLevels, Summary, WorkRow,
};
use crate::disconnect::analyse::uncancelled;
use crate::disconnect::analyse::vanished::{VanishOutcome, vanish_outcome};
use crate::disconnect::plan::phase::{Phase, REPLY_DROPPED};
use crate::disconnect::record::raw::{CallRecord, SegmentKind};
use crate::disconnect::record::timeline::{LegTimeline, Timeline};

/// A lower share of requests is chance.
const RARE: f64 = 0.02;
/// Aborts that arrive too late are not among the known delays. A correct engine misses more aborts than these delays
/// predict, but less than this many times.
const MISSED: f64 = 2.0;
/// A lower probability is not chance.
const CHANCE: f64 = 0.01;
/// With fewer compared responses of the calm the effect of batching is unknown.
const COMPARED_FEW: u64 = 20;
/// This many wrong responses, and a tenth of all, are too many to be an effect of batching.
const GROSS: u64 = 5;

/// A finding if the error rate of uncancelled requests exceeds this many times that of the calm.
const MORE_ERRORS: f64 = 1.5;

/// All findings.
pub(crate) fn of(
    data: &RunData,
    cancelled: &[CancelledCall<'_>],
    vanished: &[CancelledCall<'_>],
    summary: &Summary,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    legs_not_aborted(cancelled, &mut findings);
    stranded(data, cancelled, &mut findings);
    vanished_stranded(data, vanished, &mut findings);
    refused(data, &mut findings, summary);
    parts::stranded(data, &mut findings);
    parts::expiries(data, summary, &mut findings);
    freed_twice(data, summary, &mut findings);
    wrong_texts(data, summary, &mut findings);
    failures(data, summary, &mut findings);
    uncancelled_slower(data, summary, &mut findings);
    if !summary.exact {
        orphaned_blocks(data, summary, &mut findings);
    }
    // After an early end it is unknown which blocks would have been freed.
    let at_the_end = summary.engines.iter().filter(|_| summary.failed.is_none());
    for engine in at_the_end {
        let excused = engine.excused_at_end + engine.ghosts_at_end;
        let held = engine.held_at_end.map(|held| held.saturating_sub(excused));
        if let Some(held) = held.filter(|held| *held > 0) {
            let says = format!(
                "{} still holds {} at the end, without an open request",
                engine.name,
                engine.describe_held(held)
            );
            findings.push(Finding::new("blocks_not_freed", says, held, &[]));
        }
    }
    for fault in summary.faults.iter().filter(|fault| fault.errors_after > 0) {
        let (name, errors) = (&fault.fault, fault.errors_after);
        let says = format!("{errors} requests that began after the recovery of `{name}` failed");
        findings.push(Finding::new("not_recovered", says, errors, &[]));
    }
    findings
}

/// Legs that completed although their request was cancelled, if there are more than lost races explain.
fn legs_not_aborted(cancelled: &[CancelledCall<'_>], findings: &mut Vec<Finding>) {
    for (row, tags) in abort_delivery::rows(cancelled, &AbortDelays::of(cancelled)) {
        let name = if row.leg == "prefill" { "prefill_not_aborted" } else { "decode_not_aborted" };
        let (on, honest) = (
            row.completed_without_abort + row.continued_after_abort,
            MISSED * row.by_chance * row.judged as f64,
        );
        // Two standard deviations of the count.
        let at_most = RARE * row.judged as f64 + honest + 2.0 * honest.sqrt();
        if on >= NOT_RECEIVED_FEW && on as f64 > at_most {
            let WorkRow { leg, judged, completed_without_abort: without_abort, .. } = row;
            let says = format!(
                "the {leg} engine computed {on} of {judged} cancelled requests to their end, {without_abort} of them without an abort in its event log"
            );
            findings.push(Finding::new(name, says, on, &tags));
        }
    }
}

/// Blocks that were held too long after a cancel.
fn stranded(data: &RunData, cancelled: &[CancelledCall<'_>], findings: &mut Vec<Finding>) {
    let limit = data.run.stranded_after_us;
    let held = |request: &&CancelledCall<'_>| {
        request.timeline.is_some_and(|timeline| match timeline.all_freed_at() {
            None => true,
            Some(freed_at) => freed_at.saturating_sub(request.cancelled_at) > limit,
        })
    };
    let named = [Some(Phase::Gap), Some(Phase::Reply)];
    for (phase, name) in [(named[0], "gap_stranded"), (named[1], "reply_stranded"), (None, "stranded")] {
        let is_of = |request: &&CancelledCall<'_>| match phase {
            Some(_) => request.phase == phase,
            None => !named.contains(&request.phase),
        };
        let all: Vec<_> = cancelled.iter().filter(is_of).collect();
        let held: Vec<_> = all.iter().copied().filter(|request| held(request)).collect();
        if held.is_empty() {
            continue;
        }
        let tags: Vec<_> = held.iter().map(|request| request.call.tag.as_str()).collect();
        let why = describe_stranded(&held, limit);
        let (stranded, all, seconds) = (tags.len(), all.len(), limit as f64 / 1e6);
        let says = match phase {
            Some(Phase::Gap) => format!(
                "{stranded} of {all} requests cancelled between prefill and decode stranded their blocks for more than {seconds} s: {why}"
            ),
            Some(_) => format!(
                "{stranded} of {all} requests cancelled after the prefill and before its reply was written stranded their blocks for more than {seconds} s: {why}"
            ),
            None => format!(
                "{stranded} of {all} requests cancelled in the other phases stranded their blocks for more than {seconds} s: {why}"
            ),
        };
        findings.push(Finding::new(name, says, stranded as u64, &tags));
    }
}

/// Blocks of vanished clients that were held beyond the limit.
fn vanished_stranded(data: &RunData, vanished: &[CancelledCall<'_>], findings: &mut Vec<Finding>) {
    let held: Vec<_> = vanished
        .iter()
        .filter(|request| vanish_outcome(data, request) == Some(VanishOutcome::Stranded))
        .collect();
    let Some(first) = held.first() else { return };
    let limit = data.stranded_after(first.call);
    let tags: Vec<_> = held.iter().map(|request| request.call.tag.as_str()).collect();
    let says = format!(
        "{} of {} vanished clients stranded their blocks for more than {} s: {}",
        tags.len(),
        vanished.len(),
        limit as f64 / 1e6,
        describe_stranded(&held, limit)
    );
    findings.push(Finding::new("vanished_stranded", says, tags.len() as u64, &tags));
}

/// Counts the reasons of stranded blocks: a dropped reply, no abort, an abort too late, or an abort without effect.
fn describe_stranded(held: &[&CancelledCall<'_>], limit: u64) -> String {
    let (mut dropped, mut without_abort, mut late, mut kept) = (0, 0, 0, 0);
    for CancelledCall { timeline, cancelled_at, .. } in held.iter().copied() {
        let legs = timeline.iter().flat_map(|timeline| &timeline.legs);
        let freed = |leg: &LegTimeline| leg.freed_at().unwrap_or(u64::MAX);
        let stranding = legs
            .filter(|leg| leg.holds_at(*cancelled_at) && freed(leg).saturating_sub(*cancelled_at) > limit);
        let aborts: Vec<_> = stranding.map(|leg| (leg.aborted_after(*cancelled_at), freed(leg))).collect();
        let soon = |(aborted, freed): &(Option<u64>, u64)| {
            aborted.is_some_and(|aborted| freed.saturating_sub(aborted) <= limit)
        };
        match () {
            () if timeline.is_some_and(Timeline::dropped_reply) => dropped += 1,
            () if aborts.iter().any(|(aborted, _)| aborted.is_none()) => without_abort += 1,
            () if aborts.iter().all(soon) => late += 1,
            () => kept += 1,
        }
    }
    let counts = [
        (dropped, REPLY_DROPPED),
        (without_abort, "an engine's event log has no abort"),
        (late, "engines received the abort later and freed the blocks then"),
        (kept, "engines received the abort and did not free the blocks in time"),
    ];
    let texts: Vec<_> = counts
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{count}: {what}"))
        .collect();
    texts.join("; ")
}

/// Responses that differ from those without load. If batching may change responses (engines without an event log, and
/// engines that report it), only an excess beyond chance counts, over the calm and over repetitions in parallel. Batches
/// are small in the calm, and can be large after a fault, when clients have waited.
fn wrong_texts(data: &RunData, summary: &Summary, findings: &mut Vec<Finding>) {
    let tags: Vec<_> = wrong_answers(data).collect();
    let texts = &summary.texts;
    let is_exact = summary.exact && !data.engines.iter().any(|engine| engine.batching_shows);
    if is_exact && texts.nondeterministic > 0 {
        let (nondeterministic, all) = (texts.nondeterministic, texts.compared + texts.nondeterministic);
        let says = format!(
            "{nondeterministic} of {all} prompts have two different responses without load, from engines that report exact batching"
        );
        let tags: Vec<_> = data.nondeterministic.iter().map(String::as_str).collect();
        findings.push(Finding::new("texts_nondeterministic", says, nondeterministic, &tags));
    }
    if is_exact && texts.wrong > 0 {
        let says = WrongCount { wrong: texts.wrong, compared: texts.compared }.describe("");
        return findings.push(Finding::new("wrong_texts", says, texts.wrong, &tags));
    }
    let in_calm = |tag: &&str| {
        segment_of(data, tag)
            .is_some_and(|segment| matches!(segment.what, SegmentKind::Calm | SegmentKind::Calibration))
    };
    let tags: Vec<_> = tags.into_iter().filter(|tag| !in_calm(tag)).collect();
    let calm = WrongCount { wrong: texts.wrong_in_calm, compared: texts.compared_in_calm };
    let (wrong, compared) = (texts.wrong - calm.wrong, texts.compared - calm.compared);
    let others = WrongCount { wrong, compared };
    let parallel = WrongCount { wrong: texts.wrong_in_parallel, compared: texts.compared_in_parallel };
    // A sample that is too small excuses nothing.
    let in_parallel = |count: WrongCount| {
        let known = parallel.compared >= COMPARED_FEW && 2 * parallel.compared >= count.compared;
        known && by_chance(count, parallel) >= CHANCE
    };
    let is_chance = |count| by_chance(count, calm) >= CHANCE || in_parallel(count);
    // With too few compared responses of the calm, only more than batching can explain.
    let gross = calm.compared < COMPARED_FEW && wrong >= GROSS && wrong * 10 > compared;
    if wrong > 0 && (gross && !in_parallel(others) || !is_chance(others)) {
        return findings.push(Finding::new("wrong_texts", others.describe(""), wrong, &tags));
    }
    // Wrong responses after one kind of fault would be lost among all others.
    for segment in data.segments.iter().filter(|segment| segment.what == SegmentKind::Fault) {
        let of_segment = |tag: &str| segment_of(data, tag).is_some_and(|of| of.name == segment.name);
        let compared = data.replays.iter().filter(|(_, text, expected)| text.is_some() && expected.is_some());
        let compared = compared.filter(|(tag, ..)| of_segment(tag)).count() as u64;
        let tags: Vec<_> = tags.iter().copied().filter(|tag| of_segment(tag)).collect();
        let wrong = tags.len() as u64;
        let count = WrongCount { wrong, compared };
        if wrong > 0 && !is_chance(count) {
            let says = count.describe(&format!(" in segment {}", segment.name));
            findings.push(Finding::new("wrong_texts", says, wrong, &tags));
        }
    }
}

/// Compared responses, and how many of them are wrong.
#[derive(Clone, Copy, Debug)]
struct WrongCount {
    wrong: u64,
    compared: u64,
}

impl WrongCount {
    fn describe(self, part: &str) -> String {
        let Self { wrong, compared } = self;
        format!(
            "{wrong} of {compared} responses{part} differ from the response to the same prompt without load"
        )
    }
}

fn segment_of<'a>(data: &'a RunData, tag: &str) -> Option<&'a Segment> {
    data.segment(&data.calls.iter().find(|call| call.tag == tag)?.segment)
}

/// The probability of at least this many wrong responses among `others`, if nothing distinguishes them from the calm:
/// Fisher's exact test, one-sided.
fn by_chance(others: WrongCount, calm: WrongCount) -> f64 {
    let (wrong, all) = (others.wrong + calm.wrong, others.compared + calm.compared);
    let log_choose = |n: u64, k: u64| (1..=k).map(|i| ((n - k + i) as f64 / i as f64).ln()).sum::<f64>();
    let most = wrong.min(others.compared);
    // If the calm has fewer responses than that, some wrong ones must be among the others.
    let least = others.wrong.max(wrong.saturating_sub(calm.compared));
    let ways = |k: u64| log_choose(others.compared, k) + log_choose(calm.compared, wrong - k);
    let share = |k: u64| (ways(k) - log_choose(all, wrong)).exp();
    (least..=most).map(share).sum()
}

/// Requests that failed without an injected fault, and engines that restarted or do not respond.
fn failures(data: &RunData, summary: &Summary, findings: &mut Vec<Finding>) {
    let in_phase = |call: &&CallRecord| {
        data.segment(&call.segment).is_some_and(|segment| segment.what == SegmentKind::Phase)
    };
    let calls: Vec<_> = data.calls.iter().filter(in_phase).collect();
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
        findings.push(Finding::new("requests_failed", says, failed.len() as u64, &tags));
    }
    for engine in data.engines.iter() {
        let name = &engine.name;
        let on_purpose = |Restart { at, seen, .. }: &Restart| {
            let in_segment = data.segments.iter().any(|segment| {
                segment.what == SegmentKind::Fault && segment.began <= *at && *at <= segment.ended
            });
            // The new process may be noticed after the segment.
            in_segment || data.faults.iter().any(|fault| *seen < fault.at && fault.at <= *at)
        };
        let ours = data.restarts.iter().filter(|restart| restart.engine == engine.engine);
        let restarts = ours.filter(|restart| !on_purpose(restart)).count();
        if restarts > 0 {
            let says = format!("{name} restarted {restarts} times without an injected fault");
            findings.push(Finding::new("engine_restarted", says, restarts as u64, &[]));
        }
        let cancelled_at = summary.engines.iter().any(|row| row.name == *name && row.held_at_end.is_none());
        if cancelled_at {
            findings.push(Finding::new("engine_gone", format!("{name} does not respond at the end"), 1, &[]));
        }
    }
}

fn refused(data: &RunData, findings: &mut Vec<Finding>, summary: &Summary) {
    let Some(group) = summary.refused.as_ref().filter(|group| group.stranded > 0) else { return };
    let (stranded, all) = (group.stranded, group.cancelled);
    let seconds = data.run.stranded_after_us as f64 / 1e6;
    let says = format!(
        "{stranded} of {all} requests that the decode engine refused stranded their blocks at the prefill engine for more than {seconds} s"
    );
    findings.push(Finding::new("refused_stranded", says, stranded, &[]));
}

/// Without event logs: blocks that were held while no request was open.
fn orphaned_blocks(data: &RunData, summary: &Summary, findings: &mut Vec<Finding>) {
    let held: f64 = summary.engines.iter().map(|engine| engine.idle_block_seconds).sum();
    let sizeless = summary.engines.iter().any(|engine| engine.blocks == 0);
    // As if one request in fifty had stranded one block for the limit.
    let chance = RARE * summary.cancelled as f64 * data.run.stranded_after_us as f64 / 1e6;
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
        findings.push(Finding::new("orphaned_blocks", says, held as u64, &[]));
    }
}

fn freed_twice(data: &RunData, summary: &Summary, findings: &mut Vec<Finding>) {
    let twice =
        data.timelines.iter().filter(|(_, timeline)| timeline.legs.iter().any(|leg| leg.freed.len() > 1));
    let tags: Vec<_> = twice.map(|(tag, _)| tag.as_str()).collect();
    if !tags.is_empty() {
        let says = format!("the blocks of {} requests were freed more than once", tags.len());
        findings.push(Finding::new("freed_twice", says, tags.len() as u64, &tags));
    }
    for engine in &summary.engines {
        let (name, pool) = (&engine.name, engine.blocks);
        if engine.too_many > 0 {
            let samples = engine.too_many;
            let says = format!(
                "{name} reported more blocks than the {pool} of its pool in {samples} samples: blocks were freed twice"
            );
            findings.push(Finding::new("freed_twice", says, samples, &[]));
        }
        if engine.too_few > 0 {
            let samples = engine.too_few;
            let says =
                format!("{name} reported fewer blocks than the {pool} of its pool in {samples} samples");
            findings.push(Finding::new("blocks_lost", says, samples, &[]));
        }
    }
}

fn uncancelled_slower(data: &RunData, summary: &Summary, findings: &mut Vec<Finding>) {
    let (Some(calm), Some(storm)) = (&summary.calm, &summary.storm) else { return };
    let rate = |of: &ServiceLevels| of.errors as f64 / of.requests.max(1) as f64;
    if storm.errors > 0 && rate(storm) > rate(calm) * MORE_ERRORS {
        let (errors, all) = (storm.errors, storm.requests);
        let says = format!("{errors} of {all} uncancelled requests of the storms failed");
        let failed = |call: &&CallRecord| {
            call.leaves.is_none()
                && call.outcome != "done"
                && data.segment(&call.segment).is_some_and(|segment| segment.what == SegmentKind::Storm)
        };
        let tags: Vec<_> = data.calls.iter().filter(failed).map(|call| call.tag.as_str()).collect();
        findings.push(Finding::new("uncancelled_failed", says, errors, &tags));
    }
    for measure in Measure::ALL {
        // The high percentile shows most. If noise hides it, the median may still show the effect.
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
                && data.segment(&call.segment).is_some_and(|segment| segment.what == SegmentKind::Storm)
                && uncancelled::of(measure, call).iter().any(|sample| *sample >= after)
        };
        let tags: Vec<_> = data.calls.iter().filter(harmed).map(|call| call.tag.as_str()).collect();
        findings.push(Finding::new("uncancelled_slowed", says, 1, &tags));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_texts_are_a_finding_only_beyond_chance() {
        // Computed with integers in Python: sums of products of binomial coefficients.
        for (others, calm, p) in [
            ((2, 206), (0, 194), 0.264_599),
            ((8, 206), (0, 194), 0.004_626_9),
            ((30, 200), (10, 200), 0.000_642_47),
            ((5, 10), (0, 0), 1.0),
            ((0, 10), (3, 10), 1.0),
        ] {
            let [others, calm] = [others, calm].map(|(wrong, compared)| WrongCount { wrong, compared });
            let chance = by_chance(others, calm);
            assert!((chance / p - 1.0).abs() < 0.01, "{others:?} {calm:?}: {chance}");
        }
    }
}
