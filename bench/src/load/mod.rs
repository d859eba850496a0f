//! The load client: calls any OpenAI-compatible endpoint, disconnects at a specified time and in a specified way,
//! and records the time of every event.
//!
//! ```text
//!             Target ─▶ Client::open ─▶ call(PreparedRequest, CancelTrigger, DisconnectKind) ─▶ Call
//!   CompletionSpec ─▶ PreparedRequest ───────▲      │                                            ▲
//!                                                   ▼                                            │
//!                                         connection (FIN, RST, …) ─▶ framing ─▶ sse ─▶ reply ───┘
//! ```
//!
//! The client is written by hand over a socket, because it must disconnect in exact ways at known times. Responses
//! are hostile until checked: heads, events and bodies have limits ([`limits`]), and every call has a deadline.

mod call;
mod client;
mod clock;
pub(crate) mod endpoint_profile;
mod far_host;
mod limits;
pub(crate) mod plan;
mod reply;
mod request;
pub(crate) mod retry;
pub(crate) mod rng;
pub(crate) mod runner;
mod target;
#[cfg(test)]
mod tests;
pub(crate) mod transport;

pub(crate) use call::{Call, CallOutcome};
pub(crate) use client::{CancelTrigger, Client, Connections, DisconnectKind};
pub(crate) use clock::Moment;
pub(crate) use far_host::FarHost;
pub(crate) use limits::Limits;
pub(crate) use request::{CompletionSpec, Endpoint, Prompt, Streaming};
pub(crate) use retry::RetryLimit;
pub(crate) use target::Target;
