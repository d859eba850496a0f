//! A test server on its own thread. It counts a token for each word and one for the beginning, and treats requests
//! as its options specify.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Frame, Incoming};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// The behaviour of the server.
#[derive(Clone, Debug)]
pub(super) struct ServerOptions {
    /// Time before the first token.
    pub(super) first: Duration,
    /// Time between two tokens.
    pub(super) gap: Duration,
    /// Number of first requests without the first pause.
    pub(super) quick: usize,
    pub(super) refuse_every: Option<usize>,
    /// Every n-th of the requests that are not refused is cut.
    pub(super) cut_every: Option<usize>,
    pub(super) refuses_ignore_eos: bool,
    pub(super) tokenizes: bool,
    pub(super) tokens_per_event: usize,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            first: Duration::ZERO,
            gap: Duration::ZERO,
            quick: 0,
            refuse_every: None,
            cut_every: None,
            refuses_ignore_eos: false,
            tokenizes: true,
            tokens_per_event: 1,
        }
    }
}

/// The server's counts.
#[derive(Clone, Debug, Default)]
pub(super) struct ServerCounts {
    pub(super) completions: usize,
    pub(super) prompt_tokens: Vec<usize>,
    pub(super) users: Vec<String>,
    /// Requests with token ids.
    pub(super) ids: usize,
    now: usize,
    /// Maximum of concurrent requests.
    pub(super) peak: usize,
}

struct ServerState {
    behaviour: ServerOptions,
    seen: Mutex<ServerCounts>,
    waiting: AtomicUsize,
}

pub(super) struct TestServer {
    address: SocketAddr,
    shared: Arc<ServerState>,
}

type Body = BoxBody<Bytes, std::io::Error>;

impl TestServer {
    pub(super) fn start(behaviour: ServerOptions) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a socket");
        let address = listener.local_addr().expect("an address");
        let shared =
            Arc::new(ServerState { behaviour, seen: Mutex::default(), waiting: AtomicUsize::new(0) });
        let serving = Arc::clone(&shared);
        // The thread ends with the test's process.
        std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(accept(listener, serving));
        });
        Self { address, shared }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(super) fn seen(&self) -> ServerCounts {
        self.shared.seen.lock().expect("no test panics here").clone()
    }

    /// Requests in their first pause.
    pub(super) fn waiting(&self) -> impl Fn() -> usize + Send + 'static {
        let shared = Arc::clone(&self.shared);
        move || shared.waiting.load(Ordering::SeqCst)
    }
}

async fn accept(listener: std::net::TcpListener, shared: Arc<ServerState>) {
    let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
    while let Ok((stream, _)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        // Without this option, an event that waits for the acknowledgement of the previous one is 40 ms late.
        stream.set_nodelay(true).expect("a socket");
        tokio::spawn(async move {
            let service = hyper::service::service_fn(move |request| answer(Arc::clone(&shared), request));
            // A client that disconnects is no error.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

fn whole(status: u16, body: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(body.to_string())).map_err(|never: Infallible| match never {}).boxed();
    Response::builder()
        .status(status)
        .header("content-type", "application/json")
        .body(body)
        .expect("a response")
}

fn error(status: u16, code: &str, message: &str) -> Response<Body> {
    let mut response = whole(status, &json!({"error": {"message": message, "type": "x", "code": code}}));
    response.headers_mut().insert("retry-after-ms", "1".parse().expect("a value"));
    response
}

/// A token for each word or id, and one for the beginning of a text.
fn count(body: &Value) -> usize {
    let text = |text: &str| 1 + text.split_whitespace().count();
    match (&body["prompt"], &body["messages"][0]["content"]) {
        (Value::Array(ids), _) => ids.len(),
        (Value::String(prompt), _) => text(prompt),
        (_, Value::String(content)) => text(content),
        _ => 0,
    }
}

async fn answer(shared: Arc<ServerState>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let path = request.uri().path().to_owned();
    let bytes =
        request.into_body().collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let body: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    Ok(match path.as_str() {
        "/v1/models" => whole(200, &json!({"data": [{"id": "first"}, {"id": "second"}]})),
        "/tokenize" if shared.behaviour.tokenizes => {
            let tokens: Vec<usize> = (0..count(&body)).collect();
            whole(200, &json!({"count": tokens.len(), "tokens": tokens}))
        }
        "/v1/completions" | "/v1/chat/completions" => complete(shared, body, path.contains("chat")).await,
        _ => error(404, "not_found", "nothing here"),
    })
}

async fn complete(shared: Arc<ServerState>, body: Value, chat: bool) -> Response<Body> {
    let behaviour = shared.behaviour.clone();
    if behaviour.refuses_ignore_eos && !body["ignore_eos"].is_null() {
        return error(400, "bad_request", "unknown field ignore_eos");
    }
    let prompt_tokens = count(&body);
    let number = {
        let mut seen = shared.seen.lock().expect("no test panics here");
        seen.completions += 1;
        seen.prompt_tokens.push(prompt_tokens);
        seen.users.extend(body["user"].as_str().map(str::to_owned));
        seen.ids += usize::from(body["prompt"].is_array());
        seen.now += 1;
        seen.peak = seen.peak.max(seen.now);
        seen.completions
    };
    let gone = RequestGuard(Arc::clone(&shared));
    if behaviour.refuse_every.is_some_and(|every| number.is_multiple_of(every)) {
        return error(429, "queue_full", "no room");
    }
    let tokens = body["max_tokens"].as_u64().unwrap_or(1) as usize;
    let usage = move |so_far: usize| json!({"prompt_tokens": prompt_tokens, "completion_tokens": so_far});
    if number > behaviour.quick {
        shared.waiting.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep(behaviour.first).await;
        shared.waiting.fetch_sub(1, Ordering::SeqCst);
    }
    let choice = move |text: &str, finish: Option<&str>, piece: bool| match (chat, piece) {
        (false, _) => json!({"index": 0, "text": text, "finish_reason": finish}),
        (true, true) => json!({"index": 0, "delta": {"content": text}, "finish_reason": finish}),
        (true, false) => json!({"index": 0, "message": {"content": text}, "finish_reason": finish}),
    };
    if body["stream"] != true {
        drop(gone);
        let text = " w".repeat(tokens);
        return whole(
            200,
            &json!({"choices": [choice(&text, Some("length"), false)], "usage": usage(tokens)}),
        );
    }
    let counted = body["stream_options"]["continuous_usage_stats"] == true;
    let cut = behaviour.cut_every.is_some_and(|every| number.is_multiple_of(every));
    let (send, receive) = mpsc::channel::<std::io::Result<Frame<Bytes>>>(1);
    tokio::spawn(async move {
        // The request ends with the last byte.
        let gone = gone;
        let frame = |json: Value| Ok(Frame::data(Bytes::from(format!("data: {json}\n\n"))));
        let mut so_far = 0;
        while so_far < tokens {
            if so_far > 0 {
                tokio::time::sleep(behaviour.gap).await;
            }
            let now = behaviour.tokens_per_event.min(tokens - so_far);
            so_far += now;
            let usage = if counted { usage(so_far) } else { Value::Null };
            let chunk = json!({"choices": [choice(&" w".repeat(now), None, true)], "usage": usage});
            if send.send(frame(chunk)).await.is_err() {
                return;
            }
            if cut {
                let _ = send.send(Err(std::io::Error::other("cut"))).await;
                return;
            }
        }
        drop(gone);
        let last = [
            frame(json!({"choices": [choice("", Some("length"), true)], "usage": null})),
            frame(json!({"choices": [], "usage": usage(tokens)})),
            Ok(Frame::data(Bytes::from_static(b"data: [DONE]\n\n"))),
        ];
        for frame in last {
            if send.send(frame).await.is_err() {
                return;
            }
        }
    });
    let builder = Response::builder().header("content-type", "text/event-stream");
    builder.body(ChannelBody(receive).boxed()).expect("a response")
}

/// A body that is written while it is read.
struct ChannelBody(mpsc::Receiver<std::io::Result<Frame<Bytes>>>);

impl hyper::body::Body for ChannelBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::io::Result<Frame<Bytes>>>> {
        self.0.poll_recv(context)
    }
}

/// Counts a request until it is dropped.
struct RequestGuard(Arc<ServerState>);

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.seen.lock().expect("no test panics here").now -= 1;
    }
}
