//! Another decode engine for the rest of an answer whose engine died in the middle.

use std::sync::Arc;

use baton_connector::exchange::{Attempt, Event};
use baton_openai::Endpoint;
use bytes::Bytes;
use serde_json::{Map, Value};

use super::{Answer, Attempted, ExchangeDriver};
use crate::client::disconnect::race;
use crate::client::session::{ClientGone, Session};
use crate::engines::http::{Engine, Outgoing};
use crate::exchange::ask::Ask;
use crate::legs::decode::Plain;
use crate::legs::outcome::Ended;
use crate::message::payload::Payload;
use crate::message::{request_id, rewrite};
use crate::metrics::{Leg, Resume};

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
        self.computing = None;
        self.apply(Event::StreamCut(cut));
        // The abort of the first round is on its way under the first name.
        self.debtor.request = request_id::anew(&self.debtor.request);
        let mut tried = vec![Arc::clone(&dead)];
        for asked in 1..=usize::from(self.generation.config.attempts.decode) {
            let Some(reserved) = self.decode_again(ask, &dead, &tried) else { break };
            if !self.may_try_again(session, Leg::Decode, asked).await? {
                break;
            }
            let engine = Arc::clone(reserved.engine());
            tried.push(Arc::clone(&engine));
            let outgoing = match race(session, self.rest(&engine, ask, &rest)).await {
                Ok(outgoing) => outgoing,
                Err(ClientGone) => return Err(self.client_gone()),
            };
            let Some(mut outgoing) = outgoing else { continue };
            let body = outgoing.body.clone();
            let plain = || without_usage(&body);
            let plain = ask.owned.asks_for_usage().then_some(&plain as Plain<'_>);
            match self.ask_decode(session, ask, reserved, (&mut outgoing, plain), false).await? {
                Attempted::Accepted(answer) => {
                    tracing::info!(request = %self.debtor.request, engine = engine.authority(), "stream resumed");
                    return Ok(Some(answer));
                }
                Attempted::Refused(_) => return Ok(None),
                Attempted::Failed(..) if self.is_deafening() => break,
                Attempted::Failed(..) => {}
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
                    let context = engine.needed_context_of(&ask.model.name).await?;
                    let left = context.checked_sub(*tokens as u64).filter(|left| *left > 0)?;
                    body.insert("max_tokens".to_owned(), Value::from(left));
                }
                let body = Bytes::from(Value::Object(body).to_string());
                let outgoing = self.outgoing(ask, Leg::Decode, body);
                Some(Outgoing { path: Endpoint::Completions.path().into(), ..outgoing })
            }
        }
    }
}

/// A body that does not ask for usage. Rare, and an engine that goes on is one that takes more than that.
fn without_usage(body: &Payload) -> Payload {
    let mut fields: Map<String, Value> = serde_json::from_slice(&body.pieces().concat()).unwrap_or_default();
    fields.remove("stream_options");
    Bytes::from(Value::Object(fields).to_string()).into()
}
