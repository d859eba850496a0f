//! `baton bench router`: what the front door costs.
//!
//! One simulated prefill engine, one simulated decode engine ([`crate::sim_engine`]) and the router, on
//! loopback. Two things are measured:
//!
//! - **Added time to first token**, with one request at a time: the time until the first streamed byte
//!   through the router, against a client that makes both hops itself. The two alternate in one run, so that
//!   whatever else the machine does falls on both.
//! - **CPU per request** of the router's threads, and requests per second, with eight requests at a time, for
//!   answers in one piece and for streams of 64 tokens (user and system time, from `/proc/PID/task/*/schedstat`).
//!
//! With `--json` one object:
//!
//! | key | unit |
//! |---|---|
//! | `requests` | pairs of requests behind the times |
//! | `first_token_direct_us`, `first_token_router_us` | `{p50, p99}`, microseconds |
//! | `added_us` | `{p50, p99}`: router minus direct, quantile by quantile, microseconds |
//! | `unary`, `streamed` | `{requests, concurrency, requests_per_second, cpu_us_per_request}` |
//! | `tokens` | tokens per answer |
//! | `router` | `process`, or `threads` when it ran inside this process |

mod client;
mod subject;

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::sim_engine::{self, SimRole};
use client::{Caller, Direct, Through};
use subject::Subject;

/// What to measure.
#[derive(Clone, Debug, clap::Args)]
pub struct RouterArgs {
    /// Pairs of requests for the time to first token.
    #[arg(long, default_value_t = 2_000)]
    pub requests: usize,
    /// Requests of each kind for CPU per request.
    #[arg(long, default_value_t = 4_000)]
    pub load_requests: usize,
    /// Requests at a time for CPU per request.
    #[arg(long, default_value_t = 8)]
    pub concurrency: usize,
    /// Tokens per answer.
    #[arg(long, default_value_t = 64)]
    pub tokens: usize,
    /// The `baton` binary whose `router` is measured as a process of its own [default: this one; where this
    /// is another program, the router runs on threads of it]
    #[arg(long)]
    pub binary: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// Why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum RouterBenchError {
    /// The system around the router.
    #[error("{0}: {1}")]
    System(&'static str, std::io::Error),
    /// A request through the router or past it.
    #[error("a request failed: {0}")]
    Request(String),
    /// The router did not start.
    #[error("the router did not start: {0}")]
    Router(String),
}

/// Two quantiles in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Quantiles {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
}

/// One kind of request under load.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Load {
    /// Requests done.
    pub requests: usize,
    /// Requests at a time.
    pub concurrency: usize,
    /// Whole requests per second, client and engines included in the machine's work.
    pub requests_per_second: f64,
    /// User and system time of the router per request, in microseconds.
    pub cpu_us_per_request: f64,
}

/// What was measured; the keys of `--json`.
#[derive(Clone, Debug, Serialize)]
pub struct RouterReport {
    /// Pairs of requests behind the times.
    pub requests: usize,
    /// Past the router.
    pub first_token_direct_us: Quantiles,
    /// Through the router.
    pub first_token_router_us: Quantiles,
    /// Router minus direct.
    pub added_us: Quantiles,
    /// Answers in one piece.
    pub unary: Load,
    /// Streams.
    pub streamed: Load,
    /// Tokens per answer.
    pub tokens: usize,
    /// `process` or `threads`.
    pub router: &'static str,
}

/// Measures, and writes the table or the JSON object to `out`.
///
/// # Errors
/// [`RouterBenchError`] when a part does not start or a request fails.
pub fn run(args: &RouterArgs, out: &mut dyn Write) -> Result<(), RouterBenchError> {
    let report = measure(args)?;
    let text = if args.json {
        serde_json::to_string(&report).expect("numbers and names are JSON")
    } else {
        report.table()
    };
    writeln!(out, "{text}").map_err(|error| RouterBenchError::System("cannot write the report", error))
}

/// Measures.
///
/// # Errors
/// As [`run`].
pub fn measure(args: &RouterArgs) -> Result<RouterReport, RouterBenchError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("bench-sim")
        .enable_all()
        .build()
        .map_err(|error| RouterBenchError::System("no runtime", error))?;
    runtime.block_on(async {
        let start = |role| async move {
            sim_engine::start(role).await.map_err(|error| RouterBenchError::System("no engine", error))
        };
        let prefill = start(SimRole::Prefill).await?;
        let decode = start(SimRole::Decode { tokens: args.tokens }).await?;
        let binary = args.binary.clone().or_else(this_binary);
        let subject = Subject::start(binary.as_deref(), prefill, decode).await?;
        let mut direct = Direct::connect(prefill, decode).await?;
        let mut through = Through::connect(subject.address).await?;
        let (direct_us, router_us) = first_tokens(&mut direct, &mut through, args.requests).await?;
        let unary = load(&subject, args, false).await?;
        let streamed = load(&subject, args, true).await?;
        let report = RouterReport {
            requests: args.requests,
            first_token_direct_us: direct_us,
            first_token_router_us: router_us,
            added_us: Quantiles { p50: router_us.p50 - direct_us.p50, p99: router_us.p99 - direct_us.p99 },
            unary,
            streamed,
            tokens: args.tokens,
            router: subject.kind(),
        };
        subject.stop().await;
        Ok(report)
    })
}

/// The running program, if it has a `router` command.
fn this_binary() -> Option<PathBuf> {
    std::env::current_exe().ok().filter(|path| path.file_stem().is_some_and(|stem| stem == "baton"))
}

/// Alternates, and leaves out the first tenth: connections, caches and branch predictors are cold.
async fn first_tokens(
    direct: &mut Direct,
    through: &mut Through,
    pairs: usize,
) -> Result<(Quantiles, Quantiles), RouterBenchError> {
    let (mut past, mut by) = (histogram(), histogram());
    let warm = pairs / 10;
    for pair in 0..warm + pairs {
        let took = [direct.first_token().await?, through.first_token().await?];
        if pair >= warm {
            past.saturating_record(nanoseconds(took[0]));
            by.saturating_record(nanoseconds(took[1]));
        }
    }
    Ok((quantiles(&past), quantiles(&by)))
}

async fn load(subject: &Subject, args: &RouterArgs, stream: bool) -> Result<Load, RouterBenchError> {
    let each = args.load_requests.div_ceil(args.concurrency);
    let mut callers = Vec::new();
    for _ in 0..args.concurrency {
        let mut caller = Through::connect(subject.address).await?;
        // The connections to the engines are made now, not while the CPU is counted.
        caller.whole(stream).await?;
        callers.push(caller);
    }
    let (cpu, begun) = (subject.cpu()?, Instant::now());
    let mut tasks = tokio::task::JoinSet::new();
    for mut caller in callers {
        tasks.spawn(async move {
            for _ in 0..each {
                caller.whole(stream).await?;
            }
            Ok::<_, RouterBenchError>(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.map_err(|error| RouterBenchError::Request(error.to_string()))??;
    }
    let (took, used) = (begun.elapsed(), subject.cpu()?.saturating_sub(cpu));
    let requests = each * args.concurrency;
    Ok(Load {
        requests,
        concurrency: args.concurrency,
        requests_per_second: requests as f64 / took.as_secs_f64(),
        cpu_us_per_request: used.as_secs_f64() * 1e6 / requests as f64,
    })
}

/// From 1 µs to a minute, in nanoseconds, to three digits.
fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1_000, 60_000_000_000, 3).expect("the bounds are in order")
}

fn nanoseconds(took: Duration) -> u64 {
    u64::try_from(took.as_nanos()).unwrap_or(u64::MAX)
}

fn quantiles(of: &Histogram<u64>) -> Quantiles {
    let at = |quantile| of.value_at_quantile(quantile) as f64 / 1e3;
    Quantiles { p50: at(0.5), p99: at(0.99) }
}

impl RouterReport {
    /// The report for people.
    #[must_use]
    pub fn table(&self) -> String {
        let times = |name: &str, q: Quantiles| format!("{name:<34}{:>10.0}{:>10.0}", q.p50, q.p99);
        let load = |name: &str, l: Load| {
            format!("{name:<34}{:>10.1}{:>10.0}", l.cpu_us_per_request, l.requests_per_second)
        };
        let kind = self.router;
        [
            format!("time to first token, µs ({} pairs)        p50       p99", self.requests),
            times("  both hops by the client", self.first_token_direct_us),
            times("  through the router", self.first_token_router_us),
            times("  added by the router", self.added_us),
            format!("router ({kind}), {} at a time       CPU µs/req     req/s", self.unary.concurrency),
            load("  answers in one piece", self.unary),
            load(&format!("  streams of {} tokens", self.tokens), self.streamed),
        ]
        .join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_run_measures_every_number() {
        let args = RouterArgs {
            requests: 20,
            load_requests: 40,
            concurrency: 4,
            tokens: 8,
            binary: None,
            json: false,
        };
        let report = measure(&args).expect("everything starts on loopback");
        assert!(report.first_token_router_us.p50 > report.first_token_direct_us.p50, "{}", report.table());
        for load in [report.unary, report.streamed] {
            assert_eq!(load.requests, 40);
            assert!(load.cpu_us_per_request > 1.0 && load.requests_per_second > 1.0, "{}", report.table());
        }
        assert!(report.table().contains("added by the router"));
    }
}
