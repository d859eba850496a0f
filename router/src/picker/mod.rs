//! The endpoint picker: chooses engines for a gateway that forwards requests itself.
//!
//! ```text
//! client ─▶ gateway (Envoy) ───────────── request ─────────────▶ engine
//!              │    ▲
//!     ext_proc │    │ x-gateway-destination-endpoint: ip:port
//!              ▼    │
//!            service ─▶ stream ─▶ protocol (decides)
//!                          └────▶ request, choice ─▶ admission, routing
//! ```
//!
//! [`protocol`] is the state machine of one stream, and [`messages`] its encoding; both are pure. [`stream`] drives
//! them, [`request`] checks a request, and [`choice`] reserves its engines. [`service`] serves gRPC.

mod choice;
mod messages;
mod protocol;
mod request;
pub(crate) mod service;
mod stream;
