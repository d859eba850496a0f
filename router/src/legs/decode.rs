//! One attempt of the decode leg: whether the engine takes the request. What it then says is passed on by the
//! pump.
//!
//! The head of a stream says nothing: stock vLLM sends it before it has begun, and tells of blocks that it cannot fetch,
//! or of its own death, in the stream. So an engine has taken a request that is streamed once its first event is here,
//! and an event that tells of an error instead is a refusal like any other: the client has seen nothing yet, and another
//! engine gets the same handoff.

use std::sync::Arc;
use std::time::Duration;

use baton_connector::exchange::Failure;
use bytes::{Bytes, BytesMut};
use hyper::StatusCode;
use memchr::memmem;

use super::{Blame, Meaning, Refusal, Verdict, note_lack, unreadable};
use crate::engines::http::{CallError, Engine, Lost, Outgoing, Reply, Whole};
use crate::legs::liveness::while_alive;
use crate::message::payload::Payload;
use crate::message::sse;

/// A refusal is not read beyond this; a larger one is judged by its status.
const REFUSAL_BYTES_MAX: usize = 64 * 1024;

/// What an attempt came to.
pub(crate) enum Decoding {
    /// The engine took it: the head of a good answer is here, and of a stream its first event.
    Accepted(Box<Reply>),
    /// The engine refused the request itself.
    Refused(Refusal),
    /// The engine failed before it took the request.
    Failed(Failure, Refusal, Meaning, Blame),
}

/// Asks an engine and waits, at most `first_byte` long and only while it shows signs of life, for it to take the
/// request. It is asked for one after each `pause`. `admitted` is called with the head of a good answer: from then on the
/// engine settles with the one that lends, and may still fail.
///
/// `plain` is a body that does not ask for usage, where only the router asks for it. An engine that refuses the request
/// and may have done so for that is asked again with it, once; what it then says counts, unless it refuses that too.
///
/// # Cancel safety
/// Dropping the future cuts the connection, which aborts the request.
pub(crate) async fn ask(
    engine: &Arc<Engine>,
    outgoing: &Outgoing,
    first_byte: Duration,
    pause: Duration,
    plain: Option<Plain<'_>>,
    admitted: impl FnOnce(),
) -> Decoding {
    let call = async {
        let mut reply = engine.call(outgoing, |_| {}).await?;
        if let Some(plain) = plain {
            if is_refusal(reply.status()) {
                let refused = reply.whole_or_bare(REFUSAL_BYTES_MAX).await?;
                if !may_be_for_usage(engine, &refused) {
                    return Ok(Err(refused));
                }
                // Boxed: what few engines need is not room in every call.
                let again = Outgoing { body: plain(), ..outgoing.clone() };
                reply = Box::pin(engine.call(&again, |_| {})).await?;
                if is_refusal(reply.status()) {
                    return Ok(Err(refused));
                }
                if reply.status().is_success() {
                    engine.usage_option.learn(false);
                }
            } else if reply.status().is_success() {
                engine.usage_option.learn(true);
            }
        }
        if !reply.status().is_success() {
            return reply.whole_or_bare(REFUSAL_BYTES_MAX).await.map(Err);
        }
        admitted();
        if reply.is_stream() {
            let first = first_frames(&mut reply).await?;
            if let Some(told) = sse::first_error(&first) {
                return Ok(Err(reply.told(told.status, told.error)));
            }
            reply.put_back(first);
        }
        Ok(Ok(reply))
    };
    match while_alive(engine, pause, first_byte, call).await {
        Ok(Ok(Ok(reply))) => Decoding::Accepted(Box::new(reply)),
        Ok(Ok(Err(whole))) => {
            let verdict = Verdict::of(&whole, engine.hosts());
            note_lack(engine, &verdict.refusal);
            match verdict.failure() {
                Some(failure) => Decoding::Failed(failure, verdict.refusal, verdict.meaning, verdict.blame),
                None => Decoding::Refused(verdict.refusal),
            }
        }
        Ok(Err(CallError::NotReached | CallError::NoSocket(_))) => {
            Decoding::Failed(Failure::NotReached, Refusal::unreachable(), Meaning::Trouble, Blame::Nobody)
        }
        Ok(Err(CallError::Unreadable(why))) => {
            let (refusal, blame) = unreadable(engine, why);
            Decoding::Failed(Failure::Unknown, refusal, Meaning::Trouble, blame)
        }
        Ok(Err(CallError::Spent)) => {
            Decoding::Failed(Failure::Unknown, Refusal::spent(), Meaning::Trouble, Blame::Nobody)
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

/// What is sent to an engine that does not take `stream_options`.
pub(crate) type Plain<'a> = &'a (dyn Fn() -> Payload + Sync);

/// Whether the engine refuses what the request says.
fn is_refusal(status: StatusCode) -> bool {
    matches!(status, StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY)
}

/// Whether an engine may have refused a request because it is asked for usage: it names that, or is not known to take
/// it. An error about the handoff is judged apart.
fn may_be_for_usage(engine: &Engine, refusal: &Whole) -> bool {
    let names = |name: &str| memmem::find(&refusal.body, name.as_bytes()).is_some();
    names("stream_options")
        || names("include_usage")
        || engine.usage_option.is_taken() != Some(true)
            && Verdict::of(refusal, engine.hosts()).meaning == Meaning::Refused
}

/// Everything up to the first end of an event; an event that is longer than a refusal may be is given as far as it is
/// here.
async fn first_frames(reply: &mut Reply) -> Result<Bytes, CallError> {
    let (mut held, mut first) = (BytesMut::new(), sse::FirstEvent::default());
    loop {
        let chunk = reply.chunk().await.unwrap_or(Err(CallError::Broken(Lost::Unanswered)))?;
        let mut enough = |bytes: &[u8]| first.end(bytes).is_some() || bytes.len() > REFUSAL_BYTES_MAX;
        // Mostly it is one piece, which is not copied.
        if held.is_empty() && enough(&chunk) {
            return Ok(chunk);
        }
        held.extend_from_slice(&chunk);
        if enough(&held) {
            return Ok(held.freeze());
        }
    }
}
