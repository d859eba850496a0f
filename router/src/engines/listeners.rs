//! Listeners of an engine's load and capacity. Routing and admission implement them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, Weak};

/// Follows the load of several engines, each at an index.
pub(crate) trait LoadListener: Send + Sync {
    /// Reads the load of the engine at this index again.
    fn refresh(&self, at: usize);
}

/// Waits for capacity of any engine.
pub(crate) trait CapacityListener: Send + Sync {
    /// Called when an engine may have capacity again, while at least one request waits for some engine.
    fn capacity_freed(&self);
}

/// An engine's place at a load listener.
#[derive(Clone)]
pub(crate) struct LoadSubscription {
    listener: Weak<dyn LoadListener>,
    at: usize,
    /// `None`: all ranks.
    rank: Option<u16>,
}

impl LoadSubscription {
    /// The entry at this index of a listener that counts one rank, or all of them.
    pub(crate) fn new(listener: Weak<dyn LoadListener>, at: usize, rank: Option<u16>) -> Self {
        Self { listener, at, rank }
    }

    /// Whether the listener counts this rank.
    pub(crate) fn covers(&self, rank: Option<u16>) -> bool {
        self.rank.is_none() || self.rank == rank
    }

    /// Notifies the listener of a change.
    pub(crate) fn refresh(&self) {
        if let Some(listener) = self.listener.upgrade() {
            listener.refresh(self.at);
        }
    }

    /// The listener was dropped.
    pub(crate) fn is_dropped(&self) -> bool {
        self.listener.strong_count() == 0
    }
}

/// Notifies the queues when an engine may have capacity again.
#[derive(Default)]
pub(crate) struct CapacityNotify {
    waiting: AtomicUsize,
    listeners: Mutex<Vec<Weak<dyn CapacityListener>>>,
}

impl CapacityNotify {
    /// To be called whenever an engine may have become able to accept a request. While no request waits, the cost
    /// is one load of a word that rarely changes.
    pub(crate) fn notify(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.iter().filter_map(Weak::upgrade).for_each(|listener| listener.capacity_freed());
    }

    /// Adds a listener, and removes those that were dropped.
    pub(crate) fn listen(&self, listener: Weak<dyn CapacityListener>) {
        let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(listener);
    }

    /// Adds a waiting request. It must be added before it tries, so that no notification is lost.
    pub(crate) fn begin_waiting(&self) {
        self.waiting.fetch_add(1, Ordering::SeqCst);
    }

    /// Number of waiting requests.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Removes a waiting request.
    pub(crate) fn end_waiting(&self) {
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}
