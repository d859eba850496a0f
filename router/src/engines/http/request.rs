//! A request to an engine, with one typed field per header. No other header of a client is forwarded.

use std::borrow::Cow;

use baton_connector::RequestId;
use baton_openai::TimeLeft;
use bytes::Bytes;
use hyper::Method;
use hyper::header::HeaderValue;

use crate::engines::protocol::COMMAND_PATHS;
use crate::message::payload::Payload;
use crate::message::trace_context::TraceParent;

/// A request. It is cheap to clone, so that it can be sent to another engine.
#[derive(Clone, Debug)]
pub(crate) struct EngineRequest {
    pub method: Method,
    pub path: Cow<'static, str>,
    pub body: Payload,
    /// The request's id, the same on both legs.
    pub id: Option<RequestId>,
    /// The client's credentials. They are not sent where the router has a key of its own.
    pub authorization: Option<HeaderValue>,
    pub trace: Option<TraceParent>,
    /// The data-parallel rank of the request.
    pub rank: Option<u16>,
    /// An engine that refuses the request keeps the lease: the next engine uses it, or this router releases it.
    pub router_settles: bool,
    /// A prefill engine may reply before it has computed the prompt.
    pub early_handoff: bool,
    /// The time that is left for the response.
    pub time: TimeLeft,
}

impl EngineRequest {
    /// A request without an id, such as a probe or a query.
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
            time: TimeLeft::default(),
        }
    }

    pub(crate) fn post(path: &'static str, body: impl Into<Payload>) -> Self {
        Self { method: Method::POST, body: body.into(), ..Self::get(path) }
    }

    /// Whether the request is work, and neither a settlement nor a query.
    pub(super) fn is_work(&self) -> bool {
        self.id.is_some() && !COMMAND_PATHS.contains(&&*self.path)
    }

    pub(super) fn pieces(&self) -> &[Bytes] {
        self.body.pieces()
    }
}
