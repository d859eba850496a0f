//! From a request's path to the code that answers it.

use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;

use baton_openai::{ApiError, Endpoint, path};
use bytes::{Bytes, BytesMut};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body as _, Incoming};
use hyper::header::{CONTENT_TYPE, EXPECT, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};

use super::bodies::{Bodies, Body};
use super::detached::Begin;
use super::{BODY_TIMEOUT, Frontend, control, debug, generate, rejection};

/// What is read of a body that is too large: enough for any handoff, which routers of ours send before the prompt.
const READ_OF_TOO_LARGE: usize = 1 << 20;

/// Every body this server sends.
pub(super) type ReplyBody = BoxBody<Bytes, std::convert::Infallible>;

/// Every answer of this server.
pub(super) type Reply = Response<ReplyBody>;

/// An answer on its way.
type Answering = Pin<Box<dyn Future<Output = Result<Reply, ApiError>> + Send>>;

/// Answers one request, under the name that it has or is given. Whatever others wait for has begun when this returns, and goes on if the future is dropped.
pub(super) fn route(
    frontend: Arc<Frontend>,
    request: Request<Incoming>,
    begin: &Begin,
) -> impl Future<Output = Reply> + Send + 'static + use<> {
    let mut request = request;
    let name = generate::name(&mut request);
    let answer = dispatch(frontend, request, begin);
    async move {
        let mut reply = answer.await.unwrap_or_else(|error| error_reply(&error));
        if let Some(name) = name {
            reply.headers_mut().insert(generate::REQUEST_ID, name);
        }
        reply
    }
}

fn dispatch(frontend: Arc<Frontend>, request: Request<Incoming>, begin: &Begin) -> Answering {
    let now = |answer: Result<Reply, ApiError>| -> Answering { Box::pin(ready(answer)) };
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    match (&method, path.as_str()) {
        (&Method::POST, "/v1/completions" | "/v1/chat/completions") => {
            let endpoint = Endpoint::at(&path).expect("both paths generate");
            Box::pin(generate::answer(frontend, endpoint, request, begin))
        }
        (&Method::POST, "/tokenize") => Box::pin(control::tokenize(frontend, request)),
        (&Method::POST, "/detokenize") => Box::pin(control::detokenize(frontend, request)),
        (&Method::POST, "/kv/release") => Box::pin(begin.begun(control::release(frontend, request))),
        (&Method::POST, "/abort_requests") => Box::pin(begin.begun(control::abort(frontend, request))),
        (&Method::POST, "/reset_prefix_cache") => now(control::reset_prefix_cache(&frontend, &request)),
        (&Method::GET, "/debug/kv") => now(debug::debug_kv(&frontend, &request)),
        (&Method::GET, "/debug/kv/events") => Box::pin(debug::events(frontend, request)),
        (&Method::GET, "/debug/kv/digests") => Box::pin(control::kv_digests(frontend, request)),
        (&Method::GET, "/v1/models") => now(Ok(control::models(&frontend))),
        (&Method::GET, "/health" | "/ping") => now(Ok(control::health(&frontend))),
        (&Method::GET, "/version") => {
            now(Ok(json(StatusCode::OK, format!("{{\"version\":\"{}\"}}", version()))))
        }
        (&Method::GET, "/metrics") => now(Ok(control::metrics(&frontend))),
        (&Method::GET, model) if model.starts_with("/v1/models/") => now(control::model(&frontend, model)),
        (&Method::POST, unknown) if unknown.starts_with("/v1/") && allowed(unknown).is_none() => {
            // Another engine's endpoint: whatever was prefilled for it is given back.
            let error = path::not_found(unknown, |meant| allowed(meant).is_some());
            Box::pin(begin.begun(async move { Err(rejection::of_unread(frontend, request, error).await) }))
        }
        (_, known) => now(Err(match allowed(known) {
            Some(allowed) => ApiError::method_not_allowed(method.as_str(), allowed),
            None => path::not_found(known, |meant| allowed(meant).is_some()),
        })),
    }
}

fn allowed(path: &str) -> Option<&'static str> {
    match path {
        "/v1/completions"
        | "/v1/chat/completions"
        | "/tokenize"
        | "/detokenize"
        | "/kv/release"
        | "/abort_requests"
        | "/reset_prefix_cache" => Some("POST"),
        "/v1/models" | "/health" | "/ping" | "/version" | "/metrics" | "/debug/kv" | "/debug/kv/digests"
        | "/debug/kv/events" => Some("GET"),
        _ => None,
    }
}

/// The version of this build.
pub(super) fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// A JSON answer.
pub(super) fn json(status: StatusCode, body: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(Full::new(body.into()).boxed());
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
}

/// An error in the OpenAI envelope.
pub(super) fn error_reply(error: &ApiError) -> Reply {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut reply = json(status, error.to_bytes());
    for (name, value) in error.headers() {
        if let Ok(value) = HeaderValue::from_str(&value) {
            reply.headers_mut().insert(name, value);
        }
    }
    reply
}

/// Reads a body of at most `limit` bytes.
///
/// A client that leaves before its body is complete is an abort, not a request (hyper keeps the task).
pub(super) async fn read_body(
    request: Request<Incoming>,
    limit: usize,
    bodies: &Arc<Bodies>,
) -> Result<Body, ApiError> {
    if request.body().size_hint().lower() > limit as u64 {
        return Err(ApiError::payload_too_large(limit));
    }
    read_what_comes(request, limit, bodies).await.map_err(|unread| unread.error)
}

/// Why a body was not read to its end, and what had come of it.
pub(super) struct Unread {
    pub(super) error: ApiError,
    pub(super) read: Body,
}

/// As [`read_body`], for requests that may carry a handoff: what was read stays, so that the handoff can be given back.
/// Of a body that is announced as too large the first [`READ_OF_TOO_LARGE`] bytes are read.
pub(super) async fn read_what_comes(
    request: Request<Incoming>,
    limit: usize,
    bodies: &Arc<Bodies>,
) -> Result<Body, Unread> {
    let too_large = request.body().size_hint().lower() > limit as u64;
    // One that asks first is told no, and sends nothing.
    let asks = request.headers().contains_key(EXPECT);
    let most = match (too_large, asks) {
        (true, true) => 0,
        (true, false) => limit.min(READ_OF_TOO_LARGE),
        (false, _) => limit,
    };
    let mut body = request.into_body();
    let (mut bytes, mut share) = (BytesMut::new(), bodies.begin());
    let read = async {
        let mut complete = false;
        while !complete && bytes.len() < most {
            match body.frame().await {
                None => complete = true,
                Some(Err(_)) => return Err(ApiError::client_gone()),
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { continue };
                    let room = most - bytes.len();
                    if let Err(full) = share.take(data.len().min(room)) {
                        // A router puts the handoff in front: it is given back although the body is refused.
                        let head = READ_OF_TOO_LARGE.saturating_sub(bytes.len()).min(data.len()).min(room);
                        bytes.extend_from_slice(&data[..head]);
                        return Err(full);
                    }
                    bytes.extend_from_slice(&data[..data.len().min(room)]);
                    if data.len() > room {
                        return Err(ApiError::payload_too_large(limit));
                    }
                }
            }
        }
        // A body of exactly the limit is not too large if that was its end.
        if !complete && !too_large {
            complete = body.frame().await.is_none();
        }
        if complete && !too_large { Ok(()) } else { Err(ApiError::payload_too_large(limit)) }
    };
    let read = tokio::time::timeout(BODY_TIMEOUT, read).await;
    let read = read.unwrap_or_else(|_| Err(ApiError::request_timeout(BODY_TIMEOUT)));
    let body = share.of(bytes.freeze());
    match read {
        Ok(()) => Ok(body),
        Err(error) => Err(Unread { error, read: body }),
    }
}
