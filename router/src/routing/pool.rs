//! Engines that can stand in for each other, and the one place where one of them is chosen.
//!
//! ```text
//! members ─▶ not tried yet ─▶ has room ─▶ in use ─▶ best labels ─▶ policy ─▶ one place is taken
//! ```
//!
//! Which engines are in use is what `health` says. One that is left out is chosen only if no other is left and the
//! configuration would rather try; one that is drained, or answers nothing at all, is not chosen. Requests wait
//! rather for a healthy engine that is full than be sent to one that is not.
//!
//! A choice does not walk over the members: [`board`] knows at every moment who is ready, and answers what a policy asks
//! in as many steps as a tree of the members is high. Only what is rare walks: a place for what takes none, a pool in
//! panic, and one of which nobody is ready or full.

mod basis;
mod board;
mod member;
mod tree;

use basis::Basis;
use board::Board;
pub(crate) use member::{Fit, Member, Room, has};
use member::{Look, Now};

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::admission::{Found, Scarce};
use crate::config::{AllOut, HealthConfig, LoadUnit, PolicyConfig};
use crate::engines::caches::{Holding, Memory};
use crate::engines::http::{Engine, InFlight, Manner};
use crate::message::features::Wanted;
use crate::metrics::{Decisions, Leg, Metrics};
use crate::routing::explain::Sight;
use crate::routing::policy::{self, Candidate, Choice, Draw, Policy};

/// Engines of each kind that one explanation names.
const NAMED: usize = 8;

/// Choices that may come to nothing, because somebody else was faster, before all members are walked over.
const BOARD_TRIES: usize = 64;

/// Engines that can stand in for each other.
pub(crate) struct Pool {
    /// In the order of their caches' numbers: the ranks of one engine stand side by side.
    members: Vec<Arc<Member>>,
    /// What they are called.
    names: Arc<[Arc<str>]>,
    /// All members: those with the labels that the pool prefers, then those without.
    boards: Vec<Arc<Board>>,
    /// Members with the values of the labels that pairs should share, likewise.
    pairs: HashMap<u64, Vec<Arc<Board>>>,
    /// Engines that tell of their caches.
    telling: Vec<u32>,
    policy: Box<dyn Policy>,
    by: LoadUnit,
    policy_name: &'static str,
    decisions: Option<Decisions>,
    turn: AtomicU64,
    /// Where prompts that are sent are noted; none if nobody asks.
    memory: Option<Arc<Memory>>,
    leg: Leg,
    all_out: AllOut,
    panic_percent: usize,
}

/// An engine that was chosen; the request counts as in flight there until this is dropped.
pub(crate) struct Reserved {
    pub member: Arc<Member>,
    pub load: InFlight,
    /// What it held of the prompt already, as far as is known.
    pub holding: Holding,
}

/// A choice, and from what it was made if somebody wants to know.
type Decided = (Result<(Choice, Manner), Scarce>, Option<Basis>);

/// What would be chosen.
pub(crate) struct Trial {
    pub chosen: Option<Arc<Member>>,
    pub sight: Sight,
}

/// Which choices are told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tell {
    Nothing,
    /// Those that found an engine.
    Choices,
    Everything,
}

impl Pool {
    /// `learns`: somebody will ask what the engines hold of a prompt.
    pub(crate) fn new(
        mut members: Vec<Arc<Member>>,
        policy: &PolicyConfig,
        memory: &Arc<Memory>,
        learns: bool,
    ) -> Self {
        members.sort_by_key(|member| member.holder());
        let learns = learns || matches!(policy, PolicyConfig::PrefixAware(_));
        let telling = members.iter().filter(|member| member.events.is_some());
        Self {
            names: members.iter().map(|member| member.engine.name()).collect(),
            boards: Vec::new(),
            pairs: HashMap::new(),
            telling: telling.map(|member| member.engine.id()).collect(),
            by: policy::unit_of(policy),
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

    /// Has its members tell its boards. Until then every choice is a walk.
    fn seated(self) -> Self {
        let board = |of: &dyn Fn(&Member) -> bool| {
            let members = self.members.iter().enumerate().filter(|(_, member)| of(member));
            let members: Vec<_> = members.map(|(index, member)| (index, Arc::clone(member))).collect();
            (!members.is_empty()).then(|| Board::new(members, self.leg, self.by))
        };
        let both = |of: &dyn Fn(&Member) -> bool| -> Vec<Arc<Board>> {
            let with = |preferred| board(&|member: &Member| of(member) && member.is_preferred() == preferred);
            [true, false].into_iter().filter_map(with).collect()
        };
        let boards = both(&|_| true);
        let mut pairs = HashMap::new();
        for pair in self.members.iter().filter_map(|member| member.pair()) {
            pairs.entry(pair).or_insert_with(|| both(&|member| member.pair() == Some(pair)));
        }
        Self { boards, pairs, ..self }
    }

    /// Says which leg it serves, and what happens when its engines are not well.
    pub(crate) fn guarded(self, leg: Leg, health: &HealthConfig) -> Self {
        let panic_percent = usize::from(health.panic_percent);
        self.members.iter().for_each(|member| member.engine.health().serve(leg));
        Self { leg, all_out: health.all_out, panic_percent, ..self }.seated()
    }

    /// Counts what is decided.
    pub(crate) fn counted(self, metrics: &Metrics, model: &str) -> Self {
        let decisions = Some(metrics.decisions(model, self.leg, self.policy_name));
        Self { decisions, ..self }
    }

    /// Members that may be given requests.
    pub(crate) fn in_use(&self) -> usize {
        self.boards.iter().map(|board| board.in_use()).sum()
    }

    /// Whether an engine that is known to live may be given requests.
    pub(crate) fn is_ready(&self) -> bool {
        self.members.iter().any(|member| {
            let (health, leg) = (member.engine.health(), self.leg);
            health.standing(leg) <= crate::engines::health::Standing::Trial && member.engine.is_known()
        })
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
        self.telling.iter().find_map(|engine| memory.block_size(*engine))
    }

    /// Requests of this router at the least loaded engine; 0 without any.
    pub(crate) fn least_in_flight(&self) -> usize {
        self.boards.iter().filter_map(|board| board.least_own()).min().unwrap_or(0) as usize
    }

    /// Chooses an engine that is not among those `tried`, and has room where that is needed, and counts the request in
    /// flight there. Tells what the choice was made from to whoever wants to know.
    ///
    /// # Errors
    /// [`Scarce`] says whether waiting helps.
    pub(crate) fn reserve(
        &self,
        wanted: &Wanted<'_>,
        tried: &[Arc<Engine>],
        room: Room,
        tell: Tell,
    ) -> (Result<Reserved, Scarce>, Option<Sight>) {
        let now = Now::new(Instant::now);
        let look = Look { tried, leg: self.leg, panic: self.panics(), room, now: &now };
        let mut tries = 0;
        let (basis, taken) = loop {
            let draw = Draw::at(self.turn.fetch_add(1, Ordering::Relaxed));
            let (decided, basis) = if tries < BOARD_TRIES {
                self.decide(wanted, &look, draw, tell)
            } else {
                self.walk(wanted, &look, draw)
            };
            match decided {
                Err(scarce) => break (basis, Err(scarce)),
                Ok((choice, manner)) => {
                    let member = &self.members[choice.index];
                    // If somebody else has taken its last place, or its trial, since, the choice is made again.
                    if let Some(load) = member.begin(&look, manner, wanted.tokens) {
                        break (basis, Ok((choice, load)));
                    }
                    tries += 1;
                }
            }
        };
        let choice = taken.as_ref().map(|(choice, _)| *choice).map_err(|&scarce| scarce);
        let holding = self.holding(choice.ok(), wanted);
        let is_told = tell == Tell::Everything || (tell == Tell::Choices && choice.is_ok());
        let sight = basis.filter(|_| is_told).map(|basis| self.sight(wanted, basis, choice, holding));
        let reserved = taken.map(|(choice, load)| {
            self.decisions.iter().for_each(|decisions| decisions.count(choice.reason));
            let member = &self.members[choice.index];
            self.memory.iter().for_each(|memory| memory.sent(member.holder(), wanted.prefix));
            Reserved { member: Arc::clone(member), load, holding }
        });
        (reserved, sight)
    }

    /// What the chosen one holds of the prompt, where somebody asks for that.
    fn holding(&self, choice: Option<Choice>, wanted: &Wanted<'_>) -> Holding {
        let holding = choice.zip(self.memory.as_ref()).map(|(choice, memory)| {
            memory.holding(self.members[choice.index].holder(), wanted.prefix, wanted.blocks)
        });
        holding.unwrap_or_default()
    }

    /// What [`Self::reserve`] would choose. Nothing is counted and nothing is noted.
    pub(crate) fn try_out(&self, wanted: &Wanted<'_>, tried: &[Arc<Engine>]) -> Trial {
        let now = Now::new(Instant::now);
        let look = Look { tried, leg: self.leg, panic: self.panics(), room: Room::Needed, now: &now };
        let draw = Draw::at(self.turn.load(Ordering::Relaxed));
        let (decided, basis) = self.decide(wanted, &look, draw, Tell::Everything);
        let choice = decided.map(|(choice, _)| choice);
        let holding = self.holding(choice.ok(), wanted);
        let sight = self.sight(wanted, basis.unwrap_or_default(), choice, holding);
        Trial { chosen: choice.ok().map(|choice| Arc::clone(&self.members[choice.index])), sight }
    }

    /// Those of these engines that are members, by their numbers, ascending.
    pub(crate) fn among(&self, engines: &[Arc<Engine>]) -> Vec<u32> {
        let members = engines.iter().filter(|engine| self.has(engine)).map(|engine| engine.id());
        let mut members: Vec<_> = members.collect();
        members.sort_unstable();
        members.dedup();
        members
    }

    fn has(&self, engine: &Arc<Engine>) -> bool {
        let at = self.members.partition_point(|m| m.engine.id() < engine.id());
        self.members.get(at).is_some_and(|m| Arc::ptr_eq(&m.engine, engine))
    }

    /// Whether some member that was not `tried` is full, and is not a member of `other` as well. It will have room: what
    /// it has in flight waits for nobody.
    pub(crate) fn will_have_room(&self, tried: &[Arc<Engine>], other: &Self) -> bool {
        let now = Now::new(Instant::now);
        let look = Look { tried, leg: self.leg, panic: false, room: Room::Needed, now: &now };
        self.members.iter().any(|member| member.fit(&look) == Fit::Full && !other.has(&member.engine))
    }

    /// A choice on the boards; a walk where they cannot say.
    fn decide(&self, wanted: &Wanted<'_>, look: &Look<'_>, draw: Draw, tell: Tell) -> Decided {
        if look.room == Room::Ignored || look.panic {
            return self.walk(wanted, look, draw);
        }
        let paired =
            wanted.pair.and_then(|pair| self.pairs.get(&pair)).map(Vec::as_slice).unwrap_or_default();
        let (mut full, mut others) = (false, Vec::new());
        // Where nobody of those that pair is ready, the others are all that are.
        for (board, last) in paired.iter().map(|b| (b, false)).chain(self.boards.iter().map(|b| (b, true))) {
            let view = board.view(look.tried);
            if let Some(choice) = self.policy.choose(wanted, &view, draw) {
                let basis = (tell != Tell::Nothing).then(|| self.seen(&view, board, choice, look));
                return (Ok((choice, Manner::Careful)), basis);
            }
            if last {
                full |= view.has_full();
                others.extend(view.few_not_ready(if tell == Tell::Nothing {
                    0
                } else {
                    NAMED - others.len()
                }));
            }
        }
        if !full {
            return self.walk(wanted, look, draw);
        }
        let basis = (tell != Tell::Nothing).then(|| Basis { others, ..Basis::default() });
        (Err(Scarce::Full), basis)
    }

    /// The same choice by a walk over all members.
    fn walk(&self, wanted: &Wanted<'_>, look: &Look<'_>, draw: Draw) -> Decided {
        match self.candidates(wanted, look) {
            Err(scarce) => (Err(scarce), Some(self.walked(Vec::new(), look))),
            Ok((candidates, manner)) => {
                let choice = self.policy.choose(wanted, &candidates, draw).ok_or(Scarce::NoEngine);
                (choice.map(|choice| (choice, manner)), Some(self.walked(candidates, look)))
            }
        }
    }

    /// The engines that the policy may choose from, and how the chosen one may be taken.
    fn candidates(&self, wanted: &Wanted<'_>, look: &Look<'_>) -> Result<(Vec<Candidate>, Manner), Scarce> {
        let (mut ready, mut resting, mut full) = (Vec::with_capacity(self.members.len()), Vec::new(), false);
        for (index, member) in self.members.iter().enumerate() {
            match member.fit(look) {
                Fit::Ready => ready.push((index, member.suits(wanted))),
                Fit::Resting if self.all_out == AllOut::FailOpen => {
                    resting.push((index, member.suits(wanted)))
                }
                Fit::Full => full = true,
                Fit::Resting | Fit::Tried | Fit::Silent | Fit::Draining => {}
            }
        }
        let mut manner = if look.panic { Manner::Anyway } else { Manner::Careful };
        if ready.is_empty() {
            if full {
                return Err(Scarce::Full);
            }
            (ready, manner) = (resting, Manner::Anyway);
        }
        let best = ready.iter().map(|(_, suits)| *suits).max().ok_or(Scarce::NoEngine)?;
        let fitting = ready.into_iter().filter(|(_, suits)| *suits == best);
        Ok((fitting.map(|(index, _)| self.members[index].candidate(index, look.now)).collect(), manner))
    }
}

/// An engine that is none of the first `avoided`, or else none of the next ones, and so on.
///
/// # Errors
/// That of the last try.
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

impl Reserved {
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.member.engine
    }

    /// Its values of the labels that its partner should share.
    pub(crate) fn pair(&self) -> Option<u64> {
        self.member.pair()
    }
}

impl Found for Reserved {}

impl Found for Result<Reserved, Scarce> {
    fn has_engine(&self) -> bool {
        self.is_ok()
    }
}

#[cfg(test)]
mod tests;
