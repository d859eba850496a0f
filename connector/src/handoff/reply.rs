//! The router's check of a producer's reply. The router passes only complete replies to a consumer.
//!
//! The fields and their types are those of vLLM's NixlConnector (`pull_scheduler.py`, 0.33). A vLLM decode engine exits
//! on a reply without `remote_request_id`. Without another of the five required fields it silently recomputes the
//! prompt, and the producer's blocks are stranded. An optional field of a wrong type is refused too, because its effect
//! on a consumer is not known.

use std::time::Duration;

use serde::Deserialize;

use super::HandoffError;
use super::block_list::BlockList;
use super::scalar::Scalar;
use crate::limits::{CONSUMERS_MAX, RANKS_MAX};
use crate::{Epoch, Handle};

/// The values of a producer's reply that the router uses. The router forwards the reply itself unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplyFacts {
    /// The handle of the lease. Only engines with the lease contract send one.
    pub handle: Option<Handle>,
    /// The epoch of the producer, from the same engines.
    pub epoch: Option<Epoch>,
    /// Number of prefilled tokens.
    pub tokens: Option<u64>,
    /// Remaining lease duration at the time of the reply.
    pub lease_left: Option<Duration>,
}

/// The checked fields.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Fields<'a> {
    // This one borrow lets all fields borrow from the text.
    #[serde(borrow)]
    do_remote_prefill: Scalar<'a>,
    do_remote_decode: Scalar<'a>,
    remote_block_ids: BlockList,
    remote_engine_id: Scalar<'a>,
    remote_request_id: Scalar<'a>,
    remote_host: Scalar<'a>,
    remote_port: Scalar<'a>,
    tp_size: Scalar<'a>,
    dcp_size: Scalar<'a>,
    pp_size: Scalar<'a>,
    remote_consumers: Scalar<'a>,
    remote_num_tokens: Scalar<'a>,
    remote_prefill_cached_tokens: Scalar<'a>,
    remote_registration_generation: Scalar<'a>,
    remote_blocks_expiry_time: Scalar<'a>,
    transfer_mode: Scalar<'a>,
    remote_handle: Scalar<'a>,
    remote_epoch: Scalar<'a>,
    remote_lease_left_ms: Scalar<'a>,
}

impl ReplyFacts {
    /// Checks a producer's reply completely before a consumer is called: a malformed `kv_transfer_params` ends a vLLM
    /// 0.32 decode engine.
    ///
    /// `text` must be JSON without duplicate names. The check builds no tree.
    ///
    /// # Errors
    /// [`HandoffError`] names the first field that is missing or malformed.
    pub fn check(text: &str) -> Result<Self, HandoffError> {
        // Serde would accept a list of as many values as the fields in their order.
        let text = Some(text).filter(|text| text.trim_ascii_start().starts_with('{'));
        let fields =
            text.and_then(|text| serde_json::from_str(text).ok()).ok_or(HandoffError::NotAnObject)?;
        let Fields { do_remote_prefill, do_remote_decode, remote_block_ids, .. } = &fields;
        if !do_remote_prefill.flag("do_remote_prefill")? {
            return Err(HandoffError::Missing("do_remote_prefill"));
        }
        if do_remote_decode.flag("do_remote_decode")? {
            return Err(HandoffError::BothDirections);
        }
        fields.remote_engine_id.text("remote_engine_id")?;
        fields.remote_request_id.text("remote_request_id")?;
        fields.remote_host.text("remote_host")?;
        fields.remote_port.port("remote_port")?;
        let blocks = "remote_block_ids";
        match remote_block_ids {
            BlockList::Valid => {}
            BlockList::Absent => return Err(HandoffError::Missing(blocks)),
            BlockList::Invalid => {
                let expected = "a non-empty list of block ids";
                return Err(HandoffError::Malformed { field: blocks, expected });
            }
        }
        let ranks = "a number of ranks from 1 to 64";
        fields.tp_size.number("tp_size", 1..=RANKS_MAX, ranks)?;
        fields.dcp_size.number("dcp_size", 1..=RANKS_MAX, ranks)?;
        fields.pp_size.number("pp_size", 1..=RANKS_MAX, ranks)?;
        let consumers = "a number of consumers from 1 to 16";
        fields.remote_consumers.number("remote_consumers", 1..=CONSUMERS_MAX, consumers)?;
        let any = 0..=usize::MAX;
        let tokens = fields.remote_num_tokens.number("remote_num_tokens", any.clone(), "a count")?;
        let cached = &fields.remote_prefill_cached_tokens;
        cached.number("remote_prefill_cached_tokens", any.clone(), "a count")?;
        let registered = &fields.remote_registration_generation;
        registered.number("remote_registration_generation", any, "a count")?;
        if !matches!(fields.remote_blocks_expiry_time, Scalar::Absent | Scalar::Count(_) | Scalar::Number) {
            let field = "remote_blocks_expiry_time";
            return Err(HandoffError::Malformed { field, expected: "a number of seconds" });
        }
        if !matches!(fields.transfer_mode, Scalar::Absent | Scalar::Text(_)) {
            return Err(HandoffError::Malformed { field: "transfer_mode", expected: "a word" });
        }
        let handle = match &fields.remote_handle {
            Scalar::Absent => None,
            handle => Some(handle.handle("remote_handle")?),
        };
        let epoch = match &fields.remote_epoch {
            Scalar::Absent => None,
            epoch => Some(epoch.epoch("remote_epoch")?),
        };
        Ok(Self {
            handle,
            epoch,
            tokens: tokens.map(|tokens| tokens as u64),
            lease_left: fields.remote_lease_left_ms.milliseconds("remote_lease_left_ms")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::limits::BLOCKS_PER_HANDOFF_MAX;

    fn check(reply: &Value) -> Result<ReplyFacts, HandoffError> {
        ReplyFacts::check(&reply.to_string())
    }

    fn stock() -> Value {
        json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2], [], [3]],
            "remote_engine_id": "p", "remote_request_id": "cmpl-1-0a", "remote_host": "localhost",
            "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 20,
            "remote_blocks_expiry_time": null, "remote_registration_generation": 0, "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        })
    }

    #[test]
    fn a_stock_engines_reply_is_complete_with_several_groups_and_without_what_is_optional() {
        assert_eq!(check(&stock()).map(|facts| facts.tokens), Ok(Some(20)));
        let mut flat = stock();
        flat["remote_block_ids"] = json!([1, 2]);
        flat["remote_blocks_expiry_time"] = json!(12.5);
        assert!(check(&flat).is_ok());
        for optional in ["do_remote_decode", "tp_size", "remote_num_tokens", "transfer_mode"] {
            let mut reply = stock();
            reply.as_object_mut().unwrap().remove(optional);
            assert!(check(&reply).is_ok(), "{optional}");
        }
    }

    #[test]
    fn a_reply_in_which_any_field_is_of_another_type_is_not_complete() {
        let odd = [
            json!(-1),
            json!(1.5),
            json!({}),
            json!([{}]),
            json!([[]]),
            json!([[1], 2]),
            json!([[-1]]),
            json!(99_999_999_999_u64),
        ];
        for name in stock().as_object().unwrap().keys() {
            for wrong in &odd {
                // These fields accept numbers of any kind, or any count.
                let fits = match name.as_str() {
                    "remote_blocks_expiry_time" => wrong.is_number(),
                    "remote_num_tokens"
                    | "remote_prefill_cached_tokens"
                    | "remote_registration_generation" => wrong.is_u64(),
                    _ => false,
                };
                let mut reply = stock();
                reply[name] = wrong.clone();
                assert_eq!(check(&reply).is_ok(), fits, "{name}: {wrong}");
            }
        }
        for needed in [
            "do_remote_prefill",
            "remote_block_ids",
            "remote_engine_id",
            "remote_request_id",
            "remote_host",
            "remote_port",
        ] {
            for absent in [None, Some(Value::Null), Some(json!("")), Some(json!(0)), Some(json!(false))] {
                let mut reply = stock();
                match absent {
                    None => drop(reply.as_object_mut().unwrap().remove(needed)),
                    Some(value) => reply[needed] = value,
                }
                assert!(check(&reply).is_err(), "{needed}");
            }
        }
        let mut both = stock();
        both["do_remote_decode"] = json!(true);
        assert_eq!(check(&both), Err(HandoffError::BothDirections));
    }

    #[test]
    fn a_value_that_is_no_object_has_no_fields() {
        let in_order: Vec<Value> = stock().as_object().unwrap().values().cloned().collect();
        for text in ["", "null", "7", "\"x\"", "[]", &json!(in_order).to_string(), "{\"remote_host\":"] {
            assert_eq!(ReplyFacts::check(text), Err(HandoffError::NotAnObject), "{text}");
        }
    }

    #[test]
    fn a_list_of_blocks_is_flat_or_in_groups_and_bounded_both_ways() {
        let with = |ids: Value| {
            let mut reply = stock();
            reply["remote_block_ids"] = ids;
            check(&reply).is_ok()
        };
        assert!(with(json!([[1]])) && with(json!([[], [7]])) && with(json!([4_294_967_295_u32])));
        assert!(with(json!(vec![0; BLOCKS_PER_HANDOFF_MAX])) && with(json!(vec![vec![0]; 64])));
        for bad in [
            json!([]),
            json!([[], []]),
            json!([1, [2]]),
            json!([[[1]]]),
            json!([[1, null]]),
            json!([4_294_967_296_u64]),
            json!(["1"]),
            json!(vec![vec![0]; 65]),
            json!(vec![0; BLOCKS_PER_HANDOFF_MAX + 1]),
            json!([[1], vec![0; BLOCKS_PER_HANDOFF_MAX + 1]]),
            json!({"0": 1}),
        ] {
            let text = bad.to_string();
            assert!(!with(bad), "{}", &text[..text.len().min(60)]);
        }
    }
}
