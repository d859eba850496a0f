//! Cache contents that engines report: vLLM's KV events, over ZeroMQ.
//!
//! ```text
//! engine's PUB socket ──▶ zmtp (frames) ──▶ msgpack ──▶ batch (events) ──▶ blocks (names) ──▶ KnownCaches (caches.rs)
//!                            ▲                                │ a gap in the sequence
//!                subscriber: connects, with retries           └▶ all blocks of that engine are forgotten
//! ```
//!
//! An event names blocks by hashes of the engine's own making and contains their tokens. The router hashes the
//! tokens itself, chained from a root that contains adapter and salt. So a prompt can be compared with any engine's
//! blocks, whatever their names. A block counts while the engine has it on some medium: device, host or disk.
//!
//! Some events are ignored and counted by reason ([`crate::metrics::kv_events::IgnoredEventReason`]):
//! - blocks with images or embeddings in their keys, and the blocks that follow them
//! - blocks on another host
//! - blocks of cache groups without full attention, whose hit depends on more than the preceding tokens
//! - malformed events
//!
//! Every byte is checked and every size is bounded. An engine that sends malformed data affects no other engine.

mod batch;
mod blocks;
mod extra_keys;
mod msgpack;
mod sources;
mod subscriber;
mod zmtp;

pub(crate) use subscriber::{EventSource, Subscriptions};
