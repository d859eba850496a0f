//! KV blocks between engines of one host: the consumer copies directly from the producer's pool.
//!
//! The pool is a memfd ([`SharedMemory`]). A consumer gets a read-only descriptor of it over a UNIX socket and maps it
//! once. Then the consumer's own thread copies each block exactly once, from the mapping into the landing block. As on
//! every transport, the lease decides which blocks may be copied and whether the copy is valid:
//!
//! ```text
//! consumer                                    producer (UNIX socket, abstract name: epoch and port)
//!   checks the peer (SO_PEERCRED)               checks the peer (SO_PEERCRED)
//!   handshake, as on TCP ◀──────────────▶       secret, epoch, layout
//!   ◀── Pool{bytes, blocks} + descriptor        read-only, sealed
//!   Read{handle, reader, range} ─────────▶      the ledger grants: from here on the blocks are held
//!   ◀── Granted ◀── Batch{block ids} …          before every batch: is the lease still live? else Gone
//!   copies ── Copied ────────────────────▶      at most a window of batches ahead of the copying
//!   Done{handle, reader} ────────────────▶      the ledger's verdict: the after-read check
//! ```
//!
//! # Why a one-sided copy keeps invariant 3
//! The producer cannot stop a copy in progress. Three rules replace that:
//!
//! - While a reader is in flight, its lease is Reading or Draining, and its blocks are not freed.
//! - A reader is in flight until it reports done or failed, or until its **connection is closed**. A process does not
//!   close the connection while one of its threads copies, and a dead process copies nothing. Silence does not end a
//!   reader, because a stopped process is silent and continues to copy later.
//! - Past the drain deadline, when the blocks are freed anyway, the reader's verdict is Gone. What it copies then is
//!   never used.
//!
//! # Processes that may map the pool
//! A process with the descriptor can read all of the pool at any time, not only leased blocks. So the checks are
//! stricter than for TCP. The kernel identifies the process at the other end, which must run as the same user or as
//! root. With a secret, both ends prove it; these proofs are not valid on TCP, nor the reverse. Without a secret, the
//! process must also be visible in this PID namespace, and the user must not be the overflow user. Containers that
//! share a network also share abstract names, and an equal user number proves nothing there. The descriptor only
//! permits reading: see [`SharedMemory`]. A consumer checks a producer in the same way before it uses any of its data.
//!
//! | module | contents |
//! |---|---|
//! | `memory` | a pool's memory in a memfd: [`SharedMemory`] |
//! | `mapping` | a read-only mapping of another process's pool |
//! | `peer` | the socket's name, and the check of the peer's credentials |
//! | [`descriptor`] | a descriptor over a socket |
//! | `pool` | a pool's shape, as bytes; pure |
//! | `service` | the producer's side: [`ShmServer`] |
//! | `dialer` | the consumer's side: [`ShmTransport`] |
//!
//! The listener may also serve other transports of one host ([`ShmServer::start_with_services`]). They use the same
//! socket ([`connect`], [`check_peer`], [`descriptor`]) and may map memory in the same way ([`PoolMapping`]).

pub mod descriptor;
mod dialer;
mod mapping;
mod memory;
mod peer;
mod pool;
mod service;

pub use baton_connector_channel::{ClientOptions, Secret, ServerOptions, ServerStats};
pub use dialer::{ShmDialer, ShmTransport, connect};
pub use mapping::{PoolDescriptor, PoolMapping};
pub use memory::{SharedMemory, shared_pool};
pub use peer::{PeerError, PeerProof, check_peer, listen};
pub use pool::PoolShape;
pub use service::ShmServer;
