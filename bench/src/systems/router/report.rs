//! The report, as JSON and as a table.

use serde::Serialize;

use super::RouterArgs;
use super::gateway::Gateway;
use crate::common::machine;
use crate::common::stats::Spread;

/// A number over the repetitions of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RepeatSpread {
    /// Median.
    pub median: f64,
    /// Minimum.
    pub min: f64,
    /// Maximum.
    pub max: f64,
    #[serde(skip)]
    values: Vec<f64>,
}

impl RepeatSpread {
    pub(crate) fn add(&mut self, value: f64) {
        self.values.push(value);
        let spread = Spread::of(self.values.clone()).expect("there is a value");
        (self.median, self.min, self.max) = (spread.median, spread.min, spread.max);
    }

    /// Ratios of this number over another, for each repetition.
    pub(crate) fn over(&self, other: &Self) -> Option<Self> {
        let mut ratios = Self::default();
        for (mine, its) in self.values.iter().zip(&other.values) {
            ratios.add(mine / its);
        }
        (!ratios.values.is_empty()).then_some(ratios)
    }
}

/// One kind of request under load.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LoadReport {
    /// `unary_c1`, `unary_cN`, `streamed_c1`, `streamed_cN` or `paced_cN`, where N is `concurrency`.
    pub kind: String,
    /// User and system time of the subject per request, in microseconds.
    pub cpu_us: RepeatSpread,
    /// The same over nginx in the same repetition.
    pub cpu_over_nginx: Option<RepeatSpread>,
    /// Complete requests per second, with client and engines on the same machine.
    pub requests_per_second: RepeatSpread,
}

/// Behaviour of idle processors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CoreMode {
    /// They sleep, as the machine is configured. The time to wake one is part of the result.
    #[default]
    AsTheyAre,
    /// They are kept awake.
    Awake,
}

impl CoreMode {
    fn name(self) -> &'static str {
        match self {
            Self::AsTheyAre => "as they are",
            Self::Awake => "awake",
        }
    }
}

/// Time to first token with one request at a time, in microseconds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct FirstToken {
    /// Behaviour of idle processors during the measurement.
    pub cores: CoreMode,
    /// The client that makes both hops itself: median.
    pub direct_p50_us: RepeatSpread,
    /// The same: 99th percentile.
    pub direct_p99_us: RepeatSpread,
    /// The subject: median.
    pub p50_us: RepeatSpread,
    /// The same: 99th percentile.
    pub p99_us: RepeatSpread,
    /// The subject's median minus the direct client's.
    pub added_p50_us: RepeatSpread,
    /// The subject's 99th percentile minus the direct client's.
    pub added_p99_us: RepeatSpread,
}

/// Resident memory.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Memory {
    /// After a few requests, in MiB.
    pub idle_mib: f64,
    /// Memory that one open, silent stream adds, in KiB.
    pub per_stream_kib: Option<f64>,
    /// Number of open streams.
    pub streams: usize,
}

/// Time until an engine detects a client's disconnect.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Hangup {
    /// The phase of the client's request.
    pub phase: &'static str,
    /// Closes that the engine detected.
    pub seen: usize,
    /// Closes that the engine did not detect within a second.
    pub missed: usize,
    /// Median, in milliseconds.
    pub p50_ms: f64,
    /// 99th percentile, in milliseconds.
    pub p99_ms: f64,
    /// Greatest, in milliseconds.
    pub max_ms: f64,
}

/// One gateway.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GatewayReport {
    /// `nginx`, `baton`, `vllm-router`, `smg`.
    pub name: &'static str,
    /// The version that the gateway reports.
    pub version: String,
    /// CPU per request.
    pub loads: Vec<LoadReport>,
    /// With idle processors asleep and, if the system allows it, kept awake. Empty for nginx, which makes one hop.
    pub first_token: Vec<FirstToken>,
    /// `None` if the gateway runs in the benchmark's own process.
    pub memory: Option<Memory>,
    /// By phase.
    pub hangups: Vec<Hangup>,
}

/// A whole run. The fields are the keys of `--json`.
#[derive(Clone, Debug, Serialize)]
pub struct RouterReport {
    /// Seconds since the epoch at the start.
    pub unix_seconds: u64,
    /// Commit of the repository in which the run took place.
    pub commit: Option<String>,
    /// The command.
    pub command: String,
    /// The machine: processor, processors, memory.
    pub machine: String,
    /// Repetitions.
    pub repetitions: usize,
    /// Requests of each kind, per gateway and repetition.
    pub load_requests: usize,
    /// Concurrent requests under load.
    pub concurrency: usize,
    /// Tokens per response.
    pub tokens: usize,
    /// Milliseconds between two tokens of a paced stream.
    pub pause_ms: u64,
    /// All gateways.
    pub subjects: Vec<GatewayReport>,
}

impl GatewayReport {
    pub(super) fn load(&mut self, kind: &str) -> &mut LoadReport {
        let at = self.loads.iter().position(|load| load.kind == kind).unwrap_or_else(|| {
            self.loads.push(LoadReport { kind: kind.to_owned(), ..LoadReport::default() });
            self.loads.len() - 1
        });
        &mut self.loads[at]
    }

    pub(super) fn first_token(&mut self, cores: CoreMode) -> &mut FirstToken {
        let at = self.first_token.iter().position(|of| of.cores == cores).unwrap_or_else(|| {
            self.first_token.push(FirstToken { cores, ..FirstToken::default() });
            self.first_token.len() - 1
        });
        &mut self.first_token[at]
    }
}

impl RouterReport {
    pub(super) fn new(args: &RouterArgs, subjects: &[Gateway]) -> Self {
        let subjects = subjects.iter().map(|subject| GatewayReport {
            name: subject.name,
            version: subject.version.clone(),
            ..GatewayReport::default()
        });
        Self {
            unix_seconds: machine::unix_seconds(),
            commit: machine::commit(),
            command: machine::command(),
            machine: machine::described(),
            repetitions: args.repetitions,
            load_requests: args.load_requests,
            concurrency: args.concurrency,
            tokens: args.tokens,
            pause_ms: args.pause_ms,
            subjects: subjects.collect(),
        }
    }

    /// The report of a gateway of this run.
    pub(super) fn of(&mut self, name: &str) -> &mut GatewayReport {
        self.subjects.iter_mut().find(|of| of.name == name).expect("a subject of this run")
    }

    /// Computes the ratios.
    pub(super) fn compare(&mut self) {
        let Some(nginx) = self.subjects.iter().find(|of| of.name == "nginx").cloned() else { return };
        for load in self.subjects.iter_mut().flat_map(|of| &mut of.loads) {
            let base = nginx.loads.iter().find(|of| of.kind == load.kind);
            load.cpu_over_nginx = base.and_then(|base| load.cpu_us.over(&base.cpu_us));
        }
    }

    /// The report for people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut lines = vec![
            self.machine.clone(),
            String::from(
                "CPU per request                  µs   (  min ..   max)  × nginx (  min ..   max)    req/s",
            ),
        ];
        for subject in &self.subjects {
            for load in &subject.loads {
                let (cpu, ratio) = (&load.cpu_us, load.cpu_over_nginx.clone().unwrap_or_default());
                lines.push(format!(
                    "{:<12}{:<13}{:>10.1} ({:>6.1} .. {:>6.1}) {:>7.2} ({:>5.2} .. {:>5.2}) {:>9.0}",
                    subject.name,
                    load.kind,
                    cpu.median,
                    cpu.min,
                    cpu.max,
                    ratio.median,
                    ratio.min,
                    ratio.max,
                    load.requests_per_second.median
                ));
            }
        }
        lines.push(String::from(
            "added time to first token, µs    cores           p50 (min .. max)   p99 (min .. max)   direct p50, p99",
        ));
        for subject in &self.subjects {
            for of in &subject.first_token {
                let (p50, p99) = (&of.added_p50_us, &of.added_p99_us);
                let (added_p50, added_p99) = (
                    format!("{:.0} ({:.0} .. {:.0})", p50.median, p50.min, p50.max),
                    format!("{:.0} ({:.0} .. {:.0})", p99.median, p99.min, p99.max),
                );
                lines.push(format!(
                    "{:<33}{:<16}{added_p50:<19}{added_p99:<19}{:.0}, {:.0}",
                    subject.name,
                    of.cores.name(),
                    of.direct_p50_us.median,
                    of.direct_p99_us.median
                ));
            }
        }
        lines.push(String::from("resident memory            idle MiB   KiB per open stream"));
        for subject in &self.subjects {
            if let Some(memory) = &subject.memory {
                let each = memory.per_stream_kib.unwrap_or(f64::NAN);
                lines.push(format!("{:<20}{:>14.1} {:>12.1}", subject.name, memory.idle_mib, each));
            }
        }
        lines.push(String::from(
            "client's close at the engine, ms       p50      p99      max   seen  missed",
        ));
        for subject in &self.subjects {
            for h in &subject.hangups {
                lines.push(format!(
                    "{:<12}{:<20}{:>9.3}{:>9.3}{:>9.3}{:>7}{:>8}",
                    subject.name, h.phase, h.p50_ms, h.p99_ms, h.max_ms, h.seen, h.missed
                ));
            }
        }
        lines.join("\n")
    }
}
