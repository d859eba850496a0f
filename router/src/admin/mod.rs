//! The listener for people and monitors. Apart from the clients' one, and on loopback by default.
//!
//! Which path is what stands in [`Admin::route`], one line each; what it answers is a function in the file of whoever
//! knows it. An answer is text or JSON ([`Answer`]); `?pretty` makes JSON readable. The
//! one request whose body means something is `POST /dry-run`; no other body is read.
//!
//! Bounds: connections, a time for the head (and between two requests), for the body, and for the peer to read.

mod answer;
pub(crate) mod dry_run;
mod engines;
pub(crate) mod explain;
mod kv;
mod patience;
mod status;
mod top;

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

use crate::metrics::Format;
use crate::state::readiness;
use crate::state::shared::Shared;
use crate::tls::server::ServerTls;
pub(crate) use answer::Answer;
use patience::Patience;

/// Monitors connected at once: many more than there are, so that some that say nothing keep no other out.
const CONNECTIONS_MAX: usize = 256;
/// A monitor that sends its request's head this slowly is cut.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
/// A body that takes longer is not waited for.
const BODY_WITHIN: Duration = Duration::from_secs(10);
/// Whoever takes longer to read an answer is cut.
const READ_WITHIN: Duration = Duration::from_secs(30);
const TOO_LARGE: &str = "the body is too large, or broke off";

/// What the admin listener tells.
pub(crate) struct Admin {
    pub shared: Arc<Shared>,
    /// Bodies that are held at once: one.
    bodies: Semaphore,
    /// The engines' books.
    books: kv::Books,
}

/// One request; its body is read where it means something.
pub(crate) struct Asked {
    pub method: Method,
    pub path: String,
    pub query: String,
    pub accept: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// Serves until it is dropped.
pub(crate) async fn serve(listener: TcpListener, tls: Option<Arc<ServerTls>>, admin: Arc<Admin>) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        let permit = Arc::clone(&room).acquire_owned().await.expect("the semaphore is never closed");
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

async fn serve_one(stream: impl AsyncRead + AsyncWrite + Unpin, admin: Arc<Admin>) {
    let answer = service_fn(move |request| {
        let admin = Arc::clone(&admin);
        async move { Ok::<_, Infallible>(admin.answer(request).await) }
    });
    // A monitor that breaks off is not our concern.
    let _ = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WITHIN)
        .serve_connection(TokioIo::new(Patience::new(stream, READ_WITHIN)), answer)
        .await;
}

impl Admin {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, bodies: Semaphore::new(1), books: kv::Books::default() }
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let (head, body) = request.into_parts();
        let (path, generation) = (head.uri.path(), self.shared.generation());
        let refuse =
            |status, message: &str| Answer::error(status, message).into_response(false, &head.method);
        if let Some(why) = generation.access.suspects(path, &head.headers) {
            return refuse(StatusCode::FORBIDDEN, why);
        }
        if !generation.access.allows(path, &head.headers) {
            return refuse(StatusCode::UNAUTHORIZED, "needs `Authorization: Bearer` and the admin token");
        }
        let most = generation.config.limits.body_bytes;
        if body.size_hint().lower() > most as u64 {
            return refuse(StatusCode::PAYLOAD_TOO_LARGE, TOO_LARGE);
        }
        // Nothing else has a body that means anything: it is not read.
        let is_read = head.method == Method::POST && path == "/dry-run";
        let read = async {
            if !is_read {
                return Ok((None, Bytes::new()));
            }
            let one = self.bodies.acquire().await.expect("the semaphore is never closed");
            Limited::new(body, most).collect().await.map(|body| (Some(one), body.to_bytes()))
        };
        let (_one, body) = match tokio::time::timeout(BODY_WITHIN, read).await {
            Ok(Ok(read)) => read,
            Ok(Err(_)) => return refuse(StatusCode::PAYLOAD_TOO_LARGE, TOO_LARGE),
            Err(_elapsed) => return refuse(StatusCode::REQUEST_TIMEOUT, "the body took too long"),
        };
        let query = head.uri.query().unwrap_or_default().to_owned();
        let pretty = query.split('&').any(|part| matches!(part, "pretty" | "pretty=1" | "pretty=true"));
        let accept = head.headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
        let asked = Asked {
            method: head.method.clone(),
            path: path.to_owned(),
            query,
            accept: accept.unwrap_or_default().to_owned(),
            headers: head.headers.clone(),
            body,
        };
        self.route(&asked).await.into_response(pretty, &head.method)
    }

    /// Which path is what. Verbs are `POST`, everything else is `GET`.
    async fn route(&self, asked: &Asked) -> Answer {
        let (get, post) =
            (asked.method == Method::GET || asked.method == Method::HEAD, asked.method == Method::POST);
        let parts: Vec<&str> = asked.path.split('/').skip(1).collect();
        match parts.as_slice() {
            ["health"] if get => Answer::text("ok\n"),
            ["ready"] if get => self.readiness(),
            ["metrics"] if get => self.metrics(&asked.accept),
            ["config"] if get => status::config(&self.shared),
            ["requests"] if get => status::requests(&self.shared, &asked.query),
            ["engines"] if get => Answer::json(engines::list(&self.shared)),
            ["engines", engine @ .., verb] if post => engines::order(&self.shared, &engine.join("/"), verb),
            ["explain"] if get => Answer::json(explain::recent(&self.shared.explain)),
            ["explain", id] if get => status::explain(&self.shared, id),
            ["dry-run"] if post => status::dry_run(&self.shared, asked),
            ["dry-run"] | ["engines", .., "drain" | "undrain"] => Answer::not_allowed("POST"),
            ["debug", "kv"] if get => self.books.snapshot(&self.shared).await,
            ["debug", "kv", "requests", id] if get => self.books.timeline(&self.shared, id).await,
            ["top"] if get => top::page(),
            // A browser is shown the page, and everybody else what there is.
            [""] if get && asked.accept.contains("text/html") => top::page(),
            [""] if get => Answer::text(PATHS),
            ["health" | "ready" | "metrics" | "config" | "engines" | "explain" | "requests" | "top" | ""]
            | ["explain", _]
            | ["debug", "kv"]
            | ["debug", "kv", "requests", _] => Answer::not_allowed("GET"),
            _ => Answer::error(StatusCode::NOT_FOUND, "not found; `/` lists what there is"),
        }
    }

    fn readiness(&self) -> Answer {
        match readiness::readiness(&self.shared) {
            Ok(()) => Answer::text("ready\n"),
            Err(why) => Answer::text(format!("{why}\n")).with_status(StatusCode::SERVICE_UNAVAILABLE),
        }
    }

    fn metrics(&self, accept: &str) -> Answer {
        let format = Format::accepted(accept);
        let page = self.shared.metrics.page(format, |scrape| status::look_up(&self.shared, scrape));
        Answer::text(page).with_type(format.content_type())
    }
}

/// What `/` says.
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
