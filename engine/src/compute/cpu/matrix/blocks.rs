//! Products in bfloat16 with many rows: sums stay in the member's own memory until they are final.
//!
//! An item is a group of panels by a block of rows. It goes slice by slice of the inputs, so that a panel's slice stays in
//! the first cache for all rows; the sums of the group stay in the second, 32 columns side by side: in the rows of the
//! output, kilobytes apart, they cost more than a third of the time. With the last slice a panel is final and is
//! handed over, still warm: rounded, activated or added to what it belongs to, it need not be written and read again.

use std::ops::Range;

use super::super::bf16::{self, Operands, Unit};
use super::super::isa::Isa;
use super::super::kernel::PANEL;
use super::{GROUP_PANELS, Panels, Product, SLICE_VALUES};

/// Most inputs of a slice where tiles multiply: that of a panel is 40 of the 48 KiB of a first cache. Measured on a Xeon
/// (2026-11-22): 2365 GFLOP/s a core with 640, 2322 with 704, 2305 with 512, 1968 with 256.
const SLICE_INPUTS: usize = 640;
/// The same for vectors, through which inputs pass the first cache too. A prompt of 512 on Zen 5 (2026-11-24), against slices of
/// 640, in turns: 1.04 times as fast with 256, 320 or 384, 1.02 with 128 or 192, 1.00 with 512.
const SLICE_INPUTS_VECTORS: usize = 320;
/// Most rows of an item: the sums of a group are 256 KiB.
pub(super) const BLOCK_ROWS: usize = 512;
const _: () = assert!(BLOCK_ROWS * GROUP_PANELS * PANEL <= SLICE_VALUES);

const _: () =
    assert!(SLICE_INPUTS.is_multiple_of(bf16::CHUNK) && SLICE_INPUTS_VECTORS.is_multiple_of(bf16::CHUNK));
const _: () = assert!(BLOCK_ROWS.is_multiple_of(bf16::ROW_STEP));

fn slice_inputs(unit: Unit) -> usize {
    match unit {
        #[cfg(target_arch = "x86_64")]
        Unit::Avx512Bf16 => SLICE_INPUTS_VECTORS,
        #[cfg(target_arch = "x86_64")]
        Unit::Amx => SLICE_INPUTS,
        Unit::Widened => SLICE_INPUTS,
    }
}

/// Final sums of one panel, or of one panel of each of two products beside each other.
#[derive(Debug)]
pub(in crate::compute::cpu) struct Sums<'a> {
    /// Rows of the output.
    pub(in crate::compute::cpu) rows: Range<usize>,
    /// Columns that the output has of this panel.
    pub(in crate::compute::cpu) columns: Range<usize>,
    /// Row by row, [`PANEL`] values each, zeros beyond the output's columns.
    pub(in crate::compute::cpu) sums: &'a mut [f32],
    /// The same of the other product.
    pub(in crate::compute::cpu) beside: &'a mut [f32],
}

impl Product<'_> {
    /// Whether it is in bfloat16 and has so many rows that it goes by blocks.
    pub(in crate::compute::cpu) fn by_blocks(&self) -> bool {
        matches!(self.matrix.panels, Panels::Pairs(..)) && self.rows > bf16::ROW_STEP
    }

    /// Computes one item of this product, and of another one that has the same shape and inputs; panel by panel, `finish`
    /// gets the sums. `scratch` has [`SLICE_VALUES`] values.
    ///
    /// # Panics
    /// When the product does not go by blocks, or the other is of another shape.
    pub(in crate::compute::cpu) fn compute_blocks(
        &self,
        beside: Option<&Product<'_>>,
        isa: Isa,
        item: usize,
        scratch: &mut [f32],
        mut finish: impl FnMut(Sums<'_>),
    ) {
        let (inputs, outputs) = (self.matrix.inputs, self.matrix.outputs);
        let (first, unit) = self.pairs();
        let other = beside.map(|beside| {
            let shape = (beside.matrix.inputs, beside.matrix.outputs, beside.rows, beside.item_rows);
            assert!(shape == (inputs, outputs, self.rows, self.item_rows), "products that are cut alike");
            beside.pairs().0
        });
        let matrices = 1 + usize::from(other.is_some());
        let (rows, columns) = self.extent(item);
        let padded_rows = rows.len().next_multiple_of(bf16::ROW_STEP);
        let panels = columns.start / PANEL..columns.end / PANEL;
        let panel_len = bf16::panel_len(inputs);
        let most = slice_inputs(unit);
        let depth = inputs.div_ceil(inputs.div_ceil(most)).next_multiple_of(bf16::CHUNK);
        // Every slice of the weights in the order in which they are used; which matrix, panel and input it begins with.
        let weights = |matrix: usize, panel: usize, from: usize| {
            let values = if matrix == 0 { first } else { other.unwrap_or(first) };
            values.get(panel * panel_len + bf16::panel_len(from)..).map_or(std::ptr::null(), <[u16]>::as_ptr)
        };
        let at_once = GROUP_PANELS / matrices;
        for group in panels.clone().step_by(at_once) {
            let group = group..panels.end.min(group + at_once);
            for from in (0..inputs).step_by(depth) {
                let now = depth.min(inputs - from);
                for panel in group.clone() {
                    let start = (panel - group.start) * matrices * padded_rows * PANEL;
                    let sums = &mut scratch[start..][..matrices * padded_rows * PANEL];
                    for (matrix, sums) in sums.chunks_exact_mut(padded_rows * PANEL).enumerate() {
                        let next = if matrix + 1 < matrices {
                            weights(matrix + 1, panel, from)
                        } else if panel + 1 < group.end {
                            weights(0, panel + 1, from)
                        } else if from + now < inputs {
                            weights(0, group.start, from + now)
                        } else {
                            // Most often the next item's.
                            weights(0, group.end, 0)
                        };
                        // SAFETY: slices and rows are inside the matrices and `x` by the contract of `plan`; items begin
                        // at multiples of `ROW_STEP` rows; the sums are this member's own.
                        unsafe {
                            let operands = Operands {
                                c: sums.as_mut_ptr(),
                                c_stride: PANEL,
                                accumulate: from > 0,
                                next: next.cast(),
                                ..Operands::from(&self.x, rows.start, from, weights(matrix, panel, from), now)
                            };
                            bf16::multiply(isa, unit, rows.len(), &operands);
                        }
                    }
                    if from + now == inputs {
                        let (sums, beside) = sums.split_at_mut(padded_rows * PANEL);
                        let beside = beside.get_mut(..rows.len() * PANEL).unwrap_or_default();
                        finish(Sums {
                            rows: rows.clone(),
                            columns: panel * PANEL..outputs.min((panel + 1) * PANEL),
                            sums: &mut sums[..rows.len() * PANEL],
                            beside,
                        });
                    }
                }
            }
        }
    }

    /// An item whose sums go into the output.
    pub(super) fn compute_blocks_into_output(&self, isa: Isa, item: usize, scratch: &mut [f32]) {
        self.compute_blocks(None, isa, item, scratch, |panel| {
            let columns = PANEL.min(self.writable - panel.columns.start);
            for (row, sums) in panel.rows.zip(panel.sums.as_chunks::<PANEL>().0) {
                // SAFETY: rows and columns are inside `out` by the contract of `plan`, and those of an item its own.
                unsafe {
                    let out = self.out.base.at(row * self.out.stride + panel.columns.start);
                    std::ptr::copy_nonoverlapping(sums.as_ptr(), out, columns);
                }
            }
        });
    }

    fn pairs(&self) -> (&[u16], Unit) {
        match &self.matrix.panels {
            Panels::Pairs(values, unit) => (values, *unit),
            _ => unreachable!("asked by `by_blocks` before"),
        }
    }
}
