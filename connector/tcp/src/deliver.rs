//! The producer's side: block bytes from the pool to the socket, in batches, while the lease is live.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use baton_connector::transport::Producer;
use baton_connector_channel::link::{Link, LinkError};
use baton_connector_channel::scatter::Spans;
use baton_connector_channel::wire::{Header, KIND_BATCH, Reply};
use baton_connector_channel::{Delivered, Granted, Serve, Server, ServerOptions, ServerStats};
use socket2::Socket;

use crate::source::{Batch, batches, gather, parts};
use crate::tune;

/// Serves the blocks of one producer until it is shut down or dropped.
pub struct TcpServer {
    address: SocketAddr,
    server: Server,
}

impl TcpServer {
    /// Starts to serve on a bound listener.
    ///
    /// # Errors
    /// `InvalidInput` when the listener is reachable from beyond loopback and there is no secret; otherwise
    /// the system's.
    pub fn start(
        listener: TcpListener,
        producer: Arc<dyn Producer>,
        options: ServerOptions,
    ) -> io::Result<Self> {
        Self::start_beside(listener, producer, Vec::new(), options)
    }

    /// As [`Self::start`], and serves consumers of other transports on the same listener: each asks for its
    /// [`Serve::service`].
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_beside(
        listener: TcpListener,
        producer: Arc<dyn Producer>,
        others: Vec<Arc<dyn Serve>>,
        options: ServerOptions,
    ) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let mut services: Vec<Arc<dyn Serve>> = vec![Arc::new(Batches)];
        services.extend(others);
        let server = Server::start(listener.into(), producer, services, options)?;
        Ok(Self { address, server })
    }

    /// Where it listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> ServerStats {
        self.server.stats()
    }

    /// Stops to listen, closes every connection and waits for its thread. Reads in flight have then failed.
    pub fn shutdown(self) {
        self.server.shutdown();
    }
}

/// Granted, and the blocks in batches.
struct Batches;

impl Serve for Batches {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn meet(&self, socket: &Socket) -> io::Result<()> {
        tune(socket)
    }

    fn deliver(&self, link: &mut Link, granted: &Granted<'_>) -> Result<Delivered, LinkError> {
        let until = granted.until();
        let live = || granted.live();
        let complete = Reply::Complete.encode();
        let mut batches = batches(parts(granted)).peekable();
        // Frames that go out with the next batch, in front of it.
        let mut front = granted.announcement();
        while let Some(Batch { parts, bytes }) = batches.next() {
            if !granted.await_ready(link, &mut front, parts.end)? {
                link.send(&front, until)?;
                return break_off(link, granted, 0);
            }
            front.extend(Header { kind: KIND_BATCH, len: bytes }.encode());
            let end: &[u8] = if batches.peek().is_some() { &[] } else { &complete };
            let mut spans = Spans::with_capacity(parts.len() + 2);
            spans.push_bytes(&front);
            gather(granted, parts, &mut spans);
            spans.push_bytes(end);
            match link.send_spans(&mut spans, until, live) {
                Ok(()) => {}
                // Every block has left the pool while the lease was live; only the end is still to be said.
                Err(LinkError::LeaseEnded) if spans.left() <= end.len() => {
                    link.send(&end[end.len() - spans.left()..], until)?;
                }
                Err(LinkError::LeaseEnded) => {
                    let owed = spans.left() - end.len();
                    let unsaid = owed.saturating_sub(bytes);
                    link.send(&front[front.len() - unsaid..], until)?;
                    return break_off(link, granted, owed - unsaid);
                }
                Err(error) => return Err(error),
            }
            granted.count(bytes);
            front.clear();
        }
        Ok(Delivered::Whole)
    }
}

/// Ends a read whose lease has ended: fills up the batch with zeros, so that the connection stays in step, and
/// says that it is gone.
fn break_off(link: &mut Link, granted: &Granted<'_>, owed: usize) -> Result<Delivered, LinkError> {
    static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];
    let mut left = owed;
    while left > 0 {
        let part = left.min(ZEROS.len());
        link.send(&ZEROS[..part], granted.until())?;
        left -= part;
    }
    link.send(&Reply::Gone.encode(), granted.until())?;
    Ok(Delivered::LeaseEnded)
}
