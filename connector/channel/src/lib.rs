//! The side channel: the messages between a consumer and a producer, over any stream socket.
//!
//! A transport consists of this channel and a way to move blocks. The channel authenticates peers ([`handshake`]),
//! encodes messages ([`wire`]), bounds waits ([`socket`]) and connections ([`Server`], [`Client`]), and binds reads to
//! connections. The transport implements the connection to a producer ([`Dial`]) and the delivery of granted blocks
//! ([`Serve`]).
//!
//! ```text
//! consumer                                    producer
//!   Hello{version, nonce, epoch, layout} ──▶    compares nothing yet: an unknown peer learns nothing
//!   ◀── Welcome{nonce, proof of the secret}
//!   Proof of the secret ─────────────────▶      then the epoch (Gone), then the layout (Refused)
//!   ◀── admitted
//!   Read{handle, reader, range} ─────────▶      the ledger grants, or returns gone or refused
//!   or Slice{handle, reader, tokens, heads}
//!   ◀── Granted, and the transport's frames     before every batch: is the lease still live? else Gone; and are its
//!                                               blocks computed? else NotYet, every second until they are
//!   Done{handle, reader} ────────────────▶      the ledger's verdict
//! ```
//!
//! Control messages use any idle connection. So a heartbeat or a release never waits behind a read.
//!
//! Invariants:
//! - Every wait ends after `silence` without a byte, and every message has a maximum length (invariant 10).
//! - A peer's bytes can end its own connection and nothing else.
//! - A read belongs to the connection that granted it. If that connection ends first, the read has failed.
//!
//! The secret authenticates both ends; the channel does not encrypt. On an untrusted network, run the channel inside an
//! encrypted tunnel.
//!
//! | module | contents |
//! |---|---|
//! | `server` | accepts, bounds and ends connections |
//! | `serve` | one connection on the producer's side |
//! | `client` | the consumer's side: [`Client`] |
//! | `pool` | the consumer's idle connections |
//! | [`timeouts`] | the time limits of a read |
//! | `dial` | a TCP connection within a bound |
//! | [`batching`], [`copy_runs`] | one-sided reads: the consumer copies the blocks itself |
//! | [`handshake`] | authentication, epoch and layout check |
//! | [`wire`] | messages as bytes; pure |
//! | [`socket`] | bounded reads and writes on one socket |
//! | [`scatter`] | the two system calls that move bytes |

pub mod batching;
mod client;
mod connection;
pub mod copy_runs;
mod dial;
#[doc(hidden)]
pub mod fuzzing;
pub mod handshake;
mod pool;
pub mod scatter;
mod secret;
mod serve;
mod server;
pub mod socket;
pub mod timeouts;
pub mod wire;

pub use client::{Client, ClientOptions, Dial};
pub use connection::Connection;
pub use dial::dial;
pub use handshake::{ConnectError, Service};
pub use secret::{Secret, SecretTooShort};
pub use serve::{BlockSource, Delivery, GrantedRead, Serve};
pub use server::{Server, ServerOptions, ServerStats};
