//! `/v1/completions` and `/v1/chat/completions` of a simulated engine, from the body to a reply or a stream.
//!
//! ```text
//!  body ─▶ intent ─▶ checked ─▶ admission delay ─▶ queue ─▶ words as generated ─▶ end
//!            └ a refusal releases the source's lease: in Baton's engine always (or left to a router that settles),
//!              in vLLM's only if the handler has received the request; see [`RefusalLayer`]
//! ```
//!
//! Sampling parameters are checked but have no effect. A response has `max_tokens` tokens.

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use baton_connector::RequestId;
use baton_connector_leases::event_log::{RequestEvent, tag};
use baton_openai::limits::COMPLETIONS_MAX_TOKENS_DEFAULT;
use baton_openai::{
    ApiError, ChoiceDelta, ChunkEncoder, Code, Endpoint, Finish, FinishReason, FinishedChoice,
    GenerateRequest, MessageParts, Object, ParseLimits, ReplyHead, Usage, parse_object, recover_member, sse,
};
use serde_json::Value;
use tokio::sync::Notify;

use super::core::{Leg, RequestEnd, Source, Submission, Ticket};
use super::engine::Engine;
use super::handoff::{self, HandoffCheck, Intent, Producer};
use super::http::{HttpRequest, bare, json, refusal};
use super::plan::Dialect;
use super::text;
use crate::sim::instant::connection::ServerConnection;

const PARAMS: &str = "kv_transfer_params";
/// `retry-after` of a full queue.
const RETRY: Duration = Duration::from_secs(1);

/// The layer that refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RefusalLayer {
    /// Parsing, authorization and load balancing: vLLM's producer is not notified.
    Front,
    /// The handler, which notifies the producer.
    Handler,
}

struct Refusal {
    layer: RefusalLayer,
    error: ApiError,
    /// Another engine might accept the request with the same handoff.
    elsewhere: bool,
}

impl Refusal {
    fn front(error: ApiError) -> Self {
        Self { layer: RefusalLayer::Front, error, elsewhere: false }
    }

    fn handler(error: ApiError) -> Self {
        Self { layer: RefusalLayer::Handler, error, elsewhere: false }
    }

    fn elsewhere(self) -> Self {
        Self { elsewhere: true, ..self }
    }
}

/// A request in progress.
struct ActiveRequest<'a> {
    engine: &'a Arc<Engine>,
    request: GenerateRequest,
    ticket: Ticket,
    progress: Arc<Notify>,
    head: ReplyHead,
    internal: RequestId,
    prompt: usize,
    contents: Vec<u64>,
}

/// Answers one generation request.
pub(super) async fn answer(
    engine: &Arc<Engine>,
    connection: &mut ServerConnection,
    endpoint: Endpoint,
    request: HttpRequest,
) -> io::Result<()> {
    let id = name(&request);
    let (source, prepared) = prepare(engine, endpoint, &request, &id);
    let refuse = |refused: &Refusal| {
        if let Some(source) = &source {
            release_source(engine, source, refused, request.settles);
        }
        let why = if refused.layer == RefusalLayer::Front { "unread" } else { "rejected" };
        engine.log.emit(0, &id, 0, RequestEvent::Refused { reason: why, tag: None });
    };
    let mut submission = match prepared {
        Ok(prepared) => prepared,
        Err(refused) => {
            refuse(&refused);
            return connection.send_or_gone(&refusal(&refused.error)).await;
        }
    };
    let delay = engine.plan.admission_delay;
    if source.is_some() && !delay.is_zero() {
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = connection.wait_until_closed() => {
                // Baton's engine releases the source's lease. vLLM's has not processed the request yet.
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
            let refused = Refusal::front(ApiError::overloaded(why, RETRY)).elsewhere();
            refuse(&refused);
            return connection.send_or_gone(&refusal(&refused.error)).await;
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
    let exchange = ActiveRequest {
        engine,
        request: submission.request,
        ticket,
        progress,
        head,
        internal,
        prompt,
        contents,
    };
    let sent = if exchange.request.stream {
        exchange.stream(connection).await
    } else {
        exchange.whole(connection).await
    };
    if sent.is_err() {
        engine.drive(|core, now_us| core.disconnect(ticket, now_us));
    }
    sent
}

/// The router's name of a request, or a new one.
fn name(request: &HttpRequest) -> RequestId {
    let named = request.request_id.as_deref().and_then(|id| RequestId::new(bare(id)).ok());
    named.unwrap_or_else(|| {
        let own = format!("{:016x}", super::random());
        RequestId::new(&own).expect("hexadecimal digits are printable")
    })
}

fn parse_limits() -> ParseLimits {
    ParseLimits { prompts: 1, ..ParseLimits::default() }
}

struct CheckedRequest {
    request: GenerateRequest,
    sent: Submission,
}

/// Parses and checks a request. The source is returned separately, so that every refusal can release it.
fn prepare(
    engine: &Arc<Engine>,
    endpoint: Endpoint,
    request: &HttpRequest,
    id: &RequestId,
) -> (Option<Source>, Result<CheckedRequest, Refusal>) {
    let fields = match parse_object(&request.body, &parse_limits()) {
        Ok(fields) => fields,
        Err(error) => {
            let salvaged = recover_member(&request.body, PARAMS);
            let intent = handoff::intent(&engine.plan, salvaged.as_ref());
            let source = match intent {
                Ok(Intent::Consume { source, .. }) => Some(source),
                _ => None,
            };
            return (source, Err(Refusal::front(error)));
        }
    };
    let (leg, source, check) = match handoff::intent(&engine.plan, fields.get(PARAMS)) {
        Err(error) => return (None, Err(Refusal::handler(error))),
        Ok(Intent::Plain) => (Leg::Whole, None, None),
        Ok(Intent::Produce) => (Leg::Prefill, None, None),
        Ok(Intent::Consume { source, check }) => (Leg::Decode, Some(source), check),
        Ok(Intent::Fatal) => {
            engine.stop.cancel();
            return (None, Err(Refusal::front(ApiError::internal("the engine has ended"))));
        }
    };
    let prepared = judge(engine, endpoint, &fields, id, leg, check);
    (source, prepared)
}

fn judge(
    engine: &Arc<Engine>,
    endpoint: Endpoint,
    fields: &Object,
    id: &RequestId,
    leg: Leg,
    check: Option<HandoffCheck>,
) -> Result<CheckedRequest, Refusal> {
    let plan = &engine.plan;
    if leg == Leg::Decode && engine.drive(|core, _| core.refuses()) {
        return Err(Refusal::front(ApiError::unavailable("simulated: refused", RETRY)).elsewhere());
    }
    let request = GenerateRequest::from_map(endpoint, fields, &parse_limits()).map_err(|error| {
        // The parser refuses a value of a wrong type, the handler any other.
        let value = error.param.as_deref().and_then(|param| fields.get(param));
        if value.is_some_and(Value::is_number) { Refusal::handler(error) } else { Refusal::front(error) }
    })?;
    let handlers = |error| Err(Refusal::handler(error));
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
            Err(Refusal::handler(ApiError::invalid(PARAMS, message).with_code(code)).elsewhere())
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
    Ok(CheckedRequest { request, sent })
}

/// The engine's name of a request. vLLM adds the endpoint as prefix, and the prompt's number and a random number as
/// suffix.
fn internal(dialect: Dialect, endpoint: Endpoint, id: &RequestId) -> RequestId {
    let random = || super::random() as u32;
    let name = match (dialect, endpoint) {
        (Dialect::Baton, _) => return id.clone(),
        (Dialect::Vllm, Endpoint::Completions) => format!("cmpl-{id}-0-{:08x}", random()),
        (Dialect::Vllm, Endpoint::Chat) => format!("chatcmpl-{id}-{:08x}", random()),
    };
    // A name that would be too long remains unchanged.
    RequestId::new(&name).unwrap_or_else(|_| id.clone())
}

/// Releases the source of a refused request.
fn release_source(engine: &Engine, source: &Source, refused: &Refusal, settles: bool) {
    let gives = match engine.plan.dialect {
        Dialect::Baton => !(settles && refused.elsewhere),
        Dialect::Vllm => refused.layer == RefusalLayer::Handler,
    };
    if gives {
        engine.release_at(source, "consumer_rejected");
    }
}

impl ActiveRequest<'_> {
    /// Waits for new output. Output that exists precedes the caller's end, so that a finished request gets a reply,
    /// written or dropped.
    async fn wait_for_output(&self, connection: &mut ServerConnection) -> io::Result<()> {
        tokio::select! {
            biased;
            () = self.progress.notified() => Ok(()),
            () = connection.wait_until_closed() => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }

    /// Writes the reply in one piece.
    async fn whole(&self, connection: &mut ServerConnection) -> io::Result<()> {
        let mut words = Vec::new();
        let end = loop {
            let progress = self.engine.drive(|core, _| core.take(self.ticket));
            words.extend(progress.words);
            match progress.end {
                Some(end) => break end,
                None => self.wait_for_output(connection).await?,
            }
        };
        let sent = match self.failed(&end) {
            Some(error) => connection.send_or_gone(&refusal(&error)).await,
            None => {
                let choice = FinishedChoice {
                    index: 0,
                    text: words.concat(),
                    parts: MessageParts::default(),
                    logprobs: None,
                    finish: length(),
                    token_ids: None,
                    prompt_token_ids: None,
                    prompt_logprobs: None,
                };
                let body = self.head.full(&[choice], &self.usage(words.len()), self.params(&end).as_ref());
                self.write_reply(connection, &json(&body)).await
            }
        };
        if !self.engine.plan.reply_window().is_zero() {
            let result = if sent.is_ok() { "sent" } else { "dropped" };
            self.engine.log.emit(0, &self.internal, 0, RequestEvent::Replied(result));
        }
        if sent.is_err() {
            self.engine.drive(|core, now_us| core.reply_not_sent(&end, now_us));
        }
        sent
    }

    /// Writes a reply after the engine's reply delay, unless the caller has closed its sending side before.
    async fn write_reply(&self, connection: &mut ServerConnection, reply: &[u8]) -> io::Result<()> {
        let window = self.engine.plan.reply_window();
        if !window.is_zero() {
            tokio::select! {
                biased;
                () = connection.wait_until_closed() => return Err(io::ErrorKind::ConnectionAborted.into()),
                () = tokio::time::sleep(window) => {}
            }
        }
        connection.send_or_gone(reply).await
    }

    /// Writes the reply as server-sent events. vLLM's engine sends the head at once, Baton's with the first event.
    async fn stream(&self, connection: &mut ServerConnection) -> io::Result<()> {
        const HEAD: &[u8] =
            b"HTTP/1.1 200 OK\r\nserver: sim\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
            cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
        let (encoder, mut generated, mut out, mut begun) = (self.head.chunks(), 0, Vec::new(), false);
        if self.engine.plan.dialect == Dialect::Vllm {
            connection.send_or_gone(HEAD).await?;
            begun = true;
        }
        loop {
            let progress = self.engine.drive(|core, _| core.take(self.ticket));
            if let Some(error) = progress.end.as_ref().and_then(|end| self.failed(end)) {
                if !begun && generated == 0 {
                    return connection.send_or_gone(&refusal(&error)).await;
                }
                chunk(&mut out, &error.to_sse());
                chunk(&mut out, &sse::DONE);
                out.extend_from_slice(b"0\r\n\r\n");
                return connection.send_or_gone(&out).await;
            }
            if !begun && !progress.words.is_empty() {
                out.extend_from_slice(HEAD);
                begun = true;
            }
            let last = progress.words.len();
            for (number, word) in progress.words.into_iter().enumerate() {
                if generated == 0
                    && let Some(role) = encoder.role(0, None)
                {
                    chunk(&mut out, &role);
                }
                generated += 1;
                let end = progress.end.as_ref().filter(|_| number + 1 == last);
                self.event(&mut out, &encoder, word, generated, end);
            }
            if progress.end.is_some() {
                if self.request.stream_options.include_usage {
                    chunk(&mut out, &encoder.usage(&self.usage(generated)));
                }
                chunk(&mut out, &sse::DONE);
                out.extend_from_slice(b"0\r\n\r\n");
                return connection.send_or_gone(&out).await;
            }
            if !out.is_empty() {
                connection.send_or_gone(&out).await?;
                out.clear();
            }
            self.wait_for_output(connection).await?;
        }
    }

    fn event(
        &self,
        out: &mut Vec<u8>,
        encoder: &ChunkEncoder,
        word: &str,
        generated: usize,
        end: Option<&RequestEnd>,
    ) {
        let finish = end.map(|_| length());
        let delta = ChoiceDelta { index: 0, text: word, finish: finish.as_ref(), ..ChoiceDelta::default() };
        let usage = self.request.stream_options.continuous_usage_stats.then(|| self.usage(generated));
        let params = end.and_then(|end| self.params(end));
        chunk(out, &encoder.delta(&delta, usage.as_ref(), params.as_ref()));
    }

    fn usage(&self, generated: usize) -> Usage {
        Usage {
            prompt_tokens: self.prompt as u32,
            completion_tokens: generated as u32,
            cached_tokens: None,
            reasoning_tokens: None,
            predictions: None,
        }
    }

    /// The handoff in a reply.
    fn params(&self, end: &RequestEnd) -> Option<Value> {
        let RequestEnd::Leased(lent) = end else { return None };
        let engine = self.engine;
        let producer = Producer {
            dialect: engine.plan.dialect,
            engine: &engine.id,
            epoch: engine.epoch,
            port: engine.address.port(),
            block_tokens: engine.plan.block_tokens,
            lease: engine.plan.lease,
            pushes: engine.plan.push.is_some(),
        };
        Some(handoff::reply(&producer, lent, &self.internal, self.prompt, &self.contents))
    }

    /// The error of an unsuccessful end.
    fn failed(&self, end: &RequestEnd) -> Option<ApiError> {
        match (end, self.engine.plan.dialect) {
            (RequestEnd::Length | RequestEnd::Leased(_), _) => None,
            (RequestEnd::Aborted, _) => {
                // A code that Baton does not define.
                let error = ApiError::unavailable("the request was aborted", RETRY);
                Some(ApiError { code: Some("aborted".into()), ..error })
            }
            (RequestEnd::Unread(why), Dialect::Baton) => {
                let code = if *why == "gone" { Code::KvGone } else { Code::KvTransferFailed };
                let message = format!("the prompt's KV blocks could not be fetched: {why}");
                Some(ApiError::unavailable(message, RETRY).with_code(code))
            }
            (RequestEnd::Unread(_), Dialect::Vllm) => Some(ApiError::internal("Internal server error")),
        }
    }
}

fn length() -> Finish {
    Finish { reason: FinishReason::Length, stop: None }
}

/// Appends one chunk of a chunked response.
pub(super) fn chunk(out: &mut Vec<u8>, data: &[u8]) {
    use std::io::Write;
    // Writing to a vector cannot fail.
    let _ = write!(out, "{:x}\r\n", data.len());
    out.extend_from_slice(data);
    out.extend_from_slice(b"\r\n");
}
