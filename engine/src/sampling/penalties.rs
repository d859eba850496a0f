//! Penalties for tokens that have occurred before, and the counts that they need.

use std::collections::HashMap;

use super::SamplingParams;

/// Number of occurrences of each token in prompt and output. Grows by one entry per distinct token.
#[derive(Clone, Debug, Default)]
pub struct TokenCounts {
    /// Count of each token in the output; 0 for a token that is only in the prompt.
    output: HashMap<u32, u32>,
}

impl TokenCounts {
    /// Counts for a sequence that begins with `prompt`.
    #[must_use]
    pub fn new(prompt: &[u32]) -> Self {
        Self { output: prompt.iter().map(|id| (*id, 0)).collect() }
    }

    /// Counts for `params`; empty if no penalty needs them.
    #[must_use]
    pub fn for_params(params: &SamplingParams, prompt: &[u32]) -> Self {
        if params.has_penalties() { Self::new(prompt) } else { Self::default() }
    }

    /// Adds a generated token.
    pub fn push(&mut self, token: u32) {
        *self.output.entry(token).or_insert(0) += 1;
    }

    /// Applies the penalties of `params` to a row of logits.
    ///
    /// Repetition (CTRL, arXiv:1909.05858): a positive logit is divided, a negative one multiplied, once for each
    /// token of prompt or output. Then frequency times count, and presence once, for each token of the output.
    pub(super) fn penalize(&self, params: &SamplingParams, row: &mut [f32]) {
        if !params.has_penalties() {
            return;
        }
        for (id, count) in &self.output {
            let Some(logit) = row.get_mut(*id as usize) else { continue };
            if params.repetition_penalty != 1.0 {
                let penalty = params.repetition_penalty;
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
            if *count > 0 {
                *logit -= params.frequency_penalty * *count as f32 + params.presence_penalty;
            }
        }
    }
}
