//! What one choice was made from.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::memory::Holding;
use crate::policy::Reason;
use crate::pool::{Fit, Scarce};

/// What one choice was made from, and what it came to.
pub(crate) struct Sight {
    pub policy: &'static str,
    /// Engines of the pool.
    pub members: usize,
    /// Those that could be chosen: the chosen one, and those with the least load.
    pub considered: Vec<Considered>,
    /// Others that could be chosen.
    pub more: usize,
    /// Engines that could not, and why; not all of a large pool.
    pub removed: Vec<Removed>,
    /// Others that could not.
    pub more_removed: usize,
    pub result: Result<(Arc<str>, Reason), Scarce>,
    /// What the chosen one held of the prompt, and what there was to hold.
    pub holding: Holding,
    pub chunks: usize,
    pub blocks: usize,
}

/// An engine that could be chosen.
pub(crate) struct Considered {
    pub engine: Arc<str>,
    pub requests: u32,
    pub tokens: u64,
    pub weight: u32,
    /// As its policy sees it; more is better.
    pub score: f64,
}

/// An engine that could not be chosen.
pub(crate) struct Removed {
    pub engine: Arc<str>,
    pub why: Fit,
}

impl Fit {
    fn label(self) -> &'static str {
        match self {
            Self::Ready => "labels",
            Self::Resting => "resting",
            Self::Full => "full",
            Self::Tried => "tried",
            Self::Out => "out",
        }
    }
}

impl Sight {
    pub(super) fn json(&self) -> Value {
        let considered: Vec<_> = self
            .considered
            .iter()
            .map(|c| {
                json!({"engine": &*c.engine, "requests": c.requests, "tokens": c.tokens, "weight": c.weight,
                    "score": c.score})
            })
            .collect();
        let removed: Vec<_> =
            self.removed.iter().map(|r| json!({"engine": &*r.engine, "why": r.why.label()})).collect();
        let (chosen, reason) = match &self.result {
            Ok((engine, reason)) => (Some(&**engine), reason.label()),
            Err(Scarce::Full) => (None, "all_full"),
            Err(Scarce::Nobody) => (None, "nobody"),
        };
        json!({
            "policy": self.policy, "chosen": chosen, "reason": reason, "pool": self.members,
            "candidates": considered, "more_candidates": self.more,
            "removed": removed, "more_removed": self.more_removed,
            "held": {"chunks": self.holding.chunks, "of_chunks": self.chunks,
                "blocks": self.holding.blocks, "of_blocks": self.blocks},
        })
    }
}
