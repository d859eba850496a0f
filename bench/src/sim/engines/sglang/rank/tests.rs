//! A prefill and a decode rank on a network in virtual time: single sequences, and random ones by seed.

use std::collections::{BTreeMap, HashSet};
use std::net::Ipv4Addr;

use super::super::message::PeerMessage;
use super::*;
use crate::load::rng::Rng;

const SECOND: u64 = 1_000_000;
const PROMPT: usize = 40;

/// One of the two ranks.
const P: usize = 0;
const D: usize = 1;

fn address(side: usize) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 1 + side as u16))
}

/// A pair of ranks, the messages between them, and the outputs of their legs.
struct TestPair {
    ranks: [SglangRank; 2],
    logs: [Arc<EventLog>; 2],
    now_us: u64,
    /// Messages by arrival. Each direction keeps its order.
    network: BTreeMap<(u64, u64), (usize, PeerMessage)>,
    last_us: [u64; 2],
    sent: u64,
    latency_us: u64,
    /// Whether P receives and sends nothing.
    partitioned: bool,
    ends: [HashMap<LegTicket, RankLegEnd>; 2],
    words: HashMap<LegTicket, Vec<Cow<'static, str>>>,
    /// Writes into pages that another leg or none holds.
    stray_writes: usize,
}

impl TestPair {
    fn new(aborts: AbortExchange, plan: EnginePlan) -> Self {
        let logs = [Arc::new(EventLog::default()), Arc::new(EventLog::default())];
        let waits = super::super::plan::SglangPlan::new(super::super::super::plan::FleetPlan::new(
            1,
            1,
            plan.clone(),
        ))
        .waits();
        let rank = |side: usize| {
            let role = if side == P { Role::Prefill } else { Role::Decode };
            let (at, plan) = (address(side), plan.clone());
            let traits = RankTraits { plan, waits, aborts, role, number: 0, ranks: 1, at };
            SglangRank::new(traits, Arc::clone(&logs[side]), 1_000 * (side as u64 + 1))
        };
        Self {
            ranks: [rank(P), rank(D)],
            logs,
            now_us: 0,
            network: BTreeMap::new(),
            last_us: [0; 2],
            sent: 0,
            latency_us: 200,
            partitioned: false,
            ends: Default::default(),
            words: HashMap::new(),
            stray_writes: 0,
        }
    }

    fn drive<T>(&mut self, side: usize, what: impl FnOnce(&mut SglangRank, u64) -> T) -> T {
        let result = what(&mut self.ranks[side], self.now_us);
        self.ranks[side].advance(self.now_us);
        for action in self.ranks[side].take_actions() {
            self.act(side, action);
        }
        result
    }

    fn act(&mut self, side: usize, action: RankAction) {
        match action {
            RankAction::Send(to, Envelope { message, .. }) => {
                let to = usize::from(to == address(D));
                assert_ne!(to, side, "no rank sends to itself");
                self.sent += 1;
                let at_us = (self.now_us + self.latency_us).max(self.last_us[to]);
                self.last_us[to] = at_us;
                if !self.partitioned {
                    self.network.insert((at_us, self.sent), (to, message));
                }
            }
            RankAction::Resolve { ticket, .. } => {
                let prefill = PeerRank { at: address(P), rank: 0 };
                self.drive(side, |rank, now_us| rank.resolved(ticket, Ok(prefill), now_us));
            }
        }
    }

    fn submit(&mut self, side: usize, room: u64, rid: &str, max_tokens: usize) -> LegTicket {
        let sent = LegSubmission {
            id: RequestId::new(&format!("{rid}-{side}-{}", self.sent)).expect("an id"),
            rid: rid.to_owned(),
            tag: None,
            room,
            bootstrap: "p".to_owned(),
            prefill_rank: None,
            prompt: PROMPT,
            contents: super::super::super::text::contents(&[room as u32; PROMPT], 16),
            max_tokens,
            progress: Arc::default(),
        };
        self.sent += 1;
        self.drive(side, |rank, now_us| rank.submit(sent, now_us)).expect("a place in the queue")
    }

    fn abort(&mut self, side: usize, rid: &str) {
        self.drive(side, |rank, now_us| rank.abort_prefix(rid, EndCause::Verb, now_us));
    }

    /// Moves to the next event at or before `until_us`.
    fn step(&mut self, until_us: u64) -> bool {
        let message = self.network.first_key_value().map(|((at_us, _), _)| *at_us);
        let timers = self.ranks.iter().filter_map(SglangRank::next_us);
        let Some(next_us) = timers.chain(message).min().filter(|at_us| *at_us <= until_us) else {
            self.now_us = until_us;
            return false;
        };
        self.now_us = self.now_us.max(next_us);
        while let Some(entry) = self.network.first_entry().filter(|entry| entry.key().0 <= self.now_us) {
            let (to, message) = entry.remove();
            self.check_write(&message);
            self.drive(to, |rank, now_us| rank.receive(message, now_us));
        }
        for side in [P, D] {
            self.drive(side, |_, _| ());
            self.collect(side);
        }
        true
    }

    /// Counts a write into pages that the leg does not hold.
    fn check_write(&mut self, message: &PeerMessage) {
        let PeerMessage::Written { leg, pages, .. } = message else { return };
        let rank = &self.ranks[D];
        let held = match (rank.legs.get(leg), rank.drains.get(leg)) {
            (_, Some(Drain::Pages { pages, .. })) => pages.as_slice(),
            (Some(leg), _) => leg.pages.as_slice(),
            (None, _) => &[],
        };
        self.stray_writes += usize::from(!pages.iter().all(|page| held.contains(page)));
    }

    fn collect(&mut self, side: usize) {
        let tickets: Vec<_> = self.ranks[side].legs.keys().copied().collect();
        for ticket in tickets {
            let output = self.ranks[side].take(ticket);
            if side == D {
                self.words.entry(ticket).or_default().extend(output.words);
            }
            if let Some(end) = output.end {
                assert!(self.ends[side].insert(ticket, end).is_none(), "a leg ends once");
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

    fn free(&self, side: usize) -> bool {
        let PoolUsage { total, free, .. } = self.ranks[side].usage();
        free == total
    }

    /// Everything is over: pages, rooms, queues and drains.
    #[track_caller]
    fn assert_quiet(&self, seed: u64) {
        for side in [P, D] {
            let rank = &self.ranks[side];
            assert!(self.free(side), "seed {seed}, side {side}: {:?}", rank.usage());
            assert_eq!(rank.load(), RankLoad::default(), "seed {seed}, side {side}");
            assert_eq!((rank.legs.len(), rank.rooms.with_leg()), (0, 0), "seed {seed}, side {side}");
            // Every request that held pages freed them once.
            let (mut held, mut freed) = (HashSet::new(), HashSet::new());
            for event in self.logs[side].page(0, usize::MAX).events {
                let id = event["request_id"].as_str().expect("an id").to_owned();
                match event["kind"].as_str() {
                    Some("started" | "fetching") => drop(held.insert(id)),
                    Some("freed") => assert!(freed.insert(id), "seed {seed}: freed twice"),
                    _ => {}
                }
            }
            assert_eq!(held, freed, "seed {seed}, side {side}");
        }
    }
}

fn failed(end: Option<&RankLegEnd>, text: &str) -> bool {
    matches!(end, Some(RankLegEnd::Failed { status: 500, message }) if message.contains(text))
}

fn plan() -> EnginePlan {
    EnginePlan { prefill_rate: 1_000, fetch_rate: 100, step_tokens: 16, blocks: 24, ..EnginePlan::default() }
}

fn pair() -> TestPair {
    TestPair::new(AbortExchange::Current, plan())
}

#[test]
fn both_legs_wait_for_each_other_in_either_order() {
    for first in [P, D] {
        let mut pair = pair();
        let one = pair.submit(first, 7, "a", 5);
        pair.run_for(10 * SECOND);
        assert!(pair.ends[first].is_empty(), "it waits for its peer");
        assert_eq!(pair.ranks[P].counts.prompt_tokens, 0, "P computes nothing before D has pages");
        let other = pair.submit(1 - first, 7, "a", 5);
        pair.run_for(10 * SECOND);
        assert_eq!(pair.ends[first].get(&one), Some(&RankLegEnd::Length));
        assert_eq!(pair.ends[1 - first].get(&other), Some(&RankLegEnd::Length));
        pair.assert_quiet(0);
    }
}

#[test]
fn ps_reply_follows_the_transfer_and_ds_first_token_is_ps() {
    let mut pair = pair();
    pair.submit(P, 7, "a", 5);
    let decode = pair.submit(D, 7, "a", 5);
    while pair.ranks[P].load().transferring == 0 {
        pair.step(u64::MAX);
    }
    assert_eq!((pair.ranks[P].usage().leased, pair.ends[P].len()), (3, 0));
    let word = pair.ranks[P].legs.values().next().expect("a leg").words[0].clone();
    // Three pages at 100 per second.
    pair.run_for(29_000);
    assert_eq!(pair.ends[P].len(), 0);
    pair.run_for(1_000);
    assert_eq!((pair.ends[P].len(), pair.free(P)), (1, true));
    pair.run_for(SECOND);
    let contents = super::super::super::text::contents(&[7; PROMPT], 16);
    let expected = super::super::super::text::word(contents.into_iter(), 0);
    assert_eq!((&pair.words[&decode][0], pair.words[&decode].len()), (&word, 5));
    assert_eq!(word, expected);
    pair.assert_quiet(0);
}

#[test]
fn room_0_is_written_and_never_ready() {
    let mut pair = pair();
    pair.submit(P, 0, "a", 5);
    let decode = pair.submit(D, 0, "a", 5);
    pair.run_for(299 * SECOND);
    assert_eq!((pair.ends[P].len(), pair.ends[D].len()), (1, 0));
    pair.run_for(2 * SECOND);
    assert!(failed(pair.ends[D].get(&decode), "timed out after 300.0s in KVPoll.WaitingForInput"));
    pair.assert_quiet(0);
}

#[test]
fn a_leg_without_a_peer_ends_by_its_timeout() {
    for side in [P, D] {
        let mut pair = pair();
        let ticket = pair.submit(side, 7, "a", 5);
        pair.run_for(299 * SECOND);
        assert!(pair.ends[side].is_empty());
        pair.run_for(2 * SECOND);
        let state = if side == P { "KVPoll.Bootstrapping" } else { "KVPoll.WaitingForInput" };
        assert!(failed(pair.ends[side].get(&ticket), state));
        pair.assert_quiet(0);
    }
}

#[test]
fn two_legs_with_one_room_both_fail() {
    for side in [P, D] {
        let mut pair = pair();
        let tickets = [pair.submit(side, 7, "a", 5), pair.submit(side, 7, "b", 5)];
        pair.run_for(SECOND);
        for ticket in tickets {
            assert!(failed(pair.ends[side].get(&ticket), "Duplicate or cancelled bootstrap room"));
        }
        pair.assert_quiet(0);
    }
}

#[test]
fn an_abort_in_every_phase_ends_both_legs_at_once_if_aborts_are_exchanged() {
    for (side, other) in [(P, D), (D, P)] {
        // D's page indices arrive after 0.2 ms.
        for after_us in (1_000..180_000).step_by(3_000) {
            let mut pair = pair();
            pair.submit(P, 7, "a", 5);
            pair.submit(D, 7, "a", 5);
            pair.run_for(after_us);
            let ended = pair.ends[other].len();
            pair.abort(side, "a");
            pair.run_for(SECOND);
            pair.assert_quiet(after_us);
            assert_eq!((pair.ends[P].len(), pair.ends[D].len()), (1, 1));
            if ended == 0 && failed(pair.ends[side].values().next(), ABORTED_BY_REQUEST) && side == P {
                assert!(failed(pair.ends[D].values().next(), "Decode transfer failed"), "{after_us}");
            }
        }
    }
}

#[test]
fn without_an_exchange_d_waits_for_its_timeout() {
    let mut pair = TestPair::new(AbortExchange::Old, plan());
    pair.submit(P, 7, "a", 5);
    pair.submit(D, 7, "a", 5);
    pair.run_for(10_000);
    pair.abort(P, "a");
    pair.run_for(290 * SECOND);
    assert_eq!((pair.ends[P].len(), pair.ends[D].len()), (1, 0));
    assert!(pair.free(P) && !pair.free(D), "D's pages are reserved until the timeout");
    pair.run_for(20 * SECOND);
    assert!(failed(pair.ends[D].values().next(), "timed out"));
    pair.assert_quiet(0);
}

#[test]
fn an_abort_of_p_before_ds_page_indices_leaves_d_waiting() {
    let mut pair = pair();
    pair.submit(P, 7, "a", 5);
    pair.abort(P, "a");
    pair.submit(D, 7, "a", 5);
    pair.run_for(290 * SECOND);
    assert_eq!((pair.ends[P].len(), pair.ends[D].len()), (1, 0));
    // A router aborts both.
    pair.abort(D, "a");
    pair.run_for(SECOND);
    pair.assert_quiet(0);
}

#[test]
fn an_abort_before_the_leg_arrives_leaves_no_trace() {
    let mut pair = pair();
    pair.abort(D, "a");
    pair.submit(D, 7, "a", 5);
    pair.run_for(SECOND);
    assert_eq!(pair.ranks[D].load().transferring, 1);
}

#[test]
fn an_abort_matches_by_prefix() {
    let mut pair = pair();
    let tickets = [pair.submit(P, 7, "a1", 5), pair.submit(P, 8, "a12", 5), pair.submit(P, 9, "b1", 5)];
    pair.abort(P, "a1");
    pair.run_for(SECOND);
    let ended: Vec<_> = tickets.iter().map(|ticket| pair.ends[P].contains_key(ticket)).collect();
    assert_eq!(ended, [true, true, false]);
}

#[test]
fn pages_of_an_aborted_transfer_are_kept_for_the_acknowledgement() {
    let mut pair = pair();
    pair.submit(P, 7, "a", 5);
    pair.submit(D, 7, "a", 5);
    while pair.ranks[P].load().transferring == 0 {
        pair.step(u64::MAX);
    }
    pair.abort(D, "a");
    pair.run_for(10_000);
    assert_eq!((pair.ends[D].len(), pair.ranks[D].load().deferred), (1, 1));
    assert!(pair.free(P) && !pair.free(D), "the write is in flight");
    pair.run_for(30_000);
    pair.assert_quiet(0);
    // Without P, the wait is 30 s.
    pair.submit(D, 8, "b", 5);
    pair.run_for(SECOND);
    pair.partitioned = true;
    pair.abort(D, "b");
    pair.run_for(29 * SECOND);
    assert!(!pair.free(D));
    pair.run_for(2 * SECOND);
    pair.assert_quiet(0);
}

#[test]
fn a_lost_prefill_engine_fails_the_legs_that_wait_for_it() {
    let mut pair = pair();
    let waits = pair.submit(D, 7, "a", 5);
    pair.partitioned = true;
    pair.drive(D, |rank, now_us| rank.prefill_lost("other", now_us));
    pair.run_for(SECOND);
    assert!(pair.ends[D].is_empty());
    pair.drive(D, |rank, now_us| rank.prefill_lost("p", now_us));
    pair.run_for(31 * SECOND);
    assert!(failed(pair.ends[D].get(&waits), "Losing connection with prefill instance"));
    pair.assert_quiet(0);
}

#[test]
fn only_the_rank_of_the_room_takes_a_prefill_leg() {
    let mut pair = pair();
    pair.ranks[P].traits.ranks = 4;
    let (fits, conflicts) = (pair.submit(P, 8, "a", 5), pair.submit(P, 9, "b", 5));
    pair.run_for(SECOND);
    assert!(!pair.ends[P].contains_key(&fits));
    let conflict =
        "follow_bootstrap_room conflict: dispatched to dp_rank 0 but bootstrap_room 9 implies dp_rank 1";
    assert!(failed(pair.ends[P].get(&conflicts), conflict));
}

/// Random legs, rooms, aborts, latencies and losses. Returns the pair when everything is over.
fn storm(seed: u64, aborts: AbortExchange) -> TestPair {
    let mut rng = Rng::stream(seed, "sglang");
    let mut pair = TestPair::new(aborts, plan());
    for number in 0..30u64 {
        pair.latency_us = [50, 500, 5_000, 40_000][rng.below(4) as usize];
        let room = match rng.below(12) {
            0 => 0,
            // In use, perhaps.
            1 => number.saturating_sub(1 + rng.below(3)),
            _ => number + 1,
        };
        let (rid, tokens) = (format!("r{number}-"), 1 + rng.below(12) as usize);
        let sides: &[usize] = match rng.below(8) {
            0 => &[P],
            1 => &[D],
            2..=4 => &[P, D],
            _ => &[D, P],
        };
        for &side in sides {
            pair.submit(side, room, &rid, tokens);
            pair.run_for(rng.below(30_000));
        }
        for _ in 0..rng.below(3) {
            let rid = format!("r{}-", number.saturating_sub(rng.below(4)));
            for side in [P, D] {
                if rng.below(2) == 0 {
                    pair.abort(side, &rid);
                }
            }
            pair.run_for(rng.below(60_000));
        }
        if rng.below(20) == 0 {
            pair.partitioned = true;
            pair.run_for(rng.below(SECOND));
            pair.partitioned = false;
        }
    }
    pair.run_for(1_000 * SECOND);
    pair
}

#[test]
fn after_random_legs_aborts_and_losses_all_pages_are_free() {
    for seed in 0..200 {
        for aborts in [AbortExchange::Current, AbortExchange::Old] {
            storm(seed, aborts).assert_quiet(seed);
        }
    }
}

#[test]
fn a_write_into_pages_of_another_leg_happens_only_without_an_exchange() {
    let strays = |aborts| (0..200).map(|seed| storm(seed, aborts).stray_writes).sum::<usize>();
    assert_eq!(strays(AbortExchange::Current), 0);
    assert!(strays(AbortExchange::Old) > 0);
}
