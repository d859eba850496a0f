//! What every request needs, and what outlives a configuration.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use arc_swap::ArcSwap;
use baton_connector::{RequestId, Time};
use tokio::sync::Notify;

use crate::admission::Admission;
use crate::auth::Tenants;
use crate::config::{EngineUrl, RouterConfig};
use crate::engines::body_budget::BodyBudget;
use crate::engines::endpoints::Answers;
use crate::engines::fleet::Fleet;
use crate::engines::membership::Members;
use crate::legs::clock::Clock;
use crate::legs::retries::RetryBudget;
use crate::legs::settle::Settler;
use crate::metrics::Metrics;
use crate::metrics::log_limiter::Seldom;
use crate::observe::in_flight::{Entry, InFlightTable};
use crate::observe::observers::Observers;
use crate::routing::explain::Ring;
use crate::routing::models::Ground;
use crate::state::generation::{Generation, GenerationError, Outside};
use crate::state::reloads::Reloads;

/// Pairs of engines that are remembered as incompatible.
const MISMATCHED_MAX: usize = 4096;

/// The router's own state. The configuration is a part that is replaced whole; see [`Shared::install`].
pub(crate) struct Shared {
    current: ArcSwap<Generation>,
    /// Held while files are read for the next version: one reload at a time.
    reloading: Mutex<()>,
    /// Held while the next version is built of them, so that none is lost. Nothing is read or written meanwhile.
    installing: Mutex<()>,
    /// Engines that were looked up.
    pub answers: Answers,
    /// What became of configurations that were read again.
    pub reloads: Reloads,
    /// Somebody asked for everything to be read again.
    pub reread: Notify,
    pub fleet: Fleet,
    admission: Admission,
    /// What keys and tenants have used of their limits.
    pub tenants: Arc<Tenants>,
    /// What is held of clients' bodies.
    pub bodies: Arc<BodyBudget>,
    /// What is held of engines' whole answers.
    pub held_answers: Arc<BodyBudget>,
    pub metrics: Arc<Metrics>,
    /// Why the latest requests went where they went.
    pub explain: Ring,
    pub settler: Arc<Settler>,
    pub retries: Arc<RetryBudget>,
    /// Set when the router begins to drain: answers close their connections.
    pub draining: AtomicBool,
    /// Producer and consumer of handoffs that cannot be read: told once.
    mismatched: Mutex<HashSet<(EngineUrl, EngineUrl)>>,
    pub in_flight_table: InFlightTable,
    /// Engines that refuse the cluster secret.
    pub refused_secret: Seldom,
    in_flight: AtomicUsize,
    runtime: tokio::runtime::Handle,
    pub clock: Clock,
    /// Seconds since the epoch at which the router started: the models' `created`.
    pub created: u64,
}

/// One place among the requests in flight.
pub(crate) struct Room {
    shared: Arc<Shared>,
    number: u64,
    /// What is told of the request while it is in flight.
    pub entry: Arc<Entry>,
}

impl Shared {
    /// Must be called on the runtime that will serve.
    ///
    /// # Errors
    /// [`GenerationError`] when the configuration cannot be put into effect.
    pub(crate) fn new(config: RouterConfig) -> Result<Arc<Self>, GenerationError> {
        let (metrics, clock) = (Arc::new(Metrics::new()), Clock::start());
        let fleet = Fleet::new(Arc::clone(&metrics));
        let admission = Admission::new(Arc::clone(&fleet.freed), Arc::clone(&metrics.admission));
        let tenants = Arc::new(Tenants::new(Arc::clone(&metrics.tenants)));
        let runtime = tokio::runtime::Handle::current();
        let observers = Observers::build(&config, &Observers::default(), &metrics, &runtime)?;
        let (answers, reloads) = (Answers::default(), Reloads::new(&config));
        let members = Members::now(&config, &answers, &Members::default());
        let ground = Ground { fleet: &fleet, admission: &admission };
        let outside = Outside::read(&config, None, &fleet, &tenants, observers)?;
        let first = Generation::build((1, 0), config, members, None, &ground, outside)?;
        first.auth.iter().for_each(|auth| auth.installed(&tenants));
        metrics.server.generation.set(1.0);
        fleet.subscriptions.set(first.models.event_sources(), &fleet.memory, &runtime);
        let explain = Ring::new(first.config.explain.requests);
        let settler = Settler::new(first.settle_terms(), Arc::clone(&metrics), clock);
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Ok(Arc::new(Self {
            current: ArcSwap::from_pointee(first),
            reloading: Mutex::default(),
            installing: Mutex::default(),
            answers,
            reloads,
            reread: Notify::new(),
            fleet,
            admission,
            tenants,
            bodies: Arc::default(),
            held_answers: Arc::default(),
            metrics,
            explain,
            settler,
            retries: Arc::default(),
            draining: AtomicBool::new(false),
            mismatched: Mutex::default(),
            in_flight_table: InFlightTable::default(),
            refused_secret: Seldom::new(),
            in_flight: AtomicUsize::new(0),
            runtime,
            clock,
            created: since_epoch.as_secs(),
        }))
    }

    /// The configuration in effect. A request takes it once and keeps it to its end.
    pub(crate) fn generation(&self) -> Arc<Generation> {
        self.current.load_full()
    }

    /// Puts a configuration into effect for every request that begins from now on: whole, or not at all.
    /// Gives the number of the new generation. It reads files: not for a thread that serves.
    ///
    /// # Errors
    /// [`GenerationError`] says what is wrong; the configuration in effect stays.
    pub(crate) fn install(&self, config: RouterConfig) -> Result<u64, GenerationError> {
        let _one_reload = self.reloading.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.generation();
        let observers = Observers::build(&config, &before.observers, &self.metrics, &self.runtime)?;
        let outside = Outside::read(&config, Some(&before), &self.fleet, &self.tenants, observers)?;
        let _one_at_a_time = self.installing.lock().unwrap_or_else(PoisonError::into_inner);
        let current = self.generation();
        let members = Members::now(&config, &self.answers, &current.members);
        let number = current.number + 1;
        self.replace(&current, (number, 0), config, members, outside)?;
        self.answers.renamed();
        Ok(number)
    }

    /// Puts what discovery knows now into effect, if it is something else. `false` when that failed: it should be
    /// tried again.
    pub(crate) fn refresh(&self) -> bool {
        let _one_at_a_time = self.installing.lock().unwrap_or_else(PoisonError::into_inner);
        let current = self.generation();
        let members = Members::now(&current.config, &self.answers, &current.members);
        if members == current.members {
            return true;
        }
        let version = (current.number, current.revision + 1);
        let replaced =
            self.replace(&current, version, current.config.clone(), members, Outside::of(&current));
        if let Err(error) = &replaced {
            tracing::warn!(%error, "cannot apply discovered engines; it is retried");
        }
        replaced.is_ok()
    }

    fn replace(
        &self,
        current: &Generation,
        version: (u64, u64),
        config: RouterConfig,
        members: Members,
        outside: Outside,
    ) -> Result<(), GenerationError> {
        let ground = Ground { fleet: &self.fleet, admission: &self.admission };
        let next = Generation::build(version, config, members, Some(current), &ground, outside)?;
        self.settler.set_terms(next.settle_terms());
        self.explain.set_most(next.config.explain.requests);
        self.fleet.subscriptions.set(next.models.event_sources(), &self.fleet.memory, &self.runtime);
        self.metrics.server.generation.set(version.0 as f64);
        self.metrics.config.revision.set(version.1 as f64);
        next.auth.iter().for_each(|auth| auth.installed(&self.tenants));
        self.current.store(Arc::new(next));
        // There may be an engine now for those who wait.
        self.fleet.freed.ring();
        Ok(())
    }

    /// A place among the requests in flight; `None` when all are taken.
    pub(crate) fn room(self: &Arc<Self>, at_once: usize, id: &RequestId, begun: Time) -> Option<Room> {
        if self.in_flight.fetch_add(1, Ordering::Relaxed) >= at_once {
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        self.metrics.requests.in_flight.increment(1.0);
        let (number, entry) = self.in_flight_table.enter(id.clone(), begun);
        Some(Room { shared: Arc::clone(self), number, entry })
    }

    /// Requests in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Notes that what one engine lends another cannot read; true for the first time.
    pub(crate) fn mismatch(&self, producer: &EngineUrl, consumer: &EngineUrl) -> bool {
        let mut pairs = self.mismatched.lock().unwrap_or_else(PoisonError::into_inner);
        pairs.len() < MISMATCHED_MAX && pairs.insert((producer.clone(), consumer.clone()))
    }

    /// Now, on the clock of the exchanges.
    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.shared.in_flight_table.leave(self.number);
        self.shared.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.shared.metrics.requests.in_flight.decrement(1.0);
    }
}
