//! What is built of certificate files, and built again when they change.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;

use super::TlsError;
use crate::config::file_watch::FileWatch;

/// The last thing that could be built, and when its certificate ends.
pub(super) struct Followed<T> {
    current: ArcSwap<T>,
    /// In seconds since 1970; 0 where there is no certificate.
    not_after_s: AtomicU64,
    watch: FileWatch,
}

impl<T> Followed<T> {
    /// # Errors
    /// That of `load`.
    pub(super) fn new(
        files: Vec<PathBuf>,
        load: impl FnOnce() -> Result<(Arc<T>, u64), TlsError>,
    ) -> Result<Self, TlsError> {
        // Before they are read: what changes in between is noticed.
        let watch = FileWatch::new(files);
        let (current, not_after_s) = load()?;
        Ok(Self { current: ArcSwap::new(current), not_after_s: AtomicU64::new(not_after_s), watch })
    }

    pub(super) fn current(&self) -> Arc<T> {
        self.current.load_full()
    }

    /// In seconds since 1970; `None` where there is no certificate.
    pub(super) fn not_after_s(&self) -> Option<u64> {
        Some(self.not_after_s.load(Ordering::Relaxed)).filter(|at| *at > 0)
    }

    /// Builds it again if the files have changed; `None` if they have not. What cannot be built changes nothing.
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
