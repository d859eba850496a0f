//! An engine's load by this router's requests, in total and by data-parallel rank, with the pools that follow it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;

use super::Engine;
use crate::engines::health::TrialSlot;
use crate::engines::listeners::{CapacityNotify, LoadSubscription};
use crate::engines::prefill_times::PrefillTimes;
use crate::metrics::Leg;

/// Data-parallel ranks with separate load and cache: as many as a configuration may have.
pub(super) const RANKS_MAX: u16 = 256;

/// Requests in flight.
#[derive(Default)]
struct InFlightLoad {
    requests: AtomicUsize,
    /// Estimated tokens of their prompts.
    tokens: AtomicU64,
}

impl InFlightLoad {
    fn add(&self, tokens: u64) {
        self.requests.fetch_add(1, Ordering::SeqCst);
        self.tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    /// Sequentially consistent: a waiting request counts itself and then reads this count, in that order.
    fn take(&self, tokens: u64) {
        self.tokens.fetch_sub(tokens, Ordering::Relaxed);
        self.requests.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The load of one engine, and its listeners.
pub(super) struct LoadCounters {
    total: InFlightLoad,
    /// By data-parallel rank. Created when the first rank is chosen.
    ranks: OnceLock<Box<[InFlightLoad]>>,
    /// Pools that order their engines by load.
    pub(super) subscriptions: ArcSwap<Vec<LoadSubscription>>,
    /// Notified when a request ends here, so that a waiting request may take its place.
    pub(super) capacity: Arc<CapacityNotify>,
    /// How long prefills take there, under its present load.
    pub(super) prefill_times: PrefillTimes,
}

impl LoadCounters {
    pub(super) fn new(capacity: Arc<CapacityNotify>) -> Self {
        Self {
            total: InFlightLoad::default(),
            ranks: OnceLock::new(),
            subscriptions: ArcSwap::default(),
            capacity,
            prefill_times: PrefillTimes::default(),
        }
    }

    /// Whether a data-parallel rank was chosen.
    pub(super) fn has_ranks(&self) -> bool {
        self.ranks.get().is_some()
    }

    fn of(&self, rank: Option<u16>) -> &InFlightLoad {
        let Some(rank) = rank else { return &self.total };
        let ranks = self.ranks.get_or_init(|| (0..RANKS_MAX).map(|_| InFlightLoad::default()).collect());
        &ranks[usize::from(rank % RANKS_MAX)]
    }

    fn changed(&self, rank: Option<u16>) {
        let subscriptions = self.subscriptions.load();
        subscriptions.iter().filter(|one| one.covers(rank)).for_each(LoadSubscription::refresh);
    }
}

/// Whether a request respects the limit of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TrialRule {
    /// One request at a time while the engine is on trial.
    Enforce,
    /// Ignores the engine's health, because no other engine is left.
    Ignore,
}

/// Counts one request of this router at an engine until it is dropped.
pub(crate) struct EngineRequestGuard {
    engine: Arc<Engine>,
    tokens: u64,
    rank: Option<u16>,
    /// The leg whose trial this request is.
    trial: Option<Leg>,
}

impl Engine {
    /// Adds a pool that follows this engine, and removes those that were dropped.
    pub(crate) fn add_listener(&self, subscription: LoadSubscription) {
        self.load.subscriptions.rcu(|subscriptions| {
            let still = subscriptions.iter().filter(|subscription| !subscription.is_dropped());
            still.chain(std::iter::once(&subscription)).cloned().collect::<Vec<_>>()
        });
    }

    /// Notifies the pools: the engine's health or its reported load may have changed.
    pub(crate) fn changed(&self) {
        self.load.subscriptions.load().iter().for_each(LoadSubscription::refresh);
    }

    /// This router's requests in flight at the engine, or at one of its data-parallel ranks.
    pub(crate) fn load(&self, rank: Option<u16>) -> usize {
        // Read after a waiting request has counted itself; see `admission/mod.rs`.
        self.load.of(rank).requests.load(Ordering::SeqCst)
    }

    /// Estimated prompt tokens of the requests in flight at the engine, or at one of its data-parallel ranks.
    pub(crate) fn tokens(&self, rank: Option<u16>) -> u64 {
        self.load.of(rank).tokens.load(Ordering::Relaxed)
    }

    /// This router's requests there, in all ranks.
    pub(crate) fn own_requests(&self) -> u32 {
        u32::try_from(self.load(None)).unwrap_or(u32::MAX)
    }

    /// Counts one request of a leg, of a prompt of so many tokens, until the guard is dropped. `rank`: at one of
    /// several data-parallel ranks. `None` if `most` requests are there already, or if the engine is on trial and
    /// has its trial request.
    pub(crate) fn begin(
        self: &Arc<Self>,
        leg: Leg,
        rank: Option<u16>,
        tokens: u64,
        most: usize,
        rule: TrialRule,
    ) -> Option<EngineRequestGuard> {
        let trial = match self.health.claim_trial(leg) {
            TrialSlot::Taken if rule == TrialRule::Enforce => return None,
            TrialSlot::Taken | TrialSlot::NotOnTrial => None,
            TrialSlot::Claimed => Some(leg),
        };
        let load = self.load.of(rank);
        // The count never exceeds the limit, not even for a moment. Otherwise another request could be refused
        // without a later notification.
        let one_more = |now: usize| (now < most).then_some(now + 1);
        if load.requests.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more).is_err() {
            trial.into_iter().for_each(|leg| self.health.end_trial(leg));
            return None;
        }
        load.tokens.fetch_add(tokens, Ordering::Relaxed);
        if rank.is_some() {
            self.load.total.add(tokens);
        }
        match trial {
            // All ranks are on trial together.
            Some(_) => self.changed(),
            None => self.load.changed(rank),
        }
        Some(EngineRequestGuard { engine: Arc::clone(self), tokens, rank, trial })
    }
}

impl EngineRequestGuard {
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }
}

impl Drop for EngineRequestGuard {
    fn drop(&mut self) {
        if let Some(leg) = self.trial {
            self.engine.health.end_trial(leg);
        }
        // In this order: a waiting request reads in the opposite order.
        self.engine.load.of(self.rank).take(self.tokens);
        if self.rank.is_some() {
            self.engine.load.total.take(self.tokens);
        }
        match self.trial {
            Some(_) => self.engine.changed(),
            None => self.engine.load.changed(self.rank),
        }
        self.engine.load.capacity.notify();
    }
}
