//! P's bootstrap server: the topology, the address of each rank, and the answer to heartbeats.

use serde_json::{Value, json};

use super::super::http::{HttpRequest, json as json_reply, reply};
use super::engine::SglangEngine;
use super::prefills::ROUTE_FIELDS;

/// Answers a request to P's bootstrap server.
pub(super) fn answer(engine: &SglangEngine, request: &HttpRequest) -> Vec<u8> {
    let text =
        |status, text: &str| reply(status, &[("content-type", "text/plain".to_owned())], text.as_bytes());
    match (request.posts, request.path.as_str()) {
        (false, "/health") => text(200, "OK"),
        (false, "/route") => {
            let numbers: Option<Vec<i64>> =
                ROUTE_FIELDS.iter().map(|field| request.field(field)?.parse().ok()).collect();
            let Some(numbers) = numbers else { return text(400, "Missing inputs for bootstrap server.") };
            if numbers.iter().all(|number| *number == -1) {
                return json_reply(topology(engine).to_string().as_bytes());
            }
            let known = usize::try_from(numbers[0]).is_ok_and(|rank| rank < engine.ranks());
            if !known || numbers[1..].iter().any(|number| *number != 0) {
                return text(404, "Bootstrap info not Found");
            }
            let at = engine.identity.peer_address;
            json_reply(json!({"rank_ip": at.ip().to_string(), "rank_port": at.port()}).to_string().as_bytes())
        }
        // Without `follow_bootstrap_room` P would register the rank of each room. The simulated one follows it.
        (true, "/query_dp_ranks") => json_reply(b"{}"),
        _ => text(404, "404: Not Found"),
    }
}

fn topology(engine: &SglangEngine) -> Value {
    json!({
        "attn_tp_size": 1, "attn_cp_size": 1, "dp_size": engine.ranks(), "pp_size": 1,
        "page_size": engine.plan.block_tokens, "kv_cache_dtype": "auto", "follow_bootstrap_room": true,
        "enable_dsa_cache_layer_split": false, "enable_kv_cache_sharding": false,
        "prefill_http_port": engine.identity.address.port(), "decode_allocation_policy": "early",
    })
}
