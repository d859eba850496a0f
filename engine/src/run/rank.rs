//! One data-parallel rank (vLLM's "engine core"): scheduler, step loop, KV pool, leases, side channel and dealings with
//! peers of its own. An engine has one or more; they share the weights, the HTTP server and the epoch.
//!
//! ```text
//!  HTTP ── chooses by X-data-parallel-rank, or the least loaded ──▶ DpRank 0..n
//!  each rank: mailbox ─▶ step loop ─ executor over its own region; desk ◀─ its own side channel
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
use baton_connector_tcp::{ClientOptions, Secret, ServerOptions};
use tokio_util::sync::CancellationToken;

use crate::compute::Executor;
use crate::compute::cuda::port::Port;
use crate::compute::failing::Failing;
use crate::compute::throttled::Paced;
use crate::engine_core::ProducerAddress;
use crate::engine_core::mailbox::Mailbox;
use crate::engine_core::status::StatusBoard;
use crate::event_log::{EventLog, RankLog};
use crate::handoff::consumer::{OwnCache, Peers};
use crate::handoff::kv_rank::KvRank;
use crate::handoff::producer::LeaseDesk;
use crate::handoff::transport::{self, FoundNixl, SideChannel};
use crate::metrics::EngineMetrics;
use crate::offload::open::Tiers;
use crate::offload::workers::Workers;
use crate::run::options::{EngineOptions, StartError, system};
use crate::run::step_loop::{Parts, StepLoop};
use crate::scheduler::{Scheduler, SchedulerConfig};

/// What the HTTP side knows of one core.
pub struct DpRank {
    /// Its data-parallel rank.
    pub rank: usize,
    /// The step loop.
    pub mailbox: Arc<Mailbox>,
    /// Its leases.
    pub desk: Arc<LeaseDesk>,
    /// Dealings with other engines.
    pub peers: Arc<Peers>,
    /// Counters, labelled with the rank.
    pub metrics: Arc<EngineMetrics>,
    /// The books' copy.
    pub status: Arc<StatusBoard>,
    /// What happened to requests.
    pub log: RankLog,
    /// Requests that were given to it and have not ended.
    seated: AtomicUsize,
}

/// A request's place at a core; counts as load until it is dropped.
pub struct Seat(Arc<DpRank>);

impl DpRank {
    /// Takes a place for one request.
    #[must_use]
    pub fn seat(self: &Arc<Self>) -> Seat {
        self.seated.fetch_add(1, Ordering::Relaxed);
        Seat(Arc::clone(self))
    }

    /// Requests that were given to it and have not ended.
    #[must_use]
    pub fn load(&self) -> usize {
        self.seated.load(Ordering::Relaxed)
    }
}

impl std::ops::Deref for Seat {
    type Target = Arc<DpRank>;

    fn deref(&self) -> &Arc<DpRank> {
        &self.0
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.seated.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What the cores of one engine have in common.
pub(crate) struct Common<'a> {
    pub options: &'a EngineOptions,
    pub secret: Option<Secret>,
    /// One for all: a message that arrives at the side channel of another rank passes its handshake.
    pub epoch: Epoch,
    pub fingerprint: u64,
    /// The identity of the weights.
    pub model: &'a str,
    pub nixl: &'a FoundNixl,
    pub max_model_len: usize,
    /// Cancelled when a step loop has panicked.
    pub broken: CancellationToken,
    pub log: Arc<EventLog>,
}

/// A core with its threads.
pub(crate) struct RunningRank {
    pub core: Arc<DpRank>,
    /// By KV rank.
    pub side_channels: Vec<SocketAddr>,
    /// Where its blocks lie.
    pub cache: OwnCache,
    /// Tokens of one sequence.
    pub capacity: usize,
    servers: Vec<SideChannel>,
    offload: Option<Arc<Workers>>,
    step_loop: JoinHandle<()>,
    lease_timer: JoinHandle<()>,
    timer_stop: Arc<AtomicBool>,
}

impl RunningRank {
    /// Starts everything of one rank. `sides` are where other engines will read its blocks, by KV rank.
    pub(crate) fn start(
        common: &Common<'_>,
        rank: usize,
        mut executor: Box<dyn Executor>,
        sides: Vec<TcpListener>,
        metrics: Arc<EngineMetrics>,
    ) -> Result<Self, StartError> {
        let options = common.options;
        let side_channels: Vec<_> =
            sides.iter().map(TcpListener::local_addr).collect::<Result<_, _>>().map_err(system("listen"))?;
        let mailbox = Arc::new(Mailbox::new(options.max_waiting.max(1)));
        let status = Arc::new(StatusBoard::default());
        let port = executor.port();
        let (geometry, regions) = (executor.geometry(), executor.regions().to_vec());
        let cache = OwnCache { geometry, regions, port: port.clone() };
        metrics.cache_config(options.block_tokens, executor.blocks());
        let terms = LeaseTerms { duration: options.kv_lease_duration, ..LeaseTerms::default() };
        let log = RankLog::new(&common.log, rank);
        let desk = Arc::new(LeaseDesk::new(
            terms,
            common.epoch,
            common.fingerprint,
            Arc::clone(&mailbox),
            Arc::clone(&metrics),
            log.clone(),
        ));
        if let Some(port) = &port {
            port.count(metrics.mirrored());
        }
        let mut servers = Vec::with_capacity(sides.len());
        for ((side, rank), region) in sides.into_iter().zip(cache.geometry.each_rank()).zip(&cache.regions) {
            let producer = KvRank::new(Arc::clone(&desk), cache.geometry, rank, region.clone(), port.clone());
            let producer: Arc<dyn Producer> = Arc::new(producer);
            let limits = ServerOptions { secret: common.secret.clone(), ..ServerOptions::default() };
            let server = SideChannel::start(
                (options.kv_transport, common.nixl),
                side,
                &producer,
                port.as_ref(),
                &limits,
            );
            servers.push(server.map_err(system("side channel"))?);
        }
        // A connection per read, and some for heartbeats and releases beside them.
        let connections_per_peer_max = 2 * options.fetch_workers.max(4);
        let client = ClientOptions {
            secret: common.secret.clone(),
            connections_per_peer_max,
            ..ClientOptions::default()
        };
        let transport = transport::consumer(options.kv_transport, common.nixl, port, &client);
        metrics.nixl(common.nixl.label());
        let peers = Peers::start(
            transport,
            cache.clone(),
            Arc::clone(&mailbox),
            Arc::clone(&metrics),
            options.fetch_workers.max(1),
        );
        let peers = Arc::new(peers.map_err(system("start threads"))?);
        let scheduler = Scheduler::new(
            SchedulerConfig {
                block_tokens: options.block_tokens,
                max_num_seqs: options.max_num_seqs,
                max_num_batched_tokens: options.max_num_batched_tokens,
                max_waiting: options.max_waiting,
                max_model_len: common.max_model_len,
            },
            executor.blocks(),
        );
        let tiers = Tiers::open(
            &options.offload,
            (rank, options.data_parallel_size),
            (cache.regions.clone(), executor.port()),
            cache.geometry.rank_fingerprint(common.fingerprint, Rank(0)),
            common.model,
        );
        let mut tiers = tiers.map_err(StartError::Options)?;
        let scheduler = match &mut tiers {
            Some(tiers) => scheduler.with_tiers(tiers.config, std::mem::take(&mut tiers.found)),
            None => scheduler,
        };
        let reports = Arc::clone(&mailbox);
        let offload = tiers.map(|tiers| tiers.start(move |report| reports.offload(report))).transpose();
        let offload = offload.map_err(system("start threads"))?.map(Arc::new);
        let capacity = scheduler.capacity();
        let several = options.data_parallel_size > 1;
        let suffix = if several { format!("-dp{rank}") } else { String::new() };
        let address = ProducerAddress {
            engine_id: EngineId(format!("{}-{}{suffix}", options.role.label(), common.epoch).into()),
            host: options.side_channel_host.clone().unwrap_or_else(|| side_channels[0].ip().to_string()),
            ports: side_channels.iter().map(SocketAddr::port).collect(),
            block_tokens: options.block_tokens,
        };
        let timer_stop = Arc::new(AtomicBool::new(false));
        let lease_timer = {
            let (desk, stop) = (Arc::clone(&desk), Arc::clone(&timer_stop));
            spawn(&format!("lease-timer{suffix}"), move || desk.run_timer(|| stop.load(Ordering::Acquire)))?
        };
        let core = Arc::new(DpRank {
            rank,
            mailbox: Arc::clone(&mailbox),
            desk: Arc::clone(&desk),
            peers: Arc::clone(&peers),
            metrics: Arc::clone(&metrics),
            status: Arc::clone(&status),
            log: log.clone(),
            seated: AtomicUsize::new(0),
        });
        if let Some(pace) = options.pace {
            executor = Box::new(Paced::new(executor, pace));
        }
        if let Some(good_steps) = options.device_fails_after {
            executor = Box::new(Failing::new(executor, good_steps));
        }
        let step_loop = StepLoop::new(Parts {
            executor,
            scheduler,
            mailbox,
            desk,
            peers,
            metrics,
            status,
            address,
            offload: offload.clone(),
            log,
        });
        let step_loop = {
            let (broken, core) = (common.broken.clone(), Arc::clone(&core));
            spawn(&format!("step-loop{suffix}"), move || {
                // A loop that has panicked answers nobody: the engine ends, and its supervisor starts another.
                if std::panic::catch_unwind(AssertUnwindSafe(|| step_loop.run())).is_err() {
                    core.status.set_failed("the step loop panicked".into());
                    core.mailbox.close(Instant::now());
                    drop(core.mailbox.collect());
                    broken.cancel();
                }
            })?
        };
        Ok(Self {
            core,
            side_channels,
            cache,
            capacity,
            servers,
            offload,
            step_loop,
            lease_timer,
            timer_stop,
        })
    }

    /// Waits until the step loop has ended (its mailbox is closed), and with it the lease timer.
    pub(crate) fn wind_down(self) -> WoundDown {
        // The threads log what broke them; there is nothing more to do about it here.
        drop(self.step_loop.join());
        self.timer_stop.store(true, Ordering::Release);
        drop(self.lease_timer.join());
        let peers = Arc::clone(&self.core.peers);
        WoundDown { peers, servers: self.servers, offload: self.offload, port: self.cache.port }
    }
}

/// A core that computes nothing any more and still answers its peers.
pub(crate) struct WoundDown {
    peers: Arc<Peers>,
    servers: Vec<SideChannel>,
    offload: Option<Arc<Workers>>,
    port: Option<Arc<Port>>,
}

impl WoundDown {
    /// Delivers what peers are still owed, until `deadline`, and closes the side channel.
    pub(crate) fn close(self, deadline: Instant) {
        if let Some(port) = &self.port {
            port.close();
        }
        self.servers.into_iter().for_each(SideChannel::shutdown);
        self.peers.shutdown(deadline);
        if let Some(workers) = self.offload {
            workers.shutdown(deadline);
        }
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StartError> {
    std::thread::Builder::new().name(name.into()).spawn(run).map_err(system(format!("start thread {name}")))
}
