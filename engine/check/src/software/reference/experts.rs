//! The reference kernels of layers with experts.

use super::{KernelFault, KernelRun, dot};
use baton_engine::compute::cuda::device::Element;
use baton_engine::compute::cuda::kernels::EXPERT_ROWS;

pub(super) fn route(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    let (rows, experts, per_token) = (run.number(4)?, run.number(5)?, run.number(6)?);
    let normalized = run.number(7)? != 0;
    if run.grid()[0] != rows.div_ceil(4) {
        return Err(format!("{} blocks for {rows} rows", run.grid()[0]));
    }
    for row in 0..rows {
        let mut chosen = vec![(-1, 0.0); per_token];
        if run.integers(1, row, 1)?[0] >= 0 {
            let logits = run.read(0, Element::F32, row * experts, experts)?;
            chosen = choice(&logits, per_token, normalized);
        }
        for (slot, (expert, _)) in chosen.iter().enumerate() {
            run.write_integer(2, row * per_token + slot, *expert)?;
        }
        let weights: Vec<_> = chosen.into_iter().map(|(_, weight)| weight).collect();
        run.write(3, Element::F32, row * per_token, &weights)?;
    }
    Ok(())
}

/// The experts of a row in the order of their numbers, and their weights.
fn choice(logits: &[f32], per_token: usize, normalized: bool) -> Vec<(i32, f32)> {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut numerators: Vec<f32> = logits.iter().map(|logit| (logit - highest).exp()).collect();
    let (sum, mut total) = (numerators.iter().sum::<f32>(), 0.0);
    let mut chosen: Vec<(i32, f32)> = Vec::new();
    for _ in 0..per_token {
        let mut best = (0, f32::NEG_INFINITY);
        for (expert, numerator) in numerators.iter().enumerate() {
            if *numerator > best.1 {
                best = (expert, *numerator);
            }
        }
        let probability = numerators[best.0] / sum;
        total += probability;
        numerators[best.0] = f32::NEG_INFINITY;
        chosen.push((best.0 as i32, probability));
    }
    chosen.sort_by_key(|(expert, _)| *expert);
    if normalized {
        chosen.iter_mut().for_each(|(_, weight)| *weight /= total);
    }
    chosen
}

pub(super) fn group(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    let (pairs, experts, most_tiles) = (run.number(3)?, run.number(4)?, run.number(5)?);
    if run.grid() != [1, 1, 1] {
        return Err(format!("a grid of {:?}", run.grid()));
    }
    let chosen = run.integers(0, 0, pairs)?;
    let (mut place, mut tile) = (0, 0);
    for expert in 0..experts {
        let of_expert = chosen.iter().enumerate().filter(|(_, chosen)| **chosen == expert as i32);
        let of_expert: Vec<_> = of_expert.map(|(pair, _)| pair).collect();
        for pairs in of_expert.chunks(EXPERT_ROWS) {
            for (at, part) in [expert, place, pairs.len()].into_iter().enumerate() {
                run.write_integer(2, tile * 3 + at, part as i32)?;
            }
            for pair in pairs {
                run.write_integer(1, place, *pair as i32)?;
                place += 1;
            }
            tile += 1;
        }
    }
    if tile > most_tiles {
        return Err(format!("{tile} tiles, at most {most_tiles}"));
    }
    (tile..most_tiles).try_for_each(|tile| run.write_integer(2, tile * 3 + 2, 0))
}

/// Products of each pair of every tile with the first `outputs` rows of a part of its expert's matrices. The results
/// are by place. `x` gives the row of a place.
fn products(
    run: &mut KernelRun<'_>,
    (inputs, outputs): (usize, usize),
    (parts, part): (usize, usize),
    x: impl Fn(usize, usize) -> usize,
) -> Result<Vec<(usize, usize, Vec<f32>)>, KernelFault> {
    let (element, mut all) = (run.module.element, Vec::new());
    for tile in 0..run.grid()[1] {
        let count = KernelRun::index(run.integers(3, tile * 3 + 2, 1)?[0], "pairs")?;
        if count == 0 {
            continue;
        }
        let entry = run.integers(3, tile * 3, 2)?;
        let (expert, first) = (KernelRun::index(entry[0], "expert")?, KernelRun::index(entry[1], "place")?);
        let matrix = (expert * parts + part) * outputs * inputs;
        let matrix = run.read(1, element, matrix, outputs * inputs)?;
        for place in first..first + count {
            let pair = KernelRun::index(run.integers(2, place, 1)?[0], "pair")?;
            let row = run.read(0, element, x(place, pair) * inputs, inputs)?;
            let sums = matrix.chunks_exact(inputs).map(|weights| dot(&row, weights)).collect();
            all.push((place, pair, sums));
        }
    }
    Ok(all)
}

fn check_blocks(run: &KernelRun<'_>, outputs: usize, at_once: usize) -> Result<(), KernelFault> {
    match run.grid()[0] {
        blocks if blocks == outputs.div_ceil(at_once) => Ok(()),
        blocks => Err(format!("{blocks} blocks for {outputs} outputs")),
    }
}

pub(super) fn gate_up(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    let (inputs, outputs, per_token) = (run.number(5)?, run.number(6)?, run.number(7)?);
    check_blocks(run, outputs, 32)?;
    let activation = run.activation(8)?;
    let row = |_: usize, pair: usize| pair / per_token;
    let gates = products(run, (inputs, outputs), (2, 0), row)?;
    let ups = products(run, (inputs, outputs), (2, 1), row)?;
    for ((place, _, gate), (_, _, up)) in gates.into_iter().zip(ups) {
        let out: Vec<_> = gate.into_iter().zip(up).map(|(gate, up)| activation(gate) * up).collect();
        run.write(4, run.module.element, place * outputs, &out)?;
    }
    Ok(())
}

pub(super) fn down(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    let (inputs, outputs) = (run.number(5)?, run.number(6)?);
    check_blocks(run, outputs, 64)?;
    for (_, pair, sums) in products(run, (inputs, outputs), (1, 0), |place, _| place)? {
        run.write(4, Element::F32, pair * outputs, &sums)?;
    }
    Ok(())
}

pub(super) fn combine(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    let (width, per_token, [parts, rows, _]) = (run.number(4)?, run.number(5)?, run.grid());
    if parts != width.div_ceil(run.launch.threads as usize) {
        return Err(format!("{parts} parts of rows of {width}"));
    }
    for row in 0..rows {
        let first = row * per_token;
        let chosen = run.integers(1, first, per_token)?;
        let weights = run.read(2, Element::F32, first, per_token)?;
        let mut sum = vec![0.0; width];
        for (slot, weight) in weights.into_iter().enumerate().filter(|(slot, _)| chosen[*slot] >= 0) {
            let result = run.read(0, Element::F32, (first + slot) * width, width)?;
            sum.iter_mut().zip(result).for_each(|(sum, result)| *sum += result * weight);
        }
        run.write(3, Element::F32, row * width, &sum)?;
    }
    Ok(())
}
