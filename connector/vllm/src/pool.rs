//! Blocks by state, as the scheduler's thread last reported them.
//!
//! Only that thread can count the blocks of vLLM's pool. A reader raises [`signals::POOL`] and waits a bounded time. In
//! a long forward pass it gets the last counts with their age.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::ops::PoolCounts;
use crate::signals::{self, Signals};

/// Counts of this age are reported without a new request.
const FRESH: Duration = Duration::from_millis(100);

/// Longest wait of a reader for new counts.
const WAIT_MAX: Duration = Duration::from_millis(250);

/// Counts, with the leased blocks at the same moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolReading {
    /// The scheduler's counts.
    pub(crate) counts: PoolCounts,
    /// Different blocks of live leases.
    pub(crate) leased: usize,
    /// When the counts arrived.
    pub(crate) at: Instant,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct PoolView {
    latest: Mutex<PoolReading>,
    arrived: Notify,
}

impl PoolView {
    /// The view of a pool whose blocks are all free.
    pub(crate) fn new(blocks: usize) -> Self {
        let counts = PoolCounts { free: blocks, ..PoolCounts::default() };
        let latest = PoolReading { counts, leased: 0, at: Instant::now() };
        Self { latest: Mutex::new(latest), arrived: Notify::new() }
    }

    /// Stores new counts and wakes readers.
    pub(crate) fn report(&self, counts: PoolCounts, leased: usize) {
        *self.lock() = PoolReading { counts, leased, at: Instant::now() };
        self.arrived.notify_waiters();
    }

    /// The last counts.
    pub(crate) fn latest(&self) -> PoolReading {
        *self.lock()
    }

    /// Fresh counts if they arrive in time, else the last ones.
    pub(crate) async fn fresh(&self, signals: &Signals) -> PoolReading {
        let arrived = self.arrived.notified();
        tokio::pin!(arrived);
        // From here on no report is missed.
        arrived.as_mut().enable();
        let latest = self.latest();
        if latest.at.elapsed() < FRESH {
            return latest;
        }
        signals.raise(signals::POOL);
        // Without an answer the last counts are reported.
        let _ = tokio::time::timeout(WAIT_MAX, arrived).await;
        self.latest()
    }

    fn lock(&self) -> MutexGuard<'_, PoolReading> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
