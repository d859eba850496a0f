//! The course of a request: routing, waiting, failures, continuation, time limits.

pub(crate) mod admission;
pub(crate) mod early_handoff;
pub(crate) mod endpoints;
pub(crate) mod failures;
pub(crate) mod liveness;
pub(crate) mod load;
pub(crate) mod long_silence;
pub(crate) mod main_path;
pub(crate) mod messages;
pub(crate) mod policies;
pub(crate) mod responses;
pub(crate) mod restarts;
pub(crate) mod resume;
pub(crate) mod sglang;
pub(crate) mod time;
pub(crate) mod unstreamed;
pub(crate) mod vllm;
