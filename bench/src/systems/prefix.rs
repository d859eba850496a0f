//! `baton bench prefix`: prefix routing by token blocks that engines report, beside routing by chunks of JSON.
//!
//! Simulated engines with a prefix cache serve a trace of multi-turn chats behind one router or several, which do not
//! know of each other. Each mode runs the same trace on fresh engines:
//!
//! - `least_load`: no prefix routing, the baseline;
//! - `chunks`: `prefix_aware` by the chunks of JSON that each router has sent itself;
//! - `blocks`: `prefix_aware` by the engines' KV events, with token ids from their `/tokenize`.
//!
//! A conversation's turns reach the routers in random order. Engines compute uncached tokens at a rate, one prompt at a
//! time, and evict. The routers run on named threads of this process, whose CPU time is counted.
//!
//! `--json` prints one object: the options, and
//!
//! - `runs[]`: `routers`, `mode`; `hit_rate`, cached over all prompt tokens as engines count them;
//! - `runs[]`, per request: `computed_tokens`, `cpu_us` of the routers, `p50_ms`, `p99_ms`, `tokenized` (questions to
//!   engines);
//! - `runs[].first_share`: requests at the busiest engine over the mean;
//! - `ratios[]`: `blocks` over `chunks`, for each number of routers.

mod trace;

use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_router::{Router, RouterConfig};
use serde::Serialize;
use serde_json::Value;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::common::report::print_report;
use crate::common::stats::{SampleSummary, rounded};
use crate::sim::engines::{CacheCounts, CachingEngine, CachingPlan};
use crate::sim::instant::connection::unchunked;
use crate::systems::router::RouterBenchError;
use crate::systems::router::connection::KeptConnection;
use crate::systems::router::gateway::Gateway;
use trace::{ChatTrace, TracePlan};

/// Time until every router has subscribed to every engine.
const SUBSCRIBED_WITHIN: Duration = Duration::from_secs(10);
/// Threads of each router.
const THREADS: &str = "bench-prefix";

/// Options of `baton bench prefix`.
#[derive(Clone, Debug, clap::Args)]
pub struct PrefixArgs {
    /// Numbers of routers that share the engines, separated by commas
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [1, 3])]
    pub routers: Vec<usize>,
    /// Engines
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub engines: u32,
    /// Requests per run
    #[arg(long, value_name = "N", default_value_t = 4_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub requests: u32,
    /// Concurrent requests
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub concurrency: u32,
    /// Conversations that are open at once; at least the concurrent requests
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub conversations: u32,
    /// Turns of a conversation
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    pub turns: u32,
    /// Words of each of four system prompts
    #[arg(long, value_name = "N", default_value_t = 400, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub system_words: u32,
    /// Words of a question and of an answer
    #[arg(long, value_name = "N", default_value_t = 120, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub turn_words: u32,
    /// Blocks of 16 tokens that one engine caches
    #[arg(long, value_name = "N", default_value_t = 2_400, value_parser = clap::value_parser!(u32).range(1..))]
    pub blocks: u32,
    /// Uncached prompt tokens that an engine computes per second
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub prefill_rate: u64,
    /// Seed of the trace
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// How the routers choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    LeastLoad,
    Chunks,
    Blocks,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
struct PrefixRun {
    routers: usize,
    mode: Mode,
    hit_rate: f64,
    computed_tokens: f64,
    cpu_us: f64,
    p50_ms: f64,
    p99_ms: f64,
    tokenized: f64,
    first_share: f64,
}

/// Token blocks over chunks of JSON.
#[derive(Clone, Debug, Serialize)]
struct PrefixRatio {
    routers: usize,
    hit_rate: f64,
    computed_tokens: f64,
    cpu_us: f64,
    p50_ms: f64,
}

/// The result.
#[derive(Clone, Debug, Serialize)]
struct PrefixReport {
    engines: u32,
    requests: u32,
    concurrency: u32,
    conversations: u32,
    turns: u32,
    blocks: u32,
    seed: u64,
    runs: Vec<PrefixRun>,
    ratios: Vec<PrefixRatio>,
}

/// TurnLatencies of one task's requests, in milliseconds.
type TurnLatencies = Result<Vec<f64>, RouterBenchError>;

/// Measures, and writes the table or the JSON object to `out`.
///
/// # Errors
/// If a part does not start, or a request fails.
pub fn run(args: &PrefixArgs, out: &mut dyn Write) -> Result<(), RouterBenchError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| RouterBenchError::System("no runtime", error))?;
    let report = runtime.block_on(measure(args))?;
    print_report(&report, args.json, out, |report, out| write!(out, "{}", table(report)))
        .map_err(|error| RouterBenchError::System("cannot write the report", error))
}

async fn measure(args: &PrefixArgs) -> Result<PrefixReport, RouterBenchError> {
    let mut runs = Vec::new();
    for &routers in &args.routers {
        for mode in [Mode::LeastLoad, Mode::Chunks, Mode::Blocks] {
            runs.push(measure_mode(args, routers.max(1), mode).await?);
        }
    }
    let ratios = runs.chunks_exact(3).map(|of| {
        let [_, chunks, blocks] = of else { unreachable!("three modes per number of routers") };
        PrefixRatio {
            routers: chunks.routers,
            hit_rate: rounded(blocks.hit_rate / chunks.hit_rate),
            computed_tokens: rounded(blocks.computed_tokens / chunks.computed_tokens),
            cpu_us: rounded(blocks.cpu_us / chunks.cpu_us),
            p50_ms: rounded(blocks.p50_ms / chunks.p50_ms),
        }
    });
    Ok(PrefixReport {
        engines: args.engines,
        requests: args.requests,
        concurrency: args.concurrency,
        conversations: args.conversations,
        turns: args.turns,
        blocks: args.blocks,
        seed: args.seed,
        ratios: ratios.collect(),
        runs,
    })
}

async fn measure_mode(args: &PrefixArgs, routers: usize, mode: Mode) -> Result<PrefixRun, RouterBenchError> {
    let plan = CachingPlan {
        blocks: args.blocks as usize,
        block_tokens: 16,
        prefill_rate: args.prefill_rate,
        answer_words: args.turn_words as usize,
    };
    let start = || CachingEngine::start(plan.clone());
    let engines: Result<Vec<_>, _> = (0..args.engines).map(|_| start()).collect();
    let engines = engines.map_err(|error| RouterBenchError::System("no engine", error))?;
    let mut gateways = Vec::new();
    for _ in 0..routers {
        gateways.push(start_router(config(&engines, mode)?).await?);
    }
    if mode == Mode::Blocks {
        subscribed(&engines, routers).await?;
    }
    let cpu = || gateways[0].cpu();
    let (before, addresses) = (cpu()?, gateways.iter().map(|gateway| gateway.address).collect());
    let latencies = play(args, addresses).await?;
    let used = cpu()?.saturating_sub(before);
    gateways.into_iter().for_each(Gateway::stop);
    let counts: Vec<CacheCounts> = engines.iter().map(CachingEngine::counts).collect();
    let sum = |of: fn(&CacheCounts) -> u64| counts.iter().map(of).sum::<u64>() as f64;
    let requests = sum(|counts| counts.prompts);
    let (prompt, cached) = (sum(|counts| counts.prompt_tokens), sum(|counts| counts.cached_tokens));
    let most = counts.iter().map(|counts| counts.prompts).max().unwrap_or_default() as f64;
    let latency = SampleSummary::of(latencies, &[50.0, 99.0]);
    let percentile = |p| latency.as_ref().and_then(|latency| latency.percentile(p)).unwrap_or_default();
    Ok(PrefixRun {
        routers,
        mode,
        hit_rate: rounded(cached / prompt),
        computed_tokens: rounded((prompt - cached) / requests),
        cpu_us: rounded(used.as_secs_f64() * 1e6 / requests),
        p50_ms: rounded(percentile(50.0)),
        p99_ms: rounded(percentile(99.0)),
        tokenized: rounded(sum(|counts| counts.tokenized) / requests),
        first_share: rounded(most * counts.len() as f64 / requests),
    })
}

/// Waits until every engine has a subscription of every router.
async fn subscribed(engines: &[CachingEngine], routers: usize) -> Result<(), RouterBenchError> {
    let begun = Instant::now();
    while engines.iter().any(|engine| engine.subscribers() < routers) {
        if begun.elapsed() > SUBSCRIBED_WITHIN {
            return Err(RouterBenchError::Router("no subscription to an engine's KV events".to_owned()));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

fn config(engines: &[CachingEngine], mode: Mode) -> Result<RouterConfig, RouterBenchError> {
    let engine = |engine: &CachingEngine| {
        let events = match mode {
            Mode::Blocks => format!(", kv_events: {{port: {}}}", engine.events_port()),
            Mode::LeastLoad | Mode::Chunks => String::new(),
        };
        format!("{{url: 'http://{}'{events}}}", engine.address())
    };
    let engines: Vec<_> = engines.iter().map(engine).collect();
    let (policy, tokenize) = match mode {
        Mode::LeastLoad => ("least_load", ""),
        Mode::Chunks => ("prefix_aware", ""),
        Mode::Blocks => ("prefix_aware", "tokenize: {from: engine, timeout_ms: 1000}, "),
    };
    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\n\
         models:\n  - {{name: sim, {tokenize}decode: {{policy: {policy}, engines: [{}]}}}}\n",
        engines.join(", ")
    );
    RouterConfig::from_yaml(&yaml, "bench").map_err(|error| RouterBenchError::Router(error.to_string()))
}

async fn start_router(config: RouterConfig) -> Result<Gateway, RouterBenchError> {
    let start = || async {
        let router = Router::bind(config).await;
        let router = router.map_err(|error| RouterBenchError::Router(error.to_string()))?;
        let address = router.local_addr();
        Ok((address, router.run(CancellationToken::new())))
    };
    Gateway::threads("router", THREADS, start).await
}

/// Plays the trace. Task N uses router N modulo their number.
async fn play(args: &PrefixArgs, routers: Vec<SocketAddr>) -> TurnLatencies {
    let plan = TracePlan {
        open: args.conversations.max(args.concurrency) as usize,
        turns: args.turns,
        systems: 4,
        system_words: args.system_words as usize,
        question_words: args.turn_words as usize,
        seed: args.seed,
    };
    let trace = Arc::new(Mutex::new(ChatTrace::new(plan, args.requests.into())));
    let mut tasks = JoinSet::new();
    for (_, &router) in (0..args.concurrency).zip(routers.iter().cycle()) {
        tasks.spawn(client(router, Arc::clone(&trace)));
    }
    let mut latencies = Vec::new();
    while let Some(done) = tasks.join_next().await {
        latencies.extend(done.map_err(failed)??);
    }
    Ok(latencies)
}

/// Plays turns until the trace has no more.
async fn client(router: SocketAddr, trace: Arc<Mutex<ChatTrace>>) -> TurnLatencies {
    let lock = || trace.lock().unwrap_or_else(PoisonError::into_inner);
    let mut connection = KeptConnection::connect(router).await?;
    let mut latencies = Vec::new();
    loop {
        let Some(conversation) = lock().next() else { return Ok(latencies) };
        let body = conversation.body();
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json";
        let request = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let begun = Instant::now();
        let response = connection.post(request.as_bytes()).await?;
        latencies.push(begun.elapsed().as_secs_f64() * 1e3);
        let reply = if response.bytes.starts_with(b"{") {
            response.bytes.to_vec()
        } else {
            unchunked(response.bytes)
        };
        let reply: Value = serde_json::from_slice(&reply).map_err(failed)?;
        let answer = reply["choices"][0]["message"]["content"].as_str().ok_or_else(|| failed("no answer"))?;
        lock().answered(conversation, answer);
    }
}

fn failed(error: impl std::fmt::Display) -> RouterBenchError {
    RouterBenchError::Request(error.to_string())
}

fn table(report: &PrefixReport) -> String {
    let mut text = format!(
        "{} engines with {} blocks, {} requests of {} open conversations, {} at once\n\
         {:<8} {:<11} {:>9} {:>16} {:>14} {:>8} {:>8} {:>14}\n",
        report.engines,
        report.blocks,
        report.requests,
        report.conversations,
        report.concurrency,
        "routers",
        "mode",
        "hit rate",
        "computed tokens",
        "router CPU µs",
        "p50 ms",
        "p99 ms",
        "tokenize calls"
    );
    for run in &report.runs {
        let mode = match run.mode {
            Mode::LeastLoad => "least_load",
            Mode::Chunks => "chunks",
            Mode::Blocks => "blocks",
        };
        text.push_str(&format!(
            "{:<8} {mode:<11} {:>9.3} {:>16.0} {:>14.0} {:>8.2} {:>8.2} {:>14.2}\n",
            run.routers, run.hit_rate, run.computed_tokens, run.cpu_us, run.p50_ms, run.p99_ms, run.tokenized
        ));
    }
    for ratio in &report.ratios {
        text.push_str(&format!(
            "{:<8} {:<11} {:>9.3} {:>16.3} {:>14.3} {:>8.3}\n",
            ratio.routers, "blocks/chk", ratio.hit_rate, ratio.computed_tokens, ratio.cpu_us, ratio.p50_ms
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_routers_hit_more_by_reported_blocks_than_by_their_own_chunks() {
        let args = PrefixArgs {
            routers: vec![3],
            engines: 4,
            requests: 240,
            concurrency: 6,
            conversations: 24,
            turns: 6,
            system_words: 240,
            turn_words: 60,
            blocks: 4_000,
            prefill_rate: 0,
            seed: 1,
            json: false,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let report = runtime.block_on(measure(&args)).expect("everything starts on loopback");
        let [least, chunks, blocks] = &report.runs[..] else { panic!("{report:?}") };
        assert!(blocks.tokenized > 0.9, "{}", table(&report));
        assert_eq!((least.tokenized, chunks.tokenized), (0.0, 0.0));
        assert!(blocks.hit_rate > chunks.hit_rate && chunks.hit_rate > least.hit_rate, "{}", table(&report));
        assert!(report.ratios[0].computed_tokens < 1.0, "{}", table(&report));
    }
}
