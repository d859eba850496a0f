//! The summary as text for a terminal.

use std::fmt::Write as _;

use super::super::analyse::summary::{
    CancelGroup, FaultRow, Finding, PairedComparison, SLOWER, ServiceLevels, Summary, VanishedSummary,
};
use super::super::analyse::units::format_ms;
use super::{
    NOT_COMPARED, above, count, decimals, excused, from_samples, known, percentile, ran_on, rounds, stalls,
    storm_cancels, uncancelled_text, within_one_read,
};

/// The text for a terminal.
pub(crate) fn text(summary: &Summary) -> String {
    let parts = [
        heading(summary),
        cancelled(summary),
        uncancelled(summary),
        notes(summary),
        unknown(summary),
        vec![findings(summary)],
    ];
    parts.iter().flatten().map(|line| format!("{}\n", line.trim_end())).collect()
}

fn heading(summary: &Summary) -> Vec<String> {
    let run = &summary.run;
    let nice = run.nice.map_or_else(String::new, |nice| format!(", at nice {nice}"));
    let mut lines = vec![
        format!(
            "{} requests to {} ({}), {} cancelled",
            count(summary.requests),
            run.model,
            run.target,
            count(summary.cancelled)
        ),
        format!("by `{}`{nice}", run.command),
    ];
    lines.extend(summary.load.as_ref().map(ToString::to_string));
    if !summary.exact {
        lines.push(
            "Not every engine has an event log. Phases are the intended ones, and blocks come from metrics."
                .into(),
        );
    }
    lines.push(String::new());
    lines
}

/// The table of cancelled requests.
fn cancelled(summary: &Summary) -> Vec<String> {
    let mut lines = vec![
        "cancelled in       cancelled  stranded  no abort   ran to the end  abort p50        p99 time to free p50        p99   block-s/1000"
            .to_owned(),
    ];
    let row = |name: &str, group: &CancelGroup| {
        format!(
            "{name:<18} {:>9} {:>9} {:>9} {:>16} {:>10} {:>10} {:>16} {:>10} {:>14}",
            group.cancelled,
            known(group, || count(group.stranded)),
            known(group, || count(group.abort_not_received)),
            ran_on(group),
            percentile(&group.abort_ms, |dist| dist.p50),
            percentile(&group.abort_ms, |dist| dist.p99),
            percentile(&group.time_to_free_ms, |dist| dist.p50),
            percentile(&group.time_to_free_ms, |dist| dist.p99),
            match &summary.sampled {
                Some(sampled) if name == "all" => format!("~{}", decimals(sampled.per_1000)),
                _ => known(group, || decimals(group.block_seconds_per_1000)),
            },
        )
    };
    lines.extend(summary.phases.iter().map(|phase| row(phase.phase.label(), &phase.group)));
    lines.push(row("all", &summary.all));
    lines.extend(summary.refused.as_ref().map(|refused| row("refused", refused)));
    lines.extend(summary.vanished.as_ref().map(|vanished| row("vanished", &vanished.group)));
    if let Some(sampled) = &summary.sampled {
        lines.push(format!("block-seconds per 1,000 cancelled requests, {}", from_samples(sampled)));
    }
    lines.push(String::new());
    lines
}

/// The table of uncancelled requests, and the comparison of storm and calm.
fn uncancelled(summary: &Summary) -> Vec<String> {
    if summary.calm.is_none() || summary.storm.is_none() {
        return Vec::new();
    }
    let mut lines = vec![
        "uncancelled requests     requests  errors   TTFT p50   TTFT p99    ITL p50    ITL p99   TPOT p50   TPOT p99"
            .to_owned(),
    ];
    let row = |(name, service): (&str, &ServiceLevels)| {
        format!(
            "{name:<24} {:>8} {:>7} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}",
            service.requests,
            service.errors,
            percentile(&service.ttft_ms, |dist| dist.p50),
            percentile(&service.ttft_ms, |dist| dist.p99),
            percentile(&service.itl_ms, |dist| dist.p50),
            percentile(&service.itl_ms, |dist| dist.p99),
            percentile(&service.tpot_ms, |dist| dist.p50),
            percentile(&service.tpot_ms, |dist| dist.p99),
        )
    };
    lines.extend(uncancelled_text(summary).into_iter().map(row));
    lines.extend(summary.storm_cancels.as_ref().map(storm_cancels));
    lines.extend(within_one_read(summary));
    lines.extend(summary.judged_ttft_ratio().map(|spread| {
        format!(
            "TTFT p99, storm over the paired requests of the calm: {:.2} ({})",
            spread.median,
            rounds(spread)
        )
    }));
    let numbers = &summary.uncancelled.numbers;
    if !numbers.is_empty() {
        let above: Vec<_> = summary.uncancelled.above_target().map(above).collect();
        let above = if above.is_empty() { "nothing".to_owned() } else { above.join("; ") };
        lines.push(format!(
            "uncancelled requests, above {SLOWER} times the calm in the median round: {above}"
        ));
    }
    lines.extend(numbers.iter().map(comparison));
    lines.push(String::new());
    lines
}

/// One number of uncancelled requests in calm and storm.
fn comparison(number: &PairedComparison) -> String {
    let PairedComparison { measure, percentile, round, calm_ms, storm_ms, over, by_ms, noise_ms, .. } =
        number;
    let (measure, median, verdict) = (measure.label(), over.median, slower(number));
    let [calm, storm, noise] = [calm_ms, storm_ms, noise_ms].map(|ms| format_ms(*ms));
    format!(
        "{measure} p{percentile}: calm {calm}, storm {storm} in round {round}, {by_ms:+.1} ms, {median:.2} times: {verdict} (noise between calms {noise})"
    )
}

/// Whether a number of uncancelled requests is a finding, and how far it is from that.
fn slower(number: &PairedComparison) -> String {
    match number.named_by_ms {
        Some(more) => format!("a finding from {} more", format_ms(more)),
        None if number.slower => "SLOWER".into(),
        None => "slower, but in less than three of four rounds".into(),
    }
}

/// Retries, stalled and vanished clients, faults and texts.
fn notes(summary: &Summary) -> Vec<String> {
    let mut lines = Vec::new();
    for row in &summary.kinds {
        lines.extend(row.retries.describe().map(|retries| format!("{}: {retries}", row.kind.label())));
    }
    lines.extend(stalls(summary));
    lines.extend(summary.vanished.as_ref().map(VanishedSummary::describe));
    lines.extend(summary.faults.iter().map(of_fault));
    let texts = &summary.texts;
    lines.push(format!(
        "texts: {} of {} compared responses are wrong; {} more cannot be compared because their prompt has several responses without load",
        texts.wrong, texts.compared, texts.nondeterministic
    ));
    if texts.compared_in_parallel > 0 {
        lines.push(format!(
            "texts in parallel, without cancels and faults: {} of {} differ",
            texts.wrong_in_parallel, texts.compared_in_parallel
        ));
    }
    if summary.compared_with.is_none() {
        lines.push(NOT_COMPARED.into());
    }
    lines
}

/// The lines of one fault.
fn of_fault(fault: &FaultRow) -> String {
    let FaultRow { stayed, cancelled: left, .. } = fault;
    let mut out = format!("{}: ", fault.fault);
    let met = fault.met.as_ref();
    let _ = match met {
        None => write!(out, "not injected"),
        Some(met) if met.phases.is_empty() => write!(out, "{} in flight", met.requests),
        Some(met) => write!(out, "{} in flight ({})", met.requests, met.by_phase()),
    };
    if met.is_some_and(|met| met.requests > 0) {
        let (stayed, failed) = (fault.stayed_in_flight, fault.failed_in_flight);
        let _ = write!(out, ", {stayed} of them uncancelled, {failed} of those failed");
    }
    let _ = write!(
        out,
        "\n  uncancelled: {} of {} requests failed, {} of them after the recovery; E2E p50 {}, p99 {}, max {}",
        stayed.errors,
        stayed.requests,
        fault.errors_after,
        percentile(&stayed.e2e_ms, |dist| dist.p50),
        percentile(&stayed.e2e_ms, |dist| dist.p99),
        percentile(&stayed.e2e_ms, |dist| dist.max),
    );
    let _ = write!(
        out,
        "\n  cancelled: {}, {} stranded; time to free p50 {}, max {}; all blocks free after {}",
        left.cancelled,
        known(left, || count(left.stranded)),
        percentile(&left.time_to_free_ms, |dist| dist.p50),
        percentile(&left.time_to_free_ms, |dist| dist.max),
        fault.all_free_ms.map_or_else(|| "not within its segment".into(), format_ms),
    );
    if let Some(retries) = fault.retries.describe() {
        let _ = write!(out, "\n  {retries}");
    }
    out
}

/// What was not judged or is excused.
fn unknown(summary: &Summary) -> Vec<String> {
    let unknown = summary.describe_unknown().into_iter().map(|what| format!("not judged: {what}"));
    unknown.chain(excused(summary)).collect()
}

fn findings(summary: &Summary) -> String {
    if summary.findings.is_empty() && !summary.describe_unknown().is_empty() {
        return "\nNo findings in what was judged.".into();
    }
    if summary.findings.is_empty() {
        return "\nNo findings: no block was stranded by a cancel, freed twice or read after it was freed."
            .into();
    }
    let finding = |finding: &Finding| format!("\n  {}: {}", finding.name, finding.says);
    format!("\nFindings:{}", summary.findings.iter().map(finding).collect::<String>())
}
