//! Engines that can stand in for each other, and the one place where one of them is chosen.
//!
//! ```text
//! members ─▶ not tried yet ─▶ has room ─▶ in use ─▶ best labels ─▶ policy ─▶ one place is taken
//! ```
//!
//! Which engines are in use is what `health` says. One that is left out is chosen only if no other is left and the
//! configuration would rather try; one that is drained, or answers nothing at all, is not chosen. Requests wait
//! rather for a healthy engine that is full than be sent to one that is not.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::config::{AllOut, EngineConfig, HealthConfig, PolicyConfig, PoolConfig};
use crate::explain::{Considered, Removed, Sight};
use crate::health::Standing;
use crate::kv_events::Source;
use crate::memory::{Holding, Memory};
use crate::metrics::{Decisions, Leg, Metrics};
use crate::policy::{self, Candidate, Choice, Draw, Policy, Wanted};
use crate::upstream::{Engine, InFlight};

/// Engines of each kind that one explanation names.
const NAMED: usize = 8;

/// Engines that can stand in for each other.
pub(crate) struct Pool {
    /// In the order of their engines' ids.
    members: Vec<Arc<Member>>,
    policy: Box<dyn Policy>,
    policy_name: &'static str,
    decisions: Option<Decisions>,
    turn: AtomicU64,
    /// Where prompts that are sent are noted; none if nobody asks.
    memory: Option<Arc<Memory>>,
    leg: Leg,
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

/// An engine that was chosen; the request counts as in flight there until this is dropped.
pub(crate) struct Reserved {
    pub member: Arc<Member>,
    pub load: InFlight,
    /// What it held of the prompt already, as far as is known.
    pub holding: Holding,
}

/// What would be chosen.
pub(crate) struct Trial {
    pub chosen: Option<Arc<Member>>,
    pub sight: Sight,
}

/// Why no engine can be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scarce {
    /// Those that could be asked have as much as they take. It will pass.
    Full,
    /// There is none that could be asked.
    Nobody,
}

/// Whether an engine can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    Ready,
    /// Only if no other is left.
    Resting,
    Full,
    Tried,
    /// Not at all.
    Out,
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

    /// One rank of its engine.
    pub(crate) fn at_rank(self, rank: u16) -> Self {
        let key = xxh3_64(format!("{}#{rank}", self.engine.authority()).as_bytes());
        Self { rank: Some(rank), key, ..self }
    }

    /// Requests of this router there.
    fn load(&self) -> usize {
        self.rank.map_or_else(|| self.engine.load(), |rank| self.engine.rank_load(rank))
    }

    /// Requests there: this router's, or, where the engine itself says more, all of them.
    fn requests(&self) -> u32 {
        let ours = u32::try_from(self.load()).unwrap_or(u32::MAX);
        let reported = self.engine.reported_load().filter(|_| self.rank.is_none());
        reported.map_or(ours, |load| ours.max(load.running.saturating_add(load.waiting)))
    }

    fn fit(&self, tried: &[Arc<Engine>], leg: Leg, panic: bool) -> Fit {
        let health = self.engine.health();
        if tried.iter().any(|t| Arc::ptr_eq(t, &self.engine)) {
            Fit::Tried
        } else if health.standing(leg) > Standing::Out {
            Fit::Out
        } else if self.load() >= self.max_in_flight || self.says_it_is_full() {
            Fit::Full
        } else if health.takes(leg) || panic {
            Fit::Ready
        } else {
            Fit::Resting
        }
    }

    /// Whether its own metrics say so, where somebody asks what they say.
    fn says_it_is_full(&self) -> bool {
        // While it has a request of ours, its end is what those who wait are told of.
        if self.load() == 0 || (self.max_waiting.is_none() && self.max_kv_usage.is_none()) {
            return false;
        }
        self.engine.reported_load().is_some_and(|load| {
            self.max_waiting.is_some_and(|most| load.waiting >= most)
                || self.max_kv_usage.is_some_and(|most| load.kv_usage >= most)
        })
    }

    fn begin(&self, leg: Leg, tokens: u64) -> Option<InFlight> {
        self.engine.begin(leg, self.rank, tokens, self.max_in_flight)
    }

    fn candidate(&self, index: usize) -> Candidate {
        Candidate {
            index,
            engine: self.engine.id(),
            key: self.key,
            requests: self.requests(),
            tokens: self.engine.tokens(),
            weight: self.weight,
        }
    }

    /// How well its labels suit: the partner's labels first, then those that the pool prefers.
    fn suits(&self, wanted: &Wanted<'_>) -> u8 {
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

impl Pool {
    /// `learns`: somebody will ask what the engines hold of a prompt.
    pub(crate) fn new(
        mut members: Vec<Arc<Member>>,
        policy: &PolicyConfig,
        memory: &Arc<Memory>,
        learns: bool,
    ) -> Self {
        members.sort_by_key(|member| member.engine.id());
        let learns = learns || matches!(policy, PolicyConfig::PrefixAware(_));
        Self {
            members,
            policy: policy::of_config(policy, memory),
            policy_name: policy.name(),
            decisions: None,
            turn: AtomicU64::new(0),
            memory: learns.then(|| Arc::clone(memory)),
            leg: Leg::Decode,
            all_out: AllOut::FailOpen,
            panic_percent: 0,
        }
    }

    /// Says which leg it serves, and what happens when its engines are not well.
    pub(crate) fn guarded(self, leg: Leg, health: &HealthConfig) -> Self {
        let panic_percent = usize::from(health.panic_percent);
        Self { leg, all_out: health.all_out, panic_percent, ..self }
    }

    /// Counts what is decided.
    pub(crate) fn counted(self, metrics: &Metrics, model: &str) -> Self {
        let decisions = Some(metrics.decisions(model, self.leg, self.policy_name));
        Self { decisions, ..self }
    }

    /// Members that may be given requests.
    pub(crate) fn in_use(&self) -> usize {
        self.members.iter().filter(|m| m.engine.health().standing(self.leg) <= Standing::Trial).count()
    }

    /// Whether so few engines are left that health is looked at no more.
    fn panics(&self) -> bool {
        let fewest = self.members.len() * self.panic_percent;
        fewest > 0 && self.all_out == AllOut::FailOpen && self.in_use() * 100 < fewest
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

    /// Takes its turns where another version of the same pool is now, so that reloads favour nobody.
    pub(crate) fn go_on_from(&self, previous: &Self) {
        self.turn.store(previous.turn.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Its engines.
    pub(crate) fn members(&self) -> &[Arc<Member>] {
        &self.members
    }

    /// Tokens of one KV block, as the engines told; none if nobody asks or none told.
    pub(crate) fn block_size(&self) -> Option<usize> {
        let memory = self.memory.as_ref()?;
        let telling = self.members.iter().filter(|member| member.events.is_some());
        telling.into_iter().find_map(|member| memory.block_size(member.engine.id()))
    }

    /// Requests of this router at the least loaded engine; 0 without any.
    pub(crate) fn least_in_flight(&self) -> usize {
        self.members.iter().map(|member| member.load()).min().unwrap_or(0)
    }

    /// Chooses an engine that has room and is not among those `tried`, and counts the request in flight there.
    ///
    /// # Errors
    /// [`Scarce`] says whether waiting helps.
    pub(crate) fn reserve(&self, wanted: &Wanted<'_>, tried: &[Arc<Engine>]) -> Result<Reserved, Scarce> {
        self.reserve_telling(wanted, tried, None)
    }

    /// As [`Self::reserve`]; tells what the choice was made from to whoever wants to know.
    ///
    /// # Errors
    /// [`Scarce`] says whether waiting helps.
    pub(crate) fn reserve_telling(
        &self,
        wanted: &Wanted<'_>,
        tried: &[Arc<Engine>],
        tell: Option<&mut Option<Sight>>,
    ) -> Result<Reserved, Scarce> {
        let (candidates, taken) = loop {
            let candidates = self.candidates(wanted, tried);
            let draw = Draw::at(self.turn.fetch_add(1, Ordering::Relaxed));
            match self.decide(wanted, &candidates, draw) {
                Err(scarce) => break (candidates, Err(scarce)),
                Ok(choice) => {
                    let member = &self.members[choice.index];
                    // If somebody else has taken its last place since, the choice is made again.
                    if let Some(load) = member.begin(self.leg, wanted.tokens) {
                        break (candidates, Ok((choice, load)));
                    }
                }
            }
        };
        if let Some(told) = tell {
            let choice = taken.as_ref().map(|(choice, _)| *choice).map_err(|&scarce| scarce);
            *told = Some(self.sight(wanted, tried, candidates.as_deref().unwrap_or_default(), choice));
        }
        taken.map(|(choice, load)| {
            self.decisions.iter().for_each(|decisions| decisions.count(choice.reason));
            self.reserved(&self.members[choice.index], load, wanted)
        })
    }

    /// What [`Self::reserve`] would choose. Nothing is counted and nothing is noted.
    pub(crate) fn try_out(&self, wanted: &Wanted<'_>, tried: &[Arc<Engine>]) -> Trial {
        let candidates = self.candidates(wanted, tried);
        let choice = self.decide(wanted, &candidates, Draw::at(self.turn.load(Ordering::Relaxed)));
        let sight = self.sight(wanted, tried, candidates.as_deref().unwrap_or_default(), choice);
        Trial { chosen: choice.ok().map(|choice| Arc::clone(&self.members[choice.index])), sight }
    }

    fn decide(
        &self,
        wanted: &Wanted<'_>,
        candidates: &Result<Vec<Candidate>, Scarce>,
        draw: Draw,
    ) -> Result<Choice, Scarce> {
        let candidates = candidates.as_ref().map_err(|&scarce| scarce)?;
        self.policy.choose(wanted, candidates, draw).ok_or(Scarce::Nobody)
    }

    /// What a choice was made from, for people.
    fn sight(
        &self,
        wanted: &Wanted<'_>,
        tried: &[Arc<Engine>],
        candidates: &[Candidate],
        choice: Result<Choice, Scarce>,
    ) -> Sight {
        let chosen = choice.ok().map(|choice| choice.index);
        let mut named: Vec<&Candidate> = candidates.iter().collect();
        let order = |c: &&Candidate| (Some(c.index) != chosen, c.requests, c.index);
        if named.len() > NAMED {
            named.select_nth_unstable_by_key(NAMED, order);
            named.truncate(NAMED);
        }
        named.sort_unstable_by_key(order);
        let considered = named.into_iter().map(|c| Considered {
            engine: self.members[c.index].engine.name(),
            requests: c.requests,
            tokens: c.tokens,
            weight: c.weight,
            score: self.policy.score(wanted, c),
        });
        let is_candidate = |index: usize| candidates.binary_search_by_key(&index, |c| c.index).is_ok();
        let others = self.members.iter().enumerate().filter(|(index, _)| !is_candidate(*index));
        let removed = others.take(NAMED).map(|(_, member)| Removed {
            engine: member.engine.name(),
            why: member.fit(tried, self.leg, false),
        });
        let holding = chosen.zip(self.memory.as_ref()).map(|(index, memory)| {
            memory.holding(self.members[index].engine.id(), wanted.prefix, wanted.blocks)
        });
        Sight {
            policy: self.policy_name,
            members: self.members.len(),
            considered: considered.collect(),
            more: candidates.len().saturating_sub(NAMED),
            removed: removed.collect(),
            more_removed: (self.members.len() - candidates.len()).saturating_sub(NAMED),
            result: choice.map(|choice| (self.members[choice.index].engine.name(), choice.reason)),
            holding: holding.unwrap_or_default(),
            chunks: wanted.prefix.len(),
            blocks: wanted.blocks.len(),
        }
    }

    fn reserved(&self, member: &Arc<Member>, load: InFlight, wanted: &Wanted<'_>) -> Reserved {
        let mut holding = Holding::default();
        if let Some(memory) = &self.memory {
            holding = memory.holding(member.engine.id(), wanted.prefix, wanted.blocks);
            memory.sent(member.engine.id(), wanted.prefix);
        }
        Reserved { member: Arc::clone(member), load, holding }
    }

    /// The engines that the policy may choose from.
    fn candidates(&self, wanted: &Wanted<'_>, tried: &[Arc<Engine>]) -> Result<Vec<Candidate>, Scarce> {
        let (mut ready, mut resting, mut full) = (Vec::with_capacity(self.members.len()), Vec::new(), false);
        let panic = self.panics();
        for (index, member) in self.members.iter().enumerate() {
            match member.fit(tried, self.leg, panic) {
                Fit::Ready => ready.push(index),
                Fit::Resting if self.all_out == AllOut::FailOpen => resting.push(index),
                Fit::Full => full = true,
                Fit::Resting | Fit::Tried | Fit::Out => {}
            }
        }
        if ready.is_empty() {
            if full {
                return Err(Scarce::Full);
            }
            ready = resting;
        }
        let suits = |index: &usize| self.members[*index].suits(wanted);
        let best = ready.iter().map(suits).max().ok_or(Scarce::Nobody)?;
        let fitting = ready.into_iter().filter(|index| suits(index) == best);
        Ok(fitting.map(|index| self.members[index].candidate(index)).collect())
    }
}

impl Reserved {
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.member.engine
    }

    /// Its values of the labels that its partner should share.
    pub(crate) fn pair(&self) -> Option<u64> {
        self.member.pair
    }
}
