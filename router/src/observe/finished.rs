//! What is known of a request that is over: the one source of its line in the access log and of its trace. Made only
//! where one of them is wanted; written out elsewhere than on the request's own path.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use baton_connector::exchange::{Outcome, Phase, Timeline};
use baton_connector::{RequestId, Time};
use hyper::Method;
use hyper::header::{HeaderMap, HeaderValue, USER_AGENT};

use crate::engines::http::Engine;
use crate::message::trace_context::Trace;
use crate::message::usage::Seen;
use crate::metrics::End;
use crate::routing::models::Model;

/// Bytes of a path or of a `User-Agent` that are kept.
const TEXT_BYTES_MAX: usize = 256;

/// What of a request's head is wanted at its end.
#[derive(Debug)]
pub(crate) struct Head {
    pub method: Method,
    /// Without the query, cut at [`TEXT_BYTES_MAX`].
    pub path: Box<str>,
    /// Cut at [`TEXT_BYTES_MAX`]; what is not UTF-8 is replaced.
    pub user_agent: Option<Box<str>>,
    /// Where the client is, where that is to be told.
    pub client: Option<IpAddr>,
}

impl Head {
    pub(crate) fn of(method: &Method, path: &str, headers: &HeaderMap, client: Option<IpAddr>) -> Self {
        let agent = headers.get(USER_AGENT).map(HeaderValue::as_bytes);
        Self {
            method: method.clone(),
            path: path[..path.floor_char_boundary(TEXT_BYTES_MAX)].into(),
            user_agent: agent.map(cut),
            client,
        }
    }
}

/// The beginning of a text from outside, never half of a character.
fn cut(bytes: &[u8]) -> Box<str> {
    // A character that begins before the end is looked at whole; it goes out only if it also ends there.
    let seen = &bytes[..bytes.len().min(TEXT_BYTES_MAX + 3)];
    let text = String::from_utf8_lossy(seen);
    text[..text.floor_char_boundary(TEXT_BYTES_MAX)].into()
}

/// A request that is over.
pub(crate) struct Finished {
    pub head: Head,
    pub id: RequestId,
    /// What the client was told the id is.
    pub echoed: HeaderValue,
    pub trace: Trace,
    pub model: Option<Arc<Model>>,
    /// Who asked, as admission names them.
    pub tenant: Option<Arc<str>>,
    pub end: End,
    pub status: u16,
    pub begun: Time,
    pub over: Time,
    /// [`Self::over`] on the calendar.
    pub at: SystemTime,
    pub line: Timeline,
    /// Who was asked last, prefill and decode.
    pub engines: [Option<Arc<Engine>>; 2],
    /// Attempts of each leg.
    pub attempts: [u16; 2],
    pub request_bytes: u64,
    pub response_bytes: u64,
    pub streamed: bool,
    pub seen: Seen,
}

impl Finished {
    /// A moment of the router's clock on the calendar.
    pub(crate) fn calendar(&self, moment: Time) -> SystemTime {
        let before = self.over.since(moment);
        self.at.checked_sub(before).unwrap_or(self.at)
    }

    /// The phase in which the client left.
    pub(crate) fn left_in(&self) -> Option<Phase> {
        match self.end {
            End::Exchange(Outcome::ClientGone(phase)) => Some(phase),
            _ => None,
        }
    }

    /// Whether the client got what it asked for.
    pub(crate) fn went_well(&self) -> bool {
        let ended_well = matches!(self.end, End::Passed | End::Exchange(Outcome::Completed));
        ended_well && (200..400).contains(&self.status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_agent_is_cut_between_characters() {
        let agent = |text: &[u8]| {
            let headers =
                [(USER_AGENT, HeaderValue::from_bytes(text).expect("a value"))].into_iter().collect();
            Head::of(&Method::POST, "/", &headers, None).user_agent.expect("an agent")
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
