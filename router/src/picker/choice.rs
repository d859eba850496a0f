//! The choice of engines for one request: admission, policies and health as in the router, without any leg.
//!
//! The decode engine is the destination. If a prefill elsewhere is worth it, the prefill engine goes to the routing
//! sidecar beside the decode engine in a header.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_openai::ApiError;
use bytes::Bytes;

use super::messages::{Endpoints, Subset};
use super::request::{PickFeatures, PickRequest};
use crate::admission::{AdmissionError, Lane, Reservation, Unavailable, WaitOptions};
use crate::config::Fallback;
use crate::engines::http::Engine;
use crate::message::features::RoutingFeatures;
use crate::message::payload::Payload;
use crate::message::request_id;
use crate::metrics::Leg;
use crate::metrics::routing::DisaggregationReason;
use crate::routing::disaggregation;
use crate::routing::models::Model;
use crate::routing::pool::{CapacityRule, Detail, EngineReservation, Pool, another_first};

/// `Retry-After` of a request without a usable engine, as in the queue.
const RETRY_AFTER: Duration = Duration::from_secs(2);

/// The engines of one request. The request counts as in flight there until this is dropped.
pub(super) struct PickedEngines {
    pub endpoints: Endpoints,
    pub decode: EngineReservation,
    /// Dropped with the response's head: the prefill is over then.
    pub prefill: Option<EngineReservation>,
    /// Hash of the sender, for failures.
    pub source: u64,
    pub chosen_at: Instant,
}

/// The result of a wait for a prefill engine that need not have one.
struct MaybeReservation(Result<EngineReservation, Unavailable>);

impl Reservation for MaybeReservation {
    fn has_engine(&self) -> bool {
        self.0.is_ok()
    }
}

impl PickRequest {
    /// Chooses the engines, and waits in the model's queue while all are full.
    ///
    /// # Errors
    /// The client's error: 4xx for the request itself, 429 if engines are full, 503 if none is usable.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the queue. Nothing stays reserved.
    pub(super) async fn choose(&mut self, body: Bytes) -> Result<(PickedEngines, Payload), ApiError> {
        if self.head.subset.as_ref().is_some_and(Subset::is_empty) {
            return Err(ApiError::unavailable("the gateway names no endpoint for this request", RETRY_AFTER));
        }
        let mut wanted = self.read(body).await?;
        let client_id = request_id::client_id(&self.head.headers);
        let explanations = &self.shared.explanations;
        self.explanation = explanations.begin(
            &self.id,
            client_id.as_ref(),
            self.endpoint(),
            &wanted.model.name,
            self.shared.now(),
        );
        let decode = self.reserve_decode(&wanted).await?;
        let prefill = self.reserve_prefill(&mut wanted, &decode).await?;
        let endpoints = self.endpoints(&wanted, &decode, prefill.as_ref()).await?;
        let choice =
            PickedEngines { endpoints, decode, prefill, source: wanted.source, chosen_at: Instant::now() };
        Ok((choice, wanted.body))
    }

    async fn reserve_decode(&self, wanted: &PickFeatures) -> Result<EngineReservation, ApiError> {
        let features = wanted.features.routing_features();
        let excluded = self.outside_subset(&wanted.model.decode).await;
        let find = |model: &Model, detail| {
            let reserve = |excluded: &[Arc<Engine>]| {
                self.reserve(Leg::Decode, &model.decode, &features, excluded, detail)
            };
            let mut without = match wanted.disaggregation {
                Some(_) => model.decode.without_partner(&model.prefill),
                None => Vec::new(),
            };
            if without.is_empty() {
                return reserve(&excluded);
            }
            without.extend_from_slice(&excluded);
            another_first(&[&without, &excluded], reserve)
        };
        let lane = wanted.model.decode.excluded_ids(&excluded, None);
        let reserved = self.wait(Leg::Decode, wanted, lane, find).await;
        let reserved = reserved.map_err(|AdmissionError { error, .. }| error)?;
        let asks_for_cached = self.head.text("prefer") == Some("if-available");
        if asks_for_cached && wanted.disaggregation.is_some() && reserved.cached.share(&features) == 0.0 {
            let mut error = ApiError::invalid("prefer", "no engine has cached a part of this prompt");
            error.status = 412;
            return Err(error);
        }
        Ok(reserved)
    }

    /// A prefill engine, if a prefill elsewhere is worth it and one is available.
    async fn reserve_prefill(
        &self,
        wanted: &mut PickFeatures,
        decode: &EngineReservation,
    ) -> Result<Option<EngineReservation>, ApiError> {
        let Some(inputs) = &mut wanted.disaggregation else { return Ok(None) };
        let mut features = wanted.features.routing_features();
        inputs.cached_share = decode.cached.share(&features);
        inputs.prefill_in_flight = wanted.model.prefill.least_in_flight(decode.member.compatibility());
        let reason = disaggregation::decide(&wanted.model.disaggregate, inputs);
        if let Some(explanation) = &self.explanation {
            explanation.record_disaggregation(reason, *inputs, self.shared.now());
        }
        let routing = &self.shared.metrics.routing;
        if !reason.is_remote() {
            routing.count_disaggregation(reason);
            return Ok(None);
        }
        decode.require_partner(&mut features);
        let mut excluded = self.outside_subset(&wanted.model.prefill).await;
        // A sidecar gains nothing by a handoff from its own engine.
        excluded.push(Arc::clone(decode.engine()));
        let find = |model: &Model, detail| match self.reserve(
            Leg::Prefill,
            &model.prefill,
            &features,
            &excluded,
            detail,
        ) {
            Err(Unavailable::Full) if model.prefill.will_have_room(&features, &excluded, &model.decode) => {
                Err(Unavailable::Full)
            }
            found => Ok(MaybeReservation(found)),
        };
        let lane = wanted.model.prefill.excluded_ids(&excluded, features.compatibility);
        let error = match self.wait(Leg::Prefill, wanted, lane, find).await {
            Ok(MaybeReservation(Ok(reserved))) => {
                routing.count_disaggregation(reason);
                return Ok(Some(reserved));
            }
            Ok(MaybeReservation(Err(_))) => {
                ApiError::unavailable("no prefill engine can serve this model at the moment", RETRY_AFTER)
            }
            Err(AdmissionError { cause: Unavailable::Full, error }) => return Err(error),
            Err(AdmissionError { cause: Unavailable::NoEngine, error }) => error,
        };
        if wanted.model.handoff.fallback == Fallback::None {
            return Err(error);
        }
        routing.count_disaggregation(DisaggregationReason::FellBack);
        Ok(None)
    }

    /// Waits in the queue of a leg until `find` returns a result, usually at once.
    async fn wait<T: Reservation>(
        &self,
        leg: Leg,
        wanted: &PickFeatures,
        excluded: Lane,
        mut find: impl FnMut(&Model, Detail) -> Result<T, Unavailable>,
    ) -> Result<T, AdmissionError> {
        let mut waits = false;
        let find_again = || {
            // Engines that were added meanwhile are not compared with the subset.
            if !std::mem::replace(&mut waits, true) || self.head.subset.is_some() {
                return find(&wanted.model, Detail::All);
            }
            let now = self.shared.generation();
            find(now.models.named(Some(&wanted.model.name)).unwrap_or(&wanted.model), Detail::Choices)
        };
        let options = WaitOptions { excluded, ahead: false };
        let queue = wanted.model.queue(leg);
        queue.enter(wanted.admission, options, &self.generation.config.queue, find_again).await
    }

    fn reserve(
        &self,
        leg: Leg,
        pool: &Pool,
        features: &RoutingFeatures<'_>,
        excluded: &[Arc<Engine>],
        detail: Detail,
    ) -> Result<EngineReservation, Unavailable> {
        let detail = if self.explanation.is_some() { detail } else { Detail::None };
        let (reserved, decision) = pool.reserve(features, excluded, CapacityRule::Needed, detail);
        if let (Some(explanation), Some(decision)) = (&self.explanation, decision) {
            explanation.record_choice(leg, decision, self.shared.now());
        }
        reserved
    }

    /// The engines that the gateway's subset does not contain.
    async fn outside_subset(&self, pool: &Pool) -> Vec<Arc<Engine>> {
        let Some(subset) = &self.head.subset else { return Vec::new() };
        let mut outside = Vec::new();
        for engine in pool.engines() {
            if !engine.socket_addr().await.is_some_and(|address| subset.contains(address)) {
                outside.push(engine);
            }
        }
        outside
    }

    async fn endpoints(
        &self,
        wanted: &PickFeatures,
        decode: &EngineReservation,
        prefill: Option<&EngineReservation>,
    ) -> Result<Endpoints, ApiError> {
        let mut destination = address_of(decode.engine()).await?;
        let rank = decode.member.rank;
        if self.generation.config.picker.fallbacks > 0 && rank.is_none() {
            let mut excluded = self.outside_subset(&wanted.model.decode).await;
            excluded.push(Arc::clone(decode.engine()));
            for _ in 0..self.generation.config.picker.fallbacks {
                let next = wanted.model.decode.dry_run(&wanted.features.routing_features(), &excluded).chosen;
                let Some(next) = next else { break };
                if let Ok(address) = address_of(&next.engine).await {
                    destination = format!("{destination},{address}");
                }
                excluded.push(Arc::clone(&next.engine));
            }
        }
        let prefiller = match prefill {
            Some(prefill) => Some(address_of(prefill.engine()).await?),
            None => None,
        };
        let without_authorization = self.owns_credentials();
        let of_router = self.head.names_of_router();
        Ok(Endpoints { destination, prefiller, rank, without_authorization, of_router })
    }
}

/// The address of an engine for the gateway, which resolves no names.
async fn address_of(engine: &Arc<Engine>) -> Result<String, ApiError> {
    let address = engine.socket_addr().await.map(|address| address.to_string());
    address.ok_or_else(|| ApiError::unavailable("an engine's name cannot be resolved", RETRY_AFTER))
}
