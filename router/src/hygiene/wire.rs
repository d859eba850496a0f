//! A client's connection, held from both sides: by pingora, which writes answers and watches for its end, and by the
//! router, which reads heads and bodies.
//!
//! The two never read at the same time: the router reads a head before pingora sees the request, and the body while
//! `request_filter` runs; pingora reads only to learn that the client has left. The lock is therefore never waited for.

use std::future::poll_fn;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{BufMut, Bytes, BytesMut};
use pingora::protocols::raw_connect::ProxyDigest;
use pingora::protocols::{
    GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, TimingDigest,
    UniqueID, UniqueIDType,
};
use pingora::proxy::Session;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use super::chunked::{ChunkError, Chunked};
use super::head::{self, Framing};
use super::{Client, HeadBounds, Unclean};
use crate::admission::body_budget::{Share, Spent};

/// One read of the socket: as much as a connection's buffer in the kernel usually holds, and enough to pass buffers
/// below by.
const READ_BYTES: usize = 64 << 10;
/// Room that a body is given before any of it has come; it grows with what comes.
const BODY_ROOM_BYTES: usize = 256 << 10;
/// After a refusal, so much of what the client still sends is read and forgotten, for so long: closing at once would
/// reset the connection, and the client would lose the answer.
const LINGER_BYTES: usize = 1 << 20;
const LINGER: Duration = Duration::from_millis(500);
/// A client that does not take the last bytes is not waited for when its connection is closed.
const CLOSE_WITHIN: Duration = Duration::from_secs(1);

/// A client's connection. Closed when the last hand on it is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Wire(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    stream: Client,
    /// Who the client is: the address is looked up when somebody asks.
    socket: Arc<SocketDigest>,
    /// Since the connection is being closed: when it is dropped as it is.
    closing: Option<Pin<Box<Sleep>>>,
    /// Bytes behind the head that came with it.
    ahead: BytesMut,
    /// What is still to be read of the request's body.
    body: Body,
    expects_continue: bool,
    /// Of the request's body, that were read.
    body_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Body {
    Length(u64),
    Chunked(Chunked),
    Read,
}

/// Why there is no body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyError {
    /// Over the limit.
    TooLarge,
    /// Too much of others' bodies is held already.
    Spent,
    /// Its framing is broken.
    Malformed,
    /// The connection ended in the middle of it.
    Ended,
}

impl From<Spent> for BodyError {
    fn from(Spent: Spent) -> Self {
        Self::Spent
    }
}

impl Wire {
    pub(crate) fn new(stream: Client) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            socket: Arc::new(SocketDigest::from_raw_fd(stream.as_raw_fd())),
            closing: None,
            stream,
            ahead: BytesMut::new(),
            body: Body::Read,
            expects_continue: false,
            body_bytes: 0,
        })))
    }

    /// The connection of a session, where it is one of ours.
    pub(crate) fn of(session: &Session) -> Option<Self> {
        session.as_downstream().stream()?.as_any().downcast_ref::<Self>().cloned()
    }

    /// Whether what is written from now on is held until more follows; see [`crate::client_stream::ClientStream::hold`].
    pub(crate) fn hold(&self, hold: bool) {
        self.lock().stream.hold(hold);
    }

    /// Reads the head of the next request, as pingora is to see it. `None` where the client has none.
    ///
    /// # Errors
    /// [`Unclean`]: to be answered with [`Self::refuse`].
    pub(crate) async fn head(&self, bounds: &HeadBounds) -> Result<Option<BytesMut>, Unclean> {
        let mut bytes = std::mem::take(&mut self.lock().ahead);
        let mut searched = 0;
        if bytes.is_empty() {
            let first = tokio::time::timeout(bounds.idle, self.read(&mut bytes)).await;
            if !matches!(first, Ok(Ok(1..))) {
                return Ok(None);
            }
        }
        // Nearly always it is whole at once, and no clock is needed.
        if let Some(head) = head::read(&bytes, &mut searched, bounds.bytes)? {
            return Ok(Some(self.begin(&head, bytes)));
        }
        let rest = async {
            loop {
                match self.read(&mut bytes).await {
                    Ok(1..) => {}
                    // It left in the middle of its head: nobody is there to be told.
                    Ok(0) | Err(_) => return Ok(None),
                }
                if let Some(head) = head::read(&bytes, &mut searched, bounds.bytes)? {
                    return Ok(Some(head));
                }
            }
        };
        match tokio::time::timeout(bounds.within, rest).await {
            Ok(head) => Ok(head?.map(|head| self.begin(&head, bytes))),
            Err(_elapsed) => Err(Unclean::Late),
        }
    }

    /// Keeps what is behind the head and gives the head.
    fn begin(&self, head: &head::Head, mut bytes: BytesMut) -> BytesMut {
        let ahead = bytes.split_off(head.bytes);
        head.mask(&mut bytes);
        let mut inner = self.lock();
        inner.ahead = ahead;
        inner.body_bytes = 0;
        inner.expects_continue = head.expects_continue;
        inner.body = match head.framing {
            Framing::None => Body::Read,
            Framing::Length(length) => Body::Length(length),
            Framing::Chunked => Body::Chunked(Chunked::default()),
        };
        bytes
    }

    /// The names in the certificate that the client showed; `None` without TLS.
    pub(crate) fn certificate_names(&self) -> Option<Arc<[String]>> {
        self.lock().stream.certificate_names()
    }

    /// How long the body is, where the client has said so.
    pub(crate) fn declared(&self) -> Option<u64> {
        match self.lock().body {
            Body::Length(length) => Some(length),
            Body::Chunked(_) => None,
            Body::Read => Some(0),
        }
    }

    /// Bytes of the request's body, once it was read.
    pub(crate) fn body_bytes(&self) -> u64 {
        self.lock().body_bytes
    }

    /// Whether the client waits to be told to send the body.
    pub(crate) fn expects_continue(&self) -> bool {
        let inner = self.lock();
        inner.expects_continue && inner.ahead.is_empty()
    }

    /// Whether anything is left that would be taken for the next request: some of the body, or what came behind it.
    pub(crate) fn is_unread(&self) -> bool {
        let inner = self.lock();
        inner.body != Body::Read || !inner.ahead.is_empty()
    }

    /// Reads the whole body, once.
    ///
    /// # Errors
    /// [`BodyError`]; the connection is of no further use.
    ///
    /// # Cancel safety
    /// The connection is of no further use after a cancelled call, and [`Self::is_unread`] says so.
    pub(crate) async fn body(&self, limit_bytes: usize, share: &mut Share<'_>) -> Result<Bytes, BodyError> {
        let (framing, ahead) = {
            let mut inner = self.lock();
            (inner.body, std::mem::take(&mut inner.ahead))
        };
        match framing {
            Body::Read => {
                self.lock().ahead = ahead;
                Ok(Bytes::new())
            }
            Body::Length(length) => self.sized(length, ahead, limit_bytes, share).await,
            Body::Chunked(chunks) => self.chunks(chunks, ahead, limit_bytes, share).await,
        }
    }

    async fn sized(
        &self,
        length: u64,
        mut body: BytesMut,
        limit_bytes: usize,
        share: &mut Share<'_>,
    ) -> Result<Bytes, BodyError> {
        let length = usize::try_from(length).ok().filter(|length| *length <= limit_bytes);
        let length = length.ok_or(BodyError::TooLarge)?;
        share.take(body.len().min(length))?;
        if body.len() < length {
            // The buffer that came with the head is the head's: the body gets one of its own.
            let mut own = BytesMut::with_capacity(length.min(BODY_ROOM_BYTES.max(body.len())));
            own.extend_from_slice(&body);
            body = own;
        }
        while body.len() < length {
            let left = length - body.len();
            if body.capacity() == body.len() {
                body.reserve(left.min(body.len().max(READ_BYTES)));
            }
            let before = body.len();
            self.read_into(&mut body, left).await?;
            share.take(body.len() - before)?;
        }
        let behind = body.split_off(length);
        self.ended(behind, body.len());
        Ok(body.freeze())
    }

    async fn chunks(
        &self,
        mut chunks: Chunked,
        mut input: BytesMut,
        limit_bytes: usize,
        share: &mut Share<'_>,
    ) -> Result<Bytes, BodyError> {
        let mut body = BytesMut::new();
        loop {
            let before = body.len();
            let done = chunks.decode(&mut input, &mut body, limit_bytes).map_err(|error| match error {
                ChunkError::NotChunks => BodyError::Malformed,
                ChunkError::TooLarge => BodyError::TooLarge,
            })?;
            share.take(body.len() - before)?;
            if done {
                self.ended(input, body.len());
                return Ok(body.freeze());
            }
            if matches!(self.read(&mut input).await, Ok(0) | Err(_)) {
                return Err(BodyError::Ended);
            }
        }
    }

    fn ended(&self, behind: BytesMut, body_bytes: usize) {
        let mut inner = self.lock();
        inner.body_bytes = body_bytes as u64;
        inner.body = Body::Read;
        inner.ahead = behind;
    }

    /// Answers what cannot be served, and closes.
    pub(crate) async fn refuse(&self, unclean: Unclean) {
        let answer = unclean.answer();
        let told = async {
            let mut at = 0;
            while at < answer.len() {
                at += poll_fn(|context| self.poll(context, |s, c| s.poll_write(c, &answer[at..]))).await?;
            }
            poll_fn(|context| self.poll(context, |s, c| s.poll_flush(c))).await
        };
        if let Ok(Ok(())) = tokio::time::timeout(LINGER, told).await {
            self.linger().await;
        }
    }

    /// Says that nothing more will be said, and gives the client a moment to read what was.
    pub(crate) async fn linger(&self) {
        let rest = async {
            self.closed().await?;
            let mut forgotten = 0;
            while forgotten < LINGER_BYTES {
                match self.read(&mut BytesMut::new()).await? {
                    0 => break,
                    bytes => forgotten += bytes,
                }
            }
            io::Result::Ok(())
        };
        // Whatever comes of it, the connection is dropped next.
        let _ = tokio::time::timeout(LINGER, rest).await;
    }

    /// Says that nothing more will be said.
    async fn closed(&self) -> io::Result<()> {
        let mut wire = self.clone();
        poll_fn(|context| Pin::new(&mut wire).poll_shutdown(context)).await
    }

    /// Reads what is there, at least one byte; 0 at the end. Nothing is set aside while it waits.
    async fn read(&self, bytes: &mut BytesMut) -> io::Result<usize> {
        poll_fn(|context| {
            let mut room = [MaybeUninit::<u8>::uninit(); READ_BYTES];
            let mut room = ReadBuf::uninit(&mut room);
            ready!(self.poll(context, |stream, context| stream.poll_read(context, &mut room)))?;
            bytes.extend_from_slice(room.filled());
            Poll::Ready(Ok(room.filled().len()))
        })
        .await
    }

    /// Reads at most `most` bytes into the room that is there.
    async fn read_into(&self, bytes: &mut BytesMut, most: usize) -> Result<(), BodyError> {
        let read = poll_fn(|context| {
            self.poll(context, |stream, context| {
                let mut room = (&mut *bytes).limit(most);
                std::pin::pin!(stream.get_mut().read_buf(&mut room)).poll(context)
            })
        });
        match read.await {
            Ok(1..) => Ok(()),
            Ok(0) | Err(_) => Err(BodyError::Ended),
        }
    }

    fn poll<T>(
        &self,
        context: &mut Context<'_>,
        step: impl FnOnce(Pin<&mut Client>, &mut Context<'_>) -> T,
    ) -> T {
        step(Pin::new(&mut self.lock().stream), context)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll(context, |stream, context| stream.poll_read(context, room))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll(context, |stream, context| stream.poll_write(context, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(context, |stream, context| stream.poll_flush(context))
    }

    /// Ready after [`CLOSE_WITHIN`] at the latest.
    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Inner { stream, closing, .. } = &mut *self.lock();
        if let Poll::Ready(closed) = Pin::new(stream).poll_shutdown(context) {
            return Poll::Ready(closed);
        }
        let deadline = closing.get_or_insert_with(|| Box::pin(tokio::time::sleep(CLOSE_WITHIN)));
        deadline.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll(context, |stream, context| stream.poll_write_vectored(context, pieces))
    }

    fn is_write_vectored(&self) -> bool {
        self.lock().stream.is_write_vectored()
    }
}

#[async_trait]
impl Shutdown for Wire {
    async fn shutdown(&mut self) {
        // An error means that it is closed already, or that nobody takes the last bytes.
        let _ = self.closed().await;
    }
}

impl UniqueID for Wire {
    fn id(&self) -> UniqueIDType {
        self.lock().stream.as_raw_fd()
    }
}

impl Ssl for Wire {}

impl GetTimingDigest for Wire {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        Vec::new()
    }
}

impl GetProxyDigest for Wire {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        None
    }
}

impl GetSocketDigest for Wire {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        Some(Arc::clone(&self.lock().socket))
    }
}

impl Peek for Wire {}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::client_stream::ClientStream;

    #[tokio::test]
    async fn a_client_that_reads_nothing_is_not_waited_for_when_its_connection_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let deaf = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let stream = ClientStream::new(listener.accept().await.unwrap().0);
        let mut wire = Wire::new(Client::Plain(stream));
        let mut full = false;
        // Until the kernel takes no more, and the last bytes are held here.
        while !full {
            let piece = vec![b'x'; 1 << 20];
            full = poll_fn(|context| match Pin::new(&mut wire).poll_write(context, &piece) {
                Poll::Pending => Poll::Ready(true),
                Poll::Ready(out) => Poll::Ready(out.unwrap() == 0),
            })
            .await;
        }
        wire.write_all(b"the last bytes").await.unwrap();
        let closed = tokio::time::timeout(Duration::from_secs(20), AsyncWriteExt::shutdown(&mut wire)).await;
        let error = closed.expect("it is given up").expect_err("the last bytes are not out");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(deaf);
    }
}
