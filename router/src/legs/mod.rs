//! The two halves of a request, each as one attempt at one engine and what its answer means.

pub(crate) mod clock;
pub(crate) mod decode;
pub(crate) mod liveness;
pub(crate) mod outcome;
pub(crate) mod prefill;
pub(crate) mod retries;
pub(crate) mod settle;

mod refusal;
mod said;

pub(crate) use refusal::{Blame, Meaning, Refusal, Verdict};

use crate::engines::http::{CallError, Engine, Unreadable};

/// What it comes to that an engine's answer cannot be decoded: for the client, and for the engine.
pub(crate) fn unreadable(engine: &Engine, why: Unreadable) -> (Refusal, Blame) {
    note_unreadable(engine, why);
    match why {
        Unreadable::TooMany => (Refusal::spent(), Blame::Nobody),
        Unreadable::Unknown | Unreadable::Malformed => (Refusal::unreadable(), Blame::Engine),
    }
}

/// Whether a failed call is a fault of its engine: bounds of the router's own are not.
pub(crate) fn blame(error: &CallError) -> Blame {
    match error {
        CallError::NotReached
        | CallError::NoSocket(_)
        | CallError::Spent
        | CallError::Unreadable(Unreadable::TooMany) => Blame::Nobody,
        CallError::Broken(_)
        | CallError::TooLarge(_)
        | CallError::Unreadable(Unreadable::Unknown | Unreadable::Malformed) => Blame::Engine,
    }
}

/// Logs, not too often, why an engine's answer cannot be decoded: clients read no more than that it cannot.
fn note_unreadable(engine: &Engine, why: Unreadable) {
    if let Some(held_back) = engine.trouble.due() {
        let engine = engine.authority();
        tracing::warn!(engine, error = %why, held_back, "cannot decode the engine's response");
    }
}

/// Logs, not too often, that an engine does not have an endpoint: clients do not read which engine it was.
pub(crate) fn note_lack(engine: &Engine, refusal: &Refusal) {
    if refusal.is_lack_of_endpoint()
        && let Some(held_back) = engine.trouble.due()
    {
        tracing::warn!(engine = engine.authority(), held_back, "engine does not have the request's endpoint");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::http::Lost;

    #[test]
    fn the_routers_own_bounds_are_no_fault_of_an_engine() {
        let ours = [CallError::Spent, CallError::Unreadable(Unreadable::TooMany), CallError::NotReached];
        assert!(ours.iter().all(|error| blame(error) == Blame::Nobody));
        let engines = [
            CallError::TooLarge(1),
            CallError::Broken(Lost::Unanswered),
            CallError::Unreadable(Unreadable::Malformed),
            CallError::Unreadable(Unreadable::Unknown),
        ];
        assert!(engines.iter().all(|error| blame(error) == Blame::Engine));
        let refused = Refusal::spent().0;
        assert_eq!(refused.status, 429);
        assert!(refused.retry_after.is_some());
    }
}
