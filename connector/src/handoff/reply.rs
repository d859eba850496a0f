//! A producer's reply, as far as a router must know it: complete, or no consumer is called with it.
//!
//! The fields and their types are those of vLLM's NixlConnector (`pull_scheduler.py`, 0.33). A stock decode engine ends
//! on a reply that lacks `remote_request_id`; one that lacks any other of the first five is computed without a word, and
//! the producer's blocks are stranded. An optional field of another type than it has there is not passed on either: what
//! a consumer makes of it is not known.

use std::time::Duration;

use serde_json::{Map, Value};

use super::{HandoffError, flag, handle, left, number, port, text};
use crate::Handle;
use crate::limits::{BLOCKS_PER_HANDOFF_MAX, CONSUMERS_MAX, RANKS_MAX};

/// Groups of KV caches of one model (vLLM's hybrid models have two to four).
const GROUPS_MAX: usize = 64;

/// What a router must know of a producer's reply; the reply itself travels on unopened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplyFacts {
    /// The lease's handle; absent from engines that are not ours.
    pub handle: Option<Handle>,
    /// Tokens that were prefilled.
    pub tokens: Option<u64>,
    /// How long the producer promised to wait.
    pub lease_left: Option<Duration>,
}

impl ReplyFacts {
    /// Checks a producer's reply completely before a consumer is called: one malformed
    /// `kv_transfer_params` ends a stock vLLM 0.32 decode engine.
    ///
    /// # Errors
    /// [`HandoffError`] names the first field that is missing or malformed.
    pub fn check(value: &Value) -> Result<Self, HandoffError> {
        let fields = value.as_object().ok_or(HandoffError::NotAnObject)?;
        if !flag(fields, "do_remote_prefill")? {
            return Err(HandoffError::Missing("do_remote_prefill"));
        }
        if flag(fields, "do_remote_decode")? {
            return Err(HandoffError::BothDirections);
        }
        for field in ["remote_engine_id", "remote_request_id", "remote_host"] {
            text(fields, field)?;
        }
        port(fields)?;
        blocks(fields)?;
        let ranks = "a number of ranks from 1 to 64";
        for field in ["tp_size", "dcp_size", "pp_size"] {
            number(fields, field, 1..=RANKS_MAX, ranks)?;
        }
        number(fields, "remote_consumers", 1..=CONSUMERS_MAX, "a number of consumers from 1 to 16")?;
        for field in ["remote_num_tokens", "remote_prefill_cached_tokens", "remote_registration_generation"] {
            number(fields, field, 0..=usize::MAX, "a count")?;
        }
        optional(fields, "remote_blocks_expiry_time", "a number of seconds", Value::is_number)?;
        optional(fields, "transfer_mode", "a word", Value::is_string)?;
        let handle = match fields.get("remote_handle") {
            None | Some(Value::Null) => None,
            Some(_) => Some(handle(fields)?),
        };
        Ok(Self {
            handle,
            tokens: fields.get("remote_num_tokens").and_then(Value::as_u64),
            lease_left: left(fields)?,
        })
    }
}

/// One list of block ids per group of KV caches, or a flat one. Some group has blocks: a producer that lends nothing
/// says nothing.
fn blocks(fields: &Map<String, Value>) -> Result<(), HandoffError> {
    const FIELD: &str = "remote_block_ids";
    let malformed = HandoffError::Malformed { field: FIELD, expected: "a non-empty list of block ids" };
    let value = fields.get(FIELD).filter(|v| !v.is_null()).ok_or(HandoffError::Missing(FIELD))?;
    let list = value.as_array().ok_or_else(|| malformed.clone())?;
    let is_id = |id: &Value| id.as_u64().is_some_and(|id| u32::try_from(id).is_ok());
    let is_table = |ids: &[Value]| ids.len() <= BLOCKS_PER_HANDOFF_MAX && ids.iter().all(is_id);
    let good = match list.first() {
        Some(Value::Array(_)) => {
            let groups: Option<Vec<&Vec<Value>>> = list.iter().map(Value::as_array).collect();
            groups.is_some_and(|groups| {
                groups.len() <= GROUPS_MAX
                    && groups.iter().all(|ids| is_table(ids))
                    && groups.iter().any(|ids| !ids.is_empty())
            })
        }
        Some(_) => is_table(list),
        None => false,
    };
    if good { Ok(()) } else { Err(malformed) }
}

fn optional(
    fields: &Map<String, Value>,
    field: &'static str,
    expected: &'static str,
    is: fn(&Value) -> bool,
) -> Result<(), HandoffError> {
    match fields.get(field) {
        None | Some(Value::Null) => Ok(()),
        Some(value) if is(value) => Ok(()),
        Some(_) => Err(HandoffError::Malformed { field, expected }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

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
        assert_eq!(ReplyFacts::check(&stock()).map(|facts| facts.tokens), Ok(Some(20)));
        let mut flat = stock();
        flat["remote_block_ids"] = json!([1, 2]);
        flat["remote_blocks_expiry_time"] = json!(12.5);
        assert!(ReplyFacts::check(&flat).is_ok());
        for optional in ["do_remote_decode", "tp_size", "remote_num_tokens", "transfer_mode"] {
            let mut reply = stock();
            reply.as_object_mut().unwrap().remove(optional);
            assert!(ReplyFacts::check(&reply).is_ok(), "{optional}");
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
                // The three that are numbers of any kind, or any count.
                let fits = match name.as_str() {
                    "remote_blocks_expiry_time" => wrong.is_number(),
                    "remote_num_tokens"
                    | "remote_prefill_cached_tokens"
                    | "remote_registration_generation" => wrong.is_u64(),
                    _ => false,
                };
                let mut reply = stock();
                reply[name] = wrong.clone();
                assert_eq!(ReplyFacts::check(&reply).is_ok(), fits, "{name}: {wrong}");
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
                assert!(ReplyFacts::check(&reply).is_err(), "{needed}");
            }
        }
        let mut both = stock();
        both["do_remote_decode"] = json!(true);
        assert_eq!(ReplyFacts::check(&both), Err(HandoffError::BothDirections));
    }
}
