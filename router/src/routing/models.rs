//! The models and the engines that serve them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use baton_openai::{ApiError, TranslatedApi};

use crate::admission::{Admission, ModelQueue};
use crate::config::{
    DisaggregateConfig, EngineConfig, EngineHttp2, EngineUrl, Fallback, FeaturesConfig, ModelConfig,
    PoolConfig, ReleaseMode, RequestTimeouts, RouterConfig, TokenizeSource,
};
use crate::engines::caches::kv_events::EventSource;
use crate::engines::fleet::Fleet;
use crate::engines::health::HealthTerms;
use crate::engines::http::{ConnectionTerms, EngineTerms};
use crate::engines::pool_members::PoolMembers;
use crate::engines::protocol::learned::ProtocolTerms;
use crate::message::features::FeatureNeeds;
use crate::message::rewrite::ModelName;
use crate::metrics::{Leg, ModelMetrics};
use crate::routing::api_support::{ApiSupport, ModelApis};
use crate::routing::pool::{Pool, PoolMember, PrefixTracking, has_labels};
use crate::routing::tokenizer::Tokenizer;

/// One model.
pub(crate) struct Model {
    /// Its name at the engines.
    pub name: String,
    /// Its other names.
    pub aliases: Vec<String>,
    pub name_in_bodies: ModelName,
    pub prefill: Arc<Pool>,
    pub decode: Arc<Pool>,
    pub handoff: HandoffSettings,
    /// Time limits of its requests.
    pub bounds: RequestTimeouts,
    pub disaggregate: DisaggregateConfig,
    pub features: FeaturesConfig,
    /// The features that the router reads from its requests.
    pub needs: FeatureNeeds,
    /// The queue for an engine, per leg.
    pub queues: [Arc<ModelQueue>; 2],
    pub metrics: Arc<ModelMetrics>,
}

/// How the legs of a model's requests depend on each other.
pub(crate) struct HandoffSettings {
    pub fallback: Fallback,
    pub early_handoff: bool,
    /// The decode engine uses the token ids of the prefill engine's reply.
    pub reuse_tokens: bool,
    /// The engines schedule by priority, which the router sets.
    pub priority_scheduling: bool,
    /// How long decode engines keep the blocks of a response for the next turn; `None`: not at all.
    pub keep_turns: Option<Duration>,
    /// Another engine continues a stream whose decode engine fails.
    pub resume: bool,
    /// The log has a warning that the engines keep no blocks.
    pub has_warned_of_turns: Arc<AtomicBool>,
    /// A prefill engine has shown that it writes blocks to decode engines.
    pub pushes: Arc<AtomicBool>,
    /// The prefill engine is the only one that the request may use, so it is tried again.
    pub repeats_prefill: bool,
}

/// A prefill pool of its own for some requests of a model.
pub(crate) struct PrefillSource {
    pub engines: Arc<Pool>,
    /// As [`HandoffSettings::pushes`].
    pushes: Arc<AtomicBool>,
}

impl PrefillSource {
    pub(crate) fn new(engines: Pool) -> Self {
        Self { engines: Arc::new(engines), pushes: Arc::default() }
    }
}

impl HandoffSettings {
    fn new(config: &ModelConfig, previous: Option<&Arc<Model>>) -> Self {
        let pushes = previous.is_some_and(|previous| previous.handoff.pushes.load(Ordering::Relaxed));
        Self {
            fallback: config.fallback,
            early_handoff: config.early_handoff,
            reuse_tokens: config.reuse_tokens,
            priority_scheduling: config.priority_scheduling,
            keep_turns: config.bidirectional_kv.map(|kept| Duration::from_millis(kept.idle_ms)),
            has_warned_of_turns: previous
                .map(|previous| Arc::clone(&previous.handoff.has_warned_of_turns))
                .unwrap_or_default(),
            resume: config.resume && config.fallback == Fallback::Aggregate,
            pushes: Arc::new(AtomicBool::new(pushes)),
            repeats_prefill: false,
        }
    }
}

/// How each engine ends leases, its protocol, and its HTTP version.
type EngineSettings<'a> = HashMap<&'a EngineUrl, (ReleaseMode, ProtocolTerms, EngineHttp2)>;

/// An engine has one of each in all pools: those of its first prefill pool, because leases are
/// opened there, or else those of its first decode pool. The configuration is refused if it lists contradictory ones.
fn engine_settings<'a>(config: &RouterConfig, members: &'a PoolMembers) -> EngineSettings<'a> {
    let mut terms = HashMap::new();
    for leg in [Leg::Prefill, Leg::Decode] {
        for model in &config.models {
            for engine in members.of(&model.name, leg) {
                let protocol = || ProtocolTerms::new(model.protocol, engine);
                terms.entry(&engine.url).or_insert_with(|| (engine.release, protocol(), model.http2));
            }
        }
    }
    terms
}

/// All models by all their names.
pub(crate) struct Models {
    list: Vec<Arc<Model>>,
    /// The longest time limit of a request of any model; `None`: some have no limit.
    longest_request: Option<Duration>,
    by_name: HashMap<String, Arc<Model>>,
    /// By the models' own names.
    api_support: HashMap<String, ModelApis>,
    /// By the models' own names; of models with `tokenize`.
    tokenizers: HashMap<String, Arc<Tokenizer>>,
}

impl Model {
    fn new(
        config: &ModelConfig,
        all: &RouterConfig,
        members: &PoolMembers,
        terms: &EngineTerms,
        settlement: &EngineSettings<'_>,
        context: &BuildContext<'_>,
        previous: Option<&Arc<Self>>,
    ) -> Self {
        let fleet = context.fleet;
        let compatibility = config.compatibility.as_deref();
        let pool = |leg, pool: &PoolConfig, tracking| {
            let engines = members.of(&config.name, leg);
            let usable = |engine: &&EngineConfig| {
                terms.is_usable(&engine.url) && has_labels(&engine.labels, &pool.select)
            };
            let engines = engines.iter().filter(usable);
            let ranks = |engine: &EngineConfig| -> Vec<Arc<PoolMember>> {
                // An engine has one health, in however many pools it is.
                let health = HealthTerms { drain: members.drains(&engine.url), ..all.health.terms() };
                let (release, protocol, http2) = settlement[&engine.url].clone();
                let terms = terms.of(&engine.url).clone();
                let terms = ConnectionTerms { health, release, protocol, http2, ..terms };
                let known = fleet.engine(&engine.url, &terms);
                let member = |rank| {
                    let known = Arc::clone(&known);
                    Arc::new(PoolMember::new(engine, known, rank, pool, &config.pair_by, compatibility))
                };
                match engine.data_parallel_size {
                    0 | 1 => vec![member(None)],
                    size => (0..size).map(|rank| member(Some(rank))).collect(),
                }
            };
            let ranks = engines.flat_map(ranks).collect();
            let new = Pool::new(leg, ranks, &pool.policy, &all.health, &fleet.known_caches, tracking)
                .with_metrics(fleet.metrics(), &config.name);
            if let Some(previous) = previous {
                new.continue_turns_of(previous.pool(leg));
            }
            new
        };
        let by_policy = PrefixTracking::ByPolicy;
        // The cached part of a prompt in the decode engine need not be prefilled elsewhere.
        let for_decode =
            if config.disaggregate.asks_what_is_cached() { PrefixTracking::Always } else { by_policy };
        Self {
            name: config.name.clone(),
            aliases: config.aliases.clone(),
            name_in_bodies: ModelName::new(&config.name),
            prefill: Arc::new(pool(Leg::Prefill, &config.prefill, by_policy)),
            decode: Arc::new(pool(Leg::Decode, &config.decode, for_decode)),
            handoff: HandoffSettings::new(config, previous),
            bounds: all.timeouts.of(&config.timeouts),
            disaggregate: config.disaggregate.clone(),
            features: config.features.clone(),
            needs: FeatureNeeds::of(config),
            queues: Leg::BOTH.map(|leg| context.admission.queue(&config.name, leg)),
            metrics: Arc::new(fleet.metrics().model(&config.name)),
        }
    }

    /// The model of one request, whose client gives its name and its prefill engines. Its metrics are those of this model.
    pub(crate) fn of_client(&self, name: Option<&str>, prefill: Option<&PrefillSource>) -> Self {
        let HandoffSettings { fallback, early_handoff, reuse_tokens, keep_turns, resume, .. } = self.handoff;
        Self {
            name: name.unwrap_or(&self.name).to_owned(),
            aliases: Vec::new(),
            name_in_bodies: ModelName::of_client(name),
            prefill: Arc::clone(prefill.map_or(&self.prefill, |source| &source.engines)),
            decode: Arc::clone(&self.decode),
            handoff: HandoffSettings {
                fallback,
                early_handoff,
                reuse_tokens,
                priority_scheduling: self.handoff.priority_scheduling,
                keep_turns,
                has_warned_of_turns: Arc::clone(&self.handoff.has_warned_of_turns),
                resume,
                pushes: Arc::clone(prefill.map_or(&self.handoff.pushes, |source| &source.pushes)),
                repeats_prefill: true,
            },
            bounds: self.bounds,
            disaggregate: self.disaggregate.clone(),
            features: self.features.clone(),
            needs: self.needs,
            queues: self.queues.clone(),
            metrics: Arc::clone(&self.metrics),
        }
    }

    /// The engines of one leg.
    pub(crate) fn pool(&self, leg: Leg) -> &Pool {
        match leg {
            Leg::Prefill => &self.prefill,
            Leg::Decode => &self.decode,
        }
    }

    /// The queue for an engine of one leg.
    pub(crate) fn queue(&self, leg: Leg) -> &ModelQueue {
        &self.queues[leg as usize]
    }
}

impl Models {
    /// Policies continue their turns from the `previous` version of a pool.
    pub(crate) fn new(
        config: &RouterConfig,
        members: &PoolMembers,
        terms: &EngineTerms,
        context: &BuildContext<'_>,
        previous: Option<&Self>,
    ) -> Self {
        let (mut list, mut by_name) = (Vec::<Arc<Model>>::new(), HashMap::new());
        let settlement = engine_settings(config, members);
        let (mut api_support, mut tokenizers) = (HashMap::new(), HashMap::new());
        for model in &config.models {
            let served = Arc::new(Model::new(
                model,
                config,
                members,
                terms,
                &settlement,
                context,
                previous.and_then(|p| p.by_name.get(&model.name)),
            ));
            for name in std::iter::once(&model.name).chain(&model.aliases) {
                by_name.insert(name.clone(), Arc::clone(&served));
            }
            api_support.insert(model.name.clone(), ModelApis::new(model));
            if model.tokenize.from == TokenizeSource::Engine {
                // What was learnt of the engines outlives a reload.
                let kept = previous.and_then(|previous| previous.tokenizers.get(&model.name));
                let kept = kept.filter(|kept| kept.is_of(&model.tokenize)).cloned();
                let metrics = || context.fleet.metrics().tokenize(&model.name);
                let tokenizer = kept.unwrap_or_else(|| Arc::new(Tokenizer::new(&model.tokenize, metrics())));
                tokenizers.insert(model.name.clone(), tokenizer);
            }
            list.push(served);
        }
        let bounds: Option<Vec<Duration>> = list.iter().map(|model| model.bounds.request).collect();
        let longest_request = bounds.and_then(|bounds| bounds.into_iter().max());
        Self { list, longest_request, by_name, api_support, tokenizers }
    }

    /// The model with this name; without a name the only model.
    ///
    /// # Errors
    /// 404 for an unknown name, 400 if a name is required.
    pub(crate) fn named(&self, name: Option<&str>) -> Result<&Arc<Model>, ApiError> {
        match (name, self.list.as_slice()) {
            (Some(name), _) => self.by_name.get(name).ok_or_else(|| ApiError::model_not_found(name)),
            (None, [only]) => Ok(only),
            (None, _) => Err(ApiError::invalid("model", "`model` is missing, and several models are served")),
        }
    }

    /// The KV-event source of every engine that has one.
    pub(crate) fn event_sources(&self) -> Vec<EventSource> {
        let pools = self.list.iter().flat_map(|model| [&model.prefill, &model.decode]);
        pools.flat_map(|pool| pool.members()).filter_map(|member| member.events.clone()).collect()
    }

    /// The time limit of a request whose model is not known yet; `None`: no limit.
    pub(crate) fn longest_request(&self) -> Option<Duration> {
        self.longest_request
    }

    /// Whether the engines of a model have an API.
    pub(crate) fn api_support(&self, model: &Model, api: TranslatedApi) -> Option<&Arc<ApiSupport>> {
        self.api_support.get(&model.name).map(|apis| apis.of(api))
    }

    /// The tokenizer of a model, if the model has one.
    pub(crate) fn tokenizer(&self, model: &Model) -> Option<&Arc<Tokenizer>> {
        self.tokenizers.get(&model.name)
    }

    pub(crate) fn list(&self) -> &[Arc<Model>] {
        &self.list
    }
}

/// The parts of the router that outlive every generation.
pub(crate) struct BuildContext<'a> {
    pub fleet: &'a Fleet,
    pub admission: &'a Admission,
}
