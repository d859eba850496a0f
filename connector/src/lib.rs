//! The handoff contract: how one engine lends the KV blocks of a request to another.
//!
//! Everything here decides and nothing acts. A machine is a value with one `apply(event, now)` that
//! returns what its owner must do; sockets, clocks, threads and randomness live in the shells that drive
//! it (the router's proxy, the engine's step loop, a transport). Time comes in as an argument.
//!
//! | module | what it decides |
//! |---|---|
//! | [`lease`] | a producer's promise to keep the blocks of one request |
//! | [`ledger`] | all leases of one producer, their expiry, and the bounded memory of ended ones |
//! | [`fetch`] | a consumer's side of one handoff, from queued to landed |
//! | [`gather`] | the reports of a fetch that reads over several links, made one |
//! | [`mod@slice`] | which bytes of which block go where when ranks or block sizes differ |
//! | [`exchange`] | a router's side of one request: what each engine is still owed |
//! | [`offload`] | one request's blocks on their way down to slower tiers and up again |
//! | [`multi`] | one request and several connectors: who loads, who is asked, who lets go last |
//! | [`handoff`] | the words on the wire (`kv_transfer_params`) and their checks |
//! | [`transport`] | the two traits that every transport implements or calls |
//! | [`region`] | the memory of a paged pool, shared by executor and transport |
//! | [`limits`] | every bound, with the arithmetic that ties it to the others |

pub mod exchange;
pub mod fetch;
pub mod gather;
pub mod handoff;
pub mod id;
pub mod layout;
pub mod lease;
pub mod ledger;
pub mod limits;
pub mod multi;
pub mod offload;
pub mod region;
pub mod slice;
pub mod time;
pub mod transport;

pub use handoff::{Handoff, HandoffError};
pub use id::{BlockId, EngineId, Epoch, Handle, Rank, Reader, RequestId};
pub use layout::KvLayout;
pub use time::Time;
