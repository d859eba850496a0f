//! Strict reader of request heads: RFC 9112 without what it only tolerates.
//!
//! Refused:
//! - bare CR or LF, NUL and other control bytes, folded lines, space before a colon, an empty or odd name
//! - more than one Host, Content-Length or Transfer-Encoding, or both of the latter
//! - a length that is not plain digits, any coding but `chunked`, chunks in HTTP/1.0
//! - no Host in HTTP/1.1, a target in absolute form that names another host
//! - CONNECT and TRACE
//!
//! Upgrades are not supported and not forwarded. The reader masks the `Upgrade` header, as RFC 9110 allows. It
//! masks the headers that frame the body too, because no later reader may read them differently.
//!
//! Pure: bytes in, a verdict out. The caller passes more bytes until there is a head.

use super::HeadError;

/// Maximum header fields of one request.
pub(crate) const FIELDS_MAX: usize = 100;
/// Maximum bytes of a request's target.
pub(crate) const TARGET_BYTES_MAX: usize = 8 << 10;
/// No method in use is longer.
const METHOD_BYTES_MAX: usize = 16;
/// 18 digits: below 2^63, far above any limit.
const LENGTH_DIGITS_MAX: usize = 18;

/// The framing of a body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RequestFraming {
    #[default]
    None,
    Length(u64),
    Chunked,
}

/// A complete, accepted head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestHead {
    /// Its length, with the empty line.
    pub bytes: usize,
    pub framing: RequestFraming,
    /// Whether the client waits for `100 Continue` before it sends the body.
    pub expects_continue: bool,
    /// Whether the client offers another protocol.
    pub upgrades: bool,
    /// Names that replace masked ones, by their offset.
    masked: Vec<(usize, &'static [u8])>,
}

impl RequestHead {
    /// Replaces the names of fields that only this reader may use.
    pub(crate) fn mask_internal_fields(&self, bytes: &mut [u8]) {
        for (offset, name) in &self.masked {
            bytes[*offset..offset + name.len()].copy_from_slice(name);
        }
    }
}

/// Reads a head from the beginning of `bytes`; `None` where it is incomplete. `searched` is the end of the part
/// that earlier calls have searched; 0 at first.
///
/// # Errors
/// [`HeadError`], as early as possible.
pub(crate) fn read(
    bytes: &[u8],
    searched: &mut usize,
    bytes_max: usize,
) -> Result<Option<RequestHead>, HeadError> {
    let from = searched.saturating_sub(3);
    let mut before = from.checked_sub(1).map(|index| bytes[index]);
    let mut end = None;
    for (index, &byte) in bytes.iter().enumerate().skip(from) {
        if byte == b'\n' && before != Some(b'\r') {
            return Err(HeadError::Malformed("a line ends without a carriage return"));
        }
        if before == Some(b'\r') && byte != b'\n' {
            return Err(HeadError::Malformed("a carriage return stands alone"));
        }
        if byte == b'\n' && index >= 3 && &bytes[index - 3..=index] == b"\r\n\r\n" {
            end = Some(index + 1);
            break;
        }
        before = Some(byte);
    }
    // An early check, which refuses most of what is not HTTP at all (TLS, HTTP/0.9, an empty line).
    if *searched == 0 && bytes.first().is_some_and(|byte| !byte.is_ascii_uppercase()) {
        return Err(HeadError::Malformed("the request does not begin with a method"));
    }
    let line_end = bytes.iter().take(TARGET_BYTES_MAX + 64).position(|byte| *byte == b'\r');
    if line_end.is_none() && bytes.len() > TARGET_BYTES_MAX + 32 {
        return Err(HeadError::PathTooLong);
    }
    if end.unwrap_or(bytes.len()) > bytes_max {
        return Err(HeadError::TooLarge);
    }
    *searched = bytes.len();
    let Some(end) = end else {
        if let Some(line_end) = line_end {
            request_line(&bytes[..line_end])?;
        }
        return Ok(None);
    };
    let lines = &bytes[..end - 2];
    let line_end = line_end.expect("the head has lines");
    let line = request_line(&lines[..line_end])?;
    fields(lines, line_end + 2, &line, end).map(Some)
}

/// The empty line in front of a request, as far as it has arrived: old clients sent one behind a body. RFC 9112,
/// 2.2, has one ignored. A client that sends more is out of step, and is refused.
pub(super) fn empty_line(bytes: &[u8]) -> Option<EmptyLine> {
    match bytes {
        [] | [b'\r'] => Some(EmptyLine::MayCome),
        [b'\r', b'\n', ..] => Some(EmptyLine::Here),
        _ => None,
    }
}

/// See [`empty_line`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EmptyLine {
    MayCome,
    Here,
}

struct RequestLine<'a> {
    /// The host of a target in absolute form.
    authority: Option<&'a [u8]>,
    is_1_0: bool,
}

fn request_line(line: &[u8]) -> Result<RequestLine<'_>, HeadError> {
    let malformed = HeadError::Malformed("the request line must be METHOD SP TARGET SP HTTP/1.1");
    let mut words = line.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(malformed);
    };
    if !is_method(method) {
        return Err(malformed);
    }
    let is_1_0 = match version {
        b"HTTP/1.1" => false,
        b"HTTP/1.0" => true,
        b"HTTP/2.0" if method == b"PRI" && target == b"*" => return Err(HeadError::Http2),
        _ if version.starts_with(b"HTTP/") && version.len() == 8 => return Err(HeadError::Version),
        _ => return Err(malformed),
    };
    check_method(method)?;
    check_target(target)?;
    let authority = match target {
        [b'/', ..] => None,
        b"*" if method == b"OPTIONS" => None,
        _ => {
            let rest = target.strip_prefix(b"http://").or_else(|| target.strip_prefix(b"https://"));
            let rest = rest.ok_or(HeadError::Malformed("the target must be a path"))?;
            let end = rest.iter().position(|byte| matches!(byte, b'/' | b'?')).unwrap_or(rest.len());
            Some(&rest[..end])
        }
    };
    Ok(RequestLine { authority, is_1_0 })
}

/// Whether it has the form of a method.
pub(in crate::client) fn is_method(method: &[u8]) -> bool {
    (1..=METHOD_BYTES_MAX).contains(&method.len()) && method.iter().all(|&byte| is_token(byte))
}

/// Refuses methods that no path has.
pub(in crate::client) fn check_method(method: &[u8]) -> Result<(), HeadError> {
    match method {
        b"CONNECT" | b"TRACE" | b"TRACK" => Err(HeadError::Method),
        _ => Ok(()),
    }
}

/// Checks the length and the bytes of a target.
pub(in crate::client) fn check_target(target: &[u8]) -> Result<(), HeadError> {
    if target.len() > TARGET_BYTES_MAX {
        return Err(HeadError::PathTooLong);
    }
    let odd = |byte: &u8| !byte.is_ascii_graphic() || matches!(byte, b'#' | b'"' | b'<' | b'>' | b'\\');
    if target.iter().any(odd) {
        return Err(HeadError::Malformed("the target has a byte that must be percent-encoded"));
    }
    Ok(())
}

fn fields(lines: &[u8], mut at: usize, line: &RequestLine<'_>, end: usize) -> Result<RequestHead, HeadError> {
    let mut head = RequestHead {
        bytes: end,
        framing: RequestFraming::None,
        expects_continue: false,
        upgrades: false,
        masked: Vec::new(),
    };
    let (mut host, mut length, mut chunked, mut count) = (None, None, false, 0);
    while at < lines.len() {
        let size = lines[at..].iter().position(|byte| *byte == b'\r').unwrap_or(lines.len() - at);
        let (name, value) = field(&lines[at..at + size])?;
        count += 1;
        if count > FIELDS_MAX {
            return Err(HeadError::TooLarge);
        }
        let once = |before: bool| match before {
            true => Err(HeadError::Malformed("a header that must come once comes twice")),
            false => Ok(()),
        };
        // By length first, because most names are none of these.
        match name.len() {
            4 if name.eq_ignore_ascii_case(b"host") => {
                once(host.is_some())?;
                host = Some(value);
            }
            6 if name.eq_ignore_ascii_case(b"expect") => {
                once(head.expects_continue)?;
                if !value.eq_ignore_ascii_case(b"100-continue") {
                    return Err(HeadError::Expectation);
                }
                head.expects_continue = true;
            }
            7 if name.eq_ignore_ascii_case(b"upgrade") => {
                head.upgrades = true;
                head.masked.push((at, b"x-upgr0"));
            }
            14 if name.eq_ignore_ascii_case(b"content-length") => {
                once(length.is_some())?;
                length = Some(content_length(value)?);
                head.masked.push((at, b"x-baton-length"));
            }
            17 if name.eq_ignore_ascii_case(b"transfer-encoding") => {
                once(chunked)?;
                if !value.eq_ignore_ascii_case(b"chunked") {
                    return Err(HeadError::Malformed("the only transfer coding here is chunked"));
                }
                chunked = true;
                head.masked.push((at, b"x-baton-transfer1"));
            }
            _ => {}
        }
        at += size + 2;
    }
    match host {
        None if !line.is_1_0 => return Err(HeadError::Malformed("the Host header is missing")),
        Some(host) if !is_host(host) => return Err(HeadError::Malformed("the Host header is not a host")),
        _ => {}
    }
    if line.authority.is_some_and(|named| host.is_none_or(|host| !host.eq_ignore_ascii_case(named))) {
        return Err(HeadError::Malformed("the target names another host than the Host header"));
    }
    if chunked && (length.is_some() || line.is_1_0) {
        return Err(HeadError::Malformed("chunks and a length, or chunks in HTTP/1.0"));
    }
    head.framing = match (chunked, length) {
        (true, _) => RequestFraming::Chunked,
        (false, Some(length)) if length > 0 => RequestFraming::Length(length),
        _ => RequestFraming::None,
    };
    head.expects_continue &= !line.is_1_0 && head.framing != RequestFraming::None;
    Ok(head)
}

/// Name and value of one line.
pub(super) fn field(line: &[u8]) -> Result<(&[u8], &[u8]), HeadError> {
    let colon = line.iter().position(|byte| *byte == b':');
    let colon = colon.ok_or(HeadError::Malformed("a header line has no colon"))?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    // A folded line begins with a space, which is no token either.
    if name.is_empty() || !name.iter().all(|&byte| is_token(byte)) {
        return Err(HeadError::Malformed("a header's name has a byte that no name may have"));
    }
    if value.iter().any(|&byte| byte < 0x20 && byte != b'\t' || byte == 0x7f) {
        return Err(HeadError::Malformed("a header's value has a control byte"));
    }
    let space = |byte: &u8| matches!(byte, b' ' | b'\t');
    let start = value.iter().position(|byte| !space(byte)).unwrap_or(value.len());
    let end = value.iter().rposition(|byte| !space(byte)).map_or(start, |last| last + 1);
    Ok((name, &value[start..end]))
}

fn content_length(value: &[u8]) -> Result<u64, HeadError> {
    let digits = (1..=LENGTH_DIGITS_MAX).contains(&value.len()) && value.iter().all(u8::is_ascii_digit);
    let text = digits.then(|| std::str::from_utf8(value).ok()).flatten();
    text.and_then(|text| text.parse().ok())
        .ok_or(HeadError::Malformed("Content-Length must be one plain number"))
}

/// Whether it is a host, with or without a port.
pub(in crate::client) fn is_host(host: &[u8]) -> bool {
    let fits = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+;=:[]%".contains(byte);
    !host.is_empty() && host.len() <= 255 + 6 && host.iter().all(fits)
}

/// RFC 9110's `tchar`.
pub(super) fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: usize = 32 << 10;

    fn whole(text: &str) -> Result<Option<RequestHead>, HeadError> {
        read(text.as_bytes(), &mut 0, MAX)
    }

    #[test]
    fn a_plain_head_is_read_and_its_framing_masked() {
        let text =
            "POST /v1/completions HTTP/1.1\r\nHost: x:1\r\nContent-Length: \t5 \r\nUpgrade: h2c\r\n\r\nhello";
        let head = whole(text).unwrap().unwrap();
        assert_eq!((head.bytes, head.framing), (text.len() - 5, RequestFraming::Length(5)));
        assert!(head.upgrades && !head.expects_continue);
        let mut bytes = text.as_bytes().to_vec();
        head.mask_internal_fields(&mut bytes);
        let masked = String::from_utf8(bytes).unwrap().to_ascii_lowercase();
        assert_eq!(masked.len(), text.len());
        assert!(!masked.contains("content-length") && !masked.contains("upgrade"), "{masked}");
        let chunks =
            "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: Chunked\r\nexpect: 100-continue\r\n\r\n";
        let head = whole(chunks).unwrap().unwrap();
        assert_eq!((head.framing, head.expects_continue), (RequestFraming::Chunked, true));
        assert_eq!(
            whole("GET http://x/a HTTP/1.1\r\nHost: X\r\n\r\n").unwrap().unwrap().framing,
            RequestFraming::None
        );
        assert!(whole("GET / HTTP/1.0\r\n\r\n").unwrap().is_some());
        assert!(whole("OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n").unwrap().is_some());
    }

    #[test]
    fn every_split_gives_the_same_head() {
        let text = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello";
        let head = whole(text).unwrap().unwrap();
        for first in 1..text.len() {
            for second in first..text.len() {
                let mut searched = 0;
                let mut read = |end: usize| read(&text.as_bytes()[..end], &mut searched, MAX).unwrap();
                let found = read(first).or_else(|| read(second)).or_else(|| read(text.len()));
                assert_eq!(found.as_ref(), Some(&head), "{first} {second}");
            }
        }
    }

    #[test]
    fn no_bytes_make_it_panic_and_no_split_changes_the_verdict() {
        let base = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nA: b\r\n\r\n";
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % below
        };
        for _ in 0..100_000 {
            let mut bytes = base.to_vec();
            for _ in 0..1 + next(3) {
                let at = next(bytes.len());
                bytes[at] = b"\r\n :\0\t,;A0\xff"[next(11)];
            }
            let at_once = read(&bytes, &mut 0, MAX);
            let mut searched = 0;
            let mut in_parts = Ok(None);
            for end in (1..bytes.len()).step_by(7).chain([bytes.len()]) {
                in_parts = read(&bytes[..end], &mut searched, MAX);
                if !matches!(in_parts, Ok(None)) {
                    break;
                }
            }
            // When a head is read in parts, an error in front is found before an error behind it.
            assert_eq!(at_once.is_ok(), in_parts.is_ok(), "{}", bytes.escape_ascii());
            if at_once.is_ok() {
                assert_eq!(at_once, in_parts, "{}", bytes.escape_ascii());
            }
        }
    }
}
