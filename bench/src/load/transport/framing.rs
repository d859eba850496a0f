//! Incremental parser of a response's framing: head, then a body by length, by chunks or until the end. Pure.
//!
//! ```text
//!  Head ─▶ Length(n) ─────────────────────────────▶ Done
//!    │ ├─▶ Chunk: Size ─▶ Data ─▶ DataEnd ─▶ Size … ─▶ Trailer ─▶ Done
//!    │ └─▶ UntilEnd ─────────────────── end() ────▶ Done
//!    └──── 1xx: the next head
//! ```

use std::time::Duration;

use crate::load::limits::{CHUNK_LINE_BYTES_MAX, HEAD_BYTES_MAX, HEADERS_MAX};

/// Why bytes are no response.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HttpError {
    #[error("the head is no HTTP/1.1: {0}")]
    Head(String),
    #[error("the head has no end within {HEAD_BYTES_MAX} bytes")]
    HeadTooLong,
    #[error("expected exactly one of Content-Length and Transfer-Encoding")]
    Framing,
    #[error("a chunk is not framed as one")]
    Chunk,
    #[error("the answer is longer than {0} bytes")]
    TooLong(usize),
    #[error("the connection ended in the middle of the answer's {0}")]
    Cut(&'static str),
}

/// The relevant parts of a response head.
#[derive(Clone, Debug, Default)]
pub(crate) struct Head {
    pub(crate) status: u16,
    /// Whether the body is a stream of events.
    pub(crate) events: bool,
    pub(crate) request_id: Option<String>,
    /// Whether the connection may be reused.
    pub(crate) keep: bool,
    /// `x-should-retry`.
    pub(crate) should_retry: Option<bool>,
    /// `retry-after-ms`, or `retry-after` in seconds.
    pub(crate) retry_after: Option<Duration>,
}

enum State {
    Head,
    Length(u64),
    ChunkSize,
    ChunkData(u64),
    ChunkDataEnd,
    Trailer,
    UntilEnd,
    Done,
}

/// Reads one response.
pub(crate) struct ResponseReader {
    state: State,
    /// The received part of a head, or of a line between chunks.
    pending: Vec<u8>,
    head: Option<Head>,
    /// Bytes of the body.
    bytes: usize,
    bytes_max: usize,
    /// Whether bytes arrived after the end.
    surplus: bool,
}

impl ResponseReader {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self { state: State::Head, pending: Vec::new(), head: None, bytes: 0, bytes_max, surplus: false }
    }

    pub(crate) fn head(&self) -> Option<&Head> {
        self.head.as_ref()
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Whether the connection can be reused: the response is complete and nothing came after it.
    pub(crate) fn may_keep(&self) -> bool {
        self.is_done() && !self.surplus && self.head.as_ref().is_some_and(|head| head.keep)
    }

    /// Takes received bytes and appends those of the body.
    pub(crate) fn feed(&mut self, mut input: &[u8], body: &mut Vec<u8>) -> Result<(), HttpError> {
        while !input.is_empty() {
            match self.state {
                State::Head => input = self.feed_head(input)?,
                State::Length(left) => {
                    input = self.take(left, input, body)?;
                    if let State::Length(0) = self.state {
                        self.state = State::Done;
                    }
                }
                State::ChunkData(left) => {
                    input = self.take(left, input, body)?;
                    if let State::ChunkData(0) = self.state {
                        self.state = State::ChunkDataEnd;
                    }
                }
                State::UntilEnd => input = self.take(u64::MAX, input, body)?,
                State::ChunkSize | State::ChunkDataEnd | State::Trailer => input = self.feed_line(input)?,
                State::Done => {
                    self.surplus = true;
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// The server has ended the connection.
    pub(crate) fn end(&mut self) -> Result<(), HttpError> {
        match self.state {
            State::UntilEnd | State::Done => {
                self.state = State::Done;
                Ok(())
            }
            State::Head => Err(HttpError::Cut("head")),
            _ => Err(HttpError::Cut("body")),
        }
    }

    /// Moves up to `left` bytes into the body. Returns the rest of the input.
    fn take<'a>(&mut self, left: u64, input: &'a [u8], body: &mut Vec<u8>) -> Result<&'a [u8], HttpError> {
        let count = usize::try_from(left).unwrap_or(usize::MAX).min(input.len());
        self.bytes = self.bytes.saturating_add(count);
        if self.bytes > self.bytes_max {
            return Err(HttpError::TooLong(self.bytes_max));
        }
        body.extend_from_slice(&input[..count]);
        match &mut self.state {
            State::Length(left) | State::ChunkData(left) => *left -= count as u64,
            _ => {}
        }
        Ok(&input[count..])
    }

    fn feed_head<'a>(&mut self, input: &'a [u8]) -> Result<&'a [u8], HttpError> {
        let before = self.pending.len();
        let room = (HEAD_BYTES_MAX + 1).saturating_sub(before).min(input.len());
        self.pending.extend_from_slice(&input[..room]);
        // A head ends with a line. Without a new line it is not parsed again, as for a head that arrives byte by
        // byte.
        if self.pending.len() <= HEAD_BYTES_MAX && memchr::memchr(b'\n', input).is_none() {
            return Ok(&input[room..]);
        }
        let mut lines = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut parsed = httparse::Response::new(&mut lines);
        match parsed.parse(&self.pending) {
            Err(error) => Err(HttpError::Head(error.to_string())),
            Ok(httparse::Status::Partial) if self.pending.len() > HEAD_BYTES_MAX => {
                Err(HttpError::HeadTooLong)
            }
            Ok(httparse::Status::Partial) => Ok(&input[room..]),
            Ok(httparse::Status::Complete(length)) => {
                let (head, state) = understand(&parsed, self.bytes_max)?;
                self.pending.clear();
                // An interim response: the final one follows.
                if !(100..200).contains(&head.status) || head.status == 101 {
                    self.state = state;
                    self.head = Some(head);
                }
                Ok(&input[length - before..])
            }
        }
    }

    fn feed_line<'a>(&mut self, input: &'a [u8]) -> Result<&'a [u8], HttpError> {
        let end = memchr::memchr(b'\n', input).map_or(input.len(), |at| at + 1);
        self.pending.extend_from_slice(&input[..end]);
        if self.pending.len() > CHUNK_LINE_BYTES_MAX {
            return Err(HttpError::Chunk);
        }
        if let Some(line) = self.pending.strip_suffix(b"\n") {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            self.state = match self.state {
                State::ChunkSize => match chunk_size(line)? {
                    0 => State::Trailer,
                    size if size > self.bytes_max as u64 => return Err(HttpError::TooLong(self.bytes_max)),
                    size => State::ChunkData(size),
                },
                State::Trailer if line.is_empty() => State::Done,
                State::Trailer => State::Trailer,
                _ if line.is_empty() => State::ChunkSize,
                _ => return Err(HttpError::Chunk),
            };
            self.pending.clear();
        }
        Ok(&input[end..])
    }
}

fn chunk_size(line: &[u8]) -> Result<u64, HttpError> {
    let digits = line.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
    let text = std::str::from_utf8(digits).map_err(|_| HttpError::Chunk)?;
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(HttpError::Chunk);
    }
    u64::from_str_radix(text, 16).map_err(|_| HttpError::Chunk)
}

fn understand(parsed: &httparse::Response<'_, '_>, bytes_max: usize) -> Result<(Head, State), HttpError> {
    let status = parsed.code.unwrap_or_default();
    let mut head = Head { status, keep: parsed.version == Some(1), ..Head::default() };
    let (mut length, mut chunked) = (None, false);
    let mut after_ms = None;
    for line in parsed.headers.iter() {
        let value = String::from_utf8_lossy(line.value);
        let value = value.trim();
        let is = |name: &str| line.name.eq_ignore_ascii_case(name);
        if is("content-length") {
            let declared = value.bytes().all(|byte| byte.is_ascii_digit()).then(|| value.parse::<u64>().ok());
            let declared = declared.flatten().ok_or(HttpError::Framing)?;
            if length.replace(declared).is_some_and(|before| before != declared) {
                return Err(HttpError::Framing);
            }
        } else if is("transfer-encoding") {
            if !value.eq_ignore_ascii_case("chunked") || chunked {
                return Err(HttpError::Framing);
            }
            chunked = true;
        } else if is("connection") {
            let closes = value.split(',').any(|word| word.trim().eq_ignore_ascii_case("close"));
            head.keep &= !closes;
        } else if is("content-type") {
            let kind = value.split(';').next().unwrap_or_default().trim();
            head.events = kind.eq_ignore_ascii_case("text/event-stream");
        } else if is("x-request-id") {
            head.request_id = Some(value.chars().take(256).collect());
        } else if is("x-should-retry") {
            head.should_retry = value.parse().ok();
        } else if is("retry-after-ms") {
            after_ms = value.parse::<f64>().ok().map(|ms| ms / 1_000.0);
        } else if is("retry-after") {
            head.retry_after = value.parse::<f64>().ok().and_then(seconds);
        }
    }
    head.retry_after = after_ms.and_then(seconds).or(head.retry_after);
    let state = match (length, chunked) {
        _ if matches!(status, 204 | 304) => State::Done,
        (Some(_), true) => return Err(HttpError::Framing),
        (None, true) => State::ChunkSize,
        (Some(0), false) => State::Done,
        (Some(length), false) if length > bytes_max as u64 => return Err(HttpError::TooLong(bytes_max)),
        (Some(length), false) => State::Length(length),
        (None, false) => {
            head.keep = false;
            State::UntilEnd
        }
    };
    Ok((head, state))
}

fn seconds(seconds: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(parts: &[&[u8]]) -> Result<(ResponseReader, Vec<u8>), HttpError> {
        let (mut reader, mut body) = (ResponseReader::new(1_000), Vec::new());
        for part in parts {
            reader.feed(part, &mut body)?;
        }
        Ok((reader, body))
    }

    const CHUNKED: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
        Transfer-Encoding: chunked\r\nX-Request-Id: r-1\r\n\r\n5;ext=1\r\nhello\r\n1\r\n \r\nA\r\n0123456789\r\n0\r\nx-t: 1\r\n\r\n";

    #[test]
    fn chunks_are_parsed_at_any_split() {
        for cut in 0..=CHUNKED.len() {
            let (first, second) = CHUNKED.split_at(cut);
            let (reader, body) = read(&[first, second]).unwrap_or_else(|error| panic!("{cut}: {error}"));
            assert_eq!(body, b"hello 0123456789", "{cut}");
            assert!(reader.may_keep(), "{cut}");
            let head = reader.head().expect("a head");
            assert_eq!((head.status, head.events, head.request_id.as_deref()), (200, true, Some("r-1")));
        }
        let single: Vec<&[u8]> = CHUNKED.chunks(1).collect();
        assert_eq!(read(&single).map(|(_, body)| body), Ok(b"hello 0123456789".to_vec()));
    }

    #[test]
    fn a_body_ends_at_the_length_of_its_head() {
        let (reader, body) = read(&[b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"]).expect("an answer");
        assert!(reader.may_keep() && body == b"ok");
        let (reader, body) =
            read(&[b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1"]).expect("an answer");
        assert!(reader.is_done() && !reader.may_keep() && body == b"ok", "bytes after the end");
        let (mut reader, body) = read(&[b"HTTP/1.1 200 OK\r\n\r\nto the end"]).expect("an answer");
        assert!(!reader.is_done() && reader.end().is_ok() && reader.is_done() && !reader.may_keep());
        assert_eq!(body, b"to the end");
        let (reader, _) =
            read(&[b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"]).expect("one");
        assert!(reader.is_done() && !reader.may_keep());
    }

    #[test]
    fn retry_headers_are_parsed() {
        let (reader, _) = read(&[
            b"HTTP/1.1 429 Slow\r\nretry-after: 2\r\nretry-after-ms: 1500\r\nx-should-retry: false\r\ncontent-length: 0\r\n\r\n",
        ])
        .expect("an answer");
        let head = reader.head().expect("a head");
        assert_eq!((head.retry_after, head.should_retry), (Some(Duration::from_millis(1_500)), Some(false)));
        let (reader, _) =
            read(&[b"HTTP/1.1 503 No\r\nretry-after: -1\r\ncontent-length: 0\r\n\r\n"]).expect("one");
        assert_eq!(reader.head().expect("a head").retry_after, None);
    }

    #[test]
    fn hostile_framing_is_an_error() {
        for bad in [
            &b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"[..],
            b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
            b"SSH-2.0-OpenSSH\r\n",
        ] {
            assert!(read(&[bad]).is_err(), "{}", String::from_utf8_lossy(bad));
        }
        let too_long = HttpError::TooLong(1_000);
        for bad in [
            &b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n"[..],
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        ] {
            assert_eq!(read(&[bad]).err(), Some(too_long.clone()), "{}", String::from_utf8_lossy(bad));
        }
        let endless =
            [&b"HTTP/1.1 200 OK\r\n"[..], &b"x: y\r\n".repeat(10)[..], &[b'a'; HEAD_BYTES_MAX][..]].concat();
        assert_eq!(read(&[&endless]).err(), Some(HttpError::HeadTooLong));
        let line =
            [&b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;"[..], &[b'a'; CHUNK_LINE_BYTES_MAX]]
                .concat();
        assert_eq!(read(&[&line]).err(), Some(HttpError::Chunk));
        let until_end = [&b"HTTP/1.1 200 OK\r\n\r\n"[..], &[b'a'; 1_001]].concat();
        assert_eq!(read(&[&until_end]).err(), Some(too_long));
        let (mut reader, _) = read(&[b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab"]).expect("so far");
        assert_eq!(reader.end(), Err(HttpError::Cut("body")));
    }
}
