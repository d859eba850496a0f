//! One task per engine that tells of its cache: connects, listens, and begins again after a pause.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::batch::Batch;
use super::blocks::{Blocks, Heard};
use super::zmtp::{Publisher, ZmtpError};
use crate::config::{EngineUrl, KvEventsConfig};
use crate::memory::Memory;

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
    pub config: KvEventsConfig,
}

impl Source {
    pub(crate) fn new(url: &EngineUrl, engine: u32, config: &KvEventsConfig) -> Self {
        let address = match config.bind {
            Some(own) => SocketAddr::new(own, config.port).to_string(),
            None if url.host().contains(':') => format!("[{}]:{}", url.host(), config.port),
            None => format!("{}:{}", url.host(), config.port),
        };
        Self { engine, address, config: config.clone() }
    }
}

/// Everybody who is listened to.
#[derive(Default)]
pub(crate) struct Subscriptions {
    tasks: Mutex<HashMap<u32, Subscription>>,
}

struct Subscription {
    source: Source,
    task: AbortHandle,
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
                // What it told is not kept up to date any more.
                memory.forget_told(*engine);
            }
            stays
        });
        for (engine, source) in wanted {
            tasks.entry(engine).or_insert_with(|| {
                let task = runtime.spawn(listen(source.clone(), Arc::clone(memory))).abort_handle();
                Subscription { source, task }
            });
        }
    }
}

/// Listens for ever.
async fn listen(source: Source, memory: Arc<Memory>) {
    let mut blocks = Blocks::default();
    let mut pause = PAUSE;
    loop {
        let heard = if source.config.bind.is_some() {
            accept(&source, &memory, &mut blocks).await
        } else {
            connect(&source, &memory, &mut blocks).await
        };
        match heard {
            Ok(0) => {}
            Ok(_) => pause = PAUSE,
            Err(error) => {
                tracing::debug!(publisher = source.address, %error, "KV events cannot be had");
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// One connection to a publisher; how many messages it brought.
async fn connect(source: &Source, memory: &Memory, blocks: &mut Blocks) -> Result<u64, ZmtpError> {
    let dial = TcpStream::connect(&source.address);
    let Ok(stream) = tokio::time::timeout(CONNECT_WITHIN, dial).await else {
        return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
    };
    let mut publisher = shake_hands(stream?, source).await?;
    follow(&mut publisher, source, memory, blocks).await
}

/// The publisher that shook hands last: an engine that began anew is heard although its old connection has not ended,
/// and whoever else connects changes nothing. vLLM connects to the router where its endpoint names a host.
async fn accept(source: &Source, memory: &Memory, blocks: &mut Blocks) -> Result<u64, ZmtpError> {
    let listener = TcpListener::bind(&source.address).await?;
    let mut publisher = next_publisher(&listener, source).await;
    loop {
        publisher = tokio::select! {
            newer = next_publisher(&listener, source) => newer,
            ended = follow(&mut publisher, source, memory, blocks) => return ended,
        };
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
    SockRef::from(&stream).set_tcp_keepalive(&keepalive.with_retries(KEEPALIVE_TRIES))?;
    let hands = Publisher::subscribe(stream, source.config.topic.as_bytes());
    match tokio::time::timeout(CONNECT_WITHIN, hands).await {
        Ok(publisher) => publisher,
        Err(_elapsed) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
    }
}

/// Listens to it to its end; how many messages it brought.
async fn follow(
    publisher: &mut Publisher<TcpStream>,
    source: &Source,
    memory: &Memory,
    blocks: &mut Blocks,
) -> Result<u64, ZmtpError> {
    let mut messages = 0;
    loop {
        match publisher.message().await {
            Ok(frames) => take(&frames, source, memory, blocks),
            // Broken after it was listened to for a while: not worth a longer pause.
            Err(ZmtpError::Io(_)) if messages > 0 => return Ok(messages),
            Err(error) => return Err(error),
        }
        messages += 1;
    }
}

/// One message: topic, sequence number, events.
fn take(frames: &[Vec<u8>], source: &Source, memory: &Memory, blocks: &mut Blocks) {
    let [_, sequence, payload] = frames else { return };
    let Ok(sequence) = sequence.as_slice().try_into().map(u64::from_be_bytes) else { return };
    let engine = source.engine;
    let heard = blocks.heard(sequence);
    if heard == Heard::Repeated {
        return;
    }
    // Decoded before the index is locked: that holds up decisions.
    let batch = Batch::read(payload);
    let mut size = None;
    let mut told = memory.told();
    if heard == Heard::Gap || batch.is_err() {
        blocks.forget(engine, &mut told);
    }
    let most = told.per_engine();
    for event in batch.iter().flat_map(|batch| &batch.events) {
        size = blocks.apply(engine, event, &mut told, most).or(size);
    }
    drop(told);
    if let Some(size) = size {
        memory.set_block_size(engine, size);
    }
}
