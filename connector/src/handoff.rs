//! `kv_transfer_params`: what router, producer and consumer tell each other about one handoff.
//!
//! The fields are vLLM's NixlConnector's (read from vLLM 0.33), so that the router fronts vLLM engines and
//! baton engines alike. Ours adds `remote_handle`, `remote_epoch`, `remote_lease_left_ms`,
//! `remote_layout`, `remote_prompt`, `remote_block_size`, `remote_rank_ports` and `remote_consumers`. A consumer
//! of ours needs them (but for the last two, where one rank lends to one consumer); stock engines ignore them.
//! `tp_size` is vLLM's name for the number of ranks that the KV heads are sharded over.
//!
//! Everything here is hostile until checked: a missing or malformed field is an error that names it, nothing
//! is guessed, and nothing in the value is changed.

mod reply;

pub use reply::ReplyFacts;

use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::limits::{BLOCK_TOKENS_MAX, BLOCKS_PER_HANDOFF_MAX, CONSUMERS_MAX, RANKS_MAX};
use crate::{BlockId, Epoch, Handle, RequestId};

/// What a request's `kv_transfer_params` asks of an engine.
#[derive(Clone, Debug, PartialEq)]
pub enum KvIntent {
    /// Prefill and lend: `do_remote_decode`.
    Produce {
        /// Consumers that the handoff is meant for (`remote_consumers`): 1 to [`CONSUMERS_MAX`].
        consumers: u16,
    },
    /// Fetch, then decode: `do_remote_prefill`.
    Consume(Box<Handoff>),
}

/// One handoff, complete and checked for shape (not yet for truth: that is the producer's to say).
#[derive(Clone, Debug, PartialEq)]
pub struct Handoff {
    /// The lease's name and key.
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
    /// The producer's block table, in order. Read by index, so the ids are for people and for vLLM's shape.
    pub blocks: Vec<BlockId>,
    /// Tokens of one of the producer's blocks.
    pub block_tokens: usize,
    /// Tokens whose KV the blocks hold.
    pub tokens: usize,
    /// Life left when the producer answered; `None` from an engine that does not say.
    pub lease_left: Option<Duration>,
    /// [`crate::KvLayout::fingerprint`] of the producer.
    pub layout: u64,
    /// Fingerprint of the tokens whose KV the blocks hold: a consumer that has tokenized something else must not
    /// use them.
    pub prompt: u64,
    /// Of those tokens, how many the producer found in its own prefix cache (vLLM's name for it is
    /// `remote_prefill_cached_tokens`): what the consumer reports as cached, since fetching is not caching.
    pub cached: usize,
    /// Consumers that the lease waits for. One that does not want it leaves, where there are others.
    pub consumers: u16,
}

/// Which field of a handoff is missing or malformed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandoffError {
    /// Not an object at all.
    #[error("kv_transfer_params must be an object")]
    NotAnObject,
    /// Both or contradictory directions.
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
        /// What it must be.
        expected: &'static str,
    },
}

impl Handoff {
    /// The reply's `kv_transfer_params` as the producer writes it.
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
        })
    }
}

impl KvIntent {
    /// Reads the `kv_transfer_params` of a request to an engine. `Ok(None)` when it asks for nothing.
    ///
    /// # Errors
    /// [`HandoffError`] names the first field that is missing or malformed.
    pub fn parse(value: &Value) -> Result<Option<Self>, HandoffError> {
        if value.is_null() {
            return Ok(None);
        }
        let fields = value.as_object().ok_or(HandoffError::NotAnObject)?;
        let produce = flag(fields, "do_remote_decode")?;
        let consume = flag(fields, "do_remote_prefill")?;
        match (produce, consume) {
            (true, true) => Err(HandoffError::BothDirections),
            (true, false) => Ok(Some(Self::Produce { consumers: consumers(fields)? })),
            (false, true) => Ok(Some(Self::Consume(Box::new(handoff(fields)?)))),
            (false, false) => Ok(None),
        }
    }

    /// What a router sends to a producer.
    #[must_use]
    pub fn produce_request() -> Value {
        json!({
            "do_remote_decode": true, "do_remote_prefill": false,
            "remote_engine_id": null, "remote_block_ids": null, "remote_host": null, "remote_port": null,
        })
    }
}

fn handoff(fields: &Map<String, Value>) -> Result<Handoff, HandoffError> {
    let malformed = |field, expected| HandoffError::Malformed { field, expected };
    let request = RequestId::new(text(fields, "remote_request_id")?)
        .map_err(|_| malformed("remote_request_id", "a request id"))?;
    let epoch = text(fields, "remote_epoch")?.parse();
    let tokens = fields.get("remote_num_tokens").ok_or(HandoffError::Missing("remote_num_tokens"))?;
    let blocks = block_table(fields)?;
    let tokens = tokens.as_u64().and_then(|t| usize::try_from(t).ok()).filter(|&t| t > 0);
    let tokens = tokens.ok_or(malformed("remote_num_tokens", "a positive integer"))?;
    let block_tokens =
        number(fields, "remote_block_size", 1..=BLOCK_TOKENS_MAX, "a number of tokens from 1 to 1024")?
            .ok_or(HandoffError::Missing("remote_block_size"))?;
    if tokens.div_ceil(block_tokens) > blocks.len() {
        return Err(malformed("remote_block_ids", "as many blocks as remote_num_tokens need"));
    }
    Ok(Handoff {
        handle: handle(fields)?,
        epoch: epoch.map_err(|_| malformed("remote_epoch", "16 hexadecimal digits"))?,
        engine_id: text(fields, "remote_engine_id")?.to_owned(),
        request,
        host: text(fields, "remote_host")?.to_owned(),
        ports: ports(fields)?,
        blocks,
        block_tokens,
        tokens,
        lease_left: left(fields)?,
        layout: fingerprint(fields, "remote_layout")?,
        prompt: fingerprint(fields, "remote_prompt")?,
        cached: cached(fields)?,
        consumers: consumers(fields)?,
    })
}

fn flag(fields: &Map<String, Value>, field: &'static str) -> Result<bool, HandoffError> {
    match fields.get(field) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(set)) => Ok(*set),
        Some(_) => Err(HandoffError::Malformed { field, expected: "a boolean" }),
    }
}

fn text<'a>(fields: &'a Map<String, Value>, field: &'static str) -> Result<&'a str, HandoffError> {
    match fields.get(field) {
        None | Some(Value::Null) => Err(HandoffError::Missing(field)),
        Some(Value::String(text)) if !text.is_empty() && text.len() <= 512 => Ok(text),
        Some(_) => Err(HandoffError::Malformed { field, expected: "a string of 1 to 512 bytes" }),
    }
}

fn handle(fields: &Map<String, Value>) -> Result<Handle, HandoffError> {
    let malformed = HandoffError::Malformed { field: "remote_handle", expected: "32 hexadecimal digits" };
    text(fields, "remote_handle")?.parse().map_err(|_| malformed)
}

fn fingerprint(fields: &Map<String, Value>, field: &'static str) -> Result<u64, HandoffError> {
    let text = text(fields, field)?;
    let digits = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
    let value = digits.then(|| u64::from_str_radix(text, 16).ok()).flatten();
    value.ok_or(HandoffError::Malformed { field, expected: "16 hexadecimal digits" })
}

fn cached(fields: &Map<String, Value>) -> Result<usize, HandoffError> {
    const FIELD: &str = "remote_prefill_cached_tokens";
    match fields.get(FIELD) {
        None | Some(Value::Null) => Ok(0),
        Some(value) => value
            .as_u64()
            .and_then(|tokens| usize::try_from(tokens).ok())
            .ok_or(HandoffError::Malformed { field: FIELD, expected: "a number of tokens" }),
    }
}

fn port(fields: &Map<String, Value>) -> Result<u16, HandoffError> {
    let port =
        fields.get("remote_port").filter(|v| !v.is_null()).ok_or(HandoffError::Missing("remote_port"))?;
    let port = port.as_u64().and_then(|p| u16::try_from(p).ok()).filter(|&p| p > 0);
    port.ok_or(HandoffError::Malformed { field: "remote_port", expected: "an integer from 1 to 65535" })
}

/// A number in a range; `None` when the field is absent.
fn number(
    fields: &Map<String, Value>,
    field: &'static str,
    range: std::ops::RangeInclusive<usize>,
    expected: &'static str,
) -> Result<Option<usize>, HandoffError> {
    match fields.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
            let number = number.filter(|number| range.contains(number));
            number.map(Some).ok_or(HandoffError::Malformed { field, expected })
        }
    }
}

fn consumers(fields: &Map<String, Value>) -> Result<u16, HandoffError> {
    let expected = "a number of consumers from 1 to 16";
    let consumers = number(fields, "remote_consumers", 1..=CONSUMERS_MAX, expected)?;
    Ok(consumers.map_or(1, |consumers| u16::try_from(consumers).expect("CONSUMERS_MAX fits into 16 bits")))
}

/// The port of each rank. One rank has one port: nothing more is said of it.
fn ports(fields: &Map<String, Value>) -> Result<Vec<u16>, HandoffError> {
    const FIELD: &str = "remote_rank_ports";
    let first = port(fields)?;
    let ranks = number(fields, "tp_size", 1..=RANKS_MAX, "a number of ranks from 1 to 64")?.unwrap_or(1);
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

fn left(fields: &Map<String, Value>) -> Result<Option<Duration>, HandoffError> {
    match fields.get("remote_lease_left_ms") {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_u64().map(Duration::from_millis).map(Some).ok_or(HandoffError::Malformed {
            field: "remote_lease_left_ms",
            expected: "a number of milliseconds",
        }),
    }
}

/// vLLM sends one list per KV cache group; engines of this protocol have one group. A flat list is accepted.
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
        }
    }

    #[test]
    fn a_reply_is_read_back_as_it_was_written() {
        let reply = sample().to_reply();
        assert_eq!(KvIntent::parse(&reply), Ok(Some(KvIntent::Consume(Box::new(sample())))));
        let facts = ReplyFacts::check(&reply).expect("complete");
        assert_eq!((facts.handle, facts.tokens), (Some(sample().handle), Some(20)));
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
    fn a_handoff_that_says_nothing_of_ranks_and_consumers_has_one_of_each() {
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
        assert_eq!(ReplyFacts::check(&reply).map(|f| f.handle), Ok(None));
        let mut broken = reply;
        broken.as_object_mut().expect("an object").remove("remote_request_id");
        assert_eq!(ReplyFacts::check(&broken), Err(HandoffError::Missing("remote_request_id")));
    }

    #[test]
    fn a_request_that_asks_for_nothing_is_no_handoff() {
        assert_eq!(KvIntent::parse(&Value::Null), Ok(None));
        assert_eq!(KvIntent::parse(&json!({})), Ok(None));
        assert_eq!(
            KvIntent::parse(&KvIntent::produce_request()),
            Ok(Some(KvIntent::Produce { consumers: 1 }))
        );
        assert_eq!(KvIntent::parse(&json!("x")), Err(HandoffError::NotAnObject));
        let both = json!({"do_remote_decode": true, "do_remote_prefill": true});
        assert_eq!(KvIntent::parse(&both), Err(HandoffError::BothDirections));
    }
}
