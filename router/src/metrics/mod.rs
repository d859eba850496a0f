//! The router's metrics. Each router has its own registry, so that several routers in one process do not mix.
//!
//! Each part has a file below with its families as constants. [`families`] lists them all, and
//! `docs/reference/metrics.md` is compared with it. A new part adds a file, its `FAMILIES` to that list, and a field to
//! [`Metrics`]. Handles are created once, with the router, a model or an engine. Counting takes a few atomic operations
//! without a lock or an allocation; see [`registry`]. Label values come from the configuration, never from a client.

pub(crate) mod admission;
mod config;
mod engines;
pub(crate) mod kv_events;
mod legs;
pub(crate) mod log_limiter;
pub(crate) mod log_span;
mod observers;
mod page;
pub(crate) mod picker;
mod process;
mod registry;
pub(crate) mod requests;
mod resilience;
pub(crate) mod routing;
mod server;
pub(crate) mod tenants;
#[cfg(test)]
mod tests;
pub(crate) mod tls;

use std::sync::Arc;
use std::time::Duration;

pub(crate) use config::{DiscoveryMetrics, STALE};
pub(crate) use engines::{AttemptFailure, EngineMetrics, IN_FLIGHT, POOL, READY};
pub(crate) use legs::{AbandonWaitResult, KeptTurnEnd, Leg, ReleaseMethod, SettlementResult};
pub(crate) use page::{PageFormat, Scrape};
pub(crate) use registry::{Family, Registry};
pub(crate) use requests::{ModelMetrics, RequestOutcome};
pub(crate) use resilience::{ResumeResult, STANDINGS};
pub(crate) use routing::DecisionCounters;

/// Every family of every part.
fn families() -> impl Iterator<Item = &'static Family> {
    let parts: &[&[&'static Family]] = &[
        requests::FAMILIES,
        legs::FAMILIES,
        engines::FAMILIES,
        resilience::FAMILIES,
        admission::FAMILIES,
        tenants::FAMILIES,
        tls::FAMILIES,
        server::FAMILIES,
        config::FAMILIES,
        routing::FAMILIES,
        process::FAMILIES,
        observers::FAMILIES,
        kv_events::FAMILIES,
        picker::FAMILIES,
    ];
    parts.concat().into_iter()
}

/// Handles of all metrics that do not belong to one model or engine.
pub(crate) struct Metrics {
    registry: Arc<Registry>,
    pub requests: requests::RequestMetrics,
    pub legs: legs::LegMetrics,
    pub resilience: resilience::ResilienceMetrics,
    pub server: server::ServerMetrics,
    pub admission: Arc<admission::AdmissionMetrics>,
    pub tenants: Arc<tenants::TenantMetrics>,
    pub config: config::ConfigMetrics,
    pub observers: observers::ObserverMetrics,
    pub picker: picker::PickerMetrics,
    pub routing: routing::RoutingMetrics,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let registry = Arc::new(Registry::default());
        Self {
            requests: requests::RequestMetrics::new(&registry),
            legs: legs::LegMetrics::new(&registry),
            resilience: resilience::ResilienceMetrics::new(&registry),
            server: server::ServerMetrics::new(&registry),
            admission: Arc::new(admission::AdmissionMetrics::new(&registry)),
            tenants: Arc::new(tenants::TenantMetrics::new(&registry)),
            config: config::ConfigMetrics::new(&registry),
            observers: observers::ObserverMetrics::new(&registry),
            picker: picker::PickerMetrics::new(&registry),
            routing: routing::RoutingMetrics::new(&registry),
            registry,
        }
    }

    /// Handles of one model.
    pub(crate) fn model(&self, name: &str) -> ModelMetrics {
        ModelMetrics::new(&self.registry, name)
    }

    /// Handles of a policy's decisions for one leg of a model.
    pub(crate) fn decisions(&self, model: &str, leg: Leg, policy: &str) -> DecisionCounters {
        DecisionCounters::new(&self.registry, model, leg, policy)
    }

    /// Handles of the questions for a model's token ids.
    pub(crate) fn tokenize(&self, model: &str) -> routing::TokenizeMetrics {
        routing::TokenizeMetrics::new(&self.registry, model)
    }

    /// Handles of one source of discovery.
    pub(crate) fn discovery(&self, source: &str) -> DiscoveryMetrics {
        DiscoveryMetrics::new(&self.registry, source)
    }

    /// Handles of one engine.
    pub(crate) fn engine(&self, authority: &str) -> EngineMetrics {
        EngineMetrics::new(&self.registry, authority)
    }

    /// Handles of a listener's certificates: `clients`, `admin` or `picker`.
    pub(crate) fn listener_tls(&self, purpose: &'static str) -> tls::ListenerTlsMetrics {
        tls::ListenerTlsMetrics::new(&self.registry, purpose)
    }

    /// Handles of the files of `engine_tls`.
    pub(crate) fn engine_tls(&self) -> tls::EngineTlsMetrics {
        tls::EngineTlsMetrics::new(&self.registry, "engines")
    }

    pub(crate) fn count_abort(&self, leg: Leg) {
        self.legs.aborts[leg as usize].increment(1);
    }

    pub(crate) fn record_abort_propagation(&self, leg: Leg, took: Duration) {
        self.legs.propagation[leg as usize].record(took);
    }

    pub(crate) fn count_retry(&self, leg: Leg) {
        self.legs.retries[leg as usize].increment(1);
    }

    /// Counts a refusal of this router's cluster secret or engine key, which the operator has to fix.
    pub(crate) fn count_misconfigured(&self, leg: Leg) {
        self.legs.misconfigured[leg as usize].increment(1);
    }

    /// The page for a scraper; `look_up` adds values that are not counted as they occur.
    pub(crate) fn page(&self, format: PageFormat, look_up: impl FnOnce(&mut Scrape)) -> String {
        let mut scrape = Scrape::default();
        process::read(&mut scrape);
        look_up(&mut scrape);
        page::write(families(), &self.registry, &scrape, format)
    }
}
