//! Which engines serve which model.

use std::collections::HashMap;
use std::sync::Arc;

use baton_openai::ApiError;

use crate::config::{
    DisaggregateConfig, EngineConfig, Fallback, FeaturesConfig, ModelConfig, PoolConfig, RouterConfig,
};
use crate::discovery::membership::Members;
use crate::features::Needs;
use crate::fleet::Fleet;
use crate::metrics::{Leg, ModelMetrics};
use crate::pool::{Member, Pool, has};
use crate::upstream::Terms;

/// One model.
pub(crate) struct Model {
    /// The name that engines know.
    pub name: String,
    pub prefill: Pool,
    pub decode: Pool,
    pub fallback: Fallback,
    pub disaggregate: DisaggregateConfig,
    pub features: FeaturesConfig,
    /// What has to be looked at in its requests.
    pub needs: Needs,
    pub metrics: ModelMetrics,
}

/// Every model, by every name.
pub(crate) struct Models {
    list: Vec<Arc<Model>>,
    by_name: HashMap<String, Arc<Model>>,
}

impl Model {
    fn new(
        config: &ModelConfig,
        members: &Members,
        terms: &Terms,
        fleet: &Fleet,
        previous: Option<&Arc<Self>>,
    ) -> Self {
        let pool = |leg, pool: &PoolConfig, learns| {
            let engines = members.of(&config.name, leg);
            let engines = engines.iter().filter(|engine| has(&engine.labels, &pool.select));
            let member = |engine: &EngineConfig| {
                let known = fleet.engine(&engine.url, terms);
                Arc::new(Member::new(engine, known, pool, &config.pair_by))
            };
            let new = Pool::new(engines.map(member).collect(), &pool.policy, &fleet.memory, learns);
            if let Some(previous) = previous {
                new.go_on_from(previous.pool(leg));
            }
            new
        };
        Self {
            name: config.name.clone(),
            prefill: pool(Leg::Prefill, &config.prefill, false),
            // What a decode engine holds already need not be prefilled elsewhere.
            decode: pool(Leg::Decode, &config.decode, config.disaggregate.asks_what_is_cached()),
            fallback: config.fallback,
            disaggregate: config.disaggregate.clone(),
            features: config.features.clone(),
            needs: Needs::of(config),
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
}

impl Models {
    /// What policies remember of a pool is taken over from the `previous` version.
    pub(crate) fn new(
        config: &RouterConfig,
        members: &Members,
        terms: &Terms,
        fleet: &Fleet,
        previous: Option<&Self>,
    ) -> Self {
        let (mut list, mut by_name) = (Vec::new(), HashMap::new());
        for model in &config.models {
            let served = Arc::new(Model::new(
                model,
                members,
                terms,
                fleet,
                previous.and_then(|p| p.by_name.get(&model.name)),
            ));
            for name in std::iter::once(&model.name).chain(&model.aliases) {
                by_name.insert(name.clone(), Arc::clone(&served));
            }
            list.push(served);
        }
        Self { list, by_name }
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

    pub(crate) fn list(&self) -> &[Arc<Model>] {
        &self.list
    }
}
