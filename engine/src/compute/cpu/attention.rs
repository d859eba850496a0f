//! Attention over the paged KV pool.
//!
//! A unit is one KV head of one sequence for a run of query positions. Its rows are (position, query head of the
//! group). Three passes with a fixed order each:
//!
//! 1. scores: rows against 32 transposed keys at a time with the matrix kernel (a chain over the head's
//!    elements), up to each row's own position;
//! 2. softmax over the keys that the row sees: the maximum does not depend on order, the sum runs over 16 lanes
//!    by the key's distance from the first one, and a head's attention sink is added last;
//! 3. values: a chain over key positions from 0, continued from block to block.
//!
//! A row's result therefore depends on its sequence only, not on the chunks of its prompt, the units, the block size,
//! or the rest of the batch. With a window, keys before those that any row of the unit sees are not read, and other
//! keys outside of a row's window have weight zero. Zeros change no bit of a chain, wherever it begins. Scores of a
//! whole row are stored, which takes 4 bytes per key and row. A unit has fewer rows as the context grows.
#![allow(
    unsafe_code,
    reason = "reads and writes KV blocks through the region's raw pointers; see each block"
)]

#[cfg(target_arch = "x86_64")]
mod few;
mod pairs;

use std::ops::Range;

use baton_connector::layout::{KvDtype, KvLayout};

use super::isa::{Isa, request};
use super::kernel::{MAX_ROWS, PANEL, TileOperands, multiply, rows_at_once};
use super::{bf16, convert, vector};

/// Most rows of a unit.
const UNIT_ROWS: usize = 192;
/// Value vectors that are copied at a time if they are not used in place: 32 KiB for a head of 64.
const VALUE_RUN: usize = 128;
/// Scores of a unit at most; a longer context makes units of fewer rows. 1 MiB, half of a typical L2 cache.
const UNIT_SCORES: usize = 1 << 18;

/// Working memory of one worker for a unit.
#[derive(Debug, Default)]
pub(super) struct AttentionScratch {
    queries: Vec<f32>,
    keys: Vec<f32>,
    scores: Vec<f32>,
    sums: Vec<f32>,
    values: Vec<f32>,
    outputs: Vec<f32>,
    pairs: pairs::PairScratch,
}

/// One KV head of one sequence for a run of query positions.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionUnit {
    /// The sequence's index in the batch.
    pub(super) seq: usize,
    pub(super) kv_head: usize,
    /// First query, counted within the step's tokens of the sequence.
    pub(super) first: usize,
    pub(super) count: usize,
}

/// Query positions of one unit whose last position has `context` keys.
pub(super) fn positions_per_unit(group: usize, context: usize) -> usize {
    let rows = (UNIT_SCORES / context.max(1)).clamp(MAX_ROWS, UNIT_ROWS);
    (rows / group).max(1)
}

/// The input of a unit besides its queries: keys and values of one head of one sequence in one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadCache<'a> {
    /// Layout of a block in the rank that holds the head.
    pub(super) layout: &'a KvLayout,
    pub(super) layer: usize,
    /// Index of the head in its rank.
    pub(super) head: usize,
    /// Start of each block of the sequence in that rank.
    pub(super) blocks: &'a [*mut u8],
}

/// Half of a block's layer.
#[derive(Clone, Copy, Debug)]
pub(super) enum KvHalf {
    Keys = 0,
    Values = 1,
}

impl HeadCache<'_> {
    /// Address of one token's vector.
    fn vector(&self, half: KvHalf, position: usize) -> *mut u8 {
        let layout = self.layout;
        let (block, slot) = (position / layout.block_tokens, position % layout.block_tokens);
        let run = (self.layer * 2 + half as usize) * layout.kv_heads + self.head;
        let element = (run * layout.block_tokens + slot) * layout.head_dim;
        // SAFETY: layer, head and slot are inside the layout, so the offset is inside the block.
        unsafe { self.blocks[block].add(element * layout.dtype.bytes()) }
    }

    /// Prefetches the vectors of up to [`PANEL`] positions from `from`. Runs of one head are a block apart, which no
    /// hardware prefetcher follows. Without prefetches a decode step waits for memory at every block.
    fn request(&self, half: KvHalf, from: usize, context: usize) {
        let end = context.min(from + PANEL);
        let mut position = from;
        while position < end {
            let run = (self.layout.block_tokens - position % self.layout.block_tokens).min(end - position);
            request(self.vector(half, position), run * self.layout.head_dim * self.layout.dtype.bytes());
            position += run;
        }
    }

    /// Writes one token's vector.
    ///
    /// # Safety
    /// No other code reads or writes this token's slot meanwhile, and `isa` is of this machine.
    pub(super) unsafe fn store(&self, isa: Isa, half: KvHalf, position: usize, vector: &[f32]) {
        let to = self.vector(half, position);
        // SAFETY: the slot has `head_dim` elements of the layout's type.
        unsafe {
            match self.layout.dtype {
                KvDtype::F32 => std::ptr::copy_nonoverlapping(vector.as_ptr().cast(), to, vector.len() * 4),
                KvDtype::F16 => convert::narrow_f16(isa, vector, to.cast()),
                KvDtype::Bf16 => convert::narrow_bf16(isa, vector, to.cast()),
            }
        }
    }

    /// Reads the vectors of `count` positions into rows of `stride` values.
    ///
    /// # Safety
    /// No other code writes these slots meanwhile, and `isa` is of this machine.
    unsafe fn load(&self, isa: Isa, half: KvHalf, from: usize, count: usize, stride: usize, out: &mut [f32]) {
        for (position, out) in (from..from + count).zip(out.chunks_mut(stride)) {
            let out = &mut out[..self.layout.head_dim];
            let from = self.vector(half, position).cast_const();
            // SAFETY: the slot has `head_dim` elements of the layout's type.
            unsafe {
                match self.layout.dtype {
                    KvDtype::F32 => {
                        std::ptr::copy_nonoverlapping(from, out.as_mut_ptr().cast(), out.len() * 4);
                    }
                    KvDtype::F16 => convert::widen_f16(isa, from.cast(), out),
                    KvDtype::Bf16 => convert::widen_bf16(isa, from.cast(), out),
                }
            }
        }
    }
}

/// Shape of a unit's queries.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueryShape<'a> {
    pub(super) isa: Isa,
    /// Query heads per KV head.
    pub(super) group: usize,
    /// Multiplier of scores.
    pub(super) factor: f32,
    /// Soft cap of multiplied scores.
    pub(super) cap: Option<f32>,
    /// Attention sinks of the group's heads: logits that join the softmax and have no value.
    pub(super) sinks: Option<&'a [f32]>,
    /// Keys that a position sees, its own included. `None`: all.
    pub(super) window: Option<usize>,
    /// The unit that multiplies in bfloat16 mode.
    pub(super) bf16: Option<bf16::Bf16Unit>,
}

impl QueryShape<'_> {
    /// A position from which on all keys are read that a unit with its first query at `start` sees: a multiple of the
    /// block and of a panel, so that runs are inside blocks.
    fn begin(&self, cache: &HeadCache<'_>, start: usize) -> usize {
        let Some(window) = self.window else { return 0 };
        let mut step = cache.layout.block_tokens;
        while !step.is_multiple_of(PANEL) {
            step += cache.layout.block_tokens;
        }
        (start + 1).saturating_sub(window) / step * step
    }

    /// Turns the scores of a row from position 0 on into softmax numerators and returns their sum. The row is one of
    /// the `head`th head of the group. It sees the first `visible` keys, with a window only the last of them. Other
    /// keys from `begin` on get weight zero, because the other rows of a tile multiply them.
    fn softmax(&self, scores: &mut [f32], begin: usize, visible: usize, head: usize) -> f32 {
        let (seen, later) = scores.split_at_mut(visible);
        later.fill(0.0);
        let first = self.window.map_or(0, |window| visible.saturating_sub(window));
        let (earlier, seen) = seen.split_at_mut(first);
        earlier[begin..].fill(0.0);
        let factor = match self.cap {
            None => self.factor,
            Some(cap) => {
                vector::soft_cap(self.isa, seen, self.factor, cap);
                1.0
            }
        };
        match self.sinks {
            None => vector::softmax_numerators(self.isa, seen, factor),
            // The factor multiplies scores only.
            Some(sinks) => vector::softmax_numerators_beside(self.isa, seen, factor, sinks[head] / factor),
        }
    }

    /// Computes `count` query positions, the first at position `start`.
    ///
    /// `query(i, g)` is the rotated query of head `g` of the group at the unit's position `i`. `output(i, g)` is the
    /// destination of its result. Both have `head_dim` values.
    ///
    /// # Safety
    /// Keys and values of the head up to position `start + count - 1` are written, and no other code writes them
    /// meanwhile. `query` and `output` point to `head_dim` values, and the outputs belong to this unit alone.
    #[allow(clippy::too_many_arguments, reason = "the coordinates of one unit")]
    pub(super) unsafe fn attend(
        &self,
        cache: &HeadCache<'_>,
        start: usize,
        count: usize,
        scratch: &mut AttentionScratch,
        query: impl Fn(usize, usize) -> *const f32,
        output: impl Fn(usize, usize) -> *mut f32,
    ) {
        if let Some(unit) = self.bf16 {
            // SAFETY: the caller's contract.
            unsafe { self.attend_in_bf16(unit, cache, start, count, scratch, query, output) };
            return;
        }
        let (dim, group) = (cache.layout.head_dim, self.group);
        let rows = count * group;
        let context = start + count;
        // Keys visible to row r: all up to its own position.
        let visible = |row: usize| start + row / group + 1;
        let begin = self.begin(cache, start);
        let score_stride = context.next_multiple_of(PANEL) + 16;
        let padded_dim = dim.next_multiple_of(PANEL);
        resize(&mut scratch.queries, rows * dim);
        resize(&mut scratch.keys, dim * PANEL);
        resize(&mut scratch.scores, rows * score_stride);
        resize(&mut scratch.sums, rows);
        resize(&mut scratch.outputs, rows * padded_dim);
        for row in 0..rows {
            // SAFETY: the query has `dim` values.
            let query = unsafe { std::slice::from_raw_parts(query(row / group, row % group), dim) };
            scratch.queries[row * dim..][..dim].copy_from_slice(query);
        }
        // SAFETY: the caller vouches for the keys and values; the buffers have just been sized.
        unsafe {
            self.scores(cache, begin..context, rows, score_stride, scratch, visible);
            for row in 0..rows {
                let scores = &mut scratch.scores[row * score_stride..][..context];
                scratch.sums[row] = self.softmax(scores, begin, visible(row), row % group);
            }
            self.values(cache, begin..context, rows, score_stride, scratch, visible);
        }
        for row in 0..rows {
            // SAFETY: the output has `dim` values and belongs to this unit.
            let out = unsafe { std::slice::from_raw_parts_mut(output(row / group, row % group), dim) };
            let numerators = &scratch.outputs[row * padded_dim..][..dim];
            vector::scale_into(self.isa, numerators, 1.0 / scratch.sums[row], out);
        }
    }

    /// Pass 1.
    #[allow(clippy::too_many_arguments, reason = "the coordinates of one unit")]
    unsafe fn scores(
        &self,
        cache: &HeadCache<'_>,
        keys: Range<usize>,
        rows: usize,
        score_stride: usize,
        scratch: &mut AttentionScratch,
        visible: impl Fn(usize) -> usize,
    ) {
        let (begin, context) = (keys.start, keys.end);
        let (dim, step) = (cache.layout.head_dim, rows_at_once(self.isa));
        #[cfg(target_arch = "x86_64")]
        if rows == self.group && few::suits(self.isa, cache, rows) {
            let AttentionScratch { queries, scores, .. } = scratch;
            // SAFETY: the caller vouches for positions below `context`; slots after it are memory of the pool, which no
            // other code writes while the sequence is computed.
            unsafe { few::scores(cache, begin..context, rows, queries, scores, score_stride) };
            return;
        }
        // With many rows the arithmetic takes longer than the memory accesses.
        let waits = rows <= MAX_ROWS;
        if waits {
            cache.request(KvHalf::Keys, begin, context);
        }
        for from in (begin..context).step_by(PANEL) {
            let keys = PANEL.min(context - from);
            if waits && from + PANEL < context {
                cache.request(KvHalf::Keys, from + PANEL, context);
            } else if waits {
                cache.request(KvHalf::Values, begin, context);
            }
            // SAFETY: the caller vouches for positions below `context`.
            unsafe { transpose_keys(self.isa, cache, from, keys, &mut scratch.values, &mut scratch.keys) };
            for row in (0..rows).step_by(step) {
                let now = step.min(rows - row);
                if visible(row + now - 1) <= from {
                    continue;
                }
                let tile = TileOperands {
                    a: scratch.queries[row * dim..].as_ptr(),
                    a_stride: dim,
                    b: scratch.keys.as_ptr(),
                    b_stride: PANEL,
                    c: scratch.scores[row * score_stride + from..].as_mut_ptr(),
                    c_stride: score_stride,
                    depth: dim,
                    accumulate: false,
                    ahead: false,
                };
                // SAFETY: the ranges are inside buffers sized by `attend`: a row of scores is a multiple of
                // PANEL long.
                unsafe { multiply(self.isa, now, &tile) };
            }
        }
    }

    /// Pass 3.
    #[allow(clippy::too_many_arguments, reason = "the coordinates of one unit")]
    unsafe fn values(
        &self,
        cache: &HeadCache<'_>,
        keys: Range<usize>,
        rows: usize,
        score_stride: usize,
        scratch: &mut AttentionScratch,
        visible: impl Fn(usize) -> usize,
    ) {
        let (begin, context) = (keys.start, keys.end);
        let (dim, step) = (cache.layout.head_dim, rows_at_once(self.isa));
        let (padded_dim, block_tokens) = (dim.next_multiple_of(PANEL), cache.layout.block_tokens);
        #[cfg(target_arch = "x86_64")]
        if rows == self.group && few::suits(self.isa, cache, rows) {
            let AttentionScratch { scores, outputs, .. } = scratch;
            // SAFETY: the caller vouches for positions below `context`.
            unsafe { few::values(cache, begin..context, rows, scores, score_stride, outputs, padded_dim) };
            return;
        }
        let few = rows <= MAX_ROWS;
        let in_place = few && cache.layout.dtype == KvDtype::F32 && dim == padded_dim;
        // A copy is worth it if many rows use it: partial sums are then stored and reloaded less often.
        let run = match (in_place, few) {
            (true, _) => block_tokens,
            (false, true) => PANEL,
            (false, false) => VALUE_RUN,
        };
        if !in_place {
            resize(&mut scratch.values, run * padded_dim);
        }
        for from in (begin..context).step_by(run) {
            let tokens = run.min(context - from);
            if few && from + PANEL < context {
                cache.request(KvHalf::Values, from + PANEL, (from + PANEL + run).min(context));
            }
            let values: *const f32 = if in_place {
                cache.vector(KvHalf::Values, from).cast_const().cast()
            } else {
                // SAFETY: the caller vouches for positions below `context`.
                unsafe {
                    cache.load(self.isa, KvHalf::Values, from, tokens, padded_dim, &mut scratch.values);
                }
                scratch.values.as_ptr()
            };
            for row in (0..rows).step_by(step) {
                let now = step.min(rows - row);
                let depth = visible(row + now - 1).saturating_sub(from).min(tokens);
                if depth == 0 {
                    continue;
                }
                for column in (0..padded_dim).step_by(PANEL) {
                    // SAFETY: the ranges are inside the block or buffers sized by `attend`.
                    unsafe {
                        let tile = TileOperands {
                            a: scratch.scores[row * score_stride + from..].as_ptr(),
                            a_stride: score_stride,
                            b: values.add(column),
                            b_stride: padded_dim,
                            c: scratch.outputs[row * padded_dim + column..].as_mut_ptr(),
                            c_stride: padded_dim,
                            depth,
                            accumulate: from > begin,
                            ahead: false,
                        };
                        multiply(self.isa, now, &tile);
                    }
                }
            }
        }
    }
}

/// Writes `count` keys from position `from` as columns: `keys[element * PANEL + key]`. `wide` holds widened keys of
/// other types.
///
/// # Safety
/// The positions are written, and no other code writes them meanwhile; `isa` is of this machine.
unsafe fn transpose_keys(
    isa: Isa,
    cache: &HeadCache<'_>,
    from: usize,
    count: usize,
    wide: &mut Vec<f32>,
    keys: &mut [f32],
) {
    let dim = cache.layout.head_dim;
    let mut first = 0;
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 && dim.is_multiple_of(16) {
        let in_place = cache.layout.dtype == KvDtype::F32;
        if !in_place {
            resize(wide, 16 * dim);
        }
        while first + 16 <= count {
            let rows: [*const f32; 16] = if in_place {
                std::array::from_fn(|key| {
                    cache.vector(KvHalf::Keys, from + first + key).cast_const().cast::<f32>()
                })
            } else {
                // SAFETY: the caller's contract.
                unsafe { cache.load(isa, KvHalf::Keys, from + first, 16, dim, wide) };
                std::array::from_fn(|key| wide[key * dim..].as_ptr())
            };
            for element in (0..dim).step_by(16) {
                // SAFETY: each key has `head_dim` elements, and `keys` has a row of PANEL for each of them.
                unsafe { transpose_16(&rows, element, keys[element * PANEL + first..].as_mut_ptr(), PANEL) };
            }
            first += 16;
        }
    }
    resize(wide, dim);
    for key in first..count {
        // SAFETY: the caller's contract.
        unsafe { cache.load(isa, KvHalf::Keys, from + key, 1, dim, wide) };
        for (element, value) in wide[..dim].iter().enumerate() {
            keys[element * PANEL + key] = *value;
        }
    }
    if count < PANEL {
        for column in keys.chunks_exact_mut(PANEL).take(dim) {
            column[count..].fill(0.0);
        }
    }
}

/// Transposes 16 rows of 16 values from `start`; output rows are `stride` values apart.
///
/// # Safety
/// This machine has AVX-512, each row has `start + 16` values, and `out` has 16 rows.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn transpose_16(rows: &[*const f32; 16], start: usize, out: *mut f32, stride: usize) {
    use std::arch::x86_64::{_mm512_loadu_ps, _mm512_setzero_ps, _mm512_storeu_ps};
    let mut values = [_mm512_setzero_ps(); 16];
    // SAFETY: the caller's contract.
    unsafe {
        for (values, row) in values.iter_mut().zip(rows) {
            *values = _mm512_loadu_ps(row.add(start));
        }
        for (index, column) in few::transposed(values).into_iter().enumerate() {
            _mm512_storeu_ps(out.add(index * stride), column);
        }
    }
}

/// Makes the buffer at least this long. It never shrinks.
fn resize(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sink_takes_its_share_of_the_softmax_of_its_head() {
        let sinks = [-2.0_f32, 0.5, 3.0];
        for (window, cap) in [(None, None), (Some(5), None), (None, Some(2.0_f32))] {
            let shape = QueryShape {
                isa: Isa::detect(),
                group: 3,
                factor: 0.3,
                cap,
                sinks: Some(&sinks[..]),
                window,
                bf16: None,
            };
            for (head, sink) in sinks.into_iter().enumerate() {
                let mut scores: Vec<f32> = (0..20).map(|key| (key * 7 % 11) as f32 - 4.0).collect();
                let seen = window.map_or(0, |window| 18 - window)..18;
                let numerator = |score: f32| {
                    let x = f64::from(score) * f64::from(shape.factor);
                    cap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh()).exp()
                };
                let of_keys: f64 = scores[seen.clone()].iter().map(|score| numerator(*score)).sum();
                let whole = of_keys + f64::from(sink).exp();
                let wanted: Vec<f64> = scores.iter().map(|score| numerator(*score) / whole).collect();
                let sum = f64::from(shape.softmax(&mut scores, 0, 18, head));
                for (key, (score, wanted)) in scores.into_iter().zip(wanted).enumerate() {
                    let wanted = if seen.contains(&key) { wanted } else { 0.0 };
                    assert!((f64::from(score) / sum - wanted).abs() < 1e-6, "head {head}, key {key}");
                }
            }
        }
    }
}
