//! KV blocks by NIXL: the consumer's agent reads the producer's pool, over whatever NIXL's UCX backend finds between
//! the two (InfiniBand and RoCE, `process_vm_readv` within a host). The library is looked for at run time; nothing of
//! it is needed to build.
//!
//! ```text
//! consumer                                    producer (the TCP side channel's listener; Service::Nixl)
//!   handshake ◀──────────────────────────▶      secret, epoch, layout
//!   ◀── Offer{pool, agent's name, metadata}     checked: bounds, and that the metadata is that agent's
//!   Read{handle, reader, range} ─────────▶      the ledger grants: from here on the blocks are held
//!   ◀── Granted ◀── Batch{block ids} …          before every batch: is the lease still live? else Gone
//!   NIXL read of the batch, to its end
//!   Copied ──────────────────────────────▶      at most a window of batches ahead of the reading
//!   Done{handle, reader} ────────────────▶      the ledger's verdict: the after-read check
//! ```
//!
//! NIXL promises little, and this crate believes less. Each line is a property of NIXL 1.5.1 that was measured
//! (2026-11, two processes, no GPU), and what stands against it here:
//!
//! | NIXL | here |
//! |---|---|
//! | memory that was freed or given to somebody else reads as success | the lease holds the blocks; its verdict after the read says whether it did |
//! | a released request goes on writing (67 of 67 MB came after the release) | the only proofs of quiet are *done*, and that **our agent is gone** ([`Agent`]): see below |
//! | a post that fails says nothing of its parts that were under way | the same |
//! | a stopped process or a cut network is never noticed | every request has our deadline |
//! | a peer that was lost stays lost until it is removed and added | a failure ends the agent that saw it; the next has no memory of it |
//! | a post may block for as long as the copy takes | requests of at most [`BATCH_BYTES`] and [`DESCRIPTORS_MAX`] |
//! | a read beyond the peer's memory is noticed by the reader alone, from the peer's own words | block ids are checked against the pool's size, and the pool's size against the address space, before a descriptor is made |
//! | memory that is unmapped while it is registered ends a process | an agent holds the pools that it knows, and ends before them |
//! | a notification is lost, late or unordered, and is sent by the reader's next poll | none is used: the side channel says everything |
//! | a progress thread spins by default | ours sleeps (10 ms at the most between two looks), and only producers have one |
//! | over UCX's TCP, a producer that answers a reader who has left is **aborted by UCX** | UCX's TCP is not used unless `UCX_TLS` says so: our own is faster and has no such end |
//! | UCX's keepalive reads a null pointer in a producer that was stopped while a reader met it, and goes on when that reader has gone | there is no keepalive; see `capi` |
//!
//! # Quarantine
//! A request that fails, or that is not over within the silence bound, leaves its landing blocks unsafe: bytes may
//! still come. Its `read` does not return, so nobody else gets the blocks, until the agent is gone: the agent is
//! *retired*, later reads get a new one, reads in flight on the old one finish, and the last of them ends it.
//!
//! # Pools on a device
//! A pool in a GPU's memory is registered as such ([`device_producer`]), and a consumer whose pool is on a GPU too reads
//! from one to the other ([`NixlDeviceTransport`]): nothing passes through the host. It is a service of its own beside that
//! of the pool's host side, so that a pair of which one end is in host memory meets there; UCX would have the producer's
//! processor send such bytes, which is what its TCP does and is not trusted here. The contract is the same: the offer says
//! the kind of memory, and a consumer with another kind is not admitted.
//!
//! | module | what |
//! |---|---|
//! | [`api`] | NIXL as this crate needs it: two traits |
//! | `capi` | the library's C interface, behind them |
//! | [`find`] | where the library is looked for |
//! | `offer` | what a producer says of its pool, as bytes; pure |
//! | `pieces` | the bytes of a batch, as descriptors; pure |
//! | `pool` | our own pools, in host memory or on a device ([`DevicePool`]) |
//! | `agents` | the consumer's agent, its peers, and its retirement |
//! | `deliver` | the producer's side |
//! | `land` | the consumer's side: [`NixlTransport`] |

mod agents;
pub mod api;
mod capi;
mod deliver;
pub mod find;
mod land;
mod offer;
mod pieces;
mod pool;

// The tests' simulated library names this crate as everybody else does.
#[cfg(test)]
extern crate self as baton_connector_nixl;
#[cfg(test)]
#[path = "../tests/simulated/mod.rs"]
mod simulated;

pub use api::{Agent, Library, NixlError};
pub use baton_connector_channel::{ClientOptions, Secret, ServerOptions};
pub use deliver::{device_producer, producer};
pub use land::{Nixl, NixlDevice, NixlDeviceTransport, NixlTransport, device_transport, transport};
pub use pool::DevicePool;

use baton_connector_channel::grants::Grants;

/// The transport's name in proofs, logs and metrics.
pub const NAME: &str = "nixl";

/// The same from device to device.
pub const DEVICE_NAME: &str = "nixl-device";

/// Bytes of one batch, between two looks at the lease, and of one request unless a block is larger.
pub const BATCH_BYTES: usize = 2 << 20;

/// Bytes of one batch from device to device, and of one request unless it has too many descriptors. Posts do not block
/// there, and a GPU copies as many in some 15 µs, about what one request costs.
pub const DEVICE_BATCH_BYTES: usize = 32 << 20;

/// Descriptors of one request. NIXL bounds them nowhere; the time of one post grows with them, and nothing ends it: 0.7 s
/// for a million (measured 2026-11-21).
pub const DESCRIPTORS_MAX: usize = 1_024;

const GRANTS: Grants = Grants { batch_bytes: BATCH_BYTES };
