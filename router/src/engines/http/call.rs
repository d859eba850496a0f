//! Requests to an engine, over an idle connection or a new one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use hyper::StatusCode;

use super::connection::Purpose;
use super::head::EngineRequestHead;
use super::{
    CallError, Connection, ConnectionError, ConnectionHandle, DialError, Engine, EngineRequest, Reply,
    ReplyHead,
};
use crate::engines::health::FailureKind;
use crate::engines::protocol::ServerInfo;

/// Limit of the retry on a new connection. An idle connection that breaks so soon after a request was sent on it
/// had been closed before. One that breaks later lost the request. A shared connection counts from its last idle time.
const STALE_CONNECTION_WINDOW: Duration = Duration::from_secs(1);

/// Maximum wait for `/server_info`, and its maximum size.
const SERVER_INFO_TIMEOUT: Duration = Duration::from_secs(1);
const SERVER_INFO_BYTES_MAX: usize = 1 << 20;

impl Engine {
    /// Learns the engine's protocol from `/server_info` if it is open. Concurrent callers wait for one query.
    pub(crate) async fn learn_protocol(self: &Arc<Self>) {
        let protocol = &self.connections.protocol;
        let is_due = || protocol.is_query_due(&self.connections.terms.load().protocol, Instant::now);
        if !is_due() {
            return;
        }
        let query = async {
            let _one_at_a_time = protocol.query_lock.lock().await;
            if is_due() {
                self.query_protocol().await;
            }
        };
        if tokio::time::timeout(SERVER_INFO_TIMEOUT, query).await.is_err() {
            protocol.failed(Instant::now());
        }
    }

    /// Checks a protocol again that a proxy's answer may have shown. For health checks, which no request waits for.
    pub(crate) async fn recheck_protocol(self: &Arc<Self>) {
        self.learn_protocol().await;
        let terms = self.connections.terms.load();
        if self.connections.protocol.is_recheck_due(&terms.protocol, Instant::now()) {
            let _ = tokio::time::timeout(SERVER_INFO_TIMEOUT, self.query_protocol()).await;
        }
    }

    async fn query_protocol(self: &Arc<Self>) {
        let protocol = &self.connections.protocol;
        match self.server_info().await {
            // Another server's page shows nothing.
            Some((status, body)) if status.is_success() && body.first() == Some(&b'{') => {
                protocol.learn(ServerInfo::read(&body), Instant::now());
            }
            Some((
                StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED,
                _,
            )) => protocol.learn(None, Instant::now()),
            _ => protocol.failed(Instant::now()),
        }
    }

    /// The engine's `/server_info`, over a connection of its own: idle connections are for requests.
    async fn server_info(self: &Arc<Self>) -> Option<(StatusCode, BytesMut)> {
        let connection = self.dial(SERVER_INFO_TIMEOUT).await.ok()?;
        let mut reply = self.call_on(connection, &EngineRequest::get("/server_info")).await.ok()?;
        let mut body = BytesMut::new();
        while let Some(chunk) = reply.chunk().await {
            let chunk = chunk.ok()?;
            if body.len() + chunk.len() > SERVER_INFO_BYTES_MAX {
                return None;
            }
            body.extend_from_slice(&chunk);
        }
        Some((reply.status(), body))
    }

    /// Sends a request and waits for the head of the reply.
    ///
    /// `sent` is called with the socket each time the request is sent on one. An idle connection that the engine
    /// turns out to have closed before any byte of a reply is replaced by a new one, once. A connection of HTTP/2 that
    /// has other requests is replaced only if nothing has arrived since it was idle. This is safe: no byte
    /// was sent to the client, and an engine stops a request whose connection it closed. A later loss, or one
    /// after the request was abandoned, is a failed attempt.
    ///
    /// # Cancel safety
    /// Dropping the future cuts the connection.
    pub(crate) async fn call(
        self: &Arc<Self>,
        request: &EngineRequest,
        sent: impl Fn(Arc<ConnectionHandle>),
    ) -> Result<Reply, CallError> {
        let (mut lost, mut not_begun) = (None, false);
        let idle_timeout = self.connections.terms.load().idle_timeout;
        let purpose = if request.is_work() { Purpose::Work } else { Purpose::Command };
        let begun = Instant::now();
        if let Some(mut idle) = self.connections.idle.take(idle_timeout, purpose, begun) {
            let socket = idle.handle();
            sent(Arc::clone(&socket));
            match self.send(&mut idle, request, request.is_work()).await {
                Ok(head) => return Ok(self.reply(head, idle)),
                Err(ConnectionError::Unanswered)
                    if begun.elapsed() < STALE_CONNECTION_WINDOW
                        && idle.may_have_been_closed(STALE_CONNECTION_WINDOW)
                        && !socket.is_abandoned() =>
                {
                    lost = Some(socket);
                }
                Err(ConnectionError::GoingAway) if !socket.is_abandoned() => not_begun = true,
                Err(error) => return Err(CallError::of(error)),
            }
        }
        let begun = Instant::now();
        // Boxed, so that calls over an idle connection do not carry the state of name lookup and TLS.
        let mut fresh = match Box::pin(self.connect(purpose)).await {
            Ok(fresh) => fresh,
            Err(error) => {
                let failure = match error {
                    DialError::OutOfResources(_) | DialError::Refused => None,
                    DialError::Unanswered | DialError::NoHttp2 => Some(FailureKind::Unreachable),
                    DialError::Unresolved => Some(FailureKind::Unresolved),
                };
                failure.into_iter().for_each(|kind| self.update_health(|health, _, _| health.suspect(kind)));
                return Err(match error {
                    // The engine may have received the request sent on the idle connection.
                    _ if lost.is_some() => CallError::Broken(ConnectionError::Unanswered),
                    DialError::OutOfResources(error) => CallError::OutOfResources(error),
                    _ => CallError::NotConnected,
                });
            }
        };
        let is_replay = not_begun || lost.is_some();
        if lost.is_some_and(|socket| socket.is_abandoned()) {
            return Err(CallError::Broken(ConnectionError::Unanswered));
        }
        if is_replay {
            self.metrics.count_replay();
        }
        self.metrics.connect.record(begun.elapsed());
        sent(fresh.handle());
        match self.send(&mut fresh, request, request.is_work()).await {
            Ok(head) => Ok(self.reply(head, fresh)),
            Err(error) => Err(CallError::of(error)),
        }
    }

    /// A new connection. At an engine that speaks HTTP/2, requests that find every connection full wait for a few new
    /// ones together. A command does not wait.
    async fn connect(&self, purpose: Purpose) -> Result<Connection, DialError> {
        let (idle, within) = (&self.connections.idle, self.connections.terms.load().connect_timeout);
        let dial = async {
            let fresh = self.dial(within).await?;
            idle.share(&fresh, purpose);
            Ok(fresh)
        };
        if purpose == Purpose::Command || !self.connections.http2.is_spoken() {
            return dial.await;
        }
        let dial = async {
            let _turn = self.connections.http2.dials.acquire().await.expect("it is never closed");
            match idle.take_stream(purpose) {
                Some(stream) => Ok(stream),
                None => dial.await,
            }
        };
        tokio::time::timeout(within, dial).await.unwrap_or(Err(DialError::Unanswered))
    }

    pub(super) fn store_idle(&self, connection: Connection) {
        self.connections.idle.store(connection);
    }

    /// Closes connections that were idle for too long.
    pub(crate) fn close_idle(&self) {
        let idle_timeout = self.connections.terms.load().idle_timeout;
        self.connections.idle.close_old(idle_timeout);
        if let Some(control) = self.connections.control.load().as_deref() {
            control.idle().close_old(idle_timeout);
        }
    }

    /// Sends a liveness probe on a connection of its own, and waits for the head of the reply.
    ///
    /// # Cancel safety
    /// As [`Self::call`].
    pub(crate) async fn call_on(
        self: &Arc<Self>,
        mut connection: Connection,
        request: &EngineRequest,
    ) -> Result<Reply, CallError> {
        match self.send(&mut connection, request, true).await {
            Ok(head) => Ok(self.reply(head, connection)),
            Err(error) => Err(CallError::of(error)),
        }
    }

    async fn send(
        &self,
        connection: &mut Connection,
        request: &EngineRequest,
        shows_life: bool,
    ) -> Result<ReplyHead, ConnectionError> {
        {
            let (host, terms) = (&self.address.host, self.connections.terms.load());
            let (secret, api_key) = (terms.secret.as_ref(), terms.api_key.as_ref());
            connection.begin(&EngineRequestHead { host, secret, api_key, request }, request.pieces())?;
        }
        connection.send(shows_life).await
    }

    fn reply(self: &Arc<Self>, head: ReplyHead, connection: Connection) -> Reply {
        Reply::new(head, connection, Arc::clone(self))
    }
}
