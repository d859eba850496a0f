//! Cases about what rounds: KV caches of 16 bits and int8 weights, against the exact run under the same tokens, and
//! that each of them is as exact about batches and chunks as f32 is.

use baton_connector::layout::KvDtype;

use super::logits::{
    CHOSEN_WITHIN_BF16, MEAN_DIVERGENCE_BF16, Mean, executor, forced, logprobs, max_difference, together,
    worst,
};
use super::{Line, ParityError, Subject};
use crate::executor::Logits;
use crate::executor::cpu::{CpuOptions, WeightMode};

/// Bounds of every logit's difference. The same roundings put into `transformers` move the logits of the oracle's
/// models by 0.02 to 0.03 (f16) and 0.19 to 0.47 (bf16), measured on 2026-11-20; twice that is allowed.
const MAX_LOGIT_DIFFERENCE_F16_CACHE: f64 = 0.06;
const MAX_LOGIT_DIFFERENCE_BF16_CACHE: f64 = 0.95;

/// Keys and values in f16 and bf16.
pub(super) fn caches(subject: &Subject) -> Result<Vec<Line>, ParityError> {
    let mut lines = Vec::new();
    for (name, dtype, bound) in [
        ("f16", KvDtype::F16, MAX_LOGIT_DIFFERENCE_F16_CACHE),
        ("bf16", KvDtype::Bf16, MAX_LOGIT_DIFFERENCE_BF16_CACHE),
    ] {
        let change = |options: &mut CpuOptions| options.kv_dtype = dtype;
        let coarse = Coarse::measure(subject, change)?;
        lines.push(Line::at_most(
            &format!("{name} cache: largest difference of a logit"),
            coarse.logit,
            bound,
        ));
        lines.extend(coarse.lines(subject, &format!("{name} cache"), change)?);
    }
    Ok(lines)
}

/// Matrices in int8.
pub(super) fn int8(subject: &Subject) -> Result<Vec<Line>, ParityError> {
    let change = |options: &mut CpuOptions| options.weights = WeightMode::Int8;
    Coarse::measure(subject, change)?.lines(subject, "int8 weights", change)
}

/// How far an executor that rounds is from the exact one, under the tokens of the float32 run.
struct Coarse {
    logit: f64,
    /// In nats.
    divergence: Mean,
    /// How much less likely than its own best token the exact run's choice is to it, in nats.
    chosen: f64,
    /// The logits of each step, prompt by prompt.
    steps: Vec<Logits>,
}

impl Coarse {
    fn measure(subject: &Subject, change: impl FnOnce(&mut CpuOptions)) -> Result<Self, ParityError> {
        let mut exact = executor(subject, 1, |_| ())?;
        let mut coarse = executor(subject, 1, change)?;
        let mut found = Self { logit: 0.0, divergence: Mean::default(), chosen: 0.0, steps: Vec::new() };
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
            found.steps.push(Logits { vocab: other.vocab, values });
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
        subject: &Subject,
        name: &str,
        change: impl FnOnce(&mut CpuOptions),
    ) -> Result<Vec<Line>, ParityError> {
        Ok(vec![
            Line::at_most(
                &format!("{name}: mean divergence, nats"),
                self.divergence.mean(),
                MEAN_DIVERGENCE_BF16,
            ),
            Line::at_most(
                &format!("{name}: exact choice below its best, nats"),
                self.chosen,
                CHOSEN_WITHIN_BF16,
            ),
            together(subject, &self.steps, &format!("{name}: chunks and batches, bits"), change)?,
        ])
    }
}
