//! The record of an ended request: the only source of its access-log line and its trace. It exists only if an observer
//! needs it, and is serialized outside the request's own path.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use baton_connector::exchange::{Outcome, Phase, Timeline};
use baton_connector::{RequestId, Time};
use hyper::header::{HeaderValue, USER_AGENT};
use hyper::http::request::Parts;
use hyper::{Method, Version};

use crate::engines::http::Engine;
use crate::message::trace_context::TraceContext;
use crate::message::usage::UsageScan;
use crate::metrics::RequestOutcome;
use crate::routing::models::Model;

/// Limit on the stored bytes of a path or a `User-Agent`.
const TEXT_BYTES_MAX: usize = 256;

/// The fields of a request's head that observers need.
#[derive(Debug)]
pub(crate) struct LoggedHead {
    pub method: Method,
    /// The protocol of the client's connection.
    pub version: Version,
    /// Without the query, cut at [`TEXT_BYTES_MAX`].
    pub path: Box<str>,
    /// Cut at [`TEXT_BYTES_MAX`]; invalid UTF-8 is replaced.
    pub user_agent: Option<Box<str>>,
    /// The client's address, if the configuration logs it.
    pub client: Option<IpAddr>,
}

impl LoggedHead {
    pub(crate) fn of(head: &Parts, client: Option<IpAddr>) -> Self {
        let agent = head.headers.get(USER_AGENT).map(HeaderValue::as_bytes);
        let path = head.uri.path();
        Self {
            method: head.method.clone(),
            version: head.version,
            path: path[..path.floor_char_boundary(TEXT_BYTES_MAX)].into(),
            user_agent: agent.map(cut),
            client,
        }
    }
}

/// The beginning of an external text, in whole characters.
fn cut(bytes: &[u8]) -> Box<str> {
    // A character that begins before the limit is decoded in full; it is kept only if it also ends before the limit.
    let prefix = &bytes[..bytes.len().min(TEXT_BYTES_MAX + 3)];
    let text = String::from_utf8_lossy(prefix);
    text[..text.floor_char_boundary(TEXT_BYTES_MAX)].into()
}

/// An ended request.
pub(crate) struct FinishedRequest {
    pub head: LoggedHead,
    pub id: RequestId,
    /// The id that the client received.
    pub echoed: HeaderValue,
    pub trace: TraceContext,
    pub model: Option<Arc<Model>>,
    /// The name of the client's tenant.
    pub tenant: Option<Arc<str>>,
    pub end: RequestOutcome,
    pub status: u16,
    pub begun: Time,
    pub over: Time,
    /// [`Self::over`] as calendar time.
    pub at: SystemTime,
    pub line: Timeline,
    /// The engines of the last attempts, prefill and decode.
    pub engines: [Option<Arc<Engine>>; 2],
    /// Attempts per leg.
    pub attempts: [u16; 2],
    pub request_bytes: u64,
    pub response_bytes: u64,
    pub streamed: bool,
    pub usage_scan: UsageScan,
}

impl FinishedRequest {
    /// A time of the router's clock as calendar time.
    pub(crate) fn calendar(&self, moment: Time) -> SystemTime {
        let before = self.over.since(moment);
        self.at.checked_sub(before).unwrap_or(self.at)
    }

    /// The phase in which the client disconnected.
    pub(crate) fn cancel_phase(&self) -> Option<Phase> {
        match self.end {
            RequestOutcome::Exchange(Outcome::ClientGone(phase)) => Some(phase),
            _ => None,
        }
    }

    /// Whether the client received a complete, successful response.
    pub(crate) fn is_success(&self) -> bool {
        let ended_well =
            matches!(self.end, RequestOutcome::Passed | RequestOutcome::Exchange(Outcome::Completed));
        ended_well && (200..400).contains(&self.status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_agent_is_cut_between_characters() {
        let agent = |text: &[u8]| {
            let value = HeaderValue::from_bytes(text).expect("a value");
            let request = hyper::Request::builder().header(USER_AGENT, value).body(()).expect("a request");
            LoggedHead::of(&request.into_parts().0, None).user_agent.expect("an agent")
        };
        for (character, ascii) in [("é", 1), ("数", 1), ("数", 2), ("🙂", 1), ("🙂", 2), ("🙂", 3)] {
            let text = "a".repeat(ascii) + &character.repeat(TEXT_BYTES_MAX);
            let kept = agent(text.as_bytes());
            assert!(text.starts_with(&*kept), "{kept}");
            assert!((TEXT_BYTES_MAX - 3..=TEXT_BYTES_MAX).contains(&kept.len()), "{}", kept.len());
        }
        assert_eq!(&*agent("é".repeat(TEXT_BYTES_MAX / 2).as_bytes()), "é".repeat(TEXT_BYTES_MAX / 2));
        assert_eq!(&*agent(b"curl/8 \xff"), "curl/8 \u{FFFD}");
        assert!(agent(&[0xff; 999]).len() <= TEXT_BYTES_MAX);
    }
}
