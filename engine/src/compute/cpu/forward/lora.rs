//! Adapters: what they add to the projections of the rows that have one.
//!
//! Before a product, [`Step::shrink`] computes `scale * A x` of its inputs for each such row. [`Step::expand`] then adds
//! `B` times the result to a part of the row's outputs. The order of both sums depends on nothing but the row, and rows
//! without an adapter have the bits of an engine without adapters.

use std::ops::Range;

use super::Step;
use crate::compute::cpu::kernel::PANEL;
use crate::compute::cpu::rows::Rows;
use crate::compute::cpu::thread_pool::Worker;
use crate::compute::cpu::vector;
use crate::model::lora::{LoraAdapter, LoraSite};

/// Ranks that one item computes: few, because a decode step has few rows.
const RANKS_PER_ITEM: usize = 8;

/// Values of a row that several workers may read at once.
///
/// # Safety
/// The row has `width` values from `first` on, and no code writes them while the slice is used.
unsafe fn read<'r>(rows: Rows, row: usize, first: usize, width: usize) -> &'r [f32] {
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts(rows.base.at(row * rows.stride + first), width) }
}

impl Step<'_> {
    fn adapter_of(&self, row: usize) -> Option<&LoraAdapter> {
        let adapter = self.plan.seqs[self.plan.rows[row].seq].adapter?;
        Some(&self.network.adapters[adapter.0])
    }

    /// Whether a row has an adapter at this site.
    pub(super) fn is_adapted(&self, layer: usize, site: LoraSite, row: usize) -> bool {
        self.adapter_of(row).is_some_and(|adapter| !adapter.parts(layer, site).is_empty())
    }

    /// Whether any adapter of the step has a part at this site.
    fn has_part(&self, layer: usize, site: LoraSite) -> bool {
        let adapters = &self.network.adapters;
        self.plan.adapters.iter().any(|adapter| !adapters[adapter.0].parts(layer, site).is_empty())
    }

    /// `scale * A x` for every row with an adapter. A phase of its own, if any of their adapters has a part here.
    pub(super) fn shrink(&self, worker: &Worker<'_>, layer: usize, site: LoraSite, x: Rows) {
        // The same on every worker, which all count the phases alike.
        if !self.has_part(layer, site) {
            return;
        }
        let (adapted, chunks) = (&self.plan.adapted, self.rank.div_ceil(RANKS_PER_ITEM));
        worker.each(adapted.len() * chunks, |item| {
            let (row, start) = (adapted[item / chunks], item % chunks * RANKS_PER_ITEM);
            let Some(adapter) = self.adapter_of(row) else { return };
            for (number, part) in adapter.parts(layer, site).iter().enumerate() {
                let ranks = start..part.rank.min(start + RANKS_PER_ITEM);
                if ranks.is_empty() {
                    continue;
                }
                // SAFETY: the inputs were finished in a phase before, and the ranks of an item belong to it alone. They
                // are inside the buffer, which has `rank` values for each part.
                let (x, out) = unsafe {
                    let out = row * self.rows.adapted.stride + number * self.rank + start;
                    (
                        read(x, row, 0, part.inputs),
                        std::slice::from_raw_parts_mut(self.rows.adapted.base.at(out), ranks.len()),
                    )
                };
                for (out, a) in out.iter_mut().zip(part.a[start * part.inputs..].chunks_exact(part.inputs)) {
                    // In bfloat16 mode the inputs of every product are rounded.
                    let sum = match self.network.bf16 {
                        Some(_) => vector::dot_rounded(self.isa, x, a),
                        None => vector::dot(self.isa, x, a),
                    };
                    *out = part.scale * sum;
                }
            }
        });
    }

    /// Adds the adapter's part of a row's outputs. `out` is the columns `columns` of the site.
    pub(super) fn expand(
        &self,
        layer: usize,
        site: LoraSite,
        row: usize,
        columns: Range<usize>,
        out: &mut [f32],
    ) {
        let Some(adapter) = self.adapter_of(row) else { return };
        for (number, part) in adapter.parts(layer, site).iter().enumerate() {
            let start = columns.start.max(part.first);
            let end = columns.end.min(part.first + part.outputs);
            if start >= end {
                continue;
            }
            let out = &mut out[start - columns.start..end - columns.start];
            // SAFETY: `shrink` has written them in a phase before.
            let factors = unsafe { read(self.rows.adapted, row, number * self.rank, part.rank) };
            for (b, factor) in part.b.chunks_exact(part.outputs).zip(factors) {
                vector::add_scaled(self.isa, out, &b[start - part.first..end - part.first], *factor);
            }
        }
    }

    /// As [`Self::expand`] of gate and up, for the same columns of both.
    pub(super) fn expand_gate_up(
        &self,
        layer: usize,
        row: usize,
        columns: &Range<usize>,
        width: usize,
        (gate, up): (&mut [f32], &mut [f32]),
    ) {
        self.expand(layer, LoraSite::GateUp, row, columns.clone(), gate);
        self.expand(layer, LoraSite::GateUp, row, columns.start + width..columns.end + width, up);
    }

    /// As [`Self::expand_gate_up`], for all rows of a panel: [`PANEL`] values each.
    pub(super) fn expand_panels(
        &self,
        layer: usize,
        rows: &Range<usize>,
        columns: &Range<usize>,
        width: usize,
        (gate, up): (&mut [f32], &mut [f32]),
    ) {
        if self.plan.adapted.is_empty() {
            return;
        }
        let both = gate.as_chunks_mut::<PANEL>().0.iter_mut().zip(up.as_chunks_mut::<PANEL>().0);
        for (row, (gate, up)) in rows.clone().zip(both) {
            let count = columns.len();
            self.expand_gate_up(layer, row, columns, width, (&mut gate[..count], &mut up[..count]));
        }
    }

    /// Copies a panel's rows with an adapter to their place, for the next [`Self::shrink`]. Other rows of a panel are
    /// only written in the form that the unit multiplies.
    pub(super) fn keep_adapted(&self, to: Rows, rows: &Range<usize>, columns: &Range<usize>, panel: &[f32]) {
        if self.plan.adapted.is_empty() {
            return;
        }
        for (row, values) in rows.clone().zip(panel.as_chunks::<PANEL>().0) {
            if self.adapter_of(row).is_some() {
                // SAFETY: rows and columns of an item belong to it alone.
                unsafe {
                    let out = to.base.at(row * to.stride + columns.start);
                    std::ptr::copy_nonoverlapping(values.as_ptr(), out, columns.len());
                }
            }
        }
    }
}
