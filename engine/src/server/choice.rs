//! Follows the sequences of one request: converts their events to text, per choice.

use std::sync::Arc;

use baton_openai::{
    CallDelta, Finish, GenerateRequest, PredictionTokens, StopReason, TokenLogprob, TopLogprob, Usage,
};

use super::Frontend;
use super::guard::SequenceGuard;
use crate::engine_core::{DraftOutcome, SeqEnd};
use crate::model::detokenizer::Detokenizer;
use crate::model::tokenizer::{DecodeMode, Tokenizer};
use crate::sampling::stop::{MatchedStop, StopMatcher};
use crate::sampling::{SampledLogprobs, SampledToken};
use crate::scheduler::sequence::{FinishReason, NewSequence, SeqId, StopRule};

/// A growing choice.
pub(super) struct Choice {
    id: SeqId,
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    stop_strings: Vec<String>,
    stop_token_ids: Vec<u32>,
    min_tokens: usize,
    /// The tokens that end it, as in the scheduler.
    rule: StopRule,
    /// Whether the text of the token that ends it belongs to the answer.
    include_stop: bool,
    /// Tokens so far.
    pub(super) tokens: Vec<u32>,
    /// Characters of all text so far, for `text_offset`.
    pub(super) characters: usize,
    /// Set once, at its end.
    pub(super) finish: Option<Finish>,
}

/// The effect of one event on a choice.
#[derive(Default)]
pub(super) struct ChoiceUpdate {
    pub(super) text: String,
    /// Reasoning and calls of a chat whose text is parsed, and whether its text ends because of calls.
    pub(super) reasoning: String,
    pub(super) calls: Vec<CallDelta>,
    pub(super) called: bool,
    pub(super) logprob: Option<TokenLogprob>,
    pub(super) token: Option<u32>,
    /// Set in the last update of a choice.
    pub(super) finish: Option<Finish>,
}

impl Choice {
    pub(super) fn new(frontend: &Frontend, request: &GenerateRequest, sequence: &NewSequence) -> Self {
        let decode = if request.skip_special_tokens { DecodeMode::SkipSpecial } else { DecodeMode::All };
        let tokenizer = Arc::clone(&frontend.model.tokenizer);
        let detokenizer = Detokenizer::after_prompt(Arc::clone(&tokenizer), decode, &sequence.prompt);
        let markers = frontend.model.output.of_request(request).markers();
        let include_stop = request.include_stop_str_in_output;
        let matched = if include_stop { MatchedStop::Kept } else { MatchedStop::Removed };
        Self {
            id: sequence.id,
            detokenizer: detokenizer.showing(&markers),
            tokenizer,
            stops: StopMatcher::new(&request.stop, matched),
            stop_strings: request.stop.clone(),
            stop_token_ids: request.stop_token_ids.clone(),
            min_tokens: request.min_tokens as usize,
            rule: sequence.stop.clone(),
            include_stop,
            tokens: Vec::new(),
            characters: 0,
            finish: None,
        }
    }

    /// Adds a token. A stop string in its text ends the choice, and `guard` ends the sequence.
    pub(super) fn token(&mut self, sampled: SampledToken, guard: &mut SequenceGuard) -> Option<ChoiceUpdate> {
        if self.finish.is_some() {
            return None;
        }
        let token = sampled.token;
        self.tokens.push(token);
        let logprob =
            sampled.logprobs.map(|found| token_logprob(&self.tokenizer, token, Some(&found), usize::MAX));
        let mut piece = ChoiceUpdate { token: Some(token), logprob, ..ChoiceUpdate::default() };
        if !self.include_stop && self.rule.stops_at(token, self.tokens.len()) {
            // The end follows. The token counts, but its text does not belong to the answer (as in vLLM).
            return Some(piece);
        }
        let text = self.detokenizer.push(token);
        if self.tokens.len() <= self.min_tokens {
            // A stop string that ends in one of these tokens does not count; one that only begins there does (as in
            // vLLM).
            piece.text = self.stops.pass(&text);
            return Some(piece);
        }
        let step = self.stops.push(&text);
        piece.text = step.text;
        if let Some(found) = step.stop {
            let stop = StopReason::Text(self.stop_strings[found].clone());
            self.finish = Some(Finish { reason: FinishReason::Stop, stop: Some(stop) });
            piece.finish = self.finish.clone();
            guard.finish(self.id);
        }
        Some(piece)
    }

    /// The sequence has ended.
    pub(super) fn end(&mut self, end: &SeqEnd, guard: &mut SequenceGuard) -> Option<ChoiceUpdate> {
        guard.ended(self.id);
        self.finish.is_none().then(|| self.last(end.reason))
    }

    /// Its last update.
    fn last(&mut self, reason: FinishReason) -> ChoiceUpdate {
        // An incomplete character is left out, whatever ended the text (as in vLLM, whose detokenizers have no
        // flush). A client that resumes, or joins pieces, then gets no U+FFFD in the middle. The tokens count, and
        // their bytes are in the log probabilities.
        let text = self.stops.finish();
        let last = self.tokens.last().copied().filter(|_| reason == FinishReason::Stop);
        let stop = last.filter(|id| self.stop_token_ids.contains(id)).map(StopReason::Token);
        self.finish = Some(Finish { reason, stop });
        ChoiceUpdate { text, finish: self.finish.clone(), ..ChoiceUpdate::default() }
    }
}

/// A token with its log-probability and at most `top` alternatives. The first token of a prompt has none.
pub(super) fn token_logprob(
    tokenizer: &Tokenizer,
    token: u32,
    found: Option<&SampledLogprobs>,
    top: usize,
) -> TokenLogprob {
    let alternative = |(id, logprob): &(u32, f32)| TopLogprob {
        token: tokenizer.text(*id).into_owned(),
        bytes: tokenizer.bytes(*id).to_vec(),
        logprob: *logprob,
    };
    TokenLogprob {
        token: tokenizer.text(token).into_owned(),
        bytes: tokenizer.bytes(token).to_vec(),
        logprob: found.map(|found| found.logprob),
        top: found.into_iter().flat_map(|found| &found.top).take(top).map(alternative).collect(),
    }
}

/// Token usage of a request so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TokenUsage {
    pub(super) prompt: usize,
    pub(super) completion: usize,
    pub(super) reused: usize,
    /// Tokens of reasoning; `None` if the text is not parsed for it.
    pub(super) reasoning: Option<usize>,
    /// Drafts; `None` if the engine does not draft.
    pub(super) predictions: Option<PredictionTokens>,
}

impl TokenUsage {
    /// Counts a token of a choice, and the drafts that it has decided.
    pub(super) fn count(&mut self, drafts: DraftOutcome) {
        self.completion += 1;
        if let Some(counted) = &mut self.predictions {
            counted.accepted += u32::from(drafts.accepted);
            counted.rejected += drafts.rejected as u32;
        }
    }

    pub(super) fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt as u32,
            completion_tokens: self.completion as u32,
            cached_tokens: Some(self.reused as u32),
            reasoning_tokens: self.reasoning.map(|tokens| tokens as u32),
            predictions: self.predictions,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::fixture;
    use crate::model::tokenizer::SpecialTokens;

    #[test]
    fn a_partial_character_is_dropped_and_held_stop_text_is_sent_at_the_end() {
        for name in ["qwen3", "llama3", "sentencepiece"] {
            let (tokenizer, _) = fixture(name);
            let smile = tokenizer.encode("a🙂", SpecialTokens::AsWritten, 99).expect("short enough");
            for reason in [FinishReason::Stop, FinishReason::Length, FinishReason::Abort, FinishReason::Error]
            {
                let mut choice = Choice {
                    id: SeqId(1),
                    detokenizer: Detokenizer::new(Arc::clone(&tokenizer), DecodeMode::All),
                    tokenizer: Arc::clone(&tokenizer),
                    stops: StopMatcher::new(&["ab".to_owned()], MatchedStop::Removed),
                    stop_strings: vec!["ab".to_owned()],
                    stop_token_ids: Vec::new(),
                    min_tokens: 0,
                    rule: StopRule { max_new: 9, stop_ids: Vec::new(), min_new: 0 },
                    include_stop: false,
                    tokens: Vec::new(),
                    characters: 0,
                    finish: None,
                };
                // All but the last token of the character.
                let pushed: String =
                    smile[..smile.len() - 1].iter().map(|id| choice.detokenizer.push(*id)).collect();
                let before = choice.stops.push(&pushed).text;
                let piece = choice.last(reason);
                assert_eq!(before + &piece.text, "a", "{name}, {reason:?}");
                assert!(piece.finish.is_some_and(|finish| finish.stop.is_none()));
            }
        }
    }
}
