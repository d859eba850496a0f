//! KV blocks between devices of one host: the consumer's device copies directly from the producer's pool, from device
//! memory to device memory. No byte passes through the host.
//!
//! Two traits abstract the device ([`DevicePool`], [`ImportedPool`]). A GPU exports its pool with CUDA IPC, a software
//! device with a memfd ([`SoftwarePool`]). This crate contains the rest, which is the same for all devices:
//!
//! ```text
//! consumer                                    producer (the listener of shared memory; Service::Device)
//!   checks the peer (SO_PEERCRED)               checks the peer (SO_PEERCRED)
//!   handshake ◀──────────────────────────▶      secret, epoch, layout
//!   ◀── Offer{device, handle, pool}             and a descriptor, if the device has one
//!   opens it, once for all its connections      checked: sizes, and that this device can read that one
//!   Read{handle, reader, range} ─────────▶      the ledger grants: from here on the blocks are held
//!   ◀── Granted ◀── Batch{block ids} …          before every batch: is the lease still live? else Gone
//!   copies on a stream of its own, waits
//!   Copied ──────────────────────────────▶      at most a window of batches ahead of the copying
//!   Done{handle, reader} ────────────────▶      the ledger's verdict: the after-read check
//! ```
//!
//! The socket is that of shared memory (`baton-connector-shm`). It checks of the other end what a device's handle
//! needs: the same host, the same user, and a secret if there is one. A handle permits opening all of a pool, as
//! the descriptor of shared memory does. A consumer that cannot decode or open an offer uses another transport.
//!
//! # Why a one-sided copy keeps invariant 3
//! As in shared memory, the lease holds the blocks while a reader is in flight. A reader is in flight until it reports
//! its end or its connection is closed. Past the drain deadline its verdict is Gone. One difference: a killed process
//! may have work left on its device shortly after its connection is closed. That work only reads the producer's blocks
//! and writes into memory of the dead process. So a block that is written meanwhile does no harm.
//!
//! The memory of a dead producer stays mapped until its last connection is closed, by the next sweep. A copy from it
//! gets no verdict.
//!
//! | module | contents |
//! |---|---|
//! | `api` | the interface to a device's pool: two traits |
//! | `offer` | a producer's offer of its pool, as bytes; pure |
//! | `runs` | the copies of a batch; pure |
//! | `service` | the producer's side: [`producer`] |
//! | `dialer` | the consumer's side: [`DeviceTransport`] |
//! | `software` | pools in host memory: [`SoftwarePool`] |

mod api;
mod dialer;
mod offer;
mod runs;
mod service;
mod software;

pub use api::{DevicePool, ImportedPool, PoolExport};
pub use baton_connector_channel::copy_runs::CopyRun;
pub use baton_connector_channel::{ClientOptions, ConnectError, Secret, Serve, ServerOptions, ServerStats};
pub use dialer::{DeviceDialer, DeviceTransport, transport};
pub use offer::{DeviceId, DeviceKind, HANDLE_BYTES, Offer};
pub use service::producer;
pub use software::SoftwarePool;

/// The transport's name in proofs, logs and metrics.
pub const NAME: &str = "device";

/// Bytes of one batch, between two checks of the lease. A GPU copies a batch in about 15 µs. To launch the copies, wait
/// for them and report takes about as long. 8k tokens of Llama-3.1-8B, 1 GiB, are 32 batches.
pub const BATCH_BYTES: usize = 32 << 20;
