//! The record of one choice.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::admission::Unavailable;
use crate::engines::caches::CachedPrefix;
use crate::metrics::routing::ChoiceReason;
use crate::routing::policy::Candidate;
use crate::routing::pool::Eligibility;

/// The inputs and the result of one choice.
pub(crate) struct Decision {
    /// The names of the pool's engines; all indices below refer to this list.
    pub engines: Arc<[Arc<str>]>,
    pub policy: &'static str,
    /// Engines that could be chosen: the chosen one, one with the least load, and in a large pool only a few others.
    pub considered: Vec<Candidate>,
    /// The policy's score of each, in the same order; a higher value is better.
    pub scores: Vec<f64>,
    /// Number of further engines that could be chosen.
    pub more: usize,
    /// Engines that could not be chosen, and why; not all of a large pool.
    pub removed: Vec<(usize, Eligibility)>,
    /// Number of further engines that could not be chosen.
    pub more_removed: usize,
    pub result: Result<(usize, ChoiceReason), Unavailable>,
    /// The part of the prompt that the chosen engine had cached, and the prompt's size.
    pub cached: CachedPrefix,
    pub chunks: usize,
    pub blocks: usize,
}

impl Eligibility {
    fn label(self) -> &'static str {
        match self {
            Self::Ready => "labels",
            Self::Ejected => "resting",
            Self::Full => "full",
            Self::Tried => "tried",
            Self::Unresponsive => "silent",
            Self::Draining => "draining",
            Self::Incompatible => "incompatible",
        }
    }
}

impl Decision {
    fn name(&self, index: usize) -> &str {
        &self.engines[index]
    }

    pub(crate) fn json(&self) -> Value {
        // Most decisions are never read, so the candidates are sorted here: the chosen one, then those with the fewest
        // requests.
        let chosen = self.result.ok().map(|(index, _)| index);
        let mut considered: Vec<_> = self.considered.iter().zip(&self.scores).collect();
        considered.sort_by_key(|(c, _)| (Some(c.index) != chosen, c.requests, c.index));
        let considered: Vec<_> = considered
            .into_iter()
            .map(|(c, score)| {
                json!({"engine": self.name(c.index), "requests": c.requests, "tokens": c.tokens, "weight": c.weight,
                    "score": score})
            })
            .collect();
        let removed =
            |(index, why): &(usize, Eligibility)| json!({"engine": self.name(*index), "why": why.label()});
        let removed: Vec<_> = self.removed.iter().map(removed).collect();
        let (chosen, reason) = match &self.result {
            Ok((index, reason)) => (Some(self.name(*index)), reason.label()),
            Err(Unavailable::Full) => (None, "all_full"),
            Err(Unavailable::NoEngine) => (None, "none_usable"),
        };
        json!({
            "policy": self.policy, "chosen": chosen, "reason": reason, "pool": self.engines.len(),
            "candidates": considered, "more_candidates": self.more,
            "removed": removed, "more_removed": self.more_removed,
            "held": {"chunks": self.cached.chunks, "of_chunks": self.chunks,
                "blocks": self.cached.blocks, "of_blocks": self.blocks},
        })
    }
}
