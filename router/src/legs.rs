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
