//! Token ids of prompts, from an engine of the model (`models[].tokenize`), before engines are chosen for the request.
//!
//! ```text
//! question ─▶ cache ─▶ engine in turn ─▶ best form ─▶ reply, checked ─▶ ids
//!               └ small, busy, late, refused, failed: no ids; the request goes on, and the reason is counted
//! ```
//!
//! No request waits longer than `timeout_ms`, and at most `concurrent` wait at once. [`forms`] decides how an engine is
//! asked, [`reply`] reads its reply, and [`id_cache`] keeps the ids of recent questions.

mod forms;
mod id_cache;
mod reply;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_openai::translate::messages;
use baton_openai::{Object, RawBody};
use bytes::Bytes;
use hyper::header::HeaderValue;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

use crate::config::TokenizeConfig;
use crate::engines::health::Standing;
use crate::engines::http::{Engine, EngineRequest};
use crate::message::payload::Payload;
use crate::message::prompt_ids::{PromptIds, keeps_prompt};
use crate::message::rewrite::ModelName;
use crate::metrics::Leg;
use crate::metrics::routing::{TokenizeMetrics, TokenizeResult};
use crate::routing::pool::Pool;
use forms::{EngineForms, FormOutcome, NoForm, TokenForm};
use id_cache::{IdCache, QuestionKey};

pub(crate) use forms::PromptKind;

/// Maximum members that are examined for one question. The others are likely to be as little use.
const MEMBERS_EXAMINED_MAX: usize = 64;
/// Maximum engines of which something is remembered; more have been replaced by discovery.
const ENGINES_MAX: usize = 8_192;

/// Fields of a chat that change its tokens, as `/tokenize` of vLLM reads them.
const CHAT_FIELDS: [&str; 8] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
];
const TEXT_FIELDS: [&str; 2] = ["prompt", "add_special_tokens"];
/// Fields that a render path does not need: they change no token, or are refused without a stream.
const UNRENDERED_FIELDS: [&str; 4] = ["cache_salt", "priority", "stream_options", "user"];

/// The tokenizer of one model.
pub(crate) struct Tokenizer {
    config: TokenizeConfig,
    places: Semaphore,
    turn: AtomicUsize,
    state: Mutex<TokenizerState>,
    metrics: TokenizeMetrics,
}

#[derive(Default)]
struct TokenizerState {
    /// By [`Engine::id`].
    engines: HashMap<u32, EngineForms>,
    cache: IdCache,
}

/// A request whose token ids are wanted.
pub(crate) struct TokenQuestion<'a> {
    pub kind: PromptKind,
    pub body: &'a RawBody,
    pub model: &'a ModelName,
    /// A hash of the owner. No request reads what another owner's request has left in the cache, because the time of its
    /// answer would show that the other was sent.
    pub owner: Option<u64>,
    pub authorization: Option<&'a HeaderValue>,
}

impl Tokenizer {
    pub(crate) fn new(config: &TokenizeConfig, metrics: TokenizeMetrics) -> Self {
        Self {
            places: Semaphore::new(config.concurrent),
            config: config.clone(),
            turn: AtomicUsize::new(0),
            state: Mutex::default(),
            metrics,
        }
    }

    /// Whether this tokenizer has the given settings, so that a reload keeps it.
    pub(crate) fn is_of(&self, config: &TokenizeConfig) -> bool {
        self.config == *config
    }

    /// Counts a request that is not asked about.
    pub(crate) fn skip(&self, why: TokenizeResult) {
        self.metrics.count(why);
    }

    /// The prompt's token ids; `None` after the reason was counted.
    ///
    /// # Cancel safety
    /// Dropping the future cuts the connection to the engine.
    pub(crate) async fn ids(
        &self,
        question: &TokenQuestion<'_>,
        pools: [(Leg, &Pool); 2],
    ) -> Option<PromptIds> {
        let found = self.find(question, pools).await;
        self.metrics.count(found.as_ref().map_or_else(|why| *why, |(from, _)| *from));
        found.ok().map(|(_, ids)| ids)
    }

    async fn find(
        &self,
        question: &TokenQuestion<'_>,
        pools: [(Leg, &Pool); 2],
    ) -> Result<(TokenizeResult, PromptIds), TokenizeResult> {
        if question.body.len() < self.config.min_bytes {
            return Err(TokenizeResult::Small);
        }
        let key = question.key();
        if let Some(ids) = self.state().cache.get(&key, Instant::now()) {
            return Ok((TokenizeResult::Cache, ids));
        }
        let engine = self.choose(question, pools)?;
        let _place = self.places.try_acquire().map_err(|_| TokenizeResult::Busy)?;
        let begun = Instant::now();
        let within = Duration::from_millis(self.config.timeout_ms);
        let asked = tokio::time::timeout(within, self.ask(&engine, question)).await;
        self.metrics.wait.record(begun.elapsed());
        let ids = match asked {
            Ok(asked) => asked?,
            Err(_elapsed) => {
                // Any form: a late answer says nothing of the form.
                self.record(&engine, TokenForm::TokenizeText, FormOutcome::Late, question.body.len());
                return Err(TokenizeResult::Late);
            }
        };
        self.state().cache.insert(key, ids.clone(), Instant::now());
        Ok((TokenizeResult::Engine, ids))
    }

    /// The next engine, in turn, that is in use and may have a form.
    fn choose(
        &self,
        question: &TokenQuestion<'_>,
        pools: [(Leg, &Pool); 2],
    ) -> Result<Arc<Engine>, TokenizeResult> {
        let members: usize = pools.iter().map(|(_, pool)| pool.members().len()).sum();
        let first = self.turn.fetch_add(1, Ordering::Relaxed);
        let (now, mut lacks_form) = (Instant::now(), false);
        for turn in 0..members.min(MEMBERS_EXAMINED_MAX) {
            let mut at = first.wrapping_add(turn) % members;
            let [(leg, pool), other] = pools;
            let (leg, pool) = match at.checked_sub(pool.members().len()) {
                None => (leg, pool),
                Some(behind) => {
                    at = behind;
                    other
                }
            };
            let engine = &pool.members()[at].engine;
            if engine.health().standing(leg) > Standing::Trial || !engine.is_known() {
                continue;
            }
            match self.best_form(engine, question, now) {
                Ok(_) => return Ok(Arc::clone(engine)),
                Err(NoForm::Missing) => lacks_form = true,
                Err(NoForm::Paused) => {}
            }
        }
        Err(if lacks_form { TokenizeResult::Unsupported } else { TokenizeResult::NoEngine })
    }

    /// Asks an engine with its best form, and with the next one where that is missing.
    async fn ask(
        &self,
        engine: &Arc<Engine>,
        question: &TokenQuestion<'_>,
    ) -> Result<PromptIds, TokenizeResult> {
        loop {
            let form = self.best_form(engine, question, Instant::now());
            let form = form.map_err(|_| TokenizeResult::Unsupported)?;
            let Some(body) = question.body_for(form) else { return Err(TokenizeResult::Refused) };
            let request = EngineRequest {
                authorization: question.authorization.cloned(),
                ..EngineRequest::post(form.path(), body)
            };
            let bytes = question.body.len();
            let reply = async {
                let reply = engine.call(&request, |_| {}).await?;
                reply.read_whole(reply::bytes_max(bytes)).await
            };
            let (outcome, ids) = match reply.await {
                Ok(reply) if reply.status.is_success() => match reply::read(&reply.body, bytes) {
                    Some(ids) => (FormOutcome::Answered, Ok(ids)),
                    None => (FormOutcome::Failed, Err(TokenizeResult::Malformed)),
                },
                Ok(reply) => match FormOutcome::of_status(reply.status.as_u16()) {
                    FormOutcome::Refused => (FormOutcome::Refused, Err(TokenizeResult::Refused)),
                    outcome => (outcome, Err(TokenizeResult::Failed)),
                },
                Err(_) => (FormOutcome::Failed, Err(TokenizeResult::Failed)),
            };
            self.record(engine, form, outcome, bytes);
            if outcome != FormOutcome::Missing {
                return ids.map(|ids| PromptIds { exact: question.is_exact(form), ..PromptIds::exact(ids) });
            }
        }
    }

    fn best_form(
        &self,
        engine: &Engine,
        question: &TokenQuestion<'_>,
        now: Instant,
    ) -> Result<TokenForm, NoForm> {
        let forms = self.state().engines.get(&engine.id()).copied().unwrap_or_default();
        forms.best(question.kind, question.body.len(), now)
    }

    fn record(&self, engine: &Engine, form: TokenForm, outcome: FormOutcome, bytes: usize) {
        let mut state = self.state();
        if state.engines.len() >= ENGINES_MAX && !state.engines.contains_key(&engine.id()) {
            state.engines.clear();
        }
        state.engines.entry(engine.id()).or_default().record(form, outcome, bytes, Instant::now());
    }

    fn state(&self) -> MutexGuard<'_, TokenizerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TokenQuestion<'_> {
    /// What the ids depend on.
    fn key(&self) -> QuestionKey {
        let mut hash = Sha256::new();
        hash.update([self.kind as u8, u8::from(self.owner.is_some())]);
        hash.update(self.owner.unwrap_or_default().to_le_bytes());
        for piece in self.body.write(&[("model", self.model.as_json().as_bytes())], &["stream"]) {
            hash.update(&piece);
        }
        hash.finalize().into()
    }

    /// The body of a question in this form; `None` if Messages have no counterpart in a chat.
    fn body_for(&self, form: TokenForm) -> Option<Payload> {
        let model = ("model", self.model.as_json().as_bytes());
        let only = |kept: &[&str]| {
            let unset: Vec<_> = self.body.names().filter(|name| !kept.contains(name)).collect();
            self.body.write(&[model], &unset).into()
        };
        Some(match form {
            TokenForm::RenderChat | TokenForm::RenderMessages | TokenForm::RenderResponses => {
                self.body.write(&[model, ("stream", b"false")], &UNRENDERED_FIELDS).into()
            }
            TokenForm::TokenizeChat => only(&CHAT_FIELDS),
            TokenForm::TokenizeText => only(&TEXT_FIELDS),
            TokenForm::TokenizeMessages => {
                let body = self.body.write(&[model], &[]).concat();
                let fields: Object = serde_json::from_slice(&body).ok()?;
                let chat = messages::to_tokenize(&fields).ok()?;
                Bytes::from(Value::Object(chat).to_string()).into()
            }
        })
    }

    /// Whether an engine computes exactly the ids that it returns in this form.
    fn is_exact(&self, form: TokenForm) -> bool {
        form.renders() || (form == TokenForm::TokenizeText && keeps_prompt(self.body))
    }
}
