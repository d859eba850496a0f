//! The request rate of a simulated engine on one core: `baton bench sim --self-test`.
//!
//! The engine's work takes no time, so that only the server and the bookkeeping are measured. The client has its own
//! thread. Rates per core are per second of CPU time of the engine's thread, which other load hardly affects. The
//! rates by wall-clock time are reported too. A whole request has two legs on two engines: a prefill that opens a
//! lease, and a decode that reads the leased blocks. Its CPU time is the sum of both engines' threads.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::SimArgs;
use crate::BenchError;
use crate::common::machine;
use crate::common::report::print_report;
use crate::sim::engines::{Dialect, EnginePlan, FleetPlan, SimFleet};
use crate::sim::instant::{SimEngine, SimRole};
use crate::systems::router::RouterBenchError;
use crate::systems::router::connection::{self, KeptConnection};
use crate::systems::router::gateway::thread_time;

/// Target of requests per second of one core.
const TARGET: f64 = 30_000.0;
/// Concurrent requests.
const CONNECTIONS: usize = 64;
/// Words of a prompt and of a response.
const PROMPT: usize = 64;
const ANSWER: usize = 16;
/// Names of the engines' threads.
const PREFILL: &str = "sim-prefill-0";
const DECODE: &str = "sim-decode-0";
/// The field of a reply with the handoff.
const PARAMS: &[u8] = b"\"kv_transfer_params\":";

/// The object of `--json`.
#[derive(Debug, Serialize)]
struct SelfTestReport {
    benchmark: &'static str,
    version: &'static str,
    date: String,
    commit: Option<String>,
    machine: String,
    command: String,
    dialect: &'static str,
    prompt_tokens: usize,
    answer_tokens: usize,
    connections: usize,
    target_per_core: f64,
    rates: Vec<MeasuredRate>,
}

/// One kind of request.
#[derive(Debug, Serialize)]
struct MeasuredRate {
    what: &'static str,
    requests: usize,
    /// Requests whose blocks a decode engine has read, by its own count.
    read: u64,
    by_the_clock: f64,
    per_core: f64,
    /// Microseconds of CPU time of each engine's thread.
    cpu_us_per_request: Vec<(&'static str, f64)>,
}

pub(super) fn run(args: &SimArgs, out: &mut dyn Write) -> Result<(), BenchError> {
    Ok(print_report(&measured(args)?, args.json, out, print)?)
}

fn print(report: &SelfTestReport, out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(
        out,
        "simulated engines, {} dialect: prompts of {PROMPT} tokens, answers of {ANSWER}, {CONNECTIONS} at a time",
        report.dialect
    )?;
    for MeasuredRate { what, by_the_clock, per_core, cpu_us_per_request, .. } in &report.rates {
        let against = per_core / TARGET;
        writeln!(
            out,
            "{what:<38} {per_core:>8.0} requests/s per core ({against:.2} of the target of {TARGET}), \
             {by_the_clock:.0} by the clock",
        )?;
        if let [(first, one), (second, other)] = cpu_us_per_request.as_slice() {
            writeln!(out, "    microseconds of {first}: {one:.1}, of {second}: {other:.1}")?;
        }
    }
    Ok(())
}

fn measured(args: &SimArgs) -> Result<SelfTestReport, BenchError> {
    let dialect = args.engine.dialect.pull().ok_or("--self-test measures `baton` and `vllm` engines")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(SelfTestReport {
        benchmark: "sim --self-test",
        version: env!("CARGO_PKG_VERSION"),
        date: machine::today(),
        commit: machine::commit(),
        machine: machine::described(),
        command: machine::command(),
        dialect: dialect.label(),
        prompt_tokens: PROMPT,
        answer_tokens: ANSWER,
        connections: CONNECTIONS,
        target_per_core: TARGET,
        rates: runtime.block_on(measure(args, dialect))?,
    })
}

async fn measure(args: &SimArgs, dialect: Dialect) -> Result<Vec<MeasuredRate>, BenchError> {
    let engine = EnginePlan { dialect, waiting_max: CONNECTIONS, blocks: 1 << 16, ..EnginePlan::instant() };
    let requests = args.self_test_requests as usize / CONNECTIONS * CONNECTIONS;
    let words: String = (0..PROMPT).map(|word| format!("word{word} ")).collect();
    let whole =
        json!({"model": "sim", "prompt": words.trim_end(), "max_tokens": ANSWER, "user": "self-test"});
    let mut first = whole.clone();
    first["max_tokens"] = json!(1);
    first["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let (whole_text, first_text) = (whole.to_string(), first.to_string());
    let mut rates = Vec::new();
    {
        let fleet = SimFleet::start(FleetPlan::new(1, 1, engine.clone()))?;
        let (prefill, decode) = (fleet.prefill()[0], fleet.decode()[0]);
        let client_requests = ClientRequests {
            first: connection::request(&first_text),
            second: Some((decode, whole_text.clone())),
        };
        let before = reads(decode).await?;
        let what = "whole: prefill, then decode that reads";
        let mut rate = rate(what, prefill, &[PREFILL, DECODE], client_requests, requests).await?;
        // Reads before the measurement are subtracted.
        rate.read = (reads(decode).await? - before).saturating_sub(CONNECTIONS as u64);
        if rate.read != requests as u64 {
            let read = rate.read;
            return Err(format!("{requests} prefills were lent, and {read} of them were read").into());
        }
        rates.push(rate);
    }
    // Leases that are not read here expire soon, so that they do not accumulate.
    let soon = EnginePlan { lease: Duration::from_millis(100), ..engine };
    let fleet = SimFleet::start(FleetPlan::new(1, 1, soon))?;
    let alone = |body: &str| ClientRequests { first: connection::request(body), second: None };
    let (prefill, decode) = (fleet.prefill()[0], fleet.decode()[0]);
    let what = "prefill alone, lent until its time is up";
    rates.push(rate(what, prefill, &[PREFILL], alone(&first_text), requests).await?);
    rates.push(rate("decode alone, in one piece", decode, &[DECODE], alone(&whole_text), requests).await?);
    let bare = SimEngine::start(SimRole::Decode { tokens: ANSWER, pause: Duration::ZERO })?;
    let what = "the router benchmark's, in one piece";
    rates.push(rate(what, bare.address(), &["bench-sim"], alone(&whole_text), requests).await?);
    Ok(rates)
}

/// The requests of a client, which are repeated.
struct ClientRequests {
    first: Vec<u8>,
    /// Address and body of the second request. The handoff of the first reply is inserted into the body.
    second: Option<(SocketAddr, String)>,
}

/// A client's connections.
struct LoopClient {
    client_requests: Arc<ClientRequests>,
    first: KeptConnection,
    second: Option<KeptConnection>,
}

impl LoopClient {
    async fn connect(at: SocketAddr, client_requests: Arc<ClientRequests>) -> Result<Self, RouterBenchError> {
        let second = match &client_requests.second {
            Some((at, _)) => Some(KeptConnection::connect(*at).await?),
            None => None,
        };
        Ok(Self { first: KeptConnection::connect(at).await?, second, client_requests })
    }

    async fn ask(&mut self) -> Result<(), RouterBenchError> {
        let answer = self.first.post(&self.client_requests.first).await?;
        if let (Some((_, body)), Some(connection)) = (&self.client_requests.second, &mut self.second) {
            let params = handoff(answer.bytes).ok_or_else(|| {
                RouterBenchError::Request("a prefill was answered without a handoff".to_owned())
            })?;
            let open = body.strip_suffix('}').unwrap_or(body);
            connection
                .post(&connection::request(&format!("{open},\"kv_transfer_params\":{params}}}")))
                .await?;
        }
        Ok(())
    }
}

/// The object of a reply's [`PARAMS`], as text.
fn handoff(reply: &[u8]) -> Option<&str> {
    let at = reply.windows(PARAMS.len()).position(|window| window == PARAMS)? + PARAMS.len();
    let mut read =
        serde_json::Deserializer::from_slice(&reply[at..]).into_iter::<&serde_json::value::RawValue>();
    Some(read.next()?.ok()?.get())
}

async fn rate(
    what: &'static str,
    at: SocketAddr,
    threads: &[&'static str],
    client_requests: ClientRequests,
    requests: usize,
) -> Result<MeasuredRate, BenchError> {
    let client_requests = Arc::new(client_requests);
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut client = LoopClient::connect(at, Arc::clone(&client_requests)).await?;
        client.ask().await?;
        clients.push(client);
    }
    let process = std::process::id();
    let used = || {
        threads.iter().map(|thread| thread_time(process, Some(thread))).collect::<std::io::Result<Vec<_>>>()
    };
    let (before, begun) = (used()?, Instant::now());
    let mut tasks = tokio::task::JoinSet::new();
    for mut client in clients {
        tasks.spawn(async move {
            for _ in 0..requests / CONNECTIONS {
                client.ask().await?;
            }
            Ok::<_, RouterBenchError>(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    let (took, after) = (begun.elapsed(), used()?);
    let used: Vec<_> =
        after.iter().zip(&before).map(|(after, before)| after.saturating_sub(*before)).collect();
    let us = |used: &Duration| used.as_secs_f64() * 1e6 / requests as f64;
    Ok(MeasuredRate {
        what,
        requests,
        read: 0,
        by_the_clock: requests as f64 / took.as_secs_f64(),
        per_core: requests as f64 / used.iter().sum::<Duration>().as_secs_f64(),
        cpu_us_per_request: threads.iter().copied().zip(used.iter().map(us)).collect(),
    })
}

/// Successful reads of leased blocks, by a decode engine's own count.
async fn reads(at: SocketAddr) -> Result<u64, BenchError> {
    let mut stream = tokio::net::TcpStream::connect(at).await?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n").await?;
    let mut page = String::new();
    stream.read_to_string(&mut page).await?;
    let line = page.lines().find(|line| line.starts_with("vllm:nixl_bytes_transferred_count{"));
    let count = line.and_then(|line| line.rsplit(' ').next()?.parse().ok());
    Ok(count.ok_or("a simulated engine does not say how many reads it has ended")?)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::Value;

    use super::*;

    #[derive(Parser)]
    struct SimCli {
        #[command(flatten)]
        args: SimArgs,
    }

    #[test]
    fn a_whole_request_has_both_legs_and_its_blocks_are_read() {
        for dialect in ["vllm", "baton"] {
            let line = ["sim", "--self-test", "--self-test-requests", "1000", "--json", "--dialect", dialect];
            let mut out = Vec::new();
            run(&SimCli::parse_from(line).args, &mut out)
                .unwrap_or_else(|error| panic!("{dialect}: {error}"));
            let report: Value = serde_json::from_slice(&out).expect("JSON");
            let whole = &report["rates"][0];
            assert_eq!((&whole["requests"], &whole["read"]), (&960.into(), &960.into()), "{report:#}");
            let cpu = whole["cpu_us_per_request"].as_array().expect("both engines");
            let of = |at: usize| cpu[at][1].as_f64().expect("microseconds");
            assert_eq!((&cpu[0][0], &cpu[1][0]), (&PREFILL.into(), &DECODE.into()));
            assert!(of(0) > 0.0 && of(1) > 0.0, "{report:#}");
            let per_core = whole["per_core"].as_f64().expect("a rate");
            assert!((per_core * (of(0) + of(1)) / 1e6 - 1.0).abs() < 1e-6, "{report:#}");
            assert!(report["command"].is_string() && report["machine"].is_string(), "{report:#}");
        }
    }

    #[test]
    fn a_handoff_is_cut_out_of_a_reply() {
        let reply = br#"{"id":"x","kv_transfer_params":{"a":[[1,2]],"b":"}"},"usage":{}}"#;
        assert_eq!(handoff(reply), Some(r#"{"a":[[1,2]],"b":"}"}"#));
        assert_eq!(handoff(b"{}"), None);
    }
}
