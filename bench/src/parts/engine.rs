//! `baton bench engine`: the speed of the CPU engine as a fraction of this machine's limits.
//!
//! Speeds of shared machines drift by a factor of two within an hour. Each figure therefore has a limit from the
//! same run:
//!
//! - Decode: how often a second the fastest of several plain loops reads as many bytes as a step must. The loops run
//!   right before and after that step. The multiply-adds per second in registers over those of a step count if
//!   lower.
//! - Prefill: the peak in registers, and the speed of the `gemm` crate with the same threads on the model's own
//!   matrices. `bench/engine_peers.py` measures other engines and oneDNN.
//!
//! Rounds alternate between all measurements. The best rounds are compared. The spread shows how reliable a figure
//! is.
//!
//! The report has a row for each choice of element types of weights and KV cache. The first is the default and
//! exact. With a checkpoint, the engine is also started as a process, to measure the time to the first token and the
//! resident memory.
//!
//! Without a checkpoint, the weights of a Llama-shaped model with 214 million bf16 parameters are generated.

mod limits;
pub(super) mod made_up;
mod process;
mod subject;
mod targets;

use std::io::Write;
use std::path::PathBuf;

use baton_connector::layout::KvDtype;
use baton_engine::compute::cpu::{Bf16Unit, CpuExecutor, WeightMode};
use baton_engine::compute::{Executor, ExecutorError};
use baton_engine::model::config::ModelConfig;
use baton_engine::model::generation::GenerationDefaults;
use baton_engine::model::weights::Weights;
use baton_engine::model::{ModelError, ModelFiles};
use clap::Args;
use serde::Serialize;

pub use self::process::ProcessReport;
use self::subject::EngineSubject;
pub use self::targets::SpeedTarget;
use crate::common::report::print_report;
use crate::common::stats::median;

/// Prompt length of the prefill measurement, in tokens.
const PROMPT_TOKENS: usize = 512;
/// Sequences of the batched decode measurement.
const BATCH: usize = 8;
/// Tokens of a KV block.
const BLOCK_TOKENS: usize = 16;
/// The generated model.
const MADE_UP_CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 2816, "vocab_size": 16384, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": false}"#;

/// Options of `baton bench engine`.
#[derive(Args, Clone, Debug)]
pub struct EngineBench {
    /// Checkpoint directory [default: a generated bf16 model with 214M parameters]
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Write the generated model (430 MB) to a new directory and measure it, also as a process
    #[arg(long, value_name = "DIR", conflicts_with = "model")]
    pub write_model: Option<PathBuf>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
    /// Threads of the engine and of every baseline [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Alternating rounds of all measurements
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub rounds: usize,
    /// Tokens decoded per round
    #[arg(long, value_name = "N", default_value_t = 24)]
    pub decode_tokens: usize,
    /// Measure only the default element types
    #[arg(long)]
    pub exact_only: bool,
    /// Fail if a target is missed: 85% of the limit, 300 tokens/s, 2 s, 1.15 times the memory
    #[arg(long)]
    pub fail_on_miss: bool,
}

/// Why the benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineBenchError {
    /// The model cannot be loaded.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A forward pass failed.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// The engine could not run as a process.
    #[error("the engine as a process: {0}")]
    Process(String),
    /// The report cannot be written.
    #[error("cannot write the report: {0}")]
    Report(#[from] std::io::Error),
    /// A target was missed, with `--fail-on-miss`.
    #[error("missed: {0}")]
    Missed(String),
}

/// One JSON object of `--json`.
#[derive(Debug, Serialize)]
pub struct EngineReport {
    /// The checkpoint folder, or a description of the generated model.
    pub model: String,
    /// Seconds since 1970 at the start.
    pub unix_time_s: u64,
    /// The commit of the repository in which the benchmark ran.
    pub commit: Option<String>,
    /// The command.
    pub command: String,
    /// The processor's name.
    pub cpu: String,
    /// Threads of the engine and of the baselines.
    pub threads: usize,
    /// Instruction set of the engine.
    pub isa: &'static str,
    /// Read bandwidth of memory (1 GiB repeatedly), GB/s (10^9 bytes).
    pub memory_gbps: BestWorst,
    /// Fraction of anonymous memory in huge pages. Absent if the system does not report it.
    pub huge_page_share: Option<f64>,
    /// f32 multiply-adds in registers, all threads, GFLOP/s. Absent without a kernel for this processor.
    pub peak_gflops: Option<BestWorst>,
    /// The same for bf16, by the unit that the engine uses. Absent if that unit multiplies f32.
    pub bf16_peak_gflops: Option<BestWorst>,
    /// Speed of `gemm` on the model's matrices with 512 rows, f32, GFLOP/s.
    pub gemm_gflops: BestWorst,
    /// One entry per choice of element types, the default first.
    pub engines: Vec<EngineSpeeds>,
    /// The engine as a process. Only with a checkpoint.
    pub process: Option<ProcessReport>,
    /// Targets, and whether they were met.
    pub targets: Vec<SpeedTarget>,
}

/// The engine with one choice of element types.
#[derive(Debug, Default, Serialize)]
pub struct EngineSpeeds {
    /// Element type of the matrices in memory.
    pub weights: &'static str,
    /// The unit of the products: `f32`, or the unit of bfloat16 mode.
    pub products: &'static str,
    /// Element type of the KV cache.
    pub kv_cache: &'static str,
    /// Bytes of weights that every step streams.
    pub weight_bytes: usize,
    /// Bytes of keys and values that one sequence of a decode step reads (position 512).
    pub kv_bytes: usize,
    /// Speed of plain loops that read as many bytes as a step of one sequence, including cached bytes, GB/s.
    pub decode_b1_read_gbps: BestWorst,
    /// The same for a step of eight sequences.
    pub decode_b8_read_gbps: BestWorst,
    /// Decode of one sequence, tokens/s.
    pub decode_b1_tps: BestWorst,
    /// Decode of eight sequences together, their total tokens/s.
    pub decode_b8_tps: BestWorst,
    /// Prefill of one 512-token prompt, tokens/s.
    pub prefill_tps: BestWorst,
    /// The same in GFLOP/s, including attention (best round).
    pub prefill_gflops: f64,
    /// The bandwidth over weight and KV bytes, or the peak over a token's arithmetic if lower, tokens/s.
    pub decode_b1_limit_tps: f64,
    /// The same for eight sequences.
    pub decode_b8_limit_tps: f64,
    /// Tokens/s of a prefill that runs at the peak throughout.
    pub prefill_limit_tps: f64,
    /// Measured over limit, best rounds.
    pub decode_b1_ratio: f64,
    /// As above.
    pub decode_b8_ratio: f64,
    /// For each round, decode of one sequence in tokens/s, and the better of the readings before and after it in
    /// GB/s.
    pub decode_b1_rounds: Vec<[f64; 2]>,
    /// The same for eight sequences.
    pub decode_b8_rounds: Vec<[f64; 2]>,
    /// Median over the rounds of measured over limit, with the limit of the adjacent readings.
    pub decode_b1_ratio_beside: f64,
    /// As above.
    pub decode_b8_ratio_beside: f64,
    /// As above.
    pub prefill_ratio: f64,
    /// `prefill_gflops` over `gemm_gflops`, best rounds.
    pub prefill_over_gemm: f64,
}

/// The rounds of one measurement.
#[derive(Clone, Debug, Default, Serialize)]
pub struct BestWorst {
    /// Highest of all rounds.
    pub best: f64,
    /// Lowest of all rounds.
    pub worst: f64,
}

impl BestWorst {
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
    print_report(&report, options.json, out, |report, out| print(report, options.rounds, out))?;
    let missed: Vec<_> =
        report.targets.iter().filter(|target| !target.met).map(SpeedTarget::to_string).collect();
    if options.fail_on_miss && !missed.is_empty() {
        return Err(EngineBenchError::Missed(missed.join("; ")));
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
    if let Some(dir) = &options.write_model {
        made_up::write(dir, MADE_UP_CONFIG, &made_up_config()?, &Weights::random(1))?;
    }
    let checkpoint = options.model.as_ref().or(options.write_model.as_ref());
    let (name, config, weights) = match checkpoint {
        Some(dir) => {
            let files = ModelFiles::at(dir)?;
            (dir.display().to_string(), ModelConfig::read(&files)?, Weights::open(&files)?)
        }
        None => {
            let name = "made up: Llama shape, 214M parameters, bf16".to_owned();
            (name, made_up_config()?, Weights::random(1))
        }
    };
    let mut subjects = subjects(&config, &weights, threads, options)?;
    drop(weights);
    let engines: Vec<_> =
        subjects.iter().map(|subject| EngineSpeeds::of(subject.executor(), &config)).collect();
    let step_bytes = engines.iter().map(|row| row.step_bytes(BATCH)).max().unwrap_or(0);
    let mut machine = limits::MachineLimits::new(&config, PROMPT_TOKENS, threads, step_bytes);
    let mut report = EngineReport {
        model: name,
        unix_time_s: crate::common::machine::unix_seconds(),
        commit: crate::common::machine::commit(),
        command: crate::common::machine::command(),
        cpu: limits::cpu_name(),
        threads,
        isa: subjects[0].executor().isa().name(),
        memory_gbps: BestWorst::default(),
        huge_page_share: None,
        peak_gflops: None,
        bf16_peak_gflops: None,
        gemm_gflops: BestWorst::default(),
        engines,
        process: None,
        targets: Vec::new(),
    };
    for subject in &mut subjects {
        subject.prefill()?;
    }
    for _ in 0..options.rounds.max(1) {
        measure_round(&mut subjects, &mut machine, &mut report)?;
    }
    let share = |(huge, all): (u64, u64)| huge as f64 / all.max(1) as f64;
    report.huge_page_share = limits::huge_pages().map(share);
    let gemm = report.gemm_gflops.best * 1e9;
    let f32_peak = report.peak_gflops.as_ref().map_or(gemm, |peak| peak.best * 1e9);
    let bf16_peak = report.bf16_peak_gflops.as_ref().map_or(f32_peak, |peak| peak.best * 1e9);
    for row in &mut report.engines {
        let peak = match row.products {
            "f32" => f32_peak,
            // A vector of 8-bit integers has four times as many as one of f32.
            "int8" => 4.0 * f32_peak,
            _ => bf16_peak,
        };
        row.compare(&config, peak, gemm);
    }
    drop((subjects, machine));
    if let Some(dir) = checkpoint {
        report.process = Some(process::measure(dir, threads, report.engines[0].weight_bytes, &config)?);
    }
    report.targets = targets::judge(&report, &config);
    Ok(report)
}

/// One round: all measurements of each engine, beside those of the machine.
fn measure_round(
    subjects: &mut [EngineSubject],
    machine: &mut limits::MachineLimits,
    report: &mut EngineReport,
) -> Result<(), EngineBenchError> {
    for (subject, row) in subjects.iter_mut().zip(&mut report.engines) {
        let (one, eight) = (row.step_bytes(1), row.step_bytes(BATCH));
        for (batch, bytes, read, decode, rounds) in [
            (1, one, &mut row.decode_b1_read_gbps, &mut row.decode_b1_tps, &mut row.decode_b1_rounds),
            (BATCH, eight, &mut row.decode_b8_read_gbps, &mut row.decode_b8_tps, &mut row.decode_b8_rounds),
        ] {
            let before = machine.read_gbps(bytes);
            let decoded = subject.decode(batch)?;
            let after = machine.read_gbps(bytes);
            read.add(before);
            read.add(after);
            decode.add(decoded);
            rounds.push([decoded, before.max(after)]);
        }
        row.prefill_tps.add(subject.prefill()?);
        report.gemm_gflops.add(machine.gemm_gflops());
        if let Some(peak) = machine.peak_gflops() {
            report.peak_gflops.get_or_insert_default().add(peak);
        }
        if let Some(peak) = machine.bf16_peak_gflops(subject.executor().bf16_unit()) {
            report.bf16_peak_gflops.get_or_insert_default().add(peak);
        }
    }
    report.memory_gbps.add(machine.memory_gbps());
    Ok(())
}

fn made_up_config() -> Result<ModelConfig, ModelError> {
    ModelConfig::parse(MADE_UP_CONFIG.as_bytes(), GenerationDefaults::default())
}

/// An engine for each choice of element types. Engines with the same weights share them.
fn subjects(
    config: &ModelConfig,
    weights: &Weights,
    threads: usize,
    options: &EngineBench,
) -> Result<Vec<EngineSubject>, EngineBenchError> {
    let tokens = options.decode_tokens;
    let with = |dtype, mode| {
        let mut cpu = EngineSubject::options(dtype, threads, tokens);
        cpu.weights = mode;
        cpu
    };
    let load = |dtype, mode| CpuExecutor::with_weights(weights, config, &with(dtype, mode), &mut |_| ());
    let exact = load(KvDtype::F32, WeightMode::Stored)?;
    if options.exact_only {
        return Ok(vec![EngineSubject::new(exact, tokens)]);
    }
    let f16 = exact.sibling(&with(KvDtype::F16, WeightMode::Stored))?;
    let bf16 = exact.sibling(&with(KvDtype::Bf16, WeightMode::Stored))?;
    let int8 = load(KvDtype::F32, WeightMode::Int8)?;
    let int8_f16 = int8.sibling(&with(KvDtype::F16, WeightMode::Int8))?;
    let integers = load(KvDtype::F32, WeightMode::Integers8)?;
    let four_bits = load(KvDtype::F32, WeightMode::Integers4)?;
    let products = load(KvDtype::F32, WeightMode::Bf16)?;
    let products_bf16 = products.sibling(&with(KvDtype::Bf16, WeightMode::Bf16))?;
    let mut all = vec![exact, f16, bf16, products, products_bf16, int8, int8_f16, integers, four_bits];
    if weights_name(&all[0], config) != "f32" {
        all.push(load(KvDtype::F32, WeightMode::F32)?);
    }
    Ok(all.into_iter().map(|executor| EngineSubject::new(executor, tokens)).collect())
}

/// The element type of the weights, derived from their bytes.
fn weights_name(executor: &CpuExecutor, config: &ModelConfig) -> &'static str {
    let bytes = executor.streamed_bytes() as f64 / matrix_weights(config, 1.0);
    match bytes {
        bytes if bytes < 0.9 => "int4",
        bytes if bytes < 1.9 => "int8",
        bytes if bytes < 3.8 => "bf16",
        _ => "f32",
    }
}

impl EngineSpeeds {
    fn of(executor: &CpuExecutor, config: &ModelConfig) -> Self {
        let layout = executor.layout();
        Self {
            weights: weights_name(executor, config),
            products: match executor.multiplies_integers() {
                true => "int8",
                false => executor.bf16_unit().map_or("f32", Bf16Unit::name),
            },
            kv_cache: match layout.dtype {
                KvDtype::F32 => "f32",
                KvDtype::F16 => "f16",
                KvDtype::Bf16 => "bf16",
            },
            weight_bytes: executor.streamed_bytes(),
            kv_bytes: layout.block_bytes() * (PROMPT_TOKENS / BLOCK_TOKENS),
            ..Self::default()
        }
    }

    /// Bytes of weights, keys and values that a decode step of `batch` sequences reads.
    fn step_bytes(&self, batch: usize) -> usize {
        self.weight_bytes + batch * self.kv_bytes
    }

    /// Computes the limits from read bandwidth, peak FLOP/s and FLOP/s of `gemm`.
    fn compare(&mut self, config: &ModelConfig, peak: f64, gemm: f64) {
        let tokens = PROMPT_TOKENS as f64;
        let prefill_flops = prefill_flops(config);
        let attention = 4.0 * tokens * (config.query_width() * config.layers) as f64;
        let arithmetic = peak / (2.0 * matrix_weights(config, 1.0) + attention);
        let limit = |gbps: f64, batch: usize| {
            (gbps * 1e9 / self.step_bytes(batch) as f64 * batch as f64).min(arithmetic)
        };
        let beside = |rounds: &[[f64; 2]], batch: usize| {
            let ratios = rounds.iter().map(|[measured, gbps]| measured / limit(*gbps, batch));
            median(ratios.collect()).unwrap_or_default()
        };
        let (one, eight) =
            (limit(self.decode_b1_read_gbps.best, 1), limit(self.decode_b8_read_gbps.best, BATCH));
        let (one_beside, eight_beside) =
            (beside(&self.decode_b1_rounds, 1), beside(&self.decode_b8_rounds, BATCH));
        (self.decode_b1_limit_tps, self.decode_b8_limit_tps) = (one, eight);
        (self.decode_b1_ratio_beside, self.decode_b8_ratio_beside) = (one_beside, eight_beside);
        self.prefill_limit_tps = peak / prefill_flops * tokens;
        self.prefill_gflops = self.prefill_tps.best / tokens * prefill_flops / 1e9;
        self.decode_b1_ratio = self.decode_b1_tps.best / self.decode_b1_limit_tps;
        self.decode_b8_ratio = self.decode_b8_tps.best / self.decode_b8_limit_tps;
        self.prefill_ratio = self.prefill_tps.best / self.prefill_limit_tps;
        self.prefill_over_gemm = self.prefill_gflops * 1e9 / gemm;
    }
}

fn print(report: &EngineReport, rounds: usize, out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(out, "model    {}", report.model)?;
    writeln!(out, "machine  {}, {} threads, {}", report.cpu, report.threads, report.isa)?;
    writeln!(out, "\n{:<36}{:>9}  {:>9}", "this machine, same minute", "best", "worst")?;
    let peak = report.peak_gflops.as_ref();
    for (name, series) in [
        ("read of 1 GiB of memory, GB/s", Some(&report.memory_gbps)),
        ("f32 multiply-adds, GFLOP/s", peak),
        ("bf16 multiply-adds, GFLOP/s", report.bf16_peak_gflops.as_ref()),
        ("gemm f32 on these shapes, GFLOP/s", Some(&report.gemm_gflops)),
    ] {
        if let Some(series) = series {
            writeln!(out, "{name:<36}{:>9.1}  {:>9.1}", series.best, series.worst)?;
        }
    }
    writeln!(out, "\nengine, tokens/s                         best      worst     limit   ratio  beside")?;
    for row in &report.engines {
        let EngineSpeeds { weights, products, kv_cache, .. } = row;
        let (mb, kv_mb) = (row.weight_bytes / 1_000_000, row.kv_bytes as f64 / 1e6);
        writeln!(
            out,
            "{weights} weights ({mb} MB), products in {products}, {kv_cache} KV cache ({kv_mb:.1} MB a sequence)"
        )?;
        for (name, read) in [
            ("  plain reads of one step's bytes, GB/s", &row.decode_b1_read_gbps),
            ("  the same for 8 sequences", &row.decode_b8_read_gbps),
        ] {
            writeln!(out, "{name:<36}{:>9.1}  {:>9.1}", read.best, read.worst)?;
        }
        let (one, eight) = (Some(row.decode_b1_ratio_beside), Some(row.decode_b8_ratio_beside));
        for (name, series, limit, ratio, beside) in [
            ("decode, 1 sequence", &row.decode_b1_tps, row.decode_b1_limit_tps, row.decode_b1_ratio, one),
            ("decode, 8 sequences", &row.decode_b8_tps, row.decode_b8_limit_tps, row.decode_b8_ratio, eight),
            ("prefill, 512 tokens", &row.prefill_tps, row.prefill_limit_tps, row.prefill_ratio, None),
        ] {
            let (best, worst, percent) = (series.best, series.worst, ratio * 100.0);
            let beside = beside.map_or_else(String::new, |ratio| format!("  {:>5.0}%", ratio * 100.0));
            writeln!(out, "  {name:<34}{best:>9.1}  {worst:>9.1} {limit:>9.1}  {percent:>5.0}%{beside}")?;
        }
        let (gflops, percent) = (row.prefill_gflops, row.prefill_over_gemm * 100.0);
        writeln!(
            out,
            "    as GFLOP/s                      {gflops:>9.1}                       {percent:>5.0}% of gemm"
        )?;
    }
    writeln!(
        out,
        "\n{rounds} alternating rounds. Limits: the best plain reading of as many bytes of weights, keys and values as \
         a step's, or the best of the multiply-adds, whichever is lower. Ratio: best round over limit; beside: the median \
         of rounds, each over the readings right before and after it"
    )?;
    if let Some(share) = report.huge_page_share {
        writeln!(out, "{:.0}% of the memory is in huge pages", share * 100.0)?;
    }
    if let Some(process) = &report.process {
        process::print(process, out)?;
    }
    targets::print(&report.targets, out)
}

/// Number of weights in matrices, with `heads` output matrices per token.
fn matrix_weights(config: &ModelConfig, heads: f64) -> f64 {
    let layer: usize = limits::shapes(config).iter().map(|(outputs, inputs)| outputs * inputs).sum();
    (config.layers * layer) as f64 + heads * (config.vocab * config.hidden) as f64
}

/// Floating-point operations of the prompt: matrices, one row of logits, causal attention.
fn prefill_flops(config: &ModelConfig) -> f64 {
    let tokens = PROMPT_TOKENS as f64;
    let attention = 2.0 * tokens * tokens * (config.query_width() * config.layers) as f64;
    2.0 * tokens * matrix_weights(config, 1.0 / tokens) + attention
}

/// A report of one engine without measurements.
#[cfg(test)]
fn sample(config: &ModelConfig) -> EngineReport {
    let cpu = EngineSubject::options(KvDtype::F32, 1, 1);
    let tiny = ModelConfig { layers: 1, vocab: 64, ..config.clone() };
    let executor = CpuExecutor::with_weights(&Weights::random(1), &tiny, &cpu, &mut |_| ()).expect("it fits");
    EngineReport {
        model: "m".into(),
        unix_time_s: 0,
        commit: None,
        command: "c".into(),
        cpu: "p".into(),
        threads: 1,
        isa: executor.isa().name(),
        memory_gbps: BestWorst::default(),
        huge_page_share: None,
        peak_gflops: None,
        bf16_peak_gflops: None,
        gemm_gflops: BestWorst::default(),
        engines: vec![EngineSpeeds::of(&executor, &tiny)],
        process: None,
        targets: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_synthetic_model_has_its_declared_size() {
        let config = made_up_config().unwrap();
        let millions = baton_engine::model::weights::parameter_count(&config) / 1_000_000;
        assert_eq!(millions, 213);
        assert!((prefill_flops(&config) / 1e9 - 193.0).abs() < 1.0);
    }
}
