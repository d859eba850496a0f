//! The producer's side: block bytes from the pool to the socket, in batches, while the lease is live.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use baton_connector::transport::Producer;
use baton_connector_channel::scatter::Spans;
use baton_connector_channel::socket::{ChannelError, ChannelSocket};
use baton_connector_channel::wire::{Header, KIND_BATCH, Reply};
use baton_connector_channel::{Delivery, GrantedRead, Serve, Server, ServerOptions, ServerStats};
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
    /// `InvalidInput` if the listener is reachable from beyond loopback without a secret; otherwise a system error.
    pub fn start(
        listener: TcpListener,
        producer: Arc<dyn Producer>,
        options: ServerOptions,
    ) -> io::Result<Self> {
        Self::start_with_services(listener, producer, Vec::new(), options)
    }

    /// As [`Self::start`], and serves other transports on the same listener, by their [`Serve::service`].
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_with_services(
        listener: TcpListener,
        producer: Arc<dyn Producer>,
        others: Vec<Arc<dyn Serve>>,
        options: ServerOptions,
    ) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let mut services: Vec<Arc<dyn Serve>> = vec![Arc::new(TcpService)];
        services.extend(others);
        let server = Server::start(listener.into(), producer, services, options)?;
        Ok(Self { address, server })
    }

    /// The address of the listener.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The counters so far.
    #[must_use]
    pub fn stats(&self) -> ServerStats {
        self.server.stats()
    }

    /// Stops listening, closes every connection and waits for its thread. Reads in flight have then failed.
    pub fn shutdown(self) {
        self.server.shutdown();
    }
}

/// Sends "granted", and the blocks in batches.
struct TcpService;

impl Serve for TcpService {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn check_socket(&self, socket: &Socket) -> io::Result<()> {
        tune(socket)
    }

    fn deliver(
        &self,
        socket: &mut ChannelSocket,
        granted: &GrantedRead<'_>,
    ) -> Result<Delivery, ChannelError> {
        let until = granted.wait_limit();
        let live = || granted.is_live();
        let complete = Reply::Complete.encode();
        let mut batches = batches(parts(granted)).peekable();
        // Frames that are sent before the next batch, in one call.
        let mut front = granted.granted_frame();
        while let Some(Batch { parts, bytes }) = batches.next() {
            if !granted.await_ready(socket, &mut front, parts.end)? {
                socket.send(&front, until)?;
                return break_off(socket, granted, 0);
            }
            front.extend(Header { kind: KIND_BATCH, len: bytes }.encode());
            let end: &[u8] = if batches.peek().is_some() { &[] } else { &complete };
            let mut spans = Spans::with_capacity(parts.len() + 2);
            spans.push_bytes(&front);
            gather(granted, parts, &mut spans);
            spans.push_bytes(end);
            match socket.send_spans(&mut spans, until, live) {
                Ok(()) => {}
                // Every block was sent while the lease was live. Only a part of the end frame is unsent.
                Err(ChannelError::LeaseEnded) if spans.remaining() <= end.len() => {
                    socket.send(&end[end.len() - spans.remaining()..], until)?;
                }
                Err(ChannelError::LeaseEnded) => {
                    let unsent = spans.remaining() - end.len();
                    let unsent_header = unsent.saturating_sub(bytes);
                    socket.send(&front[front.len() - unsent_header..], until)?;
                    return break_off(socket, granted, unsent - unsent_header);
                }
                Err(error) => return Err(error),
            }
            granted.count_bytes(bytes);
            front.clear();
        }
        Ok(Delivery::Complete)
    }
}

/// Ends a read whose lease has ended: fills the rest of the batch with zeros, so that the connection stays in step, and
/// sends "gone".
fn break_off(
    socket: &mut ChannelSocket,
    granted: &GrantedRead<'_>,
    mut unsent: usize,
) -> Result<Delivery, ChannelError> {
    static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];
    while unsent > 0 {
        let part = unsent.min(ZEROS.len());
        socket.send(&ZEROS[..part], granted.wait_limit())?;
        unsent -= part;
    }
    socket.send(&Reply::Gone.encode(), granted.wait_limit())?;
    Ok(Delivery::LeaseEnded)
}
