//! Both legs at once, for protocols whose engines exchange the blocks by themselves. A failed leg ends the other one,
//! and the next attempt is a new pair under a new id.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_connector::RequestId;
use baton_connector::exchange::{Attempt, Event, Failure, SettlementCause, State};
use baton_openai::ApiError;

use super::selection::EngineSelection;
use super::{DecodeResponse, ExchangeDriver};
use crate::admission::Unavailable;
use crate::client::disconnect::race;
use crate::client::session::{ClientGone, Session};
use crate::engines::http::{Engine, EngineRequest, EngineRequestGuard, Reply};
use crate::engines::protocol::{LegOrder, Link, PushIdentity, Vllm};
use crate::exchange::client_request::ClientRequest;
use crate::legs::decode::{self, DecodeResult};
use crate::legs::liveness::{ProbeError, wait_while_alive};
use crate::legs::prefill::{PrefillCall, PrefillResult, PrefillTimeouts, ReceivedHandoff};
use crate::legs::request_error::RequestError;
use crate::legs::{ErrorClass, Fault, Refusal};
use crate::message::path::Dialect;
use crate::message::request_id;
use crate::metrics::Leg;
use crate::metrics::routing::DisaggregationReason;
use crate::routing::pool::EngineReservation;

/// Wait for the prefill engine's own error after the decode engine's. Both engines fail together, so it is due at once.
const PREFILL_GRACE: Duration = Duration::from_millis(100);

/// Wait for a decode engine after a pushing prefill engine's answer. Its heartbeats do not renew the lease (30 s by
/// default), because the decode engine does not know the prefill engine's own id of the request. After the wait the legs
/// are sent one after the other.
const PUSH_WAIT: Duration = Duration::from_secs(20);

/// The engines that failed the request, per leg.
#[derive(Default)]
struct FailedEngines {
    prefill: Vec<Arc<Engine>>,
    decode: Vec<Arc<Engine>>,
    /// A decode engine answered with an error and was not tried again.
    has_answered: bool,
}

/// The attempts of one pair, with their engines.
struct Pair {
    prefill: (Attempt, Arc<Engine>),
    decode: (Attempt, Arc<Engine>),
    sent_at: Instant,
    /// The process with which the decode engine registers, for a push, and its data-parallel rank.
    identity: Option<Arc<PushIdentity>>,
    rank: Option<u16>,
    /// Counts the request at the decode engine.
    load: EngineRequestGuard,
}

/// The outcome of one pair.
enum PairOutcome {
    Accepted(DecodeResponse),
    /// The leg failed; another pair may be tried.
    Failed(Leg, Refusal, SettlementCause),
}

/// The time limits of a pair.
#[derive(Clone, Copy)]
struct PairTimeouts {
    prefill: PrefillTimeouts,
    /// For the decode engine's acceptance.
    first_byte: Duration,
    /// For its acceptance after the prefill engine's answer.
    after_prefill: Duration,
}

/// What happens first while both legs are open.
enum PairEvent {
    Prefill(Result<PrefillResult, ProbeError>),
    Decode(DecodeResult),
}

impl ExchangeDriver {
    /// Whether both legs of the request are sent at once. The protocol is that of the reserved decode engine.
    ///
    /// # Errors
    /// The client has disconnected.
    pub(crate) async fn sends_pairs(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
    ) -> Result<bool, RequestError> {
        let Some(reserved) = self.selection.reserved.as_ref().filter(|_| request.dialect.generates()) else {
            return Ok(false);
        };
        let engine = Arc::clone(reserved.engine());
        if race(session, pin!(engine.learn_protocol())).await.is_err() {
            return Err(self.cancel());
        }
        self.protocol = engine.protocol();
        if request.model.prefill.is_empty() {
            return Ok(false);
        }
        match self.protocol.order() {
            LegOrder::Concurrent => {
                self.warn_of_unkept_turns(&engine);
                Ok(true)
            }
            LegOrder::PrefillFirst => self.sends_push(session, request).await,
        }
    }

    /// Whether a prefill engine writes the blocks, and its identity is known. The engine is reserved.
    async fn sends_push(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
    ) -> Result<bool, RequestError> {
        if !request.model.handoff.pushes.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let Some(reason) = self.would_disaggregate(request) else { return Ok(false) };
        let Ok(selection) = self.select_prefill(session, request, &[]).await else {
            return Err(self.cancel());
        };
        // The first leg selects again, and reports why there is no engine.
        let EngineSelection::Engine(reserved) = selection else { return Ok(false) };
        let knows = reserved.engine().learned_protocol().identity(reserved.member.rank).is_some();
        self.selection.reserved_prefill = Some((reserved, reason));
        if knows {
            self.protocol = &Vllm::Push;
        }
        Ok(knows)
    }

    /// Learns from a prefill engine's reply that it writes the blocks, and where decode engines register.
    pub(super) fn learn_identity(&mut self, engine: &Engine, rank: Option<u16>, params: &str) {
        if let Some(identity) = PushIdentity::read(params) {
            engine.learned_protocol().set_identity(rank, identity);
            self.model.handoff.pushes.store(true, Ordering::Relaxed);
            self.protocol = &Vllm::Push;
        } else if self.model.handoff.pushes.swap(false, Ordering::Relaxed) {
            engine.learned_protocol().forget_identity(rank);
        }
    }

    /// Both legs: the head of a decode engine's successful response. `None`: the legs of the next attempt are sent one
    /// after the other, to the reserved engines, because the prefill engine's identity is not known.
    pub(crate) async fn decode_as_pair(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
    ) -> Result<Option<DecodeResponse>, RequestError> {
        let reason = self.decide_disaggregation(request);
        // A decode engine of such a protocol may be unable to compute the prompt.
        let reason = if reason.is_remote() { reason } else { DisaggregationReason::Always };
        let result = self.attempt_pairs(session, request, reason).await;
        if !matches!(result, Ok(None)) {
            self.shared.metrics.routing.count_disaggregation(reason);
        }
        result
    }

    async fn attempt_pairs(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
        reason: DisaggregationReason,
    ) -> Result<Option<DecodeResponse>, RequestError> {
        let base = self.settlement.request.clone();
        let (mut failed, mut last) = (FailedEngines::default(), Refusal::none_left());
        let mut cause = SettlementCause::DecodeUnreachable;
        let attempts = self.generation.config.attempts.decode.max(self.generation.config.attempts.prefill);
        for number in 1..=u8::try_from(attempts).unwrap_or(u8::MAX) {
            let Some([prefill, decode]) = self.select_pair(session, request, &mut failed).await? else {
                if self.protocol.write_frees_decode() && self.give_up_handoff() {
                    // The decode engine may compute the prompt.
                    return Ok(None);
                }
                break;
            };
            if !self.take_retry(session, Leg::Decode, usize::from(number) - 1).await? {
                break;
            }
            self.give_up_handoff();
            self.settlement.rename(request_id::of_pair(&base, number));
            let identity = self
                .protocol
                .write_frees_decode()
                .then(|| prefill.engine().learned_protocol().identity(prefill.member.rank));
            if identity.as_ref().is_some_and(Option::is_none) {
                let prefill = Some((prefill, reason));
                (self.selection.reserved, self.selection.reserved_prefill) = (Some(decode), prefill);
                return Ok(None);
            }
            let identity = identity.flatten();
            let engines = [Arc::clone(prefill.engine()), Arc::clone(decode.engine())];
            let prefill_rank = prefill.member.rank;
            match self.attempt_pair(session, request, [prefill, decode], identity).await? {
                PairOutcome::Accepted(response) => return Ok(Some(response)),
                PairOutcome::Failed(leg, refusal, why) => {
                    match leg {
                        Leg::Prefill => failed.prefill.push(Arc::clone(&engines[0])),
                        Leg::Decode => {
                            failed.has_answered |= failed.decode.is_empty()
                                && !matches!(why, SettlementCause::DecodeUnreachable);
                            failed.decode.push(Arc::clone(&engines[1]));
                        }
                    }
                    (last, cause) = (refusal, why);
                    // Its process may be another one.
                    engines[0].learned_protocol().forget_identity(prefill_rank);
                    if self.faults.has_reached_unresponsive_limit() {
                        break;
                    }
                }
            }
        }
        self.apply(match (self.attempts.engines.is_empty(), cause) {
            (true, _) => Event::NoEngine,
            (false, SettlementCause::DecodeFailed) => Event::ExhaustedFor(cause),
            (false, _) => Event::Exhausted,
        });
        Err(RequestError::Refused(last))
    }

    /// A handoff belongs to one pair. Returns whether another leg may be sent.
    fn give_up_handoff(&mut self) -> bool {
        if matches!(self.exchange(|exchange| exchange.state()), State::ReadyToDecode(Some(_))) {
            self.apply(Event::HandoffUnusable);
        }
        self.exchange(|exchange| exchange.state()) == State::Choosing
    }

    /// The engines of the next pair; `None` if no engine is left.
    async fn select_pair(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
        failed: &mut FailedEngines,
    ) -> Result<Option<[EngineReservation; 2]>, RequestError> {
        if self.selection.reserved.is_none() {
            let decode = match self.select_decode(session, request, &failed.decode).await {
                // A decode engine also answers with an error if its prefill engine was restarted.
                Ok(EngineSelection::Unavailable(_)) if std::mem::take(&mut failed.has_answered) => {
                    self.select_decode(session, request, &[]).await
                }
                selection => selection,
            };
            match decode.map_err(|ClientGone| self.cancel())? {
                EngineSelection::Engine(reserved) => self.selection.reserved = Some(reserved),
                EngineSelection::Unavailable(_) => return Ok(None),
                EngineSelection::Busy(busy) => return Err(self.refuse_busy(busy)),
            }
        }
        // The choice of the prefill engine depends on the reserved decode engine.
        let prefill = match self.selection.reserved_prefill.take() {
            Some((reserved, _)) => Ok(EngineSelection::Engine(reserved)),
            None => self.select_prefill(session, request, &failed.prefill).await,
        };
        match prefill.map_err(|ClientGone| self.cancel())? {
            EngineSelection::Engine(prefill) => {
                let decode = self.selection.reserved.take().expect("it was just reserved");
                Ok(Some([prefill, decode]))
            }
            EngineSelection::Unavailable(Unavailable::NoEngine) => {
                // Another decode engine may have a prefill engine.
                match self.reselect_decode(session, request, &failed.decode).await? {
                    true => Box::pin(self.select_pair(session, request, failed)).await,
                    false => Ok(None),
                }
            }
            EngineSelection::Unavailable(Unavailable::Full) => Err(self.refuse_busy(Refusal::all_busy().0)),
            EngineSelection::Busy(busy) => Err(self.refuse_busy(busy)),
        }
    }

    pub(super) fn refuse_busy(&mut self, busy: ApiError) -> RequestError {
        let is_first = self.exchange(|exchange| exchange.state()) == State::Choosing;
        self.apply(match is_first {
            true => Event::NotAdmitted,
            false => Event::ExhaustedFor(SettlementCause::DecodeBusy),
        });
        busy.into()
    }

    /// One pair: both legs, until the decode engine accepts the request or a leg fails.
    async fn attempt_pair(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
        [prefill, decode]: [EngineReservation; 2],
        identity: Option<Arc<PushIdentity>>,
    ) -> Result<PairOutcome, RequestError> {
        let requests = self.pair_requests(session, request, [&prefill, &decode], identity.as_deref()).await?;
        let Some([prefill_request, decode_request]) = requests else {
            let refusal = Refusal::none_left();
            return Ok(PairOutcome::Failed(Leg::Prefill, refusal, SettlementCause::DecodeUnreachable));
        };
        let engines = [Arc::clone(prefill.engine()), Arc::clone(decode.engine())];
        let [prefill_engine, decode_engine] = engines;
        let pair = Pair {
            prefill: (self.attempts.add(Leg::Prefill, &prefill_engine), prefill_engine),
            decode: (self.attempts.add(Leg::Decode, &decode_engine), decode_engine),
            sent_at: Instant::now(),
            identity,
            rank: prefill.member.rank,
            load: decode.load,
        };
        self.prefill.ends_writes = pair.identity.as_ref().is_some_and(|identity| identity.ends_writes);
        let times = self.pair_timeouts(request, pair.sent_at);
        self.apply(Event::PrefillSent(pair.prefill.0));
        let call = PrefillCall::start(pair.prefill.0, prefill.load, prefill_request, pair.sent_at);
        let call = self.prefill.call.insert(call);
        // A decode engine without its prefill would wait for minutes.
        let unsent = race(session, pin!(call.wait_until_sent())).await;
        let Ok(unsent) = unsent else { return Err(self.cancel()) };
        if let Some(result) = unsent
            && let Some(outcome) = self.end_prefill_of_pair(&pair, Ok(result))?
        {
            return Ok(outcome);
        }
        self.apply(Event::DecodeSent(pair.decode.0));
        self.follow_pair(session, request, pair, &decode_request, times).await
    }

    fn pair_timeouts(&self, request: &ClientRequest, sent_at: Instant) -> PairTimeouts {
        let bounds = request.model.bounds;
        let probe_interval = Duration::from_millis(self.generation.config.timeouts.liveness_probe_ms);
        // The decode engine waits for the prefill, which has a time limit of its own.
        let first_byte = bounds.decode_first_byte.saturating_add(bounds.prefill_silence);
        // An answer that follows the transfer waits for the decode engine too. A decode engine that has not registered
        // within a pushing engine's lease waits for ever.
        let (silence, after_prefill) = match self.protocol.write_frees_decode() {
            true if request.is_streamed() => (bounds.prefill_silence, PUSH_WAIT),
            // The head of a whole response follows its last token.
            true => (bounds.prefill_silence, bounds.decode_first_byte),
            false => (first_byte, first_byte),
        };
        let prefill = PrefillTimeouts { sent_at, silence, probe_interval };
        PairTimeouts { prefill, first_byte, after_prefill }
    }

    /// Waits for both legs of a pair that was sent.
    async fn follow_pair(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
        pair: Pair,
        decode_request: &EngineRequest,
        times: PairTimeouts,
    ) -> Result<PairOutcome, RequestError> {
        let engine = Arc::clone(&pair.decode.1);
        let PairTimeouts { first_byte, prefill: PrefillTimeouts { probe_interval, .. }, .. } = times;
        let response = decode::ask(&engine, decode_request, first_byte, probe_interval, None, || ());
        let mut response = pin!(response);
        loop {
            let call = self.prefill.call.as_mut();
            let next = next_event(call, response.as_mut(), &pair.prefill.1, times);
            let event = race(session, pin!(next)).await;
            match event {
                Err(ClientGone) => return Err(self.cancel()),
                Ok(PairEvent::Prefill(prefilled)) => {
                    if let Some(outcome) = self.end_prefill_of_pair(&pair, prefilled)? {
                        return Ok(outcome);
                    }
                }
                Ok(PairEvent::Decode(DecodeResult::Accepted(reply))) => {
                    if let Some(outcome) = self.await_prefill(session, request, &pair, times.prefill).await? {
                        return Ok(outcome);
                    }
                    return Ok(PairOutcome::Accepted(self.accept_pair(pair, reply, times.prefill)));
                }
                Ok(PairEvent::Decode(decoded)) => {
                    if let Some(prefilled) = self.prefill_failure(&decoded).await
                        && let Some(outcome) = self.end_prefill_of_pair(&pair, Ok(prefilled))?
                    {
                        return Ok(outcome);
                    }
                    return self.fail_decode_of_pair(&pair, decoded);
                }
            }
        }
    }

    /// Waits for the prefill engine's answer, if the first event of the response does not show that it is due. SGLang
    /// sends the first events of Responses and Messages before it has the blocks.
    async fn await_prefill(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
        pair: &Pair,
        timeouts: PrefillTimeouts,
    ) -> Result<Option<PairOutcome>, RequestError> {
        if self.protocol.write_frees_decode() || matches!(request.dialect, Dialect::OpenAi(_)) {
            return Ok(None);
        }
        let Some(call) = self.prefill.call.as_mut() else { return Ok(None) };
        let PrefillTimeouts { silence, probe_interval, .. } = timeouts;
        let answer = {
            let answer = pin!(call.receive_response());
            race(session, pin!(wait_while_alive(&pair.prefill.1, probe_interval, silence, answer))).await
        };
        match answer {
            Err(ClientGone) => Err(self.cancel()),
            Ok(prefilled) => self.end_prefill_of_pair(pair, prefilled),
        }
    }

    /// The prefill engine's answer, if a decode engine's error may only report its failure: an engine whose transfer fails
    /// answers 500, whatever the reason.
    async fn prefill_failure(&mut self, decoded: &DecodeResult) -> Option<PrefillResult> {
        let DecodeResult::Failed(Failure::Answered, ..) = decoded else { return None };
        let call = self.prefill.call.as_mut()?;
        tokio::time::timeout(PREFILL_GRACE, call.receive_response()).await.ok()
    }

    /// The requests of both legs; `None` if the engines have different protocols.
    async fn pair_requests(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
        [prefill, decode]: [&EngineReservation; 2],
        identity: Option<&PushIdentity>,
    ) -> Result<Option<[EngineRequest; 2]>, RequestError> {
        // The port of the bootstrap server may not be known yet.
        for engine in [prefill.engine(), decode.engine()] {
            if race(session, pin!(engine.learn_protocol())).await.is_err() {
                return Err(self.cancel());
            }
        }
        if prefill.engine().known_protocol() != decode.engine().known_protocol() {
            return Ok(None);
        }
        let protocol = self.protocol;
        let id: RequestId = self.settlement.request.clone();
        let leg = request.leg_input(&id);
        if let Err(error) = protocol.check(&leg) {
            self.apply(Event::NotAdmitted);
            return Err(error.into());
        }
        self.settlement.is_named = protocol.names_legs(&leg);
        let (bootstrap, params);
        let link = match identity {
            Some(identity) => {
                params = identity.decode_params(&id);
                Link::Handoff(&params)
            }
            None => {
                bootstrap = prefill.engine().bootstrap(request.shape.prompts, prefill.member.rank);
                Link::Bootstrap(&bootstrap)
            }
        };
        let prefill_body = protocol.prefill_body(&leg, link);
        let decode_body = protocol.decode_body(&leg, link);
        let rank = |reserved: &EngineReservation| reserved.member.rank;
        Ok(Some([
            EngineRequest { rank: rank(prefill), ..self.engine_request(request, Leg::Prefill, prefill_body) },
            EngineRequest { rank: rank(decode), ..self.engine_request(request, Leg::Decode, decode_body) },
        ]))
    }

    /// The prefill half has answered, or it never will. `None`: the decode half continues.
    fn end_prefill_of_pair(
        &mut self,
        pair: &Pair,
        prefilled: Result<PrefillResult, ProbeError>,
    ) -> Result<Option<PairOutcome>, RequestError> {
        let (attempt, engine) = &pair.prefill;
        let failed = |refusal| PairOutcome::Failed(Leg::Prefill, refusal, SettlementCause::DecodeFailed);
        let pushes = self.protocol.write_frees_decode();
        let result = match prefilled {
            Err(error) => {
                // The call is still open: its abort reads the reply. An engine that is alive may wait for a decode
                // engine with other work.
                if pushes || error == ProbeError::Unresponsive {
                    self.record_fault(engine, Leg::Prefill, error.fault());
                }
                self.progress.timed_out = true;
                self.apply(Event::PrefillFailed(*attempt, Failure::Unknown));
                return Ok(Some(failed(Refusal::timed_out())));
            }
            // Without its blocks the write never comes: stock vLLM answers so while it shuts down.
            Ok(PrefillResult::NoLease) if pushes => {
                PrefillResult::Failed(Failure::Answered, Refusal::broken(), Fault::None)
            }
            Ok(result) => result.with_clients_model(&self.model),
        };
        // The reply ends the call.
        self.prefill.call = None;
        match &result {
            PrefillResult::Leased(..) => self.record_prefill(engine, pair.sent_at.elapsed()),
            // The answer follows the transfer, so its time includes the decode engine's queue.
            PrefillResult::NoLease => {
                self.record_early_lease(engine);
                engine.completed(Leg::Prefill);
            }
            PrefillResult::Refused(_) => self.record_refusal(engine, Leg::Prefill, pair.sent_at.elapsed()),
            PrefillResult::Failed(..) => {}
        }
        self.apply(result.exchange_event(*attempt));
        match result {
            PrefillResult::NoLease => Ok(None),
            PrefillResult::Leased(ReceivedHandoff { params, .. }, ..) => {
                let identity = PushIdentity::read(&params);
                self.prefill.lease = Some((*attempt, params));
                if !pushes || identity.as_ref() == pair.identity.as_deref() {
                    return Ok(None);
                }
                // Another process has the blocks than the one with which the decode engine registers.
                if let Some(identity) = identity {
                    engine.learned_protocol().set_identity(pair.rank, identity);
                }
                self.apply(Event::DecodeFailed(pair.decode.0, Failure::Unknown));
                Ok(Some(failed(Refusal::broken())))
            }
            PrefillResult::Refused(refusal) => Err(RequestError::Refused(refusal)),
            PrefillResult::Failed(_, refusal, fault) => {
                self.log_misconfigured(engine, Leg::Prefill, &refusal);
                self.record_fault(engine, Leg::Prefill, fault);
                Ok(Some(failed(refusal)))
            }
        }
    }

    /// The decode engine has accepted the request. A prefill that has not answered yet is read to its end.
    fn accept_pair(&mut self, pair: Pair, reply: Box<Reply>, timeouts: PrefillTimeouts) -> DecodeResponse {
        let Pair { decode: (attempt, engine), sent_at, load, .. } = pair;
        self.record_acceptance(&engine, sent_at.elapsed());
        self.apply(Event::DecodeAccepted(attempt));
        if let Some(call) = self.prefill.call.take() {
            // From now on a failure of the prefill ends nothing.
            self.apply(Event::FirstChunk(attempt));
            let settler = &self.shared.settler;
            self.prefill.pending = Some(settler.follow_prefill(call, timeouts, self.settlement.clone()));
        }
        DecodeResponse { attempt, reply, load }
    }

    /// The decode half has failed, which ends the prefill half.
    fn fail_decode_of_pair(
        &mut self,
        pair: &Pair,
        decoded: DecodeResult,
    ) -> Result<PairOutcome, RequestError> {
        let (attempt, engine) = &pair.decode;
        match decoded.with_clients_model(&self.model) {
            DecodeResult::Accepted(_) => unreachable!("the caller handles acceptance"),
            DecodeResult::Refused(refusal) => {
                self.record_refusal(engine, Leg::Decode, pair.sent_at.elapsed());
                self.apply(Event::DecodeRefused(*attempt));
                Err(RequestError::Refused(refusal))
            }
            DecodeResult::Failed(failure, refusal, class, fault) => {
                self.progress.timed_out = refusal == Refusal::timed_out();
                self.apply(Event::DecodeFailed(*attempt, failure));
                // The error may be the prefill engine's. If this engine is at fault, the next pair shows it.
                let is_first = self.attempts.engines.len() == 2;
                let is_open = is_first && class == ErrorClass::InternalError;
                self.record_fault(engine, Leg::Decode, if is_open { Fault::None } else { fault });
                self.log_misconfigured(engine, Leg::Decode, &refusal);
                let cause = match failure {
                    Failure::NotReached => SettlementCause::DecodeUnreachable,
                    _ => SettlementCause::DecodeFailed,
                };
                Ok(PairOutcome::Failed(Leg::Decode, refusal, cause))
            }
        }
    }
}

/// The next answer of a leg. `call` is the prefill leg, until it has answered.
async fn next_event(
    call: Option<&mut PrefillCall>,
    response: Pin<&mut impl Future<Output = DecodeResult>>,
    prefill: &Arc<Engine>,
    times: PairTimeouts,
) -> PairEvent {
    let Some(call) = call else {
        let decoded = tokio::time::timeout(times.after_prefill, response).await;
        return PairEvent::Decode(decoded.unwrap_or_else(|_elapsed| {
            let refusal = Refusal::timed_out();
            DecodeResult::Failed(Failure::Unknown, refusal, ErrorClass::Retryable, Fault::None)
        }));
    };
    let PrefillTimeouts { silence, probe_interval, .. } = times.prefill;
    let answer = pin!(call.receive_response());
    tokio::select! {
        biased;
        prefilled = wait_while_alive(prefill, probe_interval, silence, answer) => PairEvent::Prefill(prefilled),
        decoded = response => PairEvent::Decode(decoded),
    }
}
