//! A client's request, read whole, cleaned and checked completely before any engine hears of it.
//!
//! A body that a decode engine's parser refuses strands the prefill engine's blocks for a whole lease on
//! stock vLLM (30.03 s measured), so nothing that the router can know to be wrong is sent on.

use std::sync::Arc;
use std::time::Duration;

use baton_connector::RequestId;
use baton_openai::{ApiError, Outline, RawBody};
use bytes::Bytes;
use hyper::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use pingora::proxy::Session;

use crate::exchange_driver::Ended;
use crate::features::{Features, Source};
use crate::generation::Generation;
use crate::hygiene::{BodyError, Wire};
use crate::legs::Refusal;
use crate::models::Model;
use crate::policy::Wanted;
use crate::rewrite::ClientRules;
use crate::route::Dialect;

/// The only headers of a client that an engine gets as they are: its credentials. Its trace is checked first.
const PASSED_HEADERS: [HeaderName; 1] = [AUTHORIZATION];

/// A request that engines may hear of.
pub(crate) struct Ask {
    pub dialect: Dialect,
    pub model: Arc<Model>,
    /// As the client sent it, without anything internal.
    pub body: RawBody,
    /// What it says besides the prompt.
    #[expect(dead_code, reason = "policies and admission look at it")]
    pub outline: Outline,
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
        dialect: Dialect,
        body: Bytes,
        headers: &HeaderMap,
        generation: &Generation,
    ) -> Result<Self, ApiError> {
        let limits = &generation.parse_limits;
        let (body, outline) = match dialect {
            Dialect::OpenAi(endpoint) => RawBody::generate(body, endpoint, limits, &ClientRules)?,
            Dialect::Responses => RawBody::responses(body, limits, &ClientRules)?,
        };
        let model = Arc::clone(generation.models.named(outline.request.model.as_deref())?);
        let aggregate = outline.prompts > 1;
        let salt = outline.request.cache_salt.as_deref();
        let source = Source {
            model: &model.name,
            headers,
            body: &body,
            user: outline.request.user.as_deref(),
            salts: salt.as_slice(),
        };
        let features = Features::read(&source, model.needs, &model.features);
        Ok(Self { dialect, model, body, outline, aggregate, features, headers: passed(headers) })
    }

    /// What a policy may know of it.
    pub(crate) fn wanted(&self) -> Wanted<'_> {
        self.features.wanted()
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
/// 415 where it says that it is something else than JSON, 413 over the limit (at once, where the client declares it),
/// 408 when it takes too long, 400 when its framing is broken.
pub(crate) async fn body(
    session: &mut Session,
    limit_bytes: usize,
    within: Duration,
) -> Result<Bytes, Ended> {
    let wire = Wire::of(session).ok_or(Ended::ClientGone)?;
    is_json(&session.req_header().headers)?;
    if wire.declared().is_some_and(|bytes| bytes > limit_bytes as u64) {
        return Err(ApiError::payload_too_large(limit_bytes).into());
    }
    if wire.expects_continue() {
        let said = session.as_downstream_mut().write_continue_response().await;
        said.map_err(|_| Ended::ClientGone)?;
    }
    match tokio::time::timeout(within, wire.body(limit_bytes)).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(BodyError::TooLarge)) => Err(ApiError::payload_too_large(limit_bytes).into()),
        Ok(Err(BodyError::Malformed)) => {
            Err(ApiError::malformed("the body's chunks are malformed").with_code("malformed_request").into())
        }
        Ok(Err(BodyError::Ended)) => {
            Err(ApiError::malformed("the body ended early").with_code("malformed_request").into())
        }
        Err(_elapsed) => Err(ApiError::request_timeout(within).into()),
    }
}

/// Whether a request says that its body is JSON as it is. One that does not say is believed.
fn is_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let mut kinds = headers.get_all(CONTENT_TYPE).iter();
    let kind = |value: &HeaderValue| {
        let value = value.as_bytes();
        let end = value.iter().position(|byte| *byte == b';').unwrap_or(value.len());
        let kind = value[..end].trim_ascii();
        kind.eq_ignore_ascii_case(b"application/json")
            || kind.len() > 17
                && kind[..12].eq_ignore_ascii_case(b"application/")
                && kind[kind.len() - 5..].eq_ignore_ascii_case(b"+json")
    };
    if !kinds.all(kind) {
        return Err(unsupported("the body must be sent as application/json"));
    }
    let mut codings = headers.get_all(CONTENT_ENCODING).iter();
    if !codings.all(|value| value.as_bytes().eq_ignore_ascii_case(b"identity")) {
        return Err(unsupported("the body must be sent without a content coding"));
    }
    Ok(())
}

fn unsupported(message: &str) -> ApiError {
    let mut error = ApiError::malformed(message).with_code("unsupported_media_type");
    error.status = 415;
    error
}
