//! A handoff between real engines in one process: what prefill engine and decode engine say together is, token by
//! token and bit by bit, what one engine says alone, and afterwards every block is home.
//!
//! Each test starts its own engines on free ports of loopback, with the tiny checkpoints of `tests/fixtures`,
//! and speaks HTTP to them as a router does: the prefill leg, then the decode leg with the reply's
//! `kv_transfer_params`.

mod aborts;
mod data_parallel;
mod device;
mod early;
mod equality;
mod exact;
mod harness;
mod leases;
mod observe;
mod pressure;
mod ranks;
mod refusal;
mod stopping;
mod texts;
mod tiers;
mod transports;
mod vanish;
mod ways;
