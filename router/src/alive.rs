//! Whether an engine that says nothing is alive.
//!
//! A decode engine sends the head of its answer with its first event, which may be minutes away: it queues, it fetches,
//! or it computes an answer that is not streamed. A lease lives for seconds. So silence on the request's own connection
//! says nothing about the engine, and the bound on it cannot be short. An engine that lives answers `GET /health`
//! meanwhile, off its step loop, whatever the answer is. One that does not, twice in a row, has stopped, hangs or is cut
//! off: it is given up while its request's lease still lives, and another engine gets the handoff. Whether it is deaf to
//! everybody, or only for as long as this request keeps it busy, is for its health to find out.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::Method;
use hyper::header::HeaderMap;

use crate::upstream::{CallError, Engine, Outgoing};

/// The longest wait for an answer to one question.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Questions without an answer after which a request is given up.
const UNANSWERED_MAX: u32 = 2;

/// An answer to a question is not read beyond this.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// The engine does not answer anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Deaf;

/// Waits for `answer` as long as the engine is alive, which it is asked after each `pause` without one.
///
/// # Cancel safety
/// That of `answer`.
pub(crate) async fn while_alive<T>(
    engine: &Arc<Engine>,
    pause: Duration,
    answer: impl Future<Output = T>,
) -> Result<T, Deaf> {
    let mut answer = std::pin::pin!(answer);
    let mut unanswered = 0;
    loop {
        // After one question without an answer the next follows at once.
        let pause = if unanswered == 0 { pause } else { Duration::ZERO };
        let asked = async {
            tokio::time::sleep(pause).await;
            asked_for_health(engine, ANSWER_WITHIN).await
        };
        tokio::select! {
            biased;
            answer = &mut answer => return Ok(answer),
            health = asked => unanswered = if health == Ok(None) { unanswered + 1 } else { 0 },
        }
        if unanswered == UNANSWERED_MAX {
            return Err(Deaf);
        }
    }
}

/// This machine could not ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotAsked;

/// Asks an engine for its health: `None` when it answers nothing in time, or whether it says that it is well.
///
/// # Errors
/// [`NotAsked`] says nothing of the engine.
pub(crate) async fn asked_for_health(
    engine: &Arc<Engine>,
    within: Duration,
) -> Result<Option<bool>, NotAsked> {
    let question = Outgoing {
        method: Method::GET,
        path: "/health",
        headers: HeaderMap::new(),
        body: Bytes::new().into(),
    };
    let asked = async { engine.call(&question, |_| {}).await?.whole(ANSWER_BYTES_MAX).await };
    match tokio::time::timeout(within, asked).await {
        Ok(Ok(answer)) => Ok(Some(answer.status.is_success())),
        Ok(Err(CallError::NoSocket(_))) => Err(NotAsked),
        Ok(Err(_)) | Err(_) => Ok(None),
    }
}
