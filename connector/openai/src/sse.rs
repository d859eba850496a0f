//! The server-sent events of the OpenAI dialect: `data:` frames of one line, and `[DONE]`.

use bytes::{BufMut, Bytes, BytesMut};

/// The last frame of every stream.
pub const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");
/// The reply's `content-type`.
pub const CONTENT_TYPE: &str = "text/event-stream; charset=utf-8";

/// Frames one line of JSON.
#[must_use]
pub fn frame(json: &[u8]) -> Bytes {
    debug_assert!(!json.contains(&b'\n'), "a newline would end the data line");
    let mut out = BytesMut::with_capacity(json.len() + 8);
    out.put_slice(b"data: ");
    out.put_slice(json);
    out.put_slice(b"\n\n");
    out.freeze()
}
