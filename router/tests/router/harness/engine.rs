//! A scripted engine: performs the test's actions and records its requests.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::{Frame, Incoming};
use hyper::header::HeaderMap;
use hyper::service::service_fn;
use hyper::{Request, Response, Version};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;

use crate::harness::serve::{Body, channel, serve_connection};

/// Limit on a test's wait for a state.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The engine's reaction to one request to generate.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    /// Answers at once as a prefill engine, with this handle (`None`: as a stock engine).
    Lease(Option<u128>),
    /// Like [`Action::Lease`], after the test opens the gate.
    LeaseGated(Option<u128>),
    /// Opens a lease while it computes; after the test opens the gate, sends this text or closes the connection.
    LeaseEarly(u128, Option<&'static str>),
    /// A 2xx with this `kv_transfer_params`.
    Reply(Value),
    /// Like [`Action::Reply`], after the test opens the gate.
    ReplyGated(Value),
    /// A 200 with this text.
    Text(&'static str),
    /// A 200 with this JSON.
    Json(Value),
    /// A 200 with these headers and bytes.
    Bytes(Vec<(&'static str, &'static str)>, Vec<u8>),
    /// This status with these headers and bytes.
    Answer(u16, Vec<(&'static str, &'static str)>, Vec<u8>),
    /// A number of bytes of JSON in chunks of at most 64 KiB, then the connection is closed.
    PartAndDie(usize),
    /// A stream of these frames; then the connection is closed (`false`) or the response ends (`true`).
    Frames(Vec<String>, bool),
    /// Streams this many events at once, then `[DONE]`.
    Stream(usize),
    /// Streams events, one each time the test opens the gate; ends after the last.
    StreamGated(usize),
    /// Streams this many events and half of one, then closes the connection.
    StreamAndDie(usize),
    /// Answers in one piece with this many bytes of text.
    Whole(usize),
    /// Like [`Action::Whole`], after the test opens the gate.
    WholeGated(usize),
    /// Announces a long response, sends a part of it and closes the connection.
    HalfAndDie,
    /// Answers with a status and this error body.
    Refuse(u16, Value),
    /// Never answers.
    Hang,
    /// Closes the connection without an answer, after the test opens the gate.
    HangGated,
    /// Closes the connection without an answer.
    Close,
}

/// One request that an engine received.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedRequest {
    pub path: String,
    pub version: Version,
    pub headers: HeaderMap,
    pub body: Value,
    /// The body, unchanged.
    pub raw: Bytes,
}

#[derive(Default)]
struct FakeEngineState {
    requests: Mutex<Vec<ReceivedRequest>>,
    script: Mutex<VecDeque<Action>>,
    last: Mutex<Option<Action>>,
    gate: Gate,
    cut: AtomicUsize,
    connections: AtomicUsize,
    /// The stream limit of HTTP/2.
    streams: AtomicUsize,
    open: AtomicUsize,
    /// The status of answers to abort and release: 0 for 200 with the contract's answer.
    verbs: std::sync::atomic::AtomicU16,
    health_hangs: std::sync::atomic::AtomicBool,
    unwell: std::sync::atomic::AtomicBool,
    /// Half-closed connections are answered, too.
    crossing: std::sync::atomic::AtomicBool,
    /// Applied before the script.
    rule: Mutex<Option<Rule>>,
}

/// Selects the action for a received request; `None` leaves it to the script.
pub(crate) type Rule = Box<dyn Fn(&ReceivedRequest) -> Option<Action> + Send>;

struct Gate(Semaphore);

impl Default for Gate {
    fn default() -> Self {
        Self(Semaphore::new(0))
    }
}

/// A scripted engine on its own port.
pub(crate) struct FakeEngine {
    pub address: SocketAddr,
    inner: Arc<FakeEngineState>,
    server: JoinHandle<()>,
}

impl FakeEngine {
    /// Performs `action` for every request.
    pub(crate) async fn always(action: Action) -> Self {
        Self::scripted(vec![action]).await
    }

    /// Performs each action once, then the last one forever.
    pub(crate) async fn scripted(actions: Vec<Action>) -> Self {
        Self::listening(TcpListener::bind("127.0.0.1:0").await.unwrap(), actions)
    }

    /// Starts an engine at the address of a stopped one.
    pub(crate) async fn at(address: SocketAddr, action: Action) -> Self {
        Self::listening(TcpListener::bind(address).await.unwrap(), vec![action])
    }

    /// Like [`Self::at`], if the port may briefly belong to an outgoing connection.
    pub(crate) async fn back_at(address: SocketAddr, action: Action) -> Self {
        let bound = async {
            loop {
                if let Ok(listener) = TcpListener::bind(address).await {
                    return listener;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let listener = tokio::time::timeout(TIMEOUT, bound).await.expect("the port is free again");
        Self::listening(listener, vec![action])
    }

    fn listening(listener: TcpListener, actions: Vec<Action>) -> Self {
        let address = listener.local_addr().unwrap();
        let inner = Arc::new(FakeEngineState::default());
        inner.streams.store(200, Ordering::SeqCst);
        *inner.last.lock().unwrap() = actions.last().cloned();
        *inner.script.lock().unwrap() = actions.into();
        let server = tokio::spawn(serve(listener, Arc::clone(&inner)));
        Self { address, inner, server }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All requests to generate.
    pub(crate) fn received(&self) -> Vec<ReceivedRequest> {
        let generates = |path: &str| path.starts_with("/v1/") && path != "/v1/models";
        self.all().into_iter().filter(|request| generates(&request.path)).collect()
    }

    /// How often its list of models was asked for.
    pub(crate) fn model_lists(&self) -> usize {
        self.all().into_iter().filter(|request| request.path == "/v1/models").count()
    }

    /// `(handle, reason)` of every release.
    pub(crate) fn releases(&self) -> Vec<(String, String)> {
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        let released = self.all().into_iter().filter(|s| s.path == "/kv/release");
        released.map(|s| (text(&s.body["handle"]), text(&s.body["reason"]))).collect()
    }

    /// Request ids of every abort.
    pub(crate) fn aborts(&self) -> Vec<String> {
        let aborted = self.all().into_iter().filter(|s| s.path == "/abort_requests");
        aborted
            .flat_map(|s| s.body["request_ids"].as_array().cloned().unwrap_or_default())
            .map(|id| id.as_str().unwrap_or_default().to_owned())
            .collect()
    }

    /// All requests, without the router's query for the engine's protocol.
    pub(crate) fn all(&self) -> Vec<ReceivedRequest> {
        let requests = self.inner.requests.lock().unwrap();
        requests.iter().filter(|request| request.path != "/server_info").cloned().collect()
    }

    /// Number of requests whose connection was closed before the end of the response.
    pub(crate) fn cut(&self) -> usize {
        self.inner.cut.load(Ordering::SeqCst)
    }

    /// Number of accepted connections.
    pub(crate) fn connections(&self) -> usize {
        self.inner.connections.load(Ordering::SeqCst)
    }

    /// Number of open connections.
    pub(crate) fn open(&self) -> usize {
        self.inner.open.load(Ordering::SeqCst)
    }

    /// Lacks release and abort from now on, as a stock engine.
    pub(crate) fn without_verbs(self) -> Self {
        self.verbs_answer(404);
        self
    }

    /// Answers release and abort with this status from now on; with 1 not at all, and with 200 as vLLM's own path.
    pub(crate) fn verbs_answer(&self, status: u16) {
        self.inner.verbs.store(status, Ordering::SeqCst);
    }

    /// Leaves liveness probes unanswered from now on, as a stopped process.
    pub(crate) fn unresponsive(self) -> Self {
        self.inner.health_hangs.store(true, Ordering::SeqCst);
        self
    }

    /// Allows so many streams on a new HTTP/2 connection.
    pub(crate) fn with_streams(self, streams: usize) -> Self {
        self.inner.streams.store(streams, Ordering::SeqCst);
        self
    }

    /// Answers half-closed connections from now on, so that replies cross the half-close.
    pub(crate) fn crossing(self) -> Self {
        self.inner.crossing.store(true, Ordering::SeqCst);
        self
    }

    /// Answers liveness probes again.
    pub(crate) fn respond_again(&self) {
        self.inner.health_hangs.store(false, Ordering::SeqCst);
    }

    /// Sets the answer to liveness probes.
    pub(crate) fn set_healthy(&self, well: bool) {
        self.inner.unwell.store(!well, Ordering::SeqCst);
    }

    /// Applies this rule before the script from now on.
    pub(crate) fn with_rule(
        self,
        rule: impl Fn(&ReceivedRequest) -> Option<Action> + Send + 'static,
    ) -> Self {
        *self.inner.rule.lock().unwrap() = Some(Box::new(rule));
        self
    }

    /// Number of liveness probes.
    pub(crate) fn probes(&self) -> usize {
        self.all().iter().filter(|request| request.path == "/health").count()
    }

    /// Permits one gated step.
    pub(crate) fn open_gate(&self) {
        self.inner.gate.0.add_permits(1);
    }

    /// Waits until `state` holds.
    pub(crate) async fn wait(&self, what: &str, state: impl Fn(&Self) -> bool) {
        eventually(what, || state(self)).await;
    }

    /// Stops listening and closes every connection.
    pub(crate) async fn die(mut self) {
        self.server.abort();
        let _ = (&mut self.server).await;
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// Waits until `state` holds, or fails the test.
pub(crate) async fn eventually(what: &str, state: impl Fn() -> bool) {
    let waited = async {
        while !state() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    assert!(tokio::time::timeout(TIMEOUT, waited).await.is_ok(), "waited in vain: {what}");
}

async fn serve(listener: TcpListener, inner: Arc<FakeEngineState>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        stream.set_nodelay(true).unwrap();
        inner.connections.fetch_add(1, Ordering::SeqCst);
        inner.open.fetch_add(1, Ordering::SeqCst);
        let (inner, open) = (Arc::clone(&inner), Arc::clone(&inner));
        let streams = inner.streams.load(Ordering::SeqCst).try_into().unwrap_or(u32::MAX);
        connections.spawn(async move {
            let crossing = inner.crossing.load(Ordering::SeqCst);
            let service = service_fn(move |request| answer(Arc::clone(&inner), request));
            serve_connection(stream, crossing, streams, service).await;
            open.open.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

/// Counts a cut if it is dropped before the response is complete.
struct WorkGuard(Arc<FakeEngineState>, bool);

impl WorkGuard {
    fn done(mut self) {
        self.1 = true;
    }
}

impl Drop for WorkGuard {
    fn drop(&mut self) {
        if !self.1 {
            self.0.cut.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// An error in a handler closes the connection.
async fn answer(
    inner: Arc<FakeEngineState>,
    request: Request<Incoming>,
) -> Result<Response<Body>, std::io::Error> {
    let (head, body) = request.into_parts();
    let work = WorkGuard(Arc::clone(&inner), false);
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    let path = head.uri.path().to_owned();
    let request = ReceivedRequest {
        path: path.clone(),
        version: head.version,
        headers: head.headers,
        body: serde_json::from_slice(&body).unwrap_or(Value::Null),
        raw: body,
    };
    inner.requests.lock().unwrap().push(request.clone());
    let action = inner.rule.lock().unwrap().as_ref().and_then(|rule| rule(&request));
    if let Some(action) = action {
        return perform(action, inner, work).await;
    }
    if !path.starts_with("/v1/") {
        if path == "/health" && inner.health_hangs.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        let verb = path == "/kv/release" || path == "/abort_requests";
        let unwell = path == "/health" && inner.unwell.load(Ordering::SeqCst);
        let status = if unwell {
            503
        } else if verb {
            inner.verbs.load(Ordering::SeqCst)
        } else {
            200
        };
        if status == 1 {
            std::future::pending::<()>().await;
        }
        work.done();
        let body = match (verb, status) {
            (true, 0) => json!({"result": "released", "results": {}}),
            // vLLM's own path in its development mode.
            (true, 200) => json!({"status": "aborted", "aborted": 1}),
            _ => json!({"path": path, "count": 3}),
        };
        return Ok(whole(if status == 0 { 200 } else { status }, &body));
    }
    let action = inner.script.lock().unwrap().pop_front();
    let action = action.or_else(|| inner.last.lock().unwrap().clone()).unwrap();
    perform(action, inner, work).await
}

async fn perform(
    action: Action,
    inner: Arc<FakeEngineState>,
    work: WorkGuard,
) -> Result<Response<Body>, std::io::Error> {
    let response = match action {
        Action::Lease(handle) => whole(200, &handoff_reply(handle)),
        Action::LeaseGated(handle) => {
            inner.gate.0.acquire().await.unwrap().forget();
            whole(200, &handoff_reply(handle))
        }
        Action::LeaseEarly(handle, end) => return Ok(lending(work, handle, end, inner)),
        Action::Reply(params) => whole(200, &json!({"id": "p", "kv_transfer_params": params})),
        Action::ReplyGated(params) => {
            inner.gate.0.acquire().await.unwrap().forget();
            whole(200, &json!({"id": "p", "kv_transfer_params": params}))
        }
        Action::Text(text) => {
            let body = Full::new(Bytes::from_static(text.as_bytes()));
            Response::new(body.map_err(|never: Infallible| match never {}).boxed())
        }
        Action::Json(value) => whole(200, &value),
        Action::Bytes(headers, bytes) => {
            let body = Full::new(Bytes::from(bytes)).map_err(|never: Infallible| match never {});
            let mut response = Response::new(body.boxed());
            for (name, value) in headers {
                response.headers_mut().insert(name, value.parse().unwrap());
            }
            response
        }
        Action::Answer(status, headers, bytes) => {
            let body = Full::new(Bytes::from(bytes)).map_err(|never: Infallible| match never {});
            let mut response = Response::new(body.boxed());
            *response.status_mut() = status.try_into().unwrap();
            for (name, value) in headers {
                response.headers_mut().insert(name, value.parse().unwrap());
            }
            response
        }
        Action::PartAndDie(bytes) => {
            let text = text(bytes).to_string();
            let parts = text.as_bytes()[..bytes].chunks(64 << 10);
            let parts = parts.map(|part| String::from_utf8(part.to_vec()).unwrap()).collect();
            let mut response = framed(work, parts, false);
            response.headers_mut().insert("content-type", "application/json".parse().unwrap());
            return Ok(response);
        }
        Action::Frames(frames, ends) => return Ok(framed(work, frames, ends)),
        Action::Whole(bytes) => whole(200, &text(bytes)),
        Action::WholeGated(bytes) => {
            inner.gate.0.acquire().await.unwrap().forget();
            whole(200, &text(bytes))
        }
        Action::Refuse(status, body) => whole(status, &body),
        Action::Hang => std::future::pending().await,
        Action::HangGated => {
            inner.gate.0.acquire().await.unwrap().forget();
            work.done();
            return Err(std::io::Error::other("closed"));
        }
        Action::Close => {
            work.done();
            return Err(std::io::Error::other("closed"));
        }
        Action::Stream(events) => return Ok(stream(work, events, StreamEnd::Done, None)),
        Action::StreamGated(events) => {
            return Ok(stream(work, events, StreamEnd::Done, Some(Arc::clone(&inner))));
        }
        Action::StreamAndDie(events) => return Ok(stream(work, events, StreamEnd::Die, None)),
        Action::HalfAndDie => {
            work.done();
            let (sender, receiver) = mpsc::channel(2);
            sender.send(Ok(Frame::data(Bytes::from_static(b"{\"half\":")))).await.unwrap();
            tokio::spawn(async move {
                // Long enough to send the head and the first half.
                tokio::time::sleep(Duration::from_millis(50)).await;
                let _ = sender.send(Err(std::io::Error::other("died"))).await;
            });
            let mut response = Response::new(channel(receiver));
            response.headers_mut().insert("content-type", "application/json".parse().unwrap());
            return Ok(response);
        }
    };
    work.done();
    Ok(response)
}

enum StreamEnd {
    Done,
    Die,
}

pub(crate) fn event(n: usize) -> String {
    format!("data: {{\"token\":{n}}}\n\n")
}

fn stream(
    work: WorkGuard,
    events: usize,
    end: StreamEnd,
    gate: Option<Arc<FakeEngineState>>,
) -> Response<Body> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        for n in 0..events {
            if let Some(inner) = &gate {
                let closed = sender.closed();
                tokio::select! {
                    permit = inner.gate.0.acquire() => permit.unwrap().forget(),
                    () = closed => return,
                }
            }
            if sender.send(Ok(Frame::data(event(n).into()))).await.is_err() {
                return;
            }
        }
        let last = match end {
            StreamEnd::Done => sender.send(Ok(Frame::data(Bytes::from_static(b"data: [DONE]\n\n")))).await,
            StreamEnd::Die => {
                let _ = sender.send(Ok(Frame::data(Bytes::from_static(b"data: {\"tok")))).await;
                sender.send(Err(std::io::Error::other("died"))).await
            }
        };
        if last.is_ok() {
            work.done();
        }
    });
    let mut response = Response::new(channel(receiver));
    response.headers_mut().insert("content-type", "text/event-stream; charset=utf-8".parse().unwrap());
    response
}

fn lending(
    work: WorkGuard,
    handle: u128,
    end: Option<&'static str>,
    inner: Arc<FakeEngineState>,
) -> Response<Body> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let params = json!({"kv_transfer_params": handoff_reply(Some(handle))["kv_transfer_params"]});
        if sender.send(Ok(Frame::data(format!("data: {params}\n\n").into()))).await.is_err() {
            return;
        }
        let closed = sender.closed();
        tokio::select! {
            permit = inner.gate.0.acquire() => permit.unwrap().forget(),
            () = closed => return,
        }
        let last = match end {
            Some(end) => Ok(Frame::data(Bytes::from_static(end.as_bytes()))),
            None => Err(std::io::Error::other("died")),
        };
        if sender.send(last).await.is_ok() {
            work.done();
        }
    });
    let mut response = Response::new(channel(receiver));
    response.headers_mut().insert("content-type", "text/event-stream; charset=utf-8".parse().unwrap());
    response
}

fn framed(work: WorkGuard, frames: Vec<String>, ends: bool) -> Response<Body> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        for frame in frames {
            if sender.send(Ok(Frame::data(frame.into()))).await.is_err() {
                return;
            }
        }
        if !ends {
            let _ = sender.send(Err(std::io::Error::other("died"))).await;
        }
        work.done();
    });
    let mut response = Response::new(channel(receiver));
    response.headers_mut().insert("content-type", "text/event-stream; charset=utf-8".parse().unwrap());
    response
}

fn whole(status: u16, body: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(body.to_string())).map_err(|never: Infallible| match never {});
    let mut response = Response::new(body.boxed());
    *response.status_mut() = status.try_into().unwrap();
    response.headers_mut().insert("content-type", "application/json".parse().unwrap());
    response
}

fn text(bytes: usize) -> Value {
    json!({"id": "d", "choices": [{"text": "t".repeat(bytes)}]})
}

/// A complete handoff.
pub(crate) fn handoff(handle: Option<u128>) -> Value {
    json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2]],
        "remote_engine_id": "p", "remote_request_id": "cmpl-1", "remote_host": "127.0.0.1",
        "remote_port": 5600, "tp_size": 1, "remote_num_tokens": 20,
        "remote_handle": handle.map(|h| format!("{h:032x}")), "unknown_to_the_router": [{"kept": true}],
    })
}

fn handoff_reply(handle: Option<u128>) -> Value {
    json!({"id": "p", "choices": [{"text": "", "finish_reason": "length"}],
        "kv_transfer_params": handoff(handle)})
}
