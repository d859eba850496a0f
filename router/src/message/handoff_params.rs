//! Transfer parameters as JSON: the prompt's token ids are added to those of a leg.
//!
//! An engine's `kv_transfer_params` are removed from what a client receives. They name hosts and blocks. A decode engine of
//! vLLM returns them with bidirectional transfers, and `/v1/responses` in its last event.

use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;

static PARAMS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"kv_transfer_params\""));

/// The member of a reply, and of transfer parameters, that contains the prompt's token ids.
pub(crate) const PROMPT_IDS: &str = "prompt_token_ids";

/// Transfer parameters with the prompt's token ids, which vLLM's engines use instead of a chat's messages. `None` without
/// ids, or if the parameters have some.
pub(crate) fn with_prompt_ids(params: &str, ids: &[u32]) -> Option<String> {
    let members = params.trim_start().strip_prefix('{')?;
    let is_usable = !ids.is_empty() && !params.contains(PROMPT_IDS);
    is_usable.then(|| format!("{{\"{PROMPT_IDS}\":{},{members}", serde_json::json!(ids)))
}

/// The bytes with `null` in place of each value of `kv_transfer_params`: whole JSON, or whole frames of a stream. Bytes
/// without such a value are returned unchanged, without a copy.
pub(crate) fn without_params(bytes: Bytes) -> Bytes {
    let (mut out, mut from, mut at) = (BytesMut::new(), 0, 0);
    // Inside a JSON string the quotes of the name would be escaped.
    while let Some(found) = PARAMS.find(&bytes[at..]) {
        at += found + PARAMS.needle().len();
        let Some(start) = value_start(&bytes, at) else { continue };
        if bytes[start..].starts_with(b"null") {
            continue;
        }
        at = value_end(&bytes, start);
        out.extend_from_slice(&bytes[from..start]);
        out.extend_from_slice(b"null");
        from = at;
    }
    if from == 0 {
        return bytes;
    }
    out.extend_from_slice(&bytes[from..]);
    out.freeze()
}

/// The last value of `kv_transfer_params` in whole JSON, or in whole frames of a stream.
pub(crate) fn last_params(bytes: &[u8]) -> Option<&[u8]> {
    let found = PARAMS.find_iter(bytes).filter_map(|at| value_start(bytes, at + PARAMS.needle().len()));
    let start = found.last()?;
    Some(&bytes[start..value_end(bytes, start)])
}

/// The start of the value behind a name, if it is a name.
fn value_start(bytes: &[u8], at: usize) -> Option<usize> {
    let blank = |at: usize| at + bytes[at..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
    let colon = blank(at);
    (bytes.get(colon) == Some(&b':')).then(|| blank(colon + 1))
}

/// The end of the value that begins here, or of the bytes.
fn value_end(bytes: &[u8], start: usize) -> usize {
    let (mut depth, mut in_string, mut is_escaped) = (0_usize, false, false);
    for (at, byte) in bytes.iter().enumerate().skip(start) {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_string => is_escaped = true,
            b'"' => {
                in_string = !in_string;
                if !in_string && depth == 0 {
                    return at + 1;
                }
            }
            _ if in_string => {}
            b'{' | b'[' => depth += 1,
            b'}' | b']' | b',' if depth == 0 => return at,
            b'}' | b']' => {
                depth -= 1;
                if depth == 0 {
                    return at + 1;
                }
            }
            _ => {}
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_of_the_params_is_removed_and_nothing_else() {
        for (text, expected) in [
            (
                r#"{"a":1,"kv_transfer_params":{"h":["}\"",{}]},"b":2}"#,
                r#"{"a":1,"kv_transfer_params":null,"b":2}"#,
            ),
            (r#"{"kv_transfer_params" : "x\"y" }"#, r#"{"kv_transfer_params" : null }"#),
            (r#"{"kv_transfer_params":7}"#, r#"{"kv_transfer_params":null}"#),
            (
                "data: {\"response\":{\"kv_transfer_params\":{\"h\":1}}}\n\ndata: {\"kv_transfer_params\":[1]}\n\n",
                "data: {\"response\":{\"kv_transfer_params\":null}}\n\ndata: {\"kv_transfer_params\":null}\n\n",
            ),
            (r#"{"kv_transfer_params":{"cut"#, r#"{"kv_transfer_params":null"#),
        ] {
            assert_eq!(without_params(Bytes::from(text)), expected.as_bytes(), "{text}");
        }
        for text in [
            r#"{"kv_transfer_params":null}"#,
            r#"{"text":"\"kv_transfer_params\":{}"}"#,
            r#"{"name":"kv_transfer_params"}"#,
            "",
        ] {
            let bytes = Bytes::copy_from_slice(text.as_bytes());
            assert_eq!(without_params(bytes.clone()).as_ptr(), bytes.as_ptr(), "{text}");
        }
    }
}
