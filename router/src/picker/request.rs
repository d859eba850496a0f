//! A request of a gateway: admitted by its head, and read once its body is complete.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::RequestId;
use baton_openai::{ApiError, RawBody};
use bytes::Bytes;
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH, HeaderMap};

use super::messages::PickHead;
use crate::admission::{AdmissionRequest, Claim, deadline};
use crate::auth::{self, Permit, TenantId};
use crate::client::address;
use crate::config::Priority;
use crate::engines::body_budget::{BodyReservation, BudgetShare};
use crate::exchange::client_request::{self, ClientRequest, RequestOwner};
use crate::message::features::Features;
use crate::message::path::{Dialect, Route};
use crate::message::payload::Payload;
use crate::message::{request_id, rewrite};
use crate::routing::disaggregation::DisaggregationInputs;
use crate::routing::explain::Explanation;
use crate::routing::models::Model;
use crate::state::generation::Generation;
use crate::state::shared::{InFlightGuard, Shared};

/// Groups requests without a tenant that share an id, for the fair queue.
const FAIRNESS_ID: &str = "x-gateway-inference-fairness-id";
/// Names a priority of `picker.objectives`.
const OBJECTIVE: &str = "x-gateway-inference-objective";
/// The model that replaces the body's.
const MODEL_REWRITE: &str = "x-gateway-model-name-rewrite";
/// The delay before a retry while the picker is full.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Where a request may go.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Target {
    /// Its body decides.
    Body(Dialect),
    /// An engine of this model, or of the first one.
    Model(Option<String>),
}

/// An admitted request. Dropping it ends it.
pub(super) struct PickRequest {
    pub shared: Arc<Shared>,
    pub generation: Arc<Generation>,
    pub id: RequestId,
    pub head: PickHead,
    target: Target,
    permit: Option<Permit>,
    /// The body's share of the budget of all bodies.
    body_bytes: Option<BodyReservation>,
    client: IpAddr,
    began: Instant,
    pub explanation: Option<Arc<Explanation>>,
    _in_flight: InFlightGuard,
}

/// The properties of a complete request that the choice reads.
pub(super) struct PickFeatures {
    pub model: Arc<Model>,
    pub features: Features,
    /// What the engine receives.
    pub body: Payload,
    /// The inputs of the disaggregation decision; `None`: the request has one leg.
    pub disaggregation: Option<DisaggregationInputs>,
    pub admission: AdmissionRequest,
    /// Hash of the sender.
    pub source: u64,
}

impl PickRequest {
    /// Admits a request by its head.
    ///
    /// # Errors
    /// The client's error, before any byte of the body is held.
    pub(super) async fn begin(
        shared: &Arc<Shared>,
        head: PickHead,
        gateway: IpAddr,
    ) -> Result<Self, ApiError> {
        let generation = shared.generation();
        let target = match Route::of(&head.method, &head.path)? {
            Route::Ask(dialect) => {
                client_request::is_json(&head.headers)?;
                Target::Body(dialect)
            }
            Route::Model(name) => Target::Model(Some(name.into_owned())),
            Route::Models | Route::Health | Route::Ready | Route::Version | Route::Options(_) => {
                Target::Model(None)
            }
        };
        let most = generation.config.limits.body_bytes;
        let declared =
            head.headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
        if declared.is_some_and(|bytes| bytes > most as u64) {
            return Err(ApiError::payload_too_large(most));
        }
        let permit = match &generation.auth {
            None => None,
            Some(auth) => {
                let tenants = &shared.limits.tenants;
                let credentials = match auth::bearer_of_api_key(&head.headers) {
                    None => auth.identify(&head.headers, &[], tenants)?,
                    Some(bearer) => {
                        auth.identify(&HeaderMap::from_iter([(AUTHORIZATION, bearer)]), &[], tenants)?
                    }
                };
                let identity = auth.check(credentials, tenants).await?;
                Some(Permit::begin(identity, tenants, auth.shared()).await?)
            }
        };
        let id = request_id::generate();
        let Some(in_flight) = shared.begin(generation.config.limits.in_flight, &id, shared.now()) else {
            return Err(ApiError::overloaded("the picker is full", RETRY_AFTER));
        };
        Ok(Self {
            client: address::behind(gateway, &head.headers, &generation.config.trusted_proxies),
            body_bytes: Some(shared.limits.request_bodies.new_reservation()),
            shared: Arc::clone(shared),
            generation,
            id,
            head,
            target,
            permit,
            began: Instant::now(),
            explanation: None,
            _in_flight: in_flight,
        })
    }

    /// Counts a piece of the body.
    ///
    /// # Errors
    /// 429: the budget of all bodies is exhausted.
    pub(super) fn hold(&mut self, bytes: usize) -> Result<(), ApiError> {
        let Some(reservation) = &mut self.body_bytes else { return Ok(()) };
        let total_bytes = self.generation.config.limits.body_bytes_total;
        BudgetShare { reservation, total_bytes }
            .take(bytes)
            .map_err(|_| ApiError::overloaded("the picker is busy with other large requests", RETRY_AFTER))
    }

    /// No engine receives the request.
    pub(super) fn return_tokens(&mut self) {
        self.permit.iter_mut().for_each(Permit::return_tokens);
    }

    /// The body was sent back.
    pub(super) fn drop_body(&mut self) {
        self.body_bytes = None;
    }

    /// Whether the client's credentials are meant for the picker, not for engines.
    pub(super) fn owns_credentials(&self) -> bool {
        self.permit.is_some()
    }

    /// Reads the complete request.
    ///
    /// # Errors
    /// The client's error.
    pub(super) async fn read(&mut self, body: Bytes) -> Result<PickFeatures, ApiError> {
        let bytes = body.len();
        let generation = Arc::clone(&self.generation);
        let dialect = match &self.target {
            Target::Body(dialect) => *dialect,
            Target::Model(name) => {
                let model = match name {
                    Some(name) => generation.models.named(Some(name))?,
                    None => generation.models.list().first().ok_or_else(|| ApiError::model_not_found(""))?,
                };
                self.check_access(model)?;
                let source = self.client_hash();
                return Ok(PickFeatures {
                    model: Arc::clone(model),
                    features: Features::of_tokens(0),
                    body: body.into(),
                    disaggregation: None,
                    admission: self.admission(model, bytes, 0, None),
                    source,
                });
            }
        };
        let body = match self.head.text(MODEL_REWRITE) {
            None => body,
            Some(name) => with_model(body, name, &generation)?,
        };
        let owner = generation.auth.as_deref().zip(self.permit.as_ref());
        let owner = owner.map(|(auth, permit)| RequestOwner { identity: &permit.identity, auth });
        let mut request =
            ClientRequest::read(dialect, body, &self.head.headers, &generation, owner.as_ref())?;
        self.check_access(&request.model)?;
        if let Some(permit) = &mut self.permit {
            permit.take_tokens(request.tokens).await?;
        }
        request.tokenize(&generation.models).await;
        // Responses pass the gateway unread, so an engine adds nothing that the client did not ask for.
        let owned = request.owned.without_usage();
        let body = rewrite::decode_body(&request.body, &owned, &request.model.name_in_bodies, None);
        let inputs = || request.disaggregation_inputs(Default::default(), None);
        Ok(PickFeatures {
            body,
            disaggregation: dialect.generates().then(inputs),
            admission: self.admission(&request.model, bytes, request.tokens, request.priority),
            source: request.source_hash(self.client),
            model: request.model,
            features: request.features,
        })
    }

    /// The path of the endpoint, for explanations.
    pub(super) fn endpoint(&self) -> &'static str {
        match self.target {
            Target::Body(dialect) => dialect.path(),
            Target::Model(_) => "/v1/models",
        }
    }

    fn check_access(&self, model: &Model) -> Result<(), ApiError> {
        let Some(permit) = &self.permit else { return Ok(()) };
        let means =
            |name: &str| self.generation.models.named(Some(name)).is_ok_and(|found| found.name == model.name);
        if permit.identity.may_use(means) { Ok(()) } else { Err(auth::forbidden(&model.name)) }
    }

    fn client_hash(&self) -> u64 {
        xxhash_rust::xxh3::xxh3_64(self.client.to_string().as_bytes())
    }

    fn admission(&self, model: &Model, bytes: usize, tokens: u64, priority: Option<i64>) -> AdmissionRequest {
        let identity = self.permit.as_ref().map(|permit| &permit.identity);
        let most = identity.map_or(Priority::High, |identity| identity.priority_max);
        let objective = self.head.text(OBJECTIVE);
        let objective = objective.and_then(|name| self.generation.config.picker.objectives.get(name));
        let priority = match objective {
            Some(objective) => (*objective).max(most),
            None => deadline::priority(&self.head.headers, priority, most),
        };
        let whole = model.bounds.request.and_then(|most| self.began.checked_add(most));
        let client = deadline::client_deadline(&self.head.headers, self.began);
        let request_deadline = [whole, client].into_iter().flatten().min();
        let longest = Instant::now() + Duration::from_millis(self.generation.config.queue.timeout_ms);
        let tenant = match identity {
            Some(identity) => Some(identity.tenant.id),
            None => self.head.text(FAIRNESS_ID).map(fairness_tenant),
        };
        AdmissionRequest {
            claim: Claim {
                tenant,
                weight: identity.map_or(1, |identity| identity.tenant.weight),
                priority,
                bytes,
                cost: tokens,
            },
            deadline: request_deadline.map_or(longest, |ends| ends.min(longest)),
            request_deadline,
            // The gateway sends the legs.
            response: deadline::ResponseDeadlines::default(),
        }
    }
}

/// A tenant of the queue for a fairness id. The ids come from clients, so they are hashed: two ids may share a turn.
/// Only requests without an identity have one, so it meets no tenant of `auth`.
fn fairness_tenant(id: &str) -> TenantId {
    let hash = xxhash_rust::xxh3::xxh3_64(id.as_bytes());
    TenantId((hash >> 32) as u32)
}

/// The body with another model.
fn with_model(body: Bytes, name: &str, generation: &Generation) -> Result<Bytes, ApiError> {
    let body = RawBody::any(body, &generation.parse_limits, &rewrite::ClientRules)?;
    let name = serde_json::to_string(name).expect("a string can be written as JSON");
    Ok(body.write(&[("model", name.as_bytes())], &[]).concat().into())
}
