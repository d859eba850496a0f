//! The bytes of a client's connection on their way out: the head of an answer and what follows it at once are one write.
//!
//! pingora writes the head, the size of a chunk and the chunk apart, and says when they must have left. Small pieces are
//! held until then. [`ClientStream::hold`] puts that off: the pump sets it when it knows that more follows without a
//! wait (the first event behind the head, the last chunk behind `[DONE]`). Nothing is held while nobody writes.

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// More than this is not held: copying it would cost more than the write that is saved.
const HELD_BYTES_MAX: usize = 16 << 10;
/// Slices of one write.
const SLICES_MAX: usize = 8;

/// A connection of a client, without TLS.
#[derive(Debug)]
pub(crate) struct ClientStream {
    stream: TcpStream,
    held: Vec<u8>,
    hold: AtomicBool,
}

impl ClientStream {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self { stream, held: Vec::new(), hold: AtomicBool::new(false) }
    }

    /// Whether what is flushed from now on is held all the same. It leaves with the first write after that.
    pub(crate) fn hold(&self, hold: bool) {
        self.hold.store(hold, Ordering::Relaxed);
    }

    /// Writes what is held and then `pieces`; how many bytes of `pieces` are out.
    fn poll_out(&mut self, context: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let wanted: usize = pieces.iter().map(|piece| piece.len()).sum();
        loop {
            if self.held.is_empty() && wanted == 0 {
                return Poll::Ready(Ok(0));
            }
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            slices[0] = IoSlice::new(&self.held);
            let mut count = 1;
            for piece in pieces.iter().take(SLICES_MAX - 1) {
                slices[count] = IoSlice::new(piece);
                count += 1;
            }
            let first = usize::from(self.held.is_empty());
            let stream = Pin::new(&mut self.stream);
            let out = ready!(stream.poll_write_vectored(context, &slices[first..count]))?;
            if out == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let held = self.held.len();
            if out < held {
                self.held.drain(..out);
                continue;
            }
            self.held = Vec::new();
            if out > held || wanted == 0 {
                return Poll::Ready(Ok(out - held));
            }
        }
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.held.len() + bytes <= HELD_BYTES_MAX
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, room)
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.has_room(bytes.len()) {
            self.held.extend_from_slice(bytes);
            return Poll::Ready(Ok(bytes.len()));
        }
        self.poll_out(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let bytes = pieces.iter().map(|piece| piece.len()).sum();
        if self.hold.load(Ordering::Relaxed) && self.has_room(bytes) {
            pieces.iter().for_each(|piece| self.held.extend_from_slice(piece));
            return Poll::Ready(Ok(bytes));
        }
        self.poll_out(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.hold.load(Ordering::Relaxed) {
            return Poll::Ready(Ok(()));
        }
        self.poll_out(context, &[]).map_ok(drop)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_out(context, &[]))?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl AsRawFd for ClientStream {
    fn as_raw_fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    async fn pair() -> (ClientStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (ClientStream::new(listener.accept().await.unwrap().0), far)
    }

    #[tokio::test]
    async fn small_pieces_leave_together_and_nothing_is_kept() {
        let (mut near, mut far) = pair().await;
        near.write_all(b"head ").await.unwrap();
        let out = near.write_vectored(&[IoSlice::new(b"size "), IoSlice::new(b"data")]).await;
        assert_eq!(out.unwrap(), 9);
        let mut seen = [0; 64];
        let read = far.read(&mut seen).await.unwrap();
        assert_eq!(&seen[..read], b"head size data");
        assert_eq!(near.held.capacity(), 0);
    }

    #[tokio::test]
    async fn what_is_flushed_while_it_holds_leaves_with_the_next_write() {
        let (mut near, mut far) = pair().await;
        near.hold(true);
        near.write_all(b"head ").await.unwrap();
        near.flush().await.unwrap();
        assert_eq!(near.write_vectored(&[IoSlice::new(b"data ")]).await.unwrap(), 5);
        assert_eq!(far.try_read(&mut [0; 8]).map_err(|error| error.kind()), Err(io::ErrorKind::WouldBlock));
        near.hold(false);
        near.write_all(b"end").await.unwrap();
        near.flush().await.unwrap();
        let mut seen = [0; 64];
        let read = far.read(&mut seen).await.unwrap();
        assert_eq!(&seen[..read], b"head data end");
    }

    #[tokio::test]
    async fn a_large_piece_arrives_whole_and_behind_what_was_held() {
        let (mut near, mut far) = pair().await;
        let large = vec![b'x'; 4 << 20];
        let expected = [b"head".to_vec(), large.clone()].concat();
        let reads = tokio::spawn(async move {
            let mut seen = Vec::new();
            far.read_to_end(&mut seen).await.map(|_| seen)
        });
        near.write_all(b"head").await.unwrap();
        near.write_all(&large).await.unwrap();
        AsyncWriteExt::shutdown(&mut near).await.unwrap();
        assert!(reads.await.unwrap().unwrap() == expected);
    }
}
