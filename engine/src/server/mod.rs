//! The engine's OpenAI server: one task per connection, which speaks to the step loop through the mailbox.
//!
//! | path | does |
//! |---|---|
//! | `POST /v1/completions`, `/v1/chat/completions` | generate, streamed or not |
//! | `GET /v1/models`, `/v1/models/{id}` | what is served |
//! | `POST /tokenize`, `/detokenize` | the model's tokenizer |
//! | `GET /health`, `/version`, `/metrics` | for operators |
//! | `POST /kv/release`, `/abort_requests`, `/reset_prefix_cache`, `GET /debug/kv`, `/debug/kv/digests`, `/debug/kv/events` | for the cluster |
//!
//! A client that closes its connection drops its task, and with it every guard of its sequences: they are
//! aborted, streamed or not, before or after the first token. What such a client had sent is read all the same
//! (`detached.rs`): a handoff in it is given back, a release or an abort is done. One whose host vanishes without a word is
//! noticed within seconds (`presence.rs`).

mod access;
mod admit;
mod bodies;
mod control;
mod cores;
mod debug;
mod detached;
mod follow;
mod generate;
mod guard;
mod http;
mod presence;
mod rejection;
mod reply;
mod seal;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use baton_connector::fetch::LoadFailurePolicy;
use baton_connector::slice::Geometry;
use baton_connector_tcp::Secret;
use baton_openai::ParseLimits;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::event_log::EventLog;
use crate::metrics::EngineMetrics;
use crate::model::chat_template::ChatTemplate;
use crate::model::generation::GenerationDefaults;
use crate::model::tokenizer::Tokenizer;
use crate::run::options::Role;
use crate::run::rank::DpRank;
pub(crate) use bodies::Bodies;
use detached::Begin;
use presence::Watched;

/// A request's head must arrive within this time.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// A request's body must arrive within this time.
pub(crate) const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// Connections that are served at once; the next waits in the listener's backlog.
const CONNECTIONS_MAX: usize = 4_096;

/// What the HTTP side knows of its engine.
pub struct Frontend {
    /// The served model's name.
    pub model: String,
    /// When the engine started, in seconds since 1970.
    pub created: u64,
    /// Which legs it serves.
    pub role: Role,
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Conversations to text.
    pub template: ChatTemplate,
    /// The model's sampling defaults.
    pub defaults: GenerationDefaults,
    /// The model's end-of-sequence tokens.
    pub eos: Vec<u32>,
    /// Rows of the model's vocabulary.
    pub vocab: usize,
    /// Tokens of one sequence, prompt and output.
    pub capacity: usize,
    /// What becomes of a request whose blocks cannot be fetched.
    pub load_failure: LoadFailurePolicy,
    /// Layout and model of this engine's blocks.
    pub fingerprint: u64,
    /// How this engine's KV caches are cut.
    pub geometry: Geometry,
    /// Bounds of a body.
    pub limits: ParseLimits,
    /// What the cluster's own callers must show; see `control.rs`.
    pub cluster_secret: Option<Box<str>>,
    /// The same, for sealing handoffs; see `seal.rs`.
    pub secret: Option<Secret>,
    /// The engine cores, by data-parallel rank; at least one.
    pub cores: Vec<Arc<DpRank>>,
    /// Counters of what is of no core.
    pub metrics: Arc<EngineMetrics>,
    /// What happened to requests.
    pub log: Arc<EventLog>,
    /// Whether what is batched beside a request leaves its words as they are.
    pub batch_invariant: bool,
    /// The next sequence's id.
    pub next_sequence: AtomicU64,
    /// Bodies of requests that are being read.
    pub(crate) bodies: Arc<Bodies>,
    /// Bodies of verbs that show the cluster secret. They have a bound of their own: a release or an abort does not wait
    /// for what clients send.
    pub(crate) verb_bodies: Arc<Bodies>,
}

/// Serves until `stop`, then lets connections finish their requests. A client whose host acknowledges nothing for
/// `client_lost` has left; zero: as the system does it.
///
/// # Errors
/// When the listener breaks.
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
                // Out of file descriptors, or a connection that died in the backlog: neither ends the server.
                Err(error) => {
                    tracing::warn!(%error, "cannot accept connections");
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    continue;
                }
            },
            () = stop.cancelled() => break,
        };
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY not set");
        }
        let frontend = Arc::clone(&frontend);
        // It has the connection's place, and goes with the service: with the connection, and with the last of its work.
        let begin = Begin::new(permit, &works);
        let service = service_fn(move |request| {
            // Called, not only polled: see `detached.rs`.
            let reply = http::route(Arc::clone(&frontend), request, &begin);
            async move { Ok::<_, std::convert::Infallible>(reply.await) }
        });
        let connection = graceful
            .watch(protocol().serve_connection(TokioIo::new(Watched::new(stream, client_lost)), service));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::trace!(%error, "connection ended");
            }
        });
    }
    drop(listener);
    graceful.shutdown().await;
    // What is owed to others is not lost with its connection.
    works.close();
    works.wait().await;
    Ok(())
}

/// How connections are spoken to.
fn protocol() -> http1::Builder {
    let mut protocol = http1::Builder::new();
    protocol.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    protocol
}

/// Whether an address may be listened on without a cluster secret.
#[must_use]
pub fn is_loopback(address: &SocketAddr) -> bool {
    address.ip().is_loopback()
}
