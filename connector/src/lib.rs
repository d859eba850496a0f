//! The handoff contract: how one engine leases the KV blocks of a request to another.
//!
//! This crate decides and does no I/O. A machine is a value with one `apply(event, now)`, which returns the actions for
//! its owner. Sockets, clocks, threads and randomness belong to the owners: the router's proxy, the engine's step loop,
//! a transport. Time is an argument.
//!
//! A module imports its own layer and lower ones. Bottom first:
//!
//! | layer | contents |
//! |---|---|
//! | [`limits`], [`time`], [`id`], [`labelled!`] | every bound with its arithmetic; time, ids and labels as plain values |
//! | [`memory`] | a pool's [`layout`] and [`region`]; [`mod@slice`]: which bytes of which block go where |
//! | [`handoff`] | the format on the wire (`kv_transfer_params`) and its checks |
//! | [`machines`] | [`lease`], [`ledger`]: a producer's leases. [`fetch`], [`gather`]: a consumer's reads |
//! | | [`exchange`]: a router's side of one request. [`offload`], [`multi`]: tiers, several connectors |
//! | [`transport`] | the two traits that every transport implements or calls |

pub mod handoff;
pub mod id;
mod labels;
pub mod limits;
pub mod machines;
pub mod memory;
pub mod time;
pub mod transport;

pub use machines::{exchange, fetch, gather, lease, ledger, multi, offload};
pub use memory::{layout, region, slice};

pub use handoff::{Handoff, HandoffError};
pub use id::{BlockId, EngineId, Epoch, Handle, Rank, Reader, RequestId};
pub use memory::layout::KvLayout;
pub use time::Time;
