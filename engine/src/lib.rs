//! The engine: a model, its paged KV cache, a scheduler, and an OpenAI server in front of them.
//!
//! ```text
//!  HTTP task ─ submission ─▶ mailbox ─▶ step loop ─ owns ─▶ scheduler (pure) ─▶ block pool
//!      ▲                       ▲          │   └── calls ──▶ executor ─▶ KV region ◀─ transports
//!      └────── events ─────────┼──────────┘
//!        fetch workers ────────┤   leases: served off the loop, for transports and /kv/release
//! ```
//!
//! A module imports its own layer and lower ones. Bottom first:
//!
//! | layer | contents |
//! |---|---|
//! | `log_span` | the span of log lines about one request |
//! | [`model`] | the checkpoint: configuration, weights, tokenizer, chat template; formats of responses |
//! | [`sampling`] | from logits to a token; stop strings |
//! | [`grammar`] | structured output: masks over the tokens |
//! | [`compute`] | executors: forward passes on CPUs and CUDA devices |
//! | [`blocks`] | the block pool, hashes of blocks, digests of cached blocks |
//! | [`offload`] | tiers below the pool: host memory and disk |
//! | [`scheduler`] | sequences, batches, admission, preemption |
//! | [`engine_core`] | all decisions between two forward passes; mailbox and status |
//! | [`kv_events`] | KV events for routers, in vLLM's form over ZeroMQ |
//! | [`metrics`] | metrics of one engine core |
//! | [`handoff`] | the owner of a producer's leases, reads of a consumer, the choice of a transport |
//! | [`run`] | the step loop, and the threads of one data-parallel rank |
//! | [`server`] | the HTTP API |
//! | [`engine`] | one engine, assembled |

pub mod blocks;
pub mod compute;
pub mod engine;
pub mod engine_core;
pub mod grammar;
pub mod handoff;
pub mod kv_events;
mod log_span;
pub mod metrics;
pub mod model;
pub mod offload;
pub mod run;
pub mod sampling;
pub mod scheduler;
pub mod server;
