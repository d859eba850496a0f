//! The admin listener, for operators and monitors. It is separate from the clients' listener, and on loopback by
//! default.
//!
//! [`AdminService::route`] maps each path to the function that answers it. A response is text or JSON
//! ([`AdminResponse`]); `?pretty` indents JSON. The listener reads only the body of `POST /dry-run`.
//!
//! Bounds: the number of connections, and the times for a head (also between two requests), for a body, and for
//! reads of a response.

pub(crate) mod dry_run;
mod engines;
pub(crate) mod explain;
mod kv;
mod response;
mod status;
mod top;
mod write_timeout;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body as _, Incoming};
use hyper::header::{ACCEPT, HeaderMap};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::metrics::PageFormat;
use crate::state::readiness;
use crate::state::shared::Shared;
use crate::tls::server::ServerTls;
pub(crate) use response::AdminResponse;
use response::JsonFormat;
use write_timeout::WriteTimeout;

/// Connections open at once. Real monitors are far fewer, so some idle connections keep no monitor out.
const CONNECTIONS_MAX: usize = 256;
/// A connection is cut if a request's head takes longer.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// A body that takes longer is refused.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection is cut if its peer takes longer to read a response.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
const TOO_LARGE: &str = "the body is too large, or broke off";

/// The paths of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdminScope {
    All,
    /// Only `/metrics` and `/health`, for a listener that other hosts reach.
    Metrics,
}

/// State of the admin listener.
pub(crate) struct AdminService {
    pub shared: Arc<Shared>,
    scope: AdminScope,
    /// Permits for request bodies in memory: one.
    bodies: Semaphore,
    /// The latest snapshot of the engines' KV caches.
    snapshots: kv::SnapshotCache,
}

/// One request. `body` is empty where the path has no use for one.
pub(crate) struct AdminRequest {
    pub method: Method,
    pub path: String,
    pub query: String,
    pub accept: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// Accepts and serves connections until the future is dropped.
pub(crate) async fn serve(listener: TcpListener, tls: Option<Arc<ServerTls>>, admin: Arc<AdminService>) {
    let connection_slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        let permit =
            Arc::clone(&connection_slots).acquire_owned().await.expect("the semaphore is never closed");
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        if stream.set_nodelay(true).is_err() {
            continue;
        }
        let (admin, tls) = (Arc::clone(&admin), tls.clone());
        connections.spawn(async move {
            let _permit = permit;
            match tls {
                None => serve_one(stream, admin).await,
                Some(tls) => {
                    if let Some(stream) = tls.accept(stream).await {
                        serve_one(stream, admin).await;
                    }
                }
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn serve_one(stream: impl AsyncRead + AsyncWrite + Unpin, admin: Arc<AdminService>) {
    let answer = service_fn(move |request| {
        let admin = Arc::clone(&admin);
        async move { Ok::<_, Infallible>(admin.answer(request).await) }
    });
    // A connection that breaks off is no error of the router.
    let _ = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(WriteTimeout::new(stream, WRITE_TIMEOUT)), answer)
        .await;
}

impl AdminService {
    pub(crate) fn new(shared: Arc<Shared>, scope: AdminScope) -> Self {
        Self { shared, scope, bodies: Semaphore::new(1), snapshots: kv::SnapshotCache::default() }
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let (head, body) = request.into_parts();
        let (path, generation) = (head.uri.path(), self.shared.generation());
        let refuse = |status, message: &str| {
            AdminResponse::error(status, message).into_response(JsonFormat::Compact, &head.method)
        };
        if let Some(why) = generation.access.browser_signs(path, &head.headers) {
            return refuse(StatusCode::FORBIDDEN, why);
        }
        if !generation.access.allows(path, &head.headers) {
            return refuse(StatusCode::UNAUTHORIZED, "needs `Authorization: Bearer` and the admin token");
        }
        let most = generation.config.limits.body_bytes;
        if body.size_hint().lower() > most as u64 {
            return refuse(StatusCode::PAYLOAD_TOO_LARGE, TOO_LARGE);
        }
        // All other paths have no use for a body.
        let is_read = head.method == Method::POST && path == "/dry-run";
        let read = async {
            if !is_read {
                return Ok((None, Bytes::new()));
            }
            let one = self.bodies.acquire().await.expect("the semaphore is never closed");
            Limited::new(body, most).collect().await.map(|body| (Some(one), body.to_bytes()))
        };
        let (_one, body) = match tokio::time::timeout(BODY_TIMEOUT, read).await {
            Ok(Ok(read)) => read,
            Ok(Err(_)) => return refuse(StatusCode::PAYLOAD_TOO_LARGE, TOO_LARGE),
            Err(_elapsed) => return refuse(StatusCode::REQUEST_TIMEOUT, "the body took too long"),
        };
        let query = head.uri.query().unwrap_or_default().to_owned();
        let pretty = query.split('&').any(|part| matches!(part, "pretty" | "pretty=1" | "pretty=true"));
        let format = if pretty { JsonFormat::Pretty } else { JsonFormat::Compact };
        let accept = head.headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
        let request = AdminRequest {
            method: head.method.clone(),
            path: path.to_owned(),
            query,
            accept: accept.unwrap_or_default().to_owned(),
            headers: head.headers.clone(),
            body,
        };
        self.route(&request).await.into_response(format, &head.method)
    }

    /// Maps a path to its response. Verbs are `POST`, all other paths are `GET`.
    async fn route(&self, request: &AdminRequest) -> AdminResponse {
        let (get, post) =
            (request.method == Method::GET || request.method == Method::HEAD, request.method == Method::POST);
        let parts: Vec<&str> = request.path.split('/').skip(1).collect();
        match parts.as_slice() {
            parts if self.scope == AdminScope::Metrics && !matches!(parts, ["health" | "metrics"]) => {
                AdminResponse::error(StatusCode::NOT_FOUND, "this listener has /metrics and /health")
            }
            ["health"] if get => AdminResponse::text("ok\n"),
            ["ready"] if get => self.readiness(),
            ["metrics"] if get => self.metrics(&request.accept),
            ["config"] if get => status::config(&self.shared),
            ["requests"] if get => status::requests(&self.shared, &request.query),
            ["engines"] if get => AdminResponse::json(engines::list(&self.shared)),
            ["engines", engine @ .., verb] if post => {
                engines::apply_order(&self.shared, &engine.join("/"), verb)
            }
            ["explain"] if get => AdminResponse::json(explain::list_recent(&self.shared.explanations)),
            ["explain", id] if get => status::explain(&self.shared, id),
            ["dry-run"] if post => status::dry_run(&self.shared, request),
            ["dry-run"] | ["engines", .., "drain" | "undrain"] => AdminResponse::method_not_allowed("POST"),
            ["debug", "kv"] if get => self.snapshots.snapshot(&self.shared).await,
            ["debug", "kv", "requests", id] if get => self.snapshots.timeline(&self.shared, id).await,
            ["top"] if get => top::page(),
            // A browser gets the page, all other clients the list of paths.
            [""] if get && request.accept.contains("text/html") => top::page(),
            [""] if get => AdminResponse::text(PATHS),
            ["health" | "ready" | "metrics" | "config" | "engines" | "explain" | "requests" | "top" | ""]
            | ["explain", _]
            | ["debug", "kv"]
            | ["debug", "kv", "requests", _] => AdminResponse::method_not_allowed("GET"),
            _ => AdminResponse::error(StatusCode::NOT_FOUND, "not found; `/` lists what there is"),
        }
    }

    fn readiness(&self) -> AdminResponse {
        match readiness::readiness(&self.shared) {
            Ok(()) => AdminResponse::text("ready\n"),
            Err(why) => AdminResponse::text(format!("{why}\n")).with_status(StatusCode::SERVICE_UNAVAILABLE),
        }
    }

    fn metrics(&self, accept: &str) -> AdminResponse {
        let format = PageFormat::accepted(accept);
        let page = self.shared.metrics.page(format, |scrape| status::collect_samples(&self.shared, scrape));
        AdminResponse::text(page).with_type(format.content_type())
    }
}

/// The response for `/`.
const PATHS: &str = "\
GET  /health      whether the router lives
GET  /ready       503 once it drains, and while no decode engine can be used
GET  /metrics     Prometheus text, or OpenMetrics for those who accept it
GET  /config      the configuration in effect and its number
GET  /engines     every engine and what is known of it
POST /engines/HOST:PORT/drain     it gets nothing new, and finishes what it has
POST /engines/HOST:PORT/undrain   it gets requests again, also where the configuration drains it
GET  /explain     the latest requests
GET  /explain/ID  why a request went where it went; ID is the router's or the client's x-request-id
POST /dry-run     where a client's body would go (?path=/v1/chat/completions); nothing is sent; with
                  `auth` ?tenant=NAME says whose it is
GET  /requests    the requests in flight, the oldest first; ?limit=N
GET  /top         the deployment on one page, for a browser
GET  /debug/kv    the same as JSON: every engine's blocks, leases and why they are held, requests by phase
GET  /debug/kv/requests/ID  one request from its arrival to the release of its last block
JSON is for machines; ?pretty is for people.
";
