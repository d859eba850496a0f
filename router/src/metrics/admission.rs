//! The queue, and the memory of request bodies and responses.

use std::time::Duration;

use super::registry::{Counter, Gauge, Histogram, Registry, families};
use crate::config::Priority;

/// Seconds. Capacity is freed after one token at the earliest and after a long generation at the latest.
const SECONDS: &[f64] =
    &[0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 3600.0];

families! {
    gauge WAITING("baton_router_queue_requests", ["priority"]):
        "Requests that wait for a decode engine, or for a prefill engine with a decode engine reserved.";
    counter OUTCOMES("baton_router_queue_outcomes_total", ["outcome"]):
        "Ended waits for an engine, of both legs, and requests that the queue refused. Requests that did not wait are \
         not counted.";
    histogram WAITED("baton_router_queue_wait_seconds", [], SECONDS):
        "Time of requests in the queue, for all outcomes.";
    gauge BODY_BYTES("baton_router_body_bytes", []):
        "Bytes of request bodies in memory, of at most `limits.body_bytes_total`.";
    gauge ANSWER_BYTES("baton_router_answer_bytes", []):
        "Bytes of whole responses in memory, of at most `limits.body_bytes_total`. Responses of one piece are not \
         counted.";
}

baton_connector::labelled! {
    /// How a wait ended, or why it did not begin.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum QueueOutcome {
        /// An engine had capacity.
        Dispatched => "dispatched",
        /// The queue was full.
        RejectedFull => "rejected_full",
        /// The deadline would have passed in the queue.
        RejectedLate => "rejected_late",
        /// The deadline passed in the queue.
        Expired => "expired",
        /// The client disconnected, or the router stopped.
        ClientGone => "client_gone",
        /// No engine could serve the request.
        NoCapacity => "no_capacity",
    }
}

/// Handles, created once.
pub(crate) struct AdmissionMetrics {
    waiting: [Gauge; 3],
    outcomes: [Counter; 6],
    seconds: Histogram,
    pub body_bytes: Gauge,
    pub answer_bytes: Gauge,
}

impl AdmissionMetrics {
    pub(crate) fn new(registry: &Registry) -> Self {
        Self {
            waiting: Priority::ALL.map(|priority| registry.gauge(&WAITING, &[priority.label()])),
            outcomes: QueueOutcome::ALL.map(|outcome| registry.counter(&OUTCOMES, &[outcome.label()])),
            seconds: registry.histogram(&WAITED, &[]),
            body_bytes: registry.gauge(&BODY_BYTES, &[]),
            answer_bytes: registry.gauge(&ANSWER_BYTES, &[]),
        }
    }

    pub(crate) fn waiting(&self, priority: Priority) -> &Gauge {
        &self.waiting[priority as usize]
    }

    pub(crate) fn count_outcome(&self, outcome: QueueOutcome) {
        self.outcomes[outcome as usize].increment(1);
    }

    /// Requests with this outcome so far.
    #[cfg(test)]
    pub(crate) fn ended(&self, outcome: QueueOutcome) -> u64 {
        self.outcomes[outcome as usize].get()
    }

    /// Records that a request left the queue after this time.
    pub(crate) fn record_wait(&self, outcome: QueueOutcome, after: Duration) {
        self.count_outcome(outcome);
        self.seconds.record(after);
    }
}
