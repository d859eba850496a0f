//! `baton parity DIR`: this engine against recorded outputs of `transformers`.
//!
//! `DIR` holds checkpoints and golden files: `NAME/` (a Hugging Face folder), `golden/NAME.json`,
//! `golden/NAME.safetensors` and `manifest.json`. Every model goes through every case of [`CASES`]; a case
//! reports lines with the numbers it measured and the bound it held them to.
//!
//! Tolerances (measured on the reference itself, 2026-11-20): float32 against float32 differs by at most 8e-5
//! between attention implementations, so 5e-4 is a gate that catches every mistake worth the name; bf16 against
//! bf16 of another engine is only comparable step by step under the golden tokens, at multiples of the distance between the
//! reference's own bf16 and float32 runs, which the golden file has. Other devices sum in other orders:
//! they have twice the CPU's bound, and promise no bits.

mod coarse;
mod golden;
mod logits;
mod text;

use std::io::Write;
use std::path::{Path, PathBuf};

pub use golden::{Golden, Prompt, Run};

use crate::compute::ExecutorError;
use crate::compute::cuda::{DeviceChoice, LoadError};
use crate::model::config::ModelConfig;
use crate::model::{ModelError, ModelFiles};

/// One model with its golden outputs.
#[derive(Debug)]
pub struct Subject {
    /// Its name in the folder.
    pub name: String,
    /// The checkpoint.
    pub files: ModelFiles,
    /// Its configuration.
    pub config: ModelConfig,
    /// What `transformers` made of it.
    pub golden: Golden,
    /// Where it is computed.
    pub device: DeviceChoice,
}

/// A group of checks on one model.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// For the report.
    pub name: &'static str,
    /// Runs the checks; a line for each.
    pub run: fn(&Subject) -> Result<Vec<Line>, ParityError>,
}

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// What was checked.
    pub what: String,
    /// Whether it held.
    pub passed: bool,
    /// What was measured, and the bound.
    pub numbers: String,
}

impl Line {
    /// A check that held or not.
    #[must_use]
    pub fn new(what: &str, passed: bool, numbers: String) -> Self {
        Self { what: what.to_owned(), passed, numbers }
    }

    /// A measurement held to an upper bound; NaN fails.
    #[must_use]
    pub fn at_most(what: &str, measured: f64, bound: f64) -> Self {
        Self::new(what, measured <= bound, format!("{measured:.2e} (at most {bound:.1e})"))
    }
}

/// All cases, in the order in which they run. The first opens the device: nothing is said to hold where nothing can be
/// computed.
pub const CASES: &[Case] = &[
    Case { name: "float32", run: logits::float32 },
    Case { name: "configuration", run: logits::configuration },
    Case { name: "invariance", run: logits::invariance },
    Case { name: "bfloat16", run: logits::bfloat16 },
    Case { name: "16-bit caches", run: coarse::caches },
    Case { name: "int8 weights", run: coarse::int8 },
    Case { name: "bfloat16 products", run: coarse::bfloat16 },
    Case { name: "text", run: text::text },
    Case { name: "sampling", run: text::sampling },
];

/// How many checks held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParityReport {
    /// Checks that held.
    pub passed: usize,
    /// Checks that did not.
    pub failed: usize,
}

/// Why parity could not be measured at all.
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
    /// A golden file is missing or not what it should be.
    #[error("{path}: {what}", path = path.display())]
    Golden {
        /// Which file.
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
/// [`ParityError`] where nothing could be measured; a check that does not hold is in the report instead.
pub fn run(dir: &Path, device: DeviceChoice, out: &mut dyn Write) -> Result<ParityReport, ParityError> {
    let mut report = ParityReport::default();
    for name in golden::names(dir)? {
        let files = ModelFiles::Dir(dir.join(&name));
        let config = ModelConfig::read(&files)?;
        let subject = Subject { golden: Golden::read(dir, &name)?, name, files, config, device };
        for case in CASES {
            for line in (case.run)(&subject)? {
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
    writeln!(out, "{} passed, {} failed", report.passed, report.failed)?;
    Ok(report)
}
