//! The decode leg: attempts at decode engines, all with the same handoff, and one recomputation of the prompt.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::exchange::{Attempt, Event, Failure, PrefillLease, SettlementCause, State};

use super::ExchangeDriver;
use super::faults::Round;
use super::selection::EngineSelection;
use crate::client::disconnect::race;
use crate::client::session::{ClientGone, Session};
use crate::config::Fallback;
use crate::engines::http::{Engine, EngineRequest, EngineRequestGuard, Reply};
use crate::engines::protocol::{LegInput, Link};
use crate::exchange::client_request::ClientRequest;
use crate::legs::decode::{self, DecodeResult, PlainBody};
use crate::legs::prefill::unless_failed;
use crate::legs::request_error::RequestError;
use crate::legs::{ErrorClass, Fault, Refusal};
use crate::message::request_id;
use crate::metrics::Leg;
use crate::routing::pool::EngineReservation;

/// A decode engine's response, and its attempt.
pub(crate) struct DecodeResponse {
    pub attempt: Attempt,
    pub reply: Box<Reply>,
    /// Counts the request at its engine while the response is relayed.
    pub load: EngineRequestGuard,
}

/// The outcome of one attempt at a decode engine.
pub(super) enum DecodeOutcome {
    Accepted(DecodeResponse),
    /// The engine refused the request, which ends the exchange.
    Refused(Refusal),
    Failed {
        refusal: Refusal,
        class: ErrorClass,
        /// The engine was reached.
        reached: bool,
    },
}

/// What an internal error of a decode engine means for the handoff in its request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum HandoffAfterError {
    /// Another engine can use the handoff.
    Usable,
    /// The handoff counts as spent. Stock vLLM answers a plain 500 when the producer is gone (0.32), and every other
    /// engine fails with the same handoff.
    Spent,
}

/// A request to a decode engine, and its body without a usage option for engines that refuse that option.
pub(super) struct DecodeRequest<'a> {
    pub request: EngineRequest,
    pub plain_body: Option<PlainBody<'a>>,
    pub after_error: HandoffAfterError,
    /// The engine declines a prompt of which it has cached too little.
    pub is_conditional: bool,
}

impl ExchangeDriver {
    /// Second leg: the head of a decode engine's successful response. Every engine gets the same handoff. If no engine
    /// can use it, the handoff is released and the prompt is computed again once: by a decode engine, or by a second
    /// prefill if the fallback is not configured.
    pub(crate) async fn decode(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
        handoff: Option<Arc<str>>,
    ) -> Result<DecodeResponse, RequestError> {
        match self.decode_with_handoff(session, request, handoff).await? {
            Some(response) => Ok(response),
            None => {
                self.retry.round = Round::Recomputed;
                // The settlement of the first round uses the first id.
                self.settlement.rename(request_id::next_round(&self.settlement.request));
                self.shared.metrics.legs.recomputes.increment(1);
                let handoff = match request.model.handoff.fallback {
                    Fallback::Aggregate if !self.prefill.failed_after_lease => {
                        self.apply(Event::PrefillSkipped);
                        None
                    }
                    // Another prefill engine may succeed.
                    Fallback::Aggregate | Fallback::None => self.prefill(session, request).await?,
                };
                let response = self.decode_with_handoff(session, request, handoff).await?;
                Ok(response.expect("a prompt is recomputed once"))
            }
        }
    }

    /// `None` if the handoff is spent; the exchange is then in its first state.
    async fn decode_with_handoff(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
        handoff: Option<Arc<str>>,
    ) -> Result<Option<DecodeResponse>, RequestError> {
        let recompute = handoff.is_some() && self.retry.is_first_round();
        let (protocol, id) = (self.protocol, self.settlement.request.clone());
        let leg = request.leg_input(&id);
        self.settlement.is_named = protocol.names_legs(&leg);
        let link = handoff.as_deref().map_or(Link::None, Link::Handoff);
        let body = protocol.decode_body(&leg, link);
        let plain_body =
            || protocol.decode_body(&LegInput { fields: &request.owned.without_usage(), ..leg }, link);
        let plain_body = request.owned.asks_for_usage().then_some(&plain_body as PlainBody<'_>);
        let mut engine_request = self.engine_request(request, Leg::Decode, body);
        engine_request.router_settles = handoff.is_some();
        // Only stock engines are in doubt: Baton's engines report the state of a handoff.
        let state = self.exchange(|exchange| exchange.state());
        let is_stock = matches!(state, State::ReadyToDecode(Some(PrefillLease { handle: None, .. })));
        let after_error =
            if recompute && is_stock { HandoffAfterError::Spent } else { HandoffAfterError::Usable };
        let mut decode_request =
            DecodeRequest { request: engine_request, plain_body, after_error, is_conditional: false };
        let mut tried: Vec<Arc<Engine>> = Vec::new();
        let mut last = Refusal::none_left();
        let mut spent = false;
        let mut cause = SettlementCause::DecodeUnreachable;
        while tried.len() < usize::from(self.generation.config.attempts.decode) {
            let reservation = match self.selection.reserved.take() {
                Some(reservation) => reservation,
                None => match self.select_decode(session, request, &tried).await {
                    Ok(EngineSelection::Engine(reservation)) => reservation,
                    Ok(EngineSelection::Unavailable(_)) => {
                        // Engines of another revision cannot use the handoff, and can compute the prompt.
                        spent |= handoff.is_some() && self.prefill.compatibility.is_some();
                        break;
                    }
                    Ok(EngineSelection::Busy(busy)) => {
                        (last, cause) = (Refusal(busy), SettlementCause::DecodeBusy);
                        break;
                    }
                    Err(ClientGone) => return Err(self.cancel()),
                },
            };
            if !self.take_retry(session, Leg::Decode, tried.len()).await? {
                break;
            }
            tried.push(Arc::clone(reservation.engine()));
            match self.attempt_decode(session, request, reservation, &mut decode_request).await? {
                DecodeOutcome::Accepted(response) => return Ok(Some(response)),
                DecodeOutcome::Refused(refusal) => return Err(RequestError::Refused(refusal)),
                DecodeOutcome::Failed { refusal, class, reached } => {
                    last = refusal;
                    if reached {
                        cause = SettlementCause::DecodeFailed;
                    }
                    spent |= matches!(class, ErrorClass::CannotUseHandoff | ErrorClass::HandoffSpent);
                    if class == ErrorClass::HandoffSpent && handoff.is_some()
                        || self.faults.has_reached_unresponsive_limit()
                    {
                        break;
                    }
                }
            }
        }
        // The request no longer needs the rest of that prefill.
        self.prefill.tail = None;
        if spent && recompute && !self.faults.has_reached_unresponsive_limit() {
            self.apply(Event::HandoffUnusable);
            return Ok(None);
        }
        self.apply(Event::ExhaustedFor(cause));
        Err(RequestError::Refused(last))
    }

    /// One attempt at a decode engine.
    pub(super) async fn attempt_decode(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
        reservation: EngineReservation,
        decode_request: &mut DecodeRequest<'_>,
    ) -> Result<DecodeOutcome, RequestError> {
        let EngineReservation { member, load, .. } = reservation;
        let engine = Arc::clone(&member.engine);
        decode_request.request.rank = member.rank;
        let sent_at = Instant::now();
        let attempt = self.attempts.add(Leg::Decode, &engine);
        self.apply(Event::DecodeSent(attempt));
        let probe_interval = Duration::from_millis(self.generation.config.timeouts.liveness_probe_ms);
        let bounds = &request.model.bounds;
        let mut tail = self.prefill.tail.take();
        // The rest of the prefill has a time limit of its own.
        let tail_time = tail.as_ref().map_or(Duration::ZERO, |_| bounds.prefill_silence);
        let first_byte = bounds.decode_first_byte.saturating_add(tail_time);
        let accepted = || self.apply(Event::DecodeAccepted(attempt));
        // An engine that has refused the usage option gets the plain body.
        let plain_request = decode_request
            .plain_body
            .filter(|_| engine.usage_option.is_taken() == Some(false))
            .map(|plain| EngineRequest { body: plain(), ..decode_request.request.clone() });
        let (engine_request, plain_body) = match &plain_request {
            Some(plain_request) => (plain_request, None),
            None => (&decode_request.request, decode_request.plain_body),
        };
        let result = {
            let response =
                decode::ask(&engine, engine_request, first_byte, probe_interval, plain_body, accepted);
            let response = pin!(response);
            race(session, pin!(unless_failed(tail.as_mut(), response))).await
        };
        let Ok(result) = result else { return Err(self.cancel()) };
        let result = match result {
            Ok(result) => result.with_clients_model(&self.model),
            Err(fault) => return Ok(self.fail_after_lease(attempt, fault)),
        };
        // The prefill's end begins the engine's own time.
        let began_at = tail.as_ref().map_or(sent_at, |tail| sent_at.max(tail.end_time()));
        self.prefill.tail = tail;
        Ok(match result {
            DecodeResult::Accepted(reply) => {
                self.record_acceptance(&engine, began_at.elapsed());
                DecodeOutcome::Accepted(DecodeResponse { attempt, reply, load })
            }
            DecodeResult::Refused(refusal) => {
                self.record_refusal(&engine, Leg::Decode, sent_at.elapsed());
                self.apply(Event::DecodeRefused(attempt));
                DecodeOutcome::Refused(refusal)
            }
            DecodeResult::Failed(failure, refusal, ErrorClass::InternalError, _)
                if decode_request.after_error == HandoffAfterError::Spent =>
            {
                // The fault is unknown. If this engine is at fault, the second round shows it.
                self.apply(Event::DecodeFailed(attempt, failure));
                DecodeOutcome::Failed { refusal, class: ErrorClass::HandoffSpent, reached: true }
            }
            DecodeResult::Failed(_, refusal, class @ ErrorClass::PrefixMissing, _)
                if decode_request.is_conditional =>
            {
                engine.responded(Leg::Decode, sent_at.elapsed());
                self.apply(Event::DecodeDeclined(attempt));
                DecodeOutcome::Failed { refusal, class, reached: true }
            }
            DecodeResult::Failed(failure, refusal, class, fault) => {
                // The write of a pushed handoff goes to the first engine that registered for it.
                let is_pushed = self.protocol.write_frees_decode() && failure != Failure::NotReached;
                let class = if is_pushed { ErrorClass::HandoffSpent } else { class };
                self.progress.timed_out = refusal == Refusal::timed_out();
                self.apply(Event::DecodeFailed(attempt, failure));
                self.record_fault(&engine, Leg::Decode, fault);
                self.log_misconfigured(&engine, Leg::Decode, &refusal);
                DecodeOutcome::Failed { refusal, class, reached: failure != Failure::NotReached }
            }
        })
    }

    /// The prefill engine failed, so the blocks that the decode engine waits for do not arrive.
    fn fail_after_lease(&mut self, attempt: Attempt, fault: Fault) -> DecodeOutcome {
        self.apply(Event::DecodeFailed(attempt, Failure::Unknown));
        self.prefill.failed_after_lease = true;
        if let Some(producer) = self.attempts.last_prefill.clone() {
            self.record_fault(&producer, Leg::Prefill, fault);
        }
        DecodeOutcome::Failed { refusal: Refusal::broken(), class: ErrorClass::HandoffSpent, reached: true }
    }
}
