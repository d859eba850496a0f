//! The engine: a model, its paged KV cache, a scheduler, and an OpenAI server in front of them.

pub mod block_hash;
pub mod block_pool;
pub mod executor;
pub mod model;
pub mod scheduler;
pub mod sequence;
