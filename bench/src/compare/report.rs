//! What was compared, as JSON and as tables.

use serde::Serialize;

use super::calm::Round;
use super::gap::Victim;
use super::{CompareArgs, Contender};
use crate::machine;
use crate::router::report::Spread;
use crate::stats;

/// The whole run.
#[derive(Clone, Debug, Serialize)]
pub struct CompareReport {
    /// Of this program.
    pub version: &'static str,
    /// UTC.
    pub date: String,
    /// Processors, memory and kernel.
    pub machine: String,
    /// The simulated engines' verbs and rules.
    pub dialect: &'static str,
    /// Rounds.
    pub rounds: usize,
    /// Per target and round.
    pub requests: usize,
    /// Clients at a time.
    pub concurrency: usize,
    /// Tokens of a prompt.
    pub prompt_tokens: usize,
    /// Tokens of an answer.
    pub output_tokens: usize,
    /// Where clients leave: how long a decode engine takes to look at a request.
    pub admission_delay_ms: u64,
    /// And how long blocks are lent.
    pub lease_ms: u64,
    /// The first is what the others' ratios are over.
    pub targets: Vec<TargetReport>,
}

/// One front door. Times in milliseconds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TargetReport {
    /// `baton`, `vllm-router`, `smg`, `toy-proxy`, `nginx`, or a name that was given.
    pub name: String,
    /// As it tells it.
    pub version: String,
    /// Whether it asks the prefill engine of this run.
    pub disaggregates: bool,
    /// Time to first token, median of a round.
    pub ttft_p50_ms: Spread,
    /// The same, 99th percentile.
    pub ttft_p99_ms: Spread,
    /// Between two tokens, 99th percentile.
    pub itl_p99_ms: Spread,
    /// Answered whole.
    pub requests_per_second: Spread,
    /// CPU of all its threads; `None` for somebody else's.
    pub cpu_s_per_1000: Option<Spread>,
    /// Not answered whole, in all rounds.
    pub failed: usize,
    /// Over the first target in the same round: TTFT p50, TTFT p99, ITL p99, requests per second, CPU.
    pub over_first: Option<Ratios>,
    /// Clients that left in the gap.
    pub gap: Option<GapReport>,
}

/// A target over the first.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Ratios {
    /// Of the medians.
    pub ttft_p50: Option<Spread>,
    /// Of the 99th percentiles.
    pub ttft_p99: Option<Spread>,
    /// Of the 99th percentiles.
    pub itl_p99: Option<Spread>,
    /// Of the rates.
    pub requests_per_second: Option<Spread>,
    /// Of the CPU per request.
    pub cpu: Option<Spread>,
}

/// What became of the blocks of clients that left in the gap.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GapReport {
    /// Clients that left in it.
    pub victims: usize,
    /// Clients that were to, and could not: nothing was lent, or the answer was there.
    pub missed: usize,
    /// Victims whose blocks came home by the end of the lease's time, or not at all.
    pub stranded: usize,
    /// Of those, not at all while anybody looked.
    pub lost: usize,
    /// Blocks times seconds from a stranded victim's leaving until they were home, per 1,000 victims.
    pub stranded_block_seconds_per_1000: f64,
    /// From leaving until the blocks were home, over all victims: median.
    pub freed_p50_ms: f64,
    /// The same, 99th percentile.
    pub freed_p99_ms: f64,
    /// The same, greatest.
    pub freed_max_ms: f64,
    #[serde(skip)]
    block_seconds: f64,
    #[serde(skip)]
    freed_ms: Vec<f64>,
}

/// No number where there was no sample.
fn percentile(sorted: &[f64], p: f64) -> f64 {
    stats::percentile(sorted, p).unwrap_or(f64::NAN)
}

fn sorted(mut numbers: Vec<f64>) -> Vec<f64> {
    numbers.sort_by(f64::total_cmp);
    numbers
}

impl CompareReport {
    pub(super) fn new(args: &CompareArgs, contenders: &[Contender]) -> Self {
        let target = |contender: &Contender| TargetReport {
            name: contender.name.clone(),
            version: contender.version.clone(),
            disaggregates: contender.disaggregates,
            ..TargetReport::default()
        };
        Self {
            version: env!("CARGO_PKG_VERSION"),
            date: machine::today(),
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

    /// For people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut lines = vec![
            format!("{}; simulated engines, {} dialect", self.machine, self.dialect),
            format!(
                "{} rounds of {} streams, {} at a time, prompts of {} tokens, answers of {}; medians (least .. greatest)",
                self.rounds, self.requests, self.concurrency, self.prompt_tokens, self.output_tokens
            ),
            format!(
                "{:<14}{:<24}{:<24}{:<22}{:<24}{:<24}{:>7}",
                "", "TTFT p50, ms", "TTFT p99, ms", "ITL p99, ms", "requests/s", "CPU s per 1,000", "failed"
            ),
        ];
        let spread = |of: &Spread| format!("{:.2} ({:.2} .. {:.2})", of.median, of.min, of.max);
        for target in &self.targets {
            let cpu = target.cpu_s_per_1000.as_ref().map_or_else(|| String::from("-"), spread);
            lines.push(format!(
                "{:<14}{:<24}{:<24}{:<22}{:<24}{cpu:<24}{:>7}",
                target.name,
                spread(&target.ttft_p50_ms),
                spread(&target.ttft_p99_ms),
                spread(&target.itl_p99_ms),
                spread(&target.requests_per_second),
                target.failed
            ));
        }
        let first = self.targets.first().map_or("", |target| target.name.as_str());
        lines.push(format!("over {first}, of the same round"));
        for (target, ratios) in
            self.targets.iter().filter_map(|target| Some((target, target.over_first.as_ref()?)))
        {
            let ratio = |of: &Option<Spread>| of.as_ref().map_or_else(|| String::from("-"), spread);
            lines.push(format!(
                "{:<14}{:<24}{:<24}{:<22}{:<24}{:<24}",
                target.name,
                ratio(&ratios.ttft_p50),
                ratio(&ratios.ttft_p99),
                ratio(&ratios.itl_p99),
                ratio(&ratios.requests_per_second),
                ratio(&ratios.cpu)
            ));
        }
        if self.targets.iter().any(|target| target.gap.is_some()) {
            lines.push(format!(
                "clients that leave in the gap: lent for {} ms, looked at by the decode engine after {} ms",
                self.lease_ms, self.admission_delay_ms
            ));
            lines.push(format!(
                "{:<14}{:>8}{:>10}{:>8}{:>30}{:>36}",
                "",
                "victims",
                "stranded",
                "missed",
                "block-seconds per 1,000",
                "home after p50, p99, max, ms"
            ));
        }
        for (target, gap) in self.targets.iter().filter_map(|target| Some((target, target.gap.as_ref()?))) {
            let home = format!("{:.2}, {:.2}, {:.2}", gap.freed_p50_ms, gap.freed_p99_ms, gap.freed_max_ms);
            lines.push(format!(
                "{:<14}{:>8}{:>10}{:>8}{:>30.1}{home:>36}",
                target.name, gap.victims, gap.stranded, gap.missed, gap.stranded_block_seconds_per_1000
            ));
        }
        lines.join("\n")
    }
}

impl TargetReport {
    pub(super) fn add(&mut self, round: &Round) {
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
    pub(super) fn add(&mut self, victims: Vec<Victim>) {
        for victim in victims {
            match victim {
                Victim::Missed => self.missed += 1,
                Victim::Home { after_ms, blocks, stranded } => {
                    self.victims += 1;
                    self.freed_ms.push(after_ms);
                    if stranded {
                        self.stranded += 1;
                        self.block_seconds += blocks as f64 * after_ms / 1e3;
                    }
                }
                Victim::Lost { after_ms, blocks } => {
                    self.victims += 1;
                    self.stranded += 1;
                    self.lost += 1;
                    // At least.
                    self.freed_ms.push(after_ms);
                    self.block_seconds += blocks as f64 * after_ms / 1e3;
                }
            }
        }
        self.freed_ms.sort_by(f64::total_cmp);
        let at = |p| percentile(&self.freed_ms, p);
        (self.freed_p50_ms, self.freed_p99_ms, self.freed_max_ms) = (at(50.0), at(99.0), at(100.0));
        if self.victims > 0 {
            self.stranded_block_seconds_per_1000 = self.block_seconds * 1_000.0 / self.victims as f64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_counted_by_hand() {
        let mut gap = GapReport::default();
        let home = |after_ms, stranded| Victim::Home { after_ms, blocks: 4, stranded };
        gap.add(vec![home(2.0, false), home(3_000.0, true), Victim::Missed]);
        gap.add(vec![home(1.0, false), home(500.0, true)]);
        assert_eq!((gap.victims, gap.stranded, gap.missed, gap.lost), (4, 2, 1, 0));
        // 4 × 3 s and 4 × 0.5 s, of four victims.
        assert_eq!(gap.stranded_block_seconds_per_1000, 14.0 * 250.0);
        assert_eq!((gap.freed_p50_ms, gap.freed_p99_ms, gap.freed_max_ms), (2.0, 3_000.0, 3_000.0));
    }
}
