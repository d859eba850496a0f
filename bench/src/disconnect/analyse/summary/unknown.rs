//! What a run could not judge.

use super::{
    EngineRow, FaultRow, JUDGED_FEW, KindRow, Measure, NOT_RECEIVED_FEW, SLOWER, Summary, TextComparison,
    UncancelledSummary, VanishedSummary,
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
        let mut unknown = Vec::new();
        let mut add = |there: bool, what: String| unknown.extend(there.then_some(what));
        add(self.interrupted, "the run was broken off".into());
        let failed = self.failed.as_deref().unwrap_or_default();
        add(self.failed.is_some(), format!("the run ended early: {failed}"));
        add(
            self.engines.is_empty(),
            "blocks, leases and wasted work: no engine was observed (`--admin`, `--engine`)".into(),
        );
        add(
            !self.exact && !self.engines.is_empty(),
            "phases, times and blocks of single requests: the engines report metrics only".into(),
        );
        for EngineRow { name, .. } in
            self.engines.iter().filter(|engine| !self.exact && engine.sampled.is_none())
        {
            let sizeless = self.engines.iter().any(|engine| engine.name == *name && engine.blocks == 0);
            let why = if sizeless {
                "does not report the size of its pool (`num_gpu_blocks` of `vllm:cache_config_info`); held blocks are a share of the pool"
            } else {
                "had a request or a client before its first token in every sample"
            };
            add(true, format!("orphaned block-seconds: {name} {why}"));
        }
        let in_parts: u64 = self.faults.iter().map(|fault| fault.expired).sum();
        add(
            !self.exact && in_parts > 0,
            format!(
                "{in_parts} leases that expired in fault segments: engines with metrics only do not report their requests"
            ),
        );
        for engine in self.engines.iter().filter(|engine| engine.excused_at_end > 0) {
            let EngineRow { name, excused_at_end, .. } = engine;
            let what = engine.describe_held(*excused_at_end);
            add(
                true,
                format!(
                    "{name} still holds {what} at the end, of unexpired leases that a killed process had to release: a longer `--final-wait` shows their end"
                ),
            );
        }
        add(self.events_lost > 0, format!("exact counts: {} engine events were lost", self.events_lost));
        add(self.texts.compared == 0, "responses: none could be compared".into());
        let few = self.texts.compared > 0 && self.texts.compared < TEXTS_FEW && self.requests >= TEXTS_FEW;
        add(
            few,
            format!(
                "all responses: only {} of {} were compared within `--verify-seconds`",
                self.texts.compared, self.requests
            ),
        );
        let TextComparison { compared, nondeterministic, unanswered, .. } = self.texts;
        for (count, why) in
            [(nondeterministic, "different responses without load"), (unanswered, "no response without load")]
        {
            let all = compared + nondeterministic + unanswered;
            add(
                count as f64 > TEXTS_UNSTEADY * all as f64,
                format!("{count} of {all} responses: the same prompt has {why}"),
            );
        }
        if self.calm.is_some() && self.storm.is_some() {
            let UncancelledSummary { requests, rounds, unpaired_rounds, numbers } = &self.uncancelled;
            add(
                !numbers.iter().any(|number| number.measure == Measure::Ttft),
                format!(
                    "time to first token: {requests} uncancelled requests in {rounds} storms are too few"
                ),
            );
            let (above, all) = (self.uncancelled.above_target().count(), numbers.len());
            add(
                above * 2 > all && !numbers.iter().any(|number| number.slower),
                format!(
                    "effect on uncancelled requests: {above} of {all} numbers are above {SLOWER} times the calm, none beyond the noise between calms"
                ),
            );
            add(
                *unpaired_rounds > 0,
                format!("{unpaired_rounds} rounds: calm and storm have different requests"),
            );
        }
        for row in self.work.iter().filter(|row| row.at_work > 0 && row.judged < JUDGED_FEW) {
            add(
                self.exact && row.completed_without_abort + row.continued_after_abort < NOT_RECEIVED_FEW,
                format!(
                    "aborts at {} engines: only {} of {} cancelled requests are judged, the others completed within {:.1} ms, which an abort takes",
                    row.leg, row.judged, row.at_work, row.abort_delivery_ms
                ),
            );
        }
        let few = |row: &&KindRow| {
            let (left, late) = (row.group.cancelled, row.too_late);
            (left < KIND_FEW && late > left) || late > KIND_LATE * left
        };
        for row in self.kinds.iter().filter(few) {
            add(
                true,
                format!(
                    "cancel by {}: only {} of {} were measured, the other requests completed before their cancel",
                    row.kind.label(),
                    row.group.cancelled,
                    row.group.cancelled + row.too_late
                ),
            );
        }
        for phase in &self.phases {
            let missed = phase.aimed > 0 && phase.group.cancelled == 0 && self.exact;
            add(missed, format!("phase {}: no cancel was in it", phase.phase.label()));
        }
        for FaultRow { fault, met, missed, .. } in &self.faults {
            // A fault that was not injected belongs to a run that ended early.
            let Some(met) = met else { continue };
            add(met.requests == 0, format!("effect of `{fault}` on requests: none was in flight"));
            let missed = missed.filter(|_| met.requests > 0);
            add(
                missed.is_some(),
                format!("`{fault}` met {}, with {} in flight", missed.unwrap_or_default(), met.requests),
            );
        }
        add(
            self.refused.as_ref().is_some_and(|refused| refused.cancelled == 0) && self.exact,
            "refused handoffs: the decode engine refused none".into(),
        );
        unknown.extend(vanished_unknown(self));
        unknown
    }
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
