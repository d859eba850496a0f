//! Handoffs between engines: the producer's leases, the consumer's reads, KV ranks, and the choice of a transport.

pub mod consumer;
pub mod kv_rank;
pub mod producer;
pub mod transport;
