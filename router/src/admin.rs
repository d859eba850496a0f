//! The listener for people and monitors: `/metrics`, `/health`, `/ready`, `/engines`. Apart from the clients' one, and on
//! loopback by default.

mod engines;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::shared::Shared;

/// Monitors connected at once.
const CONNECTIONS_MAX: usize = 64;
/// A monitor that sends its request's head this slowly is cut.
const HEAD_WITHIN: Duration = Duration::from_secs(10);

/// The type of what is not JSON; Prometheus reads its version from it.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What the admin listener tells.
pub(crate) struct Admin {
    pub shared: Arc<Shared>,
    /// Cleared when the router begins to drain.
    pub ready: AtomicBool,
}

/// Serves until it is dropped.
pub(crate) async fn serve(listener: TcpListener, admin: Arc<Admin>) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        let permit = Arc::clone(&room).acquire_owned().await.expect("the semaphore is never closed");
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let admin = Arc::clone(&admin);
        connections.spawn(async move {
            let _permit = permit;
            let answer = service_fn(move |request| {
                let answer = admin.answer(&request);
                async move { Ok::<_, Infallible>(answer) }
            });
            let _ = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_WITHIN)
                .serve_connection(TokioIo::new(stream), answer)
                .await;
        });
        while connections.try_join_next().is_some() {}
    }
}

impl Admin {
    fn answer<B>(&self, request: &Request<B>) -> Response<Full<Bytes>> {
        let json = |value: Option<serde_json::Value>| match value {
            Some(value) => (StatusCode::OK, "application/json", value.to_string()),
            None => (StatusCode::NOT_FOUND, TEXT, "not found\n".to_owned()),
        };
        let text = |status, text: &str| (status, TEXT, text.to_owned());
        let (status, kind, text) = match (request.method(), request.uri().path()) {
            (&Method::POST, path) => json(engines::order(&self.shared, path)),
            (_, "/metrics") => (StatusCode::OK, TEXT, self.shared.metrics.render()),
            (_, "/engines") => json(Some(engines::list(&self.shared))),
            (_, "/health") => text(StatusCode::OK, "ok\n"),
            (_, "/ready") if !self.ready.load(Ordering::Relaxed) => {
                text(StatusCode::SERVICE_UNAVAILABLE, "draining\n")
            }
            (_, "/ready") if !engines::is_ready(&self.shared.generation()) => {
                text(StatusCode::SERVICE_UNAVAILABLE, "no engine\n")
            }
            (_, "/ready") => text(StatusCode::OK, "ready\n"),
            _ => text(StatusCode::NOT_FOUND, "not found\n"),
        };
        let mut response = Response::new(Full::new(Bytes::from(text)));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        response
    }
}
