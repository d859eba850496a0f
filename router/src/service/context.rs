//! The context of one request, and the accounting at its end.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use baton_connector::exchange::{Event, Outcome, Phase};
use baton_connector::{RequestId, Time};
use baton_openai::ApiError;
use hyper::header::{HeaderMap, HeaderValue};

use super::response::CommonHeaders;
use crate::admission::deadline;
use crate::auth::{self, Identity, Permit};
use crate::client::address;
use crate::client::session::Session;
use crate::engines::body_budget::BodyReservation;
use crate::envelope::Envelope;
use crate::exchange::client_request::{ClientRequest, RequestOwner};
use crate::exchange::driver::ExchangeDriver;
use crate::message::trace_context::TraceContext;
use crate::message::{random, request_id};
use crate::metrics::{Leg, RequestOutcome};
use crate::observe::finished_request::{FinishedRequest, LoggedHead};
use crate::state::generation::Generation;
use crate::state::shared::{InFlightGuard, Shared};

/// One request's context. Dropping it settles the request.
pub(super) struct RequestContext {
    pub(super) shared: Arc<Shared>,
    pub(super) begun: Time,
    /// The configuration in effect when the request began.
    pub(super) generation: Arc<Generation>,
    pub(super) ids: RequestIds,
    /// Dropped before the request leaves the table of requests in flight: its load and its retry permit end first.
    pub(super) driver: Option<ExchangeDriver>,
    pub(super) client: ClientShare,
    pub(super) accounting: Accounting,
}

/// The ids of a request, and the headers of its response that contain them.
pub(super) struct RequestIds {
    pub(super) id: RequestId,
    /// The client's own id, if its form is valid.
    pub(super) client_id: Option<HeaderValue>,
    /// Headers of every response: the id (the client's own, if valid), the client's limits, those for browsers.
    pub(super) common_headers: CommonHeaders,
}

/// The request's share of its client's limits and of the router's.
#[derive(Default)]
pub(super) struct ClientShare {
    /// With `auth`: the client's identity and its place within its limits.
    pub(super) permit: Option<Permit>,
    /// Estimated tokens of the prompt.
    pub(super) prompt_tokens: u64,
    /// The body's share of the budget of all bodies.
    pub(super) body_bytes: Option<BodyReservation>,
    pub(super) in_flight: Option<InFlightGuard>,
}

/// The values that metrics, traces and the access log record at the end of the request.
#[derive(Default)]
pub(super) struct Accounting {
    pub(super) status: u16,
    pub(super) trace: TraceContext,
    /// The fields of the head that observers record; `None` without observers.
    pub(super) head: Option<LoggedHead>,
    pub(super) request_bytes: u64,
    pub(super) response_bytes: u64,
    /// One engine answers the request without an exchange of two legs.
    pub(super) passed: bool,
    /// The end is recorded.
    is_counted: bool,
}

impl RequestContext {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        let id = request_id::generate();
        let echoed = HeaderValue::from_str(id.as_str()).expect("a request id is printable ASCII");
        let common_headers = CommonHeaders {
            id: echoed,
            envelope: Envelope::default(),
            limits: Vec::new(),
            cors: Vec::new(),
            failed_leg: None,
        };
        Self {
            begun: shared.now(),
            generation: shared.generation(),
            shared: Arc::clone(shared),
            ids: RequestIds { id, client_id: None, common_headers },
            driver: None,
            client: ClientShare::default(),
            accounting: Accounting::default(),
        }
    }

    /// The start of the request, as an [`Instant`] for deadlines.
    pub(super) fn began(&self) -> Instant {
        self.shared.instant(self.begun)
    }

    /// The deadline of one step: `step_ms` from now, but no later than the end of the whole request.
    pub(super) fn until(&self, headers: &HeaderMap, request: Option<Duration>, step_ms: u64) -> Instant {
        let step = Instant::now() + Duration::from_millis(step_ms);
        self.ends(headers, request).map_or(step, |ends| ends.min(step))
    }

    /// The deadline of the whole request: its time limit or its client's deadline, whichever is earlier.
    pub(super) fn ends(&self, headers: &HeaderMap, request: Option<Duration>) -> Option<Instant> {
        let began = self.began();
        let whole = request.and_then(|most| began.checked_add(most));
        [whole, deadline::client_deadline(headers, began)].into_iter().flatten().min()
    }

    /// Reads the fields of the head that later steps need.
    pub(super) fn read_head(&mut self, session: &Session) {
        let (head, config) = (session.req_header(), &self.generation.config);
        let observers = &self.generation.observers;
        let draw = |bytes: &mut [u8; 24]| {
            bytes[..16].copy_from_slice(&random::id());
            bytes[16..].copy_from_slice(&random::id()[..8]);
        };
        self.accounting.trace = TraceContext::begin(&head.headers, observers.sample_ratio(), draw);
        if observers.has_any() {
            let has_client = config.access_log.client;
            let client = has_client.then(|| address::of(session, &config.trusted_proxies));
            self.accounting.head = Some(LoggedHead::of(head, client));
        }
    }

    /// Checks that an authenticated client may use the model, and takes the request's tokens; with `auth` only.
    pub(super) async fn limit(&mut self, request: &ClientRequest) -> Result<(), ApiError> {
        let Some(permit) = &mut self.client.permit else { return Ok(()) };
        if !may_use(Some(&permit.identity), &self.generation, &request.model.name) {
            return Err(auth::forbidden(&request.model.name));
        }
        self.client.prompt_tokens = request.prompt_tokens;
        let taken = permit.take_tokens(request.tokens).await;
        self.ids.common_headers.limits = permit.headers();
        taken
    }

    /// The owner of the request; with `auth` only.
    pub(super) fn request_owner(&self) -> Option<RequestOwner<'_>> {
        let (auth, permit) = (self.generation.auth.as_deref()?, self.client.permit.as_ref()?);
        Some(RequestOwner { identity: &permit.identity, auth })
    }

    /// Counts the request once, whatever ended it, and notifies the observers.
    pub(super) fn end(&mut self) {
        if std::mem::replace(&mut self.accounting.is_counted, true) {
            return;
        }
        // The router's own responses, such as `/health`, are frequent and not recorded.
        let Some(end) = self.count() else { return };
        self.charge();
        let Some(head) = self.accounting.head.take() else { return };
        let driver = self.driver.as_ref();
        let progress = driver.map(|driver| &driver.progress);
        self.generation.observers.notify(FinishedRequest {
            head,
            id: self.ids.id.clone(),
            echoed: self.ids.common_headers.id.clone(),
            trace: self.accounting.trace.clone(),
            model: driver.map(|driver| Arc::clone(&driver.model)),
            tenant: self.client.permit.as_ref().map(|permit| Arc::clone(&permit.identity.tenant.name)),
            end,
            status: self.accounting.status,
            begun: self.begun,
            over: self.shared.now(),
            at: SystemTime::now(),
            line: driver.map(ExchangeDriver::timeline).unwrap_or_default(),
            engines: driver
                .map_or([None, None], |d| [Leg::Prefill, Leg::Decode].map(|leg| d.last_engine(leg).cloned())),
            attempts: progress.map_or([0, 0], |progress| progress.attempts),
            request_bytes: self.accounting.request_bytes,
            response_bytes: self.accounting.response_bytes,
            streamed: progress.is_some_and(|progress| progress.streamed),
            usage_scan: progress.map(|progress| progress.usage_scan).unwrap_or_default(),
        });
    }

    /// Counts the tenant's tokens, and charges the response's actual cost beyond the tokens already taken.
    fn charge(&mut self) {
        let (Some(permit), Some(driver)) = (&mut self.client.permit, &self.driver) else { return };
        let usage_scan = &driver.progress.usage_scan;
        permit.identity.tenant.counters.count_tokens(usage_scan.known_tokens());
        if let Some(cost) = usage_scan.cost(self.client.prompt_tokens) {
            permit.settle_cost(cost);
        }
    }

    /// How the request ended; `None` for the router's own responses, such as `/health`.
    fn count(&mut self) -> Option<RequestOutcome> {
        let unknown = &self.shared.metrics.requests.unknown;
        match &mut self.driver {
            Some(driver) => {
                // Has no effect if the exchange has ended.
                driver.apply(Event::Dropped);
                let outcome = driver.outcome().unwrap_or(Outcome::Dropped(Phase::Queue));
                let end = match outcome {
                    Outcome::Completed if self.accounting.passed => RequestOutcome::Passed,
                    outcome => RequestOutcome::Exchange(outcome),
                };
                let line = driver.timeline();
                driver.progress.record_end(
                    &driver.model.metrics,
                    end,
                    self.accounting.status,
                    &line,
                    self.begun,
                );
                Some(end)
            }
            None => {
                let end = match self.accounting.status {
                    0 => RequestOutcome::Exchange(Outcome::Dropped(Phase::Queue)),
                    499 => RequestOutcome::Exchange(Outcome::ClientGone(Phase::Queue)),
                    400.. => RequestOutcome::Rejected,
                    _ => return None,
                };
                if self.accounting.status == 499 {
                    self.shared.metrics.requests.count_disconnect(Phase::Queue);
                }
                unknown.count_end(end, self.accounting.status);
                Some(end)
            }
        }
    }
}

impl Drop for RequestContext {
    fn drop(&mut self) {
        self.end();
    }
}

/// Whether the client may use the model of this name; always without `auth`.
pub(super) fn may_use(identity: Option<&Identity>, generation: &Generation, model: &str) -> bool {
    let means = |name: &str| generation.models.named(Some(name)).is_ok_and(|found| found.name == model);
    identity.is_none_or(|identity| identity.may_use(means))
}
