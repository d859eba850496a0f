//! Adapters, embeddings, and the fields of a request: ends of texts, restrictions of tokens, log-probabilities of
//! prompts, and its turn.

pub(crate) mod adapters;
pub(crate) mod apis;
pub(crate) mod chats;
pub(crate) mod embeddings;
pub(crate) mod examples;
pub(crate) mod order;
pub(crate) mod prompt_scores;
pub(crate) mod restrictions;
pub(crate) mod speculation;
pub(crate) mod stopping;
pub(crate) mod texts;
