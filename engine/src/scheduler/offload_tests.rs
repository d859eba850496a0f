//! The scheduler with tiers below its pool, against made-up workers and a made-up device that knows what every block
//! holds: what is stored is what the hash says, what is loaded is used only if it is that, and every block comes home.

use std::collections::{BTreeMap, HashMap};

use baton_connector::RequestId;
use baton_connector::fetch::{Answer, Event, Fetch, LoadFailurePolicy};
use proptest::prelude::*;

use super::*;
use crate::offload::tier_index::TierConfig;
use crate::offload::{Fault, HostSlot, Report, Source};
use crate::scheduler::sequence::StopRule;

const BLOCK: usize = 4;
const CONFIG: SchedulerConfig = SchedulerConfig {
    block_tokens: BLOCK,
    max_num_seqs: 8,
    max_num_batched_tokens: 16,
    max_waiting: 64,
    max_model_len: 256,
};
const ROOMY: TierConfig = TierConfig { host_blocks: 16, disk_blocks: 0 };

fn new(id: u64, prompt: &[u32], max_new: usize, purpose: Purpose) -> NewSequence {
    NewSequence {
        id: SeqId(id),
        request: RequestId::new(&format!("r{id}")).expect("a test id"),
        prompt: prompt.to_vec(),
        stop: StopRule { max_new, stop_ids: vec![], min_new: 0 },
        purpose,
        follows: None,
        rides: false,
        cache_salt: None,
    }
}

/// A scheduler, what its device and tiers hold, and its orders in flight.
struct World {
    scheduler: Scheduler,
    device: HashMap<BlockId, BlockHash>,
    slots: HashMap<HostSlot, BlockHash>,
    files: HashMap<BlockHash, BlockHash>,
    flights: BTreeMap<TransferId, Order>,
    leases: Vec<Vec<BlockId>>,
    fetch_failed: Vec<SeqId>,
    recomputing: Vec<SeqId>,
    /// Orders are refused.
    refusing: bool,
    /// Workers begin with an order at once.
    eager: bool,
}

impl World {
    fn new(blocks: usize, tiers: TierConfig) -> Self {
        Self {
            scheduler: Scheduler::new(CONFIG, blocks).with_tiers(tiers, []),
            device: HashMap::new(),
            slots: HashMap::new(),
            files: HashMap::new(),
            flights: BTreeMap::new(),
            leases: Vec::new(),
            fetch_failed: Vec::new(),
            recomputing: Vec::new(),
            refusing: false,
            eager: false,
        }
    }

    fn act(&mut self) {
        loop {
            let effects = self.scheduler.take_effects();
            if effects.is_empty() {
                return;
            }
            for effect in effects {
                match effect {
                    Effect::Offload(order) if self.refusing => {
                        self.scheduler.offload_event(Report::Ended(order.id(), Err(Fault::Refused)));
                    }
                    Effect::Offload(order) => {
                        if let Order::Load { block, .. } = &order {
                            self.device.remove(block);
                        }
                        let clash = self.flights.insert(order.id(), order);
                        assert_eq!(clash, None, "names are used once");
                    }
                    Effect::Revoke(id) => {
                        let revoked = !self.eager && self.flights.remove(&id).is_some();
                        self.scheduler.offload_revoked(id, revoked);
                    }
                    Effect::FetchFailed(id, _) => {
                        self.fetch_failed.push(id);
                        self.scheduler.finish(id, FinishReason::Error);
                    }
                    Effect::Recomputing(id) => self.recomputing.push(id),
                    Effect::LendEarly(id) => self.leases.extend(self.scheduler.lend_early(id)),
                    Effect::StartRead { .. }
                    | Effect::StopRead(_)
                    | Effect::StopHeartbeat(_)
                    | Effect::ReleaseAtProducer(..) => {}
                }
            }
        }
    }

    /// A worker has done, or not done, what it was told.
    fn end(&mut self, id: TransferId, outcome: Result<(), Fault>) {
        let Some(order) = self.flights.remove(&id) else { return };
        match (&order, outcome) {
            (Order::Store { hash, block, slot, .. }, Ok(())) => {
                assert_eq!(self.device.get(block), Some(hash), "a block is not reused while it is stored");
                self.slots.insert(*slot, *hash);
            }
            (Order::Load { hash, from: Source::Host(slot), block, .. }, Ok(())) => {
                assert_eq!(self.slots.get(slot), Some(hash), "a slot is not reused while it is read");
                self.device.insert(*block, *hash);
            }
            (Order::Load { hash, from: Source::Disk { keep }, block, .. }, Ok(())) => {
                let Some(found) = self.files.get(hash).copied() else {
                    self.scheduler.offload_event(Report::Ended(id, Err(Fault::Missing)));
                    self.act();
                    return;
                };
                self.device.insert(*block, found);
                keep.map(|slot| self.slots.insert(slot, found));
            }
            (Order::Load { from: Source::Host(_), .. }, Err(_)) => {}
            (Order::Load { hash, .. }, Err(fault)) => {
                if fault == Fault::Corrupt {
                    self.files.remove(hash);
                }
            }
            (Order::Write { hash, slot, evict, .. }, Ok(())) => {
                assert_eq!(self.slots.get(slot), Some(hash), "a slot is not reused while it is written");
                for gone in evict {
                    self.files.remove(gone);
                }
                self.files.insert(*hash, *hash);
            }
            (Order::Delete { hashes, .. }, Ok(())) => self.files.retain(|hash, _| !hashes.contains(hash)),
            (Order::Store { .. } | Order::Write { .. } | Order::Delete { .. }, Err(_)) => {}
        }
        self.scheduler.offload_event(Report::Ended(id, outcome));
        self.act();
    }

    fn end_all(&mut self) {
        while let Some(id) = self.flights.keys().next().copied() {
            self.end(id, Ok(()));
        }
    }

    /// One step; what runs is checked against the device, and what it computes is put there.
    fn step(&mut self) -> usize {
        let plan = self.scheduler.schedule();
        self.act();
        for part in &plan {
            let Some(sequence) = self.scheduler.sequence(part.id) else { continue };
            let (blocks, full) = (sequence.blocks().to_vec(), part.start / BLOCK);
            for (block, hash) in blocks.iter().zip(&sequence.hashes[..full.min(sequence.hashes.len())]) {
                assert_eq!(self.device.get(block), Some(hash), "what is attended to is what was computed");
            }
            for block in &blocks[full..(part.start + part.count).div_ceil(BLOCK)] {
                self.device.remove(block);
            }
        }
        for part in &plan {
            let Some(sequence) = self.scheduler.sequences.get_mut(&part.id) else { continue };
            sequence.extend_hashes(BLOCK);
            let end = (part.start + part.count) / BLOCK;
            for index in part.start / BLOCK..end {
                self.device.insert(sequence.blocks[index], sequence.hashes[index]);
            }
            let sampled = part.samples.then(|| 1000 + sequence.tokens().len() as u32);
            if let Some(reason) = self.scheduler.commit(part, sampled)
                && let Some(Finished::Lent(blocks)) = self.scheduler.finish(part.id, reason)
            {
                self.leases.push(blocks);
            }
            self.act();
        }
        assert!(self.scheduler.usage().adds_up());
        plan.len()
    }

    /// Steps until nothing can run, with workers that do as they are told.
    fn run(&mut self) {
        for _ in 0..10_000 {
            let planned = self.step();
            self.end_all();
            if planned == 0 && self.scheduler.load().loading == 0 && self.scheduler.load().running == 0 {
                return;
            }
        }
        panic!("no progress: {:?} {:?}", self.scheduler.usage(), self.scheduler.load());
    }

    fn counts(&self) -> OffloadCounts {
        self.scheduler.load().tiers.expect("it has tiers")
    }

    /// Another prompt that fills the pool: nothing of what was cached is left in it.
    fn wash(&mut self, id: u64) {
        let blocks = self.scheduler.usage().total;
        let prompt: Vec<u32> =
            (0..(blocks * BLOCK - 1) as u32).map(|t| 500_000 + 1_000 * id as u32 + t).collect();
        self.scheduler.submit(new(id, &prompt, 1, Purpose::Plain)).expect("it fits");
        self.run();
    }
}

fn prompt(from: u32, len: u32) -> Vec<u32> {
    (from..from + len).collect()
}

#[test]
fn a_prompt_that_left_the_pool_is_loaded_and_counts_as_cached() {
    let mut world = World::new(8, ROOMY);
    world.scheduler.submit(new(1, &prompt(10, 13), 1, Purpose::Plain)).expect("accepted");
    world.run();
    assert_eq!(world.counts().host.stored, 3);
    world.wash(2);
    world.scheduler.submit(new(3, &prompt(10, 13), 2, Purpose::Plain)).expect("accepted");
    assert_eq!(world.step(), 0, "it is loaded first");
    assert_eq!((world.scheduler.usage().landing, world.scheduler.load().loading), (3, 1));
    world.end_all();
    assert_eq!(world.scheduler.schedule(), [Planned { id: SeqId(3), start: 12, count: 1, samples: true }]);
    assert_eq!(world.scheduler.sequence(SeqId(3)).expect("running").reused(), (12, 0));
    assert_eq!((world.counts().hit_tokens, world.counts().host.loaded), (12, 3));
    assert!(world.flights.is_empty(), "what came from a tier is not stored again");
}

#[test]
fn a_block_that_fails_to_load_truncates_what_is_used_and_the_rest_is_computed() {
    for fault in [Fault::Corrupt, Fault::Missing, Fault::Io, Fault::Slow, Fault::Refused, Fault::Broken] {
        let mut world = World::new(8, ROOMY);
        world.scheduler.submit(new(1, &prompt(10, 13), 1, Purpose::Plain)).expect("accepted");
        world.run();
        world.wash(2);
        world.scheduler.submit(new(3, &prompt(10, 13), 1, Purpose::Plain)).expect("accepted");
        world.step();
        let ids: Vec<_> = world.flights.keys().copied().collect();
        // The last one first: the order of their ends does not matter.
        world.end(ids[2], Ok(()));
        world.end(ids[1], Err(fault));
        world.end(ids[0], Ok(()));
        assert_eq!(world.scheduler.sequence(SeqId(3)).expect("running").reused(), (4, 0));
        assert_eq!(world.scheduler.schedule()[0].start, 4);
        world.run();
        assert_eq!(world.scheduler.usage().held_share(), 0.0);
    }
}

#[test]
fn prompts_that_load_a_block_each_do_not_starve_one_that_has_nothing_to_load() {
    const FRESH: u64 = 50;
    let long = |k: u32| [prompt(10 + 100 * k, 4), prompt(100_000 + 100 * k, 29)].concat();
    let mut world = World::new(60, TierConfig { host_blocks: 100, disk_blocks: 0 });
    for k in 0..10 {
        let stored = prompt(10 + 100 * k, 5);
        world.scheduler.submit(new(k.into(), &stored, 1, Purpose::Plain)).expect("accepted");
        world.run();
    }
    world.wash(20);
    assert!(world.counts().host.stored >= 10, "{:?}", world.counts());
    for k in 0..10 {
        if k == 1 {
            // The first one is loaded, and its rest takes the step.
            world.step();
            world.end_all();
            world.scheduler.submit(new(FRESH, &prompt(900_000, 8), 1, Purpose::Plain)).expect("accepted");
        }
        world.scheduler.submit(new(30 + u64::from(k), &long(k), 1, Purpose::Plain)).expect("accepted");
    }
    let computed = |world: &World| world.scheduler.sequence(SeqId(FRESH)).is_none_or(|one| one.computed > 0);
    let steps = (0..40).take_while(|_| {
        world.step();
        world.end_all();
        !computed(&world)
    });
    let steps = steps.count();
    // The rest of the one that runs is two steps, and those that pass have together as much as one.
    assert!(steps <= 4, "after {steps} steps it has not begun");
    world.run();
    assert_eq!(world.scheduler.usage().held_share(), 0.0);
}

/// Dynamo #6681: the store ends in the very step in which the request stops and is aborted.
#[test]
fn stop_abort_and_the_end_of_a_store_in_one_step_bring_every_block_back_once() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut world = World::new(8, ROOMY);
        world.scheduler.submit(new(1, &prompt(10, 5), 2, Purpose::Plain)).expect("accepted");
        world.step();
        let id = *world.flights.keys().next().expect("its first block is being stored");
        let mut answers = Vec::new();
        for event in order {
            match event {
                0 => answers.push(world.scheduler.finish(SeqId(1), FinishReason::Stop)),
                1 => answers.push(world.scheduler.finish(SeqId(1), FinishReason::Abort)),
                _ => {
                    world.end(id, Ok(()));
                    // Late and repeated.
                    world.scheduler.offload_event(Report::Ended(id, Ok(())));
                    world.scheduler.offload_event(Report::Ended(id, Err(Fault::Io)));
                }
            }
        }
        assert_eq!(answers, [Some(Finished::FreeNow), None], "request_finished answers once");
        let (usage, load) = (world.scheduler.usage(), world.scheduler.load());
        assert_eq!((usage.held_share(), usage.free + usage.cached), (0.0, 8));
        assert_eq!((load.offloading, load.held), (0, 0));
        assert_eq!(world.counts().host.stored, 1, "what was computed is worth keeping");
    }
}

#[test]
fn an_abort_during_a_load_frees_what_no_worker_writes_and_the_rest_when_it_is_quiet() {
    for eager in [false, true] {
        let mut world = World::new(8, ROOMY);
        world.scheduler.submit(new(1, &prompt(10, 13), 1, Purpose::Plain)).expect("accepted");
        world.run();
        world.wash(2);
        world.eager = eager;
        world.scheduler.submit(new(3, &prompt(10, 13), 1, Purpose::Plain)).expect("accepted");
        world.step();
        let first = *world.flights.keys().next().expect("three loads");
        world.end(first, Ok(()));
        assert_eq!(world.scheduler.finish(SeqId(3), FinishReason::Abort), Some(Finished::FreeNow));
        world.act();
        let left = if eager { 2 } else { 0 };
        assert_eq!(
            (world.scheduler.usage().landing, world.scheduler.load().held),
            (left, usize::from(eager))
        );
        world.end_all();
        assert_eq!((world.scheduler.usage().held_share(), world.scheduler.load().held), (0.0, 0));
        assert_eq!(world.scheduler.load().loading, 0);
    }
}

#[test]
fn a_block_both_lent_and_being_stored_comes_back_when_the_last_of_them_lets_go() {
    for lease_first in [false, true] {
        let mut world = World::new(8, ROOMY);
        world
            .scheduler
            .submit(new(1, &prompt(10, 5), 1, Purpose::Produce { consumers: 1, early: false }))
            .expect("accepted");
        world.step();
        let lent = world.leases.pop().expect("lent");
        assert_eq!((world.scheduler.usage().leased, world.scheduler.load().held), (2, 1));
        if lease_first {
            world.scheduler.lease_ended(&lent);
            assert_eq!((world.scheduler.usage().storing, world.scheduler.load().held), (1, 1));
            world.end_all();
        } else {
            world.end_all();
            assert_eq!((world.scheduler.usage().leased, world.scheduler.load().held), (2, 1));
            world.scheduler.lease_ended(&lent);
        }
        assert_eq!((world.scheduler.usage().held_share(), world.scheduler.load().held), (0.0, 0));
    }
}

#[test]
fn stores_are_given_up_before_anybody_is_preempted() {
    let mut world = World::new(8, ROOMY);
    world.scheduler.submit(new(1, &prompt(10, 16), 1, Purpose::Plain)).expect("accepted");
    world.step();
    assert_eq!(world.scheduler.usage().storing, 1, "one of eight blocks may be held by stores");
    let need: Vec<u32> = prompt(100, 31);
    world.scheduler.submit(new(2, &need, 1, Purpose::Plain)).expect("accepted");
    assert_eq!(world.step(), 0, "one block short");
    assert_eq!(world.step(), 1, "it was had back");
    assert_eq!(world.scheduler.load().preemptions, 0);
    world.run();
    assert_eq!(world.scheduler.usage().held_share(), 0.0);
}

#[test]
fn a_handoff_that_failed_under_recompute_is_loaded_from_the_tiers() {
    let mut world = World::new(8, ROOMY);
    world.scheduler.submit(new(1, &prompt(10, 13), 1, Purpose::Plain)).expect("accepted");
    world.run();
    world.wash(2);
    let consume = Purpose::Consume(Fetch::new(LoadFailurePolicy::Recompute));
    world.scheduler.submit(new(3, &prompt(10, 13), 1, consume)).expect("accepted");
    world.step();
    assert_eq!((world.scheduler.load().fetching, world.scheduler.load().loading), (1, 0), "P/D first");
    world.scheduler.fetch_event(SeqId(3), Event::TransferFailed(FailureKind::Transfer));
    world.step();
    assert_eq!((world.scheduler.load().fetching, world.scheduler.load().loading), (0, 1), "then the tiers");
    assert_eq!(world.recomputing, [SeqId(3)]);
    world.end_all();
    assert_eq!(world.scheduler.sequence(SeqId(3)).expect("running").reused(), (12, 0));
    world.run();
    assert_eq!(world.scheduler.usage().held_share(), 0.0);
}

#[test]
fn what_was_fetched_and_verified_is_stored_and_what_was_not_is_not() {
    for (answer, stored) in [(Answer::Valid, 3), (Answer::Gone, 0)] {
        let mut world = World::new(8, ROOMY);
        let consume = Purpose::Consume(Fetch::new(LoadFailurePolicy::Fail));
        world.scheduler.submit(new(1, &prompt(10, 13), 4, consume)).expect("accepted");
        world.step();
        let sequence = world.scheduler.sequence(SeqId(1)).expect("fetching");
        let fetched: Vec<_> = sequence.blocks().iter().copied().zip(sequence.hashes.clone()).collect();
        world.device.extend(fetched);
        world.scheduler.fetch_event(SeqId(1), Event::TransferDone);
        world.scheduler.fetch_event(SeqId(1), Event::Verdict(answer));
        world.act();
        world.end_all();
        assert_eq!(world.counts().host.stored, stored);
    }
}

#[test]
fn a_host_tier_that_is_full_of_writes_waits_and_loses_no_block_of_a_chain() {
    let mut world = World::new(32, TierConfig { host_blocks: 0, disk_blocks: 64 });
    // One slot only would be enough: every store waits for the write before it.
    world.scheduler.submit(new(1, &prompt(10, 100), 1, Purpose::Plain)).expect("accepted");
    world.run();
    assert_eq!((world.files.len(), world.counts().not_stored), (25, 0));
    world.scheduler.reset_prefix_cache();
    world.scheduler.submit(new(2, &prompt(10, 100), 1, Purpose::Plain)).expect("accepted");
    world.step();
    world.end_all();
    assert_eq!(world.scheduler.sequence(SeqId(2)).expect("running").reused(), (96, 0));
}

#[test]
fn a_reset_of_the_tiers_forgets_them_and_deletes_the_files() {
    let mut world = World::new(32, TierConfig { host_blocks: 0, disk_blocks: 128 });
    for id in 0..3 {
        world.scheduler.submit(new(id, &prompt(1000 * id as u32, 101), 1, Purpose::Plain)).expect("accepted");
        world.run();
    }
    assert_eq!(world.files.len(), 75);
    world.scheduler.reset_tiers();
    world.scheduler.reset_prefix_cache();
    world.act();
    world.end_all();
    assert_eq!((world.files.len(), world.counts().disk.blocks), (0, 0));
    world.scheduler.submit(new(9, &prompt(0, 101), 1, Purpose::Plain)).expect("accepted");
    assert_eq!(world.step(), 1, "nothing to load");
}

#[test]
fn a_follower_waits_for_a_leader_that_loads_and_shares_what_it_loaded() {
    let mut world = World::new(16, TierConfig { host_blocks: 64, disk_blocks: 0 });
    world.scheduler.submit(new(1, &prompt(10, 13), 1, Purpose::Plain)).expect("accepted");
    world.run();
    world.wash(2);
    world.scheduler.submit(new(3, &prompt(10, 13), 2, Purpose::Plain)).expect("accepted");
    let follower = NewSequence { follows: Some(SeqId(3)), ..new(4, &prompt(10, 13), 2, Purpose::Plain) };
    world.scheduler.submit(follower).expect("accepted");
    world.step();
    assert_eq!(world.scheduler.load().waiting, 1);
    world.run();
    assert_eq!(world.counts().host.loaded, 3, "once");
    assert_eq!(world.scheduler.usage().held_share(), 0.0);
}

/// One random event of a run.
#[derive(Clone, Debug)]
enum Act {
    Submit { prompt: u32, len: usize, max_new: usize, kind: u8 },
    Step,
    Abort(usize),
    Fetch(usize, u8),
    EndLease(usize),
    EndOrder(usize, u8),
    Late(u64, bool),
    Mood(u8),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let submit = (0_u32..3, 1_usize..36, 1_usize..8, 0_u8..5)
        .prop_map(|(prompt, len, max_new, kind)| Act::Submit { prompt, len, max_new, kind });
    let act = prop_oneof![
        3 => submit,
        6 => Just(Act::Step),
        1 => (0_usize..32).prop_map(Act::Abort),
        2 => ((0_usize..32), 0_u8..5).prop_map(|(i, e)| Act::Fetch(i, e)),
        1 => (0_usize..8).prop_map(Act::EndLease),
        8 => ((0_usize..16), 0_u8..12).prop_map(|(i, how)| Act::EndOrder(i, how)),
        1 => ((0_u64..64), any::<bool>()).prop_map(|(id, ok)| Act::Late(id, ok)),
        1 => (0_u8..10).prop_map(Act::Mood),
    ];
    prop::collection::vec(act, 1..160)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(768))]

    /// A tiny pool, tiny tiers, random submissions, aborts, transfers, and orders that end in any way and any order:
    /// the books always add up, no sequence ever attends to a block that holds something else, no block or slot is
    /// reused while it is copied; and when everybody has left and the workers are through, every block is home.
    #[test]
    fn every_block_comes_home_with_tiers_too(
        sizes in (8_usize..14, 0_usize..6, 0_usize..6),
        acts in acts(),
    ) {
        let (blocks, host_blocks, disk_blocks) = sizes;
        let tiers = TierConfig { host_blocks, disk_blocks: disk_blocks.max(usize::from(host_blocks == 0)) };
        let mut world = World::new(blocks, tiers);
        let mut next = 0_u64;
        let mut consumers = Vec::new();
        for act in acts {
            match act {
                Act::Submit { prompt, len, max_new, kind } => {
                    next += 1;
                    let purpose = match kind {
                        0 | 4 => Purpose::Plain,
                        1 => Purpose::Produce { consumers: 1, early: true },
                        2 => Purpose::Consume(Fetch::new(LoadFailurePolicy::Recompute)),
                        _ => Purpose::Consume(Fetch::new(LoadFailurePolicy::Fail)),
                    };
                    if matches!(purpose, Purpose::Consume(_)) { consumers.push(SeqId(next)) }
                    let tokens: Vec<u32> = (0..len as u32).map(|t| 10 + prompt * 100 + t).collect();
                    let _ = world.scheduler.submit(new(next, &tokens, max_new, purpose));
                }
                Act::Step => drop(world.step()),
                Act::Abort(i) => {
                    world.scheduler.finish(SeqId(1 + i as u64 % next.max(1)), FinishReason::Abort);
                }
                Act::Fetch(i, event) => if !consumers.is_empty() {
                    let id = consumers[i % consumers.len()];
                    let event = match event {
                        0 | 1 => {
                            // The transfer wrote every landing block.
                            if let Some(sequence) = world.scheduler.sequence(id).filter(|s| s.phase == Phase::Fetching) {
                                let landed: Vec<_> =
                                    sequence.blocks().iter().copied().zip(sequence.hashes.clone()).collect();
                                world.device.extend(landed);
                                world.scheduler.fetch_event(id, Event::TransferDone);
                            }
                            Event::Verdict(if event == 0 { Answer::Valid } else { Answer::Gone })
                        }
                        2 => Event::TransferFailed(FailureKind::Transfer),
                        3 => Event::LeaseGone,
                        _ => Event::Quiet,
                    };
                    world.scheduler.fetch_event(id, event);
                },
                Act::EndLease(i) => if !world.leases.is_empty() {
                    let at = i % world.leases.len();
                    let lease = world.leases.swap_remove(at);
                    world.scheduler.lease_ended(&lease);
                },
                Act::EndOrder(i, how) => {
                    let id = world.flights.keys().copied().nth(i % world.flights.len().max(1));
                    let fault = Fault::ALL.get(how as usize).copied();
                    id.into_iter().for_each(|id| world.end(id, fault.map_or(Ok(()), Err)));
                }
                // A report of something that is long over, or never was.
                Act::Late(id, ok) => if !world.flights.contains_key(&TransferId(id)) {
                    let outcome = if ok { Ok(()) } else { Err(Fault::Io) };
                    world.scheduler.offload_event(Report::Ended(TransferId(id), outcome));
                    world.scheduler.offload_revoked(TransferId(id), ok);
                },
                Act::Mood(mood) => match mood {
                    0..=2 => world.scheduler.offload_event(Report::DiskRests),
                    3..=5 => world.scheduler.offload_event(Report::DiskIsBack),
                    6 => world.scheduler.reset_prefix_cache(),
                    7 => world.scheduler.reset_tiers(),
                    8 => world.refusing = !world.refusing,
                    _ => world.eager = !world.eager,
                },
            }
            world.act();
            prop_assert!(world.scheduler.usage().adds_up());
        }
        world.refusing = false;
        for lease in std::mem::take(&mut world.leases) { world.scheduler.lease_ended(&lease) }
        for id in 1..=next { world.scheduler.finish(SeqId(id), FinishReason::Abort); }
        world.act();
        for id in consumers { world.scheduler.fetch_event(id, Event::Quiet) }
        world.act();
        world.end_all();
        let (usage, load) = (world.scheduler.usage(), world.scheduler.load());
        prop_assert_eq!(usage.held_share(), 0.0, "{:?}", usage);
        prop_assert_eq!(load.stopping + load.fetching + load.loading + load.waiting + load.running, 0);
        prop_assert_eq!((load.offloading, load.held), (0, 0));
    }
}
