//! Log-probabilities of the model's own distribution.

use super::exp::sum_of_exp;
use super::select::{argmax, top_sorted};
use super::{SampledLogprobs, SamplingScratch};

/// Log-probability and rank of `token`, and the `top` most likely tokens. Minus infinity if the row has no number or no
/// such token.
pub(super) fn logprobs(
    logits: &[f32],
    token: u32,
    top: usize,
    scratch: &mut SamplingScratch,
) -> SampledLogprobs {
    let none = SampledLogprobs { logprob: f32::NEG_INFINITY, rank: logits.len() as u32, top: Vec::new() };
    let Some((_, max)) = argmax(logits) else { return none };
    let Some(logit) = logits.get(token as usize).copied().filter(|logit| !logit.is_nan()) else {
        return none;
    };
    let normalizer = if max == f32::INFINITY { 0.0 } else { sum_of_exp(logits, max).ln() };
    let of = |logit: f32| {
        // Equal infinities are certain. Their difference would be NaN.
        if logit == max { -normalizer as f32 } else { (f64::from(logit - max) - normalizer) as f32 }
    };
    SampledLogprobs {
        logprob: of(logit),
        rank: 1 + logits.iter().filter(|other| **other > logit).count() as u32,
        top: top_sorted(logits, top, scratch)
            .iter()
            .map(|candidate| (candidate.id, of(candidate.weight)))
            .collect(),
    }
}
