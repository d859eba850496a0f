//! What the router counts. One registry per router, so that several in one process do not mix. What concerns
//! engines that fail is in `metrics/resilience.rs`.
//!
//! Each part has a file below with its families as constants; [`families`] lists them all, and `docs/reference/metrics.md` is
//! checked against it. A part that counts something adds a file, its `FAMILIES` to that list, and a field to
//! [`Metrics`]. Handles are made once (when the router, a model or an engine is made); counting is a few atomic
//! operations without a lock or an allocation: see [`registry`]. Values of labels come from configuration, never from
//! a client.

pub(crate) mod admission;
mod config;
mod engines;
pub(crate) mod kv_events;
mod legs;
pub(crate) mod log_limiter;
mod observers;
mod page;
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

use baton_connector::exchange::{Cause, Phase};

pub(crate) use config::{DiscoveryMetrics, STALE};
pub(crate) use engines::{EngineMetrics, IN_FLIGHT, POOL, READY, Reason};
pub(crate) use legs::{Leg, Settled, Via};
pub(crate) use page::{Format, Scrape};
pub(crate) use registry::{Counter, Family, Registry};
pub(crate) use requests::{End, ModelMetrics};
pub(crate) use resilience::{Resume, STANDINGS};
pub(crate) use routing::Decisions;

/// Every family, of every part.
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
    ];
    parts.concat().into_iter()
}

/// Handles on every metric that does not belong to one model or engine.
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
            routing: routing::RoutingMetrics::new(&registry),
            registry,
        }
    }

    /// Handles for one model.
    pub(crate) fn model(&self, name: &str) -> ModelMetrics {
        ModelMetrics::new(&self.registry, name)
    }

    /// Handles for what a policy decides for one leg of a model.
    pub(crate) fn decisions(&self, model: &str, leg: Leg, policy: &str) -> Decisions {
        Decisions::new(&self.registry, model, leg, policy)
    }

    /// Handles for one source of discovery.
    pub(crate) fn discovery(&self, source: &str) -> DiscoveryMetrics {
        DiscoveryMetrics::new(&self.registry, source)
    }

    /// Handles for one engine.
    pub(crate) fn engine(&self, authority: &str) -> EngineMetrics {
        EngineMetrics::new(&self.registry, authority)
    }

    /// Handles for the certificates of a listener: `clients` or `admin`.
    pub(crate) fn listener_tls(&self, purpose: &'static str) -> tls::ListenerTls {
        tls::ListenerTls::new(&self.registry, purpose)
    }

    /// Handles for the files of `engine_tls`.
    pub(crate) fn engine_tls(&self) -> tls::EngineTlsMetrics {
        tls::EngineTlsMetrics::new(&self.registry, "engines")
    }

    /// Counts a client that left.
    pub(crate) fn disconnect(&self, phase: Phase) {
        self.requests.disconnect(phase);
    }

    pub(crate) fn release(&self, cause: Cause, via: Via) {
        self.legs.release(cause, via);
    }

    pub(crate) fn settled(&self, result: Settled) {
        self.legs.settled(result);
    }

    pub(crate) fn abort(&self, leg: Leg) {
        self.legs.aborts[leg as usize].increment(1);
    }

    pub(crate) fn propagated(&self, leg: Leg, took: Duration) {
        self.legs.propagation[leg as usize].record(took);
    }

    pub(crate) fn retry(&self, leg: Leg) {
        self.legs.retries[leg as usize].increment(1);
    }

    /// Counts an engine that refused this router's cluster secret: nobody's fault but the operator's.
    pub(crate) fn misconfigured(&self, leg: Leg) {
        self.legs.misconfigured[leg as usize].increment(1);
    }

    /// The page that a scraper gets; `look_up` adds what is not counted as it happens.
    pub(crate) fn page(&self, format: Format, look_up: impl FnOnce(&mut Scrape)) -> String {
        let mut scrape = Scrape::default();
        process::read(&mut scrape);
        look_up(&mut scrape);
        page::write(families(), &self.registry, &scrape, format)
    }
}
