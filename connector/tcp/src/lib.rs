//! KV blocks over TCP: blocking sockets, one thread per connection on the producer's side, none of its own on
//! the consumer's. Handshake, messages and bounds are those of every transport (`connector/channel`); this crate
//! connects, and moves the bytes of a granted read:
//!
//! ```text
//! consumer                                    producer
//!   Read{handle, reader, range} ─────────▶      the ledger grants, or says gone or refused
//!   or Slice{handle, reader, tokens, heads}
//!   ◀── Granted ◀── Batch ◀── Batch …           before every batch: is the lease still live? else Gone
//!   Done{handle, reader} ────────────────▶      the ledger's verdict
//! ```
//!
//! Block bytes go from the producer's pool to the socket and from the socket into the landing blocks; no copy
//! of ours lies between.
//!
//! Invariants:
//! - When [`TcpTransport`]'s `read` returns, nothing writes into the landing blocks any more: bytes only move
//!   inside its own system calls (invariant 3).
//! - The lease is looked at before every batch and after every wait, so no byte of a block leaves later than
//!   one system call (well below a millisecond) after the ledger has closed it; such bytes are refused by the
//!   verdict.
//!
//! | module | what |
//! |---|---|
//! | `deliver` | the producer's side: [`TcpServer`] |
//! | `source` | the bytes of a read, cut into batches; pure |
//! | `land` | the consumer's side: [`TcpTransport`] |

mod deliver;
mod land;
mod source;

pub use baton_connector_channel::{
    ClientOptions, NotAdmitted, Secret, SecretTooShort, ServerOptions, ServerStats,
};
pub use deliver::TcpServer;
pub use land::{Tcp, TcpTransport};

/// Send buffer of every connection, in bytes; Linux doubles it for its own books. Left to grow by itself, it
/// outgrows the processor's cache and every byte is copied from and to memory. With this one, and with waits
/// in `poll` instead of inside `sendmsg`, one connection over loopback moves 0.5 of what memcpy moves, and
/// with blocking sends 0.3 (measured 2026-11 on 2 cores; 128 KiB to 4 MiB tried). At 100 µs between two
/// machines it still carries 5 GB/s.
pub const SEND_BUFFER_BYTES: usize = 256 * 1024;

/// What both ends set on a connection: no delay of small messages, and a send buffer that fits the cache.
fn tune(socket: &socket2::Socket) -> std::io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    socket.set_send_buffer_size(SEND_BUFFER_BYTES)
}
