//! `baton bench engine`: how close the CPU engine comes to what this machine can do, in this minute.
//!
//! Speeds of shared machines drift by a factor of two within an hour, so every figure stands beside a limit
//! from the same run: decode beside the measured read bandwidth, prefill beside the arithmetic that the `gemm`
//! crate reaches with the same threads on the model's own matrices. Rounds alternate between all
//! measurements; the best of each is compared, and the spread says how much to trust it.
//!
//! Without a model it makes up the weights of a Llama-shaped one with 214 million bf16 parameters, so that
//! anyone can run it.

mod limits;

use std::io::Write;
use std::path::PathBuf;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use baton_connector::BlockId;
use baton_engine::executor::cpu::{CpuExecutor, CpuOptions};
use baton_engine::executor::{Executor, ExecutorError, Logits, LogitsWanted, SeqStep};
use baton_engine::model::config::ModelConfig;
use baton_engine::model::weights::Weights;
use baton_engine::model::{ModelError, ModelFiles};
use baton_engine::sampling::GenerationDefaults;
use clap::Args;
use serde::Serialize;

/// Prompt length of the prefill measurement, in tokens.
const PROMPT_TOKENS: usize = 512;
/// Sequences of the batched decode measurement.
const BATCH: usize = 8;
/// Tokens of a KV block.
const BLOCK_TOKENS: usize = 16;
/// The made-up model.
const MADE_UP_CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 1024,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 2816, "vocab_size": 16384, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": false}"#;

/// Options of `baton bench engine`.
#[derive(Args, Clone, Debug)]
pub struct EngineBench {
    /// Checkpoint folder; without it a made-up 214M-parameter bf16 model is measured
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
    /// Threads of the engine and of every baseline; all cores by default
    #[arg(long)]
    pub threads: Option<usize>,
    /// Alternating rounds of all measurements
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Tokens decoded in each round
    #[arg(long, default_value_t = 24)]
    pub decode_tokens: usize,
}

/// Why a measurement could not be made.
#[derive(Debug, thiserror::Error)]
pub enum EngineBenchError {
    /// The model cannot be loaded.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A forward pass failed.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// The report cannot be written.
    #[error("cannot write the report: {0}")]
    Report(#[from] std::io::Error),
}

/// One JSON object of `--json`.
#[derive(Debug, Serialize)]
pub struct EngineReport {
    /// The checkpoint folder, or what was made up.
    pub model: String,
    /// Seconds since 1970 at the start.
    pub unix_time_s: u64,
    /// The processor's own name.
    pub cpu: String,
    /// Threads of the engine and of the baselines.
    pub threads: usize,
    /// Instruction set of the engine.
    pub isa: &'static str,
    /// Bytes of weights that every step streams.
    pub weight_bytes: usize,
    /// Read bandwidth of memory, GB/s (10^9 bytes).
    pub read_bandwidth_gbps: Series,
    /// What `gemm` reaches on the model's matrices with 512 rows, f32, GFLOP/s.
    pub gemm_gflops: Series,
    /// Decode of one sequence, tokens/s.
    pub decode_b1_tps: Series,
    /// Decode of eight sequences together, tokens/s of all of them.
    pub decode_b8_tps: Series,
    /// Prefill of one 512-token prompt, tokens/s.
    pub prefill_tps: Series,
    /// The same as arithmetic, attention included, GFLOP/s (best round).
    pub prefill_gflops: f64,
    /// Bytes of keys and values that one sequence of a decode step reads (position 512).
    pub kv_bytes: usize,
    /// Bandwidth over weight and KV bytes: nothing that reads all of them can decode one sequence faster.
    pub decode_b1_limit_tps: f64,
    /// The same for eight sequences, or the arithmetic limit if that is lower.
    pub decode_b8_limit_tps: f64,
    /// Tokens/s of a prefill that ran at `gemm_gflops` throughout.
    pub prefill_limit_tps: f64,
    /// Measured over limit, best rounds.
    pub decode_b1_ratio: f64,
    /// As above.
    pub decode_b8_ratio: f64,
    /// As above.
    pub prefill_ratio: f64,
}

/// The rounds of one measurement.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Series {
    /// Highest of all rounds.
    pub best: f64,
    /// Lowest of all rounds.
    pub worst: f64,
}

impl Series {
    fn add(&mut self, value: f64) {
        self.worst = if self.best == 0.0 { value } else { self.worst.min(value) };
        self.best = self.best.max(value);
    }
}

/// Measures and reports.
///
/// # Errors
/// [`EngineBenchError`].
pub fn run(options: &EngineBench, out: &mut dyn Write) -> Result<(), EngineBenchError> {
    let report = measure(options)?;
    if options.json {
        let text = serde_json::to_string_pretty(&report).map_err(std::io::Error::other)?;
        writeln!(out, "{text}")?;
    } else {
        print(&report, options.rounds, out)?;
    }
    Ok(())
}

/// Measures.
///
/// # Errors
/// [`EngineBenchError`].
pub fn measure(options: &EngineBench) -> Result<EngineReport, EngineBenchError> {
    let threads = options
        .threads
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get))
        .max(1);
    let (name, config, weights) = match &options.model {
        Some(dir) => {
            let files = ModelFiles::Dir(dir.clone());
            (dir.display().to_string(), ModelConfig::read(&files)?, Weights::open(&files)?)
        }
        None => {
            let config = ModelConfig::parse(MADE_UP_CONFIG.as_bytes(), GenerationDefaults::default())?;
            ("made up: Llama shape, 214M parameters, bf16".to_owned(), config, Weights::random(1))
        }
    };
    let mut bench = Bench::new(&config, &weights, threads, options.decode_tokens)?;
    let mut machine = limits::Machine::new(&config, PROMPT_TOKENS, threads);
    let mut report = EngineReport {
        model: name,
        unix_time_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        cpu: limits::cpu_name(),
        threads,
        isa: bench.executor.isa().name(),
        weight_bytes: bench.executor.streamed_bytes(),
        read_bandwidth_gbps: Series::default(),
        gemm_gflops: Series::default(),
        decode_b1_tps: Series::default(),
        decode_b8_tps: Series::default(),
        prefill_tps: Series::default(),
        prefill_gflops: 0.0,
        kv_bytes: bench.executor.layout().block_bytes() * (PROMPT_TOKENS / BLOCK_TOKENS),
        decode_b1_limit_tps: 0.0,
        decode_b8_limit_tps: 0.0,
        prefill_limit_tps: 0.0,
        decode_b1_ratio: 0.0,
        decode_b8_ratio: 0.0,
        prefill_ratio: 0.0,
    };
    bench.prefill()?;
    for _ in 0..options.rounds.max(1) {
        report.read_bandwidth_gbps.add(machine.read_gbps());
        report.decode_b1_tps.add(bench.decode(1)?);
        report.read_bandwidth_gbps.add(machine.read_gbps());
        report.decode_b8_tps.add(bench.decode(BATCH)?);
        report.gemm_gflops.add(machine.gemm_gflops());
        report.prefill_tps.add(bench.prefill()?);
        report.gemm_gflops.add(machine.gemm_gflops());
    }
    let prefill_flops = prefill_flops(&config);
    #[allow(clippy::cast_precision_loss)] // far below 2^52
    let (tokens, bytes, kv) = (PROMPT_TOKENS as f64, report.weight_bytes as f64, report.kv_bytes as f64);
    let token_flops = 2.0 * matrix_weights(&config, 1.0);
    let flops_limit = report.gemm_gflops.best * 1e9 / token_flops;
    report.prefill_gflops = report.prefill_tps.best / tokens * prefill_flops / 1e9;
    report.prefill_limit_tps = report.gemm_gflops.best * 1e9 / prefill_flops * tokens;
    #[allow(clippy::cast_precision_loss)]
    let batch = BATCH as f64;
    let bandwidth = report.read_bandwidth_gbps.best * 1e9;
    report.decode_b1_limit_tps = (bandwidth / (bytes + kv)).min(flops_limit);
    report.decode_b8_limit_tps = (bandwidth * batch / (bytes + batch * kv)).min(flops_limit);
    report.decode_b1_ratio = report.decode_b1_tps.best / report.decode_b1_limit_tps;
    report.decode_b8_ratio = report.decode_b8_tps.best / report.decode_b8_limit_tps;
    report.prefill_ratio = report.prefill_tps.best / report.prefill_limit_tps;
    Ok(report)
}

fn print(report: &EngineReport, rounds: usize, out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(out, "model    {}", report.model)?;
    writeln!(out, "machine  {}, {} threads, {}", report.cpu, report.threads, report.isa)?;
    writeln!(out, "\n{:<34}{:>9}  {:>17}", "this machine, same minute", "best", "worst")?;
    for (name, series) in [
        ("read bandwidth, GB/s", &report.read_bandwidth_gbps),
        ("gemm f32 on these shapes, GFLOP/s", &report.gemm_gflops),
    ] {
        writeln!(out, "{name:<34}{:>9.1}  {:>17.1}", series.best, series.worst)?;
    }
    writeln!(
        out,
        "\n{:<34}{:>9}  {:>7} {:>9}  {:>7}",
        "engine, tokens/s", "best", "worst", "limit", "ratio"
    )?;
    for (name, series, limit, ratio) in [
        ("decode, 1 sequence", &report.decode_b1_tps, report.decode_b1_limit_tps, report.decode_b1_ratio),
        ("decode, 8 sequences", &report.decode_b8_tps, report.decode_b8_limit_tps, report.decode_b8_ratio),
        ("prefill, 512 tokens", &report.prefill_tps, report.prefill_limit_tps, report.prefill_ratio),
    ] {
        let (best, worst, percent) = (series.best, series.worst, ratio * 100.0);
        writeln!(out, "{name:<34}{best:>9.1}  {worst:>7.1} {limit:>9.1}  {percent:>6.0}%")?;
    }
    let (megabytes, kv) = (report.weight_bytes / 1_000_000, report.kv_bytes / 1_000_000);
    writeln!(
        out,
        "\n{rounds} alternating rounds; limits from the best reading of bandwidth ({megabytes} MB of weights \
         and {kv} MB of KV per sequence a step) and gemm; prefill {:.0} GFLOP/s",
        report.prefill_gflops
    )
}

/// The engine under measurement.
struct Bench {
    executor: CpuExecutor,
    vocab: u32,
    decode_tokens: usize,
    tables: Vec<Vec<BlockId>>,
}

impl Bench {
    fn new(
        config: &ModelConfig,
        weights: &Weights,
        threads: usize,
        decode_tokens: usize,
    ) -> Result<Self, EngineBenchError> {
        let per_sequence = (PROMPT_TOKENS + decode_tokens).div_ceil(BLOCK_TOKENS);
        let options = CpuOptions {
            blocks: per_sequence * BATCH,
            block_tokens: BLOCK_TOKENS,
            threads,
            ..CpuOptions::default()
        };
        let executor = CpuExecutor::with_weights(weights, config, &options, &mut |_| ())?;
        let block = |index: usize| BlockId(u32::try_from(index).expect("a small pool"));
        let tables = (0..BATCH)
            .map(|sequence| (0..per_sequence).map(|i| block(sequence * per_sequence + i)).collect())
            .collect();
        let vocab = u32::try_from(config.vocab).expect("a vocabulary fits");
        Ok(Self { executor, vocab, decode_tokens, tables })
    }

    fn tokens(&self, count: usize) -> Vec<u32> {
        (0..u32::try_from(count).expect("short"))
            .map(|i| i.wrapping_mul(2_654_435_761) % self.vocab)
            .collect()
    }

    /// Tokens/s of one prompt.
    fn prefill(&mut self) -> Result<f64, EngineBenchError> {
        let (tokens, mut logits) = (self.tokens(PROMPT_TOKENS), Logits::default());
        let step =
            SeqStep { tokens: &tokens, start: 0, block_table: &self.tables[0], logits: LogitsWanted::Last };
        let start = Instant::now();
        self.executor.execute(&[step], &mut logits)?;
        Ok(rate(PROMPT_TOKENS, start))
    }

    /// Tokens/s of `batch` sequences that continue at position 512. What their earlier positions hold does not
    /// matter to the speed.
    fn decode(&mut self, batch: usize) -> Result<f64, EngineBenchError> {
        let (tokens, mut logits) = (self.tokens(batch), Logits::default());
        let start = Instant::now();
        for position in PROMPT_TOKENS..PROMPT_TOKENS + self.decode_tokens {
            let steps: Vec<SeqStep<'_>> = (0..batch)
                .map(|sequence| SeqStep {
                    tokens: &tokens[sequence..=sequence],
                    start: position,
                    block_table: &self.tables[sequence],
                    logits: LogitsWanted::Last,
                })
                .collect();
            self.executor.execute(&steps, &mut logits)?;
        }
        Ok(rate(self.decode_tokens * batch, start))
    }
}

#[allow(clippy::cast_precision_loss)] // counts of tokens
fn rate(count: usize, start: Instant) -> f64 {
    count as f64 / start.elapsed().as_secs_f64()
}

/// Weights in matrices, with `heads` output matrices per token.
#[allow(clippy::cast_precision_loss)] // far below 2^52
fn matrix_weights(config: &ModelConfig, heads: f64) -> f64 {
    let layer: usize = limits::shapes(config).iter().map(|(outputs, inputs)| outputs * inputs).sum();
    (config.layers * layer) as f64 + heads * (config.vocab * config.hidden) as f64
}

/// Floating-point operations of the prompt: matrices, one row of logits, causal attention.
#[allow(clippy::cast_precision_loss)] // far below 2^52
fn prefill_flops(config: &ModelConfig) -> f64 {
    let tokens = PROMPT_TOKENS as f64;
    let attention = 2.0 * tokens * tokens * (config.query_width() * config.layers) as f64;
    2.0 * tokens * matrix_weights(config, 1.0 / tokens) + attention
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_made_up_model_has_the_size_it_claims() {
        let config = ModelConfig::parse(MADE_UP_CONFIG.as_bytes(), GenerationDefaults::default()).unwrap();
        let millions = baton_engine::model::weights::parameter_count(&config) / 1_000_000;
        assert_eq!(millions, 213);
        assert!((prefill_flops(&config) / 1e9 - 193.0).abs() < 1.0);
    }
}
