//! What is counted of keys and tenants.
//!
//! | metric | labels | unit |
//! |---|---|---|
//! | `baton_router_tenant_requests_total` | `tenant` | requests that a tenant's limits let in; after 100 tenants the others are `other` |
//! | `baton_router_rate_limited_total` | `limit` | requests refused by a limit: `requests`, `tokens`, `concurrent` |
//! | `baton_router_unauthorized_total` | `reason` | requests answered 401: `missing`, `unknown`, `expired` |
//! | `baton_router_keys_reloads_total` | `result` | times the keys file was read again: `ok`, `failed` |

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use metrics::{Counter, Label, counter};
use metrics_exporter_prometheus::PrometheusRecorder;

/// Tenants with a label of their own. A label is a time series, and a monitor pays for each.
const TENANTS_MAX: usize = 100;

/// Which limit refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    Requests,
    Tokens,
    Concurrent,
}

/// Why nobody knows a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unknown {
    /// Neither a key nor a certificate that is named.
    Missing,
    /// A key that is not known.
    Key,
    /// A key whose time is over.
    Expired,
}

/// Handles, made once; those of tenants when their tenant is first heard of.
pub(crate) struct TenantMetrics {
    recorder: Arc<PrometheusRecorder>,
    tenants: Mutex<HashMap<String, Counter>>,
    limited: [Counter; 3],
    unknown: [Counter; 3],
    reloads: [Counter; 2],
}

impl TenantMetrics {
    /// Within the recorder of the router.
    pub(crate) fn register(recorder: Arc<PrometheusRecorder>) -> Self {
        let with = |name: &'static str, value: &'static str| vec![Label::new(name, value)];
        let of = |limit| counter!("baton_router_rate_limited_total", with("limit", limit));
        let unknown = |reason| counter!("baton_router_unauthorized_total", with("reason", reason));
        let reloads = |result| counter!("baton_router_keys_reloads_total", with("result", result));
        metrics::with_local_recorder(&*recorder, || Self {
            recorder: Arc::clone(&recorder),
            tenants: Mutex::default(),
            limited: ["requests", "tokens", "concurrent"].map(of),
            unknown: ["missing", "unknown", "expired"].map(unknown),
            reloads: ["ok", "failed"].map(reloads),
        })
    }

    /// The counter of a tenant's requests.
    pub(crate) fn tenant(&self, name: &str) -> Counter {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(counter) = tenants.get(name) {
            return counter.clone();
        }
        let label = if tenants.len() < TENANTS_MAX { name } else { "other" };
        let labels = vec![Label::new("tenant", label.to_owned())];
        let make = || counter!("baton_router_tenant_requests_total", labels);
        let counter = metrics::with_local_recorder(&*self.recorder, make);
        if tenants.len() < TENANTS_MAX {
            tenants.insert(name.to_owned(), counter.clone());
        }
        counter
    }

    pub(crate) fn limited(&self, limit: Limit) {
        self.limited[limit as usize].increment(1);
    }

    pub(crate) fn unknown(&self, why: Unknown) {
        self.unknown[why as usize].increment(1);
    }

    pub(crate) fn reloaded(&self, fine: bool) {
        self.reloads[usize::from(!fine)].increment(1);
    }
}

#[cfg(test)]
mod tests {
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;

    #[test]
    fn ten_thousand_tenants_are_a_hundred_labels_and_one() {
        let recorder = Arc::new(PrometheusBuilder::new().build_recorder());
        let handle = recorder.handle();
        let metrics = TenantMetrics::register(recorder);
        (0..10_000).for_each(|n| metrics.tenant(&format!("t{n}")).increment(1));
        let text = handle.render();
        let series = text.lines().filter(|l| l.starts_with("baton_router_tenant_requests_total{"));
        assert_eq!(series.count(), TENANTS_MAX + 1);
        assert!(text.contains("tenant=\"other\"} 9900"));
    }
}
