//! Metrics by engine address: attempts, failures and times. The series of an engine end with its last reference.

use std::sync::{Arc, OnceLock};

use baton_connector::exchange::Failure;

use super::legs::Leg;
use super::registry::{Counter, Family, Histogram, Registry};
use super::requests::FIRST_TOKEN;

/// Seconds, from loopback to the longest connect timeout.
const CONNECT: &[f64] =
    &[0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 60.0];

static REQUESTS: Family =
    Family::counter("baton_router_engine_requests_total", &["engine", "leg"], "Attempts at an engine.")
        .of_engines(1);
static ERRORS: Family = Family::counter(
    "baton_router_engine_errors_total",
    &["engine", "leg", "reason"],
    "Failed attempts: `unreachable`, `answered` (error response), `broken` (connection broken), `silent` (no response in \
     time), `unusable` (invalid handoff), `refused` (request at fault), `died` (failed during the response).",
)
.of_engines(AttemptFailure::ALL.len());
static RESPONSE_SECONDS: Family = Family::histogram(
    "baton_router_engine_response_seconds",
    &["engine", "leg"],
    FIRST_TOKEN,
    "From an attempt to a prefill engine's response, or to the head of a decode engine's successful response.",
)
.of_engines(1);
static CONNECT_SECONDS: Family = Family::histogram(
    "baton_router_engine_connect_seconds",
    &["engine"],
    CONNECT,
    "Time to open a connection to an engine.",
)
.of_engines(1);
static REPLAYS: Family = Family::counter(
    "baton_router_engine_replays_total",
    &["engine"],
    "Requests sent again on a new connection, because the engine closed the kept connection before its first byte. Such \
     a request is one attempt.",
)
.of_engines(1);
/// Looked up at each scrape.
pub(crate) static IN_FLIGHT: Family = Family::gauge(
    "baton_router_engine_requests_in_flight",
    &["engine"],
    "Requests of this router in flight at an engine.",
);
/// Looked up at each scrape.
pub(crate) static POOL: Family =
    Family::gauge("baton_router_pool_engines", &["model", "leg"], "Engines of a pool.");
/// Looked up at each scrape.
pub(crate) static READY: Family = Family::gauge(
    "baton_router_pool_ready_engines",
    &["model", "leg"],
    "Engines of a pool that can be chosen.",
);

pub(super) static FAMILIES: &[&Family] =
    &[&REQUESTS, &ERRORS, &RESPONSE_SECONDS, &CONNECT_SECONDS, &REPLAYS, &IN_FLIGHT, &POOL, &READY];

/// How an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttemptFailure {
    /// The engine did not receive the request.
    Unreachable,
    /// The engine returned an error.
    Answered,
    /// The connection broke.
    Broken,
    /// The engine did not respond in time.
    Silent,
    /// The engine's handoff is invalid.
    Unusable,
    /// The engine refused the request itself.
    Refused,
    /// The engine failed during its response.
    Died,
}

impl AttemptFailure {
    const ALL: [Self; 7] = [
        Self::Unreachable,
        Self::Answered,
        Self::Broken,
        Self::Silent,
        Self::Unusable,
        Self::Refused,
        Self::Died,
    ];

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Answered => "answered",
            Self::Broken => "broken",
            Self::Silent => "silent",
            Self::Unusable => "unusable",
            Self::Refused => "refused",
            Self::Died => "died",
        }
    }
}

impl From<Failure> for AttemptFailure {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotReached => Self::Unreachable,
            Failure::Answered => Self::Answered,
            Failure::Unknown => Self::Broken,
            Failure::Unusable(_) => Self::Unusable,
        }
    }
}

/// The metrics of one engine. The series of a leg begin with its first attempt: most engines serve one leg.
#[derive(Debug)]
pub(crate) struct EngineMetrics {
    registry: Arc<Registry>,
    engine: String,
    legs: [OnceLock<EngineLegMetrics>; 2],
    pub connect: Histogram,
    /// Created at the first replay: most engines never have one.
    replays: OnceLock<Counter>,
}

/// The metrics of one engine in one leg.
#[derive(Debug)]
pub(crate) struct EngineLegMetrics {
    pub requests: Counter,
    pub response: Histogram,
    errors: [Counter; AttemptFailure::ALL.len()],
}

impl EngineMetrics {
    pub(crate) fn new(registry: &Arc<Registry>, engine: &str) -> Self {
        Self {
            registry: Arc::clone(registry),
            engine: engine.to_owned(),
            legs: Default::default(),
            connect: registry.histogram(&CONNECT_SECONDS, &[engine]),
            replays: OnceLock::new(),
        }
    }

    /// Counts a request that is sent again because its idle connection was closed.
    pub(crate) fn count_replay(&self) {
        self.replays.get_or_init(|| self.registry.counter(&REPLAYS, &[self.engine.as_str()])).increment(1);
    }

    pub(crate) fn leg(&self, leg: Leg) -> &EngineLegMetrics {
        self.legs[leg as usize].get_or_init(|| {
            let labels = [self.engine.as_str(), leg.label()];
            EngineLegMetrics {
                requests: self.registry.counter(&REQUESTS, &labels),
                response: self.registry.histogram(&RESPONSE_SECONDS, &labels),
                errors: AttemptFailure::ALL
                    .map(|reason| self.registry.counter(&ERRORS, &[labels[0], labels[1], reason.label()])),
            }
        })
    }

    pub(crate) fn count_failure(&self, leg: Leg, reason: impl Into<AttemptFailure>) {
        self.leg(leg).errors[reason.into() as usize].increment(1);
    }
}
