//! The liveness probe of an engine: at most one is pending, shared by all requests that wait for its result.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared};
use tokio::time::Instant;

use crate::engines::health::FailureKind;

/// Maximum wait for the reply to one probe.
pub(crate) const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// The result of a liveness probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ProbeResult {
    /// The engine replied; the value is whether its status was good.
    Answered(bool),
    /// No reply, but bytes of the engine on another connection.
    Busy,
    /// No reply, and no bytes on any connection.
    Unresponsive,
    /// No connection could be made.
    Unreachable(FailureKind),
    /// This machine lacked a resource. It shows nothing about the engine.
    NotSent,
}

impl ProbeResult {
    /// Whether it shows that the engine is alive.
    pub(crate) fn shows_life(self) -> bool {
        match self {
            Self::Answered(_) | Self::Busy => true,
            Self::Unresponsive | Self::Unreachable(_) | Self::NotSent => false,
        }
    }
}

/// The pending probe of an engine, shared by all callers.
#[derive(Default)]
pub(crate) struct SharedProbe(Mutex<Option<PendingProbe>>);

struct PendingProbe {
    started_at: Instant,
    /// The engine's activity count at that time.
    activity_count: u64,
    result: WeakShared<BoxFuture<'static, ProbeResult>>,
}

impl fmt::Debug for SharedProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedProbe")
    }
}

impl SharedProbe {
    /// The pending probe, or a new one, with the engine's activity count when it started. It ends when no request
    /// waits for it.
    pub(crate) fn join(
        &self,
        activity_count: u64,
        probe: impl FnOnce() -> BoxFuture<'static, ProbeResult>,
    ) -> (u64, Shared<BoxFuture<'static, ProbeResult>>) {
        let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A probe that has been pending for a whole timeout gets no new callers, because its connection may be
        // broken.
        if let Some(pending) = pending.as_ref().filter(|pending| pending.started_at.elapsed() < PROBE_TIMEOUT)
            && let Some(result) = pending.result.upgrade().filter(|result| result.peek().is_none())
        {
            return (pending.activity_count, result);
        }
        let result = probe().shared();
        *pending = result.downgrade().map(|result| PendingProbe {
            started_at: Instant::now(),
            activity_count,
            result,
        });
        (activity_count, result)
    }
}
