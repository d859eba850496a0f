//! KV blocks over NIXL: the consumer's agent reads the producer's pool. NIXL's UCX backend chooses the path (InfiniBand
//! and RoCE, `process_vm_readv` within a host). The library is searched for at run time and is not needed to build.
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
//! NIXL guarantees little. Each row is an observed property of NIXL 1.5.1 (two processes, no GPU), and the measure of
//! this crate against it:
//!
//! | NIXL | this crate |
//! |---|---|
//! | a read of memory that was freed or reused succeeds | the lease holds the blocks; the verdict after the read confirms it |
//! | a released request continues to write | a request is over only if it is *done*, or if **this side's agent is gone** ([`Agent`]): see below |
//! | a failed post does not report its parts in flight | the same |
//! | a stopped process or a cut network is never noticed | every request has a deadline of this crate |
//! | a lost peer stays lost until it is removed and added | a failure ends its agent; the next agent has no state of it |
//! | a post may block for as long as the copy takes | requests of at most [`BATCH_BYTES`] and [`DESCRIPTORS_MAX`] |
//! | only the reader checks for a read beyond the peer's memory, with the peer's metadata | block ids are checked against the pool's size, and the pool's size against the address space, before a descriptor is made |
//! | unmapping registered memory ends the process | an agent holds its pools, and ends before them |
//! | a notification can be lost, late or unordered, and the reader's next poll sends it | notifications are not used; the side channel has all messages |
//! | a progress thread spins by default | the thread sleeps (at most 10 ms between two polls), and only producers have one |
//! | over UCX's TCP, UCX **aborts** a producer that answers a reader that has ended | UCX's TCP is used only if `UCX_TLS` sets it; Baton's TCP transport is faster and has no such abort |
//! | UCX's keepalive reads a null pointer in a producer that is stopped while a reader connects, and continues after that reader has ended | keepalive is off; see `capi` |
//!
//! # Quarantine
//! A request that fails, or that is not over within the bound on silence, may still write into its landing blocks. Its
//! `read` therefore does not return, and the blocks are not reused, until the agent is gone. The agent is *retired*:
//! later reads get a new one, reads in flight finish, and the last of them ends the old one.
//!
//! # Pools on a device
//! A pool in GPU memory is registered as such ([`device_producer`]). A consumer whose pool is on a GPU too reads from
//! GPU to GPU ([`NixlDeviceTransport`]), and nothing passes through the host. This is a service of its own next to that
//! of the pool's host side. A pair with one end in host memory uses the host side. Otherwise UCX would let the
//! producer's processor send the bytes, as its TCP does, which is not safe here. The contract is the same. The offer
//! contains the kind of memory, and a consumer with another kind is not admitted.
//!
//! | module | contents |
//! |---|---|
//! | [`api`] | the interface to NIXL: two traits |
//! | `capi` | their implementation with the library's C interface |
//! | [`find`] | the search for the library |
//! | `offer` | a producer's offer of its pool, as bytes; pure |
//! | `descriptors` | the bytes of a batch, as descriptors; pure |
//! | `pool` | the pools of this process, in host memory or on a device ([`DevicePool`]) |
//! | `agents` | the consumer's agent, its peers, and its retirement |
//! | `service` | the producer's side |
//! | `dialer` | the consumer's side: [`NixlTransport`] |

mod agents;
pub mod api;
mod capi;
mod descriptors;
mod dialer;
pub mod find;
mod offer;
mod pool;
mod service;

// The simulated library of the tests uses this crate by its public name.
#[cfg(test)]
extern crate self as baton_connector_nixl;
#[cfg(test)]
#[path = "../tests/simulated/mod.rs"]
mod simulated;

pub use api::{Agent, Library, NixlError};
pub use baton_connector_channel::{ClientOptions, Secret, ServerOptions};
pub use dialer::{
    NixlDeviceDialer, NixlDeviceTransport, NixlDialer, NixlTransport, device_transport, transport,
};
pub use pool::DevicePool;
pub use service::{device_producer, producer};

use baton_connector_channel::batching::ReadBatching;

/// The transport's name in proofs, logs and metrics.
pub const NAME: &str = "nixl";

/// The name of the transport from device to device.
pub const DEVICE_NAME: &str = "nixl-device";

/// Bytes of one batch, between two checks of the lease, and of one request unless a block is larger.
pub const BATCH_BYTES: usize = 2 << 20;

/// Bytes of one batch from device to device, and of one request unless it has too many descriptors. Posts do not block
/// there. A GPU copies a batch in about 15 µs, which is about the cost of one request.
pub const DEVICE_BATCH_BYTES: usize = 32 << 20;

/// Descriptors of one request. NIXL does not bound them, but the time of one post grows with their number and cannot be
/// limited: 0.7 s for a million.
pub const DESCRIPTORS_MAX: usize = 1_024;

const BATCHING: ReadBatching = ReadBatching { batch_bytes: BATCH_BYTES };
