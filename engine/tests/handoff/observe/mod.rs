//! Observation of requests and blocks: names, events, KV events, digests, `/debug/kv`.

pub(crate) mod block_usage;
pub(crate) mod digests;
pub(crate) mod events;
pub(crate) mod kv_events;
pub(crate) mod named;
