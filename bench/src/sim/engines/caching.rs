//! Simulated engines with a prefix cache whose contents they publish as KV events. For measurements of prefix routing.
//!
//! ```text
//! /v1/chat/completions ─▶ tokens ─▶ cached blocks ─▶ time of the others, one prompt at a time ─▶ reply
//!                                        └ stored and evicted blocks ─▶ publisher ─▶ subscribers
//! /tokenize ─▶ tokens
//! ```
//!
//! Engines of one fleet tokenize alike (`text`), and name equal blocks alike.

mod cache;
mod publisher;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use baton_openai::{ApiError, Endpoint, GenerateRequest, ParseLimits, parse_object};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::http::{self, HttpRequest, refusal};
use super::server::{accept, tokenize};
use super::text;
use crate::sim::instant::connection::ServerConnection;
use cache::{CacheChanges, PrefixCache, block_hashes};
use publisher::{Publisher, StoredEvent, removed};

/// Properties of a caching engine.
#[derive(Clone, Debug)]
pub struct CachingPlan {
    /// Blocks of the cache.
    pub blocks: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Prompt tokens per second that are not cached; 0 takes no time.
    pub prefill_rate: u64,
    /// Words of a response.
    pub answer_words: usize,
}

/// A running engine. Dropping stops it.
pub struct CachingEngine {
    address: SocketAddr,
    events_port: u16,
    state: Arc<CachingState>,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

/// Counts of one engine since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Prompts computed.
    pub prompts: u64,
    /// Their tokens.
    pub prompt_tokens: u64,
    /// The part of them that was cached.
    pub cached_tokens: u64,
    /// Requests of `/tokenize`.
    pub tokenized: u64,
}

struct CachingState {
    plan: CachingPlan,
    core: Mutex<EngineCore>,
    publisher: Publisher,
    tokenized: AtomicU64,
}

struct EngineCore {
    cache: PrefixCache,
    /// When the computed prompts are finished.
    busy_until: Instant,
    counts: CacheCounts,
}

impl CachingEngine {
    /// Starts an engine on free ports of loopback.
    ///
    /// # Errors
    /// If no port or thread is available.
    pub fn start(plan: CachingPlan) -> io::Result<Self> {
        let listen = || crate::sim::instant::listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let (requests, subscribers) = (listen()?, listen()?);
        let (address, events_port) = (requests.local_addr()?, subscribers.local_addr()?.port());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let core = EngineCore {
            cache: PrefixCache::new(plan.blocks),
            busy_until: Instant::now(),
            counts: CacheCounts::default(),
        };
        let (publisher, tokenized) = (Publisher::default(), AtomicU64::new(0));
        let state = Arc::new(CachingState { plan, core: Mutex::new(core), publisher, tokenized });
        let stop = CancellationToken::new();
        let (runs, stopped) = (Arc::clone(&state), stop.clone());
        let thread = std::thread::Builder::new().name("sim-caching".to_owned()).spawn(move || {
            let of_requests = |stream| {
                let state = Arc::clone(&runs);
                // An error means that the caller closed the connection.
                async move { drop(connection(stream, &state).await) }
            };
            let of_events = |stream| {
                let state = Arc::clone(&runs);
                async move { drop(state.publisher.serve(stream).await) }
            };
            runtime.block_on(async {
                tokio::join!(
                    accept(requests, &stopped, of_requests),
                    accept(subscribers, &stopped, of_events)
                );
            });
        })?;
        Ok(Self { address, events_port, state, stop, thread: Some(thread) })
    }

    /// Where the engine serves requests.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The port at which it publishes its events.
    #[must_use]
    pub fn events_port(&self) -> u16 {
        self.events_port
    }

    /// Subscribers to its events.
    #[must_use]
    pub fn subscribers(&self) -> usize {
        self.state.publisher.subscribers()
    }

    /// Counts since the start.
    #[must_use]
    pub fn counts(&self) -> CacheCounts {
        let tokenized = self.state.tokenized.load(Ordering::Relaxed);
        CacheCounts { tokenized, ..self.state.core().counts }
    }
}

impl Drop for CachingEngine {
    fn drop(&mut self) {
        self.stop.cancel();
        // A panic was already printed to standard error.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl CachingState {
    fn core(&self) -> MutexGuard<'_, EngineCore> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a prompt, and returns its cached tokens and when it is computed.
    fn begin(&self, tokens: usize, hashes: &[u64]) -> (usize, Instant) {
        let mut core = self.core();
        let cached = core.cache.hits(hashes) * self.plan.block_tokens;
        let micros = ((tokens - cached) as u64 * 1_000_000).checked_div(self.plan.prefill_rate).unwrap_or(0);
        core.busy_until = core.busy_until.max(Instant::now()) + Duration::from_micros(micros);
        core.counts.prompts += 1;
        core.counts.prompt_tokens += tokens as u64;
        core.counts.cached_tokens += cached as u64;
        (cached, core.busy_until)
    }

    /// Stores a computed prompt's blocks and publishes what has changed.
    fn finish(&self, tokens: &[u32], hashes: &[u64], salt: Option<&str>) {
        let mut core = self.core();
        let CacheChanges { hits, stored, evicted } = core.cache.use_prompt(hashes);
        let mut events = Vec::new();
        if !evicted.is_empty() {
            events.push(removed(&evicted));
        }
        if stored > 0 {
            let size = self.plan.block_tokens;
            let event = StoredEvent {
                hashes: &hashes[hits..hits + stored],
                parent: hits.checked_sub(1).map(|last| hashes[last]),
                tokens: &tokens[hits * size..(hits + stored) * size],
                block_tokens: size,
                salt,
            };
            events.push(event.json());
        }
        // Under the lock, so that events have the order of the changes.
        if !events.is_empty() {
            self.publisher.publish(&events);
        }
    }
}

async fn connection(stream: TcpStream, engine: &CachingState) -> io::Result<()> {
    let mut connection = ServerConnection::new(stream);
    while let Some(request) = connection.next(HttpRequest::read).await? {
        let closes = request.closes;
        let reply = match (request.posts, request.path.as_str()) {
            (true, "/v1/chat/completions") => generate(engine, &request).await,
            (true, "/tokenize") => {
                engine.tokenized.fetch_add(1, Ordering::Relaxed);
                tokenize(&request, usize::MAX)
            }
            (false, "/health") => Ok(http::json(b"{\"status\":\"ok\"}")),
            (_, path) => Err(ApiError::not_found(path)),
        };
        connection.send_or_gone(&reply.unwrap_or_else(|error| refusal(&error))).await?;
        if closes {
            return Ok(());
        }
    }
    Ok(())
}

async fn generate(engine: &CachingState, request: &HttpRequest) -> Result<Vec<u8>, ApiError> {
    let limits = ParseLimits::default();
    let fields = parse_object(&request.body, &limits)?;
    let request = GenerateRequest::from_map(Endpoint::Chat, &fields, &limits)?;
    let tokens =
        text::prompt(&request.input).ok_or_else(|| ApiError::invalid("messages", "one chat at a time"))?;
    let salt = request.cache_salt.as_deref();
    let hashes = block_hashes(&tokens, engine.plan.block_tokens, salt);
    let (cached, computed_at) = engine.begin(tokens.len(), &hashes);
    tokio::time::sleep_until(computed_at).await;
    engine.finish(&tokens, &hashes, salt);
    let contents = text::contents(&tokens, engine.plan.block_tokens);
    let words = (0..engine.plan.answer_words).map(|number| text::word(contents.iter().copied(), number));
    let usage = json!({
        "prompt_tokens": tokens.len(), "completion_tokens": engine.plan.answer_words,
        "total_tokens": tokens.len() + engine.plan.answer_words,
        "prompt_tokens_details": {"cached_tokens": cached},
    });
    let reply: Value = json!({
        "id": "chatcmpl-sim", "object": "chat.completion", "created": 0, "model": "sim", "usage": usage,
        "choices": [{"index": 0, "finish_reason": "stop",
            "message": {"role": "assistant", "content": words.collect::<String>()}}],
    });
    Ok(http::json(reply.to_string().as_bytes()))
}
