//! A connection that fails if its peer does not read.
//!
//! ```text
//! a write has to wait ─▶ the timer runs ─ everything is written ─▶ the timer is off
//!                             └─ timeout, however little the peer reads meanwhile ─▶ error: cut
//! ```

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// A stream whose writes have a timeout.
pub(super) struct WriteTimeout<S> {
    stream: S,
    timeout: Duration,
    /// Set while a write waits.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> WriteTimeout<S> {
    /// Each write must complete `within` this time since it first had to wait.
    pub(super) fn new(stream: S, within: Duration) -> Self {
        Self { stream, timeout: within, timer: None }
    }

    fn check_timeout<T>(&mut self, cx: &mut Context<'_>, polled: Poll<Result<T>>) -> Poll<Result<T>> {
        if polled.is_ready() {
            return polled;
        }
        let within = self.timeout;
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(within)));
        timer.as_mut().poll(cx).map(|()| Err(Error::from(ErrorKind::TimedOut)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.check_timeout(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.check_timeout(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// Called once a response is written: the next response has a time of its own.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        if polled.is_ready() {
            self.timer = None;
        }
        self.check_timeout(cx, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.check_timeout(cx, polled)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn a_peer_that_does_not_read_is_cut_and_one_that_reads_is_not() {
        let (ours, mut theirs) = tokio::io::duplex(16);
        let mut slow = WriteTimeout::new(ours, Duration::from_millis(20));
        let error = slow.write_all(&[0; 100]).await.expect_err("the peer does not read");
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        drop(slow);
        let mut read = Vec::new();
        theirs.read_to_end(&mut read).await.expect("what was written");
        assert_eq!(read.len(), 16);

        let (ours, mut theirs) = tokio::io::duplex(16);
        let mut patient = WriteTimeout::new(ours, Duration::from_secs(600));
        let write = async {
            patient.write_all(&[1; 100_000]).await.expect("it is read");
            patient.flush().await.expect("it is read");
            assert!(patient.timer.is_none(), "the next answer has its own time");
            drop(patient);
        };
        let (mut all, read) = (Vec::new(), ());
        let ((), _) = tokio::join!(write, async { theirs.read_to_end(&mut all).await.expect("all of it") });
        assert_eq!((all.len(), read), (100_000, ()));
    }
}
