//! KV events: what enters and leaves an engine's caches, for routers, in the form of vLLM 0.32 over ZeroMQ.
//!
//! ```text
//!  step loop ─ changes ─▶ sender (bounded) ─▶ thread `kv-events` ─ encode ─▶ log ─▶ a task per subscriber (PUB)
//!                                                                            └────▶ a task per replay (ROUTER)
//! ```
//!
//! Nothing here delays the step loop. If the thread is behind, messages are dropped and counted. If a subscriber is
//! behind, it misses messages. The sequence numbers show a gap in both cases, and a subscriber then forgets the blocks.
//!
//! Events contain the tokens and salts of prompts, as those of vLLM do, and ZeroMQ proves nothing about a subscriber.
//! An endpoint with `*` therefore listens where the engine's HTTP server does.

mod config;
mod connection;
mod encode;
mod message_log;
mod publisher;
mod replay;
mod sender;
mod shared_log;
mod sockets;
mod zmtp;

pub use self::config::{EventEndpoint, KvEventsConfig, KvEventsConfigError};
pub use self::publisher::{EventPublisher, RankBlocks};
pub use self::sender::{EventSender, KvEventMetrics};
pub use self::sockets::EventSockets;

#[cfg(test)]
mod tests;
