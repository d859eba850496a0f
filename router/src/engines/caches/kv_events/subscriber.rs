//! One task per engine that tells of its cache: connects, listens, and begins again after a pause.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::batch::{Event, Events};
use super::blocks::{Blocks, Heard};
use super::msgpack::Malformed;
use super::zmtp::{Publisher, ZmtpError};
use crate::config::{EngineUrl, KvEventsConfig};
use crate::engines::caches::Memory;
use crate::engines::http::Addresses;
use crate::metrics::kv_events::Told;

/// A connection, and the handshake after it.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// A connection on which nothing came for so long is asked whether it lives, so often and so many times.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEPALIVE_TRIES: u32 = 3;
/// Between two tries, doubled up to the longest.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Whom to listen to, and whose cache it is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Source {
    pub engine: u32,
    /// `HOST:PORT`.
    pub address: String,
    /// The engine's host, for a router that connects.
    host: String,
    pub config: KvEventsConfig,
}

impl Source {
    pub(crate) fn new(url: &EngineUrl, engine: u32, config: &KvEventsConfig) -> Self {
        let address = match config.bind {
            Some(own) => SocketAddr::new(own, config.port).to_string(),
            None if url.host().contains(':') => format!("[{}]:{}", url.host(), config.port),
            None => format!("{}:{}", url.host(), config.port),
        };
        Self { engine, address, host: url.host().to_owned(), config: config.clone() }
    }
}

/// Everybody who is listened to.
#[derive(Default)]
pub(crate) struct Subscriptions {
    tasks: Mutex<HashMap<u32, Subscription>>,
}

struct Subscription {
    source: Source,
    told: Arc<Told>,
    task: AbortHandle,
}

/// Says that a publisher is listened to, for as long as it lives.
struct Connected<'a>(&'a Told);

impl<'a> Connected<'a> {
    fn new(told: &'a Told) -> Self {
        told.set_connected(true);
        Self(told)
    }
}

impl Drop for Connected<'_> {
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
    /// Listens to these and to nobody else. Whoever was listened to already on the same terms is not disturbed.
    pub(crate) fn set(&self, sources: Vec<Source>, memory: &Arc<Memory>, runtime: &Handle) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted: HashMap<u32, Source> = sources.into_iter().map(|s| (s.engine, s)).collect();
        tasks.retain(|engine, kept| {
            let stays = wanted.get(engine) == Some(&kept.source);
            if !stays {
                // What it told is not kept up to date any more. A message of which it changes a part now changes no more.
                kept.told.end();
                memory.forget_told(*engine);
            }
            stays
        });
        for (engine, source) in wanted {
            tasks.entry(engine).or_insert_with(|| {
                let told = Arc::<Told>::default();
                let listening = listen(source.clone(), Arc::clone(memory), Arc::clone(&told));
                Subscription { source, told, task: runtime.spawn(listening).abort_handle() }
            });
        }
    }

    /// Where an engine publishes, and what became of listening to it; `None` for one that nobody listens to.
    pub(crate) fn of(&self, engine: u32) -> Option<(String, Arc<Told>)> {
        let tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.get(&engine).map(|kept| (kept.source.address.clone(), Arc::clone(&kept.told)))
    }
}

/// Listens for ever.
async fn listen(source: Source, memory: Arc<Memory>, told: Arc<Told>) {
    let addresses = Addresses::new(&source.host, source.config.port);
    let mut listener = Listener { source, addresses, memory, told, blocks: Blocks::default() };
    let mut pause = PAUSE;
    // Told once until it succeeds again.
    let mut failing = false;
    loop {
        let before = listener.told.batches();
        let heard = if listener.source.config.bind.is_some() {
            listener.accept().await
        } else {
            listener.connect().await
        };
        let publisher = &listener.source.address;
        failing &= listener.told.batches() == before;
        match heard {
            Ok(0) => {}
            Ok(_) => pause = PAUSE,
            Err(error) if failing => tracing::debug!(publisher, %error, "KV event subscription failed"),
            Err(error) => {
                failing = true;
                tracing::warn!(publisher, %error, "KV event subscription failed");
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// One subscription at work.
struct Listener {
    source: Source,
    addresses: Addresses,
    memory: Arc<Memory>,
    told: Arc<Told>,
    blocks: Blocks,
}

impl Listener {
    /// One connection to a publisher; how many messages it brought.
    async fn connect(&mut self) -> Result<u64, ZmtpError> {
        let dial = async {
            // The last good address while the resolver fails.
            let found = self.addresses.get().await;
            let found = found.map_err(|error| std::io::Error::new(error.kind(), error.to_string()))?;
            TcpStream::connect(&*found).await
        };
        let Ok(stream) = tokio::time::timeout(CONNECT_WITHIN, dial).await else {
            return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
        };
        let mut publisher = shake_hands(stream?, &self.source).await?;
        self.follow(&mut publisher).await
    }

    /// The publisher that shook hands last: an engine that began anew is heard although its old connection has not
    /// ended, and whoever else connects changes nothing. vLLM connects to the router where its endpoint names a host.
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

    /// Listens to it to its end; how many messages it brought.
    async fn follow(&mut self, publisher: &mut Publisher<TcpStream>) -> Result<u64, ZmtpError> {
        let told = Arc::clone(&self.told);
        let _connected = Connected::new(&told);
        let mut messages = 0;
        loop {
            match publisher.message().await {
                Ok(frames) => self.take(&frames),
                // Broken after it was listened to for a while: not worth a longer pause.
                Err(ZmtpError::Io(_)) if messages > 0 => return Ok(messages),
                Err(error) => return Err(error),
            }
            messages += 1;
        }
    }

    /// One message: topic, sequence number, events.
    fn take(&mut self, frames: &[Vec<u8>]) {
        let [_, sequence, payload] = frames else { return };
        let Ok(sequence) = sequence.as_slice().try_into().map(u64::from_be_bytes) else { return };
        let heard = self.blocks.heard(sequence);
        if heard == Heard::Repeated {
            return;
        }
        self.told.count_batch();
        if heard == Heard::Gap {
            self.forget();
        }
        let most = self.memory.blocks_max();
        match Events::of(payload) {
            Ok(events) => events.for_each(|event| self.apply(event, most)),
            Err(Malformed) => self.apply(Err(Malformed), most),
        }
        self.told.set_blocks(self.blocks.count());
    }

    /// One event; `Err`: the rest of the message cannot be read.
    fn apply(&mut self, event: Result<Event, Malformed>, most: usize) {
        let Ok(event) = event else { return self.forget() };
        let engine = self.source.engine;
        let changes = self.blocks.take(&event, most);
        if changes.forget {
            self.memory.forget_blocks(engine);
        }
        self.memory.told(engine, &changes.list, &self.told);
        if let Some(size) = changes.block_size
            && !self.told.is_over()
        {
            self.memory.set_block_size(engine, size);
        }
        if let Some(why) = changes.left_out
            && self.told.leave_out(why)
        {
            let (publisher, reason) = (&self.source.address, why.label());
            if why.is_a_surprise() {
                tracing::warn!(publisher, reason, "KV events ignored, the prefix index is incomplete");
            } else {
                tracing::info!(publisher, reason, "KV events ignored");
            }
        }
    }

    /// Something was missed, or cannot be read: nothing of what was said before is believed.
    fn forget(&mut self) {
        self.told.count_gap();
        self.blocks.forget();
        self.memory.forget_blocks(self.source.engine);
    }
}

async fn next_publisher(listener: &TcpListener, source: &Source) -> Publisher<TcpStream> {
    loop {
        let shaken = match listener.accept().await {
            Ok((stream, _)) => shake_hands(stream, source).await,
            Err(error) => {
                // Out of file descriptors, mostly.
                tokio::time::sleep(PAUSE).await;
                Err(error.into())
            }
        };
        match shaken {
            Ok(publisher) => return publisher,
            Err(error) => tracing::debug!(publisher = source.address, %error, "not a publisher of KV events"),
        }
    }
}

async fn shake_hands(stream: TcpStream, source: &Source) -> Result<Publisher<TcpStream>, ZmtpError> {
    // A publisher may be silent for hours, so silence alone says nothing; a host that is gone does not answer this.
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_EVERY);
    stream.set_nodelay(true)?;
    SockRef::from(&stream).set_tcp_keepalive(&keepalive.with_retries(KEEPALIVE_TRIES))?;
    let hands = Publisher::subscribe(stream, source.config.topic.as_bytes());
    match tokio::time::timeout(CONNECT_WITHIN, hands).await {
        Ok(publisher) => publisher,
        Err(_elapsed) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
    }
}
