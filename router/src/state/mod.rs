//! State that outlives one request: generations of the configuration, and what they share.

pub(crate) mod generation;
pub(crate) mod shared;
