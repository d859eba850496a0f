//! The scheduler with tiers below its pool, against scripted workers and a model of the device's block contents.
//! Stored blocks match their hashes, loaded blocks are used only if they match, and every block is freed.

use std::collections::{BTreeMap, HashMap};

use baton_connector::fetch::{Event, Fetch, LoadFailurePolicy, Verification};
use proptest::prelude::*;

use super::*;
use crate::offload::tier_index::TierConfig;
use crate::offload::{HostSlot, LoadSource, OffloadFault, OffloadReport};
use crate::scheduler::sequence::StopRule;

const BLOCK: usize = 4;
const ROOMY: TierConfig = TierConfig { host_blocks: 16, disk_blocks: 0 };
const CONFIG: SchedulerConfig = SchedulerConfig {
    block_tokens: BLOCK,
    max_num_seqs: 8,
    max_num_batched_tokens: 16,
    max_waiting: 64,
    max_model_len: 256,
    window: None,
};

fn new(id: u64, prompt: &[u32], max_new: usize, purpose: Purpose) -> NewSequence {
    let stop = StopRule { max_new, stop_ids: vec![], min_new: 0 };
    NewSequence { stop, ..tests::new(id, prompt, max_new, purpose) }
}

/// A scheduler, the contents of its device and tiers, and its pending orders.
struct OffloadModel {
    scheduler: Scheduler,
    device: HashMap<BlockId, BlockHash>,
    slots: HashMap<HostSlot, BlockHash>,
    files: HashMap<BlockHash, BlockHash>,
    orders: BTreeMap<TransferId, OffloadOrder>,
    leases: Vec<Vec<BlockId>>,
    fetch_failed: Vec<SeqId>,
    recomputing: Vec<SeqId>,
    /// Orders are refused.
    refusing: bool,
    /// Workers begin with an order at once.
    eager: bool,
}

impl OffloadModel {
    fn new(blocks: usize, tiers: TierConfig) -> Self {
        Self {
            scheduler: Scheduler::new(CONFIG, blocks).with_tiers(tiers, []),
            device: HashMap::new(),
            slots: HashMap::new(),
            files: HashMap::new(),
            orders: BTreeMap::new(),
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
                        self.scheduler
                            .offload_event(OffloadReport::Ended(order.id(), Err(OffloadFault::Refused)));
                    }
                    Effect::Offload(order) => {
                        if let OffloadOrder::Load { block, .. } = &order {
                            self.device.remove(block);
                        }
                        let clash = self.orders.insert(order.id(), order);
                        assert_eq!(clash, None, "names are used once");
                    }
                    Effect::Revoke(id) => {
                        let revoked = !self.eager && self.orders.remove(&id).is_some();
                        self.scheduler.offload_revoked(id, revoked);
                    }
                    Effect::FetchFailed(id, _) => {
                        self.fetch_failed.push(id);
                        self.scheduler.finish(id, FinishReason::Error);
                    }
                    Effect::Recomputing(id) => self.recomputing.push(id),
                    Effect::OpenLeaseEarly(id) => self.leases.extend(self.scheduler.open_lease_early(id)),
                    Effect::StartRead { .. }
                    | Effect::StopRead(_)
                    | Effect::StopHeartbeat(_)
                    | Effect::ReleaseAtProducer(..) => {}
                }
            }
        }
    }

    /// Ends an order of a worker, successfully or not.
    fn end(&mut self, id: TransferId, outcome: Result<(), OffloadFault>) {
        let Some(order) = self.orders.remove(&id) else { return };
        match (&order, outcome) {
            (OffloadOrder::Store { hash, block, slot, .. }, Ok(())) => {
                assert_eq!(self.device.get(block), Some(hash), "a block is not reused while it is stored");
                self.slots.insert(*slot, *hash);
            }
            (OffloadOrder::Load { hash, from: LoadSource::Host(slot), block, .. }, Ok(())) => {
                assert_eq!(self.slots.get(slot), Some(hash), "a slot is not reused while it is read");
                self.device.insert(*block, *hash);
            }
            (OffloadOrder::Load { hash, from: LoadSource::Disk { slot }, block, .. }, Ok(())) => {
                let Some(found) = self.files.get(hash).copied() else {
                    self.scheduler.offload_event(OffloadReport::Ended(id, Err(OffloadFault::Missing)));
                    self.act();
                    return;
                };
                self.device.insert(*block, found);
                slot.map(|slot| self.slots.insert(slot, found));
            }
            (OffloadOrder::Load { from: LoadSource::Host(_), .. }, Err(_)) => {}
            (OffloadOrder::Load { hash, .. }, Err(fault)) => {
                if fault == OffloadFault::Corrupt {
                    self.files.remove(hash);
                }
            }
            (OffloadOrder::Write { hash, slot, evict, .. }, Ok(())) => {
                assert_eq!(self.slots.get(slot), Some(hash), "a slot is not reused while it is written");
                for gone in evict {
                    self.files.remove(gone);
                }
                self.files.insert(*hash, *hash);
            }
            (OffloadOrder::Delete { hashes, .. }, Ok(())) => {
                self.files.retain(|hash, _| !hashes.contains(hash))
            }
            (
                OffloadOrder::Store { .. } | OffloadOrder::Write { .. } | OffloadOrder::Delete { .. },
                Err(_),
            ) => {}
        }
        self.scheduler.offload_event(OffloadReport::Ended(id, outcome));
        self.act();
    }

    fn end_all(&mut self) {
        while let Some(id) = self.orders.keys().next().copied() {
            self.end(id, Ok(()));
        }
    }

    /// Runs one step. The blocks that it reads are checked against the device, and the computed ones are put there.
    fn step(&mut self) -> usize {
        let plan = self.scheduler.schedule();
        self.act();
        for part in &plan {
            let Some(sequence) = self.scheduler.sequence(part.id) else { continue };
            let (blocks, full) = (sequence.blocks().to_vec(), part.start / BLOCK);
            for (block, hash) in blocks.iter().zip(sequence.blocks.hashes.iter().take(full)) {
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
                self.device.insert(sequence.blocks.table[index], sequence.blocks.hashes[index]);
            }
            let sampled = part.samples.then(|| 1000 + sequence.tokens().len() as u32);
            if let Some(reason) = self.scheduler.commit(part, sampled)
                && let Some(FinishOutcome::Leased(blocks)) = self.scheduler.finish(part.id, reason)
            {
                self.leases.push(blocks);
            }
            self.act();
        }
        assert!(self.scheduler.usage().adds_up());
        plan.len()
    }

    /// Steps until nothing can run, with workers that carry out all orders.
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

    /// Submits another prompt that fills the pool, and evicts all cached blocks.
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
    let mut model = OffloadModel::new(8, ROOMY);
    model.scheduler.submit(new(1, &prompt(10, 13), 1, Purpose::Plain)).expect("accepted");
    model.run();
    assert_eq!(model.counts().host.stored, 3);
    model.wash(2);
    model.scheduler.submit(new(3, &prompt(10, 13), 2, Purpose::Plain)).expect("accepted");
    assert_eq!(model.step(), 0, "it is loaded first");
    assert_eq!((model.scheduler.usage().landing, model.scheduler.load().loading), (3, 1));
    model.end_all();
    assert_eq!(model.scheduler.schedule(), [StepPart { id: SeqId(3), start: 12, count: 1, samples: true }]);
    assert_eq!(model.scheduler.sequence(SeqId(3)).expect("running").reused(), (12, 0));
    assert_eq!((model.counts().hit_tokens, model.counts().host.loaded), (12, 3));
    assert!(model.orders.is_empty(), "what came from a tier is not stored again");
}

#[test]
fn a_block_that_fails_to_load_truncates_the_prefix_and_the_rest_is_computed() {
    for fault in [
        OffloadFault::Corrupt,
        OffloadFault::Missing,
        OffloadFault::Io,
        OffloadFault::Slow,
        OffloadFault::Refused,
        OffloadFault::Broken,
    ] {
        let mut model = OffloadModel::new(8, ROOMY);
        model.scheduler.submit(new(1, &prompt(10, 13), 1, Purpose::Plain)).expect("accepted");
        model.run();
        model.wash(2);
        model.scheduler.submit(new(3, &prompt(10, 13), 1, Purpose::Plain)).expect("accepted");
        model.step();
        let ids: Vec<_> = model.orders.keys().copied().collect();
        // The last one first: the order of the ends does not matter.
        model.end(ids[2], Ok(()));
        model.end(ids[1], Err(fault));
        model.end(ids[0], Ok(()));
        assert_eq!(model.scheduler.sequence(SeqId(3)).expect("running").reused(), (4, 0));
        assert_eq!(model.scheduler.schedule()[0].start, 4);
        model.run();
        assert_eq!(model.scheduler.usage().held_share(), 0.0);
    }
}

#[test]
fn loading_prompts_do_not_starve_one_without_loads() {
    const FRESH: u64 = 50;
    let long = |k: u32| [prompt(10 + 100 * k, 4), prompt(100_000 + 100 * k, 29)].concat();
    let mut model = OffloadModel::new(60, TierConfig { host_blocks: 100, disk_blocks: 0 });
    for k in 0..10 {
        let stored = prompt(10 + 100 * k, 5);
        model.scheduler.submit(new(k.into(), &stored, 1, Purpose::Plain)).expect("accepted");
        model.run();
    }
    model.wash(20);
    assert!(model.counts().host.stored >= 10, "{:?}", model.counts());
    for k in 0..10 {
        if k == 1 {
            // The first one is loaded, and the rest of its prompt fills the step.
            model.step();
            model.end_all();
            model.scheduler.submit(new(FRESH, &prompt(900_000, 8), 1, Purpose::Plain)).expect("accepted");
        }
        model.scheduler.submit(new(30 + u64::from(k), &long(k), 1, Purpose::Plain)).expect("accepted");
    }
    let computed =
        |model: &OffloadModel| model.scheduler.sequence(SeqId(FRESH)).is_none_or(|one| one.computed > 0);
    let steps = (0..40).take_while(|_| {
        model.step();
        model.end_all();
        !computed(&model)
    });
    let steps = steps.count();
    // The rest of the running prompt needs two steps, and the loads that pass have together as much as one.
    assert!(steps <= 4, "after {steps} steps it has not begun");
    model.run();
    assert_eq!(model.scheduler.usage().held_share(), 0.0);
}

/// Dynamo #6681: the store ends in the same step in which the request stops and is aborted.
#[test]
fn stop_abort_and_store_end_in_one_step_free_every_block_once() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut model = OffloadModel::new(8, ROOMY);
        model.scheduler.submit(new(1, &prompt(10, 5), 2, Purpose::Plain)).expect("accepted");
        model.step();
        let id = *model.orders.keys().next().expect("its first block is being stored");
        let mut answers = Vec::new();
        for event in order {
            match event {
                0 => answers.push(model.scheduler.finish(SeqId(1), FinishReason::Stop)),
                1 => answers.push(model.scheduler.finish(SeqId(1), FinishReason::Abort)),
                _ => {
                    model.end(id, Ok(()));
                    model.scheduler.offload_event(OffloadReport::Ended(id, Ok(())));
                    model.scheduler.offload_event(OffloadReport::Ended(id, Err(OffloadFault::Io)));
                }
            }
        }
        assert_eq!(answers, [Some(FinishOutcome::Freed), None], "request_finished answers once");
        let (usage, load) = (model.scheduler.usage(), model.scheduler.load());
        assert_eq!((usage.held_share(), usage.free + usage.cached), (0.0, 8));
        assert_eq!((load.offloading, load.pending_release), (0, 0));
        assert_eq!(model.counts().host.stored, 1, "what was computed is worth keeping");
    }
}

#[test]
fn an_abort_during_a_load_frees_what_no_worker_writes_and_the_rest_when_it_is_quiet() {
    for eager in [false, true] {
        let mut model = OffloadModel::new(8, ROOMY);
        model.scheduler.submit(new(1, &prompt(10, 13), 1, Purpose::Plain)).expect("accepted");
        model.run();
        model.wash(2);
        model.eager = eager;
        model.scheduler.submit(new(3, &prompt(10, 13), 1, Purpose::Plain)).expect("accepted");
        model.step();
        let first = *model.orders.keys().next().expect("three loads");
        model.end(first, Ok(()));
        assert_eq!(model.scheduler.finish(SeqId(3), FinishReason::Abort), Some(FinishOutcome::Freed));
        model.act();
        let left = if eager { 2 } else { 0 };
        assert_eq!(
            (model.scheduler.usage().landing, model.scheduler.load().pending_release),
            (left, usize::from(eager))
        );
        model.end_all();
        assert_eq!((model.scheduler.usage().held_share(), model.scheduler.load().pending_release), (0.0, 0));
        assert_eq!(model.scheduler.load().loading, 0);
    }
}

#[test]
fn a_leased_block_under_store_is_freed_after_both_end() {
    for lease_first in [false, true] {
        let mut model = OffloadModel::new(8, ROOMY);
        model
            .scheduler
            .submit(new(1, &prompt(10, 5), 1, Purpose::Produce { consumers: 1, early: false }))
            .expect("accepted");
        model.step();
        let leased = model.leases.pop().expect("leased");
        assert_eq!((model.scheduler.usage().leased, model.scheduler.load().pending_release), (2, 1));
        if lease_first {
            model.scheduler.lease_ended(&leased);
            assert_eq!((model.scheduler.usage().storing, model.scheduler.load().pending_release), (1, 1));
            model.end_all();
        } else {
            model.end_all();
            assert_eq!((model.scheduler.usage().leased, model.scheduler.load().pending_release), (2, 1));
            model.scheduler.lease_ended(&leased);
        }
        assert_eq!((model.scheduler.usage().held_share(), model.scheduler.load().pending_release), (0.0, 0));
    }
}

#[test]
fn stores_are_cancelled_before_a_sequence_is_preempted() {
    let mut model = OffloadModel::new(8, ROOMY);
    model.scheduler.submit(new(1, &prompt(10, 16), 1, Purpose::Plain)).expect("accepted");
    model.step();
    assert_eq!(model.scheduler.usage().storing, 1, "one of eight blocks may be held by stores");
    model.scheduler.submit(new(2, &prompt(100, 31), 1, Purpose::Plain)).expect("accepted");
    assert_eq!(model.step(), 0, "one block short");
    assert_eq!(model.step(), 1, "it was had back");
    assert_eq!(model.scheduler.load().preemptions, 0);
    model.run();
    assert_eq!(model.scheduler.usage().held_share(), 0.0);
}

#[test]
fn a_handoff_that_failed_under_recompute_is_loaded_from_the_tiers() {
    let mut model = OffloadModel::new(8, ROOMY);
    model.scheduler.submit(new(1, &prompt(10, 13), 1, Purpose::Plain)).expect("accepted");
    model.run();
    model.wash(2);
    let consume = Purpose::Consume(Fetch::new(LoadFailurePolicy::Recompute));
    model.scheduler.submit(new(3, &prompt(10, 13), 1, consume)).expect("accepted");
    model.step();
    assert_eq!((model.scheduler.load().fetching, model.scheduler.load().loading), (1, 0), "P/D first");
    model.scheduler.fetch_event(SeqId(3), Event::TransferFailed(FailureKind::Transfer));
    model.step();
    assert_eq!((model.scheduler.load().fetching, model.scheduler.load().loading), (0, 1), "then the tiers");
    assert_eq!(model.recomputing, [SeqId(3)]);
    model.end_all();
    assert_eq!(model.scheduler.sequence(SeqId(3)).expect("running").reused(), (12, 0));
    model.run();
    assert_eq!(model.scheduler.usage().held_share(), 0.0);
}

#[test]
fn only_verified_fetched_blocks_are_stored() {
    for (answer, stored) in [(Verification::Valid, 3), (Verification::Gone, 0)] {
        let mut model = OffloadModel::new(8, ROOMY);
        let consume = Purpose::Consume(Fetch::new(LoadFailurePolicy::Fail));
        model.scheduler.submit(new(1, &prompt(10, 13), 4, consume)).expect("accepted");
        model.step();
        let sequence = model.scheduler.sequence(SeqId(1)).expect("fetching");
        let fetched: Vec<_> = sequence.blocks().iter().copied().zip(sequence.blocks.hashes.clone()).collect();
        model.device.extend(fetched);
        model.scheduler.fetch_event(SeqId(1), Event::TransferDone);
        model.scheduler.fetch_event(SeqId(1), Event::Verdict(answer));
        model.act();
        model.end_all();
        assert_eq!(model.counts().host.stored, stored);
    }
}

#[test]
fn a_host_tier_that_is_full_of_writes_waits_and_loses_no_block_of_a_chain() {
    let mut model = OffloadModel::new(32, TierConfig { host_blocks: 0, disk_blocks: 64 });
    // A single slot would be enough: every store waits for the write before it.
    model.scheduler.submit(new(1, &prompt(10, 100), 1, Purpose::Plain)).expect("accepted");
    model.run();
    assert_eq!((model.files.len(), model.counts().not_stored), (25, 0));
    model.scheduler.reset_prefix_cache();
    model.scheduler.submit(new(2, &prompt(10, 100), 1, Purpose::Plain)).expect("accepted");
    model.step();
    model.end_all();
    assert_eq!(model.scheduler.sequence(SeqId(2)).expect("running").reused(), (96, 0));
}

#[test]
fn a_reset_of_the_tiers_forgets_them_and_deletes_the_files() {
    let mut model = OffloadModel::new(32, TierConfig { host_blocks: 0, disk_blocks: 128 });
    for id in 0..3 {
        model.scheduler.submit(new(id, &prompt(1000 * id as u32, 101), 1, Purpose::Plain)).expect("accepted");
        model.run();
    }
    assert_eq!(model.files.len(), 75);
    model.scheduler.reset_tiers();
    model.scheduler.reset_prefix_cache();
    model.act();
    model.end_all();
    assert_eq!((model.files.len(), model.counts().disk.blocks), (0, 0));
    model.scheduler.submit(new(9, &prompt(0, 101), 1, Purpose::Plain)).expect("accepted");
    assert_eq!(model.step(), 1, "nothing to load");
}

#[test]
fn a_follower_waits_for_a_leader_that_loads_and_shares_what_it_loaded() {
    let mut model = OffloadModel::new(16, TierConfig { host_blocks: 64, disk_blocks: 0 });
    model.scheduler.submit(new(1, &prompt(10, 13), 1, Purpose::Plain)).expect("accepted");
    model.run();
    model.wash(2);
    model.scheduler.submit(new(3, &prompt(10, 13), 2, Purpose::Plain)).expect("accepted");
    let follower = NewSequence { follows: Some(SeqId(3)), ..new(4, &prompt(10, 13), 2, Purpose::Plain) };
    model.scheduler.submit(follower).expect("accepted");
    model.step();
    assert_eq!(model.scheduler.load().waiting, 1);
    model.run();
    assert_eq!(model.counts().host.loaded, 3, "once");
    assert_eq!(model.scheduler.usage().held_share(), 0.0);
}

#[derive(Clone, Debug)]
enum OffloadAction {
    Submit { prompt: u32, len: usize, max_new: usize, kind: u8 },
    Step,
    Abort(usize),
    Fetch(usize, u8),
    EndLease(usize),
    EndOrder(usize, u8),
    Late(u64, bool),
    Mood(u8),
}

fn acts() -> impl Strategy<Value = Vec<OffloadAction>> {
    let submit = (0_u32..3, 1_usize..36, 1_usize..8, 0_u8..5)
        .prop_map(|(prompt, len, max_new, kind)| OffloadAction::Submit { prompt, len, max_new, kind });
    let act = prop_oneof![
        3 => submit,
        6 => Just(OffloadAction::Step),
        1 => (0_usize..32).prop_map(OffloadAction::Abort),
        2 => ((0_usize..32), 0_u8..5).prop_map(|(i, e)| OffloadAction::Fetch(i, e)),
        1 => (0_usize..8).prop_map(OffloadAction::EndLease),
        8 => ((0_usize..16), 0_u8..12).prop_map(|(i, how)| OffloadAction::EndOrder(i, how)),
        1 => ((0_u64..64), any::<bool>()).prop_map(|(id, ok)| OffloadAction::Late(id, ok)),
        1 => (0_u8..10).prop_map(OffloadAction::Mood),
    ];
    prop::collection::vec(act, 1..160)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(768))]

    /// A tiny pool, tiny tiers, random submissions, aborts, transfers, and orders that end in any way and any order.
    /// The block counts always add up, and no sequence attends to a block with other contents. No block or slot is
    /// reused while it is copied. When all sequences and workers have ended, every block is free.
    #[test]
    fn every_block_is_freed_with_tiers(
        sizes in (8_usize..14, 0_usize..6, 0_usize..6),
        acts in acts(),
    ) {
        let (blocks, host_blocks, disk_blocks) = sizes;
        let tiers = TierConfig { host_blocks, disk_blocks: disk_blocks.max(usize::from(host_blocks == 0)) };
        let mut model = OffloadModel::new(blocks, tiers);
        let mut next = 0_u64;
        let mut consumers = Vec::new();
        for act in acts {
            match act {
                OffloadAction::Submit { prompt, len, max_new, kind } => {
                    next += 1;
                    let purpose = match kind {
                        0 | 4 => Purpose::Plain,
                        1 => Purpose::Produce { consumers: 1, early: true },
                        2 => Purpose::Consume(Fetch::new(LoadFailurePolicy::Recompute)),
                        _ => Purpose::Consume(Fetch::new(LoadFailurePolicy::Fail)),
                    };
                    if matches!(purpose, Purpose::Consume(_)) { consumers.push(SeqId(next)) }
                    let tokens: Vec<u32> = (0..len as u32).map(|t| 10 + prompt * 100 + t).collect();
                    let _ = model.scheduler.submit(new(next, &tokens, max_new, purpose));
                }
                OffloadAction::Step => drop(model.step()),
                OffloadAction::Abort(i) => {
                    model.scheduler.finish(SeqId(1 + i as u64 % next.max(1)), FinishReason::Abort);
                }
                OffloadAction::Fetch(i, event) => if !consumers.is_empty() {
                    let id = consumers[i % consumers.len()];
                    let event = match event {
                        0 | 1 => {
                            // The transfer wrote every landing block.
                            if let Some(sequence) = model.scheduler.sequence(id).filter(|s| s.phase == Phase::Fetching) {
                                let landed: Vec<_> =
                                    sequence.blocks().iter().copied().zip(sequence.blocks.hashes.clone()).collect();
                                model.device.extend(landed);
                                model.scheduler.fetch_event(id, Event::TransferDone);
                            }
                            Event::Verdict(if event == 0 { Verification::Valid } else { Verification::Gone })
                        }
                        2 => Event::TransferFailed(FailureKind::Transfer),
                        3 => Event::LeaseGone,
                        _ => Event::WorkerLost,
                    };
                    model.scheduler.fetch_event(id, event);
                },
                OffloadAction::EndLease(i) => if !model.leases.is_empty() {
                    let at = i % model.leases.len();
                    let lease = model.leases.swap_remove(at);
                    model.scheduler.lease_ended(&lease);
                },
                OffloadAction::EndOrder(i, how) => {
                    let id = model.orders.keys().copied().nth(i % model.orders.len().max(1));
                    let fault = OffloadFault::ALL.get(how as usize).copied();
                    id.into_iter().for_each(|id| model.end(id, fault.map_or(Ok(()), Err)));
                }
                // A report of an order that has ended, or never existed.
                OffloadAction::Late(id, ok) => if !model.orders.contains_key(&TransferId(id)) {
                    let outcome = if ok { Ok(()) } else { Err(OffloadFault::Io) };
                    model.scheduler.offload_event(OffloadReport::Ended(TransferId(id), outcome));
                    model.scheduler.offload_revoked(TransferId(id), ok);
                },
                OffloadAction::Mood(mood) => match mood {
                    0..=2 => model.scheduler.offload_event(OffloadReport::DiskSuspended),
                    3..=5 => model.scheduler.offload_event(OffloadReport::DiskResumed),
                    6 => model.scheduler.reset_prefix_cache(),
                    7 => model.scheduler.reset_tiers(),
                    8 => model.refusing = !model.refusing,
                    _ => model.eager = !model.eager,
                },
            }
            model.act();
            prop_assert!(model.scheduler.usage().adds_up());
        }
        model.refusing = false;
        for lease in std::mem::take(&mut model.leases) { model.scheduler.lease_ended(&lease) }
        for id in 1..=next { model.scheduler.finish(SeqId(id), FinishReason::Abort); }
        model.act();
        for id in consumers { model.scheduler.fetch_event(id, Event::WorkerLost) }
        model.act();
        model.end_all();
        let (usage, load) = (model.scheduler.usage(), model.scheduler.load());
        prop_assert_eq!(usage.held_share(), 0.0, "{:?}", usage);
        prop_assert_eq!(load.stopping + load.fetching + load.loading + load.waiting + load.running, 0);
        prop_assert_eq!((load.offloading, load.pending_release), (0, 0));
    }
}
