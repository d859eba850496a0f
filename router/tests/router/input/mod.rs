//! What a client sends, well-formed or not, and how it disconnects.

pub(crate) mod bad_input;
pub(crate) mod bounds;
pub(crate) mod disconnect;
pub(crate) mod hostile;
pub(crate) mod http_raw;
pub(crate) mod keys;
pub(crate) mod markers;
pub(crate) mod pipelining;
pub(crate) mod proxies;
pub(crate) mod tls;
pub(crate) mod vanish;
