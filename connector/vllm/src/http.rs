//! The HTTP port: verbs, state, events and metrics, as Baton's engine serves them, for routers and tools.
//!
//! | path | does |
//! |---|---|
//! | `POST /kv/release` | ends a lease, by handle or by request id |
//! | `POST /abort_requests` | ends requests by name |
//! | `POST /kv/refused` | gives the lease of a refused request back to its producer |
//! | `GET /debug/kv`, `/debug/kv/events` | state, for the cluster |
//! | `GET /health`, `/metrics` | for operators. With `wait_ms` in the query, `/health` waits for the engine's drain |
//!
//! Up to half of the connections wait for the drain or an event. A further request is answered as after its wait, and
//! its connection ends, so that verbs find a free one.
//!
//! The port is for routers, tools and vLLM's front end, never for clients. If a cluster secret is configured (beyond
//! loopback it must be), callers need it in the header `x-baton-cluster-secret`, except for metrics and for health
//! without a wait.

mod state;
mod verbs;

use std::convert::Infallible;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use baton_connector::Epoch;
use baton_connector_leases::event_log::EventLog;
use baton_openai::cluster::{self, EventQuery, SECRET_HEADER};
use baton_openai::{ApiError, Code, path};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Body as _, Incoming};
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::{Notify, Semaphore, SemaphorePermit};

use crate::config::Config;
use crate::consumer::ConsumerSide;
use crate::metrics::CoreMetrics;
use crate::pool::PoolView;
use crate::producer::ProducerSide;
use crate::signals::Signals;

/// Limit of the concurrent connections; a further one waits in the listener's backlog.
const CONNECTIONS_MAX: usize = 64;

/// Limit of the requests that wait for the drain or an event.
pub(crate) const WAITS_MAX: usize = CONNECTIONS_MAX / 2;

/// The head of a request, and its body, must arrive within this time each.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);

/// Limit of the bytes of a body.
const BODY_BYTES_MAX: usize = 1 << 20;

/// Limit of a refused handoff with a long block table.
const REFUSED_BYTES_MAX: usize = 8 << 20;

/// When a client may retry a request that a draining engine refuses, as with Baton's engine.
const DRAINING_RETRY: Duration = Duration::from_secs(1);

/// Pause after a failure to accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// How long requests in progress may take at the stop.
const STOP_WAIT: Duration = Duration::from_millis(100);

/// The response type of all endpoints.
type Reply = Response<Full<Bytes>>;

/// What the endpoints need of a core.
pub(crate) struct HttpContext {
    pub(crate) config: Arc<Config>,
    pub(crate) epoch: Epoch,
    pub(crate) producer: Arc<ProducerSide>,
    pub(crate) consumer: Arc<ConsumerSide>,
    pub(crate) pool: Arc<PoolView>,
    pub(crate) log: Arc<EventLog>,
    pub(crate) metrics: Arc<CoreMetrics>,
    pub(crate) signals: Arc<Signals>,
    /// Of [`WAITS_MAX`] permits.
    pub(crate) waits: Semaphore,
}

/// Serves until `stop`, on the calling thread.
///
/// # Errors
/// When the system refuses the runtime or the listener.
pub(crate) fn serve(context: &Arc<HttpContext>, listener: TcpListener, stop: &Notify) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let served = runtime.block_on(accept(context, listener, stop));
    runtime.shutdown_timeout(STOP_WAIT);
    served
}

async fn accept(context: &Arc<HttpContext>, listener: TcpListener, stop: &Notify) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut protocol = http1::Builder::new();
    protocol.timer(TokioTimer::new()).header_read_timeout(MESSAGE_TIMEOUT);
    loop {
        let next = async {
            let permit = Arc::clone(&permits).acquire_owned().await.expect("the semaphore is never closed");
            (permit, listener.accept().await)
        };
        let (permit, accepted) = tokio::select! {
            next = next => next,
            () = stop.notified() => return Ok(()),
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, or a connection that died in the backlog. Neither ends the server.
                tracing::warn!(event = "vllm_http_accept_failed", %error, "cannot accept connections of routers");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Without the option, small responses may be delayed.
        let _ = stream.set_nodelay(true);
        let context = Arc::clone(context);
        let service = service_fn(move |request| {
            let context = Arc::clone(&context);
            async move { Ok::<_, Infallible>(answer(&context, request).await) }
        });
        let connection = protocol.serve_connection(TokioIo::new(stream), service);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::trace!(event = "vllm_http_connection_ended", %error, "connection of a router ended");
            }
            drop(permit);
        });
    }
}

async fn answer(context: &HttpContext, request: Request<Incoming>) -> Reply {
    dispatch(context, request).await.unwrap_or_else(|error| error_reply(&error))
}

async fn dispatch(context: &HttpContext, request: Request<Incoming>) -> Result<Reply, ApiError> {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    match (&method, path.as_str()) {
        (&Method::POST, "/kv/release") => {
            let body = control_body(context, request, BODY_BYTES_MAX).await?;
            verbs::release(context, &body)
        }
        (&Method::POST, "/abort_requests") => {
            let body = control_body(context, request, BODY_BYTES_MAX).await?;
            verbs::abort(context, &body)
        }
        (&Method::POST, "/kv/refused") => {
            let body = control_body(context, request, REFUSED_BYTES_MAX).await?;
            verbs::refused(context, &body)
        }
        (&Method::GET, "/debug/kv") => {
            authorize(context, request.headers())?;
            Ok(state::debug_kv(context).await)
        }
        (&Method::GET, "/debug/kv/events") => {
            authorize(context, request.headers())?;
            let query = EventQuery::parse(request.uri().query().unwrap_or_default())?;
            let slot = WaitSlot::take(&context.waits, query.wait);
            let reply = state::events(context, &EventQuery { wait: slot.wait, ..query }).await;
            Ok(slot.end(reply))
        }
        (&Method::GET, "/health") => {
            let wait = cluster::wait(request.uri().query().unwrap_or_default())?;
            if !wait.is_zero() {
                authorize(context, request.headers())?;
            }
            let slot = WaitSlot::take(&context.waits, wait);
            let reply = health(context, slot.wait).await?;
            Ok(slot.end(reply))
        }
        (&Method::GET, "/metrics") => Ok(state::metrics(context)),
        (_, known) => Err(match allowed(known) {
            Some(allowed) => ApiError::method_not_allowed(method.as_str(), allowed),
            None => path::not_found(known, |meant| allowed(meant).is_some()),
        }),
    }
}

fn allowed(path: &str) -> Option<&'static str> {
    match path {
        "/kv/release" | "/abort_requests" | "/kv/refused" => Some("POST"),
        "/debug/kv" | "/debug/kv/events" | "/health" | "/metrics" => Some("GET"),
        _ => None,
    }
}

/// Occupied while a request waits.
struct WaitSlot<'a> {
    /// Zero if the limit is reached.
    wait: Duration,
    is_refused: bool,
    _permit: Option<SemaphorePermit<'a>>,
}

impl<'a> WaitSlot<'a> {
    fn take(waits: &'a Semaphore, asked: Duration) -> Self {
        let permit = waits.try_acquire().ok().filter(|_| !asked.is_zero());
        let wait = if permit.is_some() { asked } else { Duration::ZERO };
        Self { wait, is_refused: wait != asked, _permit: permit }
    }

    /// The answer. The caller of a refused wait asks again soon, and must not keep its connection until then.
    fn end(&self, mut reply: Reply) -> Reply {
        if self.is_refused {
            reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        reply
    }
}

/// 200 while the engine takes requests, 503 as soon as it drains.
async fn health(context: &HttpContext, wait: Duration) -> Result<Reply, ApiError> {
    if context.signals.drains_within(wait).await {
        let error = ApiError::unavailable("the engine is shutting down", DRAINING_RETRY);
        return Err(error.with_code(Code::Draining));
    }
    Ok(json(StatusCode::OK, "{\"status\":\"ok\"}"))
}

/// Refuses a caller without an accepted cluster secret.
fn authorize(context: &HttpContext, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(secret) = &context.config.secret else { return Ok(()) };
    let shown = headers.get(SECRET_HEADER).map(HeaderValue::as_bytes).unwrap_or_default();
    cluster::check_secret(shown, secret.accepted())
}

/// Authorizes a caller and reads its body.
async fn control_body(
    context: &HttpContext,
    request: Request<Incoming>,
    limit: usize,
) -> Result<Bytes, ApiError> {
    authorize(context, request.headers())?;
    if request.body().size_hint().lower() > limit as u64 {
        return Err(ApiError::payload_too_large(limit));
    }
    let body = Limited::new(request.into_body(), limit).collect();
    match tokio::time::timeout(MESSAGE_TIMEOUT, body).await {
        Err(_) => Err(ApiError::request_timeout(MESSAGE_TIMEOUT)),
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ApiError::payload_too_large(limit)),
        Ok(Err(_)) => Err(ApiError::client_gone()),
    }
}

/// A JSON answer.
fn json(status: StatusCode, body: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(Full::new(body.into()));
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
}

/// An error in the OpenAI envelope.
fn error_reply(error: &ApiError) -> Reply {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut reply = json(status, error.to_bytes());
    for (name, value) in error.headers() {
        if let Ok(value) = HeaderValue::from_str(&value) {
            reply.headers_mut().insert(name, value);
        }
    }
    reply
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_beyond_the_limit_does_not_wait_and_ends_its_connection() {
        let (waits, asked) = (Semaphore::new(1), Duration::from_secs(10));
        let none = WaitSlot::take(&waits, Duration::ZERO);
        let first = WaitSlot::take(&waits, asked);
        let second = WaitSlot::take(&waits, asked);
        assert_eq!((none.wait, first.wait, second.wait), (Duration::ZERO, asked, Duration::ZERO));
        for (slot, ends) in [(&none, false), (&first, false), (&second, true)] {
            let reply = slot.end(json(StatusCode::OK, ""));
            assert_eq!(reply.headers().contains_key(CONNECTION), ends);
        }
        drop(first);
        assert_eq!(WaitSlot::take(&waits, asked).wait, asked);
    }
}
