//! The load client: calls to any OpenAI-compatible endpoint, with the time of everything that happens, by clients that
//! leave when and how they are told to.
//!
//! ```text
//!            Target ─▶ Client::open ─▶ call(Ask, Leave, Manner) ─▶ Call
//!   Wish ─▶ Ask ──────────────────────▲      │                      ▲
//!                                            ▼                      │
//!                        connection (FIN, RST, …) ─▶ framing ─▶ sse ─▶ reply ┘
//! ```
//!
//! Written by hand over a socket, because it has to leave in exact ways and must say when it did. What comes back is
//! hostile until checked: heads, events and answers have bounds ([`limits`]), and every call has a deadline.

mod ask;
mod call;
mod client;
mod clock;
mod far;
mod limits;
pub(crate) mod plan;
mod reply;
pub(crate) mod retry;
pub(crate) mod rng;
pub(crate) mod runner;
pub(crate) mod speaker;
mod target;
#[cfg(test)]
mod tests;
pub(crate) mod wire;

pub(crate) use ask::{Endpoint, Prompt, Streaming, Wish};
pub(crate) use call::{Call, Outcome};
pub(crate) use client::{Client, Connections, Leave, Manner};
pub(crate) use clock::Moment;
pub(crate) use far::FarHost;
pub(crate) use limits::Limits;
pub(crate) use retry::Retries;
pub(crate) use target::Target;
