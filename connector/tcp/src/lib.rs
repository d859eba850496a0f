//! KV blocks over TCP: blocking sockets, one thread per connection on the producer's side, none of its own on
//! the consumer's.
//!
//! ```text
//! consumer                                    producer
//!   Hello{version, nonce, epoch, layout} ──▶    compares nothing yet: strangers learn nothing
//!   ◀── Welcome{nonce, proof of the secret}
//!   Proof of the secret ─────────────────▶      then the epoch (Gone), then the layout (Refused)
//!   ◀── admitted
//!   Read{handle, reader, range} ─────────▶      the ledger grants, or says gone or refused
//!   or Slice{handle, reader, tokens, heads}
//!   ◀── Granted ◀── Batch ◀── Batch …           before every batch: is the lease still live? else Gone
//!   Done{handle, reader} ────────────────▶      the ledger's verdict
//! ```
//!
//! Block bytes go from the producer's pool to the socket and from the socket into the landing blocks; no copy
//! of ours lies between. Control messages use whichever kept connection is free, so a heartbeat or a release
//! never waits behind a read.
//!
//! Invariants:
//! - When [`TcpTransport`]'s `read` returns, nothing writes into the landing blocks any more: bytes only move
//!   inside its own system calls (invariant 3).
//! - The lease is looked at before every batch and after every wait, so no byte of a block leaves later than
//!   one system call (well below a millisecond) after the ledger has closed it; such bytes are refused by the
//!   verdict.
//! - Every wait ends after `silence` without a byte, and every message has a greatest length (invariant 10).
//! - A peer's bytes can end its own connection and nothing else.
//!
//! The secret proves who is there; it does not encrypt. Between machines that do not trust their network, run
//! it inside a tunnel that does.
//!
//! | module | what |
//! |---|---|
//! | `server` | accepts, bounds and ends connections |
//! | `serve` | one connection on the producer's side |
//! | `client` | the consumer's side: [`TcpTransport`] |
//! | `pool` | the consumer's kept connections |
//! | `handshake` | who is there, and are we talking about the same blocks |
//! | `wire` | messages as bytes; pure |
//! | `link` | bounded reads and writes on one socket |
//! | `source` | the bytes of a read, cut into batches; pure |
//! | `scatter` | the two system calls that move blocks |

mod client;
mod handshake;
mod link;
mod pool;
mod scatter;
mod secret;
mod serve;
mod server;
mod source;
mod wire;

pub use client::{ClientOptions, TcpTransport};
pub use link::SEND_BUFFER_BYTES;
pub use secret::{Secret, SecretTooShort};
pub use server::{ServerOptions, ServerStats, TcpServer};
