//! The router as a process part: two listeners, a loop that accepts, and a drain at the end.
//!
//! pingora's own server is not used: its listeners take no port 0 and its shutdown ends the process. Requests are served
//! from here, one task per connection, so that several routers fit into one process and a drain is ours to time.

use std::net::SocketAddr;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;

use super::health_probe;
use crate::admin::{self, Admin};
use crate::auth::admin::AdminError;
use crate::client::http::{HeadBounds, Unclean, Wire};
use crate::client::session::Session;
use crate::config::RouterConfig;
use crate::engines::health::Order;
use crate::engines::presence;
use crate::metrics::Metrics;
use crate::metrics::log_limiter::Seldom;
use crate::process::discovery;
use crate::process::reload::Reload;
use crate::process::socket_takeover::{Heir, Inherited, Successor};
use crate::service::FrontDoor;
use crate::state::generation::GenerationError;
use crate::state::shared::Shared;
use crate::tls::TlsError;
use crate::tls::server::ServerTls;

/// How often idle connections are closed.
const UPKEEP: Duration = Duration::from_secs(1);
/// After a drain, debts are waited for this long at most; a lease outlives it and ends by itself.
const PAY_WITHIN_MAX: Duration = Duration::from_secs(30);
/// A connection that is younger than this when the drain begins is not closed before it is as old: its first request may be on its
/// way, and whoever sent it would read an end instead of an answer. Longer than a way around the world and back.
const FIRST_WORD: Duration = Duration::from_secs(1);

/// Why a router cannot start.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// An address cannot be listened on.
    #[error("{key}: cannot listen on {address}: {source}{}", hint(key, source))]
    Listen {
        /// The key of the configuration that it comes from.
        key: &'static str,
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The admin listener would be open to everybody.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// A certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The configuration cannot be put into effect.
    #[error(transparent)]
    Config(#[from] GenerationError),
}

/// What to do about an address that cannot be listened on, as far as that is known.
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

/// A router that listens.
pub struct Router {
    clients: TcpListener,
    admin: TcpListener,
    shared: Arc<Shared>,
    connections_max: usize,
    guards: Guards,
    inherited: Inherited,
    successor: Option<Successor>,
}

/// What stands before the listeners.
#[derive(Clone)]
struct Guards {
    clients: Option<Arc<ServerTls>>,
    admin: Option<Arc<ServerTls>>,
}

impl Router {
    /// Listens on both addresses. Clients that connect are served once [`Self::run`] runs.
    ///
    /// # Errors
    /// [`BindError`] names what is in the way.
    pub async fn bind(config: RouterConfig) -> Result<Self, BindError> {
        Self::bind_with(config, Inherited::default()).await
    }

    /// As [`Self::bind`], with sockets that somebody else has opened where they are what the configuration wants.
    ///
    /// # Errors
    /// As [`Self::bind`].
    pub async fn bind_with(config: RouterConfig, mut inherited: Inherited) -> Result<Self, BindError> {
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
            let new = |config| ServerTls::new(&config, shared.metrics.listener_tls(purpose)).map(Arc::new);
            config.map(new).transpose()
        };
        let guards = Guards { clients: tls(listen_tls, "clients")?, admin: tls(admin_tls, "admin")? };
        Ok(Self { clients, admin, shared, connections_max, guards, inherited, successor: None })
    }

    /// Waits at this path, while [`Self::run`] runs, for the router that comes next; see [`Inherited::from_router`].
    ///
    /// # Errors
    /// When it cannot wait there.
    pub fn hand_over_at(&mut self, path: &Path) -> std::io::Result<()> {
        self.successor = Some(Successor::at(path, &self.clients, &self.admin)?);
        Ok(())
    }

    /// Where clients connect.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.clients.local_addr().expect("a bound listener has an address")
    }

    /// Where `/metrics`, `/health` and `/ready` are.
    #[must_use]
    pub fn admin_addr(&self) -> SocketAddr {
        self.admin.local_addr().expect("a bound listener has an address")
    }

    /// A hand for replacing the configuration while [`Self::run`] runs.
    #[must_use]
    pub fn reload(&self) -> Reload {
        Reload(Arc::clone(&self.shared))
    }

    /// Serves until `shutdown`, then drains: `/ready` says no at once, connections are taken for `drain_delay_ms`
    /// more and closed with their answers; then there is no new connection, requests in flight go on for at most
    /// `drain_timeout_ms`, the rest is cut, and what is owed to engines is paid before this returns.
    ///
    /// The same when a successor serves ([`Self::hand_over_at`]), but that nothing more is accepted: it does that. Connections that
    /// have been accepted within the last second are waited for until they are as old.
    ///
    /// # Cancel safety
    /// Dropping the future cuts every request; debts are then paid only as long as the runtime lives.
    pub async fn run(self, shutdown: CancellationToken) {
        let Self { clients, admin, shared, connections_max, guards, mut inherited, mut successor } = self;
        // Before anybody is served, and before anybody orders something else: the router before this one accepts nobody now.
        for (url, order) in inherited.serving().await {
            tracing::info!(engine = %url, ?order, "operator order taken over from the previous router");
            shared.fleet.take_over(url, order);
        }
        let ready = Admin::new(Arc::clone(&shared));
        let mut background = JoinSet::new();
        let admin = background.spawn(admin::serve(admin, guards.admin.clone(), Arc::new(ready)));
        background.spawn(upkeep(Arc::clone(&shared)));
        background.spawn(health_probe::run(Arc::clone(&shared)));
        background.spawn(reread(Arc::clone(&shared), guards.clone()));
        background.spawn(discovery::run(Arc::clone(&shared)));
        background.spawn(reopen_logs(Arc::clone(&shared)));
        let door = Arc::new(FrontDoor(Arc::clone(&shared)));
        let (drain, draining) = watch::channel(false);
        let mut connections = JoinSet::new();
        // One bound for all, also while it drains.
        let room = Arc::new(Semaphore::new(connections_max));
        let heir = tokio::select! {
            () = shutdown.cancelled() => None,
            heir = succeeded(successor.as_ref()) => Some(heir),
            () = accept(&clients, guards.clients.clone(), &door, draining.clone(), &room, &mut connections) => None,
        };
        // Its copies of the sockets would keep them open.
        drop(successor.take());
        shared.draining.store(true, Ordering::Relaxed);
        let delay = Duration::from_millis(shared.generation().config.drain_delay_ms);
        match heir {
            Some(heir) => {
                // Who asks there is to hear of the next one. A request that is being answered may still be: what it orders
                // is either in what the next one hears, or refused.
                admin.abort();
                heir.hears(&shared.fleet.hand_over_orders()).await;
                tracing::info!("socket takeover complete, finishing requests in flight");
                // Answers close their connections by now; idle ones may still bring a request.
                tokio::time::sleep(delay).await;
            }
            None => {
                tell_of_orders(&shared);
                if !delay.is_zero() {
                    // Answers close their connections by now; idle ones may still bring a request.
                    let connections = &mut connections;
                    let accepting =
                        accept(&clients, guards.clients.clone(), &door, draining, &room, connections);
                    // It never ends by itself.
                    let _ = tokio::time::timeout(delay, accepting).await;
                }
            }
        }
        // Fails only when no connection is left to hear it.
        let _ = drain.send(true);
        drop(clients);
        let drain_timeout = shared.generation().config.drain_timeout();
        let in_flight = async { while connections.join_next().await.is_some() {} };
        if tokio::time::timeout(drain_timeout, in_flight).await.is_err() {
            tracing::warn!(connections = connections.len(), "drain timeout exceeded, connections closed");
            connections.shutdown().await;
        }
        shared.generation().observers.flush().await;
        if !shared.settler.paid(shared.settler.longest().min(PAY_WITHIN_MAX)).await {
            tracing::warn!("settlement incomplete at shutdown, leases end by expiry");
        }
    }
}

async fn listen(
    key: &'static str,
    address: SocketAddr,
    inherited: std::io::Result<Option<TcpListener>>,
) -> Result<TcpListener, BindError> {
    let listener = match inherited {
        Ok(Some(listener)) => Ok(listener),
        Ok(None) => TcpListener::bind(address).await,
        Err(error) => Err(error),
    };
    listener.map_err(|source| BindError::Listen { key, address, source })
}

/// Says whom operators have drained, where nobody takes that over.
fn tell_of_orders(shared: &Shared) {
    let drained = shared.fleet.orders().into_iter().filter(|(_, order)| *order == Order::Drain);
    let drained: Vec<_> = drained.map(|(url, _)| url.to_string()).collect();
    if !drained.is_empty() {
        tracing::warn!(
            engines = drained.join(" "),
            "operator drain orders end with this router; to keep them set `drain: true` or use --takeover-socket"
        );
    }
}

/// Ends when a successor serves, if one is waited for.
async fn succeeded(successor: Option<&Successor>) -> Heir {
    match successor {
        Some(successor) => successor.serves().await,
        None => std::future::pending().await,
    }
}

async fn accept(
    listener: &TcpListener,
    tls: Option<Arc<ServerTls>>,
    door: &Arc<FrontDoor>,
    draining: watch::Receiver<bool>,
    room: &Arc<Semaphore>,
    connections: &mut JoinSet<()>,
) {
    static TROUBLE: Seldom = Seldom::new();
    loop {
        let permit = Arc::clone(room).acquire_owned().await.expect("the semaphore is never closed");
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of file descriptors, mostly: wait for some to be closed instead of spinning.
                if let Some(held_back) = TROUBLE.due() {
                    tracing::warn!(%error, held_back, "cannot accept connections");
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
        };
        let open = Open::new(&door.0.metrics);
        let (door, draining) = (Arc::clone(door), draining.clone());
        let tls = tls.clone();
        connections.spawn(async move {
            let (_permit, _open) = (permit, open);
            serve(stream, peer, tls, &door, draining).await;
        });
        while connections.try_join_next().is_some() {}
    }
}

/// One connection of a client, as long as it is open.
struct Open(Arc<Metrics>);

impl Open {
    fn new(metrics: &Arc<Metrics>) -> Self {
        metrics.server.connected.increment(1);
        metrics.server.connections.increment(1.0);
        Self(Arc::clone(metrics))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.server.connections.decrement(1.0);
    }
}

/// One client's connection, request by request.
async fn serve(
    stream: TcpStream,
    peer: SocketAddr,
    tls: Option<Arc<ServerTls>>,
    door: &FrontDoor,
    mut draining: watch::Receiver<bool>,
) {
    // Without it a last small write waits for the peer's delayed acknowledgement: 40 ms.
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let lost_after = door.0.generation().config.timeouts.client_lost();
    presence::probe(&stream, lost_after);
    let stream = match tls {
        None => Either::Left(stream),
        // Boxed: a handshake is over soon, and would hold its room in every connection.
        Some(tls) => match Box::pin(tls.accept(stream)).await {
            Some(stream) => Either::Right(Box::new(stream)),
            None => return,
        },
    };
    let wire = Wire::new(stream, peer, lost_after);
    // One of each for the whole connection: setting them anew for each request would cost more than the request's head.
    let mut idle = pin!(tokio::time::sleep(Duration::ZERO));
    let young = tokio::time::Instant::now() + FIRST_WORD;
    let mut drained = pin!(async {
        drop(draining.wait_for(|draining| *draining).await);
        // Boxed: it has no room in a connection before there is a drain.
        Box::pin(tokio::time::sleep_until(young)).await;
    });
    loop {
        let (bounds, stall) = {
            let config = &door.0.generation().config;
            (HeadBounds::of(config), Duration::from_millis(config.timeouts.client_stall_ms))
        };
        idle.as_mut().reset(tokio::time::Instant::now() + bounds.idle);
        let head = tokio::select! {
            biased;
            head = wire.head(&bounds, idle.as_mut()) => head,
            // Nobody has asked for anything: nothing is lost.
            () = &mut drained => return,
        };
        match head {
            Ok(Some(head)) => {
                let Some(mut session) = Session::begin(&wire, head, stall).await else {
                    return wire.refuse(Unclean::Malformed("the head of the request cannot be read")).await;
                };
                // Boxed: an idle connection has no room for a request.
                let request = Box::pin(door.request(&mut session));
                tokio::select! {
                    biased;
                    () = request => {}
                    never = wire.cut_when_lost(idle.as_mut()) => match never {},
                }
                match session.is_reusable() && !wire.is_unread() {
                    true => {}
                    // A close alone would reset the connection under the answer.
                    false if wire.is_ahead() => return wire.linger().await,
                    false => return wire.close().await,
                }
            }
            Ok(None) => return,
            Err(unclean) => {
                door.0.metrics.server.refused.increment(1);
                return wire.refuse(unclean).await;
            }
        }
    }
}

/// Looks every `reload.poll_ms`, and when somebody asks for a reload, whether keys, tokens or certificates have changed on
/// disk. Apart from the workers that serve: a file system may hang.
async fn reread(shared: Arc<Shared>, guards: Guards) {
    let mut looked = Instant::now();
    loop {
        let poll = match shared.generation().config.reload.poll_ms {
            0 => Duration::MAX,
            ms => Duration::from_millis(ms),
        };
        let told = tokio::select! {
            () = shared.reread.notified() => true,
            () = tokio::time::sleep(poll.min(UPKEEP)) => false,
        };
        guards.clients.iter().chain(&guards.admin).for_each(|tls| tls.tell_expiry());
        shared.generation().tell_expiry();
        if !told && looked.elapsed() < poll {
            continue;
        }
        let (shared, guards) = (Arc::clone(&shared), guards.clone());
        let look = move || {
            guards.clients.iter().chain(&guards.admin).for_each(|tls| tls.refresh());
            shared.generation().reread(&shared.tenants);
        };
        if tokio::task::spawn_blocking(look).await.is_err() {
            tracing::error!("file reload failed; it is retried");
        }
        looked = Instant::now();
    }
}

/// SIGUSR1 opens the access log's file anew. Without this the signal would end the process.
async fn reopen_logs(shared: Arc<Shared>) {
    let Ok(mut signals) = signal(SignalKind::user_defined1()) else { return };
    while signals.recv().await.is_some() {
        if let Some(log) = &shared.generation().observers.access_log {
            log.reopen();
        }
    }
}

async fn upkeep(shared: Arc<Shared>) {
    let mut tick = tokio::time::interval(UPKEEP);
    loop {
        tick.tick().await;
        shared.metrics.admission.body_bytes.set(shared.bodies.held() as f64);
        shared.metrics.admission.answer_bytes.set(shared.held_answers.held() as f64);
        shared.fleet.prune();
        shared.fleet.engines().iter().for_each(|engine| engine.sweep());
    }
}
