//! The engine as a user starts it: how long until the first token, and how much memory it then has.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use baton_engine::model::config::ModelConfig;
use serde::Serialize;

use super::{EngineBenchError, Series};

/// Size of the KV pool: the engine's default.
const POOL_MIB: usize = 512;
/// Starts; the files are in the page cache after the first.
const STARTS: usize = 4;
/// An answer takes no longer.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// One engine process with the default element types.
#[derive(Debug, Serialize)]
pub struct ProcessReport {
    /// From starting the program to the first token's arrival, milliseconds (`best` is the highest, `worst` the lowest), the
    /// first start left out.
    pub first_token_ms: Series,
    /// Resident memory after that token, bytes.
    pub resident_bytes: u64,
    /// Weights in memory, bytes.
    pub weight_bytes: usize,
    /// The KV pool, bytes.
    pub pool_bytes: usize,
    /// Resident over weights and pool.
    pub memory_ratio: f64,
}

/// Starts the engine a few times. `streamed` are the bytes of all matrices but an embedding of its own.
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
        first_token_ms: Series::default(),
        resident_bytes: 0,
        weight_bytes,
        pool_bytes,
        memory_ratio: 0.0,
    };
    for start in 0..STARTS {
        let begun = Instant::now();
        let mut engine = Running::start(dir, threads)?;
        let address = engine.ready()?;
        first_token(address)?;
        if start > 0 {
            report.first_token_ms.add(begun.elapsed().as_secs_f64() * 1e3);
        }
        report.resident_bytes = engine.resident()?;
    }
    #[allow(clippy::cast_precision_loss)] // far below 2^52
    {
        report.memory_ratio = report.resident_bytes as f64 / (weight_bytes + pool_bytes) as f64;
    }
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

/// A process that ends with this value.
struct Running {
    child: Child,
}

fn failed(error: impl std::fmt::Display) -> EngineBenchError {
    EngineBenchError::Process(error.to_string())
}

impl Running {
    fn start(dir: &Path, threads: usize) -> Result<Self, EngineBenchError> {
        let program = std::env::current_exe().map_err(failed)?;
        let child = Command::new(program)
            .args(["engine", "--listen", "127.0.0.1:0", "--until-stdin-ends", "--model"])
            .arg(dir)
            .args(["--kv-cache-mib", &POOL_MIB.to_string(), "--threads", &threads.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(failed)?;
        Ok(Self { child })
    }

    /// The address it says it serves.
    fn ready(&mut self) -> Result<SocketAddr, EngineBenchError> {
        let out = self.child.stdout.take().ok_or_else(|| failed("no output"))?;
        for line in BufReader::new(out).lines() {
            let line = line.map_err(failed)?;
            if let Some((_, rest)) = line.split_once("ready http=") {
                return rest.split(' ').next().unwrap_or_default().parse().map_err(failed);
            }
        }
        Err(failed("it ended before it was ready"))
    }

    fn resident(&self) -> Result<u64, EngineBenchError> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).map_err(failed)?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = resident.and_then(|rest| rest.trim().split(' ').next()?.parse::<u64>().ok());
        kib.map(|kib| kib << 10).ok_or_else(|| failed("no VmRSS"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let begun = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if begun.elapsed() > Duration::from_secs(5) {
                let _ = self.child.kill();
            }
            #[allow(clippy::disallowed_methods)] // between two looks at whether a process has ended
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Asks for one token and waits for the whole answer.
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
