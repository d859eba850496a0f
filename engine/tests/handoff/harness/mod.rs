//! What the tests use: engines in this process, a plain HTTP client, checkpoints made on the spot.

pub(crate) mod cluster;
pub(crate) mod http;
pub(crate) mod wide;
pub(crate) mod widened;
