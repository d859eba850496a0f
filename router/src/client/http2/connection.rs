//! One HTTP/2 connection: its streams, and the reasons for which it ends.
//!
//! ```text
//! handshake ─▶ open ── idle, drain, close_after ─▶ draining (GOAWAY, streams in flight finish) ─▶ ended
//!                 │    or too many requests                                                         ▲
//!                 └─── flood, slow head ─────────▶ cut (GOAWAY, every stream ends) ─────────────────┘
//! ```
//!
//! It is driven by one task ([`Http2Connection::next`]). Each stream is a request of its own, in a task of its own.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::Reason;
use h2::server::{Builder, Connection, SendResponse};
use tokio::time::{Instant, Sleep};

use super::Http2Bounds;
use super::exchange::Http2Exchange;
use super::head;
use super::socket::{MeteredSocket, SharedConnection};
use crate::client::http::ClientSocket;

/// Time for a client to read the last frames, and to acknowledge that the connection ends.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Window of one stream's body. A larger one lets a client send a long prompt without waiting for each round trip.
const STREAM_WINDOW_BYTES: usize = 256 << 10;
/// Window of all bodies of a connection. The router takes bytes out of it as they arrive, or refuses their request, so
/// only bytes in between occupy memory beyond the body budget.
const CONNECTION_WINDOW_BYTES: u32 = 1 << 20;
/// Bytes of a response that wait for the client's windows or its socket: two frames of the usual size.
const SEND_BUFFER_BYTES: usize = 32 << 10;
/// Streams that were reset before their request was accepted: those of one read of the socket.
const UNACCEPTED_RESETS_MAX: usize = 100;
/// Streams that the router reset, and how long it knows them: frames that cross the reset are then ignored. Each takes
/// a few hundred bytes.
const RESET_STREAMS_MAX: usize = 1_000;
const RESET_STREAM_TIME: Duration = Duration::from_secs(5);
/// Requests of one connection. `h2` has counters that are never reset, so a connection is drained before one of them
/// can end it with all its streams.
const REQUESTS_MAX: usize = 10_000;
/// Frames on streams that the router no longer knows, in a connection's life. A refused upload may have sent its whole
/// window, in frames of the usual size, so no number of refusals ends a connection.
const ERROR_RESETS_MAX: usize = REQUESTS_MAX * (STREAM_WINDOW_BYTES / USUAL_FRAME_BYTES);
const USUAL_FRAME_BYTES: usize = 16 << 10;

/// Why the router ended a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Http2End {
    /// The client or the router ended it in order, or the client is gone.
    Closed,
    /// Too many frames that only make work.
    Flood,
    /// A head did not arrive in time.
    SlowHead,
    /// The client broke the protocol.
    Protocol,
}

/// A client's connection.
pub(crate) struct Http2Connection {
    h2: Connection<MeteredSocket, Bytes>,
    shared: Arc<SharedConnection>,
    bounds: Http2Bounds,
    /// Since when there is no request.
    quiet: Option<Instant>,
    phase: ConnectionPhase,
    /// Fires when the phase or the connection must end.
    timer: Pin<Box<Sleep>>,
    end: Http2End,
    /// Requests so far.
    requests: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionPhase {
    Open,
    /// No new requests, since this time.
    Draining(Instant),
    /// Cut at this time, or once the last frames are written.
    Cut(Instant),
}

/// A new stream.
pub(crate) enum NewStream {
    Request(Box<Http2Exchange>),
    /// Its head was refused, and it is answered.
    Refused,
}

impl Http2Connection {
    /// Begins a connection. `ahead` is what was already read of the socket. `None` if the client's preface does not
    /// arrive in time.
    pub(crate) async fn begin(
        stream: ClientSocket,
        ahead: BytesMut,
        peer: std::net::SocketAddr,
        bounds: Http2Bounds,
    ) -> Option<Self> {
        let shared = SharedConnection::new(stream, ahead, peer, bounds.streams);
        let window = STREAM_WINDOW_BYTES.min(bounds.body_bytes);
        let handshake = Builder::new()
            .max_concurrent_streams(bounds.streams)
            .max_header_list_size(head::list_bytes_max(bounds.head_bytes))
            .initial_window_size(u32::try_from(window).unwrap_or(u32::MAX))
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_send_buffer_size(SEND_BUFFER_BYTES)
            .max_concurrent_reset_streams(RESET_STREAMS_MAX)
            .reset_stream_duration(RESET_STREAM_TIME)
            .max_pending_accept_reset_streams(UNACCEPTED_RESETS_MAX)
            .max_local_error_reset_streams(Some(ERROR_RESETS_MAX))
            .handshake(MeteredSocket(Arc::clone(&shared)));
        let h2 = tokio::time::timeout(bounds.within, handshake).await.ok()?.ok()?;
        Some(Self {
            h2,
            shared,
            bounds,
            quiet: None,
            phase: ConnectionPhase::Open,
            timer: Box::pin(tokio::time::sleep(Duration::ZERO)),
            end: Http2End::Closed,
            requests: 0,
        })
    }

    /// The next stream; `None` once the connection has ended. `requests` are in flight. Frames move only while this is
    /// polled.
    ///
    /// # Cancel safety
    /// A cancelled call loses nothing.
    pub(crate) async fn next(&mut self, requests: usize) -> Option<NewStream> {
        poll_fn(|context| self.poll_next(context, requests)).await
    }

    /// Takes no further requests; the ones in flight finish.
    pub(crate) fn close(&self) {
        self.shared.close();
    }

    /// Cuts the connection once the client's host has acknowledged nothing for `within`. Never returns.
    pub(crate) fn cut_when_lost(
        &self,
        within: Duration,
    ) -> impl Future<Output = std::convert::Infallible> + use<> {
        let shared = Arc::clone(&self.shared);
        async move { shared.cut_when_lost(within).await }
    }

    /// Ends all streams and closes the connection.
    pub(crate) async fn finish(self) -> Http2End {
        let Self { h2, shared, end, .. } = self;
        drop(h2);
        shared.linger().await;
        end
    }

    fn poll_next(&mut self, context: &mut Context<'_>, requests: usize) -> Poll<Option<NewStream>> {
        match requests {
            0 => drop(self.quiet.get_or_insert_with(Instant::now)),
            _ => self.quiet = None,
        }
        loop {
            match self.h2.poll_accept(context) {
                Poll::Ready(Some(Ok((request, respond)))) => {
                    return Poll::Ready(Some(self.accept(request, respond)));
                }
                Poll::Ready(Some(Err(error))) => {
                    if self.end == Http2End::Closed && error.is_go_away() && error.is_library() {
                        self.end = match error.reason() {
                            Some(Reason::ENHANCE_YOUR_CALM) => Http2End::Flood,
                            _ => Http2End::Protocol,
                        };
                    }
                    return Poll::Ready(None);
                }
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => {}
            }
            if self.phase == ConnectionPhase::Open && self.shared.is_closing() {
                self.drain();
                continue;
            }
            if self.shared.flood().is_some() && self.cut(Http2End::Flood) {
                continue;
            }
            match self.poll_due(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Due::Drain) => self.drain(),
                Poll::Ready(Due::SlowHead) => {
                    self.cut(Http2End::SlowHead);
                }
                Poll::Ready(Due::End) => return Poll::Ready(None),
            }
        }
    }

    fn accept(
        &mut self,
        request: hyper::Request<h2::RecvStream>,
        mut respond: SendResponse<Bytes>,
    ) -> NewStream {
        self.requests += 1;
        if self.requests == REQUESTS_MAX {
            self.close();
        }
        let (mut parts, body) = request.into_parts();
        match head::check(&mut parts, self.bounds.head_bytes) {
            Ok(()) => {
                let connection = Arc::clone(&self.shared);
                NewStream::Request(Box::new(Http2Exchange::new(connection, parts, body, respond)))
            }
            Err(error) => {
                Http2Exchange::refuse(error, &mut respond);
                NewStream::Refused
            }
        }
    }

    /// Announces the end. `h2` refuses later streams, and ends the connection behind the last one.
    fn drain(&mut self) {
        self.phase = ConnectionPhase::Draining(Instant::now());
        self.h2.graceful_shutdown();
    }

    /// Ends the connection and all its streams; false if it is already cut.
    fn cut(&mut self, end: Http2End) -> bool {
        if matches!(self.phase, ConnectionPhase::Cut(_)) {
            return false;
        }
        self.phase = ConnectionPhase::Cut(Instant::now() + CLOSE_TIMEOUT);
        self.end = end;
        self.h2.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
        true
    }

    /// Ready once something is due.
    fn poll_due(&mut self, context: &mut Context<'_>) -> Poll<Due> {
        loop {
            let block = self.shared.block_since().map(Instant::from_std);
            let timing =
                Timing { phase: self.phase, quiet: self.quiet, block, has_streams: self.h2.has_streams() };
            let Some((at, due)) = timing.next(&self.bounds) else { return Poll::Pending };
            if at <= Instant::now() {
                return Poll::Ready(due);
            }
            if self.timer.deadline() != at {
                self.timer.as_mut().reset(at);
            }
            if self.timer.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
        }
    }
}

/// What happens to a connection when its time is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    Drain,
    SlowHead,
    End,
}

/// The facts that decide how long a connection may stay.
#[derive(Clone, Copy, Debug)]
struct Timing {
    phase: ConnectionPhase,
    quiet: Option<Instant>,
    block: Option<Instant>,
    /// Streams are open, or the ends of their responses wait for the client's windows.
    has_streams: bool,
}

impl Timing {
    /// The next due time, and what is due.
    fn next(self, bounds: &Http2Bounds) -> Option<(Instant, Due)> {
        let slow = self.block.map(|since| (since + bounds.within, Due::SlowHead));
        let quiet = match self.phase {
            ConnectionPhase::Cut(at) => return Some((at, Due::End)),
            ConnectionPhase::Open => self.quiet.map(|since| (since + bounds.idle, Due::Drain)),
            ConnectionPhase::Draining(begun) => {
                // The end of a response may still wait for the client.
                let rest = if self.has_streams { bounds.stall.max(CLOSE_TIMEOUT) } else { CLOSE_TIMEOUT };
                self.quiet.map(|since| (since.max(begun) + rest, Due::End))
            }
        };
        slow.into_iter().chain(quiet).min_by_key(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Http2Bounds = Http2Bounds {
        streams: 8,
        head_bytes: 1024,
        body_bytes: 1024,
        within: Duration::from_secs(10),
        idle: Duration::from_secs(75),
        stall: Duration::from_secs(60),
    };

    #[tokio::test(start_paused = true)]
    async fn a_connection_ends_by_what_comes_first() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let open = Timing { phase: ConnectionPhase::Open, quiet: None, block: None, has_streams: true };
        let draining = Timing { phase: ConnectionPhase::Draining(at(5)), ..open };
        for (timing, next) in [
            (open, None),
            (Timing { quiet: Some(now), ..open }, Some((at(75), Due::Drain))),
            (Timing { block: Some(at(3)), ..open }, Some((at(13), Due::SlowHead))),
            (Timing { quiet: Some(now), block: Some(at(70)), ..open }, Some((at(75), Due::Drain))),
            (draining, None),
            (Timing { quiet: Some(now), ..draining }, Some((at(65), Due::End))),
            (Timing { quiet: Some(at(9)), has_streams: false, ..draining }, Some((at(10), Due::End))),
            (Timing { quiet: Some(now), has_streams: false, ..draining }, Some((at(6), Due::End))),
            (Timing { block: Some(now), ..draining }, Some((at(10), Due::SlowHead))),
            (
                Timing { phase: ConnectionPhase::Cut(at(1)), block: Some(now), ..open },
                Some((at(1), Due::End)),
            ),
        ] {
            assert_eq!(timing.next(&BOUNDS), next, "{timing:?}");
        }
    }
}
