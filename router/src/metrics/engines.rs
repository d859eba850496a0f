//! Engines, by their address: what they were asked, how they failed, how long they took. Series of an engine that
//! nobody knows any more are gone.

use std::sync::{Arc, OnceLock};

use baton_connector::exchange::Failure;

use super::legs::Leg;
use super::registry::{Counter, Family, Histogram, Registry};
use super::requests::FIRST_TOKEN;

/// Seconds; from loopback to the longest connect timeout.
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
.of_engines(Reason::ALL.len());
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
/// Looked up when somebody asks.
pub(crate) static IN_FLIGHT: Family = Family::gauge(
    "baton_router_engine_requests_in_flight",
    &["engine"],
    "Requests of this router in flight at an engine.",
);
/// Looked up when somebody asks.
pub(crate) static POOL: Family =
    Family::gauge("baton_router_pool_engines", &["model", "leg"], "Engines of a pool.");
/// Looked up when somebody asks.
pub(crate) static READY: Family = Family::gauge(
    "baton_router_pool_ready_engines",
    &["model", "leg"],
    "Engines of a pool that can be chosen.",
);

pub(super) static FAMILIES: &[&Family] =
    &[&REQUESTS, &ERRORS, &RESPONSE_SECONDS, &CONNECT_SECONDS, &REPLAYS, &IN_FLIGHT, &POOL, &READY];

/// How an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// It never saw the request.
    Unreachable,
    /// It said that it cannot.
    Answered,
    /// A broken connection.
    Broken,
    /// Nothing came of it in time.
    Silent,
    /// Its handoff cannot be handed on.
    Unusable,
    /// It refused the request itself.
    Refused,
    /// It ended in the middle of its answer.
    Died,
}

impl Reason {
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

impl From<Failure> for Reason {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotReached => Self::Unreachable,
            Failure::Answered => Self::Answered,
            Failure::Unknown => Self::Broken,
            Failure::Unusable(_) => Self::Unusable,
        }
    }
}

/// One engine. The series of a leg begin with its first attempt: most engines serve one.
#[derive(Debug)]
pub(crate) struct EngineMetrics {
    registry: Arc<Registry>,
    engine: String,
    legs: [OnceLock<LegOfEngine>; 2],
    pub connect: Histogram,
    /// From the first one on: most engines never have one.
    replays: OnceLock<Counter>,
}

/// One engine in one leg.
#[derive(Debug)]
pub(crate) struct LegOfEngine {
    pub requests: Counter,
    pub response: Histogram,
    errors: [Counter; Reason::ALL.len()],
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

    /// A request is sent again because its kept connection had been closed.
    pub(crate) fn replayed(&self) {
        self.replays.get_or_init(|| self.registry.counter(&REPLAYS, &[self.engine.as_str()])).increment(1);
    }

    pub(crate) fn leg(&self, leg: Leg) -> &LegOfEngine {
        self.legs[leg as usize].get_or_init(|| {
            let labels = [self.engine.as_str(), leg.label()];
            LegOfEngine {
                requests: self.registry.counter(&REQUESTS, &labels),
                response: self.registry.histogram(&RESPONSE_SECONDS, &labels),
                errors: Reason::ALL
                    .map(|reason| self.registry.counter(&ERRORS, &[labels[0], labels[1], reason.label()])),
            }
        })
    }

    pub(crate) fn failed(&self, leg: Leg, reason: impl Into<Reason>) {
        self.leg(leg).errors[reason.into() as usize].increment(1);
    }
}
