//! KV blocks between engines of one host: the consumer copies straight from the producer's pool.
//!
//! The pool is a memfd ([`SharedMemory`]). A consumer that has introduced itself over a UNIX socket gets a
//! descriptor of it that can only be read, maps it once, and from then on each block is copied exactly once,
//! from there into the landing block, by the consumer's own thread. What may be copied, and whether the copy may
//! be used, is the lease's to say, as on every transport:
//!
//! ```text
//! consumer                                    producer (UNIX socket, abstract name: epoch and port)
//!   who are you? (SO_PEERCRED)                  who are you? (SO_PEERCRED)
//!   handshake, as on TCP ◀──────────────▶       secret, epoch, layout
//!   ◀── Pool{bytes, blocks} + descriptor        read-only, sealed
//!   Read{handle, reader, range} ─────────▶      the ledger grants: from here on the blocks are held
//!   ◀── Granted ◀── Batch{block ids} …          before every batch: is the lease still live? else Gone
//!   copies ── Copied ────────────────────▶      at most a window of batches ahead of the copying
//!   Done{handle, reader} ────────────────▶      the ledger's verdict: the after-read check
//! ```
//!
//! # Why a one-sided copy keeps invariant 3
//! The producer cannot stop a copy that is under way, so three things together replace that. While a reader is
//! in flight its lease is Reading or Draining, and the blocks stay where they are. A reader is in flight until it
//! says done or failed, or until its **connection is closed**, which a process does not do while a thread of it
//! still copies (a dead process copies nothing); silence is not the end of a reader here, because a stopped
//! process is silent and copies on when it is continued. And past the drain deadline, when the blocks are taken
//! back all the same, the reader's verdict is Gone: what it copies from then on is never used.
//!
//! # Who may map the pool
//! Whoever holds the descriptor can read all of the pool at any time, not only what it was lent, so the door is
//! narrower than TCP's. The kernel names the process at the other end; it must be of our user, or root. Where
//! there is a secret, both prove it, with proofs that are of no use on TCP and the other way round. Where there is
//! none, the process must also be visible in our PID namespace and our user must not be the overflow user: in
//! containers that share a network, and with it abstract names, an equal number means nothing. Nobody gets more
//! than reading: see [`SharedMemory`]. A producer is looked at in the same way before a byte of it is believed.
//!
//! | module | what |
//! |---|---|
//! | `memory` | a pool's memory in a memfd: [`SharedMemory`] |
//! | `mapping` | somebody else's pool, read-only |
//! | `place` | the socket's name, and whom the kernel says is there |
//! | `pass` | a descriptor over a socket |
//! | `pool` | a pool's shape, as it travels; pure |
//! | `deliver` | the producer's side: [`ShmServer`] |
//! | `land` | the consumer's side: [`ShmTransport`] |
//!
//! The listener may serve other transports of one host beside this one ([`ShmServer::start_beside`]); they use the same
//! socket ([`connect`], [`meet`], [`pass`]) and may map memory in the same way ([`Mapping`]).

mod deliver;
mod land;
mod mapping;
mod memory;
pub mod pass;
mod place;
mod pool;

pub use baton_connector_channel::{ClientOptions, Secret, ServerOptions, ServerStats};
pub use deliver::ShmServer;
pub use land::{Shm, ShmTransport, connect};
pub use mapping::{Mapping, Passed};
pub use memory::{SharedMemory, shared_pool};
pub use place::{Stranger, listen, meet};
pub use pool::Pool;
