//! What the client is told: whole answers, errors, and a decode engine's answer as it comes.
//!
//! The head of an answer is committed only after a decode engine has accepted the request. A streamed answer
//! is then passed on frame by frame, unbuffered. One that is not streamed is held until it is complete, up to
//! a bound, so that an engine's death in the middle of it is still a clear 502.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use baton_connector::exchange::{Attempt, Event};
use baton_openai::{ApiError, sse};
use bytes::{Bytes, BytesMut};
use hyper::header::{
    CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue, TRANSFER_ENCODING,
};
use hyper::{Method, Version};
use pingora::http::ResponseHeader;
use pingora::proxy::Session;
use tokio::time::{Instant, Sleep};

use crate::client_watch::{ClientGone, race};
use crate::exchange_driver::{Answer, Ended, ExchangeDriver, Rest};
use crate::hygiene::Wire;
use crate::intake::Ask;
use crate::legs::Refusal;
use crate::metrics::Resume;
use crate::resume::{Plan, Transcript};
use crate::route::Dialect;
use crate::sse::Frames;
use crate::upstream::{CallError, InFlight, Reply};

/// An answer that is not streamed is held up to this size; past it, it is passed on as it comes.
const HELD_BYTES_MAX: usize = 1 << 20;
/// After `[DONE]` an engine has this long to end its answer, so that its connection can be used again.
const END_AFTER_DONE: Duration = Duration::from_secs(1);

/// So often another engine goes on with one stream.
const RESUMES_MAX: u8 = 3;
/// So often in a row it does without a token since the last time: its engine may have been stopped just then.
const IDLE_RESUMES_MAX: u8 = 1;

/// How long an engine has said nothing. One timer for the whole answer: it is looked at when it fires, not set anew with
/// each event.
struct Silence {
    bound: Duration,
    since: Instant,
    /// When the whole request has taken as long as it may.
    until: Option<Instant>,
    fires: Pin<Box<Sleep>>,
}

impl Silence {
    fn new(patience: Patience) -> Self {
        let (bound, since) = (patience.silence, Instant::now());
        let until = patience.until.map(Instant::from_std);
        let fires = Box::pin(tokio::time::sleep_until(due(since + bound, until)));
        Self { bound, since, until, fires }
    }

    fn heard(&mut self) {
        self.since = Instant::now();
    }

    fn is_over(&self) -> bool {
        self.until.is_some_and(|until| until <= Instant::now())
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.fires.as_mut().poll(context));
            let due = due(self.since + self.bound, self.until);
            if due <= Instant::now() {
                return Poll::Ready(());
            }
            self.fires.as_mut().reset(due);
        }
    }
}

fn due(silent: Instant, until: Option<Instant>) -> Instant {
    until.map_or(silent, |until| until.min(silent))
}

/// How an engine's answer ended in the middle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Died,
    Silent,
    /// The request has taken longer than it may.
    OutOfTime,
}

/// Whether a stream whose engine died goes on.
enum Resumed {
    GoesOn,
    Over,
}

/// What another engine would need to go on with a stream.
pub(crate) struct Resuming {
    transcript: Transcript,
    ask: Ask,
    /// How often another engine was asked to go on.
    times: u8,
    /// How often in a row without a token that was sent since the last time.
    idle: u8,
    /// Tokens that were sent when one was asked last.
    sent: usize,
}

impl Resuming {
    pub(crate) fn new(transcript: Transcript, ask: Ask) -> Self {
        Self { transcript, ask, times: 0, idle: 0, sent: 0 }
    }

    fn pass(&mut self, frames: &Bytes) -> Bytes {
        let passed = self.transcript.pass(frames);
        if !self.transcript.needs_request() {
            self.ask.forget_body();
        }
        passed
    }

    /// A stream goes from engine to engine a few times, and only while it gets somewhere: one that takes engines down
    /// takes no more of them.
    fn broke(&mut self) -> Plan {
        let plan = self.transcript.broke();
        if !matches!(plan, Plan::Again | Plan::Continue(_)) {
            return plan;
        }
        let sent = self.transcript.sent();
        let idle = if self.times > 0 && sent == self.sent { self.idle + 1 } else { 0 };
        if self.times == RESUMES_MAX || idle > IDLE_RESUMES_MAX {
            return Plan::Impossible;
        }
        (self.times, self.idle, self.sent) = (self.times + 1, idle, sent);
        plan
    }
}

/// How long an answer is waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// For the next piece.
    pub silence: Duration,
    /// For the whole answer; `None`: no bound.
    pub until: Option<std::time::Instant>,
}

/// What every answer to a request carries.
pub(crate) struct Stamp {
    /// As `x-request-id`.
    pub id: HeaderValue,
    /// `x-ratelimit-*`, where the client has limits.
    pub limits: Vec<(HeaderName, HeaderValue)>,
}

impl Stamp {
    fn put(&self, head: &mut ResponseHeader) -> pingora::Result<()> {
        head.insert_header("x-request-id", &self.id)?;
        for (name, value) in &self.limits {
            head.insert_header(name, value)?;
        }
        Ok(())
    }
}

/// Sends a whole answer.
pub(crate) async fn whole(
    session: &mut Session,
    status: u16,
    headers: &[(&'static str, String)],
    stamp: &Stamp,
    body: Bytes,
) -> pingora::Result<()> {
    let mut head = ResponseHeader::build(status, Some(headers.len() + 2))?;
    for (name, value) in headers {
        head.insert_header(*name, value.as_str())?;
    }
    stamp.put(&mut head)?;
    head.insert_header(CONTENT_LENGTH, body.len())?;
    // What is left of a body that nobody wants, or came behind it, would be taken for the next request.
    let unread = Wire::of(session).is_some_and(|wire| wire.is_unread());
    let client = session.as_downstream_mut();
    if unread {
        client.set_keepalive(None);
    }
    // Whoever asked for the head alone gets no more, and its length all the same.
    let body = if client.req_header().method == Method::HEAD { Bytes::new() } else { body };
    client.write_response_header(Box::new(head)).await?;
    client.write_response_body(body, true).await
}

/// Sends an error.
pub(crate) async fn error(session: &mut Session, error: &ApiError, stamp: &Stamp) -> pingora::Result<()> {
    whole(session, error.status, &error.headers(), stamp, error.to_bytes()).await
}

/// Passes a decode engine's answer on until its end.
pub(crate) async fn pass(
    session: &mut Session,
    driver: &mut ExchangeDriver,
    answer: Answer,
    stamp: &Stamp,
    patience: Patience,
    resuming: Option<Resuming>,
    dialect: Dialect,
) -> Result<u16, Ended> {
    let Answer { attempt, reply, load } = answer;
    let reply = *reply;
    let silence = Silence::new(patience);
    let passing = Passing { session, driver, attempt, reply, load, silence, resuming, spoke: false, dialect };
    let content_type = passing.reply.content_type().cloned();
    let streamed = content_type.as_ref().is_some_and(|v| v.as_bytes().starts_with(b"text/event-stream"));
    passing.driver.watched.streamed = streamed;
    let status = passing.reply.status().as_u16();
    let mut head = ResponseHeader::build(status, Some(4)).map_err(|_| Refusal::broken())?;
    let insert = |head: &mut ResponseHeader, name, value: HeaderValue| {
        head.insert_header(name, value).map_err(|_| Refusal::broken())
    };
    insert(&mut head, CONTENT_TYPE, content_type.unwrap_or(HeaderValue::from_static("application/json")))?;
    stamp.put(&mut head).map_err(|_| Refusal::broken())?;
    if let Some(timing) = passing.driver.server_timing() {
        insert(&mut head, hyper::header::HeaderName::from_static("server-timing"), timing)?;
    }
    if streamed {
        insert(&mut head, CACHE_CONTROL, HeaderValue::from_static("no-cache"))?;
        passing.streamed(head).await?;
    } else {
        passing.held(head).await?;
    }
    Ok(status)
}

struct Passing<'a> {
    session: &'a mut Session,
    driver: &'a mut ExchangeDriver,
    attempt: Attempt,
    reply: Reply,
    /// Counts the request at its engine.
    load: InFlight,
    silence: Silence,
    resuming: Option<Resuming>,
    spoke: bool,
    dialect: Dialect,
}

impl Passing<'_> {
    async fn streamed(mut self, head: ResponseHeader) -> Result<(), Ended> {
        // The first event mostly comes with the head: then both leave in one write.
        let mut here = self.reply.here();
        self.hold(here.is_some());
        self.commit(head).await?;
        self.hold(false);
        let mut frames = Frames::default();
        loop {
            let chunk = match here.take() {
                Some(here) => self.heard(here),
                None => self.chunk().await?,
            };
            match chunk {
                Ok(Some(chunk)) => {
                    let whole = frames.pass(chunk);
                    // So does the end with `[DONE]`.
                    self.hold(frames.is_done());
                    if !whole.is_empty() {
                        let whole = match &mut self.resuming {
                            Some(resuming) => resuming.pass(&whole),
                            None => whole,
                        };
                        self.write(whole, false).await?;
                    }
                    if frames.is_done() {
                        return self.done().await;
                    }
                }
                Ok(None) if !self.dialect.says_done() && frames.is_whole() => return self.done().await,
                Ok(None) => match self.resume(Broken::Died, &frames).await? {
                    Resumed::GoesOn => frames = Frames::default(),
                    Resumed::Over => return Ok(()),
                },
                Err(broken) => match self.resume(broken, &frames).await? {
                    Resumed::GoesOn => frames = Frames::default(),
                    Resumed::Over => return Ok(()),
                },
            }
        }
    }

    /// The engine ended in the middle: another one goes on, where that is possible.
    async fn resume(&mut self, broken: Broken, frames: &Frames) -> Result<Resumed, Ended> {
        let plan = match &mut self.resuming {
            Some(resuming) if broken != Broken::OutOfTime && !frames.is_inside() => resuming.broke(),
            _ => Plan::Impossible,
        };
        let (resuming, rest) = match (plan, &mut self.resuming) {
            (Plan::Again, Some(resuming)) => (resuming, Rest::Everything),
            (Plan::Continue(body), Some(resuming)) => {
                let tokens = resuming.transcript.length();
                (resuming, Rest::After { body, tokens })
            }
            (Plan::Finish(last), _) => {
                self.driver.resumed(Resume::Resumed);
                self.driver.apply(Event::StreamEnded(self.attempt));
                self.write(last, false).await?;
                self.write(Bytes::new(), true).await?;
                return Ok(Resumed::Over);
            }
            (Plan::Impossible | Plan::Again | Plan::Continue(_), _) => {
                self.driver.resumed(Resume::NotAllowed);
                self.broken_stream(broken, frames).await?;
                return Ok(Resumed::Over);
            }
        };
        // Boxed: what happens to few streams is not room in every one.
        let going_on = Box::pin(self.driver.go_on(self.session, self.attempt, &resuming.ask, rest));
        let answer = match self.silence.until {
            None => going_on.await?,
            // What it had begun is settled by what follows.
            Some(until) => tokio::time::timeout_at(until, going_on).await.unwrap_or(Ok(None))?,
        };
        let streams = |reply: &Reply| {
            reply.content_type().is_some_and(|v| v.as_bytes().starts_with(b"text/event-stream"))
        };
        let Some(answer) = answer.filter(|answer| streams(&answer.reply)) else {
            self.driver.resumed(Resume::Failed);
            self.driver.apply(Event::GaveUp);
            self.broken_stream(broken, frames).await?;
            return Ok(Resumed::Over);
        };
        self.driver.resumed(Resume::Resumed);
        resuming.transcript.goes_on();
        (self.attempt, self.reply, self.load) = (answer.attempt, *answer.reply, answer.load);
        self.spoke = false;
        self.silence.heard();
        Ok(Resumed::GoesOn)
    }

    /// The stream has said `[DONE]`. From here on the client may hang up or ask the next thing.
    async fn done(mut self) -> Result<(), Ended> {
        self.driver.served(self.attempt);
        self.hold(false);
        self.write(Bytes::new(), true).await?;
        let mut reply = self.reply;
        if reply.ends_now() {
            reply.finish();
            return Ok(());
        }
        let rest = async move {
            while let Some(chunk) = reply.chunk().await {
                if chunk.is_err() {
                    return;
                }
            }
            reply.finish();
        };
        // The client has everything; only the connection's next use waits for this.
        tokio::spawn(async move { drop(tokio::time::timeout(END_AFTER_DONE, rest).await) });
        Ok(())
    }

    /// The engine ended in the middle: one typed error at the boundary of a frame, then `[DONE]`.
    async fn broken_stream(&mut self, broken: Broken, frames: &Frames) -> Result<(), Ended> {
        self.ended_early(broken);
        let mut last = BytesMut::new();
        if frames.is_inside() {
            last.extend_from_slice(b"\n\n");
        }
        last.extend_from_slice(&broken.refusal().0.to_sse());
        last.extend_from_slice(&sse::DONE);
        self.write(last.freeze(), false).await?;
        self.write(Bytes::new(), true).await
    }

    /// Whoever is told of it: an engine is blamed for its own end, not for a request that took too long.
    fn ended_early(&mut self, broken: Broken) {
        self.driver.apply(match broken {
            Broken::Died | Broken::Silent => Event::StreamBroken(self.attempt),
            Broken::OutOfTime => Event::GaveUp,
        });
    }

    async fn held(mut self, mut head: ResponseHeader) -> Result<(), Ended> {
        let mut held = BytesMut::new();
        loop {
            match self.chunk().await? {
                // In one piece, as it mostly is, it is not copied.
                Ok(Some(chunk)) if held.is_empty() && self.reply.is_ended() => {
                    held = chunk.into();
                    break;
                }
                Ok(Some(chunk)) => held.extend_from_slice(&chunk),
                Ok(None) => break,
                Err(broken) => {
                    self.ended_early(broken);
                    return Err(Ended::Refused(broken.refusal()));
                }
            }
            if held.len() > HELD_BYTES_MAX {
                return self.passed(head, held.freeze()).await;
            }
        }
        // Computed and read: whether the client still takes it is no engine's concern.
        self.driver.served(self.attempt);
        head.insert_header(CONTENT_LENGTH, held.len()).map_err(|_| Refusal::broken())?;
        self.commit_sized(head).await?;
        self.write(held.freeze(), true).await?;
        self.reply.finish();
        Ok(())
    }

    /// An answer too large to hold. Its end in the middle can only be told by the connection's.
    async fn passed(mut self, head: ResponseHeader, begun: Bytes) -> Result<(), Ended> {
        self.commit(head).await?;
        self.write(begun, false).await?;
        loop {
            match self.chunk().await? {
                Ok(Some(chunk)) => self.write(chunk, false).await?,
                Ok(None) => break,
                Err(broken) => {
                    self.ended_early(broken);
                    return Err(Ended::ClientGone);
                }
            }
        }
        self.driver.served(self.attempt);
        self.write(Bytes::new(), true).await?;
        self.reply.finish();
        Ok(())
    }

    /// The next piece of the answer, as long as the client is there.
    async fn chunk(&mut self) -> Result<Result<Option<Bytes>, Broken>, Ended> {
        // Once the last byte is here the client is not watched: its next request is not a hang-up.
        if self.reply.is_ended() {
            return Ok(Ok(None));
        }
        let (reply, silence) = (&mut self.reply, &mut self.silence);
        let next = poll_fn(|context| match reply.poll_chunk(context) {
            Poll::Ready(chunk) => Poll::Ready(Some(chunk)),
            Poll::Pending => silence.poll(context).map(|()| None),
        });
        match race(self.session, next).await {
            Err(ClientGone) => Err(self.driver.client_gone()),
            Ok(None) if self.silence.is_over() => Ok(Err(Broken::OutOfTime)),
            Ok(None) => Ok(Err(Broken::Silent)),
            Ok(Some(chunk)) => Ok(self.heard(chunk)),
        }
    }

    fn heard(&mut self, chunk: Option<Result<Bytes, CallError>>) -> Result<Option<Bytes>, Broken> {
        self.silence.heard();
        let chunk = chunk.transpose().map_err(|_error| Broken::Died)?;
        if chunk.is_some() && !std::mem::replace(&mut self.spoke, true) {
            self.driver.apply(Event::FirstChunk(self.attempt));
        }
        if let Some(piece) = &chunk {
            self.driver.piece(piece);
        }
        Ok(chunk)
    }

    /// Whether what is written is held back until more follows.
    fn hold(&self, hold: bool) {
        if let Some(wire) = Wire::of(self.session) {
            wire.hold(hold);
        }
    }

    async fn commit(&mut self, mut head: ResponseHeader) -> Result<(), Ended> {
        if self.session.req_header().version == Version::HTTP_11 {
            head.insert_header(TRANSFER_ENCODING, "chunked").map_err(|_| Refusal::broken())?;
        } else {
            // HTTP/1.0 has no chunks: the answer ends with the connection.
            self.session.as_downstream_mut().set_keepalive(None);
        }
        self.commit_sized(head).await
    }

    async fn commit_sized(&mut self, head: ResponseHeader) -> Result<(), Ended> {
        let written = self.session.as_downstream_mut().write_response_header(Box::new(head)).await;
        written.map_err(|_| self.driver.client_gone())
    }

    async fn write(&mut self, bytes: Bytes, end: bool) -> Result<(), Ended> {
        let written = self.session.as_downstream_mut().write_response_body(bytes, end).await;
        written.map_err(|_| self.driver.client_gone())
    }
}

impl Broken {
    fn refusal(&self) -> Refusal {
        match self {
            Self::Died => Refusal::broken(),
            Self::Silent => Refusal::silent(),
            Self::OutOfTime => Refusal::out_of_time(),
        }
    }
}

impl From<Refusal> for Ended {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}
