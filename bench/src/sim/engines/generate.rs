//! `/v1/completions` and `/v1/chat/completions` of a simulated engine: from a body to a reply or a stream.
//!
//! ```text
//!  body ─▶ intent ─▶ checked ─▶ admission delay ─▶ queue ─▶ words as they come ─▶ end
//!            └ a refusal gives the lease back: Baton's engine always (or leaves it to a router that settles),
//!              vLLM's only where its handler has seen the request; see [`Layer`]
//! ```
//!
//! Sampling parameters are checked and otherwise without effect; an answer is as long as `max_tokens` says.

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use baton_connector::RequestId;
use baton_engine::event_log::{What, tag};
use baton_openai::limits::COMPLETIONS_MAX_TOKENS_DEFAULT;
use baton_openai::{
    ApiError, ChoiceDelta, ChunkEncoder, Code, Endpoint, Finish, FinishReason, FinishedChoice,
    GenerateRequest, Object, ParseLimits, ReplyHead, Usage, parse_object, salvage_member, sse,
};
use serde_json::Value;
use tokio::sync::Notify;

use super::core::{End, Leg, Source, Submission, Ticket};
use super::engine::Engine;
use super::handoff::{self, Check, Intent, Producer};
use super::plan::Dialect;
use super::server::{Asked, bare, json, refusal};
use super::text;
use crate::sim::instant::http::Inbox;

const PARAMS: &str = "kv_transfer_params";
/// When to come back to a full queue.
const RETRY: Duration = Duration::from_secs(1);

/// Who has refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layer {
    /// What parses bodies, authorizes and balances: vLLM's producer hears nothing of it.
    Front,
    /// The handler: it tells the producer.
    Handler,
}

struct Refused {
    layer: Layer,
    error: ApiError,
    /// Another engine might take the request with the same handoff.
    elsewhere: bool,
}

impl Refused {
    fn front(error: ApiError) -> Self {
        Self { layer: Layer::Front, error, elsewhere: false }
    }

    fn handler(error: ApiError) -> Self {
        Self { layer: Layer::Handler, error, elsewhere: false }
    }

    fn elsewhere(self) -> Self {
        Self { elsewhere: true, ..self }
    }
}

/// A request on its way.
struct Exchange<'a> {
    engine: &'a Arc<Engine>,
    request: GenerateRequest,
    ticket: Ticket,
    progress: Arc<Notify>,
    head: ReplyHead,
    internal: RequestId,
    prompt: usize,
    contents: Vec<u64>,
}

/// Answers one request to generate.
pub(super) async fn answer(
    engine: &Arc<Engine>,
    inbox: &mut Inbox,
    endpoint: Endpoint,
    asked: Asked,
) -> io::Result<()> {
    let id = name(&asked);
    let (source, prepared) = prepare(engine, endpoint, &asked, &id);
    let refuse = |refused: &Refused| {
        if let Some(source) = &source {
            give_back(engine, source, refused, asked.settles);
        }
        let why = if refused.layer == Layer::Front { "unread" } else { "rejected" };
        engine.log.tell(0, &id, 0, What::Refused { reason: why, tag: None });
    };
    let mut submission = match prepared {
        Ok(prepared) => prepared,
        Err(refused) => {
            refuse(&refused);
            return inbox.send_or_gone(&refusal(&refused.error)).await;
        }
    };
    let delay = engine.plan.admission_delay;
    if source.is_some() && !delay.is_zero() {
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = inbox.gone() => {
                // Baton's engine gives back what came with a request that it drops; vLLM's has not begun to look at it.
                if let Some(source) = source.as_ref().filter(|_| engine.plan.dialect == Dialect::Baton) {
                    engine.release_at(source, "consumer_rejected");
                }
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
        }
    }
    submission.sent.source = source.clone();
    let (internal, progress) = (submission.sent.internal.clone(), Arc::clone(&submission.sent.progress));
    let (prompt, contents) = (submission.sent.prompt, submission.sent.contents.clone());
    let sent = submission.sent;
    let ticket = match engine.drive(|core, now_us| core.submit(sent, now_us)) {
        Ok(ticket) => ticket,
        Err(full) => {
            let why = format!("{} requests are waiting already", full.1.waiting);
            let refused = Refused::front(ApiError::overloaded(why, RETRY)).elsewhere();
            refuse(&refused);
            return inbox.send_or_gone(&refusal(&refused.error)).await;
        }
    };
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let head = ReplyHead {
        endpoint,
        id: format!("{}{id}", endpoint.id_prefix()),
        created,
        model: engine.plan.model.clone(),
        system_fingerprint: None,
    };
    let exchange =
        Exchange { engine, request: submission.request, ticket, progress, head, internal, prompt, contents };
    let told =
        if exchange.request.stream { exchange.stream(inbox).await } else { exchange.whole(inbox).await };
    if told.is_err() {
        engine.drive(|core, now_us| core.leave(ticket, now_us));
    }
    told
}

/// The router's name of a request, or one of our own.
fn name(asked: &Asked) -> RequestId {
    let named = asked.request_id.as_deref().and_then(|id| RequestId::new(bare(id)).ok());
    named.unwrap_or_else(|| {
        let own = format!("{:016x}", super::random());
        RequestId::new(&own).expect("hexadecimal digits are printable")
    })
}

struct Prepared {
    request: GenerateRequest,
    sent: Submission,
}

/// Everything before the queue. What came with the request is returned apart, so that every refusal gives it back.
fn prepare(
    engine: &Arc<Engine>,
    endpoint: Endpoint,
    asked: &Asked,
    id: &RequestId,
) -> (Option<Source>, Result<Prepared, Refused>) {
    let dialect = engine.plan.dialect;
    let limits = ParseLimits { prompts: 1, ..ParseLimits::default() };
    let fields = match parse_object(&asked.body, &limits) {
        Ok(fields) => fields,
        Err(error) => {
            let salvaged = salvage_member(&asked.body, PARAMS);
            let intent = handoff::intent(dialect, salvaged.as_ref());
            let source = match intent {
                Ok(Intent::Consume { source, .. }) => Some(source),
                _ => None,
            };
            return (source, Err(Refused::front(error)));
        }
    };
    let (leg, source, check) = match handoff::intent(dialect, fields.get(PARAMS)) {
        Err(error) => return (None, Err(Refused::handler(error))),
        Ok(Intent::Plain) => (Leg::Whole, None, None),
        Ok(Intent::Produce) => (Leg::Prefill, None, None),
        Ok(Intent::Consume { source, check }) => (Leg::Decode, Some(source), check),
    };
    let prepared = judge(engine, endpoint, &fields, &limits, (id, leg, check));
    (source, prepared)
}

fn judge(
    engine: &Arc<Engine>,
    endpoint: Endpoint,
    fields: &Object,
    limits: &ParseLimits,
    (id, leg, check): (&RequestId, Leg, Option<Check>),
) -> Result<Prepared, Refused> {
    let plan = &engine.plan;
    if leg == Leg::Decode && engine.drive(|core, _| core.refuses()) {
        return Err(Refused::front(ApiError::unavailable("simulated: refused", RETRY)).elsewhere());
    }
    let request = GenerateRequest::from_map(endpoint, fields, limits).map_err(|error| {
        // A value of another type than the field's is refused by what parses bodies, any other by the handler.
        let value = error.param.as_deref().and_then(|param| fields.get(param));
        if value.is_some_and(Value::is_number) { Refused::handler(error) } else { Refused::front(error) }
    })?;
    let handlers = |error| Err(Refused::handler(error));
    if let Some(model) = request.model.as_deref().filter(|model| *model != plan.model) {
        return handlers(ApiError::model_not_found(model));
    }
    if request.n != 1 {
        return handlers(ApiError::invalid("n", "a simulated engine makes one choice"));
    }
    let Some(tokens) = text::prompt(&request.input) else {
        return handlers(ApiError::invalid("prompt", "a simulated engine takes one prompt at a time"));
    };
    let (prompt, capacity) = (tokens.len(), plan.capacity());
    let room = capacity.saturating_sub(prompt);
    let max_tokens = match (request.max_tokens, endpoint) {
        (Some(tokens), _) => tokens.max(1) as usize,
        (None, Endpoint::Completions) => COMPLETIONS_MAX_TOKENS_DEFAULT as usize,
        (None, Endpoint::Chat) => room,
    };
    if max_tokens > room || room == 0 {
        return handlers(ApiError::context_length(prompt, max_tokens, capacity));
    }
    let contents = text::contents(&tokens, plan.block_tokens);
    if let Some(check) = check {
        let refused = |message: &str, code: Code| {
            Err(Refused::handler(ApiError::invalid(PARAMS, message).with_code(code)).elsewhere())
        };
        if check.layout != handoff::layout(plan.block_tokens) || check.block_tokens != plan.block_tokens {
            return refused("the handoff's blocks have another layout", Code::KvLayoutMismatch);
        }
        if check.prompt != handoff::fingerprint(&contents) {
            return refused("the handoff is of another prompt", Code::KvPromptMismatch);
        }
    }
    let sent = Submission {
        id: id.clone(),
        internal: internal(plan.dialect, endpoint, id),
        tag: tag(request.user.as_deref()),
        leg,
        prompt,
        contents,
        max_tokens,
        source: None,
        progress: Arc::new(Notify::new()),
    };
    Ok(Prepared { request, sent })
}

/// What the engine calls a request: vLLM adds the endpoint before it, and after it the prompt's number and randomness.
fn internal(dialect: Dialect, endpoint: Endpoint, id: &RequestId) -> RequestId {
    let random = || super::random() as u32;
    let name = match (dialect, endpoint) {
        (Dialect::Baton, _) => return id.clone(),
        (Dialect::Vllm, Endpoint::Completions) => format!("cmpl-{id}-0-{:08x}", random()),
        (Dialect::Vllm, Endpoint::Chat) => format!("chatcmpl-{id}-{:08x}", random()),
    };
    // A name that would be too long stays as it was sent.
    RequestId::new(&name).unwrap_or_else(|_| id.clone())
}

/// What came with a request that is refused.
fn give_back(engine: &Engine, source: &Source, refused: &Refused, settles: bool) {
    let gives = match engine.plan.dialect {
        Dialect::Baton => !(settles && refused.elsewhere),
        Dialect::Vllm => refused.layer == Layer::Handler,
    };
    if gives {
        engine.release_at(source, "consumer_rejected");
    }
}

impl Exchange<'_> {
    /// Waits until there is something to say.
    async fn moved(&self, inbox: &mut Inbox) -> io::Result<()> {
        tokio::select! {
            () = self.progress.notified() => Ok(()),
            () = inbox.gone() => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }

    /// The reply in one piece.
    async fn whole(&self, inbox: &mut Inbox) -> io::Result<()> {
        let mut said = Vec::new();
        let end = loop {
            let progress = self.engine.drive(|core, _| core.take(self.ticket));
            said.extend(progress.words);
            match progress.end {
                Some(end) => break end,
                None => self.moved(inbox).await?,
            }
        };
        let sent = match self.failed(&end) {
            Some(error) => inbox.send_or_gone(&refusal(&error)).await,
            None => {
                let choice = FinishedChoice {
                    index: 0,
                    text: said.concat(),
                    logprobs: None,
                    finish: length(),
                    token_ids: None,
                    prompt_token_ids: None,
                };
                let body = self.head.full(&[choice], &self.usage(said.len()), self.params(&end).as_ref());
                self.written(inbox, &json(&body)).await
            }
        };
        if !self.engine.plan.reply_window().is_zero() {
            let result = if sent.is_ok() { "sent" } else { "dropped" };
            self.engine.log.tell(0, &self.internal, 0, What::Replied(result));
        }
        if sent.is_err() {
            self.engine.drive(|core, now_us| core.unsent(&end, now_us));
        }
        sent
    }

    /// Writes a reply as late as the engine's server does, unless the caller has sent its end by then.
    async fn written(&self, inbox: &mut Inbox, reply: &[u8]) -> io::Result<()> {
        let window = self.engine.plan.reply_window();
        if !window.is_zero() {
            tokio::select! {
                biased;
                () = inbox.gone() => return Err(io::ErrorKind::ConnectionAborted.into()),
                () = tokio::time::sleep(window) => {}
            }
        }
        inbox.send_or_gone(reply).await
    }

    /// The reply as server-sent events. vLLM's engine sends the head before it has begun, Baton's with the first event.
    async fn stream(&self, inbox: &mut Inbox) -> io::Result<()> {
        const HEAD: &[u8] =
            b"HTTP/1.1 200 OK\r\nserver: sim\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
            cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
        let (encoder, mut said, mut out, mut begun) = (self.head.chunks(), 0, Vec::new(), false);
        if self.engine.plan.dialect == Dialect::Vllm {
            inbox.send_or_gone(HEAD).await?;
            begun = true;
        }
        loop {
            let progress = self.engine.drive(|core, _| core.take(self.ticket));
            if let Some(error) = progress.end.as_ref().and_then(|end| self.failed(end)) {
                if !begun && said == 0 {
                    return inbox.send_or_gone(&refusal(&error)).await;
                }
                chunk(&mut out, &error.to_sse());
                chunk(&mut out, &sse::DONE);
                out.extend_from_slice(b"0\r\n\r\n");
                return inbox.send_or_gone(&out).await;
            }
            if !begun && !progress.words.is_empty() {
                out.extend_from_slice(HEAD);
                begun = true;
            }
            let last = progress.words.len();
            for (number, word) in progress.words.into_iter().enumerate() {
                if said == 0
                    && let Some(role) = encoder.role(0, None)
                {
                    chunk(&mut out, &role);
                }
                said += 1;
                let end = progress.end.as_ref().filter(|_| number + 1 == last);
                self.event(&mut out, &encoder, word, said, end);
            }
            if progress.end.is_some() {
                if self.request.stream_options.include_usage {
                    chunk(&mut out, &encoder.usage(&self.usage(said)));
                }
                chunk(&mut out, &sse::DONE);
                out.extend_from_slice(b"0\r\n\r\n");
                return inbox.send_or_gone(&out).await;
            }
            if !out.is_empty() {
                inbox.send_or_gone(&out).await?;
                out.clear();
            }
            self.moved(inbox).await?;
        }
    }

    fn event(&self, out: &mut Vec<u8>, encoder: &ChunkEncoder, word: &str, said: usize, end: Option<&End>) {
        let finish = end.map(|_| length());
        let delta = ChoiceDelta { index: 0, text: word, finish: finish.as_ref(), ..ChoiceDelta::default() };
        let usage = self.request.stream_options.continuous_usage_stats.then(|| self.usage(said));
        let params = end.and_then(|end| self.params(end));
        chunk(out, &encoder.delta(&delta, usage.as_ref(), params.as_ref()));
    }

    fn usage(&self, said: usize) -> Usage {
        Usage { prompt_tokens: self.prompt as u32, completion_tokens: said as u32, cached_tokens: None }
    }

    /// The handoff that a reply carries.
    fn params(&self, end: &End) -> Option<Value> {
        let End::Lent(lent) = end else { return None };
        let engine = self.engine;
        let producer = Producer {
            dialect: engine.plan.dialect,
            engine: &engine.id,
            epoch: engine.epoch,
            port: engine.address.port(),
            block_tokens: engine.plan.block_tokens,
            lease: engine.plan.lease,
        };
        Some(handoff::reply(&producer, lent, &self.internal, self.prompt, &self.contents))
    }

    /// The error that an end is to its caller.
    fn failed(&self, end: &End) -> Option<ApiError> {
        match (end, self.engine.plan.dialect) {
            (End::Length | End::Lent(_), _) => None,
            (End::Aborted, _) => {
                // No code of Baton's own.
                let error = ApiError::unavailable("the request was aborted", RETRY);
                Some(ApiError { code: Some("aborted".into()), ..error })
            }
            (End::Unread(why), Dialect::Baton) => {
                let code = if *why == "gone" { Code::KvGone } else { Code::KvTransferFailed };
                let message = format!("the prompt's KV blocks could not be fetched: {why}");
                Some(ApiError::unavailable(message, RETRY).with_code(code))
            }
            (End::Unread(_), Dialect::Vllm) => Some(ApiError::internal("Internal server error")),
        }
    }
}

fn length() -> Finish {
    Finish { reason: FinishReason::Length, stop: None }
}

fn chunk(out: &mut Vec<u8>, data: &[u8]) {
    use std::io::Write;
    // Into a vector every write succeeds.
    let _ = write!(out, "{:x}\r\n", data.len());
    out.extend_from_slice(data);
    out.extend_from_slice(b"\r\n");
}
