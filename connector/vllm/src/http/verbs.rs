//! The verbs of routers: release, abort, and the handoff of a refused request.

use std::time::Duration;

use baton_connector::{Handle, RequestId};
use baton_openai::{ApiError, Object, ParseLimits, cluster, parse_object};
use hyper::StatusCode;
use serde_json::{Map, Value, json};

use super::{HttpContext, Reply, json as json_reply};
use crate::ids::bare;
use crate::signals::STOPPING;

/// `{"handle" or "request_id", "reason"}`: ends a lease early. By request id it also aborts a prefill that runs, and
/// remembers one that is not known. Idempotent.
pub(super) fn release(context: &HttpContext, body: &[u8]) -> Result<Reply, ApiError> {
    let fields = object(context, body)?;
    let reason = cluster::reason(&fields, "router_release")?;
    let result = match cluster::request_id(&fields, request)? {
        Some(request) => context.producer.release_request(&request, reason),
        None => {
            let handle: Handle = cluster::handle(&fields)?;
            context.producer.release(handle, reason).label()
        }
    };
    Ok(json_reply(StatusCode::OK, json!({"result": result}).to_string()))
}

/// `{"request_ids": [...], "leg": "prefill"|"decode"}`: ends requests by name, running or just finished. Unknown ids
/// are remembered. Idempotent. Without `leg` it applies to both legs.
pub(super) fn abort(context: &HttpContext, body: &[u8]) -> Result<Reply, ApiError> {
    let fields = object(context, body)?;
    let ids = cluster::request_ids(&fields, request)?;
    let legs = cluster::legs(&fields)?;
    let mut results = Map::new();
    for id in ids {
        let result = context.producer.abort(&id, legs);
        results.insert(id.as_str().to_owned(), Value::from(result));
    }
    Ok(json_reply(StatusCode::OK, json!({"results": results}).to_string()))
}

/// `{"params", "reason"}`: vLLM's front end has refused a request with this handoff. The producer gets its lease back.
pub(super) fn refused(context: &HttpContext, body: &[u8]) -> Result<Reply, ApiError> {
    let fields = object(context, body)?;
    let params = fields.get("params").ok_or_else(|| ApiError::invalid("params", "`params` is missing"))?;
    let reason = cluster::reason(&fields, "consumer_rejected")?;
    let given = context.consumer.give_back(params);
    if given.map_err(|invalid| ApiError::invalid("params", invalid.why))? {
        context.metrics.rejected(reason);
    }
    Ok(json_reply(StatusCode::OK, json!({"result": "accepted"}).to_string()))
}

fn object(context: &HttpContext, body: &[u8]) -> Result<Object, ApiError> {
    if context.signals.pending() & STOPPING != 0 {
        return Err(ApiError::unavailable("the engine is shutting down", Duration::from_secs(1)));
    }
    parse_object(body, &ParseLimits::default())
}

fn request(id: &str) -> Option<RequestId> {
    RequestId::new(bare(id)).ok()
}
