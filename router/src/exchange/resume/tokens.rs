//! The tokens of a stream: those of its prompt, and those of its response that several engines computed.

use serde_json::{Value, json};

use crate::message::usage::Usage;

/// Limit on the recorded tokens of a prompt and a response.
const TOKENS_MAX: usize = 1 << 20;

/// The recorded tokens of a stream.
#[derive(Debug, Default)]
pub(crate) struct StreamTokens {
    pub(super) prompt: Option<Vec<u32>>,
    /// Tokens whose text was sent.
    pub(super) sent: Vec<u32>,
    /// Later tokens, whose text the engine still holds back.
    pub(super) held_back: Vec<u32>,
    /// Tokens of the response that earlier engines computed.
    earlier: usize,
}

impl StreamTokens {
    /// Records that the text of all tokens was sent.
    pub(super) fn mark_sent(&mut self) {
        self.sent.append(&mut self.held_back);
    }

    /// Records that another engine continues after the sent tokens.
    pub(super) fn mark_continued(&mut self) {
        self.earlier = self.sent.len();
    }

    /// Whether the response is longer than the record may be.
    pub(super) fn is_too_long(&self) -> bool {
        self.completion() > TOKENS_MAX
    }

    fn completion(&self) -> usize {
        self.sent.len() + self.held_back.len()
    }

    /// Rewrites the usage of a frame to that of the whole response.
    pub(super) fn rewrite_usage(&self, usage: &mut Value) {
        let (Some(prompt), 1..) = (&self.prompt, self.earlier) else { return };
        let completion = usage["completion_tokens"].as_u64().unwrap_or(0) + self.earlier as u64;
        usage["prompt_tokens"] = json!(prompt.len());
        usage["completion_tokens"] = json!(completion);
        usage["total_tokens"] = json!(prompt.len() as u64 + completion);
        // Only the continuing engine's part of drafts and reasoning.
        if let Some(fields) = usage.as_object_mut() {
            fields.remove("completion_tokens_details");
        }
    }

    /// The usage of the whole response, from that of the continuing engine.
    pub(crate) fn total_usage(&self, usage: Usage) -> Usage {
        let (Some(prompt), 1..) = (&self.prompt, self.earlier) else { return usage };
        let (prompt, before) = (prompt.len() as u64, self.earlier as u64);
        let completion = usage.completion.saturating_add(before);
        Usage { prompt, cached: usage.cached.min(prompt), completion }
    }

    /// The usage of a response that lacks only its end.
    pub(crate) fn partial_usage(&self) -> Option<Usage> {
        let completion = self.completion() as u64;
        self.prompt.as_ref().map(|prompt| Usage { prompt: prompt.len() as u64, cached: 0, completion })
    }

    /// Number of tokens in the prompt of a continuation. Never more than the context.
    pub(crate) fn count(&self) -> usize {
        self.prompt.as_ref().map_or(0, Vec::len) + self.sent.len()
    }
}

/// Token ids of a frame; `None` if the value contains anything else, or too many.
pub(super) fn token_ids(ids: &Value) -> Option<Vec<u32>> {
    let read = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    ids.as_array().filter(|ids| ids.len() <= TOKENS_MAX)?.iter().map(read).collect()
}
