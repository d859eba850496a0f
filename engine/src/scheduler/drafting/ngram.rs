//! Prompt lookup: drafts of a sequence's next tokens from its own tokens. Pure.
//!
//! ```text
//!   … the cat sat on the mat. … the cat ▌        the last tokens have occurred before:
//!         └─────────┬─────────┘                   the tokens after that place are the draft
//! ```
//!
//! [`NgramIndex`] finds places that end with the same tokens. All places whose last tokens have the same hash form a
//! chain, the latest first. A search looks at [`PLACES_MAX`] places of one chain, so its cost does not depend on the
//! length of the sequence. Memory: 4 bytes for each token, and at most 256 KiB for the beginnings of the chains.
//!
//! The place with the longest match is taken, and of equal ones the latest. vLLM takes the earliest.

/// Limit of the tokens of one draft.
pub const DRAFTS_MAX: usize = 16;

/// Limit of the tokens that are compared at one place.
pub const LOOKUP_MAX: usize = 32;

/// Places of a chain that one search looks at.
const PLACES_MAX: usize = 32;

/// Chains of one sequence.
const CHAINS_MIN: usize = 1 << 8;
const CHAINS_MAX: usize = 1 << 16;

/// How drafts are looked up (vLLM's `ngram`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLookup {
    drafts: usize,
    shortest: usize,
    longest: usize,
}

impl PromptLookup {
    /// At most `drafts` tokens after a place where the last tokens have occurred: at least `shortest` of them, and at
    /// most `longest` are compared. `None` for a number out of range.
    #[must_use]
    pub fn new(drafts: usize, shortest: usize, longest: usize) -> Option<Self> {
        let lengths = (1..=longest).contains(&shortest) && longest <= LOOKUP_MAX;
        (lengths && (1..=DRAFTS_MAX).contains(&drafts)).then_some(Self { drafts, shortest, longest })
    }

    /// Limit of the tokens of a draft.
    #[must_use]
    pub fn drafts(&self) -> usize {
        self.drafts
    }
}

/// The places of one sequence by the tokens before them. A place is the number of tokens before it.
#[derive(Debug)]
pub(super) struct NgramIndex {
    lookup: PromptLookup,
    /// The latest place of each chain; 0 for none. As many chains as the sequence had tokens at first, within bounds.
    latest: Vec<u32>,
    /// For each place from `shortest` on, the one before it in its chain; 0 for none.
    earlier: Vec<u32>,
}

impl NgramIndex {
    /// An empty index. It takes its memory when the first places are added, so a waiting sequence has none.
    pub(super) fn new(lookup: PromptLookup) -> Self {
        Self { lookup, latest: Vec::new(), earlier: Vec::new() }
    }

    /// Adds the places that have a token after them, at most `budget` of them.
    pub(super) fn extend(&mut self, tokens: &[u32], budget: &mut usize) {
        if self.latest.is_empty() {
            self.latest = vec![0; tokens.len().next_power_of_two().clamp(CHAINS_MIN, CHAINS_MAX)];
        }
        let first = self.lookup.shortest + self.earlier.len();
        for place in (first..tokens.len()).take(*budget) {
            let chain = self.chain(&tokens[..place]);
            self.earlier.push(std::mem::replace(&mut self.latest[chain], place as u32));
            *budget -= 1;
        }
    }

    /// Drafts at most `most` tokens after `tokens`. A draft that reaches the end of the tokens continues with itself,
    /// so that a short period is drafted in full length.
    pub(super) fn draft(&self, tokens: &[u32], most: usize) -> Vec<u32> {
        let mut draft = Vec::new();
        let Some(place) = self.find(tokens) else { return draft };
        for source in (place..).take(most.min(self.lookup.drafts)) {
            let next = match tokens.get(source) {
                Some(token) => *token,
                None => draft[source - tokens.len()],
            };
            draft.push(next);
        }
        draft
    }

    /// The latest place with the longest match, among the places that a search looks at.
    fn find(&self, tokens: &[u32]) -> Option<usize> {
        let PromptLookup { shortest, longest, .. } = self.lookup;
        if tokens.len() < shortest || self.latest.is_empty() {
            return None;
        }
        let mut best: Option<(usize, usize)> = None;
        let mut place = self.latest[self.chain(tokens)] as usize;
        for _ in 0..PLACES_MAX {
            if place == 0 {
                break;
            }
            let pairs = tokens[..place].iter().rev().zip(tokens.iter().rev()).take(longest);
            let matched = pairs.take_while(|(ours, last)| ours == last).count();
            if matched >= shortest && best.is_none_or(|(length, _)| matched > length) {
                best = Some((matched, place));
            }
            if matched == longest {
                break;
            }
            place = self.earlier[place - shortest] as usize;
        }
        best.map(|(_, place)| place)
    }

    /// The chain of the place after `before`, which has at least `shortest` tokens.
    fn chain(&self, before: &[u32]) -> usize {
        let last = &before[before.len() - self.lookup.shortest..];
        let mix = |hash: u64, token: &u32| {
            (hash.rotate_left(23) ^ u64::from(*token)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
        };
        let hash = last.iter().fold(0x243F_6A88_85A3_08D3, mix);
        (hash >> 32) as usize & (self.latest.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(drafts: usize, shortest: usize, longest: usize) -> PromptLookup {
        PromptLookup::new(drafts, shortest, longest).expect("in range")
    }

    fn draft(lookup: PromptLookup, tokens: &[u32]) -> Vec<u32> {
        let mut index = NgramIndex::new(lookup);
        let mut budget = tokens.len();
        index.extend(tokens, &mut budget);
        index.draft(tokens, lookup.drafts())
    }

    /// The place by its definition, with every place looked at.
    fn slow(lookup: PromptLookup, tokens: &[u32]) -> Option<usize> {
        let matched = |place: usize| {
            let pairs = tokens[..place].iter().rev().zip(tokens.iter().rev()).take(lookup.longest);
            pairs.take_while(|(ours, last)| ours == last).count()
        };
        let places = (lookup.shortest..tokens.len()).filter(|place| matched(*place) >= lookup.shortest);
        places.max_by_key(|place| (matched(*place), *place))
    }

    #[test]
    fn the_longest_match_is_taken_and_of_equal_ones_the_latest() {
        let two = lookup(2, 1, 3);
        assert_eq!(draft(two, &[5, 1, 7, 8, 9, 1]), [7, 8]);
        assert_eq!(draft(two, &[5, 1, 7, 6, 1, 8, 9, 1]), [8, 9], "the latest");
        assert_eq!(draft(two, &[5, 1, 7, 6, 1, 8, 9, 5, 1]), [7, 6], "the longest");
        assert_eq!(draft(two, &[4, 5, 1, 7, 3, 5, 1, 8, 2, 4, 5, 1]), [7, 3]);
        assert_eq!(draft(lookup(2, 1, 2), &[4, 5, 1, 7, 3, 5, 1, 8, 2, 4, 5, 1]), [8, 2], "two are compared");
        assert_eq!(draft(two, &[1, 2, 3, 4]), [0; 0]);
        assert_eq!(draft(lookup(2, 2, 3), &[5, 1, 7, 8, 9, 1]), [0; 0], "one token is not enough");
        for short in 0..2 {
            assert_eq!(draft(lookup(2, 2, 3), &[1, 2][..short]), [0; 0]);
        }
    }

    #[test]
    fn a_period_is_drafted_beyond_its_end() {
        assert_eq!(draft(lookup(5, 1, 3), &[9, 9]), [9; 5]);
        assert_eq!(draft(lookup(5, 2, 3), &[1, 2, 3, 1, 2, 3, 1, 2]), [3, 1, 2, 3, 1]);
        assert_eq!(draft(lookup(2, 2, 3), &[1, 2, 3, 1, 2, 3, 1, 2]), [3, 1]);
    }

    #[test]
    fn the_index_finds_what_a_search_of_all_places_finds() {
        let mut state = 7_u64;
        let mut random = move |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        let mut found = 0;
        for round in 0..300 {
            let lookup = lookup(3, 1 + random(3) as usize, 3 + random(3) as usize);
            // With 30 or more kinds of tokens, no chain of a short text has more places than a search looks at.
            let kinds = 30 + random(20);
            let tokens: Vec<u32> = (0..10 + random(60)).map(|_| random(kinds) as u32).collect();
            let mut index = NgramIndex::new(lookup);
            // In pieces of any size, as a sequence grows.
            for end in 0..=tokens.len() {
                index.extend(&tokens[..end], &mut (random(3) as usize));
            }
            index.extend(&tokens, &mut 1_000);
            let place = slow(lookup, &tokens);
            assert_eq!(index.find(&tokens), place, "round {round}: {lookup:?} {tokens:?}");
            found += usize::from(place.is_some());
        }
        assert!((30..250).contains(&found), "{found}");
    }

    #[test]
    fn work_and_memory_are_bounded() {
        let (lookup, tokens) = (lookup(4, 1, 4), vec![3; 100_000]);
        let mut index = NgramIndex::new(lookup);
        let mut budget = 4_096;
        index.extend(&tokens, &mut budget);
        assert_eq!((index.earlier.len(), budget), (4_096, 0));
        index.extend(&tokens, &mut 1_000_000);
        assert_eq!((index.earlier.len(), index.latest.len()), (tokens.len() - 1, CHAINS_MAX));
        assert_eq!(index.draft(&tokens, 3), [3; 3]);
        assert_eq!(index.draft(&tokens, 9), [3; 4]);
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        for (drafts, shortest, longest) in [(0, 1, 1), (17, 1, 1), (1, 0, 1), (1, 2, 1), (1, 1, 33)] {
            assert_eq!(PromptLookup::new(drafts, shortest, longest), None, "{drafts} {shortest} {longest}");
        }
        assert!(PromptLookup::new(16, 32, 32).is_some());
    }
}
