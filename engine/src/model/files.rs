//! The source of a checkpoint's files: a folder on disk, or the model embedded in the binary.

use std::fs::File;
use std::ops::Deref;
use std::path::PathBuf;

use memmap2::Mmap;

use super::ModelError;

/// The files of one checkpoint.
#[derive(Clone, Debug)]
pub enum ModelFiles {
    /// A Hugging Face folder.
    Dir(PathBuf),
    /// An embedded checkpoint: name and bytes of each file, and its served name.
    BuiltIn {
        /// The served model name.
        name: &'static str,
        /// File name and contents.
        files: &'static [(&'static str, &'static [u8])],
    },
}

/// A file's bytes: memory-mapped or embedded. The operating system reads them on demand.
#[derive(Debug)]
pub enum FileBytes {
    /// Mapped from disk.
    Mapped(Mmap),
    /// Part of the binary.
    Static(&'static [u8]),
}

impl Deref for FileBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
        }
    }
}

impl ModelFiles {
    /// Opens a file of the checkpoint. `Ok(None)` if there is no file of that name.
    ///
    /// # Errors
    /// [`ModelError::File`] if it exists but cannot be read.
    #[allow(unsafe_code, reason = "a memory map; see below")]
    pub fn open(&self, name: &str) -> Result<Option<FileBytes>, ModelError> {
        match self {
            Self::BuiltIn { files, .. } => {
                Ok(files.iter().find(|(file, _)| *file == name).map(|(_, bytes)| FileBytes::Static(bytes)))
            }
            Self::Dir(dir) => {
                let path = dir.join(name);
                let failed = |source| ModelError::File { path: path.clone(), source };
                match File::open(&path) {
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
                    Err(error) => Err(failed(error)),
                    Ok(file) if file.metadata().map_err(failed)?.len() == 0 => {
                        Ok(Some(FileBytes::Static(&[])))
                    }
                    Ok(file) => {
                        // SAFETY: the map is read-only. Truncating a checkpoint under a running engine is an
                        // operator error, as with every engine that maps its weights.
                        unsafe { Mmap::map(&file) }.map(|map| Some(FileBytes::Mapped(map))).map_err(failed)
                    }
                }
            }
        }
    }

    /// The model's default served name: the folder's name.
    #[must_use]
    pub fn default_name(&self) -> String {
        match self {
            Self::BuiltIn { name, .. } => (*name).to_owned(),
            Self::Dir(dir) => {
                let absolute = dir.canonicalize().unwrap_or_else(|_| dir.clone());
                absolute
                    .file_name()
                    .map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
            }
        }
    }
}
