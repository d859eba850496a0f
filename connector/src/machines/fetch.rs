//! The fetch: a consumer's side of one handoff, from the moment the request is queued until its blocks are
//! verified, or until it has ended in another way.
//!
//! ```text
//! Queued ─ admitted ─▶ Reserving ─ blocks reserved ─▶ Reading ─ transfer done ─▶ Verifying ─ valid ─▶ Landed
//!   │ already here: Landed, released at P │                │                         │
//!   │ lease gone: policy                  │                │ failed, or quiet        │ gone, unknown: policy
//!   │ abort, reject: Ended                │                │ without a word: policy  │ abort, reject: Ended
//!   └─────────────────────────────────────┘                └ abort, reject: Stopping ─ quiet ─▶ Ended
//!
//! policy:  recompute ─▶ Recomputing      fail ─▶ Failed(kind)
//! ```
//!
//! Invariants:
//! - Landing blocks are freed at most once, and never while anything may still write into them (invariant 3):
//!   [`Action::FreeLanding`] comes only after the transport has said that the read is over.
//! - [`Action::ReleaseAtProducer`] is returned exactly once in the life of a fetch, unless it ends with the
//!   verdict "valid": then the producer has closed the lease by itself.
//! - [`Action::Land`] comes only with the verdict "valid", or when nothing had to be read.
//! - An event that no longer matters (repeated, late, out of order) changes nothing and is counted
//!   (invariant 9).
//!
//! The table of every state and event is a golden file, `connector/tests/golden/fetch.txt`.

use crate::machines::replies::{TransportError, Verdict};

/// What an engine does with a request whose blocks could not be fetched. vLLM's `kv_load_failure_policy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LoadFailurePolicy {
    /// Compute the prompt here, as if there had been no handoff.
    #[default]
    Recompute,
    /// End the request with a typed error that the router can act on.
    Fail,
}

impl LoadFailurePolicy {
    /// The word in a configuration.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Recompute => "recompute",
            Self::Fail => "fail",
        }
    }
}

/// Where a fetch stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// The request waits in the scheduler's queue; the lease is kept alive.
    Queued,
    /// The scheduler wants to run it and looks for landing blocks.
    Reserving,
    /// A transfer writes into the landing blocks.
    Reading,
    /// Every byte is here; the producer has been asked whether they may be used.
    Verifying,
    /// Given up while a transfer was writing; waits until nothing writes any more.
    Stopping(Reason),
    /// The blocks may be used. The fetch is over.
    Landed,
    /// Given up. The fetch is over.
    Ended,
    /// It failed and the prompt is computed here. The fetch is over.
    Recomputing,
    /// It failed and the request ends with an error. The fetch is over.
    Failed(FailureKind),
}

/// Why a fetch did not deliver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// The lease was over before every byte was here.
    Gone,
    /// Range, reader or layout do not fit the lease.
    Refused,
    /// The producer could not be reached, or did not prove who it is.
    Unreachable,
    /// The transfer broke off.
    Transfer,
    /// The bytes are here but the producer could not be asked whether they may be used.
    Unverified,
}

impl FailureKind {
    /// The metric label and the error code.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Refused => "refused",
            Self::Unreachable => "unreachable",
            Self::Transfer => "transfer",
            Self::Unverified => "unverified",
        }
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

/// What is known about bytes that were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// The lease was live for the whole read.
    Valid,
    /// It was not.
    Gone,
    /// The producer did not answer. Used like `Gone`, told apart in metrics.
    Unknown,
}

impl From<Result<Verdict, TransportError>> for Answer {
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
    /// The scheduler wants to run the request.
    Admitted,
    /// Landing blocks are set aside. [`Action::StartRead`] in the answer is the receipt for them: without it
    /// they are still the caller's.
    BlocksReserved,
    /// Every block is in the local prefix cache; nothing has to be read.
    AlreadyHere,
    /// A heartbeat was answered "gone". Means nothing once the read has begun: a draining lease refuses
    /// heartbeats and still lets its readers finish, and a lease that was fetched completely is gone too.
    LeaseGone,
    /// Every byte is here. Nothing writes any more.
    TransferDone,
    /// The read ended without every byte. Nothing writes any more.
    TransferFailed(FailureKind),
    /// Nothing writes any more, and the read will not say how it ended (its thread is gone).
    Quiet,
    /// The producer's answer to [`Action::AskVerdict`], or that there is none.
    Verdict(Answer),
    /// The client left, or a deadline passed.
    Abort,
    /// The engine refuses the request: out of blocks, draining, over length, queue full.
    Reject,
}

/// The reason that goes with a release at the producer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The request was aborted here.
    Aborted,
    /// The request was refused here.
    Rejected,
    /// The blocks could not be fetched.
    LoadFailed,
    /// The blocks were here already.
    NotNeeded,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Self; 4] = [Self::Aborted, Self::Rejected, Self::LoadFailed, Self::NotNeeded];

    /// The word on the wire and in metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Aborted => "consumer_aborted",
            Self::Rejected => "consumer_rejected",
            Self::LoadFailed => "load_failed",
            Self::NotNeeded => "not_needed",
        }
    }
}

/// What the owner of a fetch must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Read the blocks into the landing blocks, on a fetch worker.
    StartRead,
    /// Raise the read's stop flag. One of the transfer events, or `Quiet`, follows.
    StopRead,
    /// Ask the producer whether the bytes may be used.
    AskVerdict,
    /// Hand the blocks to the request: it may run.
    Land,
    /// Give the landing blocks back to the pool. Nothing writes into them.
    FreeLanding,
    /// Release the lease; repeated by the caller until it is answered or the lease is past its expiry. After a
    /// read that succeeded the reader gives up first ([`crate::transport::Transport::give_up`]): otherwise the
    /// producer waits for its "done" until the drain deadline.
    ReleaseAtProducer(Reason),
    /// Queue the request again, without a handoff.
    Recompute,
    /// End the request with an error.
    Fail(FailureKind),
    /// Renew the lease no longer.
    StopHeartbeat,
}

/// What one event asks for, in the order in which it must be done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Actions([Option<Action>; Self::MAX]);

impl Actions {
    /// The most that one event asks for: stop the heartbeat, free, release, and the policy.
    pub const MAX: usize = 4;

    fn of<const N: usize>(actions: [Action; N]) -> Self {
        const { assert!(N <= Self::MAX) };
        let mut all = Self::default();
        for (slot, action) in all.0.iter_mut().zip(actions) {
            *slot = Some(action);
        }
        all
    }

    /// In order.
    pub fn iter(&self) -> impl Iterator<Item = Action> + '_ {
        self.0.iter().flatten().copied()
    }

    /// Whether this action is among them.
    #[must_use]
    pub fn contains(&self, action: Action) -> bool {
        self.iter().any(|a| a == action)
    }
}

impl IntoIterator for Actions {
    type Item = Action;
    type IntoIter = std::iter::Flatten<std::array::IntoIter<Option<Action>, { Self::MAX }>>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter().flatten()
    }
}

/// One fetch. Not `Clone`: it stands for landing blocks that are given back once.
#[derive(Debug)]
pub struct Fetch {
    policy: LoadFailurePolicy,
    state: State,
    ignored: u32,
}

impl Fetch {
    /// A fetch whose request has just been queued. Its lease is to be kept alive from now on.
    #[must_use]
    pub fn new(policy: LoadFailurePolicy) -> Self {
        Self { policy, state: State::Queued, ignored: 0 }
    }

    /// What becomes of the request if it fails.
    #[must_use]
    pub fn policy(&self) -> LoadFailurePolicy {
        self.policy
    }

    /// Where it stands.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Whether the lease is to be renewed.
    #[must_use]
    pub fn heartbeating(&self) -> bool {
        matches!(self.state, State::Queued | State::Reserving | State::Reading | State::Verifying)
    }

    /// Whether it holds landing blocks.
    #[must_use]
    pub fn holds_landing(&self) -> bool {
        matches!(self.state, State::Reading | State::Verifying | State::Stopping(_))
    }

    /// Whether nothing more will be asked for.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Landed | State::Ended | State::Recomputing | State::Failed(_))
    }

    /// Events so far that changed nothing.
    #[must_use]
    pub fn ignored(&self) -> u32 {
        self.ignored
    }

    /// Moves the fetch by one event and says what its owner must do.
    ///
    /// Every event is allowed in every state: workers and peers repeat, delay and reorder them.
    pub fn apply(&mut self, event: Event) -> Actions {
        match (self.state, event) {
            (State::Queued, Event::Admitted) => self.enter(State::Reserving, []),
            (State::Queued | State::Reserving, Event::AlreadyHere) => self.enter(
                State::Landed,
                [Action::StopHeartbeat, Action::ReleaseAtProducer(Reason::NotNeeded), Action::Land],
            ),
            (State::Queued | State::Reserving, Event::LeaseGone) => self.fail(FailureKind::Gone),
            (State::Queued | State::Reserving, Event::Abort) => self.end(Reason::Aborted),
            (State::Queued | State::Reserving, Event::Reject) => self.end(Reason::Rejected),
            (State::Reserving, Event::BlocksReserved) => self.enter(State::Reading, [Action::StartRead]),

            (State::Reading, Event::TransferDone) => self.enter(State::Verifying, [Action::AskVerdict]),
            (State::Reading, Event::TransferFailed(kind)) => self.fail(kind),
            (State::Reading, Event::Quiet) => self.fail(FailureKind::Transfer),
            (State::Reading, Event::Abort) => self.stop(Reason::Aborted),
            (State::Reading, Event::Reject) => self.stop(Reason::Rejected),

            (State::Verifying, Event::Verdict(Answer::Valid)) => {
                self.enter(State::Landed, [Action::StopHeartbeat, Action::Land])
            }
            (State::Verifying, Event::Verdict(Answer::Gone)) => self.fail(FailureKind::Gone),
            (State::Verifying, Event::Verdict(Answer::Unknown)) => self.fail(FailureKind::Unverified),
            (State::Verifying, Event::Abort) => self.end(Reason::Aborted),
            (State::Verifying, Event::Reject) => self.end(Reason::Rejected),

            (State::Stopping(reason), Event::TransferDone | Event::TransferFailed(_) | Event::Quiet) => {
                self.enter(State::Ended, [Action::FreeLanding, Action::ReleaseAtProducer(reason)])
            }

            (
                State::Queued,
                Event::BlocksReserved
                | Event::TransferDone
                | Event::TransferFailed(_)
                | Event::Quiet
                | Event::Verdict(_),
            )
            | (
                State::Reserving,
                Event::Admitted
                | Event::TransferDone
                | Event::TransferFailed(_)
                | Event::Quiet
                | Event::Verdict(_),
            )
            | (
                State::Reading,
                Event::Admitted
                | Event::BlocksReserved
                | Event::AlreadyHere
                | Event::LeaseGone
                | Event::Verdict(_),
            )
            | (
                State::Verifying,
                Event::Admitted
                | Event::BlocksReserved
                | Event::AlreadyHere
                | Event::LeaseGone
                | Event::TransferDone
                | Event::TransferFailed(_)
                | Event::Quiet,
            )
            | (
                State::Stopping(_),
                Event::Admitted
                | Event::BlocksReserved
                | Event::AlreadyHere
                | Event::LeaseGone
                | Event::Verdict(_)
                | Event::Abort
                | Event::Reject,
            )
            | (State::Landed | State::Ended | State::Recomputing | State::Failed(_), _) => {
                self.ignored = self.ignored.saturating_add(1);
                Actions::default()
            }
        }
    }

    fn enter<const N: usize>(&mut self, state: State, actions: [Action; N]) -> Actions {
        self.state = state;
        Actions::of(actions)
    }

    /// Gives up while a transfer is writing.
    fn stop(&mut self, reason: Reason) -> Actions {
        self.enter(State::Stopping(reason), [Action::StopHeartbeat, Action::StopRead])
    }

    /// Gives up while nothing is writing.
    fn end(&mut self, reason: Reason) -> Actions {
        self.leave(State::Ended, reason, None)
    }

    fn fail(&mut self, kind: FailureKind) -> Actions {
        let (state, action) = match self.policy {
            LoadFailurePolicy::Recompute => (State::Recomputing, Action::Recompute),
            LoadFailurePolicy::Fail => (State::Failed(kind), Action::Fail(kind)),
        };
        self.leave(state, Reason::LoadFailed, Some(action))
    }

    /// Ends without landing: what is held comes back first, then the producer is told, then the request.
    fn leave(&mut self, state: State, reason: Reason, last: Option<Action>) -> Actions {
        let free = self.holds_landing().then_some(Action::FreeLanding);
        self.state = state;
        Actions([Some(Action::StopHeartbeat), free, Some(Action::ReleaseAtProducer(reason)), last])
    }
}

#[cfg(test)]
mod tests;
