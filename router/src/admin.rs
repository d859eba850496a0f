//! The listener for people and monitors: `/metrics`, `/health`, `/ready`. Apart from the clients' one, and on
//! loopback by default.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::metrics::Metrics;

/// Monitors connected at once.
const CONNECTIONS_MAX: usize = 64;
/// A monitor that sends its request's head this slowly is cut.
const HEAD_WITHIN: Duration = Duration::from_secs(10);

/// What the admin listener tells.
pub(crate) struct Admin {
    pub metrics: Arc<Metrics>,
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
        let (status, text) = match request.uri().path() {
            "/metrics" => (StatusCode::OK, self.metrics.render()),
            "/health" => (StatusCode::OK, "ok\n".to_owned()),
            "/ready" if self.ready.load(Ordering::Relaxed) => (StatusCode::OK, "ready\n".to_owned()),
            "/ready" => (StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned()),
            _ => (StatusCode::NOT_FOUND, "not found\n".to_owned()),
        };
        let mut response = Response::new(Full::new(Bytes::from(text)));
        *response.status_mut() = status;
        let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
        response.headers_mut().insert(CONTENT_TYPE, kind);
        response
    }
}
