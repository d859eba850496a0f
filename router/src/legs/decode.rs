//! One attempt of the decode leg: whether the engine takes the request. What it then says is passed on by the
//! pump.

use std::sync::Arc;
use std::time::Duration;

use baton_connector::exchange::Failure;

use super::{Refusal, failure_of};
use crate::upstream::{CallError, Engine, Outgoing, Reply};

/// A refusal is not read beyond this.
const REFUSAL_BYTES_MAX: usize = 64 * 1024;

/// What an attempt came to.
pub(crate) enum Decoding {
    /// The engine took it: the head of a good answer is here.
    Accepted(Box<Reply>),
    /// The engine refused the request itself.
    Refused(Refusal),
    /// The engine failed before it took the request.
    Failed(Failure, Refusal),
}

/// Asks an engine and waits, at most `first_byte` long, for it to take the request.
///
/// # Cancel safety
/// Dropping the future cuts the connection, which aborts the request.
pub(crate) async fn ask(engine: &Arc<Engine>, outgoing: &Outgoing, first_byte: Duration) -> Decoding {
    let call = async {
        let reply = engine.call(outgoing, |_| {}).await?;
        if reply.status().is_success() {
            return Ok(Ok(reply));
        }
        reply.whole(REFUSAL_BYTES_MAX).await.map(Err)
    };
    match tokio::time::timeout(first_byte, call).await {
        Ok(Ok(Ok(reply))) => Decoding::Accepted(Box::new(reply)),
        Ok(Ok(Err(whole))) => {
            let refusal = Refusal::of(&whole);
            match failure_of(whole.status) {
                Some(failure) => Decoding::Failed(failure, refusal),
                None => Decoding::Refused(refusal),
            }
        }
        Ok(Err(CallError::NotReached)) => Decoding::Failed(Failure::NotReached, Refusal::unreachable()),
        Ok(Err(error)) => {
            tracing::warn!(engine = engine.authority(), %error, "decode failed");
            Decoding::Failed(Failure::Unknown, Refusal::broken())
        }
        Err(_elapsed) => Decoding::Failed(Failure::Unknown, Refusal::silent()),
    }
}
