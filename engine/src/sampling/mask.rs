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
