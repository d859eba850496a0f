//! How a stock vLLM prefill engine is told that nobody will read what it lends.
//!
//! It has no verb for that, but a decode engine whose handler refuses a request tells the producer that its
//! handoff names. So a decode engine is sent one that must be refused: well formed, with a temperature below
//! zero. Measured on vLLM 0.32 (2026-11-20): P frees 10 ms after the refusal, and after 30 s without it. A body
//! that is not well formed would be refused too early, by the layer that parses it, and P would hear nothing.
//!
//! If a decode engine should take it after all, it computes one token and has read the blocks: they are free.

use std::sync::Arc;
use std::time::Duration;

use baton_connector::RequestId;
use baton_openai::Endpoint;
use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::HeaderValue;

use super::{ANSWER_BYTES_MAX, PAUSE_MAX, complain, pauses};
use crate::engines::http::Outgoing;
use crate::message::features::Wanted;
use crate::message::request_id;
use crate::routing::models::Model;
use crate::routing::pool::{Room, Tell};

/// What is sent, apart from where.
pub(super) struct Refusable<'a> {
    pub model: &'a Model,
    /// As the producer wrote them.
    pub params: &'a str,
    pub authorization: Option<&'a HeaderValue>,
    pub request: &'a RequestId,
}

impl Refusable<'_> {
    /// Tries so often, every decode engine once before any of them again; whether one of them has refused it. An engine
    /// that has said no before its handler says it again, and is not asked twice.
    pub(super) async fn refused(&self, tries: u16, within: Duration) -> bool {
        let (mut tried, mut useless) = (Vec::new(), Vec::new());
        let mut pauses = pauses();
        let mut outgoing = self.outgoing();
        for left in (0..tries).rev() {
            // It is refused at once and takes no place: engines that are full are when leases must come back.
            let reserve = |tried: &[_]| {
                self.model.decode.reserve(&Wanted::default(), tried, Room::Ignored, Tell::Nothing).0
            };
            let reserved = match reserve(&tried) {
                Ok(reserved) => reserved,
                Err(_) => {
                    // One that was busy for a moment may answer now: the lease would hold its blocks much longer.
                    tried.clone_from(&useless);
                    tokio::time::sleep(pauses.next().unwrap_or(PAUSE_MAX)).await;
                    let Ok(reserved) = reserve(&tried) else { continue };
                    reserved
                }
            };
            let engine = Arc::clone(reserved.engine());
            outgoing.rank = reserved.member.rank;
            let ask = async { engine.call(&outgoing, |_| {}).await?.whole(ANSWER_BYTES_MAX).await };
            match tokio::time::timeout(within, ask).await {
                Ok(Ok(answer)) if is_handlers(answer.status) => return true,
                Ok(Ok(answer)) => {
                    complain(&engine, &outgoing, left, &format!("status {}", answer.status));
                    if is_for_good(answer.status) {
                        useless.push(Arc::clone(&engine));
                    }
                }
                Ok(Err(error)) => complain(&engine, &outgoing, left, &error.to_string()),
                Err(_elapsed) => complain(&engine, &outgoing, left, "no answer in time"),
            }
            tried.push(engine);
        }
        false
    }

    fn outgoing(&self) -> Outgoing {
        let (model, params) = (self.model.name_in_bodies.as_json(), self.params);
        let body = format!(
            r#"{{"model":{model},"prompt":"x","max_tokens":1,"stream":false,"temperature":-1,"kv_transfer_params":{params}}}"#
        );
        Outgoing {
            // A name of its own: under the request's own name it could be taken for the request.
            id: Some(request_id::derived(self.request, "-r")),
            authorization: self.authorization.cloned(),
            ..Outgoing::post(Endpoint::Completions.path(), Bytes::from(body))
        }
    }
}

/// Whether the engine's handler has seen it: it took it, or refused it for what it says. Every other refusal came from
/// something in front of the handler, which tells the producer nothing.
fn is_handlers(status: StatusCode) -> bool {
    status.is_success() || matches!(status, StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY)
}

/// Whether an engine that refuses like this, before its handler, would do so again: it is not busy for now (429), and
/// did not wait in vain for the rest of the request (408).
fn is_for_good(status: StatusCode) -> bool {
    status.is_client_error() && !matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_handler_ends_a_lease() {
        let is = |status: u16| is_handlers(StatusCode::from_u16(status).expect("a status"));
        assert!([200, 400, 422].into_iter().all(is));
        assert!(![401, 403, 404, 405, 408, 409, 413, 415, 429, 500, 503].into_iter().any(is));
    }

    #[test]
    fn what_an_engine_refuses_for_now_is_asked_again() {
        let is = |status: u16| is_for_good(StatusCode::from_u16(status).expect("a status"));
        assert!([401, 403, 404, 405, 413, 415].into_iter().all(is));
        assert!(![408, 429, 500, 502, 503, 504].into_iter().any(is));
    }
}
