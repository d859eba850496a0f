//! What requests and responses contain, pure but for minted ids: paths, features, rewriting, SSE frames, usage, trace context.

pub(crate) mod block_chain;
pub(crate) mod error_inside;
pub(crate) mod estimate;
pub(crate) mod features;
pub(crate) mod hex;
pub(crate) mod path;
pub(crate) mod payload;
pub(crate) mod request_id;
pub(crate) mod rewrite;
pub(crate) mod sse;
pub(crate) mod trace_context;
pub(crate) mod usage;
