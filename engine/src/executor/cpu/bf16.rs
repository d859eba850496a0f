//! Products in bfloat16: both sides are bf16, sums are f32.
//!
//! ```text
//!   C[m][0..32] (=|+=)  Σ over chunks of 32 inputs of ( Σ even inputs a·b  +  Σ odd inputs a·b )
//! ```
//!
//! The order is that of AMX's `tdpbf16ps`: within a chunk one chain over the 16 even inputs and one over the 16 odd
//! ones, each from zero; their sum is added to the output. All units keep it, for any number of rows, so that prefill,
//! decode, any batch and any machine give the same bits (compared on the hardware, 2026-11-21, Xeon with AMX). A product
//! of two bf16 is exact in f32, so that a fused and a separate addition are the same. One exception: AMX and AVX512-BF16
//! take what is below 2^-126 in magnitude for zero, the others keep it. A logit does not come from there.
//!
//! ```text
//!   panel of 32 outputs     per chunk: 2 halves × 16 words × 16 outputs × 2 inputs, 2 KiB
//!   rows of activations     per 16 rows and chunk: 16 rows × 32 inputs, 1 KiB
//! ```
//!
//! Which two inputs share a word is the unit's ([`Unit::position`]). Inputs are filled up with zeros to whole chunks.
#![allow(unsafe_code)] // vector intrinsics and tiles on raw pointers; the contract is on `Operands`

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod dot;
mod widened;

use super::arena::Aligned;
use super::isa::{Isa, for_each_isa};
use super::kernel::PANEL;
use super::matrix::{Rows, Shared};

/// Inputs of a chunk.
pub(super) const CHUNK: usize = 32;
/// Values of a chunk of a panel.
pub(super) const PANEL_CHUNK: usize = CHUNK * PANEL;
/// Rows that lie together.
pub(super) const TILE_ROWS: usize = 16;
/// Rows that one pass over a panel serves on every unit; items begin at multiples of it.
pub(super) const ROW_STEP: usize = 2 * TILE_ROWS;

/// What multiplies bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Tiles: AMX-BF16.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// `vdpbf16ps`: AVX512-BF16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// f32 multiply-adds of the instruction set on widened values: no faster than f32, but for half of the memory.
    Widened,
}

impl Unit {
    /// The best this machine has. Where both are there, AVX512-BF16 comes after AMX but before f32: on Zen 4 it does twice
    /// as much; on a Xeon, which has AMX, half (113 against 236 GFLOP/s a core, 2026-11-21).
    #[must_use]
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// All that this machine has, the best first.
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

    /// For reports.
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

    /// Where input `input` of a chunk lies among the chunk's 32 values of a row.
    ///
    /// `vdpbf16ps` adds the upper value of a word and then the lower one to one chain: its words hold two inputs of the
    /// same parity, the first of them above.
    #[inline(always)]
    pub(super) fn position(self, input: usize) -> usize {
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

    /// Whether [`Self::position`] is the input's own.
    fn keeps_order(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => false,
            #[cfg(target_arch = "x86_64")]
            Self::Amx => true,
            Self::Widened => true,
        }
    }

    /// Whether activations are packed; the widened unit reads them as rounded f32.
    pub(super) fn packs(self) -> bool {
        self != Self::Widened
    }
}

/// Values of a panel with so many inputs.
pub(super) fn panel_len(inputs: usize) -> usize {
    inputs.div_ceil(CHUNK) * PANEL_CHUNK
}

/// Where the weight of `column` (below [`PANEL`]) for `input` lies in its panel.
#[inline(always)]
pub(super) fn panel_position(unit: Unit, input: usize, column: usize) -> usize {
    let position = unit.position(input % CHUNK);
    let (half, column) = (column / TILE_ROWS, column % TILE_ROWS);
    input / CHUNK * PANEL_CHUNK
        + half * PANEL_CHUNK / 2
        + position / 2 * (2 * TILE_ROWS)
        + 2 * column
        + position % 2
}

/// The nearest bf16, ties to even; subnormal values are zero, and what is not a number stays so.
#[inline(always)]
pub(super) fn round(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let magnitude = bits & 0x7fff_ffff;
    let kept = if magnitude > 0x7f80_0000 { bits >> 16 | 0x40 } else { rounded };
    let kept = if magnitude < 0x0080_0000 { bits >> 16 & 0x8000 } else { kept };
    #[allow(clippy::cast_possible_truncation)] // shifted by 16; the largest magnitude rounds to infinity
    {
        kept as u16
    }
}

for_each_isa! {
    /// Each value becomes the nearest bf16.
    fn round_in_place(values: &mut [f32]) {
        for value in values {
            *value = f32::from_bits(u32::from(round(*value)) << 16);
        }
    }
}

for_each_isa! {
    /// As [`round`], value by value.
    fn round_into(values: &[f32], out: &mut [u16]) {
        for (out, value) in out.iter_mut().zip(values) {
            *out = round(*value);
        }
    }
}

/// Rounds up to a chunk of values of one column into its words; what they do not fill is zero.
pub(super) fn round_words(isa: Isa, unit: Unit, values: &[f32], words: &mut [u32; CHUNK / 2]) {
    let mut rounded = [0; CHUNK];
    round_into(isa, values, &mut rounded);
    if !unit.keeps_order() {
        let natural = rounded;
        for (input, bits) in natural.into_iter().enumerate() {
            rounded[unit.position(input)] = bits;
        }
    }
    for (word, pair) in words.iter_mut().zip(rounded.as_chunks::<2>().0) {
        *word = u32::from(pair[0]) | u32::from(pair[1]) << 16;
    }
}

/// Activations on their way into a product.
///
/// They are f32 where they are made; in bfloat16 mode whoever has made a part of a row calls [`Self::finish`] on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Inputs {
    pub(super) wide: Rows,
    /// The unit, and packed rows if it has them.
    pub(super) bf16: Option<(Unit, Packed)>,
}

/// Rows of bf16 in the layout that this module's page shows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packed {
    base: Shared<u16>,
    /// Values of [`TILE_ROWS`] rows.
    tile: usize,
}

impl Inputs {
    /// The values of columns `column ..` of row `row` are final.
    ///
    /// # Safety
    /// Row and columns are inside the buffers, and nobody else uses these values meanwhile; `isa` is of this machine.
    pub(super) unsafe fn finish(&self, isa: Isa, row: usize, column: usize, values: &mut [f32]) {
        let Some((unit, packed)) = self.bf16 else { return };
        if !unit.packs() {
            round_in_place(isa, values);
            return;
        }
        let start = row / TILE_ROWS * packed.tile + row % TILE_ROWS * CHUNK;
        let mut done = 0;
        while done < values.len() {
            let input = column + done;
            let first = input % CHUNK;
            let now = (CHUNK - first).min(values.len() - done);
            let mut rounded = [0; CHUNK];
            round_into(isa, &values[done..done + now], &mut rounded);
            // SAFETY: the chunk of this row has `CHUNK` values.
            unsafe {
                let chunk = packed.base.at(start + input / CHUNK * (TILE_ROWS * CHUNK));
                if unit.keeps_order() {
                    std::ptr::copy_nonoverlapping(rounded.as_ptr(), chunk.add(first), now);
                } else {
                    for (offset, value) in rounded[..now].iter().enumerate() {
                        chunk.add(unit.position(first + offset)).write(*value);
                    }
                }
            }
            done += now;
        }
    }
}

/// Memory of packed rows; what is beyond their width stays zero.
#[derive(Debug)]
pub(super) struct PackedBuffer {
    values: Aligned<u16>,
    rows: usize,
    tile: usize,
}

impl Default for PackedBuffer {
    fn default() -> Self {
        Self { values: Aligned::zeroed(0), rows: 0, tile: 0 }
    }
}

impl PackedBuffer {
    /// Room for `rows` rows of `width` values.
    pub(super) fn fit(&mut self, rows: usize, width: usize) {
        let tile = width.div_ceil(CHUNK) * TILE_ROWS * CHUNK;
        if self.rows < rows || self.tile != tile {
            *self = Self { values: Aligned::zeroed(rows.div_ceil(TILE_ROWS) * tile), rows, tile };
        }
    }

    /// As [`Self::fit`], but of what lay there before some may be left, also beyond the width where that has changed.
    pub(super) fn reuse(&mut self, rows: usize, width: usize) {
        let tile = width.div_ceil(CHUNK) * TILE_ROWS * CHUNK;
        let needed = rows.div_ceil(TILE_ROWS) * tile;
        if self.values.len() < needed {
            self.values = Aligned::zeroed(needed);
        }
        (self.rows, self.tile) = (rows, tile);
    }

    pub(super) fn share(&mut self) -> Packed {
        Packed { base: Shared(self.values.as_mut_ptr()), tile: self.tile }
    }
}

/// Operands of one call: rows of activations against one panel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operands {
    /// Packed rows, from a multiple of [`TILE_ROWS`] and the first chunk on; the widened unit does not look at them.
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
}

impl Operands {
    /// Row `row` (a multiple of [`TILE_ROWS`]) and input `from` (one of [`CHUNK`]) of `x`, still without outputs.
    ///
    /// # Safety
    /// Row and input are inside `x`, which is for a product in bfloat16.
    pub(super) unsafe fn from(x: &Inputs, row: usize, from: usize, b: *const u16, inputs: usize) -> Self {
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
        }
    }

    fn chunks(&self) -> usize {
        self.inputs.div_ceil(CHUNK)
    }

    /// The same from `rows` rows later on.
    ///
    /// # Safety
    /// There are that many rows; for a unit that packs, `rows` is a multiple of [`TILE_ROWS`].
    unsafe fn after(&self, unit: Unit, rows: usize) -> Self {
        // SAFETY: the caller's contract; what the unit does not use is not moved.
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
/// The ranges described by `operands` are valid for `rows` rows and were made for `unit`, C overlaps none of the others,
/// nobody else writes them meanwhile, and `isa` and `unit` are this machine's.
pub(super) unsafe fn multiply(isa: Isa, unit: Unit, rows: usize, operands: &Operands) {
    // SAFETY: the caller's contract.
    unsafe {
        match unit {
            #[cfg(target_arch = "x86_64")]
            Unit::Amx => amx::multiply(rows, operands),
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512Bf16 => dot::multiply(rows, operands),
            Unit::Widened => widened::multiply(isa, rows, operands),
        }
    }
}

/// As [`multiply`], where only the first `columns` columns of C may be touched.
///
/// # Safety
/// As there, for so many columns of C.
pub(super) unsafe fn multiply_within(isa: Isa, unit: Unit, rows: usize, operands: &Operands, columns: usize) {
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
            multiply(isa, unit, now, &Operands { c: copy.as_mut_ptr().cast(), c_stride: PANEL, ..part });
            for (row, copy) in copy.iter().enumerate().take(now) {
                std::ptr::copy_nonoverlapping(copy.as_ptr(), part.c.add(row * part.c_stride), columns);
            }
        }
    }
}

#[cfg(test)]
mod tests;
