//! What a client's bytes must look like before any other part of the router sees them.
//!
//! Requests are smuggled through what two parsers read differently. So the head and the framing of a body are read here,
//! by one strict reader, and pingora is given a head that no parser can read in two ways:
//!
//! ```text
//! socket ─▶ wire ─▶ head (strict, bounded, timed) ─▶ pingora: a head without framing or upgrade
//!             │                                        │ request_filter
//!             └──────── body (length or chunks, strict) ◀ exchange::ask: when the request is wanted
//! ```
//!
//! Invariants:
//! - What is refused here is answered once, with the OpenAI envelope, and the connection is closed: nothing that follows
//!   it is taken for a request.
//! - One request is served at a time. The next one may come while it is answered (pipelining): a bounded part of it is read
//!   ahead, kept apart from the answer, and read as a request once that is over.
//! - What is behind a body that was not read whole, behind a refused framing, behind an answer that says
//!   `connection: close`, or behind an offer to speak another protocol is never a request.
//! - One empty line in front of a request is skipped, and does not start the clock of its head.
//! - Extensions and trailers of chunks are checked as strictly as heads, bounded and dropped.
//! - A head is bounded in bytes, in fields and in time; a connection without a request in time.
//! - A body is read straight into the buffer that is sent on; pingora never holds it.

pub(crate) mod chunked;
pub(crate) mod head;
mod wire;

pub(crate) use wire::{BodyError, Wire};

use std::time::Duration;

use baton_openai::{ApiError, Code};

use crate::config::RouterConfig;
use crate::message::request_id;

/// Bounds on heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadBounds {
    pub bytes: usize,
    /// From its first byte to its last.
    pub within: Duration,
    /// From the connection's begin, or the end of the last answer, to the first byte.
    pub idle: Duration,
}

impl HeadBounds {
    pub(crate) fn of(config: &RouterConfig) -> Self {
        Self {
            bytes: config.limits.head_bytes,
            within: Duration::from_millis(config.timeouts.head_ms),
            idle: Duration::from_millis(config.timeouts.client_idle_ms),
        }
    }
}

/// Why a head is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unclean {
    #[error("{0}")]
    Malformed(&'static str),
    #[error("the path is too long")]
    PathTooLong,
    #[error("the head of the request is too large")]
    TooLarge,
    #[error("the head of the request did not arrive in time")]
    Late,
    #[error("only HTTP/1.1 and HTTP/1.0 are supported")]
    Version,
    #[error("this method is not allowed here")]
    Method,
    #[error("only 100-continue can be expected")]
    Expectation,
}

impl Unclean {
    fn error(self) -> ApiError {
        let code = match self {
            Self::Malformed(_) => Code::MalformedRequest,
            Self::PathTooLong => Code::PathTooLong,
            Self::TooLarge => Code::HeadTooLarge,
            Self::Late => Code::RequestTimeout,
            Self::Version => Code::HttpVersionNotSupported,
            Self::Method => Code::MethodNotAllowed,
            Self::Expectation => Code::ExpectationFailed,
        };
        let mut error = ApiError::malformed(self.to_string());
        // The first of a late request is 408.
        (error.status, error.kind) = (code.statuses()[0], code.kind());
        error.with_code(code)
    }

    /// The whole answer.
    pub(crate) fn answer(self) -> Vec<u8> {
        let error = self.error();
        let (body, id) = (error.to_bytes(), request_id::mint());
        let reason = hyper::StatusCode::from_u16(error.status).ok().and_then(|s| s.canonical_reason());
        let mut answer = format!(
            "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nx-request-id: {id}\r\n\
             connection: close\r\n\r\n",
            error.status,
            reason.unwrap_or_default(),
            body.len()
        )
        .into_bytes();
        answer.extend_from_slice(&body);
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_one_whole_answer_in_the_envelope() {
        for unclean in [Unclean::Malformed("x"), Unclean::TooLarge, Unclean::Late, Unclean::Version] {
            let answer = String::from_utf8(unclean.answer()).unwrap();
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{head}");
            assert!(head.contains("connection: close"), "{head}");
            let body: serde_json::Value = serde_json::from_str(body).unwrap();
            assert_eq!(body["error"]["message"], unclean.to_string());
        }
    }
}
