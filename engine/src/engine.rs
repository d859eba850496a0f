//! One engine, assembled: model, device, step loop, leases, peers and HTTP server.

use std::net::{SocketAddr, TcpListener};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use baton_connector::fetch::LoadFailurePolicy;
use baton_connector::layout::KvDtype;
use baton_connector::lease::LeaseTerms;
use baton_connector::region::Region;
use baton_connector::transport::Producer;
use baton_connector::{EngineId, Epoch, KvLayout};
use baton_connector_tcp::{ClientOptions, Secret, ServerOptions, TcpServer, TcpTransport};
use baton_openai::ParseLimits;
use tokio_util::sync::CancellationToken;

use crate::engine_core::ProducerAddress;
use crate::executor::Executor;
use crate::executor::cpu::{CpuExecutor, CpuOptions, LoadProgress};
use crate::executor::paced::Paced;
use crate::lease_desk::LeaseDesk;
use crate::mailbox::Mailbox;
use crate::metrics::EngineMetrics;
use crate::model::chat_template::ChatTemplate;
use crate::model::config::ModelConfig;
use crate::model::identity::identity;
use crate::model::tokenizer::Tokenizer;
use crate::model::{ModelError, ModelFiles};
use crate::peers::Peers;
use crate::scheduler::{Scheduler, SchedulerConfig};
use crate::server::{Frontend, Role, is_loopback, serve};
use crate::status::StatusBoard;
use crate::step_loop::{Parts, StepLoop};

/// How blocks travel between engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvTransport {
    /// Shared memory between engines of one host, TCP between others.
    #[default]
    Auto,
    /// Shared memory only: a producer of another host is an error.
    Shm,
    /// TCP only: this engine neither reads shared memory nor offers its own.
    Tcp,
}

/// Everything that can be set about an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The checkpoint.
    pub model: ModelFiles,
    /// The name that requests use; the checkpoint's own by default.
    pub served_model_name: Option<String>,
    /// Which legs it serves.
    pub role: Role,
    /// Where HTTP is served; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Where other engines read blocks; port 0 takes a free one.
    pub side_channel: SocketAddr,
    /// How blocks travel between engines.
    pub kv_transport: KvTransport,
    /// The host that other engines are told to reach the side channel at; its own address by default.
    pub side_channel_host: Option<String>,
    /// Tokens of one KV block.
    pub block_tokens: usize,
    /// Bytes of the KV pool.
    pub kv_cache_bytes: usize,
    /// Blocks of the KV pool; wins over the bytes.
    pub kv_blocks: Option<usize>,
    /// Element type of the KV cache.
    pub kv_dtype: KvDtype,
    /// Tokens of one sequence at most; the model's own limit by default.
    pub max_model_len: Option<usize>,
    /// Sequences that run or fetch at once.
    pub max_num_seqs: usize,
    /// Tokens of one step.
    pub max_num_batched_tokens: usize,
    /// Sequences that wait.
    pub max_waiting: usize,
    /// Life of an unread lease (`kv_lease_duration`).
    pub kv_lease_duration: Duration,
    /// What becomes of a request whose blocks cannot be fetched.
    pub kv_load_failure_policy: LoadFailurePolicy,
    /// Reads in flight at once.
    pub fetch_workers: usize,
    /// Threads that compute; all cores by default.
    pub threads: Option<usize>,
    /// Wait before each step: for demonstrations and tests.
    pub pace: Option<Duration>,
    /// What routers and engines of this cluster show each other. Needed beyond loopback.
    pub cluster_secret: Option<String>,
    /// How long requests and leases may take to end at shutdown.
    pub shutdown_timeout: Duration,
}

impl EngineOptions {
    /// Defaults for a checkpoint: loopback, free ports, 512 MiB of KV cache.
    #[must_use]
    pub fn new(model: ModelFiles) -> Self {
        let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
        Self {
            model,
            served_model_name: None,
            role: Role::Both,
            listen: loopback,
            side_channel: loopback,
            kv_transport: KvTransport::Auto,
            side_channel_host: None,
            block_tokens: 16,
            kv_cache_bytes: 512 << 20,
            kv_blocks: None,
            kv_dtype: KvDtype::F32,
            max_model_len: None,
            max_num_seqs: 64,
            max_num_batched_tokens: 512,
            max_waiting: 1024,
            kv_lease_duration: LeaseTerms::default().duration,
            kv_load_failure_policy: LoadFailurePolicy::Recompute,
            fetch_workers: 4,
            threads: None,
            pace: None,
            cluster_secret: None,
            shutdown_timeout: Duration::from_secs(30),
        }
    }
}

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The checkpoint cannot be served.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// An option is out of its range.
    #[error("{0}")]
    Options(String),
    /// A socket or thread could not be had.
    #[error("{what}: {source}")]
    System {
        /// What for.
        what: String,
        /// The system's reason.
        source: std::io::Error,
    },
}

fn system(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> StartError {
    let what = what.into();
    move |source| StartError::System { what, source }
}

/// A running engine.
pub struct Engine {
    frontend: Arc<Frontend>,
    listener: Option<tokio::net::TcpListener>,
    http: SocketAddr,
    side_channel: SocketAddr,
    server: TcpServer,
    step_loop: JoinHandle<()>,
    lease_timer: JoinHandle<()>,
    timer_stop: Arc<AtomicBool>,
    peers: Arc<Peers>,
    /// Cancelled when the step loop has panicked.
    broken: CancellationToken,
    shutdown_timeout: Duration,
}

impl Engine {
    /// Loads the model and starts everything but HTTP, whose address is already bound. `progress` hears how much
    /// of the weights is loaded.
    ///
    /// # Errors
    /// [`StartError`], before anything is served.
    pub fn start(options: EngineOptions, progress: &mut dyn FnMut(LoadProgress)) -> Result<Self, StartError> {
        let secret = check(&options)?;
        let listener =
            TcpListener::bind(options.listen).map_err(system(format!("listen on {}", options.listen)))?;
        listener.set_nonblocking(true).map_err(system("listen"))?;
        let side = TcpListener::bind(options.side_channel)
            .map_err(system(format!("listen on {}", options.side_channel)))?;
        let http = listener.local_addr().map_err(system("listen"))?;
        let side_channel = side.local_addr().map_err(system("listen"))?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(system("listen"))?;

        let config = ModelConfig::read(&options.model)?;
        let tokenizer = Arc::new(Tokenizer::load(&options.model)?);
        let template = ChatTemplate::load(&options.model, &tokenizer)?;
        let model = options.served_model_name.clone().unwrap_or_else(|| options.model.default_name());
        let executor = load(&options, &config, progress)?;

        let metrics = Arc::new(EngineMetrics::new(&model));
        let mailbox = Arc::new(Mailbox::new(options.max_waiting.max(1)));
        let status = Arc::new(StatusBoard::default());
        let region = executor.region().clone();
        let fingerprint = executor.layout().fingerprint(&identity(&options.model)?);
        metrics.cache_config(options.block_tokens, region.blocks());
        let terms = LeaseTerms { duration: options.kv_lease_duration, ..LeaseTerms::default() };
        let epoch = Epoch(random()?);
        let desk = Arc::new(LeaseDesk::new(
            terms,
            epoch,
            fingerprint,
            region.clone(),
            Arc::clone(&mailbox),
            Arc::clone(&metrics),
        ));
        let server = {
            let producer: Arc<dyn Producer> = Arc::clone(&desk) as _;
            let options = ServerOptions { secret: secret.clone(), ..ServerOptions::default() };
            TcpServer::start(side, producer, options).map_err(system("side channel"))?
        };
        // A connection per read, and some for heartbeats and releases beside them.
        let connections_per_peer_max = 2 * options.fetch_workers.max(4);
        let transport = Arc::new(TcpTransport::new(ClientOptions {
            secret,
            connections_per_peer_max,
            ..ClientOptions::default()
        }));
        let peers = Arc::new(
            Peers::start(
                transport,
                region.clone(),
                Arc::clone(&mailbox),
                Arc::clone(&metrics),
                options.fetch_workers.max(1),
            )
            .map_err(system("start threads"))?,
        );
        let scheduler = Scheduler::new(
            SchedulerConfig {
                block_tokens: options.block_tokens,
                max_num_seqs: options.max_num_seqs,
                max_num_batched_tokens: options.max_num_batched_tokens,
                max_waiting: options.max_waiting,
                max_model_len: options.max_model_len.unwrap_or(config.max_positions),
            },
            region.blocks(),
        );
        let address = ProducerAddress {
            engine_id: EngineId(format!("{}-{epoch}", options.role.label()).into()),
            host: options.side_channel_host.clone().unwrap_or_else(|| side_channel.ip().to_string()),
            port: side_channel.port(),
        };
        let frontend = Arc::new(Frontend {
            model,
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            role: options.role,
            tokenizer,
            template,
            eos: config.eos.clone(),
            defaults: config.generation.clone(),
            vocab: executor.vocab(),
            capacity: scheduler.capacity(),
            load_failure: options.kv_load_failure_policy,
            fingerprint,
            limits: ParseLimits { vocab: u32::try_from(executor.vocab()).ok(), ..ParseLimits::default() },
            cluster_secret: options.cluster_secret.as_deref().map(Into::into),
            mailbox: Arc::clone(&mailbox),
            desk: Arc::clone(&desk),
            peers: Arc::clone(&peers),
            metrics: Arc::clone(&metrics),
            status: Arc::clone(&status),
            next_sequence: AtomicU64::new(1),
        });
        let timer_stop = Arc::new(AtomicBool::new(false));
        let lease_timer = {
            let (desk, stop) = (Arc::clone(&desk), Arc::clone(&timer_stop));
            spawn("lease-timer", move || desk.run_timer(|| stop.load(Ordering::Acquire)))?
        };
        let broken = CancellationToken::new();
        let step_loop = StepLoop::new(Parts {
            executor: match options.pace {
                Some(pace) => Box::new(Paced::new(Box::new(executor), pace)),
                None => Box::new(executor),
            },
            scheduler,
            mailbox,
            desk,
            peers: Arc::clone(&peers),
            metrics,
            status,
            address,
        });
        let step_loop = {
            let (broken, mailbox, status) =
                (broken.clone(), Arc::clone(&frontend.mailbox), Arc::clone(&frontend.status));
            spawn("step-loop", move || {
                // A loop that has panicked answers nobody: the engine ends, and its supervisor starts another.
                if std::panic::catch_unwind(AssertUnwindSafe(|| step_loop.run())).is_err() {
                    status.set_failed("the step loop panicked".into());
                    mailbox.close(Instant::now());
                    drop(mailbox.collect());
                    broken.cancel();
                }
            })?
        };
        Ok(Self {
            frontend,
            listener: Some(listener),
            http,
            side_channel,
            server,
            step_loop,
            lease_timer,
            timer_stop,
            peers,
            broken,
            shutdown_timeout: options.shutdown_timeout,
        })
    }

    /// Where HTTP is served.
    #[must_use]
    pub fn http(&self) -> SocketAddr {
        self.http
    }

    /// Where other engines read blocks.
    #[must_use]
    pub fn side_channel(&self) -> SocketAddr {
        self.side_channel
    }

    /// The memory of its KV pool, for checks.
    #[must_use]
    pub fn kv_region(&self) -> &Region {
        self.frontend.desk.region()
    }

    /// The served model's name.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.frontend.model
    }

    /// Serves until `stop`; then takes no more requests, lets running ones and leases end within the shutdown
    /// timeout, gives up the rest, and tells the peers.
    ///
    /// # Errors
    /// When the listener breaks, or the step loop has panicked.
    pub async fn run(mut self, stop: CancellationToken) -> std::io::Result<()> {
        let listener = self.listener.take().expect("taken once");
        let accepting = CancellationToken::new();
        let serving = tokio::spawn(serve(Arc::clone(&self.frontend), listener, accepting.clone()));
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.broken.cancelled() => {}
        }
        let failed = self.broken.is_cancelled();
        let deadline = Instant::now() + if failed { Duration::ZERO } else { self.shutdown_timeout };
        self.frontend.mailbox.close(deadline);
        let Self { step_loop, lease_timer, timer_stop, peers, server, frontend, .. } = self;
        let wound_down = tokio::task::spawn_blocking(move || {
            // The threads log what broke them; there is nothing more to do about it here.
            drop(step_loop.join());
            timer_stop.store(true, Ordering::Release);
            drop(lease_timer.join());
        });
        drop(wound_down.await);
        accepting.cancel();
        let grace = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(500));
        let served = tokio::time::timeout(grace, serving).await;
        drop(frontend);
        let closed = tokio::task::spawn_blocking(move || {
            server.shutdown();
            peers.shutdown(deadline.max(Instant::now() + Duration::from_millis(500)));
        });
        drop(closed.await);
        match served {
            _ if failed => Err(std::io::Error::other("the step loop panicked; the log says where")),
            Ok(Ok(served)) => served,
            Ok(Err(_)) | Err(_) => Ok(()),
        }
    }
}

fn check(options: &EngineOptions) -> Result<Option<Secret>, StartError> {
    let wrong = |what: &str| Err(StartError::Options(what.to_owned()));
    if options.block_tokens == 0 || options.block_tokens > 256 {
        return wrong("a KV block has 1 to 256 tokens");
    }
    if options.max_num_seqs == 0 || options.max_num_batched_tokens < options.max_num_seqs {
        return wrong("max_num_batched_tokens must be at least max_num_seqs, which must be at least 1");
    }
    if options.kv_lease_duration < Duration::from_millis(100) {
        return wrong("kv_lease_duration must be at least 100 ms");
    }
    if options.side_channel.ip().is_unspecified() && options.side_channel_host.is_none() {
        return wrong(
            "a side channel on an unspecified address (0.0.0.0 or ::) needs --side-channel-host: decode engines are \
             told that host, and cannot reach an unspecified one",
        );
    }
    let beyond_loopback = !is_loopback(&options.listen) || !is_loopback(&options.side_channel);
    if beyond_loopback && options.cluster_secret.is_none() {
        return wrong(
            "listening beyond loopback needs --cluster-secret-file: without a secret anybody could release or read KV blocks",
        );
    }
    let secret = options.cluster_secret.as_ref().map(|text| Secret::new(text.as_bytes()));
    secret.transpose().map_err(|error| StartError::Options(error.to_string()))
}

fn load(
    options: &EngineOptions,
    config: &ModelConfig,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<CpuExecutor, StartError> {
    let layout = KvLayout {
        layers: config.layers,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        block_tokens: options.block_tokens,
        dtype: options.kv_dtype,
    };
    let blocks = options.kv_blocks.unwrap_or(options.kv_cache_bytes / layout.block_bytes());
    if blocks < 2 {
        let message =
            format!("the KV cache holds {blocks} blocks of {} bytes; 2 are needed", layout.block_bytes());
        return Err(StartError::Options(message));
    }
    let mut cpu = CpuOptions {
        blocks,
        block_tokens: options.block_tokens,
        kv_dtype: options.kv_dtype,
        ..CpuOptions::default()
    };
    cpu.threads = options.threads.unwrap_or(cpu.threads).max(1);
    Ok(CpuExecutor::load(&options.model, config, &cpu, progress)?)
}

fn random() -> Result<u64, StartError> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| StartError::System {
        what: "randomness".into(),
        source: std::io::Error::other(error),
    })?;
    Ok(u64::from_ne_bytes(bytes))
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StartError> {
    std::thread::Builder::new().name(name.into()).spawn(run).map_err(system(format!("start thread {name}")))
}
