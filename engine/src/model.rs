//! A Hugging Face checkpoint: its files, configuration, weights, tokenizer and chat template.

pub mod config;
pub mod files;
pub mod weights;

pub use files::{FileBytes, ModelFiles};

use std::path::PathBuf;

/// Why a checkpoint cannot be served. Found before weights are read wherever possible.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file is there but cannot be read.
    #[error("cannot read {path}: {source}", path = path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file that every checkpoint needs is absent.
    #[error("{0} is missing from the checkpoint")]
    Missing(String),
    /// A file does not say what it should.
    #[error("{file}: {what}")]
    Malformed {
        /// Which file.
        file: String,
        /// What is wrong with it.
        what: String,
    },
    /// The checkpoint is sound, but this engine cannot compute it.
    #[error("{file}: {what} is not supported ({supported})")]
    Unsupported {
        /// Which file says so.
        file: String,
        /// The feature, by the name the checkpoint gives it.
        what: String,
        /// What is.
        supported: String,
    },
}
