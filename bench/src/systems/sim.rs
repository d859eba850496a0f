//! `baton bench sim`: simulated engines in the foreground ([`crate::sim::engines`]) for a router or a benchmark, and
//! a self-test of their speed.
//!
//! Prints one line, `ready prefill=ADDRESS,… decode=ADDRESS,…`, with SGLang engines also `bootstrap=ADDRESS,…`. Stops
//! with Ctrl-C or, with `--until-stdin-ends`, at the end of its standard input.

mod self_test;
mod sglang;

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::BenchError;
use crate::sim::engines::{Dialect, EnginePlan, FaultAt, FleetPlan, LoadFailure, SglangFleet, SimFleet};
use sglang::{SglangOptions, StartedFleet};

/// Options of `baton bench sim`.
#[derive(Clone, Debug, clap::Args)]
pub struct SimArgs {
    /// Prefill engines
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub prefill: usize,
    /// Decode engines
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub decode: usize,
    /// First engine's port on loopback, the next engine's is one more; 0 picks free ports
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub port: u16,
    /// Properties of the engines
    #[command(flatten)]
    pub engine: EngineOptions,
    /// Properties of SGLang engines
    #[command(flatten)]
    pub sglang: SglangOptions,
    /// Fault to inject, for example refuses:0.2@decode-0 (repeatable)
    #[arg(long, value_name = "NAME[:VALUE][@ENGINE]")]
    pub fault: Vec<FaultAt>,
    /// Write a `baton router` configuration for these engines to this file
    #[arg(long, value_name = "FILE")]
    pub router_config: Option<PathBuf>,
    /// Client address in that configuration
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080", value_parser = baton_router::listen_address)]
    pub router_listen: SocketAddr,
    /// Admin address in that configuration
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8081", value_parser = baton_router::listen_address)]
    pub router_admin: SocketAddr,
    /// Stop when standard input ends
    #[arg(long)]
    pub until_stdin_ends: bool,
    /// Measure how many requests an engine answers on one core, then exit
    #[arg(long)]
    pub self_test: bool,
    /// Requests of each kind for --self-test
    #[arg(long, value_name = "N", default_value_t = 60_000, value_parser = clap::value_parser!(u32).range(1_000..))]
    pub self_test_requests: u32,
    /// Print the result of --self-test as one JSON object
    #[arg(long, requires = "self_test")]
    pub json: bool,
}

/// Protocol and rules of the engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum SimDialect {
    /// Baton's engine: release and abort endpoints, handles, verified reads
    Baton,
    /// Stock vLLM with the NixlConnector: no release or abort endpoints, and a late read returns whatever the
    /// blocks hold
    #[default]
    Vllm,
    /// Stock vLLM with the NixlPushConnector: P writes into D's blocks, and only the end of its write frees them
    VllmPush,
    /// SGLang: both legs at once, paired by room, and P writes into D's pages
    Sglang,
}

impl SimDialect {
    /// The dialect of engines whose decode leg reads. `None` for engines that write.
    fn pull(self) -> Option<Dialect> {
        match self {
            Self::Baton => Some(Dialect::Baton),
            Self::Vllm => Some(Dialect::Vllm),
            Self::VllmPush | Self::Sglang => None,
        }
    }
}

/// Properties of every engine. A rate or a time of 0 takes no time.
#[derive(Clone, Debug, clap::Args)]
pub struct EngineOptions {
    /// Protocol and rules of the engines
    #[arg(long, value_name = "NAME", value_enum, default_value_t = SimDialect::default())]
    pub dialect: SimDialect,
    /// Model name in requests
    #[arg(long, value_name = "NAME", default_value = "sim")]
    pub served_model_name: String,
    /// Prompt tokens computed per second
    #[arg(long, value_name = "N", default_value_t = EnginePlan::default().prefill_rate)]
    pub prefill_rate: u64,
    /// Milliseconds before the first token of a prompt is computed
    #[arg(long, value_name = "MS", default_value_t = 2.0, value_parser = milliseconds)]
    pub prefill_overhead_ms: f64,
    /// Milliseconds per decoded token
    #[arg(long, value_name = "MS", default_value_t = 5.0, value_parser = milliseconds)]
    pub decode_ms: f64,
    /// Maximum prompt tokens per step, over all requests (vLLM's --max-num-batched-tokens)
    #[arg(long, value_name = "N", default_value_t = EnginePlan::default().step_tokens)]
    pub max_num_batched_tokens: usize,
    /// Maximum requests that compute at once
    #[arg(long, value_name = "N", default_value_t = EnginePlan::default().running_max)]
    pub max_num_seqs: usize,
    /// Maximum waiting requests; further ones are refused
    #[arg(long, value_name = "N", default_value_t = EnginePlan::default().waiting_max)]
    pub max_waiting: usize,
    /// Blocks per engine
    #[arg(long, value_name = "N", default_value_t = EnginePlan::default().blocks)]
    pub blocks: usize,
    /// Tokens per block
    #[arg(long, value_name = "N", default_value_t = EnginePlan::default().block_tokens)]
    pub block_size: usize,
    /// Maximum tokens of prompt and response
    #[arg(long, value_name = "N", default_value_t = EnginePlan::default().context_tokens)]
    pub max_model_len: usize,
    /// Lease duration in seconds (vLLM's name; its older TTL was 480)
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = seconds)]
    pub kv_lease_duration: f64,
    /// Seconds that a pushing prefill engine keeps a decode engine's registration without a prefill (vLLM's name)
    #[arg(long, value_name = "SECONDS", default_value_t = 480.0, value_parser = seconds)]
    pub push_registration_timeout: f64,
    /// Send no heartbeats for waiting requests, as vLLM did before it had them
    #[arg(long)]
    pub no_heartbeats: bool,
    /// Blocks read per second by a decode engine
    #[arg(long, value_name = "N", default_value_t = EnginePlan::default().fetch_rate)]
    pub fetch_rate: u64,
    /// Milliseconds from a handoff's arrival at a decode engine until it is queued; lengthens the gap
    #[arg(long, value_name = "MS", default_value_t = 0.0, value_parser = milliseconds)]
    pub admission_delay_ms: f64,
    /// Milliseconds from the end of the work to the reply in one piece [default: 1 for vllm, 0 for baton]
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub reply_delay_ms: Option<f64>,
    /// KV bytes per token, for reported transfer sizes
    #[arg(long, value_name = "N", default_value_t = EnginePlan::default().bytes_per_token)]
    pub bytes_per_token: u64,
    /// Handling of a failed read on a decode engine [default: recompute for baton, fail for vllm]
    #[arg(long, value_name = "NAME", value_enum)]
    pub kv_load_failure_policy: Option<LoadFailure>,
}

fn bounded(text: &str, most: f64) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| (0.0..=most).contains(number));
    number.ok_or_else(|| format!("`{text}` is no number from 0 to {most}"))
}

fn milliseconds(text: &str) -> Result<f64, String> {
    bounded(text, 3_600_000.0)
}

fn seconds(text: &str) -> Result<f64, String> {
    bounded(text, 86_400.0)
}

impl EngineOptions {
    /// The plan, not yet checked.
    #[must_use]
    pub fn plan(&self) -> EnginePlan {
        let after = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        let pushes = self.dialect == SimDialect::VllmPush;
        EnginePlan {
            dialect: self.dialect.pull().unwrap_or_default(),
            model: self.served_model_name.clone(),
            prefill_rate: self.prefill_rate,
            prefill_overhead: after(self.prefill_overhead_ms),
            decode_step: after(self.decode_ms),
            step_tokens: self.max_num_batched_tokens,
            running_max: self.max_num_seqs,
            waiting_max: self.max_waiting,
            blocks: self.blocks,
            block_tokens: self.block_size,
            context_tokens: self.max_model_len,
            lease: Duration::from_secs_f64(self.kv_lease_duration),
            heartbeats: !self.no_heartbeats,
            fetch_rate: self.fetch_rate,
            admission_delay: after(self.admission_delay_ms),
            reply_delay: self.reply_delay_ms.map(after),
            push: pushes.then(|| Duration::from_secs_f64(self.push_registration_timeout)),
            bytes_per_token: self.bytes_per_token,
            load_failure: self.kv_load_failure_policy,
            ..EnginePlan::default()
        }
    }
}

/// Runs engines until they are stopped, or measures one.
///
/// # Errors
/// If the options are invalid, an engine does not start, or a request of the self-test fails.
pub fn run(args: &SimArgs, out: &mut dyn Write) -> Result<(), BenchError> {
    if args.self_test {
        return self_test::run(args, out);
    }
    let plan = FleetPlan {
        faults: args.fault.clone(),
        port: args.port,
        ..FleetPlan::new(args.prefill, args.decode, args.engine.plan())
    };
    let started = match args.engine.dialect {
        SimDialect::Baton | SimDialect::Vllm | SimDialect::VllmPush => {
            SimFleet::start(plan).map(StartedFleet::Pull)
        }
        SimDialect::Sglang => SglangFleet::start(args.sglang.plan(plan)).map(StartedFleet::Sglang),
    };
    let fleet = started.map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => format!("{error}; choose others with --port, or 0 for free ones"),
        _ => error.to_string(),
    })?;
    if let Some(file) = &args.router_config {
        std::fs::write(file, fleet.router_yaml(args.router_listen, args.router_admin))
            .map_err(|error| format!("{}: {error}", file.display()))?;
    }
    writeln!(out, "ready {}", fleet.addresses())?;
    out.flush()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(stop(args.until_stdin_ends))?;
    Ok(())
}

/// Waits for Ctrl-C, SIGTERM, or with `until_stdin_ends` the end of standard input.
async fn stop(until_stdin_ends: bool) -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        () = stdin_end(), if until_stdin_ends => {}
    }
    Ok(())
}

/// Reads on a separate thread, which ends with the process. A runtime would wait for its read.
async fn stdin_end() {
    let (ends, ended) = oneshot::channel::<()>();
    std::thread::spawn(move || {
        let mut buffer = [0; 64];
        let mut stdin = std::io::stdin().lock();
        while matches!(stdin.read(&mut buffer), Ok(1..)) {}
        drop(ends);
    });
    let _ = ended.await;
}
