//! Weight matrices in the kernel's layout, and products with them.
//!
//! A matrix `[outputs][inputs]` of a checkpoint is packed once, when it is loaded, into panels
//! `[outputs / 32][inputs][32]`. A product then reads memory strictly forward. bf16 weights stay bf16. Quantized
//! weights become int8 with their scales between, four inputs at a time. Both are widened to f32 in the kernel, which
//! is exact. In bfloat16 mode panels have the layout of `bf16`, whose units multiply them without widening. Grouped
//! integers have the layout of `integer`, and are multiplied as integers.
//!
//! A product is divided into items that workers claim. With few rows an item is one to eight panels, streamed from
//! memory once. With many rows it is a group of panels by a block of rows. A slice of the group is widened into the
//! worker's cache and used for all its rows. The division of a product never changes its bits.
#![allow(
    unsafe_code,
    reason = "items write disjoint parts of one output through raw pointers; see each block"
)]

mod blocks;
mod integer;
mod pack;
mod widen;

use std::ops::Range;

pub(super) use self::blocks::PanelSums;
use self::integer::IntegerPanels;
use self::widen::widen;
use super::arena::AlignedBuffer;
use super::bf16::{self, Bf16Operands, Bf16Unit, ProductInputs};
use super::isa::Isa;
use super::kernel::{
    INTEGER_UNIT, MAX_ROWS, PANEL, PanelBf16, PanelElement, PanelInt8, TileOperands, multiply,
    multiply_beside, panels_at_once, rows_at_once,
};
use super::rows::{Rows, SharedPtr};
use crate::model::weights::Tensor;

/// Rows up to which panels are used as stored. For few rows, widening the panels first costs more than it saves.
const FEW_ROWS: usize = 24;
/// Panels of one item when there are many rows.
const GROUP_PANELS: usize = 4;
/// Inputs of one slice of a group: 512 × 128 columns × 4 bytes are 256 KiB, an eighth of a typical L2 cache.
const SLICE_DEPTH: usize = 512;
/// Values of scratch memory that a worker needs for a slice, including the scales of quantized weights.
pub(super) const SLICE_VALUES: usize = GROUP_PANELS * (SLICE_DEPTH + SLICE_DEPTH / PanelInt8::GROUP) * PANEL;
/// Items per worker below which rows are divided as well.
const ITEMS_PER_WORKER: usize = 4;
/// Fewest rows of an item when rows are divided.
const MIN_ROW_BLOCK: usize = 48;

/// Fewest rows of an item of many rows in bfloat16 mode.
const BF16_MIN_ROW_BLOCK: usize = 64;

/// A slice begins a group of scales.
const _: () = assert!(SLICE_DEPTH.is_multiple_of(PanelInt8::GROUP));
/// The sums of an item of integers fit into a worker's scratch memory.
const _: () = assert!(integer::BLOCK_ROWS * GROUP_PANELS * PANEL <= SLICE_VALUES);

/// Tensors with their numbers of rows, in the order of the matrix's rows.
type TensorParts<'a, 'b> = &'a [(Tensor<'b>, usize)];

#[derive(Debug)]
enum Panels {
    F32(AlignedBuffer<f32>),
    Bf16(AlignedBuffer<u16>),
    Int8(AlignedBuffer<i8>),
    Pairs(AlignedBuffer<u16>, Bf16Unit),
    Integers(IntegerPanels),
}

/// A packed weight matrix.
#[derive(Debug)]
pub(super) struct Matrix {
    panels: Panels,
    outputs: usize,
    inputs: usize,
}

/// Element type of packed weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightMode {
    /// bf16 stays bf16, everything else becomes f32: exact.
    Stored,
    /// All f32: exact, twice the memory of bf16.
    F32,
    /// Matrices become 8-bit integers when they are loaded, with one scale for 64 weights of a row: 8.25 bits per
    /// weight. Norms, biases and an embedding that is not the output matrix stay as with [`Self::Stored`]. The
    /// arithmetic is f32 in an order of its own: a chain over the integers of each group, and a chain over the scaled
    /// sums. It has the same invariance.
    Int8,
    /// Matrices are bf16 (others are rounded when they are loaded), and so are the inputs of every product. Sums and
    /// all values between products are f32. Norms, biases and an embedding that is not the output matrix stay as with
    /// [`Self::Stored`]. The result differs from exact mode; the invariance is the same.
    Bf16,
    /// Matrices that a file has as integers of at most 8 bits keep them, with their scales. The inputs of their products
    /// are rounded to 8 bits, with a scale for 32 of a row. Other matrices are as with [`Self::Stored`]. The result
    /// differs from exact mode; the invariance is the same.
    Integers,
    /// As [`Self::Integers`], and other matrices are rounded to 8 bits with a scale for 32 weights: 9 bits per weight.
    Integers8,
    /// As [`Self::Integers`], and other matrices are rounded to 4 bits with a scale and a zero point for 32 weights:
    /// 5.25 bits per weight.
    Integers4,
}

impl WeightMode {
    /// The suffix of a checkpoint's identity: KV computed with rounded weights or inputs belongs to another model. A
    /// change of a mode's bits needs a new suffix, so that engines of both versions share no blocks.
    #[must_use]
    pub fn identity(self) -> &'static str {
        match self {
            Self::Stored | Self::F32 => "",
            Self::Int8 => "+int8x64",
            Self::Bf16 => "+bf16",
            Self::Integers => "+integers",
            Self::Integers8 => "+integers8",
            Self::Integers4 => "+integers4",
        }
    }

    /// Whether products with integers are computed in integers.
    #[must_use]
    pub fn multiplies_integers(self) -> bool {
        match self {
            Self::Integers | Self::Integers8 | Self::Integers4 => true,
            Self::Stored | Self::F32 | Self::Int8 | Self::Bf16 => false,
        }
    }
}

impl Matrix {
    pub(super) fn outputs(&self) -> usize {
        self.outputs
    }

    /// Bytes of the packed panels that one pass over the matrix reads.
    pub(super) fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(values) => values.len() * 4,
            Panels::Bf16(values) => values.len() * 2,
            Panels::Int8(values) => values.len(),
            Panels::Pairs(values, _) => values.len() * 2,
            Panels::Integers(values) => values.bytes(),
        }
    }

    /// One row of the original matrix, for tied embeddings.
    pub(super) fn row(&self, output: usize, out: &mut [f32]) {
        let (panel, column) = (output / PANEL, output % PANEL);
        let bf16_position = 2 * (column % 16) + column / 16;
        match &self.panels {
            Panels::Integers(values) => values.row(output, out),
            Panels::F32(values) => {
                let panel = &values[panel * f32::panel_len(self.inputs)..];
                for (row, out) in panel.chunks_exact(PANEL).zip(out.iter_mut().take(self.inputs)) {
                    *out = row[column];
                }
            }
            Panels::Bf16(values) => {
                let panel = &values[panel * PanelBf16::panel_len(self.inputs)..];
                for (row, out) in panel.chunks_exact(PANEL).zip(out.iter_mut().take(self.inputs)) {
                    *out = PanelBf16(row[bf16_position]).widen();
                }
            }
            Panels::Pairs(values, unit) => {
                let panel = &values[panel * bf16::panel_len(self.inputs)..];
                for (input, out) in out.iter_mut().enumerate().take(self.inputs) {
                    *out = PanelBf16(panel[bf16::panel_position(*unit, input, column)]).widen();
                }
            }
            Panels::Int8(values) => {
                let panel = &values[panel * PanelInt8::panel_len(self.inputs)..];
                let groups = panel.chunks(PanelInt8::panel_len(PanelInt8::GROUP));
                for (group, out) in groups.zip(out[..self.inputs].chunks_mut(PanelInt8::GROUP)) {
                    let (scales, rows) = group.split_at(PanelInt8::HEADER);
                    let bits = [scales[2 * bf16_position], scales[2 * bf16_position + 1]];
                    let scale = PanelBf16(u16::from_ne_bytes(bits.map(i8::cast_unsigned))).widen();
                    for (row, out) in out.iter_mut().enumerate() {
                        *out = f32::from(rows[PanelInt8::position(row, column)]) * INTEGER_UNIT * scale;
                    }
                }
            }
        }
    }

    /// Whether the matrix is multiplied in integers.
    pub(super) fn has_integers(&self) -> bool {
        matches!(self.panels, Panels::Integers(_))
    }

    fn panel_count(&self) -> usize {
        self.outputs.div_ceil(PANEL)
    }
}

/// Panels of one item when there are few rows, if that leaves enough items. Several panels are computed side by side,
/// and their sums are stored together. Items stay small if panels are not computed side by side: storing the sums of
/// one or two rows is cheap, and the last wait is shorter.
fn panels_of_few_rows(panels: usize, workers: usize, rows: usize, at_once: usize) -> usize {
    let most = if at_once == 1 && rows <= 2 { 2 } else { 8 };
    [8, 4, 2]
        .into_iter()
        .find(|item| *item <= most && panels >= item * workers * ITEMS_PER_WORKER)
        .unwrap_or(1)
}

/// The part of a product that one item computes: rows of activations, and panels.
#[derive(Clone, Copy, Debug)]
struct ProductItem {
    first_panel: usize,
    panels: usize,
    first_row: usize,
    rows: usize,
}

/// One product `out = x · matrixᵀ`, divided into items.
#[derive(Debug)]
pub(super) struct Product<'a> {
    matrix: &'a Matrix,
    x: ProductInputs,
    rows: usize,
    out: Rows,
    /// Values of an output row that may be written. Only these columns of the last panel are copied.
    writable: usize,
    item_panels: usize,
    item_rows: usize,
}

impl<'a> Product<'a> {
    /// Plans the product of `rows` rows for `workers` workers.
    ///
    /// # Safety
    /// `x` has `rows` finished rows of the matrix's inputs; `out` has `rows` rows of `writable` values, at least the
    /// matrix's outputs. While items are computed, no other code writes either or reads `out`.
    #[allow(clippy::too_many_arguments, reason = "inputs, outputs and number of workers")]
    pub(super) unsafe fn plan(
        isa: Isa,
        matrix: &'a Matrix,
        x: ProductInputs,
        rows: usize,
        out: Rows,
        writable: usize,
        workers: usize,
    ) -> Self {
        let panels = matrix.panel_count();
        let (few, least, most, step) = match matrix.panels {
            Panels::Pairs(..) => (bf16::ROW_STEP, BF16_MIN_ROW_BLOCK, blocks::BLOCK_ROWS, bf16::ROW_STEP),
            Panels::Integers(_) => {
                (integer::FEW_ROWS, integer::BLOCK_ROWS, integer::BLOCK_ROWS, integer::FEW_ROWS)
            }
            Panels::F32(_) | Panels::Bf16(_) | Panels::Int8(_) => {
                (FEW_ROWS, MIN_ROW_BLOCK, usize::MAX, MAX_ROWS)
            }
        };
        let at_once = match matrix.panels {
            // Their items have the same size for all numbers of rows: smaller ones were not faster.
            Panels::Pairs(..) | Panels::Integers(_) => usize::MAX,
            Panels::F32(_) | Panels::Bf16(_) | Panels::Int8(_) => panels_at_once(isa, rows),
        };
        let (item_panels, item_rows) = if rows <= few {
            (panels_of_few_rows(panels, workers, rows, at_once), rows)
        } else {
            let groups = panels.div_ceil(GROUP_PANELS);
            let wanted_cuts = (workers * ITEMS_PER_WORKER).div_ceil(groups);
            let block = rows.div_ceil(wanted_cuts).clamp(least, most);
            (GROUP_PANELS, block.next_multiple_of(step).min(rows))
        };
        Self { matrix, x, rows, out, writable, item_panels, item_rows }
    }

    pub(super) fn items(&self) -> usize {
        self.matrix.panel_count().div_ceil(self.item_panels) * self.rows.div_ceil(self.item_rows.max(1))
    }

    /// Rows and columns that an item computes. The last columns may be padding.
    pub(super) fn extent(&self, item: usize) -> (Range<usize>, Range<usize>) {
        let groups = self.matrix.panel_count().div_ceil(self.item_panels);
        let first_panel = item % groups * self.item_panels;
        let panels = self.item_panels.min(self.matrix.panel_count() - first_panel);
        let first_row = item / groups * self.item_rows;
        let rows = self.item_rows.min(self.rows - first_row);
        (first_row..first_row + rows, first_panel * PANEL..(first_panel + panels) * PANEL)
    }

    /// Computes one item; `scratch` has [`SLICE_VALUES`] values.
    pub(super) fn compute(&self, isa: Isa, number: usize, scratch: &mut [f32]) {
        let (rows, columns) = self.extent(number);
        let item = ProductItem {
            first_panel: columns.start / PANEL,
            panels: columns.len() / PANEL,
            first_row: rows.start,
            rows: rows.len(),
        };
        let inputs = self.matrix.inputs;
        match &self.matrix.panels {
            Panels::F32(values) => {
                let start = values[item.first_panel * f32::panel_len(inputs)..].as_ptr();
                if item.rows <= FEW_ROWS {
                    self.stream(isa, start, item, scratch);
                } else {
                    // f32 panels need no widening and are used in place.
                    self.block(isa, item, |from, _| {
                        // SAFETY: the slice is inside the group's panels.
                        (unsafe { start.add(f32::panel_len(from)) }, f32::panel_len(inputs))
                    });
                }
            }
            Panels::Bf16(values) => {
                let start =
                    values[item.first_panel * PanelBf16::panel_len(inputs)..].as_ptr().cast::<PanelBf16>();
                self.narrow(isa, start, item, scratch);
            }
            Panels::Int8(values) => {
                let start =
                    values[item.first_panel * PanelInt8::panel_len(inputs)..].as_ptr().cast::<PanelInt8>();
                self.narrow(isa, start, item, scratch);
            }
            Panels::Pairs(values, unit) => {
                let start = values[item.first_panel * bf16::panel_len(inputs)..].as_ptr();
                if self.by_blocks() {
                    self.compute_blocks_into_output(isa, number, scratch);
                } else {
                    self.few_pairs(isa, *unit, start, item);
                }
            }
            Panels::Integers(panels) => self.integers(isa, panels, item, scratch),
        }
    }

    /// An item of integers.
    fn integers(&self, isa: Isa, panels: &IntegerPanels, item: ProductItem, scratch: &mut [f32]) {
        let x = self.x.integers.expect("the inputs of products with integers are rounded");
        let ProductItem { first_panel, first_row, rows, .. } = item;
        let sums = &mut scratch[..rows * item.panels * PANEL];
        let of_item = first_panel..first_panel + item.panels;
        // SAFETY: panels and rows are inside the matrix and `x` by the contract of `plan`.
        unsafe { panels.multiply(isa, of_item.clone(), x.at(first_row), rows, sums) };
        for (panel, sums) in of_item.zip(sums.chunks_exact(rows * PANEL)) {
            let column = panel * PANEL;
            let columns = PANEL.min(self.writable - column);
            for (row, sums) in sums.as_chunks::<PANEL>().0.iter().enumerate() {
                // SAFETY: rows and columns are inside `out` by the contract of `plan`, and those of an item belong to
                // it alone.
                unsafe {
                    let out = self.out.base.at((first_row + row) * self.out.stride + column);
                    std::ptr::copy_nonoverlapping(sums.as_ptr(), out, columns);
                }
            }
        }
    }

    /// An item in bfloat16 mode with few rows. Reads each panel once, front to back.
    fn few_pairs(&self, isa: Isa, unit: Bf16Unit, start: *const u16, item: ProductItem) {
        let ProductItem { first_panel, panels, first_row, rows } = item;
        let inputs = self.matrix.inputs;
        for panel in 0..panels {
            let column = (first_panel + panel) * PANEL;
            // SAFETY: panels, rows and columns are inside the matrix, `x` and `out` by the contract of `plan`, and the
            // output rows and columns of this item belong to it alone.
            unsafe {
                let b = start.add(panel * bf16::panel_len(inputs));
                let operands = Bf16Operands {
                    c: self.out.base.at(first_row * self.out.stride + column),
                    c_stride: self.out.stride,
                    ..Bf16Operands::from(&self.x, first_row, 0, b, inputs)
                };
                bf16::multiply_within(isa, unit, rows, &operands, self.writable - column);
            }
        }
    }

    /// An item of panels that are not f32. With many rows, each slice is first widened into `scratch`.
    fn narrow<E: PanelElement>(&self, isa: Isa, start: *const E, item: ProductItem, scratch: &mut [f32]) {
        if item.rows <= FEW_ROWS {
            self.stream(isa, start, item, scratch);
            return;
        }
        let (panel_len, slice_len) = (E::panel_len(self.matrix.inputs), E::Wide::panel_len(SLICE_DEPTH));
        assert!(item.panels * slice_len <= scratch.len(), "room for a slice of each panel");
        self.block::<E::Wide>(isa, item, |from, depth| {
            for (panel, out) in scratch.chunks_exact_mut(slice_len).take(item.panels).enumerate() {
                // SAFETY: the slice is inside the panel and begins a group, because group sizes divide the slice size.
                // Wide elements are f32, and `out` has space for a slice of them.
                unsafe { widen(isa, start.add(panel * panel_len + E::panel_len(from)), depth, out) };
            }
            (scratch.as_ptr().cast(), slice_len)
        });
    }

    /// Few rows: reads each panel once, front to back. Sums are gathered in `scratch` and copied row by row. Storing
    /// them panel by panel, 128 bytes in each row, would take a noticeable part of the streaming time.
    fn stream<E: PanelElement>(&self, isa: Isa, start: *const E, item: ProductItem, scratch: &mut [f32]) {
        let ProductItem { first_panel, panels, first_row, rows } = item;
        let (depth, width) = (self.matrix.inputs, panels * PANEL);
        let sums = &mut scratch[..rows * width];
        // SAFETY: panels and rows are inside the matrix and `x` by the contract of `plan`, and `sums` has a row of all
        // panels for each.
        unsafe {
            let tile = TileOperands {
                a: self.x.wide.base.at(first_row * self.x.wide.stride).cast_const(),
                a_stride: self.x.wide.stride,
                b: start,
                b_stride: PANEL,
                c: sums.as_mut_ptr(),
                c_stride: width,
                depth,
                accumulate: false,
                ahead: true,
            };
            multiply_beside(isa, rows, &tile, panels, E::panel_len(depth), panels_at_once(isa, rows));
        }
        let column = first_panel * PANEL;
        let columns = width.min(self.writable - column);
        for (row, sums) in sums.chunks_exact(width).enumerate() {
            // SAFETY: rows and columns are inside `out` by the contract of `plan`, and those of an item belong to it
            // alone.
            unsafe {
                let out = self.out.base.at((first_row + row) * self.out.stride + column);
                std::ptr::copy_nonoverlapping(sums.as_ptr(), out, columns);
            }
        }
    }

    /// Many rows: computes slice by slice of the group, each for all rows. `slice(from, depth)` returns the slice of
    /// the first panel, and the distance to the next panel's slice in elements.
    fn block<E: PanelElement>(
        &self,
        isa: Isa,
        item: ProductItem,
        mut slice: impl FnMut(usize, usize) -> (*const E, usize),
    ) {
        let ProductItem { first_panel, panels, first_row, rows } = item;
        let inputs = self.matrix.inputs;
        let step = rows_at_once(isa);
        for from in (0..inputs).step_by(SLICE_DEPTH) {
            let depth = SLICE_DEPTH.min(inputs - from);
            let (b, panel_stride) = slice(from, depth);
            // SAFETY: slices, rows and columns are inside the matrix, `x` and `out` by the contract of `plan`;
            // the output rows and columns of this item belong to it alone.
            unsafe {
                for row in (0..rows).step_by(step) {
                    let now = step.min(rows - row);
                    for panel in 0..panels {
                        let column = (first_panel + panel) * PANEL;
                        let tile = TileOperands {
                            a: self
                                .x
                                .wide
                                .base
                                .at((first_row + row) * self.x.wide.stride + from)
                                .cast_const(),
                            a_stride: self.x.wide.stride,
                            b: b.add(panel * panel_stride),
                            b_stride: PANEL,
                            c: self.out.base.at((first_row + row) * self.out.stride + column),
                            c_stride: self.out.stride,
                            depth,
                            accumulate: from > 0,
                            ahead: true,
                        };
                        self.multiply_within(isa, now, &tile, column);
                    }
                }
            }
        }
    }

    /// One panel whose last columns may be outside the writable columns.
    ///
    /// # Safety
    /// As [`multiply`], for the writable columns.
    unsafe fn multiply_within<E: PanelElement>(
        &self,
        isa: Isa,
        rows: usize,
        tile: &TileOperands<E>,
        column: usize,
    ) {
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
                multiply(isa, 1, &TileOperands { a, c: partial.as_mut_ptr(), c_stride: PANEL, ..*tile });
                std::ptr::copy_nonoverlapping(partial.as_ptr(), c, columns);
            }
        }
    }
}

#[cfg(test)]
mod tests;
