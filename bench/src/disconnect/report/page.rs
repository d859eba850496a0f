//! The report as one HTML page without external resources, for light and dark screens, phones and print.

mod compared_with;
mod words;

use std::fmt::Write as _;

use super::super::analyse::dist::Dist;
use super::super::analyse::summary::{
    CancelGroup, FaultRow, Measure, PlotData, SLOWER, ServiceLevels, Summary, TextComparison, VanishedSummary,
};
use super::super::analyse::units::format_ms;
use super::svg::{Axis, AxisScale, Curve, Plot, Span, cumulative, escaped};
use super::{
    above, count, decimals, excused, from_samples, known, never, percentile, ran_on, rounds, storm_cancels,
    uncancelled_text, within_one_read,
};

const STYLE: &str = "
:root{color-scheme:light dark;--ink:#1a1d21;--soft:#5d6670;--line:#d8dde3;--paper:#fff;--panel:#f5f7f9;--good:#12703a;--bad:#b3261e;
--c0:#1f6feb;--c1:#d1570c;--c2:#12803c;--c3:#a626a4;--c4:#0b7a83;--c5:#8a6d00;--c6:#6b7280;--shade:#1a1d2140;--band:#eef2f6;--other:#f7f9fb}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#9aa4af;--line:#333b44;--paper:#14171a;--panel:#1c2126;--good:#4cc38a;--bad:#ff8379;
--c0:#6ea8fe;--c1:#ff9d57;--c2:#57c785;--c3:#d58bd4;--c4:#4fc3cd;--c5:#d9b84a;--c6:#a0a8b2;--shade:#000c;--band:#1d2329;--other:#181d22}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1.2rem 1rem 3rem;font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
h1{font-size:1.5rem;line-height:1.25;margin:.2rem 0 .3rem}h2{font-size:1.15rem;margin:2.2rem 0 .4rem}p{margin:.4rem 0}
.soft,figcaption,.note{color:var(--soft);font-size:.875rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(13rem,1fr));gap:.6rem;margin:1rem 0}
.tile{background:var(--panel);border:1px solid var(--line);border-radius:.5rem;padding:.6rem .75rem}
.tile b{display:block;font-size:1.45rem;line-height:1.2;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:.8125rem;line-height:1.3;display:block}
.verdict{border-left:.3rem solid var(--good);background:var(--panel);padding:.6rem .9rem;border-radius:.25rem}
.verdict.found{border-color:var(--bad)}.verdict.unknown{border-color:var(--c5);margin-bottom:.6rem}.good{color:var(--good)}.bad{color:var(--bad);font-weight:600}
.scroll{overflow-x:auto;background:linear-gradient(to right,var(--paper) 40%,transparent) 0 0/3rem 100% no-repeat local,linear-gradient(to left,var(--paper) 40%,transparent) 100% 0/3rem 100% no-repeat local,linear-gradient(to left,var(--shade),transparent) 100% 0/1rem 100% no-repeat scroll}
.scroll td:first-child,.scroll th:first-child{position:sticky;left:0;background:var(--paper);border-right:1px solid var(--line)}
.numbers td{white-space:normal}.numbers td:last-child{max-width:32rem}
table{border-collapse:collapse;width:100%;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .5rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}th{white-space:normal;vertical-align:bottom}td small{color:var(--soft)}th{color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left}
figure{margin:.6rem 0 1rem}figure svg{width:100%;height:auto;display:block}figcaption svg{display:inline;width:28px;height:8px;margin-right:.35rem;vertical-align:middle}
.key{display:inline-block;margin:0 1rem .1rem 0;white-space:nowrap}.parts strong{color:var(--ink)}.parts small{font-size:.75rem}
.grid{stroke:var(--line);stroke-width:.7}.tick,.axis,.part{fill:var(--soft);font:11px system-ui,sans-serif}.part{text-anchor:middle;font-weight:600;fill:var(--ink)}
.band{fill:var(--band)}.band.other{fill:var(--other)}.curve{fill:none;stroke-width:1.8;stroke-linejoin:round;vector-effect:non-scaling-stroke}
.c0{stroke:var(--c0)}.c1{stroke:var(--c1)}.c2{stroke:var(--c2)}.c3{stroke:var(--c3)}.c4{stroke:var(--c4)}.c5{stroke:var(--c5)}.c6{stroke:var(--c6)}
a{color:inherit}code,pre{font:.8125rem/1.45 ui-monospace,monospace;overflow-wrap:anywhere;white-space:pre-wrap}dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;font-size:.875rem}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}li{margin:.25rem 0}
@media(max-width:34rem){.scroll td:first-child,.scroll th:first-child{min-width:6rem;max-width:9rem;white-space:normal}.tiles{grid-template-columns:1fr 1fr}dl{grid-template-columns:1fr}dd{margin-bottom:.4rem}.tick,.axis,.part{font-size:17px}.across{transform:translateY(4px)}}
@media screen and (min-width:60rem){.tick,.axis,.part{font-size:8.5px}}
@media print{@page{margin:12mm}body{max-width:none;padding:0;font-size:11pt}.scroll{overflow:visible;background:none}.scroll td:first-child,.scroll th:first-child{position:static;background:none;border-right:0}table{font-size:6.5pt}th,td{padding:.1rem .15rem}td:first-child,td small{white-space:normal}td small{display:block}.band{print-color-adjust:exact;-webkit-print-color-adjust:exact}.curve{stroke-width:1.3}.tile,.verdict{break-inside:avoid}figure,table{break-inside:avoid}h2{break-after:avoid}}
";

/// The title of the page.
const TITLE: &str = "What cancelled requests cost this deployment";

/// The page.
pub(crate) fn page(summary: &Summary) -> String {
    let mut out = String::from(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"><title>",
    );
    out.push_str(TITLE);
    out.push_str("</title><style>");
    out.push_str(STYLE);
    out.push_str("</style></head><body>");
    head(summary, &mut out);
    tiles(summary, &mut out);
    verdict(summary, &mut out);
    // The comparison with other gateways comes first, if there is one.
    if summary.compared_with.is_some() {
        compared_with::draw(summary, &mut out);
    }
    numbers(summary, &mut out);
    by_phase(summary, &mut out);
    stranded(summary, &mut out);
    uncancelled(summary, &mut out);
    pools(summary, &mut out);
    by_kind(summary, &mut out);
    faults(summary, &mut out);
    if summary.compared_with.is_none() {
        compared_with::draw(summary, &mut out);
    }
    words::draw(summary, &mut out);
    out.push_str("</body></html>\n");
    out
}

fn head(summary: &Summary, out: &mut String) {
    let run = &summary.run;
    let _ = write!(
        out,
        "<p class=\"soft\">Baton · disconnect benchmark · {}</p><h1>{TITLE}</h1><p>{} requests to <b>{}</b> ({}); {} were cancelled by their clients.</p>",
        escaped(&run.date),
        count(summary.requests),
        escaped(&run.model),
        escaped(&run.target),
        count(summary.cancelled),
    );
    if let Some(load) = &summary.load {
        let _ = write!(out, "<p class=\"note\">Load: {}.</p>", escaped(&load.to_string()));
    }
    if !summary.exact {
        out.push_str("<p class=\"note\">Not every engine has an event log. Phases are the intended ones, and blocks come from metrics.</p>");
    }
}

fn tile(out: &mut String, value: &str, class: &str, what: &str) {
    let _ = write!(
        out,
        "<div class=\"tile\"><b class=\"{class}\">{}</b><span>{}</span></div>",
        escaped(value),
        escaped(what)
    );
}

/// At most four: stranded blocks, time to free, uncancelled requests, wrong responses.
fn tiles(summary: &Summary, out: &mut String) {
    out.push_str("<div class=\"tiles\">");
    let all = &summary.all;
    if summary.exact {
        let class = if all.stranded == 0 { "good" } else { "bad" };
        let seconds = summary.run.stranded_after_us as f64 / 1e6;
        let stranded = format!("{} of {}", count(all.stranded), count(all.time_to_free_ms.n as u64));
        let what = format!("cancelled requests still held KV blocks {seconds} s later");
        tile(out, &stranded, class, &what);
        let p99 = percentile(&all.time_to_free_ms, |dist| dist.p99);
        let what = format!("from the cancel until the last block is free: median; 99 % within {p99}");
        tile(out, &percentile(&all.time_to_free_ms, |dist| dist.p50), "", &what);
    }
    if let Some(sampled) = &summary.sampled {
        // Blocks of some engines are missing.
        let at_least = if sampled.unknown_engines > 0 { "≥ " } else { "" };
        let what = format!(
            "block-seconds held per 1,000 cancelled requests; from samples of metrics, ± {}",
            decimals(sampled.per_1000_off_by)
        );
        tile(out, &format!("{at_least}{}", decimals(sampled.per_1000)), "", &what);
    }
    if let Some(spread) = summary.judged_ttft_ratio() {
        let what = "time to first token (p99) of uncancelled requests in the storm, over the paired requests of the calm";
        tile(out, &format!("{:.2} ×", spread.median), "", what);
    }
    let texts = &summary.texts;
    let class = match texts {
        TextComparison { wrong: 0, nondeterministic: 0, compared: 0, .. } => "",
        TextComparison { wrong: 0, nondeterministic: 0, .. } => "good",
        _ => "bad",
    };
    let wrong = format!("{} of {}", count(texts.wrong), count(texts.compared));
    tile(out, &wrong, class, "responses differ from the response to the same prompt without load");
    out.push_str("</div>");
}

/// The other numbers of the whole run.
fn numbers(summary: &Summary, out: &mut String) {
    let mut rows: Vec<(String, String)> = Vec::new();
    if summary.exact {
        let held = decimals(summary.all.block_seconds_per_1000);
        rows.push(("block-seconds held per 1,000 cancelled requests".into(), held));
    }
    if let Some(spread) = summary.judged_ttft_ratio() {
        // With few requests a lower percentile is judged, which this ratio does not show.
        let mut numbers = summary.uncancelled.numbers.iter();
        let judged = numbers.find(|number| (number.measure, number.percentile) == (Measure::Ttft, 99));
        let over = format!("{:.2} × ({})", spread.median, rounds(spread));
        rows.push(("time to first token of uncancelled requests, p99, storm over calm".into(), over));
        if let Some(more) = judged.and_then(|number| number.named_by_ms) {
            rows.push(("a finding from this much more".into(), format_ms(more)));
        }
    }
    if !summary.uncancelled.numbers.is_empty() {
        let above: Vec<_> = summary.uncancelled.above_target().map(above).collect();
        let mut many = format!("{} of {}", above.len(), summary.uncancelled.numbers.len());
        if !above.is_empty() {
            let _ = write!(many, ": {}", above.join("; "));
        }
        rows.push((
            format!("numbers of uncancelled requests above {SLOWER} times the calm, in the median round"),
            many,
        ));
    }
    let unsteady = count(summary.texts.nondeterministic);
    rows.push(("responses that cannot be compared: the prompt has several without load".into(), unsteady));
    let TextComparison { compared_in_parallel, wrong_in_parallel, .. } = summary.texts;
    if compared_in_parallel > 0 {
        let many = format!("{} of {}", count(wrong_in_parallel), count(compared_in_parallel));
        rows.push((
            "responses that differ if prompts are repeated in parallel, without cancels and faults".into(),
            many,
        ));
    }
    if !summary.engines.is_empty() {
        let expired: u64 = summary.engines.iter().map(|engine| engine.expired).sum();
        let excused = match summary.excused_leases {
            0 => String::new(),
            leases => format!("; {} excused", count(leases)),
        };
        rows.push(("expired leases".into(), format!("{}{excused}", count(expired))));
    }
    out.push_str("<h2>The whole run</h2><table class=\"numbers\"><tbody>");
    for (what, value) in rows {
        let _ = write!(out, "<tr><td>{}</td><td>{}</td></tr>", escaped(&what), escaped(&value));
    }
    out.push_str("</tbody></table>");
}

fn verdict(summary: &Summary, out: &mut String) {
    if let Some(excused) = excused(summary) {
        let _ = write!(out, "<div class=\"verdict unknown\"><b>Excused:</b> {}.</div>", escaped(&excused));
    }
    let unknown = summary.describe_unknown();
    if !unknown.is_empty() {
        let items: String = unknown.iter().map(|what| format!("<li>{}</li>", escaped(what))).collect();
        let _ = write!(out, "<div class=\"verdict unknown\"><b>Not judged:</b><ul>{items}</ul></div>");
    }
    if summary.findings.is_empty() && !unknown.is_empty() {
        out.push_str("<div class=\"verdict\"><b>No findings</b> in what was judged.</div>");
        return;
    }
    if summary.findings.is_empty() {
        out.push_str("<div class=\"verdict\"><b>No findings.</b> No block was stranded by a cancel, freed twice or read after it was freed.");
        if summary.storm.as_ref().is_some_and(|storm| storm.errors == 0) {
            out.push_str(" No uncancelled request of the storms failed.");
        }
        out.push_str("</div>");
        return;
    }
    let _ = write!(out, "<div class=\"verdict found\"><b>{} findings:</b><ul>", summary.findings.len());
    for finding in &summary.findings {
        let _ = write!(out, "<li><code>{}</code>: {}", finding.name, escaped(&finding.says));
        if !finding.shown_by.is_empty() {
            let tags: Vec<_> = finding.shown_by.iter().map(|tag| escaped(tag)).collect();
            let _ = write!(
                out,
                " <span class=\"note\">See <code>{}</code> in events.jsonl.</span>",
                tags.join("</code>, <code>")
            );
        }
        out.push_str("</li>");
    }
    out.push_str("</ul></div>");
}

const GROUP_HEAD: &str = "<th>cancelled</th><th>stranded</th><th>no abort</th><th>ran to the end</th><th>abort p50</th><th>p99</th><th>time to free p50</th><th>p99</th><th>max</th><th>at prefill p99</th><th>block-s / 1,000</th><th>wasted tokens</th>";

fn group_cells(group: &CancelGroup, out: &mut String) {
    let stranded = match group.stranded {
        0 => known(group, || "0".into()),
        stranded => format!("<span class=\"bad\">{}</span>", count(stranded)),
    };
    // The number of samples, where it is not the number of cancelled requests.
    let measured = |dist: &Dist| match dist.n {
        n if n == 0 || n as u64 == group.cancelled => String::new(),
        n => format!(" <small>of {}</small>", count(n as u64)),
    };
    let _ = write!(
        out,
        "<td>{}</td><td>{stranded}</td><td>{}</td><td>{}</td><td>{}</td><td>{}{}</td><td>{}</td><td>{}</td><td>{}{}</td><td>{}{}</td><td>{}</td><td>{}</td>",
        count(group.cancelled),
        known(group, || count(group.abort_not_received)),
        ran_on(group),
        percentile(&group.abort_ms, |dist| dist.p50),
        percentile(&group.abort_ms, |dist| dist.p99),
        measured(&group.abort_ms),
        percentile(&group.time_to_free_ms, |dist| dist.p50),
        percentile(&group.time_to_free_ms, |dist| dist.p99),
        percentile(&group.time_to_free_ms, |dist| dist.max),
        measured(&group.time_to_free_ms),
        percentile(&group.time_to_free_at_prefill_ms, |dist| dist.p99),
        measured(&group.time_to_free_at_prefill_ms),
        known(group, || decimals(group.block_seconds_per_1000)),
        known(group, || count(group.wasted_prompt_tokens + group.wasted_response_tokens)),
    );
}

fn group_row(name: &str, group: &CancelGroup, out: &mut String) {
    let _ = write!(out, "<tr><td>{name}</td>");
    group_cells(group, out);
    out.push_str("</tr>");
}

fn by_phase(summary: &Summary, out: &mut String) {
    out.push_str("<h2>Cancelled requests by phase</h2>");
    let samples = || {
        summary
            .series
            .time_to_free
            .iter()
            .flat_map(|(_, times)| times.iter().copied())
            .filter(|ms| ms.is_finite())
    };
    if samples().next().is_some() {
        // A curve has no point for blocks that were never freed, so its name has their number.
        let names = summary.series.time_to_free.iter().map(|(phase, times)| match never(times) {
            0 => phase.label().to_owned(),
            never => format!("{} ({} of {} never)", phase.label(), count(never), count(times.len() as u64)),
        });
        let names: Vec<String> = names.collect();
        let curves = summary.series.time_to_free.iter().zip(&names).map(|((_, times), name)| Curve {
            name,
            points: cumulative(times),
            steps: true,
        });
        let plot = Plot {
            title: "Time to free after a cancel, by phase",
            across: Axis {
                label: "milliseconds from the cancel until the last block is free (logarithmic)",
                scale: AxisScale::log(samples(), 0.01),
            },
            up: Axis { label: "% of requests", scale: AxisScale::Linear(100.0) },
            curves: curves.collect(),
            spans: Vec::new(),
        };
        out.push_str(&plot.draw());
    }
    let _ = write!(
        out,
        "<div class=\"scroll\" tabindex=\"0\"><table><thead><tr><th>phase</th>{GROUP_HEAD}</tr></thead><tbody>"
    );
    for row in &summary.phases {
        group_row(row.phase.label(), &row.group, out);
    }
    if let Some(refused) = &summary.refused {
        group_row("refused by decode", refused, out);
    }
    if let Some(vanished) = &summary.vanished {
        group_row("vanished, in no other row", &vanished.group, out);
    }
    group_row("<b>all cancelled</b>", &summary.all, out);
    out.push_str("</tbody></table></div><p class=\"note\">Definitions: <a href=\"#words\">terms</a>.</p>");
    if let Some(sampled) = &summary.sampled {
        let _ = write!(
            out,
            "<p class=\"note\">Block-seconds per 1,000 cancelled requests, {}.</p>",
            from_samples(sampled)
        );
    }
}

fn segments(summary: &Summary) -> Vec<Span<'_>> {
    summary.series.segments.iter().map(|(name, from, to)| Span { name, from: *from, to: *to }).collect()
}

fn end(summary: &Summary) -> f64 {
    summary.series.segments.iter().map(|(.., to)| *to).fold(1.0, f64::max)
}

fn stranded(summary: &Summary, out: &mut String) {
    let PlotData { stranded, stranded_in_faults, vanished, .. } = &summary.series;
    if stranded.is_empty() && stranded_in_faults.is_empty() && vanished.is_empty() {
        return;
    }
    out.push_str("<h2>Blocks held for cancelled requests</h2>");
    let named = [
        ("held for cancelled requests", stranded),
        ("in segments with a fault", stranded_in_faults),
        ("held for vanished clients", vanished),
    ];
    let there = || named.iter().filter(|(_, points)| !points.is_empty());
    let points = || there().flat_map(|(_, points)| points.iter().map(|(_, blocks)| *blocks));
    let plot = Plot {
        title: "Blocks held for cancelled requests, over the run",
        across: Axis { label: "seconds", scale: AxisScale::Linear(end(summary)) },
        up: Axis { label: "blocks", scale: AxisScale::linear(points()) },
        curves: there()
            .map(|(name, points)| Curve { name, points: (*points).clone(), steps: true })
            .collect(),
        spans: segments(summary),
    };
    out.push_str(&plot.draw());
}

fn uncancelled(summary: &Summary, out: &mut String) {
    if summary.calm.is_none() || summary.storm.is_none() {
        return;
    }
    out.push_str("<h2>Uncancelled requests</h2><p class=\"note\">Calm and storm send the same requests at the same moments, round by round. In the storm a share of them is cancelled. Each uncancelled request is compared with its paired request of the calm.</p>");
    let series = &summary.series;
    for (title, [calm, storm]) in
        [("Time to first token", &series.ttft), ("Time between tokens", &series.itl)]
    {
        if calm.is_empty() || storm.is_empty() {
            continue;
        }
        let values = || calm.iter().chain(storm.iter()).copied();
        let across = format!("{}, ms (logarithmic)", title.to_lowercase());
        let plot = Plot {
            title,
            across: Axis { label: &across, scale: AxisScale::log(values(), 0.01) },
            up: Axis { label: "% of samples", scale: AxisScale::Linear(100.0) },
            curves: vec![
                Curve { name: "calm", points: cumulative(calm), steps: true },
                Curve { name: "storm", points: cumulative(storm), steps: true },
            ],
            spans: Vec::new(),
        };
        out.push_str(&plot.draw());
    }
    out.push_str("<div class=\"scroll\" tabindex=\"0\"><table><thead><tr><th></th><th>requests</th><th>errors</th><th>TTFT p50</th><th>p99</th><th>ITL p50</th><th>p99</th><th>TPOT p50</th><th>p99</th><th>E2E p50</th><th>p99</th><th>tokens/s</th></tr></thead><tbody>");
    let mut row = |name: &str, service: &ServiceLevels| {
        let cells = |dist: &Dist| {
            format!("<td>{}</td><td>{}</td>", percentile(dist, |d| d.p50), percentile(dist, |d| d.p99))
        };
        let _ = write!(
            out,
            "<tr><td>{name}</td><td>{}</td><td>{}</td>{}{}{}{}<td>{:.0}</td></tr>",
            count(service.requests),
            count(service.errors),
            cells(&service.ttft_ms),
            cells(&service.itl_ms),
            cells(&service.tpot_ms),
            cells(&service.e2e_ms),
            service.tokens_per_second,
        );
    };
    for (name, service) in uncancelled_text(summary) {
        row(name, service);
    }
    out.push_str("</tbody></table></div>");
    let notes = [summary.storm_cancels.as_ref().map(storm_cancels), within_one_read(summary)];
    for note in notes.into_iter().flatten() {
        let _ = write!(out, "<p class=\"note\">{}</p>", escaped(&note));
    }
    if summary.uncancelled.numbers.is_empty() {
        return;
    }
    let _ = write!(
        out,
        "<div class=\"scroll\" tabindex=\"0\"><table><thead><tr><th>measure</th><th>round</th><th>calm, paired requests</th><th>storm</th><th>difference</th><th>storm over calm</th><th>range of rounds</th><th>rounds above {SLOWER}</th><th>noise between calms</th><th>slower</th><th>a finding from</th></tr></thead><tbody>"
    );
    for number in &summary.uncancelled.numbers {
        let slower = if number.slower { "<span class=\"bad\">yes</span>" } else { "no" };
        let _ = write!(
            out,
            "<tr><td>{} p{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:+.1} ms</td><td>{:.2} ×</td><td>{:.2} to {:.2}</td><td>{} of {}</td><td>{}</td><td>{slower}</td><td>{}</td></tr>",
            number.measure.label(),
            number.percentile,
            number.round,
            format_ms(number.calm_ms),
            format_ms(number.storm_ms),
            number.by_ms,
            number.over.median,
            number.over.min,
            number.over.max,
            number.rounds_above,
            number.over.runs.len(),
            format_ms(number.noise_ms),
            number.named_by_ms.map_or_else(|| "–".into(), |more| format!("{} more", format_ms(more))),
        );
    }
    out.push_str("</tbody></table></div>");
}

fn pools(summary: &Summary, out: &mut String) {
    let drawn: Vec<_> = summary.series.pools.iter().filter(|(_, points)| !points.is_empty()).collect();
    if drawn.is_empty() {
        return;
    }
    out.push_str("<h2>Pools</h2>");
    let shares = drawn.iter().flat_map(|(_, points)| points.iter().map(|(_, share)| share * 100.0));
    let plot = Plot {
        title: "Share of each engine's pool that is held, over the run",
        across: Axis { label: "seconds", scale: AxisScale::Linear(end(summary)) },
        up: Axis { label: "% of the pool held", scale: AxisScale::linear(shares) },
        curves: drawn
            .iter()
            .map(|(name, points)| Curve {
                name,
                points: points.iter().map(|(at, share)| (*at, share * 100.0)).collect(),
                steps: true,
            })
            .collect(),
        spans: segments(summary),
    };
    out.push_str(&plot.draw());
    out.push_str("<div class=\"scroll\" tabindex=\"0\"><table><thead><tr><th>engine</th><th>role</th><th>blocks</th><th>held at most</th><th>held at the end</th><th>leases expired</th><th>block-s without a request</th></tr></thead><tbody>");
    for engine in &summary.engines {
        let held_text = |held: u64| {
            if engine.blocks > 0 { count(held) } else { format!("{:.1} %", held as f64 / 10.0) }
        };
        let held = engine.held_at_end.map_or_else(|| "–".to_owned(), held_text);
        let sampled = engine.sampled.map_or_else(String::new, |held| {
            format!(
                "<br><small>{} ± {} from samples</small>",
                decimals(held.block_seconds),
                decimals(held.off_by)
            )
        });
        let blocks = if engine.blocks > 0 { count(engine.blocks) } else { "–".to_owned() };
        let _ = write!(
            out,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{held}</td><td>{}</td><td>{:.2}{sampled}</td></tr>",
            escaped(&engine.name),
            escaped(&engine.role),
            blocks,
            held_text(engine.held_at_most),
            count(engine.expired),
            engine.idle_block_seconds,
        );
    }
    out.push_str("</tbody></table></div>");
}

fn by_kind(summary: &Summary, out: &mut String) {
    if summary.kinds.is_empty() {
        return;
    }
    let _ = write!(
        out,
        "<h2>Cancelled requests by kind</h2><div class=\"scroll\" tabindex=\"0\"><table><thead><tr><th>kind</th>{GROUP_HEAD}<th>completed</th><th>too late</th><th>retries</th><th>failed retries</th></tr></thead><tbody>"
    );
    for row in &summary.kinds {
        let (kind, served, late) = (row.kind.label(), count(row.served), count(row.too_late));
        let again = |number: u64| if row.retries.asked > 0 { count(number) } else { "–".to_owned() };
        let (asked, failed) = (again(row.retries.asked), again(row.retries.failed));
        let _ = write!(out, "<tr><td>{kind}</td>");
        group_cells(&row.group, out);
        let _ = write!(out, "<td>{served}</td><td>{late}</td><td>{asked}</td><td>{failed}</td></tr>");
    }
    out.push_str("</tbody></table></div>");
    for note in [super::stalls(summary), summary.vanished.as_ref().map(VanishedSummary::describe)]
        .into_iter()
        .flatten()
    {
        let _ = write!(out, "<p class=\"note\">{}</p>", escaped(&note));
    }
    let Some(vanished) = &summary.vanished else { return };
    let _ = write!(
        out,
        "<h2>Vanished clients by phase</h2><div class=\"scroll\" tabindex=\"0\"><table><thead><tr><th>phase</th>{GROUP_HEAD}</tr></thead><tbody>"
    );
    for row in &vanished.phases {
        group_row(row.phase.label(), &row.group, out);
    }
    out.push_str("</tbody></table></div>");
}

fn faults(summary: &Summary, out: &mut String) {
    if summary.faults.is_empty() {
        return;
    }
    out.push_str("<h2>Faults</h2><p class=\"note\">Each fault is injected under load with cancels. Processes of this run are killed and restarted at once.</p><div class=\"scroll\" tabindex=\"0\"><table><thead><tr><th>fault</th><th>stranded</th><th>wrong texts</th><th>failed, uncancelled</th><th>failed after recovery</th><th>leases expired</th><th>all blocks free</th><th>in flight at the fault</th><th>failed of these, uncancelled</th><th>E2E p50</th><th>p99</th><th>max</th><th>time to free p50</th><th>max</th><th>retries, failed</th></tr></thead><tbody>");
    for fault in &summary.faults {
        let FaultRow { stayed, retries, cancelled: left, .. } = fault;
        let all_free = fault.all_free_ms.map_or_else(|| "not within its segment".to_owned(), format_ms);
        let met = fault.met.as_ref().map_or_else(
            || "not injected".to_owned(),
            |met| match met.by_phase() {
                phases if phases.is_empty() => count(met.requests),
                phases => format!("{}<br><small>{}</small>", count(met.requests), escaped(&phases)),
            },
        );
        let _ = write!(
            out,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{all_free}</td><td>{met}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escaped(&fault.fault),
            known(left, || format!("{} of {}", count(left.stranded), count(left.cancelled))),
            count(fault.wrong_texts),
            format_args!("{} of {}", count(stayed.errors), count(stayed.requests)),
            count(fault.errors_after),
            count(fault.expired),
            format_args!("{} of {}", count(fault.failed_in_flight), count(fault.stayed_in_flight)),
            percentile(&stayed.e2e_ms, |dist| dist.p50),
            percentile(&stayed.e2e_ms, |dist| dist.p99),
            percentile(&stayed.e2e_ms, |dist| dist.max),
            percentile(&left.time_to_free_ms, |dist| dist.p50),
            percentile(&left.time_to_free_ms, |dist| dist.max),
            format_args!("{}, {}", count(retries.asked), count(retries.failed)),
        );
    }
    out.push_str("</tbody></table></div>");
}
