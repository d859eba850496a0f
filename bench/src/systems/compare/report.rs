//! The report, as JSON and as tables.

use serde::Serialize;

use super::calm::CalmRound;
use super::gap::{CancelledRequest, GapOutcome};
use super::{CompareArgs, CompareTarget};
use crate::common::{machine, stats};
use crate::systems::router::report::RepeatSpread;

/// The whole run.
#[derive(Clone, Debug, Serialize)]
pub struct CompareReport {
    /// Version of this program.
    pub version: &'static str,
    /// Date in UTC.
    pub date: String,
    /// Commit of the repository in which the run took place, with a `+` if files were changed.
    pub commit: Option<String>,
    /// The command line.
    pub command: String,
    /// Processors, memory and kernel.
    pub machine: String,
    /// Protocol and rules of the simulated engines.
    pub dialect: &'static str,
    /// Number of rounds.
    pub rounds: usize,
    /// Requests per target and round.
    pub requests: usize,
    /// Concurrent clients.
    pub concurrency: usize,
    /// Tokens of a prompt.
    pub prompt_tokens: usize,
    /// Tokens of a response.
    pub output_tokens: usize,
    /// Where clients cancel: time until a decode engine accepts a request.
    pub admission_delay_ms: u64,
    /// Where clients cancel: duration of a lease.
    pub lease_ms: u64,
    /// All targets. Ratios are over the first.
    pub targets: Vec<TargetReport>,
}

/// One gateway. Times in milliseconds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TargetReport {
    /// `baton`, `vllm-router`, `smg`, `toy-proxy`, `nginx`, or a name from the options.
    pub name: String,
    /// The version that the gateway reports.
    pub version: String,
    /// Whether the gateway uses the prefill engine of this run.
    pub disaggregates: bool,
    /// Time to first token, median of a round.
    pub ttft_p50_ms: RepeatSpread,
    /// The same, 99th percentile.
    pub ttft_p99_ms: RepeatSpread,
    /// Between two tokens, 99th percentile.
    pub itl_p99_ms: RepeatSpread,
    /// Complete responses per second.
    pub requests_per_second: RepeatSpread,
    /// CPU time of all threads. `None` for gateways that this run did not start.
    pub cpu_s_per_1000: Option<RepeatSpread>,
    /// Incomplete responses in all rounds.
    pub failed: usize,
    /// Ratios over the first target in the same round.
    pub over_first: Option<Ratios>,
    /// Clients that cancelled in the gap.
    pub gap: Option<GapReport>,
}

/// A target over the first.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Ratios {
    /// Of the medians.
    pub ttft_p50: Option<RepeatSpread>,
    /// Of the 99th percentiles.
    pub ttft_p99: Option<RepeatSpread>,
    /// Of the 99th percentiles.
    pub itl_p99: Option<RepeatSpread>,
    /// Of the rates.
    pub requests_per_second: Option<RepeatSpread>,
    /// Of the CPU per request.
    pub cpu: Option<RepeatSpread>,
}

/// The outcomes for clients that cancelled in the gap.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GapReport {
    /// Clients that cancelled in the gap.
    pub cancels: usize,
    /// Clients that could not cancel in the gap: there was no lease, or the response came before.
    pub missed: usize,
    /// Cancelled requests whose blocks were freed by expiry, or not at all.
    pub stranded: usize,
    /// Of those, the ones whose blocks were not freed during the observation.
    pub lost: usize,
    /// Blocks times seconds from the cancel of a stranded request until they are free, per 1,000 cancelled requests.
    pub stranded_block_seconds_per_1000: f64,
    /// From the cancel until the blocks are free, over all cancelled requests: median.
    pub time_to_free_p50_ms: f64,
    /// The same, 99th percentile.
    pub time_to_free_p99_ms: f64,
    /// The same, greatest.
    pub time_to_free_max_ms: f64,
    /// `stranded_block_seconds_per_1000` of each round.
    pub rounds_block_seconds_per_1000: RepeatSpread,
    /// The median of each round from the cancel until the blocks were freed.
    pub rounds_time_to_free_p50_ms: RepeatSpread,
    /// All clients, from which the numbers above are computed.
    pub raw: Vec<CancelledRequest>,
}

/// NaN without samples.
fn percentile(sorted: &[f64], p: f64) -> f64 {
    stats::percentile(sorted, p).unwrap_or(f64::NAN)
}

fn sorted(mut numbers: Vec<f64>) -> Vec<f64> {
    numbers.sort_by(f64::total_cmp);
    numbers
}

impl CompareReport {
    pub(super) fn new(args: &CompareArgs, contenders: &[CompareTarget]) -> Self {
        let target = |contender: &CompareTarget| TargetReport {
            name: contender.name.clone(),
            version: contender.version.clone(),
            disaggregates: contender.disaggregates,
            ..TargetReport::default()
        };
        Self {
            version: env!("CARGO_PKG_VERSION"),
            date: machine::today(),
            commit: machine::commit(),
            command: machine::command(),
            machine: machine::described(),
            dialect: args.dialect.label(),
            rounds: args.rounds,
            requests: args.requests,
            concurrency: args.concurrency,
            prompt_tokens: args.prompt_tokens,
            output_tokens: args.output_tokens,
            admission_delay_ms: args.admission_delay_ms,
            lease_ms: args.lease_ms,
            targets: contenders.iter().map(target).collect(),
        }
    }

    pub(super) fn of(&mut self, name: &str) -> &mut TargetReport {
        self.targets.iter_mut().find(|target| target.name == name).expect("every contender has a report")
    }

    /// Ratios over the first target.
    pub(super) fn compare(&mut self) {
        let Some((first, others)) = self.targets.split_first_mut() else { return };
        for other in others {
            let cpu = |of: &TargetReport| of.cpu_s_per_1000.clone().unwrap_or_default();
            other.over_first = Some(Ratios {
                ttft_p50: other.ttft_p50_ms.over(&first.ttft_p50_ms),
                ttft_p99: other.ttft_p99_ms.over(&first.ttft_p99_ms),
                itl_p99: other.itl_p99_ms.over(&first.itl_p99_ms),
                requests_per_second: other.requests_per_second.over(&first.requests_per_second),
                cpu: cpu(other).over(&cpu(first)),
            });
        }
    }

    /// For people: a section for each measure with a line for each target, for terminals of 80 columns.
    #[must_use]
    pub fn table(&self) -> String {
        let mut lines = vec![
            self.machine.clone(),
            format!("simulated engines, {} dialect", self.dialect),
            format!(
                "{} rounds of {} streams, {} at a time, prompts of {} tokens, answers of {}",
                self.rounds, self.requests, self.concurrency, self.prompt_tokens, self.output_tokens
            ),
        ];
        let first = self.targets.first().map_or("", |target| target.name.as_str());
        let spread = |of: &RepeatSpread| vec![number(of.median), number(of.min), number(of.max)];
        let nothing = || vec!["-".to_owned(); 3];
        let over = format!("over {first}");
        let heads = ["", "median", "least", "greatest", &over, "least", "greatest"].map(str::to_owned);
        let mut rows = vec![heads.to_vec()];
        for (name, of, ratio) in MEASURES {
            rows.push(vec![name.to_owned()]);
            for (at, target) in self.targets.iter().enumerate() {
                let ratio = target.over_first.as_ref().and_then(|ratios| ratio(ratios).clone());
                let mut row = vec![format!("  {}", target.name)];
                row.extend(of(target).map_or_else(nothing, |of| spread(&of)));
                if at > 0 {
                    row.extend(ratio.map_or_else(nothing, |ratio| spread(&ratio)));
                }
                rows.push(row);
            }
        }
        rows.push(vec!["failed requests".to_owned()]);
        rows.extend(self.targets.iter().map(|of| vec![format!("  {}", of.name), of.failed.to_string()]));
        lines.extend(columns(&rows));
        lines.push(format!("ratios are of the same round; {first} is the first target"));
        if self.targets.iter().any(|target| target.gap.is_some()) {
            lines.push(String::new());
            lines.push(format!(
                "clients that leave in the gap; leases of {} ms, decode looks after {} ms",
                self.lease_ms, self.admission_delay_ms
            ));
            lines.push("free: from the cancel until the blocks are free, ms".to_owned());
            let heads = ["", "cancels", "stranded", "missed", "block-s/1,000", "free p50", "p99", "max"];
            let mut rows = vec![heads.map(str::to_owned).to_vec()];
            for (target, gap) in self.targets.iter().filter_map(|target| Some((target, target.gap.as_ref()?)))
            {
                rows.push(vec![
                    target.name.clone(),
                    gap.cancels.to_string(),
                    gap.stranded.to_string(),
                    gap.missed.to_string(),
                    format!("{:.1}", gap.stranded_block_seconds_per_1000),
                    number(gap.time_to_free_p50_ms),
                    number(gap.time_to_free_p99_ms),
                    number(gap.time_to_free_max_ms),
                ]);
            }
            lines.extend(columns(&rows));
        }
        lines.join("\n")
    }
}

type SpreadAccessor<T> = fn(&T) -> Option<RepeatSpread>;
type RatioAccessor = for<'a> fn(&'a Ratios) -> &'a Option<RepeatSpread>;

/// The measures: name, value of a target, and ratio over the first target.
const MEASURES: [(&str, SpreadAccessor<TargetReport>, RatioAccessor); 5] = [
    ("TTFT p50, ms", |of| Some(of.ttft_p50_ms.clone()), |over| &over.ttft_p50),
    ("TTFT p99, ms", |of| Some(of.ttft_p99_ms.clone()), |over| &over.ttft_p99),
    ("ITL p99, ms", |of| Some(of.itl_p99_ms.clone()), |over| &over.itl_p99),
    ("requests/s", |of| Some(of.requests_per_second.clone()), |over| &over.requests_per_second),
    ("CPU s per 1,000", |of| of.cpu_s_per_1000.clone(), |over| &over.cpu),
];

/// Two decimals, but none for large values, so that columns stay narrow.
fn number(value: f64) -> String {
    if value.is_finite() && value.abs() >= 10_000.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

/// Lines with aligned columns, two spaces apart. The first column is aligned left, the others right.
fn columns(rows: &[Vec<String>]) -> Vec<String> {
    let mut wide: Vec<usize> = Vec::new();
    for row in rows {
        wide.resize(wide.len().max(row.len()), 0);
        for (most, cell) in wide.iter_mut().zip(row) {
            *most = (*most).max(cell.chars().count());
        }
    }
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&wide).enumerate().map(|(at, (cell, wide))| match at {
            0 => format!("{cell:<wide$}"),
            _ => format!("  {cell:>wide$}"),
        });
        cells.collect::<String>().trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

impl TargetReport {
    pub(super) fn add(&mut self, round: &CalmRound) {
        let (ttft, gaps) = (sorted(round.ttft_ms.clone()), sorted(round.gaps_ms.clone()));
        self.ttft_p50_ms.add(percentile(&ttft, 50.0));
        self.ttft_p99_ms.add(percentile(&ttft, 99.0));
        self.itl_p99_ms.add(percentile(&gaps, 99.0));
        self.requests_per_second.add(round.requests_per_second);
        if let Some(cpu) = round.cpu_s_per_1000 {
            self.cpu_s_per_1000.get_or_insert_default().add(cpu);
        }
        self.failed += round.failed;
    }
}

impl GapReport {
    /// Adds a round.
    pub(super) fn add(&mut self, cancelled: Vec<CancelledRequest>) {
        let round = Tally::of(&cancelled);
        if let Some(per_1000) = round.block_seconds_per_1000() {
            self.rounds_block_seconds_per_1000.add(per_1000);
            self.rounds_time_to_free_p50_ms.add(percentile(&round.time_to_free_ms, 50.0));
        }
        self.raw.extend(cancelled);
        let all = Tally::of(&self.raw);
        let count = |fate: GapOutcome| self.raw.iter().filter(|request| request.fate == fate).count();
        (self.missed, self.lost) = (count(GapOutcome::Missed), count(GapOutcome::Lost));
        (self.cancels, self.stranded) = (all.time_to_free_ms.len(), self.lost + count(GapOutcome::Stranded));
        let at = |p| percentile(&all.time_to_free_ms, p);
        (self.time_to_free_p50_ms, self.time_to_free_p99_ms, self.time_to_free_max_ms) =
            (at(50.0), at(99.0), at(100.0));
        self.stranded_block_seconds_per_1000 = all.block_seconds_per_1000().unwrap_or(0.0);
    }
}

/// Sums over cancelled requests.
struct Tally {
    /// Sorted.
    time_to_free_ms: Vec<f64>,
    /// Of stranded and lost requests.
    block_seconds: f64,
}

impl Tally {
    fn of(cancelled: &[CancelledRequest]) -> Self {
        let left = || cancelled.iter().filter(|request| request.fate != GapOutcome::Missed);
        let stranded = left().filter(|request| request.fate != GapOutcome::Home);
        Self {
            time_to_free_ms: sorted(left().map(|request| request.after_ms).collect()),
            block_seconds: stranded.map(|request| request.blocks as f64 * request.after_ms / 1e3).sum(),
        }
    }

    fn block_seconds_per_1000(&self) -> Option<f64> {
        // The sum of no values is −0.
        let seconds = self.block_seconds + 0.0;
        (!self.time_to_free_ms.is_empty()).then(|| seconds * 1_000.0 / self.time_to_free_ms.len() as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(values: &[f64]) -> RepeatSpread {
        let mut spread = RepeatSpread::default();
        values.iter().for_each(|value| spread.add(*value));
        spread
    }

    #[test]
    fn the_table_fits_80_columns_and_no_two_columns_touch() {
        let target = |name: &str, scale: f64| TargetReport {
            name: name.to_owned(),
            ttft_p50_ms: spread(&[5.0 * scale, 4.0 * scale]),
            ttft_p99_ms: spread(&[1_234.5 * scale, 9_999.994]),
            itl_p99_ms: spread(&[11.0 * scale]),
            requests_per_second: spread(&[123_456.78 / scale]),
            cpu_s_per_1000: (scale < 3.0).then(|| spread(&[0.61 * scale])),
            gap: Some(GapReport {
                cancels: 1_000,
                stranded: 1_000,
                stranded_block_seconds_per_1000: 123_456.7,
                time_to_free_p50_ms: 30_001.25,
                time_to_free_p99_ms: 30_012.5,
                time_to_free_max_ms: 30_012.75,
                ..GapReport::default()
            }),
            ..TargetReport::default()
        };
        let mut report = CompareReport {
            version: "0",
            date: String::new(),
            commit: None,
            command: String::new(),
            machine: "2 × a processor".to_owned(),
            dialect: "vllm",
            rounds: 5,
            requests: 200,
            concurrency: 8,
            prompt_tokens: 256,
            output_tokens: 32,
            admission_delay_ms: 100,
            lease_ms: 30_000,
            targets: vec![target("baton", 1.0), target("vllm-router", 2.5), target("toy-proxy", 3.0)],
        };
        report.compare();
        let table = report.table();
        assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
        let row = |begins: &str| {
            let line = table.lines().find(|line| line.trim_start().starts_with(begins));
            line.expect("a line of it").split_whitespace().skip(1).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(row("baton"), ["4.50", "4.00", "5.00"], "the first has no ratio over itself\n{table}");
        assert_eq!(row("vllm-router"), ["11.25", "10.00", "12.50", "2.50", "2.50", "2.50"], "{table}");
        let gap = table.lines().rfind(|line| line.starts_with("vllm-router")).expect("of the gap");
        let cells: Vec<_> = gap.split_whitespace().collect();
        assert_eq!(cells[1..], ["1000", "1000", "0", "123456.7", "30001", "30012", "30013"], "{table}");
        let of_cpu =
            table.lines().skip_while(|line| *line != "CPU s per 1,000").nth(3).expect("the third target");
        assert_eq!(
            of_cpu.split_whitespace().collect::<Vec<_>>(),
            ["toy-proxy", "-", "-", "-", "-", "-", "-"]
        );
    }

    #[test]
    fn a_gap_is_counted_by_hand() {
        let mut gap = GapReport::default();
        let request = |after_ms, fate| CancelledRequest {
            round: 0,
            tag: String::from("t"),
            fate,
            left_us: Some(1),
            lent_us: None,
            freed_us: None,
            reason: None,
            blocks: 4,
            after_ms,
        };
        gap.add(vec![
            request(2.0, GapOutcome::Home),
            request(3_000.0, GapOutcome::Stranded),
            request(0.0, GapOutcome::Missed),
        ]);
        gap.add(vec![request(1.0, GapOutcome::Home), request(500.0, GapOutcome::Lost)]);
        assert_eq!((gap.cancels, gap.stranded, gap.missed, gap.lost), (4, 2, 1, 1));
        // 4 × 3 s and 4 × 0.5 s, of four cancelled requests.
        assert_eq!(gap.stranded_block_seconds_per_1000, 14.0 * 250.0);
        assert_eq!(
            (gap.time_to_free_p50_ms, gap.time_to_free_p99_ms, gap.time_to_free_max_ms),
            (2.0, 3_000.0, 3_000.0)
        );
        let rounds = &gap.rounds_block_seconds_per_1000;
        assert_eq!((rounds.min, rounds.median, rounds.max), (1_000.0, 3_500.0, 6_000.0));
        let json = serde_json::to_value(&gap).expect("JSON");
        assert_eq!(json["raw"].as_array().map(Vec::len), Some(5), "{json:#}");
        assert_eq!(
            (&json["raw"][1]["fate"], &json["raw"][1]["after_ms"]),
            (&"stranded".into(), &3_000.0.into())
        );
    }
}
