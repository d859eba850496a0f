//! Whether an engine that says nothing is alive.
//!
//! A decode engine's first event may be minutes away: it queues, it fetches, or it computes an answer that is not
//! streamed. A lease lives for seconds. So silence on the request's own connection
//! says nothing about the engine, and the bound on it cannot be short. An engine that lives answers `GET /health`
//! meanwhile, off its step loop, whatever the answer is. One that does not, twice in a row, has stopped, hangs or is cut
//! off: it is given up while its request's lease still lives, and another engine gets the handoff. Whether it is deaf to
//! everybody, or only for as long as this request keeps it busy, is for its health to find out.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::legs::Blame;
use crate::upstream::{CallError, Engine, Outgoing};

/// The longest wait for an answer to one question.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Questions without an answer after which a request is given up.
const UNANSWERED_MAX: u32 = 2;

/// An answer to a question is not read beyond this.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// Why an answer is not waited for any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Silent {
    /// The engine does not answer anything.
    Deaf,
    /// It lives, and has had its time.
    Late,
}

impl Silent {
    /// What it says of the engine.
    pub(crate) fn blame(self) -> Blame {
        match self {
            Self::Deaf => Blame::Deaf,
            Self::Late => Blame::Engine,
        }
    }
}

/// Waits for `answer`, at most `within` and as long as the engine is alive, which it is asked after each `pause`
/// without one.
///
/// # Errors
/// [`Silent`]: there is no answer.
///
/// # Cancel safety
/// That of `answer`.
pub(crate) async fn while_alive<T>(
    engine: &Arc<Engine>,
    pause: Duration,
    within: Duration,
    answer: impl Future<Output = T>,
) -> Result<T, Silent> {
    let mut answer = std::pin::pin!(answer);
    let begun = Instant::now();
    let mut unanswered = 0;
    loop {
        // After one question without an answer the next follows at once.
        let pause = if unanswered == 0 { pause } else { Duration::ZERO };
        let asked = async {
            // One timer for both: most answers come long before either.
            let left = within.saturating_sub(begun.elapsed());
            tokio::time::sleep(pause.min(left)).await;
            let left = within.checked_sub(begun.elapsed()).filter(|left| !left.is_zero())?;
            Some(asked_for_health(engine, ANSWER_WITHIN.min(left)).await)
        };
        let alive = tokio::select! {
            biased;
            answer = &mut answer => return Ok(answer),
            health = asked => health,
        };
        unanswered = match alive {
            Some(Ok(None)) if begun.elapsed() < within => unanswered + 1,
            Some(Ok(None)) | None => return Err(Silent::Late),
            Some(Ok(Some(_)) | Err(NotAsked)) => 0,
        };
        if unanswered == UNANSWERED_MAX {
            return Err(Silent::Deaf);
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
    let question = Outgoing::get("/health");
    // No request is sent on the question's connection. An engine that stands still while a request arrives on a kept connection
    // never sees it if the router dies before the engine goes on; on a connection of its own it does.
    let asked = async { engine.call(&question, |_| {}).await?.judged(ANSWER_BYTES_MAX).await };
    match tokio::time::timeout(within, asked).await {
        Ok(Ok(good)) => Ok(Some(good)),
        Ok(Err(CallError::NoSocket(_))) => Err(NotAsked),
        Ok(Err(_)) | Err(_) => Ok(None),
    }
}
