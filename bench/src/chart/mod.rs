//! `baton bench chart`: the charts of README and docs, drawn from the reports in `bench/results`.
//!
//! | chart | report | shows |
//! |---|---|---|
//! | `leaks` | `compare/` | time until the blocks of cancelled requests are free, by gateway |
//! | `router-cpu` | `router/` | CPU per request over nginx's, by router and load |
//! | `router-latency` | `router/` | added time to first token, by router |
//! | `cpu-engine` | `cpu/` | tokens per second of a CPU engine beside other engines |
//! | `gpu-decode` | `gpu/` | tokens per second of decode, inside the limit of the device's memory |
//! | `choice-cost` | `fleet/` | time of one choice among 1,000 engines, by policy |
//! | `balance` | `fleet/` | load of the busiest of 1,000 engines over the mean, by policy |
//! | `time-to-free` | `disconnect/` | time until all blocks are free, by phase of the cancel |
//!
//! A test draws the charts again and compares the files with `docs/assets`.

mod bars;

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use self::bars::{Bar, BarGroup, BarScale, Chart};
use crate::BenchError;
use crate::disconnect::grouped;
use crate::systems::compare::gap_value;

const LEAKS: &str = "compare/2026-11-23-vllm-zen5.json";
const ROUTER: &str = "router/2026-11-23-zen5.json";
const CPU: &str = "cpu/2026-11-24-peers-zen5.json";
const GPU: &str = "gpu/2026-11-22-h200.json";
const FLEET: &str = "fleet/2026-11-23-zen5.json";
const PHASES: &str = "disconnect/2026-11-23-zen5/summary.json";

/// Options of `baton bench chart`.
#[derive(Debug, clap::Args)]
pub struct ChartArgs {
    /// Directory of the reports
    #[arg(long, value_name = "DIR", default_value = "bench/results")]
    pub results: PathBuf,
    /// Directory for the SVG files
    #[arg(long, value_name = "DIR", default_value = "docs/assets")]
    pub out: PathBuf,
}

/// Draws all charts and writes them.
///
/// # Errors
/// If a report is missing or incomplete, or a file cannot be written.
pub fn run(args: &ChartArgs, out: &mut dyn Write) -> Result<(), BenchError> {
    for (name, svg) in draw(&args.results)? {
        let file = args.out.join(name).with_extension("svg");
        std::fs::write(&file, svg).map_err(|error| format!("{}: {error}", file.display()))?;
        writeln!(out, "{}", file.display())?;
    }
    Ok(())
}

/// Every chart's name and text.
fn draw(results: &Path) -> Result<Vec<(&'static str, String)>, BenchError> {
    let read = |name: &str| SourceReport::read(results, name);
    let (leaked, router, fleet) = (read(LEAKS)?, read(ROUTER)?, read(FLEET)?);
    Ok(vec![
        ("leaks", leaks(&leaked)?.draw()),
        ("router-cpu", router_cpu(&router)?.draw()),
        ("router-latency", router_latency(&router)?.draw()),
        ("cpu-engine", cpu_engine(&read(CPU)?)?.draw()),
        ("gpu-decode", gpu_decode(&read(GPU)?)?.draw()),
        ("choice-cost", choice_cost(&fleet)?.draw()),
        ("balance", balance(&fleet)?.draw()),
        ("time-to-free", time_to_free(&read(PHASES)?)?.draw()),
    ])
}

/// A report: its values, and the path below `bench/results` for errors and for its date.
struct SourceReport {
    name: String,
    value: Value,
}

impl SourceReport {
    fn read(results: &Path, name: &str) -> Result<Self, BenchError> {
        let file = results.join(name);
        let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
        let text = std::fs::read(&file).map_err(|error| wrong(&error))?;
        let value = serde_json::from_slice(&text).map_err(|error| wrong(&error))?;
        Ok(Self { name: name.to_owned(), value })
    }

    fn missing(&self, what: &str) -> BenchError {
        format!("{}: no {what}", self.name).into()
    }

    fn number(&self, value: &Value, pointer: &str) -> Result<f64, BenchError> {
        value.pointer(pointer).and_then(Value::as_f64).ok_or_else(|| self.missing(pointer))
    }

    fn list<'a>(&'a self, value: &'a Value, key: &str) -> Result<&'a [Value], BenchError> {
        value[key].as_array().map(Vec::as_slice).ok_or_else(|| self.missing(key))
    }

    /// Machine, date and file, for the last lines of a chart.
    fn source(&self, machine: &str) -> String {
        let day = |part: &&str| part.starts_with("20") && part.len() >= 10;
        let date = self.name.split('/').find(day).map_or("", |part| &part[..10]);
        format!("{machine} · {date}\nbench/results/{}", self.name)
    }

    fn machine(&self) -> &str {
        let machine = self.value["machine"].as_str().or_else(|| self.value["run"]["machine"].as_str());
        machine.and_then(|machine| machine.split(", Linux").next()).unwrap_or_default()
    }
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn leaks(report: &SourceReport) -> Result<Chart, BenchError> {
    let mut rows = Vec::new();
    for target in report.list(&report.value, "targets")? {
        let gap = &target["gap"];
        if gap.is_null() {
            continue;
        }
        let of_gap = |key: &str| gap_value(gap, key).as_f64().ok_or_else(|| report.missing(key));
        let (stranded, all) = (of_gap("stranded")?, of_gap("cancels")?);
        let (median, high) = (of_gap("time_to_free_p50_ms")?, of_gap("time_to_free_p99_ms")?);
        let name = match text(target, "name") {
            "toy-proxy" => "a proxy like vLLM's example",
            name => name,
        };
        rows.push(Bar {
            text: format!("{stranded} of {all} stranded · {} ms", number(median)),
            end: Some(high),
            ..Bar::new(name, median)
        });
    }
    let lease = report.number(&report.value, "/lease_ms")?;
    Ok(Chart {
        title: "Time to free after 200 cancelled requests".to_owned(),
        scale: BarScale::Log(0.1, 10_000.0),
        axis: format!(
            "milliseconds, log scale; bar p50, line to p99; the lease ends after {} ms",
            number(lease)
        ),
        groups: vec![BarGroup { title: None, rows }],
        source: report.source(report.machine()),
    })
}

const LOADS: [(&str, &str); 3] = [
    ("unary_c64", "response in one piece, 64 at a time"),
    ("streamed_c64", "64 tokens as fast as they come, 64 at a time"),
    ("paced_c64", "64 tokens with pauses, 64 at a time"),
];

fn router_cpu(report: &SourceReport) -> Result<Chart, BenchError> {
    let mut groups = Vec::new();
    for (kind, title) in LOADS {
        let mut rows = Vec::new();
        for subject in report.list(&report.value, "subjects")? {
            let of_kind = |load: &&Value| text(load, "kind") == kind;
            let load =
                report.list(subject, "loads")?.iter().find(of_kind).ok_or_else(|| report.missing(kind))?;
            let over = report.number(load, "/cpu_over_nginx/median")?;
            let name = text(subject, "name");
            let name = if name == "nginx" { "nginx (one hop)" } else { name };
            rows.push(Bar { text: format!("{over:.1} ×"), ..Bar::new(name, over) });
        }
        rows.sort_by(|a, b| a.value.total_cmp(&b.value));
        groups.push(BarGroup { title: Some(title.to_owned()), rows });
    }
    Ok(Chart {
        title: "Router CPU per request".to_owned(),
        scale: BarScale::Linear,
        axis: "times nginx as a plain reverse proxy, less is better".to_owned(),
        groups,
        source: report.source(report.machine()),
    })
}

fn router_latency(report: &SourceReport) -> Result<Chart, BenchError> {
    let mut rows = Vec::new();
    for subject in report.list(&report.value, "subjects")? {
        let Some(measured) = subject["first_token"].as_array() else { continue };
        let Some(first) = measured.iter().find(|one| text(one, "cores") == "as_they_are") else { continue };
        let median = report.number(first, "/added_p50_us/median")?;
        let high = report.number(first, "/added_p99_us/median")?;
        rows.push(Bar {
            text: format!("{} µs, p99 {} µs", number(median.round()), number(high.round())),
            end: Some(high),
            ..Bar::new(text(subject, "name"), median)
        });
    }
    Ok(Chart {
        title: "Router: added time to first token".to_owned(),
        scale: BarScale::Linear,
        axis: "microseconds over a client that makes both hops itself; bar p50, line to p99".to_owned(),
        groups: vec![BarGroup { title: None, rows }],
        source: report.source(report.machine()),
    })
}

fn cpu_engine(report: &SourceReport) -> Result<Chart, BenchError> {
    let tests = [
        ("prefill", "prefill of 512 tokens"),
        ("decode_b1", "decode, 1 sequence"),
        ("decode_b8", "decode, 8 sequences"),
    ];
    let mut groups = Vec::new();
    for (key, title) in tests {
        let mut rows = Vec::new();
        for engine in report.list(&report.value, "engines")? {
            let speed = engine["median"][key].as_f64().filter(|_| text(engine, "arithmetic") == "bf16");
            rows.extend(speed.map(|speed| Bar {
                text: format!("{} tokens/s", number(speed.round())),
                ..Bar::new(text(engine, "name"), speed)
            }));
        }
        rows.sort_by(|a, b| b.value.total_cmp(&a.value));
        groups.push(BarGroup { title: Some(title.to_owned()), rows });
    }
    let machine = format!("{}, {} threads", text(&report.value, "cpu"), report.value["threads"]);
    Ok(Chart {
        title: "CPU engine: a 214M model in bf16".to_owned(),
        scale: BarScale::PerGroup,
        axis: "tokens per second, more is better; each test has its own scale".to_owned(),
        groups,
        source: report.source(&machine),
    })
}

fn gpu_decode(report: &SourceReport) -> Result<Chart, BenchError> {
    let mut groups = Vec::new();
    for speed in report.list(&report.value, "speeds")? {
        let Some(batch) = text(speed, "what").strip_prefix("decode, 32 layers, batch ") else { continue };
        let (value, limit) = (report.number(speed, "/value")?, report.number(speed, "/limit")?);
        let percent = value * 100.0 / limit;
        let row = Bar {
            text: format!("{} of {} tokens/s, {percent:.0} %", number(value.round()), number(limit.round())),
            limit: Some(limit),
            ..Bar::new("baton", value)
        };
        groups.push(BarGroup { title: Some(format!("batch {batch}")), rows: vec![row] });
    }
    Ok(Chart {
        title: "GPU engine: decode of an 8B-shaped model".to_owned(),
        scale: BarScale::PerGroup,
        axis: "tokens per second; the frame is reading weights and KV cache once".to_owned(),
        groups,
        source: report.source(text(&report.value, "device")),
    })
}

/// The runs with `engines` engines.
fn runs(report: &SourceReport, engines: u64) -> Result<impl Iterator<Item = &Value>, BenchError> {
    Ok(report.list(&report.value, "runs")?.iter().filter(move |run| run["engines"] == engines))
}

fn choice_cost(report: &SourceReport) -> Result<Chart, BenchError> {
    let mut rows = Vec::new();
    for run in runs(report, 1_000)? {
        let policy = text(run, "policy");
        let of_ten = runs(report, 10)?.find(|few| text(few, "policy") == policy);
        let few = of_ten.ok_or_else(|| report.missing("runs of 10 engines"))?;
        let us = |run: &Value| Ok::<_, BenchError>(report.number(run, "/costs/choose_decode/p50_ns")? / 1e3);
        let (many, few) = (us(run)?, us(few)?);
        rows.push(Bar {
            text: format!("{many:.1} µs, of 10: {few:.1} µs"),
            mark: Some(few),
            ..Bar::new(policy, many)
        });
    }
    rows.sort_by(|a, b| a.value.total_cmp(&b.value));
    Ok(Chart {
        title: "One choice among 1,000 engines".to_owned(),
        scale: BarScale::Linear,
        axis: "microseconds, median; the mark is a choice among 10 engines".to_owned(),
        groups: vec![BarGroup { title: None, rows }],
        source: report.source(report.machine()),
    })
}

fn balance(report: &SourceReport) -> Result<Chart, BenchError> {
    let mut rows = Vec::new();
    for run in runs(report, 1_000)? {
        let over = report.number(run, "/imbalance/decode/mean")?;
        rows.push(Bar { text: format!("{over:.2}"), ..Bar::new(text(run, "policy"), over) });
    }
    rows.sort_by(|a, b| a.value.total_cmp(&b.value));
    Ok(Chart {
        title: "Load of the busiest of 1,000 decode engines".to_owned(),
        scale: BarScale::Linear,
        axis: "times the mean load, 1 is perfect".to_owned(),
        groups: vec![BarGroup { title: None, rows }],
        source: report.source(report.machine()),
    })
}

fn time_to_free(report: &SourceReport) -> Result<Chart, BenchError> {
    let mut rows = Vec::new();
    for phase in report.list(&report.value, "phases")? {
        let median = report.number(phase, "/time_to_free_ms/p50")?;
        let high = report.number(phase, "/time_to_free_ms/p99")?;
        rows.push(Bar {
            text: format!("{} ms, p99 {} ms", number(median), number(high)),
            end: Some(high),
            ..Bar::new(&text(phase, "phase").replace('_', " "), median)
        });
    }
    Ok(Chart {
        title: "Time to free, by phase of the cancel".to_owned(),
        scale: BarScale::Log(0.1, 100.0),
        axis: "milliseconds, log scale; bar p50, line to p99".to_owned(),
        groups: vec![BarGroup { title: None, rows }],
        source: report.source(report.machine()),
    })
}

/// A number with separators, and with one digit after the point below 100 where it has one.
fn number(value: f64) -> String {
    if value < 100.0 && value.fract() != 0.0 {
        return format!("{value:.1}");
    }
    grouped(&format!("{value:.0}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository")
    }

    /// `BATON_WRITE_DOCS=1` writes the charts.
    #[test]
    fn charts_match_the_results() {
        let drawn = draw(&root().join("bench/results")).expect("the reports");
        let assets = root().join("docs/assets");
        let mut other = Vec::new();
        for (name, svg) in &drawn {
            let file = assets.join(name).with_extension("svg");
            if std::env::var_os("BATON_WRITE_DOCS").is_some() {
                std::fs::write(&file, svg).expect("docs/assets can be written");
            }
            if std::fs::read_to_string(&file).ok().as_deref() != Some(svg) {
                other.push(*name);
            }
        }
        assert_eq!(other, Vec::<&str>::new(), "charts that `baton bench chart` draws differently");
        let svgs = std::fs::read_dir(assets).expect("docs/assets").filter_map(Result::ok);
        let names: Vec<_> = svgs.map(|file| file.file_name().to_string_lossy().into_owned()).collect();
        let known = |name: &String| {
            name == "top.svg"
                || !name.ends_with(".svg")
                || drawn.iter().any(|(chart, _)| *name == format!("{chart}.svg"))
        };
        let stale: Vec<_> = names.iter().filter(|name| !known(name)).collect();
        assert!(stale.is_empty(), "no chart draws {stale:?}");
    }

    #[test]
    fn a_report_without_a_value_is_an_error_that_names_it() {
        let report =
            SourceReport { name: "router/x.json".to_owned(), value: serde_json::json!({"subjects": [{}]}) };
        assert_eq!(
            router_cpu(&report).err().map(|error| error.to_string()).as_deref(),
            Some("router/x.json: no loads")
        );
    }

    #[test]
    fn numbers_have_separators() {
        let texts: Vec<_> = [0.5, 3.0, 99.96, 100.4, 1_234.0, 1_234_567.0].into_iter().map(number).collect();
        assert_eq!(texts, ["0.5", "3", "100.0", "100", "1,234", "1,234,567"]);
    }
}
