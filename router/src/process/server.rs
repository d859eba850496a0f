//! The server: two listeners, an accept loop, and the drain at shutdown.
//!
//! The router accepts connections itself and serves each in a task of its own. pingora's server and its listening
//! service are not used: `docs/explanation/decisions/0020-own-accept-loop.md` has the reasons.

use std::net::SocketAddr;
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::health_probe;
use super::http2::Http2Server;
use crate::admin::{self, AdminScope, AdminService};
use crate::auth::admin::AdminError;
use crate::client::http::{ClientConnection, ClientSocket, HeadBounds, HeadError};
use crate::client::session::Session;
use crate::config::{ClientHttp2, RouterConfig};
use crate::engines::health::OperatorOrder;
use crate::engines::presence;
use crate::metrics::Metrics;
use crate::metrics::log_limiter::LogLimiter;
use crate::process::discovery;
use crate::process::reload::ReloadHandle;
use crate::process::socket_takeover::{InheritedListeners, TakeoverClient, TakeoverListener};
use crate::service::ClientService;
use crate::state::generation::GenerationError;
use crate::state::shared::Shared;
use crate::tls::TlsError;
use crate::tls::server::ServerTls;

/// Connections that wait in the kernel's queue, above every usual `net.core.somaxconn`, which also bounds them. Beyond
/// the queue the kernel drops handshakes, and clients repeat them after a second.
const BACKLOG: u32 = 65_535;
/// Interval of the removal of idle connections and unused engines.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum wait for settlements after a drain. A lease that outlives it ends by expiry.
const SETTLE_WITHIN_MAX: Duration = Duration::from_secs(30);
/// Minimum age of a connection before a drain closes it. The first request may be in transit, and its client would
/// otherwise read an end instead of a response. Longer than a round trip around the world.
const FIRST_REQUEST_GRACE: Duration = Duration::from_secs(1);

/// Why a router cannot start.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// An address cannot be listened on.
    #[error("{key}: cannot listen on {address}: {source}{}", hint(key, source))]
    Listen {
        /// The configuration key of the address.
        key: &'static str,
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: std::io::Error,
    },
    /// The admin listener would be open to all hosts that can reach it.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// A certificate is unusable.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The configuration cannot be put into effect.
    #[error(transparent)]
    Config(#[from] GenerationError),
}

/// A hint for an address that cannot be listened on.
fn hint(key: &str, source: &std::io::Error) -> String {
    match source.kind() {
        std::io::ErrorKind::AddrInUse => {
            format!(
                "; another process listens there: end it, or set `{key}` in the configuration to another port"
            )
        }
        std::io::ErrorKind::AddrNotAvailable => {
            format!(
                "; this host does not have that address: set `{key}` in the configuration to one that it has"
            )
        }
        std::io::ErrorKind::PermissionDenied => {
            format!("; this user may not: set `{key}` in the configuration to a port from 1024 on")
        }
        _ => String::new(),
    }
}

/// A router whose listeners are open.
pub struct Router {
    clients: TcpListener,
    admin: TcpListener,
    shared: Arc<Shared>,
    connections_max: usize,
    tls: ServerTlsPair,
    inherited: InheritedListeners,
    takeover: Option<TakeoverListener>,
}

/// TLS of both listeners.
#[derive(Clone)]
pub(super) struct ServerTlsPair {
    pub(super) clients: Option<Arc<ServerTls>>,
    pub(super) admin: Option<Arc<ServerTls>>,
}

impl Router {
    /// Opens both listeners. Clients that connect are served once [`Self::run`] runs.
    ///
    /// # Errors
    /// [`BindError`] names the problem.
    pub async fn bind(config: RouterConfig) -> Result<Self, BindError> {
        Self::bind_with(config, InheritedListeners::default()).await
    }

    /// As [`Self::bind`], with inherited sockets where they match the configuration.
    ///
    /// # Errors
    /// As [`Self::bind`].
    pub async fn bind_with(
        config: RouterConfig,
        mut inherited: InheritedListeners,
    ) -> Result<Self, BindError> {
        let (listen_tls, admin_tls) = (config.listen_tls.clone(), config.admin.tls.clone());
        let clients = listen("listen", config.listen, inherited.take_clients(config.listen)).await?;
        let address = config.admin.listen;
        let admin = listen("admin.listen", address, inherited.take_admin(address)).await?;
        let connections_max = config.limits.connections;
        let shared = Shared::new(config).map_err(|error| match error {
            GenerationError::Admin(error) => BindError::Admin(error),
            error => BindError::Config(error),
        })?;
        let tls = |config: Option<_>, purpose| {
            let http2 =
                if purpose == "clients" { shared.generation().config.http2 } else { ClientHttp2::Off };
            let metrics = shared.metrics.listener_tls(purpose);
            let new = |config| ServerTls::with_alpn(&config, alpn(http2), metrics).map(Arc::new);
            config.map(new).transpose()
        };
        let tls = ServerTlsPair { clients: tls(listen_tls, "clients")?, admin: tls(admin_tls, "admin")? };
        Ok(Self { clients, admin, shared, connections_max, tls, inherited, takeover: None })
    }

    /// Waits at this path, while [`Self::run`] runs, for the next router; see [`InheritedListeners::from_router`].
    ///
    /// # Errors
    /// If the socket at the path cannot be created.
    pub fn take_over_at(&mut self, path: &Path) -> std::io::Result<()> {
        self.takeover = Some(TakeoverListener::bind(path, &self.clients, &self.admin)?);
        Ok(())
    }

    /// The address of the clients' listener.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.clients.local_addr().expect("a bound listener has an address")
    }

    /// The address of the admin listener, with `/metrics`, `/health` and `/ready`.
    #[must_use]
    pub fn admin_addr(&self) -> SocketAddr {
        self.admin.local_addr().expect("a bound listener has an address")
    }

    /// A handle for replacing the configuration while [`Self::run`] runs.
    #[must_use]
    pub fn reload(&self) -> ReloadHandle {
        ReloadHandle(Arc::clone(&self.shared))
    }

    /// Serves until `shutdown`, then drains. `/ready` fails at once. For `drain_delay_ms` connections are still
    /// accepted, and closed with their responses. Then no connection is accepted, requests in flight continue for
    /// at most `drain_timeout_ms`, and the rest is cut. Settlements complete before this returns.
    ///
    /// When the next router serves ([`Self::take_over_at`]), the same happens without further accepts, because the
    /// next router accepts. Connections accepted within the last second stay open until they are a second old.
    ///
    /// # Cancel safety
    /// Dropping the future cuts all requests. Settlements then continue only as long as the runtime does.
    pub async fn run(self, shutdown: CancellationToken) {
        let Self { clients, admin, shared, connections_max, tls, mut inherited, mut takeover } = self;
        // Before any request and any order: the previous router accepts neither now.
        for (url, order) in inherited.announce_ready().await {
            tracing::info!(
                event = "operator_order_adopted", engine = %url, ?order,
                "operator order taken over from the previous router"
            );
            shared.fleet.adopt_order(url, order);
        }
        let (_background, admin) = spawn_background(&shared, admin, &tls);
        let (drain, draining) = watch::channel(false);
        let streams = TaskTracker::new();
        let service = Arc::new(ClientService(Arc::clone(&shared), None));
        let permits = Arc::new(Semaphore::new(connections_max));
        let server = Arc::new(ClientServer::new(service, tls.clients, &permits, &streams, draining));
        let mut connections = JoinSet::new();
        let client = tokio::select! {
            () = shutdown.cancelled() => None,
            client = wait_for_takeover(takeover.as_ref()) => Some(client),
            () = server.accept(&clients, &mut connections) => None,
        };
        // The takeover listener's copies of the sockets would keep them open.
        drop(takeover.take());
        shared.draining.store(true, Ordering::Relaxed);
        let delay = Duration::from_millis(shared.generation().config.drain_delay_ms);
        match client {
            Some(client) => {
                // Admin clients must reach the next router. A request may still be in progress: its order is
                // either transferred or refused.
                admin.abort();
                client.send_orders(&shared.fleet.transfer_orders()).await;
                tracing::info!(
                    event = "socket_takeover_completed",
                    "socket takeover complete, finishing requests in flight"
                );
                // Responses close their connections from now on. Idle connections may still bring a request.
                tokio::time::sleep(delay).await;
            }
            None => {
                log_lost_orders(&shared);
                if !delay.is_zero() {
                    // Responses close their connections from now on. Idle connections may still bring a request.
                    // The accept loop never ends by itself.
                    let _ = tokio::time::timeout(delay, server.accept(&clients, &mut connections)).await;
                }
            }
        }
        drop(clients);
        drain_connections(&shared, &drain, std::slice::from_mut(&mut connections), &streams).await;
    }
}

/// The protocols of a listener over TLS, the preferred one first.
pub(super) fn alpn(http2: ClientHttp2) -> &'static [&'static [u8]] {
    match http2 {
        ClientHttp2::Auto => &[b"h2", b"http/1.1"],
        ClientHttp2::Off => &[b"http/1.1"],
    }
}

/// Ends connections without a request, waits for the others up to `drain_timeout_ms`, and settles what is left.
pub(super) async fn drain_connections(
    shared: &Shared,
    drain: &watch::Sender<bool>,
    connections: &mut [JoinSet<()>],
    streams: &TaskTracker,
) {
    // Fails only if no connection is left.
    let _ = drain.send(true);
    let drain_timeout = shared.generation().config.drain_timeout();
    let in_flight = async {
        for connections in connections.iter_mut() {
            while connections.join_next().await.is_some() {}
        }
    };
    if tokio::time::timeout(drain_timeout, in_flight).await.is_err() {
        tracing::warn!(
            event = "drain_timeout_exceeded",
            connections = connections.iter().map(JoinSet::len).sum::<usize>(),
            "drain timeout exceeded, connections closed"
        );
        for connections in connections {
            connections.shutdown().await;
        }
        // The requests over HTTP/2 are dropped by then, too.
        streams.close();
        streams.wait().await;
    }
    shared.generation().observers.flush().await;
    shared.release_all_turns();
    if !shared.settler.drained(shared.settler.max_duration().min(SETTLE_WITHIN_MAX)).await {
        tracing::warn!(
            event = "settlement_incomplete",
            "settlement incomplete at shutdown, leases end by expiry"
        );
    }
}

/// Spawns the tasks that every process has, until the set is dropped. The handle ends the admin listener.
pub(super) fn spawn_background(
    shared: &Arc<Shared>,
    admin: TcpListener,
    tls: &ServerTlsPair,
) -> (JoinSet<()>, AbortHandle) {
    let service = AdminService::new(Arc::clone(shared), AdminScope::All);
    let mut background = JoinSet::new();
    let admin = background.spawn(admin::serve(admin, tls.admin.clone(), Arc::new(service)));
    background.spawn(maintain(Arc::clone(shared)));
    background.spawn(health_probe::run(Arc::clone(shared)));
    background.spawn(reload_files(Arc::clone(shared), tls.clone()));
    background.spawn(discovery::run(Arc::clone(shared)));
    background.spawn(reopen_logs(Arc::clone(shared)));
    (background, admin)
}

pub(super) async fn listen(
    key: &'static str,
    address: SocketAddr,
    inherited: std::io::Result<Option<TcpListener>>,
) -> Result<TcpListener, BindError> {
    let listener = match inherited {
        Ok(Some(listener)) => Ok(listener),
        Ok(None) => bind(address),
        Err(error) => Err(error),
    };
    listener.map_err(|source| BindError::Listen { key, address, source })
}

fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A listener of a router that has just ended may still have connections in TIME_WAIT.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Logs drained engines if no other router takes the orders over.
fn log_lost_orders(shared: &Shared) {
    let drained = shared.fleet.orders().into_iter().filter(|(_, order)| *order == OperatorOrder::Drain);
    let drained: Vec<_> = drained.map(|(url, _)| url.to_string()).collect();
    if !drained.is_empty() {
        tracing::warn!(
            event = "operator_orders_lost",
            engines = drained.join(" "),
            "operator drain orders end with this router; to keep them set `drain: true` or use --takeover-socket"
        );
    }
}

/// Returns when the next router serves. Never returns without a takeover listener.
async fn wait_for_takeover(takeover: Option<&TakeoverListener>) -> TakeoverClient {
    match takeover {
        Some(takeover) => takeover.accept().await,
        None => std::future::pending().await,
    }
}

/// What every connection of a client needs.
pub(super) struct ClientServer {
    service: Arc<ClientService>,
    tls: Option<Arc<ServerTls>>,
    /// Set if clients may use HTTP/2.
    http2: Option<Http2Server>,
    draining: watch::Receiver<bool>,
    /// One bound for all connections, also during the drain.
    permits: Arc<Semaphore>,
}

impl ClientServer {
    pub(super) fn new(
        service: Arc<ClientService>,
        tls: Option<Arc<ServerTls>>,
        permits: &Arc<Semaphore>,
        streams: &TaskTracker,
        draining: watch::Receiver<bool>,
    ) -> Self {
        let http2 = || Http2Server { service: Arc::clone(&service), requests: streams.clone() };
        Self {
            http2: (service.0.generation().config.http2 == ClientHttp2::Auto).then(http2),
            service,
            tls,
            draining,
            permits: Arc::clone(permits),
        }
    }

    /// Serves connections until the future is dropped.
    pub(super) async fn accept(self: &Arc<Self>, listener: &TcpListener, connections: &mut JoinSet<()>) {
        static LOG_LIMITER: LogLimiter = LogLimiter::new();
        loop {
            let permits = Arc::clone(&self.permits);
            let permit = permits.acquire_owned().await.expect("the semaphore is never closed");
            let (stream, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Usually the process is out of file descriptors: wait for some to be closed instead of spinning.
                    if let Some(held_back) = LOG_LIMITER.allow() {
                        tracing::warn!(event = "accept_failed", %error, held_back, "cannot accept connections");
                    }
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    continue;
                }
            };
            let open = ConnectionGuard::new(&self.service.0.metrics);
            let server = Arc::clone(self);
            connections.spawn(async move {
                let (_permit, _open) = (permit, open);
                server.serve(stream, peer).await;
            });
            while connections.try_join_next().is_some() {}
        }
    }

    /// Serves one client's connection.
    async fn serve(&self, stream: TcpStream, peer: SocketAddr) {
        // Otherwise a last small write waits for the peer's delayed acknowledgement: 40 ms.
        if stream.set_nodelay(true).is_err() {
            return;
        }
        let lost_after = self.service.0.generation().config.timeouts.client_lost();
        presence::set_keepalive(&stream, lost_after);
        let stream = match &self.tls {
            None => Either::Left(stream),
            // Boxed, because a handshake is short, and its state would otherwise be part of every connection's task.
            Some(tls) => match Box::pin(tls.accept(stream)).await {
                Some(stream) => Either::Right(Box::new(stream)),
                None => return,
            },
        };
        let mut draining = self.draining.clone();
        let young = tokio::time::Instant::now() + FIRST_REQUEST_GRACE;
        // One drain future per connection: creating it per request would cost more than its head.
        let mut drained = pin!(async {
            drop(draining.wait_for(|draining| *draining).await);
            // Boxed, because no connection needs it before a drain.
            Box::pin(tokio::time::sleep_until(young)).await;
        });
        let is_http2 = matches!(&stream, Either::Right(tls) if tls.is_http2());
        let (stream, ahead) = if is_http2 {
            (stream, BytesMut::new())
        } else {
            let connection = ClientConnection::new(stream, peer, lost_after);
            match self.serve_http1(connection, drained.as_mut()).await {
                None => return,
                Some(socket) => socket,
            }
        };
        if let Some(http2) = &self.http2 {
            // Boxed, so that a connection over HTTP/1 has no memory for it.
            Box::pin(http2.serve(stream, ahead, peer, drained)).await;
        }
    }

    /// Serves a connection over HTTP/1, request by request. Returns its socket, and the bytes that were read of it, if
    /// the client begins with HTTP/2.
    async fn serve_http1(
        &self,
        connection: ClientConnection,
        mut drained: Pin<&mut impl Future<Output = ()>>,
    ) -> Option<(ClientSocket, BytesMut)> {
        let service = &*self.service;
        let mut is_first = true;
        // One timer per connection, for the reason of the drain future.
        let mut idle = pin!(tokio::time::sleep(Duration::ZERO));
        loop {
            let (bounds, stall) = service.0.read_generation(|generation| {
                let config = &generation.config;
                (HeadBounds::of(config), Duration::from_millis(config.timeouts.client_stall_ms))
            });
            idle.as_mut().reset(tokio::time::Instant::now() + bounds.idle);
            let head = tokio::select! {
                biased;
                head = connection.head(&bounds, idle.as_mut()) => head,
                // The client has sent no request, so none is lost.
                () = &mut drained => return None,
            };
            match head {
                Ok(Some(head)) => {
                    is_first = false;
                    let Some(mut session) = Session::begin(&connection, head, stall).await else {
                        let error = HeadError::Malformed("the head of the request cannot be read");
                        connection.refuse(error).await;
                        return None;
                    };
                    // Boxed, so that an idle connection has no memory for a request.
                    let request = Box::pin(service.request(&mut session));
                    tokio::select! {
                        biased;
                        () = request => {}
                        never = connection.cut_when_lost(idle.as_mut()) => match never {},
                    }
                    if !session.is_reusable() || connection.is_unread() {
                        // A close alone would reset the connection and lose the response.
                        match connection.is_ahead() {
                            true => connection.linger().await,
                            false => connection.close().await,
                        }
                        return None;
                    }
                }
                Ok(None) => return None,
                // Over TLS, HTTP/2 is chosen in the handshake (RFC 9113, section 3.2).
                Err(HeadError::Http2) if is_first && self.http2.is_some() && self.tls.is_none() => {
                    return connection.into_socket();
                }
                Err(error) => {
                    service.0.metrics.server.refused.increment(1);
                    connection.refuse(error).await;
                    return None;
                }
            }
        }
    }
}

/// Counts one open client connection.
struct ConnectionGuard(Arc<Metrics>);

impl ConnectionGuard {
    fn new(metrics: &Arc<Metrics>) -> Self {
        metrics.server.connected.increment(1);
        metrics.server.connections.increment(1.0);
        Self(Arc::clone(metrics))
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.0.server.connections.decrement(1.0);
    }
}

/// Reloads keys, tokens and certificates that have changed on disk, every `reload.poll_ms` and on request. It runs
/// outside the workers that serve requests, because a file system may hang.
async fn reload_files(shared: Arc<Shared>, tls: ServerTlsPair) {
    let mut last_check = Instant::now();
    loop {
        let poll = match shared.generation().config.reload.poll_ms {
            0 => Duration::MAX,
            ms => Duration::from_millis(ms),
        };
        let was_requested = tokio::select! {
            () = shared.installer.file_reload.notified() => true,
            () = tokio::time::sleep(poll.min(MAINTENANCE_INTERVAL)) => false,
        };
        tls.clients.iter().chain(&tls.admin).for_each(|tls| tls.update_expiry_metric());
        shared.generation().update_expiry_metrics();
        if !was_requested && last_check.elapsed() < poll {
            continue;
        }
        let (shared, tls) = (Arc::clone(&shared), tls.clone());
        let check = move || {
            tls.clients.iter().chain(&tls.admin).for_each(|tls| tls.refresh());
            shared.generation().reload_files(&shared.limits.tenants);
        };
        if tokio::task::spawn_blocking(check).await.is_err() {
            tracing::error!(event = "file_reload_failed", "file reload failed; it is retried");
        }
        last_check = Instant::now();
    }
}

/// Reopens the access log's file at SIGUSR1. Without this the signal would end the process.
async fn reopen_logs(shared: Arc<Shared>) {
    let Ok(mut signals) = signal(SignalKind::user_defined1()) else { return };
    while signals.recv().await.is_some() {
        if let Some(log) = &shared.generation().observers.access_log {
            log.reopen();
        }
    }
}

async fn maintain(shared: Arc<Shared>) {
    let mut tick = tokio::time::interval(MAINTENANCE_INTERVAL);
    loop {
        tick.tick().await;
        shared.metrics.admission.body_bytes.set(shared.limits.request_bodies.reserved_bytes() as f64);
        shared.metrics.admission.answer_bytes.set(shared.limits.response_bodies.reserved_bytes() as f64);
        shared.fleet.prune();
        shared.expire_turns();
        shared.fleet.engines().iter().for_each(|engine| engine.close_idle());
    }
}
