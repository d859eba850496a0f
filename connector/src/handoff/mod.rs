//! `kv_transfer_params`: the description of one handoff that router, producer and consumer exchange.
//!
//! The fields are those of vLLM's NixlConnector (vLLM 0.33), so that the router can front vLLM engines and Baton
//! engines. Baton adds `remote_handle`, `remote_epoch`, `remote_lease_left_ms`, `remote_layout`, `remote_prompt`,
//! `remote_block_size`, `remote_rank_ports`, `remote_consumers` and `remote_growing`. A Baton consumer requires them.
//! The last three are optional if one rank leases computed blocks to one consumer. Other engines ignore them. `tp_size`
//! is vLLM's name for the number of ranks that share the KV heads.
//!
//! Input is untrusted until checked. The error of a missing or malformed field names the field. No value is guessed,
//! and the input is not changed.

mod block_list;
mod reply;
mod scalar;

pub use reply::ReplyFacts;
use scalar::Scalar;

use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::limits::{BLOCK_TOKENS_MAX, BLOCKS_PER_HANDOFF_MAX, CONSUMERS_MAX, RANKS_MAX};
use crate::{BlockId, Epoch, Handle, RequestId};

/// The task that a request's `kv_transfer_params` gives to an engine.
#[derive(Clone, Debug, PartialEq)]
pub enum KvIntent {
    /// Prefill and open a lease: `do_remote_decode`.
    Produce {
        /// Number of consumers of the handoff (`remote_consumers`): 1 to [`CONSUMERS_MAX`].
        consumers: u16,
    },
    /// Fetch, then decode: `do_remote_prefill`.
    Consume(Box<Handoff>),
}

/// One handoff, with every field checked for its form. The producer decides whether the lease exists.
#[derive(Clone, Debug, PartialEq)]
pub struct Handoff {
    /// The handle of the lease.
    pub handle: Handle,
    /// The producer's epoch when it opened the lease.
    pub epoch: Epoch,
    /// The producer's engine id.
    pub engine_id: String,
    /// The producer's request.
    pub request: RequestId,
    /// Host of the producer's side channel: an IP address or a name.
    pub host: String,
    /// Port of the side channel of each of the producer's ranks; at least one.
    pub ports: Vec<u16>,
    /// The producer's block table, in order. Reads use the index. The ids serve debugging and vLLM's format.
    pub blocks: Vec<BlockId>,
    /// Tokens per block of the producer.
    pub block_tokens: usize,
    /// Tokens whose KV the blocks hold.
    pub tokens: usize,
    /// Remaining lease duration when the producer replied; `None` if the engine does not report it.
    pub lease_left: Option<Duration>,
    /// [`crate::KvLayout::fingerprint`] of the producer.
    pub layout: u64,
    /// Fingerprint of the tokens whose KV the blocks hold. A consumer with other tokens must not use the blocks.
    pub prompt: u64,
    /// Number of those tokens that the producer found in its prefix cache (vLLM: `remote_prefill_cached_tokens`). The
    /// consumer reports this number as cached tokens, because fetched tokens do not count as cached.
    pub cached: usize,
    /// Number of consumers of the lease. A consumer that does not need it leaves if there are others.
    pub consumers: u16,
    /// Whether the producer still computes. Then blocks can be read as they become final, and `lease_left` starts at
    /// the end of the prefill.
    pub growing: bool,
}

/// Why a handoff is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandoffError {
    /// The value is not an object.
    #[error("kv_transfer_params must be an object")]
    NotAnObject,
    /// Both directions are requested.
    #[error("kv_transfer_params: do_remote_decode and do_remote_prefill cannot both be true")]
    BothDirections,
    /// A field that the direction needs is absent or null.
    #[error("kv_transfer_params.{0} is missing")]
    Missing(&'static str),
    /// A field has the wrong type or range.
    #[error("kv_transfer_params.{field} must be {expected}")]
    Malformed {
        /// The field.
        field: &'static str,
        /// The expected value.
        expected: &'static str,
    },
}

impl Handoff {
    /// The `kv_transfer_params` of the producer's reply.
    #[must_use]
    pub fn to_reply(&self) -> Value {
        json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_block_ids": [self.blocks.iter().map(|b| b.0).collect::<Vec<_>>()],
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request.as_str(),
            "remote_host": self.host,
            "remote_port": self.ports.first(),
            "remote_rank_ports": (self.ports.len() > 1).then_some(&self.ports),
            "remote_block_size": self.block_tokens,
            "remote_consumers": self.consumers,
            "tp_size": self.ports.len(),
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": self.tokens,
            "remote_blocks_expiry_time": null,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": self.cached,
            "remote_handle": self.handle.to_string(),
            "remote_epoch": self.epoch.to_string(),
            "remote_lease_left_ms": self.lease_left.map(|left| left.as_millis() as u64),
            "remote_layout": format!("{:016x}", self.layout),
            "remote_prompt": format!("{:016x}", self.prompt),
            "remote_growing": self.growing,
        })
    }
}

impl KvIntent {
    /// The `kv_transfer_params` that a router sends to a producer, as JSON.
    pub const PRODUCE_REQUEST: &str = "{\"do_remote_decode\":true,\"do_remote_prefill\":false,\
        \"remote_engine_id\":null,\"remote_block_ids\":null,\"remote_host\":null,\"remote_port\":null}";

    /// Parses the `kv_transfer_params` of a request to an engine. `Ok(None)` without a task.
    ///
    /// # Errors
    /// [`HandoffError`] names the first field that is missing or malformed.
    pub fn parse(value: &Value) -> Result<Option<Self>, HandoffError> {
        if value.is_null() {
            return Ok(None);
        }
        let fields = value.as_object().ok_or(HandoffError::NotAnObject)?;
        let flag = |field| Scalar::of(fields.get(field)).flag(field);
        let (produce, consume) = (flag("do_remote_decode")?, flag("do_remote_prefill")?);
        match (produce, consume) {
            (true, true) => Err(HandoffError::BothDirections),
            (true, false) => Ok(Some(Self::Produce { consumers: consumers(fields)? })),
            (false, true) => Ok(Some(Self::Consume(Box::new(handoff(fields)?)))),
            (false, false) => Ok(None),
        }
    }
}

fn handoff(fields: &Map<String, Value>) -> Result<Handoff, HandoffError> {
    let malformed = |field, expected| HandoffError::Malformed { field, expected };
    let get = |field| Scalar::of(fields.get(field));
    let text = |field| Ok(get(field).text(field)?.to_owned());
    let number = |field, range, expected| get(field).number(field, range, expected);
    let request = RequestId::new(&text("remote_request_id")?)
        .map_err(|_| malformed("remote_request_id", "a request id"))?;
    let blocks = block_table(fields)?;
    let tokens = number("remote_num_tokens", 1..=usize::MAX, "a positive integer")?
        .ok_or(HandoffError::Missing("remote_num_tokens"))?;
    let block_tokens =
        number("remote_block_size", 1..=BLOCK_TOKENS_MAX, "a number of tokens from 1 to 1024")?
            .ok_or(HandoffError::Missing("remote_block_size"))?;
    if tokens.div_ceil(block_tokens) > blocks.len() {
        return Err(malformed("remote_block_ids", "as many blocks as remote_num_tokens need"));
    }
    let cached = number("remote_prefill_cached_tokens", 0..=usize::MAX, "a number of tokens")?;
    Ok(Handoff {
        handle: get("remote_handle").handle("remote_handle")?,
        epoch: get("remote_epoch").epoch("remote_epoch")?,
        engine_id: text("remote_engine_id")?,
        request,
        host: text("remote_host")?,
        ports: ports(fields)?,
        blocks,
        block_tokens,
        tokens,
        lease_left: get("remote_lease_left_ms").milliseconds("remote_lease_left_ms")?,
        layout: fingerprint(fields, "remote_layout")?,
        prompt: fingerprint(fields, "remote_prompt")?,
        cached: cached.unwrap_or(0),
        consumers: consumers(fields)?,
        growing: get("remote_growing").flag("remote_growing")?,
    })
}

fn fingerprint(fields: &Map<String, Value>, field: &'static str) -> Result<u64, HandoffError> {
    let text = Scalar::of(fields.get(field));
    let text = text.text(field)?;
    let digits = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
    let value = digits.then(|| u64::from_str_radix(text, 16).ok()).flatten();
    value.ok_or(HandoffError::Malformed { field, expected: "16 hexadecimal digits" })
}

fn consumers(fields: &Map<String, Value>) -> Result<u16, HandoffError> {
    const FIELD: &str = "remote_consumers";
    let expected = "a number of consumers from 1 to 16";
    let consumers = Scalar::of(fields.get(FIELD)).number(FIELD, 1..=CONSUMERS_MAX, expected)?;
    Ok(consumers.map_or(1, |consumers| u16::try_from(consumers).expect("CONSUMERS_MAX fits into 16 bits")))
}

/// The port of each rank. For one rank `remote_port` suffices.
fn ports(fields: &Map<String, Value>) -> Result<Vec<u16>, HandoffError> {
    const FIELD: &str = "remote_rank_ports";
    let get = |field| Scalar::of(fields.get(field));
    let first = get("remote_port").port("remote_port")?;
    let ranks = get("tp_size").number("tp_size", 1..=RANKS_MAX, "a number of ranks from 1 to 64")?;
    let ranks = ranks.unwrap_or(1);
    let malformed =
        HandoffError::Malformed { field: FIELD, expected: "the ports of tp_size ranks, remote_port first" };
    let ports = match fields.get(FIELD) {
        None | Some(Value::Null) if ranks == 1 => return Ok(vec![first]),
        None | Some(Value::Null) => return Err(HandoffError::Missing(FIELD)),
        Some(Value::Array(ports)) if ports.len() == ranks => ports,
        Some(_) => return Err(malformed),
    };
    let port = |value: &Value| value.as_u64().and_then(|p| u16::try_from(p).ok()).filter(|&p| p > 0);
    let ports = ports.iter().map(port).collect::<Option<Vec<_>>>();
    ports.filter(|ports| ports[0] == first).ok_or(malformed)
}

/// The block table. vLLM sends one list per KV cache group, and engines of this protocol have one group. A flat list is
/// accepted.
fn block_table(fields: &Map<String, Value>) -> Result<Vec<BlockId>, HandoffError> {
    const FIELD: &str = "remote_block_ids";
    let malformed = HandoffError::Malformed { field: FIELD, expected: "a non-empty list of block ids" };
    let value = fields.get(FIELD).filter(|v| !v.is_null()).ok_or(HandoffError::Missing(FIELD))?;
    let list = match value.as_array().map(Vec::as_slice) {
        Some([Value::Array(group)]) => group,
        Some(flat) if !flat.is_empty() => flat,
        _ => return Err(malformed),
    };
    if list.is_empty() || list.len() > BLOCKS_PER_HANDOFF_MAX {
        return Err(malformed);
    }
    let id = |v: &Value| v.as_u64().and_then(|v| u32::try_from(v).ok()).map(BlockId);
    list.iter().map(id).collect::<Option<Vec<_>>>().ok_or(malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Handoff {
        Handoff {
            handle: Handle(u128::MAX - 5),
            epoch: Epoch(77),
            engine_id: "p-1".into(),
            request: RequestId::new("cmpl-1").expect("an id"),
            host: "127.0.0.1".into(),
            ports: vec![5600, 5601],
            blocks: vec![BlockId(4), BlockId(2)],
            block_tokens: 16,
            tokens: 20,
            lease_left: Some(Duration::from_secs(30)),
            layout: 0xfeed,
            prompt: 0xbeef,
            cached: 16,
            consumers: 3,
            growing: true,
        }
    }

    #[test]
    fn a_reply_round_trips() {
        let reply = sample().to_reply();
        assert_eq!(KvIntent::parse(&reply), Ok(Some(KvIntent::Consume(Box::new(sample())))));
        let facts = ReplyFacts::check(&reply.to_string()).expect("complete");
        let expected = (Some(sample().handle), Some(sample().epoch), Some(20));
        assert_eq!((facts.handle, facts.epoch, facts.tokens), expected);
    }

    #[test]
    fn every_missing_or_malformed_field_is_named() {
        let needed = [
            "remote_block_ids",
            "remote_engine_id",
            "remote_request_id",
            "remote_host",
            "remote_port",
            "remote_num_tokens",
            "remote_block_size",
            "remote_rank_ports",
            "remote_handle",
            "remote_epoch",
            "remote_layout",
            "remote_prompt",
        ];
        for field in needed {
            for bad in [None, Some(Value::Null), Some(json!(-1)), Some(json!({"a": 1})), Some(json!(""))] {
                let mut reply = sample().to_reply();
                let fields = reply.as_object_mut().expect("an object");
                match bad.clone() {
                    None => drop(fields.remove(field)),
                    Some(bad) => drop(fields.insert(field.into(), bad)),
                }
                let error = KvIntent::parse(&reply).expect_err("a broken handoff");
                assert!(error.to_string().contains(field), "{field} {bad:?}: {error}");
            }
        }
    }

    #[test]
    fn a_geometry_that_cannot_be_is_a_named_field() {
        let many: Vec<u16> = (1..=65).collect();
        let wrong = [
            ("remote_block_size", json!(0)),
            ("remote_block_size", json!(1025)),
            ("remote_block_size", json!(16.5)),
            ("remote_rank_ports", json!([5600])),
            ("remote_rank_ports", json!([5600, 5601, 5602])),
            ("remote_rank_ports", json!([5601, 5600])),
            ("remote_rank_ports", json!([5600, 0])),
            ("remote_rank_ports", json!([5600, 70_000])),
            ("remote_rank_ports", json!([5600, "5601"])),
            ("remote_rank_ports", json!(many)),
            ("remote_consumers", json!(0)),
            ("remote_consumers", json!(17)),
            ("remote_consumers", json!(-1)),
            ("tp_size", json!(0)),
            ("tp_size", json!(65)),
            ("tp_size", json!("2")),
        ];
        for (field, value) in wrong {
            let mut reply = sample().to_reply();
            reply[field] = value.clone();
            let error = KvIntent::parse(&reply).expect_err("a broken handoff");
            assert!(error.to_string().contains(field), "{field} {value}: {error}");
        }
        let mut short = sample().to_reply();
        short["remote_num_tokens"] = json!(33);
        let error = KvIntent::parse(&short).expect_err("two blocks of 16 do not hold 33 tokens");
        assert!(error.to_string().contains("remote_block_ids"), "{error}");
    }

    #[test]
    fn a_handoff_without_ranks_and_consumers_has_one_of_each() {
        let mut reply = sample().to_reply();
        for field in ["tp_size", "remote_rank_ports", "remote_consumers"] {
            reply.as_object_mut().expect("an object").remove(field);
        }
        let Ok(Some(KvIntent::Consume(handoff))) = KvIntent::parse(&reply) else { panic!("a handoff") };
        assert_eq!((&handoff.ports[..], handoff.consumers), (&[5600][..], 1));
        let several = json!({"do_remote_decode": true, "remote_consumers": 4});
        assert_eq!(KvIntent::parse(&several), Ok(Some(KvIntent::Produce { consumers: 4 })));
    }

    #[test]
    fn the_reply_of_a_stock_engine_passes_the_routers_check() {
        let reply = json!({"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],
            "remote_engine_id":"541e8c15","remote_request_id":"cmpl-t1-0-933cb11d","remote_host":"127.0.0.1",
            "remote_port":18911,"tp_size":1,"remote_num_tokens":81,"remote_blocks_expiry_time":null});
        assert_eq!(ReplyFacts::check(&reply.to_string()).map(|f| f.handle), Ok(None));
        let mut broken = reply;
        broken.as_object_mut().expect("an object").remove("remote_request_id");
        assert_eq!(ReplyFacts::check(&broken.to_string()), Err(HandoffError::Missing("remote_request_id")));
    }

    #[test]
    fn transfer_params_without_a_handoff_are_none_a_produce_request_or_an_error() {
        assert_eq!(KvIntent::parse(&Value::Null), Ok(None));
        assert_eq!(KvIntent::parse(&json!({})), Ok(None));
        assert_eq!(
            KvIntent::parse(&serde_json::from_str(KvIntent::PRODUCE_REQUEST).expect("JSON")),
            Ok(Some(KvIntent::Produce { consumers: 1 }))
        );
        let mut named: Value = serde_json::from_str(KvIntent::PRODUCE_REQUEST).expect("JSON");
        named["router_request_id"] = json!("r-1");
        assert_eq!(KvIntent::parse(&named), Ok(Some(KvIntent::Produce { consumers: 1 })), "ignored");
        assert_eq!(KvIntent::parse(&json!("x")), Err(HandoffError::NotAnObject));
        let both = json!({"do_remote_decode": true, "do_remote_prefill": true});
        assert_eq!(KvIntent::parse(&both), Err(HandoffError::BothDirections));
    }
}
