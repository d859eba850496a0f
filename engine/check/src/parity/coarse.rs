//! Cases with rounding: KV caches of 16 bits, int8 weights and products in bfloat16, compared with the exact run under
//! the same tokens. Each of them must be as invariant to batches and chunks as f32.

use baton_connector::layout::KvDtype;

use super::golden::GoldenPrompt;
use super::logits::{
    EXPERT_SLACK, RunningMean, against_bf16, executor, forced, logprobs, max_difference, together, worst,
};
use super::{CheckLine, ParityError, ParityModel};
use baton_engine::compute::Logits;
use baton_engine::compute::cpu::{CpuOptions, WeightMode};

/// f16 has three significant bits more than bf16.
const F16_OVER_BF16: f64 = 1.0 / 8.0;

/// Bounds of the distance to the exact run.
#[derive(Clone, Copy, Debug)]
struct DistanceBounds {
    /// Of a logit's difference.
    logit: f64,
    /// Of the mean divergence, in nats.
    divergence: f64,
    /// How much less likely than the best token the exact run's choice may be, in nats.
    chosen: f64,
}

impl DistanceBounds {
    /// Bounds for rounding of `finer` times the error of bf16, at some of the places at which a bf16 run rounds: the
    /// distance of the reference's bf16 run. A divergence grows with the square of the rounding. All measured models
    /// reached less than half of the bounds.
    fn within_bf16(subject: &ParityModel, finer: f64) -> Self {
        let noise = &subject.golden.noise;
        if subject.config.mlp.experts.is_some() {
            // A rounding of any size that changes the choice of an expert moves logits as far as a larger one. The
            // reference's run has such changes too, at other places.
            return Self {
                logit: EXPERT_SLACK * noise.logit,
                divergence: EXPERT_SLACK * finer * noise.divergence,
                chosen: EXPERT_SLACK * noise.logit,
            };
        }
        Self {
            logit: finer * noise.logit,
            divergence: finer * finer * noise.divergence,
            chosen: finer * noise.logit,
        }
    }

    /// Bounds for int8 weights: with 7 bits for the largest weight of a group, the others are rounded more than in
    /// bf16. The measured models reached at most 4.1 times the mean divergence of the bf16 run, and the choice 1.4
    /// times its largest difference. A test of the packing proves that the rounding is as small as possible.
    fn of_int8(subject: &ParityModel) -> Self {
        let noise = &subject.golden.noise;
        Self { logit: f64::INFINITY, divergence: 10.0 * noise.divergence, chosen: 4.0 * noise.logit }
    }

    /// Bounds for products with integers: activations are rounded about as much as the weights of int8, so twice its
    /// divergence, and its difference times the root of two.
    fn of_integers(subject: &ParityModel) -> Self {
        let Self { logit, divergence, chosen } = Self::of_int8(subject);
        Self { logit, divergence: 2.0 * divergence, chosen: std::f64::consts::SQRT_2 * chosen }
    }
}

/// Matrices of integers, and activations rounded to 8 bits.
pub(super) fn integers(subject: &ParityModel) -> Result<Vec<CheckLine>, ParityError> {
    let change = |options: &mut CpuOptions| options.weights = WeightMode::Integers8;
    let bounds = DistanceBounds::of_integers(subject);
    RoundedRun::measure(subject, change)?.lines(subject, "products with integers", bounds, change)
}

/// Keys and values in f16 and bf16.
pub(super) fn caches(subject: &ParityModel) -> Result<Vec<CheckLine>, ParityError> {
    let mut lines = Vec::new();
    for (name, dtype, finer) in [("f16", KvDtype::F16, F16_OVER_BF16), ("bf16", KvDtype::Bf16, 1.0)] {
        let bounds = DistanceBounds::within_bf16(subject, finer);
        let change = |options: &mut CpuOptions| options.kv_dtype = dtype;
        let coarse = RoundedRun::measure(subject, change)?;
        lines.push(CheckLine::at_most(
            &format!("{name} cache: largest difference of a logit"),
            coarse.logit,
            bounds.logit,
        ));
        lines.extend(coarse.lines(subject, &format!("{name} cache"), bounds, change)?);
    }
    Ok(lines)
}

/// Matrices in int8.
pub(super) fn int8(subject: &ParityModel) -> Result<Vec<CheckLine>, ParityError> {
    let change = |options: &mut CpuOptions| options.weights = WeightMode::Int8;
    RoundedRun::measure(subject, change)?.lines(
        subject,
        "int8 weights",
        DistanceBounds::of_int8(subject),
        change,
    )
}

/// Products in bfloat16, compared with the exact run and with the bf16 run of `transformers`, if there is one.
pub(super) fn bfloat16(subject: &ParityModel) -> Result<Vec<CheckLine>, ParityError> {
    let change = |options: &mut CpuOptions| options.weights = WeightMode::Bf16;
    let bounds = DistanceBounds::within_bf16(subject, 1.0);
    let mut lines =
        RoundedRun::measure(subject, change)?.lines(subject, "bfloat16 products", bounds, change)?;
    if subject.golden.has_bf16() {
        let tokens = |prompt: &GoldenPrompt| {
            prompt.ids.len() + prompt.bf16.as_ref().map_or(0, |run| run.greedy_ids.len())
        };
        let longest = subject.golden.prompts.iter().map(tokens).max().unwrap_or(1);
        let mut executor = executor(subject, 1, |options| {
            change(options);
            options.blocks = options.blocks.max(longest.div_ceil(options.block_tokens));
        })?;
        lines.extend(against_bf16(subject, &mut executor, "bf16 run, bfloat16 products")?);
    }
    Ok(lines)
}

/// Distance of a rounding executor from the exact one, under the tokens of the float32 run.
struct RoundedRun {
    logit: f64,
    /// In nats.
    divergence: RunningMean,
    /// How much less likely than its own best token the exact run's choice is, in nats.
    chosen: f64,
    /// The logits of each step, prompt by prompt.
    steps: Vec<Logits>,
}

impl RoundedRun {
    fn measure(subject: &ParityModel, change: impl FnOnce(&mut CpuOptions)) -> Result<Self, ParityError> {
        let mut exact = executor(subject, 1, |_| ())?;
        let mut coarse = executor(subject, 1, change)?;
        let mut found =
            Self { logit: 0.0, divergence: RunningMean::default(), chosen: 0.0, steps: Vec::new() };
        for prompt in &subject.golden.prompts {
            let text = [prompt.ids.as_slice(), &prompt.f32.greedy_ids].concat();
            let (ours, other) = (forced(&mut exact, &text)?, forced(&mut coarse, &text)?);
            found.logit = worst(found.logit, max_difference(&ours.values, &other.values));
            for row in 0..ours.rows() {
                found.row(&logprobs(ours.row(row)), &logprobs(other.row(row)));
            }
            // The last row of the prompt chose the first token.
            let first = (prompt.ids.len() - 1) * other.vocab;
            let values = other.values[first..][..prompt.f32.greedy_ids.len() * other.vocab].to_vec();
            found.steps.push(Logits { vocab: other.vocab, values, ..Logits::default() });
        }
        Ok(found)
    }

    fn row(&mut self, exact: &[f64], coarse: &[f64]) {
        self.divergence.add(exact.iter().zip(coarse).map(|(e, c)| e.exp() * (e - c)).sum());
        let best = |row: &[f64]| row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let most_likely = best(exact);
        let theirs = exact.iter().position(|value| *value == most_likely).map_or(f64::NAN, |at| coarse[at]);
        self.chosen = worst(self.chosen, best(coarse) - theirs);
    }

    fn lines(
        &self,
        subject: &ParityModel,
        name: &str,
        bounds: DistanceBounds,
        change: impl FnOnce(&mut CpuOptions),
    ) -> Result<Vec<CheckLine>, ParityError> {
        Ok(vec![
            CheckLine::at_most(
                &format!("{name}: mean divergence, nats"),
                self.divergence.mean(),
                bounds.divergence,
            ),
            CheckLine::at_most(
                &format!("{name}: exact choice below its best, nats"),
                self.chosen,
                bounds.chosen,
            ),
            together(subject, &self.steps, &format!("{name}: chunks and batches, bits"), change)?,
        ])
    }
}
