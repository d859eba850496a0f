//! One attempt of the decode leg: whether the engine takes the request. What it then says is passed on by the
//! pump.

use std::sync::Arc;
use std::time::Duration;

use baton_connector::exchange::Failure;

use super::{Blame, Meaning, Refusal, Verdict};
use crate::alive::while_alive;
use crate::upstream::{CallError, Engine, Outgoing, Reply};

/// A refusal is not read beyond this; a larger one is judged by its status.
const REFUSAL_BYTES_MAX: usize = 64 * 1024;

/// What an attempt came to.
pub(crate) enum Decoding {
    /// The engine took it: the head of a good answer is here.
    Accepted(Box<Reply>),
    /// The engine refused the request itself.
    Refused(Refusal),
    /// The engine failed before it took the request.
    Failed(Failure, Refusal, Meaning, Blame),
}

/// Asks an engine and waits, at most `first_byte` long and only while it shows signs of life, for it to take the
/// request. It is asked for one after each `pause`.
///
/// # Cancel safety
/// Dropping the future cuts the connection, which aborts the request.
pub(crate) async fn ask(
    engine: &Arc<Engine>,
    outgoing: &Outgoing,
    first_byte: Duration,
    pause: Duration,
) -> Decoding {
    let call = async {
        let reply = engine.call(outgoing, |_| {}).await?;
        if reply.status().is_success() {
            return Ok(Ok(reply));
        }
        reply.whole_or_bare(REFUSAL_BYTES_MAX).await.map(Err)
    };
    match while_alive(engine, pause, first_byte, call).await {
        Ok(Ok(Ok(reply))) => Decoding::Accepted(Box::new(reply)),
        Ok(Ok(Err(whole))) => {
            let verdict = Verdict::of(&whole, engine.hosts());
            match verdict.failure() {
                Some(failure) => Decoding::Failed(failure, verdict.refusal, verdict.meaning, verdict.blame),
                None => Decoding::Refused(verdict.refusal),
            }
        }
        Ok(Err(CallError::NotReached)) => {
            Decoding::Failed(Failure::NotReached, Refusal::unreachable(), Meaning::Trouble, Blame::Nobody)
        }
        Ok(Err(error)) => {
            tracing::debug!(engine = engine.authority(), %error, "decode failed");
            Decoding::Failed(Failure::Unknown, Refusal::broken(), Meaning::Trouble, Blame::Engine)
        }
        Err(silent) => {
            Decoding::Failed(Failure::Unknown, Refusal::silent(), Meaning::Trouble, silent.blame())
        }
    }
}
