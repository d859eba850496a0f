//! Signs of life of one engine: what comes of it on any of its connections.
//!
//! `GET /health` alone does not show whether an engine lives. A busy one may leave it unanswered for many seconds while its
//! streams flow. So what is waited for on a connection and comes is counted here, for all connections of the engine that
//! have work to answer. Answers to aborts and to questions for metrics do not count: a server that answers them may stand in
//! front of an engine that hangs.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// One engine's. On cache lines of its own: every piece of every answer writes here.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Life {
    heard: AtomicU64,
    open: AtomicUsize,
}

impl Life {
    /// A read that had to wait was answered. A piece that lay in the kernel's buffer does not count: its engine may
    /// have stopped since.
    pub(super) fn hear(&self) {
        self.heard.fetch_add(1, Ordering::Relaxed);
    }

    /// Differs from an earlier value if anything came since.
    pub(super) fn heard(&self) -> u64 {
        self.heard.load(Ordering::Relaxed)
    }

    /// Connections that are open.
    pub(super) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    pub(super) fn opened(&self) {
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn closed(&self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}
