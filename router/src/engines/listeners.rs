//! Who an engine notifies when its load or its capacity changes. Routing and admission implement the listeners.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, Weak};

/// Keeps the load of several engines, each at an index.
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
pub(crate) struct Seat {
    listener: Weak<dyn LoadListener>,
    at: usize,
    /// None: all of them.
    rank: Option<u16>,
}

impl Seat {
    /// The place at this index of a listener that counts one rank, or all of them.
    pub(crate) fn new(listener: Weak<dyn LoadListener>, at: usize, rank: Option<u16>) -> Self {
        Self { listener, at, rank }
    }

    /// Whether the listener counts this rank.
    pub(crate) fn sees(&self, rank: Option<u16>) -> bool {
        self.rank.is_none() || self.rank == rank
    }

    /// Notifies the listener of a change.
    pub(crate) fn refresh(&self) {
        if let Some(listener) = self.listener.upgrade() {
            listener.refresh(self.at);
        }
    }

    /// The listener was dropped.
    pub(crate) fn is_gone(&self) -> bool {
        self.listener.strong_count() == 0
    }
}

/// Notifies the queues when an engine may have capacity again.
#[derive(Default)]
pub(crate) struct Freed {
    waiting: AtomicUsize,
    listeners: Mutex<Vec<Weak<dyn CapacityListener>>>,
}

impl Freed {
    /// To be called whenever an engine may have become able to take a request. Costs one load of a word that
    /// hardly ever changes as long as no request waits.
    pub(crate) fn ring(&self) {
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

    /// One more request waits. Counted before it tries, so that no notification is lost.
    pub(crate) fn begin_waiting(&self) {
        self.waiting.fetch_add(1, Ordering::SeqCst);
    }

    /// Requests that wait.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// One request less waits.
    pub(crate) fn end_waiting(&self) {
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}
