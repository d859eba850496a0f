//! A file's bytes: memory-mapped, embedded in the binary, or derived from another file.

use std::fs::File;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

use super::ModelError;

/// A file's bytes. The operating system reads mapped ones on demand. A clone shares them.
#[derive(Clone, Debug)]
pub enum FileBytes {
    /// Mapped from disk.
    Mapped(Arc<Mmap>),
    /// Part of the binary.
    Static(&'static [u8]),
    /// Made from the contents of another file.
    Derived(Arc<[u8]>),
}

impl Deref for FileBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
            Self::Derived(bytes) => bytes,
        }
    }
}

impl FileBytes {
    /// Maps a file. `Ok(None)` if there is none at this path.
    ///
    /// # Errors
    /// [`ModelError::File`] if it exists but cannot be read.
    #[allow(unsafe_code, reason = "a memory map; see below")]
    pub(super) fn map(path: &Path) -> Result<Option<Self>, ModelError> {
        let failed = |source| ModelError::File { path: path.to_owned(), source };
        match File::open(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(error)),
            Ok(file) if file.metadata().map_err(failed)?.len() == 0 => Ok(Some(Self::Static(&[]))),
            Ok(file) => {
                // SAFETY: the map is read-only. Truncating a checkpoint under a running engine is an operator error, as
                // with every engine that maps its weights.
                unsafe { Mmap::map(&file) }.map(|map| Some(Self::Mapped(Arc::new(map)))).map_err(failed)
            }
        }
    }
}
