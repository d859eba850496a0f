//! Signs of life of one engine: bytes that arrive on any of its connections.
//!
//! `GET /health` alone does not show whether an engine is alive: a busy one may leave it unanswered for many
//! seconds while its streams flow. So awaited reads that return bytes are counted here, for all connections of the
//! engine that carry work. Replies to aborts and metrics queries do not count, because a server in front of a hung
//! engine may answer them.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The activity of one engine. It has cache lines of its own, because every piece of every reply writes here.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct EngineActivity {
    reads: AtomicU64,
    connections: AtomicUsize,
}

impl EngineActivity {
    /// Records a read that had to wait. A read from the kernel's buffer does not count, because the engine may
    /// have stopped since.
    pub(super) fn record_read(&self) {
        self.reads.fetch_add(1, Ordering::Relaxed);
    }

    /// Differs from an earlier value if bytes have arrived since.
    pub(super) fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Open connections.
    pub(super) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    pub(super) fn add_connection(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn remove_connection(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }
}
