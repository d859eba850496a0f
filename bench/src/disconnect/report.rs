//! Renders a summary: text for a terminal, and a self-contained HTML page.

mod page;
mod svg;

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::analyse::dist::Dist;
use super::analyse::summary::{
    CancelGroup, FaultRow, PairedComparison, PlotData, SLOWER, SampledSummary, ServiceLevels, StormCancels,
    Summary, VanishedSummary,
};
use super::analyse::units::format_ms;
use super::plan::phase::{CancelKind, Phase};
use crate::common::stats::{Spread, rounded};

pub(crate) use page::page;
pub(crate) use svg::escaped;

/// A percentile, or a dash where nothing was measured.
fn percentile(dist: &Dist, of: impl Fn(&Dist) -> f64) -> String {
    if dist.n == 0 { "–".into() } else { format_ms(of(dist)) }
}

/// The number of durations that did not end.
fn never(times: &[f64]) -> u64 {
    times.iter().filter(|ms| ms.is_infinite()).count() as u64
}

/// A number of a group, or a dash without event logs.
fn known(group: &CancelGroup, number: impl FnOnce() -> String) -> String {
    if group.exact { number() } else { "–".into() }
}

/// How many completed without an abort, of those that are judged.
fn ran_on(group: &CancelGroup) -> String {
    let judged = group.ran_on.filter(|ran_on| group.exact && ran_on.judged > 0);
    judged.map_or_else(
        || "–".into(),
        |ran_on| format!("{} of {}", count(ran_on.completed_without_abort), count(ran_on.judged)),
    )
}

/// Rows of uncancelled requests: the calm, its paired requests, and the storm.
fn uncancelled_text(summary: &Summary) -> Vec<(&'static str, &ServiceLevels)> {
    let rows =
        [("calm", &summary.calm), ("calm, paired requests", &summary.calm_paired), ("storm", &summary.storm)];
    rows.into_iter().filter_map(|(name, service)| Some((name, service.as_ref()?))).collect()
}

/// The hint for a report without a table of other gateways.
const NOT_COMPARED: &str = "No comparison with other gateways: `baton bench compare --json > FILE` measures them, and `--compare-with FILE` adds them.";

/// A number of uncancelled requests above the target, reported as a finding or not.
fn above(number: &PairedComparison) -> String {
    let PairedComparison { measure, percentile, calm_ms, storm_ms, over, rounds_above, slower, .. } = number;
    format!(
        "{} p{percentile} {:.2} × ({} to {}; {rounds_above} of {} rounds; {})",
        measure.label(),
        over.median,
        format_ms(*calm_ms),
        format_ms(*storm_ms),
        over.runs.len(),
        if *slower { "a finding" } else { "no finding: within chance" },
    )
}

/// How many requests of the storms were to be cancelled, and how many were in time.
fn storm_cancels(cancels: &StormCancels) -> String {
    let StormCancels { requests, drawn, in_time, share_in_time } = cancels;
    format!(
        "Storms, all rounds: {} of {} requests were selected for a cancel. {} were cancelled before they completed ({:.1} % of all).",
        count(*drawn),
        count(*requests),
        count(*in_time),
        share_in_time * 100.0
    )
}

/// The share of events that arrived in one read of the socket.
fn within_one_read(summary: &Summary) -> Option<String> {
    let share = |service: &Option<ServiceLevels>| {
        let service = service.as_ref().filter(|service| service.itl_ms.n > 0)?;
        Some(format!("{:.0} %", service.itl_within_one_read * 100.0))
    };
    let (calm, storm) = (share(&summary.calm)?, share(&summary.storm)?);
    Some(format!(
        "ITL is the time between events as the client read them. {calm} of the calm events and {storm} of the storm events arrived in the same read as their predecessor and count as 0."
    ))
}

/// The data of the plots as JSON.
pub(crate) fn series(summary: &Summary) -> Value {
    let pairs = |points: &[(f64, f64)]| -> Value {
        points.iter().map(|(across, up)| json!([rounded(*across), rounded(*up)])).collect()
    };
    let shares = |sorted: &[f64]| pairs(&svg::cumulative(sorted));
    let both = |[calm, storm]: &[Vec<f64>; 2]| json!({"calm": shares(calm), "storm": shares(storm)});
    let PlotData { time_to_free, stranded, stranded_in_faults, vanished, pools, segments, ttft, itl } =
        &summary.series;
    let part = |(name, from, to): &(String, f64, f64)| json!({"name": name, "from_s": rounded(*from), "to_s": rounded(*to)});
    let of_phase = |(phase, times): &(Phase, Vec<f64>)| json!({"phase": phase, "n": times.len(), "never": never(times), "ms_percent": shares(times)});
    let pool = |(name, points): &(String, Vec<(f64, f64)>)| json!({"engine": name, "s_share": pairs(points)});
    let mut series = json!({
        "segments": segments.iter().map(part).collect::<Vec<_>>(),
        "time_to_free": time_to_free.iter().map(of_phase).collect::<Vec<_>>(),
        "stranded_s_blocks": pairs(stranded),
        "stranded_in_fault_segments_s_blocks": pairs(stranded_in_faults),
        "ttft_ms_percent": both(ttft),
        "itl_ms_percent": both(itl),
        "pools": pools.iter().map(pool).collect::<Vec<_>>(),
    });
    if !vanished.is_empty() {
        series["held_for_vanished_s_blocks"] = pairs(vanished);
    }
    series
}

/// The rounds of a median, as text.
fn rounds(spread: &Spread) -> String {
    match spread.runs.len() {
        1 => "one round".into(),
        many => format!("median of {many} rounds, {:.2} to {:.2}", spread.min, spread.max),
    }
}

/// Leases that expired and are no finding.
fn excused(summary: &Summary) -> Option<String> {
    let leases = summary.excused_leases;
    (leases > 0).then(|| {
        let (s, are) = if leases == 1 { ("", "is") } else { ("s", "are") };
        format!("{leases} expired lease{s} {are} excused: the process that had to release or serve them was killed")
    })
}

/// Whether a number of uncancelled requests is a finding, and how far it is from that.
fn slower(number: &PairedComparison) -> String {
    match number.named_by_ms {
        Some(more) => format!("a finding from {} more", format_ms(more)),
        None if number.slower => "SLOWER".into(),
        None => "slower, but in less than three of four rounds".into(),
    }
}

/// Block-seconds from samples of metrics, with their error.
fn from_samples(sampled: &SampledSummary) -> String {
    let SampledSummary { held, unknown_engines, per_1000, per_1000_off_by } = sampled;
    let without = match unknown_engines {
        0 => String::new(),
        engines => format!(", without {engines} engines that cannot be sampled"),
    };
    format!(
        "from samples{without}: {} ± {}, total {} ± {} ({} samples, {} without open requests; longest interval between those {:.1} s)",
        decimals(*per_1000),
        decimals(*per_1000_off_by),
        decimals(held.block_seconds),
        decimals(held.off_by),
        count(held.looks),
        count(held.quiet_looks),
        held.longest_unseen_s
    )
}

/// With two decimals and thousands separators; small values with three decimals.
fn decimals(value: f64) -> String {
    match value {
        value if value < 10.0 => format!("{value:.3}"),
        value => {
            let hundredths = (value * 100.0).round() as u64;
            format!("{}.{:02}", count(hundredths / 100), hundredths % 100)
        }
    }
}

/// A count with thousands separators.
fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// How long clients stall, and how many of them the deployment dropped.
fn stalls(summary: &Summary) -> Option<String> {
    let row = summary.kinds.iter().find(|row| row.kind == CancelKind::Stall)?;
    let rate = summary.load.as_ref()?.rate;
    let asked = summary.run.options["stall_ms"].as_f64().unwrap_or(rate.stall_ms);
    let less = if rate.stall_ms < asked {
        format!(" (of {asked:.0} ms: context or pools have no room for a longer response)")
    } else {
        String::new()
    };
    let dropped_by_server = match row.dropped_by_server {
        0 => String::new(),
        clients => format!(". The deployment dropped {} of them before the reset", count(clients)),
    };
    Some(format!(
        "A stalling client stops reading for {:.0} ms{less} in a response of {} tokens{dropped_by_server}.",
        rate.stall_ms,
        count(u64::from(rate.stall_max_tokens))
    ))
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

/// The text for a terminal.
pub(crate) fn text(summary: &Summary) -> String {
    let mut out = String::new();
    let mut line = |text: String| {
        out.push_str(text.trim_end());
        out.push('\n');
    };
    let run = &summary.run;
    line(format!(
        "{} requests to {} ({}), {} cancelled",
        count(summary.requests),
        run.model,
        run.target,
        count(summary.cancelled)
    ));
    let nice = run.nice.map_or_else(String::new, |nice| format!(", at nice {nice}"));
    line(format!("by `{}`{nice}", run.command));
    if let Some(load) = &summary.load {
        line(format!("{load}"));
    }
    if !summary.exact {
        line(
            "Not every engine has an event log. Phases are the intended ones, and blocks come from metrics."
                .into(),
        );
    }
    line(String::new());
    line(format!(
        "{:<18} {:>9} {:>9} {:>9} {:>16} {:>10} {:>10} {:>16} {:>10} {:>14}",
        "cancelled in",
        "cancelled",
        "stranded",
        "no abort",
        "ran to the end",
        "abort p50",
        "p99",
        "time to free p50",
        "p99",
        "block-s/1000"
    ));
    let mut row = |name: &str, group: &CancelGroup| {
        line(format!(
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
        ));
    };
    for phase in &summary.phases {
        row(phase.phase.label(), &phase.group);
    }
    row("all", &summary.all);
    if let Some(refused) = &summary.refused {
        row("refused", refused);
    }
    if let Some(vanished) = &summary.vanished {
        row("vanished", &vanished.group);
    }
    let mut line = |text: String| {
        out.push_str(text.trim_end());
        out.push('\n');
    };
    if let Some(sampled) = &summary.sampled {
        line(format!("block-seconds per 1,000 cancelled requests, {}", from_samples(sampled)));
    }
    line(String::new());
    if summary.calm.is_some() && summary.storm.is_some() {
        line(format!(
            "{:<24} {:>8} {:>7} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}",
            "uncancelled requests",
            "requests",
            "errors",
            "TTFT p50",
            "TTFT p99",
            "ITL p50",
            "ITL p99",
            "TPOT p50",
            "TPOT p99"
        ));
        for (name, service) in uncancelled_text(summary) {
            line(format!(
                "{name:<24} {:>8} {:>7} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}",
                service.requests,
                service.errors,
                percentile(&service.ttft_ms, |dist| dist.p50),
                percentile(&service.ttft_ms, |dist| dist.p99),
                percentile(&service.itl_ms, |dist| dist.p50),
                percentile(&service.itl_ms, |dist| dist.p99),
                percentile(&service.tpot_ms, |dist| dist.p50),
                percentile(&service.tpot_ms, |dist| dist.p99),
            ));
        }
        for note in [summary.storm_cancels.as_ref().map(storm_cancels), within_one_read(summary)] {
            note.into_iter().for_each(&mut line);
        }
        if let Some(spread) = summary.judged_ttft_ratio() {
            let over = rounds(spread);
            line(format!(
                "TTFT p99, storm over the paired requests of the calm: {:.2} ({over})",
                spread.median
            ));
        }
        if !summary.uncancelled.numbers.is_empty() {
            let above: Vec<_> = summary.uncancelled.above_target().map(above).collect();
            let above = if above.is_empty() { "nothing".to_owned() } else { above.join("; ") };
            line(format!("uncancelled requests, above {SLOWER} times the calm in the median round: {above}"));
        }
        for number in &summary.uncancelled.numbers {
            let PairedComparison {
                measure, percentile, round, calm_ms, storm_ms, over, by_ms, noise_ms, ..
            } = number;
            line(format!(
                "{} p{percentile}: calm {}, storm {} in round {round}, {by_ms:+.1} ms, {:.2} times: {} (noise between calms {})",
                measure.label(),
                format_ms(*calm_ms),
                format_ms(*storm_ms),
                over.median,
                slower(number),
                format_ms(*noise_ms),
            ));
        }
        line(String::new());
    }
    for row in &summary.kinds {
        if let Some(retries) = row.retries.describe() {
            line(format!("{}: {retries}", row.kind.label()));
        }
    }
    for note in
        [stalls(summary), summary.vanished.as_ref().map(VanishedSummary::describe)].into_iter().flatten()
    {
        line(note);
    }
    for fault in &summary.faults {
        line(of_fault(fault));
    }
    let texts = &summary.texts;
    line(format!(
        "texts: {} of {} compared responses are wrong; {} more cannot be compared because their prompt has several responses without load",
        texts.wrong, texts.compared, texts.nondeterministic
    ));
    if summary.compared_with.is_none() {
        line(NOT_COMPARED.into());
    }
    for unknown in summary.describe_unknown() {
        line(format!("not judged: {unknown}"));
    }
    if let Some(excused) = excused(summary) {
        line(excused);
    }
    if summary.findings.is_empty() && !summary.describe_unknown().is_empty() {
        line("\nNo findings in what was judged.".into());
    } else if summary.findings.is_empty() {
        line(
            "\nNo findings: no block was stranded by a cancel, freed twice or read after it was freed."
                .into(),
        );
    } else {
        let mut found = String::from("\nFindings:");
        for finding in &summary.findings {
            let _ = write!(found, "\n  {}: {}", finding.name, finding.says);
        }
        line(found);
    }
    out
}
