//! Metrics of keys and tenants: accepted and refused requests.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::registry::{Counter, Registry, families};

/// Limit on tenants with their own label: each label value is a time series in the monitoring system.
const TENANTS_MAX: usize = 100;

families! {
    counter REQUESTS("baton_router_tenant_requests_total", ["tenant"]):
        "Requests that a tenant's limits allowed. The first 100 tenants have their own label, the rest are `other`.";
    counter LIMITED("baton_router_rate_limited_total", ["limit"]):
        "Requests refused by a limit of a key or tenant.";
    counter UNKNOWN("baton_router_unauthorized_total", ["reason"]): "Requests refused with 401.";
    counter RELOADS("baton_router_keys_reloads_total", ["result"]): "Reloads of the keys file.";
}

/// The limit that refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LimitKind {
    Requests,
    Tokens,
    Concurrent,
}

/// Why a client is not authenticated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnauthorizedReason {
    /// Neither a key nor a configured certificate.
    Missing,
    /// An unknown key.
    Key,
    /// An expired key.
    Expired,
}

/// Handles, created once; those of a tenant at its first request.
pub(crate) struct TenantMetrics {
    registry: Arc<Registry>,
    tenants: Mutex<HashMap<String, Counter>>,
    limited: [Counter; 3],
    unknown: [Counter; 3],
    reloads: [Counter; 2],
}

impl TenantMetrics {
    pub(crate) fn new(registry: &Arc<Registry>) -> Self {
        Self {
            registry: Arc::clone(registry),
            tenants: Mutex::default(),
            limited: ["requests", "tokens", "concurrent"].map(|limit| registry.counter(&LIMITED, &[limit])),
            unknown: ["missing", "unknown", "expired"].map(|reason| registry.counter(&UNKNOWN, &[reason])),
            reloads: ["ok", "failed"].map(|result| registry.counter(&RELOADS, &[result])),
        }
    }

    /// The counter of a tenant's requests.
    pub(crate) fn tenant(&self, name: &str) -> Counter {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(counter) = tenants.get(name) {
            return counter.clone();
        }
        let own = tenants.len() < TENANTS_MAX;
        let counter = self.registry.counter(&REQUESTS, &[if own { name } else { "other" }]);
        if own {
            tenants.insert(name.to_owned(), counter.clone());
        }
        counter
    }

    pub(crate) fn count_limited(&self, limit: LimitKind) {
        self.limited[limit as usize].increment(1);
    }

    pub(crate) fn count_unauthorized(&self, reason: UnauthorizedReason) {
        self.unknown[reason as usize].increment(1);
    }

    pub(crate) fn count_reload(&self, fine: bool) {
        self.reloads[usize::from(!fine)].increment(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_thousand_tenants_are_a_hundred_labels_and_one() {
        let registry = Arc::new(Registry::default());
        let metrics = TenantMetrics::new(&registry);
        let kept: Vec<_> = (0..10_000).map(|n| metrics.tenant(&format!("t{n}"))).collect();
        kept.iter().for_each(|counter| counter.increment(1));
        let mut series = Vec::new();
        registry.for_each(&REQUESTS, |labels, _| series.push(labels.to_owned()));
        assert_eq!(series.len(), TENANTS_MAX + 1);
        assert!(series.contains(&"tenant=\"other\"".to_owned()));
    }
}
