//! The engine's OpenAI server: one task per connection, which sends messages to the step loop through the mailbox.
//!
//! | path | does |
//! |---|---|
//! | `POST /v1/completions`, `/v1/chat/completions` | generate, streamed or not |
//! | `POST /v1/messages`, `/v1/responses` | the same, around a chat; `/v1/messages/count_tokens` counts |
//! | `POST /v1/embeddings` | pooled hidden states of prompts |
//! | `GET /v1/models`, `/v1/models/{id}` | the served model and its adapters |
//! | `POST /tokenize`, `/detokenize` | the model's tokenizer |
//! | `GET /health`, `/version`, `/metrics` | for operators |
//! | `GET /kv_event_sources` | where each rank publishes KV events |
//! | `POST /kv/release`, `/abort_requests`, `/reset_prefix_cache` | control requests of the cluster |
//! | `GET /debug/kv`, `/debug/kv/digests`, `/debug/kv/events` | state, for the cluster |
//!
//! A client that closes its connection drops its task, and with it every guard of its sequences. The sequences are
//! then aborted, streamed or not, before or after the first token.
//!
//! A request that was sent before is still read (`task_spawner.rs`): a handoff in it is released, and a release or an
//! abort is carried out. A client whose host vanishes is detected within seconds (`client_liveness.rs`).

mod access;
mod admit;
mod block_format;
mod body_budget;
mod choice;
mod client_liveness;
mod control;
mod debug;
mod embeddings;
mod generate;
mod guard;
mod http;
mod rank_choice;
mod reply;
mod seal;
mod served_model;
mod task_spawner;
mod transfer_params;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use baton_connector::fetch::LoadFailurePolicy;
use baton_connector_leases::event_log::EventLog;
use baton_connector_tcp::Secret;
use baton_openai::ParseLimits;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::metrics::EngineMetrics;
use crate::run::options::Role;
use crate::run::rank::DpRank;
pub use block_format::BlockFormat;
pub(crate) use body_budget::BodyBudgets;
use client_liveness::MonitoredStream;
pub use served_model::{ServedAdapter, ServedModel};
use task_spawner::TaskSpawner;

/// A request's head must arrive within this time.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// A request's body must arrive within this time.
pub(crate) const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// Limit of the concurrent connections; a further one waits in the listener's backlog.
const CONNECTIONS_MAX: usize = 4_096;

/// The engine's state for the HTTP server.
pub struct Frontend {
    /// The served model.
    pub model: ServedModel,
    /// The legs that the engine serves.
    pub role: Role,
    /// The handling of a request whose blocks cannot be fetched.
    pub load_failure: LoadFailurePolicy,
    /// The format of this engine's KV blocks.
    pub blocks: BlockFormat,
    /// Bounds of a body.
    pub limits: ParseLimits,
    /// The cluster's secret, if it has one: the header of the cluster's own callers and the key of seals.
    pub secret: Option<Secret>,
    /// The engine cores, by data-parallel rank; at least one.
    pub cores: Vec<Arc<DpRank>>,
    /// Counters that belong to no core.
    pub metrics: Arc<EngineMetrics>,
    /// The event log.
    pub log: Arc<EventLog>,
    /// Whether other requests of a batch leave the tokens of a request unchanged.
    pub batch_invariant: bool,
    /// The next sequence's id.
    pub next_sequence: AtomicU64,
    /// The bodies that are being read.
    pub(crate) bodies: BodyBudgets,
}

/// Serves until `stop`, then lets connections finish their requests. A client whose host acknowledges nothing for
/// `client_lost` has left; zero leaves this to the system.
///
/// # Errors
/// When the listener fails.
pub async fn serve(
    frontend: Arc<Frontend>,
    listener: TcpListener,
    client_lost: Duration,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let permits = Arc::new(tokio::sync::Semaphore::new(CONNECTIONS_MAX));
    let graceful = hyper_util::server::graceful::GracefulShutdown::new();
    let works = TaskTracker::new();
    loop {
        let permit = Arc::clone(&permits).acquire_owned().await.expect("the semaphore is never closed");
        let (stream, _) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                // Out of file descriptors, or a connection that died in the backlog. Neither ends the server.
                Err(error) => {
                    tracing::warn!(event = "accept_failed", %error, "cannot accept connections");
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    continue;
                }
            },
            () = stop.cancelled() => break,
        };
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(event = "tcp_nodelay_not_set", %error, "TCP_NODELAY not set");
        }
        let frontend = Arc::clone(&frontend);
        // The spawner holds the connection's permit until the connection and its last task have ended.
        let begin = TaskSpawner::new(permit, &works);
        let service = service_fn(move |request| {
            // Called, not only polled: see `task_spawner.rs`.
            let reply = http::route(Arc::clone(&frontend), request, &begin);
            async move { Ok::<_, std::convert::Infallible>(reply.await) }
        });
        let connection = graceful.watch(
            protocol().serve_connection(TokioIo::new(MonitoredStream::new(stream, client_lost)), service),
        );
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::trace!(event = "http_connection_ended", %error, "connection ended");
            }
        });
    }
    drop(listener);
    graceful.shutdown().await;
    // Tasks that settle leases survive their connection.
    works.close();
    works.wait().await;
    Ok(())
}

/// The HTTP/1 parameters of all connections.
fn protocol() -> http1::Builder {
    let mut protocol = http1::Builder::new();
    protocol.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    protocol
}

/// Whether the engine may listen on an address without a cluster secret.
#[must_use]
pub fn is_loopback(address: &SocketAddr) -> bool {
    address.ip().is_loopback()
}
