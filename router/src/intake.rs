//! A client's request, read whole, cleaned and checked completely before any engine hears of it.
//!
//! A body that a decode engine's parser refuses strands the prefill engine's blocks for a whole lease on
//! stock vLLM (30.03 s measured), so nothing that the router can know to be wrong is sent on.

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use baton_connector::RequestId;
use baton_openai::{ApiError, Endpoint, GenerateRequest, parse_object};
use bytes::{Bytes, BytesMut};
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH, EXPECT, HeaderMap, HeaderName, HeaderValue};
use pingora::protocols::l4::socket::SocketAddr;
use pingora::proxy::Session;
use serde_json::{Map, Value};

use crate::exchange_driver::Ended;
use crate::features::{Features, Source};
use crate::generation::Generation;
use crate::legs::Refusal;
use crate::models::Model;
use crate::policy::Wanted;
use crate::rewrite;

/// The only headers of a client that an engine gets as they are: its credentials. Its trace is checked first.
const PASSED_HEADERS: [HeaderName; 1] = [AUTHORIZATION];

/// A request that engines may hear of.
pub(crate) struct Ask {
    pub endpoint: Endpoint,
    pub model: Arc<Model>,
    /// As the client sent it, without anything internal.
    pub body: Map<String, Value>,
    /// A decode engine computes everything: one handoff is one sequence of blocks, and this request has
    /// several prompts.
    pub aggregate: bool,
    /// What says where it belongs.
    pub features: Features,
    headers: HeaderMap,
}

impl From<ApiError> for Ended {
    fn from(error: ApiError) -> Self {
        Self::Refused(Refusal(error))
    }
}

impl Ask {
    /// Reads a body.
    ///
    /// # Errors
    /// What the client is to be told; nothing of the request has left the router.
    pub(crate) fn read(
        endpoint: Endpoint,
        body: &[u8],
        headers: &HeaderMap,
        generation: &Generation,
    ) -> Result<Self, ApiError> {
        let limits = &generation.parse_limits;
        let raw = body;
        let mut body = parse_object(raw, limits)?;
        rewrite::strip(&mut body);
        let request = GenerateRequest::from_map(endpoint, &body, limits)?;
        let model = Arc::clone(generation.models.named(request.model.as_deref())?);
        let aggregate = request.input.prompts() > 1;
        let salt = request.cache_salt.as_deref();
        let source = Source {
            model: &model.name,
            headers,
            body: raw,
            user: request.user.as_deref(),
            salts: salt.as_slice(),
        };
        let features = Features::read(&source, model.needs, &model.features);
        Ok(Self { endpoint, model, body, aggregate, features, headers: passed(headers) })
    }

    /// What a policy may know of it.
    pub(crate) fn wanted(&self) -> Wanted<'_> {
        self.features.wanted()
    }

    /// Who sent it, as a hash: its credentials, or its address where it has none.
    pub(crate) fn source(&self, peer: Option<&SocketAddr>) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        match self.headers.get(AUTHORIZATION) {
            Some(credentials) => credentials.hash(&mut hasher),
            None => peer.and_then(|peer| peer.as_inet()).map(|peer| peer.ip()).hash(&mut hasher),
        }
        hasher.finish()
    }

    /// Its credentials.
    pub(crate) fn authorization(&self) -> Option<HeaderValue> {
        self.headers.get(AUTHORIZATION).cloned()
    }

    /// The headers of both legs.
    pub(crate) fn engine_headers(&self, request: &RequestId) -> HeaderMap {
        named(self.headers.clone(), request)
    }
}

/// What an engine gets of a client's headers.
pub(crate) fn passed(headers: &HeaderMap) -> HeaderMap {
    let mut passed = HeaderMap::new();
    for name in PASSED_HEADERS {
        if let Some(value) = headers.get(&name) {
            passed.insert(name, value.clone());
        }
    }
    passed
}

/// The headers with the request's id.
pub(crate) fn named(mut headers: HeaderMap, request: &RequestId) -> HeaderMap {
    let id = HeaderValue::from_str(request.as_str()).expect("a request id is printable ASCII");
    headers.insert("x-request-id", id);
    headers
}

/// Reads the whole body of a request.
///
/// # Errors
/// 413 over the limit (at once, where the client declares it), 408 when it takes too long.
pub(crate) async fn body(
    session: &mut Session,
    limit_bytes: usize,
    within: Duration,
) -> Result<Bytes, Ended> {
    let declared = session.req_header().headers.get(CONTENT_LENGTH).and_then(|v| v.to_str().ok());
    let declared = declared.and_then(|text| text.parse::<usize>().ok());
    if declared.is_some_and(|bytes| bytes > limit_bytes) {
        return Err(ApiError::payload_too_large(limit_bytes).into());
    }
    if session.req_header().headers.contains_key(EXPECT) {
        let said = session.as_downstream_mut().write_continue_response().await;
        said.map_err(|_| Ended::ClientGone)?;
    }
    let read = async {
        let mut first = Bytes::new();
        let mut rest = BytesMut::new();
        while let Some(chunk) =
            session.as_downstream_mut().read_request_body().await.map_err(|_| Ended::ClientGone)?
        {
            if first.len() + rest.len() + chunk.len() > limit_bytes {
                return Err(ApiError::payload_too_large(limit_bytes).into());
            }
            if first.is_empty() && rest.is_empty() {
                first = chunk;
            } else {
                if rest.is_empty() {
                    rest.reserve(declared.unwrap_or(first.len() + chunk.len()));
                    rest.extend_from_slice(&std::mem::take(&mut first));
                }
                rest.extend_from_slice(&chunk);
            }
        }
        Ok(if rest.is_empty() { first } else { rest.freeze() })
    };
    match tokio::time::timeout(within, read).await {
        Ok(body) => body,
        Err(_elapsed) => Err(ApiError::request_timeout(within).into()),
    }
}
