//! The endpoint picker: requests of gateways and the time of choices.

use std::time::Duration;

use super::registry::{Counter, Histogram, Registry, families};

/// Seconds. A choice takes microseconds, a wait in the queue as long as a generation.
const SECONDS: &[f64] = &[0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0];

families! {
    counter REQUESTS("baton_picker_requests_total", ["outcome"]):
        "Requests of gateways, by outcome. `forwarded`: the response ended or the gateway closed the stream after the \
         choice. `client_gone`: the stream ended before the choice.";
    histogram CHOICE("baton_picker_choice_seconds", [], SECONDS):
        "Time from the last byte of a request to the reply with an endpoint, with the wait in the queue.";
}

baton_connector::labelled! {
    /// How a request of a gateway ended.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum PickOutcome {
        /// The gateway received an endpoint.
        Forwarded => "forwarded",
        /// 429: engines, the queue or a limit are full.
        Shed => "shed",
        /// 503: no engine is ready.
        Unavailable => "unavailable",
        /// Another error: the request itself is at fault.
        Rejected => "rejected",
        /// The client disconnected, or the gateway answered itself, before the choice.
        ClientGone => "client_gone",
        /// The gateway did not keep to the protocol.
        ProtocolError => "protocol_error",
    }
}

/// Handles of a picker.
pub(crate) struct PickerMetrics {
    requests: [Counter; PickOutcome::ALL.len()],
    choice: Histogram,
}

impl PickerMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            requests: PickOutcome::ALL.map(|outcome| registry.counter(&REQUESTS, &[outcome.label()])),
            choice: registry.histogram(&CHOICE, &[]),
        }
    }

    pub(crate) fn count(&self, outcome: PickOutcome) {
        self.requests[outcome as usize].increment(1);
    }

    pub(crate) fn record_choice(&self, took: Duration) {
        self.choice.record(took);
    }
}
