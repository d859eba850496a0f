//! The I/O of one request's [`Exchange`]: sends requests to engines, reports events to the state machine, and carries
//! out the settlements that it returns.
//!
//! The request's context owns the driver. `Drop` settles: after a response, a refusal, a panic or a shutdown, the
//! machine gets the event, and engines get the pending aborts and releases.

mod conditional_decode;
mod continuation;
mod decode;
mod faults;
mod next_turn;
mod pair;
mod prefill;
mod response_memory;
mod selection;

pub(crate) use continuation::Continuation;
pub(crate) use decode::DecodeResponse;
use faults::{FaultAttribution, RetryState};
use prefill::PrefillLeg;
use selection::Selection;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use baton_connector::RequestId;
use baton_connector::exchange::{
    Attempt, Event, EventEffect, Exchange, Outcome, Settlement, SettlementCause, Span, Timeline,
};
use hyper::header::HeaderValue;

use crate::client::session::Session;
use crate::engines::http::{Engine, EngineRequest};
use crate::engines::protocol::{Protocol, ProtocolKind};
use crate::exchange::client_request::ClientRequest;
use crate::legs::request_error::RequestError;
use crate::legs::settle::{LeaseRelease, SettlementContext};
use crate::legs::{Fault, Refusal};
use crate::message::payload::Payload;
use crate::message::trace_context::TraceContext;
use crate::metrics::Leg;
use crate::observe::in_flight::InFlightRequest;
use crate::observe::progress::RequestProgress;
use crate::routing::explain::Explanation;
use crate::routing::models::Model;
use crate::state::generation::Generation;
use crate::state::shared::Shared;

/// The engines of one request's attempts.
#[derive(Default)]
struct Attempts {
    /// By the attempt's number.
    engines: Vec<Arc<Engine>>,
    last_prefill: Option<Arc<Engine>>,
    last_decode: Option<Arc<Engine>>,
}

impl Attempts {
    /// Numbers an attempt at an engine.
    fn add(&mut self, leg: Leg, engine: &Arc<Engine>) -> Attempt {
        let number = u16::try_from(self.engines.len()).expect("the configuration bounds attempts");
        self.engines.push(Arc::clone(engine));
        let last = match leg {
            Leg::Prefill => &mut self.last_prefill,
            Leg::Decode => &mut self.last_decode,
        };
        *last = Some(Arc::clone(engine));
        Attempt(number)
    }

    fn engine(&self, attempt: Attempt) -> Arc<Engine> {
        Arc::clone(&self.engines[usize::from(attempt.0)])
    }
}

/// One request's exchange in operation.
pub(crate) struct ExchangeDriver {
    shared: Arc<Shared>,
    generation: Arc<Generation>,
    pub model: Arc<Model>,
    /// The protocol of the request's engines: that of the first decode engine.
    protocol: &'static dyn Protocol,
    settlement: SettlementContext,
    attempts: Attempts,
    selection: Selection,
    prefill: PrefillLeg,
    faults: FaultAttribution,
    retry: RetryState,
    /// Times and tokens for metrics, traces and the access log.
    pub progress: RequestProgress,
    /// For `GET /explain/{id}`; `None` if explanations are not configured.
    explanation: Option<Arc<Explanation>>,
}

impl ExchangeDriver {
    pub(crate) fn new(
        shared: Arc<Shared>,
        generation: Arc<Generation>,
        request: RequestId,
        client_id: Option<&HeaderValue>,
        path: &'static str,
        model: Arc<Model>,
    ) -> Self {
        let exchange = Arc::new(Mutex::new(Exchange::new()));
        let explanation = shared.explanations.begin(&request, client_id, path, &model.name, shared.now());
        Self {
            shared,
            generation,
            model,
            protocol: ProtocolKind::default().protocol(),
            settlement: SettlementContext {
                request,
                exchange,
                model: None,
                authorization: None,
                ends_by_write: Arc::default(),
                is_named: true,
            },
            attempts: Attempts::default(),
            selection: Selection::default(),
            prefill: PrefillLeg::default(),
            faults: FaultAttribution::default(),
            retry: RetryState::default(),
            progress: RequestProgress::default(),
            explanation,
        }
    }

    /// All legs of a request, up to the head of a decode engine's successful response.
    ///
    /// # Errors
    /// No engine serves the request, or the client has disconnected.
    pub(crate) async fn run_legs(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
    ) -> Result<DecodeResponse, RequestError> {
        if self.sends_pairs(session, request).await? {
            // Boxed, so that a request whose legs follow each other has no memory for it.
            if let Some(response) = Box::pin(self.decode_as_pair(session, request)).await? {
                return Ok(response);
            }
        } else if let Some(response) = self.decode_conditionally(session, request).await? {
            return Ok(response);
        }
        let handoff = self.prefill(session, request).await?;
        self.decode(session, request, handoff).await
    }

    /// The engine of the last attempt of a leg.
    pub(crate) fn last_engine(&self, leg: Leg) -> Option<&Arc<Engine>> {
        match leg {
            Leg::Prefill => self.attempts.last_prefill.as_ref(),
            Leg::Decode => self.attempts.last_decode.as_ref(),
        }
    }

    /// Sets the request's trace, and its entry in the table of requests in flight.
    pub(crate) fn attach_trace(&mut self, trace: &TraceContext, entry: Option<&Arc<InFlightRequest>>) {
        self.progress.trace = trace.clone();
        self.progress.entry = entry.cloned();
        if let Some(entry) = entry {
            // Set once: an entry belongs to one request, which has one driver.
            let _ = entry.exchange.set(Arc::clone(&self.settlement.exchange));
            let _ = entry.model.set(Arc::clone(&self.model));
        }
    }

    /// The time of each phase so far as a `Server-Timing` value; `None` if that is not configured.
    pub(crate) fn server_timing(&self) -> Option<HeaderValue> {
        if !self.generation.config.telemetry.server_timing {
            return None;
        }
        let line = self.timeline();
        let spans = [("prefill", line.prefill()), ("gap", line.gap()), ("accept", line.accept())];
        let parts = spans.into_iter().filter_map(|(name, span)| {
            Some(format!("{name};dur={:.3}", span.and_then(Span::duration)?.as_secs_f64() * 1000.0))
        });
        HeaderValue::from_str(&parts.collect::<Vec<_>>().join(", ")).ok()
    }

    /// Reports an event to the machine and carries out its settlements.
    pub(crate) fn apply(&mut self, event: Event) {
        let now = self.shared.now();
        if let Event::StreamBroken(attempt) | Event::StreamCut(attempt) = event {
            let engine = self.attempts.engine(attempt);
            match self.faults.stream_fault.take() {
                None | Some(Fault::Engine) => self.faults.add_after_head(engine),
                Some(fault) => self.record_fault(&engine, Leg::Decode, fault),
            }
        }
        let step = self.exchange(|exchange| exchange.apply(event, now));
        // The decode engine may hold blocks.
        let ends_decode = step.settlements.iter().any(|one| matches!(one, Settlement::AbortDecode(_)));
        if ends_decode && self.protocol.write_frees_decode() && !self.prefill.ends_writes {
            self.settlement.ends_by_write.store(true, Ordering::Relaxed);
        }
        for settlement in step.settlements {
            self.settle(settlement);
        }
        if step.ended.is_some() {
            self.faults.attribute();
        }
        if step.effect == EventEffect::Applied {
            self.progress.record_event(event, now, &self.attempts.engines);
            if let Some(explanation) = &self.explanation {
                explanation.record_event(&event, &self.attempts.engines, now);
            }
        }
        if let Some(Outcome::ClientGone(phase)) = step.ended {
            self.shared.metrics.requests.count_disconnect(phase);
        }
    }

    /// Records the status that the client received.
    pub(crate) fn record_end(&self, status: u16) {
        if let Some(explanation) = &self.explanation {
            explanation.record_end(status, self.outcome(), self.shared.now());
        }
    }

    /// Records a chunk of the response that arrived at this time.
    pub(crate) fn record_piece(&mut self, arrived: Instant) {
        if self.progress.streamed {
            self.progress.record_piece(self.shared.clock.time(arrived), &self.model.metrics);
        }
    }

    pub(crate) fn outcome(&self) -> Option<Outcome> {
        self.exchange(|exchange| exchange.outcome())
    }

    pub(crate) fn timeline(&self) -> Timeline {
        self.exchange(|exchange| *exchange.timeline())
    }

    /// Ends a request at its deadline. All settlements are pending when this returns.
    pub(crate) fn time_out(&mut self) -> RequestError {
        self.apply(Event::ExhaustedFor(SettlementCause::OutOfTime));
        RequestError::Refused(Refusal::out_of_time())
    }

    /// Ends a request whose client has disconnected. All settlements are pending when this returns.
    pub(crate) fn cancel(&mut self) -> RequestError {
        self.apply(Event::ClientGone);
        RequestError::ClientGone
    }

    fn settle(&mut self, settlement: Settlement) {
        let context = self.settlement.clone();
        let settler = &self.shared.settler;
        match settlement {
            Settlement::AbortPrefill(attempt) => {
                match (self.prefill.call.take(), self.prefill.pending.take()) {
                    (Some(call), _) => settler.abort_and_read(call, context),
                    // Without the abort the prefill runs to its end.
                    (None, Some(_)) if context.ends_by_write() => {}
                    (None, Some(pending)) => pending.abort(),
                    // The connection broke, so there is no response to read.
                    (None, None) => settler.abort(self.attempts.engine(attempt), Leg::Prefill, context),
                }
            }
            Settlement::ReleasePrefill(lease, cause) => {
                let params = self.prefill.lease.as_ref().filter(|(attempt, _)| *attempt == lease.attempt);
                let params = params.map(|(_, params)| Arc::clone(params));
                let release = LeaseRelease { lease, params, cause };
                settler.release(self.attempts.engine(lease.attempt), release, context);
            }
            Settlement::AbortDecode(attempt) => {
                settler.abort(self.attempts.engine(attempt), Leg::Decode, context);
            }
        }
    }

    fn engine_request(&self, request: &ClientRequest, leg: Leg, body: impl Into<Payload>) -> EngineRequest {
        EngineRequest {
            id: Some(self.settlement.request.clone()),
            authorization: request.authorization.clone(),
            trace: self.progress.trace.parent_for(leg),
            time: self.time_left(),
            ..EngineRequest::post(request.dialect.path(), body)
        }
    }

    fn exchange<T>(&self, with: impl FnOnce(&mut Exchange) -> T) -> T {
        with(&mut self.settlement.exchange.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for ExchangeDriver {
    fn drop(&mut self) {
        self.apply(Event::Dropped);
        self.leave_turn();
        // The engine has finished a request whose parameters it has sent, whatever the client does.
        self.keep_turn();
    }
}
