//! Detects whether an engine without a response is alive.
//!
//! A decode engine's first event may take minutes: it queues, it fetches, or it computes a response that is not
//! streamed. A lease lasts for seconds. Silence on the request's own connection therefore proves nothing, and its bound
//! cannot be short. Bytes on any other connection of the engine prove that the engine is alive.
//!
//! Without such bytes the router sends a liveness probe: a live engine answers its health path outside its step loop,
//! with any result. An engine that leaves two consecutive probes unanswered has stopped, hangs or is unreachable. The
//! attempt ends while the request's lease is still valid, and another engine gets the handoff. The engine's health
//! determines whether the engine is unresponsive for all requests or only while it handles this one.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use tokio::time::Instant;

use crate::engines::health::FailureKind;
use crate::engines::http::{DialError, Engine, EngineRequest};
use crate::engines::probe::{PROBE_TIMEOUT, ProbeResult};
use crate::legs::Fault;

/// Consecutive unanswered probes after which an attempt ends.
const UNANSWERED_MAX: u32 = 2;

/// Limit on the answer to a probe.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// Why the wait for an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProbeError {
    /// The engine is unresponsive.
    Unresponsive,
    /// The engine is alive, but the time is up.
    TimedOut,
}

impl ProbeError {
    /// The fault attribution.
    pub(crate) fn fault(self) -> Fault {
        match self {
            Self::Unresponsive => Fault::Unresponsive,
            Self::TimedOut => Fault::Engine,
        }
    }
}

/// Waits for `answer`, at most `within` and while the engine is alive. A probe follows each `pause` without bytes on
/// any of the engine's connections.
///
/// # Errors
/// [`ProbeError`]: there is no answer.
pub(crate) async fn wait_while_alive<T>(
    engine: &Arc<Engine>,
    pause: Duration,
    within: Duration,
    mut answer: Pin<&mut impl Future<Output = T>>,
) -> Result<T, ProbeError> {
    let begun = Instant::now();
    let mut unanswered = 0;
    loop {
        // After one unanswered probe the next follows at once.
        let pause = if unanswered == 0 { pause } else { Duration::ZERO };
        let received = engine.activity_count();
        let probe_after_pause = async {
            // One timer for pause and limit: most answers arrive long before.
            let left = within.saturating_sub(begun.elapsed());
            tokio::time::sleep(pause.min(left)).await;
            let left = within.checked_sub(begun.elapsed()).filter(|left| !left.is_zero())?;
            if engine.activity_count() != received {
                return Some(ProbeResult::Busy);
            }
            Some(probe(engine, PROBE_TIMEOUT.min(left)).await)
        };
        let result = tokio::select! {
            biased;
            answer = &mut answer => return Ok(answer),
            result = probe_after_pause => result,
        };
        unanswered = match result {
            Some(ProbeResult::Unresponsive | ProbeResult::Unreachable(_)) if begun.elapsed() < within => {
                unanswered + 1
            }
            Some(ProbeResult::Unresponsive | ProbeResult::Unreachable(_)) | None => {
                return Err(ProbeError::TimedOut);
            }
            Some(ProbeResult::Answered(_) | ProbeResult::Busy | ProbeResult::NotSent) => 0,
        };
        if unanswered == UNANSWERED_MAX {
            return Err(ProbeError::Unresponsive);
        }
    }
}

/// Sends a liveness probe, shared by all concurrent callers.
pub(crate) async fn probe(engine: &Arc<Engine>, within: Duration) -> ProbeResult {
    // Concurrent callers wait for their own time limits, so the probe lasts longer than the shortest one.
    let lasts = PROBE_TIMEOUT.max(within);
    let (received, answer) =
        engine.probe.join(engine.activity_count(), || send_probe(Arc::clone(engine), lasts).boxed());
    match tokio::time::timeout(within, answer).await.unwrap_or(ProbeResult::Unresponsive) {
        ProbeResult::Unresponsive | ProbeResult::Unreachable(_) if engine.activity_count() != received => {
            ProbeResult::Busy
        }
        result => result,
    }
}

/// One request of the protocol's health path on a new connection; idle connections are for requests. Suppose a stopped
/// engine had such a request on an idle connection: if the router dies before the engine continues, the engine never
/// reads that request.
async fn send_probe(engine: Arc<Engine>, within: Duration) -> ProbeResult {
    let request = EngineRequest::get(engine.protocol().health_path());
    let call = async {
        let connection = match engine.dial(within).await {
            Ok(connection) => connection,
            Err(DialError::OutOfResources(_)) => return ProbeResult::NotSent,
            Err(DialError::Refused | DialError::Unanswered | DialError::NoHttp2) => {
                return ProbeResult::Unreachable(FailureKind::Unreachable);
            }
            Err(DialError::Unresolved) => return ProbeResult::Unreachable(FailureKind::Unresolved),
        };
        let reply = engine.call_on(connection, &request).await;
        match async { reply?.read_health(ANSWER_BYTES_MAX).await }.await {
            Ok(good) => ProbeResult::Answered(good),
            Err(_) => ProbeResult::Unresponsive,
        }
    };
    tokio::time::timeout(within, call).await.unwrap_or(ProbeResult::Unresponsive)
}
