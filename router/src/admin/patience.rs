//! A connection whose peer reads what it asked for, or is cut.
//!
//! ```text
//! a write has to wait ─▶ the clock runs ─ everything is written ─▶ the clock is off
//!                             └─ too long, however little the peer reads meanwhile ─▶ error: cut
//! ```

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// A stream whose writes end in time.
pub(super) struct Patience<S> {
    stream: S,
    within: Duration,
    /// Runs since a write had to wait.
    clock: Option<Pin<Box<Sleep>>>,
}

impl<S> Patience<S> {
    /// What is written must be with the peer `within` this time since a write first had to wait.
    pub(super) fn new(stream: S, within: Duration) -> Self {
        Self { stream, within, clock: None }
    }

    fn judge<T>(&mut self, cx: &mut Context<'_>, polled: Poll<Result<T>>) -> Poll<Result<T>> {
        if polled.is_ready() {
            return polled;
        }
        let within = self.within;
        let clock = self.clock.get_or_insert_with(|| Box::pin(tokio::time::sleep(within)));
        clock.as_mut().poll(cx).map(|()| Err(Error::from(ErrorKind::TimedOut)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patience<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patience<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.judge(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.judge(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// Called when everything was written: the next answer has its own time.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        if polled.is_ready() {
            self.clock = None;
        }
        self.judge(cx, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.judge(cx, polled)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn a_peer_that_does_not_read_is_cut_and_one_that_reads_is_not() {
        let (ours, mut theirs) = tokio::io::duplex(16);
        let mut slow = Patience::new(ours, Duration::from_millis(20));
        let error = slow.write_all(&[0; 100]).await.expect_err("nobody reads");
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        drop(slow);
        let mut read = Vec::new();
        theirs.read_to_end(&mut read).await.expect("what was written");
        assert_eq!(read.len(), 16);

        let (ours, mut theirs) = tokio::io::duplex(16);
        let mut patient = Patience::new(ours, Duration::from_secs(600));
        let write = async {
            patient.write_all(&[1; 100_000]).await.expect("it is read");
            patient.flush().await.expect("it is read");
            assert!(patient.clock.is_none(), "the next answer has its own time");
            drop(patient);
        };
        let (mut all, read) = (Vec::new(), ());
        let ((), _) = tokio::join!(write, async { theirs.read_to_end(&mut all).await.expect("all of it") });
        assert_eq!((all.len(), read), (100_000, ()));
    }
}
