//! The time in which a deployment has to detect that a client's host has vanished.

/// The default of Baton's router.
pub(crate) const NOTICED_MS: u64 = 20_000;
/// The interval between keepalive probes is the limit divided by this, and at least a second
/// (`router/src/engines/presence.rs`). The last probe can just miss the limit.
const PROBES: u64 = 8;
const PROBES_APART_US: u64 = 1_000_000;

/// Adds the interval between two probes to the limit, microseconds.
pub(crate) fn add_probe_interval(noticed_us: u64) -> u64 {
    noticed_us.saturating_add((noticed_us / PROBES).max(PROBES_APART_US))
}
