//! A set of tokens, one bit for each token of the vocabulary.

/// The tokens that may be chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenMask {
    /// Bit `id % 32` of word `id / 32`. Tokens beyond the words are not in the set.
    words: Vec<u32>,
}

impl TokenMask {
    /// The set of `ids`, which are below `vocab`. Others are left out.
    #[must_use]
    pub fn of(ids: &[u32], vocab: usize) -> Self {
        let mut mask = Self::new(vec![0; vocab.div_ceil(32)]);
        ids.iter().for_each(|id| mask.set(*id, true));
        mask
    }

    /// The set with these words, lowest ids first. Ids beyond the words are not in it.
    #[must_use]
    pub fn new(words: Vec<u32>) -> Self {
        Self { words }
    }

    /// Whether a token may be chosen.
    #[must_use]
    pub fn permits(&self, token: u32) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Permits or forbids a token. An id beyond the words stays forbidden.
    pub fn set(&mut self, token: u32, permitted: bool) {
        let Some(word) = self.words.get_mut(token as usize / 32) else { return };
        let bit = 1 << (token % 32);
        *word = if permitted { *word | bit } else { *word & !bit };
    }

    /// Whether no token may be chosen.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// Sets the logits of all other tokens to minus infinity.
    pub(super) fn apply(&self, row: &mut [f32]) {
        for (index, chunk) in row.chunks_mut(32).enumerate() {
            match self.words.get(index).copied().unwrap_or(0) {
                u32::MAX => {}
                0 => chunk.fill(f32::NEG_INFINITY),
                word => {
                    let excluded = chunk.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
                    excluded.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::{
        NoCandidate, SampledToken, SamplingParams, SamplingRow, SamplingScratch, TokenCounts, TokenPosition,
        sample,
    };

    fn position(generated: u32) -> TokenPosition {
        TokenPosition { position: 10 + u64::from(generated), generated }
    }

    fn row(vocab: usize) -> Vec<f32> {
        (0..vocab).map(|id| (id * 37 % 101) as f32 / 10.0).collect()
    }

    fn masked(
        logits: &[f32],
        mask: &TokenMask,
        params: &SamplingParams,
        position: TokenPosition,
    ) -> Result<SampledToken, NoCandidate> {
        let counts = TokenCounts::default();
        let row = SamplingRow { params, counts: &counts, output: &[], position, mask: Some(mask) };
        row.sample(logits, &mut SamplingScratch::default())
    }

    #[test]
    fn only_permitted_tokens_are_drawn_for_any_temperature() {
        let (logits, permitted) = (row(70), [3, 31, 32, 64, 69]);
        let mask = TokenMask::of(&permitted, 70);
        let mut seen = std::collections::BTreeSet::new();
        for generated in 0..400 {
            let temperature = [0.0, 0.7, 1.0, 50.0][generated as usize % 4];
            let params = SamplingParams { temperature, seed: 7, ..SamplingParams::default() };
            let drawn = masked(&logits, &mask, &params, position(generated)).expect("a token");
            assert!(permitted.contains(&drawn.token), "{}", drawn.token);
            seen.insert(drawn.token);
        }
        assert_eq!(seen.len(), permitted.len(), "a flat distribution reaches all of them");
    }

    #[test]
    fn a_mask_that_permits_all_changes_nothing_and_the_log_probabilities_are_the_models_own() {
        let logits = row(64);
        let params =
            SamplingParams { temperature: 0.9, seed: 3, logprobs: Some(4), ..SamplingParams::default() };
        let (counts, mut scratch) = (TokenCounts::default(), SamplingScratch::default());
        let free = sample(&logits, &params, &counts, position(0), &mut scratch).expect("a token");
        let all = TokenMask::new(vec![u32::MAX; 2]);
        assert_eq!(masked(&logits, &all, &params, position(0)), Ok(free.clone()));
        let best = free.logprobs.expect("asked for").top;
        let forced = masked(&logits, &TokenMask::of(&[5], 64), &params, position(0)).expect("a token");
        assert_eq!(forced.token, 5);
        assert_eq!(forced.logprobs.expect("asked for").top, best, "of the row before the mask");
    }

    #[test]
    fn a_mask_keeps_exactly_its_tokens_whatever_the_vocabulary() {
        for vocab in [1, 31, 32, 33, 100] {
            let ids = [0, 30, 31, 32, 64, 99, 200];
            let mask = TokenMask::of(&ids, vocab);
            // A row may be longer than the mask: tokens without a bit are excluded.
            let mut row = vec![1.0; vocab + 40];
            mask.apply(&mut row);
            for (id, logit) in row.iter().enumerate() {
                let kept = ids.contains(&(id as u32)) && id < vocab.next_multiple_of(32);
                assert_eq!((*logit == 1.0, mask.permits(id as u32)), (kept, kept), "{id} of {vocab}");
            }
            assert_eq!((TokenMask::new(mask.words.clone()), mask.is_empty()), (mask, false));
        }
    }
}
