//! Stop strings in a stream of text.
//!
//! Text that may be the beginning of a stop string is held back until it is clear that it is not. The stop string that
//! is complete first wins; of several that end at the same position, the longest. The result therefore depends on the
//! text only, not on its pieces, and generation ends with the token that completes a match.
//!
//! One Knuth-Morris-Pratt automaton per string: a byte of text costs amortized constant time per string, for any
//! strings. Matching is by bytes, which is equivalent to characters in UTF-8.

/// Whether the stop string that ends a text stays in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatchedStop {
    /// It stays.
    Kept,
    /// The text ends before it.
    Removed,
}

/// Finds the stop strings of one sequence.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    matched_stop: MatchedStop,
    pending: String,
}

/// Result of a piece of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopStep {
    /// Text that can be sent; may be empty.
    pub text: String,
    /// Index of the found stop string in the request. The rest of the piece is dropped, and text that is pushed
    /// afterwards is a new text.
    pub stop: Option<usize>,
}

#[derive(Clone, Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// `borders[n]`: length of the longest proper border of the first `n + 1` bytes.
    borders: Vec<usize>,
    /// Length of the longest prefix of `bytes` that ends the text so far.
    matched: usize,
}

impl StopMatcher {
    /// A matcher for `stops`, none of them empty.
    #[must_use]
    pub fn new(stops: &[String], matched_stop: MatchedStop) -> Self {
        assert!(stops.iter().all(|stop| !stop.is_empty()), "an empty stop string stops before it starts");
        Self {
            patterns: stops.iter().map(|stop| Pattern::new(stop)).collect(),
            matched_stop,
            pending: String::new(),
        }
    }

    /// Adds text. Returns the text that can be sent, and the stop string that ended it.
    pub fn push(&mut self, piece: &str) -> StopStep {
        if self.patterns.is_empty() {
            return StopStep { text: piece.to_owned(), stop: None };
        }
        for (offset, byte) in piece.bytes().enumerate() {
            if let Some((stop, len)) = self.advance(byte) {
                let end = self.pending.len() + offset + 1;
                let mut text = std::mem::take(&mut self.pending) + piece;
                text.truncate(match self.matched_stop {
                    MatchedStop::Kept => end,
                    MatchedStop::Removed => end - len,
                });
                self.finish();
                return StopStep { text, stop: Some(stop) };
            }
        }
        StopStep { text: self.buffer(piece), stop: None }
    }

    /// Adds text. Returns it without a possible beginning of a stop string.
    fn buffer(&mut self, piece: &str) -> String {
        self.pending.push_str(piece);
        let hold = self.patterns.iter().map(|pattern| pattern.matched).max().unwrap_or(0);
        let rest = self.pending.split_off(self.pending.len() - hold);
        std::mem::replace(&mut self.pending, rest)
    }

    /// Adds text in which no stop string may end (`min_tokens`). Returns the text that can be sent. A stop string that
    /// begins in it may end in text that is pushed later.
    pub fn pass(&mut self, piece: &str) -> String {
        if self.patterns.is_empty() {
            return piece.to_owned();
        }
        for byte in piece.bytes() {
            for pattern in &mut self.patterns {
                if pattern.advance(byte) {
                    pattern.matched = pattern.borders[pattern.matched - 1];
                }
            }
        }
        self.buffer(piece)
    }

    /// Ends the text without a match. Returns the held-back text.
    pub fn finish(&mut self) -> String {
        self.patterns.iter_mut().for_each(|pattern| pattern.matched = 0);
        std::mem::take(&mut self.pending)
    }

    /// Bytes held back.
    #[must_use]
    pub fn pending_bytes(&self) -> usize {
        self.pending.len()
    }

    /// Advances all patterns by one byte. Returns the longest one that is complete.
    fn advance(&mut self, byte: u8) -> Option<(usize, usize)> {
        let mut found: Option<(usize, usize)> = None;
        for (index, pattern) in self.patterns.iter_mut().enumerate() {
            let len = pattern.bytes.len();
            if pattern.advance(byte) && found.is_none_or(|(_, longest)| len > longest) {
                found = Some((index, len));
            }
        }
        found
    }
}

impl Pattern {
    fn new(stop: &str) -> Self {
        let bytes = stop.as_bytes().to_vec();
        let mut borders = vec![0; bytes.len()];
        for end in 1..bytes.len() {
            let mut border = borders[end - 1];
            while border > 0 && bytes[border] != bytes[end] {
                border = borders[border - 1];
            }
            borders[end] = border + usize::from(bytes[border] == bytes[end]);
        }
        Self { bytes, borders, matched: 0 }
    }

    /// Advances by one byte. Returns whether the text ends with the whole pattern; the caller then resets `matched`.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.borders[self.matched - 1];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn strings(stops: &[&str]) -> Vec<String> {
        stops.iter().map(|stop| (*stop).to_owned()).collect()
    }

    /// The same on the whole text at once, by trying every prefix.
    fn naive(text: &str, stops: &[String], include: bool) -> (String, Option<usize>) {
        for end in (0..=text.len()).filter(|end| text.is_char_boundary(*end)) {
            let ending = stops.iter().enumerate().filter(|(_, stop)| text[..end].ends_with(stop.as_str()));
            // The first of the longest. `max_by_key` takes the last, hence the reversal.
            if let Some((index, stop)) = ending.rev().max_by_key(|(_, stop)| stop.len()) {
                let cut = if include { end } else { end - stop.len() };
                return (text[..cut].to_owned(), Some(index));
            }
        }
        (text.to_owned(), None)
    }

    #[test]
    fn text_that_may_begin_a_stop_string_is_held_until_decided() {
        let mut matcher = StopMatcher::new(&strings(&["\nUser:"]), MatchedStop::Removed);
        assert_eq!(matcher.push("Hi\nUs"), StopStep { text: "Hi".into(), stop: None });
        assert_eq!(matcher.push("ual"), StopStep { text: "\nUsual".into(), stop: None });
        assert_eq!(matcher.push(" x\nUser: y"), StopStep { text: " x".into(), stop: Some(0) });
    }

    #[test]
    fn the_first_completed_stop_string_wins_over_one_that_began_earlier() {
        let mut matcher = StopMatcher::new(&strings(&["abcd", "bc"]), MatchedStop::Removed);
        assert_eq!(matcher.push("xabcd"), StopStep { text: "xa".into(), stop: Some(1) });
    }

    #[test]
    fn the_longest_of_stop_strings_that_end_together_wins() {
        let mut matcher = StopMatcher::new(&strings(&["c", "abc", "bc"]), MatchedStop::Kept);
        assert_eq!(matcher.push("xabcy"), StopStep { text: "xabc".into(), stop: Some(1) });
    }

    #[test]
    fn a_match_that_ends_before_min_tokens_does_not_count_and_one_that_only_begins_there_does() {
        let mut matcher = StopMatcher::new(&strings(&["ab"]), MatchedStop::Removed);
        assert_eq!(matcher.pass("xab"), "xab");
        assert_eq!(matcher.push("b"), StopStep { text: "b".into(), stop: None });
        assert_eq!(matcher.pass("xa"), "x");
        assert_eq!(matcher.push("b"), StopStep { text: String::new(), stop: Some(0) });
        // A stop string that ended too early may be the beginning of one that ends later.
        let mut matcher = StopMatcher::new(&strings(&["aba"]), MatchedStop::Kept);
        assert_eq!(matcher.pass("aba"), "ab");
        assert_eq!(matcher.push("ba"), StopStep { text: "aba".into(), stop: Some(0) });
    }

    #[test]
    fn after_a_match_the_matcher_restarts() {
        let mut matcher = StopMatcher::new(&strings(&["aa", "a"]), MatchedStop::Removed);
        assert_eq!(matcher.push("xa").stop, Some(1));
        assert_eq!(matcher.push("aa"), StopStep { text: String::new(), stop: Some(1) });
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn held_text_is_shorter_than_the_longest_stop_string() {
        let mut matcher = StopMatcher::new(&strings(&[&"a".repeat(100)]), MatchedStop::Removed);
        for _ in 0..99 {
            matcher.push("a");
        }
        assert_eq!(matcher.pending_bytes(), 99);
        assert_eq!(matcher.push("b").text.len(), 100);
        assert_eq!(matcher.pending_bytes(), 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn any_cut_into_pieces_gives_what_the_whole_text_gives(
            pieces in prop::collection::vec("[abé🙂]{0,4}", 0..12),
            stops in prop::collection::vec("[abé🙂]{1,5}", 0..4),
            include: bool,
        ) {
            let matched = if include { MatchedStop::Kept } else { MatchedStop::Removed };
            let mut matcher = StopMatcher::new(&stops, matched);
            let (mut text, mut stop) = (String::new(), None);
            for piece in &pieces {
                let step = matcher.push(piece);
                text.push_str(&step.text);
                stop = step.stop;
                if stop.is_some() {
                    break;
                }
                let longest = stops.iter().map(String::len).max().unwrap_or(0);
                prop_assert!(matcher.pending_bytes() < longest.max(1));
            }
            if stop.is_none() {
                text.push_str(&matcher.finish());
            }
            prop_assert_eq!((text, stop), naive(&pieces.concat(), &stops, include));
        }
    }
}
