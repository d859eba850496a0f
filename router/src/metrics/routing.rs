//! What was decided about requests: whether another engine prefills, and by what reason engines were chosen.

use super::registry::{Counter, Family, Registry};
use crate::disaggregation::{Disaggregation, Why};

static DISAGGREGATION: Family = Family::counter(
    "baton_router_disagg_decisions_total",
    &["decision", "reason"],
    "Requests whose prefill was sent to another engine (`prefill_decode`) or left to the decode engine \
     (`decode_only`), and why: `prompt_logprobs` is for answers that tell of the prompt's tokens, too.",
);

pub(super) static FAMILIES: &[&Family] = &[&DISAGGREGATION];

/// What was decided about requests.
pub(crate) struct RoutingMetrics {
    disaggregations: [(Disaggregation, Counter); Why::ALL.len()],
}

impl RoutingMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let counter = |why: Why| {
            let decided = match why {
                Why::Always | Why::WorthIt => Disaggregation::Remote(why),
                _ => Disaggregation::Local(why),
            };
            (decided, registry.counter(&DISAGGREGATION, &[decided.label(), why.label()]))
        };
        Self { disaggregations: Why::ALL.map(counter) }
    }

    /// Counts whether a request's prefill was sent to another engine.
    pub(crate) fn disaggregation(&self, decided: Disaggregation) {
        if let Some((_, counter)) = self.disaggregations.iter().find(|(d, _)| *d == decided) {
            counter.increment(1);
        }
    }
}
