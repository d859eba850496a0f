//! Speculative decoding: drafts of a sequence's next tokens, which one step verifies.
//!
//! ```text
//!   tokens … t │ d1 d2 d3        the step computes t and the drafts, with logits of each
//!              ▼
//!   after t: d1 is chosen ─▶ accepted; after d1: d2 ─▶ accepted; after d2: x ─▶ x is kept, d3 is dropped
//! ```
//!
//! The choice of a token depends on logits, parameters, counts and position, and a row of logits depends on the
//! tokens before it. A draft is accepted exactly if that choice equals it, so drafts never change the tokens.
//!
//! - A draft comes from [prompt lookup](ngram): from the sequence's own tokens.
//! - Drafts come last. They take what one-token parts leave of the step's tokens, and of its time with a target
//!   (`step_budget.rs`), half of it while a prompt needs tokens. No sequence is preempted for them, and none waits for
//!   their blocks.
//! - The blocks of rejected drafts are released at the end of the step. Keys and values of a rejected draft in a kept
//!   block lie behind the computed tokens, and the next step overwrites them.
//! - A sequence whose drafts are rejected drafts less, then seldom ([`DraftPace`]).

mod ngram;

use std::collections::HashMap;

use self::ngram::NgramIndex;
pub use self::ngram::{DRAFTS_MAX, LOOKUP_MAX, PromptLookup};
use super::{Scheduler, StepPart};
use crate::blocks::pool::Hold;
use crate::scheduler::sequence::{Purpose, SeqId, Sequence};

/// Draft tokens of one step, over all its sequences. Each costs a row of logits. With many sequences a step has enough
/// rows without drafts.
const DRAFTS_PER_STEP: usize = 64;

/// Tokens that one step adds to the indexes of its sequences: some 100 µs. A longer prompt takes several steps.
const INDEXED_PER_STEP: usize = 16_384;

/// Rejected drafts in a row after which a pause has its full length: 2^6 - 1 steps.
const MISSES_MAX: u32 = 6;

/// How much a sequence drafts, by what became of its drafts.
///
/// Accepted drafts double the length, up to the limit. A draft that was accepted in part sets it to one more than was
/// accepted. A draft that was rejected whole halves it and is followed by a pause: 1, 3, 7, … 63 steps.
#[derive(Debug)]
struct DraftPace {
    length: usize,
    /// Drafts in a row of which nothing was accepted.
    misses: u32,
    /// Steps without a draft that are left.
    pause: u32,
}

impl DraftPace {
    fn new(longest: usize) -> Self {
        Self { length: longest, misses: 0, pause: 0 }
    }

    /// Tokens that the next step may draft.
    fn permitted(&mut self) -> usize {
        if self.pause > 0 {
            self.pause -= 1;
            return 0;
        }
        self.length
    }

    fn verified(&mut self, drafted: usize, accepted: usize, longest: usize) {
        if accepted == 0 {
            self.misses = (self.misses + 1).min(MISSES_MAX);
            self.pause = (1 << self.misses) - 1;
            self.length = (self.length / 2).max(1);
            return;
        }
        self.misses = 0;
        let length = if accepted == drafted { 2 * self.length } else { accepted + 1 };
        self.length = length.min(longest);
    }
}

/// One sequence that drafts.
#[derive(Debug)]
struct DraftingSequence {
    index: NgramIndex,
    pace: DraftPace,
    /// The last token and the drafts after it, in this step; empty without drafts.
    step: Vec<u32>,
}

impl DraftingSequence {
    /// Drafts at most `most` tokens for the next step. Returns how many.
    fn propose(&mut self, sequence: &Sequence, most: usize, indexing: &mut usize) -> usize {
        self.step.clear();
        let tokens = sequence.tokens();
        self.index.extend(tokens, indexing);
        // The step also chooses a token after the last draft.
        let left = sequence.stop.max_new.saturating_sub(sequence.generated() + 1);
        let most = most.min(left);
        let most = if most > 0 { most.min(self.pace.permitted()) } else { 0 };
        let Some(last) = tokens.last().filter(|_| most > 0) else { return 0 };
        let draft = self.index.draft(tokens, most);
        let generated = sequence.generated() + 1;
        let ends = |(at, token): (usize, &u32)| sequence.stop.stops_at(*token, generated + at);
        // The token that ends the text is chosen after the last draft.
        let useful = draft.iter().enumerate().position(ends).unwrap_or(draft.len());
        if useful > 0 {
            self.step.push(*last);
            self.step.extend(&draft[..useful]);
        }
        useful
    }
}

/// The sequences that may draft.
#[derive(Debug, Default)]
pub(super) struct Drafting {
    /// `None`: none may.
    lookup: Option<PromptLookup>,
    sequences: HashMap<SeqId, DraftingSequence>,
}

impl Drafting {
    /// The tokens of a part that has drafts: the last token, then the drafts.
    pub(super) fn tokens(&self, part: &StepPart) -> Option<&[u32]> {
        let step = self.sequences.get(&part.id)?.step.as_slice();
        (!step.is_empty() && step.len() == part.count).then_some(step)
    }

    /// A sequence has ended.
    pub(super) fn forget(&mut self, id: SeqId) {
        self.sequences.remove(&id);
    }
}

impl Scheduler {
    /// Sequences draft by prompt lookup, if [`Self::allow_drafts`] allows it.
    #[must_use]
    pub fn with_prompt_lookup(mut self, lookup: PromptLookup) -> Self {
        self.admitted.drafting.lookup = Some(lookup);
        self
    }

    /// Lets a sequence draft whose tokens are chosen from its logits alone, one after the other. A producer and a
    /// sequence of one token never draft, and neither does one whose hidden states are pooled.
    pub fn allow_drafts(&mut self, id: SeqId) {
        let drafting = &mut self.admitted.drafting;
        let (Some(lookup), Some(sequence)) = (drafting.lookup, self.sequences.get(&id)) else { return };
        let decodes = match sequence.purpose {
            Purpose::Plain | Purpose::Consume(_) => sequence.stop.max_new > 1,
            Purpose::Produce { .. } | Purpose::Pool(_) => false,
        };
        if decodes {
            let (index, pace) = (NgramIndex::new(lookup), DraftPace::new(lookup.drafts()));
            drafting.sequences.insert(id, DraftingSequence { index, pace, step: Vec::new() });
        }
    }

    /// Adds drafts to the parts of this step, which have one token each.
    pub(super) fn plan_drafts(&mut self, planned: &mut [StepPart], budget: &mut usize) {
        if self.admitted.drafting.sequences.is_empty() || planned.is_empty() {
            return;
        }
        let is_contended = !self.waiting.is_empty() || self.admitted.running.len() > planned.len();
        let tokens = if is_contended { *budget / 2 } else { *budget };
        let mut left = self.pacing.draft_budget(planned, tokens.min(DRAFTS_PER_STEP), is_contended);
        // None takes all.
        let share = left.share_of(planned.len());
        let mut indexing = INDEXED_PER_STEP;
        for part in planned {
            let behind = part.start + 1;
            let drafts = self.draft(part.id, left.most(&share, behind), is_contended, &mut indexing);
            part.count += drafts;
            *budget -= drafts;
            left.take(behind, drafts);
        }
    }

    /// Drafts at most `most` tokens after those of a sequence, with their blocks. Returns how many.
    fn draft(&mut self, id: SeqId, most: usize, is_contended: bool, indexing: &mut usize) -> usize {
        let Some(drafting) = self.admitted.drafting.sequences.get_mut(&id) else { return 0 };
        let sequence = &self.sequences[&id];
        let proposed = drafting.propose(sequence, most, indexing);
        let (tokens, held, block_tokens) =
            (sequence.tokens.len(), sequence.blocks.table.len(), self.config.block_tokens);
        let missing = (tokens + proposed).div_ceil(block_tokens).saturating_sub(held);
        // Each running sequence can still get the block that it may need next.
        let may_grow = !is_contended && missing + self.admitted.running.len() <= self.pool.available();
        if missing == 0 || (may_grow && self.grow(id, tokens + proposed)) {
            return proposed;
        }
        let kept = proposed.min(held * block_tokens - tokens);
        if let Some(drafting) = self.admitted.drafting.sequences.get_mut(&id) {
            drafting.step.truncate(if kept == 0 { 0 } else { kept + 1 });
        }
        kept
    }

    /// The tokens of a part that has drafts, once: the last token, then the drafts. `None` for another part, and for a
    /// sequence that has ended.
    pub fn take_drafted(&mut self, part: &StepPart) -> Option<Vec<u32>> {
        self.admitted.drafting.tokens(part)?;
        self.admitted.drafting.sequences.get_mut(&part.id).map(|drafting| std::mem::take(&mut drafting.step))
    }

    /// Records what became of a sequence's drafts, and releases the blocks behind its computed tokens.
    pub fn drafts_verified(&mut self, id: SeqId, drafted: usize, accepted: usize) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let held = sequence.computed.div_ceil(self.config.block_tokens);
        if held < sequence.blocks.table.len() {
            let rejected = sequence.blocks.table.split_off(held);
            self.pool.release(&rejected, Hold::Active);
        }
        let drafting = &mut self.admitted.drafting;
        if let (Some(lookup), Some(drafting)) = (drafting.lookup, drafting.sequences.get_mut(&id)) {
            drafting.pace.verified(drafted, accepted, lookup.drafts());
        }
    }
}

#[cfg(test)]
mod tests;
