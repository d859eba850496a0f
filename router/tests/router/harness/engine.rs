//! A scripted engine: does what the test says and remembers what it was asked.

use std::collections::VecDeque;
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
use hyper::header::HeaderMap;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;

/// How long a test waits for a state before it fails.
const PATIENCE: Duration = Duration::from_secs(10);

/// What an engine does with one request to generate.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    /// Answers at once as a prefill engine, with this handle (none: as a stock engine).
    Lend(Option<u128>),
    /// As [`Act::Lend`], once the test opens the gate.
    LendWhenTold(Option<u128>),
    /// Lends what it still computes; once the test opens the gate it says this, or closes the connection.
    LendEarly(u128, Option<&'static str>),
    /// A 2xx with this `kv_transfer_params`.
    Reply(Value),
    /// As [`Act::Reply`], once the test opens the gate.
    ReplyWhenTold(Value),
    /// A 200 with this text.
    Text(&'static str),
    /// A 200 with this JSON.
    Json(Value),
    /// A 200 with these headers and bytes.
    Bytes(Vec<(&'static str, &'static str)>, Vec<u8>),
    /// This status with these headers and bytes.
    Answer(u16, Vec<(&'static str, &'static str)>, Vec<u8>),
    /// So many bytes of JSON, each a chunk of at most 64 KiB, then the connection is closed.
    PartAndDie(usize),
    /// A stream of these frames, then the connection is closed (`false`) or the answer ends (`true`).
    Frames(Vec<String>, bool),
    /// Streams so many events at once, then `[DONE]`.
    Stream(usize),
    /// Streams events, each when the test opens the gate; ends after the last.
    StreamWhenTold(usize),
    /// Streams so many events and a half, then closes the connection.
    StreamAndDie(usize),
    /// Answers in one piece of so many bytes of text.
    Whole(usize),
    /// As [`Act::Whole`], once the test opens the gate.
    WholeWhenTold(usize),
    /// Announces a long answer, sends a part of it and closes the connection.
    HalfAndDie,
    /// Answers with a status and this error body.
    Refuse(u16, Value),
    /// Never answers.
    Hang,
    /// Closes the connection without an answer.
    Close,
}

/// One request that an engine saw.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub path: String,
    pub headers: HeaderMap,
    pub body: Value,
    /// The body as it came.
    pub raw: Bytes,
}

#[derive(Default)]
struct Inner {
    seen: Mutex<Vec<Seen>>,
    script: Mutex<VecDeque<Act>>,
    last: Mutex<Option<Act>>,
    gate: Gate,
    cut: AtomicUsize,
    connections: AtomicUsize,
    open: AtomicUsize,
    /// What its verbs answer: 0 for 200.
    verbs: std::sync::atomic::AtomicU16,
    deaf: std::sync::atomic::AtomicBool,
    unwell: std::sync::atomic::AtomicBool,
    /// It answers whoever has half-closed, too.
    crossing: std::sync::atomic::AtomicBool,
    /// Asked before the script.
    rule: Mutex<Option<Rule>>,
}

/// What an engine does with a request that it has just seen; `None` leaves it to the script.
pub(crate) type Rule = Box<dyn Fn(&Seen) -> Option<Act> + Send>;

struct Gate(Semaphore);

impl Default for Gate {
    fn default() -> Self {
        Self(Semaphore::new(0))
    }
}

/// A scripted engine on a port of its own.
pub(crate) struct FakeEngine {
    pub address: SocketAddr,
    inner: Arc<Inner>,
    server: JoinHandle<()>,
}

type Body = BoxBody<Bytes, std::io::Error>;

impl FakeEngine {
    /// Does `act` for every request.
    pub(crate) async fn always(act: Act) -> Self {
        Self::scripted(vec![act]).await
    }

    /// Does each act once, then the last one for ever.
    pub(crate) async fn scripted(acts: Vec<Act>) -> Self {
        Self::listening(TcpListener::bind("127.0.0.1:0").await.unwrap(), acts)
    }

    /// An engine that comes up where another went down.
    pub(crate) async fn at(address: SocketAddr, act: Act) -> Self {
        Self::listening(TcpListener::bind(address).await.unwrap(), vec![act])
    }

    /// As [`Self::at`], where the port may be somebody's outgoing connection for a moment.
    pub(crate) async fn back_at(address: SocketAddr, act: Act) -> Self {
        let bound = async {
            loop {
                if let Ok(listener) = TcpListener::bind(address).await {
                    return listener;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let listener = tokio::time::timeout(PATIENCE, bound).await.expect("the port is free again");
        Self::listening(listener, vec![act])
    }

    fn listening(listener: TcpListener, acts: Vec<Act>) -> Self {
        let address = listener.local_addr().unwrap();
        let inner = Arc::new(Inner::default());
        *inner.last.lock().unwrap() = acts.last().cloned();
        *inner.script.lock().unwrap() = acts.into();
        let server = tokio::spawn(serve(listener, Arc::clone(&inner)));
        Self { address, inner, server }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Every request to generate.
    pub(crate) fn asked(&self) -> Vec<Seen> {
        self.all().into_iter().filter(|s| s.path.starts_with("/v1/")).collect()
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

    pub(crate) fn all(&self) -> Vec<Seen> {
        self.inner.seen.lock().unwrap().clone()
    }

    /// Requests whose connection was closed before they were answered to the end.
    pub(crate) fn cut(&self) -> usize {
        self.inner.cut.load(Ordering::SeqCst)
    }

    /// Connections that were made to it.
    pub(crate) fn connections(&self) -> usize {
        self.inner.connections.load(Ordering::SeqCst)
    }

    /// Connections to it that are open.
    pub(crate) fn open(&self) -> usize {
        self.inner.open.load(Ordering::SeqCst)
    }

    /// From now on it knows neither release nor abort, as a stock engine.
    pub(crate) fn without_verbs(self) -> Self {
        self.verbs_answer(404);
        self
    }

    /// From now on release and abort are answered with this status; with 1 they are never answered.
    pub(crate) fn verbs_answer(&self, status: u16) {
        self.inner.verbs.store(status, Ordering::SeqCst);
    }

    /// From now on it does not say whether it lives, as a process that stands still.
    pub(crate) fn deaf(self) -> Self {
        self.inner.deaf.store(true, Ordering::SeqCst);
        self
    }

    /// From now on its replies cross the half-closes of those who wait for them.
    pub(crate) fn crossing(self) -> Self {
        self.inner.crossing.store(true, Ordering::SeqCst);
        self
    }

    /// It speaks again.
    pub(crate) fn speak(&self) {
        self.inner.deaf.store(false, Ordering::SeqCst);
    }

    /// Whether it says that it is well when it is asked.
    pub(crate) fn feel(&self, well: bool) {
        self.inner.unwell.store(!well, Ordering::SeqCst);
    }

    /// From now on this is asked before the script.
    pub(crate) fn ruled(self, rule: impl Fn(&Seen) -> Option<Act> + Send + 'static) -> Self {
        *self.inner.rule.lock().unwrap() = Some(Box::new(rule));
        self
    }

    /// Questions whether it lives.
    pub(crate) fn health_asked(&self) -> usize {
        self.all().iter().filter(|seen| seen.path == "/health").count()
    }

    /// Lets one gated step happen.
    pub(crate) fn go_on(&self) {
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
    assert!(tokio::time::timeout(PATIENCE, waited).await.is_ok(), "waited in vain: {what}");
}

async fn serve(listener: TcpListener, inner: Arc<Inner>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        stream.set_nodelay(true).unwrap();
        inner.connections.fetch_add(1, Ordering::SeqCst);
        inner.open.fetch_add(1, Ordering::SeqCst);
        let (inner, open) = (Arc::clone(&inner), Arc::clone(&inner));
        connections.spawn(async move {
            let crossing = inner.crossing.load(Ordering::SeqCst);
            let service = service_fn(move |request| answer(Arc::clone(&inner), request));
            let _ = hyper::server::conn::http1::Builder::new()
                .half_close(crossing)
                .serve_connection(TokioIo::new(stream), service)
                .await;
            open.open.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

/// Counts a cut when it is dropped before the answer is complete.
struct Work(Arc<Inner>, bool);

impl Work {
    fn done(mut self) {
        self.1 = true;
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if !self.1 {
            self.0.cut.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// An error in a handler closes the connection.
async fn answer(inner: Arc<Inner>, request: Request<Incoming>) -> Result<Response<Body>, std::io::Error> {
    let (head, body) = request.into_parts();
    let work = Work(Arc::clone(&inner), false);
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    let path = head.uri.path().to_owned();
    let seen = Seen {
        path: path.clone(),
        headers: head.headers,
        body: serde_json::from_slice(&body).unwrap_or(Value::Null),
        raw: body,
    };
    inner.seen.lock().unwrap().push(seen.clone());
    let ruled = inner.rule.lock().unwrap().as_ref().and_then(|rule| rule(&seen));
    if let Some(act) = ruled {
        return act_out(act, inner, work).await;
    }
    if !path.starts_with("/v1/") {
        if path == "/health" && inner.deaf.load(Ordering::SeqCst) {
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
        return Ok(whole(if status == 0 { 200 } else { status }, &json!({"path": path, "count": 3})));
    }
    let act = inner.script.lock().unwrap().pop_front();
    let act = act.or_else(|| inner.last.lock().unwrap().clone()).unwrap();
    act_out(act, inner, work).await
}

async fn act_out(act: Act, inner: Arc<Inner>, work: Work) -> Result<Response<Body>, std::io::Error> {
    let response = match act {
        Act::Lend(handle) => whole(200, &lent(handle)),
        Act::LendWhenTold(handle) => {
            inner.gate.0.acquire().await.unwrap().forget();
            whole(200, &lent(handle))
        }
        Act::LendEarly(handle, end) => return Ok(lending(work, handle, end, inner)),
        Act::Reply(params) => whole(200, &json!({"id": "p", "kv_transfer_params": params})),
        Act::ReplyWhenTold(params) => {
            inner.gate.0.acquire().await.unwrap().forget();
            whole(200, &json!({"id": "p", "kv_transfer_params": params}))
        }
        Act::Text(text) => {
            let body = Full::new(Bytes::from_static(text.as_bytes()));
            Response::new(body.map_err(|never: Infallible| match never {}).boxed())
        }
        Act::Json(value) => whole(200, &value),
        Act::Bytes(headers, bytes) => {
            let body = Full::new(Bytes::from(bytes)).map_err(|never: Infallible| match never {});
            let mut response = Response::new(body.boxed());
            for (name, value) in headers {
                response.headers_mut().insert(name, value.parse().unwrap());
            }
            response
        }
        Act::Answer(status, headers, bytes) => {
            let body = Full::new(Bytes::from(bytes)).map_err(|never: Infallible| match never {});
            let mut response = Response::new(body.boxed());
            *response.status_mut() = status.try_into().unwrap();
            for (name, value) in headers {
                response.headers_mut().insert(name, value.parse().unwrap());
            }
            response
        }
        Act::PartAndDie(bytes) => {
            let text = text(bytes).to_string();
            let parts = text.as_bytes()[..bytes].chunks(64 << 10);
            let parts = parts.map(|part| String::from_utf8(part.to_vec()).unwrap()).collect();
            let mut response = framed(work, parts, false);
            response.headers_mut().insert("content-type", "application/json".parse().unwrap());
            return Ok(response);
        }
        Act::Frames(frames, ends) => return Ok(framed(work, frames, ends)),
        Act::Whole(bytes) => whole(200, &text(bytes)),
        Act::WholeWhenTold(bytes) => {
            inner.gate.0.acquire().await.unwrap().forget();
            whole(200, &text(bytes))
        }
        Act::Refuse(status, body) => whole(status, &body),
        Act::Hang => std::future::pending().await,
        Act::Close => {
            work.done();
            return Err(std::io::Error::other("closed"));
        }
        Act::Stream(events) => return Ok(stream(work, events, End::Done, None)),
        Act::StreamWhenTold(events) => {
            return Ok(stream(work, events, End::Done, Some(Arc::clone(&inner))));
        }
        Act::StreamAndDie(events) => return Ok(stream(work, events, End::Die, None)),
        Act::HalfAndDie => {
            work.done();
            let (sender, receiver) = mpsc::channel(2);
            sender.send(Ok(Frame::data(Bytes::from_static(b"{\"half\":")))).await.unwrap();
            tokio::spawn(async move {
                // Long enough for the head and the first half to be on the wire.
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

enum End {
    Done,
    Die,
}

pub(crate) fn event(n: usize) -> String {
    format!("data: {{\"token\":{n}}}\n\n")
}

fn stream(work: Work, events: usize, end: End, gate: Option<Arc<Inner>>) -> Response<Body> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        for n in 0..events {
            if let Some(inner) = &gate {
                let gone = sender.closed();
                tokio::select! {
                    permit = inner.gate.0.acquire() => permit.unwrap().forget(),
                    () = gone => return,
                }
            }
            if sender.send(Ok(Frame::data(event(n).into()))).await.is_err() {
                return;
            }
        }
        let last = match end {
            End::Done => sender.send(Ok(Frame::data(Bytes::from_static(b"data: [DONE]\n\n")))).await,
            End::Die => {
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

fn lending(work: Work, handle: u128, end: Option<&'static str>, inner: Arc<Inner>) -> Response<Body> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let params = json!({"kv_transfer_params": lent(Some(handle))["kv_transfer_params"]});
        if sender.send(Ok(Frame::data(format!("data: {params}\n\n").into()))).await.is_err() {
            return;
        }
        let gone = sender.closed();
        tokio::select! {
            permit = inner.gate.0.acquire() => permit.unwrap().forget(),
            () = gone => return,
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

fn framed(work: Work, frames: Vec<String>, ends: bool) -> Response<Body> {
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

fn channel(receiver: mpsc::Receiver<Piece>) -> Body {
    Pipe(receiver).boxed()
}

type Piece = Result<Frame<Bytes>, std::io::Error>;

struct Pipe(mpsc::Receiver<Piece>);

impl hyper::body::Body for Pipe {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Piece>> {
        self.0.poll_recv(context)
    }
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

fn lent(handle: Option<u128>) -> Value {
    json!({"id": "p", "choices": [{"text": "", "finish_reason": "length"}],
        "kv_transfer_params": handoff(handle)})
}
