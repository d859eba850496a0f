//! An engine as member of a pool, and whether it can be chosen.

use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::config::{EngineConfig, PoolConfig};
use crate::engines::caches::kv_events::EventSource;
use crate::engines::health::Standing;
use crate::engines::http::{Engine, EngineRequestGuard, TrialRule};
use crate::message::features::RoutingFeatures;
use crate::metrics::Leg;
use crate::routing::policy::Candidate;

/// The time of a choice, read only if a reported load is compared with it.
pub(super) type LazyNow = LazyCell<Instant>;

/// The parameters of one choice.
pub(super) struct ChoiceContext<'a> {
    pub tried: &'a [Arc<Engine>],
    pub leg: Leg,
    /// So few engines are in use that their health is ignored.
    pub panic: bool,
    pub capacity: CapacityRule,
    /// The required [`PoolMember::compatibility`]; `None`: any.
    pub compatibility: Option<u64>,
    pub now: &'a LazyNow,
}

/// Whether an engine must have capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CapacityRule {
    Needed,
    /// For a request that needs no capacity because it is answered at once.
    Ignored,
}

/// An engine, or one of its ranks, as member of a pool.
pub(crate) struct PoolMember {
    pub engine: Arc<Engine>,
    /// Its data-parallel rank, where the engine has several.
    pub rank: Option<u16>,
    /// Its relative share of the work.
    pub weight: u32,
    /// Limit on this router's requests there.
    pub max_in_flight: usize,
    /// Thresholds of its own metrics at which it counts as full: waiting requests, and used share of its KV cache.
    max_waiting: Option<u32>,
    max_kv_usage: Option<f32>,
    /// A hash of its address, equal in every router.
    key: u64,
    /// A hash of its values of the pair labels; `None` if it lacks one of them.
    pair: Option<u64>,
    /// A hash of its value of the compatibility label, or of the lack of that label; `None` if the model has no such
    /// label.
    compatibility: Option<u64>,
    /// Whether it has the labels that the pool prefers.
    preferred: bool,
    /// The publisher of its KV events.
    pub events: Option<EventSource>,
}

/// Whether an engine can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Eligibility {
    Ready,
    /// Only if no other engine is left.
    Ejected,
    Full,
    Tried,
    /// Never: it does not respond.
    Unresponsive,
    /// Never: an operator or the engine drains it.
    Draining,
    /// Never: its value of the model's compatibility label differs from that of the other leg's engine.
    Incompatible,
}

impl PoolMember {
    /// `pair_by`: the names of the labels that the engines of a pair should share. `compatibility`: the name of the
    /// label that they must share. `rank`: one of several ranks of the engine.
    pub(crate) fn new(
        config: &EngineConfig,
        engine: Arc<Engine>,
        rank: Option<u16>,
        pool: &PoolConfig,
        pair_by: &[String],
        compatibility: Option<&str>,
    ) -> Self {
        let authority = config.url.authority();
        let key = rank.map_or_else(
            || xxh3_64(authority.as_bytes()),
            |rank| xxh3_64(format!("{authority}#{rank}").as_bytes()),
        );
        let most = config.max_in_flight.or(pool.capacity.max_in_flight);
        Self {
            weight: config.weight,
            max_in_flight: most.unwrap_or(usize::MAX),
            key,
            max_waiting: pool.capacity.max_waiting,
            max_kv_usage: pool.capacity.max_kv_usage,
            pair: pair_of(&config.labels, pair_by),
            compatibility: compatibility.map(|name| compatibility_of(&config.labels, name)),
            events: config
                .kv_events
                .as_ref()
                .or(pool.kv_events.as_ref())
                .map(|events| EventSource::new(&config.url, &engine, rank, events)),
            preferred: !pool.prefer.is_empty() && has_labels(&config.labels, &pool.prefer),
            rank,
            engine,
        }
    }

    /// A hash of the labels that the engine of the other leg should share.
    pub(crate) fn pair(&self) -> Option<u64> {
        self.pair
    }

    /// Equal at engines whose blocks each other can use; `None` if the model has no compatibility label.
    pub(crate) fn compatibility(&self) -> Option<u64> {
        self.compatibility
    }

    /// As [`EngineReservation::require_partner`](super::EngineReservation::require_partner).
    pub(crate) fn require_partner(&self, features: &mut RoutingFeatures<'_>) {
        features.pair = self.pair;
        features.compatibility = self.compatibility;
    }

    /// Whether the other leg's engine has the same value of the compatibility label.
    pub(super) fn is_compatible(&self, required: Option<u64>) -> bool {
        required.is_none_or(|required| self.compatibility == Some(required))
    }

    /// Whether it has the labels that the pool prefers.
    pub(super) fn is_preferred(&self) -> bool {
        self.preferred
    }

    /// This router's requests there.
    pub(super) fn load(&self) -> usize {
        self.engine.load(self.rank)
    }

    /// The id of its cache in [`KnownCaches`](crate::engines::caches::KnownCaches).
    pub(super) fn cache_id(&self) -> u32 {
        self.engine.cache_id(self.rank)
    }

    /// The rank whose requests affect its load; `None`: all ranks.
    pub(super) fn subscribed_rank(&self) -> Option<u16> {
        // An engine reports its waiting requests for all ranks together.
        self.rank.filter(|_| self.max_waiting.is_none())
    }

    /// Requests there. Engines report the requests of all routers, but only for all ranks together, so for one rank
    /// this router's requests count.
    fn requests(&self, now: &LazyNow) -> u32 {
        let own = u32::try_from(self.load()).unwrap_or(u32::MAX);
        if self.rank.is_some() {
            return own;
        }
        self.engine.reading(|| **now).map_or(own, |reading| reading.requests(own))
    }

    pub(super) fn eligibility(&self, context: &ChoiceContext<'_>) -> Eligibility {
        if !self.is_compatible(context.compatibility) {
            return Eligibility::Incompatible;
        }
        let health = self.engine.health();
        let has_room = || self.load() < self.max_in_flight && !self.reports_full(context.now);
        if context.tried.iter().any(|t| Arc::ptr_eq(t, &self.engine)) {
            return Eligibility::Tried;
        }
        match health.standing(context.leg) {
            Standing::Unresponsive => return Eligibility::Unresponsive,
            Standing::Draining => return Eligibility::Draining,
            Standing::Usable | Standing::Trial | Standing::Ejected => {}
        }
        if context.capacity == CapacityRule::Needed && !has_room() {
            Eligibility::Full
        } else if health.accepts(context.leg) || context.panic {
            Eligibility::Ready
        } else {
            Eligibility::Ejected
        }
    }

    /// Whether its own metrics exceed a threshold of the pool.
    fn reports_full(&self, now: &LazyNow) -> bool {
        // Only the end of one of this router's requests wakes the queue, so without such a request the engine never
        // counts as full.
        if (self.max_waiting.is_none() && self.max_kv_usage.is_none()) || self.load() == 0 {
            return false;
        }
        self.engine.reading(|| **now).is_some_and(|reading| {
            self.max_waiting.is_some_and(|most| reading.waiting(self.engine.own_requests()) >= most)
                || self.max_kv_usage.is_some_and(|most| reading.reported.kv_usage >= most)
        })
    }

    pub(super) fn begin(
        &self,
        context: &ChoiceContext<'_>,
        rule: TrialRule,
        tokens: u64,
    ) -> Option<EngineRequestGuard> {
        let most = match context.capacity {
            CapacityRule::Needed => self.max_in_flight,
            CapacityRule::Ignored => usize::MAX,
        };
        self.engine.begin(context.leg, self.rank, tokens, most, rule)
    }

    pub(super) fn candidate(&self, index: usize, now: &LazyNow) -> Candidate {
        Candidate {
            index,
            cache_id: self.cache_id(),
            key: self.key,
            requests: self.requests(now),
            tokens: self.engine.tokens(self.rank),
            weight: self.weight,
        }
    }

    /// How well its labels match: pair labels first, then the labels that the pool prefers.
    pub(super) fn label_score(&self, features: &RoutingFeatures<'_>) -> u8 {
        let paired = features.pair.is_some() && features.pair == self.pair;
        u8::from(paired) << 1 | u8::from(self.preferred)
    }
}

/// Whether an engine's labels contain all of `required`.
pub(crate) fn has_labels(labels: &BTreeMap<String, String>, required: &BTreeMap<String, String>) -> bool {
    required.iter().all(|(name, value)| labels.get(name) == Some(value))
}

/// Engines without the label have one value in common.
fn compatibility_of(labels: &BTreeMap<String, String>, name: &str) -> u64 {
    labels.get(name).map_or(0, |value| xxh3_64(value.as_bytes()) | 1)
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
