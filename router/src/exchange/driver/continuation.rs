//! Another decode engine for the rest of a response whose engine failed.

use std::pin::pin;
use std::sync::Arc;

use baton_connector::exchange::{Attempt, Event};
use baton_openai::{Endpoint, TimeLeft};
use bytes::Bytes;
use serde_json::{Map, Value};

use super::ExchangeDriver;
use super::decode::{DecodeOutcome, DecodeRequest, DecodeResponse, HandoffAfterError};
use crate::client::disconnect::race;
use crate::client::session::Session;
use crate::engines::http::{Engine, EngineRequest};
use crate::engines::protocol::{LegOrder, Link};
use crate::exchange::client_request::ClientRequest;
use crate::legs::decode::PlainBody;
use crate::legs::request_error::RequestError;
use crate::message::payload::Payload;
use crate::message::request_id;
use crate::metrics::log_span::request_span;
use crate::metrics::{Leg, ResumeResult};

/// The request to another decode engine.
pub(crate) enum Continuation {
    /// The client's request, because no part of its response was sent.
    Everything,
    /// A request to the completions endpoint whose prompt ends with the sent tokens.
    After { body: Map<String, Value>, tokens: usize },
}

impl ExchangeDriver {
    /// Counts the result for a stream whose engine failed, if streams may be resumed.
    pub(crate) fn count_resume(&self, result: ResumeResult) {
        if self.model.handoff.resume {
            self.shared.metrics.resilience.count_resume(result);
        }
    }

    /// Continues the response of `cut` at another engine; `None` ends the exchange because no engine is left. Every
    /// attempt takes from the retry budget.
    pub(crate) async fn resume(
        &mut self,
        session: &mut Session,
        cut: Attempt,
        request: &ClientRequest,
        rest: Continuation,
    ) -> Result<Option<DecodeResponse>, RequestError> {
        let failed = self.attempts.engine(cut);
        self.prefill.tail = None;
        if self.protocol.order() == LegOrder::Concurrent && !self.protocol.write_frees_decode() {
            // Such an engine computes no prompt alone.
            self.apply(Event::Exhausted);
            return Ok(None);
        }
        self.apply(Event::StreamCut(cut));
        // The abort of the first round uses the first id.
        self.settlement.rename(request_id::next_round(&self.settlement.request));
        let mut tried = vec![Arc::clone(&failed)];
        for asked in 1..=usize::from(self.generation.config.attempts.decode) {
            let Some(reserved) = self.reserve_decode_for_resume(request, &failed, &tried) else { break };
            if !self.take_retry(session, Leg::Decode, asked).await? {
                break;
            }
            let engine = Arc::clone(reserved.engine());
            tried.push(Arc::clone(&engine));
            let built = race(session, pin!(self.continuation_request(&engine, request, &rest))).await;
            let Ok(engine_request) = built else { return Err(self.cancel()) };
            let Some(engine_request) = engine_request else { continue };
            let body = engine_request.body.clone();
            let plain_body = || without_usage(&body);
            let plain_body = request.owned.asks_for_usage().then_some(&plain_body as PlainBody<'_>);
            let after_error = HandoffAfterError::Usable;
            let mut decode_request =
                DecodeRequest { request: engine_request, plain_body, after_error, is_conditional: false };
            match self.attempt_decode(session, request, reserved, &mut decode_request).await? {
                DecodeOutcome::Accepted(answer) => {
                    tracing::info!(
                        parent: request_span!(&self.settlement.request), event = "stream_resumed",
                        engine = engine.authority(), "stream resumed"
                    );
                    return Ok(Some(answer));
                }
                DecodeOutcome::Refused(_) => return Ok(None),
                DecodeOutcome::Failed { .. } if self.faults.has_reached_unresponsive_limit() => break,
                DecodeOutcome::Failed { .. } => {}
            }
        }
        self.apply(Event::Exhausted);
        Ok(None)
    }

    /// The request for this engine; `None` if the context length is needed and the engine does not report it.
    async fn continuation_request(
        &self,
        engine: &Arc<Engine>,
        request: &ClientRequest,
        rest: &Continuation,
    ) -> Option<EngineRequest> {
        match rest {
            Continuation::Everything => {
                let leg = request.leg_input(&self.settlement.request);
                let body = self.protocol.decode_body(&leg, Link::None);
                Some(self.engine_request(request, Leg::Decode, body))
            }
            Continuation::After { body, tokens } => {
                let mut body = body.clone();
                if !body.contains_key("max_tokens") {
                    let context = engine.needed_context_of(&request.model.name).await?;
                    let left = context.checked_sub(*tokens as u64).filter(|left| *left > 0)?;
                    body.insert("max_tokens".to_owned(), Value::from(left));
                }
                request.owned.set_in(&mut body);
                let body = Bytes::from(Value::Object(body).to_string());
                let engine_request = self.engine_request(request, Leg::Decode, body);
                // The first token was sent in time.
                let time = TimeLeft { first_token: None, ..engine_request.time };
                let path = Endpoint::Completions.path().into();
                Some(EngineRequest { path, time, ..engine_request })
            }
        }
    }
}

/// A body without the usage option. It is rare, because an engine with continuations usually accepts the option.
fn without_usage(body: &Payload) -> Payload {
    let mut fields: Map<String, Value> = serde_json::from_slice(&body.pieces().concat()).unwrap_or_default();
    fields.remove("stream_options");
    Bytes::from(Value::Object(fields).to_string()).into()
}
