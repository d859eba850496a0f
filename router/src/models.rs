//! Which engines serve which model, and the one place where one of them is chosen.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use baton_openai::ApiError;

use crate::config::{AllOut, Bounds, EngineConfig, Fallback, PoolConfig, RouterConfig};
use crate::fleet::Fleet;
use crate::health::Standing;
use crate::metrics::{Leg, ModelMetrics};
use crate::policy::{self, Candidate, Policy, Wanted};
use crate::upstream::{Engine, InFlight, Terms};

/// One model.
pub(crate) struct Model {
    /// The name that engines know.
    pub name: String,
    pub prefill: Pool,
    pub decode: Pool,
    pub fallback: Fallback,
    /// A stream whose decode engine dies is continued by another.
    #[allow(dead_code, reason = "streams are resumed in the next step")]
    pub resume: bool,
    /// What its requests may take.
    pub bounds: Bounds,
    pub metrics: ModelMetrics,
}

/// Engines that can stand in for each other.
pub(crate) struct Pool {
    leg: Leg,
    members: Vec<Arc<Member>>,
    policy: Box<dyn Policy>,
    all_out: AllOut,
    panic_percent: usize,
}

/// An engine's place in a pool.
pub(crate) struct Member {
    pub engine: Arc<Engine>,
    /// Its data-parallel rank, where the engine has several.
    pub rank: Option<u16>,
    /// Its share of the work against the others'.
    pub weight: u32,
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
    pub(crate) fn new(config: &RouterConfig, terms: &Terms, fleet: &Fleet) -> Self {
        let pools = config.models.iter().flat_map(|model| [&model.prefill, &model.decode]);
        // An engine has one state, in however many pools it is.
        let drained: HashSet<_> =
            pools.flat_map(|pool| &pool.engines).filter(|e| e.drain).map(|e| &e.url).collect();
        let members = |of: &EngineConfig| -> Vec<Arc<Member>> {
            let health = config.health.terms(drained.contains(&of.url));
            let engine = fleet.engine(&of.url, &Terms { health, release: of.release, ..terms.clone() });
            let ranks = match of.data_parallel_size {
                0 | 1 => vec![None],
                size => (0..size).map(Some).collect(),
            };
            let (weight, labels) = (of.weight, &of.labels);
            let member = |rank| Member { engine: Arc::clone(&engine), rank, weight, labels: labels.clone() };
            ranks.into_iter().map(|rank| Arc::new(member(rank))).collect()
        };
        let pool = |leg: Leg, of: &PoolConfig| Pool {
            leg,
            members: of.engines.iter().flat_map(members).collect(),
            policy: policy::of_kind(of.policy),
            all_out: config.health.all_out,
            panic_percent: usize::from(config.health.panic_percent),
        };
        let (mut list, mut by_name) = (Vec::new(), HashMap::new());
        for model in &config.models {
            let served = Arc::new(Model {
                name: model.name.clone(),
                prefill: pool(Leg::Prefill, &model.prefill),
                decode: pool(Leg::Decode, &model.decode),
                fallback: model.fallback,
                resume: model.resume && model.fallback == Fallback::Aggregate,
                bounds: config.timeouts.of(&model.timeouts),
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

impl Model {
    /// The engines of one leg.
    pub(crate) fn pool(&self, leg: Leg) -> &Pool {
        match leg {
            Leg::Prefill => &self.prefill,
            Leg::Decode => &self.decode,
        }
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

    /// Chooses an engine that is not among those `tried`, and counts the request in flight there.
    pub(crate) fn reserve(&self, wanted: &Wanted<'_>, tried: &[Arc<Engine>]) -> Option<Reserved> {
        let untried = |member: &Member| !tried.iter().any(|t| Arc::ptr_eq(t, &member.engine));
        let candidates_that = |fit: &dyn Fn(&Member) -> bool| -> Vec<_> {
            let fitting =
                self.members.iter().enumerate().filter(|(_, member)| untried(member) && fit(member));
            fitting
                .map(|(index, member)| Candidate { index, in_flight: member.load(), weight: member.weight })
                .collect()
        };
        let mut candidates = candidates_that(&|member| member.engine.health().takes(self.leg));
        if (candidates.is_empty() || self.panics()) && self.all_out == AllOut::FailOpen {
            candidates =
                candidates_that(&|member| member.engine.health().standing(self.leg) <= Standing::Out);
        }
        let member = Arc::clone(&self.members[self.policy.choose(wanted, &candidates)?]);
        let load = member.engine.begin(self.leg, member.rank);
        Some(Reserved { member, load })
    }

    /// Whether so few engines are left that health is looked at no more.
    fn panics(&self) -> bool {
        self.panic_percent > 0 && self.in_use() * 100 < self.members.len() * self.panic_percent
    }

    /// Members that may be given requests.
    pub(crate) fn in_use(&self) -> usize {
        self.members.iter().filter(|m| m.engine.health().standing(self.leg) <= Standing::Trial).count()
    }

    /// Each engine once.
    pub(crate) fn engines(&self) -> Vec<Arc<Engine>> {
        let mut engines: Vec<Arc<Engine>> = Vec::with_capacity(self.members.len());
        for member in &self.members {
            // The ranks of one engine stand side by side.
            if !engines.last().is_some_and(|last| Arc::ptr_eq(last, &member.engine)) {
                engines.push(Arc::clone(&member.engine));
            }
        }
        engines
    }
}

impl Member {
    fn load(&self) -> usize {
        self.rank.map_or_else(|| self.engine.load(), |rank| self.engine.rank_load(rank))
    }
}

impl Reserved {
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.member.engine
    }
}
