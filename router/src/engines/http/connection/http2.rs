//! HTTP/2 to an engine: connections that several requests share, with one stream per request.
//!
//! ```text
//! New ─ begin ─▶ Head ─ head ─▶ Body ─ END_STREAM ─▶ Done
//!                 └──────────────┴─ error, reset ──▶ Done
//! ```
//!
//! The `h2` crate parses frames and counts windows. A task per connection drives it.
//!
//! Invariants:
//! - Dropping a stream before its end resets it (`CANCEL`). The other streams of its connection go on.
//! - No stream waits for another one: [`MultiplexedConnection::open`] returns `None` on a full connection.
//! - A reply that is not read holds its own window only. The connection's window is the sum of all of them.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use h2::client::{Connection, ResponseFuture, SendRequest};
use h2::{Ping, PingPong, Reason, RecvStream};
use hyper::header::CONTENT_LENGTH;
use hyper::http::uri::Scheme;
use hyper::{Response, StatusCode};

use super::super::activity::EngineActivity;
use super::super::connection_error::ConnectionError;
use super::super::head::EngineRequestHead;
use super::super::reply_head::{self, ReplyHead, ReplyHeadError};
use super::transport::EngineTransport;

/// Maximum streams of one connection. Most servers allow as many; further requests open another connection.
pub(super) const STREAMS_MAX: usize = 100;
/// Received bytes of one reply that nothing has read: as many as before the first window update of any client.
const STREAM_WINDOW: u32 = 64 << 10;
/// Requests of one connection. `h2` has counters that are never reset, such as those of errors and of empty frames, so
/// the next request opens another connection before one of them can end this one with all its streams.
const REQUESTS_MAX: usize = 10_000;
/// Small frames take more memory than windows count: `h2` counts at least 256 bytes for each. A frame of 15 bytes takes
/// 16 times its size in the window, so events of that size never exhaust it.
const SMALL_FRAMES_BYTES: usize = 16 * STREAMS_MAX * STREAM_WINDOW as usize;
/// Maximum 1xx heads before the head of a reply.
const INFORMATIONAL_MAX: u8 = 16;
/// One piece of a reply has about so many bytes, as one read of HTTP/1.1 has.
const PIECE_BYTES: usize = 16 << 10;
/// Streams that were reset, and how long they are remembered: frames that cross the reset are then ignored. Without an
/// entry each is an error, and `h2` closes the connection after [`STREAM_ERRORS_MAX`].
const RESET_STREAMS_MAX: usize = 10_000;
const RESET_STREAM_TIME: Duration = Duration::from_secs(5);
const STREAM_ERRORS_MAX: usize = 100_000;

/// A connection that several requests share. It closes when the last handle and stream are dropped.
#[derive(Clone, Debug)]
pub(in crate::engines::http) struct MultiplexedConnection {
    sender: SendRequest<Bytes>,
    state: Arc<MultiplexState>,
}

#[derive(Debug)]
struct MultiplexState {
    scheme: Scheme,
    /// Streams in use.
    streams: AtomicUsize,
    /// Streams so far.
    opened: AtomicUsize,
    /// When the first stream of those in use was opened. `None` until the connection has been idle once.
    busy: Mutex<Option<BusySince>>,
    /// Heads and pieces that have arrived.
    received: AtomicU64,
    activity: Arc<EngineActivity>,
}

/// The end of a connection's idle time.
#[derive(Clone, Copy, Debug)]
struct BusySince {
    at: Instant,
    /// [`MultiplexState::received`] at that time.
    received: u64,
}

/// The stream of one request.
#[derive(Debug)]
pub(super) struct Http2Stream {
    connection: MultiplexedConnection,
    phase: StreamPhase,
    status: StatusCode,
    /// Bytes that are left of the body, if its head contains a length.
    left: Option<u64>,
    informational: u8,
}

#[derive(Debug)]
enum StreamPhase {
    New,
    Head(ResponseFuture),
    Body(RecvStream),
    Done,
}

impl MultiplexedConnection {
    /// Opens a connection over a byte stream, and waits for the engine's settings: they contain the stream limit, and
    /// show that the engine speaks HTTP/2.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`]: the engine does not speak HTTP/2.
    pub(super) async fn start(
        transport: EngineTransport,
        scheme: Scheme,
        lost_after: Duration,
        activity: &Arc<EngineActivity>,
    ) -> io::Result<Self> {
        let handshake = builder().handshake::<_, Bytes>(transport).await;
        let (sender, mut connection) = handshake.map_err(|_| no_http2())?;
        poll_fn(|context| match Pin::new(&mut connection).poll(context) {
            Poll::Ready(_) => Poll::Ready(Err(no_http2())),
            // Zero until the settings have arrived.
            Poll::Pending if sender.current_max_send_streams() > 0 => Poll::Ready(Ok(())),
            Poll::Pending => Poll::Pending,
        })
        .await?;
        activity.add_connection();
        let state = Arc::new(MultiplexState {
            scheme,
            streams: AtomicUsize::new(0),
            opened: AtomicUsize::new(0),
            busy: Mutex::default(),
            received: AtomicU64::new(0),
            activity: Arc::clone(activity),
        });
        let open = OpenConnection(Arc::clone(&state));
        tokio::spawn(async move { drive(connection, &open.0, lost_after).await });
        Ok(Self { sender, state })
    }

    /// A stream for one request; `None` if the engine allows no further one.
    pub(super) fn open(&self) -> Option<Http2Stream> {
        let limit = self.sender.current_max_send_streams().min(STREAMS_MAX);
        let one_more = |now: usize| (now < limit).then_some(now + 1);
        let in_use = self.state.streams.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more).ok()?;
        let opened = self.state.opened.fetch_add(1, Ordering::Relaxed);
        if in_use == 0 && opened > 0 {
            let received = self.state.received.load(Ordering::Relaxed);
            let mut busy = self.state.busy.lock().unwrap_or_else(PoisonError::into_inner);
            *busy = Some(BusySince { at: Instant::now(), received });
        }
        Some(Http2Stream {
            connection: self.clone(),
            phase: StreamPhase::New,
            status: StatusCode::OK,
            left: None,
            informational: 0,
        })
    }

    /// Whether requests can still begin: the connection is open, the engine is not closing it, and it has not served
    /// too many.
    pub(super) fn is_usable(&mut self) -> bool {
        let is_retired = self.state.opened.load(Ordering::Relaxed) >= REQUESTS_MAX;
        !is_retired
            && !matches!(self.sender.poll_ready(&mut Context::from_waker(Waker::noop())), Poll::Ready(Err(_)))
    }

    pub(super) fn has_streams(&self) -> bool {
        self.state.streams.load(Ordering::SeqCst) > 0
    }

    pub(super) fn activity(&self) -> &Arc<EngineActivity> {
        &self.state.activity
    }
}

fn builder() -> h2::client::Builder {
    let mut builder = h2::client::Builder::new();
    builder
        .enable_push(false)
        .initial_max_send_streams(0)
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(STREAM_WINDOW * STREAMS_MAX as u32)
        .data_frame_budget(SMALL_FRAMES_BYTES)
        .max_header_list_size(reply_head::BYTES_MAX as u32)
        .max_concurrent_reset_streams(RESET_STREAMS_MAX)
        .reset_stream_duration(RESET_STREAM_TIME)
        .max_local_error_reset_streams(Some(STREAM_ERRORS_MAX));
    builder
}

fn no_http2() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "the engine sent no HTTP/2 settings")
}

/// Counts a connection until its task ends.
struct OpenConnection(Arc<MultiplexState>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.activity.remove_connection();
    }
}

/// Drives a connection to its end. All streams end with it.
///
/// An engine that sends nothing for half of `lost_after` while it has requests gets a `PING`, and as long to answer it.
async fn drive(
    mut connection: Connection<EngineTransport, Bytes>,
    state: &MultiplexState,
    lost_after: Duration,
) {
    let ping = connection.ping_pong().filter(|_| !lost_after.is_zero());
    let Some(mut ping) = ping else {
        let _ = connection.await;
        return;
    };
    tokio::select! {
        biased;
        _ = &mut connection => {}
        () = silence(&mut ping, state, lost_after / 2) => {}
    }
}

/// Returns when the engine answers no `PING`.
async fn silence(ping: &mut PingPong, state: &MultiplexState, within: Duration) {
    let received = || state.received.load(Ordering::Relaxed);
    loop {
        let before = received();
        tokio::time::sleep(within).await;
        if state.streams.load(Ordering::Relaxed) == 0 || received() != before {
            continue;
        }
        if ping.send_ping(Ping::opaque()).is_err() {
            return;
        }
        loop {
            let before = received();
            match tokio::time::timeout(within, poll_fn(|context| ping.poll_pong(context))).await {
                Ok(Ok(_)) => break,
                Err(_elapsed) if received() != before => {}
                Ok(Err(_)) | Err(_) => return,
            }
        }
    }
}

impl Http2Stream {
    pub(super) fn connection(&self) -> &MultiplexedConnection {
        &self.connection
    }

    /// Whether the engine may have closed the connection before it got the request: the connection was idle less than
    /// `within` ago, and nothing was received since.
    pub(super) fn may_have_been_closed(&self, within: Duration) -> bool {
        let state = &self.connection.state;
        let busy = *state.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let received = state.received.load(Ordering::Relaxed);
        busy.is_some_and(|busy| busy.at.elapsed() < within && busy.received == received)
    }

    /// Begins a request. Pieces of its body are not copied, and are sent as the engine's windows allow.
    pub(super) fn begin(
        &mut self,
        head: &EngineRequestHead<'_>,
        body: &[Bytes],
    ) -> Result<(), ConnectionError> {
        let head = head.http2(self.connection.state.scheme.clone())?;
        let last = body.iter().rposition(|piece| !piece.is_empty());
        // Whatever the error is, nothing was sent.
        let begun = self.connection.sender.send_request(head, last.is_none());
        let (response, mut sending) = begun.map_err(|_| ConnectionError::GoingAway)?;
        for (at, piece) in body.iter().enumerate().filter(|(_, piece)| !piece.is_empty()) {
            // The stream was reset already: the wait for the head returns the error.
            if sending.send_data(piece.clone(), Some(at) == last).is_err() {
                break;
            }
        }
        self.phase = StreamPhase::Head(response);
        Ok(())
    }

    /// Waits for the head of the reply. `ends`: the request ends here if the head has not arrived.
    pub(super) fn poll_head(
        &mut self,
        context: &mut Context<'_>,
        ends: bool,
    ) -> Poll<Result<ReplyHead, ConnectionError>> {
        let StreamPhase::Head(response) = &mut self.phase else {
            return Poll::Ready(Err(ConnectionError::Unanswered));
        };
        while let Poll::Ready(Some(Ok(_))) = response.poll_informational(context) {
            self.informational += 1;
            if self.informational > INFORMATIONAL_MAX {
                return Poll::Ready(Err(self.end(ConnectionError::Malformed("too many 1xx heads"))));
            }
        }
        match Pin::new(response).poll(context) {
            Poll::Ready(Ok(response)) => Poll::Ready(self.head(response)),
            Poll::Ready(Err(error)) => Poll::Ready(Err(self.end(before_head(&error)))),
            Poll::Pending if ends => Poll::Ready(Err(self.end(ConnectionError::Ended))),
            Poll::Pending => Poll::Pending,
        }
    }

    fn head(&mut self, response: Response<RecvStream>) -> Result<ReplyHead, ConnectionError> {
        self.connection.state.received.fetch_add(1, Ordering::Relaxed);
        let (parts, body) = response.into_parts();
        let head = reply_head::of_fields(parts.status, &parts.headers)
            .map_err(|ReplyHeadError(what)| self.end(ConnectionError::Malformed(what)))?;
        let length = parts.headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok());
        self.left = length.and_then(|length| length.parse().ok());
        self.status = parts.status;
        self.phase = if body.is_end_stream() { StreamPhase::Done } else { StreamPhase::Body(body) };
        Ok(head)
    }

    /// The next piece of the body: the bytes that have arrived; `None` at its end. `ends`: the request ends here if
    /// nothing has arrived.
    pub(super) fn poll_piece(
        &mut self,
        context: &mut Context<'_>,
        ends: bool,
    ) -> Poll<Option<Result<Bytes, ConnectionError>>> {
        let StreamPhase::Body(body) = &mut self.phase else { return Poll::Ready(None) };
        // A copy, because a frame is a part of a larger buffer.
        let mut piece = BytesMut::new();
        while piece.len() < PIECE_BYTES {
            match body.poll_data(context) {
                Poll::Ready(Some(Ok(data))) => {
                    // An error means that the stream has ended, which the next poll returns.
                    let _ = body.flow_control().release_capacity(data.len());
                    self.left = self.left.map(|left| left.saturating_sub(data.len() as u64));
                    piece.extend_from_slice(&data);
                }
                // It is returned again by the next poll.
                Poll::Ready(Some(Err(_))) | Poll::Pending if !piece.is_empty() => break,
                Poll::Ready(Some(Err(error))) => {
                    let error = self.after_head(&error);
                    self.phase = StreamPhase::Done;
                    return Poll::Ready(error.map(Err));
                }
                Poll::Pending if ends => {
                    return Poll::Ready(Some(Err(self.end(ConnectionError::Ended))));
                }
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => {
                    self.phase = StreamPhase::Done;
                    break;
                }
            }
        }
        if piece.is_empty() {
            return Poll::Ready(None);
        }
        self.connection.state.received.fetch_add(1, Ordering::Relaxed);
        Poll::Ready(Some(Ok(piece.freeze())))
    }

    /// Whether the whole reply was read.
    pub(super) fn is_ended(&self) -> bool {
        matches!(self.phase, StreamPhase::Done)
    }

    /// Ends the stream. An engine that still works on it gets a reset.
    fn end(&mut self, error: ConnectionError) -> ConnectionError {
        self.phase = StreamPhase::Done;
        error
    }

    /// What an error in the body means; `None`: the reply is complete. After a complete reply an engine resets the
    /// stream with `NO_ERROR` if it needs no more of the request (RFC 9113, section 8.1). `h2` then does not return
    /// the end, so the length shows it, or the status of a refusal.
    fn after_head(&self, error: &h2::Error) -> Option<ConnectionError> {
        let is_refusal = self.status.is_client_error() || self.status.is_server_error();
        match error.reason() {
            Some(Reason::NO_ERROR) if error.is_reset() && (self.left == Some(0) || is_refusal) => None,
            Some(reason) if error.is_reset() && error.is_remote() => Some(ConnectionError::Reset(reason)),
            Some(reason) if !error.is_remote() => Some(ConnectionError::Frames(reason)),
            Some(_) | None => Some(ConnectionError::Ended),
        }
    }
}

/// What an error before the head means: RFC 9113, sections 6.8 and 8.7.
fn before_head(error: &h2::Error) -> ConnectionError {
    match error.reason() {
        // `h2` fails only streams above the last one that the engine processes.
        Some(_) if error.is_go_away() && error.is_remote() => ConnectionError::GoingAway,
        Some(Reason::REFUSED_STREAM) if error.is_remote() => ConnectionError::Refused,
        Some(reason) if error.is_remote() => ConnectionError::Reset(reason),
        Some(reason) => ConnectionError::Frames(reason),
        None => ConnectionError::Unanswered,
    }
}

impl Drop for Http2Stream {
    fn drop(&mut self) {
        // The reset is queued before another request can take the place.
        self.phase = StreamPhase::Done;
        self.connection.state.streams.fetch_sub(1, Ordering::SeqCst);
    }
}
