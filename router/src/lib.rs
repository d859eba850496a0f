//! The router forwards a client's request: one engine prefills, another decodes. It streams the response, and
//! settles with both engines however the request ends.
//!
//! ```text
//! client ─▶ service ─▶ exchange ─┬▶ legs::prefill ─▶ engines::http ─▶ P
//!                         │      └▶ legs::decode ──▶ engines::http ─▶ D
//!                         ▼                                │
//!            connector::exchange (decides)      client ◀───┘
//!                         └▶ legs::settle (aborts, releases)
//! ```
//!
//! A module imports its own layer and lower ones. Bottom first:
//!
//! | layer | contents |
//! |---|---|
//! | [`config`] | the YAML file, checked |
//! | `metrics` | registry, families, labels, the text page, the limiter of repeated log lines |
//! | `message` | contents of requests and responses, pure but for minted ids: paths, features, rewriting, SSE, usage |
//! | `envelope` | the form of errors: OpenAI's, or Anthropic's |
//! | `tls` | certificates and handshakes, towards clients and engines |
//! | `auth` | API keys, tenants, limits, cache salts; access to the admin listener |
//! | `engines` | an engine: HTTP client, health, load, known caches, membership; memory of bodies; address redaction |
//! | `admission` | the fair queue, deadlines |
//! | `client` | the client's connection: strict HTTP reader, pingora session, disconnect detection, address |
//! | `routing` | models, pools, policies, the disaggregation decision, explanations |
//! | `legs` | one attempt of each leg, liveness probes, retry budget, settlement |
//! | `observe` | access log, traces, requests in flight and finished, the deployment [`snapshot`] |
//! | `state` | generations of the configuration, what they share, reload results, readiness |
//! | `exchange` | one request: read, choose, prefill, decode, stream, resume |
//! | `service` | paths, request context, responses; the routing sidecar |
//! | `picker` | the endpoint picker: ext_proc streams of gateways, choices without legs |
//! | `admin` | the admin listener, one file per path |
//! | `process` | server, socket takeover, reload, discovery sources, health probes |
//! | `simulate` | entry points for the fleet simulation and for fuzzing |
//!
//! Only this crate imports pingora. It imports neither the engine nor a transport, and it forwards handoffs
//! unopened.

mod admin;
mod admission;
mod auth;
mod client;
pub mod config;
mod engines;
mod envelope;
mod exchange;
mod legs;
mod message;
mod metrics;
mod observe;
mod picker;
mod process;
mod routing;
mod service;
mod simulate;
mod state;
mod tls;

pub use auth::admin::AdminError;
pub use auth::{AuthError, NewKey};
pub use config::{AddressError, ConfigError, NamedFile, RouterConfig, listen_address};
pub use engines::http::TermsError;
pub use observe::observers::ObserverError;
pub use observe::snapshot;
pub use observe::telemetry::TelemetryError;
pub use process::picker_server::Picker;
pub use process::reload::{ConfigFile, ReloadHandle};
pub use process::server::{BindError, Router};
pub use process::sidecar_server::SidecarServer;
pub use process::socket_takeover::InheritedListeners;
pub use service::sidecar::options::{
    AllowedPrefiller, SidecarError, SidecarOptions, SidecarSettings, UNSUPPORTED,
};
#[doc(hidden)]
pub use simulate::{fuzzing, sim_router};
pub use state::generation::GenerationError;
pub use tls::TlsError;
