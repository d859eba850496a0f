//! Requests to an engine, over an idle connection or a new one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{
    CallError, Connection, ConnectionError, ConnectionHandle, DialError, Engine, EngineRequest, Reply,
    ReplyHead, head,
};
use crate::engines::health::FailureKind;

/// Limit of the retry on a new connection. An idle connection that breaks so soon after a request was sent on it
/// had been closed before. One that breaks later lost the request.
const STALE_CONNECTION_WINDOW: Duration = Duration::from_secs(1);

impl Engine {
    /// Sends a request and waits for the head of the reply.
    ///
    /// `sent` is called with the socket each time the request is sent on one. An idle connection that the engine
    /// turns out to have closed before any byte of a reply is replaced by a new one, once. This is safe: no byte
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
        let mut lost = None;
        let idle_timeout = self.connections.terms.load().idle_timeout;
        if let Some(mut idle) = self.connections.idle.take(idle_timeout) {
            let (socket, begun) = (idle.handle(), Instant::now());
            sent(Arc::clone(&socket));
            match idle.send(self.head(request), request.pieces(), request.is_work()).await {
                Ok(head) => return Ok(self.reply(head, idle)),
                Err(ConnectionError::Unanswered)
                    if begun.elapsed() < STALE_CONNECTION_WINDOW && !socket.is_abandoned() =>
                {
                    lost = Some(socket);
                }
                Err(error) => return Err(CallError::Broken(error)),
            }
        }
        let begun = Instant::now();
        // Boxed, so that calls over an idle connection do not carry the state of name lookup and TLS.
        let mut fresh = match Box::pin(self.dial(self.connections.terms.load().connect_timeout)).await {
            Ok(fresh) => fresh,
            Err(error) => {
                let failure = match error {
                    DialError::OutOfResources(_) | DialError::Refused => None,
                    DialError::Unanswered => Some(FailureKind::Unreachable),
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
        if let Some(socket) = lost {
            if socket.is_abandoned() {
                return Err(CallError::Broken(ConnectionError::Unanswered));
            }
            self.metrics.count_replay();
        }
        self.metrics.connect.record(begun.elapsed());
        sent(fresh.handle());
        match fresh.send(self.head(request), request.pieces(), request.is_work()).await {
            Ok(head) => Ok(self.reply(head, fresh)),
            Err(error) => Err(CallError::Broken(error)),
        }
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
        match connection.send(self.head(request), request.pieces(), true).await {
            Ok(head) => Ok(self.reply(head, connection)),
            Err(error) => Err(CallError::Broken(error)),
        }
    }

    fn head(&self, request: &EngineRequest) -> Vec<u8> {
        let terms = self.connections.terms.load();
        head::request(&self.address.host, terms.secret.as_ref(), terms.api_key.as_ref(), request)
    }

    fn reply(self: &Arc<Self>, head: ReplyHead, connection: Connection) -> Reply {
        Reply::new(head, connection, Arc::clone(self))
    }
}
