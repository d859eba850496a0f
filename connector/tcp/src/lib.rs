//! KV blocks over TCP, with blocking sockets. The producer's side has one thread per connection, the consumer's side
//! uses the caller's thread. Handshake, messages and bounds are those of every transport (`connector/channel`). This
//! crate connects, and transfers the bytes of a granted read:
//!
//! ```text
//! consumer                                    producer
//!   Read{handle, reader, range} ─────────▶      the ledger grants, or returns gone or refused
//!   or Slice{handle, reader, tokens, heads}
//!   ◀── Granted ◀── Batch ◀── Batch …           before every batch: is the lease still live? else Gone
//!   Done{handle, reader} ────────────────▶      the ledger's verdict
//! ```
//!
//! Block bytes go from the producer's pool to the socket and from the socket into the landing blocks, without a copy in
//! between.
//!
//! Invariants:
//! - After the return of [`TcpTransport`]'s `read`, nothing writes into the landing blocks: bytes are written only
//!   inside its own system calls (invariant 3).
//! - The lease is checked before every batch and after every wait. So no byte of a block is sent later than one system
//!   call (well below a millisecond) after the end of the lease. The verdict refuses such bytes.
//!
//! | module | contents |
//! |---|---|
//! | `service` | the producer's side: [`TcpServer`] |
//! | `source` | the bytes of a read, divided into batches; pure |
//! | `dialer` | the consumer's side: [`TcpTransport`] |

mod dialer;
mod service;
mod source;

pub use baton_connector_channel::{
    ClientOptions, ConnectError, Secret, SecretTooShort, ServerOptions, ServerStats,
};
pub use dialer::{TcpDialer, TcpTransport};
pub use service::TcpServer;

/// Send buffer of every connection, in bytes; Linux doubles it. An automatic buffer outgrows the processor's cache, and
/// then every byte is copied from and to memory. With this size, and with waits in `poll` instead of inside `sendmsg`,
/// one connection over loopback is faster than with blocking sends. At 100 µs between two machines it still permits 5
/// GB/s.
pub const SEND_BUFFER_BYTES: usize = 256 * 1024;

/// Sets the socket options of both ends: no delay of small messages, and a send buffer that fits the cache.
fn tune(socket: &socket2::Socket) -> std::io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    socket.set_send_buffer_size(SEND_BUFFER_BYTES)
}
