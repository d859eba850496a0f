//! `baton bench steps`: how long a stream waits for its next token while the same engine computes a long prompt.
//!
//! The engine runs as a process. Streams decode alone at first. Then the engine receives a long prompt, and the streams
//! decode beside it until its response has arrived. Two runs follow each other: with the time target of steps, and
//! without one (`--step-target-ms 0`), where only the number of tokens limits a step.
//!
//! The time between two tokens is that between two events of a stream, as the client reads them. With the target the
//! 99th percentile beside the prompt may be twice the target. `within` reports whether it is, and `--fail-on-miss` makes
//! a miss an error.
//!
//! Without a checkpoint, the weights of a Llama-shaped model with 39 million bf16 parameters and 40,960 positions are
//! generated. At a context of 32,768 tokens a chunk needs about thirteen times the arithmetic of one at the start.
//!
//! `--json` prints one object:
//!
//! - `date`, `commit`, `machine`, `driver` (of a GPU), `command`, `model`, `device`, `device_name` (of a GPU);
//! - `prompt_tokens`, `streams`, `step_target_ms`, `allowed_ms`, `within`;
//! - `runs[]`: `step_target_ms`, `prefill_s` (from the prompt's request to its response), and for `alone_ms` and
//!   `beside_ms` the time between tokens: `count`, `mean`, `std`, `min`, `max`, `p50`, `p99`.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use baton_engine::compute::cuda::{Accelerator, DeviceChoice};
use baton_engine::model::config::ModelConfig;
use baton_engine::model::generation::GenerationDefaults;
use baton_engine::model::weights::Weights;
use serde::Serialize;
use serde_json::{Value, json};

use super::handoff::{ask, prompt};
use crate::BenchError;
use crate::common::machine::Provenance;
use crate::common::processes::ChildProcess;
use crate::common::report::print_report;
use crate::common::stats::SampleSummary;
use crate::load::rng::Rng;

/// Tokens of a stream's prompt.
const STREAM_PROMPT: usize = 64;
/// Tokens that a stream may generate: more than it does beside any prompt.
const STREAM_TOKENS: usize = 8_000;
/// Tokens of the request that comes before all measurements.
const WARM_UP_PROMPT: usize = 512;
/// Maximum time of the response to the long prompt.
const PREFILL_WITHIN: Duration = Duration::from_secs(3_600);
/// Maximum time until the streams have decoded alone.
const ALONE_WITHIN: Duration = Duration::from_secs(600);
/// The factor on the target that the 99th percentile may have.
const ALLOWED: f64 = 2.0;
/// The percentiles of a report.
const PERCENTILES: [f64; 2] = [50.0, 99.0];
/// The generated model.
const MADE_UP: &str = "made up: Llama shape, 39M parameters, bf16";
const MADE_UP_CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 1408, "vocab_size": 16384, "max_position_embeddings": 40960, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": false}"#;

/// Options of `baton bench steps`.
#[derive(Clone, Debug, clap::Args)]
pub struct StepsOptions {
    /// Checkpoint directory with enough positions [default: a generated bf16 model with 39M parameters]
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Tokens of the long prompt
    #[arg(long, value_name = "N", default_value_t = 32_768)]
    pub tokens: usize,
    /// Streams that decode beside it
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub streams: usize,
    /// Tokens of each stream before the prompt arrives
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub alone: usize,
    /// Time target of steps in milliseconds; the second run has none
    #[arg(long, value_name = "MS", default_value_t = 100)]
    pub step_target_ms: u64,
    /// Maximum tokens per step
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub max_num_batched_tokens: usize,
    /// Size of the KV pool in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    pub kv_cache_mib: usize,
    /// Threads of the engine [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Device of the engine
    #[arg(long, value_name = "cpu|cuda:N|software", default_value_t,
          value_parser = baton_engine_check::parse_device)]
    pub device: DeviceChoice,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Fail if the 99th percentile beside the prompt is above twice the target
    #[arg(long)]
    pub fail_on_miss: bool,
}

/// Why the benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum StepsError {
    /// The engine could not be started or reached.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The engine returned an unexpected response.
    #[error("the engine answered: {0}")]
    Answer(String),
    /// A stream ended or was silent.
    #[error("a stream {0}")]
    Stream(&'static str),
    /// The options leave nothing to measure.
    #[error("--tokens, --streams, --alone and --step-target-ms must be at least 1, and --alone at most 4000")]
    Options,
    /// The target was missed, with `--fail-on-miss`.
    #[error("beside the prompt the 99th percentile is {p99:.0} ms, above {allowed:.0} ms")]
    Missed {
        /// The 99th percentile, in milliseconds.
        p99: f64,
        /// Twice the target, in milliseconds.
        allowed: f64,
    },
}

/// One engine with one target.
#[derive(Debug, Serialize)]
struct StepsRun {
    step_target_ms: u64,
    prefill_s: f64,
    alone_ms: SampleSummary,
    beside_ms: SampleSummary,
}

/// Measures and prints.
///
/// # Errors
/// [`StepsError`], or that of writing the model. With a missing GPU [`Skipped`](crate::parts::gpu::Skipped).
pub fn run(options: &StepsOptions, out: &mut dyn Write) -> Result<(), BenchError> {
    let is_empty =
        [options.tokens, options.streams, options.alone].contains(&0) || options.step_target_ms == 0;
    if is_empty || options.alone > STREAM_TOKENS / 2 {
        return Err(StepsError::Options.into());
    }
    let (device_name, driver) = match options.device {
        DeviceChoice::Cpu | DeviceChoice::Accelerator(Accelerator::Provided(_)) => (None, None),
        DeviceChoice::Accelerator(Accelerator::Cuda(ordinal)) => crate::parts::gpu::named(ordinal)?,
    };
    let folder = tempfile::tempdir()?;
    let model = match &options.model {
        Some(model) => model.clone(),
        None => made_up(folder.path())?,
    };
    let runs = [measure(options, &model, options.step_target_ms)?, measure(options, &model, 0)?];
    let name = options.model.as_ref().map_or_else(|| MADE_UP.to_owned(), |model| model.display().to_string());
    let allowed = ALLOWED * options.step_target_ms as f64;
    let p99 = p99_of(&runs[0].beside_ms);
    let mut report = serde_json::to_value(Provenance::of(driver))?;
    let measured = json!({
        "model": name, "device": options.device.to_string(), "device_name": device_name,
        "prompt_tokens": options.tokens, "streams": options.streams,
        "step_target_ms": options.step_target_ms, "allowed_ms": allowed, "within": p99 <= allowed, "runs": runs,
    });
    for (key, value) in measured.as_object().into_iter().flatten() {
        report[key] = value.clone();
    }
    print_report(&report, options.json, out, print)?;
    if options.fail_on_miss && p99 > allowed {
        return Err(StepsError::Missed { p99, allowed }.into());
    }
    Ok(())
}

fn p99_of(summary: &SampleSummary) -> f64 {
    summary.percentile(99.0).unwrap_or(f64::INFINITY)
}

/// Writes the generated model below a folder.
fn made_up(folder: &Path) -> Result<PathBuf, BenchError> {
    let model = folder.join("model");
    let config = ModelConfig::parse(MADE_UP_CONFIG.as_bytes(), GenerationDefaults::default())?;
    super::engine::made_up::write(&model, MADE_UP_CONFIG, &config, &Weights::random(1))?;
    Ok(model)
}

fn print(report: &Value, out: &mut dyn Write) -> io::Result<()> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    writeln!(
        out,
        "a prompt of {} tokens beside {} streams, {} on {}; time between two tokens of a stream, milliseconds\n",
        report["prompt_tokens"],
        report["streams"],
        text(&report["model"]),
        text(&report["device"]),
    )?;
    writeln!(
        out,
        "{:<14}{:>10}{:>10}{:>12}{:>12}{:>12}{:>14}",
        "step target", "alone p50", "p99", "beside p50", "p99", "longest", "prefill, s"
    )?;
    for run in report["runs"].as_array().into_iter().flatten() {
        let number = |part: &str, field: &str| run[part][field].as_f64().unwrap_or_default();
        let target = match run["step_target_ms"].as_u64() {
            Some(0) | None => "none".to_owned(),
            Some(target) => format!("{target} ms"),
        };
        writeln!(
            out,
            "{target:<14}{:>10.1}{:>10.1}{:>12.1}{:>12.1}{:>12.1}{:>14.1}",
            number("alone_ms", "p50"),
            number("alone_ms", "p99"),
            number("beside_ms", "p50"),
            number("beside_ms", "p99"),
            number("beside_ms", "max"),
            run["prefill_s"].as_f64().unwrap_or_default(),
        )?;
    }
    let verdict = if report["within"] == true { "within" } else { "OVER" };
    writeln!(out, "\n{verdict} {} ms, twice the target", report["allowed_ms"])
}

/// Runs an engine with one target.
fn measure(options: &StepsOptions, model: &Path, target: u64) -> Result<StepsRun, StepsError> {
    let mut words = vec!["--model".to_owned(), model.display().to_string()];
    let mut add = |name: &str, value: String| words.extend([name.to_owned(), value]);
    add("--step-target-ms", target.to_string());
    add("--max-num-batched-tokens", options.max_num_batched_tokens.to_string());
    add("--kv-cache-mib", options.kv_cache_mib.to_string());
    add("--device", options.device.to_string());
    if let Some(threads) = options.threads {
        add("--threads", threads.to_string());
    }
    let mut engine = ChildProcess::start(&words)?;
    let address = engine.ready()?;
    let mut rng = Rng::new(0x51e9_0b07);
    whole(address, &prompt(WARM_UP_PROMPT, &mut rng))?;
    let prompts: Vec<_> = (0..options.streams).map(|_| prompt(STREAM_PROMPT, &mut rng)).collect();
    let long = prompt(options.tokens, &mut rng);
    let stop = AtomicBool::new(false);
    let (alone, decoded) = sync_channel(options.streams);
    let (times, begun, ended) = std::thread::scope(|scope| {
        let stop = &stop;
        let streams: Vec<_> = prompts
            .iter()
            .map(|prompt| {
                let alone = alone.clone();
                scope.spawn(move || stream(address, prompt, options.alone, &alone, stop))
            })
            .collect();
        // If every stream fails, no sender is left to wait for.
        drop(alone);
        let prefilled = beside(&decoded, options.streams, || whole(address, &long));
        // Every stream ends with its next token, also if the prompt has failed.
        stop.store(true, Ordering::Release);
        let joined =
            streams.into_iter().map(|stream| stream.join().unwrap_or(Err(StepsError::Stream("panicked"))));
        let times = joined.collect::<Result<Vec<_>, StepsError>>();
        let (begun, ended) = prefilled?;
        Ok::<_, StepsError>((times?, begun, ended))
    })?;
    if times.iter().any(|times| times.last().is_none_or(|last| *last < ended)) {
        return Err(StepsError::Stream("ended before the prompt's response"));
    }
    let summary =
        |samples| SampleSummary::of(samples, &PERCENTILES).ok_or(StepsError::Stream("had no token"));
    Ok(StepsRun {
        step_target_ms: target,
        prefill_s: ended.duration_since(begun).as_secs_f64(),
        alone_ms: summary(gaps(&times, |at| at <= begun))?,
        beside_ms: summary(gaps(&times, |at| begun < at && at <= ended))?,
    })
}

/// Waits until all streams have decoded alone, then sends the long prompt. Returns when it was sent and answered.
fn beside(
    decoded: &Receiver<()>,
    streams: usize,
    prefill: impl FnOnce() -> Result<(), StepsError>,
) -> Result<(Instant, Instant), StepsError> {
    for _ in 0..streams {
        decoded.recv_timeout(ALONE_WITHIN).map_err(|_| StepsError::Stream("did not decode in time"))?;
    }
    let begun = Instant::now();
    prefill()?;
    Ok((begun, Instant::now()))
}

/// The times between two events of a stream, in milliseconds, whose later one is `within` a time. The first event, whose
/// prompt was computed before it, ends none.
fn gaps(times: &[Vec<Instant>], within: impl Fn(Instant) -> bool) -> Vec<f64> {
    let pairs = times.iter().flat_map(|times| times.windows(2)).filter(|pair| within(pair[1]));
    pairs.map(|pair| pair[1].duration_since(pair[0]).as_secs_f64() * 1e3).collect()
}

/// Sends a prompt for one token, and reads the whole response.
fn whole(to: SocketAddr, prompt: &[u32]) -> Result<(), StepsError> {
    let body = json!({ "prompt": prompt, "max_tokens": 1, "temperature": 0 }).to_string();
    let mut stream = ask(to, &body, &[])?;
    stream.set_read_timeout(Some(PREFILL_WITHIN))?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    if answer.starts_with("HTTP/1.1 200") { Ok(()) } else { Err(StepsError::Answer(answer)) }
}

/// Reads a stream until `stop`. Returns when each token arrived. After `alone` tokens it reports so.
fn stream(
    to: SocketAddr,
    prompt: &[u32],
    alone: usize,
    decoded: &SyncSender<()>,
    stop: &AtomicBool,
) -> Result<Vec<Instant>, StepsError> {
    // An event per token, also for a token without text of its own.
    let body = json!({
        "prompt": prompt, "max_tokens": STREAM_TOKENS, "temperature": 0, "ignore_eos": true, "stream": true,
        "return_token_ids": true,
    });
    let stream = ask(to, &body.to_string(), &[])?;
    stream.set_read_timeout(Some(PREFILL_WITHIN))?;
    let mut times = Vec::new();
    for line in BufReader::new(stream).lines() {
        let line = line?;
        if times.is_empty() && line.starts_with("HTTP/1.1 ") && !line.starts_with("HTTP/1.1 200") {
            return Err(StepsError::Answer(line));
        }
        if !line.starts_with("data: {") {
            continue;
        }
        times.push(Instant::now());
        if times.len() == alone {
            // The benchmark may have failed and left.
            let _ = decoded.send(());
        }
        if stop.load(Ordering::Acquire) {
            break;
        }
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_between_tokens_belong_to_the_phase_in_which_they_end() {
        let origin = Instant::now();
        let at = |ms: u64| origin + Duration::from_millis(ms);
        let times = [vec![at(0), at(10), at(30), at(130), at(150)], vec![at(5), at(90)]];
        assert_eq!(gaps(&times, |time| time <= at(30)), [10.0, 20.0]);
        assert_eq!(gaps(&times, |time| at(30) < time && time <= at(130)), [100.0, 85.0]);
        assert!(gaps(&times, |time| time > at(150)).is_empty());
    }

    #[test]
    fn the_generated_model_has_enough_positions_and_its_declared_size() {
        let config = ModelConfig::parse(MADE_UP_CONFIG.as_bytes(), GenerationDefaults::default()).unwrap();
        assert!(config.max_positions > 32_768);
        assert_eq!(baton_engine::model::weights::parameter_count(&config) / 1_000_000, 39);
    }
}
