//! Clients over HTTP/2: with prior knowledge on a plain connection, or chosen in the TLS handshake (ALPN).
//!
//! ```text
//! socket ─▶ frames counted ─▶ h2 ─▶ head (strict, bounded) ─▶ one request per stream
//!              └─ flood ─▶ GOAWAY      └─ refused: one response    └─ RST_STREAM: the client's disconnect
//! ```
//!
//! `h2` reads the frames and bounds their memory. This module bounds their work and their time, checks heads as strictly
//! as the HTTP/1 reader, and gives the service the same requests as over HTTP/1.

mod connection;
mod exchange;
mod head;
mod meter;
mod socket;

pub(crate) use connection::{Http2Connection, Http2End, NewStream};
pub(crate) use exchange::Http2Exchange;

use std::time::Duration;

use crate::config::RouterConfig;

/// Bounds on a connection and its requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Http2Bounds {
    /// Concurrent requests.
    pub streams: u32,
    pub head_bytes: usize,
    pub body_bytes: usize,
    /// Time of a head, from its first byte to its last; also of the client's preface.
    pub within: Duration,
    /// Time without a request.
    pub idle: Duration,
    /// Time in which the client reads nothing of a response.
    pub stall: Duration,
}

impl Http2Bounds {
    pub(crate) fn of(config: &RouterConfig) -> Self {
        let ms = Duration::from_millis;
        Self {
            streams: config.limits.streams,
            head_bytes: config.limits.head_bytes,
            body_bytes: config.limits.body_bytes,
            within: ms(config.timeouts.head_ms),
            idle: ms(config.timeouts.client_idle_ms),
            stall: ms(config.timeouts.client_stall_ms),
        }
    }
}
