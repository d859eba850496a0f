//! What a run requests and when. It is decided before the run, from distributions or a trace, by seed.

use std::path::PathBuf;
use std::time::Duration;

use crate::load::plan::arrivals::{ArrivalRate, Arrivals, REQUESTS_MAX};
use crate::load::plan::lengths::Lengths;
use crate::load::plan::prompts::PromptSegment;
use crate::load::plan::traces::{self, BLOCK_TOKENS, Format, Trace};
use crate::load::rng::Rng;

/// Default number of requests of a run, as in vLLM's `bench serve`.
const REQUESTS: usize = 1_000;
/// Maximum requests of a closed loop that ends by time.
const REQUESTS_BY_TIME: usize = 200_000;

/// The workload, as options.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct WorkloadArgs {
    /// Requests per run [default: 1000; with --duration or --trace as many as fit]
    #[arg(long, value_name = "N")]
    pub(crate) num_prompts: Option<usize>,
    /// Seconds in which requests begin
    #[arg(long, value_name = "SECONDS")]
    pub(crate) duration: Option<f64>,
    /// Requests per second; inf: all at once, or with --max-concurrency one after another per lane
    #[arg(long, default_value = "inf", value_name = "RATE")]
    pub(crate) request_rate: f64,
    /// Shape of the gamma distribution of intervals: 1 is Poisson, less is burstier, inf is constant
    #[arg(long, default_value_t = 1.0, value_name = "SHAPE")]
    pub(crate) burstiness: f64,
    /// Change of the rate from --ramp-up-start-rps to --ramp-up-end-rps over a run
    #[arg(long, value_name = "NAME", requires = "ramp_up_start_rps", requires = "ramp_up_end_rps")]
    pub(crate) ramp_up_strategy: Option<Ramp>,
    /// Requests per second at the first request of a ramp
    #[arg(long, value_name = "RATE", requires = "ramp_up_strategy")]
    pub(crate) ramp_up_start_rps: Option<f64>,
    /// Requests per second at the last request of a ramp
    #[arg(long, value_name = "RATE", requires = "ramp_up_strategy")]
    pub(crate) ramp_up_end_rps: Option<f64>,
    /// Seconds with arrivals, which alternate with --burst-off seconds without
    #[arg(long, value_name = "SECONDS", requires = "burst_off")]
    pub(crate) burst_on: Option<f64>,
    /// Seconds without arrivals between two bursts
    #[arg(long, value_name = "SECONDS", requires = "burst_on")]
    pub(crate) burst_off: Option<f64>,
    /// Maximum requests in flight; excess requests wait in the client, and the wait counts
    #[arg(long, value_name = "N")]
    pub(crate) max_concurrency: Option<usize>,
    /// Tokens per prompt: N, uniform:A-B, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA, zipf:A-B:S
    #[arg(long, visible_alias = "random-input-len", default_value = "512", value_name = "LENGTHS")]
    pub(crate) input_len: Lengths,
    /// Tokens per response, in the forms of --input-len
    #[arg(long, visible_alias = "random-output-len", default_value = "128", value_name = "LENGTHS")]
    pub(crate) output_len: Lengths,
    /// First tokens of the prompt that are shared with other requests
    #[arg(long, visible_alias = "random-prefix-len", default_value_t = 0, value_name = "TOKENS")]
    pub(crate) prefix_len: u32,
    /// Number of different shared prefixes
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) prefix_count: u32,
    /// Share of requests with a shared prefix
    #[arg(long, default_value_t = 1.0, value_name = "FRACTION")]
    pub(crate) prefix_share: f64,
    /// Trace to replay: arrival times, lengths and shared prefixes
    #[arg(long, value_name = "FILE", conflicts_with_all = ["duration", "ramp_up_strategy", "burst_on"])]
    pub(crate) trace: Option<PathBuf>,
    /// Format of the trace
    #[arg(long, value_name = "NAME", default_value = "auto", requires = "trace")]
    pub(crate) trace_format: Format,
    /// Factor by which the trace is replayed faster
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR")]
    pub(crate) speedup: f64,
    /// Replay only the first N requests of the trace [default: all]
    #[arg(long, value_name = "N", requires = "trace")]
    pub(crate) limit: Option<usize>,
    /// Maximum tokens per prompt; longer prompts are cut
    #[arg(long, value_name = "TOKENS")]
    pub(crate) max_input_len: Option<u32>,
    /// Maximum tokens per response; longer responses are cut
    #[arg(long, value_name = "TOKENS")]
    pub(crate) max_output_len: Option<u32>,
    /// Seed of lengths, words and arrivals; each further run uses the next one
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
}

/// How a rate changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Ramp {
    /// Adds the same amount with each request
    Linear,
    /// Multiplies by the same factor with each request
    Exponential,
}

/// One request of a run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlannedRequest {
    /// Time after the beginning. `None` in a closed loop, where a request is due when a lane is free.
    pub(crate) at: Option<Duration>,
    pub(crate) segments: Vec<PromptSegment>,
    pub(crate) output_tokens: u32,
}

impl PlannedRequest {
    pub(crate) fn input_tokens(&self) -> u32 {
        self.segments.iter().map(|segment| segment.tokens).sum()
    }
}

/// The plan of a run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RunPlan {
    pub(crate) requests: Vec<PlannedRequest>,
    /// Maximum requests in flight.
    pub(crate) lanes: Option<usize>,
    /// No request begins after this time. An open loop plans none for later.
    pub(crate) until: Option<Duration>,
}

/// Why a workload is invalid.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkloadError {
    #[error("{0} has to be {1}")]
    Option(&'static str, &'static str),
    #[error("{0}: {1}")]
    File(String, std::io::Error),
    #[error("{0}: {1}")]
    Trace(String, traces::TraceError),
}

/// A checked workload with its trace.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    args: WorkloadArgs,
    arrivals: Arrivals,
    trace: Option<Trace>,
}

impl WorkloadArgs {
    /// Checks everything and reads the trace.
    ///
    /// # Errors
    /// [`WorkloadError`].
    pub(crate) fn check(&self) -> Result<Workload, WorkloadError> {
        const POSITIVE: &str = "greater than 0";
        let rate = |rate: f64| rate > 0.0 && rate <= 1e7;
        let seconds = |seconds: f64| seconds > 0.0 && seconds <= 1e9;
        let need = |fine: bool, name: &'static str, what: &'static str| match fine {
            true => Ok(()),
            false => Err(WorkloadError::Option(name, what)),
        };
        let prompts = self.num_prompts.is_none_or(|n| (1..=REQUESTS_MAX).contains(&n));
        need(prompts, "--num-prompts", "from 1 to 10,000,000")?;
        need(self.duration.is_none_or(seconds), "--duration", POSITIVE)?;
        let rate_or_inf = rate(self.request_rate) || self.request_rate == f64::INFINITY;
        need(rate_or_inf, "--request-rate", "greater than 0, or inf")?;
        need(self.burstiness > 0.0, "--burstiness", POSITIVE)?;
        need(self.max_concurrency != Some(0), "--max-concurrency", POSITIVE)?;
        need((0.0..=1.0).contains(&self.prefix_share), "--prefix-share", "from 0 to 1")?;
        need(self.prefix_count > 0, "--prefix-count", POSITIVE)?;
        need(self.speedup > 0.0 && self.speedup.is_finite(), "--speedup", POSITIVE)?;
        need(self.limit != Some(0), "--limit", POSITIVE)?;
        need(self.max_input_len != Some(0), "--max-input-len", POSITIVE)?;
        need(self.max_output_len != Some(0), "--max-output-len", POSITIVE)?;
        need(self.burst_on.is_none_or(seconds), "--burst-on", POSITIVE)?;
        need(self.burst_off.is_none_or(|off| off == 0.0 || seconds(off)), "--burst-off", "0 or more")?;
        let ramp = match (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps) {
            (Some(strategy), Some(from), Some(to)) => {
                need(rate(from), "--ramp-up-start-rps", POSITIVE)?;
                need(rate(to), "--ramp-up-end-rps", POSITIVE)?;
                let no_rate = "left out with a ramp, which says its own";
                need(self.request_rate.is_infinite(), "--request-rate", no_rate)?;
                let no_duration = "left out with a ramp, which goes over --num-prompts";
                need(self.duration.is_none(), "--duration", no_duration)?;
                Some(match strategy {
                    Ramp::Linear => ArrivalRate::Linear(from, to),
                    Ramp::Exponential => ArrivalRate::Exponential(from, to),
                })
            }
            _ => None,
        };
        let constant = self.request_rate.is_finite().then_some(ArrivalRate::Constant(self.request_rate));
        let rate = ramp.or(constant);
        need(rate.is_some() || self.burst_on.is_none(), "--request-rate", "given with --burst-on")?;
        let open = rate.is_some() || self.trace.is_some();
        let ends = open || self.duration.is_none() || self.max_concurrency.is_some();
        need(ends, "--request-rate or --max-concurrency", "given with --duration")?;
        let no_rate = "left out with --trace, which has its own times";
        need(self.trace.is_none() || rate.is_none(), "--request-rate", no_rate)?;
        let of_seconds = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        let waves = self.burst_on.zip(self.burst_off).map(|(on, off)| (of_seconds(on), of_seconds(off)));
        let trace = self.trace.as_ref().map(|file| {
            let name = file.display().to_string();
            let opened =
                std::fs::File::open(file).map_err(|error| WorkloadError::File(name.clone(), error))?;
            let limit = self.limit.unwrap_or(usize::MAX);
            traces::read(std::io::BufReader::new(opened), self.trace_format, limit)
                .map_err(|error| WorkloadError::Trace(name, error))
        });
        let arrivals = Arrivals { rate, burstiness: self.burstiness, waves };
        Ok(Workload { args: self.clone(), arrivals, trace: trace.transpose()? })
    }
}

impl Workload {
    /// Lines of the trace that were skipped.
    pub(crate) fn left_out(&self) -> usize {
        self.trace.as_ref().map_or(0, |trace| trace.left_out)
    }

    /// Whether a request waits only for the end of another.
    pub(crate) fn is_closed(&self) -> bool {
        self.trace.is_none() && self.arrivals.rate.is_none() && self.args.max_concurrency.is_some()
    }

    /// The plan of the run with this number.
    pub(crate) fn plan(&self, run: usize) -> RunPlan {
        let seed = self.args.seed.wrapping_add(run as u64);
        let until =
            self.args.duration.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX));
        let requests = match &self.trace {
            Some(trace) => self.replayed(trace, seed),
            None => self.drawn(seed, until),
        };
        RunPlan { requests, lanes: self.args.max_concurrency, until }
    }

    fn replayed(&self, trace: &Trace, seed: u64) -> Vec<PlannedRequest> {
        let mut unique = Rng::stream(seed, "prompts");
        let count = self.args.num_prompts.unwrap_or(usize::MAX);
        let planned = trace.requests.iter().take(count).map(|traced| {
            let mut left = self.input(traced.input_tokens);
            let mut segments = Vec::new();
            for hash in &traced.blocks {
                let tokens = left.min(BLOCK_TOKENS);
                segments.push(PromptSegment { seed: Rng::new(seed ^ hash.rotate_left(32)).next(), tokens });
                left -= tokens;
                if left == 0 {
                    break;
                }
            }
            if left > 0 {
                segments.push(PromptSegment { seed: unique.next(), tokens: left });
            }
            let at = Some(traced.at.div_f64(self.args.speedup));
            PlannedRequest { at, segments, output_tokens: self.output(traced.output_tokens) }
        });
        planned.collect()
    }

    fn drawn(&self, seed: u64, until: Option<Duration>) -> Vec<PlannedRequest> {
        let [mut inputs, mut outputs, mut sharing, mut unique] =
            ["inputs", "outputs", "sharing", "prompts"].map(|name| Rng::stream(seed, name));
        let mut prefixes = Rng::stream(seed, "prefixes");
        let prefixes: Vec<u64> = (0..self.args.prefix_count).map(|_| prefixes.next()).collect();
        let count = self.count(until);
        let mut times = self.arrivals.times(count, &mut Rng::stream(seed, "arrivals"));
        if let Some(until) = until.filter(|_| !self.is_closed()) {
            times.truncate(times.partition_point(|at| *at < until));
        }
        let closed = self.is_closed();
        let planned = times.into_iter().map(|at| {
            let tokens = self.input(self.args.input_len.draw(&mut inputs));
            // Both are drawn for every request, so that one option does not change another's draws.
            let (shares, which) =
                (sharing.chance(self.args.prefix_share), sharing.below(prefixes.len() as u64));
            let shared = if shares { self.args.prefix_len.min(tokens) } else { 0 };
            let prefix = usize::try_from(which).ok().and_then(|which| prefixes.get(which)).copied();
            let beginning = PromptSegment { seed: prefix.unwrap_or_default(), tokens: shared };
            let rest = PromptSegment { seed: unique.next(), tokens: tokens - shared };
            PlannedRequest {
                at: (!closed).then_some(at),
                segments: [beginning, rest].into_iter().filter(|segment| segment.tokens > 0).collect(),
                output_tokens: self.output(self.args.output_len.draw(&mut outputs)),
            }
        });
        planned.collect()
    }

    /// The number of planned requests, before those that are due too late are removed.
    fn count(&self, until: Option<Duration>) -> usize {
        let by_time = match (until, self.arrivals.rate) {
            (None, _) => REQUESTS,
            (Some(_), None) => REQUESTS_BY_TIME,
            (Some(until), Some(rate)) => {
                // A Poisson process practically never exceeds 1.2 times its mean plus 1,000. A burstier process may,
                // and its silence then begins early.
                let ArrivalRate::Constant(rate) = rate else { return REQUESTS };
                let spread =
                    if self.arrivals.burstiness < 1.0 { 1.2 / self.arrivals.burstiness } else { 1.2 };
                let mean = rate * until.as_secs_f64();
                (mean * spread + 1_000.0).min(REQUESTS_MAX as f64) as usize
            }
        };
        match (self.args.num_prompts, until) {
            (Some(most), Some(_)) => most.min(by_time.max(most)),
            (Some(most), None) => most,
            (None, _) => by_time,
        }
    }

    fn input(&self, tokens: u32) -> u32 {
        tokens.min(self.args.max_input_len.unwrap_or(u32::MAX))
    }

    fn output(&self, tokens: u32) -> u32 {
        tokens.min(self.args.max_output_len.unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct WorkloadCli {
        #[command(flatten)]
        args: WorkloadArgs,
    }

    fn workload(options: &str) -> Workload {
        let line = WorkloadCli::try_parse_from(std::iter::once("x").chain(options.split_whitespace()));
        let args = line.unwrap_or_else(|error| panic!("{options}: {error}")).args;
        args.check().unwrap_or_else(|error| panic!("{options}: {error}"))
    }

    #[test]
    fn a_plan_follows_from_its_seed_and_its_options_are_independent() {
        let options =
            "--num-prompts 200 --request-rate 10 --input-len uniform:5-500 --output-len uniform:1-50";
        let plan = workload(options).plan(0);
        assert_eq!(plan, workload(options).plan(0));
        assert_eq!(
            workload(&format!("{options} --seed 3")).plan(1),
            workload(&format!("{options} --seed 4")).plan(0)
        );
        let times = |plan: &RunPlan| plan.requests.iter().map(|planned| planned.at).collect::<Vec<_>>();
        let lengths =
            |plan: &RunPlan| plan.requests.iter().map(PlannedRequest::input_tokens).collect::<Vec<_>>();
        let outputs =
            |plan: &RunPlan| plan.requests.iter().map(|planned| planned.output_tokens).collect::<Vec<_>>();
        let other =
            workload(&format!("{options} --prefix-len 100 --prefix-count 3 --burstiness 0.5")).plan(0);
        assert_eq!((lengths(&plan), outputs(&plan)), (lengths(&other), outputs(&other)));
        assert_ne!(times(&plan), times(&other));
        assert_ne!(lengths(&plan), lengths(&workload(options).plan(1)));
    }

    #[test]
    fn the_requested_share_of_requests_has_a_common_prefix() {
        let options =
            "--num-prompts 4000 --input-len 300 --prefix-len 200 --prefix-count 4 --prefix-share 0.25";
        let plan = workload(options).plan(0);
        let shared: Vec<_> = plan.requests.iter().filter(|planned| planned.segments.len() == 2).collect();
        assert!((900..1_100).contains(&shared.len()), "{}", shared.len());
        let prefixes: std::collections::BTreeSet<_> =
            shared.iter().map(|planned| planned.segments[0].seed).collect();
        assert_eq!(prefixes.len(), 4);
        assert!(
            shared.iter().all(|planned| planned.segments[0].tokens == 200 && planned.input_tokens() == 300)
        );
        let whole = workload("--num-prompts 9 --input-len 64 --prefix-len 100").plan(0);
        assert!(
            whole.requests.iter().all(|planned| planned.segments.len() == 1 && planned.input_tokens() == 64)
        );
    }

    #[test]
    fn loops_are_open_or_closed_and_end_by_number_or_time() {
        let closed = workload("--max-concurrency 8").plan(0);
        assert_eq!((closed.requests.len(), closed.lanes), (1_000, Some(8)));
        assert!(closed.requests.iter().all(|planned| planned.at.is_none()));
        let at_once = workload("--num-prompts 3").plan(0);
        assert!(
            at_once.requests.iter().all(|planned| planned.at == Some(Duration::ZERO))
                && at_once.lanes.is_none()
        );
        for burstiness in ["1", "0.1", "inf"] {
            let timed =
                workload(&format!("--duration 20 --request-rate 50 --burstiness {burstiness}")).plan(0);
            let last = timed.requests.last().and_then(|planned| planned.at).expect("requests");
            assert!(last < Duration::from_secs(20) && last > Duration::from_secs(18), "{last:?}");
            assert!((700..1_300).contains(&timed.requests.len()), "{burstiness}: {}", timed.requests.len());
        }
        assert_eq!(workload("--duration 20 --request-rate 50 --num-prompts 10").plan(0).requests.len(), 10);
        let lanes = workload("--duration 5 --max-concurrency 2").plan(0);
        assert_eq!((lanes.until, lanes.requests.len()), (Some(Duration::from_secs(5)), REQUESTS_BY_TIME));
        let ramp = "--num-prompts 100 --ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 100";
        assert!(workload(ramp).plan(0).requests.iter().all(|planned| planned.at.is_some()));
    }

    #[test]
    fn a_trace_keeps_its_times_lengths_and_what_is_shared() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let lines = [
            r#"{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}"#,
            r#"{"timestamp": 3000, "input_length": 1030, "output_length": 500, "hash_ids": [7, 8, 10]}"#,
            r#"{"timestamp": 5000, "input_length": 2000, "output_length": 1, "hash_ids": [7]}"#,
        ];
        std::fs::write(file.path(), lines.join("\n")).expect("written");
        let options = format!("--trace {} --speedup 2 --max-output-len 64", file.path().display());
        let plan = workload(&options).plan(0);
        let at: Vec<_> =
            plan.requests.iter().map(|planned| planned.at.unwrap_or_default().as_secs()).collect();
        assert_eq!(at, [0, 1, 2]);
        let tokens =
            |nth: usize| plan.requests[nth].segments.iter().map(|segment| segment.tokens).collect::<Vec<_>>();
        assert_eq!(
            (tokens(0), tokens(1), tokens(2)),
            (vec![512, 512, 76], vec![512, 512, 6], vec![512, 1_488])
        );
        let seed = |nth: usize, block: usize| plan.requests[nth].segments[block].seed;
        assert!(
            seed(0, 0) == seed(1, 0)
                && seed(0, 1) == seed(1, 1)
                && seed(0, 2) != seed(1, 2)
                && seed(2, 0) == seed(0, 0)
        );
        assert_eq!(plan.requests[1].output_tokens, 64);
        let cut = workload(&format!("{options} --max-input-len 600 --limit 2")).plan(0);
        assert_eq!((cut.requests.len(), cut.requests[0].input_tokens()), (2, 600));
        assert_ne!(
            workload(&options).plan(1).requests[0].segments,
            plan.requests[0].segments,
            "no run finds another's cache"
        );
    }
}
