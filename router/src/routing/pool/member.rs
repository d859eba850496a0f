//! An engine's place in a pool, and whether it can be chosen.

use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::config::{EngineConfig, PoolConfig};
use crate::engines::caches::kv_events::Source;
use crate::engines::health::Standing;
use crate::engines::http::{Engine, InFlight, Manner};
use crate::message::features::Wanted;
use crate::metrics::Leg;
use crate::routing::policy::Candidate;

/// The time of a choice, which only reported loads are compared with.
pub(super) type Now = LazyCell<Instant>;

/// How one choice looks at engines.
pub(super) struct Look<'a> {
    pub tried: &'a [Arc<Engine>],
    pub leg: Leg,
    /// So few are left that health is looked at no more.
    pub panic: bool,
    pub room: Room,
    pub now: &'a Now,
}

/// Whether an engine must have room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    Needed,
    /// For what takes no place: it is answered at once.
    Ignored,
}

/// An engine's place in a pool.
pub(crate) struct Member {
    pub engine: Arc<Engine>,
    /// Its data-parallel rank, where the engine has several.
    pub rank: Option<u16>,
    /// Its share of the work against the others'.
    pub weight: u32,
    /// Requests of this router that it takes at once.
    pub max_in_flight: usize,
    /// Requests waiting in it, and share of its KV cache in use, from which on it is full, as it says itself.
    max_waiting: Option<u32>,
    max_kv_usage: Option<f32>,
    /// A hash of its address, the same in every router.
    key: u64,
    /// A hash of its values of the labels that pairs should share; none if it lacks one.
    pair: Option<u64>,
    /// It has the labels that the pool prefers.
    preferred: bool,
    /// Where it tells of its cache.
    pub events: Option<Source>,
}

/// Whether an engine can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    Ready,
    /// Only if no other is left.
    Resting,
    Full,
    Tried,
    /// Not at all: it answers nothing.
    Silent,
    /// Not at all: it is being emptied.
    Draining,
}

impl Member {
    /// `pair_by` are the names of the labels that pairs should share.
    pub(crate) fn new(
        config: &EngineConfig,
        engine: Arc<Engine>,
        pool: &PoolConfig,
        pair_by: &[String],
    ) -> Self {
        let key = xxh3_64(config.url.authority().as_bytes());
        let most = config.max_in_flight.or(pool.capacity.max_in_flight);
        Self {
            weight: config.weight,
            max_in_flight: most.unwrap_or(usize::MAX),
            key,
            max_waiting: pool.capacity.max_waiting,
            max_kv_usage: pool.capacity.max_kv_usage,
            pair: pair_of(&config.labels, pair_by),
            events: config
                .kv_events
                .as_ref()
                .or(pool.kv_events.as_ref())
                .map(|events| Source::new(&config.url, engine.id(), events)),
            preferred: !pool.prefer.is_empty() && has(&config.labels, &pool.prefer),
            rank: None,
            engine,
        }
    }

    /// Its values of the labels that its partner should share.
    pub(crate) fn pair(&self) -> Option<u64> {
        self.pair
    }

    /// Whether it has the labels that the pool prefers.
    pub(super) fn is_preferred(&self) -> bool {
        self.preferred
    }

    /// One rank of its engine.
    pub(crate) fn at_rank(self, rank: u16) -> Self {
        let key = xxh3_64(format!("{}#{rank}", self.engine.authority()).as_bytes());
        Self { rank: Some(rank), key, ..self }
    }

    /// Requests of this router there.
    pub(super) fn load(&self) -> usize {
        self.engine.load(self.rank)
    }

    /// Under which number its cache is remembered.
    pub(super) fn holder(&self) -> u32 {
        self.engine.holder(self.rank)
    }

    /// The rank whose requests make a difference to it; none: those of all of them.
    pub(super) fn looks_at(&self) -> Option<u16> {
        // An engine says how many wait in all of its ranks together.
        self.rank.filter(|_| self.max_waiting.is_none())
    }

    /// Requests there: this router's, or, where engines say what they have, everybody's. Of a rank, this router's: an engine says
    /// what all of them have together.
    fn requests(&self, now: &Now) -> u32 {
        let ours = u32::try_from(self.load()).unwrap_or(u32::MAX);
        if self.rank.is_some() {
            return ours;
        }
        self.engine.reading(|| **now).map_or(ours, |reading| reading.requests(ours))
    }

    pub(super) fn fit(&self, look: &Look<'_>) -> Fit {
        let health = self.engine.health();
        let has_room = || self.load() < self.max_in_flight && !self.says_it_is_full(look.now);
        if look.tried.iter().any(|t| Arc::ptr_eq(t, &self.engine)) {
            return Fit::Tried;
        }
        match health.standing(look.leg) {
            Standing::Silent => return Fit::Silent,
            Standing::Draining => return Fit::Draining,
            Standing::Usable | Standing::Trial | Standing::Out => {}
        }
        if look.room == Room::Needed && !has_room() {
            Fit::Full
        } else if health.takes(look.leg) || look.panic {
            Fit::Ready
        } else {
            Fit::Resting
        }
    }

    /// Whether that follows from its own metrics, where somebody asks what they say.
    fn says_it_is_full(&self, now: &Now) -> bool {
        // While it has a request of ours, its end is what those who wait are told of.
        if (self.max_waiting.is_none() && self.max_kv_usage.is_none()) || self.load() == 0 {
            return false;
        }
        self.engine.reading(|| **now).is_some_and(|reading| {
            self.max_waiting.is_some_and(|most| reading.waiting(self.engine.ours()) >= most)
                || self.max_kv_usage.is_some_and(|most| reading.said.kv_usage >= most)
        })
    }

    pub(super) fn begin(&self, look: &Look<'_>, manner: Manner, tokens: u64) -> Option<InFlight> {
        let most = match look.room {
            Room::Needed => self.max_in_flight,
            Room::Ignored => usize::MAX,
        };
        self.engine.begin(look.leg, self.rank, tokens, most, manner)
    }

    pub(super) fn candidate(&self, index: usize, now: &Now) -> Candidate {
        Candidate {
            index,
            holder: self.holder(),
            key: self.key,
            requests: self.requests(now),
            tokens: self.engine.tokens(self.rank),
            weight: self.weight,
        }
    }

    /// How well its labels suit: the partner's labels first, then those that the pool prefers.
    pub(super) fn suits(&self, wanted: &Wanted<'_>) -> u8 {
        let paired = wanted.pair.is_some() && wanted.pair == self.pair;
        u8::from(paired) << 1 | u8::from(self.preferred)
    }
}

/// Whether all of `wanted` are among an engine's labels.
pub(crate) fn has(labels: &BTreeMap<String, String>, wanted: &BTreeMap<String, String>) -> bool {
    wanted.iter().all(|(name, value)| labels.get(name) == Some(value))
}

fn pair_of(labels: &BTreeMap<String, String>, names: &[String]) -> Option<u64> {
    let mut hash = Xxh3::new();
    for name in names {
        let value = labels.get(name)?;
        hash.update(&(value.len() as u64).to_le_bytes());
        hash.update(value.as_bytes());
    }
    (!names.is_empty()).then(|| hash.digest())
}
