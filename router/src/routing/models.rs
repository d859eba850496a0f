//! Which engines serve which model.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use baton_openai::ApiError;

use crate::admission::{Admission, ModelQueue};
use crate::config::{
    Bounds, DisaggregateConfig, EngineConfig, EngineUrl, Fallback, FeaturesConfig, ModelConfig, PoolConfig,
    ReleaseMode, RouterConfig,
};
use crate::engines::caches::kv_events::Source;
use crate::engines::fleet::Fleet;
use crate::engines::http::{EngineTerms, Terms};
use crate::engines::membership::Members;
use crate::message::features::Needs;
use crate::message::rewrite::ModelName;
use crate::metrics::{Leg, ModelMetrics};
use crate::routing::pool::{Member, Pool, has};

/// One model.
pub(crate) struct Model {
    /// The name that engines know.
    pub name: String,
    /// Its other names.
    pub aliases: Vec<String>,
    pub name_in_bodies: ModelName,
    pub prefill: Pool,
    pub decode: Pool,
    pub fallback: Fallback,
    pub early_handoff: bool,
    /// A stream whose decode engine dies is continued by another.
    pub resume: bool,
    /// What its requests may take.
    pub bounds: Bounds,
    pub disaggregate: DisaggregateConfig,
    pub features: FeaturesConfig,
    /// What has to be looked at in its requests.
    pub needs: Needs,
    /// Where requests wait for an engine of each leg.
    pub queues: [Arc<ModelQueue>; 2],
    pub metrics: ModelMetrics,
}

/// How leases are ended at each engine.
type Releases<'a> = HashMap<&'a EngineUrl, ReleaseMode>;

/// An engine has one way, in however many pools it is: what the first pool in which it prefills says, because that is
/// where it lends; otherwise what the first in which it decodes says. Of two that the configuration lists and that
/// contradict each other none is taken: it is refused.
fn releases<'a>(config: &RouterConfig, members: &'a Members) -> Releases<'a> {
    let mut releases = HashMap::new();
    for leg in [Leg::Prefill, Leg::Decode] {
        for engine in config.models.iter().flat_map(|model| members.of(&model.name, leg)) {
            releases.entry(&engine.url).or_insert(engine.release);
        }
    }
    releases
}

/// Every model, by every name.
pub(crate) struct Models {
    list: Vec<Arc<Model>>,
    /// The longest that any model's request may take; `None`: some have no bound.
    longest_request: Option<Duration>,
    by_name: HashMap<String, Arc<Model>>,
}

impl Model {
    fn new(
        config: &ModelConfig,
        all: &RouterConfig,
        members: &Members,
        terms: &EngineTerms,
        releases: &Releases<'_>,
        ground: &Ground<'_>,
        previous: Option<&Arc<Self>>,
    ) -> Self {
        let fleet = ground.fleet;
        let pool = |leg, pool: &PoolConfig, learns| {
            let engines = members.of(&config.name, leg);
            let usable =
                |engine: &&EngineConfig| terms.takes(&engine.url) && has(&engine.labels, &pool.select);
            let engines = engines.iter().filter(usable);
            let ranks = |engine: &EngineConfig| -> Vec<Arc<Member>> {
                // An engine has one state, in however many pools it is.
                let health = all.health.terms(members.drains(&engine.url));
                let release = releases.get(&engine.url).copied().unwrap_or(engine.release);
                let terms = Terms { health, release, ..terms.of(&engine.url).clone() };
                let known = fleet.engine(&engine.url, &terms);
                let member = || Member::new(engine, Arc::clone(&known), pool, &config.pair_by);
                match engine.data_parallel_size {
                    0 | 1 => vec![Arc::new(member())],
                    size => (0..size).map(|rank| Arc::new(member().at_rank(rank))).collect(),
                }
            };
            let ranks = engines.flat_map(ranks).collect();
            let new = Pool::new(ranks, &pool.policy, &fleet.memory, learns).guarded(leg, &all.health);
            let new = new.counted(fleet.metrics(), &config.name);
            if let Some(previous) = previous {
                new.go_on_from(previous.pool(leg));
            }
            new
        };
        Self {
            name: config.name.clone(),
            aliases: config.aliases.clone(),
            name_in_bodies: ModelName::new(&config.name),
            prefill: pool(Leg::Prefill, &config.prefill, false),
            // What a decode engine holds already need not be prefilled elsewhere.
            decode: pool(Leg::Decode, &config.decode, config.disaggregate.asks_what_is_cached()),
            fallback: config.fallback,
            early_handoff: config.early_handoff,
            resume: config.resume && config.fallback == Fallback::Aggregate,
            bounds: all.timeouts.of(&config.timeouts),
            disaggregate: config.disaggregate.clone(),
            features: config.features.clone(),
            needs: Needs::of(config),
            queues: Leg::BOTH.map(|leg| ground.admission.queue(&config.name, leg)),
            metrics: fleet.metrics().model(&config.name),
        }
    }
}

impl Model {
    /// The engines of one leg.
    pub(crate) fn pool(&self, leg: Leg) -> &Pool {
        match leg {
            Leg::Prefill => &self.prefill,
            Leg::Decode => &self.decode,
        }
    }

    /// Where requests wait for an engine of one leg.
    pub(crate) fn queue(&self, leg: Leg) -> &ModelQueue {
        &self.queues[leg as usize]
    }
}

impl Models {
    /// What policies remember of a pool is taken over from the `previous` version.
    pub(crate) fn new(
        config: &RouterConfig,
        members: &Members,
        terms: &EngineTerms,
        ground: &Ground<'_>,
        previous: Option<&Self>,
    ) -> Self {
        let (mut list, mut by_name) = (Vec::<Arc<Model>>::new(), HashMap::new());
        let releases = releases(config, members);
        for model in &config.models {
            let served = Arc::new(Model::new(
                model,
                config,
                members,
                terms,
                &releases,
                ground,
                previous.and_then(|p| p.by_name.get(&model.name)),
            ));
            for name in std::iter::once(&model.name).chain(&model.aliases) {
                by_name.insert(name.clone(), Arc::clone(&served));
            }
            list.push(served);
        }
        let bounds: Option<Vec<Duration>> = list.iter().map(|model| model.bounds.request).collect();
        Self { list, longest_request: bounds.and_then(|bounds| bounds.into_iter().max()), by_name }
    }

    /// The model of that name; without a name the only one there is.
    ///
    /// # Errors
    /// 404, or 400 where a name is needed.
    pub(crate) fn named(&self, name: Option<&str>) -> Result<&Arc<Model>, ApiError> {
        match (name, self.list.as_slice()) {
            (Some(name), _) => self.by_name.get(name).ok_or_else(|| ApiError::model_not_found(name)),
            (None, [only]) => Ok(only),
            (None, _) => Err(ApiError::invalid("model", "`model` is missing, and several models are served")),
        }
    }

    /// Every engine that tells of its cache, and where.
    pub(crate) fn event_sources(&self) -> Vec<Source> {
        let pools = self.list.iter().flat_map(|model| [&model.prefill, &model.decode]);
        pools.flat_map(Pool::members).filter_map(|member| member.events.clone()).collect()
    }

    /// What a request may take whose model is not known yet; `None`: no bound.
    pub(crate) fn longest_request(&self) -> Option<Duration> {
        self.longest_request
    }

    pub(crate) fn list(&self) -> &[Arc<Model>] {
        &self.list
    }
}

/// What outlives every version and is built upon.
pub(crate) struct Ground<'a> {
    pub fleet: &'a Fleet,
    pub admission: &'a Admission,
}
