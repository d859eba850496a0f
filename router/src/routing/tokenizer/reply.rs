//! The token ids in an engine's reply, checked. Pure.

use serde::Deserialize;

/// Maximum ids of a prompt beyond one per byte of the request: what a chat template adds. Templates with descriptions of
/// tools add a few hundred.
const TEMPLATE_IDS_MAX: usize = 16_384;
/// Bytes of one id in JSON, with its comma and a space, and of the fields around the ids.
const ID_BYTES_MAX: usize = 12;
const OTHER_BYTES_MAX: usize = 64 << 10;

/// The reply of a render path or of `/tokenize`; other fields are skipped.
#[derive(Deserialize)]
struct TokenReply {
    #[serde(alias = "token_ids")]
    tokens: Vec<u32>,
}

/// Maximum ids of the prompt of a request with a body of `bytes`.
fn ids_max(bytes: usize) -> usize {
    bytes.saturating_add(TEMPLATE_IDS_MAX)
}

/// Maximum bytes of the reply about a request with a body of `bytes`.
pub(super) fn bytes_max(bytes: usize) -> usize {
    ids_max(bytes).saturating_mul(ID_BYTES_MAX).saturating_add(OTHER_BYTES_MAX)
}

/// The ids of a reply; `None` if it has none, an id of more than 32 bits, or more than the request can have.
pub(super) fn read(reply: &[u8], bytes: usize) -> Option<Vec<u32>> {
    let TokenReply { tokens } = serde_json::from_slice(reply).ok()?;
    (!tokens.is_empty() && tokens.len() <= ids_max(bytes)).then_some(tokens)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn ids_of_both_forms_are_read_and_hostile_replies_refused() {
        let read = |reply: &Value, bytes| read(reply.to_string().as_bytes(), bytes);
        let rendered =
            json!({"request_id": "r", "token_ids": [1, 2], "sampling_params": {"n": 1}, "features": null});
        assert_eq!(read(&rendered, 100), Some(vec![1, 2]));
        let tokenized = json!({"count": 2, "max_model_len": 8, "tokens": [3, u32::MAX], "token_strs": null});
        assert_eq!(read(&tokenized, 100), Some(vec![3, u32::MAX]));
        for hostile in [
            json!({"tokens": []}),
            json!({"tokens": [1_u64 << 32]}),
            json!({"tokens": [-1]}),
            json!({"tokens": [1.5]}),
            json!({"tokens": ["1"]}),
            json!({"token_ids": null}),
            json!({"tokens": [1], "token_ids": [2]}),
            json!([1, 2]),
            json!({}),
            json!({"tokens": vec![1; TEMPLATE_IDS_MAX + 9]}),
        ] {
            assert_eq!(read(&hostile, 8), None);
        }
        assert!(read(&json!({"tokens": vec![1; TEMPLATE_IDS_MAX + 8]}), 8).is_some());
        let longest = json!({"tokens": vec![u32::MAX; ids_max(8)]}).to_string();
        assert!(longest.len() <= bytes_max(8));
        assert_eq!(bytes_max(usize::MAX), usize::MAX);
    }
}
