//! Server-sent events of chats and of translations. Boundaries are those of the HTML standard (9.2.6): LF, CRLF or CR
//! ends a line, a blank line ends an event, and the values of its `data` fields are joined by LF.

use std::borrow::Cow;

use bytes::{Bytes, BytesMut};
use memchr::memchr2;
use serde_json::Value;

use super::chat_reply::{StreamUsage, untranslatable};
use crate::error::ApiError;

const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// Lines up to and including a blank one.
struct Frame<'a> {
    /// The data of its event; `None` for a comment.
    data: Option<Cow<'a, [u8]>>,
    /// Where it ends in all bytes.
    end: usize,
}

/// A translation of the events of a chat's stream. Each method adds events of its own to `out`.
pub(super) trait ChatEvents {
    /// A comment keeps the connection alive.
    fn comment(&mut self, out: &mut BytesMut);

    /// The usage of the stream. That of a chunk is read before the chunk.
    fn usage(&mut self) -> &mut StreamUsage;

    /// A chunk of the chat.
    ///
    /// # Errors
    /// 502 for a chunk that cannot be translated.
    fn chunk(&mut self, chunk: &Value, out: &mut BytesMut) -> Result<(), ApiError>;

    /// `[DONE]`.
    ///
    /// # Errors
    /// 502 if the response is not complete.
    fn finish(&mut self, out: &mut BytesMut) -> Result<(), ApiError>;
}

/// Translates whole frames. After an error `out` has the events of what came before it.
///
/// # Errors
/// 502 for a chunk that cannot be translated, or a stream that ends early.
pub(super) fn translate(
    stream: &mut impl ChatEvents,
    bytes: &[u8],
    out: &mut BytesMut,
) -> Result<(), ApiError> {
    let mut read = 0;
    for frame in frames(bytes) {
        read = frame.end;
        match frame.data {
            None => stream.comment(out),
            Some(data) if data.trim_ascii() == b"[DONE]" => stream.finish(out)?,
            Some(data) => {
                let chunk: Option<Value> = serde_json::from_slice(&data).ok().filter(Value::is_object);
                let chunk = chunk.ok_or_else(untranslatable)?;
                stream.usage().read(&chunk);
                stream.chunk(&chunk, out)?;
            }
        }
    }
    // The rest is a part of a frame that is too long for the buffer.
    if read == bytes.len() { Ok(()) } else { Err(untranslatable()) }
}

/// The whole frames at the beginning of some bytes.
fn frames(bytes: &[u8]) -> impl Iterator<Item = Frame<'_>> {
    let mut at = if bytes.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 };
    std::iter::from_fn(move || {
        let mut data: Option<Cow<'_, [u8]>> = None;
        loop {
            let rest = &bytes[at..];
            let length = memchr2(b'\r', b'\n', rest)?;
            let line = &rest[..length];
            at += length + if rest[length..].starts_with(b"\r\n") { 2 } else { 1 };
            if line.is_empty() {
                return Some(Frame { data, end: at });
            }
            let Some(value) = data_of(line) else { continue };
            data = Some(match data {
                None => Cow::Borrowed(value),
                Some(before) => Cow::Owned([&before, b"\n" as &[u8], value].concat()),
            });
        }
    })
}

/// The value of a line with the field `data`, without one blank before it.
fn data_of(line: &[u8]) -> Option<&[u8]> {
    match line.strip_prefix(b"data")? {
        [b':', b' ', value @ ..] | [b':', value @ ..] => Some(value),
        [] => Some(b""),
        _ => None,
    }
}

/// An event that is named by its `type`.
pub(super) fn event(data: &Value) -> Bytes {
    format!("event: {}\ndata: {data}\n\n", data["type"].as_str().unwrap_or_default()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_end_at_blank_lines_however_lines_end() {
        let read = |text: &str| -> Vec<Option<String>> {
            let text_of = |data: Cow<'_, [u8]>| String::from_utf8_lossy(&data).into_owned();
            frames(text.as_bytes()).map(|frame| frame.data.map(text_of)).collect()
        };
        let data = |text: &str| Some(text.to_owned());
        for end in ["\n", "\r\n", "\r"] {
            let lines = ["data: a", "", ": ka", "", "event: x", "data:b", "data: c", "id: 7", ""];
            let text: String = lines.iter().flat_map(|line| [*line, end]).collect();
            assert_eq!(read(&text), [data("a"), None, data("b\nc")], "{end:?}");
            assert_eq!(frames(text.as_bytes()).last().map(|frame| frame.end), Some(text.len()));
            let cut = format!("{text}data: d{end}");
            assert_eq!(frames(cut.as_bytes()).last().map(|frame| frame.end), Some(text.len()), "cut");
        }
        assert_eq!(read("\u{feff}data: a\n\ndatax: b\n\n"), [data("a"), None]);
        assert!(read("").is_empty());
    }
}
