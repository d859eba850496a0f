//! The front door: takes a client's request, has one engine prefill and another decode it, passes the answer
//! on as it comes, and settles with both engines whatever ends the request.
//!
//! ```text
//! client ─▶ service ─▶ intake ─▶ exchange_driver ─┬▶ legs/prefill ─▶ upstream ─▶ P
//!                                    │            └▶ legs/decode ──▶ upstream ─▶ D
//!                                    ▼                                   │
//!                     connector::exchange (decides)      client ◀─ answer┘
//!                                    └▶ settle (pays: aborts, releases)
//! ```
//!
//! | module | what it does |
//! |---|---|
//! | [`config`] | the YAML file, checked |
//! | `service`, `route`, `intake`, `rewrite` | a request in: pingora's phases, paths, body, what is taken out |
//! | `models`, `policy` | which engine is chosen |
//! | `exchange_driver`, `legs` | in which order engines are asked, and what their answers mean |
//! | `shared`, `generation`, `fleet` | what outlives a configuration, one version of it, the engines |
//! | `health`, `alive`, `retries` | which engines are given requests, and how often they are tried again |
//! | `upstream` | connections to engines |
//! | `answer`, `sse`, `passthrough`, `client_watch` | the answer out, and whether the client is still there |
//! | `settle` | aborts and releases |
//! | `metrics`, `observe`, `admin` | what people and monitors see |
//!
//! The only crate that knows pingora. It imports neither the engine nor a transport: handoffs travel unopened.

mod admin;
mod alive;
mod answer;
mod client_watch;
pub mod config;
mod exchange_driver;
mod fleet;
mod generation;
mod health;
mod intake;
mod legs;
mod metrics;
mod models;
mod observe;
mod passthrough;
mod policy;
mod request_id;
mod retries;
mod rewrite;
mod route;
mod server;
mod service;
mod settle;
mod shared;
mod sse;
mod upstream;
mod usage;

pub use config::{ConfigError, RouterConfig};
pub use generation::GenerationError;
pub use server::{BindError, Reload, Router};
