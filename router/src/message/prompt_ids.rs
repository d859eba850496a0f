//! The token ids of a prompt.

use std::sync::Arc;

use baton_openai::RawBody;

/// Fields with which an engine computes other tokens than those of `prompt`: fewer, or those around a gap.
const CHANGING: [&str; 3] = ["truncate_prompt_tokens", "suffix", "prompt_embeds"];

/// The token ids of a prompt, as a client or an engine's tokenizer gave them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PromptIds {
    pub ids: Arc<[u32]>,
    /// Engines compute exactly these ids for the request. If false, they come from `/tokenize` for a chat, which lacks
    /// some of a chat's template options.
    pub exact: bool,
}

impl PromptIds {
    /// The ids of the body's `prompt`.
    pub(crate) fn of_prompt(ids: Vec<u32>, body: &RawBody) -> Self {
        Self { exact: keeps_prompt(body), ..Self::exact(ids) }
    }

    /// Ids that engines compute.
    pub(crate) fn exact(ids: Vec<u32>) -> Self {
        Self { ids: ids.into(), exact: true }
    }
}

/// Whether an engine computes the tokens of the body's `prompt`, and no others.
pub(crate) fn keeps_prompt(body: &RawBody) -> bool {
    !CHANGING.iter().any(|name| body.field(name).is_some_and(|value| value != b"null"))
}
