//! `baton parity DIR`: compares this engine with recorded outputs of `transformers`.
//!
//! `DIR` contains checkpoints and golden files: `NAME/` (a Hugging Face or GGUF folder), `golden/NAME.json`,
//! `golden/NAME.safetensors` and `manifest.json`. Every model runs every case of [`CASES`]. A case reports lines with
//! the measured numbers and their bounds. A model that the device does not compute is skipped and named.
//!
//! Tolerances: float32 results of different attention implementations differ by at most 8e-5, so 5e-4 finds every real
//! mistake. For bf16, engines are only comparable step by step under the golden tokens. The bounds are multiples of the
//! distance between the reference's own bf16 and float32 runs, which the golden file contains. Other devices sum in
//! other orders: they have twice the CPU's bound, and no bitwise guarantee.

mod coarse;
mod golden;
mod logits;
mod text;

use std::io::Write;
use std::path::{Path, PathBuf};

pub use golden::{Golden, GoldenPrompt, GoldenRun};

use baton_engine::compute::ExecutorError;
use baton_engine::compute::cuda::{DeviceChoice, LoadError};
use baton_engine::model::config::ModelConfig;
use baton_engine::model::{ModelError, ModelFiles};

/// One model with its golden outputs.
#[derive(Debug)]
pub struct ParityModel {
    /// Its name in the folder.
    pub name: String,
    /// The checkpoint.
    pub files: ModelFiles,
    /// Its configuration.
    pub config: ModelConfig,
    /// Golden outputs of `transformers`.
    pub golden: Golden,
    /// The device that computes it.
    pub device: DeviceChoice,
}

/// A group of checks on one model.
#[derive(Clone, Copy, Debug)]
pub struct ParityCase {
    /// Whether it measures options that only the CPU executor has.
    pub cpu_only: bool,
    /// Runs the checks and returns one line for each.
    pub run: fn(&ParityModel) -> Result<Vec<CheckLine>, ParityError>,
}

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckLine {
    /// What was checked.
    pub what: String,
    /// Whether it passed.
    pub passed: bool,
    /// What was measured, and the bound.
    pub numbers: String,
}

impl CheckLine {
    /// A check with a result.
    #[must_use]
    pub fn new(what: &str, passed: bool, numbers: String) -> Self {
        Self { what: what.to_owned(), passed, numbers }
    }

    /// A check of a measurement against an upper bound. NaN fails.
    #[must_use]
    pub fn at_most(what: &str, measured: f64, bound: f64) -> Self {
        Self::new(what, measured <= bound, format!("{measured:.2e} (at most {bound:.1e})"))
    }
}

/// All cases, in the order in which they run. The first one opens the device: without a device no case reports a
/// result.
pub const CASES: &[ParityCase] = &[
    ParityCase { cpu_only: false, run: logits::float32 },
    ParityCase { cpu_only: false, run: logits::configuration },
    ParityCase { cpu_only: true, run: logits::invariance },
    ParityCase { cpu_only: false, run: logits::bfloat16 },
    ParityCase { cpu_only: true, run: coarse::caches },
    ParityCase { cpu_only: true, run: coarse::int8 },
    ParityCase { cpu_only: true, run: coarse::integers },
    ParityCase { cpu_only: true, run: coarse::bfloat16 },
    ParityCase { cpu_only: false, run: text::text },
    ParityCase { cpu_only: false, run: text::sampling },
];

/// Numbers of passed and failed checks, and of models without checks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParityReport {
    /// Passed checks.
    pub passed: usize,
    /// Failed checks.
    pub failed: usize,
    /// Models that the device does not compute.
    pub skipped: usize,
}

/// Why parity could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum ParityError {
    /// The checkpoint cannot be served.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] LoadError),
    /// A forward pass failed.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// A golden file is missing or malformed.
    #[error("{path}: {what}", path = path.display())]
    Golden {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The report cannot be written.
    #[error("cannot write the report: {0}")]
    Report(#[from] std::io::Error),
}

/// Runs every case on every model of `dir` and writes a line for each check to `out`.
///
/// # Errors
/// [`ParityError`] if nothing could be measured. A failed check is in the report instead.
pub fn run(dir: &Path, device: DeviceChoice, out: &mut dyn Write) -> Result<ParityReport, ParityError> {
    let mut report = ParityReport::default();
    // Written last, because no device may be there at all.
    let mut skipped = Vec::new();
    for name in golden::names(dir)? {
        let files = ModelFiles::at(&dir.join(&name))?;
        let config = ModelConfig::read(&files)?;
        let golden = Golden::read(dir, &name)?;
        let config = config.for_positions(golden.longest());
        let subject = ParityModel { golden, name, files, config, device };
        let cases = CASES.iter().filter(|case| !case.cpu_only || device == DeviceChoice::Cpu);
        for (index, case) in cases.enumerate() {
            let lines = match (case.run)(&subject) {
                Err(ParityError::Device(LoadError::Unsupported(what))) if index == 0 => {
                    skipped.push(format!("SKIP  {:<16} {what}", subject.name));
                    break;
                }
                lines => lines?,
            };
            for line in lines {
                let verdict = if line.passed { "PASS" } else { "FAIL" };
                writeln!(out, "{verdict}  {:<16} {:<44} {}", subject.name, line.what, line.numbers)?;
                if line.passed {
                    report.passed += 1;
                } else {
                    report.failed += 1;
                }
            }
        }
    }
    report.skipped = skipped.len();
    skipped.iter().try_for_each(|line| writeln!(out, "{line}"))?;
    let ParityReport { passed, failed, skipped } = report;
    writeln!(out, "{passed} passed, {failed} failed, {skipped} models skipped")?;
    Ok(report)
}
