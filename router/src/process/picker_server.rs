//! The server of `baton picker`: gRPC for gateways, gRPC health for probes, and the admin listener.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::server::{BindError, ServerTlsPair, listen, spawn_background};
use crate::config::RouterConfig;
use crate::engines::presence;
use crate::picker::service::{HealthService, PickerService, serve_connection};
use crate::process::reload::ReloadHandle;
use crate::state::generation::GenerationError;
use crate::state::shared::Shared;
use crate::tls::server::ServerTls;

/// Connections of gateways. A gateway has one per worker thread, and each carries many streams.
const GATEWAYS_MAX: usize = 4096;
/// Connections of probes.
const PROBES_MAX: usize = 64;
/// Streams of one probe's connection.
const PROBE_STREAMS_MAX: u32 = 8;
/// How often the health services follow the state of the engines.
const HEALTH_INTERVAL: Duration = Duration::from_millis(500);

/// An endpoint picker whose listeners are open.
pub struct Picker {
    gateways: TcpListener,
    probes: TcpListener,
    admin: TcpListener,
    shared: Arc<Shared>,
    tls: ServerTlsPair,
}

impl Picker {
    /// Opens all listeners. Gateways that connect are served once [`Self::run`] runs.
    ///
    /// # Errors
    /// [`BindError`] names the problem.
    pub async fn bind(config: RouterConfig) -> Result<Self, BindError> {
        let (picker_tls, admin_tls) = (config.picker.tls.clone(), config.admin.tls.clone());
        let gateways = listen("picker.listen", config.picker.listen, Ok(None)).await?;
        let probes = listen("picker.health_listen", config.picker.health_listen, Ok(None)).await?;
        let admin = listen("admin.listen", config.admin.listen, Ok(None)).await?;
        let shared = Shared::new(config).map_err(|error| match error {
            GenerationError::Admin(error) => BindError::Admin(error),
            error => BindError::Config(error),
        })?;
        let metrics = |purpose| shared.metrics.listener_tls(purpose);
        let picker =
            picker_tls.map(|tls| ServerTls::with_alpn(&tls, &[b"h2"], metrics("picker")).map(Arc::new));
        let admin_tls = admin_tls.map(|tls| ServerTls::new(&tls, metrics("admin")).map(Arc::new));
        let tls = ServerTlsPair { clients: picker.transpose()?, admin: admin_tls.transpose()? };
        Ok(Self { gateways, probes, admin, shared, tls })
    }

    /// The address of the gateways' listener.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        address(&self.gateways)
    }

    /// The address of the probes' listener.
    #[must_use]
    pub fn health_addr(&self) -> SocketAddr {
        address(&self.probes)
    }

    /// The address of the admin listener, with `/metrics`.
    #[must_use]
    pub fn admin_addr(&self) -> SocketAddr {
        address(&self.admin)
    }

    /// A handle for replacing the configuration while [`Self::run`] runs.
    #[must_use]
    pub fn reload(&self) -> ReloadHandle {
        ReloadHandle(Arc::clone(&self.shared))
    }

    /// Serves until `shutdown`, then drains. The health services fail at once. For `drain_delay_ms` streams are still
    /// accepted. Then no stream is accepted, open ones continue for at most `drain_timeout_ms`, and the rest is cut.
    ///
    /// # Cancel safety
    /// Dropping the future cuts all streams and releases their reservations.
    pub async fn run(self, shutdown: CancellationToken) {
        let Self { gateways, probes, admin, shared, tls } = self;
        let health = HealthService::new().await;
        health.update(&shared).await;
        let (_background, _admin) = spawn_background(&shared, admin, &tls);
        let server = PickerServer {
            drain: CancellationToken::new(),
            health: health.clone(),
            tls: tls.clients,
            shared: Arc::clone(&shared),
        };
        let (mut streams, mut checks) = (JoinSet::new(), JoinSet::new());
        {
            let accepting = async {
                tokio::join!(
                    server.accept(&gateways, Listener::Gateways, &mut streams),
                    server.accept(&probes, Listener::Probes, &mut checks),
                    publish_health(&health, &shared),
                )
            };
            let draining = async {
                shutdown.cancelled().await;
                shared.draining.store(true, Ordering::Relaxed);
                health.update(&shared).await;
                tokio::time::sleep(Duration::from_millis(shared.generation().config.drain_delay_ms)).await;
            };
            tokio::select! {
                _ = accepting => {}
                () = draining => {}
            }
        }
        drop(gateways);
        server.drain.cancel();
        let in_flight = async { while streams.join_next().await.is_some() {} };
        if tokio::time::timeout(shared.generation().config.drain_timeout(), in_flight).await.is_err() {
            tracing::warn!(
                event = "drain_timeout_exceeded",
                connections = streams.len(),
                "drain timeout exceeded, connections closed"
            );
        }
        streams.shutdown().await;
    }
}

fn address(listener: &TcpListener) -> SocketAddr {
    listener.local_addr().expect("a bound listener has an address")
}

/// Updates the health services as engines come and go.
async fn publish_health(health: &HealthService, shared: &Shared) {
    let mut tick = tokio::time::interval(HEALTH_INTERVAL);
    loop {
        tick.tick().await;
        health.update(shared).await;
    }
}

/// Who connects to a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listener {
    Gateways,
    Probes,
}

/// What every connection needs.
struct PickerServer {
    shared: Arc<Shared>,
    health: HealthService,
    tls: Option<Arc<ServerTls>>,
    drain: CancellationToken,
}

impl PickerServer {
    async fn accept(&self, listener: &TcpListener, kind: Listener, connections: &mut JoinSet<()>) {
        let slots = Arc::new(Semaphore::new(match kind {
            Listener::Gateways => GATEWAYS_MAX,
            Listener::Probes => PROBES_MAX,
        }));
        loop {
            let slot = Arc::clone(&slots).acquire_owned().await.expect("the semaphore is never closed");
            let Ok((stream, peer)) = listener.accept().await else {
                // Usually the process is out of file descriptors: wait for some to be closed instead of spinning.
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            };
            let lost_after = self.shared.generation().config.timeouts.client_lost();
            presence::set_keepalive(&stream, lost_after);
            if stream.set_nodelay(true).is_ok() {
                let serving = self.serve(stream, peer, kind);
                connections.spawn(async move {
                    let _slot = slot;
                    serving.await;
                });
            }
            while connections.try_join_next().is_some() {}
        }
    }

    fn serve(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
        kind: Listener,
    ) -> impl Future<Output = ()> + Send + 'static {
        let (health, drain) = (self.health.clone(), self.drain.clone());
        let picker = (kind == Listener::Gateways)
            .then(|| PickerService { shared: Arc::clone(&self.shared), gateway: peer.ip() });
        let streams_max = match kind {
            // A gateway opens another connection only when it knows that this one is full.
            Listener::Gateways => {
                u32::try_from(self.shared.generation().config.limits.in_flight).unwrap_or(u32::MAX)
            }
            Listener::Probes => PROBE_STREAMS_MAX,
        };
        let tls = self.tls.clone().filter(|_| kind == Listener::Gateways);
        async move {
            match tls {
                None => serve_connection(stream, health, picker, streams_max, drain).await,
                Some(tls) => {
                    if let Some(stream) = tls.accept(stream).await {
                        serve_connection(stream, health, picker, streams_max, drain).await;
                    }
                }
            }
        }
    }
}
