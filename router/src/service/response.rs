//! What the client is told: whole answers, errors, and a decode engine's answer as it comes.
//!
//! The head of an answer is committed only after a decode engine has accepted the request. A streamed answer
//! is then passed on frame by frame, unbuffered. One that is not streamed is held until it is complete, up to
//! a bound, so that an engine's death in the middle of it is still a clear 502.

mod held;

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use baton_connector::exchange::{Attempt, Cause, Event};
use baton_openai::ApiError;
use baton_openai::sse::DONE;
use bytes::{Bytes, BytesMut};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use pingora::http::ResponseHeader;
use tokio::time::{Instant, Sleep};

use crate::client::disconnect::race;
use crate::client::session::{ClientGone, Length, Session};
use crate::engines::http::{CallError, InFlight, Reply};
use crate::exchange::ask::Ask;
use crate::exchange::driver::{Answer, ExchangeDriver, Rest};
use crate::exchange::resume::{Plan, Transcript};
use crate::legs::outcome::Ended;
use crate::legs::{Refusal, Verdict, unreadable};
use crate::message::error_inside::ErrorInside;
use crate::message::path::Dialect;
use crate::message::sse::{Frames, Read};
use crate::metrics::Resume;

/// Says what vLLM's embeddings in bytes mean.
const METADATA: HeaderName = HeaderName::from_static("metadata");
/// After `[DONE]` an engine has this long to end its answer, so that its connection can be used again.
const END_AFTER_DONE: Duration = Duration::from_secs(1);

/// So often another engine goes on with one stream.
const RESUMES_MAX: u8 = 3;
/// So often in a row it does without a token since the last time: its engine may have been stopped just then.
const IDLE_RESUMES_MAX: u8 = 1;

/// How long an engine has said nothing. One timer for the whole answer, from the first wait on: it is looked at when it
/// fires, not set anew with each event.
struct Silence {
    bound: Duration,
    since: Instant,
    /// When the whole request has taken as long as it may.
    until: Option<Instant>,
    fires: Option<Pin<Box<Sleep>>>,
}

impl Silence {
    fn new(patience: Patience) -> Self {
        let until = patience.until.map(Instant::from_std);
        Self { bound: patience.silence, since: Instant::now(), until, fires: None }
    }

    fn heard(&mut self) {
        self.since = Instant::now();
    }

    fn is_over(&self) -> bool {
        self.until.is_some_and(|until| until <= Instant::now())
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            let due = due(self.since + self.bound, self.until);
            let fires = self.fires.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
            ready!(fires.as_mut().poll(context));
            if due <= Instant::now() {
                return Poll::Ready(());
            }
            fires.as_mut().reset(due);
        }
    }
}

fn due(silent: Instant, until: Option<Instant>) -> Instant {
    until.map_or(silent, |until| until.min(silent))
}

/// How an engine's answer ended in the middle.
#[derive(Debug)]
enum Broken {
    Died,
    Silent,
    /// It said in its stream that it has failed.
    Failed(Refusal),
    /// It said in its stream that the request cannot be served: no engine can.
    Refused(Refusal),
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
) -> Result<(), ClientGone> {
    let head = whole_head(status, headers, stamp).map_err(|_| ClientGone)?;
    session.write_head(head, Length::Known(body.len())).await?;
    session.send(&body, true).await.map(drop)
}

fn whole_head(
    status: u16,
    headers: &[(&'static str, String)],
    stamp: &Stamp,
) -> pingora::Result<ResponseHeader> {
    let mut head = ResponseHeader::build_no_case(status, Some(headers.len() + 5))?;
    for (name, value) in headers {
        head.insert_header(*name, value.as_str())?;
    }
    stamp.put(&mut head)?;
    Ok(head)
}

/// Sends an error.
pub(crate) async fn error(session: &mut Session, error: &ApiError, stamp: &Stamp) -> Result<(), ClientGone> {
    whole(session, error.status, &error.headers(), stamp, error.to_bytes()).await
}

/// Passes a decode engine's answer on until its end.
pub(crate) async fn pass(
    session: &mut Session,
    driver: &mut ExchangeDriver,
    answer: Answer,
    stamp: &Stamp,
    patience: Patience,
    resuming: Option<Box<Resuming>>,
    dialect: Dialect,
) -> Result<u16, Ended> {
    let Answer { attempt, reply, load } = answer;
    let silence = Silence::new(patience);
    let content_type = reply.content_type().cloned();
    let metadata = reply.metadata().filter(|_| !dialect.generates()).cloned();
    let status = reply.status().as_u16();
    let streamed = dialect.generates() && reply.is_stream();
    let head = || -> pingora::Result<ResponseHeader> {
        let mut head = ResponseHeader::build_no_case(status, Some(8))?;
        let json = HeaderValue::from_static("application/json");
        head.insert_header(CONTENT_TYPE, content_type.unwrap_or(json))?;
        if let Some(metadata) = metadata {
            head.insert_header(METADATA, metadata)?;
        }
        stamp.put(&mut head)?;
        if let Some(timing) = driver.server_timing() {
            head.insert_header("server-timing", timing)?;
        }
        if streamed {
            head.insert_header(CACHE_CONTROL, HeaderValue::from_static("no-cache"))?;
        }
        Ok(head)
    };
    let head = head().map_err(|_| Refusal::broken())?;
    driver.watched.streamed = streamed;
    driver.watched.passes = !dialect.generates();
    let (reply, load) = (Some(reply), Some(load));
    let mut passing =
        Passing { session, driver, attempt, reply, load, silence, resuming, spoke: false, dialect };
    if streamed {
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
    /// Until its last byte was read.
    reply: Option<Box<Reply>>,
    /// Counts the request at its engine; until the same.
    load: Option<InFlight>,
    silence: Silence,
    resuming: Option<Box<Resuming>>,
    spoke: bool,
    dialect: Dialect,
}

impl Passing<'_> {
    async fn streamed(&mut self, head: ResponseHeader) -> Result<(), Ended> {
        // It leaves with the first event, which is here.
        self.commit(head, Length::Unknown).await?;
        let mut frames = Frames::new(self.driver.watched.reading);
        loop {
            let broken = match self.chunk().await? {
                Ok(Some(chunk)) => {
                    let whole = frames.pass(chunk);
                    let Read { good, told } = self.read(&mut frames, whole);
                    let done = told.is_none() && frames.is_done();
                    if done {
                        self.served();
                    }
                    if done || !good.is_empty() {
                        let good = match &mut self.resuming {
                            Some(resuming) => resuming.pass(&good),
                            None => good,
                        };
                        self.write(good, done).await?;
                    }
                    match told {
                        Some(told) => self.told(told),
                        None if done => return Ok(()),
                        None => continue,
                    }
                }
                // Its last line end is missing.
                Ok(None) if frames.ends_with_done() => {
                    self.served();
                    return self.write(DONE, true).await;
                }
                Ok(None) if !self.dialect.says_done() && frames.is_whole() => {
                    self.served();
                    return self.write(Bytes::new(), true).await;
                }
                Ok(None) => Broken::Died,
                Err(broken) => broken,
            };
            match self.resume(broken, &frames).await? {
                Resumed::GoesOn => frames = Frames::new(self.driver.watched.reading),
                Resumed::Over => return Ok(()),
            }
        }
    }

    /// The engine has said everything: from here on the client may hang up or ask the next thing, and how fast it reads
    /// is no engine's concern.
    fn served(&mut self) {
        self.driver.served(self.attempt);
        self.load = None;
        if let Some(reply) = self.reply.take() {
            drain(reply);
        }
    }

    /// Notes what whole frames say.
    fn read(&mut self, frames: &mut Frames, whole: Bytes) -> Read {
        let seen = &mut self.driver.watched.seen;
        let before = seen.usage;
        let read = frames.read(whole, seen);
        // What the engine of a continuation counts is not all of the answer.
        if let (Some(resuming), true) = (&self.resuming, seen.usage != before) {
            seen.usage = seen.usage.map(|usage| resuming.transcript.whole(usage));
        }
        read
    }

    /// What the engine said instead of an answer, or in the middle of one.
    fn told(&mut self, told: ErrorInside) -> Broken {
        let Some(reply) = &self.reply else { return Broken::Died };
        let verdict = Verdict::of(&reply.told(told.status, told.error), reply.engine().hosts());
        match verdict.failure() {
            Some(_) => {
                self.driver.told(verdict.blame);
                Broken::Failed(verdict.refusal)
            }
            None => Broken::Refused(verdict.refusal),
        }
    }

    /// The engine ended in the middle: another one goes on, where that is possible.
    async fn resume(&mut self, broken: Broken, frames: &Frames) -> Result<Resumed, Ended> {
        let plan = match &mut self.resuming {
            Some(resuming) if broken.is_engines() && !frames.is_inside() => resuming.broke(),
            _ => Plan::Impossible,
        };
        let (resuming, rest) = match (plan, &mut self.resuming) {
            (Plan::Again, Some(resuming)) => (resuming, Rest::Everything),
            (Plan::Continue(body), Some(resuming)) => {
                let tokens = resuming.transcript.length();
                (resuming, Rest::After { body, tokens })
            }
            (Plan::Finish(last), resuming) => {
                let counted = resuming.as_ref().and_then(|resuming| resuming.transcript.counted());
                let seen = &mut self.driver.watched.seen;
                if seen.usage.is_none() && counted.is_some() {
                    (seen.usage, seen.passed) = (counted, 0);
                }
                self.driver.resumed(Resume::Resumed);
                self.driver.apply(Event::StreamEnded(self.attempt));
                self.write(last, true).await?;
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
        let Some(answer) = answer.filter(|answer| answer.reply.is_stream()) else {
            self.driver.resumed(Resume::Failed);
            self.driver.apply(Event::GaveUp);
            self.broken_stream(broken, frames).await?;
            return Ok(Resumed::Over);
        };
        self.driver.resumed(Resume::Resumed);
        resuming.transcript.goes_on();
        (self.attempt, self.reply, self.load) = (answer.attempt, Some(answer.reply), Some(answer.load));
        self.spoke = false;
        self.silence.heard();
        Ok(Resumed::GoesOn)
    }

    /// The engine ended in the middle: one typed error at the boundary of a frame, then `[DONE]`.
    async fn broken_stream(&mut self, broken: Broken, frames: &Frames) -> Result<(), Ended> {
        self.ended_early(&broken);
        let mut last = BytesMut::new();
        if frames.is_inside() {
            last.extend_from_slice(b"\n\n");
        }
        last.extend_from_slice(&broken.refusal().0.to_sse());
        last.extend_from_slice(&DONE);
        self.write(last.freeze(), true).await
    }

    /// Whoever is told of it: an engine is blamed for its own end, not for a request that took too long.
    fn ended_early(&mut self, broken: &Broken) {
        self.driver.apply(match broken {
            Broken::Died | Broken::Silent | Broken::Failed(_) => Event::StreamBroken(self.attempt),
            Broken::Refused(_) => Event::GaveUp,
            Broken::OutOfTime => Event::GaveUpFor(Cause::OutOfTime),
        });
    }

    /// The next piece of the answer, as long as the client is there.
    async fn chunk(&mut self) -> Result<Result<Option<Bytes>, Broken>, Ended> {
        // Once the last byte is here the client is not watched: its next request is not a hang-up.
        let Some(reply) = self.reply.as_mut().filter(|reply| !reply.is_ended()) else { return Ok(Ok(None)) };
        let silence = &mut self.silence;
        let next = poll_fn(|context| match reply.poll_chunk(context) {
            Poll::Ready(chunk) => Poll::Ready(Some(chunk)),
            Poll::Pending => silence.poll(context).map(|()| None),
        });
        match race(self.session, next).await {
            Err(ClientGone) => Err(self.driver.client_gone()),
            Ok(None) if self.silence.is_over() => Ok(Err(Broken::OutOfTime)),
            Ok(None) => {
                self.driver.watched.silent = true;
                Ok(Err(Broken::Silent))
            }
            Ok(Some(chunk)) => Ok(self.heard(chunk)),
        }
    }

    fn heard(&mut self, chunk: Option<Result<Bytes, CallError>>) -> Result<Option<Bytes>, Broken> {
        self.silence.heard();
        let chunk = match (chunk.transpose(), &self.reply) {
            (Ok(chunk), _) => chunk,
            (Err(CallError::Unreadable(why)), Some(reply)) => {
                let (refusal, blame) = unreadable(reply.engine(), why);
                self.driver.told(blame);
                return Err(Broken::Failed(refusal));
            }
            (Err(_), _) => return Err(Broken::Died),
        };
        if chunk.is_some() && !std::mem::replace(&mut self.spoke, true) {
            self.driver.apply(Event::FirstChunk(self.attempt));
        }
        if chunk.is_some() {
            self.driver.piece();
        }
        Ok(chunk)
    }

    async fn commit(&mut self, head: ResponseHeader, length: Length) -> Result<(), Ended> {
        let written = self.session.write_head(head, length).await;
        written.map_err(|ClientGone| self.driver.client_gone())
    }

    async fn write(&mut self, bytes: Bytes, last: bool) -> Result<(), Ended> {
        match self.session.send(&bytes, last).await {
            // While the client was waited for nobody listened to the engine.
            Ok(true) => self.silence.heard(),
            Ok(false) => {}
            Err(ClientGone) => return Err(self.driver.client_gone()),
        }
        Ok(())
    }
}

impl Broken {
    /// Whether another engine may do better.
    fn is_engines(&self) -> bool {
        matches!(self, Self::Died | Self::Silent | Self::Failed(_))
    }

    fn refusal(self) -> Refusal {
        match self {
            Self::Died => Refusal::broken(),
            Self::Silent => Refusal::silent(),
            Self::Failed(refusal) | Self::Refused(refusal) => refusal,
            Self::OutOfTime => Refusal::out_of_time(),
        }
    }
}

/// Gives an engine's connection back; it may still have the end of its answer to send.
fn drain(mut reply: Box<Reply>) {
    if reply.ends_now() {
        return reply.finish();
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
}
