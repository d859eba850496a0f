//! Makes a stock vLLM prefill engine release a lease that no request needs.
//!
//! Stock vLLM has no verb for a release. But if a decode engine's request handler refuses a request, the decode engine
//! notifies the producer named in the handoff. So the router sends a decode engine a request that must be refused: well
//! formed, with a temperature below zero. P then frees the blocks within milliseconds instead of at the lease's expiry.
//! A malformed body would be refused too early, by the parser, without a notification.
//!
//! The blocks of a turn that a decode engine keeps are released the same way, by a prefill engine.
//!
//! If a decode engine accepts the request nevertheless, it computes one token and has read the blocks, which are then
//! free.

use std::sync::Arc;
use std::time::Duration;

use baton_connector::RequestId;
use baton_openai::Endpoint;
use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::HeaderValue;

use super::{ANSWER_BYTES_MAX, PAUSE_MAX, log_failed_try, retry_pauses};
use crate::engines::http::EngineRequest;
use crate::message::features::RoutingFeatures;
use crate::message::request_id;
use crate::routing::models::Model;
use crate::routing::pool::{CapacityRule, Detail, Pool};

/// The request without its destination.
pub(super) struct RefusedDecode<'a> {
    pub model: &'a Model,
    /// The engines that may refuse it.
    pub pool: &'a Pool,
    /// As the producer wrote them.
    pub params: &'a str,
    pub authorization: Option<&'a HeaderValue>,
    pub request: &'a RequestId,
}

impl RefusedDecode<'_> {
    /// Makes up to `tries` attempts, at each decode engine once before any engine again. Returns whether an engine
    /// refused the request. An engine that refuses before its handler does so permanently is not tried twice.
    pub(super) async fn send(&self, tries: u16, within: Duration) -> bool {
        let (mut tried, mut useless) = (Vec::new(), Vec::new());
        let mut pauses = retry_pauses();
        let mut message = self.message();
        for left in (0..tries).rev() {
            // The request needs no capacity, because it is refused at once. Leases must be released when engines are
            // full, too.
            let reserve = |tried: &[_]| {
                self.pool.reserve(&RoutingFeatures::default(), tried, CapacityRule::Ignored, Detail::None).0
            };
            let reserved = match reserve(&tried) {
                Ok(reserved) => reserved,
                Err(_) => {
                    // An engine may be full only briefly, and the lease would hold its blocks much longer.
                    tried.clone_from(&useless);
                    tokio::time::sleep(pauses.next().unwrap_or(PAUSE_MAX)).await;
                    let Ok(reserved) = reserve(&tried) else { continue };
                    reserved
                }
            };
            let engine = Arc::clone(reserved.engine());
            message.rank = reserved.member.rank;
            let call = async { engine.call(&message, |_| {}).await?.read_whole(ANSWER_BYTES_MAX).await };
            match tokio::time::timeout(within, call).await {
                Ok(Ok(answer)) if reached_handler(answer.status) => return true,
                Ok(Ok(answer)) => {
                    log_failed_try(&engine, &message, left, &format!("status {}", answer.status));
                    if is_permanent(answer.status) {
                        useless.push(Arc::clone(&engine));
                    }
                }
                Ok(Err(error)) => log_failed_try(&engine, &message, left, &error.to_string()),
                Err(_elapsed) => log_failed_try(&engine, &message, left, "no answer in time"),
            }
            tried.push(engine);
        }
        false
    }

    fn message(&self) -> EngineRequest {
        let (model, params) = (self.model.name_in_bodies.as_json(), self.params);
        let body = format!(
            r#"{{"model":{model},"prompt":"x","max_tokens":1,"stream":false,"temperature":-1,"kv_transfer_params":{params}}}"#
        );
        EngineRequest {
            // An id of its own: under the request's own id it could be mistaken for the request.
            id: Some(request_id::derived(self.request, "-r")),
            authorization: self.authorization.cloned(),
            ..EngineRequest::post(Endpoint::Completions.path(), Bytes::from(body))
        }
    }
}

/// Whether the engine's handler received the request: the handler accepted it or refused its content. Any other refusal
/// comes from a layer in front of the handler and does not notify the producer.
fn reached_handler(status: StatusCode) -> bool {
    status.is_success() || matches!(status, StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY)
}

/// Whether an engine would repeat this refusal: it is not full (429), and did not time out while reading the request
/// (408).
fn is_permanent(status: StatusCode) -> bool {
    status.is_client_error() && !matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_refusal_of_the_handler_ends_the_lease() {
        let is = |status: u16| reached_handler(StatusCode::from_u16(status).expect("a status"));
        assert!([200, 400, 422].into_iter().all(is));
        assert!(![401, 403, 404, 405, 408, 409, 413, 415, 429, 500, 503].into_iter().any(is));
    }

    #[test]
    fn a_temporary_refusal_is_retried() {
        let is = |status: u16| is_permanent(StatusCode::from_u16(status).expect("a status"));
        assert!([401, 403, 404, 405, 413, 415].into_iter().all(is));
        assert!(![408, 429, 500, 502, 503, 504].into_iter().any(is));
    }
}
