//! KV blocks: the pool with the state of each, their chained hashes, digests of cached blocks.

pub mod digests;
pub mod hash;
pub mod pool;
