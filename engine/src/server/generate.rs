//! `/v1/completions`, `/v1/chat/completions` and the APIs that are answered as chats (`api.rs`): from a body to a reply
//! or a stream.
//!
//! The head of a stream is sent with its first event. A refusal, a failed fetch or a full queue is therefore a status
//! and an envelope, never a broken stream.

mod api;
mod early;
mod parsed;
mod prompt_logprobs;
mod stream;
mod structured;
mod thinking;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use baton_connector::fetch::FailureKind;
use baton_connector::{Handoff, RequestId};
use baton_openai::{
    ApiError, Code, Endpoint, FinishedChoice, GenerateRequest, MessageParts, PredictionTokens, ReplyHead,
    TokenLogprob, Translation, parse_object,
};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::Value;
use tokio::sync::mpsc::Receiver;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::oneshot;

use super::admit::{self, AdmittedRequest};
use super::body_budget::{INLINE_BYTES, QUEUE_RETRY, RequestBody};
use super::choice::{Choice, ChoiceUpdate, TokenUsage};
use super::guard::{HandoffGuard, LeaseGuard, LeaseReplyBody, SequenceGuard};
use super::reply::{self, BodyError, Reply, read_remaining};
use super::task_spawner::TaskSpawner;
use super::transfer_params::{self, PARAMS, TransferOffer};
use super::{Frontend, access, seal};
use crate::engine_core::mailbox::MailboxError;
use crate::engine_core::{SeqEvent, Submission};
use crate::model::tokenizer::DecodeMode;
use crate::run::random::random_bytes;
use crate::run::rank::DpRank;
use crate::sampling::SampledLogprobs;
use crate::scheduler::Refusal;
use crate::scheduler::sequence::Purpose;
pub(super) use api::GenerateApi;
use api::ReplyForm;
use parsed::ParsedChoice;

/// The request's name, minted by the router.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The longest `Retry-After` of a queue that is too slow for a request's deadline.
const LATE_RETRY_MAX: Duration = Duration::from_secs(60);

/// A running generation request.
pub(super) struct GenerateTask {
    frontend: Arc<Frontend>,
    request: GenerateRequest,
    form: ReplyForm,
    events: Receiver<(u32, SeqEvent)>,
    guard: SequenceGuard,
    choices: Vec<Choice>,
    /// The parsers of the choices, if their text is parsed.
    parsed: Vec<Option<ParsedChoice>>,
    prompts: Vec<Vec<u32>>,
    /// The log-probabilities of each prompt, once it is computed, if requested.
    prompt_scores: Vec<Vec<SampledLogprobs>>,
    usage: TokenUsage,
    handoff: Option<Box<Handoff>>,
    open: usize,
}

/// The effect of one engine event on the reply.
#[expect(clippy::large_enum_variant, reason = "moved once per token, which costs less than an allocation")]
pub(super) enum GenerateProgress {
    /// The prompt is being computed, and its handoff has arrived.
    EarlyHandoff,
    /// A choice has grown or ended.
    Piece(usize, ChoiceUpdate),
    /// Nothing to send.
    Nothing,
}

/// Answers one request to generate. Reading has begun when this returns, and continues if the future is dropped. A
/// handoff that has arrived must be released, even if its connection has ended meanwhile.
pub(super) fn answer(
    frontend: Arc<Frontend>,
    api: GenerateApi,
    request: Request<Incoming>,
    begin: &TaskSpawner,
) -> impl Future<Output = Result<Reply, ApiError>> + Send + use<> {
    let (caller, gone) = oneshot::channel();
    let reading = request_id(request.headers())
        .ok_or_else(|| ApiError::internal("the system has no randomness"))
        .map(|id| (id.clone(), begin.spawn(read(Arc::clone(&frontend), api, id, request, gone))));
    async move {
        // Dropped with this future.
        let _caller = caller;
        let (id, reading) = reading?;
        let (request, translation, admitted) = reading.await?;
        let named = |error| api.named(error);
        let mut task = GenerateTask::start(frontend, request, translation, admitted, &id).map_err(named)?;
        let first = task.next().await.map_err(named)?;
        if task.request.stream {
            return Ok(event_stream(stream::StreamBody::new(task, first)));
        }
        if let GenerateProgress::EarlyHandoff = first {
            return Ok(event_stream(early::EarlyBody::new(task)));
        }
        let (bytes, handoff) = task.collect(first).await.map_err(named)?;
        Ok(match handoff {
            None => reply::json(StatusCode::OK, bytes),
            Some(handoff) => handoff_reply(task.guard.core(), &handoff, bytes),
        })
    }
}

/// A request, what its reply is translated to, and its sequences.
type ReadRequest = (GenerateRequest, Option<Translation>, AdmittedRequest);

/// Reads a request and checks it. A constraint is compiled until the sender of `gone` is dropped.
async fn read(
    frontend: Arc<Frontend>,
    api: GenerateApi,
    id: RequestId,
    request: Request<Incoming>,
    gone: oneshot::Receiver<()>,
) -> Result<ReadRequest, ApiError> {
    let arrived = Instant::now();
    let bodies = Arc::clone(&frontend.bodies.requests);
    let (headers, body) = read_body(&frontend, request).await?;
    let inline = body.len() <= INLINE_BYTES;
    let reader = Arc::clone(&frontend);
    let work = move || prepare(&reader, api, &headers, &id, &body, arrived);
    let (request, translation, admitted) = if inline { work()? } else { bodies.run_blocking(work).await? };
    let admitted = structured::constrain(&frontend, &request, admitted, gone).await;
    Ok((request, translation, admitted.map_err(|error| api.named(error))?))
}

/// Reads a body. A broken one releases the lease that it names.
pub(super) async fn read_body(
    frontend: &Arc<Frontend>,
    request: Request<Incoming>,
) -> Result<(HeaderMap, RequestBody), ApiError> {
    let headers = request.headers().clone();
    match read_remaining(request, frontend.limits.body_bytes, &frontend.bodies.requests).await {
        Ok(body) => Ok((headers, body)),
        Err(BodyError { error, read }) => {
            let (frontend, reported) = (Arc::clone(frontend), error.clone());
            // Not on the reading threads: the lease is held until this release.
            let release = move || transfer_params::release_broken(&frontend, &headers, &read, &reported);
            drop(tokio::task::spawn_blocking(release).await);
            Err(error)
        }
    }
}

/// The name of a request, from its caller; `None` if it is missing or invalid.
pub(super) fn request_id(headers: &HeaderMap) -> Option<RequestId> {
    let named = headers.get(&REQUEST_ID)?.to_str().ok()?;
    RequestId::new(access::bare_id(named)).ok()
}

/// The name of a request, for the head of its reply. A generation request without a name is given one.
pub(super) fn name(request: &mut Request<Incoming>) -> Option<HeaderValue> {
    if request_id(request.headers()).is_some() {
        return request.headers().get(&REQUEST_ID).cloned();
    }
    GenerateApi::at(request.uri().path()).filter(|_| request.method() == Method::POST)?;
    let number = u128::from_ne_bytes(random_bytes().ok()?);
    let minted = HeaderValue::from_str(&format!("{number:032x}")).ok()?;
    request.headers_mut().insert(REQUEST_ID, minted.clone());
    Some(minted)
}

/// Prepares a request for the queue. The intent is read first, so that every later error releases the handoff.
fn prepare(
    frontend: &Arc<Frontend>,
    api: GenerateApi,
    headers: &HeaderMap,
    id: &RequestId,
    body: &[u8],
    arrived: Instant,
) -> Result<ReadRequest, ApiError> {
    let map = parse_object(body, &frontend.limits)
        .inspect_err(|error| transfer_params::release_broken(frontend, headers, body, error))?;
    api.check_asker(&map, headers)?;
    let request_guard = frontend.begin_request(headers);
    let core = request_guard.as_ref().map_or(&frontend.cores[0], |guard| guard);
    let TransferOffer { intent, guard } = TransferOffer::read(frontend, core, map.get(PARAMS), headers);
    let judge = || -> Result<ReadRequest, ApiError> {
        let (intent, request_guard) = (intent?, request_guard?);
        let deadlines = admit::deadlines(headers, arrived)?;
        let (request, translation) = api.read(&map, &frontend.limits)?;
        let admitted = admit::admit(frontend, &request, id, &intent, request_guard, arrived);
        Ok((request, translation, admitted.map_err(|error| api.named(error))?.within(deadlines)))
    };
    match judge() {
        Ok((request, translation, admitted)) => {
            Ok((request, translation, AdmittedRequest { handoff: guard, ..admitted }))
        }
        Err(error) => {
            if let Some(guard) = guard {
                guard.refuse(&error);
            }
            Err(error)
        }
    }
}

impl GenerateTask {
    /// Queues the request's sequences: all or none.
    fn start(
        frontend: Arc<Frontend>,
        request: GenerateRequest,
        translation: Option<Translation>,
        admitted: AdmittedRequest,
        id: &RequestId,
    ) -> Result<Self, ApiError> {
        // The suffix of the reply's `id` after the request's name: callers may reuse a name, but no two replies have
        // the same id. `access::bare_id` removes the suffix.
        let mark = format!(".{:016x}", access::random_u64()?);
        let AdmittedRequest { mut submissions, events, prompts, handoff, request_guard } = admitted;
        let mut request = request;
        if matches!(submissions[0].sequence.purpose, Purpose::Produce { .. }) {
            // A producer's text is not needed. Its end is, because it contains the handle.
            request.stop.clear();
        }
        let ids: Vec<_> = submissions.iter().map(|submission| submission.sequence.id).collect();
        let choice = |submission: &Submission| Choice::new(&frontend, &request, &submission.sequence);
        let choices: Vec<_> = submissions.iter().map(choice).collect();
        let parsed = |submission: &Submission| {
            ParsedChoice::new(&frontend.model, &request, &submission.sequence, submission.index)
        };
        let parsed: Vec<_> = submissions.iter().map(parsed).collect();
        let target = handoff.map(HandoffGuard::into_target);
        submissions[0].target.clone_from(&target);
        let queued = match request_guard.status.snapshot().failed {
            Some(why) => Err(ApiError::unavailable(why, QUEUE_RETRY).with_code(Code::EngineFailed)),
            None => request_guard.mailbox.submit(submissions).map_err(|(_, why)| match why {
                MailboxError::Full => ApiError::overloaded("the engine's queue is full", QUEUE_RETRY),
                MailboxError::Closing => ApiError::unavailable("the engine is shutting down", QUEUE_RETRY)
                    .with_code(Code::Draining),
            }),
        };
        if let Err(error) = queued {
            if let Some(target) = target {
                HandoffGuard::new(Arc::clone(&request_guard), target).refuse(&error);
            }
            return Err(error);
        }
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let head = ReplyHead {
            endpoint: request.endpoint,
            id: format!("{}{id}{mark}", request.endpoint.id_prefix()),
            created,
            model: frontend.model.reply_name(request.model.as_deref()),
            system_fingerprint: None,
        };
        let usage = TokenUsage {
            prompt: prompts.iter().map(Vec::len).sum(),
            reasoning: parsed.iter().flatten().any(ParsedChoice::has_reasoning).then_some(0),
            predictions: frontend.cores[0].drafts.then(PredictionTokens::default),
            ..TokenUsage::default()
        };
        Ok(Self {
            guard: SequenceGuard::new(request_guard, id.clone(), ids),
            open: choices.len(),
            frontend,
            request,
            form: ReplyForm { head, translation },
            events,
            choices,
            prompt_scores: vec![Vec::new(); prompts.len()],
            parsed,
            prompts,
            usage,
            handoff: None,
        })
    }

    /// The next event. `Err` ends the request.
    async fn next(&mut self) -> Result<GenerateProgress, ApiError> {
        let event = self.events.recv().await;
        self.take(event)
    }

    fn take(&mut self, event: Option<(u32, SeqEvent)>) -> Result<GenerateProgress, ApiError> {
        let Some((index, event)) = event else {
            return Err(ApiError::unavailable("the engine stopped", QUEUE_RETRY));
        };
        let choice = &mut self.choices[index as usize];
        let piece = match event {
            SeqEvent::EarlyHandoff(handoff) => {
                self.handoff = Some(handoff);
                return Ok(GenerateProgress::EarlyHandoff);
            }
            SeqEvent::Started { cached, prompt_logprobs } => {
                // The choices of one prompt share it: it is counted once, like the prompt.
                if index % self.request.n == 0 {
                    self.usage.reused += cached;
                    self.prompt_scores[(index / self.request.n) as usize] = prompt_logprobs;
                }
                None
            }
            // Only the echo is wanted.
            SeqEvent::Token(..) if self.request.max_tokens == Some(0) => None,
            SeqEvent::Token(sampled, drafts) => {
                let piece = choice.token(sampled, &mut self.guard);
                if piece.is_some() {
                    self.usage.count(drafts);
                }
                piece
            }
            SeqEvent::Finished(end) => {
                let piece = choice.end(&end, &mut self.guard);
                self.handoff = end.handoff.or(self.handoff.take());
                piece
            }
            SeqEvent::Refused(refusal) => return Err(refused(refusal)),
            SeqEvent::LoadFailed(kind) => {
                let message = format!("the prompt's KV blocks could not be fetched: {}", kind.label());
                return Err(ApiError::unavailable(message, QUEUE_RETRY).with_code(load_failure(kind)));
            }
            SeqEvent::TimedOut(kind) => return Err(admit::timed_out(kind)),
            SeqEvent::DeadEnd(why) => return Err(structured::dead_end(&self.request, why)),
            SeqEvent::Unavailable(why) => return Err(ApiError::unavailable(why, QUEUE_RETRY)),
        };
        let Some(mut piece) = piece else { return Ok(GenerateProgress::Nothing) };
        if let Some(parsed) = &mut self.parsed[index as usize] {
            let reasoned = parsed.apply(&mut piece);
            self.usage.reasoning = self.usage.reasoning.map(|before| before + reasoned);
        }
        self.open -= usize::from(piece.finish.is_some());
        Ok(GenerateProgress::Piece(index as usize, piece))
    }

    /// A reply in one piece, and the handoff if the reply contains its only copy.
    async fn collect(&mut self, first: GenerateProgress) -> Result<(Bytes, Option<Box<Handoff>>), ApiError> {
        let mut texts = vec![String::new(); self.choices.len()];
        let mut logprobs: Vec<Vec<TokenLogprob>> = vec![Vec::new(); self.choices.len()];
        let mut parts = vec![MessageParts::default(); self.choices.len()];
        let mut progress = first;
        loop {
            if let GenerateProgress::Piece(index, mut piece) = progress {
                texts[index].push_str(&piece.text);
                logprobs[index].extend(piece.logprob.take());
                parsed::collect(&mut parts[index], piece);
            }
            if self.open == 0 {
                break;
            }
            progress = self.next().await?;
        }
        let mut finished = Vec::with_capacity(texts.len());
        for (index, (text, logprobs)) in texts.into_iter().zip(logprobs).enumerate() {
            let at = index / self.request.n as usize;
            let (prompt, scores) = (&self.prompts[at], &self.prompt_scores[at]);
            let tokenizer = &self.frontend.model.tokenizer;
            // A chat has them once, beside its choices.
            let scored = index == 0 || self.request.endpoint == Endpoint::Completions;
            let own = |top| prompt_logprobs::prompt_logprobs(tokenizer, prompt, scores, top);
            let with_prompt = |top| match self.request.echo {
                true => [prompt_logprobs::echoed_tokens(tokenizer, prompt, scores, top), logprobs].concat(),
                false => logprobs,
            };
            let choice = &mut self.choices[index];
            finished.push(FinishedChoice {
                index: index as u32,
                text: if self.request.echo {
                    echoed(&self.frontend, &self.request, prompt) + &text
                } else {
                    text
                },
                parts: std::mem::take(&mut parts[index]),
                logprobs: self.request.logprobs.map(with_prompt),
                finish: choice.finish.take().expect("every choice has ended"),
                token_ids: self.request.return_token_ids.then(|| std::mem::take(&mut choice.tokens)),
                prompt_token_ids: self.request.return_token_ids.then(|| prompt.clone()),
                prompt_logprobs: self.request.prompt.logprobs.filter(|_| scored).map(own),
            });
        }
        // After an error the handoff is released, because no reply contains it.
        let bytes = self.form.whole(&finished, &self.usage.usage(), self.params().as_ref())?;
        Ok((bytes, self.handoff.take()))
    }

    /// The `kv_transfer_params` of the reply.
    fn params(&self) -> Option<Value> {
        let secret = self.frontend.secret.as_ref();
        self.handoff.as_ref().map(|handoff| seal::reply(secret, handoff))
    }
}

impl Drop for GenerateTask {
    /// Releases a handle that no client receives: the stored one, or one still in the channel. If the step loop sends
    /// another one after this, the send fails and the step loop releases it.
    fn drop(&mut self) {
        self.events.close();
        loop {
            match self.events.try_recv() {
                Ok((_, SeqEvent::Finished(end))) if end.handoff.is_some() => self.handoff = end.handoff,
                Ok((_, SeqEvent::EarlyHandoff(handoff))) => self.handoff = Some(handoff),
                Ok(_) => {}
                // Closed, but the step loop may be sending right now, which takes nanoseconds.
                Err(TryRecvError::Empty) => std::hint::spin_loop(),
                Err(TryRecvError::Disconnected) => break,
            }
        }
        let Some(handoff) = self.handoff.take() else { return };
        // A growing handoff is the first event of a stream.
        drop(match self.request.stream || handoff.growing {
            true => LeaseGuard::of_stream(self.guard.core(), Some(handoff.handle)),
            false => LeaseGuard::of_unary(self.guard.core(), &handoff),
        });
    }
}

/// The prompt's text, for `echo`.
fn echoed(frontend: &Frontend, request: &GenerateRequest, prompt: &[u32]) -> String {
    let decode = if request.skip_special_tokens { DecodeMode::SkipSpecial } else { DecodeMode::All };
    frontend.model.tokenizer.decode(prompt, decode)
}

pub(super) fn refused(refusal: Refusal) -> ApiError {
    match refusal {
        Refusal::QueueFull { waiting } => {
            ApiError::overloaded(format!("{waiting} requests are waiting already"), QUEUE_RETRY)
        }
        Refusal::TooLate { wait, .. } => {
            ApiError::overloaded(refusal.to_string(), wait.clamp(QUEUE_RETRY, LATE_RETRY_MAX))
        }
        Refusal::TooLong { .. } => {
            ApiError::invalid("prompt", refusal.to_string()).with_code(Code::ContextLengthExceeded)
        }
    }
}

/// The code by which a router acts on a failed fetch: it retries the handoff elsewhere, or recomputes the prompt.
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
fn handoff_reply(core: &DpRank, handoff: &Handoff, bytes: Bytes) -> Reply {
    let mut reply = Response::new(LeaseReplyBody::new(core, handoff, bytes).boxed());
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
