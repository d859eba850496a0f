//! Feed-forward layers: one network for every row, or the experts that each row has chosen.
//!
//! The rows of an expert are copied side by side, so that its matrices are read once for all of them. A row's result is
//! the sum over its experts in the order of their numbers. It therefore depends on nothing but the row.

use super::{AddNorms, PanelSums, Product, Projection, Step, WorkerScratch, add_to_each};
use crate::compute::cpu::bf16::ProductInputs;
use crate::compute::cpu::matrix::Matrix;
use crate::compute::cpu::network::CpuDense;
use crate::compute::cpu::rows::{Rows, SharedPtr};
use crate::compute::cpu::thread_pool::Worker;
use crate::compute::cpu::vector;
use crate::model::lora::LoraSite;
use crate::model::spec::Activation;

/// Items per worker in a phase over experts.
const ITEMS_PER_WORKER: usize = 8;
/// Fewest items of an expert, because experts have different numbers of rows.
const ITEMS_PER_EXPERT: usize = 4;

impl Step<'_> {
    /// A layer with one network.
    pub(super) fn dense(
        &self,
        worker: &Worker<'_>,
        scratch: &mut WorkerScratch,
        layer: usize,
        dense: &CpuDense,
        norms: AddNorms<'_>,
    ) {
        self.shrink(worker, layer, LoraSite::GateUp, self.rows.normed.wide);
        self.gate_up(worker, scratch, layer, dense);
        let down = Projection {
            matrix: &dense.down,
            bias: dense.down_bias.as_deref(),
            x: self.rows.gate,
            norms,
            site: (layer, LoraSite::Down),
        };
        self.project(worker, scratch, down);
    }

    /// `gate = activation(gate) * up`, or what the activation makes of both.
    fn activate(&self, gate: &mut [f32], up: &[f32]) {
        match self.network.config.mlp.activation {
            Activation::Silu => vector::silu_mul(self.isa, gate, up),
            Activation::GeluTanh => vector::gelu_mul(self.isa, gate, up),
            Activation::SwigluOai => vector::swiglu_mul(self.isa, gate, up, self.network.config.mlp.limit),
        }
    }

    /// Gate and up, activated. Both products have the same items, and the worker that computes an item of both
    /// activates it.
    fn gate_up(&self, worker: &Worker<'_>, scratch: &mut WorkerScratch, layer: usize, dense: &CpuDense) {
        let (gate_rows, up_rows) = (self.rows.gate, self.rows.up);
        let width = dense.gate.outputs();
        // SAFETY: as in `product`.
        let (gate, up) = unsafe {
            (
                self.product_into(&dense.gate, self.rows.normed, gate_rows.wide, gate_rows.wide.stride),
                self.product_into(&dense.up, self.rows.normed, up_rows, up_rows.stride),
            )
        };
        if gate.by_blocks() {
            worker.each(gate.items(), |item| {
                gate.compute_blocks(Some(&up), self.isa, item, &mut scratch.slice, |panel| {
                    let PanelSums { rows, columns, sums: gate, second: up } = panel;
                    if let Some((gate_bias, up_bias)) = &dense.gate_up_bias {
                        add_to_each(self.isa, gate, &gate_bias[columns.clone()]);
                        add_to_each(self.isa, up, &up_bias[columns.clone()]);
                    }
                    self.expand_panels(layer, &rows, &columns, width, (&mut *gate, &mut *up));
                    self.activate(gate, up);
                    self.keep_adapted(gate_rows.wide, &rows, &columns, gate);
                    // SAFETY: rows and columns of an item belong to it alone.
                    unsafe {
                        gate_rows.finish_panel(self.isa, rows.start, columns.start, columns.len(), gate);
                    }
                });
            });
            return;
        }
        worker.each(gate.items(), |item| {
            self.gate_up_item(scratch, Some(layer), dense, (&gate, &up), (gate_rows, up_rows), item);
        });
    }

    /// One item of both products, which writes the given rows. Those of a layer are those of the batch; those of experts
    /// have no adapter.
    fn gate_up_item(
        &self,
        scratch: &mut WorkerScratch,
        layer: Option<usize>,
        dense: &CpuDense,
        (gate, up): (&Product<'_>, &Product<'_>),
        (gate_rows, up_rows): (ProductInputs, Rows),
        item: usize,
    ) {
        let width = dense.gate.outputs();
        gate.compute(self.isa, item, &mut scratch.slice);
        up.compute(self.isa, item, &mut scratch.slice);
        let (item_rows, columns) = gate.extent(item);
        let columns = columns.start..columns.end.min(width);
        for row in item_rows {
            // SAFETY: rows and columns of an item belong to it alone.
            let (gate, up) = unsafe {
                (
                    &mut gate_rows.wide.row(row, width)[columns.clone()],
                    &mut up_rows.row(row, width)[columns.clone()],
                )
            };
            if let Some((gate_bias, up_bias)) = &dense.gate_up_bias {
                vector::add(self.isa, gate, &gate_bias[columns.clone()]);
                vector::add(self.isa, up, &up_bias[columns.clone()]);
            }
            if let Some(layer) = layer {
                self.expand_gate_up(layer, row, &columns, width, (&mut *gate, &mut *up));
            }
            self.activate(gate, up);
            // SAFETY: as above.
            unsafe { gate_rows.finish(self.isa, row, columns.start, gate) };
        }
    }

    /// A layer with experts.
    pub(super) fn experts(
        &self,
        worker: &Worker<'_>,
        scratch: &mut WorkerScratch,
        (router, bias): (&Matrix, Option<&[f32]>),
        experts: &[CpuDense],
        norms: AddNorms<'_>,
    ) {
        let logits = self.rows.experts.logits;
        self.product(worker, scratch, router, self.rows.normed, logits, logits.stride);
        self.route(worker, experts.len(), bias);
        self.gather(worker);
        self.experts_gate_up(worker, scratch, experts);
        self.experts_down(worker, scratch, experts);
        self.combine(worker, norms);
    }

    /// Chooses the experts of each row, and then gives each expert its rows.
    fn route(&self, worker: &Worker<'_>, experts: usize, bias: Option<&[f32]>) {
        let rows = self.rows.experts;
        let normalized = self.network.config.mlp.experts.as_ref().is_some_and(|experts| experts.normalized);
        worker.each(self.plan.rows.len(), |index| {
            // SAFETY: each row is claimed by one worker.
            unsafe {
                let logits = rows.logits.row(index, experts);
                if let Some(bias) = bias {
                    vector::add(self.isa, logits, bias);
                }
                let sum = vector::softmax_numerators(self.isa, logits, 1.0);
                rows.routes.choose(index, logits, sum, normalized);
            }
        });
        // SAFETY: the phase before is over, and there is one item.
        worker.each(1, |_| unsafe { rows.routes.group() });
    }

    /// Copies each row to its places.
    fn gather(&self, worker: &Worker<'_>) {
        let (width, inputs) = (self.network.config.hidden, self.rows.experts.inputs);
        worker.each(self.plan.rows.len(), |index| {
            // SAFETY: the normed rows are only read, and each place belongs to one row.
            unsafe {
                let normed = self.rows.normed.wide.row(index, width);
                for (place, _) in self.rows.experts.routes.of_row(index) {
                    let input = inputs.wide.row(place, width);
                    input.copy_from_slice(normed);
                    inputs.finish(self.isa, place, 0, input);
                }
            }
        });
    }

    /// Calls `part` for parts of each expert in use: the expert, its first place, its number of rows, and the items of
    /// the part: from the first on, a distance apart.
    fn each_expert(&self, worker: &Worker<'_>, mut part: impl FnMut(usize, usize, usize, (usize, usize))) {
        let routes = self.rows.experts.routes;
        // The number of items must not depend on the choice, see `routing`.
        let parts = (self.workers * ITEMS_PER_WORKER).div_ceil(routes.slots()).max(ITEMS_PER_EXPERT);
        worker.each(routes.slots() * parts, |index| {
            // SAFETY: the tables were grouped in a phase before.
            if let Some(run) = unsafe { routes.run(index / parts) } {
                part(run.expert, run.first, run.count, (index % parts, parts));
            }
        });
    }

    fn experts_gate_up(&self, worker: &Worker<'_>, scratch: &mut WorkerScratch, experts: &[CpuDense]) {
        let rows = self.rows.experts;
        self.each_expert(worker, |expert, first, count, (item, distance)| {
            let dense = &experts[expert];
            // SAFETY: the places of an expert are inside the buffers and belong to it. Those that the unit packs begin
            // at a multiple of its rows.
            let (x, gate_rows, up_rows) = unsafe {
                let up = rows.up.base.at(first * rows.up.stride);
                (rows.inputs.after(first), rows.gate.after(first), Rows { base: SharedPtr(up), ..rows.up })
            };
            let plan = |matrix, out: Rows| {
                // SAFETY: as above; the inputs were finished in the phase before.
                unsafe { Product::plan(self.isa, matrix, x, count, out, out.stride, self.workers) }
            };
            let (gate, up) = (plan(&dense.gate, gate_rows.wide), plan(&dense.up, up_rows));
            for item in (item..gate.items()).step_by(distance) {
                self.gate_up_item(scratch, None, dense, (&gate, &up), (gate_rows, up_rows), item);
            }
        });
    }

    /// The results replace the inputs, which are not read any more.
    fn experts_down(&self, worker: &Worker<'_>, scratch: &mut WorkerScratch, experts: &[CpuDense]) {
        let rows = self.rows.experts;
        self.each_expert(worker, |expert, first, count, (item, distance)| {
            let CpuDense { down, down_bias, .. } = &experts[expert];
            // SAFETY: as in `experts_gate_up`, whose phase is over.
            let (product, out) = unsafe {
                let (x, out) = (rows.gate.after(first), rows.inputs.after(first).wide);
                (Product::plan(self.isa, down, x, count, out, out.stride, self.workers), out)
            };
            for item in (item..product.items()).step_by(distance) {
                product.compute(self.isa, item, &mut scratch.slice);
                let Some(bias) = down_bias else { continue };
                let (item_rows, columns) = product.extent(item);
                let columns = columns.start..columns.end.min(bias.len());
                for row in item_rows {
                    // SAFETY: rows and columns of an item belong to it alone.
                    let sums = unsafe { &mut out.row(row, bias.len())[columns.clone()] };
                    vector::add(self.isa, sums, &bias[columns.clone()]);
                }
            }
        });
    }

    /// Adds the results of each row's experts, and their sum to the residual stream.
    fn combine(&self, worker: &Worker<'_>, norms: AddNorms<'_>) {
        let (width, rows) = (self.network.config.hidden, self.rows.experts);
        worker.each(self.plan.rows.len(), |index| {
            // SAFETY: each row is claimed by one worker; the results are only read.
            unsafe {
                let sum = self.rows.projected.row(index, width);
                sum.fill(0.0);
                for (place, weight) in rows.routes.of_row(index) {
                    vector::add_scaled(self.isa, sum, rows.inputs.wide.row(place, width), weight);
                }
                self.add_to_residual(index, sum, norms.post);
            }
            self.norm_residual(index, norms.next);
        });
    }
}
