//! What was decided about requests: whether another engine prefills, and by what reason engines were chosen.

use super::registry::{Counter, Family, Registry};
use crate::disaggregation::Why;

static DISAGGREGATION: Family = Family::counter(
    "baton_router_disagg_decisions_total",
    &["decision", "reason"],
    "Requests whose prefill was sent to another engine (`prefill_decode`) or left to the decode engine \
     (`decode_only`), and why; each once. `prompt_logprobs` is for answers that tell of the prompt's tokens, too; \
     `fell_back` for those that no prefill engine could be had for.",
);

pub(super) static FAMILIES: &[&Family] = &[&DISAGGREGATION];

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
