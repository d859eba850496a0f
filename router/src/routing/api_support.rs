//! Whether the engines of a model have Anthropic's `/v1/messages` or OpenAI's `/v1/responses`, and want such requests
//! of a router. With `auto` the router asks a decode engine: an empty request is refused as invalid (400), or the path
//! or method is unknown (404, 405, 501). Baton's engines answer a router with 404 and a code of their own, because it
//! can resume a chat.
//!
//! The first request asks, and others wait for its answer. It holds for a minute, because another version may start at
//! the same address. Then one task asks again, and requests go by the old answer until it ends.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_openai::{Code, TranslatedApi};
use bytes::Bytes;
use hyper::header::HeaderValue;
use serde_json::Value;

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

/// What engines get for a request of an API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineForm {
    /// The request as it is.
    Native,
    /// A chat with the fields that all engines know.
    Chat,
    /// A chat for Baton's engines.
    BatonsChat,
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
    form: Option<EngineForm>,
    /// When the engines are asked again.
    due: Option<Instant>,
}

/// An answer that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    form: EngineForm,
    /// The caller must have the engines asked again.
    is_due: bool,
}

impl Learnt {
    /// The answer so far. When it is due, one caller has the engines asked again.
    fn known(&mut self, now: Instant) -> Option<Known> {
        let form = self.form?;
        let is_due = self.due.is_none_or(|due| due <= now);
        if is_due {
            self.due = Some(now + ASK_PAUSE);
        }
        Some(Known { form, is_due })
    }

    /// Records the end of a question. Without an answer the one before counts: a client's refused key shows nothing.
    /// Without any, requests go out as they are, and the first one shows why.
    fn learn(&mut self, answer: Option<EngineForm>, now: Instant) -> EngineForm {
        let form = answer.or(self.form).unwrap_or(EngineForm::Native);
        let pause = if answer.is_some() { ANSWER_TTL } else { ASK_PAUSE };
        *self = Self { form: Some(form), due: Some(now + pause) };
        form
    }
}

impl ApiSupport {
    fn new(api: TranslatedApi, mode: ApiMode) -> Self {
        Self { api, mode, learnt: Mutex::default(), ask_lock: tokio::sync::Mutex::default() }
    }

    /// What the engines get for requests of this API. `decode` is the model's pool, and `authorization` the client's.
    /// Engines that are not asked may be any.
    ///
    /// # Cancel safety
    /// Dropping the future ends the first question; the next request asks.
    pub(crate) async fn form(
        self: &Arc<Self>,
        decode: &Pool,
        authorization: Option<&HeaderValue>,
    ) -> EngineForm {
        match self.mode {
            ApiMode::Native => return EngineForm::Native,
            ApiMode::Translate => return EngineForm::Chat,
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
    fn known(self: &Arc<Self>, decode: &Pool, authorization: Option<&HeaderValue>) -> Option<EngineForm> {
        let known = self.learnt().known(Instant::now())?;
        if known.is_due {
            let (support, engines) = (Arc::clone(self), decode.usable_engines());
            let authorization = authorization.cloned();
            tokio::spawn(async move {
                let answer = ask(support.api, engines, authorization.as_ref()).await;
                support.learnt().learn(answer, Instant::now());
            });
        }
        Some(known.form)
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
) -> Option<EngineForm> {
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
            && let Some(answer) = form_of(reply.status.as_u16(), &reply.body)
        {
            return Some(answer);
        }
    }
    None
}

/// What an engine wants, by its answer to an empty request; `None` if the status does not show it.
fn form_of(status: u16, body: &[u8]) -> Option<EngineForm> {
    match status {
        404 if is_batons(body) => Some(EngineForm::BatonsChat),
        404 | 405 | 501 => Some(EngineForm::Chat),
        // A key is checked before the path, and an engine may be full.
        401 | 403 | 408 | 429 | 500.. => None,
        _ => Some(EngineForm::Native),
    }
}

/// Whether a 404 is that of Baton's engines for a router.
fn is_batons(body: &[u8]) -> bool {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    body["error"]["code"] == Code::UnsupportedEndpoint.as_str()
}

#[cfg(test)]
mod tests {
    use baton_openai::ApiError;

    use super::*;

    #[test]
    fn an_answer_is_given_while_one_task_asks_again() {
        use EngineForm::{Chat, Native};
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let known = |form, is_due| Some(Known { form, is_due });
        let mut learnt = Learnt::default();
        assert_eq!(learnt.known(now), None, "the first request asks");
        assert_eq!(learnt.learn(Some(Chat), now), Chat);
        assert_eq!(learnt.known(at(59)), known(Chat, false));
        assert_eq!(learnt.known(at(60)), known(Chat, true));
        assert_eq!(learnt.known(at(60)), known(Chat, false), "no other task asks");
        assert_eq!(learnt.learn(Some(Native), at(61)), Native);
        assert_eq!(learnt.known(at(62)), known(Native, false));
        // Engines that do not answer are asked from time to time, and no request waits for them.
        assert_eq!(learnt.known(at(121)), known(Native, true));
        assert_eq!(learnt.learn(None, at(124)), Native);
        assert_eq!(learnt.known(at(128)), known(Native, false));
        assert_eq!(learnt.known(at(129)), known(Native, true));
    }

    #[test]
    fn requests_go_out_as_they_are_while_no_engine_has_answered() {
        let now = Instant::now();
        let mut learnt = Learnt::default();
        assert_eq!(learnt.learn(None, now), EngineForm::Native);
        let known = Known { form: EngineForm::Native, is_due: false };
        assert_eq!(learnt.known(now + Duration::from_secs(4)), Some(known));
        assert_eq!(learnt.known(now + ASK_PAUSE), Some(Known { is_due: true, ..known }));
    }

    #[test]
    fn batons_engines_are_known_by_their_code() {
        let own = ApiError::unsupported_endpoint("/v1/messages").to_bytes();
        assert_eq!(form_of(404, &own), Some(EngineForm::BatonsChat));
        for body in [&b"{\"detail\": \"Not Found\"}"[..], b"", b"[]"] {
            assert_eq!(form_of(404, body), Some(EngineForm::Chat));
        }
        assert_eq!(form_of(405, &own), Some(EngineForm::Chat));
        assert_eq!((form_of(400, &own), form_of(401, &own)), (Some(EngineForm::Native), None));
    }
}
