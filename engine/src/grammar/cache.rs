//! The compiled grammars of recent requests.

use std::collections::VecDeque;

use baton_openai::{JsonWhitespace, OutputConstraint};

use super::compile::CompiledGrammar;

/// Grammars in the cache. Agents use a handful; one takes 0.1 to a few MB.
const ENTRIES_MAX: usize = 32;

/// Compiled grammars by constraint; the one that was used last is the first.
#[derive(Default)]
pub(super) struct GrammarCache {
    entries: VecDeque<(String, CompiledGrammar)>,
}

impl GrammarCache {
    /// The grammar of a constraint, compiled by `compile` if it is not in the cache.
    pub(super) fn get<E>(
        &mut self,
        constraint: &OutputConstraint,
        compile: impl FnOnce() -> Result<CompiledGrammar, E>,
    ) -> Result<&CompiledGrammar, E> {
        let key = key(constraint);
        let entry = match self.entries.iter().position(|(known, _)| *known == key) {
            Some(at) => self.entries.remove(at).expect("it was found there"),
            None => (key, compile()?),
        };
        self.entries.truncate(ENTRIES_MAX - 1);
        self.entries.push_front(entry);
        Ok(&self.entries[0].1)
    }
}

/// Equal for equal constraints only: each kind has a letter, and JSON keeps the order of its names.
fn key(constraint: &OutputConstraint) -> String {
    match constraint {
        OutputConstraint::Json { schema, whitespace: JsonWhitespace::Allowed } => format!("j{schema}"),
        OutputConstraint::Json { schema, whitespace: JsonWhitespace::Omitted } => format!("o{schema}"),
        OutputConstraint::Regex(regex) => format!("r{regex}"),
        OutputConstraint::Choice(choices) => format!("c{choices:?}"),
        OutputConstraint::Grammar(grammar) => format!("g{grammar}"),
    }
}
