//! What is known of a request that is over: the one source of its line in the access log and of its trace. Made only
//! where one of them is wanted; written out elsewhere than on the request's own path.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use baton_connector::exchange::{Outcome, Phase, Timeline};
use baton_connector::{RequestId, Time};
use hyper::Method;
use hyper::header::{HeaderMap, HeaderValue, USER_AGENT};

use crate::metrics::End;
use crate::models::Model;
use crate::trace_context::Trace;
use crate::upstream::Engine;
use crate::usage::Seen;

/// Bytes of a path or of a `User-Agent` that are kept.
const TEXT_BYTES_MAX: usize = 256;

/// What of a request's head is wanted at its end.
#[derive(Debug)]
pub(crate) struct Head {
    pub method: Method,
    /// Without the query, cut at [`TEXT_BYTES_MAX`].
    pub path: Box<str>,
    /// Cut at [`TEXT_BYTES_MAX`]; what is not ASCII is replaced.
    pub user_agent: Option<Box<str>>,
    /// Where the client is, where that is to be told.
    pub client: Option<IpAddr>,
}

impl Head {
    pub(crate) fn of(method: &Method, path: &str, headers: &HeaderMap, client: Option<IpAddr>) -> Self {
        let agent = headers.get(USER_AGENT).map(HeaderValue::as_bytes);
        let agent = agent.map(|bytes| &bytes[..bytes.len().min(TEXT_BYTES_MAX)]);
        Self {
            method: method.clone(),
            path: path[..path.floor_char_boundary(TEXT_BYTES_MAX)].into(),
            user_agent: agent.map(|bytes| String::from_utf8_lossy(bytes).into()),
            client,
        }
    }
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
