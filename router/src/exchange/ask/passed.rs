//! What one engine of the decode pool answers by itself: tokens, embeddings, scores. Cleaned, and passed with all fields
//! that nobody here knows; what `/tokenize` and `/detokenize` mean is checked too. Whose it is counts as for what
//! generates: its tokens are charged, its turn comes in the model's queue, and what its key may not say is taken out.

use std::sync::Arc;

use baton_openai::{
    ApiError, DetokenizeRequest, Object, ParseLimits, RawBody, TokenizeRequest, parse_object, strip,
};
use bytes::Bytes;
use hyper::header::{AUTHORIZATION, HeaderMap};

use super::{Ask, Owner, priority};
use crate::message::estimate::Known;
use crate::message::features::Features;
use crate::message::path::Dialect;
use crate::message::rewrite::{ClientRules, Owned};
use crate::state::generation::Generation;

/// Whether a body means something.
type Reader = fn(&Object, &ParseLimits) -> Result<(), ApiError>;

/// Endpoints whose answers depend on no cache of prefixes.
const UNSALTED: [&str; 2] = ["/tokenize", "/detokenize"];

impl Ask {
    /// As [`Ask::read`], for a path whose answers are not generated.
    pub(super) fn read_passed(
        path: &'static str,
        body: Bytes,
        headers: &HeaderMap,
        generation: &Generation,
        owner: Option<&Owner<'_>>,
    ) -> Result<Self, ApiError> {
        let limits = &generation.parse_limits;
        let checked = |read: Reader| {
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
        let mut owned = Owned::default();
        if let Some(owner) = owner {
            let salted = !UNSALTED.contains(&path);
            let client = body.string("cache_salt");
            let salt = salted.then(|| owner.auth.cache_salt(owner.identity, client.as_deref()));
            owned = Owned::new(salt.as_deref(), owner.forbids(&body));
        }
        let tokens = Known::of(&body).prompt_tokens(&body);
        Ok(Self {
            dialect: Dialect::Passed(path),
            model,
            aggregate: false,
            prompt_logprobs: false,
            owned,
            tokens,
            prompt_tokens: tokens,
            priority: priority(&body),
            features: Features::of_tokens(tokens),
            owner: owner.map(Owner::hash),
            authorization: headers.get(AUTHORIZATION).cloned(),
            body,
        })
    }
}
