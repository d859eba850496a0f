//! A value built from certificate files, and rebuilt when they change.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;

use super::TlsError;
use crate::config::file_watch::FileWatch;

/// The last valid value, with the expiry of its certificate.
pub(super) struct TlsFiles<T> {
    current: ArcSwap<T>,
    /// In seconds since 1970; 0 without a certificate.
    not_after_s: AtomicU64,
    watch: FileWatch,
}

impl<T> TlsFiles<T> {
    /// # Errors
    /// That of `load`.
    pub(super) fn new(
        files: Vec<PathBuf>,
        load: impl FnOnce() -> Result<(Arc<T>, u64), TlsError>,
    ) -> Result<Self, TlsError> {
        // Created before the files are read, so that a change in between is noticed.
        let watch = FileWatch::new(files);
        let (current, not_after_s) = load()?;
        Ok(Self { current: ArcSwap::new(current), not_after_s: AtomicU64::new(not_after_s), watch })
    }

    pub(super) fn current(&self) -> Arc<T> {
        self.current.load_full()
    }

    /// In seconds since 1970; `None` without a certificate.
    pub(super) fn not_after_s(&self) -> Option<u64> {
        Some(self.not_after_s.load(Ordering::Relaxed)).filter(|at| *at > 0)
    }

    /// Rebuilds the value if the files have changed; `None` if they have not. An error changes nothing.
    pub(super) fn refresh(
        &self,
        load: impl FnOnce() -> Result<(Arc<T>, u64), TlsError>,
    ) -> Option<Result<(), TlsError>> {
        self.watch.has_changed().then(|| {
            let (current, not_after_s) = load()?;
            self.current.store(current);
            self.not_after_s.store(not_after_s, Ordering::Relaxed);
            Ok(())
        })
    }
}
