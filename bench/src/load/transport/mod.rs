//! The client's connection: framing of HTTP, SSE, TLS.

pub(crate) mod connection;
pub(crate) mod framing;
pub(crate) mod sse;
pub(crate) mod tls;
