//! `/v1/completions` and `/v1/chat/completions`: from a body to a reply or a stream.
//!
//! The head of a stream is sent with its first event, so that a refusal, a failed fetch or a full queue is a
//! status and an envelope, never a broken stream.

mod early;
mod stream;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use baton_connector::fetch::FailureKind;
use baton_connector::{Handoff, RequestId};
use baton_openai::{
    ApiError, Code, Endpoint, FinishedChoice, GenerateRequest, ReplyHead, TokenLogprob, parse_object,
};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::Value;
use tokio::sync::mpsc::Receiver;
use tokio::sync::mpsc::error::TryRecvError;

use super::admit::{self, Admitted};
use super::bodies::{INLINE_BYTES, QUEUE_RETRY};
use super::detached::Begin;
use super::follow::{Choice, Counted, Piece};
use super::guard::{HandoffBody, HandoffGuard, LentGuard, SequenceGuard};
use super::rejection::{self, Offer, PARAMS};
use super::reply::{self, Reply, Unread, read_what_comes};
use super::{Frontend, access, seal};
use crate::engine_core::mailbox::Undelivered;
use crate::engine_core::{SeqEnd, SeqEvent, Submission};
use crate::model::tokenizer::Decode;
use crate::run::rank::DpRank;
use crate::scheduler::Refusal;
use crate::scheduler::sequence::Purpose;

/// The request's name, minted by the router.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A request on its way.
pub(super) struct Exchange {
    frontend: Arc<Frontend>,
    request: GenerateRequest,
    head: ReplyHead,
    events: Receiver<(u32, SeqEvent)>,
    guard: SequenceGuard,
    choices: Vec<Choice>,
    prompts: Vec<Vec<u32>>,
    counted: Counted,
    handoff: Option<Box<Handoff>>,
    open: usize,
}

/// What one event of the engine means for the reply.
pub(super) enum Progress {
    /// The prompt is being computed, and its handoff is there.
    Lending,
    /// A choice has grown or ended.
    Piece(usize, Piece),
    /// Nothing to show.
    Nothing,
}

/// Answers one request to generate. Its reading has begun when this returns, and goes on if the future is dropped: a
/// handoff that has arrived must be given back, also when its connection has ended meanwhile.
pub(super) fn answer(
    frontend: Arc<Frontend>,
    endpoint: Endpoint,
    request: Request<Incoming>,
    begin: &Begin,
) -> impl Future<Output = Result<Reply, ApiError>> + Send + use<> {
    let reading = request_id(request.headers())
        .ok_or_else(|| ApiError::internal("the system has no randomness"))
        .map(|id| (id.clone(), begin.begun(read(Arc::clone(&frontend), endpoint, id, request))));
    async move {
        let (id, reading) = reading?;
        let (request, admitted) = reading.await?;
        let mut exchange = Exchange::start(frontend, request, admitted, &id)?;
        let first = exchange.next().await?;
        if exchange.request.stream {
            return Ok(event_stream(stream::StreamBody::new(exchange, first)));
        }
        if let Progress::Lending = first {
            return Ok(event_stream(early::EarlyBody::new(exchange)));
        }
        let (bytes, handoff) = exchange.collect(first).await?;
        Ok(match handoff {
            None => reply::json(StatusCode::OK, bytes),
            Some(handoff) => handoff_reply(exchange.guard.core(), &handoff, bytes),
        })
    }
}

/// Reads a request and judges it.
async fn read(
    frontend: Arc<Frontend>,
    endpoint: Endpoint,
    id: RequestId,
    request: Request<Incoming>,
) -> Result<(GenerateRequest, Admitted), ApiError> {
    let arrived = Instant::now();
    let headers = request.headers().clone();
    let bodies = Arc::clone(&frontend.bodies);
    let body = match read_what_comes(request, frontend.limits.body_bytes, &bodies).await {
        Ok(body) => body,
        Err(Unread { error, read }) => {
            let told = error.clone();
            // It waits for no text that is being read: a lease is held until then.
            let giving_back = move || rejection::of_broken(&frontend, &headers, &read, &told);
            drop(tokio::task::spawn_blocking(giving_back).await);
            return Err(error);
        }
    };
    let inline = body.len() <= INLINE_BYTES;
    let work = move || prepare(&frontend, endpoint, &headers, &id, &body, arrived);
    if inline { work() } else { bodies.apart(work).await }
}

/// The name of a request, as its caller has it; `None` where it has none, or none that could be one.
fn request_id(headers: &HeaderMap) -> Option<RequestId> {
    let named = headers.get(&REQUEST_ID)?.to_str().ok()?;
    RequestId::new(access::bare_id(named)).ok()
}

/// The name of a request, for the head of its reply. One that generates is given a name if it has none.
pub(super) fn name(request: &mut Request<Incoming>) -> Option<HeaderValue> {
    if request_id(request.headers()).is_some() {
        return request.headers().get(&REQUEST_ID).cloned();
    }
    Endpoint::at(request.uri().path()).filter(|_| request.method() == Method::POST)?;
    let mut random = [0; 16];
    getrandom::fill(&mut random).ok()?;
    let minted = HeaderValue::from_str(&format!("{:032x}", u128::from_ne_bytes(random))).ok()?;
    request.headers_mut().insert(REQUEST_ID, minted.clone());
    Some(minted)
}

/// What a reply's `id` has behind the request's name: callers use a name again, and no two replies have the same id.
/// [`access::bare_id`] takes it off.
fn mark() -> Result<String, ApiError> {
    Ok(format!(".{:016x}", admit::random_u64()?))
}

/// Everything before the queue: the intent first, so that whatever is wrong with the rest gives a handoff back.
fn prepare(
    frontend: &Arc<Frontend>,
    endpoint: Endpoint,
    headers: &HeaderMap,
    id: &RequestId,
    body: &[u8],
    arrived: Instant,
) -> Result<(GenerateRequest, Admitted), ApiError> {
    let map = parse_object(body, &frontend.limits)
        .inspect_err(|error| rejection::of_broken(frontend, headers, body, error))?;
    let seat = frontend.seat(headers);
    let core = seat.as_ref().map_or(&frontend.cores[0], |seat| seat);
    let Offer { intent, guard } = Offer::read(frontend, core, map.get(PARAMS), headers);
    let judge = || {
        let (intent, seat) = (intent?, seat?);
        let request = GenerateRequest::from_map(endpoint, &map, &frontend.limits)?;
        let admitted = admit::admit(frontend, &request, id, &intent, seat, arrived)?;
        Ok((request, admitted))
    };
    match judge() {
        Ok((request, admitted)) => Ok((request, Admitted { handoff: guard, ..admitted })),
        Err(error) => {
            if let Some(guard) = guard {
                guard.refuse(&error);
            }
            Err(error)
        }
    }
}

impl Exchange {
    /// Queues the request's sequences: all or none.
    fn start(
        frontend: Arc<Frontend>,
        request: GenerateRequest,
        admitted: Admitted,
        id: &RequestId,
    ) -> Result<Self, ApiError> {
        let mark = mark()?;
        let Admitted { mut submissions, events, prompts, handoff, seat } = admitted;
        let mut request = request;
        if matches!(submissions[0].sequence.purpose, Purpose::Produce { .. }) {
            // Its text is of no interest, and its end must be waited for: that is where the handle comes from.
            request.stop.clear();
        }
        let ids: Vec<_> = submissions.iter().map(|submission| submission.sequence.id).collect();
        let choice = |submission: &Submission| Choice::new(&frontend, &request, &submission.sequence);
        let choices: Vec<_> = submissions.iter().map(choice).collect();
        let target = handoff.map(HandoffGuard::into_target);
        submissions[0].target.clone_from(&target);
        let queued = match seat.status.look().failed {
            Some(why) => Err(ApiError::unavailable(why, QUEUE_RETRY).with_code(Code::EngineFailed)),
            None => seat.mailbox.submit(submissions).map_err(|(_, why)| match why {
                Undelivered::Full => ApiError::overloaded("the engine's queue is full", QUEUE_RETRY),
                Undelivered::Closing => ApiError::unavailable("the engine is shutting down", QUEUE_RETRY)
                    .with_code(Code::Draining),
            }),
        };
        if let Err(error) = queued {
            if let Some(target) = target {
                HandoffGuard::new(Arc::clone(&seat), target).refuse(&error);
            }
            return Err(error);
        }
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let head = ReplyHead {
            endpoint: request.endpoint,
            id: format!("{}{id}{mark}", request.endpoint.id_prefix()),
            created,
            model: frontend.model.clone(),
            system_fingerprint: None,
        };
        let counted = Counted { prompt: prompts.iter().map(Vec::len).sum(), ..Counted::default() };
        Ok(Self {
            guard: SequenceGuard::new(seat, id.clone(), ids),
            open: choices.len(),
            frontend,
            request,
            head,
            events,
            choices,
            prompts,
            counted,
            handoff: None,
        })
    }

    /// The next event. `Err` ends the request.
    async fn next(&mut self) -> Result<Progress, ApiError> {
        let event = self.events.recv().await;
        self.take(event)
    }

    fn take(&mut self, event: Option<(u32, SeqEvent)>) -> Result<Progress, ApiError> {
        let Some((index, event)) = event else {
            return Err(ApiError::unavailable("the engine stopped", QUEUE_RETRY));
        };
        let choice = &mut self.choices[index as usize];
        let piece = match event {
            SeqEvent::Lending(handoff) => {
                self.handoff = Some(handoff);
                return Ok(Progress::Lending);
            }
            SeqEvent::Started { cached } => {
                // The choices of one prompt share it: it is counted once, like the prompt.
                self.counted.reused += if index % self.request.n == 0 { cached } else { 0 };
                None
            }
            SeqEvent::Token(sampled) => {
                let piece = choice.token(sampled, &mut self.guard);
                self.counted.completion += usize::from(piece.is_some());
                piece
            }
            SeqEvent::Finished(end) => {
                let piece = choice.end(&end, &mut self.guard);
                self.ended(*end);
                piece
            }
            SeqEvent::Refused(refusal) => return Err(refused(refusal)),
            SeqEvent::LoadFailed(kind) => {
                let message = format!("the prompt's KV blocks could not be fetched: {}", kind.label());
                return Err(ApiError::unavailable(message, QUEUE_RETRY).with_code(load_failure(kind)));
            }
            SeqEvent::Unavailable(why) => return Err(ApiError::unavailable(why, QUEUE_RETRY)),
        };
        let Some(piece) = piece else { return Ok(Progress::Nothing) };
        self.open -= usize::from(piece.finish.is_some());
        Ok(Progress::Piece(index as usize, piece))
    }

    fn ended(&mut self, end: SeqEnd) {
        if end.handoff.is_some() {
            self.handoff = end.handoff;
        }
    }

    /// A reply in one piece, and the handoff whose only copy it carries.
    async fn collect(&mut self, first: Progress) -> Result<(Bytes, Option<Box<Handoff>>), ApiError> {
        let mut texts = vec![String::new(); self.choices.len()];
        let mut logprobs: Vec<Vec<TokenLogprob>> = vec![Vec::new(); self.choices.len()];
        let mut progress = first;
        loop {
            if let Progress::Piece(index, piece) = progress {
                texts[index].push_str(&piece.text);
                logprobs[index].extend(piece.logprob);
            }
            if self.open == 0 {
                break;
            }
            progress = self.next().await?;
        }
        let wants_logprobs = self.request.logprobs.is_some();
        let mut finished = Vec::with_capacity(texts.len());
        for (index, (text, logprobs)) in texts.into_iter().zip(logprobs).enumerate() {
            let prompt = &self.prompts[index / self.request.n as usize];
            let choice = &mut self.choices[index];
            finished.push(FinishedChoice {
                index: index as u32,
                text: if self.request.echo {
                    echoed(&self.frontend, &self.request, prompt) + &text
                } else {
                    text
                },
                logprobs: wants_logprobs.then_some(logprobs),
                finish: choice.finish.take().expect("every choice has ended"),
                token_ids: self.request.return_token_ids.then(|| std::mem::take(&mut choice.tokens)),
                prompt_token_ids: self.request.return_token_ids.then(|| prompt.clone()),
            });
        }
        let bytes = self.head.full(&finished, &self.counted.usage(), self.params().as_ref());
        Ok((bytes, self.handoff.take()))
    }

    /// The `kv_transfer_params` of the reply.
    fn params(&self) -> Option<Value> {
        let secret = self.frontend.secret.as_ref();
        self.handoff.as_ref().map(|handoff| seal::reply(secret, handoff))
    }
}

impl Drop for Exchange {
    /// A handle that nobody will learn any more is released: the one at hand, and one still in the channel. What
    /// the step loop sends after this fails there, and is released there.
    fn drop(&mut self) {
        self.events.close();
        loop {
            match self.events.try_recv() {
                Ok((_, SeqEvent::Finished(end))) if end.handoff.is_some() => self.handoff = end.handoff,
                Ok((_, SeqEvent::Lending(handoff))) => self.handoff = Some(handoff),
                Ok(_) => {}
                // Closed, but the step loop is just putting something in: that takes nanoseconds.
                Err(TryRecvError::Empty) => std::hint::spin_loop(),
                Err(TryRecvError::Disconnected) => break,
            }
        }
        let handle = self.handoff.take().map(|handoff| handoff.handle);
        drop(LentGuard::new(self.guard.core(), handle));
    }
}

/// The prompt's text, for `echo`.
fn echoed(frontend: &Frontend, request: &GenerateRequest, prompt: &[u32]) -> String {
    let decode = if request.skip_special_tokens { Decode::SkipSpecial } else { Decode::All };
    frontend.tokenizer.decode(prompt, decode)
}

fn refused(refusal: Refusal) -> ApiError {
    match refusal {
        Refusal::QueueFull { waiting } => {
            ApiError::overloaded(format!("{waiting} requests are waiting already"), QUEUE_RETRY)
        }
        Refusal::TooLong { .. } => {
            ApiError::invalid("prompt", refusal.to_string()).with_code(Code::ContextLengthExceeded)
        }
    }
}

/// The code by which a router acts on a failed fetch: the same handoff elsewhere, or the prompt anew.
fn load_failure(kind: FailureKind) -> Code {
    match kind {
        FailureKind::Gone => Code::KvGone,
        FailureKind::Refused => Code::KvRefused,
        FailureKind::Unreachable => Code::KvHandshakeFailed,
        FailureKind::Transfer => Code::KvTransferFailed,
        FailureKind::Unverified => Code::KvUnverified,
    }
}

/// A producer's reply: the only copy of its handle.
fn handoff_reply(core: &Arc<DpRank>, handoff: &Handoff, bytes: Bytes) -> Reply {
    let mut reply = Response::new(HandoffBody::new(core, handoff.handle, bytes).boxed());
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
}

fn event_stream(body: impl Body<Data = Bytes, Error = Infallible> + Send + Sync + 'static) -> Reply {
    let mut reply = Response::new(body.boxed());
    let headers = reply.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    reply
}
