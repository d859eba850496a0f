//! The fetch: a consumer's side of one handoff, from the queueing of the request to the verification of its blocks or
//! another end.
//!
//! ```text
//! Queued ─ admitted ─▶ Reserving ─ blocks reserved ─▶ Reading ─ transfer done ─▶ Verifying ─ valid ─▶ Landed
//!   │ cached: Landed, released at P       │                │                         │
//!   │ lease gone: policy                  │                │ failed, or worker       │ gone, unknown: policy
//!   │ abort, reject: Ended                │                │ lost: policy            │ abort, reject: Ended
//!   └─────────────────────────────────────┘                └ abort, reject: Stopping ─ read over ─▶ Ended
//!
//! policy:  recompute ─▶ Recomputing      fail ─▶ Failed(kind)
//! ```
//!
//! Invariants:
//! - Landing blocks are freed at most once, and never while a transfer may still write into them (invariant 3).
//!   [`Action::FreeLanding`] follows only the end of the read.
//! - [`Action::ReleaseAtProducer`] is returned exactly once in the life of a fetch, unless the verdict is "valid": then
//!   the producer has closed the lease by itself.
//! - [`Action::Land`] follows only the verdict "valid", or the case that nothing had to be read.
//! - An irrelevant event (repeated, late, out of order) changes nothing and is counted (invariant 9).
//!
//! The table of every state and event is a golden file, `connector/tests/golden/fetch.txt`.

use crate::machines::replies::{TransportError, Verdict};

crate::labelled! {
    /// The rule for a request whose blocks could not be fetched: vLLM's `kv_load_failure_policy`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub enum LoadFailurePolicy {
        /// Compute the prompt on this engine, as without a handoff.
        #[default]
        Recompute => "recompute",
        /// End the request with a typed error that the router can handle.
        Fail => "fail",
    }
}

/// State of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// The request waits in the scheduler's queue; the consumer renews the lease.
    Queued,
    /// The scheduler admitted the request and reserves landing blocks.
    Reserving,
    /// A transfer writes into the landing blocks.
    Reading,
    /// Every byte has arrived; the producer's verdict is pending.
    Verifying,
    /// Abandoned while a transfer was writing; waits for the end of the transfer.
    Stopping(ReleaseReason),
    /// The blocks may be used. The fetch is over.
    Landed,
    /// Abandoned. The fetch is over.
    Ended,
    /// The fetch failed and is over. This engine computes the prompt.
    Recomputing,
    /// The fetch failed and is over. The request ends with an error.
    Failed(FailureKind),
}

crate::labelled! {
    /// Why a fetch failed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum FailureKind {
        /// The lease ended before every byte had arrived.
        Gone => "gone",
        /// Range, reader or layout do not fit the lease.
        Refused => "refused",
        /// The producer could not be reached, or did not prove its identity.
        Unreachable => "unreachable",
        /// The transfer broke off.
        Transfer => "transfer",
        /// Every byte has arrived, but the producer gave no verdict.
        Unverified => "unverified",
    }
}

impl From<&TransportError> for FailureKind {
    fn from(error: &TransportError) -> Self {
        match error {
            TransportError::Gone => Self::Gone,
            TransportError::Refused(_) => Self::Refused,
            TransportError::Handshake(..) => Self::Unreachable,
            TransportError::Transfer(_) | TransportError::Stopped => Self::Transfer,
        }
    }
}

/// Whether the lease of the read bytes was live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verification {
    /// The lease was live for the whole read.
    Valid,
    /// The lease was not live for the whole read.
    Gone,
    /// The producer did not answer. Handled like `Gone`, with a metric label of its own.
    Unknown,
}

impl From<Result<Verdict, TransportError>> for Verification {
    fn from(verdict: Result<Verdict, TransportError>) -> Self {
        match verdict {
            Ok(Verdict::Valid) => Self::Valid,
            Ok(Verdict::Gone) | Err(TransportError::Gone) => Self::Gone,
            Err(_) => Self::Unknown,
        }
    }
}

/// What can happen to a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The scheduler admits the request.
    Admitted,
    /// Landing blocks are reserved. [`Action::StartRead`] in the answer takes them over. Without it they stay with the
    /// caller.
    BlocksReserved,
    /// Every block is in the local prefix cache; nothing has to be read.
    AlreadyCached,
    /// A heartbeat was answered "gone". Irrelevant once the read has begun: a draining lease refuses heartbeats but
    /// lets its readers finish, and a completely fetched lease is gone too.
    LeaseGone,
    /// Every byte has arrived. The transfer writes no more.
    TransferDone,
    /// The read ended without every byte. The transfer writes no more.
    TransferFailed(FailureKind),
    /// The read's thread ended without a result. It writes no more.
    WorkerLost,
    /// The producer's answer to [`Action::AskVerdict`], or its absence.
    Verdict(Verification),
    /// The client disconnected, or a deadline passed.
    Abort,
    /// The engine refuses the request: out of blocks, draining, over length, queue full.
    Reject,
}

crate::labelled! {
    /// The reason of a release at the producer.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum ReleaseReason {
        /// This engine aborted the request.
        Aborted => "consumer_aborted",
        /// This engine refused the request.
        Rejected => "consumer_rejected",
        /// The blocks could not be fetched.
        LoadFailed => "load_failed",
        /// The blocks were already cached.
        NotNeeded => "not_needed",
    }
}

/// What the owner of a fetch must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Read the blocks into the landing blocks, on a fetch worker.
    StartRead,
    /// Raise the read's stop flag. One of the transfer events, or `WorkerLost`, follows.
    StopRead,
    /// Request the producer's verdict on the bytes.
    AskVerdict,
    /// Hand the blocks to the request, which may run.
    Land,
    /// Free the landing blocks. No transfer writes into them.
    FreeLanding,
    /// Release the lease. The caller repeats this until it gets an answer or the lease has expired. After a successful
    /// read it calls [`crate::transport::Transport::give_up`] first. Otherwise the producer waits for the reader's
    /// "done" until the drain deadline.
    ReleaseAtProducer(ReleaseReason),
    /// Queue the request again, without a handoff.
    Recompute,
    /// End the request with an error.
    Fail(FailureKind),
    /// Stop renewing the lease.
    StopHeartbeat,
}

/// The actions of one event, in the order in which they must be done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FetchActions([Option<Action>; Self::MAX]);

impl FetchActions {
    /// The most actions of one event: stop the heartbeat, free, release, and the policy.
    pub const MAX: usize = 4;

    fn of<const N: usize>(actions: [Action; N]) -> Self {
        const { assert!(N <= Self::MAX) };
        let mut all = Self::default();
        for (slot, action) in all.0.iter_mut().zip(actions) {
            *slot = Some(action);
        }
        all
    }

    /// The actions, in order.
    pub fn iter(&self) -> impl Iterator<Item = Action> + '_ {
        self.0.iter().flatten().copied()
    }

    /// Whether the actions contain this one.
    #[must_use]
    pub fn contains(&self, action: Action) -> bool {
        self.iter().any(|a| a == action)
    }
}

impl IntoIterator for FetchActions {
    type Item = Action;
    type IntoIter = std::iter::Flatten<std::array::IntoIter<Option<Action>, { Self::MAX }>>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter().flatten()
    }
}

/// One fetch. Not `Clone`: its landing blocks are freed once.
#[derive(Debug)]
pub struct Fetch {
    policy: LoadFailurePolicy,
    state: State,
    ignored: u32,
}

impl Fetch {
    /// The fetch of a request that was just queued. The owner renews its lease from now on.
    #[must_use]
    pub fn new(policy: LoadFailurePolicy) -> Self {
        Self { policy, state: State::Queued, ignored: 0 }
    }

    /// The rule for a failed fetch.
    #[must_use]
    pub fn policy(&self) -> LoadFailurePolicy {
        self.policy
    }

    /// Current state.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Whether the owner must renew the lease.
    #[must_use]
    pub fn needs_heartbeat(&self) -> bool {
        matches!(self.state, State::Queued | State::Reserving | State::Reading | State::Verifying)
    }

    /// Whether the fetch holds landing blocks.
    #[must_use]
    pub fn holds_landing(&self) -> bool {
        matches!(self.state, State::Reading | State::Verifying | State::Stopping(_))
    }

    /// Whether no further action follows.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Landed | State::Ended | State::Recomputing | State::Failed(_))
    }

    /// Events so far that changed nothing.
    #[must_use]
    pub fn ignored(&self) -> u32 {
        self.ignored
    }

    /// Applies one event and returns the actions for the owner.
    ///
    /// Every event is allowed in every state: workers and peers repeat, delay and reorder them.
    pub fn apply(&mut self, event: Event) -> FetchActions {
        match (self.state, event) {
            (State::Queued, Event::Admitted) => self.enter(State::Reserving, []),
            (State::Queued | State::Reserving, Event::AlreadyCached) => self.enter(
                State::Landed,
                [Action::StopHeartbeat, Action::ReleaseAtProducer(ReleaseReason::NotNeeded), Action::Land],
            ),
            (State::Queued | State::Reserving, Event::LeaseGone) => self.fail(FailureKind::Gone),
            (State::Queued | State::Reserving, Event::Abort) => self.end(ReleaseReason::Aborted),
            (State::Queued | State::Reserving, Event::Reject) => self.end(ReleaseReason::Rejected),
            (State::Reserving, Event::BlocksReserved) => self.enter(State::Reading, [Action::StartRead]),

            (State::Reading, Event::TransferDone) => self.enter(State::Verifying, [Action::AskVerdict]),
            (State::Reading, Event::TransferFailed(kind)) => self.fail(kind),
            (State::Reading, Event::WorkerLost) => self.fail(FailureKind::Transfer),
            (State::Reading, Event::Abort) => self.stop(ReleaseReason::Aborted),
            (State::Reading, Event::Reject) => self.stop(ReleaseReason::Rejected),

            (State::Verifying, Event::Verdict(Verification::Valid)) => {
                self.enter(State::Landed, [Action::StopHeartbeat, Action::Land])
            }
            (State::Verifying, Event::Verdict(Verification::Gone)) => self.fail(FailureKind::Gone),
            (State::Verifying, Event::Verdict(Verification::Unknown)) => self.fail(FailureKind::Unverified),
            (State::Verifying, Event::Abort) => self.end(ReleaseReason::Aborted),
            (State::Verifying, Event::Reject) => self.end(ReleaseReason::Rejected),

            (State::Stopping(reason), Event::TransferDone | Event::TransferFailed(_) | Event::WorkerLost) => {
                self.enter(State::Ended, [Action::FreeLanding, Action::ReleaseAtProducer(reason)])
            }

            (
                State::Queued | State::Reserving,
                Event::TransferDone | Event::TransferFailed(_) | Event::WorkerLost | Event::Verdict(_),
            )
            | (State::Queued, Event::BlocksReserved)
            | (State::Reserving, Event::Admitted)
            | (
                State::Reading | State::Verifying | State::Stopping(_),
                Event::Admitted | Event::BlocksReserved | Event::AlreadyCached | Event::LeaseGone,
            )
            | (State::Reading | State::Stopping(_), Event::Verdict(_))
            | (State::Verifying, Event::TransferDone | Event::TransferFailed(_) | Event::WorkerLost)
            | (State::Stopping(_), Event::Abort | Event::Reject)
            | (State::Landed | State::Ended | State::Recomputing | State::Failed(_), _) => {
                self.ignored = self.ignored.saturating_add(1);
                FetchActions::default()
            }
        }
    }

    fn enter<const N: usize>(&mut self, state: State, actions: [Action; N]) -> FetchActions {
        self.state = state;
        FetchActions::of(actions)
    }

    /// Abandons the fetch while a transfer is writing.
    fn stop(&mut self, reason: ReleaseReason) -> FetchActions {
        self.enter(State::Stopping(reason), [Action::StopHeartbeat, Action::StopRead])
    }

    /// Abandons the fetch while no transfer is writing.
    fn end(&mut self, reason: ReleaseReason) -> FetchActions {
        self.leave(State::Ended, reason, None)
    }

    fn fail(&mut self, kind: FailureKind) -> FetchActions {
        let (state, action) = match self.policy {
            LoadFailurePolicy::Recompute => (State::Recomputing, Action::Recompute),
            LoadFailurePolicy::Fail => (State::Failed(kind), Action::Fail(kind)),
        };
        self.leave(state, ReleaseReason::LoadFailed, Some(action))
    }

    /// Ends without landing. The order is: free the landing blocks, release at the producer, act on the request.
    fn leave(&mut self, state: State, reason: ReleaseReason, last: Option<Action>) -> FetchActions {
        let free = self.holds_landing().then_some(Action::FreeLanding);
        self.state = state;
        FetchActions([Some(Action::StopHeartbeat), free, Some(Action::ReleaseAtProducer(reason)), last])
    }
}

#[cfg(test)]
mod tests;
