//! Engines that can replace each other, and the code that chooses one of them.
//!
//! ```text
//! members ─▶ not tried yet ─▶ has capacity ─▶ in use ─▶ best labels ─▶ policy ─▶ reservation
//! ```
//!
//! `health` determines which engines are in use. An ejected engine is chosen only if no other engine is left and the
//! configuration allows the attempt. A draining or unresponsive engine is not chosen. A request waits for a full
//! healthy engine rather than use an ejected one.
//!
//! A choice does not scan the members. [`load_index`] always contains the ready members and answers a policy's queries
//! in O(height of its tree). A pool scans its members in three cases: the request needs no capacity, the pool panics,
//! or no member is ready or full.

mod inputs;
mod label_indexes;
mod load_index;
mod load_tree;
mod member;

use inputs::DecisionInputs;
use label_indexes::LabelIndexes;
pub(crate) use member::{CapacityRule, Eligibility, PoolMember, has_labels};
use member::{ChoiceContext, LazyNow};

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::admission::{Reservation, Unavailable};
use crate::config::{AllOut, HealthConfig, PolicyConfig};
use crate::engines::caches::{CachedPrefix, KnownCaches};
use crate::engines::http::{Engine, EngineRequestGuard, TrialRule};
use crate::message::features::RoutingFeatures;
use crate::metrics::{DecisionCounters, Leg, Metrics};
use crate::routing::explain::Decision;
use crate::routing::policy::{self, Candidate, Choice, Draw, Policy};

/// Limit on the engines of each kind that one explanation names.
const NAMED_MAX: usize = 8;

/// Lost races for an engine's last capacity before the pool scans its members.
const INDEX_TRIES: usize = 64;

/// Engines that can replace each other.
pub(crate) struct Pool {
    /// Ordered by cache id, so the ranks of one engine are adjacent.
    members: Vec<Arc<PoolMember>>,
    /// The members' names.
    names: Arc<[Arc<str>]>,
    indexes: LabelIndexes,
    /// The numbers of the caches that engines report.
    event_engines: Vec<u32>,
    policy: Box<dyn Policy>,
    policy_name: &'static str,
    decisions: Option<DecisionCounters>,
    turn: AtomicU64,
    /// Records the prompts sent; `None` if nothing reads it.
    known_caches: Option<Arc<KnownCaches>>,
    leg: Leg,
    all_out: AllOut,
    panic_percent: usize,
}

/// A chosen engine. The request counts as in flight there until this is dropped.
pub(crate) struct EngineReservation {
    pub member: Arc<PoolMember>,
    pub load: EngineRequestGuard,
    /// The part of the prompt that its cache held, as far as the router knows.
    pub cached: CachedPrefix,
}

/// A choice, and its inputs if the caller wants them.
type ChoiceResult = (Result<(Choice, TrialRule), Unavailable>, Option<DecisionInputs>);

/// The engine that would be chosen.
pub(crate) struct DryRun {
    pub chosen: Option<Arc<PoolMember>>,
    pub decision: Decision,
}

/// Whether a pool records the prompts that it sends to its engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrefixTracking {
    /// Only for a policy that reads them.
    ByPolicy,
    /// The caller of [`Pool::reserve`] reads how much of a prompt the engines have cached.
    Always,
}

/// Which choices return a [`Decision`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detail {
    None,
    /// Choices that found an engine.
    Choices,
    All,
}

impl Pool {
    /// The pool of one leg of a model.
    pub(crate) fn new(
        leg: Leg,
        mut members: Vec<Arc<PoolMember>>,
        policy: &PolicyConfig,
        health: &HealthConfig,
        caches: &Arc<KnownCaches>,
        tracking: PrefixTracking,
    ) -> Self {
        members.sort_by_key(|member| member.cache_id());
        members.iter().for_each(|member| member.engine.health().add_leg(leg));
        let tracks_prefixes =
            tracking == PrefixTracking::Always || matches!(policy, PolicyConfig::PrefixAware(_));
        let reporting = members.iter().filter(|member| member.events.is_some());
        Self {
            names: members.iter().map(|member| member.engine.name()).collect(),
            indexes: LabelIndexes::new(&members, leg, policy::unit_of(policy)),
            event_engines: reporting.map(|member| member.cache_id()).collect(),
            members,
            policy: policy::of_config(policy, caches),
            policy_name: policy.name(),
            decisions: None,
            turn: AtomicU64::new(0),
            known_caches: tracks_prefixes.then(|| Arc::clone(caches)),
            leg,
            all_out: health.all_out,
            panic_percent: usize::from(health.panic_percent),
        }
    }

    /// Counts the decisions.
    pub(crate) fn with_metrics(self, metrics: &Metrics, model: &str) -> Self {
        let decisions = Some(metrics.decisions(model, self.leg, self.policy_name));
        Self { decisions, ..self }
    }

    /// Members that may receive requests.
    pub(crate) fn in_use(&self) -> usize {
        self.indexes.in_use(None)
    }

    /// Whether an engine with a proven health may receive requests.
    pub(crate) fn is_ready(&self) -> bool {
        self.members.iter().any(|member| {
            let (health, leg) = (member.engine.health(), self.leg);
            health.standing(leg) <= crate::engines::health::Standing::Trial && member.engine.is_known()
        })
    }

    /// Whether so few engines are in use that the pool ignores their health.
    fn panics(&self) -> bool {
        let fewest = self.members.len() * self.panic_percent;
        fewest > 0 && self.all_out == AllOut::FailOpen && self.in_use() * 100 < fewest
    }

    /// Every engine once.
    pub(crate) fn engines(&self) -> Vec<Arc<Engine>> {
        let mut engines: Vec<Arc<Engine>> = Vec::with_capacity(self.members.len());
        for member in &self.members {
            // The ranks of one engine are adjacent.
            if !engines.last().is_some_and(|last| Arc::ptr_eq(last, &member.engine)) {
                engines.push(Arc::clone(&member.engine));
            }
        }
        engines
    }

    /// The engines that may receive requests and are known to exist.
    pub(crate) fn usable_engines(&self) -> Vec<Arc<Engine>> {
        let mut engines = self.engines();
        engines.retain(|engine| {
            engine.health().standing(self.leg) <= crate::engines::health::Standing::Trial && engine.is_known()
        });
        engines
    }

    /// Continues the turns of the previous version of this pool, so that a reload favours no engine.
    pub(crate) fn continue_turns_of(&self, previous: &Self) {
        self.turn.store(previous.turn.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    pub(crate) fn members(&self) -> &[Arc<PoolMember>] {
        &self.members
    }

    /// Tokens of one KV block, as the engines report it; `None` if the pool tracks no prefixes or no engine reported
    /// it.
    pub(crate) fn block_size(&self) -> Option<usize> {
        let caches = self.known_caches.as_ref()?;
        self.event_engines.iter().find_map(|engine| caches.block_size(*engine))
    }

    /// Whether an engine has named this model as a LoRA adapter, in KV events or in its list of models.
    pub(crate) fn is_adapter(&self, model: &str) -> bool {
        self.known_caches.as_ref().is_some_and(|caches| caches.is_adapter(model.as_bytes()))
    }

    /// Requests of this router at the least loaded engine of this compatibility; 0 without any.
    pub(crate) fn least_in_flight(&self, compatibility: Option<u64>) -> usize {
        self.indexes.least_own(compatibility).unwrap_or(0) as usize
    }

    /// The [`PoolMember::compatibility`] of an engine; `None` if the model has no label for it.
    pub(crate) fn compatibility_of(&self, engine: &Arc<Engine>) -> Option<u64> {
        let at = self.members.partition_point(|member| member.engine.id() < engine.id());
        self.members.get(at).filter(|member| Arc::ptr_eq(&member.engine, engine))?.compatibility()
    }

    /// The engines for which `other` has no compatible engine in use. Empty if no engine of this pool has a compatible
    /// one either: the difference then helps no choice.
    pub(crate) fn without_partner(&self, other: &Self) -> Vec<Arc<Engine>> {
        let mut values = self.indexes.compatibilities();
        let count = values.len();
        values.retain(|value| other.indexes.in_use(Some(*value)) == 0);
        if values.is_empty() || values.len() == count {
            return Vec::new();
        }
        let is_without =
            |member: &&Arc<PoolMember>| member.compatibility().is_some_and(|value| values.contains(&value));
        self.members.iter().filter(is_without).map(|member| Arc::clone(&member.engine)).collect()
    }

    /// Chooses an engine that is not among `tried` and satisfies `capacity`, and counts the request in flight there.
    /// Returns the [`Decision`] as well if `detail` asks for it.
    ///
    /// # Errors
    /// [`Unavailable`] contains whether waiting helps.
    pub(crate) fn reserve(
        &self,
        features: &RoutingFeatures<'_>,
        tried: &[Arc<Engine>],
        capacity: CapacityRule,
        detail: Detail,
    ) -> (Result<EngineReservation, Unavailable>, Option<Decision>) {
        let now = LazyNow::new(Instant::now);
        let compatibility = features.compatibility;
        let context =
            ChoiceContext { tried, leg: self.leg, panic: self.panics(), capacity, compatibility, now: &now };
        let mut tries = 0;
        let (inputs, taken) = loop {
            let draw = Draw::at(self.turn.fetch_add(1, Ordering::Relaxed));
            let (decided, inputs) = if tries < INDEX_TRIES {
                self.decide(features, &context, draw, detail)
            } else {
                self.scan(features, &context, draw)
            };
            match decided {
                Err(scarce) => break (inputs, Err(scarce)),
                Ok((choice, rule)) => {
                    let member = &self.members[choice.index];
                    // Another request may have taken the last capacity, or the trial, since then. The choice is then
                    // repeated.
                    if let Some(load) = member.begin(&context, rule, features.tokens) {
                        break (inputs, Ok((choice, load)));
                    }
                    tries += 1;
                }
            }
        };
        let choice = taken.as_ref().map(|(choice, _)| *choice).map_err(|&scarce| scarce);
        let cached = self.cached_prefix(choice.ok(), features);
        let is_wanted = detail == Detail::All || (detail == Detail::Choices && choice.is_ok());
        let decision =
            inputs.filter(|_| is_wanted).map(|inputs| self.explain(features, inputs, choice, cached));
        let reserved = taken.map(|(choice, load)| {
            self.decisions.iter().for_each(|decisions| decisions.count(choice.reason));
            let member = &self.members[choice.index];
            self.known_caches
                .iter()
                .for_each(|caches| caches.record_routed(member.cache_id(), features.prefix));
            EngineReservation { member: Arc::clone(member), load, cached }
        });
        (reserved, decision)
    }

    /// The part of the prompt that the chosen engine has cached, if the pool tracks prefixes.
    fn cached_prefix(&self, choice: Option<Choice>, features: &RoutingFeatures<'_>) -> CachedPrefix {
        let cached = choice.zip(self.known_caches.as_ref()).map(|(choice, caches)| {
            caches.cached_prefix(self.members[choice.index].cache_id(), features.prefix, features.blocks)
        });
        cached.unwrap_or_default()
    }

    /// The choice that [`Self::reserve`] would make. It counts and records nothing.
    pub(crate) fn dry_run(&self, features: &RoutingFeatures<'_>, tried: &[Arc<Engine>]) -> DryRun {
        let now = LazyNow::new(Instant::now);
        let context = ChoiceContext {
            tried,
            leg: self.leg,
            panic: self.panics(),
            capacity: CapacityRule::Needed,
            compatibility: features.compatibility,
            now: &now,
        };
        let draw = Draw::at(self.turn.load(Ordering::Relaxed));
        let (decided, inputs) = self.decide(features, &context, draw, Detail::All);
        let choice = decided.map(|(choice, _)| choice);
        let cached = self.cached_prefix(choice.ok(), features);
        let decision = self.explain(features, inputs.unwrap_or_default(), choice, cached);
        DryRun { chosen: choice.ok().map(|choice| Arc::clone(&self.members[choice.index])), decision }
    }

    /// The ids of those `engines` that are members, and of all members that are not compatible; ascending.
    pub(crate) fn excluded_ids(&self, engines: &[Arc<Engine>], compatibility: Option<u64>) -> Vec<u32> {
        let members = engines.iter().filter(|engine| self.contains(engine)).map(|engine| engine.id());
        let others = if compatibility.is_some() { &*self.members } else { &[] };
        let incompatible = others.iter().filter(|member| !member.is_compatible(compatibility));
        let mut members: Vec<_> = members.chain(incompatible.map(|member| member.engine.id())).collect();
        members.sort_unstable();
        members.dedup();
        members
    }

    fn contains(&self, engine: &Arc<Engine>) -> bool {
        let at = self.members.partition_point(|m| m.engine.id() < engine.id());
        self.members.get(at).is_some_and(|m| Arc::ptr_eq(&m.engine, engine))
    }

    /// Whether a compatible member not among `tried` and not in `other` is full. It will have capacity again: its
    /// requests do not wait for another engine.
    pub(crate) fn will_have_room(
        &self,
        features: &RoutingFeatures<'_>,
        tried: &[Arc<Engine>],
        other: &Self,
    ) -> bool {
        let now = LazyNow::new(Instant::now);
        let context = ChoiceContext {
            tried,
            leg: self.leg,
            panic: false,
            capacity: CapacityRule::Needed,
            compatibility: features.compatibility,
            now: &now,
        };
        self.members.iter().any(|member| {
            member.eligibility(&context) == Eligibility::Full && !other.contains(&member.engine)
        })
    }

    /// Chooses on the load indexes, or by a scan where they cannot decide.
    fn decide(
        &self,
        features: &RoutingFeatures<'_>,
        context: &ChoiceContext<'_>,
        draw: Draw,
        detail: Detail,
    ) -> ChoiceResult {
        if context.capacity == CapacityRule::Ignored || context.panic {
            return self.scan(features, context, draw);
        }
        let paired = self.indexes.of_pair(features.compatibility, features.pair);
        let all = self.indexes.compatible(features.compatibility);
        let (mut full, mut others) = (false, Vec::new());
        // If no paired member is ready, all ready members are among the others.
        for (load_index, last) in paired.iter().map(|b| (b, false)).chain(all.iter().map(|b| (b, true))) {
            let view = load_index.view(context.tried);
            if let Some(choice) = self.policy.choose(features, &view, draw) {
                let inputs = (detail != Detail::None)
                    .then(|| self.inputs_of_index(&view, load_index, choice, context));
                return (Ok((choice, TrialRule::Enforce)), inputs);
            }
            if last {
                full |= view.has_full();
                others.extend(view.first_not_ready(if detail == Detail::None {
                    0
                } else {
                    NAMED_MAX - others.len()
                }));
            }
        }
        if !full {
            return self.scan(features, context, draw);
        }
        let inputs = (detail != Detail::None).then(|| DecisionInputs { others, ..DecisionInputs::default() });
        (Err(Unavailable::Full), inputs)
    }

    /// The same choice by a scan of all members.
    fn scan(&self, features: &RoutingFeatures<'_>, context: &ChoiceContext<'_>, draw: Draw) -> ChoiceResult {
        match self.candidates(features, context) {
            Err(scarce) => (Err(scarce), Some(self.inputs_of_scan(Vec::new(), context))),
            Ok((candidates, rule)) => {
                let choice = self.policy.choose(features, &candidates, draw).ok_or(Unavailable::NoEngine);
                (choice.map(|choice| (choice, rule)), Some(self.inputs_of_scan(candidates, context)))
            }
        }
    }

    /// The engines that the policy may choose from, and the trial rule for the chosen one.
    fn candidates(
        &self,
        features: &RoutingFeatures<'_>,
        context: &ChoiceContext<'_>,
    ) -> Result<(Vec<Candidate>, TrialRule), Unavailable> {
        let (mut ready, mut ejected, mut full) = (Vec::with_capacity(self.members.len()), Vec::new(), false);
        for (index, member) in self.members.iter().enumerate() {
            match member.eligibility(context) {
                Eligibility::Ready => ready.push((index, member.label_score(features))),
                Eligibility::Ejected if self.all_out == AllOut::FailOpen => {
                    ejected.push((index, member.label_score(features)))
                }
                Eligibility::Full => full = true,
                Eligibility::Ejected
                | Eligibility::Tried
                | Eligibility::Unresponsive
                | Eligibility::Draining
                | Eligibility::Incompatible => {}
            }
        }
        let mut rule = if context.panic { TrialRule::Ignore } else { TrialRule::Enforce };
        if ready.is_empty() {
            if full {
                return Err(Unavailable::Full);
            }
            (ready, rule) = (ejected, TrialRule::Ignore);
        }
        let best = ready.iter().map(|(_, score)| *score).max().ok_or(Unavailable::NoEngine)?;
        let fitting = ready.into_iter().filter(|(_, score)| *score == best);
        Ok((fitting.map(|(index, _)| self.members[index].candidate(index, context.now)).collect(), rule))
    }
}

/// Chooses an engine outside the first list of `avoided`; if there is none, outside the next list, and so on.
///
/// # Errors
/// The error of the last attempt.
pub(crate) fn another_first<T, E>(
    avoided: &[&[Arc<Engine>]],
    mut choose: impl FnMut(&[Arc<Engine>]) -> Result<T, E>,
) -> Result<T, E> {
    let (last, others) = avoided.split_last().expect("the list of engines to avoid has an entry");
    for avoided in others {
        if let Ok(chosen) = choose(avoided) {
            return Ok(chosen);
        }
    }
    choose(last)
}

impl EngineReservation {
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.member.engine
    }

    /// Requires of the other leg's engine what this one has: the compatibility label, and if possible the pair labels.
    pub(crate) fn require_partner(&self, features: &mut RoutingFeatures<'_>) {
        self.member.require_partner(features);
    }
}

impl Reservation for EngineReservation {}

impl Reservation for Result<EngineReservation, Unavailable> {
    fn has_engine(&self) -> bool {
        self.is_ok()
    }
}

#[cfg(test)]
mod tests;
