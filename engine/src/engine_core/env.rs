//! What an engine core needs of the world, as one trait with two implementations: the step loop's, with sockets,
//! threads and the clock, and the simulator's, with virtual time and faults.

use std::time::{Duration, Instant};

use baton_connector::ledger::{Grant, OpenRefused};
use baton_connector::offload::TransferId;
use baton_connector::{BlockId, Epoch, Handle, RequestId};

use super::ProducerAddress;
use crate::engine_core::fetch_target::FetchTarget;
use crate::event_log::What;
use crate::offload::Order;
use crate::scheduler::sequence::{FinishReason, SeqId};

/// See the module's documentation. Nothing here waits: what takes time reports through the mail.
pub trait Surroundings {
    /// The engine's monotonic clock.
    fn now(&self) -> Instant;

    /// A fresh random handle; `None` when the system has no randomness.
    fn fresh_handle(&mut self) -> Option<Handle>;

    /// Opens a lease; says how long it lives.
    ///
    /// # Errors
    /// [`OpenRefused`] gives the grant back.
    fn lend(&mut self, grant: Grant) -> Result<Duration, OpenRefused>;

    /// Opens a lease of blocks of which the first `ready` are final.
    ///
    /// # Errors
    /// As [`Self::lend`].
    fn lend_growing(&mut self, grant: Grant, ready: usize) -> Result<Duration, OpenRefused>;

    /// More blocks of a growing lease are final: the first `ready`.
    fn grow(&mut self, handle: Handle, ready: usize);

    /// All blocks of a growing lease are final, and its time runs. False: it has ended.
    fn seal(&mut self, handle: Handle) -> bool;

    /// Ends a lease of this engine.
    fn release(&mut self, handle: Handle, reason: &'static str);

    /// Ends every lease of this engine.
    fn release_all(&mut self, reason: &'static str);

    /// Whether a request that would lend was given up before it was known.
    fn was_released_early(&self, request: &RequestId) -> bool;

    /// Live leases of this engine.
    fn live_leases(&self) -> usize;

    /// How consumers reach this engine's leases.
    fn address(&self) -> &ProducerAddress;

    /// This engine's epoch.
    fn epoch(&self) -> Epoch;

    /// The layout fingerprint of its blocks.
    fn fingerprint(&self) -> u64;

    /// Keeps the lease of a queued sequence alive from now on.
    fn keep_alive(&mut self, id: SeqId, target: &FetchTarget);

    /// Renews it no longer.
    fn let_go(&mut self, id: SeqId);

    /// Starts a read into landing blocks; its reports come as mail.
    fn read(&mut self, id: SeqId, target: &FetchTarget, first: usize, into: Vec<BlockId>);

    /// Raises the stop flag of a read.
    fn stop_read(&mut self, id: SeqId);

    /// Releases a lease at its producer: at least once, repeated until answered or past expiry.
    fn release_at_producer(&mut self, target: &FetchTarget, reason: &'static str);

    /// Hands an order to the offload workers, whose report comes as mail. False: they refuse it, as every engine
    /// without tiers does, and nothing will come of it.
    fn offload(&mut self, order: Order) -> bool {
        drop(order);
        false
    }

    /// Takes a store or a load back from the offload workers. True: no worker had begun, none will, and no report
    /// comes.
    fn revoke(&mut self, id: TransferId) -> bool {
        let _ = id;
        false
    }

    /// Something to be counted.
    fn note(&self, fact: Fact<'_>);

    /// Something to be written down about one choice of a request.
    fn tell(&self, request: &RequestId, index: u32, what: What) {
        let _ = (request, index, what);
    }
}

/// What an engine core has seen happen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fact<'a> {
    /// A sequence has its first token.
    FirstToken {
        /// Since the request arrived.
        after: Duration,
        /// Tokens of the prompt.
        prompt: usize,
        /// Of those, found in the prefix cache.
        cached: usize,
        /// Of those, read from a producer.
        fetched: usize,
    },
    /// It has another one, so long after the one before.
    NextToken(Duration),
    /// A sequence with a handoff was queued; tokens of its prompt.
    HandedOff(usize),
    /// A sequence with a handoff was turned away.
    EarlyRejection(&'static str),
    /// A handoff could not be used; what was done instead.
    LoadFailed(&'static str),
    /// A sequence has left the books, so long after its request arrived. Exactly once per sequence (invariant 7).
    Finished {
        /// Which one.
        id: SeqId,
        /// Why.
        reason: FinishReason,
        /// How long it was here.
        after: Duration,
    },
    /// The device has failed; the engine cannot go on.
    DeviceFailed(&'a str),
}
