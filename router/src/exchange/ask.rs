//! A client's request, read whole, cleaned and checked completely before any engine hears of it.
//!
//! A body that a decode engine's parser refuses strands the prefill engine's blocks for a whole lease on
//! stock vLLM (30.03 s measured), so nothing that the router can know to be wrong is sent on.

mod passed;

use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_openai::{ApiError, Code, Outline, RawBody};
use bytes::Bytes;
use hyper::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};

use crate::auth::{Auth, Identity};
use crate::client::http::BodyError;
use crate::client::session::{ClientGone, Session};
use crate::config::Priority;
use crate::engines::body_budget::Share;
use crate::engines::caches::Holding;
use crate::legs::outcome::Ended;
use crate::message::estimate::Known;
use crate::message::features::{Features, Source, Wanted};
use crate::message::path::Dialect;
use crate::message::rewrite::{ClientRules, Owned};
use crate::message::sse::{Counts, Reading};
use crate::routing::disaggregation::Facts;
use crate::routing::models::Model;
use crate::state::generation::Generation;

/// When to come back while too many bodies are held.
const COME_BACK: Duration = Duration::from_secs(1);

/// A request that engines may hear of.
pub(crate) struct Ask {
    pub dialect: Dialect,
    pub model: Arc<Model>,
    /// As the client sent it, without anything internal.
    pub body: RawBody,
    /// A decode engine computes everything: one handoff is one sequence of blocks, and this request has
    /// several prompts.
    pub aggregate: bool,
    /// A decode engine computes everything: the answer tells of the prompt's tokens. A stock decode engine computes
    /// the whole prompt for that, handed over or not, and a prefill engine's reply would hold all of them.
    pub prompt_logprobs: bool,
    /// What the router writes into it because it knows whose it is.
    pub owned: Owned,
    /// What it will cost, in tokens: the prompt's, and what it may generate. Estimated.
    pub tokens: u64,
    /// The prompt's alone.
    pub prompt_tokens: u64,
    /// vLLM's `priority`.
    pub priority: Option<i64>,
    /// What says where it belongs.
    pub features: Features,
    /// Whose it is, as a hash, where the router knows.
    owner: Option<u64>,
    /// The client's credentials: of its headers all that an engine gets as it came. Its trace is checked first.
    pub authorization: Option<HeaderValue>,
}

/// Whose request it is, where the router knows.
pub(crate) struct Owner<'a> {
    pub identity: &'a Identity,
    pub auth: &'a Auth,
}

impl Owner<'_> {
    /// Whether the key may not have the body's priority (vLLM's number). Engines with priority scheduling read it.
    pub(crate) fn forbids(&self, body: &RawBody) -> bool {
        // What no number here can be read from is not an engine's to interpret either.
        let own = body.field("priority").filter(|value| *value != b"null");
        own.is_some_and(|_| {
            priority(body).is_none_or(|number| Priority::of_number(number) < self.identity.priority_max)
        })
    }

    /// The tenant, by whichever of its keys and from wherever: tenants are kept from each other's harm.
    fn hash(&self) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        self.identity.tenant.name.hash(&mut hasher);
        hasher.finish()
    }
}

impl Ask {
    /// Reads a body.
    ///
    /// # Errors
    /// What the client is to be told; nothing of the request has left the router.
    pub(crate) fn read(
        dialect: Dialect,
        body: Bytes,
        headers: &HeaderMap,
        generation: &Generation,
        owner: Option<&Owner<'_>>,
    ) -> Result<Self, ApiError> {
        let limits = &generation.parse_limits;
        let read = match dialect {
            Dialect::OpenAi(endpoint) => RawBody::generate(body.clone(), endpoint, limits, &ClientRules),
            Dialect::Responses => RawBody::responses(body.clone(), limits, &ClientRules),
            Dialect::Passed(path) => return Self::read_passed(path, body, headers, generation, owner),
        };
        let (body, mut outline) = read.map_err(|error| match error.param.as_deref() {
            Some("model") => error,
            _ => unserved(body, generation).unwrap_or(error),
        })?;
        let model = Arc::clone(generation.models.named(outline.request.model.as_deref())?);
        let aggregate = outline.prompts > 1;
        let prompt_logprobs = tells_of_the_prompt(&body, outline.request.stream)?;
        let priority = priority(&body);
        let known = Known::of(&body);
        let prompt_tokens = known.prompt_tokens(&body);
        let tokens = estimated_tokens(prompt_tokens, &outline);
        let mut owned = Owned::default();
        if let Some(owner) = owner {
            let salt = owner.auth.cache_salt(owner.identity, outline.request.cache_salt.as_deref());
            owned = Owned::new(Some(&salt), owner.forbids(&body));
            outline.request.cache_salt = Some(salt);
        }
        let is_asked = outline.request.stream_options.include_usage;
        if outline.request.stream && !is_asked && matches!(dialect, Dialect::OpenAi(_)) {
            owned.ask_for_usage(&body);
        }
        let salt = outline.request.cache_salt.as_deref();
        let source = Source {
            model: &model.name,
            headers,
            body: &body,
            user: outline.request.user.as_deref(),
            salts: salt.as_slice(),
            known,
            block_size: model.decode.block_size().or_else(|| model.prefill.block_size()),
        };
        let features = Features::read(&source, model.needs, &model.features);
        let authorization = headers.get(AUTHORIZATION).cloned();
        let owner = owner.map(Owner::hash);
        Ok(Self {
            dialect,
            model,
            body,
            owned,
            aggregate,
            prompt_logprobs,
            tokens,
            prompt_tokens,
            priority,
            features,
            owner,
            authorization,
        })
    }

    /// What a policy may know of it.
    pub(crate) fn wanted(&self) -> Wanted<'_> {
        self.features.wanted()
    }

    /// What the disaggregation decision depends on, if the decode engine holds this much of the prompt.
    pub(crate) fn facts(&self, holding: Holding) -> Facts {
        Facts {
            several_prompts: self.aggregate,
            prompt_logprobs: self.prompt_logprobs,
            ..Facts::new(&self.model, &self.wanted(), holding)
        }
    }

    /// Who sent it, as a hash: the tenant, where the router knows it, or else the credentials that it passes on,
    /// or else the address.
    pub(crate) fn source(&self, client: IpAddr) -> u64 {
        if let Some(owner) = self.owner {
            return owner;
        }
        let mut hasher = std::hash::DefaultHasher::new();
        match &self.authorization {
            Some(credentials) => credentials.hash(&mut hasher),
            None => client.hash(&mut hasher),
        }
        hasher.finish()
    }

    /// How its answer is read, if it is a stream.
    pub(crate) fn reading(&self) -> Reading {
        let has_ids = self.owned.token_ids || self.body.field("return_token_ids") == Some(b"true");
        let counts = match self.dialect {
            Dialect::Responses => Counts::Deltas,
            Dialect::OpenAi(_) | Dialect::Passed(_) if has_ids => Counts::TokenIds,
            Dialect::OpenAi(_) | Dialect::Passed(_) => Counts::Events,
        };
        Reading { counts, without_usage: self.owned.asks_for_usage() }
    }

    /// Gives the body's memory back. For answers that have begun: what is needed of it is kept elsewhere.
    pub(crate) fn forget_body(&mut self) {
        self.body = RawBody::default();
    }
}

/// That its model is not served, if that is so: of everything that is wrong with a body that is JSON it is told first,
/// because what a request may say depends on its model. vLLM's handlers begin with it, too (`_check_model`).
fn unserved(body: Bytes, generation: &Generation) -> Option<ApiError> {
    let body = RawBody::any(body, &generation.parse_limits, &ClientRules).ok()?;
    let name = body.string("model")?;
    generation.models.named(Some(&name)).err()
}

/// Whether the answer holds log-probabilities of the prompt's tokens: `prompt_logprobs`, or `echo` with `logprobs`.
///
/// # Errors
/// 400 where they are asked of a stream, as at engines; no prefill is spent on it.
fn tells_of_the_prompt(body: &RawBody, stream: bool) -> Result<bool, ApiError> {
    let set = |name| body.field(name).filter(|value| *value != b"null" && *value != b"false");
    if let Some(number) = set("prompt_logprobs") {
        if stream && number != b"0" {
            let message = "`prompt_logprobs` cannot be streamed; leave `stream` out";
            return Err(ApiError::invalid("prompt_logprobs", message));
        }
        return Ok(true);
    }
    Ok(set("echo").is_some() && (set("logprobs").is_some() || set("top_logprobs").is_some()))
}

/// vLLM's `priority`.
pub(crate) fn priority(body: &RawBody) -> Option<i64> {
    body.field("priority").and_then(|value| serde_json::from_slice(value).ok())
}

/// Tokens that a request is taken to generate when it does not say how many it may. What it generates beyond them is
/// charged when it is over; see [`crate::auth::Permit::has_cost`].
const ANSWER_TOKENS: u64 = 256;

/// No request is taken to cost more, whatever it says: sums of costs stay within 64 bits.
const TOKENS_MAX: u64 = 1 << 40;

fn estimated_tokens(prompt: u64, outline: &Outline) -> u64 {
    let answer = outline.request.max_tokens.map_or(ANSWER_TOKENS, u64::from);
    let answers = (outline.prompts.max(1) as u64).saturating_mul(outline.request.n.max(1).into());
    prompt.saturating_add(answer.saturating_mul(answers)).min(TOKENS_MAX)
}

/// Reads the whole body of a request.
///
/// # Errors
/// 415 where it says that it is something else than JSON, 413 over the limit (at once, where the client declares it),
/// 408 when it takes too long, 400 when its framing is broken, 429 when the router holds too much of others' bodies.
pub(crate) async fn body(
    session: &mut Session,
    limit_bytes: usize,
    mut share: Share<'_>,
    within: Duration,
) -> Result<Bytes, Ended> {
    let wire = session.wire().clone();
    is_json(&session.req_header().headers)?;
    if wire.declared().is_some_and(|bytes| bytes > limit_bytes as u64) {
        return Err(ApiError::payload_too_large(limit_bytes).into());
    }
    let spent = || ApiError::overloaded("the router is busy with other large requests", COME_BACK);
    // A body that will not fit is not asked for.
    if !share.fits(wire.declared().unwrap_or(0)) {
        return Err(spent().into());
    }
    if wire.expects_continue() {
        session.go_on().await.map_err(|ClientGone| Ended::ClientGone)?;
    }
    match tokio::time::timeout(within, wire.body(limit_bytes, &mut share)).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(BodyError::TooLarge)) => Err(ApiError::payload_too_large(limit_bytes).into()),
        Ok(Err(BodyError::Spent)) => Err(spent().into()),
        Ok(Err(BodyError::Malformed)) => Err(ApiError::malformed("the body's chunks are malformed")
            .with_code(Code::MalformedRequest)
            .into()),
        Ok(Err(BodyError::Ended)) => {
            Err(ApiError::malformed("the body ended early").with_code(Code::MalformedRequest).into())
        }
        Err(_elapsed) => Err(ApiError::request_timeout(within).into()),
    }
}

/// Whether a request says that its body is JSON as it is. One that does not say is believed.
fn is_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let mut kinds = headers.get_all(CONTENT_TYPE).iter();
    let kind = |value: &HeaderValue| {
        let value = value.as_bytes();
        let end = value.iter().position(|byte| *byte == b';').unwrap_or(value.len());
        let kind = value[..end].trim_ascii();
        kind.eq_ignore_ascii_case(b"application/json")
            || kind.len() > 17
                && kind[..12].eq_ignore_ascii_case(b"application/")
                && kind[kind.len() - 5..].eq_ignore_ascii_case(b"+json")
    };
    if !kinds.all(kind) {
        return Err(unsupported("the body must be sent as application/json"));
    }
    let mut codings = headers.get_all(CONTENT_ENCODING).iter();
    if !codings.all(|value| value.as_bytes().eq_ignore_ascii_case(b"identity")) {
        return Err(unsupported("the body must be sent without a content coding"));
    }
    Ok(())
}

fn unsupported(message: &str) -> ApiError {
    let mut error = ApiError::malformed(message);
    error.status = 415;
    error.with_code(Code::UnsupportedMediaType)
}
