//! The environment of an engine core, as one trait with two implementations. The step loop's has sockets, threads and
//! a clock; the simulator's has virtual time and faults.

use std::time::{Duration, Instant};

use baton_connector::ledger::{LeaseOpenError, LeaseSpec};
use baton_connector::offload::TransferId;
use baton_connector::{BlockId, Epoch, Handle, RequestId};
use baton_connector_leases::event_log::RequestEvent;

use super::ProducerAddress;
use crate::engine_core::fetch_target::FetchTarget;
use crate::offload::OffloadOrder;
use crate::scheduler::StepTiming;
use crate::scheduler::sequence::{FinishReason, SeqId};

/// See the module's documentation. No method waits: results of longer work come as mail.
pub trait EngineEnv {
    /// The engine's monotonic clock.
    fn now(&self) -> Instant;

    /// A fresh random handle; `None` when the system has no randomness.
    fn fresh_handle(&mut self) -> Option<Handle>;

    /// Opens a lease. Returns its lifetime.
    ///
    /// # Errors
    /// [`LeaseOpenError`] returns the grant.
    fn open_lease(&mut self, grant: LeaseSpec) -> Result<Duration, LeaseOpenError>;

    /// Opens a lease of blocks of which the first `ready` are final.
    ///
    /// # Errors
    /// As [`Self::open_lease`].
    fn open_growing_lease(&mut self, grant: LeaseSpec, ready: usize) -> Result<Duration, LeaseOpenError>;

    /// More blocks of a growing lease are final: the first `ready`.
    fn grow(&mut self, handle: Handle, ready: usize);

    /// All blocks of a growing lease are final, and its time runs. False: it has ended.
    fn seal(&mut self, handle: Handle) -> bool;

    /// Ends a lease of this engine.
    fn release(&mut self, handle: Handle, reason: &'static str);

    /// Ends every lease of this engine.
    fn release_all(&mut self, reason: &'static str);

    /// Whether a prefill was released before it was known.
    fn was_released_early(&self, request: &RequestId) -> bool;

    /// Live leases of this engine.
    fn live_leases(&self) -> usize;

    /// How consumers reach this engine's leases.
    fn address(&self) -> &ProducerAddress;

    /// This engine's epoch.
    fn epoch(&self) -> Epoch;

    /// The layout fingerprint of this engine's blocks.
    fn fingerprint(&self) -> u64;

    /// Keeps the lease of a queued sequence alive from now on.
    fn keep_alive(&mut self, id: SeqId, target: &FetchTarget);

    /// Stops renewing that lease.
    fn stop_renewing(&mut self, id: SeqId);

    /// Starts a read into landing blocks; its reports come as mail.
    fn read(&mut self, id: SeqId, target: &FetchTarget, first: usize, into: Vec<BlockId>);

    /// Raises the stop flag of a read.
    fn stop_read(&mut self, id: SeqId);

    /// Releases a lease at its producer: at least once, repeated until answered or past expiry.
    fn release_at_producer(&mut self, target: &FetchTarget, reason: &'static str);

    /// Hands an order to the offload workers, whose report comes as mail. False: they refuse the order, as every
    /// engine without tiers does, and no report comes.
    fn offload(&mut self, order: OffloadOrder) -> bool {
        drop(order);
        false
    }

    /// Withdraws a store or a load from the offload workers. True: no worker had begun, none will, and no report
    /// comes.
    fn revoke(&mut self, id: TransferId) -> bool {
        let _ = id;
        false
    }

    /// Counts an event in the metrics.
    fn record(&self, event: CoreEvent<'_>);

    /// Writes an event of one choice of a request into the event log.
    fn emit(&self, request: &RequestId, index: u32, event: RequestEvent) {
        let _ = (request, index, event);
    }
}

/// An event of an engine core, for metrics.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CoreEvent<'a> {
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
    /// The next token, so long after the one before.
    NextToken(Duration),
    /// A step has verified drafts of one sequence.
    DraftVerified {
        /// Tokens of the draft.
        drafted: usize,
        /// Of those, the first ones that were accepted.
        accepted: usize,
    },
    /// A sequence with a handoff was queued; tokens of its prompt.
    HandoffQueued(usize),
    /// A sequence with a handoff was refused.
    EarlyRejection(&'static str),
    /// A handoff could not be used. The label of the fallback.
    LoadFailed(&'static str),
    /// A sequence was removed. Recorded exactly once per sequence (invariant 7).
    Finished {
        /// Which one.
        id: SeqId,
        /// Why.
        reason: FinishReason,
        /// Time since the request arrived.
        after: Duration,
    },
    /// A step has ended.
    Step(StepTiming),
    /// A sequence was ended at its deadline. The label of what it did.
    TimedOut(&'static str),
    /// The device has failed. The engine cannot continue.
    DeviceFailed(&'a str),
}
