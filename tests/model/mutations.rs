//! Planted bugs that the model checker must find. Each is the kind of bug that a report from the field describes. The
//! bugs are in the model's code around the machines, never in the machines.

use baton_connector::fetch::LoadFailurePolicy;

use crate::bounds::Bounds;

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mutation {
    /// vLLM #25067: an abort after the end runs a second `request_finished`.
    AbortIsASecondFinish,
    /// vLLM #35506, one way: the blocks of a request that is aborted after its end are freed at once, with or without a
    /// reader.
    AbortFreesUnderAReader,
    /// vLLM #35506, the other way: after the end both abort and release are ignored. Only time frees the blocks.
    AbortIgnoredAfterFinish,
    /// vLLM #41269: D refuses and sends no release.
    SilentRefusal,
    /// vLLM #20139: leases do not expire.
    NoExpiry,
    /// Dynamo #6681, one way: the end of a request removes its slot. Later reports find no slot, and blocks leak.
    EndForgetsTheSlot,
    /// Dynamo #6681, the other way: the end frees everything at once, also blocks that a worker is copying.
    EndFreesInFlight,
    /// D uses the bytes whatever P's verdict.
    VerdictNotChecked,
    /// A repeated acknowledgement counts as another reader.
    ReadersAreCounted,
    /// After a restart handles repeat, and the epoch is not checked.
    EarlierEpochAccepted,
    /// A release finds its lease by the request's name, and two requests have one name.
    ReleaseByRequestId,
    /// A release that arrives before its request is forgotten.
    NoTombstone,
    /// D's recomputation has the name of the first round. An abort of that round may be on its way or remembered.
    OneNameForBothRounds,
    /// The landing block of an aborted fetch is freed while its transfer runs.
    LandingFreedAtOnce,
    /// The router closes the connection when its client disconnects. The only copy of the handle is lost with the
    /// connection.
    HangUpInsteadOfAbort,
    /// The producer reports blocks of an early lease as final before they are computed.
    ReadyBeforeComputed,
    /// The end of a prefill does not seal its early lease.
    NeverSealed,
    /// A prefill that ends together with its lease frees the blocks, with or without a reader.
    EndOfPrefillFreesUnderAReader,
    /// Both legs at once: the prefill leg fails, and the decode leg is not ended.
    FailedPrefillLeavesDecode,
    /// Both legs at once: the decode leg fails, and the prefill leg is not ended.
    FailedDecodeLeavesPrefill,
    /// The next pair of a request has the room of the previous one.
    RoomIsReused,
    /// SGLang #32564: D gives the pages of an aborted request away while P may write into them.
    PagesGivenAwayAtOnce,
    /// A prefill that falls silent after the first chunk is not aborted.
    SilentPrefillIsLeft,
    /// The id of a request's first pair is a prefix of the next pair's id.
    RidIsAPrefix,
    /// vLLM push: the prefill of a pair that is given up is aborted, although D waits for its write.
    PushedPrefillIsAborted,
}

impl Mutation {
    /// Whether the bug concerns both legs at once: see `pair.rs`.
    pub(crate) fn is_of_pairs(self) -> bool {
        matches!(
            self,
            Self::FailedPrefillLeavesDecode
                | Self::FailedDecodeLeavesPrefill
                | Self::RoomIsReused
                | Self::PagesGivenAwayAtOnce
                | Self::SilentPrefillIsLeft
                | Self::RidIsAPrefix
                | Self::PushedPrefillIsAborted
        )
    }
}

/// A mutation, the bounds in which to look for it, and the violation that must be found.
pub(crate) struct PlantedBug {
    pub name: &'static str,
    pub mutation: Mutation,
    /// Without the mutation the system is sound within these bounds.
    pub bounds: Bounds,
    /// A part of the violation's text.
    pub broken: &'static str,
}

const fn planted(name: &'static str, mutation: Mutation, bounds: Bounds, broken: &'static str) -> PlantedBug {
    PlantedBug { name, mutation, bounds, broken }
}

const LIVELY: Bounds = Bounds { clients_cancel: true, refusals: true, ..Bounds::PLAIN };
const EARLY: Bounds = Bounds { early: true, recompute: true, ..LIVELY };
const PAIRS: Bounds = Bounds { prefill: 2, decode: 2, ..LIVELY };
const WAITS: &str = "nothing went wrong, and an engine still works for a pair that was given up";
const STRANDED: &str = "nothing went wrong, every process is alive and done, and blocks are still leased";

/// Every mutation.
pub(crate) const PLANTED: &[PlantedBug] = &[
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
        Mutation::AbortIgnoredAfterFinish,
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
        "vLLM #20139: without an expiry, a crashed process keeps the blocks",
        Mutation::NoExpiry,
        Bounds { faults: 1, ..Bounds::PLAIN },
        "a lease is left that never ends",
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
        "that was not given up",
    ),
    planted(
        "a release that comes before its request is forgotten",
        Mutation::NoTombstone,
        LIVELY,
        "given up before it finished",
    ),
    planted(
        "a recomputation has the first round's name, and a late abort ends it",
        Mutation::OneNameForBothRounds,
        Bounds { decode: 2, faults: 2, recompute: true, policy: LoadFailurePolicy::Fail, ..Bounds::PLAIN },
        "that was not given up",
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
    planted(
        "both legs at once: P fails and D is not ended",
        Mutation::FailedPrefillLeavesDecode,
        PAIRS,
        WAITS,
    ),
    planted(
        "both legs at once: D fails and P is not ended",
        Mutation::FailedDecodeLeavesPrefill,
        PAIRS,
        WAITS,
    ),
    planted(
        "the next pair has the room of the previous one",
        Mutation::RoomIsReused,
        Bounds { decode_blocks: 2, ..PAIRS },
        "lands in pages",
    ),
    planted(
        "SGLang #32564: D gives pages away before the write into them",
        Mutation::PagesGivenAwayAtOnce,
        PAIRS,
        "lands in pages that were given away",
    ),
    planted(
        "a prefill that falls silent after the first chunk is left",
        Mutation::SilentPrefillIsLeft,
        Bounds { faults: 1, ..Bounds::PLAIN },
        "at the end an engine still works",
    ),
    planted(
        "the rid of a pair is a prefix of the next pair's",
        Mutation::RidIsAPrefix,
        Bounds { decode_blocks: 2, ..PAIRS },
        "which was not given up",
    ),
    planted(
        "vLLM push: P is aborted, and D waits for its write",
        Mutation::PushedPrefillIsAborted,
        Bounds { pushes: true, ..PAIRS },
        WAITS,
    ),
];
