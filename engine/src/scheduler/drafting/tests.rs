//! Drafts against a scripted model, whose next token is a function of the tokens before it, and a model of the
//! contents of the KV cache. The texts are those without drafts, and no position reads another one's keys.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_connector::fetch::{Fetch, LoadFailurePolicy};
use baton_connector::{BlockId, RequestId};
use proptest::prelude::*;

use super::*;
use crate::scheduler::SchedulerConfig;
use crate::scheduler::sequence::{FinishReason, NewSequence, Pooling, StopRule};

const BLOCK: usize = 4;
const CONFIG: SchedulerConfig = SchedulerConfig {
    block_tokens: BLOCK,
    max_num_seqs: 8,
    max_num_batched_tokens: 16,
    max_waiting: 64,
    max_model_len: 256,
    window: None,
};

fn lookup() -> PromptLookup {
    PromptLookup::new(5, 1, 3).expect("in range")
}

/// The model: a period of four tokens, which every 13th token breaks.
fn choose(tokens: &[u32]) -> u32 {
    let (count, last) = (tokens.len() as u32, tokens[tokens.len() - 1]);
    if count.is_multiple_of(13) { 4 + count / 13 % 5 } else { (last + 1) % 4 }
}

/// The text that the model generates one token at a time.
fn reference(prompt: &[u32], stop: &StopRule) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    loop {
        let token = choose(&tokens);
        tokens.push(token);
        let generated = tokens.len() - prompt.len();
        if generated == stop.max_new || stop.stops_at(token, generated) {
            return tokens[prompt.len()..].to_vec();
        }
    }
}

struct DraftModel {
    scheduler: Scheduler,
    /// The tokens up to each position whose keys were written last, by block and offset.
    kv: HashMap<(BlockId, usize), Vec<u32>>,
    texts: BTreeMap<SeqId, Vec<u32>>,
    steps: usize,
    /// Tokens of the last step.
    planned: usize,
    drafted: usize,
    accepted: usize,
}

impl DraftModel {
    fn new(blocks: usize) -> Self {
        Self {
            scheduler: Scheduler::new(CONFIG, blocks).with_prompt_lookup(lookup()),
            kv: HashMap::new(),
            texts: BTreeMap::new(),
            steps: 0,
            planned: 0,
            drafted: 0,
            accepted: 0,
        }
    }

    fn submit(&mut self, id: u64, prompt: &[u32], stop: StopRule, purpose: Purpose) {
        let new = NewSequence {
            id: SeqId(id),
            request: RequestId::new(&format!("r{id}")).expect("a test id"),
            prompt: prompt.to_vec(),
            stop,
            purpose,
            follows: None,
            admitted_with_first: false,
            cache_salt: None,
            prompt_logprobs: None,
            adapter: None,
            priority: 0,
        };
        self.scheduler.submit(new).expect("accepted");
        self.scheduler.allow_drafts(SeqId(id));
    }

    /// Computes one step. Returns the number of its parts.
    fn step(&mut self) -> usize {
        let before = self.scheduler.load().preemptions;
        let plan = self.scheduler.schedule();
        self.scheduler.take_effects();
        self.planned = plan.iter().map(|part| part.count).sum();
        assert!(self.planned <= CONFIG.max_num_batched_tokens);
        let drafts = plan.iter().any(|part| self.scheduler.admitted.drafting.tokens(part).is_some());
        assert!(!drafts || self.scheduler.load().preemptions == before, "preempted for a draft");
        plan.iter().for_each(|part| self.compute(part));
        plan.iter().for_each(|part| self.verify(part));
        assert!(self.scheduler.usage().adds_up());
        self.steps += usize::from(!plan.is_empty());
        plan.len()
    }

    /// Writes the keys of a part, after a look at all keys that it reads.
    fn compute(&mut self, part: &StepPart) {
        let (sequences, _) = self.scheduler.in_step();
        let sequence = sequences.get(part.id).expect("planned");
        let (computed, has_drafts) = sequences.tokens(part);
        let tokens = [&sequence.tokens()[..part.start], computed].concat();
        let (generated, stop) = (sequence.generated(), &sequence.stop);
        assert!(tokens.len() < sequence.prompt_len() + stop.max_new, "drafts behind the last token");
        let mut drafts = computed.iter().enumerate().skip(1);
        let ends = |(at, token): (usize, &u32)| stop.stops_at(*token, generated + at);
        assert!(!has_drafts || !drafts.any(ends), "drafts behind the end of the text");
        let slot = |position: usize| (sequence.blocks()[position / BLOCK], position % BLOCK);
        for position in 0..part.start {
            assert_eq!(self.kv.get(&slot(position)).map(Vec::as_slice), Some(&tokens[..=position]));
        }
        for position in part.start..part.start + part.count {
            self.kv.insert(slot(position), tokens[..=position].to_vec());
        }
    }

    /// Records a part as the engine core does.
    fn verify(&mut self, part: &StepPart) {
        let Some(tokens) = self.scheduler.take_drafted(part) else {
            self.commit(part);
            return;
        };
        let mut accepted = 0;
        for offset in 0..tokens.len() {
            let chosen = self.commit(&StepPart { start: part.start + offset, count: 1, ..*part });
            if offset + 1 == tokens.len() || chosen != Some(tokens[offset + 1]) {
                break;
            }
            accepted += 1;
        }
        self.drafted += tokens.len() - 1;
        self.accepted += accepted;
        self.scheduler.drafts_verified(part.id, tokens.len() - 1, accepted);
        if let Some(sequence) = self.scheduler.sequence(part.id) {
            assert_eq!(
                sequence.blocks().len(),
                sequence.computed.div_ceil(BLOCK),
                "blocks of drafts are kept"
            );
        }
    }

    /// Records a part without drafts. Returns the chosen token of a sequence that continues.
    fn commit(&mut self, part: &StepPart) -> Option<u32> {
        let sequence = self.scheduler.sequence(part.id).expect("it runs");
        let (prompt, token) = (sequence.prompt_len(), part.samples.then(|| choose(sequence.tokens())));
        let Some(reason) = self.scheduler.commit(part, token) else { return token };
        let sequence = self.scheduler.sequence(part.id).expect("it has just ended");
        self.texts.insert(part.id, sequence.tokens()[prompt..].to_vec());
        self.scheduler.finish(part.id, reason).expect("once");
        None
    }

    fn run(&mut self) {
        for _ in 0..10_000 {
            if self.step() == 0 {
                return;
            }
        }
        panic!("no progress");
    }
}

fn stop(max_new: usize) -> StopRule {
    StopRule { max_new, stop_ids: Vec::new(), min_new: 0 }
}

#[test]
fn a_text_that_repeats_takes_fewer_steps_and_is_the_same() {
    let mut model = DraftModel::new(64);
    let prompt: Vec<u32> = (0..10).map(|at| at % 4).collect();
    model.submit(1, &prompt, stop(48), Purpose::Plain);
    model.run();
    assert_eq!(model.texts[&SeqId(1)], reference(&prompt, &stop(48)));
    assert_eq!(model.steps, 48 - model.accepted, "each accepted draft saves a step");
    assert!(model.accepted >= 24, "{} of {} accepted", model.accepted, model.drafted);
    assert_eq!(model.scheduler.usage().held_share(), 0.0);
    assert!(model.scheduler.admitted.drafting.sequences.is_empty());
}

#[test]
fn no_token_is_drafted_behind_the_end_of_a_text() {
    for (max_new, stop_ids) in [(2, vec![]), (7, vec![]), (40, vec![3]), (40, vec![5])] {
        let (mut model, stop) = (DraftModel::new(64), StopRule { max_new, stop_ids, min_new: 3 });
        let prompt = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1];
        model.submit(1, &prompt, stop.clone(), Purpose::Plain);
        model.run();
        assert_eq!(model.texts[&SeqId(1)], reference(&prompt, &stop), "{stop:?}");
    }
}

#[test]
fn drafts_leave_half_of_the_tokens_to_prompts_and_all_blocks_to_others() {
    let counts = |decoding: u64, prompt: &[u32], waits: bool| {
        let mut model = DraftModel::new(64);
        (1..=decoding).for_each(|id| model.submit(id, prompt, stop(30), Purpose::Plain));
        model.step();
        if waits {
            // A prompt of several chunks.
            model.submit(9, &[9; 60], stop(2), Purpose::Plain);
        }
        let counts: Vec<usize> = model.scheduler.schedule().iter().map(|part| part.count).collect();
        model.run();
        assert_eq!(model.texts.len(), decoding as usize + usize::from(waits));
        counts
    };
    let eight = [0, 1, 2, 3, 0, 1, 2, 3];
    assert_eq!(counts(1, &eight, false), [6]);
    // Nine tokens and three drafts fill the three blocks that the sequence holds.
    assert_eq!(counts(1, &eight, true), [4, 12]);
    // 13 tokens are left, half of them for three sequences.
    assert_eq!(counts(3, &[0, 1, 2, 0], true), [3, 3, 3, 7]);
}

/// The durations of the steps of `streams` texts of 100 tokens each, in milliseconds: on a machine whose steps take
/// `step_ms`, and `token_ms` for each token.
fn timed(target_ms: u64, step_ms: u64, token_ms: u64, streams: u64) -> (DraftModel, Vec<u64>) {
    let (mut model, mut now, mut steps) = (DraftModel::new(128), Instant::now(), Vec::new());
    model.scheduler = model.scheduler.with_step_target(Duration::from_millis(target_ms));
    let prompt: Vec<u32> = (0..10).map(|at| at % 4).collect();
    (1..=streams).for_each(|id| model.submit(id, &prompt, stop(100), Purpose::Plain));
    loop {
        model.scheduler.begin_step(now);
        if model.step() == 0 {
            break;
        }
        let took = step_ms + token_ms * model.planned as u64;
        now += Duration::from_millis(took);
        steps.push(took);
    }
    for id in 1..=streams {
        assert_eq!(model.texts[&SeqId(id)], reference(&prompt, &stop(100)));
    }
    (model, steps)
}

#[test]
fn a_step_with_drafts_keeps_the_time_target() {
    for (step_ms, token_ms, streams) in [(10, 20, 1), (40, 10, 1), (10, 10, 3), (10, 10, 1)] {
        let (model, steps) = timed(100, step_ms, token_ms, streams);
        // The first steps have chunks of the prompts.
        let longest = steps.iter().skip(8).max().expect("steps");
        assert!(*longest <= 101, "{longest} ms, of {step_ms} and {token_ms} for a token");
        assert!(model.accepted >= 40, "{} accepted of {}", model.accepted, model.drafted);
    }
    let (_, steps) = timed(0, 10, 20, 1);
    assert_eq!(steps.iter().skip(8).max(), Some(&130), "without a target drafts have no price");
}

#[test]
fn a_sequence_gets_its_one_token_only_where_no_time_is_left() {
    for (step_ms, token_ms) in [(200, 20), (95, 10), (110, 1)] {
        let (model, _) = timed(100, step_ms, token_ms, 1);
        assert_eq!(model.drafted, 0, "{step_ms} and {token_ms} ms for a token");
    }
    let (model, _) = timed(0, 200, 20, 1);
    assert!(model.drafted > 40, "{}", model.drafted);
}

#[test]
fn only_sequences_that_decode_may_draft() {
    let mut model = DraftModel::new(64);
    let consume = Purpose::Consume(Fetch::new(LoadFailurePolicy::Recompute));
    let purposes = [
        (Purpose::Produce { consumers: 1, early: false }, 1, false),
        (Purpose::Pool(Pooling::Last), 1, false),
        (Purpose::Plain, 1, false),
        (Purpose::Plain, 2, true),
        (consume, 2, true),
    ];
    for (id, (purpose, max_new, may)) in (1..).zip(purposes) {
        model.submit(id, &[1, 2], stop(max_new), purpose);
        assert_eq!(model.scheduler.admitted.drafting.sequences.contains_key(&SeqId(id)), may, "{id}");
    }
    model.scheduler = Scheduler::new(CONFIG, 64);
    model.submit(9, &[1, 2], stop(2), Purpose::Plain);
    assert!(model.scheduler.admitted.drafting.sequences.is_empty(), "without the option");
}

#[test]
fn rejected_drafts_are_followed_by_longer_and_longer_pauses() {
    let mut pace = DraftPace::new(5);
    let mut drafted = Vec::new();
    for step in 0..400 {
        let length = pace.permitted();
        if length > 0 {
            drafted.push((step, length));
            pace.verified(length, 0, 5);
        }
    }
    let steps: Vec<usize> = drafted.iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, [0, 2, 6, 14, 30, 62, 126, 190, 254, 318, 382]);
    assert_eq!(drafted.iter().map(|(_, length)| length).sum::<usize>(), 5 + 2 + 9);
    while pace.permitted() == 0 {}
    for (accepted, next) in [(1, 2), (2, 4), (4, 5), (2, 3), (1, 2)] {
        pace.verified(pace.length, accepted, 5);
        assert_eq!(pace.permitted(), next, "after {accepted}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(384))]

    /// Prompts of three kinds in a small pool, with preemptions, shared prefixes and aborts. Every text that ends is
    /// the one without drafts, and every block is freed.
    #[test]
    fn every_text_is_the_one_without_drafts(
        blocks in 17_usize..40,
        requests in prop::collection::vec(
            (0_u32..3, 1_usize..24, 1_usize..40, any::<bool>(), 0_usize..8, 0_u8..8),
            1..14,
        ),
    ) {
        let mut model = DraftModel::new(blocks);
        let (mut expected, mut aborted, count) = (BTreeMap::new(), 0, requests.len());
        for (id, (kind, len, max_new, stops, steps, aborts)) in (1_u64..).zip(requests) {
            let prompt: Vec<u32> = (0..len as u32).map(|at| [at % 4, 50 + at, 7][kind as usize]).collect();
            let stop = StopRule { stop_ids: if stops { vec![6] } else { vec![] }, ..stop(max_new) };
            model.submit(id, &prompt, stop.clone(), Purpose::Plain);
            expected.insert(SeqId(id), reference(&prompt, &stop));
            for _ in 0..steps {
                model.step();
            }
            if aborts == 0 {
                aborted += usize::from(model.scheduler.finish(SeqId(id), FinishReason::Abort).is_some());
            }
        }
        model.run();
        prop_assert_eq!((model.texts.len(), model.scheduler.load().waiting), (count - aborted, 0));
        for (id, text) in &model.texts {
            prop_assert_eq!(text, &expected[id]);
        }
        prop_assert_eq!(model.scheduler.usage().held_share(), 0.0, "{:?}", model.scheduler.usage());
        prop_assert!(model.scheduler.admitted.drafting.sequences.is_empty());
        prop_assert!(model.accepted <= model.drafted);
    }
}
