//! Relays a response from an engine to its client: chunk by chunk, with a limit on silence, and continued by another
//! engine if one fails.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use baton_connector::exchange::{Attempt, Event, SettlementCause};
use baton_openai::StreamTranslator;
use baton_openai::sse::DONE;
use bytes::{Bytes, BytesMut};
use pingora::http::ResponseHeader;
use tokio::time::{Instant, Sleep};

use super::{ReplyFormat, StreamTimeouts};
use crate::client::disconnect::race;
use crate::client::session::{BodyPiece, ClientGone, ResponseLength, Session};
use crate::engines::http::{CallError, EngineRequestGuard, Reply};
use crate::exchange::driver::{Continuation, ExchangeDriver};
use crate::exchange::resume::{ResumePlan, ResumeState};
use crate::legs::request_error::RequestError;
use crate::legs::{Refusal, Verdict, classify_unreadable};
use crate::message::embedded_error::EmbeddedError;
use crate::message::handoff_params::without_params;
use crate::message::sse::{FilteredFrames, FrameBuffer};
use crate::message::usage::Usage;
use crate::metrics::ResumeResult;

/// Time that an engine has after `[DONE]` to end its response, so that its connection can be reused.
const END_AFTER_DONE: Duration = Duration::from_secs(1);

/// Measures how long an engine has been silent. One timer serves the whole response from the first wait on: it is
/// checked when it fires, not reset with each event.
pub(super) struct IdleTimer {
    bound: Duration,
    since: Instant,
    /// The deadline of the whole request.
    deadline: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl IdleTimer {
    pub(super) fn new(timeouts: StreamTimeouts) -> Self {
        let until = timeouts.deadline.map(Instant::from_std);
        Self { bound: timeouts.silence, since: Instant::now(), deadline: until, timer: None }
    }

    /// Returns the time, which is read once per event.
    pub(super) fn received(&mut self) -> Instant {
        self.since = Instant::now();
        self.since
    }

    fn is_past_deadline(&self) -> bool {
        self.deadline.is_some_and(|until| until <= Instant::now())
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            let due = next_deadline(self.since + self.bound, self.deadline);
            let fires = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
            ready!(fires.as_mut().poll(context));
            if due <= Instant::now() {
                return Poll::Ready(());
            }
            fires.as_mut().reset(due);
        }
    }
}

fn next_deadline(silent: Instant, until: Option<Instant>) -> Instant {
    until.map_or(silent, |until| until.min(silent))
}

/// How a response failed in the middle.
#[derive(Debug)]
pub(super) enum StreamError {
    EngineDied,
    IdleTimeout,
    /// The engine reported its failure in the stream.
    Failed(Refusal),
    /// The engine reported in the stream that no engine can serve the request.
    Refused(Refusal),
    /// The request has exceeded its time limit.
    OutOfTime,
}

/// Whether a failed stream continues at another engine.
enum ResumeOutcome {
    Continues,
    Ended,
}

/// Relays one response from engine to client.
pub(super) struct ResponsePump<'a> {
    pub(super) session: &'a mut Session,
    pub(super) driver: &'a mut ExchangeDriver,
    pub(super) attempt: Attempt,
    /// `None` once its last byte is read.
    pub(super) reply: Option<Box<Reply>>,
    /// Counts the request at its engine; `None` at the same time.
    pub(super) load: Option<EngineRequestGuard>,
    pub(super) idle: IdleTimer,
    pub(super) resume_state: Option<Box<ResumeState>>,
    pub(super) has_first_chunk: bool,
    pub(super) format: ReplyFormat,
    /// Set if the events are translated.
    pub(super) translator: Option<Box<StreamTranslator>>,
}

impl ResponsePump<'_> {
    pub(super) async fn relay_stream(&mut self, head: ResponseHeader) -> Result<(), RequestError> {
        // The head is sent with the first event, which has arrived.
        // Boxed, like the continuation: the wait for chunks lasts for minutes, and has no memory for its other steps.
        Box::pin(self.commit(head, ResponseLength::Unknown)).await?;
        let mut frames = FrameBuffer::new(self.driver.progress.reading);
        loop {
            self.session.set_inside_event(frames.is_inside());
            let error = match self.next_chunk().await? {
                Ok(Some(chunk)) => {
                    let whole = frames.pass(chunk);
                    let FilteredFrames { forwarded, error } = self.read(&mut frames, whole);
                    let done = error.is_none() && frames.is_done();
                    match self.for_client(forwarded) {
                        Err(untranslatable) => untranslatable,
                        Ok(forwarded) => {
                            if done {
                                self.complete();
                            }
                            if done || !forwarded.is_empty() {
                                let piece = if done { BodyPiece::Last } else { BodyPiece::Inner };
                                self.write(forwarded, piece).await?;
                            }
                            match error {
                                Some(error) => self.stream_error(error),
                                None if done => return Ok(()),
                                None => continue,
                            }
                        }
                    }
                }
                // The final line end is missing.
                Ok(None) if frames.ends_with_done() => match self.translated(DONE) {
                    Ok(done) => {
                        self.complete();
                        return self.write(done, BodyPiece::Last).await;
                    }
                    Err(untranslatable) => untranslatable,
                },
                Ok(None) => StreamError::EngineDied,
                Err(error) => error,
            };
            match Box::pin(self.resume(error, &frames)).await? {
                ResumeOutcome::Continues => frames = FrameBuffer::new(self.driver.progress.reading),
                ResumeOutcome::Ended => return Ok(()),
            }
        }
    }

    /// The engine has sent everything. From here on the client may disconnect or send its next request, and its reading
    /// speed does not concern the engine.
    pub(super) fn complete(&mut self) {
        self.driver.record_completion(self.attempt);
        self.load = None;
        if let Some(reply) = self.reply.take() {
            drain(reply);
        }
    }

    /// The bytes that the client gets for an engine's frames.
    fn for_client(&mut self, frames: Bytes) -> Result<Bytes, StreamError> {
        if frames.is_empty() {
            return Ok(frames);
        }
        let frames = match &mut self.resume_state {
            Some(resume_state) => {
                self.driver.record_params(&frames);
                resume_state.rewrite_frames(&frames)
            }
            None => self.driver.record_frames(frames),
        };
        self.translated(without_params(frames))
    }

    fn translated(&mut self, frames: Bytes) -> Result<Bytes, StreamError> {
        match &mut self.translator {
            None => Ok(frames),
            Some(translator) => {
                translator.push(&frames).map_err(|error| StreamError::Refused(Refusal(error)))
            }
        }
    }

    /// Records the usage in whole frames.
    pub(super) fn read(&mut self, frames: &mut FrameBuffer, whole: Bytes) -> FilteredFrames {
        let usage_scan = &mut self.driver.progress.usage_scan;
        let before = usage_scan.usage;
        let read = frames.read(whole, usage_scan);
        // The engine of a continuation counts only its part of the response.
        if let (Some(resume_state), true) = (&self.resume_state, usage_scan.usage != before) {
            usage_scan.usage =
                usage_scan.usage.map(|usage| resume_state.transcript.tokens.total_usage(usage));
        }
        read
    }

    /// Classifies an error in the body of a response.
    pub(super) fn stream_error(&mut self, error: EmbeddedError) -> StreamError {
        let Some(reply) = &self.reply else { return StreamError::EngineDied };
        let verdict = Verdict::of(&reply.error_reply(error.status, error.error), reply.engine().redactor());
        match verdict.failure() {
            Some(_) => {
                self.driver.report_fault(verdict.fault);
                StreamError::Failed(verdict.refusal)
            }
            None => StreamError::Refused(verdict.refusal),
        }
    }

    /// Continues a failed stream at another engine, if possible.
    async fn resume(
        &mut self,
        error: StreamError,
        frames: &FrameBuffer,
    ) -> Result<ResumeOutcome, RequestError> {
        let plan = match &mut self.resume_state {
            Some(resume_state) if error.is_engine_fault() && !frames.is_inside() => {
                resume_state.plan_resume()
            }
            _ => ResumePlan::Impossible,
        };
        let (resume_state, rest) = match (plan, &mut self.resume_state) {
            (ResumePlan::Restart, Some(resume_state)) => (resume_state, Continuation::Everything),
            (ResumePlan::Continue(body), Some(resume_state)) => {
                let tokens = resume_state.transcript.tokens.count();
                (resume_state, Continuation::After { body, tokens })
            }
            (ResumePlan::Finish(last), resume_state) => {
                let usage = resume_state
                    .as_ref()
                    .and_then(|resume_state| resume_state.transcript.tokens.partial_usage());
                let usage_scan = &mut self.driver.progress.usage_scan;
                if usage_scan.usage.is_none() && usage.is_some() {
                    (usage_scan.usage, usage_scan.streamed) = (usage, 0);
                }
                if let (Some(translator), Some(usage)) = (&mut self.translator, usage) {
                    let Usage { prompt, cached, completion } = usage;
                    translator.set_usage([prompt, cached, completion]);
                }
                match self.translated(last) {
                    Ok(last) => {
                        self.driver.count_resume(ResumeResult::Resumed);
                        self.driver.apply(Event::StreamEnded(self.attempt));
                        self.write(last, BodyPiece::Last).await?;
                    }
                    Err(untranslatable) => {
                        self.driver.count_resume(ResumeResult::NotAllowed);
                        self.end_with_error(untranslatable, frames).await?;
                    }
                }
                return Ok(ResumeOutcome::Ended);
            }
            (ResumePlan::Impossible | ResumePlan::Restart | ResumePlan::Continue(_), _) => {
                self.driver.count_resume(ResumeResult::NotAllowed);
                self.end_with_error(error, frames).await?;
                return Ok(ResumeOutcome::Ended);
            }
        };
        // Boxed: few streams need this, so it should not enlarge every one.
        let continuation =
            Box::pin(self.driver.resume(self.session, self.attempt, &resume_state.request, rest));
        let answer = match self.idle.deadline {
            None => continuation.await?,
            // The exchange settles what the continuation began.
            Some(until) => tokio::time::timeout_at(until, continuation).await.unwrap_or(Ok(None))?,
        };
        let Some(answer) = answer.filter(|answer| answer.reply.is_stream()) else {
            self.driver.count_resume(ResumeResult::Failed);
            self.driver.apply(Event::Exhausted);
            self.end_with_error(error, frames).await?;
            return Ok(ResumeOutcome::Ended);
        };
        self.driver.count_resume(ResumeResult::Resumed);
        resume_state.transcript.mark_continued();
        (self.attempt, self.reply, self.load) = (answer.attempt, Some(answer.reply), Some(answer.load));
        self.has_first_chunk = false;
        self.idle.received();
        Ok(ResumeOutcome::Continues)
    }

    /// Ends a failed stream: one typed error at a frame boundary, then `[DONE]` in OpenAI's form.
    pub(super) async fn end_with_error(
        &mut self,
        error: StreamError,
        frames: &FrameBuffer,
    ) -> Result<(), RequestError> {
        self.apply_error(&error);
        let mut last = BytesMut::new();
        if frames.is_inside() && self.translator.is_none() {
            last.extend_from_slice(b"\n\n");
        }
        last.extend_from_slice(&self.last_event(error));
        self.write(last.freeze(), BodyPiece::Last).await
    }

    /// The end of a failed stream, in the form of the client's API.
    fn last_event(&mut self, error: StreamError) -> Bytes {
        let Refusal(error) = error.refusal();
        match &mut self.translator {
            Some(translator) => translator.fail(&error),
            None => self.format.envelope().last_event(&error),
        }
    }

    /// Applies the error to the exchange. The engine is at fault only for its own failure, not for a request that took
    /// too long.
    pub(super) fn apply_error(&mut self, error: &StreamError) {
        self.driver.apply(match error {
            StreamError::EngineDied | StreamError::IdleTimeout | StreamError::Failed(_) => {
                Event::StreamBroken(self.attempt)
            }
            StreamError::Refused(_) => Event::Exhausted,
            StreamError::OutOfTime => Event::ExhaustedFor(SettlementCause::OutOfTime),
        });
    }

    /// The next chunk of the response, while the client is connected.
    pub(super) async fn next_chunk(&mut self) -> Result<Result<Option<Bytes>, StreamError>, RequestError> {
        // After the last byte the client is not watched: its next request is no disconnect.
        let Some(reply) = self.reply.as_mut().filter(|reply| !reply.is_ended()) else { return Ok(Ok(None)) };
        let idle = &mut self.idle;
        let next = pin!(poll_fn(|context| match reply.poll_chunk(context) {
            Poll::Ready(chunk) => Poll::Ready(Some(chunk)),
            Poll::Pending => idle.poll(context).map(|()| None),
        }));
        match race(self.session, next).await {
            Err(ClientGone) => Err(self.driver.cancel()),
            Ok(None) if self.idle.is_past_deadline() => Ok(Err(StreamError::OutOfTime)),
            Ok(None) => {
                self.driver.progress.timed_out = true;
                Ok(Err(StreamError::IdleTimeout))
            }
            Ok(Some(chunk)) => Ok(self.received(chunk)),
        }
    }

    fn received(&mut self, chunk: Option<Result<Bytes, CallError>>) -> Result<Option<Bytes>, StreamError> {
        let now = self.idle.received();
        let chunk = match (chunk.transpose(), &self.reply) {
            (Ok(chunk), _) => chunk,
            (Err(CallError::Undecodable(error)), Some(reply)) => {
                let (refusal, fault) = classify_unreadable(reply.engine(), error);
                self.driver.report_fault(fault);
                return Err(StreamError::Failed(refusal));
            }
            (Err(_), _) => return Err(StreamError::EngineDied),
        };
        if chunk.is_some() && !std::mem::replace(&mut self.has_first_chunk, true) {
            self.driver.apply(Event::FirstChunk(self.attempt));
        }
        if chunk.is_some() {
            self.driver.record_piece(now.into_std());
        }
        Ok(chunk)
    }

    pub(super) async fn commit(
        &mut self,
        head: ResponseHeader,
        length: ResponseLength,
    ) -> Result<(), RequestError> {
        let written = self.session.write_head(head, length).await;
        written.map_err(|ClientGone| self.driver.cancel())
    }

    pub(super) async fn write(&mut self, bytes: Bytes, piece: BodyPiece) -> Result<(), RequestError> {
        match self.session.send(&bytes, piece).await {
            // The time spent waiting for the client does not count as the engine's silence.
            Ok(true) => _ = self.idle.received(),
            Ok(false) => {}
            Err(ClientGone) => return Err(self.driver.cancel()),
        }
        Ok(())
    }
}

impl StreamError {
    /// Whether another engine may succeed.
    fn is_engine_fault(&self) -> bool {
        matches!(self, Self::EngineDied | Self::IdleTimeout | Self::Failed(_))
    }

    pub(super) fn refusal(self) -> Refusal {
        match self {
            Self::EngineDied => Refusal::broken(),
            Self::IdleTimeout => Refusal::timed_out(),
            Self::Failed(refusal) | Self::Refused(refusal) => refusal,
            Self::OutOfTime => Refusal::out_of_time(),
        }
    }
}

/// Returns an engine's connection for reuse, after the end of its response has arrived.
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
    // The client has received everything; only the connection's next use waits for this.
    tokio::spawn(async move { drop(tokio::time::timeout(END_AFTER_DONE, rest).await) });
}
