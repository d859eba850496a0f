//! An engine from the router's view: an address, a load, and a small pool of idle connections.
//!
//! A connection returns to the pool only when a whole reply was read from it. In every other case its `Drop` cuts
//! the socket. The engine then sees at once that the reply is no longer needed. Requests over HTTP/2 share connections,
//! and `Drop` resets the stream of one.

mod activity;
mod addresses;
mod call;
mod chunks;
mod connection;
mod connection_error;
mod connection_terms;
mod content_coding;
mod dial;
mod head;
mod http1;
mod load;
mod model_cards;
mod reply;
mod reply_head;
mod request;
mod usage_option;
mod verbs;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use baton_connector::Time;
use hyper::header::HeaderValue;
use tokio::sync::Semaphore;

use crate::config::{EngineUrl, ReleaseMode};
use crate::engines::caches::{CacheIds, KnownCaches};
use crate::engines::health::{self, FailureKind, Health, HealthState, HealthTimers, LoadReading};
use crate::engines::listeners::CapacityNotify;
use crate::engines::prefill_times::PrefillTimes;
use crate::engines::probe::SharedProbe;
use crate::engines::protocol::learned::LearnedProtocol;
use crate::engines::protocol::{Bootstrap, Protocol, ProtocolKind};
use crate::engines::redact::AddressRedactor;
use crate::metrics::log_limiter::EngineLogLimiters;
use crate::metrics::{EngineMetrics, Leg};
use activity::EngineActivity;
pub(crate) use addresses::Addresses;
use connection::IdleConnections;
pub(crate) use connection::{Connection, ConnectionHandle};
pub(crate) use connection_error::ConnectionError;
pub use connection_terms::TermsError;
pub(crate) use connection_terms::{ApiKeys, ConnectionTerms, EngineTerms};
pub(crate) use content_coding::ContentCodingError;
pub(crate) use dial::DialError;
pub(crate) use load::{EngineRequestGuard, TrialRule};
use load::{LoadCounters, RANKS_MAX};
use model_cards::ModelCards;
pub(crate) use reply::{Reply, ReplyReservation, WholeReply};
use reply_head::ReplyHead;
pub(crate) use request::EngineRequest;
use usage_option::UsageOption;
use verbs::ControlAddress;
pub(crate) use verbs::{LeaseIdentity, Support, VerbSupport};

/// One engine.
pub(crate) struct Engine {
    address: EngineAddress,
    connections: Connections,
    load: LoadCounters,
    health: Health,
    /// The liveness probe: one for all requests that wait for it.
    pub(crate) probe: SharedProbe,
    known_caches: Arc<KnownCaches>,
    /// The addresses of all engines.
    redactor: Arc<AddressRedactor>,
    verbs: VerbSupport,
    /// Whether the engine takes a stream's usage option.
    pub usage_option: UsageOption,
    /// The engine's list at `/v1/models`.
    model_cards: ModelCards,
    pub metrics: EngineMetrics,
    pub log_limiters: EngineLogLimiters,
}

/// Where an engine is, and its number in this process.
struct EngineAddress {
    url: EngineUrl,
    /// See [`Engine::id`].
    id: u32,
    authority: Arc<str>,
    host: HeaderValue,
}

/// How connections to an engine are made, and the idle ones.
struct Connections {
    /// The protocol of the process at the other end.
    protocol: LearnedProtocol,
    addresses: Addresses,
    terms: ArcSwap<ConnectionTerms>,
    idle: IdleConnections,
    http2: Http2Support,
    activity: Arc<EngineActivity>,
    /// Where the engine answers verbs and snapshot queries, if not at its own address.
    control: ArcSwapOption<ControlAddress>,
}

/// Concurrent dials of requests that find all HTTP/2 connections of an engine full. One dial serves many requests. Several
/// shorten the wait where an engine allows few streams.
const HTTP2_DIALS_MAX: usize = 4;

/// Whether the engine speaks HTTP/2, and the turns of new connections to it.
struct Http2Support {
    is_spoken: AtomicBool,
    dials: Semaphore,
}

impl Default for Http2Support {
    fn default() -> Self {
        Self { is_spoken: AtomicBool::default(), dials: Semaphore::new(HTTP2_DIALS_MAX) }
    }
}

impl Http2Support {
    /// Whether the last new connection was one of HTTP/2.
    fn is_spoken(&self) -> bool {
        self.is_spoken.load(Ordering::Relaxed)
    }

    fn learn(&self, is_spoken: bool) {
        self.is_spoken.store(is_spoken, Ordering::Relaxed);
    }
}

/// The structures that are notified when an engine changes.
pub(crate) struct EngineListeners {
    /// When each engine's health is due.
    pub timers: Arc<HealthTimers>,
    /// Requests that wait for an engine with capacity.
    pub capacity: Arc<CapacityNotify>,
    /// The known contents of the engines' caches.
    pub known_caches: Arc<KnownCaches>,
    /// The addresses of all engines.
    pub redactor: Arc<AddressRedactor>,
}

/// Why an engine gave no reply.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// No connection: the engine never received the request.
    #[error("no connection")]
    NotConnected,
    /// No attempt either, because this machine lacks a resource (descriptors, ports, memory). It shows nothing about
    /// the engine.
    #[error("no socket: {0}")]
    OutOfResources(std::io::Error),
    /// The connection broke; the engine may have received the request.
    #[error("the connection broke: {0}")]
    Broken(ConnectionError),
    /// The reply is larger than any that the router can use.
    #[error("the answer is larger than {0} bytes")]
    TooLarge(usize),
    /// The reply is compressed and cannot be decoded.
    #[error("the answer cannot be read: {0}")]
    Undecodable(ContentCodingError),
    /// The replies of other engines exhaust the budget. It shows nothing about this one.
    #[error("too many replies are held")]
    BudgetExhausted,
}

impl CallError {
    /// A request that its engine has not begun never reached it.
    fn of(error: ConnectionError) -> Self {
        match error {
            ConnectionError::GoingAway | ConnectionError::Refused => Self::NotConnected,
            error => Self::Broken(error),
        }
    }
}

impl Engine {
    /// Number of cache ids reserved per engine.
    pub(crate) const HOLDERS: u32 = RANKS_MAX as u32;

    pub(crate) fn new(
        url: EngineUrl,
        terms: ConnectionTerms,
        listeners: EngineListeners,
        metrics: EngineMetrics,
    ) -> Self {
        let EngineListeners { timers, capacity, known_caches, redactor } = listeners;
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // Each engine reserves as many ids as it may have ranks. The ids suffice for 16 million engines per
        // process.
        let id = NEXT.fetch_add(Self::HOLDERS, Ordering::Relaxed);
        let health = Health::new(&terms.health, id, timers);
        let authority: Arc<str> = url.authority().into();
        let host = HeaderValue::from_str(&authority).expect("an EngineUrl is printable ASCII");
        let control = terms.control.as_ref().map(|control| Arc::new(ControlAddress::new(&control.url)));
        Self {
            connections: Connections {
                protocol: LearnedProtocol::default(),
                addresses: Addresses::new(url.host(), url.port()),
                terms: ArcSwap::from_pointee(terms),
                idle: IdleConnections::default(),
                http2: Http2Support::default(),
                activity: Arc::default(),
                control: ArcSwapOption::new(control),
            },
            address: EngineAddress { url, id, authority, host },
            load: LoadCounters::new(capacity),
            health,
            probe: SharedProbe::default(),
            known_caches,
            redactor,
            verbs: VerbSupport::default(),
            usage_option: UsageOption::default(),
            model_cards: ModelCards::default(),
            metrics,
            log_limiters: EngineLogLimiters::default(),
        }
    }

    /// Replaces the terms of new connections.
    pub(crate) fn set_terms(&self, terms: ConnectionTerms) {
        let health = terms.health;
        self.set_control(terms.control.as_ref().map(|control| &control.url));
        if self.connections.terms.load().http2 != terms.http2 {
            self.connections.idle.clear();
            self.connections.http2.learn(false);
        }
        self.connections.terms.store(Arc::new(terms));
        // The drain key and the check interval may have changed.
        self.health.change(&self.address.authority, &health, |_, _| ());
        self.health.arm(&health);
        self.changed();
    }

    /// Replaces the cluster secret of new requests.
    pub(crate) fn set_secret(&self, secret: HeaderValue) {
        let terms = ConnectionTerms::clone(&self.connections.terms.load());
        self.connections.terms.store(Arc::new(ConnectionTerms { secret: Some(secret), ..terms }));
    }

    /// Schedules the engine's health checks.
    pub(crate) fn arm(&self) {
        self.health.arm(&self.health_terms());
    }

    /// An address of the engine, for a peer that connects to it itself; `None` while its name cannot be resolved.
    pub(crate) async fn socket_addr(&self) -> Option<SocketAddr> {
        self.connections.addresses.get().await.ok()?.first().copied()
    }

    pub(crate) fn health(&self) -> &Health {
        &self.health
    }

    /// The addresses of all engines, which a client's response must not contain.
    pub(crate) fn redactor(&self) -> &AddressRedactor {
        &self.redactor
    }

    /// The verbs that the engine is known to support.
    pub(crate) fn verbs(&self) -> &VerbSupport {
        &self.verbs
    }

    /// The times of its prefills, recorded while it returns no handles.
    pub(crate) fn prefill_times(&self) -> &PrefillTimes {
        &self.load.prefill_times
    }

    /// Whether requests to it have a key of the router's own, not the client's.
    fn has_own_key(&self) -> bool {
        self.connections.terms.load().api_key.is_some()
    }

    pub(crate) fn release_mode(&self) -> ReleaseMode {
        self.connections.terms.load().release
    }

    /// The protocol of its legs, if it is configured or learned.
    pub(crate) fn known_protocol(&self) -> Option<ProtocolKind> {
        self.connections.protocol.kind(&self.connections.terms.load().protocol)
    }

    /// The protocol of its legs; vLLM's while it is not known.
    pub(crate) fn protocol(&self) -> &'static dyn Protocol {
        self.known_protocol().unwrap_or_default().protocol()
    }

    /// What its replies have shown of its process.
    pub(crate) fn learned_protocol(&self) -> &LearnedProtocol {
        &self.connections.protocol
    }

    /// A new meeting place at this prefill engine, with one room per prompt.
    pub(crate) fn bootstrap(&self, prompts: usize, rank: Option<u16>) -> Bootstrap {
        let terms = self.connections.terms.load();
        let terms = &terms.protocol;
        let host =
            terms.bootstrap_host.clone().unwrap_or_else(|| self.address.url.bracketed_host().to_owned());
        Bootstrap::new(host, self.connections.protocol.bootstrap_port(terms), prompts, rank, terms.ranks)
    }

    /// Records that the engine sent a response head or refused a request of a leg, `after` this time.
    pub(crate) fn responded(&self, leg: Leg, after: Duration) {
        if self.health.responded(leg, after, &self.address.authority, &self.connections.terms.load().health) {
            self.changed();
        }
    }

    /// Records that the engine completed a request of a leg.
    pub(crate) fn completed(&self, leg: Leg) {
        if self.health.completed(leg, &self.address.authority, &self.connections.terms.load().health) {
            self.changed();
        }
    }

    /// Records that the engine failed a request of a leg.
    pub(crate) fn failed(&self, leg: Leg, kind: FailureKind) {
        if kind == FailureKind::Unreachable {
            // The next process at this address may be another version, or another kind of engine.
            self.verbs.forget_missing();
            self.connections.protocol.forget();
        }
        self.health.failed(leg, kind, &self.address.authority, &self.connections.terms.load().health);
        self.changed();
    }

    /// Changes the health state.
    pub(crate) fn update_health<T>(
        &self,
        with: impl FnOnce(&mut HealthState, Time, &health::HealthTerms) -> T,
    ) -> T {
        let terms = self.connections.terms.load().health;
        let (result, moved) =
            self.health.change(&self.address.authority, &terms, |machine, now| with(machine, now, &terms));
        if moved {
            self.changed();
            // The engine may be able to accept a request again.
            self.load.capacity.notify();
        }
        result
    }

    /// Differs from an earlier value if bytes have arrived since, on any of its connections.
    pub(crate) fn activity_count(&self) -> u64 {
        self.connections.activity.reads()
    }

    /// Whether an engine is known to exist at this address.
    pub(crate) fn is_known(&self) -> bool {
        let terms = self.health_terms();
        self.health.snapshot().is_known(&terms)
    }

    pub(crate) fn health_terms(&self) -> health::HealthTerms {
        self.connections.terms.load().health
    }

    pub(crate) fn url(&self) -> &EngineUrl {
        &self.address.url
    }

    /// `HOST:PORT`; for logs, never for clients.
    pub(crate) fn authority(&self) -> &str {
        &self.address.authority
    }

    /// [`Self::authority`] as an owned value.
    pub(crate) fn name(&self) -> Arc<str> {
        Arc::clone(&self.address.authority)
    }

    /// The engine's number in this process. An engine that is removed and returns has another number.
    pub(crate) fn id(&self) -> u32 {
        self.address.id
    }

    /// The number of one of its caches. Each data-parallel rank has its own; the first rank's is the engine's.
    pub(crate) fn cache_id(&self, rank: Option<u16>) -> u32 {
        self.address.id + u32::from(rank.unwrap_or(0) % RANKS_MAX)
    }

    /// All cache ids in use.
    pub(crate) fn cache_ids(&self) -> CacheIds {
        let ranks = if self.load.has_ranks() { RANKS_MAX } else { 1 };
        self.address.id..self.address.id + u32::from(ranks)
    }

    /// All cache ids that could be in use.
    pub(crate) fn all_cache_ids(&self) -> CacheIds {
        self.address.id..self.address.id + Self::HOLDERS
    }

    /// Stores the engine's reported load.
    pub(crate) fn set_reading(&self, reading: LoadReading) {
        self.health.set_reading(reading);
        self.changed();
    }

    /// The engine's reported load, if it is configured and not stale at `now`.
    pub(crate) fn reading(&self, now: impl FnOnce() -> Instant) -> Option<LoadReading> {
        self.health.reading(now, || self.connections.terms.load().health.load_stale)
    }
}
