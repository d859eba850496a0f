//! The producer's side: requests of this engine, leases of their blocks, aborts by name.
//!
//! Invariants:
//! - A release or an abort that arrives before its request, or before the end of its prefill, wins: nothing is lent.
//! - An id of a lent request is in [`News::ended`] exactly once (invariant 7).
//! - Every table is bounded.
//!
//! Locks are taken in this order: requests, the ledger of [`LeaseService`], [`LentBlocks`]. The ledger calls its owner
//! without its own lock.

mod requests;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use baton_connector::ledger::{
    ClosedLease, LeaseOpenErrorKind, LeaseSpec, LeaseView, LedgerCounts, ReleaseReply,
};
use baton_connector::limits::CONSUMERS_MAX;
use baton_connector::{BlockId, Handle, RequestId};
use baton_connector_leases::event_log::{RankLog, RequestEvent, tag};
use baton_connector_leases::service::{LeaseOwner, LeaseService};
use baton_openai::cluster::LegFilter;

use crate::ids::{HandleFacts, random};
use crate::metrics::CoreMetrics;
use crate::ops::{EventKind, EventOp, QueuedOp};
use crate::signals::{self, Signals};
pub(crate) use requests::Leg;
use requests::{RequestTable, known};

/// The placeholder block of vLLM's pool, which stands for blocks outside of a sliding window.
const PLACEHOLDER: BlockId = BlockId(0);

/// The result of an abort or a release that ends a running request.
const ABORTING: &str = "aborting";

/// The result of an abort or a release of a request that is not known yet.
const REMEMBERED: &str = "remembered";

/// A lent request whose lease has ended.
#[derive(Clone, Debug)]
pub(crate) struct EndedLease {
    /// vLLM's internal id.
    pub(crate) id: Arc<str>,
    /// The cause's label.
    pub(crate) cause: &'static str,
    /// The reason of the release, or the cause.
    pub(crate) reason: Box<str>,
}

/// What the Python half has not seen yet.
#[derive(Debug, Default)]
pub(crate) struct News {
    /// Leases that have ended.
    pub(crate) ended: Vec<EndedLease>,
    /// Internal ids of requests to abort.
    pub(crate) aborts: Vec<Arc<str>>,
}

/// The lease of a finished request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenedLease {
    pub(crate) handle: Handle,
    pub(crate) left_ms: u64,
}

/// The blocks of live leases, and ended leases that the Python half has not seen.
pub(crate) struct LentBlocks {
    state: Mutex<LentState>,
    signals: Arc<Signals>,
    metrics: Arc<CoreMetrics>,
}

#[derive(Default)]
struct LentState {
    by_handle: HashMap<Handle, Arc<str>>,
    ended: Vec<EndedLease>,
    /// Number of live leases by block.
    leased: HashMap<BlockId, u32>,
}

impl LentBlocks {
    pub(crate) fn new(signals: Arc<Signals>, metrics: Arc<CoreMetrics>) -> Self {
        Self { state: Mutex::default(), signals, metrics }
    }

    fn insert(&self, handle: Handle, id: Arc<str>, blocks: &[BlockId]) {
        let mut state = self.lock();
        state.by_handle.insert(handle, id);
        for block in blocks.iter().filter(|block| **block != PLACEHOLDER) {
            *state.leased.entry(*block).or_default() += 1;
        }
    }

    /// Removes a lease from the tables.
    fn remove(state: &mut LentState, handle: Handle, blocks: &[BlockId]) -> Option<Arc<str>> {
        let id = state.by_handle.remove(&handle)?;
        for block in blocks {
            if let Some(leases) = state.leased.get_mut(block) {
                *leases -= 1;
                if *leases == 0 {
                    state.leased.remove(block);
                }
            }
        }
        Some(id)
    }

    fn is_live(&self, handle: Handle) -> bool {
        self.lock().by_handle.contains_key(&handle)
    }

    fn lock(&self) -> MutexGuard<'_, LentState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LeaseOwner for LentBlocks {
    fn lease_opened(&self, blocks: usize, _growing: bool) {
        self.metrics.lease_opened(blocks);
    }

    fn count_closed(&self, lease: &ClosedLease) {
        self.metrics.lease_closed(lease);
    }

    fn leases_closed(&self, closed: Vec<ClosedLease>) {
        let mut state = self.lock();
        for lease in closed {
            let Some(id) = Self::remove(&mut state, lease.handle, &lease.blocks) else { continue };
            state.ended.push(EndedLease { id, cause: lease.cause.label(), reason: lease.reason });
        }
        drop(state);
        self.signals.raise(signals::ENDED);
    }

    fn leases_unfinished(&self, _handles: Vec<Handle>) {
        // No lease is opened before its prefill ends.
    }
}

/// See the module's documentation.
pub(crate) struct ProducerSide {
    requests: Mutex<RequestTable>,
    leases: Arc<LeaseService>,
    lent: Arc<LentBlocks>,
    log: RankLog,
    signals: Arc<Signals>,
    metrics: Arc<CoreMetrics>,
}

impl ProducerSide {
    /// The producer's side of a new core. `lent` is the owner of the leases.
    pub(crate) fn new(
        leases: Arc<LeaseService>,
        lent: Arc<LentBlocks>,
        log: RankLog,
        signals: Arc<Signals>,
        metrics: Arc<CoreMetrics>,
    ) -> Self {
        Self { requests: Mutex::default(), leases, lent, log, signals, metrics }
    }

    /// Registers a request. True: a release or an abort came before it, and it must be aborted.
    pub(crate) fn queued(&self, op: &QueuedOp) -> bool {
        let (leg, id) = (Leg::of(&op.leg), Arc::from(op.id.as_str()));
        let mut requests = self.requests();
        let Some(entry) = requests.insert(&id, op.request_id.as_deref(), leg) else {
            self.metrics.late();
            return false;
        };
        let (request, index) = (entry.name.request.clone(), entry.name.index);
        let released = match leg {
            Leg::Prefill => self.leases.was_released_early(&request),
            Leg::Decode | Leg::Whole | Leg::Other => requests.was_aborted_early(&request, Instant::now()),
        };
        if let Some(entry) = requests.get_mut(&id).filter(|_| released) {
            entry.aborted = true;
        }
        let queued =
            RequestEvent::Queued { leg: leg.label(), prompt: op.prompt, tag: tag(op.tag.as_deref()) };
        self.log.emit(&request, index, queued);
        released
    }

    /// Appends events of requests to the log. The last event of a request removes it from the table.
    pub(crate) fn events(&self, events: &[EventOp]) {
        let mut requests = self.requests();
        events.iter().for_each(|event| self.event(&mut requests, event));
    }

    fn event(&self, requests: &mut RequestTable, op: &EventOp) {
        if let EventKind::Fetched { reason: Some(reason), .. } = &op.kind {
            self.metrics.load_failed(reason);
        }
        let Some(entry) = requests.get_mut(&op.id) else {
            if let EventKind::Refused { reason } = &op.kind {
                // Refused before it was queued.
                let name = requests.name_of(&op.id);
                let refused = RequestEvent::Refused { reason: known(reason, requests::REFUSALS), tag: None };
                self.log.emit(&name.request, name.index, refused);
            } else {
                self.metrics.late();
            }
            return;
        };
        let event = match &op.kind {
            EventKind::Started { cached } => RequestEvent::Started(*cached),
            EventKind::Computed { tokens } => RequestEvent::Computed(*tokens),
            EventKind::FirstToken => RequestEvent::FirstToken,
            EventKind::Fetching { blocks } => RequestEvent::Fetching(*blocks),
            EventKind::Fetched { result, .. } => {
                RequestEvent::Fetched(known(result, requests::FETCH_RESULTS))
            }
            // The verb that named the request was logged when it arrived.
            EventKind::Abort { .. } if entry.aborted => return,
            EventKind::Abort { how } => RequestEvent::Abort(known(how, requests::ABORTS)),
            EventKind::Refused { reason } => {
                entry.ended = true;
                entry.freed = true;
                RequestEvent::Refused { reason: known(reason, requests::REFUSALS), tag: None }
            }
            EventKind::Ended { outcome, generated, computed, blocks } => {
                entry.ended = true;
                entry.freed |= *blocks == 0;
                let outcome = known(outcome, requests::OUTCOMES);
                RequestEvent::Ended { outcome, generated: *generated, computed: *computed, blocks: *blocks }
            }
            EventKind::Freed { blocks } => {
                entry.freed = true;
                RequestEvent::Freed(*blocks)
            }
        };
        self.log.emit(&entry.name.request, entry.name.index, event);
        if entry.ended && entry.freed && entry.lent.is_none() {
            requests.remove(&op.id);
        }
    }

    /// Lends the blocks of a finished request.
    ///
    /// # Errors
    /// The word of the refusal: the blocks are freed now.
    pub(crate) fn offer(
        &self,
        facts: &HandleFacts<'_>,
        blocks: Vec<BlockId>,
        consumers: u64,
    ) -> Result<OpenedLease, &'static str> {
        let id = facts.id;
        let mut requests = self.requests();
        let closing = requests.closing;
        let Some(entry) = requests.get_mut(id) else {
            self.metrics.late();
            return Err("full");
        };
        if entry.aborted || closing || entry.lent.is_some() {
            return Err("released");
        }
        let handle = facts.handle(u64::from_ne_bytes(random().map_err(|_| "full")?));
        let (request, expected) = (entry.name.request.clone(), consumers.clamp(1, CONSUMERS_MAX as u64));
        self.lent.insert(handle, Arc::from(id), &blocks);
        let spec = LeaseSpec { handle, request, blocks, expected: expected as usize };
        match self.leases.open(spec) {
            Ok(left) => {
                entry.lent = Some(handle);
                Ok(OpenedLease { handle, left_ms: left.as_millis() as u64 })
            }
            Err(refused) => {
                LentBlocks::remove(&mut self.lent.lock(), handle, &refused.spec.blocks);
                Err(match refused.kind {
                    LeaseOpenErrorKind::AlreadyReleased => "released",
                    LeaseOpenErrorKind::Full => "full",
                    LeaseOpenErrorKind::Blocks => "blocks",
                })
            }
        }
    }

    /// All consumers of the NixlConnector have acknowledged. True: another consumer still reads, so the blocks must not
    /// be freed before the lease has ended.
    pub(crate) fn acked(&self, id: &str) -> bool {
        // Without a live lease, the end of the lease is why the workers reported the id.
        self.live_lease(id)
            .is_some_and(|handle| self.leases.release_here(handle, "transfer_done") == ReleaseReply::Draining)
    }

    /// Consumers of the NixlConnector have renewed.
    pub(crate) fn beat(&self, ids: &[String]) {
        for handle in ids.iter().filter_map(|id| self.live_lease(id)) {
            self.leases.heartbeat(handle);
        }
    }

    /// The scheduler has freed the blocks of a lent request.
    pub(crate) fn freed(&self, id: &str, blocks: usize) {
        let mut requests = self.requests();
        let Some(entry) = requests.remove(id) else {
            self.metrics.late();
            return;
        };
        if let Some(handle) = entry.lent.filter(|handle| self.lent.is_live(*handle)) {
            // Freed without an order: nothing may be read from here on.
            self.leases.release_here(handle, "aborted");
        }
        self.log.emit(&entry.name.request, entry.name.index, RequestEvent::Freed(blocks));
    }

    /// Whether a verb ended this request, so that its caller waits for an answer.
    pub(crate) fn is_aborted_by_verb(&self, id: &str) -> bool {
        self.requests().get_mut(id).is_some_and(|entry| entry.aborted)
    }

    /// Ends a lease early.
    pub(crate) fn release(&self, handle: Handle, reason: &str) -> ReleaseReply {
        self.leases.release_here(handle, reason)
    }

    /// Ends the lease of a request. A prefill that still runs is aborted, and one that is not known is remembered.
    pub(crate) fn release_request(&self, request: &RequestId, reason: &str) -> &'static str {
        let mut requests = self.requests();
        let reply = self.leases.release_request(request, reason);
        let running = requests.abort(request, LegFilter::Prefill);
        if running {
            self.log.emit(request, 0, RequestEvent::Abort("verb"));
            self.signals.raise(signals::ABORTS);
        }
        word(reply, running)
    }

    /// Ends a request by name: its lease if it has one, else the request itself, now or when it arrives.
    pub(crate) fn abort(&self, request: &RequestId, legs: LegFilter) -> &'static str {
        let mut requests = self.requests();
        self.log.emit(request, 0, RequestEvent::Abort("verb"));
        let reply = match legs {
            LegFilter::Decode => ReleaseReply::Unknown,
            LegFilter::Prefill | LegFilter::Both => self.leases.release_request(request, "aborted"),
        };
        let running = requests.abort(request, legs);
        if running {
            self.signals.raise(signals::ABORTS);
        } else if legs != LegFilter::Prefill {
            requests.remember(request.clone(), Instant::now());
        }
        word(reply, running)
    }

    /// Takes what the Python half has not seen. The caller has cleared the signals.
    pub(crate) fn take(&self) -> News {
        let aborts = std::mem::take(&mut self.requests().aborts);
        News { ended: std::mem::take(&mut self.lent.lock().ended), aborts }
    }

    /// Ends every lease and opens no more.
    pub(crate) fn stop(&self) {
        let mut requests = self.requests();
        requests.closing = true;
        self.leases.release_all("shutdown");
    }

    /// Different blocks of live leases.
    pub(crate) fn leased_blocks(&self) -> usize {
        self.lent.lock().leased.len()
    }

    /// Number of live leases.
    pub(crate) fn live(&self) -> usize {
        self.leases.live()
    }

    /// Live leases, oldest first.
    pub(crate) fn view(&self) -> Vec<LeaseView> {
        self.leases.view()
    }

    /// Counts of opened leases and of late messages.
    pub(crate) fn counts(&self) -> LedgerCounts {
        self.leases.counts()
    }

    /// Requests in the table.
    pub(crate) fn tracked(&self) -> usize {
        self.requests().len()
    }

    fn live_lease(&self, id: &str) -> Option<Handle> {
        let handle = match self.requests().get_mut(id) {
            Some(entry) => entry.lent,
            None => {
                self.metrics.late();
                None
            }
        };
        handle.filter(|handle| self.lent.is_live(*handle))
    }

    fn requests(&self) -> MutexGuard<'_, RequestTable> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The result of a verb that names a request.
fn word(reply: ReleaseReply, running: bool) -> &'static str {
    match reply {
        ReleaseReply::Unknown if running => ABORTING,
        ReleaseReply::Unknown => REMEMBERED,
        other => other.label(),
    }
}
