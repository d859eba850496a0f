//! The engine: a model, its paged KV cache, a scheduler, and an OpenAI server in front of them.
//!
//! ```text
//!  HTTP task ─ submission ─▶ mailbox ─▶ step loop ─ owns ─▶ scheduler (pure) ─▶ block pool
//!      ▲                       ▲          │   └── calls ──▶ executor ─▶ KV region ◀─ transports
//!      └────── events ─────────┼──────────┘
//!        fetch workers ────────┤   lease desk: leases served off the loop, for transports and /kv/release
//! ```

pub mod block_hash;
pub mod block_pool;
pub mod digests;
pub mod dp_rank;
pub mod engine;
pub mod engine_core;
pub mod event_log;
pub mod executor;
pub mod kv_rank;
pub mod lease_desk;
pub mod mailbox;
pub mod metrics;
pub mod model;
pub mod offload;
pub mod parity;
pub mod peers;
pub mod sampling;
pub mod scheduler;
pub mod sequence;
pub mod server;
pub mod status;
pub mod step_loop;
pub mod stop;
pub mod transport;
