//! The prefill leg: attempts at prefill engines, until one answers with a handoff or without one.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::exchange::{Attempt, Event, Exchange, Failure};

use super::ExchangeDriver;
use super::next_turn::TurnRecording;
use super::selection::EngineSelection;
use crate::admission::Unavailable;
use crate::client::disconnect::race;
use crate::client::session::{ClientGone, Session};
use crate::config::Fallback;
use crate::engines::caches::kept_turns::KeptTurn;
use crate::engines::http::{Engine, EngineRequest};
use crate::engines::protocol::Link;
use crate::exchange::client_request::ClientRequest;
use crate::legs::liveness::wait_while_alive;
use crate::legs::prefill::{PrefillCall, PrefillResult, PrefillTail, PrefillTimeouts};
use crate::legs::request_error::RequestError;
use crate::legs::settle::PendingPrefill;
use crate::legs::{Fault, Refusal};
use crate::metrics::Leg;
use crate::metrics::routing::DisaggregationReason;
use crate::routing::pool::EngineReservation;
use crate::state::shared::TurnClaim;

/// The prefill of one request.
#[derive(Default)]
pub(super) struct PrefillLeg {
    /// The call in flight.
    pub call: Option<PrefillCall>,
    /// The rest of a call whose engine leased its blocks early.
    pub tail: Option<PrefillTail>,
    /// The call of a pair whose decode engine has begun its response.
    pub pending: Option<PendingPrefill>,
    /// The engine of the last pair notifies its decode engine of a write that will not come.
    pub ends_writes: bool,
    /// The last lease and its transfer parameters, for the release.
    pub lease: Option<(Attempt, Arc<str>)>,
    /// The compatibility of the last prefill engine.
    pub compatibility: Option<u64>,
    /// A prefill engine failed after it leased its blocks early.
    pub failed_after_lease: bool,
    /// The kept turn whose blocks a prefill engine reads.
    pub turn: Option<Box<KeptTurn<TurnClaim>>>,
    /// The prefill engine that failed with a kept turn, and the engine id of the process that keeps the blocks.
    pub unread: Option<(Arc<Engine>, String)>,
    /// Records the response for the next turn of its conversation.
    pub next_turn: Option<Box<TurnRecording>>,
}

/// The outcome of all attempts at prefill engines.
enum PrefillOutcome {
    /// An engine answered, with a handoff or without one.
    Responded(Option<Arc<str>>),
    /// No engine is left, or all are full.
    Unavailable(Unavailable, Refusal),
}

/// The outcome of one attempt at a prefill engine.
enum PrefillAttempt {
    Responded(Option<Arc<str>>),
    /// The engine failed; another one may be tried.
    Failed(Refusal),
}

impl ExchangeDriver {
    /// First leg: the handoff, or `None` when the decode engine computes the whole prompt.
    pub(crate) async fn prefill(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
    ) -> Result<Option<Arc<str>>, RequestError> {
        if !request.dialect.generates() {
            self.apply(Event::PrefillSkipped);
            return Ok(None);
        }
        let reason = self.decide_disaggregation(request);
        let (reason, handoff) = if reason.is_remote() {
            match self.prefill_remotely(session, request).await {
                // The first reply shows that the engine would write the blocks.
                Ok(PrefillOutcome::Responded(Some(_)))
                    if self.protocol.write_frees_decode() && !request.can_be_pushed() =>
                {
                    self.apply(Event::HandoffUnusable);
                    self.apply(Event::PrefillSkipped);
                    (DisaggregationReason::PushUnmatched, Ok(None))
                }
                Ok(PrefillOutcome::Responded(handoff)) => (reason, Ok(handoff)),
                Ok(PrefillOutcome::Unavailable(..))
                    if request.model.handoff.fallback == Fallback::Aggregate =>
                {
                    self.apply(Event::PrefillSkipped);
                    (DisaggregationReason::FellBack, Ok(None))
                }
                Ok(PrefillOutcome::Unavailable(unavailable, last)) => {
                    self.apply(match unavailable {
                        Unavailable::Full => Event::NotAdmitted,
                        Unavailable::NoEngine if self.attempts.engines.is_empty() => Event::NoEngine,
                        Unavailable::NoEngine => Event::Exhausted,
                    });
                    (reason, Err(RequestError::Refused(last)))
                }
                Err(error) => (reason, Err(error)),
            }
        } else {
            self.apply(Event::PrefillSkipped);
            (reason, Ok(None))
        };
        // The first round has counted the request.
        if self.retry.is_first_round() {
            self.shared.metrics.routing.count_disaggregation(reason);
        }
        handoff
    }

    async fn prefill_remotely(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
    ) -> Result<PrefillOutcome, RequestError> {
        let mut engine_request = self.engine_request(
            request,
            Leg::Prefill,
            self.protocol.prefill_body(&request.leg_input(&self.settlement.request), Link::None),
        );
        // A recomputed prompt has no third round.
        engine_request.early_handoff = request.model.handoff.early_handoff && self.retry.is_first_round();
        let (mut tried, mut sent, mut has_turn) = (Vec::<Arc<Engine>>::new(), 0, false);
        let mut last = Refusal::none_left();
        while tried.len() < usize::from(self.generation.config.attempts.prefill) {
            let selection = match self.selection.reserved_prefill.take() {
                Some((reserved, _)) => EngineSelection::Engine(reserved),
                None => match self.select_prefill(session, request, &tried).await {
                    Ok(selection) => selection,
                    Err(ClientGone) => return Err(self.cancel()),
                },
            };
            let reservation = match selection {
                EngineSelection::Engine(reservation) => reservation,
                // Another decode engine may have a prefill engine.
                EngineSelection::Unavailable(Unavailable::NoEngine)
                    if tried.is_empty()
                        && request.model.handoff.fallback == Fallback::None
                        && self.reselect_decode(session, request, &[]).await? =>
                {
                    continue;
                }
                EngineSelection::Unavailable(Unavailable::NoEngine) => break,
                EngineSelection::Unavailable(Unavailable::Full) => {
                    return Ok(PrefillOutcome::Unavailable(Unavailable::Full, Refusal::all_busy()));
                }
                EngineSelection::Busy(busy) => {
                    self.apply(Event::NotAdmitted);
                    return Err(busy.into());
                }
            };
            if !self.take_retry(session, Leg::Prefill, sent).await? {
                break;
            }
            let kept = if sent == 0 { self.take_turn(request) } else { None };
            // A kept turn is read once, so the next engine gets the body without it.
            if kept.is_some() || has_turn {
                let link = kept.as_deref().map_or(Link::None, Link::Handoff);
                let leg = request.leg_input(&self.settlement.request);
                engine_request.body = self.protocol.prefill_body(&leg, link);
            }
            has_turn = kept.is_some();
            sent += 1;
            tried.push(Arc::clone(reservation.engine()));
            match self.attempt_prefill(session, request, reservation, &mut engine_request).await? {
                PrefillAttempt::Responded(handoff) => return Ok(PrefillOutcome::Responded(handoff)),
                PrefillAttempt::Failed(refusal) => last = refusal,
            }
            // The decode engine that kept the blocks may have failed, so this engine may get the request without them.
            if self.prefill.turn.is_some() {
                self.leave_turn();
                tried.clear();
            }
        }
        Ok(PrefillOutcome::Unavailable(Unavailable::NoEngine, last))
    }

    /// One attempt at a prefill engine.
    async fn attempt_prefill(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
        reservation: EngineReservation,
        engine_request: &mut EngineRequest,
    ) -> Result<PrefillAttempt, RequestError> {
        let silence = request.model.bounds.prefill_silence;
        let probe_interval = Duration::from_millis(self.generation.config.timeouts.liveness_probe_ms);
        let EngineReservation { member, load, .. } = reservation;
        let (engine, rank) = (Arc::clone(&member.engine), member.rank);
        self.prefill.compatibility = member.compatibility();
        engine_request.rank = rank;
        let sent_at = Instant::now();
        let attempt = self.attempts.add(Leg::Prefill, &engine);
        self.apply(Event::PrefillSent(attempt));
        let call =
            self.prefill.call.insert(PrefillCall::start(attempt, load, engine_request.clone(), sent_at));
        let response = {
            let response = pin!(call.receive_response());
            race(session, pin!(wait_while_alive(&engine, probe_interval, silence, response))).await
        };
        let result = match response {
            Err(ClientGone) => return Err(self.cancel()),
            Ok(Err(error)) => {
                self.suspect_turn(&engine);
                self.record_prefill_fault(&engine, error.fault());
                self.progress.timed_out = true;
                self.apply(Event::PrefillFailed(attempt, Failure::Unknown));
                if self.faults.has_reached_unresponsive_limit() {
                    self.apply(Event::Exhausted);
                    return Err(RequestError::Refused(Refusal::timed_out()));
                }
                return Ok(PrefillAttempt::Failed(Refusal::timed_out()));
            }
            Ok(Ok(result)) => result.with_clients_model(&self.model),
        };
        // The response ends the call.
        let load = self.prefill.call.take().map(PrefillCall::into_load);
        match &result {
            PrefillResult::Leased(_, _, Some(_)) => self.record_early_lease(&engine),
            PrefillResult::Leased(..) | PrefillResult::NoLease => {
                self.record_prefill(&engine, sent_at.elapsed());
            }
            PrefillResult::Refused(_) => self.record_refusal(&engine, Leg::Prefill, sent_at.elapsed()),
            PrefillResult::Failed(..) => {}
        }
        self.end_turn(&engine, &result);
        self.apply(result.exchange_event(attempt));
        match result {
            PrefillResult::Leased(handoff, _, rest) => {
                self.learn_identity(&engine, rank, &handoff.params);
                self.prefill.tail = rest.zip(load).map(|(rest, load)| {
                    let timeouts = PrefillTimeouts { sent_at, silence, probe_interval };
                    self.exchange(Exchange::computes_on);
                    let exchange = &self.settlement.exchange;
                    PrefillTail::start(self.shared.clock, exchange, attempt, load, rest, timeouts)
                });
                self.prefill.lease = Some((attempt, Arc::clone(&handoff.params)));
                Ok(PrefillAttempt::Responded(Some(handoff.into_decode_params())))
            }
            PrefillResult::NoLease => Ok(PrefillAttempt::Responded(None)),
            PrefillResult::Refused(refusal) => Err(RequestError::Refused(refusal)),
            PrefillResult::Failed(_, refusal, fault) => {
                self.log_misconfigured(&engine, Leg::Prefill, &refusal);
                self.record_prefill_fault(&engine, fault);
                Ok(PrefillAttempt::Failed(refusal))
            }
        }
    }

    /// An engine that was to read kept blocks may have failed because of them.
    fn record_prefill_fault(&mut self, engine: &Arc<Engine>, fault: Fault) {
        let is_of_turn = self.prefill.turn.is_some() && fault == Fault::Engine;
        self.record_fault(engine, Leg::Prefill, if is_of_turn { Fault::None } else { fault });
    }
}
