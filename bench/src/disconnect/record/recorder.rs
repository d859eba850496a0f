//! Where raw events go as they happen: a file, or nowhere for who looks at engines without a record.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::disconnect::record::raw::{self, Record};

/// See the module's documentation.
pub(crate) struct Recorder {
    out: Mutex<Out>,
}

struct Out {
    file: Box<dyn Write + Send>,
    /// The first thing that went wrong: what is missing in the file must not look as if it had not happened.
    failed: Option<std::io::Error>,
}

impl Recorder {
    /// A fresh file.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(crate) fn create(path: &Path) -> std::io::Result<Self> {
        Ok(Self::into(BufWriter::new(File::create(path)?)))
    }

    /// Keeps nothing.
    pub(crate) fn nowhere() -> Self {
        Self::into(std::io::sink())
    }

    fn into(file: impl Write + Send + 'static) -> Self {
        Self { out: Mutex::new(Out { file: Box::new(file), failed: None }) }
    }

    /// Writes one record. That it could not be written is told by [`Self::finish`].
    pub(crate) fn put(&self, record: &Record) {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        if out.failed.is_none() {
            out.failed = raw::write(&mut out.file, record).err();
        }
    }

    /// Everything is in the file.
    ///
    /// # Errors
    /// When it is not.
    pub(crate) fn finish(&self) -> std::io::Result<()> {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        out.file.flush()?;
        out.failed.take().map_or(Ok(()), Err)
    }
}
