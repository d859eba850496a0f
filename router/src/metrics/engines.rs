//! Metrics by engine address: attempts, failures and times. The series of an engine end with its last reference.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use baton_connector::exchange::Failure;

use super::legs::Leg;
use super::registry::{Counter, Histogram, Registry, families};
use super::requests::FIRST_TOKEN;

/// Seconds, from loopback to the longest connect timeout.
const CONNECT: &[f64] =
    &[0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 60.0];

/// Seconds, from a prefill at its usual time to one that waited behind many others.
const ESTIMATE_ERROR: &[f64] =
    &[0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0];

families! {
    counter REQUESTS("baton_router_engine_requests_total", ["engine", "leg"]).of_engines(1):
        "Attempts at an engine.";
    counter ERRORS("baton_router_engine_errors_total", ["engine", "leg", "reason"])
        .of_engines(AttemptFailure::ALL.len()):
        "Failed attempts: `unreachable`, `answered` (error response), `broken` (connection broken), `silent` (no \
         response in time), `unusable` (invalid handoff), `refused` (request at fault), `died` (failed during the \
         response).";
    histogram RESPONSE_SECONDS("baton_router_engine_response_seconds", ["engine", "leg"], FIRST_TOKEN)
        .of_engines(1):
        "From an attempt to a prefill engine's response, or to the head of a decode engine's successful response.";
    histogram CONNECT_SECONDS("baton_router_engine_connect_seconds", ["engine"], CONNECT).of_engines(1):
        "Time to open a connection to an engine.";
    histogram ESTIMATE_ERROR_SECONDS(
        "baton_router_prefill_estimate_error_seconds", ["engine"], ESTIMATE_ERROR
    ).of_engines(1):
        "Difference between the time of a stock engine's prefill and its estimate, which decides about waits for \
         replies of cancelled prefills.";
    counter REPLAYS("baton_router_engine_replays_total", ["engine"]).of_engines(1):
        "Requests sent again on a new connection, because the engine closed the kept connection before its first \
         byte. Such a request is one attempt.";
    /// Looked up at each scrape.
    pub(crate) gauge IN_FLIGHT("baton_router_engine_requests_in_flight", ["engine"]):
        "Requests of this router in flight at an engine.";
    /// Looked up at each scrape.
    pub(crate) gauge POOL("baton_router_pool_engines", ["model", "leg"]): "Engines of a pool.";
    /// Looked up at each scrape.
    pub(crate) gauge READY("baton_router_pool_ready_engines", ["model", "leg"]):
        "Engines of a pool that can be chosen.";
}

baton_connector::labelled! {
    /// How an attempt failed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum AttemptFailure {
        /// The engine did not receive the request.
        Unreachable => "unreachable",
        /// The engine returned an error.
        Answered => "answered",
        /// The connection broke.
        Broken => "broken",
        /// The engine did not respond in time.
        Silent => "silent",
        /// The engine's handoff is invalid.
        Unusable => "unusable",
        /// The engine refused the request itself.
        Refused => "refused",
        /// The engine failed during its response.
        Died => "died",
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
    /// Created at the second prefill of one size: only stock prefill engines have one.
    estimate_error: OnceLock<Histogram>,
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
            estimate_error: OnceLock::new(),
        }
    }

    /// Counts a request that is sent again because its idle connection was closed.
    pub(crate) fn count_replay(&self) {
        self.replays.get_or_init(|| self.registry.counter(&REPLAYS, &[self.engine.as_str()])).increment(1);
    }

    /// Records the difference between a prefill's time and its estimate.
    pub(crate) fn record_estimate_error(&self, error: Duration) {
        let labels = [self.engine.as_str()];
        self.estimate_error
            .get_or_init(|| self.registry.histogram(&ESTIMATE_ERROR_SECONDS, &labels))
            .record(error);
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
