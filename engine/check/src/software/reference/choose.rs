//! The reference kernels that choose tokens. Sums of weights are whole numbers, as in the kernels. The same draw
//! therefore chooses the same token, unless two devices' exponentials differ exactly at that boundary.

use super::{KernelFault, KernelRun};
use baton_engine::compute::cuda::device::Element;
use baton_engine::compute::cuda::kernels::DRAW_WORDS;

/// A weight of 1.
const ONE: f64 = (1_u64 << 40) as f64;

pub(super) fn best_of_parts(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    let (vocab, parts, [grid_parts, rows, _]) = (run.number(3)?, run.number(4)?, run.grid());
    if grid_parts != parts {
        return Err(format!("a grid of {grid_parts} for {parts} parts"));
    }
    let per_part = vocab.div_ceil(parts);
    for row in 0..rows {
        let logits = run.read(0, Element::F32, row * vocab, vocab)?;
        for part in 0..parts {
            let (start, end) = ((part * per_part).min(vocab), ((part + 1) * per_part).min(vocab));
            let (mut best, mut index) = (f32::NEG_INFINITY, -1);
            for (i, value) in logits[start..end].iter().enumerate() {
                if *value > best {
                    (best, index) = (*value, i32::try_from(start + i).map_err(|e| e.to_string())?);
                }
            }
            run.write(1, Element::F32, row * parts + part, &[best])?;
            run.write_integer(2, row * parts + part, index)?;
        }
    }
    Ok(())
}

pub(super) fn choose(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    let (vocab, parts) = (run.number(5)?, run.number(6)?);
    for row in 0..run.grid()[0] {
        let draw = run.integers(3, row * DRAW_WORDS, DRAW_WORDS)?;
        if draw[0] == 0 {
            continue;
        }
        let values = run.read(1, Element::F32, row * parts, parts)?;
        let indices = run.integers(2, row * parts, parts)?;
        let (mut best, mut index) = (f32::NEG_INFINITY, -1);
        for (value, at) in values.into_iter().zip(indices) {
            if at >= 0 && (index < 0 || value > best) {
                (best, index) = (value, at);
            }
        }
        if draw[0] == 2 && index >= 0 && best < f32::INFINITY {
            let logits = run.read(0, Element::F32, row * vocab, vocab)?;
            index = drawn(&logits, best, &draw);
        }
        run.write_integer(4, row, index)?;
    }
    Ok(())
}

fn mass(weight: f32) -> u64 {
    (f64::from(weight) * ONE) as u64
}

/// The token that the fraction of a draw selects.
fn drawn(logits: &[f32], best: f32, draw: &[i32]) -> i32 {
    let float = |word: usize| f32::from_bits(draw[word].cast_unsigned());
    let (inverse_temperature, top_k, top_p, min_p) =
        (float(1), draw[2].cast_unsigned() as usize, float(3), float(4));
    let fraction = u64::from(draw[6].cast_unsigned()) << 32 | u64::from(draw[5].cast_unsigned());
    let weights: Vec<f32> = logits.iter().map(|logit| ((logit - best) * inverse_temperature).exp()).collect();
    // Best first, the lowest id first among equals. NaN is not above 0 and drops out.
    let mut candidates: Vec<usize> = (0..weights.len()).filter(|id| weights[*id] > 0.0).collect();
    candidates.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]).then(a.cmp(b)));
    // Min-p, then top-k with all of its ties, then top-p.
    candidates.retain(|id| weights[*id] >= min_p);
    if top_k > 0 && top_k < candidates.len() {
        let least = weights[candidates[top_k - 1]];
        candidates.retain(|id| weights[*id] >= least);
    }
    if top_p < 1.0 {
        let total: u64 = candidates.iter().map(|id| mass(weights[*id])).sum();
        let wanted = ((total as f64 * f64::from(top_p)) as u64).max(1);
        let mut sum = 0;
        let reached = candidates.iter().position(|id| {
            sum += mass(weights[*id]);
            sum >= wanted
        });
        candidates.truncate(reached.map_or(candidates.len(), |last| last + 1));
    }
    candidates.sort_unstable();
    let total: u64 = candidates.iter().map(|id| mass(weights[*id])).sum();
    let target = ((u128::from(fraction) * u128::from(total)) >> 64) as u64;
    let mut sum = 0;
    let at = candidates.iter().find(|id| {
        sum += mass(weights[**id]);
        sum > target
    });
    at.map_or(-1, |id| i32::try_from(*id).expect("a vocabulary fits"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use baton_engine::sampling::{SamplingParams, TokenCounts, TokenPosition, distribution};

    /// The tokens that a device can choose, from draws over the whole range.
    fn drawable(logits: &[f32], params: &SamplingParams) -> BTreeSet<u32> {
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let float = |value: f32| value.to_bits().cast_signed();
        let half = |value: u64| (value as u32).cast_signed();
        let token = |fraction: u64| {
            let settings =
                [float(params.temperature.recip()), params.top_k.cast_signed(), float(params.top_p)];
            let [temperature, top_k, top_p] = settings;
            let fraction = [half(fraction), half(fraction >> 32)];
            let draw = [2, temperature, top_k, top_p, float(params.min_p), fraction[0], fraction[1]];
            drawn(logits, best, &draw).cast_unsigned()
        };
        (0..4096_u64).map(|step| token(step << 52)).collect()
    }

    #[test]
    fn ties_and_the_order_of_min_p_top_k_and_top_p_match_the_host() {
        let logits = [2.0, 1.0, 1.0, 1.0, 0.0, 0.0, -1.0, 3.0];
        // Top-k keeps all that equal the k-th. Top-p is a share of the tokens that min-p and top-k leave: as a share of
        // all tokens, the last two cases would have one more.
        for (top_k, top_p, min_p, wanted) in [
            (3, 1.0, 0.0, &[0, 1, 2, 3, 7][..]),
            (1, 1.0, 0.0, &[7]),
            (6, 1.0, 0.0, &[0, 1, 2, 3, 4, 5, 7]),
            (0, 0.75, 0.0, &[0, 1, 7]),
            (2, 0.7, 0.0, &[7]),
            (3, 0.8, 0.1, &[0, 1, 7]),
            (0, 0.8, 0.1, &[0, 1, 7]),
            (0, 0.9, 0.1, &[0, 1, 2, 7]),
        ] {
            let params =
                SamplingParams { temperature: 1.0, top_k, top_p, min_p, ..SamplingParams::default() };
            let host = distribution(
                &logits,
                &params,
                &TokenCounts::default(),
                TokenPosition { position: 0, generated: 0 },
            );
            let host: BTreeSet<u32> = host.into_iter().map(|(id, _)| id).collect();
            let wanted: BTreeSet<u32> = wanted.iter().copied().collect();
            assert_eq!((&host, drawable(&logits, &params)), (&wanted, wanted.clone()), "{params:?}");
        }
    }
}
