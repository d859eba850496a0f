//! An engine as the router sees it: an address, a load, and a small pool of idle connections.
//!
//! A connection goes back to the pool only when a whole answer was read from it. In every other case its
//! `Drop` cuts the socket, and that is how an engine learns at once that nobody wants the answer.

mod addresses;
mod chunks;
mod coding;
mod connection;
mod dial;
mod head;
mod http1;
mod life;
mod lost;
mod model_cards;
mod outgoing;
mod reply;
mod reply_head;
mod terms;
mod transport;
mod usage_option;
mod verbs;

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use baton_connector::Time;
use hyper::header::HeaderValue;

use crate::config::{EngineUrl, ReleaseMode};
use crate::engines::caches::{Holders, Memory};
use crate::engines::health::{self, EngineHealth, Health, Reading, Sign, Timers, TryOut};
use crate::engines::listeners::{Freed, Seat};
use crate::engines::liveness::Question;
use crate::engines::redact::Hosts;
use crate::metrics::log_limiter::Seldom;
use crate::metrics::{EngineMetrics, Leg};
pub(crate) use addresses::Addresses;
pub(crate) use coding::Unreadable;
pub(crate) use connection::{Connection, Socket};
pub(crate) use dial::NoConnection;
use life::Life;
pub(crate) use lost::Lost;
use model_cards::ModelCards;
pub(crate) use outgoing::Outgoing;
pub(crate) use reply::{ReadShare, Reply, Whole};
use reply_head::Head;
pub use terms::TermsError;
pub(crate) use terms::{ApiKeys, EngineTerms, Terms};
use usage_option::UsageOption;
pub(crate) use verbs::{Verb, Verbs};

/// Idle connections kept per engine; more than the requests that one engine batches would be waste.
const IDLE_MAX: usize = 256;
/// A kept connection that is lost so soon after a request was put on it had been closed meanwhile. One that is lost later
/// took the request with it.
const STALE_WITHIN: Duration = Duration::from_secs(1);
/// One engine.
pub(crate) struct Engine {
    url: EngineUrl,
    /// Which engine it is, in this process; see [`Engine::id`].
    id: u32,
    authority: Arc<str>,
    host: HeaderValue,
    addresses: Addresses,
    terms: ArcSwap<Terms>,
    idle: std::sync::Mutex<Vec<Connection>>,
    life: Arc<Life>,
    /// Whether it lives: asked once for all who want to know.
    pub(crate) question: Question,
    load: Load,
    /// Told whenever a request ends here: somebody may wait for its place.
    freed: Arc<Freed>,
    /// What its cache is taken to hold.
    memory: Arc<Memory>,
    /// The load of each data-parallel rank; made when the first rank is chosen.
    ranks: OnceLock<Box<[Load]>>,
    health: Health,
    /// Where pools look at what it is doing.
    seats: ArcSwap<Vec<Seat>>,
    /// Where all engines live.
    hosts: Arc<Hosts>,
    verbs: Verbs,
    /// Whether it can be asked for the usage of a stream.
    pub usage_option: UsageOption,
    /// What it lists at `/v1/models`.
    model_cards: ModelCards,
    pub metrics: EngineMetrics,
    /// Its trouble is told seldom.
    pub trouble: Seldom,
}

/// What is in flight somewhere.
#[derive(Default)]
struct Load {
    requests: AtomicUsize,
    /// Tokens of their prompts, estimated.
    tokens: AtomicU64,
}

impl Load {
    fn add(&self, tokens: u64) {
        self.requests.fetch_add(1, Ordering::SeqCst);
        self.tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    /// Sequentially consistent: one who waits counts itself and looks at this, in that order.
    fn take(&self, tokens: u64) {
        self.tokens.fetch_sub(tokens, Ordering::Relaxed);
        self.requests.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Who is told when an engine changes.
pub(crate) struct Bells {
    /// When each wants looking after.
    pub timers: Arc<Timers>,
    /// Those who wait for an engine that can take a request.
    pub freed: Arc<Freed>,
    /// Whoever remembers what it holds.
    pub memory: Arc<Memory>,
    /// Where all of them live.
    pub hosts: Arc<Hosts>,
}

/// Why an engine gave no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// No connection: the engine never saw the request.
    #[error("no connection")]
    NotReached,
    /// Not even a try at one, for want of something of this machine's own (descriptors, ports, memory). It says
    /// nothing of the engine.
    #[error("no socket: {0}")]
    NoSocket(std::io::Error),
    /// The connection broke; the engine may have seen the request.
    #[error("the connection broke: {0}")]
    Broken(Lost),
    /// The answer is larger than anything the router can use.
    #[error("the answer is larger than {0} bytes")]
    TooLarge(usize),
    /// The answer is compressed and cannot be decoded.
    #[error("the answer cannot be read: {0}")]
    Unreadable(Unreadable),
    /// The replies of other engines take all memory that there is for them. It says nothing of this one.
    #[error("too many replies are held")]
    Spent,
}

/// Counts one request of this router at an engine for as long as it lives.
pub(crate) struct InFlight {
    engine: Arc<Engine>,
    tokens: u64,
    rank: Option<u16>,
    /// The leg whose trial this request is.
    trial: Option<Leg>,
}

/// Data-parallel ranks whose load and cache are known apart; as many as a configuration may say.
const RANKS_MAX: u16 = 256;

/// How a place at an engine is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// One at a time while it is on trial.
    Careful,
    /// Whatever its health: no other engine is left.
    Anyway,
}

impl Engine {
    /// Numbers that the caches of one engine may be remembered under.
    pub(crate) const HOLDERS: u32 = RANKS_MAX as u32;

    pub(crate) fn new(url: EngineUrl, terms: Terms, bells: Bells, metrics: EngineMetrics) -> Self {
        let Bells { timers, freed, memory, hosts } = bells;
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // Each has as many numbers as it may have ranks: enough for 16 million engines in the life of a process.
        let id = NEXT.fetch_add(Self::HOLDERS, Ordering::Relaxed);
        let health = Health::new(&terms.health, id, timers);
        let authority: Arc<str> = url.authority().into();
        let host = HeaderValue::from_str(&authority).expect("an EngineUrl is printable ASCII");
        Self {
            addresses: Addresses::new(url.host(), url.port()),
            url,
            id,
            authority,
            host,
            terms: ArcSwap::from_pointee(terms),
            idle: std::sync::Mutex::default(),
            life: Arc::default(),
            question: Question::default(),
            load: Load::default(),
            freed,
            memory,
            ranks: OnceLock::new(),
            health,
            seats: ArcSwap::default(),
            hosts,
            verbs: Verbs::default(),
            usage_option: UsageOption::default(),
            model_cards: ModelCards::default(),
            metrics,
            trouble: Seldom::new(),
        }
    }

    /// Replaces the terms on which connections are made from now on.
    pub(crate) fn set_terms(&self, terms: Terms) {
        let health = terms.health;
        self.terms.store(Arc::new(terms));
        // What is drained may have changed, and how often it is asked.
        self.health.change(&self.authority, &health, |_, _| ());
        self.health.arm(&health);
        self.changed();
    }

    /// Has its health looked after from now on.
    pub(crate) fn arm(&self) {
        self.health.arm(&self.health_terms());
    }

    /// A pool looks at it from now on. Pools that are gone are forgotten.
    pub(crate) fn sit(&self, seat: Seat) {
        self.seats.rcu(|seats| {
            let still = seats.iter().filter(|seat| !seat.is_gone());
            still.chain(std::iter::once(&seat)).cloned().collect::<Vec<_>>()
        });
    }

    /// Its health, or what it says of its load, may have changed.
    pub(crate) fn changed(&self) {
        self.seats.load().iter().for_each(Seat::refresh);
    }

    /// What one rank is doing has changed.
    fn load_changed(&self, rank: Option<u16>) {
        self.seats.load().iter().filter(|seat| seat.sees(rank)).for_each(Seat::refresh);
    }

    pub(crate) fn health(&self) -> &Health {
        &self.health
    }

    /// Where all engines live: what this one says to a client must name none of them.
    pub(crate) fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// The verbs that it is known to have.
    pub(crate) fn verbs(&self) -> &Verbs {
        &self.verbs
    }

    /// Whether it is shown a key of the router's own, not the client's.
    fn has_own_key(&self) -> bool {
        self.terms.load().api_key.is_some()
    }

    pub(crate) fn release_mode(&self) -> ReleaseMode {
        self.terms.load().release
    }

    /// It sent the head of an answer, or refused a request of a leg, so long after that was sent.
    pub(crate) fn spoke(&self, leg: Leg, after: Duration) {
        if self.health.spoke(leg, after, &self.authority, &self.terms.load().health) {
            self.changed();
        }
    }

    /// It answered a request of a leg, well and to the end.
    pub(crate) fn served(&self, leg: Leg) {
        if self.health.served(leg, &self.authority, &self.terms.load().health) {
            self.changed();
        }
    }

    /// It failed a request of a leg.
    pub(crate) fn failed(&self, leg: Leg, sign: Sign) {
        if sign == Sign::Unreachable {
            // What comes up at its address may be another version.
            self.verbs.forget();
        }
        self.health.failed(leg, sign, &self.authority, &self.terms.load().health);
        self.changed();
    }

    /// Changes what is known of its health.
    pub(crate) fn judge<T>(&self, with: impl FnOnce(&mut EngineHealth, Time, &health::Terms) -> T) -> T {
        let terms = self.terms.load().health;
        let (told, moved) =
            self.health.change(&self.authority, &terms, |machine, now| with(machine, now, &terms));
        if moved {
            self.changed();
            // It may be able to take a request again.
            self.freed.ring();
        }
        told
    }

    /// Differs from an earlier value if anything has come of it since, on any of its connections.
    pub(crate) fn heard(&self) -> u64 {
        self.life.heard()
    }

    /// Whether anybody is known to live there.
    pub(crate) fn is_known(&self) -> bool {
        let terms = self.health_terms();
        self.health.snapshot().is_known(&terms)
    }

    pub(crate) fn health_terms(&self) -> health::Terms {
        self.terms.load().health
    }

    pub(crate) fn url(&self) -> &EngineUrl {
        &self.url
    }

    /// `HOST:PORT`; for logs, never for clients.
    pub(crate) fn authority(&self) -> &str {
        &self.authority
    }

    /// Requests of this router that it, or one of its data-parallel ranks, is working on.
    pub(crate) fn load(&self, rank: Option<u16>) -> usize {
        // Looked at after one counted itself among the waiting; see `admission/mod.rs`.
        self.load_of(rank).requests.load(Ordering::SeqCst)
    }

    /// [`Self::authority`] for those who outlive the engine.
    pub(crate) fn name(&self) -> Arc<str> {
        Arc::clone(&self.authority)
    }

    /// Which engine it is, in this process. Engines that are forgotten and come back have another.
    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// Under which number one of its caches is remembered: each data-parallel rank has its own. The first one's is the
    /// engine's.
    pub(crate) fn holder(&self, rank: Option<u16>) -> u32 {
        self.id + u32::from(rank.unwrap_or(0) % RANKS_MAX)
    }

    /// Every number that one of its caches may be remembered under.
    pub(crate) fn holders(&self) -> Holders {
        let ranks = if self.ranks.get().is_some() { RANKS_MAX } else { 1 };
        self.id..self.id + u32::from(ranks)
    }

    /// Every number that one of its caches could be remembered under.
    pub(crate) fn every_holder(&self) -> Holders {
        self.id..self.id + Self::HOLDERS
    }

    /// Prompt tokens of what it, or one of its data-parallel ranks, has in flight, estimated.
    pub(crate) fn tokens(&self, rank: Option<u16>) -> u64 {
        self.load_of(rank).tokens.load(Ordering::Relaxed)
    }

    /// Requests of this router there, in all of its ranks.
    pub(crate) fn ours(&self) -> u32 {
        u32::try_from(self.load(None)).unwrap_or(u32::MAX)
    }

    /// What it says of its own load.
    pub(crate) fn set_reading(&self, reading: Reading) {
        self.health.set_reading(reading);
        self.changed();
    }

    /// What it said of its own load, where it is asked and that is not too long before `now`.
    pub(crate) fn reading(&self, now: impl FnOnce() -> Instant) -> Option<Reading> {
        self.health.reading(now, || self.terms.load().health.load_stale)
    }

    fn load_of(&self, rank: Option<u16>) -> &Load {
        let Some(rank) = rank else { return &self.load };
        let ranks = self.ranks.get_or_init(|| (0..RANKS_MAX).map(|_| Load::default()).collect());
        &ranks[usize::from(rank % RANKS_MAX)]
    }

    /// Counts one request of a leg, of a prompt of so many tokens, at one rank where it has several, until the guard
    /// is dropped; `None` when there are `most` already, or when it is on trial and another request is its one.
    pub(crate) fn begin(
        self: &Arc<Self>,
        leg: Leg,
        rank: Option<u16>,
        tokens: u64,
        most: usize,
        manner: Manner,
    ) -> Option<InFlight> {
        let trial = match self.health.try_out(leg) {
            TryOut::Taken if manner == Manner::Careful => return None,
            TryOut::Taken | TryOut::NotOnTrial => None,
            TryOut::Mine => Some(leg),
        };
        let load = self.load_of(rank);
        // Never one too many, not even for a moment: somebody else would be turned away and told of no room later.
        let one_more = |now: usize| (now < most).then_some(now + 1);
        if load.requests.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more).is_err() {
            trial.into_iter().for_each(|leg| self.health.tried(leg));
            return None;
        }
        load.tokens.fetch_add(tokens, Ordering::Relaxed);
        if rank.is_some() {
            self.load.add(tokens);
        }
        match trial {
            // All of its ranks are on trial together.
            Some(_) => self.changed(),
            None => self.load_changed(rank),
        }
        Some(InFlight { engine: Arc::clone(self), tokens, rank, trial })
    }

    /// Sends a request and waits for the head of the answer.
    ///
    /// `sent` is told the socket each time the request is put on one. A kept connection that turns out at once to
    /// have been closed by the engine before any byte of an answer is replaced by a new one, once: nothing
    /// was committed to anybody, and an engine stops a request whose connection it closed. Later, or once the request
    /// is abandoned, the loss is an attempt that failed.
    ///
    /// # Cancel safety
    /// Dropping the future cuts the connection.
    pub(crate) async fn call(
        self: &Arc<Self>,
        outgoing: &Outgoing,
        sent: impl Fn(Arc<Socket>),
    ) -> Result<Reply, CallError> {
        let mut lost = None;
        if let Some(mut kept) = self.kept() {
            let (socket, begun) = (kept.socket(), Instant::now());
            sent(Arc::clone(&socket));
            match kept.send(self.head(outgoing), outgoing.pieces(), outgoing.is_work()).await {
                Ok(head) => return Ok(self.reply(head, kept)),
                Err(Lost::Unanswered) if begun.elapsed() < STALE_WITHIN && !socket.is_abandoned() => {
                    lost = Some(socket);
                }
                Err(error) => return Err(CallError::Broken(error)),
            }
        }
        let begun = Instant::now();
        // Boxed: what a first connection needs, names and TLS, would be room in every call over a kept one.
        let mut fresh = match Box::pin(self.dial(self.terms.load().connect_timeout)).await {
            Ok(fresh) => fresh,
            Err(none) => {
                let doubt = match none {
                    NoConnection::Ours(_) | NoConnection::Refused => None,
                    NoConnection::Unanswered => Some(Sign::Unreachable),
                    NoConnection::Nameless => Some(Sign::Nameless),
                };
                doubt.into_iter().for_each(|sign| self.judge(|health, _, _| health.doubt(sign)));
                return Err(match none {
                    // What went out over the kept connection may have been seen.
                    _ if lost.is_some() => CallError::Broken(Lost::Unanswered),
                    NoConnection::Ours(error) => CallError::NoSocket(error),
                    _ => CallError::NotReached,
                });
            }
        };
        if let Some(socket) = lost {
            if socket.is_abandoned() {
                return Err(CallError::Broken(Lost::Unanswered));
            }
            self.metrics.replayed();
        }
        self.metrics.connect.record(begun.elapsed());
        sent(fresh.socket());
        match fresh.send(self.head(outgoing), outgoing.pieces(), outgoing.is_work()).await {
            Ok(head) => Ok(self.reply(head, fresh)),
            Err(error) => Err(CallError::Broken(error)),
        }
    }

    /// An idle connection that still seems to be open.
    fn kept(&self) -> Option<Connection> {
        let idle_timeout = self.terms.load().idle_timeout;
        loop {
            let mut kept = self.pool().pop()?;
            if kept.idle_for() < idle_timeout && kept.is_ready() {
                return Some(kept);
            }
        }
    }

    fn keep(&self, mut connection: Connection) {
        if !connection.is_ready() {
            return;
        }
        connection.rest(Instant::now());
        let mut pool = self.pool();
        if pool.len() == IDLE_MAX {
            pool.remove(0);
        }
        pool.push(connection);
    }

    /// Closes connections that nobody has used for too long.
    pub(crate) fn sweep(&self) {
        let idle_timeout = self.terms.load().idle_timeout;
        self.pool().retain(|kept| kept.idle_for() < idle_timeout);
    }

    fn pool(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Asks the engine whether it lives, on a connection of its own, and waits for the head of the answer.
    ///
    /// # Cancel safety
    /// As [`Self::call`].
    pub(crate) async fn call_on(
        self: &Arc<Self>,
        mut connection: Connection,
        outgoing: &Outgoing,
    ) -> Result<Reply, CallError> {
        match connection.send(self.head(outgoing), outgoing.pieces(), true).await {
            Ok(head) => Ok(self.reply(head, connection)),
            Err(error) => Err(CallError::Broken(error)),
        }
    }

    fn head(&self, outgoing: &Outgoing) -> Vec<u8> {
        let terms = self.terms.load();
        head::request(&self.host, terms.secret.as_ref(), terms.api_key.as_ref(), outgoing)
    }

    fn reply(self: &Arc<Self>, head: Head, connection: Connection) -> Reply {
        Reply::new(head, connection, Arc::clone(self))
    }
}

impl InFlight {
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Some(leg) = self.trial {
            self.engine.health.tried(leg);
        }
        // In this order: one who waits looks in the opposite order.
        self.engine.load_of(self.rank).take(self.tokens);
        if self.rank.is_some() {
            self.engine.load.take(self.tokens);
        }
        match self.trial {
            Some(_) => self.engine.changed(),
            None => self.engine.load_changed(self.rank),
        }
        self.engine.freed.ring();
    }
}
