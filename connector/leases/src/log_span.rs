//! The span of log lines about one lease.
//!
//! A span is the `parent` of a log line: `tracing::warn!(parent: lease_span!(handle), event = …)`. `tracing` evaluates
//! the parent only for a line that is written, so a lease without log lines costs nothing.
//!
//! A filter that shows a line shows its span. The span has the level `error`, which every filter for the line's module
//! includes. Expanded in that module, it also has the line's target.

/// The span `lease{handle}`. The handle is a secret, so the span has only its first 8 digits. The caller's crate
/// depends on `tracing`.
#[macro_export]
macro_rules! lease_span {
    ($handle:expr) => {
        &tracing::error_span!("lease", handle = %format_args!("{:08x}", $handle.0 >> 96))
    };
}
