//! Routes a request's path to its handler.

use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;

use baton_openai::translate::messages;
use baton_openai::{ApiError, path};
use hyper::body::Incoming;
use hyper::header::HeaderName;
use hyper::{Method, Request, StatusCode};

use super::generate::GenerateApi;
use super::reply::{Reply, error_reply, json, message_error};
use super::task_spawner::TaskSpawner;
use super::{Frontend, control, debug, embeddings, generate, transfer_params};

/// Anthropic's name of the header with a request's name.
const MESSAGES_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// A pending answer.
type ReplyFuture = Pin<Box<dyn Future<Output = Result<Reply, ApiError>> + Send>>;

/// Answers one request, under its name or a new one. Tasks that settle leases have begun when this returns, and
/// continue if the future is dropped.
pub(super) fn route(
    frontend: Arc<Frontend>,
    request: Request<Incoming>,
    begin: &TaskSpawner,
) -> impl Future<Output = Reply> + Send + 'static + use<> {
    let mut request = request;
    let name = generate::name(&mut request);
    let is_of_messages = messages::is_at(request.uri().path());
    // A router acts by the code, which Anthropic's envelope has not, and gives the client its own.
    let is_for_router = request.headers().contains_key(transfer_params::ROUTER_SETTLES);
    let answer = dispatch(frontend, request, begin);
    async move {
        let form = if is_of_messages && !is_for_router { message_error } else { error_reply };
        let mut reply = answer.await.unwrap_or_else(|error| form(&error));
        if let Some(name) = name {
            if is_of_messages {
                reply.headers_mut().insert(MESSAGES_REQUEST_ID, name.clone());
            }
            reply.headers_mut().insert(generate::REQUEST_ID, name);
        }
        reply
    }
}

fn dispatch(frontend: Arc<Frontend>, request: Request<Incoming>, begin: &TaskSpawner) -> ReplyFuture {
    let now = |answer: Result<Reply, ApiError>| -> ReplyFuture { Box::pin(ready(answer)) };
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    if method == Method::POST
        && let Some(api) = GenerateApi::at(&path)
    {
        return Box::pin(generate::answer(frontend, api, request, begin));
    }
    match (&method, path.as_str()) {
        (&Method::POST, "/v1/embeddings") => Box::pin(embeddings::answer(frontend, request, begin)),
        (&Method::POST, messages::COUNT_TOKENS) => {
            Box::pin(control::answer(frontend, request, control::count_tokens))
        }
        (&Method::POST, "/tokenize") => Box::pin(control::answer(frontend, request, control::tokenize)),
        (&Method::POST, "/detokenize") => Box::pin(control::answer(frontend, request, control::detokenize)),
        (&Method::POST, "/kv/release") => Box::pin(begin.spawn(control::release(frontend, request))),
        (&Method::POST, "/abort_requests") => Box::pin(begin.spawn(control::abort(frontend, request))),
        (&Method::POST, "/reset_prefix_cache") => now(control::reset_prefix_cache(&frontend, &request)),
        (&Method::GET, "/debug/kv") => now(debug::debug_kv(&frontend, &request)),
        (&Method::GET, "/debug/kv/events") => Box::pin(debug::events(frontend, request)),
        (&Method::GET, "/debug/kv/digests") => Box::pin(control::kv_digests(frontend, request)),
        (&Method::GET, "/v1/models") => now(Ok(control::models(&frontend))),
        (&Method::GET, "/health" | "/ping") => now(Ok(control::health(&frontend))),
        (&Method::GET, "/version") => {
            now(Ok(json(StatusCode::OK, format!("{{\"version\":\"{}\"}}", version()))))
        }
        (&Method::GET, "/kv_event_sources") => now(Ok(control::kv_event_sources(&frontend))),
        (&Method::GET, "/metrics") => now(Ok(control::metrics(&frontend))),
        (&Method::GET, model) if model.starts_with("/v1/models/") => now(control::model(&frontend, model)),
        (&Method::POST, unknown) if unknown.starts_with("/v1/") && allowed(unknown).is_none() => {
            // An endpoint that this engine does not have: a handoff in the request is released.
            let error = path::not_found(unknown, |meant| allowed(meant).is_some());
            Box::pin(
                begin.spawn(
                    async move { Err(transfer_params::release_unread(frontend, request, error).await) },
                ),
            )
        }
        (_, known) => now(Err(match allowed(known) {
            Some(allowed) => ApiError::method_not_allowed(method.as_str(), allowed),
            None => path::not_found(known, |meant| allowed(meant).is_some()),
        })),
    }
}

fn allowed(path: &str) -> Option<&'static str> {
    if GenerateApi::at(path).is_some() {
        return Some("POST");
    }
    match path {
        "/v1/embeddings"
        | messages::COUNT_TOKENS
        | "/tokenize"
        | "/detokenize"
        | "/kv/release"
        | "/abort_requests"
        | "/reset_prefix_cache" => Some("POST"),
        "/v1/models" | "/health" | "/ping" | "/version" | "/metrics" | "/debug/kv" | "/debug/kv/digests"
        | "/debug/kv/events" | "/kv_event_sources" => Some("GET"),
        _ => None,
    }
}

/// The version of this build.
pub(super) fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
