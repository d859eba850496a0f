//! Steps with a time target, on a machine whose steps take as long as a formula says.

use std::time::{Duration, Instant};

use baton_connector::RequestId;
use baton_connector::fetch::{Fetch, LoadFailurePolicy};
use proptest::prelude::*;

use super::step_budget::{ALONE, CHUNK_MIN};
use super::*;
use crate::blocks::hash;
use crate::offload::tier_index::TierConfig;
use crate::scheduler::sequence::StopRule;

const TARGET: Duration = Duration::from_millis(100);
const BLOCKS: usize = 2_600;
const CONFIG: SchedulerConfig = SchedulerConfig {
    block_tokens: 16,
    max_num_seqs: 64,
    max_num_batched_tokens: 512,
    max_waiting: 256,
    max_model_len: 40_000,
    window: None,
};

fn new(id: u64, len: usize, max_new: usize) -> NewSequence {
    NewSequence {
        id: SeqId(id),
        request: RequestId::new(&format!("r{id}")).expect("a test id"),
        prompt: (0..len).map(|at| 1 + (id as u32) * 65_536 + at as u32).collect(),
        stop: StopRule { max_new, stop_ids: Vec::new(), min_new: 0 },
        purpose: Purpose::Plain,
        follows: None,
        admitted_with_first: false,
        cache_salt: None,
        prompt_logprobs: None,
        adapter: None,
        priority: 0,
    }
}

/// An engine core without an engine: its scheduler, its clock, and what its machine needs for a step.
struct Machine {
    scheduler: Scheduler,
    now: Instant,
    per_step: f64,
    per_token: f64,
    per_pair: f64,
    /// The sequences whose first token has been sampled.
    started: Vec<SeqId>,
}

impl Machine {
    /// 10 ms for the weights, 0.25 ms per token, 0.15 µs per pair of positions.
    fn new(target: Duration) -> Self {
        Self {
            scheduler: Scheduler::new(CONFIG, BLOCKS).with_step_target(target),
            now: Instant::now(),
            per_step: 0.010,
            per_token: 250e-6,
            per_pair: 0.15e-6,
            started: Vec::new(),
        }
    }

    fn submit(&mut self, new: NewSequence) {
        self.scheduler.submit(new).expect("accepted");
    }

    /// Plans and computes a step. Returns its parts and duration.
    fn step(&mut self) -> (Vec<StepPart>, Duration) {
        self.scheduler.begin_step(self.now);
        let plan = self.scheduler.schedule();
        let seconds = |part: &StepPart| {
            let pairs = part.count as f64 * (part.start as f64 + part.count as f64 / 2.0);
            self.per_token * part.count as f64 + self.per_pair * pairs
        };
        let took = Duration::from_secs_f64(self.per_step + plan.iter().map(seconds).sum::<f64>());
        self.now += took;
        for part in &plan {
            if part.samples && !self.started.contains(&part.id) {
                self.started.push(part.id);
            }
            if let Some(reason) = self.scheduler.commit(part, part.samples.then_some(9)) {
                self.scheduler.finish(part.id, reason);
            }
        }
        assert!(self.scheduler.usage().adds_up());
        (plan, took)
    }

    /// Steps until the sequence has its first token. Returns their durations.
    fn prefill(&mut self, id: u64) -> Vec<Duration> {
        let mut steps = Vec::new();
        while !self.started.contains(&SeqId(id)) {
            steps.push(self.step().1);
            assert!(steps.len() < 10_000, "no progress");
        }
        steps
    }
}

/// The longest step of a stream that decodes beside a prompt of 32,768 tokens, and the number of steps.
fn beside_a_long_prompt(target: Duration) -> (Duration, usize) {
    let mut machine = Machine::new(target);
    machine.submit(new(1, 32, 5_000));
    for _ in 0..20 {
        machine.step();
    }
    machine.submit(new(2, 32_768, 4));
    let steps = machine.prefill(2);
    (steps.iter().copied().max().expect("steps"), steps.len())
}

#[test]
fn a_stream_beside_a_prompt_of_32k_tokens_keeps_the_target() {
    let (longest, steps) = beside_a_long_prompt(TARGET);
    assert!(longest < TARGET * 13 / 10, "{longest:?} in {steps} steps");
    // What the machine can do in such steps: a step for the weights alone is a tenth of the target.
    assert!(steps < 1_300, "{steps} steps");
    let (longest, _) = beside_a_long_prompt(Duration::ZERO);
    assert!(longest > 10 * TARGET, "without a target the context makes steps long: {longest:?}");
}

#[test]
fn the_only_sequence_of_an_engine_takes_more_than_one_target_and_less_than_five() {
    let mut machine = Machine::new(TARGET);
    machine.submit(new(1, 16_384, 2));
    let steps = machine.prefill(1);
    let longest = steps.iter().copied().max().expect("steps");
    assert!(longest > 3 * TARGET && longest < TARGET * (ALONE + 1), "{longest:?}");
    // A request that arrives then waits for one such step. The next one has a target again.
    machine.submit(new(2, 16_384, 2));
    machine.submit(new(3, 64, 2));
    let (_, took) = machine.step();
    assert!(took < TARGET * 13 / 10, "{took:?}");
}

#[test]
fn where_decoding_takes_longer_than_the_target_prompts_proceed_all_the_same() {
    let mut machine = Machine::new(TARGET);
    machine.per_step = 0.5;
    machine.submit(new(1, 32, 5_000));
    for _ in 0..20 {
        machine.step();
    }
    machine.submit(new(2, 8_192, 4));
    let steps = machine.prefill(2).len();
    // A quarter of half a second are about 400 tokens at the start, and 90 at the end.
    assert!(steps < 100, "{steps} steps");
}

/// The steps in which a prompt of 100 tokens gets its first token beside twelve of 3,000.
fn short_beside_long(target: Duration) -> usize {
    let mut machine = Machine::new(target);
    for id in 1..=12 {
        machine.submit(new(id, 3_000, 4));
    }
    for _ in 0..12 {
        machine.step();
    }
    machine.submit(new(13, 100, 4));
    machine.prefill(13).len()
}

#[test]
fn a_short_prompt_does_not_wait_for_long_ones() {
    let steps = short_beside_long(TARGET);
    assert!(steps <= 4, "{steps} steps");
    assert!(short_beside_long(Duration::ZERO) > 40, "without a target it waits for all of them");
}

#[test]
fn a_long_prompt_begins_while_short_ones_keep_arriving() {
    let mut machine = Machine::new(TARGET);
    for id in 1..=6 {
        machine.submit(new(id, 3_000, 2));
    }
    // In each step arrives one that passes the long prompts in the queue.
    for id in 100..600 {
        machine.submit(new(id, 40, 1));
        machine.step();
    }
    let long = (1..=6).filter(|id| machine.started.contains(&SeqId(*id))).count();
    assert_eq!(long, 6, "{:?}", machine.scheduler.load());
    let short = machine.started.len() - long;
    assert!(short > 490, "{short} short prompts have begun");
}

#[test]
fn a_fetch_begins_within_one_step_behind_any_number_of_prompts() {
    for target in [Duration::ZERO, TARGET] {
        let mut machine = Machine::new(target);
        machine.submit(new(1, 8_192, 4));
        machine.step();
        // More prompts than a fetch leaves room for, behind one that takes the whole step.
        for id in 2..=40 {
            machine.submit(new(id, 600, 4));
        }
        machine.step();
        assert!(machine.scheduler.load().waiting > 20, "{:?}", machine.scheduler.load());
        let purpose = Purpose::Consume(Fetch::new(LoadFailurePolicy::Fail));
        machine.submit(NewSequence { purpose, ..new(41, 200, 4) });
        machine.scheduler.take_effects();
        machine.step();
        let effects = machine.scheduler.take_effects();
        assert!(
            effects.iter().any(|effect| matches!(effect, Effect::StartRead { id: SeqId(41), .. })),
            "{target:?}: {effects:?}"
        );
    }
}

#[test]
fn an_urgent_prompt_takes_a_place_beside_a_long_one_that_runs() {
    let mut machine = Machine::new(TARGET);
    let config = SchedulerConfig { max_num_seqs: 2, ..CONFIG };
    machine.scheduler =
        Scheduler::new(config, BLOCKS).with_step_target(TARGET).with_policy(SchedulingPolicy::Priority);
    machine.submit(NewSequence { priority: 1, ..new(1, 32_768, 4) });
    machine.submit(NewSequence { priority: 1, ..new(2, 32, 5_000) });
    for _ in 0..20 {
        machine.step();
    }
    assert_eq!(machine.scheduler.load().running, 2);
    machine.submit(new(3, 64, 4));
    let steps = machine.prefill(3).len();
    assert!(steps <= 3, "{steps} steps");
    assert_eq!(machine.scheduler.load().preemptions, 1);
    assert!(machine.scheduler.sequences[&SeqId(1)].computed > 0, "the younger one has yielded");
}

#[test]
fn of_running_prompts_the_more_urgent_one_is_before_a_shorter_one() {
    let mut machine = Machine::new(TARGET);
    machine.scheduler = machine.scheduler.with_policy(SchedulingPolicy::Priority);
    for (id, len, priority) in [(1, 4_000, 0), (2, 3_000, 0), (3, 2_000, 1)] {
        machine.submit(NewSequence { priority, ..new(id, len, 4) });
    }
    for _ in 0..5 {
        machine.step();
    }
    let order: Vec<u64> = machine.step().0.iter().map(|part| part.id.0).collect();
    assert_eq!(order, [2, 3, 1], "the oldest comes last, with what is left");
}

#[test]
fn a_prompt_that_is_long_after_its_load_waits_while_four_run() {
    let mut machine = Machine::new(TARGET);
    // Of two long prompts a tier has the first block, and of a third one all but eight tokens.
    let mut found = Vec::new();
    for (id, blocks) in [(5, 1), (6, 1), (7, 37)] {
        let mut hashes = Vec::new();
        hash::extend_with(&mut hashes, &new(id, 600, 1).prompt[..blocks * 16], 16, None, None);
        found.extend(hashes);
    }
    let tiers = TierConfig { host_blocks: 64, disk_blocks: 64 };
    machine.scheduler = machine.scheduler.with_tiers(tiers, found);
    for id in 1..=4 {
        machine.submit(new(id, 3_000, 4));
    }
    for _ in 0..6 {
        machine.step();
    }
    assert_eq!(machine.scheduler.load().running, 4);
    for (id, len) in [(5, 3_000), (6, 3_000), (7, 600)] {
        machine.submit(new(id, len, 4));
    }
    machine.step();
    let phase = |id: u64| machine.scheduler.sequences[&SeqId(id)].phase;
    assert_eq!((phase(5), phase(6)), (Phase::Waiting, Phase::Waiting));
    assert!(matches!(phase(7), Phase::Loading(_)), "{:?}", phase(7));
}

/// A prompt of a random run: the step of its arrival, its length, new tokens, and whether its logits are wanted.
type Arrival = (usize, usize, usize, bool);

fn arrivals() -> impl Strategy<Value = Vec<Arrival>> {
    let len = prop_oneof![4 => 1_usize..200, 1 => 200_usize..3_000];
    prop::collection::vec((0_usize..60, len, 1_usize..6, prop::bool::weighted(0.1)), 1..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Any arrivals on any machine: the oldest running prompt proceeds in every step, so that every prompt ends within a
    /// bounded number of steps. No step has too many tokens, and all blocks are free at the end.
    #[test]
    fn every_prompt_proceeds_within_a_bounded_number_of_steps(
        mut arrivals in arrivals(),
        per_token_us in 1_u32..20_000,
        per_pair_ns in 0_u32..2_000,
        target_ms in 1_u64..200,
    ) {
        arrivals.sort_unstable();
        let mut machine = Machine::new(Duration::from_millis(target_ms));
        machine.per_token = f64::from(per_token_us) * 1e-6;
        machine.per_pair = f64::from(per_pair_ns) * 1e-9;
        let of = |(_, len, max_new, _): &Arrival| len.div_ceil(CHUNK_MIN) + max_new + 1;
        let bound = 60 + arrivals.iter().map(of).sum::<usize>();
        let mut pending = arrivals.iter().enumerate().peekable();
        for at in 0..=bound {
            while let Some((index, (_, len, max_new, scored))) = pending.next_if(|(_, (step, ..))| *step <= at) {
                let prompt_logprobs = scored.then_some(0);
                machine.submit(NewSequence { prompt_logprobs, ..new(1 + index as u64, *len, *max_new) });
            }
            let is_prompt = |id: &&SeqId| machine.scheduler.sequences[*id].uncomputed() > 1;
            let oldest = machine.scheduler.admitted.running.iter().find(is_prompt).copied();
            let left = oldest.map_or(0, |id| machine.scheduler.sequences[&id].uncomputed());
            let (plan, _) = machine.step();
            prop_assert!(plan.iter().map(|part| part.count).sum::<usize>() <= CONFIG.max_num_batched_tokens);
            let mut ids: Vec<SeqId> = plan.iter().map(|part| part.id).collect();
            ids.sort_unstable();
            ids.dedup();
            prop_assert_eq!(ids.len(), plan.len(), "a sequence has two parts: {:?}", plan);
            if let Some(oldest) = oldest {
                let count = plan.iter().find(|part| part.id == oldest).map_or(0, |part| part.count);
                prop_assert!(count >= left.min(CHUNK_MIN), "{:?} has {} of {}", oldest, count, left);
            }
        }
        prop_assert_eq!(machine.started.len(), arrivals.len());
        prop_assert_eq!(machine.scheduler.load().running + machine.scheduler.load().waiting, 0);
        prop_assert_eq!(machine.scheduler.usage().held_share(), 0.0);
    }
}
