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

impl QueryShape<'_> {
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
        let score_stride = context.next_multiple_of(CHUNK) + 16;
        scratch.fit_pairs(cache, rows, context, score_stride);
        let inputs = |values: &mut Vec<f32>, stride, packed: &mut PackedBuffer| ProductInputs {
            wide: Rows { base: SharedPtr(values.as_mut_ptr()), stride },
            bf16: Some((unit, packed.share())),
            integers: None,
        };
        let super::AttentionScratch { queries, scores, sums, values, outputs, pairs, .. } = scratch;
        let PairScratch { queries: packed_queries, weights: packed_weights, rounded, panels } = pairs;
        let attention = PairAttention {
            shape: self,
            unit,
            cache,
            start,
            rows,
            begin: self.begin(cache, start),
            context,
            queries: inputs(queries, dim, packed_queries),
            weights: inputs(scores, score_stride, packed_weights),
        };
        // SAFETY: the caller vouches for queries, keys, values and outputs; all other ranges are inside buffers that
        // have just been sized and belong to this worker.
        unsafe {
            attention.round_queries(query);
            attention.multiply_keys(values, rounded, panels);
            attention.softmax(sums);
            attention.multiply_values(values, rounded, panels, outputs);
            attention.scale_outputs(outputs, sums, output);
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
        let begin = self.begin(cache, context - 1);
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
            scores(cache, begin..context, rows, queries, &mut scratch.scores, stride);
            for (row, weights) in weights.chunks_exact_mut(padded_context).take(rows).enumerate() {
                let scores = &mut scratch.scores[row * stride..][..padded_context];
                scratch.sums[row] = self.softmax(scores, begin, context, row);
                bf16::round_rows(self.isa, ORDER, scores, padded_context, weights);
            }
            values(cache, begin..context, rows, weights, padded_context, &mut scratch.outputs, dim);
            for row in 0..rows {
                let out = std::slice::from_raw_parts_mut(output(row), dim);
                let numerators = &scratch.outputs[row * dim..][..dim];
                vector::scale_into(self.isa, numerators, 1.0 / scratch.sums[row], out);
            }
        }
    }
}

impl super::AttentionScratch {
    /// Makes space for a unit in this mode.
    fn fit_pairs(&mut self, cache: &HeadCache<'_>, rows: usize, context: usize, score_stride: usize) {
        let dim = cache.layout.head_dim;
        let (padded_dim, padded_context) = (dim.next_multiple_of(PANEL), context.next_multiple_of(CHUNK));
        resize(&mut self.queries, rows * dim);
        resize(&mut self.scores, rows * score_stride);
        resize(&mut self.sums, rows);
        resize(&mut self.values, RUN * padded_dim);
        resize(&mut self.outputs, rows * padded_dim);
        let pairs = &mut self.pairs;
        pairs.queries.reuse(rows, dim);
        pairs.weights.reuse(rows, padded_context);
        if pairs.rounded.len() < RUN * padded_dim {
            pairs.rounded.resize(RUN * padded_dim, 0);
        }
        let words = padded_dim / PANEL * (RUN / CHUNK) * PANEL_CHUNK / 2;
        if pairs.panels.len() < words {
            pairs.panels = AlignedBuffer::zeroed(words);
        }
    }
}

/// The passes of one unit in this mode.
struct PairAttention<'a> {
    shape: &'a QueryShape<'a>,
    unit: bf16::Bf16Unit,
    cache: &'a HeadCache<'a>,
    /// Position of the first query.
    start: usize,
    /// Query positions, times the heads of the group.
    rows: usize,
    /// The first key position that is read.
    begin: usize,
    /// The key positions' end.
    context: usize,
    queries: ProductInputs,
    /// Scores, and then softmax weights.
    weights: ProductInputs,
}

/// The safety contract of each pass is that of [`QueryShape::attend`], with buffers of
/// [`fit_pairs`](super::AttentionScratch::fit_pairs) that belong to this worker.
impl PairAttention<'_> {
    /// Number of keys that a row sees.
    #[inline(always)]
    fn visible(&self, row: usize) -> usize {
        self.start + row / self.shape.group + 1
    }

    /// With many rows the arithmetic takes longer than the memory accesses.
    #[inline(always)]
    fn waits_for_memory(&self) -> bool {
        self.rows <= MAX_ROWS
    }

    /// Before pass 1: copies the queries and rounds them.
    ///
    /// # Safety
    /// See the impl.
    #[inline(always)]
    unsafe fn round_queries(&self, query: impl Fn(usize, usize) -> *const f32) {
        let (dim, group) = (self.cache.layout.head_dim, self.shape.group);
        for row in 0..self.rows {
            // SAFETY: the caller's contract.
            unsafe {
                let values = std::slice::from_raw_parts_mut(self.queries.wide.base.at(row * dim), dim);
                values.copy_from_slice(std::slice::from_raw_parts(query(row / group, row % group), dim));
                self.queries.finish(self.shape.isa, row, 0, values);
            }
        }
    }

    /// Pass 1: scores of all rows, panel by panel of keys.
    ///
    /// # Safety
    /// See the impl.
    #[inline(always)]
    unsafe fn multiply_keys(&self, wide: &mut [f32], rounded: &mut [u16], panel: &mut [u32]) {
        let &Self { unit, cache, start, rows, begin, context, .. } = self;
        let (isa, group, dim) = (self.shape.isa, self.shape.group, cache.layout.head_dim);
        let (scores, waits) = (self.weights.wide, self.waits_for_memory());
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
            let rounded = &mut rounded[..keys * dim];
            // SAFETY: the caller's contract.
            unsafe {
                cache.load_rounded(isa, KvHalf::Keys, from, dim, wide, rounded, |values, out| {
                    bf16::round_rows(isa, unit, values, dim, out);
                });
                pack_keys(isa, unit, rounded, dim, panel);
                // Rows are in the order of their positions, so these keys may not be visible to the first rows.
                let first = (from.saturating_sub(start) * group / TILE_ROWS * TILE_ROWS).min(rows);
                let operands = Bf16Operands {
                    c: scores.base.at(first * scores.stride + from),
                    c_stride: scores.stride,
                    ..Bf16Operands::from(&self.queries, first, 0, panel.as_ptr().cast(), dim)
                };
                bf16::multiply(isa, unit, rows - first, &operands);
            }
        }
    }

    /// Pass 2: scores become rounded weights, and `sums` their sums.
    ///
    /// # Safety
    /// See the impl.
    #[inline(always)]
    unsafe fn softmax(&self, sums: &mut [f32]) {
        let (isa, padded_context) = (self.shape.isa, self.context.next_multiple_of(CHUNK));
        let Rows { base, stride } = self.weights.wide;
        for (row, sum) in sums.iter_mut().enumerate().take(self.rows) {
            // SAFETY: the caller's contract.
            unsafe {
                let scores = std::slice::from_raw_parts_mut(base.at(row * stride), padded_context);
                *sum = self.shape.softmax(scores, self.begin, self.visible(row), row % self.shape.group);
                self.weights.finish(isa, row, self.begin, &mut scores[self.begin..]);
            }
        }
    }

    /// Pass 3: weighted sums of the values, run by run of positions.
    ///
    /// # Safety
    /// See the impl.
    #[inline(always)]
    unsafe fn multiply_values(
        &self,
        wide: &mut [f32],
        rounded: &mut [u16],
        panels: &mut [u32],
        outputs: &mut [f32],
    ) {
        let &Self { unit, cache, begin, context, .. } = self;
        let (isa, waits) = (self.shape.isa, self.waits_for_memory());
        let padded_dim = cache.layout.head_dim.next_multiple_of(PANEL);
        for from in (begin..context).step_by(RUN) {
            let tokens = RUN.min(context - from);
            if waits && from + PANEL < context {
                cache.request(KvHalf::Values, from + PANEL, (from + PANEL + RUN).min(context));
            }
            let rounded = &mut rounded[..tokens * padded_dim];
            // SAFETY: the caller's contract.
            unsafe {
                cache.load_rounded(isa, KvHalf::Values, from, padded_dim, wide, rounded, |values, out| {
                    bf16::round_into(isa, values, out);
                });
            }
            let panel_words = tokens.div_ceil(CHUNK) * PANEL_CHUNK / 2;
            let packed = panels.chunks_exact_mut(panel_words).take(padded_dim / PANEL);
            for (panel, packed) in packed.enumerate() {
                pack_values(isa, unit, rounded, padded_dim, panel * PANEL, packed);
            }
            // SAFETY: the caller's contract.
            unsafe { self.add_run(from..from + tokens, panels, panel_words, outputs) };
        }
    }

    /// Adds the weighted values of one run of positions, whose panels are `panel_words` words apart.
    ///
    /// # Safety
    /// See the impl.
    #[inline(always)]
    unsafe fn add_run(
        &self,
        run: std::ops::Range<usize>,
        panels: &[u32],
        panel_words: usize,
        outputs: &mut [f32],
    ) {
        let padded_dim = self.cache.layout.head_dim.next_multiple_of(PANEL);
        let (from, tokens) = (run.start, run.len());
        for row in (0..self.rows).step_by(ROW_STEP) {
            let now = ROW_STEP.min(self.rows - row);
            let depth = self.visible(row + now - 1).saturating_sub(from).min(tokens);
            if depth == 0 {
                continue;
            }
            for panel in 0..padded_dim / PANEL {
                let packed = panels[panel * panel_words..].as_ptr();
                // Whole chunks: the weights beyond the row's own position are zero.
                let depth = depth.next_multiple_of(CHUNK);
                // SAFETY: the caller's contract.
                unsafe {
                    let operands = Bf16Operands {
                        c: outputs[row * padded_dim + panel * PANEL..].as_mut_ptr(),
                        c_stride: padded_dim,
                        accumulate: from > self.begin,
                        ..Bf16Operands::from(&self.weights, row, from, packed.cast(), depth)
                    };
                    bf16::multiply(self.shape.isa, self.unit, now, &operands);
                }
            }
        }
    }

    /// After pass 3: divides by the sums of the weights.
    ///
    /// # Safety
    /// See the impl.
    #[inline(always)]
    unsafe fn scale_outputs(
        &self,
        numerators: &[f32],
        sums: &[f32],
        output: impl Fn(usize, usize) -> *mut f32,
    ) {
        let (dim, group) = (self.cache.layout.head_dim, self.shape.group);
        for (row, sum) in sums.iter().enumerate().take(self.rows) {
            // SAFETY: the caller's contract.
            let out = unsafe { std::slice::from_raw_parts_mut(output(row / group, row % group), dim) };
            let numerators = &numerators[row * dim.next_multiple_of(PANEL)..][..dim];
            vector::scale_into(self.shape.isa, numerators, 1.0 / *sum, out);
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
