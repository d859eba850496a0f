//! A checkpoint, in a Hugging Face folder or a GGUF file: its files, configuration, weights, tokenizer, chat template and
//! formats of responses.

pub mod chat_template;
pub mod config;
pub mod detokenizer;
mod file_bytes;
pub mod files;
pub mod generation;
pub mod gguf;
pub mod identity;
pub mod lora;
pub mod output;
mod quantized;
pub mod spec;
pub mod tensors;
pub mod tokenizer;
pub mod truncation;
pub mod weights;

pub use file_bytes::FileBytes;
pub use files::ModelFiles;

use std::path::PathBuf;

/// Why a checkpoint cannot be served. If possible, it is detected before weights are read.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file exists but cannot be read.
    #[error("cannot read {path}: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file that every checkpoint needs is absent.
    #[error("{0} is missing from the checkpoint")]
    Missing(String),
    /// A file is malformed.
    #[error("{file}: {what}")]
    Malformed {
        /// The file.
        file: String,
        /// What is wrong.
        what: String,
    },
    /// The checkpoint is valid, but this engine cannot compute it.
    #[error("{file}: {what} is not supported ({supported})")]
    Unsupported {
        /// The file with the feature.
        file: String,
        /// The feature, by its name in the checkpoint.
        what: String,
        /// The supported alternatives.
        supported: String,
    },
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;
    use std::sync::{Arc, LazyLock};

    use super::chat_template::ChatTemplate;
    use super::files::ModelFiles;
    use super::tokenizer::Tokenizer;

    /// Files of a text fixture: `llama3`, `qwen3` or `sentencepiece`.
    pub(crate) fn fixture_files(name: &str) -> ModelFiles {
        ModelFiles::Dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text").join(name))
    }

    type Text = (Arc<Tokenizer>, Arc<ChatTemplate>);

    /// Tokenizer and template of a text fixture, loaded once per process.
    pub(crate) fn fixture(name: &str) -> Text {
        static LOADED: LazyLock<[(&str, Text); 3]> = LazyLock::new(|| {
            ["llama3", "qwen3", "sentencepiece"].map(|name| {
                let files = fixture_files(name);
                let tokenizer = Tokenizer::load(&files).expect("the fixture has a tokenizer");
                let template = ChatTemplate::load(&files, &tokenizer).expect("its template is sound");
                (name, (Arc::new(tokenizer), Arc::new(template)))
            })
        });
        let found = LOADED.iter().find(|(known, _)| *known == name);
        found.expect("one of the three").1.clone()
    }
}
