//! The reference kernels of attention.

use super::{KernelFault, KernelRun, dot};
use baton_engine::compute::cuda::device::{Element, KernelArg};
use baton_engine::compute::cuda::kernels::SPLIT_TOKENS;

/// Query heads that a block of decode attention takes.
const GROUP_HEADS: usize = 16;

/// The arguments that locate keys and values, starting with the block's stride.
#[derive(Clone, Copy)]
struct PoolArgs {
    block_stride: usize,
    layer: usize,
    heads: usize,
    kv_heads: usize,
    block_tokens: usize,
}

impl PoolArgs {
    fn of(run: &KernelRun<'_>, first: usize) -> Result<Self, KernelFault> {
        Ok(Self {
            block_stride: run.number(first)?,
            layer: run.number(first + 1)?,
            heads: run.number(first + 2)?,
            kv_heads: run.number(first + 3)?,
            block_tokens: run.number(first + 4)?,
        })
    }

    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// The query heads that share a head of keys.
    fn heads_of(&self, kv_head: usize) -> std::ops::Range<usize> {
        kv_head * self.group()..(kv_head + 1) * self.group()
    }
}

/// The arguments that turn products into scores: the multiplier, then those of features.
#[derive(Clone, Copy)]
struct ScoreArgs {
    scale: f32,
    window: usize,
    cap: Option<f32>,
}

impl ScoreArgs {
    fn of(run: &KernelRun<'_>, first: usize) -> Result<Self, KernelFault> {
        let mut args = Self { scale: run.float(first)?, window: usize::MAX, cap: None };
        for arg in first + 1..run.launch.args.len() {
            match run.arg(arg)? {
                KernelArg::U32(window) if window > 0 => args.window = window as usize,
                KernelArg::F32(cap) if cap > 0.0 => args.cap = Some(cap),
                other => return Err(format!("argument {arg} is {other:?}")),
            }
        }
        Ok(args)
    }

    /// The first key that the query at `position` sees.
    fn oldest(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window)
    }

    fn score(&self, product: f32) -> f32 {
        let score = product * self.scale;
        self.cap.map_or(score, |cap| super::capped(score, cap)) * std::f32::consts::LOG2_E
    }
}

/// Numerators, maximum in units of log 2, denominator.
struct SoftmaxSums {
    outputs: Vec<f32>,
    highest: f32,
    sum: f32,
}

/// Keys and values of one head, of successive tokens from `start` on.
struct KeysValues {
    start: usize,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl KeysValues {
    /// Those of the tokens `start..end`. `table` is the start of the block table in argument 2.
    fn read(
        run: &mut KernelRun<'_>,
        pool: &PoolArgs,
        kv_head: usize,
        table: usize,
        (start, end): (usize, usize),
    ) -> Result<Self, KernelFault> {
        let (element, dim) = (run.module.element, run.module.head_dim);
        let mut all = Self { start, keys: Vec::new(), values: Vec::new() };
        let mut token = start;
        while token < end {
            let block = KernelRun::index(run.integers(2, table + token / pool.block_tokens, 1)?[0], "block")?;
            let within = token % pool.block_tokens;
            let tokens = (pool.block_tokens - within).min(end - token);
            let vector = kv_head * pool.block_tokens + within;
            let keys = block * pool.block_stride + pool.layer + vector * dim;
            let values = keys + pool.kv_heads * pool.block_tokens * dim;
            all.keys.extend(run.read(1, element, keys, tokens * dim)?);
            all.values.extend(run.read(1, element, values, tokens * dim)?);
            token += tokens;
        }
        Ok(all)
    }

    /// One query over the keys `start..end`.
    fn attend(&self, query: &[f32], (start, end): (usize, usize), scores: &ScoreArgs) -> SoftmaxSums {
        let dim = query.len();
        let mut sums = SoftmaxSums { outputs: vec![0.0; dim], highest: f32::NEG_INFINITY, sum: 0.0 };
        if start >= end {
            return sums;
        }
        let taken = (start - self.start) * dim..(end - self.start) * dim;
        let keys = self.keys[taken.clone()].chunks_exact(dim);
        for (key, value) in keys.zip(self.values[taken].chunks_exact(dim)) {
            let score = scores.score(dot(query, key));
            if score > sums.highest {
                let shrink = (sums.highest - score).exp2();
                sums.highest = score;
                sums.sum *= shrink;
                sums.outputs.iter_mut().for_each(|output| *output *= shrink);
            }
            let weight = (score - sums.highest).exp2();
            sums.sum += weight;
            sums.outputs.iter_mut().zip(value).for_each(|(output, value)| *output += weight * value);
        }
        sums
    }
}

pub(super) fn decode(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    let (pool, splits, scores) = (PoolArgs::of(run, 6)?, run.number(11)?, ScoreArgs::of(run, 12)?);
    let (dim, [grid_splits, groups, sequences]) = (run.module.head_dim, run.grid());
    let group_tiles = pool.group().div_ceil(GROUP_HEADS);
    if grid_splits != splits || groups != pool.kv_heads * group_tiles {
        return Err(format!("a grid of {grid_splits} × {groups} for {splits} splits"));
    }
    for sequence in 0..sequences {
        let entry = run.integers(3, sequence * 3, 3)?;
        let (row, length) = (entry[0], KernelRun::index(entry[1], "length")?);
        if length == 0 {
            continue;
        }
        let (row, table) = (KernelRun::index(row, "row")?, KernelRun::index(entry[2], "table")?);
        let oldest = scores.oldest(length - 1);
        let per_split = (length - oldest).div_ceil(splits).next_multiple_of(SPLIT_TOKENS);
        for split in 0..splits {
            let start = oldest + split * per_split;
            let end = length.min(start + per_split);
            for kv_head in 0..pool.kv_heads {
                let kv = KeysValues::read(run, &pool, kv_head, table, (start, end))?;
                for head in pool.heads_of(kv_head) {
                    let at = (sequence * pool.heads + head) * splits + split;
                    let width = pool.heads + 2 * pool.kv_heads;
                    let query = run.read(0, run.module.element, (row * width + head) * dim, dim)?;
                    let sums = kv.attend(&query, (start, end), &scores);
                    run.write(5, Element::F32, at * 2, &[sums.highest, sums.sum])?;
                    if start < end {
                        run.write(4, Element::F32, at * dim, &sums.outputs)?;
                    }
                }
            }
        }
    }
    Ok(())
}

pub(super) fn merge(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    let (heads, splits, dim) = (run.number(4)?, run.number(5)?, run.module.head_dim);
    let [grid_heads, sequences, _] = run.grid();
    if grid_heads != heads {
        return Err(format!("a grid of {grid_heads} for {heads} heads"));
    }
    for sequence in 0..sequences {
        let entry = run.integers(2, sequence * 3, 3)?;
        if entry[1] == 0 {
            continue;
        }
        let row = KernelRun::index(entry[0], "row")?;
        for head in 0..heads {
            let first = (sequence * heads + head) * splits;
            let summary = run.read(1, Element::F32, first * 2, splits * 2)?;
            let best = summary.chunks(2).map(|pair| pair[0]).fold(f32::NEG_INFINITY, f32::max);
            let (mut total, mut values) = (0.0, vec![0.0; dim]);
            for (split, pair) in summary.chunks(2).enumerate() {
                let weight = (pair[0] - best).exp2();
                total += weight * pair[1];
                if weight > 0.0 {
                    let partial = run.read(0, Element::F32, (first + split) * dim, dim)?;
                    values.iter_mut().zip(partial).for_each(|(value, partial)| *value += weight * partial);
                }
            }
            values.iter_mut().for_each(|value| *value /= total);
            run.write(3, run.module.element, (row * heads + head) * dim, &values)?;
        }
    }
    Ok(())
}

pub(super) fn prefill(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    let (pool, scores, dim) = (PoolArgs::of(run, 5)?, ScoreArgs::of(run, 10)?, run.module.head_dim);
    let [tiles, heads, _] = run.grid();
    if heads != pool.heads {
        return Err(format!("a grid of {heads} for {} heads", pool.heads));
    }
    for tile in 0..tiles {
        let entry = run.integers(3, tile * 4, 4)?;
        let [row, queries, first, table] =
            [0, 1, 2, 3].map(|i| KernelRun::index(entry[i], "entry of a tile"));
        let (row, queries, first, table) = (row?, queries?, first?, table?);
        if queries > baton_engine::compute::cuda::kernels::TILE_QUERIES {
            return Err(format!("a tile of {queries} queries"));
        }
        for kv_head in 0..pool.kv_heads {
            let kv = KeysValues::read(run, &pool, kv_head, table, (scores.oldest(first), first + queries))?;
            for (query, head) in
                (0..queries).flat_map(|query| pool.heads_of(kv_head).map(move |head| (query, head)))
            {
                let width = heads + 2 * pool.kv_heads;
                let q = run.read(0, run.module.element, ((row + query) * width + head) * dim, dim)?;
                let keys = (scores.oldest(first + query), first + query + 1);
                let sums = kv.attend(&q, keys, &scores);
                let out: Vec<_> = sums.outputs.iter().map(|output| output / sums.sum).collect();
                run.write(4, run.module.element, ((row + query) * heads + head) * dim, &out)?;
            }
        }
    }
    Ok(())
}
