//! Selects the engines of a request: chooses them, waits in the queue while they are full, and records the decisions.
//!
//! A request that waits for a prefill engine keeps its reserved decode engine. Two requests cannot wait for each
//! other's capacity, because no request waits for a prefill engine that also decodes for the same model: a waiting
//! request may hold that capacity. Such engines count as full at once.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::exchange::{Event, State};
use baton_openai::{ApiError, TimeLeft};

use super::ExchangeDriver;
use crate::admission::{AdmissionError, AdmissionRequest, Reservation, Unavailable, WaitOptions};
use crate::client::address;
use crate::client::disconnect::race;
use crate::client::session::{ClientGone, Session};
use crate::config::Fallback;
use crate::engines::http::Engine;
use crate::exchange::client_request::ClientRequest;
use crate::legs::request_error::RequestError;
use crate::message::features::RoutingFeatures;
use crate::metrics::Leg;
use crate::metrics::routing::DisaggregationReason;
use crate::routing::disaggregation::{self, DisaggregationInputs};
use crate::routing::models::Model;
use crate::routing::pool::{CapacityRule, Detail, EngineReservation, Pool, another_first};

/// The result of waiting for an engine.
pub(super) enum EngineSelection {
    Engine(EngineReservation),
    /// No engine can be used, however long the wait. [`Unavailable::Full`]: the remaining engines are full.
    Unavailable(Unavailable),
    /// All engines are full, and the wait was too long.
    Busy(ApiError),
}

/// The reserved engine and the admission of one request.
#[derive(Default)]
pub(super) struct Selection {
    /// The decode engine, reserved before a prefill is sent.
    pub reserved: Option<EngineReservation>,
    /// The prefill engine, if it is reserved before the order of the legs is known, and why it prefills. The decision is
    /// made once, because the reservation itself counts as a prefill in flight.
    pub reserved_prefill: Option<(EngineReservation, DisaggregationReason)>,
    /// Set by [`ExchangeDriver::reserve`].
    admission: Option<AdmissionRequest>,
}

impl ExchangeDriver {
    /// Reserves a decode engine before any prefill attempt; waits in the model's queue while all are full.
    ///
    /// # Errors
    /// No decode engine is available.
    pub(crate) async fn reserve(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
        admission: AdmissionRequest,
    ) -> Result<(), RequestError> {
        self.faults.source =
            request.source_hash(address::of(session, &self.generation.config.trusted_proxies));
        self.selection.admission = Some(admission);
        self.settlement.model = Some(Arc::clone(&request.model));
        self.settlement.authorization = request.authorization.clone();
        let find = |model: &Model, detail| {
            let without_partner = match request.dialect.generates() {
                true => model.decode.without_partner(&model.prefill),
                false => Vec::new(),
            };
            self.search(Leg::Decode, &model.decode, &request.routing_features(), detail, |choose| {
                match without_partner.is_empty() {
                    true => choose(&[]),
                    false => another_first(&[&without_partner, &[]], choose),
                }
            })
        };
        match self.wait(session, Leg::Decode, admission, WaitOptions::default(), find).await {
            Err(ClientGone) => Err(self.cancel()),
            Ok(Ok(reserved)) => {
                self.selection.reserved = Some(reserved);
                Ok(())
            }
            Ok(Err(AdmissionError { cause, error })) => {
                self.apply(match cause {
                    Unavailable::Full => Event::NotAdmitted,
                    Unavailable::NoEngine => Event::NoEngine,
                });
                Err(error.into())
            }
        }
    }

    /// A decode engine outside `tried`, after failures or for a recomputation. The request may wait in the queue
    /// repeatedly, each time up to the general limit, because its first wait has established its turn. With a finished
    /// prefill it precedes requests that had no turn yet.
    pub(super) async fn select_decode(
        &self,
        session: &mut Session,
        request: &ClientRequest,
        tried: &[Arc<Engine>],
    ) -> Result<EngineSelection, ClientGone> {
        let is_ready = matches!(self.exchange(|exchange| exchange.state()), State::ReadyToDecode(Some(_)));
        let compatibility = if is_ready { self.prefill.compatibility } else { None };
        let find = |model: &Model, detail| {
            let features = RoutingFeatures { compatibility, ..request.routing_features() };
            match self.search(Leg::Decode, &model.decode, &features, detail, |choose| choose(tried)) {
                Err(Unavailable::Full) => Err(Unavailable::Full),
                chosen => Ok(chosen),
            }
        };
        let excluded = self.model.decode.excluded_ids(tried, compatibility);
        let options = WaitOptions { excluded, ahead: is_ready };
        self.select(session, Leg::Decode, self.renewed_admission(), options, find).await
    }

    /// A prefill engine: preferably neither the decode engine nor one of the engines tried before.
    pub(super) async fn select_prefill(
        &self,
        session: &mut Session,
        request: &ClientRequest,
        tried: &[Arc<Engine>],
    ) -> Result<EngineSelection, ClientGone> {
        let mut features = request.routing_features();
        self.selection.reserved.iter().for_each(|decode| decode.require_partner(&mut features));
        let decode = self.selection.reserved.as_ref().map(EngineReservation::engine);
        let before: Vec<_> = tried.iter().chain(&self.attempts.last_prefill).cloned().collect();
        let mut others: Vec<_> = before.iter().chain(decode).cloned().collect();
        if decode.is_none() {
            others.extend(self.model.prefill.without_partner(&self.model.decode));
        }
        let find = |model: &Model, detail| {
            self.search(Leg::Prefill, &model.prefill, &features, detail, |choose| match choose(&others) {
                Err(Unavailable::Full) if model.prefill.will_have_room(&features, &others, &model.decode) => {
                    Err(Unavailable::Full)
                }
                // After a failure with an open lease, no engine is tried twice if a decode engine may compute the
                // prompt.
                Err(_)
                    if self.prefill.failed_after_lease
                        && request.model.handoff.fallback == Fallback::Aggregate =>
                {
                    Ok(Err(Unavailable::NoEngine))
                }
                Err(_) if request.model.handoff.repeats_prefill => Ok(choose(&[])),
                Err(_) => Ok(another_first(&[&before, tried], choose)),
                chosen => Ok(chosen),
            })
        };
        let is_first = self.attempts.last_prefill.is_none() && self.retry.is_first_round();
        let admission = if is_first { self.admission() } else { self.renewed_admission() };
        let excluded = self.model.prefill.excluded_ids(&others, features.compatibility);
        let options = WaitOptions { excluded, ahead: false };
        self.select(session, Leg::Prefill, admission, options, find).await
    }

    /// Replaces the reserved decode engine if no prefill engine fits it and one fits another. Returns whether it did.
    pub(super) async fn reselect_decode(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
        failed: &[Arc<Engine>],
    ) -> Result<bool, RequestError> {
        let mut tried = self.model.decode.without_partner(&self.model.prefill);
        let is_without =
            |reserved: &EngineReservation| tried.iter().any(|engine| Arc::ptr_eq(engine, reserved.engine()));
        if !self.selection.reserved.as_ref().is_some_and(is_without) {
            return Ok(false);
        }
        tried.extend_from_slice(failed);
        match self.select_decode(session, request, &tried).await {
            Err(ClientGone) => Err(self.cancel()),
            Ok(EngineSelection::Engine(reserved)) => {
                self.selection.reserved = Some(reserved);
                Ok(true)
            }
            Ok(EngineSelection::Unavailable(_)) => Ok(false),
            Ok(EngineSelection::Busy(busy)) => Err(self.refuse_busy(busy)),
        }
    }

    /// The time that is left for the response.
    pub(super) fn time_left(&self) -> TimeLeft {
        // Most requests have no deadline, and need no time.
        let response = self.selection.admission.as_ref().map(|admission| &admission.response);
        let limited = response.filter(|response| response.first().is_some());
        limited.map_or_else(TimeLeft::default, |response| response.left(Instant::now()))
    }

    fn admission(&self) -> AdmissionRequest {
        self.selection.admission.expect("a decode engine is reserved before anything else")
    }

    /// The admission for a wait after attempts at engines, whose time does not count as waiting.
    fn renewed_admission(&self) -> AdmissionRequest {
        let admission = self.admission();
        let most = Instant::now() + Duration::from_millis(self.generation.config.queue.timeout_ms);
        let deadline = admission.request_deadline.map_or(most, |ends| ends.min(most));
        AdmissionRequest { deadline, ..admission }
    }

    async fn select(
        &self,
        session: &mut Session,
        leg: Leg,
        admission: AdmissionRequest,
        options: WaitOptions,
        find: impl FnMut(&Model, Detail) -> Result<Result<EngineReservation, Unavailable>, Unavailable>,
    ) -> Result<EngineSelection, ClientGone> {
        Ok(match self.wait(session, leg, admission, options, find).await? {
            Ok(Ok(reserved)) => EngineSelection::Engine(reserved),
            Ok(Err(unavailable)) => EngineSelection::Unavailable(unavailable),
            Err(AdmissionError { error, .. }) => EngineSelection::Busy(error),
        })
    }

    /// Waits in the queue of a leg until `find` returns a result, usually at once.
    async fn wait<T: Reservation>(
        &self,
        session: &mut Session,
        leg: Leg,
        admission: AdmissionRequest,
        options: WaitOptions,
        mut find: impl FnMut(&Model, Detail) -> Result<T, Unavailable>,
    ) -> Result<Result<T, AdmissionError>, ClientGone> {
        let mut waits = false;
        let find_again = || {
            if !std::mem::replace(&mut waits, true) {
                return find(&self.model, Detail::All);
            }
            // Waiting requests can use engines added meanwhile. Later ones are recorded only with an engine.
            let now = self.shared.generation();
            find(now.models.named(Some(&self.model.name)).unwrap_or(&self.model), Detail::Choices)
        };
        let queue = self.model.queue(leg);
        let place = queue.enter(admission, options, &self.generation.config.queue, find_again);
        race(session, pin!(place)).await
    }

    /// Searches an engine for a leg without waiting. `choose` makes one or more choices, each with the engines to
    /// exclude. Only the last decision is recorded, because the earlier ones exclude the same engines.
    fn search<T>(
        &self,
        leg: Leg,
        pool: &Pool,
        features: &RoutingFeatures<'_>,
        detail: Detail,
        choose: impl FnOnce(&mut dyn FnMut(&[Arc<Engine>]) -> Result<EngineReservation, Unavailable>) -> T,
    ) -> T {
        let detail = if self.explanation.is_some() { detail } else { Detail::None };
        let mut last = None;
        let found = choose(&mut |tried| {
            let (reserved, decision) = pool.reserve(features, tried, CapacityRule::Needed, detail);
            last = decision;
            reserved
        });
        if let (Some(explanation), Some(decision)) = (&self.explanation, last) {
            explanation.record_choice(leg, decision, self.shared.now());
        }
        found
    }

    /// Reserves a decode engine for the rest of a response without waiting: one outside `tried` if possible. If all
    /// others have failed, one of them may have recovered; the engine that broke off is the last choice. The rest comes
    /// from an engine of the same revision, where the model has a label for it.
    pub(super) fn reserve_decode_for_resume(
        &self,
        request: &ClientRequest,
        failed: &Arc<Engine>,
        tried: &[Arc<Engine>],
    ) -> Option<EngineReservation> {
        let decode = &request.model.decode;
        let compatibility = decode.compatibility_of(failed);
        let features = RoutingFeatures { compatibility, ..request.routing_features() };
        self.search(Leg::Decode, decode, &features, Detail::All, |choose| {
            match choose(tried).or_else(|_| choose(std::slice::from_ref(failed))) {
                Err(Unavailable::NoEngine) => choose(&[]).ok(),
                reserved => reserved.ok(),
            }
        })
    }

    /// Whether another engine would prefill, without a record of the decision.
    pub(super) fn would_disaggregate(&self, request: &ClientRequest) -> Option<DisaggregationReason> {
        Some(self.disaggregation_reason(request, &self.disaggregation_inputs(request)))
            .filter(|reason| reason.is_remote())
    }

    fn disaggregation_reason(
        &self,
        request: &ClientRequest,
        inputs: &DisaggregationInputs,
    ) -> DisaggregationReason {
        match &self.selection.reserved_prefill {
            Some((_, reason)) => *reason,
            None => disaggregation::decide(&request.model.disaggregate, inputs),
        }
    }

    fn disaggregation_inputs(&self, request: &ClientRequest) -> DisaggregationInputs {
        let reserved = self.selection.reserved.as_ref();
        let cached = reserved.map(|reserved| reserved.cached).unwrap_or_default();
        request.disaggregation_inputs(cached, reserved.and_then(|reserved| reserved.member.compatibility()))
    }

    /// Decides whether another engine prefills, given the reserved decode engine.
    pub(super) fn decide_disaggregation(&self, request: &ClientRequest) -> DisaggregationReason {
        let inputs = self.disaggregation_inputs(request);
        let reason = self.disaggregation_reason(request, &inputs);
        if let Some(explanation) = &self.explanation {
            explanation.record_disaggregation(reason, inputs, self.shared.now());
        }
        reason
    }
}
