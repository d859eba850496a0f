//! Checks and fields that several endpoints share: authorization, request id, special tokens.

use baton_openai::{ApiError, Code};
use hyper::header::{HeaderMap, HeaderValue};

use super::Frontend;
use crate::model::tokenizer::SpecialTokens;

/// Refuses a caller without the cluster secret.
pub(super) fn authorize(frontend: &Frontend, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(secret) = &frontend.cluster_secret else { return Ok(()) };
    let shown = headers.get(CLUSTER_SECRET_HEADER).map(HeaderValue::as_bytes).unwrap_or_default();
    if equal_in_constant_time(shown, secret.as_bytes()) { Ok(()) } else { Err(wrong_secret()) }
}

/// The request's name in a reply's `id`. The id has the endpoint's prefix, as in vLLM, and a suffix that
/// distinguishes replies to the same name.
pub(super) fn bare_id(id: &str) -> &str {
    let Some(rest) = id.strip_prefix("chatcmpl-").or_else(|| id.strip_prefix("cmpl-")) else { return id };
    let is_mark = |mark: &str| mark.len() == 16 && mark.bytes().all(|byte| byte.is_ascii_hexdigit());
    rest.rsplit_once('.')
        .filter(|(name, mark)| !name.is_empty() && is_mark(mark))
        .map_or(rest, |(name, _)| name)
}

/// Whether text is encoded with the tokenizer's special tokens.
pub(super) fn special(add: Option<bool>, default: bool) -> SpecialTokens {
    if add.unwrap_or(default) { SpecialTokens::Add } else { SpecialTokens::AsWritten }
}

/// The header with the cluster secret of the cluster's own callers.
pub(super) const CLUSTER_SECRET_HEADER: &str = "x-baton-cluster-secret";

/// 401 with its own code: a router must not report it as a wrong API key of the client.
fn wrong_secret() -> ApiError {
    let mut error = ApiError::unauthorized().with_code(Code::InvalidClusterSecret);
    error.message = format!("missing or wrong cluster secret in the header {CLUSTER_SECRET_HEADER}");
    error
}

fn equal_in_constant_time(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}
