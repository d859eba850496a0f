//! What was decided about requests: whether another engine prefills, and by what reason engines were chosen.

use std::sync::{Arc, OnceLock};

use super::legs::Leg;
use super::registry::{Counter, Family, Registry};
use crate::routing::disaggregation::Why;
use crate::routing::policy::Reason;

static DISAGGREGATION: Family = Family::counter(
    "baton_router_disagg_decisions_total",
    &["decision", "reason"],
    "Requests by where the prefill runs, with the reason: on a prefill engine (`prefill_decode`) or on the decode engine \
     (`decode_only`). `prompt_logprobs`: the response includes prompt tokens. `fell_back`: no prefill engine was \
     available.",
);

static DECISIONS: Family = Family::counter(
    "baton_router_decisions_total",
    &["model", "leg", "policy", "reason"],
    "Choices of an engine, by policy and reason. `/explain` shows the same reason for one request.",
);

pub(super) static FAMILIES: &[&Family] = &[&DISAGGREGATION, &DECISIONS];

/// What a policy decided for one leg of a model. A reason's series begins with its first decision.
pub(crate) struct Decisions {
    registry: Arc<Registry>,
    labels: [String; 3],
    reasons: [OnceLock<Counter>; Reason::KINDS],
}

impl Decisions {
    pub(super) fn new(registry: &Arc<Registry>, model: &str, leg: Leg, policy: &str) -> Self {
        let labels = [model, leg.label(), policy].map(str::to_owned);
        Self { registry: Arc::clone(registry), labels, reasons: Default::default() }
    }

    /// Counts an engine that was chosen.
    pub(crate) fn count(&self, reason: Reason) {
        let [model, leg, policy] = &self.labels;
        let counter = || self.registry.counter(&DECISIONS, &[model, leg, policy, reason.label()]);
        self.reasons[reason.kind()].get_or_init(counter).increment(1);
    }
}

/// What was decided about requests.
pub(crate) struct RoutingMetrics {
    disaggregations: [Counter; Why::ALL.len()],
}

impl RoutingMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let counter = |why: Why| registry.counter(&DISAGGREGATION, &[why.decision(), why.label()]);
        Self { disaggregations: Why::ALL.map(counter) }
    }

    /// Counts whether a request's prefill was another engine's; once for each request.
    pub(crate) fn disaggregation(&self, why: Why) {
        self.disaggregations[why as usize].increment(1);
    }
}
