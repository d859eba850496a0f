//! The handoff contract: how one engine lends the KV blocks of a request to another.
//!
//! Everything here decides and nothing acts. A machine is a value with one `apply(event, now)` that
//! returns what its owner must do; sockets, clocks, threads and randomness live in the shells that drive
//! it (the router's proxy, the engine's step loop, a transport). Time comes in as an argument.
//!
//! A module imports its own layer and lower ones. Bottom first:
//!
//! | layer | contents |
//! |---|---|
//! | [`limits`], [`time`], [`id`] | every bound with its arithmetic; time and names as plain values |
//! | [`memory`] | a pool's [`layout`] and [`region`]; [`mod@slice`]: which bytes of which block go where |
//! | [`handoff`] | the format on the wire (`kv_transfer_params`) and its checks |
//! | [`machines`] | [`lease`], [`ledger`]: a producer's promises. [`fetch`], [`gather`]: a consumer's reads |
//! | | [`exchange`]: a router's side of one request. [`offload`], [`multi`]: tiers, several connectors |
//! | [`transport`] | the two traits that every transport implements or calls |

pub mod handoff;
pub mod id;
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
