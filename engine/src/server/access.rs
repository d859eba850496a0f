//! Checks and fields that several endpoints share: authorization, request id, query.

use baton_connector_tcp::Secret;
use baton_openai::{ApiError, Code};
use hyper::header::{HeaderMap, HeaderValue};

use super::Frontend;
use crate::run::random::random_bytes;

/// The secret of the cluster's engines and routers, in both its forms.
pub struct ClusterSecret {
    /// As the cluster's own callers send it; see `control.rs`.
    pub text: Box<str>,
    /// As the key of seals; see `seal.rs`.
    pub key: Secret,
}

/// Refuses a caller without the cluster secret.
pub(super) fn authorize(frontend: &Frontend, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(secret) = &frontend.secret else { return Ok(()) };
    let shown = headers.get(CLUSTER_SECRET_HEADER).map(HeaderValue::as_bytes).unwrap_or_default();
    if equal_in_constant_time(shown, secret.text.as_bytes()) { Ok(()) } else { Err(wrong_secret()) }
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

/// The value of a field of a request's query.
pub(super) fn query_field<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
}

/// A random number.
pub(super) fn random_u64() -> Result<u64, ApiError> {
    let bytes = random_bytes().map_err(|_| ApiError::internal("the system has no randomness"))?;
    Ok(u64::from_ne_bytes(bytes))
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
