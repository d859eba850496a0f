//! The CUDA executor: a model and its paged KV pool on a GPU, without a CUDA toolkit to build or to run.
//!
//! ```text
//!   kernels   sources, launches       device    what a device does      driver    a GPU, through libcuda
//!   nvrtc     sources to machine code cubins    machine code on disk    software  a CPU in its place, with checks
//!   plan      one step as integers    mirror    who has newer bytes     model     weights on the device
//!   port      the pool, for others    forward   one step as launches    pieces    many copies as launches
//!   pool_size how many blocks fit
//! ```
//!
//! One step is one copy to the device (its integers), launches, and copies back: the tokens that were chosen there, and
//! the logits of rows whose token the host chooses. A step of one token for each sequence is padded to a bucket; its launches are recorded the second time a bucket is met and
//! launched as one graph from then on.
//!
//! The KV pool is one plain allocation in the layout of [`KvLayout`], which engines on the same host may read device to
//! device ([`port`]). Tiers and the other transports see a mirror of it in host memory: a block is copied there, on a
//! stream of its own and by the thread that wants it, when one that was lent is first read there ([`Executor::lend`]) or
//! one that is to be stored is stored ([`Executor::store`]), and back before the first step that reads a block written
//! from outside ([`Executor::landing`]). The thread of the steps waits for no such copy but that of blocks that are
//! hashed for people ([`Executor::publish`]), and leaves out those that others are copying.
//!
//! Not exact in the sense of the trait: the matrix library chooses its order of summation by shape, so that a row may
//! differ in its last bits with what is batched beside it.

pub mod cubins;
pub mod device;
pub mod driver;
mod forward;
pub mod kernels;
mod mirror;
mod model;
pub mod nvrtc;
mod open;
mod pieces;
mod plan;
pub mod pool_size;
pub mod port;
pub mod software;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use baton_connector::layout::KvDtype;
use baton_connector::region::Region;
use baton_connector::{BlockId, KvLayout};

pub use self::device::{Device, DeviceError, Element};
pub use self::model::LoadError;
pub use self::open::{Accelerator, DeviceChoice, GPU_MEMORY_UTILIZATION, open, shared_out};

use self::device::{Event, Graph, Host, HostAt, Priority, Slice, Stream};
use self::forward::Activations;
use self::kernels::{DRAW_WORDS, Shape};
use self::model::Network;
use self::plan::{BUCKETS, Bounds, Plan};
use self::pool_size::Memory;
pub use self::pool_size::PoolSize;
use self::port::{Level, Port};
use super::cpu::LoadProgress;
use super::step_hazards::Apart;
use super::{Executor, ExecutorError, Logits, Row, SeqStep};
use crate::model::config::ModelConfig;
use crate::model::weights::Weights;

/// How to run a model on a device.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// Blocks of the KV pool.
    pub pool_size: PoolSize,
    /// Tokens of one block; at least one.
    pub block_tokens: usize,
    /// Element type of weights, activations and KV.
    pub element: Element,
    /// Tokens of one step; at least one.
    pub max_rows: usize,
    /// Sequences of one step; at least one.
    pub max_sequences: usize,
    /// Tokens of one sequence; at least one.
    pub max_positions: usize,
    /// Makes the mirror: so many zeroed blocks of so many bytes.
    pub pool: fn(usize, usize) -> Region,
}

/// A model on a device. See the module's documentation.
pub struct CudaExecutor<D: Device> {
    device: D,
    config: ModelConfig,
    layout: KvLayout,
    shape: Shape,
    bounds: Bounds,
    network: Network,
    activations: Activations,
    pool: Slice,
    regions: Vec<Region>,
    port: Arc<Port>,
    mirror_host: Host,
    /// Of a step's integers, here and there.
    words_host: Host,
    words: Slice,
    apart: Apart,
    /// Of what comes back: chosen tokens, then logits.
    results_host: Host,
    results: Slice,
    chosen_bytes: usize,
    wanted_max: usize,
    compute: Stream,
    copies: Stream,
    computed: Event,
    copied: Event,
    /// By bucket, and whether any token is chosen on the device.
    graphs: HashMap<(usize, bool), Graph>,
    /// Buckets that have run once: the ways to compute their products are known.
    met: HashSet<(usize, bool)>,
}

impl<D: Device> CudaExecutor<D> {
    /// Copies the weights to the device and allocates everything that steps need. `progress` is called after each
    /// tensor.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load(
        mut device: D,
        weights: &Weights,
        config: &ModelConfig,
        options: &DeviceOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, LoadError> {
        let dtype = match options.element {
            Element::F32 => KvDtype::F32,
            Element::Bf16 => KvDtype::Bf16,
        };
        let layout = config.kv_layout(options.block_tokens, dtype);
        let mut bounds = bounds(config, options)?;
        if options.max_sequences > bounds.bucket {
            tracing::warn!(
                max_num_seqs = options.max_sequences,
                recorded = bounds.bucket,
                "decode steps above the recorded graphs are slower, lower --max-num-seqs to avoid them"
            );
        }
        let shape = Shape {
            element: options.element,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            decode_stages: kernels::decode_stages(config.head_dim, device.shared_bytes_max()),
            block_tokens: options.block_tokens,
            block_stride: layout.block_bytes() / layout.dtype.bytes(),
            norm_eps: config.norm_eps,
        };
        let (compute, copies) = (device.stream(Priority::Steps)?, device.stream(Priority::Copies)?);
        let network = Network::load(
            &mut device,
            compute,
            weights,
            config,
            (options.element, options.max_positions),
            progress,
        )?;
        let multiprocessors = device.multiprocessors();
        let mut own = network.bytes;
        let mut room = |bytes: usize| {
            own += bytes.max(4);
            device.alloc(bytes.max(4)).map(|buffer| Slice::of(buffer, bytes.max(4)))
        };
        let wanted_max = bounds.bucket;
        let chosen_bytes = (wanted_max * 4).next_multiple_of(256);
        let results = room(chosen_bytes + wanted_max * config.vocab * 4)?;
        let words = room(bounds.words * 4)?;
        let activations = Activations::new(&mut room, &shape, config, &bounds, multiprocessors)?;
        let blocks = blocks(&device, options, (own, layout.block_bytes()))?;
        bounds.blocks = blocks;
        let pool_bytes = blocks * layout.block_bytes();
        let (pool, memory) = device.alloc_shared(pool_bytes)?;
        let pool = Slice::of(pool, pool_bytes);
        let region = (options.pool)(blocks, layout.block_bytes());
        Ok(Self {
            mirror_host: device.host_over(&region)?,
            words_host: device.host(words.bytes)?,
            results_host: device.host(results.bytes)?,
            computed: device.event()?,
            copied: device.event()?,
            port: Arc::new(Port::new(memory, region.clone())),
            regions: vec![region],
            apart: Apart::new(blocks),
            config: config.clone(),
            graphs: HashMap::new(),
            met: HashSet::new(),
            device,
            layout,
            shape,
            bounds,
            network,
            activations,
            pool,
            words,
            results,
            chosen_bytes,
            wanted_max,
            compute,
            copies,
        })
    }

    /// The device.
    pub fn device(&mut self) -> &mut D {
        &mut self.device
    }

    /// Runs and records decode steps of every bucket, of padding alone: the first requests then wait neither for the
    /// comparison of ways to compute a product nor for a recording.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn warm_up(&mut self) -> Result<(), DeviceError> {
        let most = self.bounds.bucket;
        for bucket in BUCKETS.into_iter().filter(|bucket| *bucket <= most) {
            for sampled in [true, false] {
                let plan = Plan::padding(bucket, sampled);
                // Once as it is, once recorded.
                for _ in 0..2 {
                    self.send(&plan)?;
                    self.decode_step((bucket, sampled), &plan)?;
                    self.device.record(self.computed, self.compute)?;
                    self.device.synchronize(self.computed)?;
                }
            }
        }
        Ok(())
    }

    /// The step's integers, on their way to the device.
    fn send(&mut self, plan: &Plan) -> Result<(), DeviceError> {
        let bytes: Vec<u8> = plan.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let words = HostAt { host: self.words_host, offset: 0 };
        self.device.write_host(words, &bytes)?;
        self.device.upload(self.compute, words, self.words.part(0, bytes.len()))
    }

    /// What the device says, unless it was given up; and gives it up for whatever fails. Blocks count as copied to the device
    /// before they are, and what a step has left of its own is undefined: so nothing goes on from there.
    fn used<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, DeviceError>,
    ) -> Result<T, ExecutorError> {
        let done = self.port.usable().and_then(|()| work(self));
        done.inspect_err(|error| self.port.failed(error))
            .map_err(|error| ExecutorError::Device(error.to_string()))
    }

    fn step(
        &mut self,
        batch: &[SeqStep<'_>],
        logits: &mut Logits,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), DeviceError> {
        let plan = Plan::new(batch, &self.bounds).map_err(DeviceError::Step)?;
        self.apart.check(batch, self.layout.block_tokens).map_err(DeviceError::Step)?;
        self.onboard(batch)?;
        self.send(&plan)?;
        match plan.bucket.map(|bucket| (bucket, plan.sampled)) {
            Some(key) => self.decode_step(key, &plan)?,
            None => self.layers(&plan)?,
        }
        for seq in batch {
            let (first, end) = (seq.start / self.layout.block_tokens, seq.start + seq.tokens.len());
            let written = &seq.block_table[first..end.div_ceil(self.layout.block_tokens)];
            let mut mirror = self.port.mirror();
            written.iter().for_each(|block| mirror.computed(*block));
        }
        // One piece, unless somebody wants the logits of a whole prompt.
        for first in (0..plan.wanted_rows).step_by(self.wanted_max) {
            let rows = self.wanted_max.min(plan.wanted_rows - first);
            if plan.bucket.is_none() {
                self.head(&plan, first, rows)?;
            }
            let real = rows.min(plan.wanted_real - first);
            self.fetch(&plan, first, real, logits, meanwhile)?;
        }
        if plan.wanted_rows == 0 {
            self.device.record(self.computed, self.compute)?;
            self.device.synchronize_beside(self.computed, meanwhile)?;
        }
        Ok(())
    }

    /// The first time as it is, so that products are known; the second time recorded; then replayed.
    fn decode_step(&mut self, key: (usize, bool), plan: &Plan) -> Result<(), DeviceError> {
        if let Some(graph) = self.graphs.get(&key) {
            return self.device.replay(*graph, self.compute);
        }
        if !self.met.contains(&key) {
            self.layers(plan)?;
            self.head(plan, 0, plan.wanted_rows)?;
            self.met.insert(key);
            return Ok(());
        }
        self.device.begin_capture(self.compute)?;
        let issued = self.layers(plan).and_then(|()| self.head(plan, 0, plan.wanted_rows));
        let graph = self.device.end_capture(self.compute);
        issued?;
        let graph = graph?;
        self.graphs.insert(key, graph);
        self.device.replay(graph, self.compute)
    }

    /// Copies to the device what was written from outside, is read for the first time, and was not brought there
    /// ([`Port::onto_device`]).
    fn onboard(&mut self, batch: &[SeqStep<'_>]) -> Result<(), DeviceError> {
        let block_tokens = self.layout.block_tokens;
        // What lies behind earlier positions is of no use: a read that failed may have left it.
        let read = batch.iter().flat_map(|seq| seq.block_table[..seq.start.div_ceil(block_tokens)].iter());
        let landed = self.port.onboard(read.copied());
        if landed.is_empty() {
            return Ok(());
        }
        for block in landed {
            let (host, device) = self.both(block);
            self.device.upload(self.copies, host, device)?;
        }
        self.device.record(self.copied, self.copies)?;
        self.device.wait(self.compute, self.copied)
    }

    /// A block in the mirror and in the pool.
    fn both(&self, block: BlockId) -> (HostAt, Slice) {
        let bytes = self.layout.block_bytes();
        let offset = block.index() * bytes;
        (HostAt { host: self.mirror_host, offset }, self.pool.part(offset, bytes))
    }

    /// Brings back `rows` wanted rows from `first` on: the tokens that were chosen, and the logits of the others. Waits for
    /// them.
    fn fetch(
        &mut self,
        plan: &Plan,
        first: usize,
        rows: usize,
        logits: &mut Logits,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), DeviceError> {
        let to_host = plan.rows_to_host(first, rows);
        let row_bytes = self.config.vocab * 4;
        let chosen = plan.sampled.then_some((0, rows * 4));
        let values =
            to_host.iter().map(|run| (self.chosen_bytes + run.start * row_bytes, run.len() * row_bytes));
        let pieces: Vec<(usize, usize)> = chosen.into_iter().chain(values).collect();
        for &(at, bytes) in &pieces {
            let to = HostAt { host: self.results_host, offset: at };
            self.device.download(self.compute, self.results.part(at, bytes), to)?;
        }
        self.device.record(self.computed, self.compute)?;
        self.device.synchronize_beside(self.computed, meanwhile)?;
        let mut raw = Vec::new();
        let (mut earlier, mut tokens) = (logits.rows(), Vec::new());
        for (index, (at, bytes)) in pieces.into_iter().enumerate() {
            raw.resize(bytes, 0);
            self.device.read_host(HostAt { host: self.results_host, offset: at }, &mut raw)?;
            let words = raw.as_chunks::<4>().0;
            if plan.sampled && index == 0 {
                let token = |raw: &[u8; 4]| u32::try_from(i32::from_le_bytes(*raw)).ok();
                tokens.extend(words.iter().map(token).map(Row::Drawn));
            } else {
                logits.values.extend(words.iter().map(|raw| f32::from_le_bytes(*raw)));
            }
        }
        if plan.sampled {
            for row in to_host.into_iter().flatten() {
                tokens[row] = Row::Values(earlier);
                earlier += 1;
            }
        }
        logits.chosen.extend(tokens);
        Ok(())
    }

    /// Makes both sides of these blocks the same, and waits for it; those of which others' copies are under way are left out
    /// ([`Port::begin_level`]). The host's side is newer only of what was written from
    /// outside and never read by a step.
    fn level(&mut self, blocks: &[BlockId]) -> Result<Vec<BlockId>, DeviceError> {
        let level = self.port.begin_level(blocks)?;
        let copied = self.copy_both_ways(&level);
        self.port.end_level(&level, &copied);
        copied.map(|()| level.level)
    }

    fn copy_both_ways(&mut self, level: &Level) -> Result<(), DeviceError> {
        if level.down.is_empty() && level.up.is_empty() {
            return Ok(());
        }
        for &block in &level.down {
            let (host, device) = self.both(block);
            self.device.download(self.copies, device, host)?;
        }
        for &block in &level.up {
            let (host, device) = self.both(block);
            self.device.upload(self.copies, host, device)?;
        }
        self.device.record(self.copied, self.copies)?;
        self.device.synchronize(self.copied)
    }
}

/// Blocks of the pool, with weights and buffers of so many bytes in place.
fn blocks(
    device: &impl Device,
    options: &DeviceOptions,
    (own, block_bytes): (usize, usize),
) -> Result<usize, LoadError> {
    let most = i32::MAX as usize / options.block_tokens;
    let share = match options.pool_size {
        PoolSize::Blocks(blocks) if blocks == 0 || blocks > most => {
            return Err(LoadError::Unsupported(format!(
                "the KV pool has {blocks} blocks, expected 1 to {most}"
            )));
        }
        PoolSize::Blocks(blocks) => return Ok(blocks),
        PoolSize::Share(share) => share,
    };
    let total = device.total_bytes()?;
    let (free, reserve) = (device.free_bytes()?, Memory::reserve_of(total));
    // Of an engine that has a part of the device, a part: others of the same device start beside it.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let host = (pool_size::host_bytes() as f64 * (share / GPU_MEMORY_UTILIZATION).min(1.0)) as usize;
    let memory = Memory { total, free, own, reserve, host };
    let chosen = pool_size::blocks(share, &memory, block_bytes, most)
        .map_err(|error| LoadError::Unsupported(error.to_string()))?;
    tracing::info!(
        blocks = chosen.blocks,
        tokens = chosen.blocks * options.block_tokens,
        mib = (chosen.blocks * block_bytes) >> 20,
        bound = chosen.bound,
        share,
        total_mib = total >> 20,
        free_mib = free >> 20,
        weights_and_buffers_mib = own >> 20,
        "KV cache sized from free device memory; --kv-cache-mib sets it"
    );
    Ok(chosen.blocks)
}

/// What a step may be at most; the blocks are set when the pool is sized.
fn bounds(config: &ModelConfig, options: &DeviceOptions) -> Result<Bounds, LoadError> {
    let unsupported = |what: String| Err(LoadError::Unsupported(what));
    kernels::supported(options.element, config.head_dim).map_err(LoadError::Unsupported)?;
    if options.block_tokens == 0 {
        return unsupported("block size must be at least 1 token".into());
    }
    if options.max_rows == 0 || options.max_sequences == 0 || options.max_positions == 0 {
        return unsupported("rows, sequences and positions of a step must be at least 1".into());
    }
    // Launches have a row of the grid for each row of a step.
    if options.max_rows > 65_535 {
        return unsupported(format!("a step has {} tokens, expected at most 65535", options.max_rows));
    }
    let bucket = BUCKETS.into_iter().find(|bucket| *bucket >= options.max_sequences);
    let bucket = bucket.unwrap_or(BUCKETS[BUCKETS.len() - 1]);
    let rows = options.max_rows.max(bucket);
    let tables = options.max_sequences * options.max_positions.div_ceil(options.block_tokens);
    let tiles = rows.div_ceil(kernels::TILE_QUERIES) + options.max_sequences;
    Ok(Bounds {
        rows,
        positions: options.max_positions,
        vocab: config.vocab,
        blocks: 0,
        block_tokens: options.block_tokens,
        // Every row may be wanted and drawn from.
        words: rows * (3 + 3 + 1 + DRAW_WORDS) + 4 * tiles + tables,
        sequences: options.max_sequences,
        bucket,
    })
}

impl<D: Device> Executor for CudaExecutor<D> {
    fn layout(&self) -> KvLayout {
        self.layout
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn vocab(&self) -> usize {
        self.config.vocab
    }

    fn run(
        &mut self,
        batch: &[SeqStep<'_>],
        logits: &mut Logits,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExecutorError> {
        logits.vocab = self.config.vocab;
        logits.values.clear();
        logits.chosen.clear();
        if batch.is_empty() {
            return Ok(());
        }
        self.used(|executor| executor.step(batch, logits, meanwhile))
    }

    /// The matrix library chooses its order of summation by shape.
    fn is_batch_invariant(&self) -> bool {
        false
    }

    fn landing(&mut self, blocks: &[BlockId]) {
        self.port.landing(blocks);
    }

    fn publish(&mut self, blocks: &[BlockId]) -> Result<Vec<BlockId>, ExecutorError> {
        self.used(|executor| executor.level(blocks))
    }

    /// Every step has been waited for, so that the device has finished what it wrote into them.
    fn lend(&mut self, blocks: &[BlockId]) -> Result<(), ExecutorError> {
        self.used(|executor| {
            executor.port.mirror().lend(blocks.iter().copied());
            // Those stay where they are; what only the mirror has is brought to the device.
            let only_here = executor.port.mirror().on_host(blocks);
            // None is left out: nothing lands in a block before copies from it are over.
            executor.level(&only_here).map(drop)
        })
    }

    /// As [`Self::lend`]: whoever stores them copies them out of the device ([`Port::store`]), and nothing is copied now.
    fn store(&mut self, _blocks: &[BlockId]) -> Result<(), ExecutorError> {
        self.usable()
    }

    fn usable(&self) -> Result<(), ExecutorError> {
        self.port.usable().map_err(|error| ExecutorError::Device(error.to_string()))
    }

    fn port(&self) -> Option<Arc<Port>> {
        Some(Arc::clone(&self.port))
    }
}

#[cfg(test)]
mod tests;
