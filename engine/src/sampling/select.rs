//! Which tokens stay in the draw: argmax, min-p, top-k, top-p, without sorting the vocabulary.
//!
//! - *Min-p* comes first, as in vLLM, so that top-p is a share of what it leaves. It and top-k are bounds on a token's
//!   weight, in whatever order.
//! - *Top-k* first takes the maximum of every block of [`BLOCK`] logits. The k-th largest of those is at most the
//!   k-th largest logit, so only blocks that reach it are looked at again.
//! - *Top-p* looks among the [`NUCLEUS`] best tokens first. When they do not weigh enough, it drops what cannot be
//!   in: all tokens under total × (1 - p) / n together weigh at most 1 - p; a quickselect by
//!   weight finds the cut among the rest in linear time.

use std::cmp::Ordering;

use super::exp::weigh;
use super::{SamplingParams, Scratch};

const BLOCK: usize = 64;
/// Tokens among which a nucleus is looked for first.
const NUCLEUS: usize = 1024;

/// A token that stays in the draw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Kept {
    /// Its logit while selecting, then e^((logit - max) / temperature).
    pub(super) weight: f32,
    pub(super) id: u32,
}

impl Kept {
    /// By weight, highest first; among equals the lowest id first. Weights are never NaN.
    pub(super) fn best_first(a: &Self, b: &Self) -> Ordering {
        b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
    }
}

/// The first of the largest entries; `None` when there is no entry above minus infinity.
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

/// Finds the tokens of the draw. True: they are in `scratch.kept`, with weights. False: all of them, with their
/// weights in `scratch.weights`.
pub(super) fn keep(row: &[f32], max: f32, params: &SamplingParams, scratch: &mut Scratch) -> bool {
    let factor = params.temperature.recip();
    let top_k = params.top_k as usize;
    if top_k > 0 && top_k < row.len() {
        top_logits(row, top_k, &mut scratch.maxima, &mut scratch.kept);
        let total = weigh_kept(scratch, max, factor);
        finish(scratch, params, total);
        return true;
    }
    let total = weigh(row, max, factor, &mut scratch.weights);
    if params.top_p >= 1.0 && params.min_p <= 0.0 {
        return false;
    }
    if params.top_p < 1.0 && params.min_p <= 0.0 && row.len() > NUCLEUS {
        // Most nuclei are small: if these tokens weigh enough, no other can be in.
        top_logits(row, NUCLEUS, &mut scratch.maxima, &mut scratch.kept);
        let weights = &scratch.weights;
        scratch.kept.iter_mut().for_each(|kept| kept.weight = weights[kept.id as usize]);
        let mass: f64 = scratch.kept.iter().map(|kept| f64::from(kept.weight)).sum();
        if mass >= f64::from(params.top_p) * total {
            finish(scratch, params, total);
            return true;
        }
    }
    let by_mass = (total * (1.0 - f64::from(params.top_p)) / row.len() as f64 * 0.999) as f32;
    let least = if params.min_p > 0.0 { params.min_p } else { by_mass };
    let weights = scratch.weights.iter().enumerate();
    let reach = weights.filter(|(_, weight)| **weight >= least && **weight > 0.0);
    scratch.kept.clear();
    scratch.kept.extend(reach.map(|(id, weight)| Kept { weight: *weight, id: id as u32 }));
    finish(scratch, params, total);
    true
}

/// Turns the logits of `scratch.kept` into weights; their sum.
fn weigh_kept(scratch: &mut Scratch, max: f32, factor: f32) -> f64 {
    scratch.maxima.clear();
    scratch.maxima.extend(scratch.kept.iter().map(|kept| kept.weight));
    let total = weigh(&scratch.maxima, max, factor, &mut scratch.weights);
    scratch.kept.iter_mut().zip(&scratch.weights).for_each(|(kept, weight)| kept.weight = *weight);
    total
}

/// Min-p, then top-p, over tokens whose weights are a part of `total`.
fn finish(scratch: &mut Scratch, params: &SamplingParams, mut total: f64) {
    let kept = &mut scratch.kept;
    if params.min_p > 0.0 {
        // The heaviest token weighs 1, and 1 >= min_p: it stays.
        kept.retain(|kept| kept.weight >= params.min_p);
        total = kept.iter().map(|kept| f64::from(kept.weight)).sum();
    }
    if params.top_p < 1.0 {
        let prefix = prefix_of_mass(kept, f64::from(params.top_p) * total);
        kept.truncate(prefix);
    }
}

/// Reorders so that the shortest prefix of the best tokens that weighs at least `mass` is first; its length, at
/// least 1.
fn prefix_of_mass(kept: &mut [Kept], mass: f64) -> usize {
    let (mut low, mut high, mut before) = (0, kept.len(), 0.0);
    // The answer is in low..=high; kept[..low] are better than the rest and weigh `before`.
    while high - low > 64 {
        let middle = low + (high - low) / 2;
        kept[low..high].select_nth_unstable_by(middle - low, Kept::best_first);
        let upper: f64 = kept[low..middle].iter().map(|kept| f64::from(kept.weight)).sum();
        if before + upper >= mass {
            high = middle;
        } else {
            (low, before) = (middle, before + upper);
        }
    }
    kept[low..high].sort_unstable_by(Kept::best_first);
    for (index, token) in kept[low..high].iter().enumerate() {
        before += f64::from(token.weight);
        if before >= mass {
            return low + index + 1;
        }
    }
    high.max(1).min(kept.len())
}

/// All logits that reach the k-th largest, in no order: k of them, and more when several equal it (as in
/// Hugging Face and vLLM). Fewer when the row has fewer numbers above minus infinity.
pub(super) fn top_logits(row: &[f32], k: usize, maxima: &mut Vec<f32>, out: &mut Vec<Kept>) {
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
                out.push(Kept { weight: *logit, id: (index * BLOCK + offset) as u32 });
            }
        }
    }
    if out.len() > k {
        let least = out.select_nth_unstable_by(k - 1, Kept::best_first).1.weight;
        out.retain(|kept| kept.weight >= least);
    }
}

/// The k best, best first; exactly k, lowest ids among equals.
pub(super) fn top_sorted<'a>(row: &[f32], k: usize, scratch: &'a mut Scratch) -> &'a [Kept] {
    if k == 0 {
        return &[];
    }
    top_logits(row, k, &mut scratch.maxima, &mut scratch.kept);
    scratch.kept.sort_unstable_by(Kept::best_first);
    scratch.kept.truncate(k);
    &scratch.kept
}
