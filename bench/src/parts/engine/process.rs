//! The engine as a user starts it: time to the first token, and resident memory after it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use baton_engine::model::config::ModelConfig;
use serde::Serialize;

use super::{BestWorst, EngineBenchError};
use crate::common::processes::ChildProcess;

/// Size of the KV pool: the engine's default.
const POOL_MIB: usize = 512;
/// Number of starts. After the first, the files are in the page cache.
const STARTS: usize = 4;
/// Maximum time of a response.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// One engine process with the default element types.
#[derive(Debug, Serialize)]
pub struct ProcessReport {
    /// From the start of the program to the first token, in milliseconds (`best` is the highest, `worst` the
    /// lowest), without the first start.
    pub first_token_ms: BestWorst,
    /// Resident memory after that token, bytes.
    pub resident_bytes: u64,
    /// Weights in memory, bytes.
    pub weight_bytes: usize,
    /// The KV pool, bytes.
    pub pool_bytes: usize,
    /// Resident over weights and pool.
    pub memory_ratio: f64,
}

/// Starts the engine several times. `streamed` are the bytes of all matrices except a separate embedding.
pub(super) fn measure(
    dir: &Path,
    threads: usize,
    streamed: usize,
    config: &ModelConfig,
) -> Result<ProcessReport, EngineBenchError> {
    let element = streamed / (super::matrix_weights(config, 1.0) as usize).max(1);
    let embedding = if config.tied { 0 } else { config.vocab * config.hidden * element };
    let weight_bytes = streamed + embedding;
    let pool_bytes = POOL_MIB << 20;
    let mut report = ProcessReport {
        first_token_ms: BestWorst::default(),
        resident_bytes: 0,
        weight_bytes,
        pool_bytes,
        memory_ratio: 0.0,
    };
    for start in 0..STARTS {
        let begun = Instant::now();
        let pool = POOL_MIB.to_string();
        let options =
            ["--kv-cache-mib", &pool, "--threads", &threads.to_string(), "--model"].map(str::to_owned);
        let model = dir.display().to_string();
        let mut engine = ChildProcess::start(&[&options[..], &[model]].concat()).map_err(failed)?;
        let address = engine.ready().map_err(failed)?;
        first_token(address)?;
        if start > 0 {
            report.first_token_ms.add(begun.elapsed().as_secs_f64() * 1e3);
        }
        report.resident_bytes = engine.resident().map_err(failed)?;
    }
    report.memory_ratio = report.resident_bytes as f64 / (weight_bytes + pool_bytes) as f64;
    Ok(report)
}

pub(super) fn print(report: &ProcessReport, out: &mut dyn Write) -> std::io::Result<()> {
    let (slow, fast) = (report.first_token_ms.best, report.first_token_ms.worst);
    writeln!(
        out,
        "\nas a process: {fast:.0} to {slow:.0} ms from its start to the first token, files in the page cache; resident \
         {} MB, {:.2} of {} MB weights and {} MB KV pool",
        report.resident_bytes / 1_000_000,
        report.memory_ratio,
        report.weight_bytes / 1_000_000,
        report.pool_bytes / 1_000_000
    )
}

fn failed(error: impl std::fmt::Display) -> EngineBenchError {
    EngineBenchError::Process(error.to_string())
}

/// Requests one token and waits for the whole response.
fn first_token(address: SocketAddr) -> Result<(), EngineBenchError> {
    let mut stream = TcpStream::connect(address).map_err(failed)?;
    stream.set_read_timeout(Some(ANSWER_WITHIN)).map_err(failed)?;
    let body = r#"{"prompt":[1,2,3,4,5,6,7,8],"max_tokens":1,"temperature":0}"#;
    let length = body.len();
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).map_err(failed)?;
    let mut answer = String::new();
    stream.take(1 << 20).read_to_string(&mut answer).map_err(failed)?;
    if answer.starts_with("HTTP/1.1 200") { Ok(()) } else { Err(failed(format!("it answered {answer}"))) }
}
