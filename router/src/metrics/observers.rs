//! Metrics of the access log and the traces: written and dropped. Dropping keeps requests from waiting.

use super::registry::{Counter, Registry, families};

families! {
    counter LINES("baton_router_access_log_lines_total", []): "Written lines of the access log.";
    counter LINES_DROPPED("baton_router_access_log_dropped_total", []):
        "Dropped lines of the access log: the queue was full, or the file was not writable.";
    counter SPANS("baton_router_spans_total", []): "Spans that the collector accepted.";
    counter SPANS_DROPPED("baton_router_spans_dropped_total", ["reason"]):
        "Dropped spans: `queue_full`, or `export_failed` twice.";
}

/// Metrics of the access log and the traces.
pub(crate) struct ObserverMetrics {
    pub lines: Counter,
    pub lines_dropped: Counter,
    pub spans: Counter,
    pub spans_dropped_full: Counter,
    pub spans_dropped_failed: Counter,
}

impl ObserverMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            lines: registry.counter(&LINES, &[]),
            lines_dropped: registry.counter(&LINES_DROPPED, &[]),
            spans: registry.counter(&SPANS, &[]),
            spans_dropped_full: registry.counter(&SPANS_DROPPED, &["queue_full"]),
            spans_dropped_failed: registry.counter(&SPANS_DROPPED, &["export_failed"]),
        }
    }
}
