//! `baton bench router`: the costs of the router, compared with other gateways.
//!
//! All gateways are on loopback in front of one simulated prefill engine and one simulated decode engine
//! ([`crate::sim::instant`]). They are nginx as a plain reverse proxy (one hop, to the decode engine), this router,
//! with `--http2` this router with HTTP/2 to the engines, and with `--peers` the routers that `bench/peers.sh`
//! installs. A missing one is skipped with a line on standard error. Rounds alternate between the gateways, so that
//! other load of the machine affects all of them. Each number is the median over the repetitions, with minimum and
//! maximum. Each ratio is of the same repetition.
//!
//! | measured | how |
//! |---|---|
//! | CPU per request | user and system time of all threads of all processes of the subject (`schedstat`), per request; responses in one piece, streams of `--tokens` tokens as fast as the engine writes them, and streams with `--pause-ms` between two tokens, so that each token takes a separate read and write; with 1 and with `--concurrency` concurrent requests |
//! | added time to first token | first streamed byte through the subject, minus the same by a client that makes both hops itself, one request at a time, alternating by request; the engine sends its second token a millisecond later; with idle processors asleep, and kept awake |
//! | memory | resident (`smaps_rollup`), idle after a short warm-up, and per stream with `--streams` of them open and silent |
//! | close | from a client's close until the engine of its request detects it (end of the connection, or the abort or release verb, whichever comes first), on one clock, by the phase in which the client disconnects |
//!
//! `--soak N` measures only the router's memory, over N requests of which every tenth is cancelled.
//!
//! The objects of `--json` are [`RouterReport`] and [`SoakReport`].
//!
//! On a busy machine, run the command under a negative `nice`, which the gateways inherit.

mod busy_cores;
pub(crate) mod connection;
mod first_token;
pub(crate) mod gateway;
mod hangup;
mod load;
mod memory;
pub(crate) mod peers;
pub(crate) mod report;
mod soak;

use std::io::Write;
use std::time::Duration;

use crate::common::report::print_report;
use crate::sim::instant::{SimEngine, SimRole};
pub use peers::ProgramArgs;
pub use report::{
    CoreMode, FirstToken, GatewayReport, Hangup, LoadReport, Memory, RepeatSpread, RouterReport,
};
pub use soak::SoakReport;

/// Options of `baton bench router`.
#[derive(Clone, Debug, clap::Args)]
pub struct RouterArgs {
    /// Repetitions of all measurements; medians and spread are over them
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub repetitions: usize,
    /// Requests per subject and repetition for the time to first token
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    pub requests: usize,
    /// Requests per kind, subject and repetition for CPU per request
    #[arg(long, value_name = "N", default_value_t = 2_000)]
    pub load_requests: usize,
    /// Concurrent requests for CPU per request under load
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub concurrency: usize,
    /// Tokens per response
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub tokens: usize,
    /// Milliseconds between two tokens of a paced stream
    #[arg(long, value_name = "MS", default_value_t = 10)]
    pub pause_ms: u64,
    /// Open streams for the memory per stream; 0 skips the measurement
    #[arg(long, value_name = "N", default_value_t = 2_000)]
    pub streams: usize,
    /// Cancelled requests per phase and subject; 0 skips the measurement
    #[arg(long, value_name = "N", default_value_t = 300)]
    pub cancels: usize,
    /// Measure the router with HTTP/2 to its engines, too
    #[arg(long)]
    pub http2: bool,
    /// The programs of the gateways
    #[command(flatten)]
    pub programs: ProgramArgs,
    /// Measure only the router's memory, over this many requests with 10 % cancels
    #[arg(long, value_name = "N")]
    pub soak: Option<usize>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Why the benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum RouterBenchError {
    /// A system call failed.
    #[error("{0}: {1}")]
    System(&'static str, std::io::Error),
    /// A request to a gateway or an engine failed.
    #[error("a request failed: {0}")]
    Request(String),
    /// A gateway did not start.
    #[error("not started: {0}")]
    Router(String),
}

/// A prefill engine and a decode engine with its number of tokens and pauses.
struct EnginePair {
    prefill: SimEngine,
    decode: SimEngine,
}

impl EnginePair {
    fn start(tokens: usize, pause: Duration) -> Result<Self, RouterBenchError> {
        let start =
            |role| SimEngine::start(role).map_err(|error| RouterBenchError::System("no engine", error));
        Ok(Self { prefill: start(SimRole::Prefill)?, decode: start(SimRole::Decode { tokens, pause })? })
    }

    fn addresses(&self) -> peers::EngineAddresses {
        peers::EngineAddresses { prefill: self.prefill.address(), decode: self.decode.address() }
    }
}

/// Measures, and writes the table or the JSON object to `out`.
///
/// # Errors
/// [`RouterBenchError`] if a part does not start or a request fails.
pub fn run(args: &RouterArgs, out: &mut dyn Write) -> Result<(), RouterBenchError> {
    let written = match args.soak {
        Some(requests) => {
            let report = runtime()?.block_on(soak::measure(args, requests))?;
            print_report(&report, args.json, out, |report, out| writeln!(out, "{}", report.table()))
        }
        None => {
            let report = measure(args)?;
            print_report(&report, args.json, out, |report, out| writeln!(out, "{}", report.table()))
        }
    };
    written.map_err(|error| RouterBenchError::System("cannot write the report", error))
}

/// A runtime on the current thread for the client. Each engine has its own thread.
fn runtime() -> Result<tokio::runtime::Runtime, RouterBenchError> {
    let built = tokio::runtime::Builder::new_current_thread().enable_all().build();
    built.map_err(|error| RouterBenchError::System("no runtime", error))
}

/// Starts all gateways, and the router with HTTP/2 to its engines.
async fn start_all(
    args: &RouterArgs,
    engines: &EnginePair,
    skips: &peers::SkipLog,
) -> Result<Vec<gateway::Gateway>, RouterBenchError> {
    let mut subjects = peers::start_all(&args.programs, engines.addresses(), skips).await?;
    if args.http2 {
        let binary = args.programs.binary.as_ref();
        subjects.push(peers::baton(binary, engines.addresses(), peers::EngineHttp::Two).await?);
    }
    Ok(subjects)
}

/// Measures.
///
/// # Errors
/// As [`run`].
pub fn measure(args: &RouterArgs) -> Result<RouterReport, RouterBenchError> {
    runtime()?.block_on(async {
        let skips = peers::SkipLog::default();
        let engines = EnginePair::start(args.tokens, Duration::ZERO)?;
        let subjects = start_all(args, &engines, &skips).await?;
        let mut report = RouterReport::new(args, &subjects);
        for subject in &subjects {
            memory::idle(subject, report.of(subject.name)).await?;
        }
        for repetition in 0..args.repetitions {
            for kind in load::LoadKind::ALL {
                if !kind.is_paced() {
                    load::measure(kind, args, &subjects, repetition, &mut report).await?;
                }
            }
        }
        for subject in &subjects {
            if args.cancels > 0 {
                hangup::measure(args, &engines, subject, report.of(subject.name)).await?;
            }
            if args.streams > 0 {
                memory::per_stream(args, &engines, subject, report.of(subject.name)).await?;
            }
        }
        subjects.into_iter().for_each(gateway::Gateway::stop);
        let engines = EnginePair::start(args.tokens, Duration::from_millis(args.pause_ms))?;
        let subjects = start_all(args, &engines, &skips).await?;
        for repetition in 0..args.repetitions {
            load::measure(load::LoadKind::Paced, args, &subjects, repetition, &mut report).await?;
        }
        subjects.into_iter().for_each(gateway::Gateway::stop);
        let engines = EnginePair::start(first_token::TOKENS, first_token::PAUSE)?;
        let subjects = start_all(args, &engines, &skips).await?;
        for repetition in 0..args.repetitions {
            first_token::measure(args, &engines, &subjects, repetition, &mut report).await?;
        }
        subjects.into_iter().for_each(gateway::Gateway::stop);
        report.compare();
        Ok(report)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn short() -> RouterArgs {
        RouterArgs {
            repetitions: 1,
            requests: 20,
            load_requests: 40,
            concurrency: 4,
            tokens: 8,
            pause_ms: 1,
            streams: 0,
            cancels: 3,
            http2: true,
            programs: ProgramArgs::default(),
            soak: None,
            json: false,
        }
    }

    #[test]
    fn a_short_run_measures_every_number() {
        let mut report = measure(&short()).expect("everything starts on loopback");
        let table = report.table();
        for name in ["baton", "baton-http2"] {
            let baton = report.of(name);
            assert_eq!(baton.first_token[0].cores, CoreMode::AsTheyAre, "{table}");
            for first in &baton.first_token {
                // Within one repetition. A first byte takes at least the time of a packet.
                let added = first.p50_us.median - first.direct_p50_us.median;
                assert!((first.added_p50_us.median - added).abs() < 1e-6, "{table}");
                assert!(first.p50_us.median > 5.0 && first.p99_us.median >= first.p50_us.median, "{table}");
            }
            assert_eq!(baton.loads.len(), load::LoadKind::ALL.len(), "{table}");
            for load in &baton.loads {
                assert!(load.cpu_us.median > 1.0 && load.requests_per_second.median > 1.0, "{table}");
            }
            assert_eq!(baton.hangups.len(), hangup::HangupPhase::ALL.len(), "{table}");
            for hangup in &baton.hangups {
                assert_eq!((hangup.seen, hangup.missed), (3, 0), "{}: {table}", hangup.phase);
            }
        }
        assert!(table.contains("baton"));
    }

    #[test]
    fn a_short_soak_counts_requests_and_cancels() {
        let report = runtime().expect("a runtime").block_on(soak::measure(&short(), 400));
        let report = report.expect("everything starts on loopback");
        assert_eq!((report.requests, report.cancelled), (400, 40));
        assert!(report.first_quarter_kib > 0, "{}", report.table());
    }
}
