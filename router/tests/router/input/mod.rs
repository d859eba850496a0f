//! Clients' requests, well-formed or not, and disconnects.

pub(crate) mod bad_input;
pub(crate) mod bounds;
pub(crate) mod client_loss;
pub(crate) mod cors;
pub(crate) mod disconnect;
pub(crate) mod hostile_bodies;
pub(crate) mod http2;
pub(crate) mod http2_raw;
pub(crate) mod http2_tls;
pub(crate) mod http_raw;
pub(crate) mod jwt;
pub(crate) mod keys;
pub(crate) mod markers;
pub(crate) mod pipelining;
pub(crate) mod proxies;
pub(crate) mod shared_limits;
pub(crate) mod tls;
