//! A prefill and a decode engine on a network in virtual time: single sequences, and random ones by seed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use baton_connector_leases::event_log::EventLog;

use super::super::{AbortSource, Leg, RequestEnd, Source, Submission};
use super::*;
use crate::load::rng::Rng;
use crate::sim::engines::plan::EnginePlan;
use crate::sim::engines::{pool::PoolUsage, text};

const SECOND: u64 = 1_000_000;
const PROMPT: usize = 40;
/// Blocks of a prompt.
const BLOCKS: usize = 3;

/// One of the two engines.
const P: usize = 0;
const D: usize = 1;

enum PushMessage {
    Register(Registration),
    Written(Registration, Vec<u64>),
}

/// Two engines, the messages between them, and the ends of their requests.
struct PushPair {
    cores: [Core; 2],
    logs: [Arc<EventLog>; 2],
    now_us: u64,
    /// By arrival. Messages overtake each other.
    network: BTreeMap<(u64, u64), PushMessage>,
    sent: u64,
    latency_us: u64,
    ends: [HashMap<Ticket, RequestEnd>; 2],
    words: HashMap<Ticket, Vec<&'static str>>,
    /// D's requests that were registered, and those whose blocks were written.
    registered: HashSet<Ticket>,
    written: HashSet<Ticket>,
}

impl PushPair {
    fn new(plan: &EnginePlan) -> Self {
        let logs = [Arc::new(EventLog::default()), Arc::new(EventLog::default())];
        let core = |side: usize| Core::new(plan.clone(), Arc::clone(&logs[side]), side as u64 + 1);
        Self {
            cores: [core(P), core(D)],
            logs,
            now_us: 0,
            network: BTreeMap::new(),
            sent: 0,
            latency_us: 200,
            ends: Default::default(),
            words: HashMap::new(),
            registered: HashSet::new(),
            written: HashSet::new(),
        }
    }

    fn drive<T>(&mut self, side: usize, what: impl FnOnce(&mut Core, u64) -> T) -> T {
        let result = what(&mut self.cores[side], self.now_us);
        self.cores[side].advance(self.now_us);
        for action in self.cores[side].take_actions() {
            let message = match action {
                Action::Register(ticket, _, registration) => {
                    assert!(self.registered.insert(ticket), "a request registers once");
                    PushMessage::Register(registration)
                }
                Action::Written(registration, contents) => PushMessage::Written(registration, contents),
                // A request that has not registered. P does not know it.
                Action::Release(..) => continue,
                Action::Fetch(..) | Action::StopFetch(_) => panic!("a push engine reads nothing"),
            };
            self.sent += 1;
            self.network.insert((self.now_us + self.latency_us, self.sent), message);
        }
        result
    }

    fn submit(&mut self, side: usize, name: &str, max_tokens: usize) -> Ticket {
        self.sent += 1;
        let id = RequestId::new(name).expect("an id");
        let internal = RequestId::new(&format!("cmpl-{name}-0-{:08x}", self.sent)).expect("an id");
        let source =
            Source { engine: "p".into(), lease: LeaseKey::Unnamed, blocks: vec![], tokens: usize::MAX };
        let sent = Submission {
            id,
            internal,
            tag: None,
            leg: if side == P { Leg::Prefill } else { Leg::Decode },
            prompt: PROMPT,
            contents: contents(name),
            max_tokens: if side == P { 1 } else { max_tokens },
            source: (side == D).then_some(source),
            progress: Arc::default(),
        };
        self.drive(side, |core, now_us| core.submit(sent, now_us)).expect("a place in the queue")
    }

    fn abort(&mut self, side: usize, ticket: Ticket) {
        self.drive(side, |core, now_us| core.abort(ticket, AbortSource::Disconnect, now_us));
    }

    /// Moves to the next event at or before `until_us`.
    fn step(&mut self, until_us: u64) -> bool {
        let message = self.network.first_key_value().map(|((at_us, _), _)| *at_us);
        let timers = self.cores.iter().filter_map(Core::next_us);
        let Some(next_us) = timers.chain(message).min().filter(|at_us| *at_us <= until_us) else {
            self.now_us = until_us;
            return false;
        };
        self.now_us = self.now_us.max(next_us);
        while let Some(entry) = self.network.first_entry().filter(|entry| entry.key().0 <= self.now_us) {
            match entry.remove() {
                PushMessage::Register(registration) => {
                    self.drive(P, |core, now_us| core.register(registration, now_us));
                }
                PushMessage::Written(registration, contents) => {
                    assert!(self.written.insert(registration.ticket), "blocks are written once");
                    self.drive(D, |core, _| core.land(&registration, contents));
                }
            }
        }
        for side in [P, D] {
            self.drive(side, |_, _| ());
            self.collect(side);
        }
        true
    }

    fn collect(&mut self, side: usize) {
        let tickets: Vec<_> = self.cores[side].requests.keys().copied().collect();
        for ticket in tickets {
            let output = self.cores[side].take(ticket);
            if side == D {
                self.words.entry(ticket).or_default().extend(output.words);
            }
            if let Some(end) = output.end {
                assert!(self.ends[side].insert(ticket, end).is_none(), "a request ends once");
            }
        }
    }

    fn run_for(&mut self, micros: u64) {
        let until_us = self.now_us + micros;
        while self.step(until_us) {}
        for side in [P, D] {
            self.collect(side);
        }
    }

    fn usage(&self, side: usize) -> PoolUsage {
        self.cores[side].usage()
    }

    fn is_free(&self, side: usize) -> bool {
        self.usage(side).free == self.usage(side).total
    }

    /// P is empty, and D holds exactly the blocks whose write never came.
    #[track_caller]
    fn assert_rest(&self, seed: u64) {
        let unwritten = self.registered.difference(&self.written).count();
        let PoolUsage { total, free, active, landing, leased } = self.usage(D);
        assert!(self.is_free(P), "seed {seed}: {:?}", self.usage(P));
        assert_eq!((landing, active, leased), (unwritten * BLOCKS_OF_D, 0, 0), "seed {seed}");
        assert_eq!(free + landing, total, "seed {seed}");
        assert!(self.cores[P].push.waiting.is_empty() && self.cores[P].push.writes.is_empty(), "seed {seed}");
        assert_eq!(self.cores[P].requests.len(), 0, "seed {seed}");
        assert_eq!(self.cores[D].requests.len(), unwritten, "seed {seed}");
        for log in &self.logs {
            let mut freed = HashSet::new();
            for event in log.page(0, usize::MAX).events {
                if event["kind"] == "freed" {
                    assert!(freed.insert(event["request_id"].clone()), "seed {seed}: freed twice");
                }
            }
        }
    }
}

/// Blocks of a decode request: its prompt and up to eight tokens.
const BLOCKS_OF_D: usize = 3;

fn plan() -> EnginePlan {
    EnginePlan {
        prefill_rate: 1_000,
        fetch_rate: 100,
        step_tokens: 16,
        blocks: 120,
        push: Some(Duration::from_secs(480)),
        ..EnginePlan::default()
    }
}

fn contents(name: &str) -> Vec<u64> {
    let token = name.bytes().fold(0u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    text::contents(&[token; PROMPT], 16)
}

fn right(name: &str) -> &'static str {
    text::word(contents(name).into_iter(), 0)
}

#[test]
fn legs_in_either_order_meet_by_the_id_of_their_request() {
    for first in [P, D] {
        let mut pair = PushPair::new(&plan());
        let one = pair.submit(first, "a", 5);
        let stranger = pair.submit(D, "b", 5);
        pair.run_for(SECOND);
        let other = pair.submit(1 - first, "a", 5);
        pair.run_for(SECOND);
        let decode = if first == D { one } else { other };
        assert_eq!(pair.ends[D].get(&decode), Some(&RequestEnd::Length));
        assert_eq!((pair.words[&decode].len(), pair.words[&decode][0]), (5, right("a")));
        assert!(pair.is_free(P) && !pair.ends[D].contains_key(&stranger));
        pair.run_for(500 * SECOND);
        pair.assert_rest(0);
    }
}

#[test]
fn only_the_end_of_the_write_frees_the_blocks_of_a_cancelled_request() {
    let mut pair = PushPair::new(&plan());
    let decode = pair.submit(D, "a", 5);
    pair.run_for(SECOND);
    pair.abort(D, decode);
    pair.run_for(SECOND);
    assert_eq!((pair.usage(D).landing, pair.ends[D].len()), (BLOCKS, 0));
    pair.submit(P, "a", 1);
    // 3 steps, a message, and three blocks at 100 per second.
    pair.run_for(60_000);
    assert_eq!((pair.usage(P).leased, pair.usage(D).landing), (BLOCKS, BLOCKS), "the write is under way");
    pair.run_for(SECOND);
    assert_eq!(pair.ends[D].get(&decode), Some(&RequestEnd::Aborted));
    assert!(pair.is_free(P) && pair.is_free(D));
    assert_eq!(pair.cores[D].counts.stray_writes, 0);
}

#[test]
fn without_a_prefill_blocks_are_held_without_end() {
    for aborts in [false, true] {
        let mut pair = PushPair::new(&plan());
        let decode = pair.submit(D, "a", 5);
        let prefill = aborts.then(|| pair.submit(P, "a", 1));
        pair.run_for(10_000);
        prefill.into_iter().for_each(|prefill| pair.abort(P, prefill));
        pair.abort(D, decode);
        pair.run_for(479 * SECOND);
        assert_eq!(pair.cores[P].push.waiting.len(), 1);
        pair.run_for(10_000 * SECOND);
        assert_eq!((pair.cores[P].push.waiting.len(), pair.usage(D).landing), (0, BLOCKS));
        pair.assert_rest(0);
        // The registration is dropped, so a prefill that comes now writes nothing either.
        pair.submit(P, "a", 1);
        pair.run_for(29 * SECOND);
        assert_eq!(pair.usage(P).leased, BLOCKS);
        pair.run_for(2 * SECOND);
        pair.assert_rest(0);
    }
}

#[test]
fn a_lease_without_a_decode_engine_ends_by_time() {
    let mut pair = PushPair::new(&plan());
    pair.submit(P, "a", 1);
    pair.run_for(30 * SECOND);
    assert_eq!(pair.usage(P).leased, BLOCKS);
    pair.run_for(SECOND);
    assert!(pair.is_free(P));
    // A decode engine that comes later waits without end.
    pair.submit(D, "a", 5);
    pair.run_for(1_000 * SECOND);
    assert_eq!(pair.usage(D).landing, BLOCKS);
    pair.assert_rest(0);
}

#[test]
fn a_lease_whose_write_has_begun_does_not_expire() {
    let slow = EnginePlan { fetch_rate: 1, lease: Duration::from_secs(2), ..plan() };
    let mut pair = PushPair::new(&slow);
    pair.submit(P, "a", 1);
    let decode = pair.submit(D, "a", 5);
    pair.run_for(10 * SECOND);
    assert_eq!(pair.words[&decode][0], right("a"));
    pair.assert_rest(0);
}

#[derive(Clone, Copy, PartialEq)]
enum Rules {
    /// Both legs abort at any time.
    None,
    /// A prefill whose decode leg was sent runs to its end.
    Router,
}

/// Random legs, aborts and latencies. Returns the pair when everything is over.
fn storm(seed: u64, rules: Rules, plan: &EnginePlan) -> PushPair {
    let mut rng = Rng::stream(seed, "push");
    let mut pair = PushPair::new(plan);
    let mut tickets: Vec<[Option<Ticket>; 2]> = Vec::new();
    for number in 0..30 {
        pair.latency_us = [50, 500, 5_000, 40_000][rng.below(4) as usize];
        let name = format!("r{number}");
        let sides: &[usize] = match (rng.below(8), rules) {
            (0, Rules::None) => &[P],
            (1, Rules::None) => &[D],
            (0..=4, _) => &[P, D],
            _ => &[D, P],
        };
        let mut legs = [None; 2];
        for &side in sides {
            legs[side] = Some(pair.submit(side, &name, 1 + rng.below(8) as usize));
            pair.run_for(rng.below(30_000));
        }
        tickets.push(legs);
        for _ in 0..rng.below(3) {
            let at = tickets.len() - 1 - rng.below(tickets.len().min(4) as u64) as usize;
            for side in [P, D] {
                let may = side == D || rules == Rules::None;
                if let Some(ticket) = tickets[at][side].filter(|_| may && rng.below(2) == 0) {
                    pair.abort(side, ticket);
                }
            }
            pair.run_for(rng.below(60_000));
        }
    }
    pair.run_for(1_000 * SECOND);
    // Every text is that of its own prompt.
    for (number, legs) in tickets.iter().enumerate() {
        let words = legs[D].and_then(|ticket| pair.words.get(&ticket)?.first());
        if plan.faults == Default::default() {
            assert!(words.is_none_or(|word| *word == right(&format!("r{number}"))), "seed {seed}");
        }
    }
    pair
}

#[test]
fn after_random_legs_and_aborts_only_unwritten_blocks_are_held() {
    let mut unwritten = 0;
    for seed in 0..300 {
        let pair = storm(seed, Rules::None, &plan());
        pair.assert_rest(seed);
        assert_eq!(pair.cores[D].counts.stray_writes, 0, "seed {seed}");
        unwritten += pair.registered.len() - pair.written.len();
    }
    assert!(unwritten > 0, "some prefill was aborted");
}

#[test]
fn if_prefills_run_to_their_end_every_block_is_freed() {
    for seed in 0..300 {
        let pair = storm(seed, Rules::Router, &plan());
        pair.assert_rest(seed);
        assert!(pair.is_free(D), "seed {seed}: {:?}", pair.usage(D));
    }
}

#[test]
fn a_decode_engine_that_frees_at_the_abort_is_written_into_blocks_of_others() {
    let mut sick = plan();
    sick.faults.plant(crate::sim::engines::Fault::FreesBeforeWrite);
    let strays =
        (0..300).map(|seed| storm(seed, Rules::Router, &sick).cores[D].counts.stray_writes).sum::<u64>();
    assert!(strays > 0);
}
