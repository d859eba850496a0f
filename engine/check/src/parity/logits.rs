//! Cases of the network: tokens, logits and log-probabilities, and the invariance of bits to batches and chunks.

use baton_connector::BlockId;
use baton_connector::region::Region;

use super::golden::{GoldenPrompt, GoldenRun};
use super::{CheckLine, ParityError, ParityModel};
use baton_engine::compute::cpu::{CpuExecutor, CpuOptions};
use baton_engine::compute::cuda::{self, DeviceChoice, DeviceOptions, Element, PoolSize};
use baton_engine::compute::{Executor, Logits, LogitsRequest, SeqStep};
use baton_engine::model::weights::Weights;

/// Bound of every logit's difference, float32 against float32.
const MAX_LOGIT_DIFFERENCE: f64 = 5e-4;
/// Bound of the mean difference of the five best log-probabilities, float32 against float32.
const MEAN_LOGPROB_DIFFERENCE: f64 = 5e-5;

/// Factor of an accelerator's bounds on the distance to the float32 run.
const ACCELERATOR_SLACK: f64 = 2.0;

const BLOCK_TOKENS: usize = 16;

/// Bounds of the distance to a bf16 run, in nats. They are multiples of the distance between the reference's bf16 run
/// and its own float32 run, so that they follow from the model.
///
/// An engine in float32 has that distance; one in bf16 adds rounding of its own. A divergence grows with the square of
/// the rounding, so two independent roundings have twice the divergence of one. Another half is for the few prompts
/// whose logits are all in the golden file. Correct engines reached at most 1.3 times the mean and 1.7 times the
/// largest divergence. They reached 0.9 times the root mean square (mean difference of the five best), and 0.7 times
/// the largest difference (the other run's choice below the best). The smallest planted mistake that bf16 can show,
/// GELU for SiLU, has 30 times the mean divergence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bf16Bounds {
    /// Mean divergence.
    pub(super) divergence: f64,
    /// Largest divergence of a step.
    pub(super) divergence_max: f64,
    /// Mean difference of the five best log-probabilities.
    pub(super) top: f64,
    /// How much less likely than the best token the other run's choice may be. If no logit differs by more than d, that
    /// is at most 2d.
    pub(super) chosen: f64,
}

/// Factor of the bounds on divergences for a model with experts. Rounding that changes the choice of an expert is rare
/// and moves a step far, so a mean over few prompts scatters.
pub(super) const EXPERT_SLACK: f64 = 2.0;

impl Bf16Bounds {
    fn of(subject: &ParityModel) -> Self {
        let noise = &subject.golden.noise;
        let slack = if subject.config.mlp.experts.is_some() { EXPERT_SLACK } else { 1.0 };
        Self {
            divergence: slack * 3.0 * noise.divergence,
            divergence_max: slack * 3.0 * noise.divergence_max,
            top: 2.0 * noise.logit_rms,
            chosen: 2.0 * noise.logit,
        }
    }
}

/// The end-of-sequence tokens, for which `generation_config.json` has priority.
pub(super) fn configuration(subject: &ParityModel) -> Result<Vec<CheckLine>, ParityError> {
    // The order has no meaning, and a GGUF file has none.
    let [ours, golden] = [&subject.config.eos, &subject.golden.eos_token_ids].map(|tokens| {
        let mut tokens = tokens.clone();
        tokens.sort_unstable();
        tokens
    });
    Ok(vec![CheckLine::new("end-of-sequence tokens", ours == golden, format!("{ours:?}"))])
}

/// Greedy continuations and their logits, one prompt at a time, against the float32 run.
pub(super) fn float32(subject: &ParityModel) -> Result<Vec<CheckLine>, ParityError> {
    let mut executor = computing(subject, 1, Element::F32)?;
    let slack = if subject.device == DeviceChoice::Cpu { 1.0 } else { ACCELERATOR_SLACK };
    let (mut identical, mut tokens) = (0, 0);
    let (mut logit, mut top, mut prompt_logprob) = (0.0_f64, RunningMean::default(), 0.0_f64);
    for (index, prompt) in subject.golden.prompts.iter().enumerate() {
        let golden = &prompt.f32;
        let alone = continuation(&mut *executor, &prompt.ids, golden.greedy_ids.len())?;
        identical += usize::from(alone.ids == golden.greedy_ids);
        tokens += golden.greedy_ids.len();
        let mut compare = |what: &str, ours: &[f32]| {
            if let Some(golden) = subject.golden.tensor("f32", index, what) {
                logit = logit.max(max_difference(ours, golden));
            }
        };
        compare("prompt_last", alone.steps.row(0));
        // After a wrong token the contexts differ, and the wrong token is already reported.
        if alone.ids == golden.greedy_ids {
            compare("steps", &alone.steps.values);
            add_top_differences(&mut top, golden, &alone.steps, 0);
        }
        let all = forced(&mut *executor, &prompt.ids)?;
        compare("prompt_all", &all.values);
        for (position, golden) in golden.prompt_logprobs.iter().enumerate() {
            let ours = logprobs(all.row(position))[prompt.ids[position + 1] as usize];
            prompt_logprob = worst(prompt_logprob, (ours - golden).abs());
        }
    }
    let prompts = subject.golden.prompts.len();
    Ok(vec![
        CheckLine::new(
            "greedy tokens",
            identical == prompts,
            format!("{identical} of {prompts} prompts identical, {tokens} tokens"),
        ),
        CheckLine::at_most("largest difference of a logit", logit, slack * MAX_LOGIT_DIFFERENCE),
        CheckLine::at_most(
            "mean difference of top-5 log-probabilities",
            top.mean(),
            slack * MEAN_LOGPROB_DIFFERENCE,
        ),
        CheckLine::at_most(
            "largest difference of a prompt log-probability",
            prompt_logprob,
            slack * MAX_LOGIT_DIFFERENCE,
        ),
    ])
}

/// All prompts at once, in chunks of different sizes, decoding as they finish: the bits must equal those of single
/// runs.
pub(super) fn invariance(subject: &ParityModel) -> Result<Vec<CheckLine>, ParityError> {
    let prompts = &subject.golden.prompts;
    let mut alone = Vec::new();
    let mut single = executor(subject, 1, |_| ())?;
    for prompt in prompts {
        alone.push(continuation(&mut single, &prompt.ids, prompt.f32.greedy_ids.len())?.steps);
    }
    Ok(vec![together(subject, &alone, "chunks and batches give the same bits", |_| ())?])
}

/// All prompts in one executor, compared with `alone`, the logits of each step under the golden tokens.
pub(super) fn together(
    subject: &ParityModel,
    alone: &[Logits],
    what: &str,
    change: impl FnOnce(&mut CpuOptions),
) -> Result<CheckLine, ParityError> {
    let prompts = &subject.golden.prompts;
    let mut executor = executor(subject, prompts.len(), change)?;
    let different = different_rows(&mut executor, prompts, alone)?;
    let rows: usize = alone.iter().map(Logits::rows).sum();
    let numbers = format!("{different} of {rows} rows differ, {} sequences together", prompts.len());
    Ok(CheckLine::new(what, different == 0, numbers))
}

/// Under the tokens of the bf16 run: bf16 weights with f32 arithmetic stay within the bf16 bounds.
pub(super) fn bfloat16(subject: &ParityModel) -> Result<Vec<CheckLine>, ParityError> {
    if !subject.golden.has_bf16() {
        return Ok(Vec::new());
    }
    let mut executor = computing(subject, 1, Element::Bf16)?;
    against_bf16(subject, &mut *executor, "bf16 run")
}

/// Compares under the tokens of the bf16 run.
pub(super) fn against_bf16(
    subject: &ParityModel,
    executor: &mut dyn Executor,
    name: &str,
) -> Result<Vec<CheckLine>, ParityError> {
    let bounds = Bf16Bounds::of(subject);
    let (mut divergence, mut top) = (RunningMean::default(), RunningMean::default());
    let (mut divergence_max, mut chosen) = (0.0_f64, 0.0_f64);
    for (index, prompt) in subject.golden.prompts.iter().enumerate() {
        let Some(golden) = &prompt.bf16 else { continue };
        let text = [prompt.ids.as_slice(), &golden.greedy_ids].concat();
        let all = forced(executor, &text)?;
        let first = prompt.ids.len() - 1;
        add_top_differences(&mut top, golden, &all, first);
        for (step, token) in golden.greedy_ids.iter().enumerate() {
            let ours = logprobs(all.row(first + step));
            let best = ours.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            chosen = worst(chosen, best - ours[*token as usize]);
            if let Some(steps) = subject.golden.tensor("bf16", index, "steps") {
                let golden = logprobs(&steps[step * all.vocab..][..all.vocab]);
                let of_step = golden.iter().zip(&ours).map(|(g, o)| g.exp() * (g - o)).sum();
                divergence.add(of_step);
                divergence_max = worst(divergence_max, of_step);
            }
        }
    }
    Ok(vec![
        CheckLine::at_most(&format!("{name}: mean divergence, nats"), divergence.mean(), bounds.divergence),
        CheckLine::at_most(
            &format!("{name}: largest divergence of a step, nats"),
            divergence_max,
            bounds.divergence_max,
        ),
        CheckLine::at_most(&format!("{name}: mean difference of top-5"), top.mean(), bounds.top),
        CheckLine::at_most(&format!("{name}: its choice below our best, nats"), chosen, bounds.chosen),
    ])
}

/// Greedy continuation with the logits that each token was chosen from.
struct Continuation {
    ids: Vec<u32>,
    steps: Logits,
}

pub(super) fn executor(
    subject: &ParityModel,
    sequences: usize,
    change: impl FnOnce(&mut CpuOptions),
) -> Result<CpuExecutor, ParityError> {
    let tokens = |prompt: &GoldenPrompt| prompt.ids.len() + prompt.f32.greedy_ids.len();
    let longest = subject.golden.prompts.iter().map(tokens).max().unwrap_or(1);
    let blocks = longest.div_ceil(BLOCK_TOKENS) * sequences;
    let mut options = CpuOptions { blocks, block_tokens: BLOCK_TOKENS, ..CpuOptions::default() };
    change(&mut options);
    Ok(CpuExecutor::load(&subject.files, &subject.config, &options, &mut |_| ())?)
}

/// The executor of a model's device. The CPU computes in f32 for all element types.
fn computing(
    subject: &ParityModel,
    sequences: usize,
    element: Element,
) -> Result<Box<dyn Executor>, ParityError> {
    let accelerator = match subject.device {
        DeviceChoice::Cpu => return Ok(Box::new(executor(subject, sequences, |_| ())?)),
        DeviceChoice::Accelerator(accelerator) => accelerator,
    };
    let tokens = |prompt: &GoldenPrompt| {
        let bf16 = prompt.bf16.as_ref().map_or(0, |run| run.greedy_ids.len());
        prompt.ids.len() + prompt.f32.greedy_ids.len().max(bf16)
    };
    let longest = subject.golden.prompts.iter().map(tokens).max().unwrap_or(1);
    let options = DeviceOptions {
        pool_size: PoolSize::Blocks(longest.div_ceil(BLOCK_TOKENS) * sequences),
        block_tokens: BLOCK_TOKENS,
        element,
        max_rows: longest,
        max_sequences: sequences,
        max_positions: longest,
        mirror: Some(Region::allocate),
    };
    let weights = Weights::open(&subject.files)?;
    Ok(cuda::open(accelerator, &weights, &subject.config, &options, &mut |_| ())?)
}

fn table(sequence: usize, blocks: usize) -> Vec<BlockId> {
    let first = sequence * blocks;
    (first..first + blocks).map(|block| BlockId(u32::try_from(block).expect("a small pool"))).collect()
}

fn continuation(
    executor: &mut dyn Executor,
    prompt: &[u32],
    count: usize,
) -> Result<Continuation, ParityError> {
    let table = table(0, executor.blocks());
    let (mut ids, mut steps) = (Vec::new(), Logits { vocab: executor.vocab(), ..Logits::default() });
    let mut logits = Logits::default();
    let (mut tokens, mut start) = (prompt.to_vec(), 0);
    for _ in 0..count {
        let step = SeqStep {
            tokens: &tokens,
            start,
            block_table: &table,
            logits: LogitsRequest::Last,
            adapter: None,
        };
        executor.execute(&[step], &mut logits)?;
        steps.values.extend_from_slice(&logits.values);
        start += tokens.len();
        tokens = vec![best(logits.row(0))];
        ids.push(tokens[0]);
    }
    Ok(Continuation { ids, steps })
}

/// Logits of every position.
pub(super) fn forced(executor: &mut dyn Executor, tokens: &[u32]) -> Result<Logits, ParityError> {
    let table = table(0, executor.blocks());
    let mut logits = Logits::default();
    let step = SeqStep { tokens, start: 0, block_table: &table, logits: LogitsRequest::All, adapter: None };
    executor.execute(&[step], &mut logits)?;
    Ok(logits)
}

/// Runs all prompts together under their golden tokens and counts rows that differ from `alone` in any bit.
fn different_rows(
    executor: &mut dyn Executor,
    prompts: &[GoldenPrompt],
    alone: &[Logits],
) -> Result<usize, ParityError> {
    let blocks = executor.blocks() / prompts.len();
    let texts: Vec<Vec<u32>> =
        prompts.iter().map(|prompt| [prompt.ids.as_slice(), &prompt.f32.greedy_ids].concat()).collect();
    let tables: Vec<_> = (0..prompts.len()).map(|sequence| table(sequence, blocks)).collect();
    let mut done = vec![0; prompts.len()];
    let mut logits = Logits::default();
    let mut different = 0;
    loop {
        let (mut batch, mut rows) = (Vec::new(), Vec::new());
        for (sequence, prompt) in prompts.iter().enumerate() {
            let (start, length) = (done[sequence], prompt.ids.len());
            // Chunks of 1 to 43 tokens in the prompt, then one token per step.
            let chunk = if start < length { (1 + sequence * 5 % 43).min(length - start) } else { 1 };
            let end = start + chunk;
            let step = (end + 1).checked_sub(length + 1);
            if step.is_some_and(|step| step >= prompt.f32.greedy_ids.len()) {
                continue;
            }
            let wanted = if step.is_some() { LogitsRequest::Last } else { LogitsRequest::No };
            batch.push(SeqStep {
                tokens: &texts[sequence][start..end],
                start,
                block_table: &tables[sequence],
                logits: wanted,
                adapter: None,
            });
            rows.extend(step.map(|step| (sequence, step)));
            done[sequence] = end;
        }
        if batch.is_empty() {
            return Ok(different);
        }
        executor.execute(&batch, &mut logits)?;
        for (row, (sequence, step)) in rows.into_iter().enumerate() {
            let same = logits
                .row(row)
                .iter()
                .zip(alone[sequence].row(step))
                .all(|(a, b)| a.to_bits() == b.to_bits());
            different += usize::from(!same);
        }
    }
}

#[derive(Default)]
pub(super) struct RunningMean {
    sum: f64,
    count: u32,
}

impl RunningMean {
    pub(super) fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
    }

    /// NaN without values: a check that measured nothing must not pass.
    pub(super) fn mean(&self) -> f64 {
        self.sum / f64::from(self.count)
    }
}

/// Differences of the five best tokens' log-probabilities, step by step; step 0 is row `first`.
fn add_top_differences(mean: &mut RunningMean, golden: &GoldenRun, ours: &Logits, first: usize) {
    for (step, (ids, values)) in golden.top_ids.iter().zip(&golden.top_logprobs).enumerate() {
        let ours = logprobs(ours.row(first + step));
        for (id, golden) in ids.iter().zip(values).take(5) {
            mean.add((ours[*id as usize] - golden).abs());
        }
    }
}

fn best(row: &[f32]) -> u32 {
    let mut best = 0;
    for (index, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = index;
        }
    }
    u32::try_from(best).expect("a vocabulary fits")
}

/// Natural log-probabilities.
pub(super) fn logprobs(row: &[f32]) -> Vec<f64> {
    let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shifted = row.iter().map(|logit| f64::from(*logit) - f64::from(highest));
    let log_sum = shifted.clone().map(f64::exp).sum::<f64>().ln();
    shifted.map(|logit| logit - log_sum).collect()
}

/// The larger, or NaN if either is.
pub(super) fn worst(a: f64, b: f64) -> f64 {
    if b <= a { a } else { b }
}

pub(super) fn max_difference(ours: &[f32], golden: &[f32]) -> f64 {
    if ours.len() != golden.len() {
        return f64::INFINITY;
    }
    ours.iter().zip(golden).fold(0.0, |far, (a, b)| worst(far, (f64::from(*a) - f64::from(*b)).abs()))
}
