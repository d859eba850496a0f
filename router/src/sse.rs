//! Server-sent events on their way through: whole frames pass as they come, a broken one is never passed.
//!
//! An engine writes whole frames, so in the usual case a chunk is passed on untouched. When a chunk ends
//! inside a frame, that end waits for the rest: should the engine die there, the client sees the frames
//! before it, then one typed error, then `[DONE]`, and never half a frame.
//!
//! An engine that fails after its stream has begun says so in the stream: `data: {"error": {...}}`, vLLM's older
//! `data: {"object": "error", ...}`, of responses `data: {"type": "error", ...}`. [`error_in`] finds such an event; whoever passes the stream on decides what it means.

use bytes::{Bytes, BytesMut};
use hyper::StatusCode;
use memchr::memmem;
use serde_json::Value;

/// A frame longer than this is passed on in pieces: a bound on memory is worth more than a clean end.
const FRAME_BYTES_MAX: usize = 1 << 20;

/// One stream's frames.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    tail: BytesMut,
    done: bool,
    inside: bool,
}

impl Frames {
    /// Takes what came and gives what may be passed on; empty when no frame has ended.
    pub(crate) fn pass(&mut self, chunk: Bytes) -> Bytes {
        if self.done {
            return Bytes::new();
        }
        let whole = if self.tail.is_empty() { chunk } else { self.joined(&chunk) };
        let end = match last_frame_end(&whole) {
            Some(end) => end,
            None if whole.len() > FRAME_BYTES_MAX => whole.len(),
            None => 0,
        };
        self.tail.extend_from_slice(&whole[end..]);
        if end > 0 {
            self.inside = !(whole[..end].ends_with(b"\n\n") || whole[..end].ends_with(b"\n\r\n"));
        }
        if let Some(done) = done_end(&whole[..end]) {
            // Nothing that follows means anything.
            self.done = true;
            self.tail.clear();
            return whole.slice(..done);
        }
        whole.slice(..end)
    }

    /// Whether the stream has said `[DONE]`: what comes after it changes nothing.
    pub(crate) fn is_done(&self) -> bool {
        self.done
    }

    /// Whether all that is left is a `[DONE]` without its last line end.
    pub(crate) fn ends_with_done(&self) -> bool {
        !self.inside && self.tail.strip_prefix(b"data:").is_some_and(|said| said.trim_ascii() == b"[DONE]")
    }

    /// Whether a piece of an unfinished frame was passed on, so that a blank line must end it.
    pub(crate) fn is_inside(&self) -> bool {
        self.inside
    }

    /// Whether everything that came was passed on, in whole frames.
    pub(crate) fn is_whole(&self) -> bool {
        self.tail.is_empty() && !self.inside
    }

    fn joined(&mut self, chunk: &[u8]) -> Bytes {
        self.tail.extend_from_slice(chunk);
        std::mem::take(&mut self.tail).freeze()
    }
}

/// An engine's error in the middle of its stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Told {
    /// Where its event begins.
    pub at: usize,
    /// As the engine would have answered; 500 where it does not say.
    pub status: StatusCode,
    /// The event's data.
    pub error: Bytes,
}

/// The first event in whole frames that tells of an error.
pub(crate) fn error_in(frames: &Bytes) -> Option<Told> {
    let mut looked = 0;
    loop {
        // Quotes in a text are escaped, so this is a name or a whole value: few events have to be parsed.
        let found = looked + memmem::find(&frames[looked..], b"\"error\"")?;
        let start = memchr::memrchr(b'\n', &frames[..found]).map_or(0, |newline| newline + 1);
        looked = memchr::memchr2(b'\r', b'\n', &frames[found..]).map_or(frames.len(), |end| found + end);
        let Some(data) = frames[start..looked].strip_prefix(b"data:") else { continue };
        if let Some(status) = told_status(data) {
            let at = last_frame_end(&frames[..start]).unwrap_or(0);
            return Some(Told { at, status, error: frames.slice_ref(data.trim_ascii()) });
        }
    }
}

/// Where the next line begins that has data.
fn next_data(frames: &[u8], from: usize) -> Option<usize> {
    memmem::find(&frames[from..], b"\ndata:").map(|at| from + at + 1)
}

/// What an event's data says as a status, if it tells of an error. vLLM says it in `code`; Baton's engines have names
/// there, and the kind of error says it.
fn told_status(data: &[u8]) -> Option<StatusCode> {
    let body: Value = serde_json::from_slice(data).ok()?;
    let error = match &body["error"] {
        Value::Object(_) => &body["error"],
        Value::String(text) if !text.is_empty() => &body["error"],
        _ if body["object"] == "error" || body["type"] == "error" => &body,
        _ => return None,
    };
    let code = error["code"].as_u64().and_then(|code| u16::try_from(code).ok());
    let kind = match error["type"].as_str().unwrap_or_default() {
        "invalid_request_error" => 400,
        "overloaded_error" => 429,
        "service_unavailable_error" => 503,
        "timeout_error" => 504,
        _ => 500,
    };
    let status = code.filter(|code| (400..600).contains(code)).unwrap_or(kind);
    Some(StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR))
}

/// Whether an event with data has ended; comments that keep a connection alive are none.
pub(crate) fn has_event(bytes: &[u8]) -> bool {
    last_frame_end(bytes).is_some_and(|end| has_data(&bytes[..end]))
}

/// Looks for the end of the first event that has data, in bytes that grow; each of them is looked at once.
#[derive(Debug, Default)]
pub(crate) struct FirstEvent {
    /// Where the line begins that has not ended yet, and how far that was looked.
    line: usize,
    looked: usize,
    has_data: bool,
}

impl FirstEvent {
    /// Just past it, once it is there.
    pub(crate) fn end(&mut self, bytes: &[u8]) -> Option<usize> {
        while let Some(at) = memchr::memchr(b'\n', &bytes[self.looked..]) {
            let end = self.looked + at + 1;
            let line = &bytes[self.line..end];
            let blank = matches!(line, b"\n" | b"\r\n");
            self.has_data |= line.starts_with(b"data:");
            (self.line, self.looked) = (end, end);
            if blank && self.has_data {
                return Some(end);
            }
        }
        self.looked = bytes.len();
        None
    }
}

/// The data of the first line of whole frames that has some.
pub(crate) fn data_of(frames: &Bytes) -> Option<Bytes> {
    let start = if frames.starts_with(b"data:") { 0 } else { next_data(frames, 0)? } + b"data:".len();
    let end = memchr::memchr2(b'\r', b'\n', &frames[start..]).map_or(frames.len(), |end| start + end);
    Some(frames.slice_ref(frames[start..end].trim_ascii()))
}

/// Whether any line has data.
pub(crate) fn has_data(frames: &[u8]) -> bool {
    frames.starts_with(b"data:") || next_data(frames, 0).is_some()
}

/// Just past the last blank line.
fn last_frame_end(bytes: &[u8]) -> Option<usize> {
    let newline = |at: &usize| bytes[*at] == b'\n';
    let ends_frame = |&at: &usize| bytes[..at].ends_with(b"\n") || bytes[..at].ends_with(b"\n\r");
    (1..bytes.len()).rev().filter(newline).find(ends_frame).map(|at| at + 1)
}

/// Just past the event that says `[DONE]`, in whole frames.
fn done_end(frames: &[u8]) -> Option<usize> {
    let mut from = 0;
    loop {
        let at = from + memmem::find(&frames[from..], b"[DONE]")?;
        from = at + b"[DONE]".len();
        let line = frames[..at].trim_ascii_end();
        let begins = line == b"data:" || line.ends_with(b"\ndata:");
        let rest = &frames[from..];
        let ends = rest.len() - rest.trim_ascii_start().len();
        if begins && rest[..ends].contains(&b'\n') {
            // Its blank line belongs to it; what comes behind that does not.
            let newline = |at: &usize| rest[*at] == b'\n';
            let end = (1..rest.len())
                .filter(newline)
                .find(|&at| rest[..at].ends_with(b"\n") || rest[..at].ends_with(b"\n\r"));
            return Some(from + end.map_or(rest.len(), |end| end + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &[u8] = b"data: {\"a\":1}\n\n: keep-alive\n\ndata: {\"b\":2}\r\n\r\ndata: [DONE]\n\n";

    #[test]
    fn every_split_gives_the_same_bytes_and_only_whole_frames() {
        for first in 0..STREAM.len() {
            for second in first..STREAM.len() {
                let mut frames = Frames::default();
                let mut passed = Vec::new();
                for piece in [&STREAM[..first], &STREAM[first..second], &STREAM[second..]] {
                    let out = frames.pass(Bytes::copy_from_slice(piece));
                    let whole = out.is_empty() || out.ends_with(b"\n\n") || out.ends_with(b"\r\n\r\n");
                    assert!(whole, "half a frame at {first}/{second}: {out:?}");
                    passed.extend_from_slice(&out);
                }
                assert_eq!(passed, STREAM, "split at {first} and {second}");
                assert!(frames.is_done() && !frames.is_inside());
            }
        }
    }

    #[test]
    fn whole_frames_pass_without_being_held_or_copied() {
        let chunk = Bytes::from_static(b"data: 1\n\n");
        let passed = Frames::default().pass(chunk.clone());
        assert_eq!(passed.as_ptr(), chunk.as_ptr());
    }

    #[test]
    fn done_is_a_frame_of_its_own_and_not_a_word_in_a_text() {
        let mut frames = Frames::default();
        frames.pass(Bytes::from_static(b"data: {\"text\":\"data: [DONE]\"}\n\n"));
        assert!(!frames.is_done());
        frames.pass(Bytes::from_static(b"data: [DONE]\n"));
        assert!(!frames.is_done());
        frames.pass(Bytes::from_static(b"\n"));
        assert!(frames.is_done());
    }

    #[test]
    fn an_error_is_found_where_it_stands_and_not_in_a_text() {
        let told = |frames: &'static str| error_in(&Bytes::from_static(frames.as_bytes()));
        for good in [
            "data: {\"choices\":[{\"text\":\"data: {\\\"error\\\": 1}\"}]}\n\n",
            "data: {\"id\":\"1\",\"error\":null}\n\ndata: [DONE]\n\n",
            "data: {\"error\": null, \"choices\":[]}\n\n",
            "data: {\"object\":\"chat.completion.chunk\"}\n\n",
            "data: {\"choices\":[{\"text\":\"error\",\"error\":1}]}\n\n",
            "data: {\"type\":\"response.created\",\"response\":{\"error\":null}}\n\n",
            "data: {\"choices\":[],\"error\":\"\"}\n\ndata: {\"choices\":[],\"error\":false}\n\n",
            ": {\"error\":1}\n\n",
            ": data\n\n",
            "data:\n\n",
            "",
        ] {
            assert_eq!(told(good), None, "{good}");
        }
        let first = "data: {\"choices\":[]}\n\n";
        for (event, status) in [
            ("data: {\"error\": {\"message\": \"x\", \"code\": 503}}\n\n", 503),
            ("data:{ \"error\":{\"message\":\"x\",\"code\":\"kv_gone\"}}\r\n\r\n", 500),
            ("data: {\"object\": \"error\", \"message\": \"x\", \"code\": 400}\n\n", 400),
            ("event: error\ndata: {\"error\":{\"code\":7}}\n\n", 500),
            ("data: {\"id\":\"1\",\"choices\":[],\"error\":{\"code\":502}}\n\n", 502),
            ("event: error\r\ndata: {\"type\":\"error\",\"code\":\"server_error\"}\r\n\r\n", 500),
            ("data: {\"error\":\"out of memory\"}\n\n", 500),
            ("data: {\"error\":{\"type\":\"service_unavailable_error\",\"code\":\"draining\"}}\n\n", 503),
        ] {
            for before in ["", first] {
                let frames = Bytes::from([before, event, "data: [DONE]\n\n"].concat());
                let found = error_in(&frames).expect(event);
                assert_eq!((found.at, found.status.as_u16()), (before.len(), status), "{event}");
                assert!(serde_json::from_slice::<Value>(&found.error).is_ok(), "{event}");
            }
        }
    }

    #[test]
    fn what_comes_behind_done_is_not_passed() {
        for (behind, end) in
            [(": ping\n\n", "\n\n"), ("data: {\"a\":1}\n\n: p", "\r\n\r\n"), (": half", "\n\n")]
        {
            let mut frames = Frames::default();
            let done = format!("data: 1\n\ndata: [DONE]{end}");
            assert_eq!(frames.pass(Bytes::from(format!("{done}{behind}"))), done);
            assert!(frames.pass(Bytes::from_static(b"data: 2\n\n")).is_empty());
            assert!(frames.is_done() && frames.is_whole());
        }
        let mut frames = Frames::default();
        assert_eq!(frames.pass(Bytes::from_static(b"data: 1\n\ndata: [DONE]\n")), "data: 1\n\n");
        assert!(!frames.is_done() && frames.ends_with_done());
    }

    #[test]
    fn the_first_event_is_told_from_what_follows_it() {
        let both = Bytes::from_static(b": hi\n\nevent: x\r\ndata: {\"a\": 1} \r\n\r\ndata: 2\n\n");
        let end = FirstEvent::default().end(&both).expect("it has ended");
        assert_eq!(
            (&both[end..], data_of(&both).as_deref()),
            (&b"data: 2\n\n"[..], Some(&b"{\"a\": 1}"[..]))
        );
        for cut in 0..end {
            let mut first = FirstEvent::default();
            assert_eq!(first.end(&both[..cut]), None, "{cut}");
            assert_eq!(first.end(&both), Some(end), "{cut}, and then the rest");
        }
        assert_eq!(data_of(&Bytes::from_static(b": no data\n\n")), None);
    }

    #[test]
    fn a_comment_is_no_event() {
        assert!(!has_event(b": ping\n\n") && !has_event(b": ping\n\ndata: 1\n"));
        assert!(has_event(b": ping\n\ndata: 1\n\n") && has_event(b"event: x\ndata: 1\r\n\r\n"));
    }

    #[test]
    fn a_frame_without_an_end_is_bounded() {
        let mut frames = Frames::default();
        let piece = Bytes::from(vec![b'x'; FRAME_BYTES_MAX]);
        assert!(frames.pass(piece.clone()).is_empty());
        assert_eq!(frames.pass(piece).len(), 2 * FRAME_BYTES_MAX);
        assert!(frames.is_inside());
    }
}
