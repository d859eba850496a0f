//! A request to an engine: what it says, each thing as a type of its own. Nothing else of a client's head travels on.

use std::borrow::Cow;

use baton_connector::RequestId;
use bytes::Bytes;
use hyper::Method;
use hyper::header::HeaderValue;

use crate::message::payload::Payload;
use crate::message::trace_context::TraceParent;

/// A request. Cheap to clone, so that another engine can be sent the same.
#[derive(Clone, Debug)]
pub(crate) struct Outgoing {
    pub method: Method,
    pub path: Cow<'static, str>,
    pub body: Payload,
    /// The request's name, the same on both legs.
    pub id: Option<RequestId>,
    /// The client's credentials; not sent to an engine that is shown a key of the router's own.
    pub authorization: Option<HeaderValue>,
    pub trace: Option<TraceParent>,
    /// The data-parallel rank that it is pinned to.
    pub rank: Option<u16>,
    /// An engine that refuses it leaves the lease alone: the next engine gets it, or this router releases it.
    pub router_settles: bool,
    /// A prefill engine may answer before it has computed the prompt.
    pub early_handoff: bool,
}

impl Outgoing {
    /// A question, which nobody asks by name.
    pub(crate) fn get(path: impl Into<Cow<'static, str>>) -> Self {
        Self {
            method: Method::GET,
            path: path.into(),
            body: Bytes::new().into(),
            id: None,
            authorization: None,
            trace: None,
            rank: None,
            router_settles: false,
            early_handoff: false,
        }
    }

    pub(crate) fn post(path: &'static str, body: impl Into<Payload>) -> Self {
        Self { method: Method::POST, body: body.into(), ..Self::get(path) }
    }

    /// Whether it asks for work, and is no settlement and no question.
    pub(super) fn is_work(&self) -> bool {
        self.id.is_some() && !matches!(&*self.path, "/abort_requests" | "/kv/release")
    }

    pub(super) fn pieces(&self) -> &[Bytes] {
        self.body.pieces()
    }
}
