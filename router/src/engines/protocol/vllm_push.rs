//! vLLM's NixlPushConnector (0.32, 0.33): the prefill engine writes the blocks to the decode engine. Both legs are sent at
//! once, as soon as a reply of the prefill engine's process has shown its identity.
//!
//! Rules of vLLM, below `vllm/distributed/kv_transfer/kv_connector/v1/nixl/`:
//! - The prefill engine matches a decode engine's registration by the request id of both legs (`push_worker.py`). So both
//!   have the same `X-Request-Id`.
//! - A missing `tp_size` ends the decode engine (`push_scheduler.py`).
//! - The end of the write frees the blocks of both engines. A decode engine whose request was cancelled keeps its blocks
//!   until then, without a time limit. So the prefill leg of a cancelled pair runs to its end.
//!
//! `BatonPushConnector` (connector/vllm) notifies the decode engine of a write that will not come, and its replies have
//! `remote_ends_writes`. There the prefill leg of a cancelled pair is aborted. A cancelled decode engine cancels its
//! registration, which also frees the blocks of a prefill that was answered.

use baton_connector::RequestId;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Most bytes of an engine id and of a host.
const NAME_BYTES_MAX: usize = 512;

/// Where a decode engine registers with a prefill engine, from a reply of that engine's process.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct PushIdentity {
    remote_engine_id: String,
    remote_host: String,
    remote_port: u16,
    tp_size: u32,
    #[serde(default = "one")]
    pp_size: u32,
    #[serde(default = "one")]
    dcp_size: u32,
    /// The engine notifies the decode engine of a write that will not come.
    #[serde(default, rename = "remote_ends_writes", skip_serializing)]
    pub(crate) ends_writes: bool,
    #[serde(skip_serializing)]
    transfer_mode: String,
}

fn one() -> u32 {
    1
}

impl PushIdentity {
    /// Reads the transfer parameters of a reply; `None` if its engine does not push, or if a field is missing.
    pub(crate) fn read(params: &str) -> Option<Self> {
        // Replies of other connectors are not parsed again.
        memchr::memmem::find(params.as_bytes(), b"\"push\"")?;
        let identity: Self = serde_json::from_str(params).ok()?;
        let is_short = |text: &str| !text.is_empty() && text.len() <= NAME_BYTES_MAX;
        let is_valid = identity.transfer_mode == "push"
            && is_short(&identity.remote_engine_id)
            && is_short(&identity.remote_host)
            && identity.remote_port > 0
            && identity.tp_size > 0;
        is_valid.then_some(identity)
    }

    /// The transfer parameters of the decode leg.
    pub(crate) fn decode_params(&self, request: &RequestId) -> String {
        let mut params = json!(self);
        params["do_remote_prefill"] = true.into();
        params["do_remote_decode"] = false.into();
        // The key is needed, and its value is not used for the match.
        params["remote_request_id"] = request.as_str().into();
        params["transfer_id"] = request.as_str().into();
        params.to_string()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn an_identity_is_read_from_a_push_reply_only() {
        let reply = json!({
            "do_remote_prefill": true, "do_remote_decode": false, "transfer_mode": "push",
            "remote_engine_id": "e-1", "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 2, "pp_size": 1,
            "dcp_size": 1, "remote_num_tokens": 16, "remote_request_id": "cmpl-x-0-1234abcd",
            "remote_block_ids": [[1, 2]], "remote_prefill_cached_tokens": 0,
        });
        let identity = PushIdentity::read(&reply.to_string()).expect("an identity");
        assert!(!identity.ends_writes, "stock engines do not");
        let request = RequestId::new("r-1").expect("an id");
        let params: Value = serde_json::from_str(&identity.decode_params(&request)).expect("JSON");
        assert_eq!(
            params,
            json!({
                "remote_engine_id": "e-1", "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 2, "pp_size": 1,
                "dcp_size": 1, "do_remote_prefill": true, "do_remote_decode": false, "remote_request_id": "r-1",
                "transfer_id": "r-1",
            })
        );
        for (name, value) in [
            ("transfer_mode", json!("pull")),
            ("tp_size", Value::Null),
            ("tp_size", json!(0)),
            ("remote_port", json!(70_000)),
            ("remote_engine_id", json!("")),
            ("remote_host", json!("x".repeat(600))),
        ] {
            let mut other = reply.clone();
            other[name] = value;
            assert_eq!(PushIdentity::read(&other.to_string()), None, "{name}");
        }
    }
}
