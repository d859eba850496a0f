//! What restricts the next token of a sequence: first its reasoning, then its grammar.
//!
//! ```text
//!  Reasoning ── a marker ends it, by the model or because the budget is spent ──▶ Grammar, or free
//!    └───────── the first token does not open it ──────────────────────────────▶ Grammar
//! ```
//!
//! Before a grammar, tokens of reasoning are free but for those that end the sequence: its text would be missing. Where
//! the model decides whether to reason, the first token is one that the grammar permits, or the marker that opens
//! reasoning. Once the budget is spent, the tokens of the closing marker are the only ones. All of it depends on the
//! end of the prompt and on the tokens of the sequence.

use std::sync::Arc;
use std::time::Duration;

use baton_openai::FinishReason;

use super::state::{GrammarState, MaskReadiness};
use crate::model::output::{ReasoningTrack, ResponseStage};
use crate::model::tokenizer::{SpecialTokens, Tokenizer};
use crate::sampling::TokenMask;

/// Tokens of the markers that end reasoning.
const CLOSING_TOKENS_MAX: usize = 64;

/// The reasoning of a request's responses, before their first token.
pub struct ReasoningRules {
    track: ReasoningTrack,
    tokenizer: Arc<Tokenizer>,
    rows: usize,
    /// The token that opens reasoning, where the prompt has not.
    opening: Option<u32>,
    /// The most tokens of reasoning, and the tokens that end it.
    budget: Option<(u32, Vec<u32>)>,
    /// The tokens of reasoning; `None` for all.
    free: Option<TokenMask>,
}

/// Whether reasoning can come before a constrained text: the prompt has opened it, or one token does.
#[must_use]
pub fn can_precede_grammar(track: &ReasoningTrack, tokenizer: &Tokenizer) -> bool {
    track.opening().is_none_or(|marker| token_of(marker, tokenizer).is_some())
}

/// The token that is this marker.
fn token_of(marker: &str, tokenizer: &Tokenizer) -> Option<u32> {
    tokenizer.id(marker).filter(|id| tokenizer.bytes(*id) == marker.as_bytes())
}

impl ReasoningRules {
    /// The rules of responses with this track, for a model with `rows` rows of logits.
    #[must_use]
    pub fn new(track: ReasoningTrack, tokenizer: &Arc<Tokenizer>, rows: usize) -> Self {
        let opening = track.opening().and_then(|marker| token_of(marker, tokenizer));
        Self { track, tokenizer: Arc::clone(tokenizer), rows, opening, budget: None, free: None }
    }

    /// With at most so many tokens of reasoning. `None` if the tokenizer cannot write the marker that ends it.
    #[must_use]
    pub fn with_budget(self, tokens: u32) -> Option<Self> {
        let closing = self.closing_tokens()?;
        Some(Self { budget: Some((tokens, closing)), ..self })
    }

    /// Without these tokens, which end a sequence, unless they end reasoning as well.
    #[must_use]
    pub fn without_stops(self, stops: &[u32]) -> Self {
        let closing = self.closing_tokens().unwrap_or_default();
        let mut free = TokenMask::new(vec![u32::MAX; self.rows.div_ceil(32)]);
        let mut excluded = stops.iter().filter(|stop| !closing.contains(stop)).peekable();
        let any = excluded.peek().is_some();
        excluded.for_each(|stop| free.set(*stop, false));
        Self { free: any.then_some(free), ..self }
    }

    fn closing_tokens(&self) -> Option<Vec<u32>> {
        let text = self.track.closing();
        let tokens = self.tokenizer.encode(text, SpecialTokens::AsWritten, CLOSING_TOKENS_MAX).ok()?;
        let bytes: Vec<u8> = tokens.iter().flat_map(|id| self.tokenizer.bytes(*id)).copied().collect();
        (bytes == text.as_bytes()).then_some(tokens)
    }
}

/// The reasoning of one sequence.
struct ReasoningGate {
    rules: Arc<ReasoningRules>,
    track: ReasoningTrack,
    /// The first token is still to come, and may be the grammar's.
    is_open: bool,
    /// Tokens of the closing marker that the budget has forced.
    forced: usize,
    /// The tokens that are permitted next; `None` for those of the rules.
    mask: Option<TokenMask>,
}

/// The effect of a token on reasoning.
enum GateStep {
    /// It goes on.
    Stays,
    /// Its end was this number of bytes of the token.
    Ended(usize),
    /// There is none: the token is the grammar's first.
    Absent,
}

impl ReasoningGate {
    fn new(rules: &Arc<ReasoningRules>, grammar: Option<&GrammarState>) -> Self {
        let (rules, track) = (Arc::clone(rules), rules.track.clone());
        let mut gate = Self { rules, track, is_open: false, forced: 0, mask: None };
        match (gate.rules.opening, grammar.and_then(GrammarState::mask)) {
            (Some(opening), Some(first)) => {
                let mut mask = first.clone();
                mask.set(opening, true);
                gate.mask = Some(mask);
                gate.is_open = true;
            }
            (None, _) | (_, None) => gate.mask = gate.forced_mask(),
        }
        gate
    }

    fn mask(&self) -> Option<&TokenMask> {
        self.mask.as_ref().or(self.rules.free.as_ref())
    }

    /// The only next token, if the budget is spent.
    fn forced_token(&self) -> Option<u32> {
        let (budget, closing) = self.rules.budget.as_ref()?;
        let spent = self.track.stage() == ResponseStage::Reasoning && self.track.tokens() >= *budget;
        closing.get(self.forced).copied().filter(|_| self.forced > 0 || spent)
    }

    fn forced_mask(&self) -> Option<TokenMask> {
        self.forced_token().map(|token| TokenMask::of(&[token], self.rules.rows))
    }

    fn add(&mut self, token: u32) -> GateStep {
        if std::mem::replace(&mut self.is_open, false) && self.rules.opening != Some(token) {
            return GateStep::Absent;
        }
        let was_forced = self.forced_token() == Some(token);
        if let Some(at) = self.track.push(self.rules.tokenizer.bytes(token)) {
            return GateStep::Ended(at);
        }
        let closing = self.rules.budget.as_ref().map_or(0, |(_, closing)| closing.len());
        let next = self.forced + 1;
        self.forced = if was_forced && next < closing { next } else { 0 };
        self.mask = self.forced_mask();
        GateStep::Stays
    }
}

/// See the module's documentation.
pub struct TokenGate {
    /// `None` once it has ended.
    reasoning: Option<ReasoningGate>,
    grammar: Option<GrammarState>,
}

impl std::fmt::Debug for TokenGate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let reasons = self.reasoning.is_some();
        f.debug_struct("TokenGate").field("reasons", &reasons).field("grammar", &self.grammar).finish()
    }
}

impl TokenGate {
    /// The gate of one sequence; `None` if nothing restricts it. Rules before a grammar are those of a track that
    /// [`can_precede_grammar`].
    #[must_use]
    pub fn new(rules: Option<&Arc<ReasoningRules>>, grammar: Option<GrammarState>) -> Option<Self> {
        let reasoning = rules.map(|rules| ReasoningGate::new(rules, grammar.as_ref()));
        (reasoning.is_some() || grammar.is_some()).then_some(Self { reasoning, grammar })
    }

    /// Waits for the mask of the next token, at most this long.
    pub fn wait(&mut self, at_most: Duration) -> MaskReadiness {
        match (&self.reasoning, &mut self.grammar) {
            (None, Some(grammar)) => grammar.wait(at_most),
            (Some(_), _) | (None, None) => MaskReadiness::Ready,
        }
    }

    /// The mask of the next token, if it is there and there is one.
    #[must_use]
    pub fn mask(&self) -> Option<&TokenMask> {
        match &self.reasoning {
            Some(reasoning) => reasoning.mask(),
            None => self.grammar.as_ref().and_then(GrammarState::mask),
        }
    }

    /// Whether any token may be next.
    #[must_use]
    pub fn is_free(&self) -> bool {
        match &self.reasoning {
            Some(reasoning) => reasoning.mask().is_none(),
            None => self.grammar.is_none(),
        }
    }

    /// Whether the sequence may end here, as far as it is known.
    #[must_use]
    pub fn is_accepting(&self) -> bool {
        match &self.reasoning {
            Some(reasoning) => self.grammar.is_none() && reasoning.forced_token().is_none(),
            None => self.grammar.as_ref().is_none_or(GrammarState::is_accepting),
        }
    }

    /// Adds a token of which the scheduler reports `ended`. Returns why the sequence ends, if it does.
    pub fn end_after(&mut self, token: u32, ended: Option<FinishReason>) -> Option<FinishReason> {
        if ended == Some(FinishReason::Stop) {
            return ended;
        }
        let step = self.reasoning.as_mut().map_or(GateStep::Absent, |reasoning| reasoning.add(token));
        if matches!(step, GateStep::Stays) {
            return ended;
        }
        let reasoning = self.reasoning.take();
        let Some(grammar) = &mut self.grammar else { return ended };
        match (step, reasoning) {
            (GateStep::Ended(at), Some(reasoning)) => {
                let behind = reasoning.rules.tokenizer.bytes(token).get(at..).unwrap_or_default();
                grammar.begin(behind, ended)
            }
            _ => grammar.end_after(token, ended),
        }
    }
}

#[cfg(test)]
mod tests;
