//! One core: assembly, operations of the Python half, threads.

use std::io::IsTerminal;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::Duration;

use baton_connector::lease::LeaseTerms;
use baton_connector::{BlockId, Epoch};
use baton_connector_channel::Server;
use baton_connector_leases::event_log::{EventLog, RankLog};
use baton_connector_leases::service::{LeaseOwner, LeaseService};
use serde_json::{Value, json};
use socket2::Socket;
use tokio::sync::{Notify, Semaphore};
use tracing_subscriber::EnvFilter;

use crate::channel::{self, NixlName};
use crate::config::Config;
use crate::consumer::{self, ConsumerSide, Hold, Invalid, LoadVerdict};
use crate::http::{self, HttpContext};
use crate::ids::{HandleFacts, random};
use crate::metrics::CoreMetrics;
use crate::ops::{AdmitOp, Op, PoolCounts};
use crate::pool::PoolView;
use crate::producer::{LentBlocks, ProducerSide};
use crate::signals::{self, Signals};

/// How long a stop waits for the core's own threads.
const JOIN_WAIT: Duration = Duration::from_millis(300);

/// See the module's documentation.
pub(crate) struct Core {
    config: Arc<Config>,
    epoch: Epoch,
    http: SocketAddr,
    channel_port: u16,
    signals: Arc<Signals>,
    metrics: Arc<CoreMetrics>,
    leases: Arc<LeaseService>,
    producer: Arc<ProducerSide>,
    consumer: Arc<ConsumerSide>,
    pool: Arc<PoolView>,
    channel: Mutex<Channel>,
    threads: Threads,
}

/// The side channel.
enum Channel {
    /// The layout is not known: nothing is served.
    Bound(Socket),
    Serving {
        layout: u64,
        server: Server,
    },
    Stopped,
}

/// The threads of a core, and what ends them.
struct Threads {
    stop: Arc<AtomicBool>,
    stop_http: Arc<Notify>,
    /// Every thread has a clone of the sender, so the receiver disconnects when all have ended.
    running: Mutex<Option<SyncSender<()>>>,
    ended: Mutex<Receiver<()>>,
}

impl Core {
    /// Starts a core.
    ///
    /// # Errors
    /// What is wrong with the configuration, or what the system refuses.
    pub(crate) fn start(config: &str) -> Result<Arc<Self>, String> {
        start_log();
        let config = Arc::new(Config::parse(config)?);
        let listener =
            TcpListener::bind(config.http).map_err(|error| address_error("http", config.http, &error))?;
        let http = listener.local_addr().map_err(|error| address_error("http", config.http, &error))?;
        let socket = channel::bind(config.channel)
            .map_err(|error| address_error("channel", config.channel, &error))?;
        let bound = socket.local_addr().ok().and_then(|address| address.as_socket());
        let epoch = Epoch(u64::from_ne_bytes(random()?));
        let (signals, log) = (Arc::new(Signals::default()), Arc::new(EventLog::default()));
        let metrics = Arc::new(CoreMetrics::new(&config.identity, config.policy));
        let lent = Arc::new(LentBlocks::new(Arc::clone(&signals), Arc::clone(&metrics)));
        let rank_log = RankLog::new(&log, config.identity.rank);
        let terms = LeaseTerms { duration: config.lease, ..LeaseTerms::default() };
        let owner: Arc<dyn LeaseOwner> = lent.clone();
        // The side channel compares the layout that vLLM's workers report later.
        let leases = Arc::new(LeaseService::new(terms, epoch, 0, owner, rank_log.clone()));
        let producer = Arc::new(ProducerSide::new(
            Arc::clone(&leases),
            lent,
            rank_log,
            Arc::clone(&signals),
            Arc::clone(&metrics),
        ));
        let consumer = ConsumerSide::new(&config, Arc::clone(&signals), Arc::clone(&metrics));
        let core = Arc::new(Self {
            epoch,
            http,
            channel_port: bound.map_or(config.channel.port(), |address| address.port()),
            pool: Arc::new(PoolView::new(config.identity.blocks)),
            channel: Mutex::new(Channel::Bound(socket)),
            threads: Threads::default(),
            config,
            signals,
            metrics,
            leases,
            producer,
            consumer,
        });
        core.start_threads(listener, log)?;
        tracing::info!(
            event = "vllm_core_started", http = %core.http, channel = core.channel_port, epoch = %core.epoch,
            engine = %core.config.identity.engine, "core of a vLLM engine started"
        );
        Ok(core)
    }

    fn start_threads(&self, listener: TcpListener, log: Arc<EventLog>) -> Result<(), String> {
        let context = Arc::new(HttpContext {
            config: Arc::clone(&self.config),
            epoch: self.epoch,
            producer: Arc::clone(&self.producer),
            consumer: Arc::clone(&self.consumer),
            pool: Arc::clone(&self.pool),
            log,
            metrics: Arc::clone(&self.metrics),
            signals: Arc::clone(&self.signals),
            waits: Semaphore::new(http::WAITS_MAX),
        });
        let stop_http = Arc::clone(&self.threads.stop_http);
        self.threads.spawn("baton-http", move || {
            if let Err(error) = http::serve(&context, listener, &stop_http) {
                tracing::error!(event = "vllm_http_failed", %error, "HTTP port of a core failed");
            }
        })?;
        let (leases, stop) = (Arc::clone(&self.leases), Arc::clone(&self.threads.stop));
        self.threads.spawn("lease-timer", move || leases.run_timer(|| stop.load(Ordering::Acquire)))
    }

    /// What the Python half learns at the start.
    pub(crate) fn facts(&self) -> Value {
        json!({
            "epoch": self.epoch.to_string(), "http": self.http.to_string(), "channel_port": self.channel_port,
        })
    }

    /// The bits that the Python half polls.
    pub(crate) fn signals(&self) -> &Signals {
        &self.signals
    }

    /// Runs one operation.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn call(&self, op: &str) -> Result<Value, String> {
        let op: Op = serde_json::from_str(op).map_err(|error| format!("operation: {error}"))?;
        match op {
            Op::Layout { layout } => self.serve_channel(&layout).map(|()| json!({})),
            Op::Queued(op) => Ok(json!({"released": self.producer.queued(&op)})),
            Op::Events { events } => Ok(empty(|| self.producer.events(&events))),
            Op::Offer { id, blocks, consumers, prompt } => Ok(self.offer(&id, &blocks, consumers, &prompt)),
            Op::Take => Ok(self.take()),
            Op::Acked { id } => Ok(json!({"draining": self.producer.acked(&id)})),
            Op::Beat { ids } => Ok(empty(|| self.producer.beat(&ids))),
            Op::Freed { id, blocks } => Ok(empty(|| self.producer.freed(&id, blocks))),
            Op::Pool(counts) => Ok(empty(|| self.report(counts))),
            Op::Draining => Ok(empty(|| self.signals.begin_drain())),
            Op::Aborted { id } => Ok(json!({"by_verb": self.producer.is_aborted_by_verb(&id)})),
            Op::Unverified { used } => Ok(empty(|| self.metrics.unverified(used))),
            Op::Late {} => Ok(empty(|| self.metrics.late())),
            Op::Admit(op) => Ok(self.admit(&op)),
            Op::GiveBack { params } => {
                self.consumer.give_back(&params).map(|_| json!({})).map_err(|invalid| invalid.why)
            }
            Op::State { id, wait_us } => {
                Ok(hold_json(self.consumer.hold_within(&id, Duration::from_micros(wait_us))))
            }
            Op::Begin { id } => Ok(empty(|| self.consumer.begin(&id))),
            Op::Done { ids, wait_us } => {
                let ids: Vec<Arc<str>> = ids.into_iter().map(Arc::from).collect();
                let verdicts = self.consumer.done(&ids, Duration::from_micros(wait_us));
                let verdicts = ids.iter().zip(verdicts).map(|(id, verdict)| verdict_json(id, verdict));
                Ok(json!({"verdicts": verdicts.collect::<Vec<_>>()}))
            }
            Op::Leave { id, reason } => Ok(empty(|| self.consumer.leave(&id, &reason))),
            Op::Stats => Ok(self.stats()),
        }
    }

    /// Begins to serve the side channel, once.
    fn serve_channel(&self, text: &str) -> Result<(), String> {
        let wrong = || format!("`layout` must be 16 hexadecimal digits, found `{text}`");
        let layout = consumer::layout(text).ok_or_else(wrong)?;
        let mut channel = self.channel();
        if let Channel::Serving { layout: known, .. } = &*channel {
            let other = || format!("`layout` is {known:016x} already, found {layout:016x}");
            return if *known == layout { Ok(()) } else { Err(other()) };
        }
        let Channel::Bound(socket) = std::mem::replace(&mut *channel, Channel::Stopped) else {
            return Err("the core is stopping".into());
        };
        let secret = self.config.secret.as_ref();
        let identity = &self.config.identity;
        let nixl =
            NixlName { engine_id: &identity.engine_id, port: self.config.nixl.0, ranks: self.config.nixl.1 };
        let fingerprint = channel::fingerprint(layout, &nixl);
        let server = channel::serve(socket, Arc::clone(&self.leases), fingerprint, secret)
            .map_err(|error| address_error("channel", self.config.channel, &error))?;
        self.consumer.set_layout(layout);
        *channel = Channel::Serving { layout, server };
        Ok(())
    }

    fn offer(&self, id: &str, groups: &[Vec<u32>], consumers: u64, prompt: &str) -> Value {
        let blocks = groups.iter().flatten().map(|block| BlockId(*block)).collect();
        let groups: Vec<_> = groups.iter().map(Vec::len).collect();
        let block_tokens = self.config.identity.block_tokens;
        let facts = HandleFacts { id, prompt, block_tokens, groups: &groups };
        match self.producer.offer(&facts, blocks, consumers) {
            Ok(lease) => json!({
                "handle": lease.handle.to_string(), "epoch": self.epoch.to_string(), "left_ms": lease.left_ms,
            }),
            Err(refused) => json!({"refused": refused}),
        }
    }

    fn take(&self) -> Value {
        // Cleared first: what arrives meanwhile raises its bit again.
        self.signals.clear(signals::ENDED | signals::ABORTS | signals::VERDICTS);
        let (news, verdicts) = (self.producer.take(), self.consumer.take());
        let ended = news.ended.iter();
        let ended =
            ended.map(|lease| json!({"id": &*lease.id, "cause": lease.cause, "reason": &*lease.reason}));
        let verdicts = verdicts.iter().map(|(id, verdict)| verdict_json(id, Some(*verdict)));
        json!({
            "ended": ended.collect::<Vec<_>>(),
            "aborts": news.aborts.iter().map(|id| &**id).collect::<Vec<_>>(),
            "verdicts": verdicts.collect::<Vec<_>>(),
        })
    }

    fn report(&self, counts: PoolCounts) {
        self.signals.clear(signals::POOL);
        let leased = self.producer.leased_blocks();
        let PoolCounts { free, cached, active, landing, .. } = counts;
        // A Python half without a pool reports nothing in use and nothing free.
        if free + cached + active + landing + leased > 0 {
            self.pool.report(counts, leased);
        }
    }

    fn admit(&self, op: &AdmitOp) -> Value {
        match self.consumer.admit(op) {
            Ok(params) => json!({"params": params, "load": true}),
            Err(Invalid { why, stock }) => json!({"invalid": why, "stock": stock}),
        }
    }

    fn stats(&self) -> Value {
        let (loads, notices, dropped) = self.consumer.counts();
        let counts = self.producer.counts();
        let channel = match &*self.channel() {
            Channel::Serving { server, .. } => {
                let stats = server.stats();
                json!({
                    "connections": stats.connections, "rejected": stats.rejected, "reads": stats.reads,
                    "reads_gone": stats.reads_gone, "handshakes_failed": stats.handshakes_failed,
                })
            }
            Channel::Bound(_) | Channel::Stopped => Value::Null,
        };
        json!({
            "requests": self.producer.tracked(), "leases": self.producer.live(),
            "leased_blocks": self.producer.leased_blocks(), "loads": loads, "notices": notices,
            "notices_dropped": dropped, "late_events": self.metrics.late_events(),
            "ledger_late": counts.late, "ledger_unknown": counts.unknown, "channel": channel,
        })
    }

    /// Releases every lease, leaves every load and ends the threads. Takes about a second at most.
    pub(crate) fn stop(&self) {
        self.signals.begin_drain();
        self.signals.raise(signals::STOPPING);
        self.producer.stop();
        self.consumer.stop();
        let channel = std::mem::replace(&mut *self.channel(), Channel::Stopped);
        if let Channel::Serving { server, .. } = channel {
            server.shutdown();
        }
        self.threads.stop();
        tracing::info!(event = "vllm_core_stopped", epoch = %self.epoch, "core of a vLLM engine stopped");
    }

    fn channel(&self) -> MutexGuard<'_, Channel> {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Threads {
    fn default() -> Self {
        let (running, ended) = mpsc::sync_channel(1);
        let (running, ended) = (Mutex::new(Some(running)), Mutex::new(ended));
        Self { stop: Arc::default(), stop_http: Arc::new(Notify::new()), running, ended }
    }
}

impl Threads {
    fn spawn(&self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), String> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let run = move || {
            let _running = running;
            run();
        };
        let spawned = thread::Builder::new().name(name.into()).spawn(run);
        spawned.map(drop).map_err(|error| format!("cannot start the thread {name}: {error}"))
    }

    /// Ends the threads. One that does not end in time is left behind.
    fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.stop_http.notify_one();
        drop(self.running.lock().unwrap_or_else(PoisonError::into_inner).take());
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        // No thread sends: the wait ends when the last one drops its sender.
        let _ = ended.recv_timeout(JOIN_WAIT);
    }
}

/// Writes log lines to standard error, once per process. `BATON_LOG` is a filter as `RUST_LOG`; the default is `info`.
fn start_log() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let filter = EnvFilter::try_from_env("BATON_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
        let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
        // Another library of this process may have a subscriber.
        let _ = lines.with_ansi(std::io::stderr().is_terminal()).try_init();
    });
}

/// The reply of an operation without a result.
fn empty(act: impl FnOnce()) -> Value {
    act();
    json!({})
}

fn address_error(key: &str, address: SocketAddr, error: &std::io::Error) -> String {
    format!("`{key}` {address}: {error}")
}

fn hold_json(hold: Option<Hold>) -> Value {
    let (state, reason) = match hold {
        None => ("none", None),
        Some(Hold::Asking) => ("holding", None),
        Some(Hold::Live) => ("live", None),
        Some(Hold::Gone(reason)) => ("gone", Some(reason)),
    };
    json!({"state": state, "reason": reason})
}

fn verdict_json(id: &str, verdict: Option<LoadVerdict>) -> Value {
    match verdict {
        None => json!({"id": id, "verdict": "pending", "reason": null}),
        Some(LoadVerdict { valid, reason }) => {
            json!({"id": id, "verdict": if valid { "valid" } else { "gone" }, "reason": reason})
        }
    }
}

#[cfg(test)]
mod tests;
