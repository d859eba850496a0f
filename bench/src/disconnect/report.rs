//! Renders a summary: text for a terminal, and a self-contained HTML page.

mod page;
mod svg;
mod text;

use serde_json::{Value, json};

use super::analyse::dist::Dist;
use super::analyse::summary::{
    CancelGroup, PairedComparison, PlotData, SampledSummary, ServiceLevels, StormCancels, Summary,
};
use super::analyse::units::format_ms;
use super::plan::phase::{CancelKind, Phase};
use crate::common::stats::{Spread, rounded};

pub(crate) use page::page;
pub(crate) use svg::escaped;
pub(crate) use text::text;

/// A percentile, or a dash where nothing was measured.
pub(super) fn percentile(dist: &Dist, of: impl Fn(&Dist) -> f64) -> String {
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
    let (measure, calm, storm) = (measure.label(), format_ms(*calm_ms), format_ms(*storm_ms));
    let (median, rounds) = (over.median, over.runs.len());
    let verdict = if *slower { "a finding" } else { "no finding: within chance" };
    format!(
        "{measure} p{percentile} {median:.2} × ({calm} to {storm}; {rounds_above} of {rounds} rounds; {verdict})"
    )
}

/// How many requests of the storms were to be cancelled, and how many were in time.
fn storm_cancels(cancels: &StormCancels) -> String {
    let StormCancels { requests, drawn, in_time, share_in_time } = cancels;
    let [requests, drawn, in_time] = [requests, drawn, in_time].map(|number| count(*number));
    let percent = share_in_time * 100.0;
    format!(
        "Storms, all rounds: {drawn} of {requests} requests were selected for a cancel. {in_time} were cancelled before they completed ({percent:.1} % of all)."
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

/// Block-seconds from samples of metrics, with their error.
fn from_samples(sampled: &SampledSummary) -> String {
    let SampledSummary { held, unknown_engines, per_1000, per_1000_off_by } = sampled;
    let without = match unknown_engines {
        0 => String::new(),
        engines => format!(", without {engines} engines that cannot be sampled"),
    };
    let (per, per_off) = (decimals(*per_1000), decimals(*per_1000_off_by));
    let (total, total_off) = (decimals(held.block_seconds), decimals(held.off_by));
    let (looks, quiet, longest) = (count(held.looks), count(held.quiet_looks), held.longest_unseen_s);
    format!(
        "from samples{without}: {per} ± {per_off}, total {total} ± {total_off} ({looks} samples, {quiet} without open requests; longest interval between those {longest:.1} s)"
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
pub(super) fn count(value: u64) -> String {
    grouped(&value.to_string())
}

/// Digits with thousands separators.
pub(crate) fn grouped(digits: &str) -> String {
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
