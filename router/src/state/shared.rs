//! State that every request needs and that outlives a configuration.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use baton_connector::{RequestId, Time};
use hyper::header::HeaderValue;

use crate::admission::Admission;
use crate::auth::TenantRegistry;
use crate::config::{EngineUrl, RouterConfig};
use crate::engines::body_budget::BodyBudget;
use crate::engines::caches::kept_turns::KeptTurns;
use crate::engines::discovery_sources::DiscoverySources;
use crate::engines::fleet::Fleet;
use crate::engines::pool_members::PoolMembers;
use crate::legs::clock::Clock;
use crate::legs::retries::RetryBudget;
use crate::legs::settle::Settler;
use crate::metrics::Metrics;
use crate::metrics::log_limiter::LogLimiter;
use crate::observe::in_flight::{InFlightRequest, InFlightTable};
use crate::observe::observers::Observers;
use crate::routing::explain::ExplanationHistory;
use crate::routing::models::BuildContext;
use crate::state::generation::{ExternalInputs, Generation, GenerationError, GenerationVersion};
use crate::state::installer::Installer;
use crate::state::reloads::ReloadStatus;

/// Limit on the pairs of engines recorded as incompatible.
const MISMATCHED_MAX: usize = 4096;

/// The router's own state. The configuration is a part that is replaced whole; see [`Shared::install`].
pub(crate) struct Shared {
    pub installer: Installer,
    pub fleet: Fleet,
    pub limits: Limits,
    pub in_flight: InFlightRequests,
    pub settler: Arc<Settler>,
    pub metrics: Arc<Metrics>,
    /// Routing decisions of the latest requests.
    pub explanations: ExplanationHistory,
    pub incompatible: IncompatibleEngines,
    /// Conversations whose blocks decode engines keep for the next turn.
    pub kept_turns: parking_lot::Mutex<KeptTurns<TurnClaim>>,
    pub clock: Clock,
    /// Seconds since the epoch at which the router started: the models' `created`.
    pub created: u64,
    /// Set when the router begins to drain: responses close their connections.
    pub draining: AtomicBool,
}

/// What the release of a kept turn needs.
pub(crate) struct TurnClaim {
    /// The request whose response the turn ended with.
    pub request: RequestId,
    /// The client's credentials, which engines may require.
    pub authorization: Option<HeaderValue>,
}

/// The resources that all requests share.
pub(crate) struct Limits {
    pub(super) admission: Admission,
    /// The use of keys' and tenants' limits.
    pub tenants: Arc<TenantRegistry>,
    /// Memory of clients' request bodies.
    pub request_bodies: Arc<BodyBudget>,
    /// Memory of engines' whole responses.
    pub response_bodies: Arc<BodyBudget>,
    pub retries: Arc<RetryBudget>,
}

/// The requests in flight.
#[derive(Default)]
pub(crate) struct InFlightRequests {
    pub table: InFlightTable,
    count: AtomicUsize,
}

impl InFlightRequests {
    /// Requests in flight.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }
}

/// Engines that do not fit each other or the router's configuration.
pub(crate) struct IncompatibleEngines {
    /// Producer and consumer of handoffs that cannot be read: each pair is logged once.
    pairs: Mutex<HashSet<(EngineUrl, EngineUrl)>>,
    /// Limits the log of engines that refuse the cluster secret.
    pub misconfigured_log: LogLimiter,
}

impl IncompatibleEngines {
    fn new() -> Self {
        Self { pairs: Mutex::default(), misconfigured_log: LogLimiter::new() }
    }

    /// Records that the consumer cannot read the producer's blocks; true for the first time.
    pub(crate) fn record_mismatch(&self, producer: &EngineUrl, consumer: &EngineUrl) -> bool {
        let mut pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        pairs.len() < MISMATCHED_MAX && pairs.insert((producer.clone(), consumer.clone()))
    }
}

/// Counts one request in flight, until it is dropped.
pub(crate) struct InFlightGuard {
    shared: Arc<Shared>,
    number: u64,
    /// The request's entry in the table of requests in flight.
    pub entry: Arc<InFlightRequest>,
}

impl Shared {
    /// Must be called on the runtime that will serve.
    ///
    /// # Errors
    /// [`GenerationError`] when the configuration cannot be put into effect.
    pub(crate) fn new(config: RouterConfig) -> Result<Arc<Self>, GenerationError> {
        let (metrics, clock) = (Arc::new(Metrics::new()), Clock::start());
        let fleet = Fleet::new(Arc::clone(&metrics));
        let admission = Admission::new(Arc::clone(&fleet.capacity), Arc::clone(&metrics.admission));
        let tenants = Arc::new(TenantRegistry::new(Arc::clone(&metrics.tenants)));
        let runtime = tokio::runtime::Handle::current();
        let observers = Observers::build(&config, &Observers::default(), &metrics, &runtime)?;
        let (sources, reloads) = (DiscoverySources::default(), ReloadStatus::new(&config));
        let members = PoolMembers::now(&config, &sources, &PoolMembers::default());
        let context = BuildContext { fleet: &fleet, admission: &admission };
        let inputs = ExternalInputs::read(&config, None, &fleet, &tenants, observers)?;
        let first = Generation::build(GenerationVersion::FIRST, config, members, None, &context, inputs)?;
        first.auth.iter().for_each(|auth| auth.activate(&tenants));
        metrics.server.generation.set(1.0);
        fleet.subscriptions.set(first.models.event_sources(), &fleet.known_caches, &runtime);
        let explanations = ExplanationHistory::new(first.config.explain.requests);
        let settler = Settler::new(first.settle_terms(), Arc::clone(&metrics), clock);
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let limits = Limits {
            admission,
            tenants,
            request_bodies: Arc::default(),
            response_bodies: Arc::default(),
            retries: Arc::default(),
        };
        Ok(Arc::new(Self {
            installer: Installer::new(first, sources, reloads, runtime),
            fleet,
            limits,
            in_flight: InFlightRequests::default(),
            settler,
            metrics,
            explanations,
            incompatible: IncompatibleEngines::new(),
            kept_turns: parking_lot::Mutex::default(),
            clock,
            created: since_epoch.as_secs(),
            draining: AtomicBool::new(false),
        }))
    }

    /// The generation in effect. A request takes it once and keeps it to its end.
    pub(crate) fn generation(&self) -> Arc<Generation> {
        self.installer.current.load_full()
    }

    /// Looks at the generation in effect, without a share of it: its count of shares is one that all workers change.
    pub(crate) fn read_generation<T>(&self, with: impl FnOnce(&Generation) -> T) -> T {
        with(&self.installer.current.load())
    }

    /// Puts a configuration into effect for all new requests, as a whole or not at all. Returns the number of the new
    /// generation. It reads files, so a serving thread must not call it.
    ///
    /// # Errors
    /// [`GenerationError`] contains the reason; the configuration in effect stays.
    pub(crate) fn install(&self, config: RouterConfig) -> Result<u64, GenerationError> {
        let _one_reload = self.installer.reloading.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.generation();
        let observers = Observers::build(&config, &before.observers, &self.metrics, &self.installer.runtime)?;
        let inputs =
            ExternalInputs::read(&config, Some(&before), &self.fleet, &self.limits.tenants, observers)?;
        let _one_at_a_time = self.installer.installing.lock().unwrap_or_else(PoisonError::into_inner);
        let current = self.generation();
        let members = PoolMembers::now(&config, &self.installer.sources, &current.members);
        let number = current.version.number + 1;
        let version = GenerationVersion { number, revision: 0 };
        self.replace(&current, version, config, members, inputs)?;
        self.installer.sources.configuration_changed();
        Ok(number)
    }

    /// Puts the current result of discovery into effect, if it has changed. `false` if that failed and must be retried.
    pub(crate) fn refresh(&self) -> bool {
        let _one_at_a_time = self.installer.installing.lock().unwrap_or_else(PoisonError::into_inner);
        let current = self.generation();
        let members = PoolMembers::now(&current.config, &self.installer.sources, &current.members);
        if members == current.members {
            return true;
        }
        let version = GenerationVersion { revision: current.version.revision + 1, ..current.version };
        let replaced =
            self.replace(&current, version, current.config.clone(), members, ExternalInputs::reuse(&current));
        if let Err(error) = &replaced {
            tracing::warn!(
                event = "discovery_not_applied", %error,
                "cannot apply discovered engines; it is retried"
            );
        }
        replaced.is_ok()
    }

    fn replace(
        &self,
        current: &Generation,
        version: GenerationVersion,
        config: RouterConfig,
        members: PoolMembers,
        inputs: ExternalInputs,
    ) -> Result<(), GenerationError> {
        let context = BuildContext { fleet: &self.fleet, admission: &self.limits.admission };
        let next = Generation::build(version, config, members, Some(current), &context, inputs)?;
        self.settler.set_terms(next.settle_terms());
        self.explanations.set_most(next.config.explain.requests);
        self.fleet.subscriptions.set(
            next.models.event_sources(),
            &self.fleet.known_caches,
            &self.installer.runtime,
        );
        self.metrics.server.generation.set(version.number as f64);
        self.metrics.config.revision.set(version.revision as f64);
        next.auth.iter().for_each(|auth| auth.activate(&self.limits.tenants));
        self.installer.current.store(Arc::new(next));
        // Waiting requests may have an engine now.
        self.fleet.capacity.notify();
        Ok(())
    }

    /// Begins a request; `None` when the maximum number of requests is in flight.
    pub(crate) fn begin(
        self: &Arc<Self>,
        at_once: usize,
        id: &RequestId,
        begun: Time,
    ) -> Option<InFlightGuard> {
        let count = &self.in_flight.count;
        if count.fetch_add(1, Ordering::Relaxed) >= at_once {
            count.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        self.metrics.requests.in_flight.increment(1.0);
        let (number, entry) = self.in_flight.table.enter(id.clone(), begun);
        Some(InFlightGuard { shared: Arc::clone(self), number, entry })
    }

    /// The current time on the clock of the exchanges.
    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    /// A time of this clock, for timers.
    pub(crate) fn instant(&self, time: Time) -> Instant {
        self.clock.instant(time)
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.shared.in_flight.table.leave(self.number);
        self.shared.in_flight.count.fetch_sub(1, Ordering::Relaxed);
        self.shared.metrics.requests.in_flight.decrement(1.0);
    }
}
