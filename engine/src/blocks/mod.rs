//! KV blocks: their pool and states, their chained hashes, digests of cached blocks, and changes of the caches.

pub mod adapter;
pub mod cache_events;
pub mod digests;
pub mod hash;
pub mod pool;
