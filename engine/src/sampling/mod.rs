//! Choosing the next token from a row of logits.
//!
//! ```text
//!  logits ─▶ bias ─▶ min_tokens mask ─▶ penalties ─▶ temperature ─▶ min-p ─▶ top-k ─▶ top-p ─▶ draw(seed, position)
//!     └────▶ log-probabilities, when asked for: of the model's own distribution (vLLM's `raw_logprobs`)
//! ```
//!
//! The order is vLLM's. All tokens that equal the k-th best stay in top-k, as there; of those that equal the last of
//! top-p, the ones with the lowest ids.
//!
//! Invariants:
//! - The choice is a function of logits, parameters, counts and position: no state, so prefill and decode
//!   engine, restart and preemption choose alike. The draw for a position is a hash of seed and position.
//! - Greedy takes the lowest id among equals.
//! - NaN is never chosen; a row without a candidate is an error, not token 0.
//! - After the first call a [`Scratch`] no longer allocates, except for what is returned.
//!
//! Every entry of the row can be chosen, rows that pad the vocabulary too, as in Hugging Face and vLLM: training
//! has made them improbable, and an engine that leaves them out differs from both on models where they are not.
//! A caller that wants them out passes a shorter row.

mod exp;
mod logprobs;
mod params;
mod penalties;
mod select;
pub mod stop;

pub use params::SamplingParams;
pub use penalties::TokenCounts;

use logprobs::logprobs;
use select::Kept;

/// Where in its sequence the token is that is being chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its position: prompt tokens and generated tokens before it.
    pub position: u64,
    /// Generated tokens before it.
    pub generated: u32,
}

/// A draw that a device can make by itself: nothing but the row of logits is needed for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Below 1e-5 the best token is taken.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// Where the draw falls, as a fraction of 2^64: of seed and position.
    pub fraction: u64,
}

impl Draw {
    /// The draw for one place; `None` where more than the row is needed: log-probabilities, bias, masks, penalties.
    #[must_use]
    pub fn of(params: &SamplingParams, place: Place) -> Option<Self> {
        let masked = place.generated < params.min_tokens && !params.masked_before_min.is_empty();
        let plain = params.logprobs.is_none() && params.logit_bias.is_empty() && !params.has_penalties();
        (plain && !masked).then(|| Self {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            fraction: mixed(params.seed, place.position) >> 11 << 11,
        })
    }

    /// Whether the best token is taken always.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature < params::GREEDY_BELOW
    }
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Its log-probability and the alternatives, when asked for.
    pub logprobs: Option<SampledLogprobs>,
}

/// Log-probabilities of one position, natural logarithm, of the model's own distribution: before bias, penalties
/// and temperature.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledLogprobs {
    /// Of the chosen token.
    pub logprob: f32,
    /// 1 for the most likely token.
    pub rank: u32,
    /// The most likely tokens, best first, lowest id first among equals.
    pub top: Vec<(u32, f32)>,
}

/// The row of logits offers nothing to choose: all of it is NaN or minus infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("none of the {entries} logits is a number above minus infinity")]
pub struct NoCandidate {
    /// Entries of the row.
    pub entries: usize,
}

/// Buffers that are used again for every token. One per thread that samples.
#[derive(Debug, Default)]
pub struct Scratch {
    adjusted: Vec<f32>,
    weights: Vec<f32>,
    kept: Vec<Kept>,
    maxima: Vec<f32>,
}

/// Chooses a token.
///
/// # Errors
/// [`NoCandidate`].
pub fn sample(
    logits: &[f32],
    params: &SamplingParams,
    counts: &TokenCounts,
    place: Place,
    scratch: &mut Scratch,
) -> Result<Sampled, NoCandidate> {
    let mut adjusted = std::mem::take(&mut scratch.adjusted);
    let row = adjust(logits, params, counts, place, &mut adjusted);
    let token = choose(row, params, place, scratch);
    scratch.adjusted = adjusted;
    let token = token.ok_or(NoCandidate { entries: logits.len() })?;
    let wanted = params.logprobs.map(|top| logprobs(logits, token, top as usize, scratch));
    Ok(Sampled { token, logprobs: wanted })
}

/// Log-probability of a token that is given, not chosen (an echoed prompt), with alternatives.
#[must_use]
pub fn logprobs_of(logits: &[f32], token: u32, top: u32, scratch: &mut Scratch) -> SampledLogprobs {
    logprobs(logits, token, top as usize, scratch)
}

/// The distribution that [`sample`] draws from: tokens of probability over 0, most likely first. For tests and
/// parity checks.
#[must_use]
pub fn distribution(
    logits: &[f32],
    params: &SamplingParams,
    counts: &TokenCounts,
    place: Place,
) -> Vec<(u32, f64)> {
    let mut scratch = Scratch::default();
    let mut adjusted = Vec::new();
    let row = adjust(logits, params, counts, place, &mut adjusted);
    let Some((best, max)) = select::argmax(row) else { return Vec::new() };
    if params.is_greedy() || max == f32::INFINITY {
        return vec![(best, 1.0)];
    }
    if !select::keep(row, max, params, &mut scratch) {
        let weights = scratch.weights.iter().enumerate();
        scratch.kept = weights.map(|(id, weight)| Kept { weight: *weight, id: id as u32 }).collect();
    }
    let mut kept: Vec<_> = scratch.kept.iter().filter(|kept| kept.weight > 0.0).copied().collect();
    kept.sort_unstable_by(Kept::best_first);
    let total: f64 = kept.iter().map(|kept| f64::from(kept.weight)).sum();
    kept.iter().map(|kept| (kept.id, f64::from(kept.weight) / total)).collect()
}

/// The row after bias, mask and penalties: the logits themselves when there are none.
fn adjust<'a>(
    logits: &'a [f32],
    params: &SamplingParams,
    counts: &TokenCounts,
    place: Place,
    adjusted: &'a mut Vec<f32>,
) -> &'a [f32] {
    let masked = place.generated < params.min_tokens && !params.masked_before_min.is_empty();
    if params.logit_bias.is_empty() && !masked && !params.has_penalties() {
        return logits;
    }
    adjusted.clear();
    adjusted.extend_from_slice(logits);
    for (id, bias) in &params.logit_bias {
        if let Some(logit) = adjusted.get_mut(*id as usize) {
            *logit += bias;
        }
    }
    if masked {
        for id in &params.masked_before_min {
            if let Some(logit) = adjusted.get_mut(*id as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
    counts.penalize(params, adjusted);
    adjusted
}

fn choose(row: &[f32], params: &SamplingParams, place: Place, scratch: &mut Scratch) -> Option<u32> {
    let (best, max) = select::argmax(row)?;
    // Infinity leaves no distribution to draw from; the first of it is the most likely token.
    if params.is_greedy() || max == f32::INFINITY {
        return Some(best);
    }
    let u = uniform(params.seed, place.position);
    let drawn = if select::keep(row, max, params, scratch) {
        let weights = scratch.kept.iter().map(|kept| kept.weight);
        draw(weights, u).map(|index| scratch.kept[index].id)
    } else {
        draw(scratch.weights.iter().copied(), u).map(|index| index as u32)
    };
    Some(drawn.unwrap_or(best))
}

/// The index that the fraction `u` of the total weight falls on; never one of weight 0.
fn draw(weights: impl Iterator<Item = f32> + Clone, u: f64) -> Option<usize> {
    let total: f64 = weights.clone().map(f64::from).sum();
    let target = u * total;
    let (mut sum, mut last) = (0.0, None);
    for (index, weight) in weights.enumerate() {
        if weight > 0.0 {
            sum += f64::from(weight);
            last = Some(index);
            if sum > target {
                break;
            }
        }
    }
    last
}

/// A number in 0..1 for each (seed, position), independent of all others: SplitMix64's finalizer over both.
fn uniform(seed: u64, position: u64) -> f64 {
    // 53 bits: every value is exact, and 1 is not among them.
    (mixed(seed, position) >> 11) as f64 / (1u64 << 53) as f64
}

fn mixed(seed: u64, position: u64) -> u64 {
    mix(mix(seed).wrapping_add(position.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
}

/// SplitMix64 (Steele, Lea, Flood 2014): one step of its sequence, as a hash.
fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests;
