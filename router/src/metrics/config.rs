//! The configuration: reloads, and the sources that discover engines.

use std::time::SystemTime;

use super::registry::{Counter, Gauge, Registry, families};

families! {
    counter RELOADS("baton_router_config_reloads_total", ["result"]):
        "Reloads of the configuration: `accepted`, or `rejected` and not in effect.";
    gauge SUCCESSFUL("baton_router_config_last_reload_successful", []):
        "1 if the last configuration read is in effect, else 0.";
    gauge SUCCEEDED_AT("baton_router_config_last_reload_success_timestamp_seconds", []):
        "Time at which the configuration took effect, in seconds since 1970.";
    gauge REVISION("baton_router_config_revision", []):
        "Changes of pools by discovery since the configuration took effect.";
    gauge ENDPOINTS("baton_router_discovery_endpoints", ["source"]):
        "Engines in the last valid response of a discovery source.";
    counter FAILURES("baton_router_discovery_failures_total", ["source"]):
        "Failures of a discovery source. The last valid response stays in effect.";
    /// Looked up at each scrape.
    pub(crate) gauge STALE("baton_router_discovery_stale_seconds", ["source"]):
        "Time since a discovery source began to fail; 0 while it works.";
}

/// The configuration.
pub(crate) struct ConfigMetrics {
    accepted: Counter,
    rejected: Counter,
    successful: Gauge,
    succeeded_at: Gauge,
    pub revision: Gauge,
}

/// One source of discovery.
pub(crate) struct DiscoveryMetrics {
    pub endpoints: Gauge,
    pub failures: Counter,
}

impl ConfigMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let result = |result| registry.counter(&RELOADS, &[result]);
        let metrics = Self {
            accepted: result("accepted"),
            rejected: result("rejected"),
            successful: registry.gauge(&SUCCESSFUL, &[]),
            succeeded_at: registry.gauge(&SUCCEEDED_AT, &[]),
            revision: registry.gauge(&REVISION, &[]),
        };
        metrics.record_success();
        metrics
    }

    fn record_success(&self) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.successful.set(1.0);
        self.succeeded_at.set(now.as_secs_f64().floor());
    }

    pub(crate) fn count_accepted(&self) {
        self.accepted.increment(1);
        self.record_success();
    }

    pub(crate) fn count_rejected(&self) {
        self.rejected.increment(1);
        self.successful.set(0.0);
    }
}

impl DiscoveryMetrics {
    pub(super) fn new(registry: &Registry, source: &str) -> Self {
        Self {
            endpoints: registry.gauge(&ENDPOINTS, &[source]),
            failures: registry.counter(&FAILURES, &[source]),
        }
    }
}
