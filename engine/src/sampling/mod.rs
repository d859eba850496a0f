//! Choosing the next token from a row of logits.
//!
//! ```text
//!  logits ─▶ mask, exclusions ─▶ bias ─▶ penalties ─▶ temperature ─▶ min-p ─▶ top-k ─▶ top-p ─▶ draw(seed, position)
//!     └────▶ log-probabilities, when asked for: of the model's own distribution (vLLM's `raw_logprobs`)
//! ```
//!
//! [`SamplingRow`] is one row of a step, for every device. A device draws the rows that need only their logits
//! ([`SamplingRow::draw`]). The host chooses the tokens of the other rows, and only their logits are copied.
//!
//! The order is vLLM's. As there, top-k keeps all tokens that equal the k-th best. Of the tokens that equal the last of
//! top-p, the ones with the lowest ids stay.
//!
//! Invariants:
//! - The choice is a function of logits, parameters, counts and position, without state. Prefill and decode engine,
//!   restart and preemption therefore choose the same token. The draw for a position is a hash of seed and position.
//! - Greedy takes the lowest id among equals.
//! - NaN is never chosen. A row without a candidate is an error, not token 0.
//! - After the first call a [`SamplingScratch`] no longer allocates, except for returned values.
//!
//! Every entry of the row can be chosen, including rows that pad the vocabulary, as in Hugging Face and vLLM. Training
//! makes padding improbable. An engine that leaves it out would differ from both on models where it is not. A caller
//! can exclude padding with a shorter row.

mod exclusions;
mod exp;
mod logprobs;
mod mask;
mod params;
mod penalties;
mod select;
pub mod stop;

pub use exclusions::TokenExclusions;
pub use mask::TokenMask;
pub use params::SamplingParams;
pub use penalties::TokenCounts;

use logprobs::logprobs;
use select::Candidate;

/// Position of the chosen token in its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPosition {
    /// Number of prompt tokens and generated tokens before it.
    pub position: u64,
    /// Number of generated tokens before it.
    pub generated: u32,
}

/// A draw that a device can make without the host: it needs only the row of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Below 1e-5 the best token is chosen.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// The draw as a fraction of 2^64, from seed and position.
    pub fraction: u64,
}

impl Draw {
    /// The draw for one position. `None` if more than the row is needed: log-probabilities, bias, exclusions, penalties.
    #[must_use]
    pub fn of(params: &SamplingParams, position: TokenPosition) -> Option<Self> {
        let excludes = params.exclusions.apply_at(position.generated);
        let plain = params.logprobs.is_none() && params.logit_bias.is_empty() && !params.has_penalties();
        (plain && !excludes).then(|| Self {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            fraction: fraction(params.seed, position.position),
        })
    }

    /// Whether the best token is always chosen.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature < params::GREEDY_BELOW
    }
}

/// The draws for consecutive positions of one sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DrawSeries {
    first: Draw,
    seed: u64,
    /// Of the first draw.
    position: u64,
}

impl DrawSeries {
    /// The draws from one position on. `None` if [`Draw::of`] has none for the first.
    #[must_use]
    pub fn of(params: &SamplingParams, position: TokenPosition) -> Option<Self> {
        let first = Draw::of(params, position)?;
        Some(Self { first, seed: params.seed, position: position.position })
    }

    /// The draw of a later position.
    #[must_use]
    pub fn at(&self, offset: usize) -> Draw {
        Draw { fraction: fraction(self.seed, self.position + offset as u64), ..self.first }
    }
}

/// Everything but its logits that the token of one row depends on. The same for every device.
#[derive(Clone, Copy, Debug)]
pub struct SamplingRow<'a> {
    /// The parameters of its request.
    pub params: &'a SamplingParams,
    /// The counts of its tokens, for penalties.
    pub counts: &'a TokenCounts,
    /// Its generated tokens, for bad words.
    pub output: &'a [u32],
    /// The position of the token.
    pub position: TokenPosition,
    /// The only tokens that a grammar allows here; `None` for all.
    pub mask: Option<&'a TokenMask>,
}

impl SamplingRow<'_> {
    /// The draw, if a device can choose the token from the row of logits alone.
    #[must_use]
    pub fn draw(&self) -> Option<Draw> {
        Draw::of(self.params, self.position).filter(|_| self.mask.is_none())
    }

    /// As [`Self::draw`], for this and the next positions.
    #[must_use]
    pub fn draws(&self) -> Option<DrawSeries> {
        DrawSeries::of(self.params, self.position).filter(|_| self.mask.is_none())
    }

    /// Chooses the token. Log-probabilities are those before mask, exclusions, bias and penalties.
    ///
    /// If `min_tokens` excludes every token that the mask permits, it yields: only the end of the text is permitted.
    ///
    /// # Errors
    /// [`NoCandidate`].
    pub fn sample(&self, logits: &[f32], scratch: &mut SamplingScratch) -> Result<SampledToken, NoCandidate> {
        let after_min = TokenPosition { generated: u32::MAX, ..self.position };
        let late = self.mask.map(|_| Self { position: after_min, ..*self });
        let token = [Some(*self), late].into_iter().flatten().find_map(|row| row.token(logits, scratch));
        let token = token.ok_or(NoCandidate { entries: logits.len() })?;
        let wanted = self.params.logprobs.map(|top| logprobs(logits, token, top as usize, scratch));
        Ok(SampledToken { token, logprobs: wanted })
    }

    fn token(&self, logits: &[f32], scratch: &mut SamplingScratch) -> Option<u32> {
        let mut adjusted = std::mem::take(&mut scratch.adjusted);
        let row = adjust(logits, self, &mut adjusted);
        let token = choose(row, self.params, self.position, scratch);
        scratch.adjusted = adjusted;
        token
    }
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// The token.
    pub token: u32,
    /// Log-probabilities of the token and of alternatives, if requested.
    pub logprobs: Option<SampledLogprobs>,
}

/// Log-probabilities of one position, natural logarithm, of the model's own distribution: before bias, penalties and
/// temperature.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledLogprobs {
    /// Of the chosen token.
    pub logprob: f32,
    /// 1 for the most likely token.
    pub rank: u32,
    /// The most likely tokens, best first, lowest id first among equals.
    pub top: Vec<(u32, f32)>,
}

/// The row has no candidate: all of it is NaN or minus infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("none of the {entries} logits is a number above minus infinity")]
pub struct NoCandidate {
    /// Entries of the row.
    pub entries: usize,
}

/// Buffers that are reused for every token. One per sampling thread.
#[derive(Debug, Default)]
pub struct SamplingScratch {
    adjusted: Vec<f32>,
    weights: Vec<f32>,
    candidates: Vec<Candidate>,
    maxima: Vec<f32>,
}

/// Chooses a token without a mask and without generated tokens before it, as [`SamplingRow::sample`].
///
/// # Errors
/// [`NoCandidate`].
pub fn sample(
    logits: &[f32],
    params: &SamplingParams,
    counts: &TokenCounts,
    position: TokenPosition,
    scratch: &mut SamplingScratch,
) -> Result<SampledToken, NoCandidate> {
    SamplingRow { params, counts, output: &[], position, mask: None }.sample(logits, scratch)
}

/// Whether any token of a row of logits could be chosen, if nothing were excluded.
#[must_use]
pub fn has_candidate(logits: &[f32]) -> bool {
    select::argmax(logits).is_some()
}

/// Log-probability of a given token (of a prompt), with alternatives.
#[must_use]
pub fn logprobs_of(logits: &[f32], token: u32, top: u32, scratch: &mut SamplingScratch) -> SampledLogprobs {
    logprobs(logits, token, top as usize, scratch)
}

/// The distribution of [`sample`]: tokens with a probability above 0, most likely first. For tests and parity checks.
#[must_use]
pub fn distribution(
    logits: &[f32],
    params: &SamplingParams,
    counts: &TokenCounts,
    position: TokenPosition,
) -> Vec<(u32, f64)> {
    let mut scratch = SamplingScratch::default();
    let mut adjusted = Vec::new();
    let whole = SamplingRow { params, counts, output: &[], position, mask: None };
    let row = adjust(logits, &whole, &mut adjusted);
    let Some((best, max)) = select::argmax(row) else { return Vec::new() };
    if params.is_greedy() || max == f32::INFINITY {
        return vec![(best, 1.0)];
    }
    if !select::select(row, max, params, &mut scratch) {
        let weights = scratch.weights.iter().enumerate();
        scratch.candidates =
            weights.map(|(id, weight)| Candidate { weight: *weight, id: id as u32 }).collect();
    }
    let mut candidates: Vec<_> =
        scratch.candidates.iter().filter(|candidate| candidate.weight > 0.0).copied().collect();
    candidates.sort_unstable_by(Candidate::best_first);
    let total: f64 = candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
    candidates.iter().map(|candidate| (candidate.id, f64::from(candidate.weight) / total)).collect()
}

/// The logits after mask, exclusions, bias and penalties: the logits themselves if there are none.
fn adjust<'a>(logits: &'a [f32], row: &SamplingRow<'_>, adjusted: &'a mut Vec<f32>) -> &'a [f32] {
    let SamplingRow { params, counts, output, position, mask } = *row;
    let excludes = params.exclusions.apply_at(position.generated);
    if mask.is_none() && !excludes && params.logit_bias.is_empty() && !params.has_penalties() {
        return logits;
    }
    adjusted.clear();
    adjusted.extend_from_slice(logits);
    if let Some(mask) = mask {
        mask.apply(adjusted);
    }
    params.exclusions.apply(output, position.generated, adjusted);
    for (id, bias) in &params.logit_bias {
        if let Some(logit) = adjusted.get_mut(*id as usize) {
            *logit += bias;
        }
    }
    counts.penalize(params, adjusted);
    adjusted
}

fn choose(
    row: &[f32],
    params: &SamplingParams,
    position: TokenPosition,
    scratch: &mut SamplingScratch,
) -> Option<u32> {
    let (best, max) = select::argmax(row)?;
    // With infinity there is no distribution to draw from. The first infinite entry is the most likely token.
    if params.is_greedy() || max == f32::INFINITY {
        return Some(best);
    }
    let u = uniform(params.seed, position.position);
    let drawn = if select::select(row, max, params, scratch) {
        let weights = scratch.candidates.iter().map(|candidate| candidate.weight);
        draw(weights, u).map(|index| scratch.candidates[index].id)
    } else {
        draw(scratch.weights.iter().copied(), u).map(|index| index as u32)
    };
    Some(drawn.unwrap_or(best))
}

/// The index at the fraction `u` of the total weight, never one of weight 0.
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
    // 53 bits: every value is exact, and 1 is excluded.
    (mixed(seed, position) >> 11) as f64 / (1u64 << 53) as f64
}

/// The same number as a fraction of 2^64.
fn fraction(seed: u64, position: u64) -> u64 {
    mixed(seed, position) >> 11 << 11
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
