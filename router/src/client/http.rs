//! Strict reading of a client's bytes, before any other part of the router sees them.
//!
//! Request smuggling needs two parsers that read the same bytes differently. So one strict reader reads the head
//! and the framing of a body here. pingora receives a head that no parser can read in two ways:
//!
//! ```text
//! socket ─▶ connection ─▶ head (strict, bounded, timed) ─▶ pingora: a head without framing or upgrade
//!                │                                            │ request_filter
//!                └─────── body (length or chunks, strict) ◀ exchange: when the body is needed
//! ```
//!
//! Invariants:
//! - A refused request is answered once, with the OpenAI envelope, and the connection is closed. Bytes that follow
//!   it are never a request.
//! - One request is served at a time. The next one may arrive before the response is complete (pipelining). A
//!   bounded part of it is read ahead and parsed once the response is over.
//! - Bytes are never a request behind a body that was not read whole, a refused framing, a response with
//!   `connection: close`, or an `Upgrade` offer.
//! - One empty line in front of a request is skipped, and does not start the timeout of its head.
//! - Extensions and trailers of chunks are checked as strictly as heads, bounded and dropped.
//! - A head is bounded in bytes, in fields and in time. A connection without a request is bounded in time.
//! - A body is read straight into the buffer that is forwarded. pingora never has it.

pub(crate) mod chunked;
mod connection;
pub(crate) mod head;

pub(in crate::client) use connection::BODY_CAPACITY_INITIAL;
pub(crate) use connection::{ClientConnection, ClientSocket};

use std::time::Duration;

use baton_openai::{ApiError, Code};

use crate::config::RouterConfig;
use crate::engines::body_budget::BudgetExhausted;
use crate::message::request_id;

/// Bounds on heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadBounds {
    pub bytes: usize,
    /// Time from its first byte to its last.
    pub within: Duration,
    /// Time from the start of the connection, or the end of the last response, to the first byte.
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
pub(crate) enum HeadError {
    #[error("{0}")]
    Malformed(&'static str),
    #[error("the path is too long")]
    PathTooLong,
    #[error("the head of the request is too large")]
    TooLarge,
    #[error("the head of the request did not arrive in time")]
    TimedOut,
    #[error("only HTTP/1.1 and HTTP/1.0 are supported")]
    Version,
    /// The preface of HTTP/2, which is a connection's first request line if it is none of HTTP/1.
    #[error("HTTP/2 is not supported here")]
    Http2,
    #[error("this method is not allowed here")]
    Method,
    #[error("only 100-continue can be expected")]
    Expectation,
}

impl HeadError {
    pub(super) fn error(self) -> ApiError {
        let code = match self {
            Self::Malformed(_) => Code::MalformedRequest,
            Self::PathTooLong => Code::PathTooLong,
            Self::TooLarge => Code::HeadTooLarge,
            Self::TimedOut => Code::RequestTimeout,
            Self::Version | Self::Http2 => Code::HttpVersionNotSupported,
            Self::Method => Code::MethodNotAllowed,
            Self::Expectation => Code::ExpectationFailed,
        };
        // The first status of a code that has several; a late request is 408.
        ApiError::of(code, self.to_string())
    }

    /// The whole response.
    pub(crate) fn answer(self) -> Vec<u8> {
        let error = self.error();
        let (body, id) = (error.to_bytes(), request_id::generate());
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

/// Why reading a body failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyError {
    /// Over the limit.
    TooLarge,
    /// The budget of all bodies is exhausted.
    BudgetExhausted,
    /// Its framing is broken.
    Malformed,
    /// The connection or the stream ended in the middle of it.
    Ended,
}

impl From<BudgetExhausted> for BodyError {
    fn from(BudgetExhausted: BudgetExhausted) -> Self {
        Self::BudgetExhausted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_one_whole_answer_in_the_envelope() {
        for error in [HeadError::Malformed("x"), HeadError::TooLarge, HeadError::TimedOut, HeadError::Version]
        {
            let answer = String::from_utf8(error.answer()).unwrap();
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{head}");
            assert!(head.contains("connection: close"), "{head}");
            let body: serde_json::Value = serde_json::from_str(body).unwrap();
            assert_eq!(body["error"]["message"], error.to_string());
        }
    }
}
