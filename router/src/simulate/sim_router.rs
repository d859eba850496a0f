//! What a simulated fleet drives (`baton bench fleet`): this router's own models, pools, policies, health and table of
//! requests, built from a configuration as the router builds them, without a listener, a socket or a task.
//!
//! Not an interface. Whoever drives it plays clients and engines, and moves the requests' exchanges itself.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::{RequestId, Time};

use crate::admission::{Admission, Scarce};
use crate::auth::Tenants;
use crate::config::RouterConfig;
use crate::engines::endpoints::Answers;
use crate::engines::fleet::Fleet;
use crate::engines::health::{EngineLoad, Reading, Sign};
use crate::engines::http::Engine;
use crate::engines::membership::Members;
use crate::message::features::Wanted;
use crate::metrics::{Leg, Metrics};
use crate::observe::in_flight::InFlightTable;
use crate::observe::observers::Observers;
use crate::routing::disaggregation::{self, Facts};
use crate::routing::explain::Sight;
use crate::routing::models::{Ground, Model};
use crate::routing::policy::Draw;
use crate::routing::pool::{Pool, Reserved, Room, Tell};
use crate::state::generation::{Generation, GenerationError, Outside};

/// One router, without what makes it one process among others.
pub struct Rehearsal {
    fleet: Fleet,
    _admission: Admission,
    generation: Generation,
    model: Arc<Model>,
    /// By the numbers that whoever drives this gave them.
    engines: Vec<Arc<Engine>>,
    numbers: HashMap<u32, usize>,
    in_flight: InFlightTable,
    /// What the latest choices were made from, as many as the configuration has kept.
    sights: Mutex<VecDeque<Sight>>,
}

/// What a request says of itself, as features of it: hashes, and how long it is.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// Of the session that it names.
    pub session: Option<u64>,
    /// Of the prompt's beginning, chunk by chunk.
    pub prefix: Vec<u64>,
    /// Tokens of the prompt.
    pub tokens: u64,
    /// Tokens of one chunk.
    pub chunk_tokens: f64,
}

/// A place at an engine, taken until this is dropped.
pub struct Place {
    reserved: Reserved,
    leg: Leg,
    /// The engine's number.
    pub engine: usize,
    /// Chunks of the prompt that it was taken to hold already.
    pub held_chunks: usize,
}

/// Why there is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unplaced {
    /// All that could be asked are full.
    Full,
    /// Nobody could be asked.
    Nobody,
}

/// A request in the router's table of those in flight.
pub struct Entered(u64);

/// What is drawn on this thread from now on follows from `seed`.
pub fn reseed(seed: u64) {
    Draw::reseed(seed);
}

impl Rehearsal {
    /// A router with the only model of `config`, whose engines have the `names` (`HOST:PORT`) in the order of their
    /// numbers.
    ///
    /// # Errors
    /// [`GenerationError`] when the configuration cannot be put into effect.
    ///
    /// # Panics
    /// When the configuration has several models, or no engine of some name.
    pub fn new(config: RouterConfig, names: &[String]) -> Result<Self, GenerationError> {
        let metrics = Arc::new(Metrics::new());
        let fleet = Fleet::new(Arc::clone(&metrics));
        let admission = Admission::new(Arc::clone(&fleet.freed), Arc::clone(&metrics.admission));
        let tenants = Arc::new(Tenants::new(Arc::clone(&metrics.tenants)));
        let members = Members::now(&config, &Answers::default(), &Members::default());
        let ground = Ground { fleet: &fleet, admission: &admission };
        let outside = Outside::read(&config, None, &fleet, &tenants, Observers::default())?;
        let generation = Generation::build((1, 0), config, members, None, &ground, outside)?;
        let model = Arc::clone(generation.models.named(None).expect("one model"));
        let by_name: HashMap<String, Arc<Engine>> =
            fleet.engines().into_iter().map(|engine| (engine.authority().to_owned(), engine)).collect();
        let engine = |name: &String| Arc::clone(by_name.get(name).expect("an engine of that name"));
        let engines: Vec<_> = names.iter().map(engine).collect();
        let numbers = engines.iter().enumerate().map(|(number, engine)| (engine.id(), number)).collect();
        let in_flight = InFlightTable::default();
        let sights = Mutex::default();
        Ok(Self { fleet, _admission: admission, generation, model, engines, numbers, in_flight, sights })
    }

    /// A request is in flight from now on.
    pub fn enter(&self, id: &RequestId, now: Time) -> Entered {
        let (number, entry) = self.in_flight.enter(id.clone(), now);
        // The first to be told is also the last: whoever drives this keeps the exchange.
        drop(entry.model.set(Arc::clone(&self.model)));
        Entered(number)
    }

    /// It is over.
    pub fn leave(&self, entered: Entered) {
        self.in_flight.leave(entered.0);
    }

    /// Sets a decode engine aside that is none of those `tried`.
    ///
    /// # Errors
    /// [`Unplaced`].
    pub fn decode(&self, asked: &Asked, tried: &[usize]) -> Result<Place, Unplaced> {
        self.place(Leg::Decode, &self.model.decode, &asked.wanted(), &self.known(tried))
    }

    /// Whether a prefill engine is asked, and which one, none of those `tried`; `None`: the decode engine computes
    /// everything.
    ///
    /// # Errors
    /// [`Unplaced`].
    pub fn prefill(&self, asked: &Asked, decode: &Place, tried: &[usize]) -> Result<Option<Place>, Unplaced> {
        let mut wanted = asked.wanted();
        let facts = Facts::new(&self.model, &wanted, decode.reserved.holding);
        if !disaggregation::decide(&self.model.disaggregate, &facts).is_remote() {
            return Ok(None);
        }
        wanted.pair = decode.reserved.pair();
        let mut others = self.known(tried);
        others.push(Arc::clone(decode.reserved.engine()));
        self.place(Leg::Prefill, &self.model.prefill, &wanted, &others).map(Some)
    }

    fn place(
        &self,
        leg: Leg,
        pool: &Pool,
        wanted: &Wanted<'_>,
        tried: &[Arc<Engine>],
    ) -> Result<Place, Unplaced> {
        let explained = self.generation.config.explain.requests;
        let tell = if explained > 0 { Tell::Everything } else { Tell::Nothing };
        let (reserved, sight) = pool.reserve(wanted, tried, Room::Needed, tell);
        let reserved = reserved.map_err(|scarce| match scarce {
            Scarce::Full => Unplaced::Full,
            Scarce::NoEngine => Unplaced::Nobody,
        })?;
        if let Some(sight) = sight {
            let mut sights = self.sights.lock().unwrap_or_else(PoisonError::into_inner);
            if sights.len() >= explained * Leg::BOTH.len() {
                sights.pop_front();
            }
            sights.push_back(sight);
        }
        let engine = self.numbers[&reserved.engine().id()];
        Ok(Place { leg, engine, held_chunks: reserved.holding.chunks, reserved })
    }

    fn known(&self, numbers: &[usize]) -> Vec<Arc<Engine>> {
        numbers.iter().map(|&number| Arc::clone(&self.engines[number])).collect()
    }

    /// A connection to an engine could not be made.
    pub fn unreachable(&self, engine: usize) {
        self.engines[engine].failed(Leg::Decode, Sign::Unreachable);
    }

    /// Its cool-down is over, and it answers when it is asked for its health.
    pub fn answers_again(&self, engine: usize) {
        self.engines[engine].judge(|health, now, terms| {
            let later = now.after(Duration::from_millis(3_600_000));
            health.tick(later, || 1.0, terms);
            health.told(crate::engines::liveness::Pulse::Answered(true), later, terms);
        });
    }

    /// An engine says how many requests it works on, and how many wait in it.
    pub fn told(&self, engine: usize, running: u32, waiting: u32) {
        let engine = &self.engines[engine];
        let load = EngineLoad { running, waiting, kv_usage: 0.0, at: Instant::now() };
        engine.set_reading(Reading::new(load, [engine.ours(); 2]));
    }

    /// Requests of this router at each engine.
    #[must_use]
    pub fn loads(&self) -> Vec<usize> {
        self.engines.iter().map(|engine| engine.load(None)).collect()
    }

    /// Engines that the router knows.
    #[must_use]
    pub fn engines(&self) -> usize {
        self.fleet.engines().len()
    }
}

impl Asked {
    fn wanted(&self) -> Wanted<'_> {
        Wanted {
            session: self.session,
            prefix: &self.prefix,
            tokens: self.tokens,
            chunk_tokens: self.chunk_tokens,
            ..Wanted::default()
        }
    }
}

impl Place {
    /// The head of the engine's answer came, so long after it was asked.
    pub fn spoke(&self, after: Duration) {
        self.reserved.engine().spoke(self.leg, after);
    }

    /// The engine's answer was good, to its end.
    pub fn served(self) {
        self.reserved.engine().served(self.leg);
    }
}

/// Runs something without the log lines of what happens to engines in it.
pub fn silently<T>(run: impl FnOnce() -> T) -> T {
    tracing::subscriber::with_default(tracing::subscriber::NoSubscriber::default(), run)
}
