//! What is planted to see that it is found: each the kind of bug that a report of the field was about, in the model's
//! shells around the machines, never in the machines.

use baton_connector::fetch::LoadFailurePolicy;

use crate::bounds::Bounds;

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mutation {
    /// vLLM #25067: an abort that comes after the end is a second `request_finished`.
    AbortIsASecondFinish,
    /// vLLM #35506, one way: the blocks of a request that is aborted after its end come back at once, reader or not.
    AbortFreesUnderAReader,
    /// vLLM #35506, the other way: after the end neither abort nor release is heard; only time frees.
    AbortIsDeafAfterFinish,
    /// vLLM #41269: D refuses and tells nobody.
    SilentRefusal,
    /// vLLM #20139: leases do not run out.
    NoExpiry,
    /// Dynamo #6681, one way: the end of a request removes its slot; who reports later finds nothing, and blocks leak.
    EndForgetsTheSlot,
    /// Dynamo #6681, the other way: the end frees everything at once, also what a worker is copying.
    EndFreesInFlight,
    /// Bytes are used whatever P says of them.
    VerdictNotChecked,
    /// A repeated acknowledgement counts as another reader.
    ReadersAreCounted,
    /// After a restart handles begin anew, and nobody asks for the epoch.
    EarlierEpochAccepted,
    /// A release goes by the request's name, and two requests have one.
    ReleaseByRequestId,
    /// A release that comes before its request is known is forgotten.
    NoTombstone,
    /// What D computes anew has the name of the first round, of which an abort is still on its way, or remembered.
    OneNameForBothRounds,
    /// The landing block of an aborted fetch goes back while its transfer runs.
    LandingFreedAtOnce,
    /// The router hangs up when its client has left, and with the connection goes the only copy of the handle.
    HangUpInsteadOfAbort,
    /// What is lent early is said to be final before it is computed.
    ReadyBeforeComputed,
    /// The end of a prefill does not seal what was lent early.
    NeverSealed,
    /// A prefill that ends with its lease frees the blocks, reader or not.
    EndOfPrefillFreesUnderAReader,
}

/// A mutation, where to look for it, and what it must be seen to break.
pub(crate) struct Planted {
    pub name: &'static str,
    pub mutation: Mutation,
    /// Within them the system without the mutation is sound.
    pub bounds: Bounds,
    /// Part of what is said of the violation.
    pub broken: &'static str,
}

const fn planted(name: &'static str, mutation: Mutation, bounds: Bounds, broken: &'static str) -> Planted {
    Planted { name, mutation, bounds, broken }
}

const LIVELY: Bounds = Bounds { clients_leave: true, refusals: true, ..Bounds::PLAIN };
const EARLY: Bounds = Bounds { early: true, anew: true, ..LIVELY };
const STRANDED: &str = "nothing went wrong, everybody is alive and done, and blocks are still lent";

/// Every mutation.
pub(crate) const PLANTED: &[Planted] = &[
    planted(
        "vLLM #25067: an abort after the end is a second finish",
        Mutation::AbortIsASecondFinish,
        LIVELY,
        "freed twice",
    ),
    planted(
        "vLLM #35506: an abort after the end frees under a reader",
        Mutation::AbortFreesUnderAReader,
        Bounds { faults: 1, ..LIVELY },
        "are held",
    ),
    planted(
        "vLLM #35506: an abort after the end is not heard, only time frees",
        Mutation::AbortIsDeafAfterFinish,
        LIVELY,
        STRANDED,
    ),
    planted(
        "vLLM #41269: D refuses before admission and P never learns",
        Mutation::SilentRefusal,
        Bounds { refusals: true, foreign_router: true, ..Bounds::PLAIN },
        STRANDED,
    ),
    planted(
        "vLLM #20139: without an expiry, whoever dies takes the blocks along",
        Mutation::NoExpiry,
        Bounds { faults: 1, ..Bounds::PLAIN },
        "a lease is left that nobody will ever end",
    ),
    planted(
        "Dynamo #6681: the end forgets a transfer that is in flight",
        Mutation::EndForgetsTheSlot,
        Bounds::PLAIN,
        "still held for a transfer",
    ),
    planted(
        "Dynamo #6681: the end frees what a worker is copying",
        Mutation::EndFreesInFlight,
        Bounds::PLAIN,
        "freed",
    ),
    planted(
        "the verdict is not looked at",
        Mutation::VerdictNotChecked,
        Bounds { faults: 2, ..LIVELY },
        "stale bytes reach a forward pass",
    ),
    planted(
        "readers are counted: a repeated acknowledgement closes early",
        Mutation::ReadersAreCounted,
        Bounds { ranks: 2, faults: 1, ..LIVELY },
        "closes as fetched after 1 of 2 readers",
    ),
    planted(
        "an earlier epoch is accepted after a restart",
        Mutation::EarlierEpochAccepted,
        Bounds { requests: 2, faults: 1, ..Bounds::PLAIN },
        "stale bytes reach a forward pass",
    ),
    planted(
        "a repeated release ends the lease of another request of that name",
        Mutation::ReleaseByRequestId,
        Bounds { requests: 2, prefill_blocks: 2, refusals: true, ..Bounds::PLAIN },
        "that nobody gave up",
    ),
    planted(
        "a release that comes before its request is forgotten",
        Mutation::NoTombstone,
        LIVELY,
        "given up before it finished",
    ),
    planted(
        "what is computed anew has the first round's name, and a late abort ends it",
        Mutation::OneNameForBothRounds,
        Bounds { decode: 2, faults: 2, anew: true, policy: LoadFailurePolicy::Fail, ..Bounds::PLAIN },
        "that nobody gave up",
    ),
    planted(
        "landing blocks are freed while their transfer writes",
        Mutation::LandingFreedAtOnce,
        LIVELY,
        "(invariant",
    ),
    planted(
        "an abort destroys the only copy of the handle",
        Mutation::HangUpInsteadOfAbort,
        LIVELY,
        STRANDED,
    ),
    planted(
        "blocks are called final before they are computed",
        Mutation::ReadyBeforeComputed,
        EARLY,
        "stale bytes reach a forward pass",
    ),
    planted("what is lent early is never sealed", Mutation::NeverSealed, EARLY, STRANDED),
    planted(
        "the end of a prefill frees what is read of it",
        Mutation::EndOfPrefillFreesUnderAReader,
        EARLY,
        "are held",
    ),
];
