//! The connection of one request to an engine: a connection of HTTP/1.1, or a stream of HTTP/2. An abandoned
//! connection is cut, or half-closed and read to the end. An abandoned stream is reset.

mod http2;
mod pool;
mod transport;

use std::future::poll_fn;
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::http::uri::Scheme;
use socket2::SockRef;
use tokio::net::TcpStream;

use super::activity::EngineActivity;
use super::connection_error::ConnectionError;
use super::head::EngineRequestHead;
use super::http1::Http1;
use super::reply_head::ReplyHead;
use crate::config::EngineHttp2;
use crate::engines::presence;
use crate::tls::client::EngineTlsConnector;
use http2::{Http2Stream, MultiplexedConnection};
pub(super) use pool::IdleConnections;
use transport::EngineTransport;

/// A handle that abandons a connection while its reply is awaited. It has no descriptor: its commands are carried
/// out at the next poll of the reply.
#[derive(Debug, Default)]
pub(crate) struct ConnectionHandle {
    /// The request's work is no longer needed.
    abandoned: AtomicBool,
    /// Nothing more will be sent.
    half_closed: AtomicBool,
}

/// A connection. It is closed when dropped.
#[derive(Debug)]
pub(crate) struct Connection {
    http: HttpVersion,
    handle: Arc<ConnectionHandle>,
    half_closed: bool,
    idle_since: Instant,
    activity: Arc<EngineActivity>,
    /// Received bytes are a sign of life: the request is work, or a liveness probe.
    shows_life: bool,
    /// The last read had to wait.
    waits: bool,
}

#[derive(Debug)]
enum HttpVersion {
    /// Boxed once per connection: a connection is moved several times per request.
    One(Box<Http1<EngineTransport>>),
    Two(Box<Http2Stream>),
}

/// What a connection is for. A command shares no HTTP/2 connection with requests: their bodies may have used up the
/// engine's window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Work,
    Command,
}

/// How to connect.
#[derive(Clone, Copy)]
pub(super) struct DialTerms<'a> {
    pub tls: Option<&'a EngineTlsConnector>,
    pub http2: EngineHttp2,
    /// See [`super::ConnectionTerms::lost_after`].
    pub lost_after: Duration,
}

impl ConnectionHandle {
    /// Closes the sending side. The reply can still be read, and must be awaited. Stock vLLM aborts a request at a
    /// half-close just as at a close, and a reply that crosses it still arrives. A stream of HTTP/2 is reset, and only
    /// a reply that has arrived can be read.
    pub(crate) fn half_close(&self) {
        self.abandon();
        self.half_closed.store(true, Ordering::SeqCst);
    }

    /// Whether the sending side is closed, or will be at the next poll.
    pub(crate) fn is_half_closed(&self) -> bool {
        self.half_closed.load(Ordering::SeqCst)
    }

    /// The request must not be sent again, however its connection ends. The engine gets no message.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::SeqCst)
    }
}

impl Connection {
    /// Connects to the first address that accepts.
    ///
    /// # Errors
    /// [`std::io::ErrorKind::Unsupported`]: the engine does not speak HTTP/2, which is required.
    pub(super) async fn dial(
        addresses: &[SocketAddr],
        terms: DialTerms<'_>,
        activity: &Arc<EngineActivity>,
    ) -> std::io::Result<Self> {
        let stream = TcpStream::connect(addresses).await?;
        stream.set_nodelay(true)?;
        presence::set_lost_timeout(&stream, terms.lost_after);
        let (stream, is_http2) = match terms.tls {
            None => (EngineTransport::Left(stream), terms.http2 == EngineHttp2::On),
            Some(name) => {
                let (stream, is_http2) = name.connect(stream, terms.http2).await?;
                (EngineTransport::Right(Box::new(stream)), is_http2)
            }
        };
        if is_http2 {
            let scheme = if terms.tls.is_some() { Scheme::HTTPS } else { Scheme::HTTP };
            let shared = MultiplexedConnection::start(stream, scheme, terms.lost_after, activity).await?;
            let stream = shared.open().ok_or(std::io::ErrorKind::ConnectionAborted)?;
            return Ok(Self::over_stream(stream));
        }
        activity.add_connection();
        Ok(Self::new(HttpVersion::One(Box::new(Http1::new(stream))), Arc::clone(activity)))
    }

    fn over_stream(stream: Http2Stream) -> Self {
        let activity = Arc::clone(stream.connection().activity());
        Self::new(HttpVersion::Two(Box::new(stream)), activity)
    }

    fn new(http: HttpVersion, activity: Arc<EngineActivity>) -> Self {
        Self {
            http,
            handle: Arc::default(),
            half_closed: false,
            idle_since: Instant::now(),
            activity,
            shows_life: false,
            waits: false,
        }
    }

    pub(crate) fn handle(&self) -> Arc<ConnectionHandle> {
        Arc::clone(&self.handle)
    }

    /// The shared connection of HTTP/2.
    fn shared(&self) -> Option<MultiplexedConnection> {
        match &self.http {
            HttpVersion::One(_) => None,
            HttpVersion::Two(stream) => Some(stream.connection().clone()),
        }
    }

    pub(super) fn is_http2(&self) -> bool {
        matches!(self.http, HttpVersion::Two(_))
    }

    /// Stores a request, its head and the pieces of its body. [`Self::send`] sends it.
    pub(super) fn begin(
        &mut self,
        head: &EngineRequestHead<'_>,
        body: &[Bytes],
    ) -> Result<(), ConnectionError> {
        match &mut self.http {
            HttpVersion::One(http) => {
                http.begin(head.http1(), body);
                Ok(())
            }
            HttpVersion::Two(stream) => stream.begin(head, body),
        }
    }

    /// Sends the request, and waits for the head of its reply. `shows_life`: a reply shows that the engine works.
    ///
    /// # Cancel safety
    /// The connection is unusable after a cancelled call.
    pub(super) async fn send(&mut self, shows_life: bool) -> Result<ReplyHead, ConnectionError> {
        self.shows_life = shows_life;
        let head = poll_fn(|context| {
            let ends = self.apply_half_close();
            match &mut self.http {
                HttpVersion::One(http) => http.poll_head(context),
                HttpVersion::Two(stream) => stream.poll_head(context, ends),
            }
        });
        let head = head.await?;
        // Stock vLLM sends the head of a stream before it has begun, also while its engine hangs.
        if shows_life && !head.is_stream() {
            self.activity.record_read();
        }
        Ok(head)
    }

    /// The next piece of the reply's body; `None` at its end.
    pub(crate) fn poll_piece(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, ConnectionError>>> {
        let ends = self.apply_half_close();
        let piece = match &mut self.http {
            HttpVersion::One(http) => http.poll_piece(context),
            HttpVersion::Two(stream) => stream.poll_piece(context, ends),
        };
        match &piece {
            Poll::Pending => self.waits = true,
            Poll::Ready(Some(Ok(_))) if std::mem::take(&mut self.waits) && self.shows_life => {
                self.activity.record_read()
            }
            Poll::Ready(_) => {}
        }
        piece
    }

    /// Carries out the handle's half-close, and returns whether there was one. HTTP/2 has none that an engine reacts
    /// to: there the stream is reset, unless the reply has arrived.
    fn apply_half_close(&mut self) -> bool {
        if !self.half_closed && self.handle.half_closed.load(Ordering::Relaxed) {
            self.half_closed = true;
            if let HttpVersion::One(http) = &self.http {
                // An error means that the connection is closed already, which is the purpose.
                let _ = SockRef::from(transport::tcp(http.stream())).shutdown(Shutdown::Write);
            }
        }
        self.half_closed
    }

    /// Whether the whole reply was read.
    pub(crate) fn is_ended(&self) -> bool {
        match &self.http {
            HttpVersion::One(http) => http.is_ended(),
            HttpVersion::Two(stream) => stream.is_ended(),
        }
    }

    /// Whether another request can be sent: the last reply was read, and the engine has not closed the connection. A
    /// stream of HTTP/2 serves one request.
    pub(crate) fn is_ready(&mut self) -> bool {
        match &mut self.http {
            HttpVersion::One(http) => http.is_ready(),
            HttpVersion::Two(_) => false,
        }
    }

    /// Whether the engine may have closed the connection before this request was sent: it was idle before, `within` ago at
    /// most. A shared connection counts as open once something was received for a request since.
    pub(super) fn may_have_been_closed(&self, within: Duration) -> bool {
        match &self.http {
            HttpVersion::One(_) => true,
            HttpVersion::Two(stream) => stream.may_have_been_closed(within),
        }
    }

    pub(crate) fn mark_idle(&mut self, now: Instant) {
        self.idle_since = now;
    }

    pub(crate) fn idle_for(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.idle_since)
    }
}

/// Whether a connection failed because this machine lacks a resource.
pub(super) fn is_local_error(error: &std::io::Error) -> bool {
    let local = [libc::EMFILE, libc::ENFILE, libc::EADDRNOTAVAIL, libc::ENOBUFS, libc::ENOMEM];
    error.raw_os_error().is_some_and(|code| local.contains(&code))
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let HttpVersion::One(_) = self.http {
            self.activity.remove_connection();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::is_local_error;

    #[test]
    fn local_resource_errors_are_distinct_from_engine_errors() {
        let is = |code: i32| is_local_error(&std::io::Error::from_raw_os_error(code));
        assert!(
            [libc::EMFILE, libc::ENFILE, libc::EADDRNOTAVAIL, libc::ENOBUFS, libc::ENOMEM]
                .into_iter()
                .all(is)
        );
        assert!(
            ![libc::ECONNREFUSED, libc::EHOSTUNREACH, libc::ETIMEDOUT, libc::ECONNRESET].into_iter().any(is)
        );
        assert!(!is_local_error(&std::io::Error::other("no such host")));
    }
}
