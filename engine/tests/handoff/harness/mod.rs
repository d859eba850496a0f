//! The harness of the tests: engines in this process, a minimal HTTP client, generated checkpoints.

pub(crate) mod cluster;
pub(crate) mod http;
pub(crate) mod quantized;
pub(crate) mod unpacked;
pub(crate) mod wide;
pub(crate) mod widened;
