//! The compiled grammars of recent requests.

use std::collections::VecDeque;

use baton_openai::{JsonWhitespace, OutputConstraint};

use super::compile::CompiledGrammar;

/// Grammars in the cache. Agents use a handful; one takes 0.1 to a few MB.
const ENTRIES_MAX: usize = 32;

/// Bytes of the cached lexers and of their constraints. Hostile regular expressions have lexers of tens of MB.
const CACHE_BYTES_MAX: usize = 64 << 20;

/// Compiled grammars by constraint; the one that was used last is the first.
#[derive(Default)]
pub(super) struct GrammarCache {
    entries: VecDeque<(String, CompiledGrammar)>,
}

impl GrammarCache {
    /// A copy of the grammar with this key.
    pub(super) fn find(&mut self, key: &str) -> Option<CompiledGrammar> {
        let at = self.entries.iter().position(|(known, _)| known == key)?;
        let entry = self.entries.remove(at)?;
        self.entries.push_front(entry);
        Some(self.entries[0].1.copy())
    }

    /// Adds a grammar, unless it alone exceeds the bound. The ones that were used longest ago leave.
    pub(super) fn add(&mut self, key: String, grammar: CompiledGrammar) {
        if key.len().saturating_add(grammar.bytes) > CACHE_BYTES_MAX {
            return;
        }
        // Two threads may have compiled it at the same time.
        self.entries.retain(|(known, _)| *known != key);
        self.entries.push_front((key, grammar));
        while self.entries.len() > ENTRIES_MAX || self.bytes() > CACHE_BYTES_MAX {
            self.entries.pop_back();
        }
    }

    /// Bytes of all entries.
    fn bytes(&self) -> usize {
        self.entries.iter().map(|(key, grammar)| key.len().saturating_add(grammar.bytes)).sum()
    }
}

/// Equal for equal constraints only: each kind has a letter, and JSON keeps the order of its names.
pub(super) fn key(constraint: &OutputConstraint) -> String {
    match constraint {
        OutputConstraint::Json { schema, whitespace: JsonWhitespace::Allowed } => format!("j{schema}"),
        OutputConstraint::Json { schema, whitespace: JsonWhitespace::Omitted } => format!("o{schema}"),
        OutputConstraint::Regex(regex) => format!("r{regex}"),
        OutputConstraint::Choice(choices) => format!("c{choices:?}"),
        OutputConstraint::Grammar(grammar) => format!("g{grammar}"),
    }
}

#[cfg(test)]
mod tests {
    use llguidance::Matcher;

    use super::*;
    use crate::grammar::state::RawMask;

    fn grammar(bytes: usize) -> CompiledGrammar {
        let matcher = Matcher::new(Err(std::io::Error::other("not needed").into()));
        CompiledGrammar { matcher, first: RawMask::complete(8), bytes }
    }

    #[test]
    fn the_cache_is_bounded_in_entries_and_in_bytes() {
        let mut cache = GrammarCache::default();
        for number in 0..=ENTRIES_MAX {
            cache.add(number.to_string(), grammar(1));
            assert!(cache.find("0").is_some(), "it was used after every other");
            if number + 1 == ENTRIES_MAX {
                assert!(cache.find("1").is_some());
            }
        }
        assert_eq!(cache.entries.len(), ENTRIES_MAX);
        assert!(cache.find("0").is_some() && cache.find("1").is_some() && cache.find("2").is_none());
        cache.add("half".into(), grammar(CACHE_BYTES_MAX / 2));
        cache.add("more".into(), grammar(CACHE_BYTES_MAX / 2));
        assert!(cache.find("more").is_some() && cache.find("half").is_none());
        assert!(cache.bytes() <= CACHE_BYTES_MAX);
        cache.add("more".into(), grammar(3));
        assert_eq!(cache.find("more").map(|grammar| grammar.bytes), Some(3));
        cache.add("too large".into(), grammar(CACHE_BYTES_MAX));
        assert_eq!((cache.entries.len(), cache.bytes()), (1, 7));
    }
}
