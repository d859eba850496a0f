//! Checks and fields that several endpoints share: authorization, request id.

use baton_openai::ApiError;
use baton_openai::cluster::{SECRET_HEADER, check_secret};
use hyper::header::{HeaderMap, HeaderValue};

use super::Frontend;
use crate::run::random::random_bytes;

/// Refuses a caller without an accepted cluster secret.
pub(super) fn authorize(frontend: &Frontend, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(secret) = &frontend.secret else { return Ok(()) };
    let shown = headers.get(SECRET_HEADER).map(HeaderValue::as_bytes).unwrap_or_default();
    check_secret(shown, secret.accepted())
}

/// The request's name in a reply's `id`. The id has the endpoint's prefix, as in vLLM, and a suffix that
/// distinguishes replies to the same name. A name may begin like the id of a message or a response, which always has
/// the suffix.
pub(super) fn bare_id(id: &str) -> &str {
    let is_mark = |mark: &str| mark.len() == 16 && mark.bytes().all(|byte| byte.is_ascii_hexdigit());
    let name_end = |rest: &str| -> Option<usize> {
        let (name, mark) = rest.rsplit_once('.')?;
        (!name.is_empty() && is_mark(mark)).then_some(name.len())
    };
    if let Some(rest) = id.strip_prefix("msg_").or_else(|| id.strip_prefix("resp_")) {
        return name_end(rest).map_or(id, |end| &rest[..end]);
    }
    let Some(rest) = id.strip_prefix("chatcmpl-").or_else(|| id.strip_prefix("cmpl-")) else { return id };
    name_end(rest).map_or(rest, |end| &rest[..end])
}

/// A random number.
pub(super) fn random_u64() -> Result<u64, ApiError> {
    let bytes = random_bytes().map_err(|_| ApiError::internal("the system has no randomness"))?;
    Ok(u64::from_ne_bytes(bytes))
}
