//! Requests that one decode engine serves without generation: tokens, embeddings, scores. They are cleaned and passed
//! on with all unknown fields; the fields of `/tokenize` and `/detokenize` are checked too. The owner's limits apply as
//! to generating requests: tokens are charged, the model's queue orders them, and fields that the key may not use are
//! removed.

use std::sync::Arc;

use baton_openai::{
    ApiError, DetokenizeRequest, Object, ParseLimits, RawBody, TokenizeRequest, parse_object, strip,
};
use bytes::Bytes;
use hyper::header::{AUTHORIZATION, HeaderMap};

use super::{ClientRequest, LegShape, RequestOwner, priority, with_priority};
use crate::message::estimate::NonTextParts;
use crate::message::features::Features;
use crate::message::path::Dialect;
use crate::message::rewrite::{ClientRules, RouterFields};
use crate::state::generation::Generation;

/// Checks the fields of a body.
type BodyCheck = fn(&Object, &ParseLimits) -> Result<(), ApiError>;

/// Endpoints whose responses depend on no prefix cache.
const UNSALTED: [&str; 2] = ["/tokenize", "/detokenize"];

impl ClientRequest {
    /// Like [`ClientRequest::read`], for a path whose responses are not generated.
    pub(super) fn read_passed(
        path: &'static str,
        body: Bytes,
        headers: &HeaderMap,
        generation: &Generation,
        owner: Option<&RequestOwner<'_>>,
    ) -> Result<Self, ApiError> {
        let limits = &generation.parse_limits;
        let checked = |read: BodyCheck| {
            let mut map = parse_object(&body, limits)?;
            strip(&mut map, &ClientRules);
            read(&map, limits)
        };
        match path {
            "/tokenize" => checked(|map, limits| TokenizeRequest::from_map(map, limits).map(drop))?,
            "/detokenize" => checked(|map, limits| DetokenizeRequest::from_map(map, limits).map(drop))?,
            _ => {}
        }
        let body = RawBody::any(body, limits, &ClientRules)?;
        let name = body.string("model");
        if name.is_none() && body.field("model").is_some_and(|model| model != b"null") {
            return Err(ApiError::invalid("model", "`model` must be a string"));
        }
        let model = Arc::clone(generation.models.named(name.as_deref())?);
        let mut owned = RouterFields::default();
        if let Some(owner) = owner {
            let salted = !UNSALTED.contains(&path);
            let client = body.string("cache_salt");
            let salt = salted.then(|| owner.auth.cache_salt(owner.identity, client.as_deref()));
            owned = RouterFields::new(salt.as_deref(), owner.exceeds_priority(&body));
        }
        let owned = with_priority(owned, Dialect::Passthrough(path), &model, headers, priority(&body), owner);
        let tokens = NonTextParts::of(&body).prompt_tokens(&body);
        Ok(Self {
            dialect: Dialect::Passthrough(path),
            model,
            shape: LegShape { prompts: 1, ..LegShape::default() },
            translation: None,
            owned,
            tokens,
            prompt_tokens: tokens,
            priority: priority(&body),
            features: Features::of_tokens(tokens),
            owner: owner.map(RequestOwner::hash),
            authorization: headers.get(AUTHORIZATION).cloned(),
            body,
        })
    }
}
