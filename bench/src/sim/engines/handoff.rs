//! `kv_transfer_params` in both dialects: a prefill engine writes them, a decode engine reads them.
//!
//! vLLM's fields are those that a stock 0.32 pair exchanges. If a required field is missing, a stock decode engine
//! silently computes the prompt itself, and the producer's blocks remain until expiry. Baton's engine names the
//! missing field. A stock engine of a pushing pair ends without `tp_size`, and needs no blocks.

use std::time::Duration;

use baton_connector::handoff::{Handoff, KvIntent};
use baton_connector::{BlockId, Epoch, Handle, RequestId};
use baton_openai::{ApiError, Code};
use serde_json::{Value, json};

use super::core::{OpenedLease, Source};
use super::leases::LeaseKey;
use super::plan::{Dialect, EnginePlan};
use crate::load::rng::mix;

/// The meaning of a request's `kv_transfer_params`.
#[derive(Debug)]
pub(super) enum Intent {
    Plain,
    Produce,
    Consume {
        source: Source,
        check: Option<HandoffCheck>,
    },
    /// The engine does not survive the request.
    Fatal,
}

/// Values that Baton's engine compares before it reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct HandoffCheck {
    pub layout: u64,
    pub prompt: u64,
    pub block_tokens: usize,
}

/// The producer of a lease.
pub(super) struct Producer<'a> {
    pub dialect: Dialect,
    pub engine: &'a str,
    pub epoch: Epoch,
    pub port: u16,
    pub block_tokens: usize,
    pub lease: Duration,
    /// The producer writes the blocks.
    pub pushes: bool,
}

/// The fingerprint of the layout of simulated blocks.
pub(super) fn layout(block_tokens: usize) -> u64 {
    mix(block_tokens as u64 ^ 0x51_4d5f_4b56)
}

/// The fingerprint of a prompt: the content of its last block.
pub(super) fn fingerprint(contents: &[u64]) -> u64 {
    contents.last().copied().unwrap_or_default()
}

/// The reply's `kv_transfer_params`.
pub(super) fn reply(
    producer: &Producer<'_>,
    lent: &OpenedLease,
    internal: &RequestId,
    tokens: usize,
    contents: &[u64],
) -> Value {
    match producer.dialect {
        Dialect::Vllm => json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [lent.blocks],
            "remote_engine_id": producer.engine, "remote_request_id": internal.as_str(),
            "remote_host": "127.0.0.1", "remote_port": producer.port, "tp_size": 1, "dcp_size": 1, "pp_size": 1,
            "remote_num_tokens": tokens, "remote_blocks_expiry_time": null,
            "transfer_mode": if producer.pushes { "push" } else { "pull" }, "remote_prefill_cached_tokens": 0,
        }),
        Dialect::Baton => Handoff {
            handle: Handle(lent.handle),
            epoch: producer.epoch,
            engine_id: producer.engine.to_owned(),
            request: internal.clone(),
            host: String::from("127.0.0.1"),
            ports: vec![producer.port],
            blocks: lent.blocks.iter().map(|&block| BlockId(block)).collect(),
            block_tokens: producer.block_tokens,
            tokens,
            lease_left: Some(producer.lease),
            layout: layout(producer.block_tokens),
            prompt: fingerprint(contents),
            cached: 0,
            consumers: 1,
            growing: false,
        }
        .to_reply(),
    }
}

/// Parses a request's `kv_transfer_params`.
///
/// # Errors
/// In Baton's dialect the missing or malformed field. None in vLLM's.
pub(super) fn intent(plan: &EnginePlan, params: Option<&Value>) -> Result<Intent, ApiError> {
    let Some(params) = params.filter(|params| !params.is_null()) else { return Ok(Intent::Plain) };
    match plan.dialect {
        Dialect::Vllm => Ok(vllms(params, plan.push.is_some())),
        Dialect::Baton => {
            let malformed = |error: baton_connector::handoff::HandoffError| {
                ApiError::invalid("kv_transfer_params", error.to_string())
                    .with_code(Code::InvalidKvTransferParams)
            };
            Ok(match KvIntent::parse(params).map_err(malformed)? {
                None => Intent::Plain,
                Some(KvIntent::Produce { .. }) => Intent::Produce,
                Some(KvIntent::Consume(handoff)) => baton_intent(&handoff),
            })
        }
    }
}

fn baton_intent(handoff: &Handoff) -> Intent {
    let source = Source {
        engine: handoff.engine_id.clone(),
        lease: LeaseKey::Handle(handoff.handle.0),
        blocks: handoff.blocks.iter().map(|block| block.0).collect(),
        tokens: handoff.tokens,
    };
    let &Handoff { layout, prompt, block_tokens, .. } = handoff;
    Intent::Consume { source, check: Some(HandoffCheck { layout, prompt, block_tokens }) }
}

fn vllms(params: &Value, pushes: bool) -> Intent {
    let set = |flag: &str| params[flag].as_bool() == Some(true);
    if set("do_remote_decode") {
        return Intent::Produce;
    }
    let registers = || {
        params["remote_host"].as_str()?;
        params["remote_port"].as_u64()?;
        // Required, and not compared.
        params["remote_request_id"].as_str()?;
        let engine = params["remote_engine_id"].as_str()?.to_owned();
        // All tokens that the producer has.
        Some(Source { engine, lease: LeaseKey::Unnamed, blocks: Vec::new(), tokens: usize::MAX })
    };
    let consume = || {
        let ids = params["remote_block_ids"].as_array()?;
        let ids = ids.first().and_then(Value::as_array).unwrap_or(ids);
        let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
        let blocks = ids.iter().map(id).collect::<Option<Vec<_>>>().filter(|blocks| !blocks.is_empty())?;
        params["remote_host"].as_str()?;
        params["remote_port"].as_u64()?;
        Some(Source {
            engine: params["remote_engine_id"].as_str()?.to_owned(),
            lease: LeaseKey::Request(RequestId::new(params["remote_request_id"].as_str()?).ok()?),
            blocks,
            tokens: params["remote_num_tokens"].as_u64().map_or(usize::MAX, |tokens| tokens as usize),
        })
    };
    let source = if pushes { registers() } else { consume() };
    match source.filter(|_| set("do_remote_prefill")) {
        Some(_) if pushes && params["tp_size"].as_u64().is_none() => Intent::Fatal,
        Some(source) => Intent::Consume { source, check: None },
        None => Intent::Plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_connector::handoff::ReplyFacts;

    #[test]
    fn a_written_handoff_is_parsed_by_engine_and_router() {
        let lent = OpenedLease { handle: 7 << 64, blocks: vec![3, 1] };
        let internal = RequestId::new("cmpl-a-0-1").expect("an id");
        for dialect in [Dialect::Baton, Dialect::Vllm] {
            let producer = Producer {
                dialect,
                engine: "p",
                epoch: Epoch(5),
                port: 5600,
                block_tokens: 16,
                lease: Duration::from_secs(30),
                pushes: false,
            };
            let plan = EnginePlan { dialect, ..EnginePlan::default() };
            let params = reply(&producer, &lent, &internal, 20, &[1, 2]);
            ReplyFacts::check(&params.to_string()).expect("complete");
            let Ok(Intent::Consume { source, .. }) = intent(&plan, Some(&params)) else {
                panic!("{dialect:?}")
            };
            assert_eq!((source.blocks, source.tokens, &*source.engine), (vec![3, 1], 20, "p"));
            for field in
                ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"]
            {
                let mut broken = params.clone();
                broken[field] = Value::Null;
                let read = intent(&plan, Some(&broken));
                match dialect {
                    Dialect::Baton => {
                        assert!(read.is_err_and(|error| error.message.contains(field)), "{field}")
                    }
                    Dialect::Vllm => assert!(matches!(read, Ok(Intent::Plain)), "{field}"),
                }
            }
        }
    }

    #[test]
    fn a_decode_leg_of_a_pushing_pair_needs_an_identity_and_no_blocks() {
        let plan = EnginePlan { push: Some(Duration::from_secs(480)), ..EnginePlan::default() };
        let identity = json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "p", "remote_host": "127.0.0.1",
            "remote_port": 5600, "tp_size": 1, "remote_request_id": "none",
        });
        let Ok(Intent::Consume { source, check: None }) = intent(&plan, Some(&identity)) else {
            panic!("it registers")
        };
        assert_eq!((&*source.engine, source.lease, source.blocks.len()), ("p", LeaseKey::Unnamed, 0));
        for (field, dies) in [("remote_engine_id", false), ("remote_request_id", false), ("tp_size", true)] {
            let mut broken = identity.clone();
            broken[field] = Value::Null;
            let read = intent(&plan, Some(&broken)).expect("no error in vLLM's dialect");
            assert_eq!(matches!(read, Intent::Fatal), dies, "{field}");
            assert_eq!(matches!(read, Intent::Plain), !dies, "{field}");
        }
    }
}
