//! Which engines serve which model.

use std::collections::HashMap;
use std::sync::Arc;

use baton_openai::ApiError;

use crate::config::{EngineUrl, Fallback, PoolConfig, RouterConfig};
use crate::policy::{self, Candidate, Policy};
use crate::upstream::{Engine, Terms};

/// One model.
pub(crate) struct Model {
    /// The name that engines know.
    pub name: String,
    pub prefill: Pool,
    pub decode: Pool,
    pub fallback: Fallback,
}

/// Engines that can stand in for each other.
pub(crate) struct Pool {
    engines: Vec<Arc<Engine>>,
    policy: Box<dyn Policy>,
}

/// Every model, by every name.
pub(crate) struct Models {
    list: Vec<Arc<Model>>,
    by_name: HashMap<String, Arc<Model>>,
    engines: Vec<Arc<Engine>>,
}

impl Models {
    /// An engine that is listed twice is one engine: its load and its connections are counted together.
    pub(crate) fn new(config: &RouterConfig, terms: &Terms) -> Self {
        let mut engines: HashMap<EngineUrl, Arc<Engine>> = HashMap::new();
        let mut pool = |config: &PoolConfig| Pool {
            engines: config
                .engines
                .iter()
                .map(|e| {
                    let new = || Arc::new(Engine::new(e.url.clone(), terms));
                    Arc::clone(engines.entry(e.url.clone()).or_insert_with(new))
                })
                .collect(),
            policy: policy::of_kind(config.policy),
        };
        let (mut list, mut by_name) = (Vec::new(), HashMap::new());
        for model in &config.models {
            let served = Arc::new(Model {
                name: model.name.clone(),
                prefill: pool(&model.prefill),
                decode: pool(&model.decode),
                fallback: model.fallback,
            });
            for name in std::iter::once(&model.name).chain(&model.aliases) {
                by_name.insert(name.clone(), Arc::clone(&served));
            }
            list.push(served);
        }
        Self { list, by_name, engines: engines.into_values().collect() }
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

    /// Every engine once.
    pub(crate) fn engines(&self) -> &[Arc<Engine>] {
        &self.engines
    }
}

impl Pool {
    pub(crate) fn is_empty(&self) -> bool {
        self.engines.is_empty()
    }

    /// An engine that is not among those `tried`.
    pub(crate) fn choose(&self, tried: &[Arc<Engine>]) -> Option<Arc<Engine>> {
        let untried = |engine: &Arc<Engine>| !tried.iter().any(|t| Arc::ptr_eq(t, engine));
        let candidates_that = |fit: &dyn Fn(&Arc<Engine>) -> bool| -> Vec<_> {
            let fitting =
                self.engines.iter().enumerate().filter(|(_, engine)| untried(engine) && fit(engine));
            fitting.map(|(index, engine)| Candidate { index, in_flight: engine.load() }).collect()
        };
        let mut candidates = candidates_that(&|engine| !engine.is_resting());
        if candidates.is_empty() {
            candidates = candidates_that(&|_| true);
        }
        self.policy.choose(&candidates).map(|index| Arc::clone(&self.engines[index]))
    }
}
