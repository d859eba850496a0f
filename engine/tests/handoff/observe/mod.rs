//! Observation of requests and blocks: names, events, digests, `/debug/kv`.

pub(crate) mod block_usage;
pub(crate) mod digests;
pub(crate) mod events;
pub(crate) mod named;
