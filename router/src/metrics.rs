//! What the router counts. One registry per router, so that several in one process do not mix. What concerns
//! engines that fail is in `metrics/resilience.rs`.
//!
//! | metric | labels | unit |
//! |---|---|---|
//! | `baton_router_requests_total` | `outcome` | requests |
//! | `baton_router_requests_in_flight` | | requests |
//! | `baton_router_disconnects_total` | `phase` | requests |
//! | `baton_router_releases_total` | `cause` | leases |
//! | `baton_router_aborts_total` | `leg` | requests |
//! | `baton_router_abort_propagation_seconds` | `leg` | from the decision to the engine's answer |
//! | `baton_router_settlements_total` | `result` | settlements |
//! | `baton_router_settlements_in_flight` | | settlements |
//! | `baton_router_retries_total` | `leg` | attempts after the first |
//! | `baton_router_recomputes_total` | | handoffs that no decode engine could use; computed anew |
//! | `baton_router_misconfigured_total` | `leg` | engines that refused this router's cluster secret |
//! | `baton_router_config_generation` | | number of the configuration in effect, from 1 |
//! | `baton_router_prefill_seconds` | | from the first prefill attempt to the handoff |
//! | `baton_router_time_to_first_byte_seconds` | | from the request's head to the first byte of its answer |

mod resilience;

pub(crate) use resilience::{Resilience, Resume, Via};

use baton_connector::exchange::{Cause, Outcome, Phase};
use metrics::{Counter, Gauge, Histogram, Label, counter, gauge, histogram};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

/// Seconds; from a loopback abort (0.1 ms) to a long prefill.
const SECONDS: [f64; 15] =
    [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 600.0];

/// Half of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Leg {
    Prefill,
    Decode,
}

impl Leg {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// How a settlement went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    /// The engine confirmed it.
    Confirmed,
    /// The engine does not have the verb; its lease will lapse.
    Unsupported,
    /// Every try failed; the lease will lapse.
    Failed,
    /// Too many settlements at once; the lease will lapse.
    Refused,
}

impl Settled {
    const ALL: [Self; 4] = [Self::Confirmed, Self::Unsupported, Self::Failed, Self::Refused];

    fn label(self) -> &'static str {
        match self {
            Self::Confirmed => "confirmed",
            Self::Unsupported => "unsupported",
            Self::Failed => "failed",
            Self::Refused => "refused",
        }
    }
}

/// Handles on every metric, made once: a handle costs nothing to use, a lookup by label does.
pub(crate) struct Metrics {
    handle: PrometheusHandle,
    requests: Vec<(&'static str, Counter)>,
    disconnects: Vec<(Phase, Counter)>,
    releases: Vec<(Cause, Counter)>,
    settlements: Vec<(Settled, Counter)>,
    aborts: [Counter; 2],
    propagation: [Histogram; 2],
    retries: [Counter; 2],
    misconfigured: [Counter; 2],
    pub recomputes: Counter,
    pub resilience: Resilience,
    pub in_flight: Gauge,
    pub generation: Gauge,
    pub settling: Gauge,
    pub prefill_seconds: Histogram,
    pub first_byte_seconds: Histogram,
}

/// Outcomes of requests that never became an exchange.
pub(crate) const REJECTED: &str = "rejected";
/// Requests that were passed to one engine as they came.
pub(crate) const PASSED: &str = "passed";

impl Metrics {
    pub(crate) fn new() -> Self {
        let recorder = PrometheusBuilder::new()
            .set_buckets(&SECONDS)
            .expect("the buckets are not empty")
            .build_recorder();
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || Self::register(handle))
    }

    fn register(handle: PrometheusHandle) -> Self {
        let legs = [Leg::Prefill, Leg::Decode].map(Leg::label);
        let phase = Phase::Queue;
        let outcomes = [
            Outcome::Completed,
            Outcome::PrefillRefused,
            Outcome::PrefillExhausted,
            Outcome::DecodeRefused,
            Outcome::DecodeExhausted,
            Outcome::StreamBroken,
            Outcome::ClientGone(phase),
            Outcome::Dropped(phase),
        ];
        let labels = outcomes.map(Outcome::label).into_iter().chain([REJECTED, PASSED]);
        let with = |name: &'static str, value: &'static str| vec![Label::new(name, value)];
        Self {
            handle,
            requests: labels
                .map(|l| (l, counter!("baton_router_requests_total", with("outcome", l))))
                .collect(),
            disconnects: Phase::ALL
                .map(|p| (p, counter!("baton_router_disconnects_total", with("phase", p.label()))))
                .into(),
            releases: Cause::ALL
                .map(|c| (c, counter!("baton_router_releases_total", with("cause", c.label()))))
                .into(),
            settlements: Settled::ALL
                .map(|s| (s, counter!("baton_router_settlements_total", with("result", s.label()))))
                .into(),
            aborts: legs.map(|l| counter!("baton_router_aborts_total", with("leg", l))),
            propagation: legs.map(|l| histogram!("baton_router_abort_propagation_seconds", with("leg", l))),
            retries: legs.map(|l| counter!("baton_router_retries_total", with("leg", l))),
            misconfigured: legs.map(|l| counter!("baton_router_misconfigured_total", with("leg", l))),
            recomputes: counter!("baton_router_recomputes_total"),
            resilience: Resilience::register(),
            in_flight: gauge!("baton_router_requests_in_flight"),
            generation: gauge!("baton_router_config_generation"),
            settling: gauge!("baton_router_settlements_in_flight"),
            prefill_seconds: histogram!("baton_router_prefill_seconds"),
            first_byte_seconds: histogram!("baton_router_time_to_first_byte_seconds"),
        }
    }

    /// Counts how a request ended.
    pub(crate) fn outcome(&self, outcome: Outcome) {
        self.request(outcome.label());
        if let Outcome::ClientGone(phase) = outcome {
            self.disconnect(phase);
        }
    }

    /// Counts a request under one of the labels above.
    pub(crate) fn request(&self, label: &'static str) {
        count(&self.requests, label);
    }

    /// Counts a client that left.
    pub(crate) fn disconnect(&self, phase: Phase) {
        count(&self.disconnects, phase);
    }

    pub(crate) fn release(&self, cause: Cause) {
        count(&self.releases, cause);
    }

    pub(crate) fn settled(&self, result: Settled) {
        count(&self.settlements, result);
    }

    pub(crate) fn abort(&self, leg: Leg) {
        self.aborts[leg as usize].increment(1);
    }

    pub(crate) fn propagated(&self, leg: Leg, took: std::time::Duration) {
        self.propagation[leg as usize].record(took);
    }

    pub(crate) fn retry(&self, leg: Leg) {
        self.retries[leg as usize].increment(1);
    }

    /// Counts an engine that refused this router's cluster secret: nobody's fault but the operator's.
    pub(crate) fn misconfigured(&self, leg: Leg) {
        self.misconfigured[leg as usize].increment(1);
    }

    /// Prometheus text.
    pub(crate) fn render(&self) -> String {
        self.handle.render()
    }

    /// Folds samples into buckets, so that nobody's scraping does not let them pile up.
    pub(crate) fn upkeep(&self) {
        self.handle.run_upkeep();
    }
}

fn count<L: PartialEq>(counters: &[(L, Counter)], label: L) {
    if let Some((_, counter)) = counters.iter().find(|(l, _)| *l == label) {
        counter.increment(1);
    }
}
