//! What a run could not judge.

use super::{
    FaultRow, JUDGED_FEW, KindRow, Measure, NOT_RECEIVED_FEW, PhaseRow, SLOWER, Summary, TextComparison,
    UncancelledSummary, VanishedSummary, WorkRow,
};
use crate::disconnect::analyse::run_data::UnavailableKind;
use crate::disconnect::analyse::units::format_ms;

/// With fewer comparisons the other responses are unknown.
const TEXTS_FEW: u64 = 50;
/// Above this share of incomparable responses the others are not representative.
const TEXTS_UNSTEADY: f64 = 0.02;
/// Fewer cancels of one kind are not representative.
const KIND_FEW: u64 = 10;
/// If this many times as many cancels came too late, only the slowest requests were measured.
const KIND_LATE: u64 = 2;

impl Summary {
    /// What could not be judged, as text. Without it, a report without findings would claim too much.
    pub(crate) fn describe_unknown(&self) -> Vec<String> {
        [
            run_unknown(self),
            engines_unknown(self),
            texts_unknown(self),
            uncancelled_unknown(self),
            cancels_unknown(self),
            faults_unknown(self),
            vanished_unknown(self),
        ]
        .concat()
    }
}

/// The part of the run that is missing.
fn run_unknown(summary: &Summary) -> Vec<String> {
    let interrupted = summary.interrupted.then(|| "the run was broken off".to_owned());
    let failed = summary.failed.as_ref().map(|why| format!("the run ended early: {why}"));
    interrupted.into_iter().chain(failed).collect()
}

/// What engines did not report until the end of the run.
fn engines_unknown(summary: &Summary) -> Vec<String> {
    let mut unknown = Vec::new();
    if summary.engines.is_empty() {
        unknown.push(
            "blocks, leases and wasted work: no engine was observed (`--admin`, `--engine`)".to_owned(),
        );
    } else if !summary.exact {
        unknown
            .push("phases, times and blocks of single requests: the engines report metrics only".to_owned());
        unknown.push(
            "phases reply, gap and fetch: no client aims at them without event logs; blocks that stay there appear as orphaned blocks and expired leases"
                .to_owned(),
        );
    }
    for engine in summary.engines.iter().filter(|engine| !summary.exact && engine.sampled.is_none()) {
        let why = if engine.blocks == 0 {
            "does not report the size of its pool (`num_gpu_blocks` of `vllm:cache_config_info`); held blocks are a share of the pool"
        } else {
            "had a request or a client before its first token in every sample"
        };
        unknown.push(format!("orphaned block-seconds: {} {why}", engine.name));
    }
    let in_faults: u64 = summary.faults.iter().map(|fault| fault.expired).sum();
    if !summary.exact && in_faults > 0 {
        unknown.push(format!(
            "{in_faults} leases that expired in fault segments: engines with metrics only do not report their requests"
        ));
    }
    for engine in summary.engines.iter().filter(|engine| engine.excused_at_end > 0) {
        unknown.push(format!(
            "{} still holds {} at the end, of unexpired leases that a killed process had to release: a longer `--final-wait` shows their end",
            engine.name,
            engine.describe_held(engine.excused_at_end)
        ));
    }
    if summary.events_lost > 0 {
        unknown.push(format!("exact counts: {} engine events were lost", summary.events_lost));
    }
    unknown
}

/// Responses that could not be compared.
fn texts_unknown(summary: &Summary) -> Vec<String> {
    let TextComparison { compared, nondeterministic, unanswered, .. } = summary.texts;
    let mut unknown = Vec::new();
    if compared == 0 {
        unknown.push("responses: none could be compared".to_owned());
    } else if compared < TEXTS_FEW && summary.requests >= TEXTS_FEW {
        unknown.push(format!(
            "all responses: only {compared} of {} were compared within `--verify-seconds`",
            summary.requests
        ));
    }
    let all = compared + nondeterministic + unanswered;
    for (count, why) in
        [(nondeterministic, "different responses without load"), (unanswered, "no response without load")]
    {
        if count as f64 > TEXTS_UNSTEADY * all as f64 {
            unknown.push(format!("{count} of {all} responses: the same prompt has {why}"));
        }
    }
    let TextComparison { wrong, compared_in_parallel, wrong_in_parallel, .. } = summary.texts;
    if wrong > 0 && wrong_in_parallel > 0 && !summary.findings.iter().any(|found| found.name == "wrong_texts")
    {
        unknown.push(format!(
            "{wrong} of {compared} responses, which differ: {wrong_in_parallel} of {compared_in_parallel} also differ in parallel without cancels and faults, by batching or a defect under load"
        ));
    }
    unknown
}

/// What calm and storm do not show.
fn uncancelled_unknown(summary: &Summary) -> Vec<String> {
    let mut unknown = Vec::new();
    if summary.calm.is_none() || summary.storm.is_none() {
        return unknown;
    }
    let UncancelledSummary { requests, rounds, unpaired_rounds, numbers } = &summary.uncancelled;
    if !numbers.iter().any(|number| number.measure == Measure::Ttft) {
        unknown.push(format!(
            "time to first token: {requests} uncancelled requests in {rounds} storms are too few"
        ));
    }
    let (above, all) = (summary.uncancelled.above_target().count(), numbers.len());
    if above * 2 > all && !numbers.iter().any(|number| number.slower) {
        unknown.push(format!(
            "effect on uncancelled requests: {above} of {all} numbers are above {SLOWER} times the calm, none beyond the noise between calms"
        ));
    }
    if *unpaired_rounds > 0 {
        unknown.push(format!("{unpaired_rounds} rounds: calm and storm have different requests"));
    }
    unknown
}

/// Cancels that were too few or too late, by engine, kind and phase.
fn cancels_unknown(summary: &Summary) -> Vec<String> {
    let is_unjudged = |row: &&WorkRow| {
        let missing = row.completed_without_abort + row.continued_after_abort;
        summary.exact && row.at_work > 0 && row.judged < JUDGED_FEW && missing < NOT_RECEIVED_FEW
    };
    let aborts = summary.work.iter().filter(is_unjudged).map(|row| {
        format!(
            "aborts at {} engines: only {} of {} cancelled requests are judged, the others completed within {:.1} ms, which an abort takes",
            row.leg, row.judged, row.at_work, row.abort_delivery_ms
        )
    });
    let is_few = |row: &&KindRow| {
        let (left, late) = (row.group.cancelled, row.too_late);
        (left < KIND_FEW && late > left) || late > KIND_LATE * left
    };
    let kinds = summary.kinds.iter().filter(is_few).map(|row| {
        format!(
            "cancel by {}: only {} of {} were measured, the other requests completed before their cancel",
            row.kind.label(),
            row.group.cancelled,
            row.group.cancelled + row.too_late
        )
    });
    let is_missed = |row: &&PhaseRow| summary.exact && row.aimed > 0 && row.group.cancelled == 0;
    let phases = summary.phases.iter().filter(is_missed);
    let phases = phases.map(|row| format!("phase {}: no cancel was in it", row.phase.label()));
    aborts.chain(kinds).chain(phases).collect()
}

/// Faults without a request, and refusals that did not happen.
fn faults_unknown(summary: &Summary) -> Vec<String> {
    let mut unknown = Vec::new();
    for FaultRow { fault, met, missed, .. } in &summary.faults {
        // A fault that was not injected belongs to a run that ended early.
        match met.as_ref().map(|met| met.requests) {
            None => {}
            Some(0) => unknown.push(format!("effect of `{fault}` on requests: none was in flight")),
            Some(requests) => unknown
                .extend(missed.map(|missed| format!("`{fault}` met {missed}, with {requests} in flight"))),
        }
    }
    if summary.exact && summary.refused.as_ref().is_some_and(|refused| refused.cancelled == 0) {
        unknown.push("refused handoffs: the decode engine refused none".to_owned());
    }
    unknown
}

/// What could not be judged of vanished clients.
fn vanished_unknown(summary: &Summary) -> Vec<String> {
    let not_played = summary
        .not_played
        .iter()
        .map(|UnavailableKind { kind, why }| format!("cancel by {}: not possible here: {why}", kind.label()));
    let mut unknown: Vec<String> = not_played.collect();
    if let Some(VanishedSummary { noticed_within_ms, noticed_ms, by_itself_ms, group, .. }) =
        &summary.vanished
        && group.exact
        && noticed_ms.n == 0
        && group.stranded == 0
    {
        let longest = if by_itself_ms.n == 0 {
            "none of them had reached an engine".to_owned()
        } else {
            format!("the longest completed after {}", format_ms(by_itself_ms.max))
        };
        unknown.push(format!(
            "detection of vanished clients: of {} requests {longest}, and the limit is {} (`--vanish-noticed-ms`)",
            group.cancelled,
            format_ms(*noticed_within_ms)
        ));
    }
    for engine in summary.engines.iter().filter(|engine| engine.ghosts_at_end > 0) {
        unknown.push(format!(
            "{} still holds {} at the end for vanished clients, within the limit for their detection",
            engine.name,
            engine.describe_held(engine.ghosts_at_end)
        ));
    }
    unknown
}
