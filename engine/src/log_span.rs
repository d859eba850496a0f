//! The span of log lines about one request. The span of a lease is [`baton_connector_leases::lease_span!`].
//!
//! A span is the `parent` of a log line: `tracing::warn!(parent: request_span!(id), event = …)`. `tracing` evaluates
//! the parent only for a line that is written, so a request without log lines costs nothing.
//!
//! A filter that shows a line shows its span. The span has the level `error`, which every filter for the line's module
//! includes. Expanded in that module, it also has the line's target.

use baton_connector::RequestId;
use tracing::field::DisplayValue;

/// The span `request{id}`.
macro_rules! request_span {
    ($id:expr) => {
        &tracing::error_span!("request", id = $crate::log_span::display($id))
    };
}
pub(crate) use request_span;

/// The field `id`. `None`, for a sequence that has ended, leaves it out.
pub(crate) fn display<'a>(id: impl Into<Option<&'a RequestId>>) -> Option<DisplayValue<&'a RequestId>> {
    id.into().map(tracing::field::display)
}
