//! Whether the engines of a model have Anthropic's `/v1/messages`. With `messages: auto` the router asks a decode
//! engine: an empty request is refused as invalid (400), or the path or method is unknown (404, 405, 501).
//!
//! One request at a time asks, and the answer holds for a minute, because another version may start at the same address.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::header::HeaderValue;

use crate::config::MessagesMode;
use crate::engines::http::EngineRequest;
use crate::message::path::Dialect;
use crate::routing::pool::Pool;

/// How long an answer holds, and how long the router does not ask after no engine has answered.
const ANSWER_TTL: Duration = Duration::from_secs(60);
const SILENCE_TTL: Duration = Duration::from_secs(5);
/// Maximum engines that one request asks, and maximum wait for each.
const ENGINES_ASKED_MAX: usize = 3;
const ASK_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum bytes of an answer; of a larger one the status counts.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Of one model.
pub(crate) struct MessagesSupport {
    mode: MessagesMode,
    learnt: Mutex<Option<Learnt>>,
    /// Held by the request that asks.
    ask_lock: tokio::sync::Mutex<()>,
}

#[derive(Clone, Copy, Debug)]
struct Learnt {
    is_native: bool,
    until: Instant,
}

impl MessagesSupport {
    pub(crate) fn new(mode: MessagesMode) -> Self {
        Self { mode, learnt: Mutex::default(), ask_lock: tokio::sync::Mutex::default() }
    }

    /// Whether the engines get Messages as they are. `decode` is the model's pool, and `authorization` the client's.
    ///
    /// # Cancel safety
    /// Dropping the future ends the question; the next request asks.
    pub(crate) async fn is_native(&self, decode: &Pool, authorization: Option<&HeaderValue>) -> bool {
        match self.mode {
            MessagesMode::Native => return true,
            MessagesMode::Translate => return false,
            MessagesMode::Auto => {}
        }
        if let Some(known) = self.known() {
            return known;
        }
        let _one_at_a_time = self.ask_lock.lock().await;
        if let Some(known) = self.known() {
            return known;
        }
        let answer = ask(decode, authorization).await;
        // Without an answer the one before counts: a client's refused key shows nothing. The first request shows why.
        let before = *self.learnt.lock().unwrap_or_else(PoisonError::into_inner);
        let is_native = answer.unwrap_or_else(|| before.is_none_or(|before| before.is_native));
        let ttl = if answer.is_some() { ANSWER_TTL } else { SILENCE_TTL };
        let learnt = Learnt { is_native, until: Instant::now() + ttl };
        *self.learnt.lock().unwrap_or_else(PoisonError::into_inner) = Some(learnt);
        is_native
    }

    fn known(&self) -> Option<bool> {
        let learnt = *self.learnt.lock().unwrap_or_else(PoisonError::into_inner);
        learnt.filter(|learnt| Instant::now() < learnt.until).map(|learnt| learnt.is_native)
    }
}

/// Asks decode engines until one has answered; `None` if no answer shows it.
async fn ask(decode: &Pool, authorization: Option<&HeaderValue>) -> Option<bool> {
    let known = decode.members().iter().filter(|member| member.engine.is_known());
    for member in known.take(ENGINES_ASKED_MAX) {
        let request = EngineRequest {
            authorization: authorization.cloned(),
            ..EngineRequest::post(Dialect::Messages.path(), Bytes::from_static(b"{}"))
        };
        let reply = async {
            let reply = member.engine.call(&request, |_| {}).await?;
            reply.read_whole_or_head(ANSWER_BYTES_MAX).await
        };
        if let Ok(Ok(reply)) = tokio::time::timeout(ASK_TIMEOUT, reply).await
            && let Some(answer) = has_endpoint(reply.status.as_u16())
        {
            return Some(answer);
        }
    }
    None
}

/// Whether an engine has the endpoint, by its status for an empty request; `None` if the status does not show it.
fn has_endpoint(status: u16) -> Option<bool> {
    match status {
        404 | 405 | 501 => Some(false),
        // A key is checked before the path, and an engine may be full.
        401 | 403 | 408 | 429 | 500.. => None,
        _ => Some(true),
    }
}
