//! The router of a simulated fleet (`baton bench fleet`): the real models, pools, policies, health and request
//! table. A configuration builds them as in the router, but without a listener, a socket or a task.
//!
//! Not a public interface. The simulation plays clients and engines, and advances the requests' exchanges itself.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::{RequestId, Time};

use crate::admission::{Admission, Unavailable};
use crate::auth::TenantRegistry;
use crate::config::RouterConfig;
use crate::engines::discovery_sources::DiscoverySources;
use crate::engines::fleet::Fleet;
use crate::engines::health::{EngineLoad, FailureKind, LoadReading};
use crate::engines::http::Engine;
use crate::engines::pool_members::PoolMembers;
use crate::message::features::RoutingFeatures;
use crate::metrics::{Leg, Metrics};
use crate::observe::in_flight::InFlightTable;
use crate::observe::observers::Observers;
use crate::routing::disaggregation::{self, DisaggregationInputs};
use crate::routing::explain::Decision;
use crate::routing::models::{BuildContext, Model};
use crate::routing::policy::Draw;
use crate::routing::pool::{CapacityRule, Detail, EngineReservation, Pool, another_first};
use crate::state::generation::{ExternalInputs, Generation, GenerationError, GenerationVersion};

/// One simulated router.
pub struct SimRouter {
    fleet: Fleet,
    _admission: Admission,
    generation: Generation,
    model: Arc<Model>,
    /// By the simulation's numbers.
    engines: Vec<Arc<Engine>>,
    numbers: HashMap<u32, usize>,
    in_flight: InFlightTable,
    /// The latest decisions, as many as the configuration keeps.
    decisions: Mutex<VecDeque<Decision>>,
}

/// A request's features: hashes and lengths.
#[derive(Clone, Debug, Default)]
pub struct SimRequest {
    /// Hash of the request's session.
    pub session: Option<u64>,
    /// Hashes of the prompt's beginning, chunk by chunk.
    pub prefix: Vec<u64>,
    /// Tokens of the prompt.
    pub tokens: u64,
    /// Tokens of one chunk.
    pub chunk_tokens: f64,
}

/// A reservation at an engine. Dropping it frees the capacity.
pub struct SimReservation {
    reserved: EngineReservation,
    leg: Leg,
    /// The engine's number.
    pub engine: usize,
    /// Chunks of the prompt that the router assumed to be cached there.
    pub cached_chunks: usize,
}

/// Why there is no reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimReserveError {
    /// All eligible engines are full.
    Full,
    /// No engine is eligible.
    NoEngine,
}

/// A request in the router's table of requests in flight.
pub struct SimInFlight(u64);

/// Seeds the random numbers of this thread.
pub fn reseed(seed: u64) {
    Draw::reseed(seed);
}

impl SimRouter {
    /// A router with the only model of `config`, whose engines have the `names` (`HOST:PORT`) in the order of their
    /// numbers.
    ///
    /// # Errors
    /// [`GenerationError`] if the configuration cannot be put into effect.
    ///
    /// # Panics
    /// If the configuration has several models, or no engine for some name.
    pub fn new(config: RouterConfig, names: &[String]) -> Result<Self, GenerationError> {
        let metrics = Arc::new(Metrics::new());
        let fleet = Fleet::new(Arc::clone(&metrics));
        let admission = Admission::new(Arc::clone(&fleet.capacity), Arc::clone(&metrics.admission));
        let tenants = Arc::new(TenantRegistry::new(Arc::clone(&metrics.tenants)));
        let members = PoolMembers::now(&config, &DiscoverySources::default(), &PoolMembers::default());
        let context = BuildContext { fleet: &fleet, admission: &admission };
        let inputs = ExternalInputs::read(&config, None, &fleet, &tenants, Observers::default())?;
        let generation =
            Generation::build(GenerationVersion::FIRST, config, members, None, &context, inputs)?;
        let model = Arc::clone(generation.models.named(None).expect("one model"));
        let by_name: HashMap<String, Arc<Engine>> =
            fleet.engines().into_iter().map(|engine| (engine.authority().to_owned(), engine)).collect();
        let engine = |name: &String| Arc::clone(by_name.get(name).expect("an engine of that name"));
        let engines: Vec<_> = names.iter().map(engine).collect();
        let numbers = engines.iter().enumerate().map(|(number, engine)| (engine.id(), number)).collect();
        let in_flight = InFlightTable::default();
        let decisions = Mutex::default();
        Ok(Self { fleet, _admission: admission, generation, model, engines, numbers, in_flight, decisions })
    }

    /// Adds a request to the requests in flight.
    pub fn begin_request(&self, id: &RequestId, now: Time) -> SimInFlight {
        let (number, entry) = self.in_flight.enter(id.clone(), now);
        // The value is set only once, because the simulation keeps the exchange.
        drop(entry.model.set(Arc::clone(&self.model)));
        SimInFlight(number)
    }

    /// Removes a request from the requests in flight.
    pub fn end_request(&self, in_flight: SimInFlight) {
        self.in_flight.leave(in_flight.0);
    }

    /// Reserves a decode engine that is not in `tried`.
    ///
    /// # Errors
    /// [`SimReserveError`].
    pub fn reserve_decode(
        &self,
        request: &SimRequest,
        tried: &[usize],
    ) -> Result<SimReservation, SimReserveError> {
        let tried = self.engines_of(tried);
        let mut without = self.model.decode.without_partner(&self.model.prefill);
        without.extend_from_slice(&tried);
        if without.len() == tried.len() {
            return self.reserve(Leg::Decode, &self.model.decode, &request.features(), &tried);
        }
        let reserve =
            |tried: &[Arc<Engine>]| self.reserve(Leg::Decode, &self.model.decode, &request.features(), tried);
        another_first(&[&without, &tried], reserve)
    }

    /// Reserves a prefill engine that is not in `tried`; `None` if the decode engine computes the whole prompt.
    ///
    /// # Errors
    /// [`SimReserveError`].
    pub fn reserve_prefill(
        &self,
        request: &SimRequest,
        decode: &SimReservation,
        tried: &[usize],
    ) -> Result<Option<SimReservation>, SimReserveError> {
        let mut features = request.features();
        decode.reserved.require_partner(&mut features);
        let inputs = DisaggregationInputs::new(&self.model, &features, decode.reserved.cached);
        if !disaggregation::decide(&self.model.disaggregate, &inputs).is_remote() {
            return Ok(None);
        }
        let mut others = self.engines_of(tried);
        others.push(Arc::clone(decode.reserved.engine()));
        self.reserve(Leg::Prefill, &self.model.prefill, &features, &others).map(Some)
    }

    fn reserve(
        &self,
        leg: Leg,
        pool: &Pool,
        features: &RoutingFeatures<'_>,
        tried: &[Arc<Engine>],
    ) -> Result<SimReservation, SimReserveError> {
        let explained = self.generation.config.explain.requests;
        let detail = if explained > 0 { Detail::All } else { Detail::None };
        let (reserved, decision) = pool.reserve(features, tried, CapacityRule::Needed, detail);
        let reserved = reserved.map_err(|unavailable| match unavailable {
            Unavailable::Full => SimReserveError::Full,
            Unavailable::NoEngine => SimReserveError::NoEngine,
        })?;
        if let Some(decision) = decision {
            let mut decisions = self.decisions.lock().unwrap_or_else(PoisonError::into_inner);
            if decisions.len() >= explained * Leg::BOTH.len() {
                decisions.pop_front();
            }
            decisions.push_back(decision);
        }
        let engine = self.numbers[&reserved.engine().id()];
        Ok(SimReservation { leg, engine, cached_chunks: reserved.cached.chunks, reserved })
    }

    fn engines_of(&self, numbers: &[usize]) -> Vec<Arc<Engine>> {
        numbers.iter().map(|&number| Arc::clone(&self.engines[number])).collect()
    }

    /// Records that no connection to an engine could be made.
    pub fn fail_connection(&self, engine: usize) {
        self.engines[engine].failed(Leg::Decode, FailureKind::Unreachable);
    }

    /// Ends an engine's cool-down with a successful health check.
    pub fn recover(&self, engine: usize) {
        self.engines[engine].update_health(|health, now, terms| {
            let later = now.after(Duration::from_millis(3_600_000));
            health.tick(later, || 1.0, terms);
            health.record_probe(crate::engines::probe::ProbeResult::Answered(true), later, terms);
        });
    }

    /// Stores an engine's reported load: its running and waiting requests.
    pub fn report_load(&self, engine: usize, running: u32, waiting: u32) {
        let engine = &self.engines[engine];
        let load = EngineLoad { running, waiting, kv_usage: 0.0, at: Instant::now() };
        engine.set_reading(LoadReading::new(load, [engine.own_requests(); 2]));
    }

    /// Requests of this router at each engine.
    #[must_use]
    pub fn loads(&self) -> Vec<usize> {
        self.engines.iter().map(|engine| engine.load(None)).collect()
    }

    /// Number of known engines.
    #[must_use]
    pub fn engines(&self) -> usize {
        self.fleet.engines().len()
    }
}

impl SimRequest {
    fn features(&self) -> RoutingFeatures<'_> {
        RoutingFeatures {
            session: self.session,
            prefix: &self.prefix,
            tokens: self.tokens,
            chunk_tokens: self.chunk_tokens,
            ..RoutingFeatures::default()
        }
    }
}

impl SimReservation {
    /// Records that the head of the engine's reply arrived after this time.
    pub fn respond(&self, after: Duration) {
        self.reserved.engine().responded(self.leg, after);
    }

    /// Records that the engine completed its reply.
    pub fn complete(self) {
        self.reserved.engine().completed(self.leg);
    }
}

/// Runs a function without the log lines about engines.
pub fn without_logs<T>(run: impl FnOnce() -> T) -> T {
    tracing::subscriber::with_default(tracing::subscriber::NoSubscriber::default(), run)
}
