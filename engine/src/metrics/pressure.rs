//! Metrics of an engine without room or time for all of its requests.

use metrics::Counter;

use super::Registrar;
use crate::scheduler::SchedulerLoad;

/// What a sequence did when its deadline passed.
const PHASES: [&str; 3] = ["waiting", "fetching", "running"];

/// Preemptions and deadlines.
pub(super) struct PressureMetrics {
    preemptions: Counter,
    recomputed: Counter,
    /// By phase.
    timeouts: [Counter; PHASES.len()],
}

impl PressureMetrics {
    pub(super) fn new(make: &Registrar<'_>) -> Self {
        let help = "Sequences ended at the deadline of their request, by phase.";
        Self {
            preemptions: make.counter("vllm:num_preemptions_total", "Preemptions."),
            recomputed: make
                .counter("baton_recomputed_tokens_total", "Tokens computed again after preemptions."),
            timeouts: PHASES
                .map(|phase| make.counter_with("baton_deadlines_exceeded_total", help, "phase", phase)),
        }
    }

    pub(super) fn publish(&self, load: &SchedulerLoad) {
        self.preemptions.absolute(load.preemptions);
        self.recomputed.absolute(load.recomputed_tokens);
    }

    pub(super) fn timed_out(&self, phase: &str) {
        if let Some(at) = PHASES.iter().position(|known| *known == phase) {
            self.timeouts[at].increment(1);
        }
    }
}
