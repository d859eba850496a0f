//! One data-parallel rank (vLLM's "engine core") with its own scheduler, step loop, KV pool, leases, side channel and
//! consumer. An engine has one or more; they share the weights, the HTTP server and the epoch.
//!
//! ```text
//!  HTTP ── chooses by X-data-parallel-rank, or the least loaded ──▶ DpRank 0..n
//!  each rank: mailbox ─▶ step loop ─ executor over its own region; leases ◀─ its own side channel
//! ```

use std::net::{SocketAddr, TcpListener};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use baton_connector::lease::LeaseTerms;
use baton_connector::transport::Producer;
use baton_connector::{EngineId, Epoch, Rank};
use baton_connector_leases::event_log::{EventLog, RankLog};
use baton_connector_leases::rank::LeasedRank;
use baton_connector_leases::service::LeaseService;
use baton_connector_tcp::{ClientOptions, Secret, ServerOptions, TcpTransport};
use tokio_util::sync::CancellationToken;

use crate::compute::Executor;
use crate::compute::cuda::shared_kv_pool::SharedKvPool;
use crate::compute::degraded::DegradedExecutor;
use crate::engine_core::ProducerAddress;
use crate::engine_core::mailbox::Mailbox;
use crate::engine_core::status::SharedStatus;
use crate::handoff::consumer::{HandoffConsumer, LocalCache};
use crate::handoff::kv_rank::KvRank;
use crate::handoff::producer::EngineLeaseOwner;
use crate::handoff::transport::{self, NixlState, SideChannel};
use crate::kv_events::{EventPublisher, EventSender, EventSockets, RankBlocks};
use crate::metrics::EngineMetrics;
use crate::offload::host_arena::TieredPool;
use crate::offload::open::OpenTiers;
use crate::offload::workers::OffloadWorkers;
use crate::run::options::{EngineOptions, StartError, system};
use crate::run::step_loop::{LiveEnv, StepLoop};
use crate::scheduler::{Scheduler, SchedulerConfig, SchedulingPolicy};

/// The handles of one core for the HTTP server.
pub struct DpRank {
    /// Its data-parallel rank.
    pub rank: usize,
    /// The mailbox of its step loop.
    pub mailbox: Arc<Mailbox>,
    /// Its leases.
    pub leases: Arc<LeaseService>,
    /// The consumer of other engines' handoffs.
    pub consumer: Arc<HandoffConsumer>,
    /// Counters, labelled with the rank.
    pub metrics: Arc<EngineMetrics>,
    /// A copy of its state.
    pub status: Arc<SharedStatus>,
    /// Its event log.
    pub log: RankLog,
    /// The order in which it serves waiting sequences.
    pub policy: SchedulingPolicy,
    /// Whether its sequences may draft.
    pub drafts: bool,
    /// Where it publishes KV events, as vLLM reports it.
    pub kv_event_source: Option<serde_json::Value>,
    /// Its requests that have not ended.
    requests: AtomicUsize,
}

/// Counts a request as load of a core until it is dropped.
pub struct RequestGuard(Arc<DpRank>);

impl DpRank {
    /// Counts one request as load.
    #[must_use]
    pub fn begin_request(self: &Arc<Self>) -> RequestGuard {
        self.requests.fetch_add(1, Ordering::Relaxed);
        RequestGuard(Arc::clone(self))
    }

    /// Its requests that have not ended.
    #[must_use]
    pub fn load(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }
}

impl std::ops::Deref for RequestGuard {
    type Target = Arc<DpRank>;

    fn deref(&self) -> &Arc<DpRank> {
        &self.0
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What the cores of one engine share.
pub(crate) struct RankContext<'a> {
    pub options: &'a EngineOptions,
    pub secret: Option<Secret>,
    /// The same for all ranks, so that a message at the side channel of another rank passes its handshake.
    pub epoch: Epoch,
    pub fingerprint: u64,
    /// The identity of the weights.
    pub model: &'a str,
    pub nixl: &'a NixlState,
    pub max_model_len: usize,
    /// Keys that a position sees, if every layer has a window.
    pub window: Option<usize>,
    /// Cancelled when a step loop has panicked.
    pub broken: CancellationToken,
    pub log: Arc<EventLog>,
}

/// A core with its threads.
pub(crate) struct RunningRank {
    pub core: Arc<DpRank>,
    /// By KV rank.
    pub side_channels: Vec<SocketAddr>,
    /// Its KV pool.
    pub cache: LocalCache,
    /// Tokens of one sequence.
    pub capacity: usize,
    servers: Vec<SideChannel>,
    offload: Option<Arc<OffloadWorkers>>,
    events: Option<EventPublisher>,
    threads: RankThreads,
}

/// The threads of one rank.
struct RankThreads {
    step_loop: JoinHandle<()>,
    /// Only with handoffs: without them there are no leases.
    lease_timer: Option<JoinHandle<()>>,
    timer_stop: Arc<AtomicBool>,
}

impl RankContext<'_> {
    /// The suffix of one rank's names; empty for a single rank.
    fn suffix(&self, rank: usize) -> String {
        if self.options.data_parallel_size > 1 { format!("-dp{rank}") } else { String::new() }
    }

    fn open_leases(
        &self,
        mailbox: &Arc<Mailbox>,
        metrics: &Arc<EngineMetrics>,
        log: &RankLog,
    ) -> Arc<LeaseService> {
        let terms = LeaseTerms { duration: self.options.kv_lease_duration, ..LeaseTerms::default() };
        let owner = Arc::new(EngineLeaseOwner::new(Arc::clone(mailbox), Arc::clone(metrics)));
        Arc::new(LeaseService::new(terms, self.epoch, self.fingerprint, owner, log.clone()))
    }

    /// Starts a side channel for each KV rank.
    fn open_side_channels(
        &self,
        sides: Vec<TcpListener>,
        cache: &LocalCache,
        leases: &Arc<LeaseService>,
    ) -> Result<Vec<SideChannel>, StartError> {
        let pool = cache.shared_pool.as_ref();
        let mut servers = Vec::with_capacity(sides.len());
        for ((side, rank), region) in sides.into_iter().zip(cache.geometry.each_rank()).zip(&cache.regions) {
            let memory = KvRank::new(cache.geometry, rank, region.clone(), pool.cloned());
            let producer: Arc<dyn Producer> = Arc::new(LeasedRank::new(Arc::clone(leases), memory));
            let limits = ServerOptions { secret: self.secret.clone(), ..ServerOptions::default() };
            let transport = self.options.kv_transport;
            let server = SideChannel::start(transport, self.nixl, side, &producer, pool, &limits);
            servers.push(server.map_err(system("side channel"))?);
        }
        Ok(servers)
    }

    fn start_consumer(
        &self,
        cache: &LocalCache,
        mailbox: &Arc<Mailbox>,
        metrics: &Arc<EngineMetrics>,
    ) -> Result<Arc<HandoffConsumer>, StartError> {
        let options = self.options;
        let (state, library) = self.nixl.label();
        metrics.nixl(state, library);
        if !options.role.has_handoffs() {
            let client = ClientOptions { secret: self.secret.clone(), ..ClientOptions::default() };
            let transport = Arc::new(TcpTransport::new(client));
            let (mailbox, metrics) = (Arc::clone(mailbox), Arc::clone(metrics));
            return Ok(Arc::new(HandoffConsumer::for_refusals(transport, mailbox, metrics)));
        }
        // One connection per read, and some more for heartbeats and releases.
        let connections_per_peer_max = 2 * options.fetch_workers.max(4);
        let client = ClientOptions {
            secret: self.secret.clone(),
            connections_per_peer_max,
            ..ClientOptions::default()
        };
        let pool = cache.shared_pool.clone();
        let transport = transport::open_consumer_transport(options.kv_transport, self.nixl, pool, &client);
        let consumer = HandoffConsumer::start(
            transport,
            cache.clone(),
            Arc::clone(mailbox),
            Arc::clone(metrics),
            options.fetch_workers.max(1),
        );
        consumer.map(Arc::new).map_err(system("start threads"))
    }

    /// The scheduler, and the workers of the tiers below its pool.
    fn open_scheduler(
        &self,
        rank: usize,
        blocks: usize,
        cache: &LocalCache,
        mailbox: &Arc<Mailbox>,
    ) -> Result<(Scheduler, Option<Arc<OffloadWorkers>>), StartError> {
        let options = self.options;
        let scheduler = Scheduler::new(
            SchedulerConfig {
                block_tokens: options.block_tokens,
                max_num_seqs: options.max_num_seqs,
                max_num_batched_tokens: options.max_num_batched_tokens,
                max_waiting: options.max_waiting,
                max_model_len: self.max_model_len,
                window: self.window,
            },
            blocks,
        )
        .with_step_target(options.step_target)
        .with_policy(options.scheduling.policy);
        let scheduler =
            if options.scheduling.growth_reserve { scheduler.with_growth_reserve() } else { scheduler };
        let scheduler = match options.speculation {
            Some(lookup) => scheduler.with_prompt_lookup(lookup),
            None => scheduler,
        };
        let scheduler = if options.kv_events.is_some() { scheduler.with_cache_events() } else { scheduler };
        let tiers = OpenTiers::open(
            &options.offload,
            rank,
            options.data_parallel_size,
            TieredPool::new(cache.regions.clone(), cache.shared_pool.clone()),
            cache.geometry.rank_fingerprint(self.fingerprint, Rank(0)),
            self.model,
        );
        let Some(mut tiers) = tiers.map_err(StartError::Options)? else { return Ok((scheduler, None)) };
        let scheduler = scheduler.with_tiers(tiers.config, std::mem::take(&mut tiers.on_disk));
        let reports = Arc::clone(mailbox);
        let offload = tiers.start(move |report| reports.offload(report));
        Ok((scheduler, Some(Arc::new(offload.map_err(system("start threads"))?))))
    }

    /// Starts the publisher of KV events, if they are published.
    fn start_events(
        &self,
        rank: usize,
        sockets: Option<EventSockets>,
        metrics: &EngineMetrics,
    ) -> Result<(Option<EventSender>, Option<EventPublisher>), StartError> {
        let (Some(config), Some(sockets)) = (&self.options.kv_events, sockets) else {
            return Ok((None, None));
        };
        let blocks = RankBlocks { rank, block_tokens: self.options.block_tokens };
        let name = format!("kv-events{}", self.suffix(rank));
        let started = EventPublisher::start(&name, config, sockets, blocks, metrics.kv_events());
        let (sender, publisher) = started.map_err(system("publish KV events"))?;
        Ok((Some(sender), Some(publisher)))
    }

    fn producer_address(&self, rank: usize, side_channels: &[SocketAddr]) -> ProducerAddress {
        let options = self.options;
        let id = format!("{}-{}{}", options.role.label(), self.epoch, self.suffix(rank));
        ProducerAddress {
            engine_id: EngineId(id.into()),
            host: options.side_channel_host.clone().unwrap_or_else(|| {
                side_channels.first().map_or_else(String::new, |side_channel| side_channel.ip().to_string())
            }),
            ports: side_channels.iter().map(SocketAddr::port).collect(),
            block_tokens: options.block_tokens,
        }
    }

    /// Adds the test and benchmark options to the executor.
    fn wrap(&self, executor: Box<dyn Executor>) -> Box<dyn Executor> {
        match (self.options.pace, self.options.device_fails_after) {
            (None, None) => executor,
            (pace, good_steps) => Box::new(DegradedExecutor::new(executor, pace, good_steps)),
        }
    }
}

impl RunningRank {
    /// Starts all threads of one rank. Other engines read its blocks at `sides`, by KV rank, which is empty without
    /// handoffs, and routers its KV events at `events`.
    pub(crate) fn start(
        common: &RankContext<'_>,
        rank: usize,
        executor: Box<dyn Executor>,
        sides: Vec<TcpListener>,
        events: Option<EventSockets>,
        metrics: Arc<EngineMetrics>,
    ) -> Result<Self, StartError> {
        let options = common.options;
        let side_channels: Vec<_> =
            sides.iter().map(TcpListener::local_addr).collect::<Result<_, _>>().map_err(system("listen"))?;
        let mailbox = Arc::new(Mailbox::new(options.max_waiting.max(1)));
        let status = Arc::new(SharedStatus::default());
        let (geometry, regions) = (executor.geometry(), executor.regions().to_vec());
        let cache = LocalCache { geometry, regions, shared_pool: executor.shared_pool() };
        metrics.cache_config(options.block_tokens, executor.blocks());
        metrics.step_target(options.step_target);
        let log = RankLog::new(&common.log, rank);
        let leases = common.open_leases(&mailbox, &metrics, &log);
        if let Some(pool) = &cache.shared_pool {
            let mirror_bytes =
                cache.regions.iter().map(|mirror| mirror.blocks() * mirror.block_bytes()).sum();
            metrics.mirror_bytes(mirror_bytes);
            pool.set_counters(metrics.copy_counters());
        }
        let servers = common.open_side_channels(sides, &cache, &leases)?;
        let consumer = common.start_consumer(&cache, &mailbox, &metrics)?;
        let (scheduler, offload) = common.open_scheduler(rank, executor.blocks(), &cache, &mailbox)?;
        let capacity = scheduler.capacity();
        let (sender, events) = common.start_events(rank, events, &metrics)?;
        let core = Arc::new(DpRank {
            rank,
            mailbox: Arc::clone(&mailbox),
            leases: Arc::clone(&leases),
            consumer: Arc::clone(&consumer),
            metrics: Arc::clone(&metrics),
            status: Arc::clone(&status),
            log: log.clone(),
            policy: options.scheduling.policy,
            drafts: options.speculation.is_some(),
            kv_event_source: events.as_ref().map(|publisher| publisher.source().clone()),
            requests: AtomicUsize::new(0),
        });
        let env = LiveEnv {
            leases,
            consumer,
            drafts: options.speculation.map(|lookup| metrics.drafts(lookup.drafts())),
            metrics,
            status,
            address: common.producer_address(rank, &side_channels),
            offload: offload.clone(),
            log,
        };
        let step_loop = StepLoop::new(common.wrap(executor), scheduler, mailbox, env, sender);
        let threads = RankThreads::spawn(common, &common.suffix(rank), step_loop, &core)?;
        Ok(Self { core, side_channels, cache, capacity, servers, offload, events, threads })
    }

    /// Waits for the end of the step loop, whose mailbox is closed, and of the lease timer.
    pub(crate) fn stop(self) -> StoppedRank {
        // The threads have logged their errors.
        self.threads.join();
        let consumer = Arc::clone(&self.core.consumer);
        StoppedRank {
            consumer,
            servers: self.servers,
            offload: self.offload,
            events: self.events,
            shared_pool: self.cache.shared_pool,
        }
    }
}

impl RankThreads {
    fn spawn(
        common: &RankContext<'_>,
        suffix: &str,
        step_loop: StepLoop,
        core: &Arc<DpRank>,
    ) -> Result<Self, StartError> {
        let timer_stop = Arc::new(AtomicBool::new(false));
        let lease_timer = common.options.role.has_handoffs().then(|| {
            let (leases, stop) = (Arc::clone(&core.leases), Arc::clone(&timer_stop));
            spawn(&format!("lease-timer{suffix}"), move || leases.run_timer(|| stop.load(Ordering::Acquire)))
        });
        let lease_timer = lease_timer.transpose()?;
        let (core, broken) = (Arc::clone(core), common.broken.clone());
        let step_loop = spawn(&format!("step-loop{suffix}"), move || {
            // A loop that has panicked answers no request: the engine ends, and its supervisor restarts it.
            if std::panic::catch_unwind(AssertUnwindSafe(|| step_loop.run())).is_err() {
                core.status.set_failed("the step loop panicked".into());
                core.mailbox.close(Instant::now());
                drop(core.mailbox.collect());
                broken.cancel();
            }
        })?;
        Ok(Self { step_loop, lease_timer, timer_stop })
    }

    /// Waits for the step loop, and then for the lease timer.
    fn join(self) {
        drop(self.step_loop.join());
        self.timer_stop.store(true, Ordering::Release);
        self.lease_timer.into_iter().for_each(|timer| drop(timer.join()));
    }
}

/// A core that no longer computes but still answers its peers.
pub(crate) struct StoppedRank {
    consumer: Arc<HandoffConsumer>,
    servers: Vec<SideChannel>,
    offload: Option<Arc<OffloadWorkers>>,
    events: Option<EventPublisher>,
    shared_pool: Option<Arc<SharedKvPool>>,
}

impl StoppedRank {
    /// Delivers the pending notices to peers until `deadline`, and closes the side channel.
    pub(crate) fn close(self, deadline: Instant) {
        if let Some(pool) = &self.shared_pool {
            pool.close();
        }
        self.servers.into_iter().for_each(SideChannel::shutdown);
        self.consumer.shutdown(deadline);
        if let Some(workers) = self.offload {
            workers.shutdown(deadline);
        }
        if let Some(publisher) = self.events {
            publisher.join();
        }
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StartError> {
    std::thread::Builder::new().name(name.into()).spawn(run).map_err(system(format!("start thread {name}")))
}
