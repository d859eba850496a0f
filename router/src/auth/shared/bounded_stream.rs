//! A connection to the server that reads little more than it writes. Each reply is shorter than its question, so a
//! server that sends more is broken or hostile, and could fill the memory of the router.

use std::io::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes that may be read beyond those written: error messages.
const SLACK_BYTES: u64 = 64 << 10;

/// A stream with a budget for reads.
pub(super) struct BoundedStream<S> {
    stream: S,
    /// Bytes that may still be read.
    budget: u64,
}

impl<S> BoundedStream<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, budget: SLACK_BYTES }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for BoundedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let read = (buffer.filled().len() - before) as u64;
        match self.budget.checked_sub(read) {
            Some(rest) => {
                self.budget = rest;
                Poll::Ready(Ok(()))
            }
            None => Poll::Ready(Err(Error::new(
                ErrorKind::InvalidData,
                "the server sends more than it was asked",
            ))),
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for BoundedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes))?;
        // A quiet server does not collect a budget for later.
        self.budget = (self.budget + written as u64).min(SLACK_BYTES + (1 << 20));
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test]
    async fn a_reply_may_be_as_long_as_its_question_and_not_much_longer() {
        let (own, mut server) = duplex(1 << 20);
        let mut stream = BoundedStream::new(own);
        stream.write_all(&[0; 1000]).await.expect("room");
        server.write_all(&vec![0; SLACK_BYTES as usize + 1001]).await.expect("room");
        let mut read = vec![0; SLACK_BYTES as usize + 1000];
        stream.read_exact(&mut read).await.expect("within the budget");
        let error = stream.read(&mut read).await.expect_err("beyond the budget");
        assert_eq!(error.kind(), ErrorKind::InvalidData);
    }
}
