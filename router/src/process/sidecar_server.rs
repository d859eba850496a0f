//! The server of `baton sidecar`: one listener per data-parallel rank, the admin listener on loopback, and a listener
//! for monitors.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::join_all;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::discovery::inference_pool;
use super::server::{
    BindError, ClientServer, ServerTlsPair, alpn, drain_connections, listen, spawn_background,
};
use crate::admin::{self, AdminScope, AdminService};
use crate::config::{InferencePoolConfig, Scheme};
use crate::metrics::log_limiter::LogLimiter;
use crate::service::ClientService;
use crate::service::sidecar::options::{ServingTls, SidecarOptions};
use crate::service::sidecar::{PodAddresses, Sidecar, SidecarListener};
use crate::state::generation::GenerationError;
use crate::state::shared::Shared;
use crate::tls::server::ServerTls;

/// Interval of the removal of idle prefill engines.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(10);

/// A sidecar whose listeners are open.
pub struct SidecarServer {
    /// By rank.
    clients: Vec<TcpListener>,
    admin: TcpListener,
    monitors: Option<TcpListener>,
    shared: Arc<Shared>,
    sidecar: Arc<Sidecar>,
    tls: ServerTlsPair,
}

impl SidecarServer {
    /// Opens all listeners. Clients that connect are served once [`Self::run`] runs.
    ///
    /// # Errors
    /// [`BindError`] names the problem.
    pub async fn bind(options: SidecarOptions) -> Result<Self, BindError> {
        let config = options.router_config();
        let mut clients = Vec::new();
        for rank in 0..options.ranks {
            clients.push(listen("--port", options.listen_at(rank), Ok(None)).await?);
        }
        let admin = listen("admin.listen", config.admin.listen, Ok(None)).await?;
        let monitors = match options.metrics() {
            Some(address) => Some(listen("--metrics-port", address, Ok(None)).await?),
            None => None,
        };
        let shared = Shared::new(config).map_err(|error| match error {
            GenerationError::Admin(error) => BindError::Admin(error),
            error => BindError::Config(error),
        })?;
        let (metrics, alpn) =
            (|| shared.metrics.listener_tls("clients"), alpn(shared.generation().config.http2));
        let tls = match &options.serving_tls {
            ServingTls::Off => None,
            ServingTls::SelfSigned => Some(ServerTls::self_signed(alpn, metrics())?),
            ServingTls::Files(config) => Some(ServerTls::with_alpn(config, alpn, metrics())?),
        };
        let tls = ServerTlsPair { clients: tls.map(Arc::new), admin: None };
        let sidecar = Arc::new(Sidecar::new(options)?);
        sidecar.apply_secret(&shared.generation());
        Ok(Self { clients, admin, monitors, shared, sidecar, tls })
    }

    /// The address of rank 0's listener.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.clients[0].local_addr().expect("a bound listener has an address")
    }

    /// The address of the admin listener.
    #[must_use]
    pub fn admin_addr(&self) -> SocketAddr {
        self.admin.local_addr().expect("a bound listener has an address")
    }

    /// Serves until `shutdown`, then drains as a router does.
    ///
    /// # Cancel safety
    /// Dropping the future cuts all requests. Settlements then continue only as long as the runtime does.
    pub async fn run(self, shutdown: CancellationToken) {
        let Self { clients, admin, monitors, shared, sidecar, tls } = self;
        let (mut background, _admin) = spawn_background(&shared, admin, &tls);
        if let Some(monitors) = monitors {
            let service = AdminService::new(Arc::clone(&shared), AdminScope::Metrics);
            background.spawn(admin::serve(monitors, None, Arc::new(service)));
        }
        background.spawn(follow_pool(Arc::clone(&sidecar)));
        background.spawn(remove_idle_prefillers(Arc::clone(&sidecar)));
        background.spawn(follow_secret(Arc::clone(&sidecar), Arc::clone(&shared)));
        let (drain, draining) = watch::channel(false);
        // One bound for the connections of all ranks, also during the drain.
        let permits = Arc::new(Semaphore::new(shared.generation().config.limits.connections));
        let streams = TaskTracker::new();
        let servers: Vec<_> = (0..sidecar.options.ranks)
            .map(|rank| SidecarListener { sidecar: Arc::clone(&sidecar), rank })
            .map(|listener| Arc::new(ClientService(Arc::clone(&shared), Some(listener))))
            .map(|service| {
                ClientServer::new(service, tls.clients.clone(), &permits, &streams, draining.clone())
            })
            .map(Arc::new)
            .collect();
        let mut connections: Vec<JoinSet<()>> = clients.iter().map(|_| JoinSet::new()).collect();
        {
            let each = clients.iter().zip(&servers).zip(&mut connections);
            let accepting =
                each.map(|((listener, server), connections)| server.accept(listener, connections));
            tokio::select! {
                () = shutdown.cancelled() => {}
                _ = join_all(accepting) => {}
            }
        }
        shared.draining.store(true, Ordering::Relaxed);
        drop(clients);
        drain_connections(&shared, &drain, &mut connections, &streams).await;
    }
}

/// Keeps the addresses of the InferencePool's Pods up to date.
async fn follow_pool(sidecar: Arc<Sidecar>) {
    let Some(pool) = &sidecar.options.inference_pool else { return };
    let config = InferencePoolConfig {
        namespace: Some(pool.namespace.clone()),
        name: pool.name.clone(),
        scheme: Scheme::Http,
        kubeconfig_file: std::env::var_os("KUBECONFIG").map(Into::into),
    };
    inference_pool::follow(&config, |found| match found {
        Ok(engines) => {
            let addresses = engines.iter().filter_map(|engine| engine.url.host().parse::<IpAddr>().ok());
            sidecar.set_pods(addresses.map(|address| address.to_canonical()).collect::<PodAddresses>());
        }
        Err(error) => {
            tracing::warn!(
                event = "inference_pool_unknown",
                error,
                "cannot read the InferencePool; it is retried"
            );
        }
    })
    .await;
}

/// Reads the file of the cluster's secret as often as a router reads its files.
async fn follow_secret(sidecar: Arc<Sidecar>, shared: Arc<Shared>) {
    if sidecar.options.secret().is_none() {
        return;
    }
    static LOG_LIMITER: LogLimiter = LogLimiter::new();
    let mut tick = tokio::time::interval(Duration::from_millis(shared.generation().config.reload.poll_ms));
    loop {
        tick.tick().await;
        let (of, generation) = (Arc::clone(&sidecar), shared.generation());
        let read = tokio::task::spawn_blocking(move || {
            of.refresh_secret(&generation).map_err(|error| error.to_string())
        })
        .await;
        if let Ok(Err(error)) = read
            && let Some(held_back) = LOG_LIMITER.allow()
        {
            tracing::warn!(
                event = "cluster_secret_unreadable",
                error,
                held_back,
                "cannot read the cluster secret; the last one stays in use"
            );
        }
    }
}

async fn remove_idle_prefillers(sidecar: Arc<Sidecar>) {
    let mut tick = tokio::time::interval(MAINTENANCE_INTERVAL);
    loop {
        tick.tick().await;
        sidecar.remove_idle_prefillers();
    }
}
