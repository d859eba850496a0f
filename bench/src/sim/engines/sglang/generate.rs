//! Generation of a simulated SGLang engine, from the body to a reply or a stream.
//!
//! ```text
//!  body ─▶ checked ─▶ rid reserved ─▶ rank ─▶ words as generated ─▶ end
//!  client gone: before the first byte, found at the next look (every 4 s); in a stream, the abort follows after 2 s
//! ```
//!
//! - A stream's head is sent with its first event, but at once by `/generate`. An error of the scheduler is an event of
//!   a stream (status 200), and the status of a reply in one piece.
//! - Refusals of the server (400, 503) precede the scheduler. The peer is not notified of them.
//! - `n` choices have one room, as SGLang sends them to the scheduler: they end each other.

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use baton_connector::RequestId;
use baton_connector_leases::event_log::{RequestEvent, tag};
use baton_openai::{
    ChoiceDelta, ChunkEncoder, Endpoint, Finish, FinishReason, FinishedChoice, MessageParts, ReplyHead,
    Usage, sse,
};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::super::generate::chunk;
use super::super::http::{HttpRequest, json as json_reply, reply};
use super::super::role::Role;
use super::super::text;
use super::body::{self, GeneratePath, SglangBody};
use super::engine::{RidGuard, SglangEngine};
use super::message::LegTicket;
use super::rank::{EndCause, LegOutput, LegSubmission, RankLegEnd};
use crate::sim::instant::connection::ServerConnection;

const STREAM_HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
    transfer-encoding: chunked\r\n\r\n";
const STREAM_END: &[u8] = b"0\r\n\r\n";

/// A request in progress.
struct SglangExchange<'a> {
    engine: &'a Arc<SglangEngine>,
    path: GeneratePath,
    body: SglangBody,
    rid: RidGuard<'a>,
    rank: usize,
    ticket: LegTicket,
    progress: Arc<Notify>,
    client: ClientWatch,
}

/// What the server knows of its client.
struct ClientWatch {
    began: Instant,
    /// A byte of the response was sent.
    streams: bool,
    /// The client has closed. The abort follows at this time.
    aborts_at: Option<Instant>,
}

impl ClientWatch {
    /// The client has closed now.
    fn close(&mut self, poll: Duration, stream_abort: Duration) {
        let now = Instant::now();
        self.aborts_at = Some(if self.streams {
            now + stream_abort
        } else {
            let looks = (now - self.began).as_nanos() / poll.as_nanos().max(1) + 1;
            self.began + poll.saturating_mul(u32::try_from(looks).unwrap_or(u32::MAX))
        });
    }
}

/// A response that is no success.
struct SglangError {
    status: u16,
    message: String,
}

/// Answers one generation request.
pub(super) async fn answer(
    engine: &Arc<SglangEngine>,
    connection: &mut ServerConnection,
    path: GeneratePath,
    request: &HttpRequest,
) -> io::Result<()> {
    let mut exchange = match SglangExchange::prepare(engine, path, request) {
        Ok(exchange) => exchange,
        Err(SglangError { status, message }) => {
            let refused = RequestEvent::Refused { reason: "rejected", tag: None };
            engine.log.emit(0, &log_id(""), 0, refused);
            return connection.send_or_gone(&error_reply(path, status, &message)).await;
        }
    };
    if let Err(error) = exchange.submit() {
        let tag = tag(exchange.body.user.as_deref());
        let refused = RequestEvent::Refused { reason: "rejected", tag };
        engine.log.emit(exchange.rank, &log_id(&exchange.rid.rid), 0, refused);
        return exchange.fail(connection, &error).await;
    }
    let sent = if exchange.body.stream {
        exchange.stream(connection).await
    } else {
        exchange.whole(connection).await
    };
    engine.drive(exchange.rank, |rank, _| rank.abandon(exchange.ticket));
    sent
}

/// The name of a request in the event log: its `rid`, or a new one.
fn log_id(rid: &str) -> RequestId {
    RequestId::new(rid).unwrap_or_else(|_| {
        let own = format!("{:016x}", super::super::random());
        RequestId::new(&own).expect("hexadecimal digits are printable")
    })
}

impl<'a> SglangExchange<'a> {
    /// What the server checks before the scheduler.
    fn prepare(
        engine: &'a Arc<SglangEngine>,
        path: GeneratePath,
        request: &HttpRequest,
    ) -> Result<Self, SglangError> {
        let refuse = |status, message| SglangError { status, message };
        let body =
            body::parse(path, request, engine.plan.capacity()).map_err(|message| refuse(400, message))?;
        if engine.identity.role == Role::Decode && engine.refuses() {
            return Err(refuse(503, "simulated: refused".to_owned()));
        }
        let random = || format!("{:016x}{:016x}", super::super::random(), super::super::random());
        let rid = body.pairing.rid.clone().filter(|rid| !rid.is_empty()).unwrap_or_else(random);
        let rank = body.pairing.routed_rank;
        let rank = rank.unwrap_or_else(|| engine.next_rank(body.pairing.room.unwrap_or_default()));
        if rank >= engine.ranks() {
            return Err(refuse(400, format!("DP rank {rank} is not active")));
        }
        let Some(rid) = engine.reserve_rid(&rid) else {
            return Err(refuse(400, format!("Duplicate request ID detected: {rid}")));
        };
        let client = ClientWatch { began: Instant::now(), streams: false, aborts_at: None };
        let (ticket, progress) = (LegTicket(0), Arc::default());
        Ok(Self { engine, path, body, rid, rank, ticket, progress, client })
    }

    /// Gives the request to its rank.
    fn submit(&mut self) -> Result<(), SglangError> {
        let Some(room) = self.body.pairing.room else {
            let message = format!(
                "Invalid request: Disaggregated request received without bootstrap room id. req.rid='{}'",
                self.rid.rid
            );
            return Err(SglangError { status: 400, message });
        };
        let (engine, body) = (self.engine, &self.body);
        let submission = |progress| LegSubmission {
            id: log_id(&self.rid.rid),
            rid: self.rid.rid.clone(),
            tag: tag(body.user.as_deref()),
            room,
            bootstrap: body.pairing.bootstrap.clone().unwrap_or_default(),
            prefill_rank: body.pairing.prefill_rank,
            prompt: body.tokens.len(),
            contents: text::contents(&body.tokens, engine.plan.block_tokens),
            max_tokens: if engine.identity.role == Role::Prefill { 1 } else { body.max_tokens },
            progress,
        };
        let submit = |progress| {
            let leg = submission(progress);
            engine.drive(self.rank, |rank, now_us| rank.submit(leg, now_us))
        };
        let full = || SglangError { status: 503, message: "The request queue is full.".to_owned() };
        let ticket = submit(Arc::clone(&self.progress)).ok_or_else(full)?;
        for _ in 1..self.body.choices {
            if let Some(copy) = submit(Arc::default()) {
                engine.drive(self.rank, |rank, _| rank.abandon(copy));
            }
        }
        self.ticket = ticket;
        Ok(())
    }

    /// Waits for new output. A client that has closed is found, and its request aborted, as SGLang's server does.
    async fn next_output(&mut self, connection: &mut ServerConnection) -> io::Result<LegOutput> {
        let waits = self.engine.waits;
        loop {
            let output = self.engine.drive(self.rank, |rank, _| rank.take(self.ticket));
            if !output.words.is_empty() || output.end.is_some() {
                return Ok(output);
            }
            let aborts_at = self.client.aborts_at;
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(aborts_at.unwrap_or(self.client.began)), if aborts_at.is_some() => {
                    self.engine.abort(&self.rid.rid, EndCause::Disconnect);
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
                () = self.progress.notified() => {}
                () = connection.wait_until_closed(), if aborts_at.is_none() => {
                    self.client.close(waits.poll, waits.stream_abort);
                }
            }
        }
    }

    /// Sends bytes, unless the client has closed. Its request continues until the abort.
    async fn send(&mut self, connection: &mut ServerConnection, bytes: &[u8]) {
        if self.client.aborts_at.is_none() && connection.send_or_gone(bytes).await.is_err() {
            self.client.close(self.engine.waits.poll, self.engine.waits.stream_abort);
        }
        self.client.streams = true;
    }

    /// `Ok` if the connection can serve another request.
    fn finished(&self) -> io::Result<()> {
        self.client.aborts_at.map_or(Ok(()), |_| Err(io::ErrorKind::ConnectionAborted.into()))
    }

    /// Writes the response in one piece.
    async fn whole(&mut self, connection: &mut ServerConnection) -> io::Result<()> {
        let (mut words, mut number) = (String::new(), 0);
        let end = loop {
            let output = self.next_output(connection).await?;
            number += output.words.len();
            words.extend(output.words);
            if let Some(end) = output.end {
                break end;
            }
        };
        let reason = match end {
            RankLegEnd::Failed { status, message } => {
                return self.fail(connection, &SglangError { status, message }).await;
            }
            RankLegEnd::Length => FinishReason::Length,
            RankLegEnd::Aborted => FinishReason::Abort,
        };
        let body = match self.path {
            GeneratePath::Native => self.native(&words, number, Some(reason)).to_string().into_bytes(),
            GeneratePath::OpenAi(endpoint) => {
                let choice = FinishedChoice {
                    index: 0,
                    text: words,
                    parts: MessageParts::default(),
                    logprobs: None,
                    finish: Finish { reason, stop: None },
                    token_ids: None,
                    prompt_token_ids: None,
                    prompt_logprobs: None,
                };
                self.head(endpoint).full(&[choice], &self.usage(number), None).to_vec()
            }
        };
        self.send(connection, &json_reply(&body)).await;
        self.finished()
    }

    /// Writes the response as server-sent events.
    async fn stream(&mut self, connection: &mut ServerConnection) -> io::Result<()> {
        let encoder = match self.path {
            GeneratePath::Native => {
                self.send(connection, STREAM_HEAD).await;
                None
            }
            GeneratePath::OpenAi(endpoint) => Some(self.head(endpoint).chunks()),
        };
        let (mut text, mut number) = (String::new(), 0);
        loop {
            let LegOutput { words, end } = self.next_output(connection).await?;
            if let Some(RankLegEnd::Failed { status, message }) = end {
                return self.fail(connection, &SglangError { status, message }).await;
            }
            let mut out = if self.client.streams { Vec::new() } else { STREAM_HEAD.to_vec() };
            let reason = end.as_ref().map(|end| match end {
                RankLegEnd::Aborted => FinishReason::Abort,
                RankLegEnd::Length | RankLegEnd::Failed { .. } => FinishReason::Length,
            });
            match &encoder {
                Some(encoder) => self.deltas(&mut out, encoder, &words, number, reason),
                None => {
                    text.extend(words.iter().map(|word| &**word));
                    let event = self.native(&text, number + words.len(), reason).to_string();
                    chunk(&mut out, &sse::frame(event.as_bytes()));
                }
            }
            number += words.len();
            if end.is_some() {
                if let Some(encoder) = encoder.as_ref().filter(|_| self.body.usage) {
                    chunk(&mut out, &encoder.usage(&self.usage(number)));
                }
                chunk(&mut out, &sse::DONE);
                out.extend_from_slice(STREAM_END);
            }
            self.send(connection, &out).await;
            if end.is_some() {
                return self.finished();
            }
        }
    }

    fn deltas(
        &self,
        out: &mut Vec<u8>,
        encoder: &ChunkEncoder,
        words: &[std::borrow::Cow<'static, str>],
        before: usize,
        reason: Option<FinishReason>,
    ) {
        if before == 0
            && let Some(role) = encoder.role(0, None)
        {
            chunk(out, &role);
        }
        let finish = reason.map(|reason| Finish { reason, stop: None });
        let mut delta = |text: &str, finish: Option<&Finish>| {
            chunk(out, &encoder.delta(&ChoiceDelta { text, finish, ..ChoiceDelta::default() }, None, None));
        };
        let (last, others) = match words.split_last() {
            Some((last, others)) => (&**last, others),
            None => ("", words),
        };
        for word in others {
            delta(word, None);
        }
        delta(last, finish.as_ref());
    }

    /// Writes an error of the scheduler: the status of a response in one piece, or an event of a stream.
    async fn fail(&mut self, connection: &mut ServerConnection, error: &SglangError) -> io::Result<()> {
        let SglangError { status, message } = error;
        if !self.body.stream {
            self.send(connection, &error_reply(self.path, *status, message)).await;
            return self.finished();
        }
        let event = match self.path {
            GeneratePath::OpenAi(_) => {
                let name = match status {
                    400 => "BAD_REQUEST",
                    503 => "SERVICE_UNAVAILABLE",
                    _ => "INTERNAL_SERVER_ERROR",
                };
                json!({"error": error_object(*status, name, message)})
            }
            GeneratePath::Native => {
                let mut event = self.native("", 0, None);
                event["meta_info"]["finish_reason"] =
                    json!({"type": "abort", "message": message, "status_code": status, "err_type": null});
                event
            }
        };
        let mut out = if self.client.streams { Vec::new() } else { STREAM_HEAD.to_vec() };
        chunk(&mut out, &sse::frame(event.to_string().as_bytes()));
        chunk(&mut out, &sse::DONE);
        out.extend_from_slice(STREAM_END);
        self.send(connection, &out).await;
        self.finished()
    }

    /// The body, or one event, of `/generate`. The text is that since the first token.
    fn native(&self, text: &str, number: usize, reason: Option<FinishReason>) -> Value {
        let finish = reason.map(|reason| match reason {
            FinishReason::Abort => json!({"type": "abort", "message": "Aborted"}),
            _ => json!({"type": "length", "length": number}),
        });
        json!({
            "text": text, "output_ids": [],
            "meta_info": {
                "id": self.rid.rid, "finish_reason": finish, "prompt_tokens": self.body.tokens.len(),
                "completion_tokens": number, "cached_tokens": 0, "weight_version": "default",
            },
        })
    }

    fn head(&self, endpoint: Endpoint) -> ReplyHead {
        ReplyHead {
            endpoint,
            id: self.rid.rid.clone(),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            model: self.engine.plan.model.clone(),
            system_fingerprint: None,
        }
    }

    fn usage(&self, generated: usize) -> Usage {
        let prompt_tokens = self.body.tokens.len() as u32;
        Usage {
            prompt_tokens,
            completion_tokens: generated as u32,
            cached_tokens: None,
            reasoning_tokens: None,
            predictions: None,
        }
    }
}

fn error_object(status: u16, kind: &str, message: &str) -> Value {
    json!({"object": "error", "message": message, "type": kind, "param": null, "code": status})
}

/// An error as a whole response. FastAPI's handler has the same shape as the OpenAI paths.
fn error_reply(path: GeneratePath, status: u16, message: &str) -> Vec<u8> {
    let body = match (path, status) {
        (GeneratePath::Native, 400) => json!({"error": {"message": message}}),
        (GeneratePath::OpenAi(_), 400) => error_object(status, "BadRequest", message),
        _ => error_object(status, &status.to_string(), message),
    };
    reply(status, &[("content-type", "application/json".to_owned())], body.to_string().as_bytes())
}
