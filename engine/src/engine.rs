//! One engine, assembled: the model, one engine core per data-parallel rank, and the HTTP server before them.

mod adapters;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use baton_connector::Epoch;
use baton_connector::layout::KvDtype;
use baton_connector::limits::RANKS_MAX;
use baton_connector::region::Region;
use baton_connector::slice::Geometry;
use baton_connector_leases::service::LeaseService;
use baton_connector_tcp::{Secret, SecretTooShort};
use baton_openai::ParseLimits;
use tokio_util::sync::CancellationToken;

use self::adapters::Adapters;
use crate::compute::Executor;
use crate::compute::cpu::{CpuExecutor, CpuOptions, WeightLoadProgress, WeightMode};
use crate::compute::cuda::{Accelerator, DeviceChoice, DeviceOptions, Element, PoolSize};
use crate::compute::shared_pool::shared_pool;
use crate::grammar::GrammarService;
use crate::handoff::transport::{KvTransport, NixlState};
use crate::kv_events::EventSockets;
use crate::metrics::EngineMetrics;
use crate::model::chat_template::ChatTemplate;
use crate::model::config::ModelConfig;
use crate::model::identity::identity;
use crate::model::lora::LoraAdapter;
use crate::model::output::OutputFormat;
use crate::model::tokenizer::Tokenizer;
use crate::model::weights::Weights;
use crate::run::options::{EngineOptions, StartError, system};
use crate::run::random::random_bytes;
use crate::run::rank::{RankContext, RunningRank};
use crate::server::{BlockFormat, BodyBudgets, Frontend, ServedModel, is_loopback, serve};

/// Engine cores of one process.
const DATA_PARALLEL_MAX: usize = 64;
/// Limit of the time target of a step.
const STEP_TARGET_MAX: Duration = Duration::from_secs(60);

/// A running engine.
pub struct Engine {
    frontend: Arc<Frontend>,
    listener: Option<tokio::net::TcpListener>,
    http: SocketAddr,
    /// By rank; at least one.
    running: Vec<RunningRank>,
    /// Cancelled when a step loop has panicked.
    broken: CancellationToken,
    client_lost: Duration,
    shutdown_timeout: Duration,
}

impl Engine {
    /// Loads the model and starts all threads of the engine except HTTP, whose address is already bound. `progress`
    /// receives the state of loading the weights.
    ///
    /// # Errors
    /// [`StartError`], before anything is served.
    pub fn start(
        options: EngineOptions,
        progress: &mut dyn FnMut(WeightLoadProgress),
    ) -> Result<Self, StartError> {
        let secret = check(&options)?;
        let listener = TcpListener::bind(options.listen)
            .map_err(system(format!("listen on {} (--listen)", options.listen)))?;
        listener.set_nonblocking(true).map_err(system("listen"))?;
        let sides = side_channels(&options)?;
        let events = event_sockets(&options)?;
        let http = listener.local_addr().map_err(system("listen"))?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(system("listen"))?;

        let config = ModelConfig::read(&options.model)?;
        let tokenizer = Arc::new(Tokenizer::load(&options.model)?);
        let template = ChatTemplate::load(&options.model, &tokenizer)?;
        let model = options.served.model.clone().unwrap_or_else(|| options.model.default_name());
        let max_model_len = max_model_len(&options, &config)?;
        let config = config.for_positions(max_model_len);
        let eos = ends_of_text(&config, &tokenizer);
        let adapters = Adapters::open(&options, &model, &config)?;
        let executors = executors(&options, &config, &adapters.loaded, progress)?;

        let weights = identity(&options.model)? + options.weights.identity() + config.identity();
        let fingerprint = executors[0].layout().fingerprint(&weights);
        let nixl = NixlState::find(options.kv_transport, options.nixl_library.as_deref());
        let common = RankContext {
            options: &options,
            secret: secret.clone(),
            epoch: Epoch(random_bytes().map(u64::from_ne_bytes).map_err(system("randomness"))?),
            fingerprint,
            model: &weights,
            nixl: &nixl,
            max_model_len,
            window: config.attention.widest_window(),
            broken: CancellationToken::new(),
            log: Arc::default(),
        };
        let (vocab, batch_invariant) = (executors[0].vocab(), executors[0].is_batch_invariant());
        let pooling = executors[0].computes_hidden().then_some(options.pooling);
        let metrics = Arc::new(EngineMetrics::new(&model));
        let running = start_ranks(&common, executors, sides, events, &metrics, &model)?;
        let model = ServedModel {
            grammars: GrammarService::new(&tokenizer, vocab, &eos),
            name: model,
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            tokenizer,
            output: OutputFormat::of_model(options.output, &template),
            template,
            defaults: config.generation.clone(),
            eos,
            vocab,
            capacity: running[0].capacity,
            pooling,
            adapters: adapters.served,
        };
        let frontend = Arc::new(Frontend {
            model,
            role: options.role,
            load_failure: options.kv_load_failure_policy,
            blocks: BlockFormat { fingerprint, geometry: running[0].cache.geometry },
            limits: ParseLimits { vocab: u32::try_from(vocab).ok(), ..ParseLimits::default() },
            secret,
            cores: running.iter().map(|running| Arc::clone(&running.core)).collect(),
            metrics,
            log: Arc::clone(&common.log),
            batch_invariant,
            next_sequence: AtomicU64::new(1),
            bodies: BodyBudgets::of(options.body_bytes_total),
        });
        Ok(Self {
            frontend,
            listener: Some(listener),
            http,
            running,
            broken: common.broken.clone(),
            client_lost: options.client_lost,
            shutdown_timeout: options.shutdown_timeout,
        })
    }

    /// Where HTTP is served.
    #[must_use]
    pub fn http(&self) -> SocketAddr {
        self.http
    }

    /// Where other engines read blocks: the KV ranks of one data-parallel rank after the other. Empty without handoffs.
    #[must_use]
    pub fn side_channels(&self) -> Vec<SocketAddr> {
        self.running.iter().flat_map(|running| running.side_channels.clone()).collect()
    }

    /// The memory of the first data-parallel rank's KV pool, by KV rank, for checks. Empty if no transport uses it and it
    /// is in a device's memory.
    #[must_use]
    pub fn kv_regions(&self) -> &[Region] {
        &self.running[0].cache.regions
    }

    /// The served model's name.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.frontend.model.name
    }

    /// Serves until `stop`. The engine then takes no more requests, and running requests and leases may end within
    /// the shutdown timeout. Afterwards the engine aborts the rest and delivers the pending notices to peers.
    ///
    /// # Errors
    /// When the listener breaks, or the step loop has panicked.
    pub async fn run(mut self, stop: CancellationToken) -> std::io::Result<()> {
        let listener = self.listener.take().expect("taken once");
        let accepting = CancellationToken::new();
        let frontend = Arc::clone(&self.frontend);
        let serving = tokio::spawn(serve(frontend, listener, self.client_lost, accepting.clone()));
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.broken.cancelled() => {}
        }
        let failed = self.broken.is_cancelled();
        let deadline = Instant::now() + if failed { Duration::ZERO } else { self.shutdown_timeout };
        for core in &self.frontend.cores {
            core.mailbox.close(deadline);
        }
        let Self { running, frontend, .. } = self;
        let stopped = tokio::task::spawn_blocking(move || {
            running.into_iter().map(RunningRank::stop).collect::<Vec<_>>()
        });
        let stopped = stopped.await.unwrap_or_default();
        accepting.cancel();
        let grace = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(500));
        let served = tokio::time::timeout(grace, serving).await;
        drop(frontend);
        let closed = tokio::task::spawn_blocking(move || {
            let deadline = deadline.max(Instant::now() + Duration::from_millis(500));
            stopped.into_iter().for_each(|core| core.close(deadline));
        });
        drop(closed.await);
        match served {
            _ if failed => Err(std::io::Error::other("the step loop panicked; see the log")),
            Ok(Ok(served)) => served,
            Ok(Err(_)) | Err(_) => Ok(()),
        }
    }
}

/// The tokens that end a text.
fn ends_of_text(config: &ModelConfig, tokenizer: &Tokenizer) -> Vec<u32> {
    let eos = config.ends_of_text(tokenizer.eos());
    if eos.is_empty() {
        tracing::warn!(
            event = "end_token_missing",
            "no end-of-text token in the checkpoint, only stop strings, stop_token_ids and max_tokens end a text"
        );
    }
    eos
}

/// Starts each rank with its executor and its side channels.
fn start_ranks(
    common: &RankContext<'_>,
    executors: Vec<Box<dyn Executor>>,
    sides: Vec<TcpListener>,
    events: Vec<EventSockets>,
    metrics: &Arc<EngineMetrics>,
    model: &str,
) -> Result<Vec<RunningRank>, StartError> {
    let mut running = Vec::with_capacity(executors.len());
    let (mut sides, mut events) = (sides.into_iter(), events.into_iter());
    for (rank, executor) in executors.into_iter().enumerate() {
        let side = sides.by_ref().take(common.options.kv_ranks).collect();
        let metrics = match rank {
            0 => Arc::clone(metrics),
            _ => Arc::new(metrics.sibling(model, rank)),
        };
        running.push(RunningRank::start(common, rank, executor, side, events.next(), metrics)?);
    }
    let leases: Vec<_> = running.iter().map(|running| Arc::clone(&running.core.leases)).collect();
    LeaseService::link_siblings(&leases);
    Ok(running)
}

/// A listener per data-parallel rank and KV rank: consecutive ports, or free ones. None without handoffs.
fn side_channels(options: &EngineOptions) -> Result<Vec<TcpListener>, StartError> {
    if !options.role.has_handoffs() {
        return Ok(Vec::new());
    }
    let base = options.side_channel;
    let listen = |rank: usize| {
        let port = match base.port() {
            0 => Some(0),
            port => u16::try_from(rank).ok().and_then(|rank| port.checked_add(rank)),
        };
        let port = port.ok_or_else(|| StartError::Options("a side channel port is above 65535".into()))?;
        let at = SocketAddr::new(base.ip(), port);
        TcpListener::bind(at).map_err(system(format!("listen on {at} (--side-channel)")))
    };
    (0..options.data_parallel_size * options.kv_ranks).map(listen).collect()
}

/// The sockets for KV events of each data-parallel rank, if events are published.
fn event_sockets(options: &EngineOptions) -> Result<Vec<EventSockets>, StartError> {
    let Some(config) = &options.kv_events else { return Ok(Vec::new()) };
    let own = options.listen.ip();
    let bind = |rank| EventSockets::bind(config, rank, own);
    let bound: Result<_, _> = (0..options.data_parallel_size).map(bind).collect();
    bound.map_err(|error| StartError::Options(format!("--kv-events-config: {error}")))
}

/// One executor per rank, over the same weights.
fn executors(
    options: &EngineOptions,
    config: &ModelConfig,
    adapters: &Arc<[LoraAdapter]>,
    progress: &mut dyn FnMut(WeightLoadProgress),
) -> Result<Vec<Box<dyn Executor>>, StartError> {
    if let DeviceChoice::Accelerator(accelerator) = options.device {
        return Ok(vec![on_device(accelerator, options, config, progress)?]);
    }
    let first = load(options, config, adapters, progress)?;
    let cpu = cpu_options(options, first.layout().block_bytes())?;
    let siblings = (1..options.data_parallel_size).map(|_| first.sibling(&cpu));
    let siblings = siblings.collect::<Result<Vec<_>, _>>()?;
    let boxed = |executor: CpuExecutor| -> Box<dyn Executor> { Box::new(executor) };
    Ok(std::iter::once(first).chain(siblings).map(boxed).collect())
}

fn on_device(
    accelerator: Accelerator,
    options: &EngineOptions,
    config: &ModelConfig,
    progress: &mut dyn FnMut(WeightLoadProgress),
) -> Result<Box<dyn Executor>, StartError> {
    let wrong = |what: String| StartError::Options(format!("--device {accelerator}: {what}"));
    let element = match options.kv_dtype {
        KvDtype::F32 => Element::F32,
        KvDtype::Bf16 => Element::Bf16,
        KvDtype::F16 => return Err(wrong("--kv-cache-dtype must be f32 or bf16".into())),
    };
    if options.weights != WeightMode::Stored {
        return Err(wrong("weights cannot be converted to int8 or bfloat16 on this device".into()));
    }
    if options.kv_ranks != 1 || options.data_parallel_size != 1 {
        return Err(wrong("--kv-ranks and --data-parallel-size must be 1".into()));
    }
    let layout = config.kv_layout(options.block_tokens, options.kv_dtype);
    let positions = options.max_model_len.unwrap_or(config.max_positions);
    let (pool_size, positions) = match options.gpu_memory_utilization {
        Some(share) if options.kv_blocks.is_none() => (PoolSize::Share(share), positions),
        Some(_) | None => {
            let blocks = pool_blocks(options, layout.block_bytes())?;
            (PoolSize::Blocks(blocks), positions.min(blocks * options.block_tokens))
        }
    };
    let device = DeviceOptions {
        pool_size,
        block_tokens: options.block_tokens,
        element,
        max_rows: options.max_num_batched_tokens,
        max_sequences: options.max_num_seqs,
        max_positions: positions,
        // Only transports use the host's memory: tiers and digests copy from the device.
        mirror: options.role.has_handoffs().then(|| pool(options)),
    };
    let weights = Weights::open(&options.model)?;
    let opened = crate::compute::cuda::open(accelerator, &weights, config, &device, progress);
    opened.map_err(|error| wrong(error.to_string()))
}

/// Blocks of a KV pool.
fn pool_blocks(options: &EngineOptions, block_bytes: usize) -> Result<usize, StartError> {
    let blocks = options.kv_blocks.unwrap_or(options.kv_cache_bytes / block_bytes);
    if blocks < 2 {
        let message = format!("the KV cache holds {blocks} blocks of {block_bytes} bytes; 2 are needed");
        return Err(StartError::Options(message));
    }
    Ok(blocks)
}

/// The allocator of the memory that transports see. Without handoffs the memory is private.
fn pool(options: &EngineOptions) -> fn(usize, usize) -> Region {
    match options.kv_transport {
        _ if !options.role.has_handoffs() => Region::allocate,
        KvTransport::Tcp => Region::allocate,
        KvTransport::Auto | KvTransport::Shm | KvTransport::Nixl => shared_pool,
    }
}

/// The token limit of one sequence. Beyond the positions of the model the text would be fluent nonsense.
fn max_model_len(options: &EngineOptions, config: &ModelConfig) -> Result<usize, StartError> {
    match options.max_model_len {
        Some(wanted) if wanted > config.max_positions => Err(StartError::Options(format!(
            "--max-model-len {wanted} is more than the {} positions of the model (max_position_embeddings and rope \
             scaling in config.json)",
            config.max_positions
        ))),
        wanted => Ok(wanted.unwrap_or(config.max_positions)),
    }
}

fn check(options: &EngineOptions) -> Result<Option<Secret>, StartError> {
    let wrong = |what: &str| Err(StartError::Options(what.to_owned()));
    if options.data_parallel_size == 0 || options.data_parallel_size > DATA_PARALLEL_MAX {
        return wrong("--data-parallel-size must be from 1 to 64");
    }
    if options.kv_ranks == 0 || options.kv_ranks > RANKS_MAX {
        return wrong("--kv-ranks must be from 1 to 64");
    }
    if options.block_tokens == 0 || options.block_tokens > 256 {
        return wrong("--block-size must be from 1 to 256 tokens");
    }
    if options.max_num_seqs == 0 || options.max_num_batched_tokens < options.max_num_seqs {
        return wrong("max_num_batched_tokens must be at least max_num_seqs, which must be at least 1");
    }
    if options.step_target > STEP_TARGET_MAX {
        return wrong("--step-target-ms must be at most 60000 ms");
    }
    if options.gpu_memory_utilization.is_some_and(|share| !(share > 0.0 && share <= 1.0)) {
        return wrong("--gpu-memory-utilization must be above 0 and at most 1");
    }
    if options.gpu_memory_utilization.is_some() && options.device == DeviceChoice::Cpu {
        return wrong("--gpu-memory-utilization needs a device with its own memory: --device cuda:N");
    }
    if options.kv_lease_duration < Duration::from_millis(100) {
        return wrong("kv_lease_duration must be at least 100 ms");
    }
    check_transports(options)?;
    check_secrets(options)
}

/// The options of handoffs. Without handoffs none of them has an effect.
fn check_transports(options: &EngineOptions) -> Result<(), StartError> {
    let wrong = |what: &str| Err(StartError::Options(what.to_owned()));
    if !options.role.has_handoffs() {
        let given = [
            ("--kv-transport", options.kv_transport != KvTransport::Auto),
            ("--side-channel-host", options.side_channel_host.is_some()),
        ];
        return match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) => wrong(&format!(
                "{option} has no effect with --role standalone, which opens no side channel: leave it out, or choose \
                 another --role"
            )),
            None => Ok(()),
        };
    }
    if options.side_channel.ip().is_unspecified() && options.side_channel_host.is_none() {
        return wrong(
            "a side channel on an unspecified address (0.0.0.0 or ::) needs --side-channel-host: decode engines \
             connect to that host, and cannot reach an unspecified one",
        );
    }
    Ok(())
}

fn check_secrets(options: &EngineOptions) -> Result<Option<Secret>, StartError> {
    let wrong = |what: &str| Err(StartError::Options(what.to_owned()));
    let serves_blocks_beyond = options.role.has_handoffs() && !is_loopback(&options.side_channel);
    let beyond_loopback = !is_loopback(&options.listen) || serves_blocks_beyond;
    if beyond_loopback && options.cluster_secret.is_none() {
        return wrong(
            "listening beyond loopback needs --cluster-secret-file: without a secret any host could abort requests, \
             and release or read KV blocks",
        );
    }
    if options.previous_cluster_secret.is_some() && options.cluster_secret.is_none() {
        return wrong("--previous-cluster-secret-file needs --cluster-secret-file");
    }
    let secret = options.cluster_secret.as_ref().map(|text| {
        let secret = Secret::new(text.as_bytes())?;
        match &options.previous_cluster_secret {
            Some(previous) => secret.with_previous(previous.as_bytes()),
            None => Ok(secret),
        }
    });
    secret.transpose().map_err(|error: SecretTooShort| StartError::Options(error.to_string()))
}

fn load(
    options: &EngineOptions,
    config: &ModelConfig,
    adapters: &Arc<[LoraAdapter]>,
    progress: &mut dyn FnMut(WeightLoadProgress),
) -> Result<CpuExecutor, StartError> {
    let layout = config.kv_layout(options.block_tokens, options.kv_dtype);
    Geometry::new(layout, options.kv_ranks)
        .map_err(|error| StartError::Options(format!("--kv-ranks {}: {error}", options.kv_ranks)))?;
    let mut cpu = cpu_options(options, layout.block_bytes())?;
    cpu.adapters = Arc::clone(adapters);
    Ok(CpuExecutor::load(&options.model, config, &cpu, progress)?)
}

/// The options of one rank: a pool of its own, and its share of the threads.
fn cpu_options(options: &EngineOptions, block_bytes: usize) -> Result<CpuOptions, StartError> {
    let blocks = pool_blocks(options, block_bytes)?;
    let mut cpu = CpuOptions {
        blocks,
        block_tokens: options.block_tokens,
        kv_ranks: options.kv_ranks,
        kv_dtype: options.kv_dtype,
        weights: options.weights,
        pool: pool(options),
        ..CpuOptions::default()
    };
    cpu.threads = (options.threads.unwrap_or(cpu.threads) / options.data_parallel_size).max(1);
    Ok(cpu)
}
