//! The explorations. Each is complete within its bounds.
//!
//! Everything at once (two of each, disconnects, refusals, any number of faults) has too many states for any machine.
//! The bounds are therefore split: all actors with few faults, few actors with many, and each behaviour with each
//! fault.

use baton_connector::fetch::LoadFailurePolicy;

use crate::bounds::Bounds;

/// All behaviours of clients and engines without a fault.
const LIVELY: Bounds = Bounds { clients_cancel: true, refusals: true, cached: true, ..Bounds::PLAIN };
/// Early leases. A failure then leads to a recomputation.
const EARLY: Bounds = Bounds { early: true, recompute: true, ..Bounds::PLAIN };
/// Two of each.
const TWO: Bounds = Bounds { requests: 2, prefill: 2, decode: 2, ..Bounds::PLAIN };

/// Takes seconds, for every day: `cargo test --workspace`.
pub(crate) const SMALL: &[(&str, Bounds)] = &[
    (
        "two of everything, no fault, clients leave and engines refuse",
        Bounds { clients_cancel: true, refusals: true, ..TWO },
    ),
    ("two of everything, one fault", Bounds { faults: 1, ..TWO }),
    ("one request, two of each engine, one fault", Bounds { requests: 1, faults: 1, ..merge(TWO, LIVELY) }),
    ("one request, one of each engine, three faults", Bounds { faults: 3, ..LIVELY }),
    (
        "two requests for one block of one P and one D, one fault",
        Bounds { requests: 2, faults: 1, clients_cancel: true, ..Bounds::PLAIN },
    ),
    ("a D of two ranks, one fault", Bounds { ranks: 2, faults: 1, ..LIVELY }),
    (
        "policy fail and fallback, one fault",
        Bounds {
            requests: 1,
            faults: 1,
            fallback: true,
            policy: LoadFailurePolicy::Fail,
            ..merge(TWO, LIVELY)
        },
    ),
    (
        "policy fail, spent handoffs are recomputed by a second prefill, one fault",
        Bounds {
            requests: 1,
            faults: 1,
            recompute: true,
            policy: LoadFailurePolicy::Fail,
            clients_cancel: true,
            ..TWO
        },
    ),
    (
        "one P, two Ds, streams that break are resumed, two faults",
        Bounds { decode: 2, faults: 2, resume: true, refusals: true, ..Bounds::PLAIN },
    ),
    (
        "prefills that are lent while they are computed, one fault",
        Bounds { faults: 1, clients_cancel: true, refusals: true, cached: true, ..EARLY },
    ),
    (
        "the same with two of each engine",
        Bounds { prefill: 2, decode: 2, faults: 1, policy: LoadFailurePolicy::Fail, ..EARLY },
    ),
    (
        "a router that settles nothing",
        Bounds {
            requests: 2,
            decode: 2,
            refusals: true,
            cached: true,
            foreign_router: true,
            ..Bounds::PLAIN
        },
    ),
];

/// Takes minutes, in release: `cargo test --release --test model`.
pub(crate) const FULL: &[(&str, Bounds)] = &[
    ("two of everything, one fault, clients leave", Bounds { faults: 1, clients_cancel: true, ..TWO }),
    (
        "two requests for one block of one P and one D, two faults, clients leave",
        Bounds { requests: 2, faults: 2, clients_cancel: true, ..Bounds::PLAIN },
    ),
    (
        "two of everything, no fault, clients leave, engines refuse, prompts are cached",
        Bounds { requests: 2, ..merge(TWO, LIVELY) },
    ),
    ("one request, two of each engine, two faults", Bounds { requests: 1, faults: 2, ..merge(TWO, LIVELY) }),
    (
        "one request, two of each engine, two faults, policy fail and fallback",
        Bounds {
            requests: 1,
            faults: 2,
            fallback: true,
            policy: LoadFailurePolicy::Fail,
            ..merge(TWO, LIVELY)
        },
    ),
    (
        "one P, two Ds, two faults, policy fail, spent handoffs are recomputed by a second prefill",
        Bounds { decode: 2, faults: 2, recompute: true, policy: LoadFailurePolicy::Fail, ..LIVELY },
    ),
    (
        "one request, two of each engine, two faults, policy fail, spent handoffs are recomputed by D",
        Bounds {
            requests: 1,
            faults: 2,
            recompute: true,
            fallback: true,
            policy: LoadFailurePolicy::Fail,
            clients_cancel: true,
            ..TWO
        },
    ),
    (
        "two requests, two blocks of one P and one D, one fault",
        Bounds {
            requests: 2,
            prefill_blocks: 2,
            decode_blocks: 2,
            faults: 1,
            clients_cancel: true,
            ..Bounds::PLAIN
        },
    ),
    (
        "two requests, one P and one D, one fault, and everything else",
        Bounds { requests: 2, faults: 1, ..LIVELY },
    ),
    ("one request, one of each engine, five faults", Bounds { faults: 5, ..LIVELY }),
    ("a D of two ranks, three faults", Bounds { ranks: 2, faults: 3, ..LIVELY }),
    ("two Ds of two ranks, one fault", Bounds { ranks: 2, decode: 2, faults: 1, ..LIVELY }),
    (
        "one P, two Ds, streams that break are resumed, three faults, and everything else",
        Bounds { decode: 2, faults: 3, resume: true, ..LIVELY },
    ),
    (
        "prefills that are lent while they are computed, two faults, clients leave",
        Bounds { faults: 2, clients_cancel: true, ..EARLY },
    ),
    (
        "the same with two of each engine, one fault, policy fail",
        Bounds {
            prefill: 2,
            decode: 2,
            faults: 1,
            clients_cancel: true,
            policy: LoadFailurePolicy::Fail,
            ..EARLY
        },
    ),
    (
        "the same with two requests for one block of one P and one D, one fault",
        Bounds { requests: 2, faults: 1, fallback: true, ..EARLY },
    ),
    (
        "a router that settles nothing, one fault",
        Bounds {
            requests: 2,
            decode: 2,
            refusals: true,
            cached: true,
            faults: 1,
            foreign_router: true,
            ..Bounds::PLAIN
        },
    ),
];

/// Combines the actors of one with the behaviour of the other.
const fn merge(actors: Bounds, behaviour: Bounds) -> Bounds {
    Bounds { requests: actors.requests, prefill: actors.prefill, decode: actors.decode, ..behaviour }
}

/// Both legs at once, without a fault.
const PAIR: Bounds = Bounds { clients_cancel: true, refusals: true, ..Bounds::PLAIN };

/// The same with vLLM's push engines.
const PUSH: Bounds = Bounds { pushes: true, ..PAIR };

/// Takes seconds.
pub(crate) const PAIRS_SMALL: &[(&str, Bounds)] = &[
    ("pairs: one request, two of each engine, no fault", Bounds { prefill: 2, decode: 2, ..PAIR }),
    ("pairs: one request, two Ds, one fault", Bounds { decode: 2, faults: 1, ..Bounds::PLAIN }),
    ("pairs: one request, one of each engine, one fault", Bounds { faults: 1, ..Bounds::PLAIN }),
    ("pairs: two requests for one page of one D", Bounds { requests: 2, refusals: false, ..PAIR }),
    ("push: one request, two of each engine, no fault", Bounds { prefill: 2, decode: 2, ..PUSH }),
    ("push: one request, one of each engine, one fault", Bounds { faults: 1, ..PUSH }),
    ("push: two requests for one page of one D", Bounds { requests: 2, refusals: false, ..PUSH }),
];

pub(crate) const PAIRS_FULL: &[(&str, Bounds)] = &[
    (
        "pairs: one request, two of each engine, one fault",
        Bounds { prefill: 2, decode: 2, faults: 1, ..PAIR },
    ),
    ("pairs: one request, one of each engine, one fault", Bounds { faults: 1, ..PAIR }),
    ("pairs: one request, one of each engine, two faults", Bounds { faults: 2, ..Bounds::PLAIN }),
    ("pairs: two requests for one page of one D", Bounds { requests: 2, refusals: false, ..PAIR }),
    ("push: one request, two of each engine, one fault", Bounds { prefill: 2, decode: 2, faults: 1, ..PUSH }),
    ("push: one request, one of each engine, two faults", Bounds { faults: 2, ..PUSH }),
    ("push: two requests for one page of one D", Bounds { requests: 2, refusals: false, ..PUSH }),
];

/// Everything at once: too large to explore, so random runs are made.
pub(crate) const PAIRS_WALKED: Bounds =
    Bounds { requests: 2, prefill: 2, decode: 2, decode_blocks: 2, faults: 6, ..PAIR };
