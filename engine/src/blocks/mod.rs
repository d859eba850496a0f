//! KV blocks: their pool and states, their chained hashes, and digests of cached blocks.

pub mod digests;
pub mod hash;
pub mod pool;
