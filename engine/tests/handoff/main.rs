//! A handoff between real engines in one process: what prefill engine and decode engine say together is, token by
//! token and bit by bit, what one engine says alone, and afterwards every block is home.
//!
//! Each test starts its own engines on free ports of loopback, with the tiny checkpoints of `tests/fixtures`,
//! and speaks HTTP to them as a router does: the prefill leg, then the decode leg with the reply's
//! `kv_transfer_params`.

mod aborts;
mod books;
mod cluster;
mod data_parallel;
mod device;
mod digests;
mod early;
mod equality;
mod events;
mod exact;
mod full;
mod http;
mod leases;
mod named;
mod pressure;
mod ranks;
mod refusals;
mod rejections;
mod stale;
mod stopping;
mod texts;
mod tiers;
mod transports;
mod vanish;
mod ways;
mod wide;
mod widened;
