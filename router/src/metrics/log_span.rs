//! The span of log lines about one request.

use baton_connector::RequestId;
use tracing::field::DisplayValue;

/// The span `request{id}`, as the `parent` of a log line: `tracing::warn!(parent: request_span!(id), event = …)`.
/// `tracing` evaluates the parent only for a line that is written, so a request without log lines costs nothing.
///
/// A filter that shows a line shows its span. The span has the level `error`, which every filter for the line's module
/// includes if it has no directive for spans. Expanded in that module, it also has the line's target.
macro_rules! request_span {
    ($id:expr) => {
        &tracing::error_span!("request", id = $crate::metrics::log_span::display($id))
    };
}
pub(crate) use request_span;

/// The field `id`. `None`, as for a probe, leaves it out.
pub(crate) fn display<'a>(id: impl Into<Option<&'a RequestId>>) -> Option<DisplayValue<&'a RequestId>> {
    id.into().map(tracing::field::display)
}
