//! A reply as SSE frames. The common part of all chunks is serialized once, so that a token costs one small JSON
//! object.

use bytes::Bytes;
use serde_json::Value;

use super::choice::Choice;
use super::{ChoiceDelta, ReplyHead, Usage};
use crate::request::Endpoint;

/// Bytes of a typical chunk beyond the common part.
const CHUNK_BYTES: usize = 160;

/// Encodes the frames of one reply. It has no state: frames may be encoded in any order, for any choice.
#[derive(Clone, Debug)]
pub struct ChunkEncoder {
    endpoint: Endpoint,
    /// `data: {"id":…,"choices":[`
    start: Vec<u8>,
}

impl ChunkEncoder {
    pub(super) fn new(head: &ReplyHead) -> Self {
        #[derive(serde::Serialize)]
        struct Head<'a> {
            id: &'a str,
            object: &'static str,
            created: u64,
            model: &'a str,
            #[serde(skip_serializing_if = "Option::is_none")]
            system_fingerprint: Option<&'a str>,
            choices: [(); 0],
        }
        let object = match head.endpoint {
            Endpoint::Completions => "text_completion",
            Endpoint::Chat => "chat.completion.chunk",
        };
        let json = super::json(&Head {
            id: &head.id,
            object,
            created: head.created,
            model: &head.model,
            system_fingerprint: head.system_fingerprint.as_deref(),
            choices: [],
        });
        let open = json.strip_suffix(b"]}").expect("ends with the empty choices");
        Self { endpoint: head.endpoint, start: [b"data: ", open].concat() }
    }

    /// Chat: the first frame of each choice, with the role. `None` for completions.
    #[must_use]
    pub fn role(&self, index: u32, prompt_token_ids: Option<&[u32]>) -> Option<Bytes> {
        (self.endpoint == Endpoint::Chat)
            .then(|| self.frame(Some(&Choice::role(index, None)), prompt_token_ids, None, None))
    }

    /// The same for a choice that may begin with reasoning: an empty one announces it. A router that would continue a
    /// broken stream as plain text sees that it cannot.
    #[must_use]
    pub fn reasoning_role(&self, index: u32, prompt_token_ids: Option<&[u32]>) -> Bytes {
        self.frame(Some(&Choice::role(index, Some(""))), prompt_token_ids, None, None)
    }

    /// The addition of one step to a choice. `usage` is for `continuous_usage_stats`. The handoff belongs in the chunk
    /// that finishes a producer's request.
    #[must_use]
    pub fn delta(
        &self,
        delta: &ChoiceDelta<'_>,
        usage: Option<&Usage>,
        kv_transfer_params: Option<&Value>,
    ) -> Bytes {
        let prompt = if self.endpoint == Endpoint::Chat { delta.prompt_token_ids } else { None };
        self.frame(Some(&Choice::delta(self.endpoint, delta)), prompt, usage, kv_transfer_params)
    }

    /// The last chunk for `include_usage`: no choices.
    #[must_use]
    pub fn usage(&self, usage: &Usage) -> Bytes {
        self.frame(None, None, Some(usage), None)
    }

    fn frame(
        &self,
        choice: Option<&Choice<'_>>,
        prompt_token_ids: Option<&[u32]>,
        usage: Option<&Usage>,
        kv_transfer_params: Option<&Value>,
    ) -> Bytes {
        let mut out = Vec::with_capacity(self.start.len() + CHUNK_BYTES);
        out.extend_from_slice(&self.start);
        if let Some(choice) = choice {
            append(&mut out, choice);
        }
        out.push(b']');
        if let Some(ids) = prompt_token_ids {
            out.extend_from_slice(b",\"prompt_token_ids\":");
            append(&mut out, &ids);
        }
        if let Some(usage) = usage {
            out.extend_from_slice(b",\"usage\":");
            append(&mut out, usage);
        }
        if let Some(params) = kv_transfer_params {
            out.extend_from_slice(b",\"kv_transfer_params\":");
            append(&mut out, params);
        }
        out.extend_from_slice(b"}\n\n");
        Bytes::from(out)
    }
}

fn append<T: serde::Serialize>(out: &mut Vec<u8>, value: &T) {
    serde_json::to_writer(out, value).expect("types of this crate serialize, and a Vec takes every write");
}
