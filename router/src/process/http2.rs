//! Serves one client's HTTP/2 connection: each stream is a request, in a task of its own.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;

use bytes::BytesMut;
use tokio::task::JoinSet;
use tokio_util::task::TaskTracker;

use crate::client::http::ClientSocket;
use crate::client::http2::{Http2Bounds, Http2Connection, Http2End, NewStream};
use crate::client::session::Session;
use crate::service::ClientService;

/// What a connection needs of the server.
pub(super) struct Http2Server {
    pub service: Arc<ClientService>,
    /// Every request's task, so that a drain can wait for tasks whose connection was cut.
    pub requests: TaskTracker,
}

impl Http2Server {
    /// Serves a connection until it ends. `ahead` is what was already read of the socket. Once `drained` is ready, the
    /// connection takes no further requests.
    pub(super) async fn serve(
        &self,
        stream: ClientSocket,
        ahead: BytesMut,
        peer: SocketAddr,
        drained: impl Future<Output = ()>,
    ) {
        let (bounds, lost_after) = {
            let config = &self.service.0.generation().config;
            (Http2Bounds::of(config), config.timeouts.client_lost())
        };
        let metrics = &self.service.0.metrics.server;
        metrics.http2.connected.increment(1);
        let Some(mut connection) = Http2Connection::begin(stream, ahead, peer, bounds).await else { return };
        let mut requests = JoinSet::new();
        let (mut drained, mut is_drained) = (pin!(drained), false);
        let mut lost = pin!(connection.cut_when_lost(lost_after));
        loop {
            let in_flight = requests.len();
            tokio::select! {
                biased;
                stream = connection.next(in_flight) => match stream {
                    Some(NewStream::Request(exchange)) => {
                        let session = Session::over_http2(exchange, bounds.stall);
                        requests.spawn(self.requests.track_future(self.request(session)));
                    }
                    Some(NewStream::Refused) => metrics.refused.increment(1),
                    None => break,
                },
                Some(_) = requests.join_next() => {}
                () = &mut drained, if !is_drained => {
                    is_drained = true;
                    connection.close();
                }
                never = &mut lost, if in_flight > 0 => match never {},
            }
        }
        // The requests in flight find that their clients are gone.
        match connection.finish().await {
            Http2End::Closed => {}
            Http2End::Flood => metrics.http2.flood.increment(1),
            Http2End::SlowHead => metrics.http2.slow_head.increment(1),
            Http2End::Protocol => metrics.http2.protocol.increment(1),
        }
        while requests.join_next().await.is_some() {}
    }

    fn request(&self, mut session: Session) -> impl Future<Output = ()> + use<> {
        let service = Arc::clone(&self.service);
        async move { service.request(&mut session).await }
    }
}
