//! Whether an engine or the request is at fault for a failed attempt, and whether another attempt follows.
//!
//! A failure is an engine's fault if another engine then served the same request. If two engines failed the request
//! alike, the request is at fault. The same holds if one engine failed it and another refused it. The failure of a
//! single engine counts only together with failures of other sources: one class of bad requests ejects no engine.
//!
//! A response head shows that the engines that failed before it were at fault. Only a completed response shows this for
//! an engine that broke off.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use baton_connector::exchange::{Attempt, Event};

use super::ExchangeDriver;
use crate::client::disconnect::race;
use crate::client::session::Session;
use crate::engines::health::FailureKind;
use crate::engines::http::Engine;
use crate::legs::request_error::RequestError;
use crate::legs::retries::{self, RetryPermit};
use crate::legs::{Fault, Refusal};
use crate::message::random;
use crate::metrics::Leg;
use crate::metrics::log_span::request_span;

/// Limit on unresponsive engines of one request, after which no other engine gets it: the request itself may block
/// them.
const UNRESPONSIVE_MAX: u32 = 2;

/// An engine that failed the request.
struct PendingFault {
    engine: Arc<Engine>,
    leg: Leg,
    /// The engine failed after the head of its response.
    after_head: bool,
}

/// Failures of one request that are not attributed yet.
#[derive(Default)]
pub(super) struct FaultAttribution {
    pending: Vec<PendingFault>,
    /// The fault that the decode engine reported in its stream.
    pub stream_fault: Option<Fault>,
    /// Engines that were unresponsive to this request.
    unresponsive: u32,
    /// Hash of the client. The failures of one source alone eject no engine.
    pub source: u64,
}

impl FaultAttribution {
    fn add(&mut self, engine: &Arc<Engine>, leg: Leg) {
        self.pending.push(PendingFault { engine: Arc::clone(engine), leg, after_head: false });
    }

    /// Adds a decode engine whose response broke off.
    pub(super) fn add_after_head(&mut self, engine: Arc<Engine>) {
        self.pending.push(PendingFault { engine, leg: Leg::Decode, after_head: true });
    }

    /// Whether the request is sent to no other engine.
    pub(super) fn has_reached_unresponsive_limit(&self) -> bool {
        self.unresponsive >= UNRESPONSIVE_MAX
    }

    /// A success of `by` shows that the engines of these faults were at fault.
    fn confirm(&mut self, by: &Arc<Engine>, these: impl Fn(&PendingFault) -> bool) {
        self.pending.retain(|pending| {
            let confirmed = these(pending);
            if confirmed && !Arc::ptr_eq(&pending.engine, by) {
                pending.engine.failed(pending.leg, FailureKind::EngineFault);
            }
            !confirmed
        });
    }

    /// Attributes the remaining faults when the request ends. The failure of a single engine counts if other sources
    /// confirm it; a failure of two engines is the request's own fault.
    pub(super) fn attribute(&mut self) {
        let pending = std::mem::take(&mut self.pending);
        for leg in [Leg::Prefill, Leg::Decode] {
            let of_leg = pending.iter().filter(|pending| pending.leg == leg);
            let mut engines: Vec<_> = of_leg.map(|pending| &pending.engine).collect();
            engines.dedup_by(|a, b| Arc::ptr_eq(a, b));
            if let [engine] = engines[..] {
                engine.failed(leg, FailureKind::PossibleFault(self.source));
            }
        }
    }
}

/// Whether the prompt was computed a second time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Round {
    #[default]
    First,
    Recomputed,
}

/// The request's retries.
#[derive(Default)]
pub(super) struct RetryState {
    /// Its share of the retry budget.
    permit: Option<RetryPermit>,
    pub round: Round,
}

impl RetryState {
    /// Whether the prompt may be computed again.
    pub(super) fn is_first_round(&self) -> bool {
        self.round == Round::First
    }
}

impl ExchangeDriver {
    /// Whether another attempt follows: at once for the first two, and after a pause for later ones. No retry follows
    /// when the retry budget is exhausted.
    pub(super) async fn take_retry(
        &mut self,
        session: &mut Session,
        leg: Leg,
        tried: usize,
    ) -> Result<bool, RequestError> {
        if tried == 0 {
            return Ok(true);
        }
        let terms = &self.generation.config.retries;
        let budget = &self.shared.limits.retries;
        let Some(permit) = budget.take(self.shared.in_flight.count(), self.shared.now(), terms) else {
            self.shared.metrics.resilience.count_refused_retry(leg);
            return Ok(false);
        };
        let pause = retries::pause(tried, random::fraction(), terms);
        self.retry.permit = Some(permit);
        self.shared.metrics.count_retry(leg);
        if !pause.is_zero() && race(session, pin!(tokio::time::sleep(pause))).await.is_err() {
            return Err(self.cancel());
        }
        Ok(true)
    }

    /// Records the fault that the decode engine reports before its stream breaks.
    pub(crate) fn report_fault(&mut self, fault: Fault) {
        self.faults.stream_fault = Some(fault);
    }

    /// Records that an engine failed the request. The fault is attributed later.
    pub(super) fn record_fault(&mut self, engine: &Arc<Engine>, leg: Leg, fault: Fault) {
        match fault {
            Fault::None => {}
            Fault::Engine => self.faults.add(engine, leg),
            Fault::Unresponsive => {
                self.faults.unresponsive += 1;
                self.faults.add(engine, leg);
                let source = self.faults.source;
                engine.update_health(|health, now, terms| health.unresponsive(leg, source, now, terms));
            }
            Fault::Draining => engine.update_health(|health, now, _| health.reported_draining(now)),
            Fault::Layout => {
                let Some(producer) = &self.attempts.last_prefill else { return };
                if self.shared.incompatible.record_mismatch(producer.url(), engine.url()) {
                    tracing::warn!(
                        parent: request_span!(&self.settlement.request), event = "engines_incompatible",
                        prefill = producer.authority(), decode = engine.authority(),
                        "decode engine cannot read the prefill engine's blocks: models, versions or caches differ"
                    );
                }
            }
        }
    }

    /// Records a completed prefill: engines that failed before were at fault.
    pub(super) fn record_prefill(&mut self, engine: &Arc<Engine>, after: Duration) {
        engine.responded(Leg::Prefill, after);
        engine.completed(Leg::Prefill);
        self.faults.confirm(engine, |pending| pending.leg == Leg::Prefill);
    }

    /// Records an early lease: prefill engines that failed before were at fault.
    pub(super) fn record_early_lease(&mut self, engine: &Arc<Engine>) {
        self.faults.confirm(engine, |pending| pending.leg == Leg::Prefill);
    }

    /// Records the head of a decode engine's good response.
    pub(super) fn record_acceptance(&mut self, engine: &Arc<Engine>, after: Duration) {
        engine.responded(Leg::Decode, after);
        self.faults.confirm(engine, |pending| pending.leg == Leg::Decode && !pending.after_head);
    }

    /// Records a decode engine's completed response.
    pub(crate) fn record_completion(&mut self, attempt: Attempt) {
        if let Some(tail) = self.prefill.tail.take() {
            tail.detach();
        }
        self.keep_turn();
        let engine = self.attempts.engine(attempt);
        engine.completed(Leg::Decode);
        self.faults.confirm(&engine, |pending| pending.leg == Leg::Decode);
        self.apply(Event::StreamEnded(attempt));
    }

    /// Records a refusal: the engine responds, and the request is at fault for the failures before.
    pub(super) fn record_refusal(&mut self, engine: &Arc<Engine>, leg: Leg, after: Duration) {
        engine.responded(leg, after);
        self.faults.pending.retain(|pending| pending.leg != leg);
    }

    /// Logs a refusal that only the operator can fix.
    pub(super) fn log_misconfigured(&self, engine: &Engine, leg: Leg, refusal: &Refusal) {
        if *refusal == Refusal::misconfigured() {
            if let Some(held_back) = self.shared.incompatible.misconfigured_log.allow() {
                tracing::error!(
                    parent: request_span!(&self.settlement.request), event = "engine_credentials_refused",
                    engine = engine.authority(), leg = leg.label(), held_back,
                    "engine refused the cluster secret or API key"
                );
            }
            self.shared.metrics.count_misconfigured(leg);
        }
        if *refusal == Refusal::wrong_model() {
            tracing::error!(
                parent: request_span!(&self.settlement.request), event = "engine_model_mismatched",
                engine = engine.authority(), leg = leg.label(),
                "engine does not serve its configured model"
            );
            self.shared.metrics.resilience.count_wrong_model(leg);
        }
    }
}
