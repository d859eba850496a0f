//! KV blocks between devices of one host: the consumer's device copies straight from the producer's pool, from device
//! memory to device memory, while no byte passes through the host.
//!
//! What a device is, is behind two traits ([`DevicePool`], [`Opened`]): a GPU exports its pool by CUDA IPC, a software
//! device by a memfd ([`Software`]). Everything else is here, and the same for all of them:
//!
//! ```text
//! consumer                                    producer (the listener of shared memory; Service::Device)
//!   who are you? (SO_PEERCRED)                  who are you? (SO_PEERCRED)
//!   handshake ◀──────────────────────────▶      secret, epoch, layout
//!   ◀── Offer{device, handle, pool}             and a descriptor, where the device has one
//!   opens it, once for all its connections      checked: sizes, and that the device can be reached from ours
//!   Read{handle, reader, range} ─────────▶      the ledger grants: from here on the blocks are held
//!   ◀── Granted ◀── Batch{block ids} …          before every batch: is the lease still live? else Gone
//!   copies on a stream of its own, waits
//!   Copied ──────────────────────────────▶      at most a window of batches ahead of the copying
//!   Done{handle, reader} ────────────────▶      the ledger's verdict: the after-read check
//! ```
//!
//! The socket is that of shared memory (`baton-connector-shm`), because what it says of the other end is what a device's
//! handle needs: the same host, our user, and a secret where there is one. A handle opens all of a pool for whoever has
//! it, as shared memory's descriptor does. A consumer that does not understand an offer, or cannot open it, was not
//! admitted: its blocks travel otherwise.
//!
//! # Why a one-sided copy keeps invariant 3
//! As in shared memory: the lease holds the blocks while a reader is in flight, a reader is in flight until it says so or
//! its connection is closed, and past the drain deadline its verdict is Gone. One thing is different: a process that was
//! killed may have work left on its device for a moment after its connection is closed. That work only reads the
//! producer's blocks, and lands in memory that died with the process; a block that is written meanwhile spoils nothing.
//!
//! A producer that dies leaves its memory mapped here; the mapping goes with the last connection to it, within a sweep. What
//! is copied from it until then has no verdict.
//!
//! | module | what |
//! |---|---|
//! | `api` | a device's pool, as this crate needs it: two traits |
//! | `offer` | what a producer says of its pool, as bytes; pure |
//! | `runs` | the bytes of a batch: from where to where; pure |
//! | `deliver` | the producer's side: [`producer`] |
//! | `land` | the consumer's side: [`DeviceTransport`] |
//! | `software` | pools in host memory: [`Software`] |

mod api;
mod deliver;
mod land;
mod offer;
mod runs;
mod software;

pub use api::{DevicePool, Export, Opened};
pub use baton_connector_channel::{ClientOptions, NotAdmitted, Secret, Serve, ServerOptions, ServerStats};
pub use deliver::producer;
pub use land::{Device, DeviceTransport, transport};
pub use offer::{DeviceId, HANDLE_BYTES, Kind, Offer};
pub use runs::Run;
pub use software::Software;

/// The transport's name in proofs, logs and metrics.
pub const NAME: &str = "device";

/// Bytes of one batch, between two looks at the lease. A GPU copies as many in some 15 µs, about what it takes to
/// launch the copies, to wait for them and to say so; 8k tokens of Llama-3.1-8B, 1 GiB, are 32 batches.
pub const BATCH_BYTES: usize = 32 << 20;
