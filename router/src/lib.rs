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
//! | `hygiene` | a client's bytes, read strictly before anything else sees them |
//! | `session`, `service`, `route`, `intake`, `features`, `rewrite` | a request in: its head, paths, body, what is taken out |
//! | `models`, `pool`, `policy` | which engine is chosen |
//! | `memory`, `prefix_index`, `kv_events` | what the engines' caches hold, as far as is known |
//! | `admission` | who waits when every engine is full, and whose turn it is |
//! | `exchange_driver`, `disaggregation`, `legs` | in which order engines are asked, and what their answers mean |
//! | `shared`, `generation`, `fleet` | what outlives a configuration, one version of it, the engines |
//! | `health`, `alive`, `retries` | which engines are given requests, and how often they are tried again |
//! | `resume` | what is kept of a stream so that another engine can go on with it |
//! | `tenants`, `tls` | who asks, and what they may; encrypted connections |
//! | `reload`, `discovery` | the next configuration; engines that it does not list |
//! | `upstream` | connections to engines |
//! | `answer`, `sse`, `client_watch` | the answer out, and whether the client is still there |
//! | `settle` | aborts and releases |
//! | `explain` | why a request went where it went |
//! | `metrics`, `observe`, `inflight`, `admin`, `seldom` | what people and monitors see |
//! | [`snapshot`] | every engine's blocks and leases at one moment, and what is stranded |
//! | `finished`, `observers`, `access_log`, `telemetry`, `trace_context` | a request that is over: its line, its trace |
//!
//! The only crate that knows pingora. It imports neither the engine nor a transport: handoffs travel unopened.

mod access_log;
mod admin;
mod admission;
mod alive;
mod answer;
mod client_address;
mod client_watch;
pub mod config;
mod disaggregation;
mod discovery;
mod error_inside;
mod estimate;
mod exchange_driver;
mod explain;
mod features;
mod file_watch;
mod finished;
mod fleet;
#[doc(hidden)]
pub mod fuzzing;
mod generation;
mod handover;
mod health;
mod hex;
mod hosts;
mod hygiene;
mod inflight;
mod intake;
pub mod kv_events;
mod legs;
mod memory;
mod metrics;
mod models;
mod named_file;
mod observe;
mod observers;
mod policy;
mod pool;
mod prefix_index;
mod presence;
#[doc(hidden)]
pub mod rehearsal;
mod reload;
mod request_id;
mod resume;
mod retries;
mod rewrite;
mod route;
mod seldom;
mod server;
mod service;
mod session;
mod settle;
mod shared;
pub mod snapshot;
mod sse;
mod telemetry;
mod tenants;
mod tls;
mod trace_context;
mod upstream;
mod usage;

pub use admin::AdminError;
pub use config::{AddressError, ConfigError, NamedFile, RouterConfig, listen_address};
pub use generation::GenerationError;
pub use handover::Inherited;
pub use observers::ObserverError;
pub use reload::{ConfigFile, Reload};
pub use server::{BindError, Router};
pub use telemetry::TelemetryError;
pub use tenants::{AuthError, NewKey};
pub use tls::TlsError;
pub use upstream::TermsError;
