//! The rest of a prefill whose handoff arrived early: its engine still computes while decode engines read the finished
//! blocks. A separate task reads the rest of the reply, so that the engine's load and health stay correct during any
//! other wait of the request. Dropping the tail closes the connection, which aborts the prefill.

use std::fmt;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::exchange::{Attempt, Event, Exchange};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::REPLY_BYTES_MAX;
use crate::engines::http::{CallError, ConnectionError, EngineRequestGuard, Reply, WholeReply};
use crate::legs::clock::Clock;
use crate::legs::liveness::wait_while_alive;
use crate::legs::{Fault, Verdict, fault_of};
use crate::message::sse::FrameBuffer;
use crate::message::usage::UsageScan;
use crate::metrics::Leg;

/// The rest of a reply after its handoff.
pub(crate) struct ReplyTail(pub(super) Box<Reply>);

impl fmt::Debug for ReplyTail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReplyTail")
    }
}

/// A prefill that still computes; see the module's documentation.
pub(crate) struct PrefillTail {
    /// `None` once it is detached.
    task: Option<AbortHandle>,
    failed: Option<oneshot::Receiver<Fault>>,
    ended: Arc<OnceLock<Instant>>,
}

/// The time limits of a prefill.
#[derive(Clone, Copy)]
pub(crate) struct PrefillTimeouts {
    pub sent_at: Instant,
    /// Limit on the silence, counted from `sent_at`.
    pub silence: Duration,
    /// The pause between two liveness probes.
    pub probe_interval: Duration,
}

impl PrefillTail {
    /// Reads the rest of a reply.
    pub(crate) fn start(
        clock: Clock,
        exchange: &Arc<Mutex<Exchange>>,
        attempt: Attempt,
        load: EngineRequestGuard,
        ReplyTail(reply): ReplyTail,
        timeouts: PrefillTimeouts,
    ) -> Self {
        let exchange = Arc::clone(exchange);
        let (sender, failed) = oneshot::channel();
        let ended = Arc::<OnceLock<Instant>>::default();
        let end = Arc::clone(&ended);
        let task = tokio::spawn(async move {
            let engine = Arc::clone(load.engine());
            let PrefillTimeouts { sent_at, silence, probe_interval } = timeouts;
            let left = silence.saturating_sub(sent_at.elapsed());
            let read = {
                let read = pin!(read_to_end(reply));
                wait_while_alive(&engine, probe_interval, left, read).await
            };
            // Set once, here.
            let _ = end.set(Instant::now());
            let fault = match read {
                Ok(Ok(None)) => {
                    engine.responded(Leg::Prefill, sent_at.elapsed());
                    engine.completed(Leg::Prefill);
                    let mut exchange = exchange.lock().unwrap_or_else(PoisonError::into_inner);
                    exchange.apply(Event::PrefillEnded(attempt), clock.now());
                    return;
                }
                Ok(Ok(Some(error))) => Verdict::of(&error, engine.redactor()).fault,
                Ok(Err(error)) => {
                    tracing::debug!(
                        event = "prefill_failed_after_handoff", engine = engine.authority(), %error,
                        "prefill failed after its handoff"
                    );
                    fault_of(&error)
                }
                Err(error) => error.fault(),
            };
            drop(load);
            // An ended request has no receiver; the error is ignored.
            let _ = sender.send(fault);
        });
        Self { task: Some(task.abort_handle()), failed: Some(failed), ended }
    }

    /// The end of the prefill, or the current time if it still computes.
    pub(crate) fn end_time(&self) -> Instant {
        self.ended.get().copied().unwrap_or_else(Instant::now)
    }

    /// Called when the request completes, which implies the end of the prefill. The rest of the reply is still read.
    pub(crate) fn detach(mut self) {
        self.task = None;
    }

    /// Waits until the prefill fails; forever if it does not.
    ///
    /// # Cancel safety
    /// Cancel-safe. After it has returned, it waits forever.
    pub(crate) async fn wait_for_failure(&mut self) -> Fault {
        if let Some(failed) = &mut self.failed {
            let fault = failed.await;
            self.failed = None;
            if let Ok(fault) = fault {
                return fault;
            }
        }
        std::future::pending().await
    }
}

impl Drop for PrefillTail {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Reads to the end; returns the error that the engine reported, if any.
async fn read_to_end(mut reply: Box<Reply>) -> Result<Option<WholeReply>, CallError> {
    let (mut frames, mut read) = (FrameBuffer::default(), 0);
    while let Some(chunk) = reply.chunk().await {
        let chunk = chunk?;
        read += chunk.len();
        if read > REPLY_BYTES_MAX {
            return Err(CallError::TooLarge(REPLY_BYTES_MAX));
        }
        let whole = frames.pass(chunk);
        if let Some(embedded) = frames.read(whole, &mut UsageScan::default()).error {
            return Ok(Some(reply.error_reply(embedded.status, embedded.error)));
        }
    }
    if !frames.is_done() {
        return Err(CallError::Broken(ConnectionError::Unanswered));
    }
    reply.finish();
    Ok(None)
}

/// Waits for a step that depends on the prefill, until the prefill fails.
///
/// # Errors
/// The prefill has failed, so the step cannot complete.
pub(crate) async fn unless_failed<T>(
    tail: Option<&mut PrefillTail>,
    step: Pin<&mut impl Future<Output = T>>,
) -> Result<T, Fault> {
    match tail {
        None => Ok(step.await),
        Some(tail) => tokio::select! {
            biased;
            answer = step => Ok(answer),
            fault = tail.wait_for_failure() => Err(fault),
        },
    }
}
