//! Attention in bfloat16 mode: the same three passes with the products of `bf16`.
//!
//! Queries, keys, softmax weights and values are rounded to bf16 where they are multiplied. Scores, the softmax and its
//! sum are f32. Chunks of the third pass are 32 key positions counted from 0. A key that is not visible to a row has
//! weight zero, which adds nothing to any chain. A row's result therefore depends on its sequence only.

use super::super::arena::AlignedBuffer;
use super::super::bf16::{
    self, Bf16Operands, CHUNK, PANEL_CHUNK, PackedBuffer, ProductInputs, ROW_STEP, TILE_ROWS,
};
use super::super::isa::for_each_isa;
use super::super::rows::{Rows, SharedPtr};
use super::*;

/// Key positions whose values are packed at a time: 32 KiB for a head of 64.
const RUN: usize = 256;
/// Words of a chunk.
const WORDS: usize = CHUNK / 2;

const _: () = assert!(RUN.is_multiple_of(CHUNK) && PANEL == CHUNK);

/// Working memory of one worker for a unit in this mode.
#[derive(Debug)]
pub(super) struct PairScratch {
    queries: PackedBuffer,
    weights: PackedBuffer,
    /// Keys or values, rounded.
    rounded: Vec<u16>,
    /// The same as words.
    panels: AlignedBuffer<u32>,
}

impl Default for PairScratch {
    fn default() -> Self {
        Self {
            queries: PackedBuffer::default(),
            weights: PackedBuffer::default(),
            rounded: Vec::new(),
            panels: AlignedBuffer::zeroed(0),
        }
    }
}

impl QueryShape {
    /// As [`QueryShape::attend`].
    ///
    /// # Safety
    /// As there.
    #[allow(clippy::too_many_arguments, reason = "the coordinates of one unit")]
    pub(super) unsafe fn attend_in_bf16(
        &self,
        unit: bf16::Bf16Unit,
        cache: &HeadCache<'_>,
        start: usize,
        count: usize,
        scratch: &mut super::AttentionScratch,
        query: impl Fn(usize, usize) -> *const f32,
        output: impl Fn(usize, usize) -> *mut f32,
    ) {
        let (dim, group) = (cache.layout.head_dim, self.group);
        let (rows, context) = (count * group, start + count);
        #[cfg(target_arch = "x86_64")]
        if count == 1 && few::in_bf16::suits(self.isa, unit, cache, rows) {
            // SAFETY: the caller's contract.
            unsafe {
                self.attend_one_in_bf16(cache, context, scratch, |row| query(0, row), |row| output(0, row))
            };
            return;
        }
        let (padded_dim, padded_context) = (dim.next_multiple_of(PANEL), context.next_multiple_of(CHUNK));
        let score_stride = padded_context + 16;
        let visible = |row: usize| start + row / group + 1;
        resize(&mut scratch.queries, rows * dim);
        resize(&mut scratch.scores, rows * score_stride);
        resize(&mut scratch.sums, rows);
        resize(&mut scratch.values, RUN * padded_dim);
        resize(&mut scratch.outputs, rows * padded_dim);
        let pairs = &mut scratch.pairs;
        pairs.queries.reuse(rows, dim);
        pairs.weights.reuse(rows, padded_context);
        if pairs.rounded.len() < RUN * padded_dim {
            pairs.rounded.resize(RUN * padded_dim, 0);
        }
        let panels = padded_dim / PANEL;
        let words = panels * (RUN / CHUNK) * PANEL_CHUNK / 2;
        if pairs.panels.len() < words {
            pairs.panels = AlignedBuffer::zeroed(words);
        }
        let inputs = |values: &mut Vec<f32>, stride, packed: &mut PackedBuffer| ProductInputs {
            wide: Rows { base: SharedPtr(values.as_mut_ptr()), stride },
            bf16: Some((unit, packed.share())),
        };
        let queries = inputs(&mut scratch.queries, dim, &mut pairs.queries);
        let weights = inputs(&mut scratch.scores, score_stride, &mut pairs.weights);
        let scores = weights.wide.base;
        let waits = rows <= MAX_ROWS;
        // SAFETY: the caller vouches for queries, keys, values and outputs; all other ranges are inside buffers that
        // have just been sized and belong to this worker.
        unsafe {
            for row in 0..rows {
                let values = std::slice::from_raw_parts_mut(queries.wide.base.at(row * dim), dim);
                values.copy_from_slice(std::slice::from_raw_parts(query(row / group, row % group), dim));
                queries.finish(self.isa, row, 0, values);
            }
            if waits {
                cache.request(KvHalf::Keys, 0, context);
            }
            for from in (0..context).step_by(PANEL) {
                let keys = PANEL.min(context - from);
                if waits && from + PANEL < context {
                    cache.request(KvHalf::Keys, from + PANEL, context);
                } else if waits {
                    cache.request(KvHalf::Values, 0, context);
                }
                let rounded = &mut pairs.rounded[..keys * dim];
                let wide = &mut scratch.values;
                cache.load_rounded(self.isa, KvHalf::Keys, from, dim, wide, rounded, |values, out| {
                    bf16::round_rows(self.isa, unit, values, dim, out);
                });
                pack_keys(self.isa, unit, rounded, dim, &mut pairs.panels);
                // Rows are in the order of their positions, so these keys may not be visible to the first rows.
                let first = (from.saturating_sub(start) * group / TILE_ROWS * TILE_ROWS).min(rows);
                let operands = Bf16Operands {
                    c: scores.at(first * score_stride + from),
                    c_stride: score_stride,
                    ..Bf16Operands::from(&queries, first, 0, pairs.panels.as_ptr().cast(), dim)
                };
                bf16::multiply(self.isa, unit, rows - first, &operands);
            }
            for row in 0..rows {
                let scores = std::slice::from_raw_parts_mut(scores.at(row * score_stride), padded_context);
                let (seen, later) = scores.split_at_mut(visible(row));
                scratch.sums[row] = vector::softmax_numerators(self.isa, seen, self.factor);
                later.fill(0.0);
                weights.finish(self.isa, row, 0, scores);
            }
            for from in (0..context).step_by(RUN) {
                let tokens = RUN.min(context - from);
                if waits && from + PANEL < context {
                    cache.request(KvHalf::Values, from + PANEL, (from + PANEL + RUN).min(context));
                }
                let rounded = &mut pairs.rounded[..tokens * padded_dim];
                let wide = &mut scratch.values;
                cache.load_rounded(
                    self.isa,
                    KvHalf::Values,
                    from,
                    padded_dim,
                    wide,
                    rounded,
                    |values, out| {
                        bf16::round_into(self.isa, values, out);
                    },
                );
                let chunks = tokens.div_ceil(CHUNK);
                let panel_words = chunks * PANEL_CHUNK / 2;
                for (panel, packed) in pairs.panels.chunks_exact_mut(panel_words).take(panels).enumerate() {
                    pack_values(self.isa, unit, rounded, padded_dim, panel * PANEL, packed);
                }
                for row in (0..rows).step_by(ROW_STEP) {
                    let now = ROW_STEP.min(rows - row);
                    let depth = visible(row + now - 1).saturating_sub(from).min(tokens);
                    if depth == 0 {
                        continue;
                    }
                    for panel in 0..panels {
                        let packed = pairs.panels[panel * panel_words..].as_ptr();
                        // Whole chunks: the weights beyond the row's own position are zero.
                        let depth = depth.next_multiple_of(CHUNK);
                        let operands = Bf16Operands {
                            c: scratch.outputs[row * padded_dim + panel * PANEL..].as_mut_ptr(),
                            c_stride: padded_dim,
                            accumulate: from > 0,
                            ..Bf16Operands::from(&weights, row, from, packed.cast(), depth)
                        };
                        bf16::multiply(self.isa, unit, now, &operands);
                    }
                }
            }
            for row in 0..rows {
                let out = std::slice::from_raw_parts_mut(output(row / group, row % group), dim);
                let numerators = &scratch.outputs[row * padded_dim..][..dim];
                vector::scale_into(self.isa, numerators, 1.0 / scratch.sums[row], out);
            }
        }
    }

    /// One position, for a cache that [`few::in_bf16`] supports.
    ///
    /// # Safety
    /// As [`Self::attend_in_bf16`].
    #[cfg(target_arch = "x86_64")]
    unsafe fn attend_one_in_bf16(
        &self,
        cache: &HeadCache<'_>,
        context: usize,
        scratch: &mut super::AttentionScratch,
        query: impl Fn(usize) -> *const f32,
        output: impl Fn(usize) -> *mut f32,
    ) {
        use few::in_bf16::{ORDER, scores, values};

        let (dim, rows) = (cache.layout.head_dim, self.group);
        let padded_context = context.next_multiple_of(CHUNK);
        let stride = padded_context + 16;
        resize(&mut scratch.scores, rows * stride);
        resize(&mut scratch.sums, rows);
        resize(&mut scratch.outputs, rows * dim);
        let rounded = &mut scratch.pairs.rounded;
        if rounded.len() < rows * (dim + padded_context) {
            rounded.resize(rows * (dim + padded_context), 0);
        }
        let (queries, weights) = rounded.split_at_mut(rows * dim);
        // SAFETY: the caller vouches for queries, keys, values and outputs; slots after the context are memory of the
        // pool, which no other code writes while the sequence is computed.
        unsafe {
            for (row, rounded) in queries.chunks_exact_mut(dim).enumerate() {
                let query = std::slice::from_raw_parts(query(row), dim);
                bf16::round_rows(self.isa, ORDER, query, dim, rounded);
            }
            scores(cache, context, rows, queries, &mut scratch.scores, stride);
            for (row, weights) in weights.chunks_exact_mut(padded_context).take(rows).enumerate() {
                let scores = &mut scratch.scores[row * stride..][..padded_context];
                let (seen, later) = scores.split_at_mut(context);
                scratch.sums[row] = vector::softmax_numerators(self.isa, seen, self.factor);
                later.fill(0.0);
                bf16::round_rows(self.isa, ORDER, scores, padded_context, weights);
            }
            values(cache, context, rows, (weights, padded_context), (&mut scratch.outputs, dim));
            for row in 0..rows {
                let out = std::slice::from_raw_parts_mut(output(row), dim);
                let numerators = &scratch.outputs[row * dim..][..dim];
                vector::scale_into(self.isa, numerators, 1.0 / scratch.sums[row], out);
            }
        }
    }
}

impl HeadCache<'_> {
    /// Reads vectors from position `from` on and rounds them into rows of `stride` values until `rounded` is full.
    /// Vectors that are already f32 with this stride are not copied to `wide` first.
    ///
    /// # Safety
    /// As [`HeadCache::load`]; the positions are in the cache, and `wide` has as many values as `rounded`.
    #[allow(clippy::too_many_arguments, reason = "source, destination and conversion")]
    unsafe fn load_rounded(
        &self,
        isa: Isa,
        half: KvHalf,
        from: usize,
        stride: usize,
        wide: &mut [f32],
        rounded: &mut [u16],
        round: impl Fn(&[f32], &mut [u16]),
    ) {
        let KvLayout { head_dim, block_tokens, dtype, .. } = *self.layout;
        if dtype != KvDtype::F32 || stride != head_dim {
            // SAFETY: the caller's contract.
            unsafe { self.load(isa, half, from, rounded.len() / stride, stride, wide) };
            round(&wide[..rounded.len()], rounded);
            return;
        }
        let (mut position, mut rest) = (from, rounded);
        while !rest.is_empty() {
            let run = (block_tokens - position % block_tokens) * head_dim;
            let (out, later) = rest.split_at_mut(run.min(rest.len()));
            // SAFETY: the vectors of a head are contiguous in a block; the caller's contract for the rest.
            let values = unsafe {
                std::slice::from_raw_parts(self.vector(half, position).cast_const().cast(), out.len())
            };
            round(values, out);
            position += run / head_dim;
            rest = later;
        }
    }
}

/// Packs up to 32 keys of `dim` elements, the columns of a panel. Columns without a key are zero. Whole chunks of keys
/// are in the order of the unit.
fn pack_keys(isa: Isa, unit: bf16::Bf16Unit, keys: &[u16], dim: usize, panel: &mut [u32]) {
    let count = keys.len() / dim;
    // A line has a word for each of 16 keys.
    let between = (unit.line(1, 0) - unit.line(0, 0)) * TILE_ROWS;
    for (chunk, packed) in panel.chunks_exact_mut(PANEL_CHUNK / 2).take(dim.div_ceil(CHUNK)).enumerate() {
        let elements = chunk * CHUNK..dim.min((chunk + 1) * CHUNK);
        for half in 0..2 {
            let first = half * TILE_ROWS;
            let packed = &mut packed[unit.line(0, half) * TILE_ROWS..];
            #[cfg(target_arch = "x86_64")]
            if isa == Isa::Avx512 && elements.len() == CHUNK && first + TILE_ROWS <= count {
                let rows = std::array::from_fn(|key| {
                    keys[(first + key) * dim..][elements.clone()].as_ptr().cast::<f32>()
                });
                // SAFETY: 16 rows of 16 words each way; shuffles do not interpret the values that they move.
                unsafe { transpose_16(&rows, 0, packed.as_mut_ptr().cast(), between) };
                continue;
            }
            let mut words = [[0_u32; WORDS]; TILE_ROWS];
            for (key, words) in (first..count).zip(&mut words) {
                let key = &keys[key * dim..][elements.clone()];
                match key.as_array::<CHUNK>() {
                    Some(ordered) => *words = bf16::words(ordered),
                    None => bf16::to_words(unit, key, words),
                }
            }
            for (key, words) in words.iter().enumerate() {
                for (word, bits) in words.iter().enumerate() {
                    packed[word * between + key] = *bits;
                }
            }
        }
    }
}

/// Packs the columns `column .. column + 32` of rows of values; positions are the inputs of the panel.
fn pack_values(
    isa: Isa,
    unit: bf16::Bf16Unit,
    values: &[u16],
    stride: usize,
    column: usize,
    panel: &mut [u32],
) {
    for_each_isa! {
        fn pack(unit: bf16::Bf16Unit, values: &[u16], stride: usize, column: usize, order: &[[usize; 2]; WORDS], panel: &mut [u32]) {
            for (chunk, packed) in panel.chunks_exact_mut(PANEL_CHUNK / 2).enumerate() {
                for half in 0..2 {
                    for (word, inputs) in order.iter().enumerate() {
                        let row = |input: usize| {
                            let start = (chunk * CHUNK + input) * stride + column + half * TILE_ROWS;
                            values.get(start..start + TILE_ROWS).unwrap_or(&[0; TILE_ROWS])
                        };
                        let (lower, upper) = (row(inputs[0]), row(inputs[1]));
                        let packed = &mut packed[unit.line(word, half) * TILE_ROWS..][..TILE_ROWS];
                        for ((packed, lower), upper) in packed.iter_mut().zip(lower).zip(upper) {
                            *packed = u32::from(*lower) | u32::from(*upper) << 16;
                        }
                    }
                }
            }
        }
    }
    let mut order = [[0; 2]; WORDS];
    for input in 0..CHUNK {
        let position = unit.position(input);
        order[position / 2][position % 2] = input;
    }
    pack(isa, unit, values, stride, column, &order, panel);
}
