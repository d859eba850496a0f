//! `baton bench handoff`: how long a client waits for a handoff. The decode engine reads a prompt's blocks while
//! they are computed, or afterwards.
//!
//! A prefill engine and a decode engine run as processes with one thread each. They receive requests as from a
//! router, each with a new prompt. Each repetition alternates:
//!
//! - **early**: the prefill engine makes an early handoff, and the decode engine receives it at once. The exposed
//!   time is from the end of the prefill engine's response to the decode engine's;
//! - **late**: the decode engine receives the handoff after the prefill engine's response. The exposed time is its
//!   whole response;
//! - **cached**: the decode engine receives the same prompt with one token more, and has the rest cached. The
//!   exposed time is that of a response without a read (admission, one token, HTTP).
//!
//! The response has one token. A read adds the exposed time less that of cached. An early read cannot hide one
//! chunk's share of the late read.
//!
//! An early read may add one chunk's share and 2 ms. The report contains for each transport whether it does
//! (`judged`). With `--fail-on-miss`, a transport that adds more fails the command.
//!
//! `--json` prints one object:
//!
//! - `date`, `commit`, `machine`, `driver` (of a GPU), `command`, `device`, `device_name` (of a GPU), `repetitions`;
//! - `prompt_tokens`, `chunk_tokens`, `kv_bytes` of the prompt, `pace_ms` (the minimum time of the prefill engine's
//!   steps);
//! - `transports.NAME.early_ms`, `late_ms`, `cached_ms`: medians of the exposed time;
//! - `transports.NAME.early_read_ms`, `late_read_ms`: medians of the differences to `cached` within a repetition;
//! - `transports.NAME.chunk_ms`: one chunk's share of `late_read_ms`;
//! - `transports.NAME.allowed_ms`: `chunk_ms` and 2 ms;
//! - `transports.NAME.within`: whether `early_read_ms` is at most `allowed_ms`;
//! - `within`, for all transports.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use baton_connector::handoff::KvIntent;
use baton_engine::compute::cuda::{Accelerator, DeviceChoice};
use serde_json::{Map, Value, json};

use crate::BenchError;
use crate::common::machine::Provenance;
use crate::common::processes::ChildProcess;
use crate::common::report::print_report;
use crate::load::rng::Rng;

/// Maximum time of a response.
const ANSWER_WITHIN: Duration = Duration::from_secs(300);
/// Allowed time of an early read in addition to the last chunk's share.
const ALLOWANCE_MS: f64 = 2.0;
/// The KV pool of each engine.
const POOL_MIB: usize = 512;

/// Options of `baton bench handoff`.
#[derive(Clone, Debug, clap::Args)]
pub struct HandoffOptions {
    /// Checkpoint directory [default: built-in demo model]
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 1536)]
    pub tokens: usize,
    /// Tokens per step of the prefill engine
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub chunk: usize,
    /// Minimum time per step of the prefill engine in milliseconds, as on a slower device
    #[arg(long, value_name = "MS", default_value_t = 20)]
    pub pace_ms: u64,
    /// Device of both engines
    #[arg(long, value_name = "cpu|cuda:N|software", default_value_t,
          value_parser = baton_engine_check::parse_device)]
    pub device: DeviceChoice,
    /// Transports to measure, separated by commas
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_values_t = ["shm".to_owned(), "tcp".to_owned()])]
    pub transport: Vec<String>,
    /// Repetitions of each measurement
    #[arg(long, value_name = "N", default_value_t = 11)]
    pub repetitions: usize,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Fail if an early read adds more than one chunk's share and 2 ms
    #[arg(long)]
    pub fail_on_miss: bool,
}

/// Why the benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum HandoffError {
    /// An engine could not be started or reached, or the output failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// An engine returned an unexpected response.
    #[error("an engine answered: {0}")]
    Answer(String),
    /// The options leave nothing to measure.
    #[error("a prompt must have more tokens than a chunk, and there must be a repetition and a transport")]
    Options,
    /// An early read adds more than allowed.
    #[error("an early read adds more than a chunk's share and 2 ms by {0}")]
    Over(String),
}

/// Measures and prints.
///
/// # Errors
/// [`HandoffError`]. With a missing GPU [`Skipped`](crate::parts::gpu::Skipped), or the device's error.
pub fn run(options: &HandoffOptions, out: &mut dyn Write) -> Result<(), BenchError> {
    let nothing = options.chunk == 0 || options.repetitions == 0 || options.transport.is_empty();
    if options.tokens <= options.chunk || nothing {
        return Err(HandoffError::Options.into());
    }
    let (device_name, driver) = match options.device {
        DeviceChoice::Cpu | DeviceChoice::Accelerator(Accelerator::Provided(_)) => (None, None),
        DeviceChoice::Accelerator(Accelerator::Cuda(ordinal)) => crate::parts::gpu::named(ordinal)?,
    };
    let mut transports = Map::new();
    let mut kv_bytes = 0;
    for transport in &options.transport {
        let (row, bytes) = measure(options, transport)?;
        kv_bytes = bytes;
        transports.insert(transport.clone(), row);
    }
    let over: Vec<_> = transports.iter().filter(|(_, row)| row["within"] != true).collect();
    let over = over.into_iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
    let mut report = serde_json::to_value(Provenance::of(driver))?;
    let measured = json!({
        "prompt_tokens": options.tokens, "chunk_tokens": options.chunk, "pace_ms": options.pace_ms,
        "device": options.device.to_string(), "device_name": device_name, "kv_bytes": kv_bytes,
        "repetitions": options.repetitions, "transports": transports, "within": over.is_empty(),
    });
    for (key, value) in measured.as_object().into_iter().flatten() {
        report[key] = value.clone();
    }
    print_report(&report, options.json, out, print)?;
    if options.fail_on_miss && !over.is_empty() {
        return Err(HandoffError::Over(over).into());
    }
    Ok(())
}

fn print(report: &Value, out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "a prompt of {} tokens in steps of {} that take {} ms or more, on {}, {} MB of KV; milliseconds, medians of {}\n",
        report["prompt_tokens"],
        report["chunk_tokens"],
        report["pace_ms"],
        report["device"].as_str().unwrap_or_default(),
        report["kv_bytes"].as_u64().unwrap_or_default() / 1_000_000,
        report["repetitions"],
    )?;
    let columns = ["early", "late", "cached", "early_read", "late_read", "chunk", "allowed"];
    write!(out, "{:<10}", "")?;
    columns.iter().try_for_each(|column| write!(out, "{column:>12}"))?;
    for (name, row) in report["transports"].as_object().into_iter().flatten() {
        write!(out, "\n{name:<10}")?;
        for column in columns {
            write!(out, "{:>12.2}", row[format!("{column}_ms")].as_f64().unwrap_or_default())?;
        }
        write!(out, "  {}", if row["within"] == true { "within" } else { "OVER" })?;
    }
    writeln!(out)
}

/// One transport: its row, and the bytes of KV that it moved for a prompt.
fn measure(options: &HandoffOptions, transport: &str) -> Result<(Value, u64), HandoffError> {
    let common = || {
        let mut words =
            vec!["--kv-transport".to_owned(), transport.to_owned(), "--threads".to_owned(), "1".to_owned()];
        words.extend(["--kv-cache-mib".to_owned(), POOL_MIB.to_string()]);
        words.extend(["--device".to_owned(), options.device.to_string()]);
        if let Some(model) = &options.model {
            words.extend(["--model".to_owned(), model.display().to_string()]);
        }
        words
    };
    let step =
        ["--role", "prefill", "--max-num-batched-tokens", &options.chunk.to_string(), "--max-num-seqs", "8"]
            .map(str::to_owned);
    let pace = ["--pace-ms".to_owned(), options.pace_ms.to_string()];
    let mut prefill = ChildProcess::start(&[common(), step.to_vec(), pace.to_vec()].concat())?;
    let mut decode =
        ChildProcess::start(&[common(), vec!["--role".to_owned(), "decode".to_owned()]].concat())?;
    let (p, d) = (prefill.ready()?, decode.ready()?);
    let mut rng = Rng::new(0x9e37_79b9);
    let mut series: [Vec<f64>; 5] = Default::default();
    // The first repetition warms up and does not count.
    for repetition in 0..=options.repetitions {
        let (early_prompt, late_prompt) =
            (prompt(options.tokens, &mut rng), prompt(options.tokens, &mut rng));
        let early = early(p, d, &early_prompt)?;
        let late = late(p, d, &late_prompt)?;
        let longer = [&late_prompt[..], &[6]].concat();
        let cached = answer(d, &body(&longer, &Value::Null), &[])?.1;
        if repetition > 0 {
            let ms = |time: Duration| time.as_secs_f64() * 1e3;
            let all = [ms(early), ms(late), ms(cached), ms(early) - ms(cached), ms(late) - ms(cached)];
            series.iter_mut().zip(all).for_each(|(list, value)| list.push(value));
        }
    }
    let failures = metric(d, "baton_kv_load_failures_total")?;
    let lent_early = metric(p, "baton_kv_early_leases_total")?;
    if failures > 0.0 || lent_early < (options.repetitions + 1) as f64 {
        return Err(HandoffError::Answer(format!("{failures} reads failed, {lent_early} leases were early")));
    }
    let bytes = metric(d, "baton_kv_transfer_bytes_total")? / (2 * (options.repetitions + 1)) as f64;
    let share = options.chunk as f64 / options.tokens as f64;
    Ok((judged(series.map(median), share), bytes as u64))
}

/// One transport's row of medians: early, late and cached, then the time that early and late reads add, all in ms.
/// `share` is one chunk's share of the prompt.
fn judged([early, late, cached, early_read, late_read]: [f64; 5], share: f64) -> Value {
    let chunk = late_read * share;
    // A negative time of a late read does not reduce the allowance.
    let allowed = chunk.max(0.0) + ALLOWANCE_MS;
    json!({
        "early_ms": early, "late_ms": late, "cached_ms": cached, "early_read_ms": early_read,
        "late_read_ms": late_read, "chunk_ms": chunk, "allowed_ms": allowed, "within": early_read <= allowed,
    })
}

/// Time from the end of the prefill engine's response to that of the decode engine, which received its request
/// earlier.
fn early(p: SocketAddr, d: SocketAddr, prompt: &[u32]) -> Result<Duration, HandoffError> {
    let mut prefilling = ask(p, &prefill_body(prompt), &["x-baton-early-handoff: 1"])?;
    let mut text = String::new();
    let params = loop {
        if let Some(event) = text.split_once("data: ").and_then(|(_, rest)| Some(rest.split_once("\n\n")?.0))
        {
            let event: Value = serde_json::from_str(event).map_err(io::Error::other)?;
            break event["kv_transfer_params"].clone();
        }
        more(&mut prefilling, &mut text)?;
    };
    let body = body(prompt, &params);
    let decoding = std::thread::spawn(move || answer(d, &body, &[]).map(|_| Instant::now()));
    prefilling.read_to_string(&mut text)?;
    let prefilled = Instant::now();
    let decoded = decoding.join().map_err(|_| HandoffError::Answer("a thread panicked".into()))??;
    if !text.contains("[DONE]") {
        return Err(HandoffError::Answer(text));
    }
    Ok(decoded.saturating_duration_since(prefilled))
}

/// Time from the prefill engine's response to the decode engine's.
fn late(p: SocketAddr, d: SocketAddr, prompt: &[u32]) -> Result<Duration, HandoffError> {
    let (lent, _) = answer(p, &prefill_body(prompt), &[])?;
    Ok(answer(d, &body(prompt, &lent["kv_transfer_params"]), &[])?.1)
}

pub(super) fn prompt(tokens: usize, rng: &mut Rng) -> Vec<u32> {
    // Token ids of words, not of special tokens, in every vocabulary.
    (0..tokens).map(|_| 6 + rng.below(1_400) as u32).collect()
}

fn body(prompt: &[u32], params: &Value) -> String {
    json!({ "kv_transfer_params": params, "prompt": prompt, "max_tokens": 1, "temperature": 0 }).to_string()
}

fn prefill_body(prompt: &[u32]) -> String {
    body(prompt, &serde_json::from_str(KvIntent::PRODUCE_REQUEST).expect("it is JSON"))
}

/// Sends a request. Returns the connection with its response.
pub(super) fn ask(to: SocketAddr, body: &str, headers: &[&str]) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(to)?;
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    stream.set_nodelay(true)?;
    let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    let length = body.len();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-type: application/json\r\n\
         {headers}content-length: {length}\r\n\r\n"
    );
    stream.write_all((head + body).as_bytes())?;
    Ok(stream)
}

/// A whole response and its duration.
fn answer(to: SocketAddr, body: &str, headers: &[&str]) -> Result<(Value, Duration), HandoffError> {
    let begun = Instant::now();
    let mut text = String::new();
    ask(to, body, headers)?.read_to_string(&mut text)?;
    let took = begun.elapsed();
    let body = text.split_once("\r\n\r\n").map(|(_, body)| body).unwrap_or_default();
    match serde_json::from_str(body) {
        Ok(value) if text.starts_with("HTTP/1.1 200") => Ok((value, took)),
        _ => Err(HandoffError::Answer(text)),
    }
}

fn more(stream: &mut TcpStream, text: &mut String) -> Result<(), HandoffError> {
    let mut piece = [0; 4096];
    match stream.read(&mut piece)? {
        0 => Err(HandoffError::Answer(std::mem::take(text))),
        read => {
            text.push_str(&String::from_utf8_lossy(&piece[..read]));
            Ok(())
        }
    }
}

/// The sum of a metric over its labels.
fn metric(of: SocketAddr, name: &str) -> Result<f64, HandoffError> {
    let mut stream = TcpStream::connect(of)?;
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let ours = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
    Ok(text.lines().filter(ours).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
}

fn median(mut list: Vec<f64>) -> f64 {
    list.sort_by(f64::total_cmp);
    list[list.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::judged;

    #[test]
    fn an_early_read_may_add_a_chunks_share_and_two_milliseconds_and_no_more() {
        let row = |early_read, late_read| judged([3.0, 9.0, 1.0, early_read, late_read], 0.25);
        let within = row(4.0, 8.0);
        assert_eq!((&within["chunk_ms"], &within["allowed_ms"]), (&2.0.into(), &4.0.into()));
        assert_eq!(within["within"], true, "all that is allowed");
        assert_eq!(row(4.001, 8.0)["within"], false);
        assert_eq!((&row(1.9, -3.0)["within"], &row(2.1, -3.0)["within"]), (&true.into(), &false.into()));
    }
}
