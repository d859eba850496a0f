//! State that outlives one request: generations of the configuration, and what they share.

pub(crate) mod generation;
mod installer;
pub(crate) mod readiness;
pub(crate) mod reloads;
pub(crate) mod shared;
