//! The engine: a model, its paged KV cache, a scheduler, and an OpenAI server in front of them.

pub mod executor;
pub mod model;
pub mod parity;
