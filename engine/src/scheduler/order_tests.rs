//! The order of sequences, and the reserve for their growth, against scripted responses.

use baton_connector::fetch::{Fetch, LoadFailurePolicy};
use proptest::prelude::*;

use super::*;
use crate::offload::OffloadReport;
use crate::offload::tier_index::TierConfig;
use crate::scheduler::sequence::StopRule;

const CONFIG: SchedulerConfig = SchedulerConfig {
    block_tokens: 4,
    max_num_seqs: 8,
    max_num_batched_tokens: 64,
    max_waiting: 64,
    max_model_len: 256,
    window: None,
};

/// A sequence whose tokens are its own.
fn new(id: u64, len: usize, max_new: usize, priority: i32) -> NewSequence {
    let prompt: Vec<u32> = (0..len as u32).map(|at| 1_000 * id as u32 + at).collect();
    NewSequence { priority, ..tests::new(id, &prompt, max_new, Purpose::Plain) }
}

fn by_priority(config: SchedulerConfig, blocks: usize) -> Scheduler {
    Scheduler::new(config, blocks).with_policy(SchedulingPolicy::Priority)
}

/// Computes a step and returns the sequences in it.
fn step(scheduler: &mut Scheduler) -> Vec<u64> {
    let plan = scheduler.schedule();
    for part in &plan {
        if let Some(reason) = scheduler.commit(part, part.samples.then_some(9)) {
            scheduler.finish(part.id, reason);
        }
    }
    assert!(scheduler.usage().adds_up());
    plan.iter().map(|part| part.id.0).collect()
}

/// Computes until nothing can run, and returns the sequences in the order of their first steps.
fn order(scheduler: &mut Scheduler) -> Vec<u64> {
    let mut begun = Vec::new();
    for _ in 0..10_000 {
        let ids = step(scheduler);
        if ids.is_empty() {
            assert_eq!((scheduler.usage().held_share(), scheduler.load().waiting), (0.0, 0));
            return begun;
        }
        begun.extend(ids.into_iter().filter(|id| !begun.contains(id)).collect::<Vec<_>>());
    }
    panic!("no progress");
}

#[test]
fn urgent_sequences_begin_first_and_equals_in_the_order_of_arrival() {
    let config = SchedulerConfig { max_num_seqs: 1, ..CONFIG };
    let asked = [(1, 5), (2, 0), (3, 5), (4, -1), (5, 0)];
    for (policy, expected) in
        [(SchedulingPolicy::Fcfs, [1, 2, 3, 4, 5]), (SchedulingPolicy::Priority, [4, 2, 5, 1, 3])]
    {
        let mut scheduler = Scheduler::new(config, 16).with_policy(policy);
        for (id, priority) in asked {
            scheduler.submit(new(id, 6, 2, priority)).expect("accepted");
        }
        assert_eq!(order(&mut scheduler), expected, "{policy:?}");
        assert_eq!(scheduler.load().preemptions, 0);
    }
}

#[test]
fn the_youngest_of_the_least_urgent_is_preempted() {
    let mut scheduler = by_priority(CONFIG, 9);
    // Three blocks each at the end, one at the start. The fourth sequence is the youngest, but not the least urgent.
    for (id, priority) in [(1, 0), (2, 7), (3, 7), (4, 1)] {
        scheduler.submit(new(id, 4, 8, priority)).expect("accepted");
        step(&mut scheduler);
    }
    let mut waited = Vec::new();
    for _ in 0..100 {
        step(&mut scheduler);
        waited.extend(scheduler.waiting.iter().map(|id| id.0));
        waited.dedup();
    }
    assert_eq!(waited.first(), Some(&3), "{waited:?}");
    assert!(!waited.contains(&1) && !waited.contains(&4), "{waited:?}");
    assert!(scheduler.load().preemptions > 0 && scheduler.load().recomputed_tokens > 0);
    assert_eq!(scheduler.usage().held_share(), 0.0);
}

#[test]
fn a_less_urgent_sequence_yields_to_one_that_is_admitted_in_its_place() {
    let mut scheduler = by_priority(CONFIG, 10);
    scheduler.submit(new(1, 16, 20, 1)).expect("accepted");
    scheduler.submit(new(2, 12, 20, 2)).expect("accepted");
    assert_eq!(step(&mut scheduler), [1, 2]);
    // The pool has three blocks left. Equals and less urgent ones wait.
    scheduler.submit(new(3, 16, 4, 2)).expect("accepted");
    assert_eq!(step(&mut scheduler), [1, 2]);
    scheduler.submit(new(4, 16, 4, 0)).expect("accepted");
    assert_eq!(step(&mut scheduler), [1, 4], "the least urgent one yields");
    assert_eq!(scheduler.load().preemptions, 1);
    // It goes before its equal, and without more urgent ones nothing is preempted.
    assert_eq!(scheduler.waiting.iter().map(|id| id.0).collect::<Vec<_>>(), [2, 3]);
    order(&mut scheduler);
}

#[test]
fn nothing_yields_where_that_admits_no_other() {
    let mut scheduler = by_priority(CONFIG, 10);
    scheduler.submit(new(1, 12, 24, -1)).expect("accepted");
    scheduler.submit(new(2, 12, 20, 5)).expect("accepted");
    assert_eq!(step(&mut scheduler), [1, 2]);
    // It needs eight blocks. The more urgent sequence keeps more than the other two.
    scheduler.submit(new(3, 32, 1, 0)).expect("accepted");
    assert_eq!((step(&mut scheduler), scheduler.load().preemptions), (vec![1, 2], 0));
    order(&mut scheduler);
}

#[test]
fn blocks_of_the_heads_own_prefix_are_no_reason_to_yield() {
    let mut scheduler = by_priority(CONFIG, 10);
    let first: Vec<u32> = (1..17).collect();
    scheduler.submit(new(1, 12, 4, -1)).expect("accepted");
    scheduler.submit(NewSequence { prompt: first.clone(), ..new(2, 16, 4, 5) }).expect("accepted");
    assert_eq!(step(&mut scheduler), [1, 2]);
    // Four of its eight blocks are those of the second sequence, which has no other. Three are free.
    let prompt = [first, (101..117).collect()].concat();
    scheduler.submit(NewSequence { prompt, ..new(3, 32, 1, 0) }).expect("accepted");
    assert_eq!((step(&mut scheduler), scheduler.load().preemptions), (vec![1, 2], 0));
    assert_eq!(order(&mut scheduler), [1, 2, 3]);
}

#[test]
fn blocks_under_store_are_freed_after_it_and_no_reason_to_yield_before() {
    let tiers = TierConfig { host_blocks: 16, disk_blocks: 0 };
    let mut scheduler = by_priority(CONFIG, 12).with_tiers(tiers, []);
    scheduler.submit(new(1, 1, 8, -1)).expect("accepted");
    scheduler.submit(new(2, 24, 20, 5)).expect("accepted");
    assert_eq!((step(&mut scheduler), scheduler.usage().active), (vec![1, 2], 7));
    // It needs ten blocks and leaves one. Five are free, and of six that the second sequence has, one is being stored.
    scheduler.submit(new(3, 40, 1, 0)).expect("accepted");
    assert_eq!((step(&mut scheduler), scheduler.load().preemptions), (vec![1, 2], 0));
    loop {
        let effects = scheduler.take_effects();
        if effects.is_empty() {
            break;
        }
        for effect in effects {
            let Effect::Offload(order) = effect else { panic!("{effect:?}") };
            scheduler.offload_event(OffloadReport::Ended(order.id(), Ok(())));
        }
    }
    assert_eq!((step(&mut scheduler), scheduler.load().preemptions), (vec![1, 3], 1));
}

#[test]
fn a_follower_that_waits_for_its_leader_hides_no_other_sequence() {
    let mut scheduler = by_priority(SchedulerConfig { max_num_seqs: 2, ..CONFIG }, 64);
    scheduler.submit(new(2, 8, 40, 5)).expect("accepted");
    step(&mut scheduler);
    scheduler.submit(new(1, 100, 4, 0)).expect("accepted");
    assert_eq!(step(&mut scheduler), [2, 1]);
    let follows = Some(SeqId(1));
    scheduler
        .submit(NewSequence { follows, admitted_with_first: true, ..new(3, 100, 4, 0) })
        .expect("accepted");
    assert_eq!(
        (scheduler.has_queue(), scheduler.waiting_ahead(9)),
        (false, 0),
        "it waits for its leader only"
    );
    scheduler.submit(new(4, 8, 1, 1)).expect("accepted");
    assert_eq!((scheduler.has_queue(), scheduler.waiting_ahead(0), scheduler.waiting_ahead(1)), (true, 0, 1));
    assert_eq!(step(&mut scheduler), [1, 4], "the least urgent one yields to the one behind the follower");
    order(&mut scheduler);
}

#[test]
fn a_sequence_yields_a_bounded_number_of_times() {
    let config = SchedulerConfig { max_num_seqs: 1, ..CONFIG };
    let mut scheduler = by_priority(config, 16);
    scheduler.submit(new(1, 8, 40, 9)).expect("accepted");
    let mut yielded = 0;
    for id in 2..12 {
        step(&mut scheduler);
        scheduler.submit(new(id, 8, 1, 0)).expect("accepted");
        if step(&mut scheduler) == [id] {
            yielded += 1;
        }
        // The others have ended, and the first one runs again.
        step(&mut scheduler);
    }
    assert_eq!((yielded, scheduler.load().preemptions), (3, 3));
    order(&mut scheduler);
}

#[test]
fn a_handoff_goes_before_its_equals_and_starves_none() {
    let config = SchedulerConfig { max_num_seqs: 1, ..CONFIG };
    let mut scheduler = by_priority(config, 16);
    scheduler.submit(new(1, 8, 40, 0)).expect("accepted");
    step(&mut scheduler);
    scheduler.submit(new(2, 8, 1, 0)).expect("accepted");
    let waiting = |scheduler: &Scheduler| scheduler.waiting.iter().map(|id| id.0).collect::<Vec<_>>();
    for id in 3..30 {
        let purpose = Purpose::Consume(Fetch::new(LoadFailurePolicy::Recompute));
        scheduler.submit(NewSequence { purpose, ..new(id, 8, 1, 0) }).expect("accepted");
    }
    let mut expected: Vec<u64> = (3..19).collect();
    expected.push(2);
    expected.extend(19..30);
    assert_eq!(waiting(&scheduler), expected, "sixteen have passed it");
    // A more urgent sequence goes before all of them, and a less urgent one behind.
    scheduler.submit(new(30, 8, 1, -1)).expect("accepted");
    scheduler.submit(new(31, 8, 1, 1)).expect("accepted");
    assert_eq!((waiting(&scheduler)[0], waiting(&scheduler).last()), (30, Some(&31)));
}

/// What a run cost.
#[derive(Clone, Copy, Debug, Default)]
struct RunCost {
    preemptions: u64,
    recomputed: u64,
    steps: u64,
}

/// Runs scripted requests in a pool that is always full: their prompts' lengths, `max_new`, and responses' lengths.
fn full_pool(requests: &[(usize, usize, usize)], reserves: bool) -> RunCost {
    let config = SchedulerConfig {
        block_tokens: 16,
        max_num_seqs: 32,
        max_num_batched_tokens: 256,
        max_waiting: 1_024,
        max_model_len: 4_096,
        window: None,
    };
    let scheduler = Scheduler::new(config, 256);
    let mut scheduler = if reserves { scheduler.with_growth_reserve() } else { scheduler };
    for (at, &(len, max_new, _)) in requests.iter().enumerate() {
        let id = at as u64 + 1;
        let prompt: Vec<u32> = (0..len as u32).map(|token| 10_000 * id as u32 + token).collect();
        scheduler.submit(tests::new(id, &prompt, max_new, Purpose::Plain)).expect("accepted");
    }
    let mut steps = 0;
    loop {
        let plan = scheduler.schedule();
        if plan.is_empty() {
            break;
        }
        steps += 1;
        for part in &plan {
            let sequence = scheduler.sequence(part.id).expect("planned");
            // Token 0 ends a response.
            let is_last = sequence.generated() + 1 == requests[part.id.0 as usize - 1].2;
            let token = 10_000 * part.id.0 as u32 + sequence.tokens().len() as u32;
            let token = if is_last { 0 } else { token };
            if let Some(reason) = scheduler.commit(part, part.samples.then_some(token)) {
                scheduler.finish(part.id, reason);
            }
        }
    }
    assert_eq!((scheduler.usage().held_share(), scheduler.load().waiting), (0.0, 0));
    let load = scheduler.load();
    RunCost { preemptions: load.preemptions, recomputed: load.recomputed_tokens, steps }
}

#[test]
fn a_growth_reserve_makes_preemptions_rare_in_a_full_pool() {
    type Response = fn(&mut dyn FnMut(usize) -> usize) -> (usize, usize);
    let kinds: [(&str, Response); 3] = [
        ("some long responses", |draw| {
            let is_short = draw(10) < 7;
            (512, if is_short { 20 + draw(60) } else { 200 + draw(300) })
        }),
        ("a `max_new` of the whole context", |draw| {
            let length = draw(64);
            (3_000, 8 + length * (1 + draw(8)))
        }),
        ("all of `max_new`", |_| (128, 128)),
    ];
    for (kind, response) in kinds {
        let (mut plain, mut reserved) = (RunCost::default(), RunCost::default());
        for seed in 1..3_u64 {
            let mut state = seed;
            let mut draw = |below: usize| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as usize % below
            };
            let mut requests = Vec::new();
            for _ in 0..250 {
                let prompt = 16 + draw(240);
                let (max_new, length) = response(&mut draw);
                requests.push((prompt, max_new, length));
            }
            for (total, reserves) in [(&mut plain, false), (&mut reserved, true)] {
                let cost = full_pool(&requests, reserves);
                total.preemptions += cost.preemptions;
                total.recomputed += cost.recomputed;
                total.steps += cost.steps;
            }
        }
        println!("{kind}: without a reserve {plain:?}, with it {reserved:?}");
        assert!(plain.preemptions > 200, "the pool is full: {plain:?}");
        assert!(2 * reserved.preemptions <= plain.preemptions, "{kind}: {plain:?} {reserved:?}");
        assert!(3 * reserved.recomputed <= 2 * plain.recomputed, "{kind}: {plain:?} {reserved:?}");
        assert!(100 * reserved.steps <= 107 * plain.steps, "{kind}: {plain:?} {reserved:?}");
    }
}

#[test]
fn a_reserve_never_keeps_an_idle_engine_from_work() {
    // Each alone needs the whole pool.
    let mut scheduler = Scheduler::new(CONFIG, 10).with_growth_reserve();
    scheduler.submit(new(1, 36, 4, 0)).expect("accepted");
    scheduler.submit(new(2, 36, 4, 0)).expect("accepted");
    assert_eq!(order(&mut scheduler), [1, 2]);
    assert_eq!(scheduler.load().preemptions, 0);
}

#[test]
fn blocks_for_growth_are_left_until_a_sequence_ends() {
    let begun_at_once = |reserves: bool| {
        let scheduler = Scheduler::new(CONFIG, 8);
        let mut scheduler = if reserves { scheduler.with_growth_reserve() } else { scheduler };
        // Two blocks each at the start, and six at the end.
        for id in 1..4 {
            let stop = StopRule { max_new: 16, stop_ids: Vec::new(), min_new: 0 };
            scheduler.submit(NewSequence { stop, ..new(id, 8, 16, 0) }).expect("accepted");
        }
        let begun = step(&mut scheduler);
        order(&mut scheduler);
        (begun.len(), scheduler.load().preemptions > 0)
    };
    assert_eq!(begun_at_once(false), (3, true));
    assert!((1..3).contains(&begun_at_once(true).0), "the third would take blocks that two will need");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Random priorities, lengths and aborts in a small pool, with a reserve: the blocks add up, everything ends, and
    /// the queue stays sorted.
    #[test]
    fn any_priorities_end_and_free_every_block(
        asked in prop::collection::vec((1_usize..30, 1_usize..12, -2_i32..3, 0_u8..4), 1..40),
    ) {
        let mut scheduler = by_priority(SchedulerConfig { max_num_seqs: 3, ..CONFIG }, 12).with_growth_reserve();
        for (at, (len, max_new, priority, steps)) in asked.iter().enumerate() {
            let id = at as u64 + 1;
            scheduler.submit(new(id, *len, *max_new, *priority)).expect("accepted");
            for _ in 0..*steps {
                step(&mut scheduler);
                let waiting: Vec<i32> =
                    scheduler.waiting.iter().map(|id| scheduler.sequences[id].turn.priority).collect();
                prop_assert!(waiting.is_sorted(), "{:?}", waiting);
            }
            if *steps == 3 {
                scheduler.finish(SeqId(1 + id / 2), FinishReason::Abort);
            }
        }
        order(&mut scheduler);
    }
}
