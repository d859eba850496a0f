//! The choice of tokens from the results of a forward pass.

use crate::compute::Logits;
use crate::sampling::{SampledToken, SamplingParams, SamplingScratch, TokenCounts, TokenPosition, sample};

/// The logits of the latest step, and working memory for the choice of tokens.
#[derive(Debug, Default)]
pub(super) struct Sampler {
    pub(super) logits: Logits,
    scratch: SamplingScratch,
}

impl Sampler {
    /// The token of a row. The device may have drawn it. `None`: the row contains no number.
    pub(super) fn token_of(
        &mut self,
        row: usize,
        params: &SamplingParams,
        counts: &TokenCounts,
        position: TokenPosition,
    ) -> Option<SampledToken> {
        match self.logits.drawn(row) {
            Some(token) => token.map(|token| SampledToken { token, logprobs: None }),
            None => sample(self.logits.row(row), params, counts, position, &mut self.scratch).ok(),
        }
    }
}
