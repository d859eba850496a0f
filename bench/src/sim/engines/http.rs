//! Requests to a simulated engine, and whole replies.

use baton_openai::ApiError;

use crate::sim::instant::connection::unchunked;

/// The parts of a request that engines use.
pub(super) struct HttpRequest {
    pub posts: bool,
    pub path: String,
    pub query: String,
    pub body: Vec<u8>,
    pub request_id: Option<String>,
    /// `x-data-parallel-rank`.
    pub data_parallel_rank: Option<String>,
    /// `x-baton-router-settles`.
    pub settles: bool,
    /// The connection is closed after the reply.
    pub closes: bool,
}

impl HttpRequest {
    pub(super) fn read(head: &[u8], body: &[u8], chunked: bool) -> Self {
        let mut lines = head.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii);
        let mut words = lines.next().unwrap_or_default().split(|&byte| byte == b' ');
        let word = |word: Option<&[u8]>| String::from_utf8_lossy(word.unwrap_or_default()).into_owned();
        let posts = words.next() == Some(b"POST");
        let target = word(words.next());
        let old = words.next() == Some(b"HTTP/1.0");
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let body = if chunked { unchunked(body) } else { body.to_vec() };
        let (path, query) = (path.to_owned(), query.to_owned());
        let (request_id, data_parallel_rank) = (None, None);
        let mut request =
            Self { posts, path, query, body, request_id, data_parallel_rank, settles: false, closes: old };
        for line in lines {
            let Some(colon) = line.iter().position(|&byte| byte == b':') else { continue };
            let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
            if name.eq_ignore_ascii_case(b"x-request-id") {
                request.request_id = Some(word(Some(value)));
            } else if name.eq_ignore_ascii_case(b"x-data-parallel-rank") {
                request.data_parallel_rank = Some(word(Some(value)));
            } else if name.eq_ignore_ascii_case(b"x-baton-router-settles") {
                request.settles = true;
            } else if name.eq_ignore_ascii_case(b"connection") {
                request.closes = value.eq_ignore_ascii_case(b"close");
            }
        }
        request
    }

    pub(super) fn field(&self, name: &str) -> Option<&str> {
        self.query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
    }
}

/// A whole reply, head and body in one buffer.
pub(super) fn reply(status: u16, headers: &[(&str, String)], body: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut out = Vec::with_capacity(body.len() + 160);
    let reason = if status < 400 { "OK" } else { "Error" };
    // Writing to a vector cannot fail.
    let _ = write!(out, "HTTP/1.1 {status} {reason}\r\nserver: sim\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in headers {
        let _ = write!(out, "{name}: {value}\r\n");
    }
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(body);
    out
}

pub(super) fn json(body: &[u8]) -> Vec<u8> {
    reply(200, &[("content-type", String::from("application/json"))], body)
}

pub(super) fn refusal(error: &ApiError) -> Vec<u8> {
    reply(error.status, &error.headers(), &error.to_bytes())
}

/// The router's request id, without the prefix that vLLM adds.
pub(super) fn bare(id: &str) -> &str {
    id.strip_prefix("chatcmpl-").or_else(|| id.strip_prefix("cmpl-")).unwrap_or(id)
}
