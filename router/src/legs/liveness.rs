//! Whether an engine that says nothing is alive.
//!
//! A decode engine's first event may be minutes away: it queues, it fetches, or it computes an answer that is not
//! streamed. A lease lives for seconds. So silence on the request's own connection
//! says nothing about the engine, and the bound on it cannot be short. Bytes on any other connection of the engine show
//! that it lives. Where none come, it is asked: an engine that lives answers `GET /health`, off its step loop, whatever the
//! answer is. One from which nothing comes at all, for two questions in a row, has stopped, hangs or is cut
//! off: it is given up while its request's lease still lives, and another engine gets the handoff. Whether it is deaf to
//! everybody, or only for as long as this request keeps it busy, is for its health to find out.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use tokio::time::Instant;

use crate::engines::health::Sign;
use crate::engines::http::{Engine, NoConnection, Outgoing};
use crate::engines::liveness::{ANSWER_WITHIN, Pulse};
use crate::legs::Blame;

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

/// Waits for `answer`, at most `within` and as long as the engine is alive: after each `pause` in which nothing came of it,
/// on any of its connections, it is asked.
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
        let heard = engine.heard();
        let asked = async {
            // One timer for both: most answers come long before either.
            let left = within.saturating_sub(begun.elapsed());
            tokio::time::sleep(pause.min(left)).await;
            let left = within.checked_sub(begun.elapsed()).filter(|left| !left.is_zero())?;
            if engine.heard() != heard {
                return Some(Pulse::Busy);
            }
            Some(ask(engine, ANSWER_WITHIN.min(left)).await)
        };
        let pulse = tokio::select! {
            biased;
            answer = &mut answer => return Ok(answer),
            pulse = asked => pulse,
        };
        unanswered = match pulse {
            Some(Pulse::Silent | Pulse::Unreachable(_)) if begun.elapsed() < within => unanswered + 1,
            Some(Pulse::Silent | Pulse::Unreachable(_)) | None => return Err(Silent::Late),
            Some(Pulse::Answered(_) | Pulse::Busy | Pulse::Unasked) => 0,
        };
        if unanswered == UNANSWERED_MAX {
            return Err(Silent::Deaf);
        }
    }
}

/// Asks an engine whether it lives, together with all who ask meanwhile.
pub(crate) async fn ask(engine: &Arc<Engine>, within: Duration) -> Pulse {
    // Those who join wait as long as they want to: it lasts longer than the shortest of them.
    let lasts = ANSWER_WITHIN.max(within);
    let (heard, answer) =
        engine.question.join(engine.heard(), || question(Arc::clone(engine), lasts).boxed());
    match tokio::time::timeout(within, answer).await.unwrap_or(Pulse::Silent) {
        Pulse::Silent | Pulse::Unreachable(_) if engine.heard() != heard => Pulse::Busy,
        pulse => pulse,
    }
}

/// One `GET /health`, on a connection of its own: the kept ones are for requests. An engine that stands still while a
/// request arrives on a kept connection never sees it if the router dies before the engine goes on.
async fn question(engine: Arc<Engine>, within: Duration) -> Pulse {
    let question = Outgoing::get("/health");
    let asked = async {
        let connection = match engine.dial(within).await {
            Ok(connection) => connection,
            Err(NoConnection::Ours(_)) => return Pulse::Unasked,
            Err(NoConnection::Refused | NoConnection::Unanswered) => {
                return Pulse::Unreachable(Sign::Unreachable);
            }
            Err(NoConnection::Nameless) => return Pulse::Unreachable(Sign::Nameless),
        };
        let reply = engine.call_on(connection, &question).await;
        match async { reply?.judged(ANSWER_BYTES_MAX).await }.await {
            Ok(good) => Pulse::Answered(good),
            Err(_) => Pulse::Silent,
        }
    };
    tokio::time::timeout(within, asked).await.unwrap_or(Pulse::Silent)
}
