//! The two halves of a request, each as one attempt at one engine and what its answer means.

pub(crate) mod decode;
pub(crate) mod prefill;

mod refusal;
mod said;

pub(crate) use refusal::{Blame, Meaning, Refusal, Verdict};

use crate::upstream::{Engine, Unreadable};

/// Logs, not too often, why an engine's answer cannot be decoded: clients read no more than that it cannot.
pub(crate) fn note_unreadable(engine: &Engine, why: Unreadable) {
    if let Some(held_back) = engine.trouble.due() {
        let engine = engine.authority();
        tracing::warn!(engine, %why, held_back, "an engine's answer cannot be decoded");
    }
}

/// Logs, not too often, that an engine does not have an endpoint: clients do not read which engine it was.
pub(crate) fn note_lack(engine: &Engine, path: &str, refusal: &Refusal) {
    if refusal.is_lack_of_endpoint()
        && let Some(held_back) = engine.trouble.due()
    {
        tracing::warn!(engine = engine.authority(), path, held_back, "an engine does not have this endpoint");
    }
}
