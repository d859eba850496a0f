//! The listener for people and monitors. Apart from the clients' one, and on loopback by default.
//!
//! Which path is what stands in [`Admin::route`], one line each; what it answers is a function in the file of whoever
//! knows it. An answer is text or JSON ([`Answer`]); `?pretty` makes JSON readable. Bodies of requests are bounded.

mod access;
mod answer;
mod engines;
mod pages;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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

use crate::explain;
use crate::metrics::Format;
use crate::shared::Shared;
use crate::tls::server::ServerTls;
pub(crate) use access::Access;
pub use access::AdminError;
pub(crate) use answer::Answer;

/// Monitors connected at once.
const CONNECTIONS_MAX: usize = 64;
/// A monitor that sends its request's head this slowly is cut.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
/// A body that takes longer is not waited for.
const BODY_WITHIN: Duration = Duration::from_secs(10);
/// The largest body that is read; a dry run is a client's request.
const BODY_BYTES_MAX: usize = 32 << 20;

/// What the admin listener tells.
pub(crate) struct Admin {
    pub shared: Arc<Shared>,
    /// Cleared when the router begins to drain.
    pub ready: AtomicBool,
}

/// One request, its body read.
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
        .serve_connection(TokioIo::new(stream), answer)
        .await;
}

impl Admin {
    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let (head, body) = request.into_parts();
        if !self.shared.generation().access.allows(head.uri.path(), &head.headers) {
            let refused =
                Answer::error(StatusCode::UNAUTHORIZED, "needs `Authorization: Bearer` and the admin token");
            return refused.into_response(false, &head.method);
        }
        let header =
            |name| head.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
        let query = head.uri.query().unwrap_or_default().to_owned();
        let pretty = query.split('&').any(|part| matches!(part, "pretty" | "pretty=1" | "pretty=true"));
        let too_large =
            || Answer::error(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large, or broke off");
        if body.size_hint().lower() > BODY_BYTES_MAX as u64 {
            return too_large().into_response(pretty, &head.method);
        }
        let read = tokio::time::timeout(BODY_WITHIN, Limited::new(body, BODY_BYTES_MAX).collect());
        let answer = match read.await {
            Ok(Ok(body)) => {
                let asked = Asked {
                    method: head.method.clone(),
                    path: head.uri.path().to_owned(),
                    query,
                    accept: header(ACCEPT),
                    headers: head.headers.clone(),
                    body: body.to_bytes(),
                };
                self.route(&asked).await
            }
            Ok(Err(_)) => too_large(),
            Err(_elapsed) => Answer::error(StatusCode::REQUEST_TIMEOUT, "the body took too long"),
        };
        answer.into_response(pretty, &head.method)
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
            ["config"] if get => pages::config(&self.shared),
            ["requests"] if get => pages::requests(&self.shared, &asked.query),
            ["engines"] if get => Answer::json(engines::list(&self.shared)),
            ["engines", engine @ .., verb] if post => engines::order(&self.shared, &engine.join("/"), verb),
            ["explain"] if get => Answer::json(explain::recent(&self.shared.explain)),
            ["explain", id] if get => pages::explain(&self.shared, id),
            ["dry-run"] if post => pages::dry_run(&self.shared, asked),
            ["dry-run"] => Answer::not_allowed("POST"),
            [""] if get => Answer::text(PATHS),
            ["health" | "ready" | "metrics" | "config" | "engines" | "explain" | "requests" | ""]
            | ["explain", _] => Answer::not_allowed("GET"),
            _ => Answer::error(StatusCode::NOT_FOUND, "not found; `/` lists what there is"),
        }
    }

    fn readiness(&self) -> Answer {
        let not_ready = |why: &str| Answer::text(why).with_status(StatusCode::SERVICE_UNAVAILABLE);
        if !self.ready.load(Ordering::Relaxed) {
            return not_ready("draining\n");
        }
        if !engines::is_ready(&self.shared.generation()) {
            return not_ready("no engine\n");
        }
        Answer::text("ready\n")
    }

    fn metrics(&self, accept: &str) -> Answer {
        let format = Format::accepted(accept);
        let page = self.shared.metrics.page(format, |scrape| pages::look_up(&self.shared, scrape));
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
POST /engines/HOST:PORT/undrain   it gets requests again, whatever the configuration says
GET  /explain     the latest requests
GET  /explain/ID  why a request went where it went; ID is the router's or the client's x-request-id
POST /dry-run     where a client's body would go (?path=/v1/chat/completions); nothing is sent
GET  /requests    the requests in flight, the oldest first; ?limit=N
JSON is for machines; ?pretty is for people.
";
