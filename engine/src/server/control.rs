//! All endpoints except generation: models, tokenizer, health, metrics, and the cluster's control requests.
//!
//! The cluster's endpoints (`/kv/release`, `/abort_requests`, `/reset_prefix_cache`, `/debug/kv`,
//! `/debug/kv/digests`, `/debug/kv/events`) and requests with `kv_transfer_params` are for routers and engines, never
//! for clients. If a cluster secret is configured (beyond loopback it must be), they need it in the header
//! `x-baton-cluster-secret`.

use std::sync::Arc;

use baton_connector::{Handle, RequestId};
use baton_openai::cluster;
use baton_openai::path::model_at;
use baton_openai::response::{DetokenizeReply, TokenizeReply, models as model_list};
use baton_openai::translate::messages;
use baton_openai::{ApiError, DetokenizeRequest, Object, TokenizeRequest, parse_object};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Request, StatusCode};
use serde_json::{Map, Value, json};

use tokio::sync::oneshot;

use super::Frontend;
use super::access::{authorize, bare_id};
use super::reply::{self, Reply, read_body};
use crate::blocks::digests::{BlockDigest, DigestRequest};
use crate::blocks::hash::BlockHash;
use crate::engine_core::mailbox::MailboxError;
use crate::model::tokenizer::DecodeMode;
use crate::run::rank::DpRank;

/// Limit of the bytes of a control message.
const CONTROL_BODY_MAX: usize = 1 << 20;

async fn control_object(frontend: &Frontend, request: Request<Incoming>) -> Result<Object, ApiError> {
    authorize(frontend, request.headers())?;
    let body = read_body(request, CONTROL_BODY_MAX, &frontend.bodies.control).await?;
    parse_object(&body, &frontend.limits)
}

fn named(frontend: &Frontend, headers: &HeaderMap) -> Result<Option<Arc<DpRank>>, ApiError> {
    authorize(frontend, headers)?;
    Ok(frontend.named_core(headers)?.cloned())
}

/// `POST /kv/release {"handle", "reason"}`: ends a lease early, on any rank or only on the one in the header.
/// Idempotent: a repetition gets an answer too.
pub(super) async fn release(frontend: Arc<Frontend>, request: Request<Incoming>) -> Result<Reply, ApiError> {
    let named = named(&frontend, request.headers())?;
    let fields = control_object(&frontend, request).await?;
    let handle: Handle = cluster::handle(&fields)?;
    let reason = cluster::reason(&fields, "router_release")?;
    let reply = frontend.release(named.as_ref(), handle, reason);
    Ok(reply::json(StatusCode::OK, json!({"result": reply.label()}).to_string()))
}

/// `POST /abort_requests {"request_ids": [...], "leg": "prefill"|"decode"}`: ends requests by name, running or just
/// finished. Unknown ids are remembered: such a request is ended when it arrives. Idempotent. Without `leg` it
/// applies to both legs, without the rank header to every rank.
pub(super) async fn abort(frontend: Arc<Frontend>, request: Request<Incoming>) -> Result<Reply, ApiError> {
    let named = named(&frontend, request.headers())?;
    let fields = control_object(&frontend, request).await?;
    let ids = cluster::request_ids(&fields, |id| RequestId::new(bare_id(id)).ok())?;
    let legs = cluster::legs(&fields)?;
    let mut results = Map::new();
    for id in ids {
        let result = frontend.abort(named.as_ref(), &id, legs).map_err(|_| {
            ApiError::unavailable("too many aborts are waiting", std::time::Duration::from_secs(1))
        })?;
        results.insert(id.as_str().to_owned(), Value::from(result));
    }
    Ok(reply::json(StatusCode::OK, json!({"results": results}).to_string()))
}

/// `POST /reset_prefix_cache`. `?reset_external=true` also clears the offload tiers (vLLM's name).
pub(super) fn reset_prefix_cache(
    frontend: &Frontend,
    request: &Request<Incoming>,
) -> Result<Reply, ApiError> {
    authorize(frontend, request.headers())?;
    let query = request.uri().query().unwrap_or_default();
    let tiers_too = match cluster::query_field(query, "reset_external") {
        None | Some("false") => false,
        Some("true") => true,
        Some(_) => return Err(ApiError::invalid("reset_external", "`reset_external` must be true or false")),
    };
    for core in &frontend.cores {
        core.mailbox.reset_cache();
        if tiers_too {
            core.mailbox.reset_tiers();
        }
    }
    Ok(reply::json(StatusCode::OK, "{}"))
}

/// `GET /debug/kv/digests?after=HASH`: the prefix cache, block by block, in the order of the hashes: chained hash,
/// block id and SHA-256 of the block's bytes. Two engines with the same model and layout must have the same digest
/// for the same hash.
///
/// `rank=` (0 by default) chooses the cache. A page has at most [`crate::blocks::digests::DIGEST_BLOCKS_MAX`] blocks
/// and [`crate::blocks::digests::DIGEST_BYTES_MAX`] bytes; `next` is the `after` of the next page, null on the last.
/// On a GPU, blocks that are being copied are left out; a later request may contain them.
pub(super) async fn kv_digests(
    frontend: Arc<Frontend>,
    request: Request<Incoming>,
) -> Result<Reply, ApiError> {
    authorize(&frontend, request.headers())?;
    let query = request.uri().query().unwrap_or_default();
    let after = cluster::query_field(query, "after");
    let rank = cluster::query_field(query, "rank").map_or(Some(0), |rank| rank.parse::<usize>().ok());
    let core = rank.and_then(|rank| frontend.cores.get(rank)).ok_or_else(|| {
        ApiError::invalid("rank", format!("`rank` must be from 0 to {}", frontend.cores.len() - 1))
    })?;
    let after = after.map(str::parse).transpose();
    let after = after.map_err(|_| ApiError::invalid("after", "`after` must be 64 hexadecimal digits"))?;
    let pause = std::time::Duration::from_secs(1);
    let (reply, page) = oneshot::channel();
    core.mailbox.request_digests(DigestRequest { after, reply }).map_err(|why| match why {
        MailboxError::Full => ApiError::overloaded("too many digests are being computed", pause),
        MailboxError::Closing => ApiError::unavailable("the engine is shutting down", pause),
    })?;
    let page = page.await.map_err(|_| ApiError::unavailable("the engine stopped", pause))?;
    let hex = |bytes: [u8; 32]| BlockHash(bytes).to_string();
    let shown = |digest: &BlockDigest| json!({"hash": digest.hash.to_string(), "block": digest.block.0, "sha256": hex(digest.sha256)});
    let body = json!({
        "layout": format!("{:016x}", frontend.blocks.fingerprint), "rank": core.rank, "ranks": frontend.cores.len(),
        "blocks": page.blocks.iter().map(shown).collect::<Vec<_>>(),
        "next": page.next.map(|hash| hash.to_string()),
    });
    Ok(reply::json(StatusCode::OK, body.to_string()))
}

/// `GET /health`: 200 while the engine takes requests, 503 while it drains or after the device of a core has failed.
pub(super) fn health(frontend: &Frontend) -> Reply {
    let pause = std::time::Duration::from_secs(5);
    for core in &frontend.cores {
        if let Some(why) = core.status.snapshot().failed {
            let why = if frontend.cores.len() > 1 { format!("rank {}: {why}", core.rank) } else { why };
            return reply::error_reply(&ApiError::unavailable(why, pause));
        }
    }
    if frontend.cores.iter().any(|core| core.mailbox.is_closing()) {
        return reply::error_reply(&ApiError::unavailable("the engine is shutting down", pause));
    }
    reply::json(StatusCode::OK, "{\"status\":\"ok\"}")
}

/// `GET /kv_event_sources`: where each rank publishes KV events, as in vLLM. Empty without events.
pub(super) fn kv_event_sources(frontend: &Frontend) -> Reply {
    let sources = frontend.cores.iter().filter_map(|core| {
        core.kv_event_source.as_ref().map(|source| (core.rank.to_string(), source.clone()))
    });
    reply::json(StatusCode::OK, serde_json::Value::Object(sources.collect()).to_string())
}

/// `GET /metrics`, in Prometheus' text format.
pub(super) fn metrics(frontend: &Frontend) -> Reply {
    let mut reply = reply::json(StatusCode::OK, frontend.metrics.render());
    let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    reply.headers_mut().insert(CONTENT_TYPE, text);
    reply
}

/// `GET /v1/models`.
pub(super) fn models(frontend: &Frontend) -> Reply {
    reply::json(StatusCode::OK, model_list(&frontend.model.cards()))
}

/// `GET /v1/models/{id}`.
pub(super) fn model(frontend: &Frontend, path: &str) -> Result<Reply, ApiError> {
    let name = model_at(path).ok_or_else(|| ApiError::not_found(path))??;
    match frontend.model.cards().into_iter().find(|card| card.id == name) {
        Some(card) => Ok(reply::json(StatusCode::OK, card.to_bytes())),
        None => Err(ApiError::model_not_found(&name)),
    }
}

/// Reads a client's body, and answers it on a thread that may block.
pub(super) async fn answer(
    frontend: Arc<Frontend>,
    request: Request<Incoming>,
    answer: fn(&Frontend, &[u8]) -> Result<Reply, ApiError>,
) -> Result<Reply, ApiError> {
    let body = read_body(request, frontend.limits.body_bytes, &frontend.bodies.requests).await?;
    let bodies = Arc::clone(&frontend.bodies.requests);
    bodies.run_blocking(move || answer(&frontend, &body)).await
}

/// `POST /tokenize`.
pub(super) fn tokenize(frontend: &Frontend, body: &[u8]) -> Result<Reply, ApiError> {
    let request = TokenizeRequest::from_map(&parse_object(body, &frontend.limits)?, &frontend.limits)?;
    let tokens = tokens(frontend, &request)?;
    let spelled = |id: &u32| frontend.model.tokenizer.spelling(*id).unwrap_or_default();
    let token_strs = request.return_token_strs.then(|| tokens.iter().map(spelled).collect());
    let reply =
        TokenizeReply { count: tokens.len(), max_model_len: frontend.model.capacity, tokens, token_strs };
    Ok(reply::json(StatusCode::OK, reply.to_bytes()))
}

fn tokens(frontend: &Frontend, request: &TokenizeRequest) -> Result<Vec<u32>, ApiError> {
    frontend.model.adapter(request.model.as_deref())?;
    let mut prompts = frontend.model.encode(&request.input, request.add_special_tokens, None)?;
    prompts.pop().ok_or_else(|| ApiError::invalid("prompt", "there is no prompt"))
}

/// `POST /v1/messages/count_tokens`: the tokens of the chat that a request of Messages is translated to.
pub(super) fn count_tokens(frontend: &Frontend, body: &[u8]) -> Result<Reply, ApiError> {
    let chat = messages::to_tokenize(&parse_object(body, &frontend.limits)?)?;
    let request = TokenizeRequest::from_map(&chat, &frontend.limits)?;
    let count = tokens(frontend, &request)?.len();
    Ok(reply::json(StatusCode::OK, json!({"input_tokens": count}).to_string()))
}

/// `POST /detokenize`.
pub(super) fn detokenize(frontend: &Frontend, body: &[u8]) -> Result<Reply, ApiError> {
    let request = DetokenizeRequest::from_map(&parse_object(body, &frontend.limits)?, &frontend.limits)?;
    frontend.model.adapter(request.model.as_deref())?;
    let reply = DetokenizeReply { prompt: frontend.model.tokenizer.decode(&request.tokens, DecodeMode::All) };
    Ok(reply::json(StatusCode::OK, reply.to_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_found_by_its_name_and_by_the_id_of_its_reply() {
        for id in
            ["a.b", "cmpl-a.b", "chatcmpl-a.b", "cmpl-a.b.0123456789abcdef", "chatcmpl-a.b.0123456789abcdef"]
        {
            assert_eq!(bare_id(id), "a.b", "{id}");
        }
        for id in ["msg_a.b.0123456789abcdef", "resp_a.b.0123456789abcdef"] {
            assert_eq!(bare_id(id), "a.b", "{id}");
        }
        for id in ["msg_a.b", "resp_a", "msg_.0123456789abcdef"] {
            assert_eq!(bare_id(id), id, "a name may begin like an id");
        }
        // A name may end like an id.
        for id in ["a.0123456789abcdef", ".0123456789abcdef"] {
            assert_eq!(bare_id(id), id);
        }
        assert_eq!(bare_id("cmpl-.0123456789abcdef"), ".0123456789abcdef");
        assert_eq!(bare_id("cmpl-a.0123456789abcdeg"), "a.0123456789abcdeg");
    }
}
