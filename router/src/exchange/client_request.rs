//! A client's request: read, cleaned and checked completely before any engine receives it.
//!
//! On stock vLLM, a body that the decode engine's parser refuses strands the prefill engine's blocks for a whole lease.
//! Therefore the router sends nothing that it can recognize as invalid.

mod decode_only;
mod pass_through;
mod tokenized;
mod translated;

use std::borrow::Cow;
use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use baton_connector::RequestId;
use baton_openai::translate::messages;
use baton_openai::{ApiError, Code, Endpoint, RawBody, RequestOutline, Translation};
use bytes::Bytes;
use hyper::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};

use crate::admission::deadline;
use crate::auth::{Auth, Identity};
use crate::client::http::BodyError;
use crate::client::session::{ClientGone, Session};
use crate::config::Priority;
use crate::engines::body_budget::BudgetShare;
use crate::engines::caches::CachedPrefix;
use crate::engines::caches::kept_turns::TurnOwner;
use crate::engines::protocol::LegInput;
use crate::legs::request_error::RequestError;
use crate::message::estimate::NonTextParts;
use crate::message::features::{FeatureInput, Features, RoutingFeatures};
use crate::message::path::Dialect;
use crate::message::prompt_ids::PromptIds;
use crate::message::rewrite::{ClientRules, RouterFields};
use crate::message::sse::{StreamReadOptions, TokenCountRule};
use crate::metrics::routing::DisaggregationReason;
use crate::routing::disaggregation::DisaggregationInputs;
use crate::routing::models::Model;
use crate::state::generation::Generation;

/// Bytes of a chat whose prompt is not tokenized twice. A token of text has a byte or more, and at most 8 bytes in the
/// prefill engine's reply, which has 8 MiB at most.
const REUSED_BYTES_MAX: usize = 512 << 10;
/// The delay before a retry while too many bodies are in memory.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A request that engines may receive.
pub(crate) struct ClientRequest {
    pub dialect: Dialect,
    pub model: Arc<Model>,
    /// The client's body without internal fields.
    pub body: RawBody,
    pub shape: LegShape,
    /// What the engines' replies are translated to.
    pub translation: Option<Translation>,
    /// Fields that the router sets because it knows the owner.
    pub owned: RouterFields,
    /// Estimated cost in tokens: the prompt's, and those that it may generate.
    pub tokens: u64,
    /// Estimated tokens of the prompt.
    pub prompt_tokens: u64,
    /// vLLM's `priority`.
    pub priority: Option<i64>,
    /// The features for routing.
    pub features: Features,
    /// Hash of the owner, if known.
    owner: Option<u64>,
    /// The client's credentials: the only header that engines receive unchanged. The trace headers are checked first.
    pub authorization: Option<HeaderValue>,
}

/// Finds the model of a request by its name.
pub(crate) type FindModel<'a> = &'a dyn Fn(Option<&str>) -> Result<Arc<Model>, ApiError>;

/// Which legs a request can have. One handoff is one sequence of blocks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LegShape {
    pub prompts: usize,
    pub has_choices: bool,
    /// The decode engine may keep the blocks of the response for the next turn.
    pub keeps_turn: bool,
    /// Why a decode engine computes the whole request, if it must.
    pub decode_only: Option<DisaggregationReason>,
}

/// The owner of a request, if authenticated.
pub(crate) struct RequestOwner<'a> {
    pub identity: &'a Identity,
    pub auth: &'a Auth,
}

impl RequestOwner<'_> {
    /// Whether the body's `priority` (vLLM's number) exceeds that of the key. Engines with priority scheduling read it.
    pub(crate) fn exceeds_priority(&self, body: &RawBody) -> bool {
        // A value that is no number here must not be interpreted by an engine either.
        let own = body.field("priority").filter(|value| *value != b"null");
        own.is_some_and(|_| {
            priority(body).is_none_or(|number| Priority::of_number(number) < self.identity.priority_max)
        })
    }

    /// Hash of the tenant, independent of its key and address: a tenant's requests must not harm another tenant.
    fn hash(&self) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        self.identity.tenant.name.hash(&mut hasher);
        hasher.finish()
    }
}

impl ClientRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// The client's error; nothing of the request has left the router.
    pub(crate) fn read(
        dialect: Dialect,
        body: Bytes,
        headers: &HeaderMap,
        generation: &Generation,
        owner: Option<&RequestOwner<'_>>,
    ) -> Result<Self, ApiError> {
        let find = |name: Option<&str>| generation.models.named(name).cloned();
        Self::read_for(dialect, body, headers, generation, owner, &find)
    }

    /// As [`Self::read`], for the model that `find` returns for the name in the body.
    ///
    /// # Errors
    /// As [`Self::read`], and those of `find`.
    pub(crate) fn read_for(
        dialect: Dialect,
        body: Bytes,
        headers: &HeaderMap,
        generation: &Generation,
        owner: Option<&RequestOwner<'_>>,
        find: FindModel<'_>,
    ) -> Result<Self, ApiError> {
        let limits = &generation.parse_limits;
        let read = match dialect {
            Dialect::OpenAi(endpoint) => RawBody::generate(body.clone(), endpoint, limits, &ClientRules),
            Dialect::Responses => RawBody::responses(body.clone(), limits, &ClientRules),
            Dialect::Messages => RawBody::messages(body.clone(), limits, &ClientRules),
            Dialect::Passthrough(path) => return Self::read_passed(path, body, headers, generation, owner),
        };
        let (body, mut outline) = read.map_err(|error| match error.param.as_deref() {
            Some("model") => error,
            _ => unserved_model_error(body, generation, find).unwrap_or(error),
        })?;
        let model = find(outline.request.model.as_deref())?;
        let decode_only = decode_only::reason(dialect, &body, &outline)?;
        let priority = priority(&body);
        let non_text = NonTextParts::of(&body);
        let prompt_tokens = non_text.prompt_tokens(&body);
        let tokens = estimated_tokens(prompt_tokens, &outline);
        let mut owned = RouterFields::default();
        if let Some(owner) = owner {
            let salt = owner.auth.cache_salt(owner.identity, outline.request.cache_salt.as_deref());
            owned = RouterFields::new(Some(&salt), owner.exceeds_priority(&body));
            outline.request.cache_salt = Some(salt);
        }
        let asks_for_usage = outline.request.stream_options.include_usage;
        if outline.request.stream && !asks_for_usage && matches!(dialect, Dialect::OpenAi(_)) {
            owned.ask_for_usage(&body);
        }
        if model.disaggregate.cache_hit_threshold.is_some() {
            // Only a conditional decode has another value.
            owned = owned.with_cache_hit_threshold(0.0);
        }
        owned.prompt_ids = model.handoff.reuse_tokens && reuses_tokens(dialect, &body, &non_text);
        let is_one = outline.prompts == 1 && outline.request.n == 1 && decode_only.is_none();
        let keeps_turn =
            model.handoff.keep_turns.is_some() && is_one && matches!(dialect, Dialect::OpenAi(_));
        owned.token_ids |= keeps_turn;
        let salt = outline.request.cache_salt.as_deref();
        let system = body.field("system").filter(|_| dialect == Dialect::Messages);
        let input = FeatureInput {
            model: &model.name,
            headers,
            body: &body,
            system: &messages::compared_bytes(system.unwrap_or_default()),
            user: outline.request.user.as_deref(),
            salts: salt.as_slice(),
            non_text,
            block_size: model.decode.block_size().or_else(|| model.prefill.block_size()),
            is_adapter: model.decode.is_adapter(&model.name) || model.prefill.is_adapter(&model.name),
        };
        let features = Features::read(&input, model.needs, &model.features);
        let authorization = headers.get(AUTHORIZATION).cloned();
        Ok(Self {
            dialect,
            owned: with_priority(owned, dialect, &model, headers, priority, owner),
            model,
            body,
            shape: LegShape {
                prompts: outline.prompts,
                has_choices: outline.request.n > 1,
                keeps_turn,
                decode_only,
            },
            translation: None,
            tokens,
            prompt_tokens,
            priority,
            features,
            owner: owner.map(RequestOwner::hash),
            authorization,
        })
    }

    /// Whether a prefill engine that writes the blocks can match both legs: by the router's id of the request, which names
    /// neither one of several choices nor a response.
    pub(crate) fn can_be_pushed(&self) -> bool {
        !self.shape.has_choices && self.dialect != Dialect::Responses
    }

    /// Hash of the tenant; the same for all requests without one.
    pub(crate) fn tenant_hash(&self) -> u64 {
        self.owner.unwrap_or_default()
    }

    /// Whose next turn may read the blocks of the response; `None` if the decode engine keeps none.
    pub(crate) fn turn_owner(&self) -> Option<TurnOwner> {
        let cache_salt =
            || self.owned.cache_salt().or_else(|| self.body.string("cache_salt").map(Cow::into_owned));
        self.shape.keeps_turn.then(|| TurnOwner { model: self.model.name.clone(), cache_salt: cache_salt() })
    }

    /// The prompt's token ids: the client's own, or those of an engine's tokenizer (`models[].tokenize`), set before any
    /// leg is sent. `None` if neither is known.
    pub(crate) fn prompt_ids(&self) -> Option<&PromptIds> {
        self.features.prompt_ids()
    }

    /// The properties of the request that a policy reads.
    pub(crate) fn routing_features(&self) -> RoutingFeatures<'_> {
        self.features.routing_features()
    }

    /// The inputs of the disaggregation decision; `cached` is the part of the prompt that the decode engine has cached,
    /// and `compatibility` what a prefill engine needs.
    pub(crate) fn disaggregation_inputs(
        &self,
        cached: CachedPrefix,
        compatibility: Option<u64>,
    ) -> DisaggregationInputs {
        let features = RoutingFeatures { compatibility, ..self.routing_features() };
        DisaggregationInputs {
            decode_only: self.shape.decode_only.or_else(|| {
                let pushes = self.model.handoff.pushes.load(Ordering::Relaxed);
                (pushes && !self.can_be_pushed()).then_some(DisaggregationReason::PushUnmatched)
            }),
            ..DisaggregationInputs::new(&self.model, &features, cached)
        }
    }

    /// The request as its legs need it, under this id.
    pub(crate) fn leg_input<'a>(&'a self, request: &'a RequestId) -> LegInput<'a> {
        LegInput {
            dialect: self.dialect,
            body: &self.body,
            fields: &self.owned,
            model: &self.model.name_in_bodies,
            request,
            prompts: self.shape.prompts,
        }
    }

    /// Hash of the sender: the tenant if known, or else the forwarded credentials, or else the address.
    pub(crate) fn source_hash(&self, client: IpAddr) -> u64 {
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

    /// How the response is read if it is a stream.
    pub(crate) fn stream_reading(&self) -> StreamReadOptions {
        let has_ids = self.owned.token_ids || self.body.field("return_token_ids") == Some(b"true");
        let counts = match self.dialect {
            Dialect::Responses => TokenCountRule::Deltas,
            Dialect::Messages => TokenCountRule::BlockDeltas,
            Dialect::OpenAi(_) | Dialect::Passthrough(_) if has_ids => TokenCountRule::TokenIds,
            Dialect::OpenAi(_) | Dialect::Passthrough(_) => TokenCountRule::Events,
        };
        // A translated stream ends with its usage.
        let without_usage = self.owned.asks_for_usage() && self.translation.is_none();
        StreamReadOptions { counts, without_usage, ending: self.dialect.stream_ending() }
    }

    /// Whether the client asks for a stream.
    pub(crate) fn is_streamed(&self) -> bool {
        self.dialect.generates() && self.body.field("stream") == Some(b"true")
    }

    /// Frees the memory of body and token ids once the response has begun; later steps do not need them.
    pub(crate) fn drop_body(&mut self) {
        self.body = RawBody::default();
        self.features.drop_prompt_ids();
    }
}

/// The error for a model that is not served, if that is the case. Of all errors of a JSON body this one takes
/// precedence, because the valid fields depend on the model. vLLM's handlers check the model first, too
/// (`_check_model`).
fn unserved_model_error(body: Bytes, generation: &Generation, find: FindModel<'_>) -> Option<ApiError> {
    let body = RawBody::any(body, &generation.parse_limits, &ClientRules).ok()?;
    let name = body.string("model")?;
    find(Some(&name)).err()
}

/// Whether a decode engine may use the token ids of the prefill engine's reply. Engines need the messages of a chat with
/// media or `echo`.
fn reuses_tokens(dialect: Dialect, body: &RawBody, non_text: &NonTextParts) -> bool {
    dialect == Dialect::OpenAi(Endpoint::Chat)
        && non_text.is_empty()
        && body.len() <= REUSED_BYTES_MAX
        && body.field("echo") != Some(b"true")
}

/// vLLM's `priority`.
pub(crate) fn priority(body: &RawBody) -> Option<i64> {
    body.field("priority").and_then(|value| serde_json::from_slice(value).ok())
}

/// Paths whose requests no engine schedules: only their text is tokenized.
const UNSCHEDULED: [&str; 3] = ["/tokenize", "/detokenize", messages::COUNT_TOKENS];

/// The same fields with the `priority` of the request, if the model's engines schedule by it and the endpoint has it.
fn with_priority(
    owned: RouterFields,
    dialect: Dialect,
    model: &Model,
    headers: &HeaderMap,
    asked: Option<i64>,
    owner: Option<&RequestOwner<'_>>,
) -> RouterFields {
    let has_field = match dialect {
        Dialect::OpenAi(_) | Dialect::Responses | Dialect::Messages => true,
        // An engine computes nothing for these.
        Dialect::Passthrough(path) => !UNSCHEDULED.contains(&path),
    };
    if !(model.handoff.priority_scheduling && has_field) {
        return owned;
    }
    let most = owner.map_or(Priority::High, |owner| owner.identity.priority_max);
    owned.with_priority(deadline::priority_number(headers, asked, most))
}

/// Assumed tokens of a response without a limit. Tokens beyond them are charged at the end of the request; see
/// [`crate::auth::Permit::settle_cost`].
const ANSWER_TOKENS: u64 = 256;

/// Limit on the estimated cost of a request, so that sums of costs stay within 64 bits.
const TOKENS_MAX: u64 = 1 << 40;

fn estimated_tokens(prompt: u64, outline: &RequestOutline) -> u64 {
    let answer = outline.request.max_tokens.map_or(ANSWER_TOKENS, u64::from);
    let answers = (outline.prompts.max(1) as u64).saturating_mul(outline.request.n.max(1).into());
    prompt.saturating_add(answer.saturating_mul(answers)).min(TOKENS_MAX)
}

/// Reads the whole body of a request.
///
/// # Errors
/// - 415: the body is not declared as JSON.
/// - 413: the body is over the limit; at once if the client declares the length.
/// - 408: the time limit is exceeded.
/// - 400: the framing is malformed.
/// - 429: the budget of all bodies is exhausted.
pub(crate) async fn read_body(
    session: &mut Session,
    limit_bytes: usize,
    share: BudgetShare<'_>,
    within: Duration,
) -> Result<Bytes, RequestError> {
    is_json(&session.req_header().headers)?;
    read_any_body(session, limit_bytes, share, within).await
}

/// As [`read_body`], whatever the body is declared to be.
///
/// # Errors
/// As [`read_body`], but for 415.
pub(crate) async fn read_any_body(
    session: &mut Session,
    limit_bytes: usize,
    mut share: BudgetShare<'_>,
    within: Duration,
) -> Result<Bytes, RequestError> {
    if session.declared().is_some_and(|bytes| bytes > limit_bytes as u64) {
        return Err(ApiError::payload_too_large(limit_bytes).into());
    }
    let exhausted = || ApiError::overloaded("the router is busy with other large requests", RETRY_AFTER);
    // A body that does not fit the budget is not requested.
    if !share.fits(session.declared().unwrap_or(0)) {
        return Err(exhausted().into());
    }
    session.send_continue().await.map_err(|ClientGone| RequestError::ClientGone)?;
    match tokio::time::timeout(within, session.read_body(limit_bytes, &mut share)).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(BodyError::TooLarge)) => Err(ApiError::payload_too_large(limit_bytes).into()),
        Ok(Err(BodyError::BudgetExhausted)) => Err(exhausted().into()),
        Ok(Err(BodyError::Malformed)) => {
            Err(ApiError::of(Code::MalformedRequest, "the body's chunks are malformed").into())
        }
        Ok(Err(BodyError::Ended)) => Err(ApiError::of(Code::MalformedRequest, "the body ended early").into()),
        Err(_elapsed) => Err(ApiError::request_timeout(within).into()),
    }
}

/// Accepts a body that is declared as unencoded JSON, or not declared at all.
pub(crate) fn is_json(headers: &HeaderMap) -> Result<(), ApiError> {
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
    ApiError::of(Code::UnsupportedMediaType, message)
}
