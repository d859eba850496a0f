//! From raw events to a summary. A pure function: the same events give the same numbers, whenever they are read.

pub(crate) mod abort_delivery;
pub(crate) mod dist;
pub(crate) mod faults;
pub(crate) mod findings;
pub(crate) mod sampled;
pub(crate) mod series;
pub(crate) mod summary;
pub(crate) mod uncancelled;
pub(crate) mod vanished;

use std::collections::{BTreeMap, HashMap, HashSet};

use self::abort_delivery::Telling;
use self::dist::{Dist, Times};
use self::faults::Fault;
use self::summary::{EngineRow, Group, KindRow, PhaseRow, Service, StormCancels, Summary, Texts};
use self::vanished::NotPlayed;
use super::drive::rate::{Load, Rate};
use super::plan::phase::{Kind, Phase};
use super::record::raw::{ActKind, Books, CallRecord, EngineFacts, Record, Run};
use super::record::retries::Retries;
use super::record::timeline::{Leg, Timeline, Told};

/// The raw events, sorted into what they are about.
#[derive(Default)]
pub(crate) struct Facts {
    pub(crate) run: Run,
    pub(crate) engines: Vec<EngineFacts>,
    pub(crate) acts: Vec<Act>,
    pub(crate) calls: Vec<CallRecord>,
    /// By tag.
    pub(crate) timelines: BTreeMap<String, Timeline>,
    /// In the order of time.
    pub(crate) books: Vec<Books>,
    pub(crate) faults: Vec<Fault>,
    /// Tag, what was said in the run, and what is right.
    pub(crate) replays: Vec<(String, Option<String>, Option<String>)>,
    /// Tags of those whose prompt had two different answers when all was quiet, and how many had none.
    pub(crate) unsteady: Vec<String>,
    pub(crate) unanswered: u64,
    pub(crate) lost: u64,
    pub(crate) rate: Option<Rate>,
    /// Kinds of leaving that were not possible here, and why.
    pub(crate) not_played: Vec<NotPlayed>,
    pub(crate) compared_with: Option<serde_json::Value>,
    /// Broken off, and when.
    pub(crate) interrupted: Option<u64>,
    /// Why it could not go on.
    pub(crate) failed: Option<String>,
    /// Engines that were started again, and when.
    pub(crate) restarts: Vec<(usize, u64)>,
}

/// A part of the run.
#[derive(Clone, Debug)]
pub(crate) struct Act {
    pub(crate) name: String,
    pub(crate) what: ActKind,
    pub(crate) began: u64,
    pub(crate) ended: u64,
}

/// A client that left while its request was not over.
pub(crate) struct Victim<'a> {
    pub(crate) call: &'a CallRecord,
    /// What became of it; `None` where engines tell nothing.
    pub(crate) timeline: Option<&'a Timeline>,
    pub(crate) gone: u64,
    pub(crate) phase: Option<Phase>,
    /// Nobody looked at the engines afterwards.
    pub(crate) watched_until: u64,
}

impl Facts {
    /// Sorts raw events.
    pub(crate) fn of(records: &[Record]) -> Self {
        let mut facts = Self::default();
        // An engine's event with a number that was told already is that event.
        let mut told = HashSet::new();
        for record in records {
            match record {
                Record::Run(run) => facts.run = run.clone(),
                Record::Engine(engine) => {
                    // A later word on the same engine is the better one.
                    facts.engines.retain(|known| known.engine != engine.engine);
                    facts.engines.push(engine.clone());
                }
                Record::SegmentBegan { act, at_us, what } => {
                    let (name, what) = (act.clone(), *what);
                    facts.acts.push(Act { name, what, began: *at_us, ended: u64::MAX });
                }
                Record::SegmentEnded { act, at_us } => {
                    if let Some(known) = facts.acts.iter_mut().rev().find(|known| known.name == *act) {
                        known.ended = *at_us;
                    }
                }
                Record::Load(rate) => facts.rate = Some(*rate),
                Record::Call(call) => facts.calls.push(call.clone()),
                Record::Event(event) if !told.insert((event.engine, event.seq)) => {}
                Record::Event(event) => facts.timelines.entry(event.tag.clone()).or_default().take(event),
                Record::EngineState(books) => facts.books.push(books.clone()),
                Record::Interrupted { at_us } => facts.interrupted = Some(*at_us),
                Record::Failed { why, .. } => facts.failed = Some(why.clone()),
                Record::Restarted { engine, at_us } => {
                    // It counts anew.
                    told.retain(|(of, _)| of != engine);
                    facts.restarts.push((*engine, *at_us));
                }
                Record::NotPlayed { kind, why } => {
                    facts.not_played.push(NotPlayed { kind: *kind, why: why.clone() });
                }
                Record::ComparedWith { compared } => facts.compared_with = Some(compared.clone()),
                Record::Lost { events, .. } => facts.lost += events,
                Record::Fault { act, fault, at_us, mended, struck } => {
                    let (act, fault, struck) = (act.clone(), fault.clone(), struck.clone());
                    facts.faults.push(Fault { act, fault, at: *at_us, mended: *mended, struck });
                }
                Record::Replay { tag, text, said, unanswered, .. } => {
                    facts.unanswered += u64::from(*unanswered);
                    if text.is_some() && said.is_none() && !unanswered {
                        facts.unsteady.push(tag.clone());
                    }
                    facts.replays.push((tag.clone(), text.clone(), said.clone()));
                }
            }
        }
        if let Some(at) = facts.interrupted {
            // What became of them then is nobody's fault.
            facts.calls.retain(|call| call.ended_us < at);
        }
        facts.engines.sort_by_key(|engine| engine.engine);
        facts.books.sort_by_key(|books| books.at_us);
        facts
    }

    /// Whether every engine has an event log.
    pub(crate) fn exact(&self) -> bool {
        !self.engines.is_empty() && self.engines.iter().all(|engine| engine.events)
    }

    pub(crate) fn act(&self, name: &str) -> Option<&Act> {
        self.acts.iter().find(|act| act.name == name)
    }

    /// In the order of time.
    fn acts_of(&self, what: ActKind) -> Vec<&Act> {
        self.acts.iter().filter(|act| act.what == what).collect()
    }

    /// The last look at an engine.
    pub(crate) fn watched_until(&self) -> u64 {
        self.books.last().map_or(0, |books| books.at_us)
    }

    /// Whether who leaves in this part of the run is counted: not where it is to be learnt from, or something is broken.
    fn counts(&self, call: &CallRecord) -> bool {
        let what = self.act(&call.act).map(|act| act.what);
        what.is_some_and(|what| !matches!(what, ActKind::Calibration | ActKind::Fault | ActKind::Refused))
    }

    /// Whether a client that was to leave came too late: it has its whole answer, or its request was over on the engines.
    fn is_over_too_soon(&self, call: &CallRecord) -> bool {
        let over = |gone| {
            self.timelines.get(&call.tag).is_some_and(|timeline| phase_of(call, timeline, gone).is_none())
        };
        self.counts(call)
            && call.leaves.is_some()
            && match call.outcome.as_str() {
                "done" => call.left_us.is_none(),
                _ => gone(call).is_some_and(over),
            }
    }

    /// Whether the deployment ended the request of a client that read nothing any more, before that reset.
    fn is_let_go(&self, call: &CallRecord) -> bool {
        let (Some(leaves), Some(stalled)) = (call.leaves, call.left_us) else { return false };
        let told = |timeline: &Timeline| {
            timeline.legs.iter().flat_map(|leg| &leg.told).any(|at| (stalled..call.ended_us).contains(at))
        };
        leaves.kind == Kind::Stall
            && self.is_over_too_soon(call)
            && self.timelines.get(&call.tag).is_some_and(told)
    }

    /// Whether a client left while its request was not over; also one that half-closed, and was served all the same.
    fn has_left_in_time(&self, call: &CallRecord) -> bool {
        let left = gone(call).or(call.left_us.filter(|_| call.leaves.is_some() && call.outcome == "done"));
        left.is_some_and(|left| !self.exact() || self.phase_at(call, left).is_some())
    }

    /// Clients that left before their requests were over, but not in acts to learn from, nor where parts were broken.
    pub(crate) fn victims(&self) -> Vec<Victim<'_>> {
        self.calls.iter().filter(|call| self.counts(call)).filter_map(|call| self.victim(call)).collect()
    }

    /// The client of this call, if it left before its request was over.
    pub(crate) fn victim<'a>(&'a self, call: &'a CallRecord) -> Option<Victim<'a>> {
        let gone = gone(call)?;
        let timeline = self.timelines.get(&call.tag);
        let phase = match timeline {
            // Nobody tells where it was.
            None if !self.exact() => call.leaves.and_then(|leaves| leaves.phase),
            // `None`: over before the client left.
            _ => Some(self.phase_at(call, gone)?),
        };
        Some(Victim { call, timeline, gone, phase, watched_until: self.watched_until() })
    }

    /// The phase of a call at this moment, as its engines tell; `None`: it was over.
    pub(crate) fn phase_at(&self, call: &CallRecord, at: u64) -> Option<Phase> {
        // Without a word of any engine it is on its way, or was never sent on.
        self.timelines.get(&call.tag).map_or(Some(Phase::Queued), |timeline| phase_of(call, timeline, at))
    }
}

/// When the client of a call was gone; `None`: it stayed, or had its whole answer.
pub(crate) fn gone(call: &CallRecord) -> Option<u64> {
    let leaves = call.leaves?;
    if call.outcome != "left" {
        return None;
    }
    match leaves.kind {
        // Until it resets, it may read on at any moment.
        Kind::Stall => Some(call.ended_us),
        _ => call.left_us,
    }
}

/// In which phase a request was when its client left, or at another moment; `None`: it was over.
pub(crate) fn phase_of(call: &CallRecord, timeline: &Timeline, at: u64) -> Option<Phase> {
    // What an engine aborted because the client left was not over before that, whatever the clocks say.
    let gone = if self::gone(call) == Some(at) { timeline.before_told(at) } else { at };
    let phase = timeline.phase_at(&call.seen(), gone)?;
    // Who stalls has tokens before it, and does not look at them.
    let stalls = call.leaves.is_some_and(|leaves| leaves.kind == Kind::Stall);
    let says = |leg: &Leg| !leg.lends && leg.first_token.is_some_and(|at| at <= gone);
    if stalls && phase == Phase::FirstToken && timeline.legs.iter().any(says) {
        return Some(Phase::Stream);
    }
    Some(phase)
}

/// Everything that a run has shown.
pub(crate) fn summary(records: &[Record]) -> Summary {
    let facts = Facts::of(records);
    // No deployment can know at once that a host has vanished: such clients are counted by themselves.
    let (vanished, victims): (Vec<_>, Vec<_>) =
        facts.victims().into_iter().partition(|victim| victim.call.vanishes());
    let telling = Telling::of(&victims);
    let group = |of: &dyn Fn(&Victim<'_>) -> bool| {
        let chosen: Vec<_> = victims.iter().chain(&vanished).filter(|victim| of(victim)).collect();
        let ran_on = Some(abort_delivery::ran_on(&chosen, &telling));
        Group { ran_on, ..grouped(&chosen, &facts) }
    };
    let aimed_at = |call: &CallRecord| call.leaves.and_then(|leaves| leaves.phase);
    let phases = |vanish: bool| {
        let of = |phase| {
            let ours = |call: &CallRecord| call.vanishes() == vanish && aimed_at(call) == Some(phase);
            let aimed = facts.calls.iter().filter(|call| ours(call)).count() as u64;
            let group = group(&|victim| victim.call.vanishes() == vanish && victim.phase == Some(phase));
            (aimed + group.cancelled > 0).then_some(PhaseRow { phase, aimed, group })
        };
        Phase::ALL.into_iter().filter_map(of).collect::<Vec<_>>()
    };
    let kind_of: HashMap<&str, Kind> =
        facts.calls.iter().filter_map(|call| Some((call.tag.as_str(), call.leaves?.kind))).collect();
    let kinds = Kind::ALL.into_iter().filter_map(|kind| {
        let is = |call: &CallRecord| call.leaves.is_some_and(|leaves| leaves.kind == kind);
        // Where a part was broken, neither those that left nor those that were served are counted here.
        let served = |call: &&CallRecord| {
            is(call) && call.outcome == "done" && call.left_us.is_some() && facts.counts(call)
        };
        let served = facts.calls.iter().filter(served).count() as u64;
        let over = |call: &&CallRecord| is(call) && facts.is_over_too_soon(call);
        let too_late = facts.calls.iter().filter(over).count() as u64;
        let dropped_by_server = |call: &&CallRecord| is(call) && facts.is_let_go(call);
        let dropped_by_server = facts.calls.iter().filter(dropped_by_server).count() as u64;
        let again = |call: &&CallRecord| {
            let first = call.retries.as_deref();
            first.is_some_and(|first| kind_of.get(first) == Some(&kind)) && facts.counts(call)
        };
        let retries = Retries::of(facts.calls.iter().filter(again));
        let group = group(&|victim| is(victim.call));
        (group.cancelled + served + too_late > 0).then_some(KindRow {
            kind,
            served,
            too_late,
            dropped_by_server,
            retries,
            group,
        })
    });
    let mut summary = Summary {
        load: Load::of(&facts),
        exact: facts.exact(),
        requests: facts.calls.len() as u64,
        cancelled: victims.len() as u64,
        all: group(&|victim| !victim.call.vanishes()),
        phases: phases(false),
        kinds: kinds.collect(),
        vanished: vanished::of(&facts, &vanished, group(&|victim| victim.call.vanishes()), phases(true)),
        not_played: facts.not_played.clone(),
        refused: refused(&facts),
        calm: service(&facts, &facts.acts_of(ActKind::Calm)),
        storm: service(&facts, &facts.acts_of(ActKind::Storm)),
        storm_cancels: storm_cancels(&facts),
        calm_paired: stand_ins(&facts),
        ttft_p99_over_calm_paired: uncancelled::ttft_p99_over_calm_paired(&facts),
        uncancelled: uncancelled::compared(&facts),
        work: abort_delivery::rows(&victims, &telling).into_iter().map(|(row, _)| row).collect(),
        faults: faults::rows(&facts),
        excused_leases: findings::excused_leases(&facts),
        engines: facts.engines.iter().map(|engine| engine_row(&facts, engine)).collect(),
        texts: texts(&facts),
        sampled: sampled::of(&facts, victims.len() as u64).filter(|_| !facts.exact()),
        compared_with: facts.compared_with.clone(),
        events_lost: facts.lost,
        interrupted: facts.interrupted.is_some(),
        failed: facts.failed.clone(),
        series: series::of(&facts, &victims, &vanished),
        findings: Vec::new(),
        run: facts.run.clone(),
    };
    summary.findings = findings::of(&facts, &victims, &vanished, &summary);
    summary
}

/// An engine's books are looked at many times in this time.
const FRESH_US: u64 = 2_000_000;

pub(super) fn ms(us: u64) -> f64 {
    us as f64 / 1e3
}

/// What these clients did to the engines.
pub(super) fn grouped(victims: &[&Victim<'_>], facts: &Facts) -> Group {
    let exact = facts.exact();
    let mut group = Group { exact, cancelled: victims.len() as u64, ..Group::default() };
    let (mut told, mut back, mut back_at_p) = (Times::default(), Times::default(), Times::default());
    for Victim { call, timeline, gone, watched_until, .. } in victims {
        let Some(timeline) = timeline else { continue };
        // For as long as anybody looked.
        let watched = ms(watched_until.saturating_sub(*gone));
        match timeline.told(*gone) {
            Told::Nobody => {}
            Told::All(at) => told.ended(ms(at.saturating_sub(*gone))),
            Told::Never => {
                group.abort_not_received += 1;
                told.never(watched);
            }
        }
        match timeline.home_at() {
            None => {
                group.never_freed += 1;
                // Blocks of a vanished client may be held for longer than the engines were watched.
                let soon = call.vanishes() && watched <= ms(facts.stranded_after(call));
                group.stranded += u64::from(!soon);
                back.never(watched);
            }
            // It held nothing any more when its client left.
            Some(home) if home <= *gone => {}
            Some(home) => {
                back.ended(ms(home - gone));
                group.stranded += u64::from(home - gone > facts.stranded_after(call));
            }
        }
        let lending = timeline.legs.iter().filter(|leg| leg.lends && (leg.held() > 0 || leg.is_at_work()));
        let at_p: Vec<_> = lending.map(|leg| leg.freed.first().map(|(at, _)| *at)).collect();
        if at_p.contains(&None) {
            back_at_p.never(watched);
        } else if let Some(at) = at_p.into_iter().flatten().max().filter(|at| at > gone) {
            back_at_p.ended(ms(at - gone));
        }
        group.block_seconds += timeline.block_seconds_after(*gone, *watched_until);
        let (prompt, answer) = timeline.work_after(*gone, u64::from(call.generated));
        group.wasted_prompt_tokens += prompt;
        group.wasted_response_tokens += answer;
        group.expired += u64::from(timeline.expired());
    }
    (group.abort_ms, group.time_to_free_ms) = (told.dist(), back.dist());
    group.time_to_free_at_prefill_ms = back_at_p.dist();
    group.block_seconds_per_1000 = group.block_seconds * 1_000.0 / group.cancelled.max(1) as f64;
    group
}

/// Clients that the decode engine refused: from the refusal until the prefill engine's blocks were back.
fn refused(facts: &Facts) -> Option<Group> {
    let act = facts.acts.iter().find(|act| act.what == ActKind::Refused)?;
    let lent = |call: &CallRecord| {
        facts
            .timelines
            .get(&call.tag)
            .is_some_and(|timeline| timeline.legs.iter().any(|leg| leg.lent.is_some()))
    };
    // A gateway that refuses them itself has nothing to give back.
    let refused =
        facts.calls.iter().filter(|call| call.act == act.name && call.outcome == "refused" && lent(call));
    let victims: Vec<Victim<'_>> = refused
        .map(|call| Victim {
            call,
            timeline: facts.timelines.get(&call.tag),
            gone: call.ended_us,
            phase: None,
            watched_until: facts.watched_until(),
        })
        .collect();
    let mut group = grouped(&victims.iter().collect::<Vec<_>>(), facts);
    // The refusal is the last that anybody hears of it; nobody has to be told.
    (group.abort_ms, group.abort_not_received) = (Dist::default(), 0);
    Some(group)
}

/// Its client stays to the end. One that asks again after it has left is not one that stayed.
pub(super) fn stays(call: &CallRecord) -> bool {
    call.leaves.is_none() && call.retries.is_none()
}

/// What clients that stayed got in these acts.
pub(super) fn service(facts: &Facts, acts: &[&Act]) -> Option<Service> {
    let of = |act: &&Act| {
        facts.calls.iter().filter(|call| call.act == act.name).filter(|call| stays(call)).collect()
    };
    let parts: Vec<Vec<&CallRecord>> = acts.iter().map(of).collect();
    (!parts.is_empty()).then(|| served(&parts))
}

/// Who was to leave in the storms of all rounds, and who did so in time.
fn storm_cancels(facts: &Facts) -> Option<StormCancels> {
    let storms: Vec<_> = facts.acts_of(ActKind::Storm).into_iter().map(|act| act.name.as_str()).collect();
    let arrivals = |call: &&CallRecord| storms.contains(&call.act.as_str()) && call.retries.is_none();
    let mut leavers = StormCancels::default();
    for call in facts.calls.iter().filter(arrivals) {
        leavers.requests += 1;
        leavers.drawn += u64::from(call.leaves.is_some());
        leavers.in_time += u64::from(facts.has_left_in_time(call));
    }
    leavers.share_in_time = leavers.in_time as f64 / leavers.requests.max(1) as f64;
    (!storms.is_empty()).then_some(leavers)
}

/// What the requests of the calm got whose clients stay in the storm.
fn stand_ins(facts: &Facts) -> Option<Service> {
    let (rounds, _) = uncancelled::rounds(facts);
    let parts: Vec<Vec<&CallRecord>> =
        rounds.iter().map(|round| round.pairs.iter().map(|(calm, _)| *calm).collect()).collect();
    (!parts.is_empty()).then(|| served(&parts))
}

/// What these calls got, part by part of the run.
fn served(parts: &[Vec<&CallRecord>]) -> Service {
    let (mut ttft, mut itl, mut tpot, mut e2e) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut service = Service::default();
    let (mut tokens, mut lasted) = (0, 0);
    for calls in parts {
        let (mut first, mut last) = (u64::MAX, 0_u64);
        for call in calls {
            service.requests += 1;
            if call.outcome != "done" {
                service.errors += 1;
                continue;
            }
            (first, last) = (first.min(call.due_us), last.max(call.ended_us));
            tokens += u64::from(call.generated);
            e2e.push(ms(call.ended_us.saturating_sub(call.due_us)));
            ttft.extend(series::ttft(call));
            itl.extend(series::gaps(call));
            tpot.extend(series::tpot(call));
        }
        lasted += last.saturating_sub(first);
    }
    service.tokens_per_second = tokens as f64 * 1e6 / lasted.max(1) as f64;
    service.itl_within_one_read = series::within_one_read(&itl);
    (service.ttft_ms, service.itl_ms) = (Dist::of(&ttft), Dist::of(&itl));
    (service.tpot_ms, service.e2e_ms) = (Dist::of(&tpot), Dist::of(&e2e));
    service
}

/// The first moment after `at` from which every engine's books say that nothing is held, until `end`.
pub(super) fn home_after(facts: &Facts, at: u64, end: u64) -> Option<u64> {
    let mut home = at;
    for engine in &facts.engines {
        let ours = |books: &&Books| books.engine == engine.engine && books.at_us >= at && books.at_us <= end;
        let looks: Vec<_> = facts.books.iter().filter(ours).collect();
        let quiet = looks.iter().rposition(|books| books.held > 0).map_or(0, |last| last + 1);
        home = home.max(looks.get(quiet)?.at_us);
    }
    Some(home)
}

pub(super) fn expired_during(facts: &Facts, engine: usize, act: &Act) -> u64 {
    let ours = facts.books.iter().filter(|books| books.engine == engine);
    let within = ours.filter(|books| books.at_us >= act.began && books.at_us <= act.ended);
    // An engine that was started again counts from nothing.
    let pairs: Vec<u64> = within.map(|books| books.expired).collect();
    pairs.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).sum()
}

fn engine_row(facts: &Facts, engine: &EngineFacts) -> EngineRow {
    let books: Vec<_> = facts.books.iter().filter(|books| books.engine == engine.engine).collect();
    // Outside of the acts the benchmark asks things that are no calls.
    let in_act = |at: u64| facts.acts.iter().any(|act| act.began <= at && at < act.ended);
    let there: Vec<_> = facts.calls.iter().map(|call| (call.began_us, facts.there_until(call))).collect();
    let idle = |at: u64| in_act(at) && !there.iter().any(|(began, until)| *began <= at && at < *until);
    let idle_block_us: u64 = books
        .windows(2)
        .filter(|pair| idle(pair[0].at_us) && idle(pair[1].at_us))
        .map(|pair| pair[0].held.min(pair[1].held) * (pair[1].at_us - pair[0].at_us))
        .sum();
    let counts: Vec<u64> = books.iter().map(|books| books.expired).collect();
    EngineRow {
        name: engine.name.clone(),
        role: engine.role.clone(),
        exact: engine.events,
        blocks: engine.blocks,
        held_at_most: books.iter().map(|books| books.held).max().unwrap_or(0),
        // An engine that was last seen long ago says nothing of the end.
        held_at_end: books
            .last()
            .filter(|last| last.at_us + FRESH_US > facts.watched_until())
            .map(|last| last.held),
        excused_at_end: books
            .last()
            .map_or(0, |last| findings::excused_at_end(facts, engine.engine, last.at_us).min(last.held)),
        ghosts_at_end: books
            .last()
            .map_or(0, |last| facts.held_for_ghosts(engine.engine, last.at_us, last.held)),
        expired: counts.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).sum(),
        too_many: books.iter().filter(|books| books.askew > 0).count() as u64,
        too_few: books.iter().filter(|books| books.askew < 0).count() as u64,
        idle_block_seconds: idle_block_us as f64 / 1e6,
        sampled: sampled::of_engine(facts, engine.engine).filter(|_| !facts.exact()),
    }
}

fn texts(facts: &Facts) -> Texts {
    let calm = |tag: &str| {
        let call = facts.calls.iter().find(|call| call.tag == tag);
        call.and_then(|call| facts.act(&call.act))
            .is_some_and(|act| matches!(act.what, ActKind::Calm | ActKind::Calibration))
    };
    let (unsteady, unanswered) = (facts.unsteady.len() as u64, facts.unanswered);
    let mut texts = Texts { nondeterministic: unsteady, unanswered, ..Texts::default() };
    for (tag, ..) in facts.replays.iter().filter(|(_, text, said)| text.is_some() && said.is_some()) {
        texts.compared += 1;
        texts.compared_in_calm += u64::from(calm(tag));
    }
    for tag in wrong(facts) {
        texts.wrong += 1;
        texts.wrong_in_calm += u64::from(calm(tag));
    }
    texts
}

/// The tags of answers that were not what the same prompt gives when all is quiet. What a client that left has seen must
/// be the beginning of that.
pub(crate) fn wrong(facts: &Facts) -> impl Iterator<Item = &str> {
    facts.replays.iter().filter_map(|(tag, text, said)| {
        let (text, said) = (text.as_ref()?, said.as_ref()?);
        let whole = facts.calls.iter().any(|call| call.tag == *tag && call.outcome == "done");
        let right = if whole { text == said } else { said.starts_with(text.as_str()) };
        (!right).then_some(tag.as_str())
    })
}
