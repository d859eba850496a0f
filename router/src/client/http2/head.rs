//! Strict check of a request's head: the rules of the HTTP/1 reader, for what HTTP/2 has instead.
//!
//! One rule is weaker: `h2` drops a fragment (`#`) of `:path` before this check, so it is not refused. No engine gets
//! it.
//!
//! `h2` has already refused broken pseudo-headers, names in upper case, control bytes, and headers that belong to a
//! connection. This check refuses:
//!
//! - no host, two hosts, or an `:authority` that names another host than `Host`.
//! - two lengths, values with spaces around them, an odd path, an unknown scheme.
//! - CONNECT and TRACE.
//! - heads that are too large, counted as in HTTP/1.
//!
//! Pure: a head in, a verdict out.

use hyper::header::{CONTENT_LENGTH, EXPECT, HOST, HeaderValue};
use hyper::http::request::Parts;
use hyper::http::uri::Scheme;
use hyper::{Method, Uri};

use crate::client::http::HeadError;
use crate::client::http::head::{
    FIELDS_MAX, TARGET_BYTES_MAX, check_method, check_target, is_host, is_method,
};

/// A field's colon, space and line end in HTTP/1.
const FIELD_BYTES: usize = 4;
/// What `SETTINGS_MAX_HEADER_LIST_SIZE` adds per field (RFC 9113, section 10.5.1).
const LISTED_FIELD_BYTES: usize = 32;

/// The size of a list of headers that `h2` may accept: every head of `bytes_max` with the most fields. Its own answer to
/// a larger one has no body.
pub(super) fn list_bytes_max(bytes_max: usize) -> u32 {
    let listed = bytes_max.saturating_add(FIELDS_MAX * LISTED_FIELD_BYTES);
    u32::try_from(listed).unwrap_or(u32::MAX)
}

/// Checks a head, and leaves only the path in its URI, as in HTTP/1.
///
/// # Errors
/// [`HeadError`], which the stream gets as its response.
pub(super) fn check(head: &mut Parts, bytes_max: usize) -> Result<(), HeadError> {
    let method = head.method.as_str().as_bytes();
    check_method(method)?;
    if !is_method(method) {
        return Err(HeadError::Malformed("the method is too long"));
    }
    check_size(head, bytes_max)?;
    check_fields(head)?;
    check_host(head)?;
    let scheme = head.uri.scheme();
    if scheme.is_some_and(|scheme| *scheme != Scheme::HTTP && *scheme != Scheme::HTTPS) {
        return Err(HeadError::Malformed("the scheme must be http or https"));
    }
    let path = head.uri.path_and_query().cloned();
    let path = path.ok_or(HeadError::Malformed("the path is missing"))?;
    check_target(path.as_str().as_bytes())?;
    let is_path = path.as_str().starts_with('/') || path == "*" && head.method == Method::OPTIONS;
    if !is_path {
        return Err(HeadError::Malformed("the target must be a path"));
    }
    head.uri = Uri::from(path);
    Ok(())
}

fn check_size(head: &Parts, bytes_max: usize) -> Result<(), HeadError> {
    if head.headers.len() > FIELDS_MAX {
        return Err(HeadError::TooLarge);
    }
    let target = head.uri.path_and_query().map_or(0, |path| path.as_str().len());
    if target > TARGET_BYTES_MAX {
        return Err(HeadError::PathTooLong);
    }
    let authority = head.uri.authority().map_or(0, |authority| authority.as_str().len());
    let line = head.method.as_str().len() + target + authority;
    let field = |(name, value): (&hyper::header::HeaderName, &HeaderValue)| {
        name.as_str().len() + value.len() + FIELD_BYTES
    };
    let bytes = line + head.headers.iter().map(field).sum::<usize>();
    if bytes > bytes_max { Err(HeadError::TooLarge) } else { Ok(()) }
}

fn check_fields(head: &Parts) -> Result<(), HeadError> {
    let is_space = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
    for value in head.headers.values() {
        let value = value.as_bytes();
        if is_space(value.first()) || is_space(value.last()) {
            return Err(HeadError::Malformed("a header's value begins or ends with a space"));
        }
    }
    for name in [CONTENT_LENGTH, EXPECT] {
        if head.headers.get_all(name).iter().nth(1).is_some() {
            return Err(HeadError::Malformed("a header that must come once comes twice"));
        }
    }
    match head.headers.get(EXPECT) {
        Some(value) if !value.as_bytes().eq_ignore_ascii_case(b"100-continue") => Err(HeadError::Expectation),
        _ => Ok(()),
    }
}

fn check_host(head: &Parts) -> Result<(), HeadError> {
    let mut hosts = head.headers.get_all(HOST).iter();
    let host = hosts.next().map(HeaderValue::as_bytes);
    if hosts.next().is_some() {
        return Err(HeadError::Malformed("a header that must come once comes twice"));
    }
    let authority = head.uri.authority().map(|authority| authority.as_str().as_bytes());
    match (authority, host) {
        (None, None) => Err(HeadError::Malformed("the :authority is missing")),
        (Some(authority), Some(host)) if !authority.eq_ignore_ascii_case(host) => {
            Err(HeadError::Malformed("the :authority names another host than the Host header"))
        }
        (Some(named), _) | (None, Some(named)) if !is_host(named) => {
            Err(HeadError::Malformed("the :authority is not a host"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use hyper::Request;

    use super::*;

    fn verdict(method: &str, uri: &str, headers: &[(&str, &str)]) -> Result<String, HeadError> {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut head = request.body(()).unwrap().into_parts().0;
        check(&mut head, 1024).map(|()| head.uri.to_string())
    }

    #[test]
    fn a_plain_head_passes_and_only_its_path_is_left() {
        assert_eq!(verdict("POST", "http://x:1/v1/models?a=b", &[]), Ok("/v1/models?a=b".to_owned()));
        assert_eq!(
            verdict("GET", "https://x/", &[("host", "X"), ("expect", "100-Continue")]),
            Ok("/".to_owned())
        );
        assert_eq!(verdict("GET", "/health", &[("host", "x")]), Ok("/health".to_owned()));
        assert_eq!(verdict("OPTIONS", "*", &[("host", "x")]), Ok("*".to_owned()));
    }

    #[test]
    fn odd_heads_are_refused_as_in_http_1() {
        let malformed = |method: &str, uri: &str, headers: &[(&str, &str)]| {
            let verdict = verdict(method, uri, headers);
            assert!(
                matches!(verdict, Err(HeadError::Malformed(_))),
                "{method} {uri} {headers:?}: {verdict:?}"
            );
        };
        malformed("GET", "/", &[]);
        malformed("GET", "http://x/", &[("host", "y")]);
        malformed("GET", "http://u@x/", &[]);
        malformed("GET", "/", &[("host", "x"), ("host", "x")]);
        malformed("GET", "/", &[("host", "x y")]);
        malformed("GET", "ftp://x/", &[]);
        malformed("GET", "*", &[("host", "x")]);
        malformed("VERYLONGMETHODNAME", "http://x/", &[]);
        malformed("POST", "http://x/", &[("content-length", "1"), ("content-length", "1")]);
        malformed("GET", "http://x/", &[("x-a", " b")]);
        malformed("GET", "http://x/", &[("x-a", "b\t")]);
        assert_eq!(verdict("CONNECT", "x:443", &[]), Err(HeadError::Method));
        assert_eq!(verdict("TRACE", "http://x/", &[]), Err(HeadError::Method));
        assert_eq!(verdict("GET", "http://x/", &[("expect", "magic")]), Err(HeadError::Expectation));
    }

    #[test]
    fn a_head_is_bounded_in_bytes_fields_and_path() {
        let long = "a".repeat(1024 - "GET/x".len() - "x-a".len() - FIELD_BYTES);
        assert!(verdict("GET", "http://x/", &[("x-a", &long)]).is_ok());
        assert_eq!(verdict("GET", "http://x/", &[("x-ab", &long)]), Err(HeadError::TooLarge));
        let many = vec![("a", "b"); FIELDS_MAX + 1];
        assert_eq!(verdict("GET", "http://x/", &many), Err(HeadError::TooLarge));
        let path = format!("http://x/{}", "p".repeat(TARGET_BYTES_MAX));
        assert_eq!(verdict("GET", &path, &[]), Err(HeadError::PathTooLong));
    }
}
