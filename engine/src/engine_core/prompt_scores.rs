//! The log-probabilities of a prompt's tokens, collected from the chunks in which the prompt is computed.

use std::ops::Range;

use crate::compute::Logits;
use crate::sampling::{SampledLogprobs, SamplingScratch, logprobs_of};
use crate::scheduler::sequence::NewSequence;

/// The log-probabilities of one prompt so far.
#[derive(Debug)]
pub(super) struct PromptScores {
    /// Number of alternatives.
    top: u32,
    /// Of the second token of the prompt, the third, and so on.
    found: Vec<SampledLogprobs>,
}

impl PromptScores {
    /// Empty, if the sequence wants any.
    pub(super) fn of(sequence: &NewSequence) -> Option<Self> {
        sequence.prompt_logprobs.map(|top| Self { top, found: Vec::new() })
    }

    /// Adds a chunk: `rows` are the logits of the positions from `start` on. The logits of a position are those of the
    /// next token. After a preemption a chunk may repeat positions.
    pub(super) fn add(
        &mut self,
        logits: &Logits,
        rows: Range<usize>,
        start: usize,
        prompt: &[u32],
        scratch: &mut SamplingScratch,
    ) {
        for (position, row) in (start..).zip(rows) {
            if position == self.found.len()
                && let Some(next) = prompt.get(position + 1)
            {
                self.found.push(logprobs_of(logits.row(row), *next, self.top, scratch));
            }
        }
    }

    /// All of them.
    pub(super) fn take(&mut self) -> Vec<SampledLogprobs> {
        std::mem::take(&mut self.found)
    }
}
