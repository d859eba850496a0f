//! Durations of steps, beside the time target and what the engine expected.

use std::time::Duration;

use metrics::{Gauge, Histogram};

use super::Registrar;
use crate::scheduler::StepTiming;

/// Buckets of steps: fine around the default targets of 30 and 100 ms, and twice these.
const STEP_SECONDS: [f64; 17] =
    [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.045, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0, 60.0];

/// The metrics of the steps of one engine core.
pub(super) struct StepMetrics {
    target: Gauge,
    took: Histogram,
    expected: Histogram,
}

impl StepMetrics {
    pub(super) fn new(make: &Registrar<'_>) -> Self {
        Self {
            target: make.gauge("baton_engine_step_target_seconds", "Time target of a step; 0 for none."),
            took: make.histogram(
                "baton_engine_step_seconds",
                "Duration of a step, from its plan to the next one.",
                &STEP_SECONDS,
            ),
            expected: make.histogram(
                "baton_engine_step_expected_seconds",
                "Expected duration of a step when it was planned. Only with a time target.",
                &STEP_SECONDS,
            ),
        }
    }

    pub(super) fn set_target(&self, target: Duration) {
        self.target.set(target.as_secs_f64());
    }

    pub(super) fn record(&self, timing: StepTiming) {
        self.took.record(timing.took.as_secs_f64());
        if let Some(expected) = timing.expected {
            self.expected.record(expected.as_secs_f64());
        }
    }
}
