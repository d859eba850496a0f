//! A client's request, read whole, cleaned and checked completely before any engine hears of it.
//!
//! A body that a decode engine's parser refuses strands the prefill engine's blocks for a whole lease on
//! stock vLLM (30.03 s measured), so nothing that the router can know to be wrong is sent on.

use std::sync::Arc;
use std::time::Duration;

use baton_connector::RequestId;
use baton_openai::{ApiError, Endpoint, GenerateRequest, parse_object};
use bytes::{Bytes, BytesMut};
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH, EXPECT, HeaderMap, HeaderName, HeaderValue};
use pingora::proxy::Session;
use serde_json::{Map, Value};

use crate::admission::body_budget::{Held, Spent};
use crate::config::Priority;
use crate::exchange_driver::Ended;
use crate::features::{Features, Source};
use crate::generation::Generation;
use crate::legs::Refusal;
use crate::models::Model;
use crate::policy::Wanted;
use crate::rewrite;
use crate::tenants::{Auth, Identity};

/// The only headers of a client that an engine gets as they are: its credentials. Its trace is checked first.
const PASSED_HEADERS: [HeaderName; 1] = [AUTHORIZATION];

/// When to come back while too many bodies are held.
const COME_BACK: Duration = Duration::from_secs(1);

/// A request that engines may hear of.
pub(crate) struct Ask {
    pub endpoint: Endpoint,
    pub model: Arc<Model>,
    /// As the client sent it, without anything internal.
    pub body: Map<String, Value>,
    /// A decode engine computes everything: one handoff is one sequence of blocks, and this request has
    /// several prompts.
    pub aggregate: bool,
    /// Of the body, in bytes.
    pub bytes: usize,
    /// What it will cost, in tokens: the prompt's by its length, and what it may generate. Estimated.
    pub tokens: u64,
    /// vLLM's `priority`.
    pub priority: Option<i64>,
    /// What says where it belongs.
    pub features: Features,
    headers: HeaderMap,
}

impl From<ApiError> for Ended {
    fn from(error: ApiError) -> Self {
        Self::Refused(Refusal(error))
    }
}

/// Whose request it is, where the router knows.
pub(crate) struct Owner<'a> {
    pub identity: &'a Identity,
    pub auth: &'a Auth,
}

impl Owner<'_> {
    /// Makes a body this tenant's, and gives its salt: made of the client's own, which can only divide the tenant's
    /// cache further. A priority that the key may not have is taken out: engines with priority scheduling read it.
    fn take(&self, body: &mut Map<String, Value>, priority: Option<i64>, own: Option<&str>) -> String {
        let salt = self.auth.cache_salt(self.identity, own);
        body.insert("cache_salt".to_owned(), Value::String(salt.clone()));
        if priority.is_some_and(|number| Priority::of_number(number) < self.identity.priority_max) {
            body.remove("priority");
        }
        salt
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
        owner: Option<&Owner<'_>>,
    ) -> Result<Self, ApiError> {
        let limits = &generation.parse_limits;
        let raw = body;
        let mut body = parse_object(raw, limits)?;
        rewrite::strip(&mut body);
        let request = GenerateRequest::from_map(endpoint, &body, limits)?;
        let model = Arc::clone(generation.models.named(request.model.as_deref())?);
        let aggregate = request.input.prompts() > 1;
        let priority = body.get("priority").and_then(Value::as_i64);
        let tokens = estimated_tokens(raw.len(), &request);
        let salt = match owner {
            Some(owner) => Some(owner.take(&mut body, priority, request.cache_salt.as_deref())),
            None => request.cache_salt,
        };
        let salt = salt.as_deref();
        let source = Source {
            model: &model.name,
            headers,
            body: raw,
            user: request.user.as_deref(),
            salts: salt.as_slice(),
        };
        let features = Features::read(&source, model.needs, &model.features);
        let (bytes, headers) = (raw.len(), passed(headers));
        Ok(Self { endpoint, model, body, aggregate, bytes, tokens, priority, features, headers })
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

/// Four bytes of text are about one token of English; the JSON around it makes up for what is shorter.
const BYTES_PER_TOKEN: usize = 4;
/// Tokens that a request is taken to generate when it does not say how many it may.
const ANSWER_TOKENS: u64 = 256;

fn estimated_tokens(bytes: usize, request: &GenerateRequest) -> u64 {
    let answer = request.max_tokens.map_or(ANSWER_TOKENS, u64::from);
    let answers = request.input.prompts().max(1) as u64 * u64::from(request.n.max(1));
    (bytes / BYTES_PER_TOKEN) as u64 + answer.saturating_mul(answers)
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
/// 413 over the limit (at once, where the client declares it), 408 when it takes too long, 429 when the router
/// holds `total_bytes` of bodies already.
pub(crate) async fn body(
    session: &mut Session,
    limit_bytes: usize,
    (held, total_bytes): (&mut Held, usize),
    within: Duration,
) -> Result<Bytes, Ended> {
    let declared = session.req_header().headers.get(CONTENT_LENGTH).and_then(|v| v.to_str().ok());
    let declared = declared.and_then(|text| text.parse::<usize>().ok());
    if declared.is_some_and(|bytes| bytes > limit_bytes) {
        return Err(ApiError::payload_too_large(limit_bytes).into());
    }
    let spent = |Spent| ApiError::overloaded("the router is busy with other large requests", COME_BACK);
    // A body that will not fit is not asked for.
    if !held.fits(declared.unwrap_or(0), total_bytes) {
        return Err(spent(Spent).into());
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
            held.take(chunk.len(), total_bytes).map_err(spent)?;
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
