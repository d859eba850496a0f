//! The choice of tokens from the results of a forward pass.

use std::ops::Range;

use super::prompt_scores::PromptScores;
use super::{EngineCore, EngineEnv, LiveSequence, SeqEvent, token_position};
use crate::compute::{Logits, LogitsRequest, SeqStep};
use crate::grammar::{GrammarFault, TokenGate};
use crate::log_span::request_span;
use crate::sampling::{SampledToken, SamplingRow, SamplingScratch, has_candidate};
use crate::scheduler::StepPart;
use crate::scheduler::sequence::{FinishReason, SeqId, Sequence};

/// The logits of the latest step, and working memory for the choice of tokens.
#[derive(Debug, Default)]
pub(super) struct Sampler {
    pub(super) logits: Logits,
    /// The rows of each part of the step: of logits, or of hidden states.
    rows: Vec<Range<usize>>,
    scratch: SamplingScratch,
}

/// The token of one row.
pub(super) enum RowOutcome {
    /// The chosen token.
    Token(SampledToken),
    /// The request excludes every token at this position.
    Excluded,
    /// The row contains no number.
    Invalid,
}

impl Sampler {
    /// Records how many rows each part of a step gets.
    pub(super) fn expect_rows(&mut self, batch: &[SeqStep<'_>]) {
        let (mut logits, mut hidden) = (0, 0);
        self.rows.clear();
        for step in batch {
            let (first, count) = match step.logits {
                LogitsRequest::No => (&mut logits, 0),
                LogitsRequest::Last | LogitsRequest::Draw(_) => (&mut logits, 1),
                LogitsRequest::All | LogitsRequest::DrawEach(_) => (&mut logits, step.tokens.len()),
                LogitsRequest::Hidden => (&mut hidden, step.tokens.len()),
            };
            self.rows.push(*first..*first + count);
            *first += count;
        }
    }

    /// The rows of each part, once.
    pub(super) fn take_rows(&mut self) -> Vec<Range<usize>> {
        std::mem::take(&mut self.rows)
    }

    /// The token of a row. The device may have drawn it.
    pub(super) fn token_of(&mut self, index: usize, row: &SamplingRow<'_>) -> RowOutcome {
        let token = match self.logits.drawn(index) {
            Some(token) => token.map(|token| SampledToken { token, logprobs: None }),
            None => row.sample(self.logits.row(index), &mut self.scratch).ok(),
        };
        match token {
            Some(token) => RowOutcome::Token(token),
            None if self.logits.drawn(index).is_none() && has_candidate(self.logits.row(index)) => {
                RowOutcome::Excluded
            }
            None => RowOutcome::Invalid,
        }
    }

    /// Adds the rows of a chunk, one for each of its positions, to the log-probabilities of its prompt.
    pub(super) fn score(
        &mut self,
        scores: &mut PromptScores,
        rows: Range<usize>,
        start: usize,
        prompt: &[u32],
    ) {
        scores.add(&self.logits, rows, start, prompt, &mut self.scratch);
    }
}

impl LiveSequence {
    /// The row of its next token.
    pub(super) fn sampling_row<'a>(&'a self, sequence: &'a Sequence) -> SamplingRow<'a> {
        SamplingRow {
            params: &self.sampling,
            counts: &self.counts,
            output: &sequence.tokens()[sequence.prompt_len()..],
            position: token_position(sequence),
            mask: self.grammar.as_ref().and_then(TokenGate::mask),
        }
    }

    /// Whether no mask restricts its next token.
    pub(super) fn is_unmasked(&self) -> bool {
        self.grammar.as_ref().is_none_or(TokenGate::is_free)
    }

    /// Reports the end of its prompt, before the first token. `cached` tokens of it came from this engine's cache.
    pub(super) fn send_started(&mut self, cached: usize) {
        let cached = self.target.as_ref().map_or(cached, |target| target.cached);
        let prompt_logprobs = self.collected.take_scores();
        // If its front end has left, sending the token fails too.
        let _ = self.outbox.try_send((self.index, SeqEvent::Started { cached, prompt_logprobs }));
    }
}

impl<S: EngineEnv> EngineCore<S> {
    /// Ends a sequence for which no token is left to choose: as after a stop token, unless its constraint needs more
    /// text.
    pub(super) fn end_without_token(&mut self, part: &StepPart) {
        let grammar = self.live.get(&part.id).and_then(|live| live.grammar.as_ref());
        if grammar.is_some_and(|grammar| !grammar.is_accepting()) {
            return self.end_unmasked(part.id, GrammarFault::Excluded);
        }
        let cached = self.scheduler.sequence(part.id).map_or(0, |sequence| sequence.reused().0);
        self.scheduler.commit(part, None);
        if let Some(live) = self.live.get_mut(&part.id).filter(|live| live.last_token.is_none()) {
            live.send_started(cached);
        }
        self.end(part.id, FinishReason::Stop);
    }

    /// Ends a sequence whose logits contain no number.
    pub(super) fn logits_invalid(&mut self, id: SeqId) {
        tracing::error!(parent: request_span!(self.request_of(id)), event = "logits_invalid",
            "logits row contains no number");
        self.end_with(id, FinishReason::Error, SeqEvent::Unavailable("the model produced no number"));
    }
}
