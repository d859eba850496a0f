//! Whether the engines of a model have Anthropic's `/v1/messages` or OpenAI's `/v1/responses`, and want such requests
//! of a router. With `auto` the router asks a decode engine: an empty request is refused as invalid (400), or the path
//! or method is unknown (404, 405, 501). Baton's engines answer a router with 404, because it can resume a chat.
//!
//! The first request asks, and others wait for its answer. It holds for a minute, because another version may start at
//! the same address. Then one task asks again, and requests go by the old answer until it ends.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_openai::TranslatedApi;
use bytes::Bytes;
use hyper::header::HeaderValue;

use crate::config::{ApiMode, ModelConfig};
use crate::engines::http::{Engine, EngineRequest};
use crate::routing::pool::Pool;

/// How long an answer holds, and how long the router does not ask again after it has asked.
const ANSWER_TTL: Duration = Duration::from_secs(60);
const ASK_PAUSE: Duration = Duration::from_secs(5);
/// Maximum engines that are asked at a time, and maximum wait for each.
const ENGINES_ASKED_MAX: usize = 3;
const ASK_TIMEOUT: Duration = Duration::from_secs(1);
// One task at a time asks.
const _: () = assert!(ENGINES_ASKED_MAX as u64 * ASK_TIMEOUT.as_secs() < ASK_PAUSE.as_secs());
/// Maximum bytes of an answer; of a larger one the status counts.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// The APIs of one model.
pub(crate) struct ModelApis {
    messages: Arc<ApiSupport>,
    responses: Arc<ApiSupport>,
}

impl ModelApis {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let support = |api, mode| Arc::new(ApiSupport::new(api, mode));
        Self {
            messages: support(TranslatedApi::Messages, config.messages),
            responses: support(TranslatedApi::Responses, config.responses),
        }
    }

    pub(crate) fn of(&self, api: TranslatedApi) -> &Arc<ApiSupport> {
        match api {
            TranslatedApi::Messages => &self.messages,
            TranslatedApi::Responses => &self.responses,
        }
    }
}

/// One API of one model.
pub(crate) struct ApiSupport {
    api: TranslatedApi,
    mode: ApiMode,
    learnt: Mutex<Learnt>,
    /// Held by the first request that asks.
    ask_lock: tokio::sync::Mutex<()>,
}

/// What is known. Pure: times in.
#[derive(Clone, Copy, Debug, Default)]
struct Learnt {
    /// `None` until the first question has ended.
    is_native: Option<bool>,
    /// When the engines are asked again.
    due: Option<Instant>,
}

/// An answer that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    is_native: bool,
    /// The caller must have the engines asked again.
    is_due: bool,
}

impl Learnt {
    /// The answer so far. When it is due, one caller has the engines asked again.
    fn known(&mut self, now: Instant) -> Option<Known> {
        let is_native = self.is_native?;
        let is_due = self.due.is_none_or(|due| due <= now);
        if is_due {
            self.due = Some(now + ASK_PAUSE);
        }
        Some(Known { is_native, is_due })
    }

    /// Records the end of a question. Without an answer the one before counts: a client's refused key shows nothing.
    /// Without any, requests go out as they are, and the first one shows why.
    fn learn(&mut self, answer: Option<bool>, now: Instant) -> bool {
        let is_native = answer.or(self.is_native).unwrap_or(true);
        let pause = if answer.is_some() { ANSWER_TTL } else { ASK_PAUSE };
        *self = Self { is_native: Some(is_native), due: Some(now + pause) };
        is_native
    }
}

impl ApiSupport {
    fn new(api: TranslatedApi, mode: ApiMode) -> Self {
        Self { api, mode, learnt: Mutex::default(), ask_lock: tokio::sync::Mutex::default() }
    }

    /// Whether the engines get requests of this API as they are. `decode` is the model's pool, and `authorization` the
    /// client's.
    ///
    /// # Cancel safety
    /// Dropping the future ends the first question; the next request asks.
    pub(crate) async fn is_native(
        self: &Arc<Self>,
        decode: &Pool,
        authorization: Option<&HeaderValue>,
    ) -> bool {
        match self.mode {
            ApiMode::Native => return true,
            ApiMode::Translate => return false,
            ApiMode::Auto => {}
        }
        if let Some(known) = self.known(decode, authorization) {
            return known;
        }
        let _one_at_a_time = self.ask_lock.lock().await;
        if let Some(known) = self.known(decode, authorization) {
            return known;
        }
        let answer = ask(self.api, decode.usable_engines(), authorization).await;
        self.learnt().learn(answer, Instant::now())
    }

    /// The answer so far. A task asks again when it is due.
    fn known(self: &Arc<Self>, decode: &Pool, authorization: Option<&HeaderValue>) -> Option<bool> {
        let known = self.learnt().known(Instant::now())?;
        if known.is_due {
            let (support, engines) = (Arc::clone(self), decode.usable_engines());
            let authorization = authorization.cloned();
            tokio::spawn(async move {
                let answer = ask(support.api, engines, authorization.as_ref()).await;
                support.learnt().learn(answer, Instant::now());
            });
        }
        Some(known.is_native)
    }

    fn learnt(&self) -> MutexGuard<'_, Learnt> {
        self.learnt.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks engines until one has answered; `None` if no answer shows it.
async fn ask(
    api: TranslatedApi,
    engines: Vec<Arc<Engine>>,
    authorization: Option<&HeaderValue>,
) -> Option<bool> {
    for engine in engines.into_iter().take(ENGINES_ASKED_MAX) {
        let request = EngineRequest {
            authorization: authorization.cloned(),
            // By this Baton's engines know that a router asks.
            router_settles: true,
            ..EngineRequest::post(api.path(), Bytes::from_static(b"{}"))
        };
        let reply = async {
            let reply = engine.call(&request, |_| {}).await?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_given_while_one_task_asks_again() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let known = |is_native, is_due| Some(Known { is_native, is_due });
        let mut learnt = Learnt::default();
        assert_eq!(learnt.known(now), None, "the first request asks");
        assert!(!learnt.learn(Some(false), now));
        assert_eq!(learnt.known(at(59)), known(false, false));
        assert_eq!(learnt.known(at(60)), known(false, true));
        assert_eq!(learnt.known(at(60)), known(false, false), "no other task asks");
        assert!(learnt.learn(Some(true), at(61)));
        assert_eq!(learnt.known(at(62)), known(true, false));
        // Engines that do not answer are asked from time to time, and no request waits for them.
        assert_eq!(learnt.known(at(121)), known(true, true));
        assert!(learnt.learn(None, at(124)));
        assert_eq!(learnt.known(at(128)), known(true, false));
        assert_eq!(learnt.known(at(129)), known(true, true));
    }

    #[test]
    fn requests_go_out_as_they_are_while_no_engine_has_answered() {
        let now = Instant::now();
        let mut learnt = Learnt::default();
        assert!(learnt.learn(None, now));
        let known = Known { is_native: true, is_due: false };
        assert_eq!(learnt.known(now + Duration::from_secs(4)), Some(known));
        assert_eq!(learnt.known(now + ASK_PAUSE), Some(Known { is_due: true, ..known }));
    }
}
