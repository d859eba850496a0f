//! The scheduler against a scripted executor: every token is known beforehand, so the generated tokens can be
//! checked, and every block must be freed.

use baton_connector::RequestId;
use baton_connector::fetch::{Event, Fetch, LoadFailurePolicy, Verification};
use proptest::prelude::*;

use super::*;
use crate::scheduler::sequence::StopRule;

const CONFIG: SchedulerConfig = SchedulerConfig {
    block_tokens: 4,
    max_num_seqs: 8,
    max_num_batched_tokens: 16,
    max_waiting: 64,
    max_model_len: 256,
    window: None,
};

pub(super) fn new(id: u64, prompt: &[u32], max_new: usize, purpose: Purpose) -> NewSequence {
    NewSequence {
        id: SeqId(id),
        request: RequestId::new(&format!("r{id}")).expect("a test id"),
        prompt: prompt.to_vec(),
        stop: StopRule { max_new, stop_ids: vec![0], min_new: 0 },
        purpose,
        follows: None,
        admitted_with_first: false,
        cache_salt: None,
        adapter: None,
        prompt_logprobs: None,
        priority: 0,
    }
}

fn consume(policy: LoadFailurePolicy) -> Purpose {
    Purpose::Consume(Fetch::new(policy))
}

/// Runs steps until nothing can run. Returns the leased blocks.
fn run(scheduler: &mut Scheduler) -> Vec<Vec<BlockId>> {
    let mut leased = Vec::new();
    for _ in 0..10_000 {
        let plan = scheduler.schedule();
        assert!(plan.iter().map(|p| p.count).sum::<usize>() <= CONFIG.max_num_batched_tokens);
        if plan.is_empty() {
            return leased;
        }
        for part in &plan {
            let sequence = scheduler.sequence(part.id).expect("planned");
            assert!(sequence.blocks().len() * CONFIG.block_tokens >= part.start + part.count);
            let sampled = part.samples.then(|| 1000 + sequence.tokens().len() as u32);
            if let Some(reason) = scheduler.commit(part, sampled)
                && let Some(FinishOutcome::Leased(blocks)) = scheduler.finish(part.id, reason)
            {
                leased.push(blocks);
            }
        }
        assert!(scheduler.usage().adds_up());
    }
    panic!("no progress");
}

#[test]
fn a_long_prompt_is_computed_in_chunks_and_its_blocks_are_freed() {
    let mut scheduler = Scheduler::new(CONFIG, 32);
    scheduler.submit(new(1, &[7; 50], 3, Purpose::Plain)).expect("accepted");
    let first = scheduler.schedule();
    assert_eq!(first, [StepPart { id: SeqId(1), start: 0, count: 16, samples: false }]);
    scheduler.commit(&first[0], None);
    run(&mut scheduler);
    assert_eq!(scheduler.usage().held_share(), 0.0);
}

#[test]
fn a_position_whose_token_is_not_sampled_is_computed_again() {
    let mut scheduler = Scheduler::new(CONFIG, 32);
    scheduler.submit(new(1, &[7; 10], 4, Purpose::Plain)).expect("accepted");
    // The whole prompt but its last token counts as computed.
    let prompt = scheduler.schedule();
    assert_eq!(prompt, [StepPart { id: SeqId(1), start: 0, count: 10, samples: true }]);
    scheduler.commit(&StepPart { count: 9, samples: false, ..prompt[0] }, None);
    let last = [StepPart { id: SeqId(1), start: 9, count: 1, samples: true }];
    assert_eq!(scheduler.schedule(), last);
    // Nothing is recorded: the part is planned as often as necessary, with the same blocks.
    let blocks = scheduler.sequence(SeqId(1)).expect("running").blocks().to_vec();
    assert_eq!(scheduler.schedule(), last);
    assert_eq!(scheduler.sequence(SeqId(1)).expect("running").blocks(), blocks);
    scheduler.commit(&last[0], Some(1_000));
    assert_eq!(scheduler.schedule(), [StepPart { id: SeqId(1), start: 10, count: 1, samples: true }]);
    run(&mut scheduler);
    assert_eq!(scheduler.usage().held_share(), 0.0);
}

#[test]
fn a_repeated_prompt_computes_only_its_tail() {
    let mut scheduler = Scheduler::new(CONFIG, 32);
    let prompt: Vec<u32> = (1..=13).collect();
    scheduler.submit(new(1, &prompt, 1, Purpose::Plain)).expect("accepted");
    run(&mut scheduler);
    scheduler.submit(new(2, &prompt, 1, Purpose::Plain)).expect("accepted");
    assert_eq!(scheduler.schedule(), [StepPart { id: SeqId(2), start: 12, count: 1, samples: true }]);
    assert_eq!(scheduler.sequence(SeqId(2)).expect("running").reused(), (12, 0));
}

#[test]
fn a_prompt_whose_logprobs_are_wanted_is_computed_whole_with_bounded_rows() {
    let config = SchedulerConfig { max_num_batched_tokens: 512, max_model_len: 512, ..CONFIG };
    let mut scheduler = Scheduler::new(config, 256);
    let prompt: Vec<u32> = (1..=150).collect();
    // The parts of all steps until nothing can run.
    let drain = |scheduler: &mut Scheduler| {
        let mut parts = Vec::new();
        loop {
            let plan = scheduler.schedule();
            if plan.is_empty() {
                return parts;
            }
            let scores = |part: &&StepPart| {
                scheduler.sequence(part.id).expect("planned").scores_prompt(part.start, part.count)
            };
            let rows: usize = plan.iter().filter(scores).map(|part| part.count).sum();
            assert!(rows <= SCORED_ROWS_MAX, "{plan:?}");
            for part in &plan {
                if let Some(reason) = scheduler.commit(part, part.samples.then_some(1000)) {
                    scheduler.finish(part.id, reason).expect("once");
                }
            }
            parts.extend(plan);
        }
    };
    scheduler.submit(new(1, &prompt, 1, Purpose::Plain)).expect("accepted");
    assert_eq!(drain(&mut scheduler).len(), 1, "one step has room for the whole prompt");
    for id in [2, 3] {
        let scored = NewSequence { prompt_logprobs: Some(0), ..new(id, &prompt, 2, Purpose::Plain) };
        scheduler.submit(scored).expect("accepted");
    }
    let parts = drain(&mut scheduler);
    for id in [2, 3] {
        let mut next = 0;
        for part in parts.iter().filter(|part| part.id == SeqId(id)) {
            assert_eq!(part.start, next, "nothing is taken from the cache, and nothing is computed twice");
            next += part.count;
        }
        // The prompt, and the first new token for the second.
        assert_eq!(next, 151);
    }
    scheduler.submit(new(4, &prompt, 1, Purpose::Plain)).expect("accepted");
    assert_eq!(drain(&mut scheduler)[0].start, 148, "other requests use the blocks");
    assert_eq!(scheduler.usage().held_share(), 0.0);
}

#[test]
fn only_the_end_of_its_lease_frees_a_producers_prompt() {
    let mut scheduler = Scheduler::new(CONFIG, 8);
    scheduler.submit(new(1, &[5; 9], 1, Purpose::Produce { consumers: 1, early: false })).expect("accepted");
    let leased = run(&mut scheduler);
    assert_eq!((leased.len(), leased[0].len()), (1, 3));
    assert_eq!(scheduler.usage().leased, 3);
    assert_eq!(scheduler.finish(SeqId(1), FinishReason::Abort), None, "request_finished comes once");
    scheduler.lease_ended(&leased[0]);
    assert_eq!(scheduler.usage().leased, 0);
}

#[test]
fn an_abort_in_the_step_in_which_a_producer_finishes_wins() {
    let mut scheduler = Scheduler::new(CONFIG, 8);
    scheduler.submit(new(1, &[5; 9], 1, Purpose::Produce { consumers: 1, early: false })).expect("accepted");
    let plan = scheduler.schedule();
    assert_eq!(scheduler.finish(SeqId(1), FinishReason::Abort), Some(FinishOutcome::Freed));
    assert_eq!(scheduler.commit(&plan[0], Some(9)), None, "a result that is late is a no-op");
    assert_eq!(scheduler.usage().held_share(), 0.0);
}

#[test]
fn fetched_blocks_are_used_only_after_the_verdict() {
    let mut scheduler = Scheduler::new(CONFIG, 8);
    let prompt: Vec<u32> = (1..=9).collect();
    scheduler.submit(new(1, &prompt, 2, consume(LoadFailurePolicy::Fail))).expect("accepted");
    assert!(scheduler.schedule().is_empty());
    let effects = scheduler.take_effects();
    assert!(matches!(&effects[..], [Effect::StartRead { first: 0, into, .. }] if into.len() == 3));
    assert_eq!(scheduler.usage().landing, 3);
    scheduler.fetch_event(SeqId(1), Event::TransferDone);
    assert!(scheduler.schedule().is_empty());
    scheduler.fetch_event(SeqId(1), Event::Verdict(Verification::Valid));
    assert_eq!(scheduler.schedule(), [StepPart { id: SeqId(1), start: 8, count: 1, samples: true }]);
    assert_eq!(scheduler.usage().landing, 0);
}

#[test]
fn blocks_without_a_valid_verdict_are_never_cached() {
    for policy in [LoadFailurePolicy::Fail, LoadFailurePolicy::Recompute] {
        let mut scheduler = Scheduler::new(CONFIG, 8);
        let prompt: Vec<u32> = (1..=9).collect();
        scheduler.submit(new(1, &prompt, 2, consume(policy))).expect("accepted");
        scheduler.schedule();
        scheduler.fetch_event(SeqId(1), Event::TransferDone);
        scheduler.fetch_event(SeqId(1), Event::Verdict(Verification::Gone));
        assert_eq!((scheduler.usage().landing, scheduler.usage().cached), (0, 0));
        let effects = scheduler.take_effects();
        match policy {
            LoadFailurePolicy::Fail => {
                assert!(effects.contains(&Effect::FetchFailed(SeqId(1), FailureKind::Gone)));
                scheduler.finish(SeqId(1), FinishReason::Error).expect("it has not finished");
            }
            LoadFailurePolicy::Recompute => {
                assert!(effects.contains(&Effect::Recomputing(SeqId(1))));
                assert_eq!(scheduler.schedule()[0].start, 0, "computed from the start");
                run(&mut scheduler);
            }
        }
        assert_eq!(scheduler.usage().held_share(), 0.0);
        assert_eq!(scheduler.load().fetching, 0);
    }
}

#[test]
fn an_aborted_fetch_keeps_its_landing_blocks_until_the_transfer_is_quiet() {
    let mut scheduler = Scheduler::new(CONFIG, 4);
    scheduler.submit(new(1, &[3; 9], 2, consume(LoadFailurePolicy::Fail))).expect("accepted");
    scheduler.schedule();
    scheduler.take_effects();
    assert_eq!(scheduler.finish(SeqId(1), FinishReason::Abort), Some(FinishOutcome::Freed));
    assert!(scheduler.take_effects().contains(&Effect::StopRead(SeqId(1))));
    assert_eq!((scheduler.usage().landing, scheduler.load().stopping), (3, 1));
    scheduler.fetch_event(SeqId(1), Event::TransferFailed(FailureKind::Transfer));
    assert_eq!((scheduler.usage().landing, scheduler.load().stopping), (0, 0));
    assert!(matches!(scheduler.take_effects()[..], [Effect::ReleaseAtProducer(SeqId(1), _)]));
}

#[test]
fn a_prompt_that_is_cached_here_is_not_fetched_again() {
    let mut scheduler = Scheduler::new(CONFIG, 8);
    let prompt: Vec<u32> = (1..=9).collect();
    scheduler.submit(new(1, &prompt, 1, Purpose::Plain)).expect("accepted");
    run(&mut scheduler);
    scheduler.submit(new(2, &prompt, 1, consume(LoadFailurePolicy::Fail))).expect("accepted");
    scheduler.schedule();
    let effects = scheduler.take_effects();
    assert!(matches!(
        effects[..],
        [Effect::StopHeartbeat(_), Effect::ReleaseAtProducer(_, ReleaseReason::NotNeeded)]
    ));
    assert_eq!(scheduler.schedule(), [StepPart { id: SeqId(2), start: 8, count: 1, samples: true }]);
}

#[test]
fn a_follower_waits_for_the_prompt_it_shares() {
    let mut scheduler = Scheduler::new(CONFIG, 32);
    let prompt: Vec<u32> = (1..=40).collect();
    scheduler.submit(new(1, &prompt, 2, Purpose::Plain)).expect("accepted");
    scheduler
        .submit(NewSequence { follows: Some(SeqId(1)), ..new(2, &prompt, 2, Purpose::Plain) })
        .expect("ok");
    run(&mut scheduler);
    assert_eq!(scheduler.usage().held_share(), 0.0);
}

/// Computes the next step; no sampled token ends a sequence.
fn step(scheduler: &mut Scheduler) -> Vec<StepPart> {
    let plan = scheduler.schedule();
    for part in &plan {
        if let Some(reason) = scheduler.commit(part, part.samples.then_some(9)) {
            scheduler.finish(part.id, reason);
        }
    }
    plan
}

#[test]
fn decodes_and_fetches_proceed_during_a_long_prefill() {
    let mut scheduler = Scheduler::new(CONFIG, 64);
    scheduler.submit(new(1, &[5; 90], 1, Purpose::Plain)).expect("accepted");
    step(&mut scheduler);
    let handed: Vec<u32> = (1..=9).collect();
    // Before the handoff waits a prompt that must wait for the first one.
    scheduler.submit(new(2, &[6; 9], 4, Purpose::Plain)).expect("accepted");
    scheduler.submit(new(3, &handed, 4, consume(LoadFailurePolicy::Fail))).expect("accepted");
    let whole = StepPart { id: SeqId(1), start: 16, count: 16, samples: false };
    assert_eq!(step(&mut scheduler), [whole]);
    let effects = scheduler.take_effects();
    assert!(matches!(&effects[..], [Effect::StartRead { id: SeqId(3), .. }]), "{effects:?}");
    assert_eq!((scheduler.load().fetching, scheduler.load().waiting), (1, 1));
    scheduler.fetch_event(SeqId(3), Event::TransferDone);
    scheduler.fetch_event(SeqId(3), Event::Verdict(Verification::Valid));
    // After landing it takes part in every step. The prefill takes the rest of each.
    for (at, start) in [32, 47, 62].into_iter().enumerate() {
        let decoded = StepPart { id: SeqId(3), start: 8 + at, count: 1, samples: true };
        let rest = StepPart { id: SeqId(1), start, count: 15, samples: false };
        assert_eq!(step(&mut scheduler), [decoded, rest]);
    }
    run(&mut scheduler);
    assert_eq!((scheduler.usage().held_share(), scheduler.load().preemptions), (0.0, 0));
}

#[test]
fn a_fetch_that_overtakes_a_prompt_does_not_take_its_place_or_blocks() {
    let admitted = |config: SchedulerConfig, blocks: usize| {
        let mut scheduler = Scheduler::new(config, blocks);
        scheduler.submit(new(1, &[5; 40], 1, Purpose::Plain)).expect("accepted");
        step(&mut scheduler);
        scheduler.submit(new(2, &[6; 24], 1, Purpose::Plain)).expect("accepted");
        let handed: Vec<u32> = (1..=9).collect();
        scheduler.submit(new(3, &handed, 4, consume(LoadFailurePolicy::Fail))).expect("accepted");
        step(&mut scheduler);
        scheduler.load().fetching == 1
    };
    // 10 blocks run, 6 are reserved for the waiting prompt, one is the reserve, 3 are fetched into.
    assert!(admitted(CONFIG, 20) && !admitted(CONFIG, 19));
    assert!(!admitted(SchedulerConfig { max_num_seqs: 2, ..CONFIG }, 64));
}

#[test]
fn admission_reserves_a_block_for_each_running_sequence() {
    let preemptions = |blocks: usize| {
        let mut scheduler = Scheduler::new(CONFIG, blocks);
        // Fills its second block with its next token, while a waiting prompt would take all free blocks.
        scheduler.submit(new(1, &[5; 7], 3, Purpose::Plain)).expect("accepted");
        step(&mut scheduler);
        scheduler.submit(new(2, &[6; 7], 2, Purpose::Plain)).expect("accepted");
        run(&mut scheduler);
        scheduler.load().preemptions
    };
    assert_eq!(preemptions(4), 0);
    // Without others, a sequence may have the whole pool.
    let mut scheduler = Scheduler::new(CONFIG, 4);
    scheduler.submit(new(1, &[5; 15], 1, Purpose::Plain)).expect("accepted");
    assert_eq!(scheduler.schedule().len(), 1);
}

#[test]
fn a_request_that_cannot_fit_is_refused_before_allocation() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_waiting: 1, ..CONFIG }, 4);
    let refused = scheduler.submit(new(1, &[1; 15], 2, Purpose::Plain)).expect_err("17 tokens, 16 fit");
    assert_eq!(refused.1, Refusal::TooLong { tokens: 17, capacity: 16 });
    scheduler.submit(new(2, &[1; 4], 2, Purpose::Plain)).expect("accepted");
    let refused = scheduler.submit(new(3, &[1; 4], 2, Purpose::Plain)).expect_err("the queue is full");
    assert_eq!(refused.1, Refusal::QueueFull { waiting: 1 });
}

/// One random event of a run.
#[derive(Clone, Debug)]
enum SchedulerAction {
    Submit { prompt: u32, len: usize, max_new: usize, kind: u8 },
    Step,
    Abort(usize),
    Fetch(usize, u8),
    EndLease(usize),
}

fn acts() -> impl Strategy<Value = Vec<SchedulerAction>> {
    let submit = (0_u32..3, 1_usize..40, 1_usize..8, 0_u8..4)
        .prop_map(|(prompt, len, max_new, kind)| SchedulerAction::Submit { prompt, len, max_new, kind });
    let act = prop_oneof![
        2 => submit,
        4 => Just(SchedulerAction::Step),
        1 => (0_usize..32).prop_map(SchedulerAction::Abort),
        2 => ((0_usize..32), 0_u8..6).prop_map(|(i, e)| SchedulerAction::Fetch(i, e)),
        1 => (0_usize..8).prop_map(SchedulerAction::EndLease),
    ];
    prop::collection::vec(act, 1..120)
}

/// Carries out the effects that concern blocks. A lease that is opened early may end at any time, like the others.
fn obey(scheduler: &mut Scheduler, leases: &mut Vec<Vec<BlockId>>) {
    for effect in scheduler.take_effects() {
        match effect {
            Effect::FetchFailed(id, _) => drop(scheduler.finish(id, FinishReason::Error)),
            Effect::OpenLeaseEarly(id) => leases.extend(scheduler.open_lease_early(id)),
            _ => {}
        }
    }
}

#[test]
fn early_leased_blocks_are_freed_after_request_and_lease() {
    let early = || Purpose::Produce { consumers: 1, early: true };
    let prompt: Vec<u32> = (0..4 * CONFIG.max_num_batched_tokens as u32).collect();
    for aborted in [false, true] {
        let mut scheduler = Scheduler::new(CONFIG, 64);
        scheduler.submit(new(1, &prompt, 1, early())).expect("accepted");
        let plan = scheduler.schedule();
        assert_eq!(scheduler.take_effects(), [Effect::OpenLeaseEarly(SeqId(1))]);
        let leased = scheduler.open_lease_early(SeqId(1)).expect("it runs");
        assert_eq!(scheduler.open_lease_early(SeqId(1)), None, "once");
        assert!(scheduler.final_blocks(SeqId(1)).is_empty());
        scheduler.commit(&plan[0], None);
        let done = CONFIG.max_num_batched_tokens / CONFIG.block_tokens;
        assert_eq!(scheduler.final_blocks(SeqId(1)), &leased[..done]);
        let finished = if aborted {
            scheduler.finish(SeqId(1), FinishReason::Abort)
        } else {
            loop {
                let plan = scheduler.schedule();
                assert!(scheduler.take_effects().is_empty(), "it has been asked");
                if let Some(reason) = scheduler.commit(&plan[0], plan[0].samples.then_some(7)) {
                    break scheduler.finish(SeqId(1), reason);
                }
            }
        };
        let expected =
            if aborted { FinishOutcome::Unfinished } else { FinishOutcome::Sealed(leased.clone()) };
        assert_eq!(finished, Some(expected));
        let usage = scheduler.usage();
        assert_eq!((usage.leased, usage.active, scheduler.load().pending_release), (leased.len(), 0, 1));
        scheduler.lease_ended(&leased);
        assert_eq!((scheduler.usage().held_share(), scheduler.load().pending_release), (0.0, 0));
    }
}

#[test]
fn a_lease_that_ends_before_its_prefill_does_not_free_the_requests_blocks() {
    let mut scheduler = Scheduler::new(CONFIG, 12);
    let long: Vec<u32> = (0..CONFIG.max_num_batched_tokens as u32 + 1).collect();
    scheduler.submit(new(1, &long, 1, Purpose::Produce { consumers: 1, early: true })).expect("accepted");
    scheduler.schedule();
    scheduler.take_effects();
    let leased = scheduler.open_lease_early(SeqId(1)).expect("it runs");
    scheduler.lease_ended(&leased);
    let usage = scheduler.usage();
    assert_eq!((usage.leased, usage.active), (0, leased.len()));
    assert_eq!(scheduler.finish(SeqId(1), FinishReason::Abort), Some(FinishOutcome::Freed));
    assert_eq!(scheduler.usage().held_share(), 0.0);
}

/// An older sequence runs out of blocks: the scheduler preempts that sequence itself, and the leased prefill goes on
/// in the same step.
#[test]
fn an_early_leased_prefill_continues_when_an_older_sequence_is_preempted() {
    let (plain, leased) = (CONFIG.block_tokens, CONFIG.max_num_batched_tokens + 1);
    let mut scheduler = Scheduler::new(CONFIG, 1 + leased.div_ceil(CONFIG.block_tokens));
    scheduler.submit(new(1, &vec![1; plain], 4, Purpose::Plain)).expect("accepted");
    for part in scheduler.schedule() {
        assert_eq!(scheduler.commit(&part, Some(7)), None);
    }
    // Its next token needs a second block, and by then the other sequence holds all that are left.
    let early = Purpose::Produce { consumers: 1, early: true };
    scheduler.submit(new(2, &vec![2; leased], 1, early)).expect("accepted");
    let mut leases = Vec::new();
    scheduler.admitted.running.reverse();
    let admitted = {
        // The second sequence is admitted while the older one needs no block for the step.
        scheduler.admitted.running.clear();
        let plan = scheduler.schedule();
        scheduler.admitted.running.insert(0, SeqId(1));
        plan
    };
    assert_eq!(admitted.iter().map(|part| part.id).collect::<Vec<_>>(), [SeqId(2)]);
    obey(&mut scheduler, &mut leases);
    scheduler.commit(&admitted[0], None);
    assert_eq!((leases.len(), scheduler.usage().free), (1, 0));
    let plan = scheduler.schedule();
    assert_eq!(plan.iter().map(|part| part.id).collect::<Vec<_>>(), [SeqId(2)], "{:?}", scheduler.load());
    assert_eq!(scheduler.load().preemptions, 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Tiny pool, random submissions, aborts and transfer events in any order: the block counts always add up. When
    /// faults stop and all sequences have ended, every block is free (invariants 1, 2, 5, 7, 9).
    #[test]
    fn every_block_is_freed_in_any_order_of_events(acts in acts()) {
        let mut scheduler = Scheduler::new(CONFIG, 12);
        let mut next = 0_u64;
        let mut consumers = Vec::new();
        let mut leases: Vec<Vec<BlockId>> = Vec::new();
        for act in acts {
            match act {
                SchedulerAction::Submit { prompt, len, max_new, kind } => {
                    next += 1;
                    let purpose = match kind {
                        0 => Purpose::Plain,
                        1 => Purpose::Produce { consumers: 1, early: len % 2 == 0 },
                        2 => consume(LoadFailurePolicy::Recompute),
                        _ => consume(LoadFailurePolicy::Fail),
                    };
                    if kind >= 2 { consumers.push(SeqId(next)) }
                    let tokens: Vec<u32> = (0..len as u32).map(|t| 10 + prompt * 100 + t).collect();
                    let _ = scheduler.submit(new(next, &tokens, max_new, purpose));
                }
                SchedulerAction::Step => {
                    let plan = scheduler.schedule();
                    obey(&mut scheduler, &mut leases);
                    for part in plan {
                        let Some(sequence) = scheduler.sequence(part.id) else { continue };
                        let sampled = part.samples.then(|| 1000 + sequence.tokens().len() as u32);
                        if let Some(reason) = scheduler.commit(&part, sampled)
                            && let Some(FinishOutcome::Leased(blocks)) = scheduler.finish(part.id, reason)
                        {
                            leases.push(blocks);
                        }
                    }
                }
                SchedulerAction::Abort(i) => drop(scheduler.finish(SeqId(1 + i as u64 % next.max(1)), FinishReason::Abort)),
                SchedulerAction::Fetch(i, event) => if !consumers.is_empty() {
                    let event = match event {
                        0 => Event::TransferDone,
                        1 => Event::Verdict(Verification::Valid),
                        2 => Event::Verdict(Verification::Gone),
                        3 => Event::TransferFailed(FailureKind::Transfer),
                        4 => Event::LeaseGone,
                        _ => Event::WorkerLost,
                    };
                    scheduler.fetch_event(consumers[i % consumers.len()], event);
                },
                SchedulerAction::EndLease(i) => if !leases.is_empty() {
                    let lease = leases.swap_remove(i % leases.len());
                    scheduler.lease_ended(&lease);
                },
            }
            prop_assert!(scheduler.usage().adds_up());
            obey(&mut scheduler, &mut leases);
        }
        for lease in leases.drain(..) { scheduler.lease_ended(&lease) }
        for id in 1..=next { scheduler.finish(SeqId(id), FinishReason::Abort); }
        for id in consumers { scheduler.fetch_event(id, Event::WorkerLost) }
        prop_assert_eq!(scheduler.usage().held_share(), 0.0, "{:?}", scheduler.usage());
        prop_assert_eq!(scheduler.load().stopping + scheduler.load().fetching, 0);
        prop_assert_eq!(scheduler.load().waiting + scheduler.load().running, 0);
    }
}
