//! A handoff between real engines in one process. The joint answer of prefill and decode engine equals the answer of
//! one engine, token by token and bit by bit. Afterwards every block is free.
//!
//! Each test starts its own engines on free loopback ports, with the tiny checkpoints of `tests/fixtures`. It sends
//! HTTP requests as a router does: the prefill leg, then the decode leg with the reply's `kv_transfer_params`.

mod aborts;
mod data_parallel;
mod device;
mod early;
mod equality;
mod exact;
mod harness;
mod leases;
mod observe;
mod paths;
mod pressure;
mod ranks;
mod refusal;
mod requests;
mod standalone;
mod structured;
mod tiers;
mod transports;
mod vanish;
