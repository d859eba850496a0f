//! How many requests a simulated engine answers on one core: `baton bench sim --self-test`.
//!
//! The engine's work takes no time, so that what is counted is the server and the books. The client has a thread of its
//! own; per core means per second of CPU time of the engine's thread, which other work on the machine does not change
//! much, and the rate by the clock stands beside it.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::SimArgs;
use crate::BenchError;
use crate::router::subject::thread_time;
use crate::router::wire::{self, Wire};
use crate::sim_engine::{SimEngine, SimRole};
use crate::sim_fleet::{EnginePlan, FleetPlan, SimFleet};

/// What is asked of a simulated engine.
const TARGET: f64 = 30_000.0;
/// Requests at a time.
const CONNECTIONS: usize = 64;
/// Words of a prompt, and of an answer.
const PROMPT: usize = 64;
const ANSWER: usize = 16;

/// One kind of request.
struct Rate {
    what: &'static str,
    by_the_clock: f64,
    per_core: f64,
}

pub(super) fn run(args: &SimArgs, out: &mut dyn Write) -> Result<(), BenchError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let rates = runtime.block_on(measure(args))?;
    writeln!(
        out,
        "simulated engines, {} dialect: prompts of {PROMPT} tokens, answers of {ANSWER}, {CONNECTIONS} at a time",
        args.engine.dialect.label()
    )?;
    for Rate { what, by_the_clock, per_core } in rates {
        let against = per_core / TARGET;
        writeln!(
            out,
            "{what:<38} {per_core:>8.0} requests/s per core ({against:.2} of the target of {TARGET}), \
             {by_the_clock:.0} by the clock",
        )?;
    }
    Ok(())
}

async fn measure(args: &SimArgs) -> Result<Vec<Rate>, BenchError> {
    let engine = EnginePlan {
        dialect: args.engine.dialect,
        waiting_max: CONNECTIONS,
        // What nobody reads here goes soon, and does not pile up.
        lease: Duration::from_millis(100),
        blocks: 1 << 16,
        ..EnginePlan::instant()
    };
    let fleet = SimFleet::start(FleetPlan::new(1, 1, engine))?;
    let requests = args.self_test_requests as usize;
    let words: String = (0..PROMPT).map(|word| format!("word{word} ")).collect();
    let whole =
        json!({"model": "sim", "prompt": words.trim_end(), "max_tokens": ANSWER, "user": "self-test"});
    let mut first = whole.clone();
    first["max_tokens"] = json!(1);
    first["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let (prefill, decode) = (fleet.prefill()[0], fleet.decode()[0]);
    let bare = SimEngine::start(SimRole::Decode { tokens: ANSWER, pause: Duration::ZERO })?;
    Ok(vec![
        rate("prefill, lent until its time is up", prefill, "sim-prefill-0", &first, requests).await?,
        rate("whole, in one piece", decode, "sim-decode-0", &whole, requests).await?,
        rate("the router benchmark's, in one piece", bare.address(), "bench-sim", &whole, requests).await?,
    ])
}

async fn rate(
    what: &'static str,
    at: SocketAddr,
    thread: &str,
    body: &Value,
    requests: usize,
) -> Result<Rate, BenchError> {
    let request: Arc<[u8]> = wire::request(&body.to_string()).into();
    let mut wires = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut wire = Wire::connect(at).await?;
        wire.post(&request).await?;
        wires.push(wire);
    }
    let used = || thread_time(std::process::id(), Some(thread));
    let (before, begun) = (used()?, Instant::now());
    let mut tasks = tokio::task::JoinSet::new();
    for mut wire in wires {
        let request = Arc::clone(&request);
        tasks.spawn(async move {
            for _ in 0..requests / CONNECTIONS {
                wire.post(&request).await?;
            }
            Ok::<_, crate::router::RouterBenchError>(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    let (took, used) = (begun.elapsed(), used()? - before);
    let answered = (requests / CONNECTIONS * CONNECTIONS) as f64;
    Ok(Rate { what, by_the_clock: answered / took.as_secs_f64(), per_core: answered / used.as_secs_f64() })
}
