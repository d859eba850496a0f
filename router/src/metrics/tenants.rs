//! Metrics of keys and tenants: accepted and refused requests, tokens.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::registry::{Counter, Registry, families};

/// Limit on tenants with their own label: each label value is a time series in the monitoring system.
const TENANTS_MAX: usize = 100;

families! {
    counter REQUESTS("baton_router_tenant_requests_total", ["tenant"]):
        "Requests that a tenant's limits allowed. The first 100 tenants have their own label, the rest are `other`.";
    counter TOKENS("baton_router_tenant_tokens_total", ["tenant", "kind"]):
        "Tokens of a tenant's responses, from the engines' `usage`: `prompt`, `cached_prompt` (part of prompt), \
         `completion` (events, if a stream ended before its usage).";
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

/// The counters of a tenant.
#[derive(Clone)]
pub(crate) struct TenantCounters {
    /// Requests that the limits allowed.
    pub requests: Counter,
    /// Tokens: `prompt`, `cached_prompt`, `completion`.
    tokens: [Counter; 3],
}

impl TenantCounters {
    /// Counts the tokens of a response that has ended, as far as they are known.
    pub(crate) fn count_tokens(&self, [prompt, cached, completion]: [u64; 3]) {
        for (counter, tokens) in self.tokens.iter().zip([prompt, cached, completion]) {
            counter.increment(tokens);
        }
    }
}

/// Handles, created once; those of a tenant when a configuration first contains it.
pub(crate) struct TenantMetrics {
    registry: Arc<Registry>,
    tenants: Mutex<HashMap<String, TenantCounters>>,
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

    /// The counters of a tenant.
    pub(crate) fn tenant(&self, name: &str) -> TenantCounters {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(counters) = tenants.get(name) {
            return counters.clone();
        }
        let own = tenants.len() < TENANTS_MAX;
        let label = if own { name } else { "other" };
        let kinds = ["prompt", "cached_prompt", "completion"];
        let counters = TenantCounters {
            requests: self.registry.counter(&REQUESTS, &[label]),
            tokens: kinds.map(|kind| self.registry.counter(&TOKENS, &[label, kind])),
        };
        if own {
            tenants.insert(name.to_owned(), counters.clone());
        }
        counters
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
        kept.iter().for_each(|counters| counters.requests.increment(1));
        for (family, kinds, other) in
            [(&REQUESTS, 1, "tenant=\"other\""), (&TOKENS, 3, "tenant=\"other\",kind=\"prompt\"")]
        {
            let mut series = Vec::new();
            registry.for_each(family, |labels, _| series.push(labels.to_owned()));
            assert_eq!(series.len(), kinds * (TENANTS_MAX + 1));
            assert!(series.contains(&other.to_owned()));
        }
    }
}
