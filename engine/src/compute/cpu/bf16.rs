//! Products in bfloat16: both sides are bf16, sums are f32.
//!
//! ```text
//!   C[m][0..32] (=|+=)  Σ over chunks of 32 inputs of ( Σ even inputs a·b  +  Σ odd inputs a·b )
//! ```
//!
//! The order is that of AMX's `tdpbf16ps`. Within a chunk there is one chain over the 16 even inputs and one over the
//! 16 odd ones, each from zero. Their sum is added to the output. All units keep this order for any number of rows, so
//! that prefill, decode, any batch and any machine give the same bits. A product of two bf16 is exact in f32, so a
//! fused and a separate addition are the same. One exception: AMX and AVX512-BF16 treat magnitudes below 2^-126 as
//! zero, the others keep them. Logits are far larger.
//!
//! ```text
//!   panel of 32 outputs     per chunk: 32 lines, 2 KiB; a line is a word of two inputs for each of 16 outputs
//!   rows of activations     per 16 rows and chunk: 16 rows × 32 inputs, 1 KiB
//! ```
//!
//! The unit determines which two inputs share a word ([`Bf16Unit::position`]) and the order of the lines
//! ([`Bf16Unit::line`]). Inputs are padded with zeros to whole chunks.
#![allow(
    unsafe_code,
    reason = "vector intrinsics and tiles on raw pointers; the contract is on `Bf16Operands`"
)]

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod dot;
mod integer_rows;
mod rounding;
mod widened;

pub(super) use self::integer_rows::{
    BIAS, FIRST_BIAS, GROUP, GROUP_WORDS, IntegerBuffer, IntegerRows, SCALE, SUM,
};
pub(super) use self::rounding::{round, round_into, round_rows, to_words, words};
use self::rounding::{round_chunks, round_in_place};
use super::arena::AlignedBuffer;
use super::isa::Isa;
use super::kernel::PANEL;
use super::rows::{Rows, SharedPtr};

/// Inputs of a chunk: as many as a panel has columns, so that a panel of sums is a chunk of the next product.
pub(super) const CHUNK: usize = 32;
const _: () = assert!(CHUNK == PANEL);
/// Values of a chunk of a panel.
pub(super) const PANEL_CHUNK: usize = CHUNK * PANEL;
/// Values of a line of a panel: a word for each output of one half.
pub(super) const LINE_VALUES: usize = 2 * TILE_ROWS;
/// Rows that are stored together.
pub(super) const TILE_ROWS: usize = 16;
/// Rows that one pass over a panel serves on every unit. Items begin at multiples of it.
pub(super) const ROW_STEP: usize = 2 * TILE_ROWS;

/// The unit that multiplies bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bf16Unit {
    /// Tiles: AMX-BF16.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// `vdpbf16ps`: AVX512-BF16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// f32 multiply-adds of the instruction set on widened values: as fast as f32, with half of the memory.
    Widened,
}

impl Bf16Unit {
    /// The best unit of this machine. AVX512-BF16 ranks below AMX and above f32: on Zen 4 it is twice as fast as f32,
    /// on Xeons with AMX half as fast.
    #[must_use]
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// All units of this machine, the best first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            let avx512 = Isa::available().contains(&Isa::Avx512);
            let dot = avx512 && is_x86_feature_detected!("avx512bf16");
            [(avx512 && amx::permitted(), Self::Amx), (dot, Self::Avx512Bf16), (true, Self::Widened)]
                .into_iter()
                .filter_map(|(has, unit)| has.then_some(unit))
                .collect()
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            vec![Self::Widened]
        }
    }

    /// The name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => "amx",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => "avx512_bf16",
            Self::Widened => "widened",
        }
    }

    /// Position of input `input` of a chunk among the chunk's 32 values of a row.
    ///
    /// `vdpbf16ps` adds the upper value of a word and then the lower one to one chain. Its words therefore contain two
    /// inputs of the same parity, the first of them in the upper half.
    #[inline(always)]
    pub(super) const fn position(self, input: usize) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => input,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => {
                let (word, parity, second) = (input / 4, input % 2, input % 4 / 2);
                2 * (CHUNK / 4 * parity + word) + 1 - second
            }
            Self::Widened => input,
        }
    }

    /// Position of the line of word `word` and of one half of the outputs among the 32 lines of a panel's chunk.
    ///
    /// Tiles need 16 words of a half side by side. Vectors load both halves of a word at once, and read a panel
    /// strictly forward.
    #[inline(always)]
    pub(super) const fn line(self, word: usize, half: usize) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => half * CHUNK / 2 + word,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => 2 * word + half,
            Self::Widened => half * CHUNK / 2 + word,
        }
    }

    /// The input of a chunk at each position, the inverse of [`Self::position`]. `None` if every input keeps its
    /// position.
    pub(super) fn order(self) -> Option<&'static [u16; CHUNK]> {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => Some(&dot::ORDER),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => None,
            Self::Widened => None,
        }
    }

    /// Whether activations are packed. The widened unit reads them as rounded f32.
    pub(super) fn packs(self) -> bool {
        self != Self::Widened
    }
}

/// Values of a panel with this number of inputs.
pub(super) fn panel_len(inputs: usize) -> usize {
    inputs.div_ceil(CHUNK) * PANEL_CHUNK
}

/// Position of the weight of `column` (below [`PANEL`]) for `input` in its panel.
#[inline(always)]
pub(super) fn panel_position(unit: Bf16Unit, input: usize, column: usize) -> usize {
    let position = unit.position(input % CHUNK);
    let (half, column) = (column / TILE_ROWS, column % TILE_ROWS);
    input / CHUNK * PANEL_CHUNK + unit.line(position / 2, half) * LINE_VALUES + 2 * column + position % 2
}

/// Inputs of a product.
///
/// Activations are computed in f32. In bfloat16 mode and with integers, the code that has computed a part of a row calls
/// [`Self::finish`] on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProductInputs {
    pub(super) wide: Rows,
    /// The unit, and the packed rows if the unit packs.
    pub(super) bf16: Option<(Bf16Unit, PackedRows)>,
    /// The rows rounded to 8 bits, if products with integers are computed in integers.
    pub(super) integers: Option<IntegerRows>,
}

/// Rows of bf16 in the layout of the module documentation.
#[derive(Clone, Copy, Debug)]
pub(super) struct PackedRows {
    base: SharedPtr<u16>,
    /// Values of [`TILE_ROWS`] rows.
    tile: usize,
}

impl ProductInputs {
    /// The rows from `row` on.
    ///
    /// # Safety
    /// The row is inside the buffers. If the unit packs, it is a multiple of [`ROW_STEP`].
    pub(super) unsafe fn after(&self, row: usize) -> Self {
        // SAFETY: the caller's contract; without packed rows their tile is 0.
        unsafe {
            let wide = Rows { base: SharedPtr(self.wide.base.at(row * self.wide.stride)), ..self.wide };
            let packed = |packed: PackedRows| PackedRows {
                base: SharedPtr(packed.base.at(row / TILE_ROWS * packed.tile)),
                ..packed
            };
            Self {
                wide,
                bf16: self.bf16.map(|(unit, rows)| (unit, packed(rows))),
                integers: self.integers.map(|rows| rows.after(row)),
            }
        }
    }

    /// Makes the values of columns `column ..` of row `row` final.
    ///
    /// # Safety
    /// Row and columns are inside the buffers, and no other code uses these values meanwhile; `isa` is of this machine.
    /// For integers the values are whole groups, but for the last ones of a row.
    pub(super) unsafe fn finish(&self, isa: Isa, row: usize, column: usize, values: &mut [f32]) {
        if let Some(integers) = self.integers {
            // SAFETY: the caller's contract.
            unsafe { integers.finish(isa, row, column, values) };
        }
        let Some((unit, packed)) = self.bf16 else { return };
        if !unit.packs() {
            round_in_place(isa, values);
            return;
        }
        // SAFETY: the row is inside the buffer.
        let row = unsafe { packed.base.at(row / TILE_ROWS * packed.tile + row % TILE_ROWS * CHUNK) };
        // The rest of a started chunk, whole chunks, and a partial chunk.
        let head = (column.next_multiple_of(CHUNK) - column).min(values.len());
        let (head, rest) = values.split_at(head);
        let (whole, tail) = rest.as_chunks::<CHUNK>();
        let first_whole = column.next_multiple_of(CHUNK);
        // SAFETY: the chunks of this row have `CHUNK` values each, and are 16 rows apart.
        unsafe {
            let chunk = |input: usize| row.wrapping_add(input / CHUNK * (TILE_ROWS * CHUNK));
            finish_part(isa, unit, head, column % CHUNK, chunk(column));
            round_chunks(isa, Some(unit), whole, chunk(first_whole), TILE_ROWS * CHUNK);
            finish_part(isa, unit, tail, 0, chunk(first_whole + whole.len() * CHUNK));
        }
    }
}

/// Rounds up to a chunk of values. The first one is input `first` of the row's chunk.
///
/// # Safety
/// The chunk has [`CHUNK`] values, and no other code uses them. `values` may be empty.
unsafe fn finish_part(isa: Isa, unit: Bf16Unit, values: &[f32], first: usize, chunk: *mut u16) {
    let mut rounded = [0; CHUNK];
    let rounded = &mut rounded[..values.len()];
    round_into(isa, values, rounded);
    for (input, value) in (first..).zip(rounded) {
        // SAFETY: the caller's contract.
        unsafe { chunk.add(unit.position(input)).write(*value) };
    }
}

impl ProductInputs {
    /// Makes the values of columns `column .. column + width` of rows `row ..` final. `values` has [`PANEL`] values of
    /// each row, with zeros beyond the width.
    ///
    /// # Safety
    /// As [`Self::finish`]; the row is a multiple of [`TILE_ROWS`], the column one of [`PANEL`].
    pub(super) unsafe fn finish_panel(
        &self,
        isa: Isa,
        row: usize,
        column: usize,
        width: usize,
        values: &mut [f32],
    ) {
        let Some((unit, packed)) = self.bf16 else { return };
        for (tile, values) in values.chunks_mut(TILE_ROWS * PANEL).enumerate() {
            let row = row + tile * TILE_ROWS;
            // SAFETY: the caller's contract.
            unsafe {
                if unit.packs() {
                    let to = packed.base.at(row / TILE_ROWS * packed.tile + column * TILE_ROWS);
                    round_chunks(isa, Some(unit), values.as_chunks().0, to, CHUNK);
                    continue;
                }
                for (row, values) in (row..).zip(values.as_chunks_mut::<PANEL>().0) {
                    let wide = self.wide.base.at(row * self.wide.stride + column);
                    let wide = std::slice::from_raw_parts_mut(wide, width);
                    wide.copy_from_slice(&values[..width]);
                    self.finish(isa, row, column, wide);
                }
            }
        }
    }
}

/// Memory of packed rows. Values beyond their width stay zero.
#[derive(Debug)]
pub(super) struct PackedBuffer {
    values: AlignedBuffer<u16>,
    rows: usize,
    tile: usize,
}

impl Default for PackedBuffer {
    fn default() -> Self {
        Self { values: AlignedBuffer::zeroed(0), rows: 0, tile: 0 }
    }
}

impl PackedBuffer {
    /// Makes space for `rows` rows of `width` values.
    pub(super) fn fit(&mut self, rows: usize, width: usize) {
        let tile = width.div_ceil(CHUNK) * TILE_ROWS * CHUNK;
        if self.rows < rows || self.tile != tile {
            *self = Self { values: AlignedBuffer::zeroed(rows.div_ceil(TILE_ROWS) * tile), rows, tile };
        }
    }

    /// As [`Self::fit`], but earlier contents may remain, also beyond the width if that has changed.
    pub(super) fn reuse(&mut self, rows: usize, width: usize) {
        let tile = width.div_ceil(CHUNK) * TILE_ROWS * CHUNK;
        let needed = rows.div_ceil(TILE_ROWS) * tile;
        if self.values.len() < needed {
            self.values = AlignedBuffer::zeroed(needed);
        }
        (self.rows, self.tile) = (rows, tile);
    }

    pub(super) fn share(&mut self) -> PackedRows {
        PackedRows { base: SharedPtr(self.values.as_mut_ptr()), tile: self.tile }
    }
}

/// Operands of one call: rows of activations against one panel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bf16Operands {
    /// Packed rows, from a multiple of [`TILE_ROWS`] and the first chunk on. The widened unit ignores them.
    pub(super) a: *const u16,
    /// Values between 16 rows and the next.
    pub(super) a_tile: usize,
    /// The same as f32, for the widened unit only: row m begins `m * wide_stride` values later.
    pub(super) wide: *const f32,
    pub(super) wide_stride: usize,
    /// The panel's first chunk.
    pub(super) b: *const u16,
    /// First output; row m begins `m * c_stride` values later and has [`PANEL`] values.
    pub(super) c: *mut f32,
    pub(super) c_stride: usize,
    /// Inputs, from a whole chunk on.
    pub(super) inputs: usize,
    /// Continue the sums that are in C, instead of starting from zero.
    pub(super) accumulate: bool,
    /// The panel of the next product, for prefetching; null if unknown.
    pub(super) next: *const u8,
}

impl Bf16Operands {
    /// Row `row` (a multiple of [`TILE_ROWS`]) and input `from` (a multiple of [`CHUNK`]) of `x`, without outputs yet.
    ///
    /// # Safety
    /// Row and input are inside `x`, which is for a product in bfloat16.
    pub(super) unsafe fn from(
        x: &ProductInputs,
        row: usize,
        from: usize,
        b: *const u16,
        inputs: usize,
    ) -> Self {
        debug_assert!(row.is_multiple_of(TILE_ROWS) && from.is_multiple_of(CHUNK));
        let (unit, packed) = x.bf16.expect("packed weights have a unit");
        let a = if unit.packs() {
            // SAFETY: the caller's contract.
            unsafe { packed.base.at(row / TILE_ROWS * packed.tile + from * TILE_ROWS) }
        } else {
            std::ptr::null_mut()
        };
        // SAFETY: the caller's contract.
        let wide = unsafe { x.wide.base.at(row * x.wide.stride + from) };
        Self {
            a,
            a_tile: packed.tile,
            wide,
            wide_stride: x.wide.stride,
            b,
            c: std::ptr::null_mut(),
            c_stride: 0,
            inputs,
            accumulate: false,
            next: std::ptr::null(),
        }
    }

    fn chunks(&self) -> usize {
        self.inputs.div_ceil(CHUNK)
    }

    /// The same operands from `rows` rows later on.
    ///
    /// # Safety
    /// There are that many rows; for a unit that packs, `rows` is a multiple of [`TILE_ROWS`].
    unsafe fn after(&self, unit: Bf16Unit, rows: usize) -> Self {
        // SAFETY: the caller's contract; pointers that the unit does not use are not moved.
        unsafe {
            let c = self.c.add(rows * self.c_stride);
            if unit.packs() {
                Self { a: self.a.add(rows / TILE_ROWS * self.a_tile), c, ..*self }
            } else {
                Self { wide: self.wide.add(rows * self.wide_stride), c, ..*self }
            }
        }
    }
}

/// Computes `rows` rows (any number) of one panel.
///
/// # Safety
/// The ranges described by `operands` are valid for `rows` rows and were made for `unit`, C overlaps none of the
/// others, no other code writes them meanwhile, and `isa` and `unit` are this machine's.
pub(super) unsafe fn multiply(isa: Isa, unit: Bf16Unit, rows: usize, operands: &Bf16Operands) {
    // SAFETY: the caller's contract.
    unsafe {
        match unit {
            #[cfg(target_arch = "x86_64")]
            Bf16Unit::Amx => amx::multiply(rows, operands),
            #[cfg(target_arch = "x86_64")]
            Bf16Unit::Avx512Bf16 => dot::multiply(rows, operands),
            Bf16Unit::Widened => widened::multiply(isa, rows, operands),
        }
    }
}

/// As [`multiply`], where only the first `columns` columns of C may be touched.
///
/// # Safety
/// As there, for this number of columns of C.
pub(super) unsafe fn multiply_within(
    isa: Isa,
    unit: Bf16Unit,
    rows: usize,
    operands: &Bf16Operands,
    columns: usize,
) {
    if columns >= PANEL {
        // SAFETY: the caller's contract.
        unsafe { multiply(isa, unit, rows, operands) };
        return;
    }
    for first in (0..rows).step_by(TILE_ROWS) {
        let now = TILE_ROWS.min(rows - first);
        let mut copy = [[0.0_f32; PANEL]; TILE_ROWS];
        // SAFETY: `columns` values of each row may be read and written; the kernel works on the copy.
        unsafe {
            let part = operands.after(unit, first);
            for (row, copy) in copy.iter_mut().enumerate().take(now) {
                if part.accumulate {
                    let from = part.c.add(row * part.c_stride);
                    std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), columns);
                }
            }
            multiply(isa, unit, now, &Bf16Operands { c: copy.as_mut_ptr().cast(), c_stride: PANEL, ..part });
            for (row, copy) in copy.iter().enumerate().take(now) {
                std::ptr::copy_nonoverlapping(copy.as_ptr(), part.c.add(row * part.c_stride), columns);
            }
        }
    }
}

#[cfg(test)]
mod tests;
