//! The side channel: what a consumer and a producer say to each other, over any stream socket.
//!
//! A transport is this channel and a way to move the bytes of blocks. The channel knows who is there
//! ([`handshake`]), what is asked and answered ([`wire`]), how long one waits ([`link`]), how many connections
//! there are ([`Server`], [`Client`]), and which connection answers for which read. The transport says how to reach
//! a producer ([`Reach`]) and how granted blocks get to a reader ([`Serve`]).
//!
//! ```text
//! consumer                                    producer
//!   Hello{version, nonce, epoch, layout} ──▶    compares nothing yet: strangers learn nothing
//!   ◀── Welcome{nonce, proof of the secret}
//!   Proof of the secret ─────────────────▶      then the epoch (Gone), then the layout (Refused)
//!   ◀── admitted
//!   Read{handle, reader, range} ─────────▶      the ledger grants, or says gone or refused
//!   or Slice{handle, reader, tokens, heads}
//!   ◀── Granted, and what the transport sends   before every batch: is the lease still live? else Gone; and are its
//!                                               blocks computed? else NotYet, every second until they are
//!   Done{handle, reader} ────────────────▶      the ledger's verdict
//! ```
//!
//! Control messages use whichever kept connection is free, so a heartbeat or a release never waits behind a
//! read.
//!
//! Invariants:
//! - Every wait ends after `silence` without a byte, and every message has a greatest length (invariant 10).
//! - A peer's bytes can end its own connection and nothing else.
//! - A read belongs to the connection that it was granted on: when that ends first, the read has failed.
//!
//! The secret proves who is there; it does not encrypt. Between machines that do not trust their network, run
//! it inside a tunnel that does.
//!
//! | module | what |
//! |---|---|
//! | `server` | accepts, bounds and ends connections |
//! | `serve` | one connection on the producer's side |
//! | `client` | the consumer's side: [`Client`] |
//! | `pool` | the consumer's kept connections |
//! | [`patience`] | how long a read is waited for |
//! | `dial` | a TCP connection within a bound |
//! | [`grants`] | reads in which the consumer takes the blocks itself |
//! | [`handshake`] | who is there, and are we talking about the same blocks |
//! | [`wire`] | messages as bytes; pure |
//! | [`link`] | bounded reads and writes on one socket |
//! | [`scatter`] | the two system calls that move bytes |

mod client;
mod dial;
#[doc(hidden)]
pub mod fuzzing;
pub mod grants;
pub mod handshake;
pub mod link;
pub mod patience;
mod pool;
pub mod scatter;
mod secret;
mod serve;
mod server;
pub mod wire;

pub use client::{Client, ClientOptions, Connection, Reach};
pub use dial::dial;
pub use handshake::{NotAdmitted, Service};
pub use secret::{Secret, SecretTooShort};
pub use serve::{Delivered, Granted, Serve, Source};
pub use server::{Server, ServerOptions, ServerStats};
