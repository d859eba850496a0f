//! The contents of requests and responses: paths, features, rewriting, SSE frames, usage, trace context. Pure,
//! except for random numbers.

pub(crate) mod block_chain;
pub(crate) mod embedded_error;
pub(crate) mod engine_abort;
pub(crate) mod estimate;
pub(crate) mod features;
pub(crate) mod handoff_params;
pub(crate) mod hex;
pub(crate) mod path;
pub(crate) mod payload;
pub(crate) mod prompt_ids;
pub(crate) mod random;
pub(crate) mod request_id;
pub(crate) mod rewrite;
pub(crate) mod sse;
pub(crate) mod trace_context;
pub(crate) mod turn;
pub(crate) mod usage;
