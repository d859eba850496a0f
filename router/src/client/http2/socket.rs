//! The socket of an HTTP/2 connection, with two owners: `h2` reads and writes it, and the router counts the frames,
//! watches for lost clients and closes it.
//!
//! One task uses both, so the lock of the socket never blocks. Streams only touch the atomic fields.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::either::Either;

use super::meter::{Flood, FrameMeter};
use crate::client::http::ClientSocket;
use crate::engines::presence;

/// Behind the last frame so many bytes are read and discarded, for so long. Closing at once would reset the connection,
/// and the client would lose the `GOAWAY` frame.
const LINGER_BYTES: usize = 1 << 20;
const LINGER: Duration = Duration::from_millis(500);
/// Size of one such read.
const LINGER_READ_BYTES: usize = 16 << 10;

/// What a connection's task and its streams share.
#[derive(Debug)]
pub(super) struct SharedConnection {
    socket: Mutex<SocketState>,
    pub peer: SocketAddr,
    /// The names in the client's certificate; `None` without TLS.
    pub certificate_names: Option<Arc<[String]>>,
    /// `DATA` frames of responses that the meter has not counted.
    data_frames: AtomicU32,
    /// Complete responses that the meter has not counted.
    responses: AtomicU32,
    /// The connection takes no further requests.
    is_closing: AtomicBool,
}

#[derive(Debug)]
struct SocketState {
    stream: ClientSocket,
    /// Bytes that were read before the protocol was known.
    ahead: BytesMut,
    meter: FrameMeter,
    flood: Option<Flood>,
}

impl SharedConnection {
    pub(super) fn new(
        stream: ClientSocket,
        ahead: BytesMut,
        peer: SocketAddr,
        streams_max: u32,
    ) -> Arc<Self> {
        let certificate_names = match &stream {
            Either::Left(_) => None,
            Either::Right(tls) => Some(tls.client_names()),
        };
        let meter = FrameMeter::new(streams_max, Instant::now());
        Arc::new(Self {
            socket: Mutex::new(SocketState { stream, ahead, meter, flood: None }),
            peer,
            certificate_names,
            data_frames: AtomicU32::new(0),
            responses: AtomicU32::new(0),
            is_closing: AtomicBool::new(false),
        })
    }

    /// Counts a `DATA` frame of a response.
    pub(super) fn count_data_frame(&self) {
        self.data_frames.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a complete response.
    pub(super) fn count_response(&self) {
        self.responses.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes no further requests; the ones in flight finish.
    pub(super) fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Relaxed)
    }

    /// The flood that the meter found.
    pub(super) fn flood(&self) -> Option<Flood> {
        self.lock().flood
    }

    /// Since when a block of headers is incomplete.
    pub(super) fn block_since(&self) -> Option<Instant> {
        self.lock().meter.block_since()
    }

    /// Cuts the connection once the client's host has acknowledged nothing for `within`. Never returns.
    pub(super) async fn cut_when_lost(&self, within: Duration) -> Infallible {
        if within.is_zero() {
            return std::future::pending().await;
        }
        let mut silence = presence::PeerSilence::default();
        loop {
            tokio::time::sleep(within / presence::CHECKS_PER_TIMEOUT).await;
            let state = self.lock();
            let socket = state.tcp();
            if silence.is_over(socket, within) {
                presence::cut(socket);
            }
        }
    }

    /// Closes the sending side, and gives the client time to read the last frames.
    pub(super) async fn linger(&self) {
        let rest = async {
            poll_fn(|context| Pin::new(&mut self.lock().stream).poll_shutdown(context)).await?;
            let mut discarded = 0;
            while discarded < LINGER_BYTES {
                match poll_fn(|context| self.poll_discard(context)).await? {
                    0 => break,
                    bytes => discarded += bytes,
                }
            }
            io::Result::Ok(())
        };
        // The connection is dropped next, whatever the result.
        let _ = tokio::time::timeout(LINGER, rest).await;
    }

    fn poll_discard(&self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut bytes = [0; LINGER_READ_BYTES];
        let mut bytes = ReadBuf::new(&mut bytes);
        ready!(Pin::new(&mut self.lock().stream).poll_read(context, &mut bytes))?;
        Poll::Ready(Ok(bytes.filled().len()))
    }

    fn lock(&self) -> MutexGuard<'_, SocketState> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SocketState {
    fn tcp(&self) -> &TcpStream {
        match &self.stream {
            Either::Left(stream) => stream,
            Either::Right(tls) => tls.tcp(),
        }
    }
}

/// The owner that `h2` has.
#[derive(Debug)]
pub(super) struct MeteredSocket(pub Arc<SharedConnection>);

impl AsyncRead for MeteredSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let state = &mut *self.0.lock();
        let before = buffer.filled().len();
        if state.ahead.is_empty() {
            ready!(Pin::new(&mut state.stream).poll_read(context, buffer))?;
        } else {
            let bytes = buffer.remaining().min(state.ahead.len());
            buffer.put_slice(&state.ahead[..bytes]);
            state.ahead.advance(bytes);
        }
        let take = |count: &AtomicU32| count.swap(0, Ordering::Relaxed);
        state.meter.earn(take(&self.0.data_frames), take(&self.0.responses));
        match state.meter.read(&buffer.filled()[before..], Instant::now()) {
            Ok(()) => Poll::Ready(Ok(())),
            Err(flood) => {
                // The connection's task ends the connection next, and reads nothing more.
                state.flood = Some(flood);
                buffer.set_filled(before);
                Poll::Pending
            }
        }
    }
}

impl AsyncWrite for MeteredSocket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0.lock().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.lock().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.lock().stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0.lock().stream).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.lock().stream.is_write_vectored()
    }
}
