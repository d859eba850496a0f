//! Which engines serve which model, and the one place where one of them is chosen.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use baton_openai::ApiError;

use crate::admission::{Admission, ModelQueue, Scarce};
use crate::config::{Fallback, PoolConfig, RouterConfig};
use crate::fleet::Fleet;
use crate::metrics::ModelMetrics;
use crate::policy::{self, Candidate, Policy, Wanted};
use crate::upstream::{Engine, EngineTerms, InFlight};

/// One model.
pub(crate) struct Model {
    /// The name that engines know.
    pub name: String,
    pub prefill: Pool,
    pub decode: Pool,
    pub fallback: Fallback,
    /// Where requests wait for a decode engine.
    pub queue: Arc<ModelQueue>,
    pub metrics: ModelMetrics,
}

/// Engines that can stand in for each other.
pub(crate) struct Pool {
    members: Vec<Arc<Member>>,
    policy: Box<dyn Policy>,
}

/// An engine's place in a pool.
pub(crate) struct Member {
    pub engine: Arc<Engine>,
    /// Its share of the work against the others'.
    pub weight: u32,
    /// Requests of this router that it takes at once.
    pub max_in_flight: usize,
    #[expect(dead_code, reason = "labels are for policies")]
    pub labels: BTreeMap<String, String>,
}

/// An engine that was chosen; the request counts as in flight there until this is dropped.
pub(crate) struct Reserved {
    pub member: Arc<Member>,
    pub load: InFlight,
}

/// Every model, by every name.
pub(crate) struct Models {
    list: Vec<Arc<Model>>,
    by_name: HashMap<String, Arc<Model>>,
}

impl Models {
    pub(crate) fn new(
        config: &RouterConfig,
        terms: &EngineTerms,
        fleet: &Fleet,
        admission: &Admission,
    ) -> Self {
        let pool = |config: &PoolConfig| Pool {
            members: config
                .engines
                .iter()
                .map(|e| {
                    let engine = fleet.engine(&e.url, terms.of(&e.url));
                    Arc::new(Member {
                        engine,
                        weight: e.weight,
                        max_in_flight: e.max_in_flight.unwrap_or(usize::MAX),
                        labels: e.labels.clone(),
                    })
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
                queue: admission.queue(&model.name),
                metrics: fleet.metrics().model(&model.name),
            });
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

impl Pool {
    /// Its engines.
    pub(crate) fn members(&self) -> &[Arc<Member>] {
        &self.members
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Chooses an engine that has room and is not among those `tried`, and counts the request in flight there.
    pub(crate) fn reserve(&self, wanted: &Wanted<'_>, tried: &[Arc<Engine>]) -> Option<Reserved> {
        let untried = |member: &Member| !tried.iter().any(|t| Arc::ptr_eq(t, &member.engine));
        let candidates_that = |fit: &dyn Fn(&Member) -> bool| -> Vec<_> {
            let fitting =
                self.members.iter().enumerate().filter(|(_, member)| untried(member) && fit(member));
            fitting
                .map(|(index, member)| Candidate {
                    index,
                    in_flight: member.engine.load(),
                    weight: member.weight,
                })
                .collect()
        };
        loop {
            let has_room = |member: &Member| member.engine.load() < member.max_in_flight;
            let mut candidates = candidates_that(&|member| has_room(member) && !member.engine.is_resting());
            if candidates.is_empty() {
                candidates = candidates_that(&has_room);
            }
            let member = Arc::clone(&self.members[self.policy.choose(wanted, &candidates)?]);
            // Somebody else may have taken its last place since; then the choice is made again.
            if let Some(load) = member.engine.begin(member.max_in_flight) {
                return Some(Reserved { member, load });
            }
        }
    }

    /// Why [`Pool::reserve`] had nothing to give to a request that has tried none.
    pub(crate) fn scarcity(&self) -> Scarce {
        let full = |member: &Arc<Member>| member.engine.load() >= member.max_in_flight;
        if self.members.iter().any(full) { Scarce::Full } else { Scarce::Nobody }
    }
}

impl Reserved {
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.member.engine
    }
}
