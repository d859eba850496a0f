//! The two legs of requests and their settlement: retries, aborts and releases.

use std::time::Duration;

use baton_connector::exchange::SettlementCause;

use super::registry::{Counter, Family, Gauge, Histogram, Registry, families};

/// One half of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Leg {
    Prefill,
    Decode,
}

impl Leg {
    pub(crate) const BOTH: [Self; 2] = [Self::Prefill, Self::Decode];

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

baton_connector::labelled! {
    /// The result of a settlement.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum SettlementResult {
        /// The engine confirmed it.
        Confirmed => "confirmed",
        /// The engine lacks the verb; the lease ends by expiry.
        Unsupported => "unsupported",
        /// Every attempt failed; the lease ends by expiry.
        Failed => "failed",
        /// Too many settlements were pending; the lease ends by expiry.
        Refused => "refused",
    }
}

baton_connector::labelled! {
    /// How a lease is released.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum ReleaseMethod {
        /// `POST /kv/release` with the lease's handle.
        Release => "release",
        /// `POST /abort_requests` with the request's id, if the engine returned no handle.
        Abort => "abort",
        /// A decode request that must be refused, after which stock vLLM notifies its producer.
        RefusedDecode => "refused_decode",
        /// No release: the lease expires.
        Lease => "lease",
    }
}

baton_connector::labelled! {
    /// Why a decode engine's blocks are no longer kept for a next turn.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum KeptTurnEnd {
        /// A prefill engine reads them.
        Used => "used",
        /// The prefill engine did not begin the request, and the router releases them.
        Unread => "unread",
        /// Their tokens are not known, so no turn may read them. The router releases them.
        Unknown => "unknown",
        /// No turn came in time, or a read had no known end, or failed because of their engine. The router releases
        /// them.
        Expired => "expired",
        /// Too many turns were kept.
        Evicted => "evicted",
        /// The router ends.
        Shutdown => "shutdown",
    }
}

baton_connector::labelled! {
    /// How the wait for the reply of a cancelled prefill ended.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum AbandonWaitResult {
        /// The engine replied, or closed its connection.
        Reply => "reply",
        /// The bound was reached, and the connection was half-closed.
        Timeout => "timeout",
    }
}

/// Seconds, from a loopback abort (0.1 ms) to an abort that needs every attempt.
const PROPAGATION: &[f64] =
    &[0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];

/// Seconds, up to the longest bound.
const ABANDON_WAIT: &[f64] =
    &[0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0];

families! {
    counter RETRIES("baton_router_retries_total", ["leg"]): "Attempts of a leg after the first.";
    counter RECOMPUTES("baton_router_recomputes_total", []):
        "Handoffs that no decode engine could use, so that the prompt was computed again.";
    counter MISCONFIGURED("baton_router_misconfigured_total", ["leg"]):
        "Responses in which an engine refuses this router's cluster secret or its configured API key.";
    counter ABORTS("baton_router_aborts_total", ["leg"]): "Aborted legs.";
    histogram PROPAGATION_SECONDS("baton_router_abort_propagation_seconds", ["leg"], PROPAGATION):
        "From the decision to abort a leg to the engine's confirmation.";
    counter ABANDON_WAITS("baton_router_abandon_waits_total", ["result"]):
        "Waits for the due reply of a cancelled prefill at an engine without the abort verb, by their end: P \
         answered or failed (`reply`), or the bound (`timeout`).";
    histogram ABANDON_WAIT_SECONDS("baton_router_abandon_wait_seconds", [], ABANDON_WAIT):
        "Duration of waits for the due reply of a cancelled prefill. Until its end the engine computes for no client.";
    gauge ABANDON_WAIT_BOUND_SECONDS("baton_router_abandon_wait_bound_seconds", []):
        "Bound of a wait for the due reply of a cancelled prefill (`timeouts.abandon_wait_ms`).";
    counter RELEASES("baton_router_releases_total", ["cause", "via"]):
        "Leases that the router released, by cause and method.";
    counter SETTLEMENTS("baton_router_settlements_total", ["result"]):
        "Completed aborts and releases. All results but `confirmed` leave the lease to its expiry.";
    gauge KEPT_TURNS("baton_router_kept_turns", []):
        "Turns of conversations whose blocks a decode engine keeps for the next turn (`models[].bidirectional_kv`).";
    counter KEPT_TURN_ENDS("baton_router_kept_turns_ended_total", ["end"]):
        "Responses whose blocks are no longer kept: read by a prefill engine (`used`), or released. `unread`: the prefill \
         engine did not begin the request. `unknown`: no turn can read them. `expired`: no turn came in time, or a read \
         had no known end, or failed because of their engine. `evicted`: too many turns. `shutdown`: the \
         router ends.";
    gauge SETTLING("baton_router_settlements_in_flight", []): "Aborts and releases in progress.";
    gauge SETTLEMENTS_WAITING("baton_router_settlements_waiting", []):
        "Aborts and releases that wait for one in progress to complete.";
}

/// Metrics of legs and settlements.
pub(crate) struct LegMetrics {
    pub retries: [Counter; 2],
    pub recomputes: Counter,
    pub misconfigured: [Counter; 2],
    pub aborts: [Counter; 2],
    pub propagation: [Histogram; 2],
    pub settling: Gauge,
    pub settlements_waiting: Gauge,
    pub abandon_wait_bound: Gauge,
    pub kept_turns: Gauge,
    kept_turn_ends: [Counter; KeptTurnEnd::ALL.len()],
    abandon_wait: Histogram,
    abandon_waits: [Counter; AbandonWaitResult::ALL.len()],
    releases: [[Counter; ReleaseMethod::ALL.len()]; SettlementCause::ALL.len()],
    settlements: [Counter; SettlementResult::ALL.len()],
}

impl LegMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let both = |family: &'static Family| Leg::BOTH.map(|leg| registry.counter(family, &[leg.label()]));
        Self {
            retries: both(&RETRIES),
            recomputes: registry.counter(&RECOMPUTES, &[]),
            misconfigured: both(&MISCONFIGURED),
            aborts: both(&ABORTS),
            propagation: Leg::BOTH.map(|leg| registry.histogram(&PROPAGATION_SECONDS, &[leg.label()])),
            settling: registry.gauge(&SETTLING, &[]),
            settlements_waiting: registry.gauge(&SETTLEMENTS_WAITING, &[]),
            abandon_wait_bound: registry.gauge(&ABANDON_WAIT_BOUND_SECONDS, &[]),
            kept_turns: registry.gauge(&KEPT_TURNS, &[]),
            kept_turn_ends: KeptTurnEnd::ALL.map(|end| registry.counter(&KEPT_TURN_ENDS, &[end.label()])),
            abandon_wait: registry.histogram(&ABANDON_WAIT_SECONDS, &[]),
            abandon_waits: AbandonWaitResult::ALL
                .map(|result| registry.counter(&ABANDON_WAITS, &[result.label()])),
            releases: SettlementCause::ALL.map(|cause| {
                ReleaseMethod::ALL.map(|via| registry.counter(&RELEASES, &[cause.label(), via.label()]))
            }),
            settlements: SettlementResult::ALL
                .map(|result| registry.counter(&SETTLEMENTS, &[result.label()])),
        }
    }

    pub(crate) fn count_release(&self, cause: SettlementCause, via: ReleaseMethod) {
        self.releases[cause as usize][via as usize].increment(1);
    }

    pub(crate) fn count_kept_turn(&self, end: KeptTurnEnd) {
        self.kept_turn_ends[end as usize].increment(1);
    }

    pub(crate) fn record_abandon_wait(&self, result: AbandonWaitResult, took: Duration) {
        self.abandon_waits[result as usize].increment(1);
        self.abandon_wait.record(took);
    }

    pub(crate) fn count_settlement(&self, result: SettlementResult) {
        self.settlements[result as usize].increment(1);
    }
}
