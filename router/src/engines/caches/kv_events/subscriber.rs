//! One task per publisher of KV events, which an engine has one of per data-parallel rank: the task connects, reads
//! messages, and reconnects after a pause.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::batch::{EventBatch, KvEvent};
use super::blocks::{EngineBlocks, SequenceCheck};
use super::msgpack::MsgpackError;
use super::sources::{self, ReportedSource, SourceError};
use super::zmtp::{PublisherConnection, ZmtpError};
use crate::config::{EngineUrl, KvEventsConfig};
use crate::engines::caches::KnownCaches;
use crate::engines::http::{Addresses, Engine, EngineRequest};
use crate::metrics::kv_events::{EngineSubscriptions, SubscriptionStats};

/// Where an engine reports the publishers of its ranks.
const SOURCES: &str = "/kv_event_sources";
/// Timeout of a connection with its handshake, and of that report.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// TCP keepalive of a silent connection: idle time, interval and number of probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEPALIVE_TRIES: u32 = 3;
/// Pause between two tries, doubled up to the maximum.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// A publisher, and the cache that it reports.
#[derive(Clone)]
pub(crate) struct EventSource {
    /// The number of the cache; see [`Engine::cache_id`].
    cache_id: u32,
    /// `HOST:PORT`; without a configured port, the path at which the engine reports its publishers.
    address: String,
    /// The engine's host, where the router connects.
    host: String,
    rank: u16,
    /// The port of this rank, if it is configured.
    port: Option<u16>,
    config: KvEventsConfig,
    engine: Weak<Engine>,
}

impl PartialEq for EventSource {
    fn eq(&self, other: &Self) -> bool {
        let key = |source: &Self| (source.cache_id, source.rank, source.port);
        key(self) == key(other) && self.host == other.host && self.config == other.config
    }
}

impl EventSource {
    /// The publisher of an engine, or of one of its ranks. `url`: the engine's.
    pub(crate) fn new(
        url: &EngineUrl,
        engine: &Arc<Engine>,
        rank: Option<u16>,
        config: &KvEventsConfig,
    ) -> Self {
        let number = rank.unwrap_or_default();
        // A port beyond the last one is a configuration error.
        let port = config.port.map(|port| port.saturating_add(number));
        let address = match (port, config.bind) {
            (Some(port), Some(own)) => SocketAddr::new(own, port).to_string(),
            (Some(port), None) => format!("{}:{port}", url.bracketed_host()),
            (None, _) => format!("{}{SOURCES}#{number}", url.authority()),
        };
        Self {
            cache_id: engine.cache_id(rank),
            address,
            host: url.host().to_owned(),
            rank: number,
            port,
            config: config.clone(),
            engine: Arc::downgrade(engine),
        }
    }
}

/// All subscriptions.
#[derive(Default)]
pub(crate) struct Subscriptions {
    /// By the numbers of the caches, so that those of an engine's ranks are adjacent.
    tasks: Mutex<BTreeMap<u32, Subscription>>,
}

struct Subscription {
    source: EventSource,
    stats: Arc<SubscriptionStats>,
    task: AbortHandle,
}

/// Marks a publisher as connected until it is dropped.
struct ConnectedGuard<'a>(&'a SubscriptionStats);

impl<'a> ConnectedGuard<'a> {
    fn new(stats: &'a SubscriptionStats) -> Self {
        stats.set_connected(true);
        Self(stats)
    }
}

impl Drop for ConnectedGuard<'_> {
    fn drop(&mut self) {
        self.0.set_connected(false);
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Subscriptions {
    /// Replaces the sources. Subscriptions with unchanged sources continue.
    pub(crate) fn set(&self, sources: Vec<EventSource>, known_caches: &Arc<KnownCaches>, runtime: &Handle) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        let sources: HashMap<u32, EventSource> = sources.into_iter().map(|s| (s.cache_id, s)).collect();
        tasks.retain(|cache_id, subscription| {
            let stays = sources.get(cache_id) == Some(&subscription.source);
            if !stays {
                // Reports of this cache are no longer updated. A batch that is being applied changes nothing from
                // now on.
                subscription.stats.end();
                known_caches.forget_reported(*cache_id);
            }
            stays
        });
        for (cache_id, source) in sources {
            tasks.entry(cache_id).or_insert_with(|| {
                let stats = Arc::<SubscriptionStats>::default();
                let listening = listen(source.clone(), Arc::clone(known_caches), Arc::clone(&stats));
                Subscription { source, stats, task: runtime.spawn(listening).abort_handle() }
            });
        }
    }

    /// Where an engine publishes, with the statistics; `None` without a subscription.
    pub(crate) fn of(&self, engine: &Engine) -> Option<EngineSubscriptions> {
        let tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        let of_ranks = tasks
            .range(engine.all_cache_ids())
            .map(|(_, subscription)| (subscription.source.address.clone(), Arc::clone(&subscription.stats)));
        EngineSubscriptions::new(of_ranks.collect())
    }
}

/// Runs one subscription, without end.
async fn listen(source: EventSource, known_caches: Arc<KnownCaches>, stats: Arc<SubscriptionStats>) {
    let mut listener =
        Subscriber { source, publisher: None, known_caches, stats, blocks: EngineBlocks::default() };
    let mut pause = PAUSE;
    // A failure is logged once, until a message has arrived again.
    let mut failing = false;
    loop {
        let before = listener.stats.batches();
        let messages = if listener.source.config.bind.is_some() {
            listener.accept().await
        } else {
            listener.connect().await
        };
        let publisher = &listener.source.address;
        failing &= listener.stats.batches() == before;
        match messages {
            Ok(0) => {}
            Ok(_) => pause = PAUSE,
            Err(error) if failing => tracing::debug!(
                event = "kv_event_subscription_failed", publisher, %error,
                "KV event subscription failed"
            ),
            Err(error) => {
                failing = true;
                tracing::warn!(
                    event = "kv_event_subscription_failed", publisher, %error,
                    "KV event subscription failed"
                );
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// One running subscription.
struct Subscriber {
    source: EventSource,
    /// The last publisher, by port, with its resolved address.
    publisher: Option<(u16, Addresses)>,
    known_caches: Arc<KnownCaches>,
    stats: Arc<SubscriptionStats>,
    blocks: EngineBlocks,
}

impl Subscriber {
    /// Connects to a publisher and follows it. Returns the number of messages.
    async fn connect(&mut self) -> Result<u64, ZmtpError> {
        let configured = |port| ReportedSource { port, topic: self.source.config.topic.clone() };
        let ReportedSource { port, topic } = match self.source.port {
            Some(port) => configured(port),
            None => self.reported_source().await?,
        };
        if self.publisher.as_ref().is_none_or(|(known, _)| *known != port) {
            self.publisher = Some((port, Addresses::new(&self.source.host, port)));
        }
        let dial = async {
            let (_, addresses) = self.publisher.as_ref().expect("set above");
            // While the resolver fails, the last good address stays in use.
            let addresses = addresses.get().await;
            let addresses =
                addresses.map_err(|error| std::io::Error::new(error.kind(), error.to_string()))?;
            TcpStream::connect(&*addresses).await
        };
        let Ok(stream) = tokio::time::timeout(CONNECT_TIMEOUT, dial).await else {
            return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
        };
        let mut publisher = shake_hands(stream?, &topic).await?;
        self.follow(&mut publisher).await
    }

    /// The publisher that the engine reports, with the configured topic if there is one.
    async fn reported_source(&self) -> Result<ReportedSource, SourceError> {
        let engine = self.source.engine.upgrade().ok_or(SourceError::Unreported)?;
        let request = EngineRequest::get(SOURCES);
        let reply = async { engine.call(&request, |_| {}).await?.read_whole(sources::REPLY_BYTES_MAX).await };
        let reply = tokio::time::timeout(CONNECT_TIMEOUT, reply).await.ok().and_then(Result::ok);
        let reply = reply.filter(|reply| reply.status.is_success()).ok_or(SourceError::Unreported)?;
        let reported = sources::read(&reply.body, self.source.rank, &self.source.host)?;
        let own = &self.source.config.topic;
        Ok(if own.is_empty() { reported } else { ReportedSource { topic: own.clone(), ..reported } })
    }

    /// Follows the publisher with the newest handshake: a restarted engine replaces its old connection before that
    /// has ended. Connections without a handshake change nothing. vLLM connects to the router where its endpoint
    /// names a host.
    async fn accept(&mut self) -> Result<u64, ZmtpError> {
        let listener = TcpListener::bind(&self.source.address).await?;
        let source = self.source.clone();
        let mut publisher = next_publisher(&listener, &source).await;
        loop {
            publisher = tokio::select! {
                newer = next_publisher(&listener, &source) => newer,
                ended = self.follow(&mut publisher) => return ended,
            };
        }
    }

    /// Reads messages until the connection ends. Returns their number.
    async fn follow(&mut self, publisher: &mut PublisherConnection<TcpStream>) -> Result<u64, ZmtpError> {
        let stats = Arc::clone(&self.stats);
        let _connected = ConnectedGuard::new(&stats);
        let mut messages = 0;
        loop {
            match publisher.message().await {
                Ok(frames) => {
                    // Not earlier: engines publish before they serve.
                    if messages == 0 {
                        self.learn_adapters();
                    }
                    self.take(&frames);
                }
                // A connection that broke after some messages needs no longer pause.
                Err(ZmtpError::Io(_)) if messages > 0 => return Ok(messages),
                Err(error) => return Err(error),
            }
            messages += 1;
        }
    }

    /// Learns which models are adapters, beside the messages.
    fn learn_adapters(&self) {
        if let Some(engine) = self.source.engine.upgrade() {
            tokio::spawn(async move { engine.learn_adapters().await });
        }
    }

    /// Applies one message: topic, sequence number, events.
    fn take(&mut self, frames: &[Vec<u8>]) {
        let [_, sequence, payload] = frames else { return };
        let Ok(sequence) = sequence.as_slice().try_into().map(u64::from_be_bytes) else { return };
        let check = self.blocks.check_sequence(sequence);
        if check == SequenceCheck::Duplicate {
            return;
        }
        self.stats.count_batch();
        if check == SequenceCheck::Gap {
            self.forget();
        }
        let most = self.known_caches.blocks_max();
        match EventBatch::of(payload) {
            Ok(events) => events.for_each(|event| self.apply(event, most)),
            Err(MsgpackError) => self.apply(Err(MsgpackError), most),
        }
        self.stats.set_blocks(self.blocks.count());
    }

    /// Applies one event; `Err`: the rest of the message is unreadable.
    fn apply(&mut self, event: Result<KvEvent, MsgpackError>, most: usize) {
        let Ok(event) = event else { return self.forget() };
        let engine = self.source.cache_id;
        let changes = self.blocks.take(&event, most);
        if changes.forget {
            self.known_caches.forget_blocks(engine);
        }
        self.known_caches.apply_reported(engine, &changes.list, &self.stats);
        if let Some(size) = changes.block_size
            && !self.stats.has_ended()
        {
            self.known_caches.set_block_size(engine, size);
        }
        if let Some(adapter) = changes.adapter {
            self.known_caches.add_adapter(&adapter);
        }
        if let Some(reason) = changes.left_out
            && self.stats.count_ignored(reason)
        {
            let (publisher, hides) = (&self.source.address, reason.hides_cached_blocks());
            let reason = reason.label();
            if hides {
                tracing::warn!(
                    event = "prefix_index_incomplete",
                    publisher,
                    reason,
                    "KV events ignored, the prefix index is incomplete"
                );
            } else {
                tracing::info!(event = "kv_events_ignored", publisher, reason, "KV events ignored");
            }
        }
    }

    /// Messages are missing or unreadable: nothing reported before is valid.
    fn forget(&mut self) {
        self.stats.count_gap();
        self.blocks.forget();
        self.known_caches.forget_blocks(self.source.cache_id);
    }
}

async fn next_publisher(listener: &TcpListener, source: &EventSource) -> PublisherConnection<TcpStream> {
    loop {
        let shaken = match listener.accept().await {
            Ok((stream, _)) => shake_hands(stream, &source.config.topic).await,
            Err(error) => {
                // Usually the process is out of file descriptors.
                tokio::time::sleep(PAUSE).await;
                Err(error.into())
            }
        };
        match shaken {
            Ok(publisher) => return publisher,
            Err(error) => tracing::debug!(
                event = "kv_event_publisher_rejected", publisher = source.address, %error,
                "not a publisher of KV events"
            ),
        }
    }
}

async fn shake_hands(stream: TcpStream, topic: &str) -> Result<PublisherConnection<TcpStream>, ZmtpError> {
    // A publisher may be silent for hours, so silence alone shows nothing. A host that is gone does not answer
    // keepalives.
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_EVERY);
    stream.set_nodelay(true)?;
    SockRef::from(&stream).set_tcp_keepalive(&keepalive.with_retries(KEEPALIVE_TRIES))?;
    let handshake = PublisherConnection::subscribe(stream, topic.as_bytes());
    match tokio::time::timeout(CONNECT_TIMEOUT, handshake).await {
        Ok(publisher) => publisher,
        Err(_elapsed) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
    }
}
