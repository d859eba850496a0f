//! What one choice was made from.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::admission::Scarce;
use crate::engines::caches::Holding;
use crate::metrics::routing::Reason;
use crate::routing::policy::Candidate;
use crate::routing::pool::Fit;

/// What one choice was made from, and what it came to.
pub(crate) struct Sight {
    /// What the engines of the pool are called; whoever is spoken of below is so by its index here.
    pub engines: Arc<[Arc<str>]>,
    pub policy: &'static str,
    /// Those that could be chosen: the chosen one, one with the least load, and of a large pool a few others.
    pub considered: Vec<Considered>,
    /// Others that could be chosen.
    pub more: usize,
    /// Engines that could not, and why; not all of a large pool.
    pub removed: Vec<Removed>,
    /// Others that could not.
    pub more_removed: usize,
    pub result: Result<(usize, Reason), Scarce>,
    /// What the chosen one held of the prompt, and what there was to hold.
    pub holding: Holding,
    pub chunks: usize,
    pub blocks: usize,
}

/// An engine that could be chosen.
pub(crate) struct Considered {
    pub candidate: Candidate,
    /// As its policy sees it; more is better.
    pub score: f64,
}

/// An engine that could not be chosen.
pub(crate) struct Removed {
    pub index: usize,
    pub why: Fit,
}

impl Fit {
    fn label(self) -> &'static str {
        match self {
            Self::Ready => "labels",
            Self::Resting => "resting",
            Self::Full => "full",
            Self::Tried => "tried",
            Self::Silent => "silent",
            Self::Draining => "draining",
        }
    }
}

impl Sight {
    fn name(&self, index: usize) -> &str {
        &self.engines[index]
    }

    pub(crate) fn json(&self) -> Value {
        // Nobody may ever ask, so they are put in order here: the chosen one, and then those that are busy with least.
        let chosen = self.result.ok().map(|(index, _)| index);
        let mut considered: Vec<_> = self.considered.iter().collect();
        considered
            .sort_by_key(|c| (Some(c.candidate.index) != chosen, c.candidate.requests, c.candidate.index));
        let considered: Vec<_> = considered
            .into_iter()
            .map(|Considered { candidate: c, score }| {
                json!({"engine": self.name(c.index), "requests": c.requests, "tokens": c.tokens, "weight": c.weight,
                    "score": score})
            })
            .collect();
        let removed = |r: &Removed| json!({"engine": self.name(r.index), "why": r.why.label()});
        let removed: Vec<_> = self.removed.iter().map(removed).collect();
        let (chosen, reason) = match &self.result {
            Ok((index, reason)) => (Some(self.name(*index)), reason.label()),
            Err(Scarce::Full) => (None, "all_full"),
            Err(Scarce::NoEngine) => (None, "none_usable"),
        };
        json!({
            "policy": self.policy, "chosen": chosen, "reason": reason, "pool": self.engines.len(),
            "candidates": considered, "more_candidates": self.more,
            "removed": removed, "more_removed": self.more_removed,
            "held": {"chunks": self.holding.chunks, "of_chunks": self.chunks,
                "blocks": self.holding.blocks, "of_blocks": self.blocks},
        })
    }
}
