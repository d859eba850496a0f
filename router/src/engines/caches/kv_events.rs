//! What engines tell of their caches: vLLM's KV events, over ZeroMQ.
//!
//! ```text
//! engine's PUB socket ──▶ zmtp (frames) ──▶ msgpack ──▶ batch (events) ──▶ blocks (places) ──▶ Memory (caches.rs)
//!                            ▲                                │ a gap in the sequence
//!                subscriber: connects, again and again        └▶ everything of that engine is forgotten
//! ```
//!
//! An event names blocks by hashes of the engine's own making, and says which tokens are in them. The router hashes
//! the tokens itself, chained from the root, so that a prompt of known tokens can be compared with what any engine
//! holds, whatever it calls its blocks.
//!
//! Some events are left out, and each is counted by its reason ([`crate::metrics::kv_events::LeftOut`]): blocks with extra keys (salts, adapters,
//! images) and what follows them; blocks on another medium; blocks of cache groups without full attention, whose hit
//! depends on more than the tokens before it; events that are malformed.
//!
//! Every byte is checked and every size is bounded: an engine that sends nonsense costs the others nothing.

mod batch;
mod blocks;
mod msgpack;
mod subscriber;
mod zmtp;

pub(crate) use subscriber::{Source, Subscriptions};
