//! Products in bfloat16 with many rows: sums stay in the worker's own memory until they are final.
//!
//! An item is a group of panels by a block of rows. It advances slice by slice of the inputs, so that a panel's slice
//! stays in the first-level cache for all rows. The sums of the group stay in the second-level cache, 32 columns side
//! by side. In the rows of the output, kilobytes apart, they would cost more than a third of the time. After the last
//! slice a panel is final and is passed to the caller while it is in the cache. The caller rounds it, activates it or
//! adds it to another value, so it is not written and read again.

use std::ops::Range;

use super::super::bf16::{self, Bf16Operands, Bf16Unit};
use super::super::isa::Isa;
use super::super::kernel::PANEL;
use super::{GROUP_PANELS, Panels, Product, SLICE_VALUES};

/// Most inputs of a slice for tiles: a panel's slice takes 40 of the 48 KiB of a first-level cache. Other sizes between
/// 512 and 704 are about 2 % slower, 256 is much slower.
const SLICE_INPUTS: usize = 640;
/// The same for vectors, whose inputs also pass through the first-level cache. Sizes from 256 to 384 are equally fast
/// on Zen 5.
const SLICE_INPUTS_VECTORS: usize = 320;
/// Most rows of an item. The sums of a group take 256 KiB.
pub(super) const BLOCK_ROWS: usize = 512;
const _: () = assert!(BLOCK_ROWS * GROUP_PANELS * PANEL <= SLICE_VALUES);

const _: () =
    assert!(SLICE_INPUTS.is_multiple_of(bf16::CHUNK) && SLICE_INPUTS_VECTORS.is_multiple_of(bf16::CHUNK));
const _: () = assert!(BLOCK_ROWS.is_multiple_of(bf16::ROW_STEP));

fn slice_inputs(unit: Bf16Unit) -> usize {
    match unit {
        #[cfg(target_arch = "x86_64")]
        Bf16Unit::Avx512Bf16 => SLICE_INPUTS_VECTORS,
        #[cfg(target_arch = "x86_64")]
        Bf16Unit::Amx => SLICE_INPUTS,
        Bf16Unit::Widened => SLICE_INPUTS,
    }
}

/// Final sums of one panel, or of the same panel of each of two products.
#[derive(Debug)]
pub(in crate::compute::cpu) struct PanelSums<'a> {
    /// Rows of the output.
    pub(in crate::compute::cpu) rows: Range<usize>,
    /// The output's columns in this panel.
    pub(in crate::compute::cpu) columns: Range<usize>,
    /// Row by row, [`PANEL`] values each, with zeros beyond the output's columns.
    pub(in crate::compute::cpu) sums: &'a mut [f32],
    /// The same for the second product.
    pub(in crate::compute::cpu) second: &'a mut [f32],
}

impl Product<'_> {
    /// Whether the product is in bfloat16 and has enough rows to be computed by blocks.
    pub(in crate::compute::cpu) fn by_blocks(&self) -> bool {
        matches!(self.matrix.panels, Panels::Pairs(..)) && self.rows > bf16::ROW_STEP
    }

    /// Computes one item of this product and of `second`, which has the same shape and inputs. `finish` gets the sums
    /// panel by panel. `scratch` has [`SLICE_VALUES`] values.
    ///
    /// # Panics
    /// When the product is not computed by blocks, or `second` has another shape.
    pub(in crate::compute::cpu) fn compute_blocks(
        &self,
        second: Option<&Product<'_>>,
        isa: Isa,
        item: usize,
        scratch: &mut [f32],
        mut finish: impl FnMut(PanelSums<'_>),
    ) {
        let (inputs, outputs) = (self.matrix.inputs, self.matrix.outputs);
        let (first, unit) = self.pairs();
        let other = second.map(|second| {
            let shape = (second.matrix.inputs, second.matrix.outputs, second.rows, second.item_rows);
            assert!(shape == (inputs, outputs, self.rows, self.item_rows), "products of the same shape");
            second.pairs().0
        });
        let matrices = 1 + usize::from(other.is_some());
        let (rows, columns) = self.extent(item);
        let padded_rows = rows.len().next_multiple_of(bf16::ROW_STEP);
        let panels = columns.start / PANEL..columns.end / PANEL;
        let panel_len = bf16::panel_len(inputs);
        let most = slice_inputs(unit);
        let depth = inputs.div_ceil(inputs.div_ceil(most)).next_multiple_of(bf16::CHUNK);
        // Every slice of the weights in the order of its use: the matrix, the panel and the first input.
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
                            // Usually the first slice of the next item.
                            weights(0, group.end, 0)
                        };
                        // SAFETY: slices and rows are inside the matrices and `x` by the contract of `plan`; items
                        // begin at multiples of `ROW_STEP` rows; the sums belong to this worker alone.
                        unsafe {
                            let operands = Bf16Operands {
                                c: sums.as_mut_ptr(),
                                c_stride: PANEL,
                                accumulate: from > 0,
                                next: next.cast(),
                                ..Bf16Operands::from(
                                    &self.x,
                                    rows.start,
                                    from,
                                    weights(matrix, panel, from),
                                    now,
                                )
                            };
                            bf16::multiply(isa, unit, rows.len(), &operands);
                        }
                    }
                    if from + now == inputs {
                        let (sums, second) = sums.split_at_mut(padded_rows * PANEL);
                        let second = second.get_mut(..rows.len() * PANEL).unwrap_or_default();
                        finish(PanelSums {
                            rows: rows.clone(),
                            columns: panel * PANEL..outputs.min((panel + 1) * PANEL),
                            sums: &mut sums[..rows.len() * PANEL],
                            second,
                        });
                    }
                }
            }
        }
    }

    /// An item whose sums are written to the output.
    pub(super) fn compute_blocks_into_output(&self, isa: Isa, item: usize, scratch: &mut [f32]) {
        self.compute_blocks(None, isa, item, scratch, |panel| {
            let columns = PANEL.min(self.writable - panel.columns.start);
            for (row, sums) in panel.rows.zip(panel.sums.as_chunks::<PANEL>().0) {
                // SAFETY: rows and columns are inside `out` by the contract of `plan`, and those of an item belong to
                // it alone.
                unsafe {
                    let out = self.out.base.at(row * self.out.stride + panel.columns.start);
                    std::ptr::copy_nonoverlapping(sums.as_ptr(), out, columns);
                }
            }
        });
    }

    fn pairs(&self) -> (&[u16], Bf16Unit) {
        match &self.matrix.panels {
            Panels::Pairs(values, unit) => (values, *unit),
            _ => unreachable!("asked by `by_blocks` before"),
        }
    }
}
