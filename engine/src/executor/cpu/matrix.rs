//! Weight matrices in the kernel's layout, and products with them.
//!
//! A matrix `[outputs][inputs]` of a checkpoint is packed once, when it is loaded, into panels
//! `[outputs / 32][inputs][32]`: a product then reads memory strictly forward. bf16 weights stay bf16 and are
//! widened exactly on the way into f32 arithmetic.
//!
//! A product is cut into items that members of the team claim. With few rows an item is one or two panels,
//! streamed from memory once. With many rows it is a group of panels by a block of rows: a slice of the group
//! is widened into the member's cache and used for all its rows. How a product is cut never changes its bits.
#![allow(unsafe_code)] // items write disjoint parts of one output through raw pointers; see each block

use std::ops::Range;

use super::arena::Aligned;
use super::isa::Isa;
use super::kernel::{Bf16, Element, PANEL, Tile, multiply, multiply_two, rows_at_once};
use super::team::{JobPanicked, Team};
use crate::model::weights::{Tensor, WeightDtype};

/// Rows up to which panels are used as stored: widening them first would cost more than it saves.
const FEW_ROWS: usize = 24;
/// Panels of one item when there are many rows.
const GROUP_PANELS: usize = 4;
/// Inputs of one slice of a group: 512 × 128 columns × 4 bytes are 256 KiB, an eighth of a typical L2 cache.
const SLICE_DEPTH: usize = 512;
/// Values of scratch memory a member needs for a slice.
pub(super) const SLICE_VALUES: usize = GROUP_PANELS * SLICE_DEPTH * PANEL;
/// Items per member below which rows are cut as well.
const ITEMS_PER_MEMBER: usize = 4;
/// Fewest rows of an item when rows are cut.
const MIN_ROW_BLOCK: usize = 48;

#[derive(Debug)]
enum Panels {
    F32(Aligned<f32>),
    Bf16(Aligned<u16>),
}

/// A packed weight matrix.
#[derive(Debug)]
pub(super) struct Matrix {
    panels: Panels,
    outputs: usize,
    inputs: usize,
}

/// Which element type packed weights have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightMode {
    /// bf16 stays bf16, everything else becomes f32: exact.
    Stored,
    /// All f32: exact, twice the memory of bf16.
    F32,
}

impl Matrix {
    /// Packs the rows of all parts, one after the other; each part is `[outputs][inputs]`.
    pub(super) fn pack(
        team: &mut Team,
        parts: &[(Tensor<'_>, usize)],
        inputs: usize,
        mode: WeightMode,
    ) -> Result<Self, JobPanicked> {
        let outputs = parts.iter().map(|(_, outputs)| outputs).sum::<usize>();
        let bf16 =
            mode == WeightMode::Stored && parts.iter().all(|(part, _)| part.dtype() == WeightDtype::Bf16);
        let values = outputs.div_ceil(PANEL) * PANEL * inputs;
        let panels = if bf16 {
            let mut packed = Aligned::<u16>::zeroed(values);
            let read = |part: &Tensor<'_>, start, out: &mut [u16]| part.read_bf16_bits(start, out);
            pack_panels(team, parts, inputs, &mut packed, Bf16::column, read)?;
            Panels::Bf16(packed)
        } else {
            let mut packed = Aligned::<f32>::zeroed(values);
            let read = |part: &Tensor<'_>, start, out: &mut [f32]| part.read_f32(start, out);
            pack_panels(team, parts, inputs, &mut packed, f32::column, read)?;
            Panels::F32(packed)
        };
        Ok(Self { panels, outputs, inputs })
    }

    pub(super) fn outputs(&self) -> usize {
        self.outputs
    }

    /// Bytes of the packed panels: what one pass over the matrix reads.
    pub(super) fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(values) => values.len() * 4,
            Panels::Bf16(values) => values.len() * 2,
        }
    }

    /// One row of the original matrix, for tied embeddings.
    pub(super) fn row(&self, output: usize, out: &mut [f32]) {
        let start = output / PANEL * PANEL * self.inputs;
        let column = output % PANEL;
        match &self.panels {
            Panels::F32(values) => {
                for (input, out) in out.iter_mut().enumerate().take(self.inputs) {
                    *out = values[start + input * PANEL + column];
                }
            }
            Panels::Bf16(values) => {
                let position = 2 * (column % 16) + column / 16;
                for (input, out) in out.iter_mut().enumerate().take(self.inputs) {
                    *out = Bf16(values[start + input * PANEL + position]).widen();
                }
            }
        }
    }

    fn panel_count(&self) -> usize {
        self.outputs.div_ceil(PANEL)
    }
}

/// Fills panels in parallel: each is the transpose of 32 rows.
fn pack_panels<T: super::arena::Plain + Default>(
    team: &mut Team,
    parts: &[(Tensor<'_>, usize)],
    inputs: usize,
    packed: &mut [T],
    column: impl Fn(usize) -> usize + Sync,
    read: impl Fn(&Tensor<'_>, usize, &mut [T]) + Sync,
) -> Result<(), JobPanicked> {
    let panel_values = PANEL * inputs;
    let outputs: usize = parts.iter().map(|(_, outputs)| outputs).sum();
    let base = Shared(packed.as_mut_ptr());
    let count = packed.len() / panel_values;
    team.run(&|member| {
        let mut rows = vec![T::default(); panel_values];
        member.each(count, |index| {
            // SAFETY: panels are disjoint, and each index is claimed by one member.
            let panel =
                unsafe { std::slice::from_raw_parts_mut(base.at(index * panel_values), panel_values) };
            for (slot, row) in rows.chunks_exact_mut(inputs).enumerate() {
                let output = index * PANEL + slot;
                if output >= outputs {
                    row.fill(T::default());
                    continue;
                }
                let (mut part, mut local) = (0, output);
                while local >= parts[part].1 {
                    local -= parts[part].1;
                    part += 1;
                }
                read(&parts[part].0, local * inputs, row);
            }
            for (input, out) in panel.chunks_exact_mut(PANEL).enumerate() {
                for (position, out) in out.iter_mut().enumerate() {
                    *out = rows[column(position) * inputs + input];
                }
            }
        });
    })
}

/// A pointer that members of a team may share; they use disjoint parts of what it points to.
#[derive(Debug)]
pub(super) struct Shared<T>(pub(super) *mut T);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}
// SAFETY: a pointer by itself is harmless; each dereference says why its range is disjoint from others.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// # Safety
    /// `offset` is inside the allocation.
    pub(super) unsafe fn at(self, offset: usize) -> *mut T {
        // SAFETY: the caller's contract.
        unsafe { self.0.add(offset) }
    }
}

/// Rows of activations: `count` rows of `stride` values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub(super) base: Shared<f32>,
    pub(super) stride: usize,
}

/// One product `out = x · matrixᵀ`, cut into items.
#[derive(Debug)]
pub(super) struct Product<'a> {
    matrix: &'a Matrix,
    x: Rows,
    rows: usize,
    out: Rows,
    /// Values of an output row that may be written; a last panel that reaches beyond is copied in part.
    writable: usize,
    item_panels: usize,
    item_rows: usize,
}

impl<'a> Product<'a> {
    /// Plans the product of `rows` rows for a team of `members`.
    ///
    /// # Safety
    /// `x` has `rows` rows of the matrix's inputs; `out` has `rows` rows of `writable` values, at least the
    /// matrix's outputs. While items are computed nobody else writes either or reads `out`.
    pub(super) unsafe fn plan(
        matrix: &'a Matrix,
        x: Rows,
        rows: usize,
        out: Rows,
        writable: usize,
        members: usize,
    ) -> Self {
        let panels = matrix.panel_count();
        let (item_panels, item_rows) = if rows <= FEW_ROWS {
            (if panels >= 2 * members * ITEMS_PER_MEMBER { 2 } else { 1 }, rows)
        } else {
            let groups = panels.div_ceil(GROUP_PANELS);
            let wanted_cuts = (members * ITEMS_PER_MEMBER).div_ceil(groups);
            let block = rows.div_ceil(wanted_cuts).max(MIN_ROW_BLOCK);
            (GROUP_PANELS, block.next_multiple_of(super::kernel::MAX_ROWS).min(rows))
        };
        Self { matrix, x, rows, out, writable, item_panels, item_rows }
    }

    pub(super) fn items(&self) -> usize {
        self.matrix.panel_count().div_ceil(self.item_panels) * self.rows.div_ceil(self.item_rows.max(1))
    }

    /// Rows and columns that an item computes; the last columns may be padding.
    pub(super) fn extent(&self, item: usize) -> (Range<usize>, Range<usize>) {
        let groups = self.matrix.panel_count().div_ceil(self.item_panels);
        let first_panel = item % groups * self.item_panels;
        let panels = self.item_panels.min(self.matrix.panel_count() - first_panel);
        let first_row = item / groups * self.item_rows;
        let rows = self.item_rows.min(self.rows - first_row);
        (first_row..first_row + rows, first_panel * PANEL..(first_panel + panels) * PANEL)
    }

    /// Computes one item; `scratch` has [`SLICE_VALUES`] values.
    pub(super) fn compute(&self, isa: Isa, item: usize, scratch: &mut [f32]) {
        let (rows, columns) = self.extent(item);
        let (first_panel, panels) = (columns.start / PANEL, columns.len() / PANEL);
        let (first_row, rows) = (rows.start, rows.len());
        match &self.matrix.panels {
            Panels::F32(values) => {
                let start = values[first_panel * PANEL * self.matrix.inputs..].as_ptr();
                if rows <= FEW_ROWS {
                    self.stream(isa, start, first_panel, panels, first_row, rows);
                } else {
                    self.block(isa, start, first_panel, panels, first_row, rows, None);
                }
            }
            Panels::Bf16(values) => {
                let start = values[first_panel * PANEL * self.matrix.inputs..].as_ptr().cast::<Bf16>();
                if rows <= FEW_ROWS {
                    self.stream(isa, start, first_panel, panels, first_row, rows);
                } else {
                    self.block(isa, start, first_panel, panels, first_row, rows, Some(scratch));
                }
            }
        }
    }

    /// Few rows: each panel once, front to back.
    fn stream<E: Element>(
        &self,
        isa: Isa,
        start: *const E,
        first_panel: usize,
        panels: usize,
        first_row: usize,
        rows: usize,
    ) {
        let depth = self.matrix.inputs;
        let panel_values = PANEL * depth;
        let mut panel = 0;
        while panel < panels {
            let column = (first_panel + panel) * PANEL;
            let whole = column + 2 * PANEL <= self.writable;
            // SAFETY: panel, rows and columns are inside the matrix, `x` and `out` by the contract of `plan`;
            // the output columns of this item belong to it alone.
            unsafe {
                let tile = Tile {
                    a: self.x.base.at(first_row * self.x.stride).cast_const(),
                    a_stride: self.x.stride,
                    b: start.add(panel * panel_values),
                    b_stride: PANEL,
                    c: self.out.base.at(first_row * self.out.stride + column),
                    c_stride: self.out.stride,
                    depth,
                    accumulate: false,
                };
                if panel + 1 < panels && whole {
                    multiply_two(isa, rows, &tile, panel_values);
                    panel += 2;
                } else {
                    self.multiply_within(isa, rows, &tile, column);
                    panel += 1;
                }
            }
        }
    }

    /// Many rows: slice by slice of the group, each for all rows.
    #[allow(clippy::too_many_arguments)] // the coordinates of one item
    fn block<E: Element>(
        &self,
        isa: Isa,
        start: *const E,
        first_panel: usize,
        panels: usize,
        first_row: usize,
        rows: usize,
        mut scratch: Option<&mut [f32]>,
    ) {
        let inputs = self.matrix.inputs;
        let step = rows_at_once(isa);
        for from in (0..inputs).step_by(SLICE_DEPTH) {
            let depth = SLICE_DEPTH.min(inputs - from);
            // SAFETY: slices, rows and columns are inside the matrix, `x` and `out` by the contract of `plan`;
            // the output rows and columns of this item belong to it alone.
            unsafe {
                let slice = start.add(from * PANEL);
                let (b, panel_stride): (*const f32, usize) = match scratch.as_deref_mut() {
                    Some(scratch) => {
                        for panel in 0..panels {
                            let values =
                                std::slice::from_raw_parts(slice.add(panel * PANEL * inputs), depth * PANEL);
                            widen(isa, values, &mut scratch[panel * SLICE_DEPTH * PANEL..][..depth * PANEL]);
                        }
                        (scratch.as_ptr(), SLICE_DEPTH * PANEL)
                    }
                    // Only f32 panels are used in place.
                    None => (slice.cast(), PANEL * inputs),
                };
                for row in (0..rows).step_by(step) {
                    let now = step.min(rows - row);
                    for panel in 0..panels {
                        let column = (first_panel + panel) * PANEL;
                        let tile = Tile {
                            a: self.x.base.at((first_row + row) * self.x.stride + from).cast_const(),
                            a_stride: self.x.stride,
                            b: b.add(panel * panel_stride),
                            b_stride: PANEL,
                            c: self.out.base.at((first_row + row) * self.out.stride + column),
                            c_stride: self.out.stride,
                            depth,
                            accumulate: from > 0,
                        };
                        self.multiply_within(isa, now, &tile, column);
                    }
                }
            }
        }
    }

    /// One panel whose last columns may lie beyond what may be written.
    ///
    /// # Safety
    /// As [`multiply`], for the writable columns.
    unsafe fn multiply_within<E: Element>(&self, isa: Isa, rows: usize, tile: &Tile<E>, column: usize) {
        if column + PANEL <= self.writable {
            // SAFETY: the caller's contract.
            unsafe { multiply(isa, rows, tile) };
            return;
        }
        let columns = self.writable - column;
        for row in 0..rows {
            let mut partial = [0.0_f32; PANEL];
            // SAFETY: `columns` values of each row may be read and written; the kernel works on the copy.
            unsafe {
                let c = tile.c.add(row * tile.c_stride);
                if tile.accumulate {
                    std::ptr::copy_nonoverlapping(c, partial.as_mut_ptr(), columns);
                }
                let a = tile.a.add(row * tile.a_stride);
                multiply(isa, 1, &Tile { a, c: partial.as_mut_ptr(), c_stride: PANEL, ..*tile });
                std::ptr::copy_nonoverlapping(partial.as_ptr(), c, columns);
            }
        }
    }
}

/// Widens rows of panels to f32 in natural column order.
fn widen<E: Element>(isa: Isa, values: &[E], out: &mut [f32]) {
    #[inline(always)]
    fn body<E: Element>(values: &[E], out: &mut [f32]) {
        for (row, out) in values.chunks_exact(PANEL).zip(out.chunks_exact_mut(PANEL)) {
            for (position, value) in row.iter().enumerate() {
                out[E::column(position)] = value.widen();
            }
        }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn avx512<E: Element>(values: &[E], out: &mut [f32]) {
        use std::arch::x86_64::_mm512_storeu_ps;
        for (row, out) in values.chunks_exact(PANEL).zip(out.chunks_exact_mut(PANEL)) {
            // SAFETY: both rows have `PANEL` values.
            unsafe {
                let (low, high) = E::load_avx512(row.as_ptr());
                _mm512_storeu_ps(out.as_mut_ptr(), low);
                _mm512_storeu_ps(out.as_mut_ptr().add(16), high);
            }
        }
    }
    match isa {
        // SAFETY: this `Isa` only comes from `Isa::available`.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { avx512(values, out) },
        _ => body(values, out),
    }
}

#[cfg(test)]
mod tests;
