//! Selects the candidates of the draw: argmax, min-p, top-k, top-p, without sorting the vocabulary.
//!
//! - *Min-p* comes first, as in vLLM, so that top-p is a share of the remaining tokens. Min-p and top-k are bounds on a
//!   token's weight, in any order.
//! - *Top-k* first takes the maximum of every block of [`BLOCK`] logits. The k-th largest maximum is at most the k-th
//!   largest logit, so only blocks that reach it are read again.
//! - *Top-p* first tries the [`NUCLEUS`] best tokens. If their weight is too small, it drops all tokens under total ×
//!   (1 - p) / n. Together they weigh at most 1 - p, so none is in the nucleus. A quickselect by weight finds the cut
//!   among the rest in linear time.

use std::cmp::Ordering;

use super::exp::weigh;
use super::{SamplingParams, SamplingScratch};

const BLOCK: usize = 64;
/// Number of best tokens that are tried first for a nucleus.
const NUCLEUS: usize = 1024;

/// A token that can be drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    /// The logit during selection, then e^((logit - max) / temperature).
    pub(super) weight: f32,
    pub(super) id: u32,
}

impl Candidate {
    /// By weight, highest first; among equals the lowest id first. Weights are never NaN.
    pub(super) fn best_first(a: &Self, b: &Self) -> Ordering {
        b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
    }
}

/// The first of the largest entries; `None` if no entry is above minus infinity.
pub(super) fn argmax(row: &[f32]) -> Option<(u32, f32)> {
    let (mut best, mut start) = (f32::NEG_INFINITY, None);
    for (index, block) in row.chunks(BLOCK).enumerate() {
        let max = block_max(block);
        if max > best {
            (best, start) = (max, Some(index * BLOCK));
        }
    }
    let start = start?;
    let offset = row[start..].iter().position(|x| *x == best).expect("the block's maximum is in the block");
    Some(((start + offset) as u32, best))
}

/// The largest entry that is a number.
fn block_max(block: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (whole, rest) = block.as_chunks::<16>();
    for part in whole {
        for (lane, x) in lanes.iter_mut().zip(part) {
            // False for NaN.
            *lane = if *x > *lane { *x } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |max, x| if *x > max { *x } else { max })
}

/// Finds the candidates of the draw. Returns true if they are in `scratch.candidates`, with weights. Returns false if
/// all tokens are candidates, with their weights in `scratch.weights`.
pub(super) fn select(row: &[f32], max: f32, params: &SamplingParams, scratch: &mut SamplingScratch) -> bool {
    let factor = params.temperature.recip();
    let top_k = params.top_k as usize;
    if top_k > 0 && top_k < row.len() {
        top_logits(row, top_k, &mut scratch.maxima, &mut scratch.candidates);
        let total = weigh_candidates(scratch, max, factor);
        finish(scratch, params, total);
        return true;
    }
    let total = weigh(row, max, factor, &mut scratch.weights);
    if params.top_p >= 1.0 && params.min_p <= 0.0 {
        return false;
    }
    if params.top_p < 1.0 && params.min_p <= 0.0 && row.len() > NUCLEUS {
        // Most nuclei are small: if these tokens weigh enough, no other token can be in the nucleus.
        top_logits(row, NUCLEUS, &mut scratch.maxima, &mut scratch.candidates);
        let weights = &scratch.weights;
        scratch.candidates.iter_mut().for_each(|candidate| candidate.weight = weights[candidate.id as usize]);
        let mass: f64 = scratch.candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
        if mass >= f64::from(params.top_p) * total {
            finish(scratch, params, total);
            return true;
        }
    }
    let by_mass = (total * (1.0 - f64::from(params.top_p)) / row.len() as f64 * 0.999) as f32;
    let least = if params.min_p > 0.0 { params.min_p } else { by_mass };
    let weights = scratch.weights.iter().enumerate();
    let reach = weights.filter(|(_, weight)| **weight >= least && **weight > 0.0);
    scratch.candidates.clear();
    scratch.candidates.extend(reach.map(|(id, weight)| Candidate { weight: *weight, id: id as u32 }));
    finish(scratch, params, total);
    true
}

/// Converts the logits of `scratch.candidates` to weights and returns their sum.
fn weigh_candidates(scratch: &mut SamplingScratch, max: f32, factor: f32) -> f64 {
    scratch.maxima.clear();
    scratch.maxima.extend(scratch.candidates.iter().map(|candidate| candidate.weight));
    let total = weigh(&scratch.maxima, max, factor, &mut scratch.weights);
    scratch
        .candidates
        .iter_mut()
        .zip(&scratch.weights)
        .for_each(|(candidate, weight)| candidate.weight = *weight);
    total
}

/// Applies min-p, then top-p, to candidates whose weights are a part of `total`.
fn finish(scratch: &mut SamplingScratch, params: &SamplingParams, mut total: f64) {
    let candidates = &mut scratch.candidates;
    if params.min_p > 0.0 {
        // The heaviest token weighs 1, and 1 >= min_p, so it stays.
        candidates.retain(|candidate| candidate.weight >= params.min_p);
        total = candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
    }
    if params.top_p < 1.0 {
        let prefix = prefix_of_mass(candidates, f64::from(params.top_p) * total);
        candidates.truncate(prefix);
    }
}

/// Moves the shortest prefix of the best tokens with at least weight `mass` to the front. Returns its length, at least
/// 1.
fn prefix_of_mass(candidates: &mut [Candidate], mass: f64) -> usize {
    let (mut low, mut high, mut before) = (0, candidates.len(), 0.0);
    // The result is in low..=high; candidates[..low] are better than the rest and weigh `before`.
    while high - low > 64 {
        let middle = low + (high - low) / 2;
        candidates[low..high].select_nth_unstable_by(middle - low, Candidate::best_first);
        let upper: f64 = candidates[low..middle].iter().map(|candidate| f64::from(candidate.weight)).sum();
        if before + upper >= mass {
            high = middle;
        } else {
            (low, before) = (middle, before + upper);
        }
    }
    candidates[low..high].sort_unstable_by(Candidate::best_first);
    for (index, token) in candidates[low..high].iter().enumerate() {
        before += f64::from(token.weight);
        if before >= mass {
            return low + index + 1;
        }
    }
    high.max(1).min(candidates.len())
}

/// All logits that reach the k-th largest, unordered: k of them, and more if several equal it (as in Hugging Face and
/// vLLM). Fewer if the row has fewer numbers above minus infinity.
pub(super) fn top_logits(row: &[f32], k: usize, maxima: &mut Vec<f32>, out: &mut Vec<Candidate>) {
    out.clear();
    maxima.clear();
    maxima.extend(row.chunks(BLOCK).map(block_max));
    let bound = if k < maxima.len() {
        let mut sorted = maxima.clone();
        *sorted.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
    } else {
        f32::NEG_INFINITY
    };
    for (index, (block, max)) in row.chunks(BLOCK).zip(&*maxima).enumerate() {
        if *max < bound {
            continue;
        }
        for (offset, logit) in block.iter().enumerate() {
            if *logit >= bound && *logit > f32::NEG_INFINITY {
                out.push(Candidate { weight: *logit, id: (index * BLOCK + offset) as u32 });
            }
        }
    }
    if out.len() > k {
        let least = out.select_nth_unstable_by(k - 1, Candidate::best_first).1.weight;
        out.retain(|candidate| candidate.weight >= least);
    }
}

/// The k best, best first: exactly k, lowest ids among equals.
pub(super) fn top_sorted<'a>(row: &[f32], k: usize, scratch: &'a mut SamplingScratch) -> &'a [Candidate] {
    if k == 0 {
        return &[];
    }
    top_logits(row, k, &mut scratch.maxima, &mut scratch.candidates);
    scratch.candidates.sort_unstable_by(Candidate::best_first);
    scratch.candidates.truncate(k);
    &scratch.candidates
}
