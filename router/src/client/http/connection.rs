//! A client's connection, with two owners. pingora's HTTP session receives the head of a request and writes the
//! head of a response. The router reads and writes everything else.
//!
//! The head that pingora writes is buffered until the first bytes of the body, so that both are one write. Both
//! owners are used by one task, so the lock never blocks.

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

use super::chunked::{ChunkError, ChunkedReader};
use super::head::{self, EmptyLine, RequestFraming};
use super::{BodyError, HeadBounds, HeadError};
use crate::engines::body_budget::BudgetShare;
use crate::engines::presence;
use crate::tls::TlsConnection;

/// Size of one read of the socket: the usual content of the kernel's receive buffer, and enough to bypass the
/// buffers below.
const READ_BYTES: usize = 64 << 10;
/// Maximum bytes read ahead while a request is served: the start of the next request of a client that pipelines. More
/// stays in the kernel's buffers and with the client.
const AHEAD_BYTES_MAX: usize = 16 << 10;
/// Size of one read ahead.
const AHEAD_READ_BYTES: usize = 4 << 10;
/// Interval of checks for the end of the connection while nothing more is read ahead.
const END_CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Initial capacity of a body's buffer, which grows with the received bytes.
pub(in crate::client) const BODY_CAPACITY_INITIAL: usize = 256 << 10;
/// After a refusal, so many bytes are read and discarded, for so long. Closing at once would reset the connection,
/// and the client would lose the response.
const LINGER_BYTES: usize = 1 << 20;
const LINGER: Duration = Duration::from_millis(500);
/// Maximum wait for a shutdown to be written.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Slices of one write: the unsent head, and a chunk's size, data and end.
const SLICES_MAX: usize = 4;

/// A client's socket, with TLS or without.
pub(crate) type ClientSocket = Either<TcpStream, Box<TlsConnection>>;

/// A client's connection. It is closed when the last clone is dropped.
#[derive(Clone, Debug)]
pub(crate) struct ClientConnection(Arc<Mutex<ConnectionState>>);

#[derive(Debug)]
struct ConnectionState {
    stream: ClientSocket,
    peer: SocketAddr,
    /// Maximum time without an acknowledgement; zero: the kernel's default.
    lost_after: Duration,
    /// Written by pingora, not yet sent.
    unsent: Vec<u8>,
    /// Bytes behind those read of the request: of its body, or of the next request.
    ahead: BytesMut,
    /// More than the maximum came behind a request: the connection ends with its response.
    is_overrun: bool,
    /// The client has sent a request before the previous response.
    pipelines: bool,
    /// Timer of the checks for the end while nothing more is read ahead.
    end_check: Option<Pin<Box<Sleep>>>,
    /// The request has an `Upgrade`: for another reader the bytes behind it may not be HTTP.
    upgrades: bool,
    /// The unread part of the request's body.
    body: UnreadBody,
    expects_continue: bool,
    /// Bytes of the request's body that were read.
    body_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnreadBody {
    Length(u64),
    Chunked(ChunkedReader),
    Read,
}

impl ConnectionState {
    /// Stores a copy of the bytes behind a request, so that they hold no other memory. Stores nothing if they are
    /// too many.
    fn store_ahead(&mut self, behind: &[u8]) {
        self.pipelines |= !behind.is_empty();
        self.is_overrun = behind.len() > AHEAD_BYTES_MAX;
        self.ahead = if self.is_overrun { BytesMut::new() } else { BytesMut::from(behind) };
    }
}

/// The TCP socket of a connection.
fn tcp(stream: &ClientSocket) -> &TcpStream {
    match stream {
        Either::Left(stream) => stream,
        Either::Right(tls) => tls.tcp(),
    }
}

impl ClientConnection {
    pub(crate) fn new(stream: ClientSocket, peer: SocketAddr, lost_after: Duration) -> Self {
        Self(Arc::new(Mutex::new(ConnectionState {
            stream,
            peer,
            lost_after,
            unsent: Vec::new(),
            ahead: BytesMut::new(),
            is_overrun: false,
            pipelines: false,
            end_check: None,
            upgrades: false,
            body: UnreadBody::Read,
            expects_continue: false,
            body_bytes: 0,
        })))
    }

    /// Writes the unsent bytes and then `pieces`, of which it uses at most three. Returns how many bytes of
    /// `pieces` were sent.
    pub(crate) fn poll_send(
        &self,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let ConnectionState { stream, unsent, .. } = &mut *self.lock();
        let wanted = pieces.iter().any(|piece| !piece.is_empty());
        loop {
            if unsent.is_empty() && !wanted {
                return Pin::new(stream).poll_flush(context).map_ok(|()| 0);
            }
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            slices[0] = IoSlice::new(unsent);
            let pieces = &pieces[..pieces.len().min(SLICES_MAX - 1)];
            slices[1..=pieces.len()].copy_from_slice(pieces);
            let first = usize::from(unsent.is_empty());
            let slices = &slices[first..=pieces.len()];
            let out = ready!(Pin::new(&mut *stream).poll_write_vectored(context, slices))?;
            if out == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            if out < unsent.len() {
                unsent.drain(..out);
                continue;
            }
            let out = out - std::mem::take(unsent).len();
            if out > 0 {
                return Poll::Ready(Ok(out));
            }
        }
    }

    /// Adds bytes to those that the next [`Self::poll_send`] sends first.
    pub(crate) fn queue(&self, pieces: &[&[u8]]) {
        let unsent = &mut self.lock().unsent;
        pieces.iter().for_each(|piece| unsent.extend_from_slice(piece));
    }

    /// Ready once the client's end of the connection is closed or broken.
    ///
    /// Bytes that arrive meanwhile belong to an unread body or to the next request, and are stored. If they are too
    /// many, the end is behind unread bytes. Then the kernel is queried for it.
    pub(crate) fn poll_gone(&self, context: &mut Context<'_>) -> Poll<()> {
        let state = &mut *self.lock();
        while state.ahead.len() < AHEAD_BYTES_MAX {
            let mut buffer = [MaybeUninit::<u8>::uninit(); AHEAD_READ_BYTES];
            let left = AHEAD_READ_BYTES.min(AHEAD_BYTES_MAX - state.ahead.len());
            let mut buffer = ReadBuf::uninit(&mut buffer[..left]);
            let read = ready!(Pin::new(&mut state.stream).poll_read(context, &mut buffer));
            if read.is_err() || buffer.filled().is_empty() {
                return Poll::Ready(());
            }
            state.ahead.extend_from_slice(buffer.filled());
            state.pipelines |= state.body == UnreadBody::Read;
        }
        let timer = state.end_check.get_or_insert_with(|| Box::pin(tokio::time::sleep(END_CHECK_INTERVAL)));
        loop {
            ready!(timer.as_mut().poll(context));
            if presence::has_ended(tcp(&state.stream)) {
                return Poll::Ready(());
            }
            timer.as_mut().reset(Instant::now() + END_CHECK_INTERVAL);
        }
    }

    /// Cuts the connection once the client's host has acknowledged nothing for `lost_after`: the request in
    /// progress then finds that the client has disconnected. `timer` is any timer that is not in use meanwhile.
    pub(crate) async fn cut_when_lost(&self, mut timer: Pin<&mut Sleep>) -> Infallible {
        let within = self.lock().lost_after;
        if within.is_zero() {
            return std::future::pending().await;
        }
        let mut silence = presence::PeerSilence::default();
        loop {
            timer.as_mut().reset(Instant::now() + within / presence::CHECKS_PER_TIMEOUT);
            timer.as_mut().await;
            let state = self.lock();
            let socket = tcp(&state.stream);
            if silence.is_over(socket, within) {
                presence::cut(socket);
            }
        }
    }

    /// The client's address.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.lock().peer
    }

    /// Reads the head of the next request, as pingora will see it. `None` if the client sends none before `idle`
    /// ends.
    ///
    /// # Errors
    /// [`HeadError`], to be answered with [`Self::refuse`].
    pub(crate) async fn head(
        &self,
        bounds: &HeadBounds,
        mut idle: Pin<&mut Sleep>,
    ) -> Result<Option<BytesMut>, HeadError> {
        let mut bytes = std::mem::take(&mut self.lock().ahead);
        let (mut searched, mut may_be_empty) = (0, true);
        // An empty line does not begin a request: a client may send one behind its last request and then be idle.
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
        // Nearly always the head is complete at once, and no timer is needed.
        match head::read(&bytes, &mut searched, bounds.bytes) {
            Ok(Some(head)) => return Ok(Some(self.begin(&head, bytes))),
            Ok(None) => {}
            Err(error) => return Err(self.refused(error, bytes)),
        }
        let rest = async {
            loop {
                match self.read(&mut bytes).await {
                    Ok(1..) => {}
                    // The client disconnected in the middle of its head, so no response is possible.
                    Ok(0) | Err(_) => return Ok(None),
                }
                if let Some(head) = head::read(&bytes, &mut searched, bounds.bytes)? {
                    return Ok(Some(head));
                }
            }
        };
        match tokio::time::timeout(bounds.within, rest).await {
            Ok(Ok(head)) => Ok(head.map(|head| self.begin(&head, bytes))),
            Ok(Err(error)) => Err(self.refused(error, bytes)),
            Err(_elapsed) => Err(HeadError::TimedOut),
        }
    }

    /// Keeps the bytes of a head that belong to HTTP/2.
    fn refused(&self, error: HeadError, bytes: BytesMut) -> HeadError {
        if error == HeadError::Http2 {
            self.lock().ahead = bytes;
        }
        error
    }

    /// The socket, with the bytes that were read of it and belong to no request; `None` while the connection has
    /// another owner.
    pub(crate) fn into_socket(self) -> Option<(ClientSocket, BytesMut)> {
        let state = Arc::into_inner(self.0)?.into_inner().unwrap_or_else(PoisonError::into_inner);
        Some((state.stream, state.ahead))
    }

    /// Stores the bytes behind the head and returns the head.
    fn begin(&self, head: &head::RequestHead, mut ahead: BytesMut) -> BytesMut {
        // Copied, so that neither the head nor the body holds the other's memory.
        let mut bytes = BytesMut::from(&ahead[..head.bytes]);
        ahead.advance(head.bytes);
        head.mask_internal_fields(&mut bytes);
        let mut state = self.lock();
        state.is_overrun = false;
        match head.framing {
            RequestFraming::None => state.store_ahead(&ahead),
            RequestFraming::Length(_) | RequestFraming::Chunked => state.ahead = ahead,
        }
        state.end_check = None;
        state.body_bytes = 0;
        state.upgrades = head.upgrades;
        state.expects_continue = head.expects_continue;
        state.body = match head.framing {
            RequestFraming::None => UnreadBody::Read,
            RequestFraming::Length(length) => UnreadBody::Length(length),
            RequestFraming::Chunked => UnreadBody::Chunked(ChunkedReader::default()),
        };
        bytes
    }

    /// The names in the client's certificate; `None` without TLS.
    pub(crate) fn certificate_names(&self) -> Option<Arc<[String]>> {
        let state = self.lock();
        match &state.stream {
            Either::Left(_) => None,
            Either::Right(tls) => Some(tls.client_names()),
        }
    }

    /// The length of the body, if the client declared it.
    pub(crate) fn declared(&self) -> Option<u64> {
        match self.lock().body {
            UnreadBody::Length(length) => Some(length),
            UnreadBody::Chunked(_) => None,
            UnreadBody::Read => Some(0),
        }
    }

    /// Bytes of the request's body, after it was read.
    pub(crate) fn body_bytes(&self) -> u64 {
        self.lock().body_bytes
    }

    /// Whether the client waits for `100 Continue` before it sends the body.
    pub(crate) fn expects_continue(&self) -> bool {
        let state = self.lock();
        state.expects_continue && state.ahead.is_empty()
    }

    /// Whether the bytes behind the request cannot be the next one: a part of its body, more than the maximum, or
    /// another protocol.
    pub(crate) fn is_unread(&self) -> bool {
        let state = self.lock();
        state.body != UnreadBody::Read || state.is_overrun || state.upgrades
    }

    /// Whether the client sent more than this request, or may be about to.
    pub(crate) fn is_ahead(&self) -> bool {
        let state = self.lock();
        state.body != UnreadBody::Read || state.is_overrun || state.pipelines || !state.ahead.is_empty()
    }

    /// Reads the whole body, once.
    ///
    /// # Errors
    /// [`BodyError`]. The connection is then unusable.
    ///
    /// # Cancel safety
    /// After a cancelled call the connection is unusable, and [`Self::is_unread`] returns true.
    pub(crate) async fn body(
        &self,
        limit_bytes: usize,
        budget: &mut BudgetShare<'_>,
    ) -> Result<Bytes, BodyError> {
        let (framing, ahead) = {
            let mut state = self.lock();
            (state.body, std::mem::take(&mut state.ahead))
        };
        match framing {
            UnreadBody::Read => {
                self.lock().store_ahead(&ahead);
                Ok(Bytes::new())
            }
            UnreadBody::Length(length) => self.sized(length, ahead, limit_bytes, budget).await,
            UnreadBody::Chunked(chunks) => self.chunks(chunks, ahead, limit_bytes, budget).await,
        }
    }

    async fn sized(
        &self,
        length: u64,
        mut body: BytesMut,
        limit_bytes: usize,
        budget: &mut BudgetShare<'_>,
    ) -> Result<Bytes, BodyError> {
        let length = usize::try_from(length).ok().filter(|length| *length <= limit_bytes);
        let length = length.ok_or(BodyError::TooLarge)?;
        budget.take(body.len().min(length))?;
        if body.len() < length {
            // The buffer that came with the head belongs to the head, so the body gets its own.
            let mut own = BytesMut::with_capacity(length.min(BODY_CAPACITY_INITIAL.max(body.len())));
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
            budget.take(body.len() - before)?;
        }
        self.ended(&body[length..], length);
        body.truncate(length);
        Ok(body.freeze())
    }

    async fn chunks(
        &self,
        mut chunks: ChunkedReader,
        mut input: BytesMut,
        limit_bytes: usize,
        budget: &mut BudgetShare<'_>,
    ) -> Result<Bytes, BodyError> {
        let mut body = BytesMut::new();
        loop {
            let before = body.len();
            let done = chunks.decode(&mut input, &mut body, limit_bytes).map_err(|error| match error {
                ChunkError::Malformed => BodyError::Malformed,
                ChunkError::TooLarge => BodyError::TooLarge,
            })?;
            budget.take(body.len() - before)?;
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
        let mut state = self.lock();
        state.body_bytes = body_bytes as u64;
        state.body = UnreadBody::Read;
        state.store_ahead(behind);
    }

    /// Sends the error response of a refused request, and closes.
    pub(crate) async fn refuse(&self, error: HeadError) {
        let answer = error.answer();
        let refusal = async {
            let mut at = 0;
            while at < answer.len() {
                at += poll_fn(|context| self.poll_send(context, &[IoSlice::new(&answer[at..])])).await?;
            }
            poll_fn(|context| self.poll_send(context, &[])).await
        };
        if let Ok(Ok(_)) = tokio::time::timeout(LINGER, refusal).await {
            self.linger().await;
        }
    }

    /// Closes the sending side after the last response.
    pub(crate) async fn close(&self) {
        let closed = poll_fn(|context| self.poll(context, |stream, context| stream.poll_shutdown(context)));
        // An error means that the connection is closed already.
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, closed).await;
    }

    /// Closes the sending side, and gives the client time to read the response.
    pub(crate) async fn linger(&self) {
        let rest = async {
            poll_fn(|context| self.poll(context, |stream, context| stream.poll_shutdown(context))).await?;
            let mut discarded = 0;
            while discarded < LINGER_BYTES {
                match self.read(&mut BytesMut::new()).await? {
                    0 => break,
                    bytes => discarded += bytes,
                }
            }
            io::Result::Ok(())
        };
        // The connection is dropped next, whatever the result.
        let _ = tokio::time::timeout(LINGER, rest).await;
    }

    /// Reads the available bytes, at least one; 0 at the end. No buffer is held during the wait.
    async fn read(&self, bytes: &mut BytesMut) -> io::Result<usize> {
        poll_fn(|context| {
            let mut buffer = [MaybeUninit::<u8>::uninit(); READ_BYTES];
            let mut buffer = ReadBuf::uninit(&mut buffer);
            ready!(self.poll(context, |stream, context| stream.poll_read(context, &mut buffer)))?;
            bytes.extend_from_slice(buffer.filled());
            Poll::Ready(Ok(buffer.filled().len()))
        })
        .await
    }

    /// Reads at most `most` bytes into the free capacity.
    async fn read_into(&self, bytes: &mut BytesMut, most: usize) -> Result<(), BodyError> {
        let read = poll_fn(|context| {
            self.poll(context, |stream, context| {
                let mut buffer = (&mut *bytes).limit(most);
                std::pin::pin!(stream.get_mut().read_buf(&mut buffer)).poll(context)
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
        step: impl FnOnce(Pin<&mut ClientSocket>, &mut Context<'_>) -> T,
    ) -> T {
        step(Pin::new(&mut self.lock().stream), context)
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsyncRead for ClientConnection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll(context, |stream, context| stream.poll_read(context, buffer))
    }
}

impl AsyncWrite for ClientConnection {
    /// Buffers heads, which are small.
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.lock().unsent.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

// pingora's traits without effect: the router closes the connection and knows the client.

#[async_trait]
impl Shutdown for ClientConnection {
    async fn shutdown(&mut self) {}
}

impl UniqueID for ClientConnection {
    fn id(&self) -> UniqueIDType {
        0
    }
}

impl Ssl for ClientConnection {}

impl GetTimingDigest for ClientConnection {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        Vec::new()
    }
}

impl GetProxyDigest for ClientConnection {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        None
    }
}

impl GetSocketDigest for ClientConnection {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        None
    }
}

impl Peek for ClientConnection {}
