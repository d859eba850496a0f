//! The destination of raw events: a file, or none if engines are watched without a record.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::disconnect::record::raw::{self, Record};

/// See the module's documentation.
pub(crate) struct Recorder {
    out: Mutex<EventWriter>,
}

struct EventWriter {
    file: Box<dyn Write + Send>,
    /// The first write error. Without it, missing records would look like events that did not happen.
    failed: Option<std::io::Error>,
}

impl Recorder {
    /// Creates a new file.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub(crate) fn create(path: &Path) -> std::io::Result<Self> {
        Ok(Self::into(BufWriter::new(File::create(path)?)))
    }

    /// A recorder that discards all records.
    pub(crate) fn discard() -> Self {
        Self::into(std::io::sink())
    }

    fn into(file: impl Write + Send + 'static) -> Self {
        Self { out: Mutex::new(EventWriter { file: Box::new(file), failed: None }) }
    }

    /// Writes one record. [`Self::finish`] returns a write error.
    pub(crate) fn put(&self, record: &Record) {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        if out.failed.is_none() {
            out.failed = raw::write(&mut out.file, record).err();
        }
    }

    /// Flushes the file.
    ///
    /// # Errors
    /// The first write error, or an error of the flush.
    pub(crate) fn finish(&self) -> std::io::Result<()> {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        out.file.flush()?;
        out.failed.take().map_or(Ok(()), Err)
    }
}
