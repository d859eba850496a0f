//! A prefill whose handoff came before its end: its engine computes on, and decode engines read what is done already.
//! The rest of its reply is read on a task of its own, so that its engine's load and health are right whatever the
//! request waits for; whoever drops it cuts the connection, which ends the prefill.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::exchange::{Attempt, Event, Exchange};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::REPLY_BYTES_MAX;
use crate::engines::http::{CallError, InFlight, Lost, Reply, Whole};
use crate::legs::clock::Clock;
use crate::legs::liveness::while_alive;
use crate::legs::{Blame, Verdict, blame};
use crate::message::sse::Frames;
use crate::message::usage::Seen;
use crate::metrics::Leg;

/// What still comes of a reply after its handoff.
pub(crate) struct Rest(pub(super) Box<Reply>);

impl fmt::Debug for Rest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Rest")
    }
}

/// See the module's documentation.
pub(crate) struct Computing {
    /// None once it is let go.
    task: Option<AbortHandle>,
    failed: Option<oneshot::Receiver<Blame>>,
    ended: Arc<OnceLock<Instant>>,
}

/// How long an engine is waited for.
#[derive(Clone, Copy)]
pub(crate) struct Patience {
    pub asked: Instant,
    /// From then on.
    pub silence: Duration,
    /// It is asked for a sign of life after each of these.
    pub pause: Duration,
}

impl Computing {
    /// Reads the rest of a reply to its end.
    pub(crate) fn start(
        clock: Clock,
        exchange: &Arc<Mutex<Exchange>>,
        (attempt, load): (Attempt, InFlight),
        Rest(reply): Rest,
        patience: Patience,
    ) -> Self {
        let exchange = Arc::clone(exchange);
        let (tell, failed) = oneshot::channel();
        let ended = Arc::<OnceLock<Instant>>::default();
        let end = Arc::clone(&ended);
        let task = tokio::spawn(async move {
            let engine = Arc::clone(load.engine());
            let Patience { asked, silence, pause } = patience;
            let left = silence.saturating_sub(asked.elapsed());
            let read = while_alive(&engine, pause, left, read(reply)).await;
            // Set once, here.
            let _ = end.set(Instant::now());
            let blame = match read {
                Ok(Ok(None)) => {
                    engine.spoke(Leg::Prefill, asked.elapsed());
                    engine.served(Leg::Prefill);
                    let mut exchange = exchange.lock().unwrap_or_else(PoisonError::into_inner);
                    exchange.apply(Event::PrefillEnded(attempt), clock.now());
                    return;
                }
                Ok(Ok(Some(told))) => Verdict::of(&told, engine.hosts()).blame,
                Ok(Err(error)) => {
                    tracing::debug!(engine = engine.authority(), %error, "prefill failed after its handoff");
                    blame(&error)
                }
                Err(silent) => silent.blame(),
            };
            drop(load);
            // A request that is over does not care.
            let _ = tell.send(blame);
        });
        Self { task: Some(task.abort_handle()), failed: Some(failed), ended }
    }

    /// When the prefill had ended; now, if it has not.
    pub(crate) fn ended_at(&self) -> Instant {
        self.ended.get().copied().unwrap_or_else(Instant::now)
    }

    /// The request has ended well, so the prefill has: the rest of its answer is read to its end.
    pub(crate) fn let_go(mut self) {
        self.task = None;
    }

    /// Waits until the prefill has failed: for ever, if it does not.
    ///
    /// # Cancel safety
    /// Nothing is lost. Once it has told, it waits for ever.
    pub(crate) async fn failed(&mut self) -> Blame {
        if let Some(failed) = &mut self.failed {
            let told = failed.await;
            self.failed = None;
            if let Ok(blame) = told {
                return blame;
            }
        }
        std::future::pending().await
    }
}

impl Drop for Computing {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Reads to the end; says what error the engine told of, if it did.
async fn read(mut reply: Box<Reply>) -> Result<Option<Whole>, CallError> {
    let (mut frames, mut read) = (Frames::default(), 0);
    while let Some(chunk) = reply.chunk().await {
        let chunk = chunk?;
        read += chunk.len();
        if read > REPLY_BYTES_MAX {
            return Err(CallError::TooLarge(REPLY_BYTES_MAX));
        }
        let whole = frames.pass(chunk);
        if let Some(told) = frames.read(whole, &mut Seen::default()).told {
            return Ok(Some(reply.told(told.status, told.error)));
        }
    }
    if !frames.is_done() {
        return Err(CallError::Broken(Lost::Unanswered));
    }
    reply.finish();
    Ok(None)
}

/// Waits for what follows a prefill, as long as that does not fail.
///
/// # Errors
/// The prefill has failed: nothing will come.
///
/// # Cancel safety
/// That of `what`.
pub(crate) async fn unless_failed<T>(
    computing: Option<&mut Computing>,
    what: impl Future<Output = T>,
) -> Result<T, Blame> {
    match computing {
        None => Ok(what.await),
        Some(computing) => tokio::select! {
            biased;
            answer = what => Ok(answer),
            blame = computing.failed() => Err(blame),
        },
    }
}
