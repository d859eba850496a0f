//! Another decode engine for the rest of an answer whose engine died in the middle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::exchange::{Attempt, Event};
use baton_openai::Endpoint;
use bytes::Bytes;
use pingora::proxy::Session;
use serde_json::{Map, Value};

use super::{Answer, Ended, ExchangeDriver};
use crate::client_watch::race;
use crate::intake::Ask;
use crate::legs::decode::{self, Decoding};
use crate::metrics::{Leg, Resume};
use crate::pool::{Reserved, Scarce};
use crate::upstream::{Engine, Outgoing};
use crate::{request_id, rewrite};

/// An engine's list of models is waited for this long, and read so far.
const MODELS_WITHIN: Duration = Duration::from_secs(2);
const MODELS_BYTES_MAX: usize = 1 << 20;

/// What another engine is asked.
pub(crate) enum Rest {
    /// The request as it is: nothing of its answer was sent.
    Everything,
    /// This, at the completions endpoint; it begins with so many tokens.
    After { body: Map<String, Value>, tokens: usize },
}

impl ExchangeDriver {
    /// Counts what became of a stream whose engine died, where streams may be resumed.
    pub(crate) fn resumed(&self, result: Resume) {
        if self.model.resume {
            self.shared.metrics.resilience.resume(result);
        }
    }

    /// Gives the engine of `cut` up and has another one go on; `None` when none can be had, and the exchange is over
    /// then. Every engine that is asked is charged to the budget of second attempts: what it takes over was paid for
    /// once.
    pub(crate) async fn go_on(
        &mut self,
        session: &mut Session,
        cut: Attempt,
        ask: &Ask,
        rest: Rest,
    ) -> Result<Option<Answer>, Ended> {
        let dead = self.engine(cut);
        self.apply(Event::StreamCut(cut));
        // The abort of the first round is on its way under the first name.
        self.debtor.request = request_id::anew(&self.debtor.request);
        let mut tried = vec![Arc::clone(&dead)];
        for asked in 0..usize::from(self.generation.config.attempts.decode) {
            let wanted = ask.wanted();
            let decode = &ask.model.decode;
            // Where every other one has failed, one of them may be back by now; the first only where there is no other.
            let others = std::slice::from_ref(&dead);
            let reserved = decode.reserve(&wanted, &tried).or_else(|_| decode.reserve(&wanted, others));
            let reserved = match reserved {
                Err(Scarce::Nobody) => decode.reserve(&wanted, &[]),
                reserved => reserved,
            };
            let Ok(Reserved { member, load, .. }) = reserved else { break };
            if !self.may_try_again(session, Leg::Decode, asked + 1).await? {
                break;
            }
            let engine = Arc::clone(&member.engine);
            tried.push(Arc::clone(&engine));
            let Some(mut outgoing) = self.rest(&engine, ask, &rest).await else { continue };
            outgoing.rank = member.rank;
            let attempt = self.attempt(&engine);
            self.decode_engine = Some(Arc::clone(&engine));
            self.apply(Event::DecodeSent(attempt));
            let began = Instant::now();
            let first_byte = ask.model.bounds.decode_first_byte;
            let pause = Duration::from_millis(self.generation.config.timeouts.alive_ms);
            let Ok(decoding) = race(session, decode::ask(&engine, &outgoing, first_byte, pause)).await else {
                return Err(self.client_gone());
            };
            match decoding {
                Decoding::Accepted(reply) => {
                    self.accepted(&engine, began.elapsed());
                    self.apply(Event::DecodeAccepted(attempt));
                    tracing::info!(request = %self.debtor.request, engine = engine.authority(), "goes on");
                    return Ok(Some(Answer { attempt, reply, load }));
                }
                Decoding::Refused(_) => {
                    self.apply(Event::DecodeRefused(attempt));
                    return Ok(None);
                }
                Decoding::Failed(failure, refusal, _, blame) => {
                    self.apply(Event::DecodeFailed(attempt, failure));
                    self.note_misconfigured(&engine, Leg::Decode, &refusal);
                    self.blame(&engine, Leg::Decode, blame);
                    if self.is_deafening() {
                        break;
                    }
                }
            }
        }
        self.apply(Event::GaveUp);
        Ok(None)
    }

    /// What this engine is sent; `None` when it does not say how long its context is, and that must be known.
    async fn rest(&self, engine: &Arc<Engine>, ask: &Ask, rest: &Rest) -> Option<Outgoing> {
        match rest {
            Rest::Everything => {
                let body = rewrite::decode_body(&ask.body, &ask.owned, &ask.model.name_in_bodies, None);
                Some(self.outgoing(ask, Leg::Decode, body))
            }
            Rest::After { body, tokens } => {
                let mut body = body.clone();
                if !body.contains_key("max_tokens") {
                    let context = context_of(engine, &ask.model.name).await?;
                    let left = context.checked_sub(*tokens as u64).filter(|left| *left > 0)?;
                    body.insert("max_tokens".to_owned(), Value::from(left));
                }
                let body = Bytes::from(Value::Object(body).to_string());
                let outgoing = self.outgoing(ask, Leg::Decode, body);
                Some(Outgoing { path: Endpoint::Completions.path(), ..outgoing })
            }
        }
    }
}

/// `max_model_len` of a model at an engine: for chat, the rest of it is what an answer without a bound may fill.
async fn context_of(engine: &Arc<Engine>, model: &str) -> Option<u64> {
    let question = Outgoing::get("/v1/models");
    let asked = async { engine.call(&question, |_| {}).await?.whole(MODELS_BYTES_MAX).await };
    let answer = tokio::time::timeout(MODELS_WITHIN, asked).await.ok()?.ok()?;
    let models: Value = serde_json::from_slice(&answer.body).ok()?;
    let card = models["data"].as_array()?.iter().find(|card| card["id"] == model)?;
    card["max_model_len"].as_u64()
}
