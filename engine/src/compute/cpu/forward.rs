//! One step: every worker walks through the same phases and claims rows, items or units in each.
//!
//! ```text
//!   embed+norm ▶ [ qkv ▶ rotate, write KV ▶ attend ▶ output ▶ add+norm ▶ gate, up, act ▶ down ▶ add+norm ]×layers
//!              ▶ final norm of wanted rows ▶ logits
//! ```
//!
//! The feed-forward phases are in `mlp`, those of layers with experts too. What adapters add is in `lora`.
//!
//! A phase writes buffers that the next one reads. The barrier between them is the end of `Worker::each`.
#![allow(
    unsafe_code,
    reason = "phases share buffers through raw pointers with a barrier between; see each block"
)]

mod lora;
mod mlp;

use std::sync::{Mutex, PoisonError};

use baton_connector::KvLayout;
use baton_connector::region::Region;

use super::activations::{ActivationRows, CpuActivations};
use super::arena::AlignedBuffer;
use super::attention::{self, AttentionUnit, HeadCache, KvHalf, QueryShape, positions_per_unit};
use super::bf16::{GROUP, ProductInputs};
use super::isa::{Isa, request};
use super::kernel::PANEL;
use super::matrix::{Matrix, PanelSums, Product, SLICE_VALUES};
use super::network::{CpuLayer, CpuMlp, CpuNetwork};
use super::rows::{Rows, SharedPtr};
use super::thread_pool::{JobPanicked, ThreadPool, Worker};
use super::vector;
use crate::compute::{LogitsRequest, SeqStep};
use crate::model::config::ModelConfig;
use crate::model::lora::{AdapterIndex, LoraAdapter, LoraSite};

/// A batch, row by row.
#[derive(Debug)]
pub(super) struct BatchPlan {
    rows: Vec<BatchRow>,
    seqs: Vec<BatchSequence>,
    units: Vec<AttentionUnit>,
    /// Rows whose logits are wanted, in order.
    wanted: Vec<usize>,
    /// Rows whose hidden states are wanted, in order.
    hidden: Vec<usize>,
    /// Rows with an adapter, in order.
    adapted: Vec<usize>,
    /// Their adapters, each once.
    adapters: Vec<AdapterIndex>,
}

#[derive(Clone, Copy, Debug)]
struct BatchRow {
    token: u32,
    seq: usize,
    position: usize,
}

#[derive(Debug)]
struct BatchSequence {
    first_row: usize,
    start: usize,
    /// Blocks of its table.
    table: usize,
    /// Start of each block, rank by rank.
    blocks: Vec<*mut u8>,
    adapter: Option<AdapterIndex>,
}

// SAFETY: the pointers are into the regions, which outlive the plan. The rows and units that workers claim determine
// which slots they touch.
unsafe impl Sync for BatchPlan {}

impl BatchPlan {
    pub(super) fn new(
        batch: &[SeqStep<'_>],
        layout: &KvLayout,
        regions: &[Region],
        config: &ModelConfig,
        workers: usize,
    ) -> Self {
        let (rows, seqs, units) = (Vec::new(), Vec::new(), Vec::new());
        let (wanted, hidden, adapted, adapters) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut plan = Self { rows, seqs, units, wanted, hidden, adapted, adapters };
        let group = config.heads / config.kv_heads;
        for (seq, step) in batch.iter().enumerate() {
            let (first_row, count) = (plan.rows.len(), step.tokens.len());
            let end = step.start + count;
            assert!(count > 0, "a step has at least one token");
            assert!(
                step.block_table.len() >= layout.blocks_for(end),
                "{} blocks of {} tokens for {end} positions",
                step.block_table.len(),
                layout.block_tokens
            );
            for (offset, token) in step.tokens.iter().enumerate() {
                assert!(
                    (*token as usize) < config.vocab,
                    "token {token} of a vocabulary of {}",
                    config.vocab
                );
                plan.rows.push(BatchRow { token: *token, seq, position: step.start + offset });
            }
            match step.logits {
                LogitsRequest::No => {}
                LogitsRequest::Last | LogitsRequest::Draw(_) => plan.wanted.push(first_row + count - 1),
                LogitsRequest::All | LogitsRequest::DrawEach(_) => {
                    plan.wanted.extend(first_row..first_row + count);
                }
                LogitsRequest::Hidden => plan.hidden.extend(first_row..first_row + count),
            }
            if let Some(adapter) = step.adapter {
                plan.adapted.extend(first_row..first_row + count);
                if !plan.adapters.contains(&adapter) {
                    plan.adapters.push(adapter);
                }
            }
            let in_rank = |region: &Region| {
                step.block_table.iter().map(|block| region.block_ptr(*block)).collect::<Vec<_>>()
            };
            let blocks = regions.iter().flat_map(in_rank).collect();
            plan.seqs.push(BatchSequence {
                first_row,
                start: step.start,
                table: step.block_table.len(),
                blocks,
                adapter: step.adapter,
            });
            // A long prompt is divided finely enough that every worker gets several units.
            let fair = (count * config.kv_heads).div_ceil(4 * workers).max(1);
            let run = positions_per_unit(group, end).min(fair.next_multiple_of(4));
            for kv_head in 0..config.kv_heads {
                for first in (0..count).step_by(run) {
                    plan.units.push(AttentionUnit { seq, kv_head, first, count: run.min(count - first) });
                }
            }
        }
        // The longest first, so that the workers finish together.
        plan.units.sort_by_key(|unit| {
            std::cmp::Reverse(unit.count * (plan.seqs[unit.seq].start + unit.first + unit.count))
        });
        plan
    }

    /// Whether every adapter of the batch is one of these.
    pub(super) fn fits(&self, adapters: &[LoraAdapter]) -> bool {
        self.seqs.iter().filter_map(|seq| seq.adapter).all(|adapter| adapter.0 < adapters.len())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub(super) fn rows(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn wanted_rows(&self) -> usize {
        self.wanted.len()
    }

    pub(super) fn hidden_rows(&self) -> usize {
        self.hidden.len()
    }
}

/// Adds a bias to rows of a panel's width. Columns beyond the bias are unchanged.
fn add_to_each(isa: Isa, rows: &mut [f32], bias: &[f32]) {
    for row in rows.as_chunks_mut::<PANEL>().0 {
        vector::add(isa, &mut row[..bias.len()], bias);
    }
}

/// Working memory of one worker.
#[derive(Debug)]
pub(super) struct WorkerScratch {
    slice: AlignedBuffer<f32>,
    attention: attention::AttentionScratch,
}

impl WorkerScratch {
    pub(super) fn new() -> Self {
        Self { slice: AlignedBuffer::zeroed(SLICE_VALUES), attention: attention::AttentionScratch::default() }
    }
}

/// The state that all phases share.
struct Step<'a> {
    network: &'a CpuNetwork,
    /// Layout of a block in one rank.
    shard: &'a KvLayout,
    isa: Isa,
    plan: &'a BatchPlan,
    workers: usize,
    rows: ActivationRows,
    logits: Rows,
    hidden: Rows,
    /// The highest rank of an adapter.
    rank: usize,
}

/// A product whose result is added to the residual stream.
struct Projection<'a> {
    matrix: &'a Matrix,
    bias: Option<&'a [f32]>,
    x: ProductInputs,
    norms: AddNorms<'a>,
    /// Its layer and place, for adapters.
    site: (usize, LoraSite),
}

/// Norms around an addition to the residual stream.
#[derive(Clone, Copy)]
struct AddNorms<'a> {
    /// Of the values that are added.
    post: Option<&'a [f32]>,
    /// Of the sum, before the next product.
    next: Option<&'a [f32]>,
}

/// Runs the step and leaves the wanted rows in `logits` and `hidden`.
#[allow(clippy::too_many_arguments, reason = "the parts of one executor, borrowed separately")]
pub(super) fn run(
    network: &CpuNetwork,
    shard: &KvLayout,
    isa: Isa,
    plan: &BatchPlan,
    activations: &mut CpuActivations,
    scratch: &[Mutex<WorkerScratch>],
    threads: &mut ThreadPool,
    logits: &mut [f32],
    hidden: &mut [f32],
    meanwhile: &mut dyn FnMut(),
) -> Result<(), JobPanicked> {
    let step = Step {
        network,
        shard,
        isa,
        plan,
        workers: threads.size(),
        rows: activations.share(network.bf16),
        logits: Rows { base: SharedPtr(logits.as_mut_ptr()), stride: network.config.vocab },
        hidden: Rows { base: SharedPtr(hidden.as_mut_ptr()), stride: network.config.hidden },
        rank: network.adapters.iter().map(|adapter| adapter.rank).max().unwrap_or(0),
    };
    threads.run_with(meanwhile, &|worker| {
        // Each worker has its own scratch, so the lock is never contended.
        let mut scratch = scratch[worker.index()].lock().unwrap_or_else(PoisonError::into_inner);
        step.walk(worker, &mut scratch);
    })
}

/// Prefetch distance, in rows of the residual stream, for the addition of a panel. The panel's columns are a page apart
/// from row to row, which no hardware prefetcher follows.
const ROWS_AHEAD: usize = 12;

impl Step<'_> {
    fn walk(&self, worker: &Worker<'_>, scratch: &mut WorkerScratch) {
        let layers = &self.network.layers;
        self.embed(worker);
        for (index, layer) in layers.iter().enumerate() {
            let qkv_width = layer.qkv.outputs();
            self.shrink(worker, index, LoraSite::Qkv, self.rows.normed.wide);
            self.product(worker, scratch, &layer.qkv, self.rows.normed, self.rows.qkv, qkv_width);
            self.rotate_and_store(worker, index, layer);
            self.attend(worker, scratch, index);
            let output = Projection {
                matrix: &layer.output,
                bias: layer.output_bias.as_deref(),
                x: self.rows.attended,
                norms: AddNorms { post: layer.attention_post_norm.as_deref(), next: Some(&layer.mlp_norm) },
                site: (index, LoraSite::Output),
            };
            self.project(worker, scratch, output);
            let norms = AddNorms {
                post: layer.mlp_post_norm.as_deref(),
                next: layers.get(index + 1).map(|next| next.attention_norm.as_slice()),
            };
            match &layer.mlp {
                CpuMlp::Dense(dense) => self.dense(worker, scratch, index, dense, norms),
                CpuMlp::Experts { router, router_bias, experts } => {
                    self.experts(worker, scratch, (router, router_bias.as_deref()), experts, norms);
                }
            }
        }
        self.hidden_states(worker);
        self.logits(worker, scratch);
    }

    /// Embeddings, angles, and the first norm.
    fn embed(&self, worker: &Worker<'_>) {
        let config = &self.network.config;
        let (rotary, ropes) = (config.attention.rotary_dim, &self.network.ropes);
        let scale = self.network.embedding_scale;
        worker.each(self.plan.rows.len(), |index| {
            let row = self.plan.rows[index];
            // SAFETY: each row is claimed by one worker.
            let (hidden, normed, angles) = unsafe {
                (
                    self.rows.hidden.row(index, config.hidden),
                    self.rows.normed.wide.row(index, config.hidden),
                    self.rows.angles.row(index, rotary * ropes.len()),
                )
            };
            self.network.embed(row.token, hidden);
            if let Some(scale) = scale {
                vector::scale(self.isa, hidden, scale);
            }
            for (rope, angles) in ropes.iter().zip(angles.chunks_exact_mut(rotary)) {
                let (cos, sin) = angles.split_at_mut(rotary / 2);
                for ((frequency, cos), sin) in rope.frequencies.iter().zip(cos).zip(sin) {
                    // The product is rounded to f32 as in transformers. Sine and cosine of it are then exact.
                    let (exact_sin, exact_cos) = f64::from(row.position as f32 * frequency).sin_cos();
                    *cos = exact_cos as f32 * rope.factor;
                    *sin = exact_sin as f32 * rope.factor;
                }
            }
            if let Some(first) = self.network.layers.first() {
                vector::rms_norm(self.isa, hidden, &first.attention_norm, config.norm_eps, normed);
                // SAFETY: as above.
                unsafe { self.rows.normed.finish(self.isa, index, 0, normed) };
            }
        });
    }

    /// The product of all rows with a matrix, see [`Product::plan`].
    ///
    /// # Safety
    /// As for [`Product::plan`].
    unsafe fn product_into<'m>(
        &self,
        matrix: &'m Matrix,
        x: ProductInputs,
        out: Rows,
        writable: usize,
    ) -> Product<'m> {
        // SAFETY: the caller's contract.
        unsafe { Product::plan(self.isa, matrix, x, self.plan.rows.len(), out, writable, self.workers) }
    }

    /// `out = x · matrixᵀ` for all rows.
    fn product(
        &self,
        worker: &Worker<'_>,
        scratch: &mut WorkerScratch,
        matrix: &Matrix,
        x: ProductInputs,
        out: Rows,
        writable: usize,
    ) {
        // SAFETY: the buffers are sized by `CpuActivations::fit`, and only this phase uses `out`. A row of `out`
        // consists of whole panels if `writable` is its stride.
        let product = unsafe { self.product_into(matrix, x, out, writable.min(out.stride)) };
        worker.each(product.items(), |item| product.compute(self.isa, item, &mut scratch.slice));
    }

    /// Adds biases, norms heads, rotates, and writes keys and values to the pool.
    fn rotate_and_store(&self, worker: &Worker<'_>, layer_index: usize, layer: &CpuLayer) {
        let config = &self.network.config;
        let (dim, query, kv) = (config.head_dim, config.query_width(), config.kv_width());
        let (rotary, ropes) = (config.attention.rotary_dim, self.network.ropes.len());
        worker.each(self.plan.rows.len(), |index| {
            let row = self.plan.rows[index];
            // SAFETY: each row is claimed by one worker; the angles are only read.
            let (qkv, angles) = unsafe {
                (self.rows.qkv.row(index, query + 2 * kv), self.rows.angles.row(index, rotary * ropes))
            };
            if let Some(bias) = &layer.qkv_bias {
                vector::add(self.isa, qkv, bias);
            }
            self.expand(layer_index, LoraSite::Qkv, index, 0..query + 2 * kv, qkv);
            let (cos, sin) = angles[layer.rope * rotary..][..rotary].split_at(rotary / 2);
            let (queries, keys_values) = qkv.split_at_mut(query);
            let (keys, values) = keys_values.split_at_mut(kv);
            let norms = layer.qk_norm.as_ref();
            for (heads, norm) in
                [(queries, norms.map(|both| &both.0)), (&mut *keys, norms.map(|both| &both.1))]
            {
                for head in heads.chunks_exact_mut(dim) {
                    if let Some(norm) = norm {
                        vector::rms_norm_in_place(self.isa, head, norm, config.norm_eps);
                    }
                    vector::rotate(self.isa, &mut head[..rotary], cos, sin);
                }
            }
            for head in 0..config.kv_heads {
                let cache = self.cache(row.seq, layer_index, head);
                // SAFETY: a row's position has its own slot, in blocks that this step may write.
                unsafe {
                    cache.store(self.isa, KvHalf::Keys, row.position, &keys[head * dim..][..dim]);
                    cache.store(self.isa, KvHalf::Values, row.position, &values[head * dim..][..dim]);
                }
            }
        });
    }

    fn attend(&self, worker: &Worker<'_>, scratch: &mut WorkerScratch, layer: usize) {
        let config = &self.network.config;
        let (dim, group) = (config.head_dim, config.heads / config.kv_heads);
        let sinks = self.network.layers[layer].sinks.as_deref();
        // Whole groups of integers. Otherwise, whole rows are rounded in a phase of their own.
        let by_heads = !self.network.integers || (group * dim).is_multiple_of(GROUP);
        let shape = QueryShape {
            isa: self.isa,
            group,
            factor: config.attention.factor,
            cap: config.attention.cap,
            sinks: None,
            window: config.attention.window(layer),
            bf16: self.network.bf16,
        };
        worker.each(self.plan.units.len(), |index| {
            let unit = self.plan.units[index];
            let seq = &self.plan.seqs[unit.seq];
            let first_row = seq.first_row + unit.first;
            let column = unit.kv_head * group * dim;
            let offset = |rows: Rows, i: usize, g: usize| {
                // SAFETY: row and head are inside the buffer.
                unsafe { rows.base.at((first_row + i) * rows.stride + column + g * dim) }
            };
            let attended = self.rows.attended.wide;
            let shape = QueryShape { sinks: sinks.map(|all| &all[unit.kv_head * group..][..group]), ..shape };
            // SAFETY: all keys and values up to this unit's last position were written in earlier steps or in the phase
            // before; rows and heads of a unit belong to it alone.
            unsafe {
                shape.attend(
                    &self.cache(unit.seq, layer, unit.kv_head),
                    seq.start + unit.first,
                    unit.count,
                    &mut scratch.attention,
                    |i, g| offset(self.rows.qkv, i, g).cast_const(),
                    |i, g| offset(attended, i, g),
                );
                for i in (0..unit.count).filter(|_| by_heads) {
                    let heads = std::slice::from_raw_parts_mut(offset(attended, i, 0), group * dim);
                    self.rows.attended.finish(self.isa, first_row + i, column, heads);
                }
            }
        });
        if !by_heads {
            worker.each(self.plan.rows.len(), |index| {
                // SAFETY: the phase before is over, and each row is claimed by one worker.
                unsafe {
                    let attended = self.rows.attended.wide.row(index, config.query_width());
                    self.rows.attended.finish(self.isa, index, 0, attended);
                }
            });
        }
    }

    /// Adds a projection to the residual stream and norms the result for the next product.
    fn project(&self, worker: &Worker<'_>, scratch: &mut WorkerScratch, projection: Projection<'_>) {
        let Projection { matrix, bias, x, norms, site: (layer, site) } = projection;
        let out = self.rows.projected;
        self.shrink(worker, layer, site, x.wide);
        // SAFETY: as in `product`.
        let product = unsafe { self.product_into(matrix, x, out, out.stride) };
        // A norm of the added values needs the whole row.
        let added = product.by_blocks() && norms.post.is_none();
        if added {
            worker.each(product.items(), |item| {
                product.compute_blocks(None, self.isa, item, &mut scratch.slice, |panel| {
                    let PanelSums { rows, columns, sums, .. } = panel;
                    if let Some(bias) = bias {
                        add_to_each(self.isa, sums, &bias[columns.clone()]);
                    }
                    for (row, sums) in rows.zip(sums.as_chunks::<PANEL>().0) {
                        let (Rows { base, stride }, later) = (self.rows.hidden, row + ROWS_AHEAD);
                        request(
                            base.0.wrapping_add(later * stride + columns.start).cast(),
                            size_of_val(sums),
                        );
                        // SAFETY: rows and columns of an item belong to it alone.
                        let hidden = unsafe { self.rows.hidden.row(row, self.network.config.hidden) };
                        vector::add(self.isa, &mut hidden[columns.clone()], sums);
                    }
                });
            });
        } else {
            worker.each(product.items(), |item| product.compute(self.isa, item, &mut scratch.slice));
        }
        let width = self.network.config.hidden;
        worker.each(self.plan.rows.len(), |index| {
            let is_adapted = self.is_adapted(layer, site, index);
            // SAFETY: each row is claimed by one worker.
            let projected = unsafe { self.rows.projected.row(index, width) };
            if !added {
                if let Some(bias) = bias {
                    vector::add(self.isa, projected, bias);
                }
                if norms.post.is_some() {
                    self.expand(layer, site, index, 0..width, projected);
                }
                self.add_to_residual(index, projected, norms.post);
            }
            // Without a norm of the sum, the adapter's part is added after it, whether the panels were added or the row.
            if is_adapted && norms.post.is_none() {
                projected.fill(0.0);
                self.expand(layer, site, index, 0..width, projected);
                self.add_to_residual(index, projected, None);
            }
            self.norm_residual(index, norms.next);
        });
    }

    /// Adds values to a row of the residual stream, which the caller has claimed.
    fn add_to_residual(&self, index: usize, values: &mut [f32], post: Option<&[f32]>) {
        if let Some(post) = post {
            vector::rms_norm_in_place(self.isa, values, post, self.network.config.norm_eps);
        }
        // SAFETY: the caller's claim.
        let hidden = unsafe { self.rows.hidden.row(index, self.network.config.hidden) };
        vector::add(self.isa, hidden, values);
    }

    /// Norms a row of the residual stream, which the caller has claimed, for the next product.
    fn norm_residual(&self, index: usize, next: Option<&[f32]>) {
        let (Some(next), config) = (next, &self.network.config) else { return };
        // SAFETY: the caller's claim.
        unsafe {
            let hidden = self.rows.hidden.row(index, config.hidden);
            let normed = self.rows.normed.wide.row(index, config.hidden);
            vector::rms_norm(self.isa, hidden, next, config.norm_eps, normed);
            self.rows.normed.finish(self.isa, index, 0, normed);
        }
    }

    /// Final norm of the rows whose hidden states are wanted.
    fn hidden_states(&self, worker: &Worker<'_>) {
        let config = &self.network.config;
        worker.each(self.plan.hidden.len(), |index| {
            // SAFETY: each wanted row is claimed by one worker and has a row of `hidden`; the residual stream is only
            // read.
            let (residual, hidden) = unsafe {
                (
                    self.rows.hidden.row(self.plan.hidden[index], config.hidden),
                    self.hidden.row(index, config.hidden),
                )
            };
            vector::rms_norm(self.isa, residual, &self.network.final_norm, config.norm_eps, hidden);
        });
    }

    /// Final norm and output matrix of the wanted rows.
    fn logits(&self, worker: &Worker<'_>, scratch: &mut WorkerScratch) {
        let config = &self.network.config;
        let wanted = &self.plan.wanted;
        worker.each(wanted.len(), |index| {
            // SAFETY: each wanted row is claimed by one worker; the residual stream is only read.
            let (hidden, normed) = unsafe {
                (
                    self.rows.hidden.row(wanted[index], config.hidden),
                    self.rows.normed.wide.row(index, config.hidden),
                )
            };
            vector::rms_norm(self.isa, hidden, &self.network.final_norm, config.norm_eps, normed);
            // SAFETY: as above.
            unsafe { self.rows.normed.finish(self.isa, index, 0, normed) };
        });
        // SAFETY: `logits` has a row of the vocabulary for each wanted row.
        let product = unsafe {
            Product::plan(
                self.isa,
                &self.network.head,
                self.rows.normed,
                wanted.len(),
                self.logits,
                config.vocab,
                self.workers,
            )
        };
        worker.each(product.items(), |item| product.compute(self.isa, item, &mut scratch.slice));
        if let Some(cap) = config.logit_cap {
            worker.each(wanted.len(), |index| {
                // SAFETY: each wanted row is claimed by one worker.
                let logits = unsafe { self.logits.row(index, config.vocab) };
                vector::soft_cap(self.isa, logits, 1.0, cap);
            });
        }
    }

    /// Keys and values of one of the model's KV heads.
    fn cache(&self, seq: usize, layer: usize, kv_head: usize) -> HeadCache<'_> {
        let (seq, heads) = (&self.plan.seqs[seq], self.shard.kv_heads);
        let blocks = &seq.blocks[kv_head / heads * seq.table..][..seq.table];
        HeadCache { layout: self.shard, layer, head: kv_head % heads, blocks }
    }
}
