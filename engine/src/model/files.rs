//! The source of a checkpoint's files: a folder on disk, a GGUF file, or the model embedded in the binary.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::ModelError;
use super::file_bytes::FileBytes;
use super::gguf::{self, GgufFiles};

/// The files of one checkpoint.
#[derive(Clone, Debug)]
pub enum ModelFiles {
    /// A Hugging Face folder.
    Dir(PathBuf),
    /// A GGUF file, or its shards. Its metadata appears as the files of a Hugging Face folder.
    Gguf(Arc<GgufFiles>),
    /// An embedded checkpoint: name and bytes of each file, and its served name.
    BuiltIn {
        /// The served model name.
        name: &'static str,
        /// File name and contents.
        files: &'static [(&'static str, &'static [u8])],
    },
}

impl ModelFiles {
    /// The checkpoint at a path: a GGUF file, a Hugging Face folder, or a folder without `config.json` that contains
    /// one GGUF file or the shards of one.
    ///
    /// # Errors
    /// [`ModelError`] for a GGUF file that is unreadable, malformed or not supported, and for a folder with several.
    pub fn at(path: &Path) -> Result<Self, ModelError> {
        let found = match path.is_dir() {
            true if path.join("config.json").exists() => None,
            true => gguf::in_folder(path)?,
            false => Some(path.to_owned()),
        };
        match found {
            Some(file) => Ok(Self::Gguf(Arc::new(GgufFiles::open(&file)?))),
            None => Ok(Self::Dir(path.to_owned())),
        }
    }

    /// Opens a file of the checkpoint. `Ok(None)` if there is no file of that name.
    ///
    /// # Errors
    /// [`ModelError::File`] if it exists but cannot be read. Errors of GGUF metadata, when it becomes a file.
    pub fn open(&self, name: &str) -> Result<Option<FileBytes>, ModelError> {
        match self {
            Self::BuiltIn { files, .. } => {
                Ok(files.iter().find(|(file, _)| *file == name).map(|(_, bytes)| FileBytes::Static(bytes)))
            }
            Self::Gguf(files) => files.read(name),
            Self::Dir(dir) => FileBytes::map(&dir.join(name)),
        }
    }

    /// Whether this is a GGUF file with matrices of integers that can be multiplied as such. False for files that
    /// cannot be read, which opening them refuses.
    #[must_use]
    pub fn has_gguf_integers(&self) -> bool {
        match self {
            Self::Gguf(files) => files.entries().is_ok_and(|entries| {
                entries.iter().any(|entry| entry.shape.len() == 2 && entry.kind.integer_form().is_some())
            }),
            Self::Dir(_) | Self::BuiltIn { .. } => false,
        }
    }

    /// The model's default served name: the folder's name, or the GGUF file's without extension and shard number.
    #[must_use]
    pub fn default_name(&self) -> String {
        match self {
            Self::BuiltIn { name, .. } => (*name).to_owned(),
            Self::Gguf(files) => files.model_name(),
            Self::Dir(dir) => {
                let absolute = dir.canonicalize().unwrap_or_else(|_| dir.clone());
                absolute
                    .file_name()
                    .map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
            }
        }
    }
}
