//! Parser of the head of an engine's reply: the status, the length of the body, and the few headers that the
//! router uses. Other headers are dropped.
//!
//! Pure: bytes in, a head out. A reply whose length can be read in two ways is refused.

use std::mem::MaybeUninit;
use std::time::{Duration, SystemTime};

use hyper::StatusCode;
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};

use super::content_coding::Coding;

/// Maximum bytes of a reply's head, with all 1xx heads before it.
pub(super) const BYTES_MAX: usize = 64 << 10;
/// Maximum header fields of a reply.
const FIELDS_MAX: usize = 100;
/// Upper bound of an engine's `Retry-After`.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);
/// Content types that engines usually send. They are not copied.
const USUAL_KINDS: [&str; 3] = ["application/json", "text/event-stream; charset=utf-8", "text/event-stream"];

/// The relevant fields of a reply's head.
#[derive(Debug)]
pub(crate) struct ReplyHead {
    pub status: StatusCode,
    pub content_type: Option<HeaderValue>,
    /// vLLM's metadata of embeddings in bytes.
    pub metadata: Option<HeaderValue>,
    /// How the body is compressed.
    pub(super) coding: Coding,
    /// The engine's `Retry-After-Ms`, or `Retry-After` in seconds or as a date.
    pub retry_after: Option<Duration>,
}

impl ReplyHead {
    /// Whether a stream of server-sent events follows.
    pub(super) fn is_stream(&self) -> bool {
        self.content_type.as_ref().is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
    }
}

/// How the body of a reply ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplyLength {
    /// So many bytes.
    Length(u64),
    Chunked,
    /// Where the engine closes the connection.
    ToEnd,
}

/// A complete head.
#[derive(Debug)]
pub(super) struct ParsedHead {
    pub head: ReplyHead,
    pub extent: ReplyLength,
    /// Another request may follow the reply.
    pub reusable: bool,
    /// Length of the head, with the 1xx heads before it.
    pub bytes: usize,
}

/// Why the bytes are not the head of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReplyHeadError(pub &'static str);

/// Reads a head; `None` while it is incomplete.
///
/// # Errors
/// [`ReplyHeadError`]. The connection is then unusable.
pub(super) fn read(bytes: &[u8]) -> Result<Option<ParsedHead>, ReplyHeadError> {
    let mut at = 0;
    loop {
        let mut fields = [const { MaybeUninit::uninit() }; FIELDS_MAX];
        let mut parsed = httparse::Response::new(&mut []);
        let rest = &bytes[at..];
        let config = httparse::ParserConfig::default();
        at += match config.parse_response_with_uninit_headers(&mut parsed, rest, &mut fields) {
            Ok(httparse::Status::Complete(bytes)) => bytes,
            Ok(httparse::Status::Partial) if bytes.len() < BYTES_MAX => return Ok(None),
            Ok(httparse::Status::Partial) => return Err(ReplyHeadError("an endless head")),
            Err(_) => return Err(ReplyHeadError("no head")),
        };
        match parsed.code.unwrap_or_default() {
            100 | 102..200 => {}
            101 => return Err(ReplyHeadError("a switch of protocols")),
            code => {
                let status = StatusCode::from_u16(code).map_err(|_| ReplyHeadError("a status"))?;
                let is_1_0 = parsed.version == Some(0);
                return of(status, is_1_0, parsed.headers, at).map(Some);
            }
        }
    }
}

fn of(
    status: StatusCode,
    is_1_0: bool,
    fields: &[httparse::Header<'_>],
    bytes: usize,
) -> Result<ParsedHead, ReplyHeadError> {
    let (mut kind, mut metadata, mut after, mut after_ms) = (None, None, None, None);
    let (mut coding, mut length) = (None, None);
    let mut content_coding = Coding::Identity;
    let mut closes = false;
    for field in fields {
        let is = |name: &str| field.name.eq_ignore_ascii_case(name);
        if is("content-type") {
            kind = kind.or(Some(field.value));
        } else if is("content-length") {
            check_single(length.replace(field.value))?;
        } else if is("transfer-encoding") {
            check_single(coding.replace(field.value))?;
        } else if is("content-encoding") {
            content_coding = content_coding.and(field.value);
        } else if is("connection") {
            closes |= says_close(field.value);
        } else if is("metadata") {
            metadata = metadata.or(Some(field.value));
        } else if is("retry-after") {
            after = after.or(Some(field.value));
        } else if is("retry-after-ms") {
            after_ms = after_ms.or(Some(field.value));
        }
    }
    let extent = extent(status, is_1_0, coding, length)?;
    Ok(ParsedHead {
        head: ReplyHead {
            status,
            content_type: kind.map(content_type).transpose()?,
            metadata: metadata.map(header_value).transpose()?,
            coding: content_coding,
            retry_after: retry_after(after_ms, after),
        },
        extent,
        reusable: extent != ReplyLength::ToEnd && !is_1_0 && !closes,
        bytes,
    })
}

/// The head of an HTTP/2 reply. Its frames contain the length of the body.
///
/// # Errors
/// [`ReplyHeadError`]. Only its stream is then unusable.
pub(super) fn of_fields(status: StatusCode, fields: &HeaderMap) -> Result<ReplyHead, ReplyHeadError> {
    if fields.len() > FIELDS_MAX {
        return Err(ReplyHeadError("too many fields"));
    }
    let first = |name: &str| fields.get(name).map(HeaderValue::as_bytes);
    let codings = fields.get_all(CONTENT_ENCODING).iter();
    Ok(ReplyHead {
        status,
        content_type: fields.get(CONTENT_TYPE).map(|kind| content_type(kind.as_bytes())).transpose()?,
        metadata: fields.get("metadata").cloned(),
        coding: codings.fold(Coding::Identity, |coding, value| coding.and(value.as_bytes())),
        retry_after: retry_after(first("retry-after-ms"), first("retry-after")),
    })
}

fn retry_after(after_ms: Option<&[u8]>, after: Option<&[u8]>) -> Option<Duration> {
    let ms = after_ms.and_then(count).map(Duration::from_millis);
    ms.or_else(|| after.and_then(seconds_or_date)).map(|after| after.min(RETRY_AFTER_MAX))
}

fn check_single(before: Option<&[u8]>) -> Result<(), ReplyHeadError> {
    before.map_or(Ok(()), |_| Err(ReplyHeadError("a repeated length")))
}

/// The length of a reply's body: RFC 9112, section 6.3, without what it tolerates.
fn extent(
    status: StatusCode,
    is_1_0: bool,
    coding: Option<&[u8]>,
    length: Option<&[u8]>,
) -> Result<ReplyLength, ReplyHeadError> {
    if let Some(coding) = coding {
        check_single(length)?;
        return match coding.eq_ignore_ascii_case(b"chunked") && !is_1_0 {
            true => Ok(ReplyLength::Chunked),
            false => Err(ReplyHeadError("a transfer coding other than chunked")),
        };
    }
    let length = length.map(|text| length_of(text).ok_or(ReplyHeadError("a length"))).transpose()?;
    Ok(match length {
        _ if matches!(status.as_u16(), 204 | 304) => ReplyLength::Length(0),
        Some(bytes) => ReplyLength::Length(bytes),
        None => ReplyLength::ToEnd,
    })
}

/// Plain digits, at most 18 of them.
fn length_of(text: &[u8]) -> Option<u64> {
    let plain = (1..=18).contains(&text.len()) && text.iter().all(u8::is_ascii_digit);
    plain.then(|| text.iter().fold(0, |length, digit| length * 10 + u64::from(digit - b'0')))
}

fn says_close(value: &[u8]) -> bool {
    value.split(|&byte| byte == b',').any(|word| word.trim_ascii().eq_ignore_ascii_case(b"close"))
}

fn count(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.trim().parse().ok()
}

/// `Retry-After`: seconds, or a date (RFC 9110, section 10.2.3). A date in the past means now.
fn seconds_or_date(text: &[u8]) -> Option<Duration> {
    count(text).map(Duration::from_secs).or_else(|| {
        let date = httpdate::parse_http_date(std::str::from_utf8(text).ok()?.trim()).ok()?;
        Some(date.duration_since(SystemTime::now()).unwrap_or_default())
    })
}

fn content_type(kind: &[u8]) -> Result<HeaderValue, ReplyHeadError> {
    match USUAL_KINDS.iter().find(|usual| usual.as_bytes() == kind) {
        Some(usual) => Ok(HeaderValue::from_static(usual)),
        None => header_value(kind),
    }
}

fn header_value(value: &[u8]) -> Result<HeaderValue, ReplyHeadError> {
    HeaderValue::from_bytes(value).map_err(|_| ReplyHeadError("a header's value"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(fields: &str) -> ReplyHead {
        let text = format!("HTTP/1.1 429 Too Many\r\n{fields}content-length: 0\r\n\r\n");
        read(text.as_bytes()).expect("a head").expect("a whole one").head
    }

    #[test]
    fn known_headers_match_in_any_case_and_the_first_counts() {
        let seen =
            head("X-Other: 1\r\nCONTENT-TYPE: text/plain; x=y\r\ncontent-type: a/b\r\nRetry-After: 7 \r\n");
        assert_eq!(seen.status, 429);
        assert_eq!(seen.content_type, Some(HeaderValue::from_static("text/plain; x=y")));
        assert_eq!(seen.retry_after, Some(Duration::from_secs(7)));
        let seen = head("Metadata: {\"a\":1}\r\n").metadata;
        assert_eq!(seen, Some(HeaderValue::from_static("{\"a\":1}")));
        for usual in USUAL_KINDS {
            assert_eq!(head(&format!("content-type: {usual}\r\n")).content_type.as_ref().unwrap(), usual);
        }
    }

    #[test]
    fn retry_after_is_bounded_and_an_invalid_one_is_ignored() {
        for (fields, after_ms) in [
            ("", None),
            ("retry-after: soon\r\n", None),
            ("retry-after: -1\r\n", None),
            ("retry-after: 2\r\n", Some(2_000)),
            ("retry-after: 2\r\nretry-after-ms: 300\r\n", Some(300)),
            ("retry-after: 2\r\nretry-after-ms: x\r\n", Some(2_000)),
            ("retry-after: 99999999\r\n", Some(3_600_000)),
            ("retry-after: Fri, 31 Dec 9999 23:59:59 GMT\r\n", Some(3_600_000)),
            ("retry-after: Sun, 06 Nov 1994 08:49:37 GMT\r\n", Some(0)),
            ("retry-after: Sunday, 06-Nov-94 08:49:37 GMT\r\n", Some(0)),
            ("retry-after: Sun, 06 Nov\r\n", None),
        ] {
            assert_eq!(head(fields).retry_after, after_ms.map(Duration::from_millis), "{fields}");
        }
    }

    #[test]
    fn the_fields_of_http2_mean_the_same_as_those_of_http1() {
        let fields = [
            ("content-type", "text/event-stream"),
            ("content-encoding", "gzip"),
            ("metadata", "{}"),
            ("retry-after", "2"),
            ("retry-after-ms", "300"),
        ];
        let text: String = fields.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let mut map = HeaderMap::new();
        for (name, value) in fields {
            map.append(name, HeaderValue::from_static(value));
        }
        let two = of_fields(StatusCode::TOO_MANY_REQUESTS, &map).expect("a head");
        assert_eq!(format!("{two:?}"), format!("{:?}", head(&text)));
        map.append("content-encoding", HeaderValue::from_static("br"));
        assert_eq!(of_fields(StatusCode::OK, &map).expect("a head").coding, Coding::Unknown);
        (0..FIELDS_MAX).for_each(|_| _ = map.append("x", HeaderValue::from_static("y")));
        assert_eq!(of_fields(StatusCode::OK, &map).err(), Some(ReplyHeadError("too many fields")));
    }

    #[test]
    fn a_head_is_awaited_until_complete_after_1xx_heads() {
        let whole =
            b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";
        let end = whole.len() - 5;
        for cut in 0..end {
            assert!(read(&whole[..cut]).expect("the beginning of a head").is_none(), "{cut}");
        }
        let seen = read(whole).expect("a head").expect("a whole one");
        assert_eq!((seen.bytes, seen.extent, seen.reusable), (end, ReplyLength::Length(5), true));
        let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: b\r\n".repeat(FIELDS_MAX + 1));
        assert_eq!(read(many.as_bytes()).err(), Some(ReplyHeadError("no head")));
    }
}
