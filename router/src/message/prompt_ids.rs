//! The token ids of a prompt.

use std::sync::Arc;

/// The token ids of a prompt, as a client or an engine's tokenizer gave them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PromptIds {
    pub ids: Arc<[u32]>,
    /// Engines compute exactly these ids for the request. If false, they come from `/tokenize` for a chat, which lacks
    /// some of a chat's template options.
    pub exact: bool,
}

impl PromptIds {
    /// Ids that engines compute.
    pub(crate) fn exact(ids: Vec<u32>) -> Self {
        Self { ids: ids.into(), exact: true }
    }
}
