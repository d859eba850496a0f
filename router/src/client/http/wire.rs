//! A client's connection, held from both sides: by pingora's HTTP session, which is given the head of a request and
//! writes the head of an answer, and by the router, which reads and writes everything else.
//!
//! What pingora writes is held until the first bytes of the body: a head and what follows it are one write. One task
//! has both hands, so the lock is never waited for.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use pingora::protocols::raw_connect::ProxyDigest;
use pingora::protocols::{
    GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, TimingDigest,
    UniqueID, UniqueIDType,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use tokio_util::either::Either;

use super::chunked::{ChunkError, Chunked};
use super::head::{self, EmptyLine, Framing};
use super::{HeadBounds, Unclean};
use crate::engines::body_budget::{Share, Spent};
use crate::engines::presence;
use crate::tls::TlsConnection;

/// One read of the socket: as much as a connection's buffer in the kernel usually holds, and enough to pass buffers
/// below by.
const READ_BYTES: usize = 64 << 10;
/// What comes behind a request while it is answered is read ahead up to this size, and kept for when it is over: a request
/// of a client that does not wait for answers. More stays with the client and in the system's buffers.
const AHEAD_BYTES_MAX: usize = 16 << 10;
/// One read ahead.
const AHEAD_READ_BYTES: usize = 4 << 10;
/// While nothing more is read ahead, the client's end of the connection is looked for so often.
const LOOKS_FOR_END: Duration = Duration::from_millis(250);
/// Room that a body is given before any of it has come; it grows with what comes.
const BODY_ROOM_BYTES: usize = 256 << 10;
/// After a refusal, so much of what the client still sends is read and forgotten, for so long: closing at once would
/// reset the connection, and the client would lose the answer.
const LINGER_BYTES: usize = 1 << 20;
const LINGER: Duration = Duration::from_millis(500);
/// A client that does not take the end of its connection is not waited for.
const CLOSE_WITHIN: Duration = Duration::from_secs(1);
/// Slices of one write: what is held, and a chunk's size, data and end.
const SLICES_MAX: usize = 4;

/// A client's socket, with TLS or without.
pub(crate) type Socket = Either<TcpStream, Box<TlsConnection>>;

/// A client's connection. Closed when the last hand on it is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Wire(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    stream: Socket,
    peer: SocketAddr,
    /// It may acknowledge nothing for so long; zero: as the system does it.
    lost_after: Duration,
    /// It is given longer for now; see [`Wire::bear`].
    /// Written by pingora, and not yet out.
    held: Vec<u8>,
    /// Bytes behind what was read of the request: of its body, or of the next request.
    ahead: BytesMut,
    /// More came behind a request than is kept: the connection ends with its answer.
    overrun: bool,
    /// The client has sent a request before the answer to the one before it.
    pipelines: bool,
    /// Nothing more is read ahead: when the client's end is looked for.
    looks: Option<Pin<Box<Sleep>>>,
    /// The request offers to speak another protocol: what is behind it may not be HTTP to another reader.
    upgrades: bool,
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

impl Inner {
    /// Keeps a copy of what came behind a request, so that it holds no other memory; nothing of what is too much.
    fn keep(&mut self, behind: &[u8]) {
        self.pipelines |= !behind.is_empty();
        self.overrun = behind.len() > AHEAD_BYTES_MAX;
        self.ahead = if self.overrun { BytesMut::new() } else { BytesMut::from(behind) };
    }
}

/// The socket below.
fn tcp(stream: &Socket) -> &TcpStream {
    match stream {
        Either::Left(stream) => stream,
        Either::Right(tls) => tls.tcp(),
    }
}

impl Wire {
    pub(crate) fn new(stream: Socket, peer: SocketAddr, lost_after: Duration) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            stream,
            peer,
            lost_after,
            held: Vec::new(),
            ahead: BytesMut::new(),
            overrun: false,
            pipelines: false,
            looks: None,
            upgrades: false,
            body: Body::Read,
            expects_continue: false,
            body_bytes: 0,
        })))
    }

    /// Writes what is held and then `pieces`, of which it takes three at most; how many bytes of `pieces` are out.
    pub(crate) fn poll_send(
        &self,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let Inner { stream, held, .. } = &mut *self.lock();
        let wanted = pieces.iter().any(|piece| !piece.is_empty());
        loop {
            if held.is_empty() && !wanted {
                return Pin::new(stream).poll_flush(context).map_ok(|()| 0);
            }
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            slices[0] = IoSlice::new(held);
            let pieces = &pieces[..pieces.len().min(SLICES_MAX - 1)];
            slices[1..=pieces.len()].copy_from_slice(pieces);
            let first = usize::from(held.is_empty());
            let slices = &slices[first..=pieces.len()];
            let out = ready!(Pin::new(&mut *stream).poll_write_vectored(context, slices))?;
            if out == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            if out < held.len() {
                held.drain(..out);
                continue;
            }
            let out = out - std::mem::take(held).len();
            if out > 0 {
                return Poll::Ready(Ok(out));
            }
        }
    }

    /// Whether the client has left: its end of the connection is closed, or broken. Once the request's body was read.
    ///
    /// What it sends meanwhile is its next request, and kept. Where that is too much, its end is behind what is not read:
    /// then the system is asked for it.
    pub(crate) fn poll_gone(&self, context: &mut Context<'_>) -> Poll<()> {
        let inner = &mut *self.lock();
        while inner.ahead.len() < AHEAD_BYTES_MAX {
            let mut room = [MaybeUninit::<u8>::uninit(); AHEAD_READ_BYTES];
            let left = AHEAD_READ_BYTES.min(AHEAD_BYTES_MAX - inner.ahead.len());
            let mut room = ReadBuf::uninit(&mut room[..left]);
            let read = ready!(Pin::new(&mut inner.stream).poll_read(context, &mut room));
            if read.is_err() || room.filled().is_empty() {
                return Poll::Ready(());
            }
            inner.ahead.extend_from_slice(room.filled());
            inner.pipelines = true;
        }
        let looks = inner.looks.get_or_insert_with(|| Box::pin(tokio::time::sleep(LOOKS_FOR_END)));
        loop {
            ready!(looks.as_mut().poll(context));
            if presence::has_ended(tcp(&inner.stream)) {
                return Poll::Ready(());
            }
            looks.as_mut().reset(Instant::now() + LOOKS_FOR_END);
        }
    }

    /// Cuts the connection once the client's host has acknowledged nothing for longer than it may: what is served then
    /// finds that the client has left. `clock` is any timer that is free meanwhile.
    pub(crate) async fn cut_when_lost(&self, mut clock: Pin<&mut Sleep>) -> Infallible {
        let within = self.lock().lost_after;
        if within.is_zero() {
            return std::future::pending().await;
        }
        let mut silence = presence::Silence::default();
        loop {
            clock.as_mut().reset(Instant::now() + within / presence::LOOKS);
            clock.as_mut().await;
            let inner = self.lock();
            let socket = tcp(&inner.stream);
            if silence.is_over(socket, within) {
                presence::cut(socket);
            }
        }
    }

    /// The client's address.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.lock().peer
    }

    /// Reads the head of the next request, as pingora is to see it. `None` where the client has none until `idle` ends.
    ///
    /// # Errors
    /// [`Unclean`]: to be answered with [`Self::refuse`].
    pub(crate) async fn head(
        &self,
        bounds: &HeadBounds,
        mut idle: Pin<&mut Sleep>,
    ) -> Result<Option<BytesMut>, Unclean> {
        let mut bytes = std::mem::take(&mut self.lock().ahead);
        let (mut searched, mut may_be_empty) = (0, true);
        // An empty line is no beginning of a request: a client that sent one with its last may be idle behind it.
        loop {
            match head::empty_line(&bytes).filter(|_| may_be_empty || bytes.is_empty()) {
                Some(EmptyLine::Here) => {
                    bytes.advance(2);
                    may_be_empty = false;
                }
                Some(EmptyLine::MayCome) => {
                    let more = tokio::select! {
                        biased;
                        more = self.read(&mut bytes) => more,
                        () = idle.as_mut() => return Ok(None),
                    };
                    if !matches!(more, Ok(1..)) {
                        return Ok(None);
                    }
                }
                None => break,
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
    fn begin(&self, head: &head::Head, mut ahead: BytesMut) -> BytesMut {
        // Copied: neither the head nor the body holds the other's memory.
        let mut bytes = BytesMut::from(&ahead[..head.bytes]);
        ahead.advance(head.bytes);
        head.mask(&mut bytes);
        let mut inner = self.lock();
        inner.overrun = false;
        match head.framing {
            Framing::None => inner.keep(&ahead),
            Framing::Length(_) | Framing::Chunked => inner.ahead = ahead,
        }
        inner.looks = None;
        inner.body_bytes = 0;
        inner.upgrades = head.upgrades;
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
        let inner = self.lock();
        match &inner.stream {
            Either::Left(_) => None,
            Either::Right(tls) => Some(tls.client_names()),
        }
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

    /// Whether what is behind the request must not be taken for the next one: some of its body, more than is kept, or what
    /// may be another protocol.
    pub(crate) fn is_unread(&self) -> bool {
        let inner = self.lock();
        inner.body != Body::Read || inner.overrun || inner.upgrades
    }

    /// Whether the client sent more than what was answered, or may be about to.
    pub(crate) fn is_ahead(&self) -> bool {
        let inner = self.lock();
        inner.body != Body::Read || inner.overrun || inner.pipelines || !inner.ahead.is_empty()
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
                self.lock().keep(&ahead);
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
        self.ended(&body[length..], length);
        body.truncate(length);
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
                self.ended(&input, body.len());
                return Ok(body.freeze());
            }
            if matches!(self.read(&mut input).await, Ok(0) | Err(_)) {
                return Err(BodyError::Ended);
            }
        }
    }

    fn ended(&self, behind: &[u8], body_bytes: usize) {
        let mut inner = self.lock();
        inner.body_bytes = body_bytes as u64;
        inner.body = Body::Read;
        inner.keep(behind);
    }

    /// Answers what cannot be served, and closes.
    pub(crate) async fn refuse(&self, unclean: Unclean) {
        let answer = unclean.answer();
        let told = async {
            let mut at = 0;
            while at < answer.len() {
                at += poll_fn(|context| self.poll_send(context, &[IoSlice::new(&answer[at..])])).await?;
            }
            poll_fn(|context| self.poll_send(context, &[])).await
        };
        if let Ok(Ok(_)) = tokio::time::timeout(LINGER, told).await {
            self.linger().await;
        }
    }

    /// Says that nothing more will be said. For an answer that was the connection's last.
    pub(crate) async fn close(&self) {
        let closed = poll_fn(|context| self.poll(context, |stream, context| stream.poll_shutdown(context)));
        // An error means that it is closed already.
        let _ = tokio::time::timeout(CLOSE_WITHIN, closed).await;
    }

    /// Says that nothing more will be said, and gives the client a moment to read what was.
    pub(crate) async fn linger(&self) {
        let rest = async {
            poll_fn(|context| self.poll(context, |stream, context| stream.poll_shutdown(context))).await?;
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
        step: impl FnOnce(Pin<&mut Socket>, &mut Context<'_>) -> T,
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
    /// Held: heads, which are small.
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.lock().held.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

// What pingora may ask of a connection, and need not be told: the router closes it, and knows its client.

#[async_trait]
impl Shutdown for Wire {
    async fn shutdown(&mut self) {}
}

impl UniqueID for Wire {
    fn id(&self) -> UniqueIDType {
        0
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
        None
    }
}

impl Peek for Wire {}
