//! Metrics of keys, tokens and tenants: accepted and refused requests, tokens, shared limits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::registry::{Counter, Gauge, Histogram, Registry, families};

/// Limit on configured tenants with their own label, and on all tenants up to which others get one. Each label value is
/// a time series in the monitoring system.
const TENANTS_MAX: usize = 100;

/// Seconds: a server in the same host to the longest timeout.
const SECONDS: &[f64] = &[0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.03, 0.1, 0.3, 1.0];

families! {
    counter REQUESTS("baton_router_tenant_requests_total", ["tenant"]):
        "Requests that a tenant's limits allowed. The first 100 configured tenants have their own label, and others up to \
         100 in all. The rest are `other`.";
    counter TOKENS("baton_router_tenant_tokens_total", ["tenant", "kind"]):
        "Tokens of a tenant's responses, from the engines' `usage`: `prompt`, `cached_prompt` (part of prompt), \
         `completion` (events, if a stream ended before its usage).";
    counter LIMITED("baton_router_rate_limited_total", ["limit"]):
        "Requests refused by a limit of a key or tenant.";
    counter UNKNOWN("baton_router_unauthorized_total", ["reason"]):
        "Requests refused with 401: no key (`missing`), an `unknown` or `expired` one, or a token: `token_malformed`, \
         `token_issuer`, `token_audience`, `token_algorithm`, `token_key_id`, `token_signature`, `token_expired`, \
         `token_not_yet_valid`, `token_claims`.";
    counter RELOADS("baton_router_keys_reloads_total", ["result"]): "Reloads of the keys file.";
    counter TOKEN_CHECKS("baton_router_jwt_checks_total", ["result"]):
        "Checks of tokens (JWT). `cached`: accepted without a check of the signature. `verified`: accepted after it. \
         `no_keys`, `busy`: refused with 503 without the issuer's keys, or with keys that may be older than the token's, \
         or beyond the bound of checks. `refused`: 401.";
    counter KEY_FETCHES("baton_router_jwks_fetches_total", ["issuer", "result"]):
        "Fetches of an issuer's keys (JWKS): `ok` or `failed`.";
    gauge ISSUER_KEYS("baton_router_jwks_keys", ["issuer"]):
        "Usable keys of an issuer. 0: its tokens are refused with 503.";
    histogram SHARED_SECONDS("baton_router_shared_limits_seconds", [], SECONDS):
        "Time of questions to the server of the shared limits, for all results.";
    counter SHARED("baton_router_shared_limits_total", ["result"]):
        "Questions of requests to the server of the shared limits. `unavailable`: not sent, because the server is known \
         not to answer. With `timeout`, `error` and `unavailable`, `on_failure` decides.";
    counter CORRECTIONS("baton_router_shared_limits_corrections_total", ["result"]):
        "Corrections sent after a request's end: `sent`, `failed`, or `dropped` because the queue was full.";
    gauge SHARED_UP("baton_router_shared_limits_up", []):
        "1 while requests ask the server of the shared limits, otherwise 0. No sample: none is configured.";
}

/// The limit that refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LimitKind {
    Requests,
    Tokens,
    Concurrent,
}

baton_connector::labelled! {
    /// Why a client is not authenticated.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum UnauthorizedReason {
        /// Neither a key nor a configured certificate.
        Missing => "missing",
        /// An unknown key.
        Key => "unknown",
        /// An expired key.
        Expired => "expired",
        /// A token that cannot be read, or is too long.
        TokenMalformed => "token_malformed",
        /// A token of an issuer that is not configured.
        TokenIssuer => "token_issuer",
        /// A token for another audience.
        TokenAudience => "token_audience",
        /// A token whose algorithm is not that of the key, or is not accepted.
        TokenAlgorithm => "token_algorithm",
        /// A token whose key the issuer does not have.
        TokenKeyId => "token_key_id",
        /// A token with a wrong signature.
        TokenSignature => "token_signature",
        /// An expired token.
        TokenExpired => "token_expired",
        /// A token whose `nbf` is in the future.
        TokenNotYetValid => "token_not_yet_valid",
        /// A token without a tenant, or with invalid claims.
        TokenClaims => "token_claims",
    }
}

baton_connector::labelled! {
    /// The result of the check of a token.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum TokenCheckResult {
        /// Accepted without a check of the signature.
        Cached => "cached",
        /// Accepted after a check of the signature.
        Verified => "verified",
        /// 401.
        Refused => "refused",
        /// 503: the issuer's keys are unavailable, or older than a token with an unknown key may be.
        NoKeys => "no_keys",
        /// 503: too many checks at once, or too many tenants.
        Busy => "busy",
    }
}

baton_connector::labelled! {
    /// The result of a question to the server of the shared limits.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum SharedResult {
        /// Within the limits.
        Taken => "taken",
        /// Beyond a limit.
        Refused => "refused",
        /// No answer in time.
        Timeout => "timeout",
        /// The connection broke, or the answer was an error.
        Error => "error",
        /// Not sent.
        Unavailable => "unavailable",
    }
}

baton_connector::labelled! {
    /// The result of a correction.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum CorrectionResult {
        /// The server has it.
        Sent => "sent",
        /// The server did not confirm it.
        Failed => "failed",
        /// The queue was full.
        Dropped => "dropped",
    }
}

/// The metrics of one issuer of tokens.
#[derive(Clone)]
pub(crate) struct IssuerMetrics {
    fetches: [Counter; 2],
    /// Usable keys.
    pub keys: Gauge,
}

impl IssuerMetrics {
    pub(crate) fn count_fetch(&self, fine: bool) {
        self.fetches[usize::from(!fine)].increment(1);
    }
}

/// The metrics of the shared limits.
pub(crate) struct SharedLimitsMetrics {
    results: [Counter; SharedResult::ALL.len()],
    corrections: [Counter; CorrectionResult::ALL.len()],
    /// Time of questions.
    pub seconds: Histogram,
    /// 1 while requests ask the server.
    pub up: Gauge,
}

impl SharedLimitsMetrics {
    fn new(registry: &Registry) -> Self {
        Self {
            results: SharedResult::ALL.map(|result| registry.counter(&SHARED, &[result.label()])),
            corrections: CorrectionResult::ALL
                .map(|result| registry.counter(&CORRECTIONS, &[result.label()])),
            seconds: registry.histogram(&SHARED_SECONDS, &[]),
            up: registry.gauge(&SHARED_UP, &[]),
        }
    }

    pub(crate) fn count(&self, result: SharedResult) {
        self.results[result as usize].increment(1);
    }

    pub(crate) fn count_correction(&self, result: CorrectionResult) {
        self.corrections[result as usize].increment(1);
    }
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
    unknown: [Counter; UnauthorizedReason::ALL.len()],
    token_checks: [Counter; TokenCheckResult::ALL.len()],
    reloads: [Counter; 2],
}

impl TenantMetrics {
    pub(crate) fn new(registry: &Arc<Registry>) -> Self {
        Self {
            registry: Arc::clone(registry),
            tenants: Mutex::default(),
            limited: ["requests", "tokens", "concurrent"].map(|limit| registry.counter(&LIMITED, &[limit])),
            unknown: UnauthorizedReason::ALL.map(|reason| registry.counter(&UNKNOWN, &[reason.label()])),
            token_checks: TokenCheckResult::ALL
                .map(|result| registry.counter(&TOKEN_CHECKS, &[result.label()])),
            reloads: ["ok", "failed"].map(|result| registry.counter(&RELOADS, &[result])),
        }
    }

    /// The metrics of the shared limits, which exist while these are configured: 0 would mean that the server is away.
    pub(crate) fn shared_limits(&self) -> SharedLimitsMetrics {
        SharedLimitsMetrics::new(&self.registry)
    }

    /// The metrics of an issuer of tokens.
    pub(crate) fn issuer(&self, name: &str) -> IssuerMetrics {
        IssuerMetrics {
            fetches: ["ok", "failed"].map(|result| self.registry.counter(&KEY_FETCHES, &[name, result])),
            keys: self.registry.gauge(&ISSUER_KEYS, &[name]),
        }
    }

    pub(crate) fn count_token_check(&self, result: TokenCheckResult) {
        self.token_checks[result as usize].increment(1);
    }

    /// Gives the first of these tenants their own labels, also if tenants that only tokens name have taken all.
    pub(crate) fn reserve<'a>(&self, names: impl Iterator<Item = &'a str>) {
        let mut reserved: Vec<&str> = Vec::new();
        for name in names {
            if reserved.len() >= TENANTS_MAX {
                break;
            }
            if !reserved.contains(&name) {
                reserved.push(name);
            }
        }
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        for name in &reserved {
            if tenants.contains_key(*name) {
                continue;
            }
            if tenants.len() >= 2 * TENANTS_MAX {
                // Labels of earlier configurations. The series last as long as their tenants.
                tenants.retain(|known, _| reserved.contains(&known.as_str()));
            }
            tenants.insert((*name).to_owned(), self.counters(name));
        }
    }

    /// The counters of a tenant.
    pub(crate) fn tenant(&self, name: &str) -> TenantCounters {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(counters) = tenants.get(name) {
            return counters.clone();
        }
        if tenants.len() >= TENANTS_MAX {
            return self.counters("other");
        }
        let counters = self.counters(name);
        tenants.insert(name.to_owned(), counters.clone());
        counters
    }

    fn counters(&self, label: &str) -> TenantCounters {
        let kinds = ["prompt", "cached_prompt", "completion"];
        TenantCounters {
            requests: self.registry.counter(&REQUESTS, &[label]),
            tokens: kinds.map(|kind| self.registry.counter(&TOKENS, &[label, kind])),
        }
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

    fn labels(registry: &Registry) -> Vec<String> {
        let mut labels = Vec::new();
        registry.for_each(&REQUESTS, |label, _| labels.push(label.to_owned()));
        labels
    }

    #[test]
    fn configured_tenants_have_labels_whatever_tokens_name() {
        let registry = Arc::new(Registry::default());
        let metrics = TenantMetrics::new(&registry);
        let names: Vec<_> = (0..10_000).map(|n| format!("c{n}")).collect();
        // At load, before any token.
        metrics.reserve(names.iter().map(String::as_str).take(1));
        let mut kept: Vec<_> = (0..10_000).map(|n| metrics.tenant(&format!("t{n}"))).collect();
        kept.push(metrics.tenant("c0"));
        assert_eq!(labels(&registry).len(), TENANTS_MAX + 1);
        // At reloads, with a bounded number of labels.
        for first in (0..5_000).step_by(500) {
            metrics.reserve(names[first..].iter().map(String::as_str));
            kept = names[first..first + TENANTS_MAX].iter().map(|name| metrics.tenant(name)).collect();
            let there = labels(&registry);
            let has = |name: &String| there.contains(&format!("tenant=\"{name}\""));
            assert!(names[first..first + TENANTS_MAX].iter().all(has), "{first}");
            assert!(there.len() <= 2 * TENANTS_MAX + 1, "{}", there.len());
        }
        drop(kept);
    }

    #[test]
    fn shared_limits_have_a_gauge_while_they_are_configured() {
        let registry = Arc::new(Registry::default());
        let metrics = TenantMetrics::new(&registry);
        let gauges = || {
            let mut count = 0;
            registry.for_each(&SHARED_UP, |_, _| count += 1);
            count
        };
        assert_eq!(gauges(), 0, "an alert on 0 would fire");
        let shared = metrics.shared_limits();
        assert_eq!(gauges(), 1);
        drop(shared);
        assert_eq!(gauges(), 0);
    }

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
