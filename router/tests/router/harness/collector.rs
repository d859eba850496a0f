//! A collector of traces: accepts and stores OTLP over HTTP with JSON.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::harness::engine::eventually;

/// One span in the collector.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub trace: String,
    pub id: String,
    /// Empty: none.
    pub parent: String,
    pub name: String,
    pub kind: u64,
    pub start_ns: u128,
    pub end_ns: u128,
    pub attributes: BTreeMap<String, Value>,
    /// 2: an error.
    pub status: u64,
    pub message: String,
}

#[derive(Default)]
struct CollectorState {
    received: Mutex<Vec<(HeaderMap, Value)>>,
    /// 0 for 200; 1: never answers.
    status: AtomicU16,
}

/// A collector on its own port.
pub(crate) struct Collector {
    pub address: SocketAddr,
    inner: Arc<CollectorState>,
    server: JoinHandle<()>,
}

impl Collector {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, inner) = (listener.local_addr().unwrap(), Arc::new(CollectorState::default()));
        let server = tokio::spawn(serve(listener, Arc::clone(&inner)));
        Self { address, inner, server }
    }

    /// As YAML; `more` are further keys.
    pub(crate) fn yaml(&self, more: &str) -> String {
        format!("telemetry: {{otlp: {{endpoint: 'http://{}'{more}}}}}", self.address)
    }

    /// Sets the status of later answers; 1: no answer.
    pub(crate) fn answers(&self, status: u16) {
        self.inner.status.store(status, Ordering::SeqCst);
    }

    /// The received requests.
    pub(crate) fn received(&self) -> Vec<(HeaderMap, Value)> {
        self.inner.received.lock().unwrap().clone()
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        let received = self.received();
        let list = |value: &Value, name: &str| value[name].as_array().cloned().unwrap_or_default();
        let resources = received.iter().flat_map(|(_, body)| list(body, "resourceSpans"));
        let scopes = resources.flat_map(|resource| list(&resource, "scopeSpans"));
        scopes.flat_map(|scope| list(&scope, "spans")).map(|span| read(&span)).collect()
    }

    /// Waits for at least `count` spans with this name.
    pub(crate) async fn has(&self, name: &str, count: usize) -> Vec<Span> {
        let of = || -> Vec<Span> { self.spans().into_iter().filter(|span| span.name == name).collect() };
        eventually(&format!("{count} spans `{name}`"), || of().len() >= count).await;
        of()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn read(span: &Value) -> Span {
    let text = |name: &str| span[name].as_str().unwrap_or_default().to_owned();
    let nanos = |name: &str| {
        span[name].as_str().and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{span}"))
    };
    let attribute = |pair: &Value| {
        let value = pair["value"].as_object().and_then(|v| v.values().next().cloned()).unwrap_or(Value::Null);
        (pair["key"].as_str().unwrap_or_default().to_owned(), value)
    };
    Span {
        trace: text("traceId"),
        id: text("spanId"),
        parent: text("parentSpanId"),
        name: text("name"),
        kind: span["kind"].as_u64().unwrap_or_default(),
        start_ns: nanos("startTimeUnixNano"),
        end_ns: nanos("endTimeUnixNano"),
        attributes: span["attributes"].as_array().into_iter().flatten().map(attribute).collect(),
        status: span["status"]["code"].as_u64().unwrap_or_default(),
        message: span["status"]["message"].as_str().unwrap_or_default().to_owned(),
    }
}

async fn serve(listener: TcpListener, inner: Arc<CollectorState>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let inner = Arc::clone(&inner);
        connections.spawn(async move {
            let service = service_fn(move |request| take(Arc::clone(&inner), request));
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

async fn take(
    inner: Arc<CollectorState>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let status = inner.status.load(Ordering::SeqCst);
    if status == 1 {
        std::future::pending::<()>().await;
    }
    assert_eq!(head.uri.path(), "/v1/traces");
    if status == 0 {
        inner.received.lock().unwrap().push((head.headers, serde_json::from_slice(&body).unwrap()));
    }
    let mut response = Response::new(Full::new(Bytes::from_static(b"{}")));
    *response.status_mut() = if status == 0 { 200 } else { status }.try_into().unwrap();
    Ok(response)
}
