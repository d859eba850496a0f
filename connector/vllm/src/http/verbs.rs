//! The verbs of routers: release, abort, and the handoff of a refused request.

use std::time::Duration;

use baton_connector::{Handle, RequestId};
use baton_openai::{ApiError, Object, ParseLimits, parse_object};
use hyper::StatusCode;
use serde_json::{Map, Value, json};

use super::{HttpContext, Reply, json as json_reply};
use crate::ids::bare;
use crate::producer::LegFilter;
use crate::signals::STOPPING;

/// Limit of the request ids in one abort.
const ABORT_IDS_MAX: usize = 1_024;

/// Limit of the bytes of a release reason.
const REASON_BYTES_MAX: usize = 64;

/// `{"handle" or "request_id", "reason"}`: ends a lease early. By request id it also aborts a prefill that runs, and
/// remembers one that is not known. Idempotent.
pub(super) fn release(context: &HttpContext, body: &[u8]) -> Result<Reply, ApiError> {
    let fields = object(context, body)?;
    let reason = reason(&fields, "router_release")?;
    let result = match (fields.get("handle"), fields.get("request_id")) {
        (None | Some(Value::Null), Some(id)) => {
            let request = request(id)
                .ok_or_else(|| ApiError::invalid("request_id", "`request_id` must be a request id"))?;
            context.producer.release_request(&request, reason)
        }
        (handle, _) => {
            let handle: Handle = handle
                .and_then(Value::as_str)
                .and_then(|text| text.parse().ok())
                .ok_or_else(|| ApiError::invalid("handle", "`handle` must be 32 hexadecimal digits"))?;
            context.producer.release(handle, reason).label()
        }
    };
    Ok(json_reply(StatusCode::OK, json!({"result": result}).to_string()))
}

/// `{"request_ids": [...], "leg": "prefill"|"decode"}`: ends requests by name, running or just finished. Unknown ids
/// are remembered. Idempotent. Without `leg` it applies to both legs.
pub(super) fn abort(context: &HttpContext, body: &[u8]) -> Result<Reply, ApiError> {
    let fields = object(context, body)?;
    let malformed = || {
        ApiError::invalid(
            "request_ids",
            format!("`request_ids` must be a list of 1 to {ABORT_IDS_MAX} request ids"),
        )
    };
    let ids = fields.get("request_ids").and_then(Value::as_array).ok_or_else(malformed)?;
    if ids.is_empty() || ids.len() > ABORT_IDS_MAX {
        return Err(malformed());
    }
    let ids = ids.iter().map(request).collect::<Option<Vec<_>>>().ok_or_else(malformed)?;
    let legs = match fields.get("leg").map(|leg| leg.as_str()) {
        None => LegFilter::Both,
        Some(Some("prefill")) => LegFilter::Prefill,
        Some(Some("decode")) => LegFilter::Decode,
        Some(_) => return Err(ApiError::invalid("leg", "`leg` must be \"prefill\" or \"decode\"")),
    };
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
    let reason = reason(&fields, "consumer_rejected")?;
    let given = context.consumer.give_back(params, reason);
    given.map_err(|invalid| ApiError::invalid("params", invalid.why))?;
    Ok(json_reply(StatusCode::OK, json!({"result": "accepted"}).to_string()))
}

fn object(context: &HttpContext, body: &[u8]) -> Result<Object, ApiError> {
    if context.signals.pending() & STOPPING != 0 {
        return Err(ApiError::unavailable("the engine is shutting down", Duration::from_secs(1)));
    }
    parse_object(body, &ParseLimits::default())
}

fn request(id: &Value) -> Option<RequestId> {
    id.as_str().map(bare).and_then(|id| RequestId::new(id).ok())
}

fn reason<'a>(fields: &'a Object, default: &'static str) -> Result<&'a str, ApiError> {
    let reason = fields.get("reason").and_then(Value::as_str).unwrap_or(default);
    if !reason.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') || reason.len() > REASON_BYTES_MAX {
        return Err(ApiError::invalid(
            "reason",
            format!("`reason` must be at most {REASON_BYTES_MAX} letters, digits and `_`"),
        ));
    }
    Ok(reason)
}
