//! What one engine of the decode pool answers by itself: tokens, embeddings, scores. Cleaned, and passed with all fields
//! that nobody here knows; what `/tokenize` and `/detokenize` mean is checked too. Whose it is counts as for what
//! generates: its tokens are charged, its turn comes in the model's queue, and what its key may not say is taken out.

use std::sync::Arc;
use std::time::Duration;

use baton_connector::RequestId;
use baton_openai::{
    ApiError, DetokenizeRequest, Object, ParseLimits, RawBody, TokenizeRequest, parse_object, strip,
};
use bytes::Bytes;
use hyper::header::AUTHORIZATION;
use pingora::proxy::Session;

use crate::answer::Stamp;
use crate::client_watch::{ClientGone, race};
use crate::exchange_driver::Ended;
use crate::generation::Generation;
use crate::intake::Owner;
use crate::legs::{Refusal, Verdict};
use crate::metrics::Leg;
use crate::models::Model;
use crate::policy::Wanted;
use crate::pool::Reserved;
use crate::retries::Retry;
use crate::rewrite::{ClientRules, Owned};
use crate::service::ticket;
use crate::shared::Shared;
use crate::tenants::{self, Permit};
use crate::trace_context::Trace;
use crate::upstream::{CallError, Engine, Outgoing};
use crate::{answer, intake, retries, rewrite};

/// Tokens of the longest context, with their texts.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Whether a body means something.
type Reader = fn(&Object, &ParseLimits) -> Result<(), ApiError>;

/// Endpoints whose answers depend on no cache of prefixes.
const UNSALTED: [&str; 2] = ["/tokenize", "/detokenize"];

/// One request that is passed on.
pub(crate) struct Passing<'a> {
    pub shared: &'a Shared,
    pub generation: &'a Generation,
    pub path: &'static str,
    pub id: &'a RequestId,
    pub trace: &'a Trace,
    pub permit: Option<&'a mut Permit>,
    pub stamp: &'a mut Stamp,
}

/// A body, and where it goes.
struct Passed {
    model: Arc<Model>,
    body: RawBody,
    owned: Owned,
    tokens: u64,
}

impl Passing<'_> {
    /// Passes the request and its answer; gives the answer's status.
    pub(crate) async fn pass(mut self, session: &mut Session, body: Bytes) -> Result<u16, Ended> {
        let passed = self.read(body)?;
        if let Some(permit) = self.permit.as_deref_mut() {
            let taken = permit.take_tokens(passed.tokens);
            self.stamp.limits = permit.headers();
            taken?;
        }
        let reserved = match self.enter(session, &passed).await {
            Ok(reserved) => reserved,
            Err(refused) => {
                // No engine was asked.
                self.permit.into_iter().for_each(Permit::give_tokens_back);
                return Err(refused);
            }
        };
        self.ask(session, &passed, reserved).await
    }

    fn read(&self, body: Bytes) -> Result<Passed, ApiError> {
        let limits = &self.generation.parse_limits;
        let checked = |read: Reader| {
            let mut map = parse_object(&body, limits)?;
            strip(&mut map, &ClientRules);
            read(&map, limits)
        };
        match self.path {
            "/tokenize" => checked(|map, limits| TokenizeRequest::from_map(map, limits).map(drop))?,
            "/detokenize" => checked(|map, limits| DetokenizeRequest::from_map(map, limits).map(drop))?,
            _ => {}
        }
        let body = RawBody::any(body, limits, &ClientRules)?;
        let name = body.string("model");
        if name.is_none() && body.field("model").is_some_and(|model| model != b"null") {
            return Err(ApiError::invalid("model", "`model` must be a string"));
        }
        let models = &self.generation.models;
        let model = Arc::clone(models.named(name.as_deref())?);
        let mut owned = Owned::default();
        if let (Some(auth), Some(permit)) = (self.generation.auth.as_deref(), self.permit.as_deref()) {
            let identity = &*permit.identity;
            let means = |name: &str| models.named(Some(name)).is_ok_and(|found| Arc::ptr_eq(found, &model));
            if !identity.may_use(means) {
                return Err(tenants::forbidden(&model.name));
            }
            let salted = !UNSALTED.contains(&self.path);
            let salt = salted.then(|| auth.cache_salt(identity, body.string("cache_salt").as_deref()));
            owned = Owned::new(salt.as_deref(), Owner { identity, auth }.forbids(&body));
        }
        let tokens = intake::prompt_tokens(body.len());
        Ok(Passed { model, body, owned, tokens })
    }

    /// Waits for its turn, and for an engine.
    async fn enter(&self, session: &mut Session, passed: &Passed) -> Result<Reserved, Ended> {
        let Passed { model, body, tokens, .. } = passed;
        let identity = self.permit.as_deref().map(|permit| &*permit.identity);
        let asked = (intake::priority(body), body.len(), *tokens);
        let ticket = ticket(&session.req_header().headers, asked, self.generation, identity);
        let reserve = || {
            // Engines that came since are good for those who wait already.
            let now = self.shared.generation();
            let model = now.models.named(Some(&model.name)).unwrap_or(model);
            model.decode.reserve(&passed.wanted(), &[])
        };
        let entered = model.queue.enter(ticket, &self.generation.config.queue, reserve);
        let entered = race(session, entered).await.map_err(|ClientGone| Ended::ClientGone)?;
        Ok(entered?)
    }

    async fn ask(&self, session: &mut Session, passed: &Passed, first: Reserved) -> Result<u16, Ended> {
        let Passed { model, body, owned, .. } = passed;
        let config = &self.generation.config;
        let body = rewrite::decode_body(body, owned, &model.name_in_bodies, None);
        let mut outgoing = Outgoing {
            id: Some(self.id.clone()),
            authorization: session.req_header().headers.get(AUTHORIZATION).cloned(),
            trace: self.trace.told(Leg::Decode),
            ..Outgoing::post(self.path, body)
        };
        let mut tried: Vec<Arc<Engine>> = Vec::new();
        let mut last = Refusal::none_left();
        let mut first = Some(first);
        // The latest second attempt's share of their budget.
        let mut _retry = None;
        let silence = Duration::from_millis(config.timeouts.stream_silence_ms);
        while tried.len() < usize::from(config.attempts.decode) {
            let reserved = first.take().map(Ok);
            let Ok(reserved) = reserved.unwrap_or_else(|| model.decode.reserve(&passed.wanted(), &tried))
            else {
                break;
            };
            if !tried.is_empty() {
                let Some(leave) = self.second_attempt() else { break };
                _retry = Some(leave);
                let pause = retries::pause(tried.len(), retries::dice(), &config.retries);
                let paused = race(session, tokio::time::sleep(pause)).await;
                paused.map_err(|ClientGone| Ended::ClientGone)?;
            }
            let engine = reserved.engine();
            outgoing.rank = reserved.member.rank;
            let call = async { engine.call(&outgoing, |_| {}).await?.whole(ANSWER_BYTES_MAX).await };
            let called = race(session, tokio::time::timeout(silence, call)).await;
            tried.push(Arc::clone(engine));
            match called.map_err(|ClientGone| Ended::ClientGone)? {
                Ok(Ok(whole)) if whole.status.is_success() => {
                    let headers = [("content-type", "application/json".to_owned())];
                    let status = whole.status.as_u16();
                    let told = answer::whole(session, status, &headers, self.stamp, whole.body).await;
                    return told.map(|()| status).map_err(|_| Ended::ClientGone);
                }
                Ok(Ok(whole)) => {
                    let verdict = Verdict::of(&whole, engine.hosts());
                    if verdict.failure().is_none() {
                        return Err(Ended::Refused(verdict.refusal));
                    }
                    last = verdict.refusal;
                }
                Ok(Err(CallError::NotReached)) => last = Refusal::unreachable(),
                Ok(Err(CallError::TooLarge(_))) => {
                    return Err(ApiError::bad_gateway("an engine's answer is too large").into());
                }
                Ok(Err(CallError::Broken(_))) => last = Refusal::broken(),
                Err(_elapsed) => last = Refusal::silent(),
            }
        }
        Err(Ended::Refused(last))
    }

    /// Leave for a second attempt, out of the whole router's budget.
    fn second_attempt(&self) -> Option<Retry> {
        let (shared, terms) = (self.shared, &self.generation.config.retries);
        let leave = shared.retries.take(shared.in_flight(), shared.now(), terms);
        match leave {
            Some(_) => shared.metrics.retry(Leg::Decode),
            None => shared.metrics.resilience.retry_refused(Leg::Decode),
        }
        leave
    }
}

impl Passed {
    fn wanted(&self) -> Wanted<'_> {
        Wanted { tokens: self.tokens, ..Wanted::default() }
    }
}
