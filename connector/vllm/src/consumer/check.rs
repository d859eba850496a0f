//! The check of a handoff that a client or a router sent, before any value reaches vLLM's code (invariant 8).

use std::sync::Arc;
use std::time::Duration;

use baton_connector::BlockId;
use baton_connector::handoff::ReplyFacts;
use baton_connector::limits::KV_LEASE_DURATION;
use serde_json::{Map, Value, json};

use super::target::{LoadTarget, ProducerKey};
use crate::channel::{NixlName, fingerprint};
use crate::ids::HandleFacts;
use crate::ops::AdmitOp;

/// The largest block id. vLLM's workers multiply ids by the kernel blocks of one block, in 32 bits.
const BLOCK_ID_MAX: u32 = (1 << 24) - 1;

/// Digits of a prompt's fingerprint in a handoff. The handle proves all of them.
const PROMPT_DIGITS: usize = 16;

/// Bytes of a host name.
const HOST_BYTES_MAX: usize = 253;

/// The longest lifetime of a lease without a heartbeat that a consumer assumes.
const LEASE_LEFT_MAX: Duration = Duration::from_secs(3_600);

/// Why a handoff is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Invalid {
    /// The field, and what it must be.
    pub(crate) why: String,
    /// The handoff is well formed and has no handle: its producer is stock.
    pub(crate) stock: bool,
}

impl Invalid {
    /// A field with another type, range or value than expected.
    pub(super) fn field(field: &str, expected: &str) -> Self {
        Self { why: format!("kv_transfer_params.{field} must be {expected}"), stock: false }
    }

    fn missing(field: &str) -> Self {
        Self { why: format!("kv_transfer_params.{field} is missing"), stock: false }
    }
}

/// A handoff that may be used.
#[derive(Debug)]
pub(super) struct CheckedHandoff {
    /// The lease.
    pub(super) target: LoadTarget,
    /// The keys that vLLM's connector reads, with normalized types.
    pub(super) params: Value,
}

/// Checks a handoff completely. `layout` is this engine's.
///
/// # Errors
/// [`Invalid`] names the first wrong field.
pub(super) fn check(op: &AdmitOp, layout: Option<u64>) -> Result<CheckedHandoff, Invalid> {
    let target = lease_of(&op.params)?;
    let fields = HandoffFields(op.params.as_object().ok_or_else(|| Invalid::missing("remote_handle"))?);
    if layout != Some(target.layout) {
        return Err(Invalid::field("remote_layout", "the layout of this engine"));
    }
    if op.prompt.get(..PROMPT_DIGITS) != Some(fields.text("remote_prompt")?) {
        return Err(Invalid::field("remote_prompt", "the fingerprint of this prompt's tokens"));
    }
    let tokens =
        fields.count("remote_num_tokens", 1)?.ok_or_else(|| Invalid::missing("remote_num_tokens"))?;
    if tokens < op.tokens {
        return Err(Invalid::field("remote_num_tokens", "at least the tokens that this engine loads"));
    }
    let size = "remote_block_size";
    let block_tokens = fields.count(size, 1)?.ok_or_else(|| Invalid::missing(size))?;
    if block_tokens != op.block_tokens {
        return Err(Invalid::field(size, "the block size of this engine"));
    }
    let groups = groups(fields.0.get("remote_block_ids"));
    if groups.len() != op.groups {
        return Err(Invalid::field("remote_block_ids", "one list for each KV cache group of this engine"));
    }
    // Groups with a sliding window have fewer blocks.
    let lengths: Vec<_> = groups.iter().map(Vec::len).collect();
    if lengths.iter().max() != Some(&op.tokens.div_ceil(block_tokens)) {
        return Err(Invalid::field("remote_block_ids", "as many blocks as the prompt's tokens need"));
    }
    let id = fields.text("remote_request_id")?;
    let facts = HandleFacts { id, prompt: &op.prompt, block_tokens, groups: &lengths };
    if !facts.are_of(target.handle) {
        return Err(Invalid::field("remote_handle", "that of this prompt, request and block table"));
    }
    // The connector refuses vLLM's sleep mode, so this engine never needs a later registration.
    fields.count("remote_registration_generation", 0)?;
    let params = json!({
        "do_remote_prefill": true,
        "do_remote_decode": false,
        "remote_block_ids": groups,
        "remote_engine_id": fields.text("remote_engine_id")?,
        "remote_request_id": id,
        "remote_host": fields.text("remote_host")?,
        "remote_port": fields.port("remote_port")?,
        "tp_size": fields.count("tp_size", 1)?.unwrap_or(1),
        "dcp_size": 1,
        "pp_size": 1,
        "remote_block_size": block_tokens,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": null,
    });
    Ok(CheckedHandoff { target, params })
}

/// The lease of a handoff: enough to renew or to release it.
///
/// # Errors
/// [`Invalid`] names the first wrong field.
pub(super) fn lease_of(params: &Value) -> Result<LoadTarget, Invalid> {
    let facts = ReplyFacts::check(&params.to_string())
        .map_err(|error| Invalid { why: error.to_string(), stock: false })?;
    let fields = HandoffFields(params.as_object().ok_or_else(|| Invalid::missing("remote_handle"))?);
    let Some(handle) = facts.handle else {
        return Err(Invalid { stock: true, ..Invalid::missing("remote_handle") });
    };
    let epoch = facts.epoch.ok_or_else(|| Invalid::missing("remote_epoch"))?;
    let layout = layout(fields.text("remote_layout")?)
        .ok_or_else(|| Invalid::field("remote_layout", "16 hexadecimal digits"))?;
    let port = fields.port("remote_channel_port")?;
    let host = fields.text("remote_host")?;
    let is_host = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:%".contains(&byte);
    if host.len() > HOST_BYTES_MAX || !host.bytes().all(is_host) {
        return Err(Invalid::field("remote_host", "an IP address or a host name of at most 253 bytes"));
    }
    let blocks = groups(fields.0.get("remote_block_ids")).concat();
    if blocks.iter().any(|block| *block > BLOCK_ID_MAX) {
        return Err(Invalid::field("remote_block_ids", "block ids below 2^24"));
    }
    let one = |field: &str| match fields.count(field, 1)? {
        None | Some(1) => Ok(()),
        Some(_) => Err(Invalid::field(field, "1")),
    };
    one("dcp_size")?;
    one("pp_size")?;
    let ranks = fields.count("tp_size", 1)?.unwrap_or(1);
    let nixl =
        NixlName { engine_id: fields.text("remote_engine_id")?, port: fields.port("remote_port")?, ranks };
    let fingerprint = fingerprint(layout, &nixl);
    let consumers = fields.count("remote_consumers", 1)?.unwrap_or(1);
    Ok(LoadTarget {
        handle,
        producer: ProducerKey { host: host.into(), port, epoch, fingerprint },
        layout,
        several_consumers: consumers > 1,
        lease: facts.lease_left.unwrap_or(KV_LEASE_DURATION).min(LEASE_LEFT_MAX),
        blocks: blocks.into_iter().map(BlockId).collect::<Arc<[BlockId]>>(),
    })
}

/// The value of 16 hexadecimal digits.
pub(crate) fn layout(text: &str) -> Option<u64> {
    let digits = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    digits.then(|| u64::from_str_radix(text, 16).ok()).flatten()
}

/// The block ids of each group. [`ReplyFacts::check`] has checked them.
fn groups(value: Option<&Value>) -> Vec<Vec<u32>> {
    let list = value.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let ids = |list: &[Value]| -> Vec<u32> {
        list.iter().filter_map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
    };
    if list.iter().all(Value::is_array) {
        list.iter().filter_map(Value::as_array).map(|group| ids(group)).collect()
    } else {
        vec![ids(list)]
    }
}

/// The fields of a handoff.
struct HandoffFields<'a>(&'a Map<String, Value>);

impl<'a> HandoffFields<'a> {
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    fn text(&self, field: &str) -> Result<&'a str, Invalid> {
        let value = self.get(field).ok_or_else(|| Invalid::missing(field))?;
        value.as_str().ok_or_else(|| Invalid::field(field, "a string"))
    }

    /// A count of at least `least`; `None` if absent.
    fn count(&self, field: &str, least: usize) -> Result<Option<usize>, Invalid> {
        let Some(value) = self.get(field) else { return Ok(None) };
        // vLLM's own integers are signed.
        let count = value.as_i64().and_then(|count| usize::try_from(count).ok());
        let count = count.filter(|count| *count >= least);
        count.map(Some).ok_or_else(|| Invalid::field(field, &format!("an integer of at least {least}")))
    }

    fn port(&self, field: &str) -> Result<u16, Invalid> {
        let value = self.get(field).ok_or_else(|| Invalid::missing(field))?;
        let port = value.as_u64().and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0);
        port.ok_or_else(|| Invalid::field(field, "an integer from 1 to 65535"))
    }
}

#[cfg(test)]
mod tests {
    use baton_connector::Handle;

    use super::*;

    const PROMPT: &str = "00000000000000cc00000000000000dd";

    fn handle(groups: &[usize]) -> Handle {
        HandleFacts { id: "cmpl-x-0-0a1b2c3d", prompt: PROMPT, block_tokens: 16, groups }.handle(7)
    }

    fn sample() -> Value {
        json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[5, 6, 7]],
            "remote_engine_id": "p", "remote_request_id": "cmpl-x-0-0a1b2c3d", "remote_host": "127.0.0.1",
            "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 33,
            "remote_blocks_expiry_time": null, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0,
            "remote_registration_generation": 0, "remote_handle": handle(&[3]).to_string(),
            "remote_epoch": "00000000000000aa", "remote_lease_left_ms": 30000, "remote_channel_port": 7700,
            "remote_layout": "00000000000000bb", "remote_prompt": "00000000000000cc", "remote_block_size": 16,
            "remote_consumers": 1, "router_request_id": "x", "unknown": {"a": [1]},
        })
    }

    fn op(params: Value) -> AdmitOp {
        AdmitOp {
            id: "cmpl-y-0-0a1b2c3d".into(),
            params,
            prompt: PROMPT.into(),
            tokens: 33,
            block_tokens: 16,
            groups: 1,
        }
    }

    fn checked(params: Value) -> Result<CheckedHandoff, Invalid> {
        check(&op(params), Some(0xbb))
    }

    #[test]
    fn a_good_handoff_becomes_the_keys_that_vllm_reads() {
        let CheckedHandoff { target, params } = checked(sample()).expect("it is in order");
        assert_eq!((target.producer.port, target.blocks.len(), target.several_consumers), (7700, 3, false));
        assert_eq!(target.lease, Duration::from_secs(30));
        let keys: Vec<_> = params.as_object().expect("an object").keys().cloned().collect();
        assert!(!keys.iter().any(|key| key.contains("handle") || key.contains("unknown")), "{keys:?}");
        assert_eq!(params["remote_block_ids"], json!([[5, 6, 7]]));
        let mut flat = sample();
        flat["remote_block_ids"] = json!([5, 6, 7]);
        flat["remote_lease_left_ms"] = json!(u64::MAX);
        for optional in ["tp_size", "dcp_size", "pp_size", "remote_consumers", "transfer_mode"] {
            flat.as_object_mut().expect("an object").remove(optional);
        }
        let CheckedHandoff { target, params } = checked(flat).expect("it is in order");
        assert_eq!((&params["remote_block_ids"], &params["tp_size"]), (&json!([[5, 6, 7]]), &json!(1)));
        assert_eq!(target.lease, LEASE_LEFT_MAX);
    }

    #[test]
    fn every_needed_field_that_is_absent_or_of_another_type_is_named() {
        let needed = [
            "do_remote_prefill",
            "remote_block_ids",
            "remote_engine_id",
            "remote_request_id",
            "remote_host",
            "remote_port",
            "remote_num_tokens",
            "remote_epoch",
            "remote_channel_port",
            "remote_layout",
            "remote_prompt",
            "remote_block_size",
        ];
        for field in needed {
            for bad in [None, Some(Value::Null), Some(json!(-1)), Some(json!({"a": 1})), Some(json!(""))] {
                let mut params = sample();
                match bad.clone() {
                    None => drop(params.as_object_mut().expect("an object").remove(field)),
                    Some(bad) => params[field] = bad,
                }
                let invalid = checked(params).expect_err("a broken handoff");
                assert!(invalid.why.contains(field) && !invalid.stock, "{field} {bad:?}: {}", invalid.why);
            }
        }
    }

    #[test]
    fn no_value_of_any_field_panics() {
        let odd = [
            json!(null),
            json!(true),
            json!(-1),
            json!(0),
            json!(1.5),
            json!(u64::MAX),
            json!(i64::MAX),
            json!("\u{0}"),
            json!("x".repeat(600)),
            json!([]),
            json!([[]]),
            json!([[1], [2]]),
            json!([[[1]]]),
            json!([1, [2]]),
            json!({}),
        ];
        let names: Vec<String> = sample().as_object().expect("an object").keys().cloned().collect();
        for name in &names {
            for value in &odd {
                let mut params = sample();
                params[name.as_str()] = value.clone();
                let _ = checked(params);
            }
        }
        for value in odd {
            assert!(checked(value).is_err());
        }
    }

    #[test]
    fn values_that_do_not_fit_this_engine_are_named() {
        for (field, value) in [
            ("remote_layout", json!("00000000000000bc")),
            ("remote_prompt", json!("00000000000000cd")),
            ("remote_num_tokens", json!(32)),
            ("remote_block_size", json!(24)),
            ("remote_block_size", json!(32)),
            ("remote_block_ids", json!([[5, 6]])),
            ("remote_block_ids", json!([[5, 6, 7, 8]])),
            ("remote_handle", json!("0123456789abcdef0011223344556677")),
            ("remote_block_ids", json!([[5, 6, 7], [8]])),
            ("remote_block_ids", json!([[5, 6, BLOCK_ID_MAX + 1]])),
            ("pp_size", json!(2)),
            ("dcp_size", json!(2)),
            ("remote_host", json!("a b")),
            ("remote_host", json!("x".repeat(300))),
            ("remote_channel_port", json!(70_000)),
            ("remote_consumers", json!(17)),
            ("tp_size", json!(65)),
            ("remote_registration_generation", json!(u64::MAX)),
        ] {
            let mut params = sample();
            params[field] = value.clone();
            let invalid = checked(params).expect_err("it does not fit");
            assert!(invalid.why.contains(field), "{field} {value}: {}", invalid.why);
        }
        // The handle of another request, or of a prompt whose fingerprint begins alike.
        let mut other = sample();
        other["remote_request_id"] = json!("cmpl-z-0-0a1b2c3d");
        assert!(checked(other).expect_err("another request").why.contains("remote_handle"));
        let alike = AdmitOp { prompt: PROMPT.replace("dd", "de"), ..op(sample()) };
        assert!(check(&alike, Some(0xbb)).expect_err("another prompt").why.contains("remote_handle"));
        // Groups of the same blocks with other boundaries.
        let mut groups = sample();
        groups["remote_block_ids"] = json!([[5, 6, 7], [8, 9], [10]]);
        groups["remote_handle"] = json!(handle(&[3, 2, 1]).to_string());
        assert!(check(&AdmitOp { groups: 3, ..op(groups.clone()) }, Some(0xbb)).is_ok());
        groups["remote_block_ids"] = json!([[5, 6, 7], [8], [9, 10]]);
        let invalid = check(&AdmitOp { groups: 3, ..op(groups) }, Some(0xbb)).expect_err("moved");
        assert!(invalid.why.contains("remote_handle"));
        assert!(check(&op(sample()), None).expect_err("no layout yet").why.contains("remote_layout"));
        let mut stock = sample();
        stock.as_object_mut().expect("an object").remove("remote_handle");
        let invalid = checked(stock.clone()).expect_err("a stock handoff");
        assert!(invalid.stock && invalid.why.contains("remote_handle"));
        stock["remote_port"] = json!("5600");
        assert!(!checked(stock).expect_err("a broken one").stock);
    }
}
