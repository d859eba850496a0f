//! What is collected from the chunks in which a prompt is computed: log-probabilities of its tokens, or hidden states.
//!
//! Hidden states are added in the order of the positions, in f64. So an embedding does not depend on the chunks, the
//! batch or a preemption.

use std::ops::Range;

use super::prompt_scores::PromptScores;
use super::{EngineCore, EngineEnv};
use crate::sampling::SampledLogprobs;
use crate::scheduler::StepPart;
use crate::scheduler::sequence::{FinishReason, NewSequence, Pooling, Purpose};

/// What a sequence collects.
#[derive(Debug)]
pub(super) enum PromptCollector {
    Nothing,
    Scores(PromptScores),
    Pool(PromptPool),
}

impl PromptCollector {
    pub(super) fn of(sequence: &NewSequence) -> Self {
        match sequence.purpose {
            Purpose::Pool(pooling) => Self::Pool(PromptPool::new(pooling)),
            Purpose::Plain | Purpose::Produce { .. } | Purpose::Consume(_) => {
                PromptScores::of(sequence).map_or(Self::Nothing, Self::Scores)
            }
        }
    }

    /// The log-probabilities of the prompt's tokens, once.
    pub(super) fn take_scores(&mut self) -> Vec<SampledLogprobs> {
        match self {
            Self::Scores(scores) => scores.take(),
            Self::Nothing | Self::Pool(_) => Vec::new(),
        }
    }

    /// The embedding of a prompt that is complete.
    pub(super) fn embedding(&self) -> Option<Vec<f32>> {
        match self {
            Self::Pool(pool) => pool.embedding(),
            Self::Nothing | Self::Scores(_) => None,
        }
    }
}

/// The pooled hidden states of one prompt so far.
#[derive(Debug)]
pub(super) struct PromptPool {
    pooling: Pooling,
    /// The first position that is missing from the sum.
    next: usize,
    sum: Vec<f64>,
    is_complete: bool,
}

impl PromptPool {
    fn new(pooling: Pooling) -> Self {
        Self { pooling, next: 0, sum: Vec::new(), is_complete: false }
    }

    /// Adds the hidden states of the positions from `start` on. After a preemption a chunk may repeat positions.
    fn add<'a>(&mut self, start: usize, rows: impl Iterator<Item = &'a [f32]>) {
        for (position, row) in (start..).zip(rows) {
            match self.pooling {
                Pooling::Last => {
                    self.sum.clear();
                    self.sum.extend(row.iter().map(|value| f64::from(*value)));
                }
                Pooling::Mean if position == self.next => {
                    self.sum.resize(row.len(), 0.0);
                    self.sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
                    self.next += 1;
                }
                Pooling::Mean => {}
            }
        }
    }

    /// The pooled states, divided by their length: the mean and the sum have the same direction. `None` for an
    /// incomplete prompt, or if they have no length.
    fn embedding(&self) -> Option<Vec<f32>> {
        let length = self.sum.iter().map(|value| value * value).sum::<f64>().sqrt();
        let has_length = length > 0.0 && length.is_finite();
        (self.is_complete && has_length)
            .then(|| self.sum.iter().map(|value| (value / length) as f32).collect())
    }
}

impl<S: EngineEnv> EngineCore<S> {
    /// Records one planned part of a sequence whose hidden states are pooled. `rows` are those of its hidden states.
    pub(super) fn commit_pooled(&mut self, part: &StepPart, rows: Range<usize>) {
        let Some(live) = self.live.get_mut(&part.id) else { return };
        let PromptCollector::Pool(pool) = &mut live.collected else { return };
        pool.add(part.start, rows.map(|row| self.sampler.logits.hidden_row(row)));
        pool.is_complete = part.samples;
        let is_valid = !part.samples || pool.embedding().is_some();
        self.scheduler.commit(part, None);
        if !is_valid {
            self.logits_invalid(part.id);
        } else if part.samples {
            self.end(part.id, FinishReason::Stop);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: [[f32; 2]; 4] = [[1.0, 0.0], [0.0, 4.0], [2.0, 0.0], [0.0, 0.0]];

    fn pooled(pooling: Pooling, chunks: &[Range<usize>]) -> Option<Vec<f32>> {
        let mut pool = PromptPool::new(pooling);
        for chunk in chunks {
            pool.add(chunk.start, ROWS[chunk.clone()].iter().map(|row| row.as_slice()));
            pool.is_complete = chunk.end == 3;
        }
        pool.embedding()
    }

    #[test]
    fn an_embedding_has_unit_length_and_does_not_depend_on_chunks() {
        let (all, part) = (0..3, 0..2);
        let whole = std::slice::from_ref(&all);
        assert_eq!(pooled(Pooling::Last, whole), Some(vec![1.0, 0.0]));
        assert_eq!(pooled(Pooling::Mean, whole), Some(vec![0.6, 0.8]));
        for pooling in [Pooling::Last, Pooling::Mean] {
            for chunks in [&[0..1, 1..3][..], &[0..2, 2..3], &[0..1, 1..2, 2..3], &[0..2, 0..1, 1..3]] {
                assert_eq!(pooled(pooling, chunks), pooled(pooling, whole), "{chunks:?}");
            }
        }
        assert_eq!(pooled(Pooling::Mean, std::slice::from_ref(&part)), None, "incomplete");
        let mut zero = PromptPool::new(Pooling::Last);
        zero.add(3, std::iter::once(ROWS[3].as_slice()));
        zero.is_complete = true;
        assert_eq!(zero.embedding(), None, "no direction");
    }
}
