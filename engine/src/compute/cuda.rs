//! The CUDA executor: a model and its paged KV pool on a GPU, without a CUDA toolkit to build or to run.
//!
//! ```text
//!   kernels     sources, launches            device          interface of a device
//!   driver      a GPU, through libcuda       open            the values of `--device`
//!   nvrtc       sources to machine code      cubins          machine code on disk
//!   model       weights on the device        plan            one step as integers
//!   forward     one step as launches         copy_pieces     many copies as launches
//!   mirror_map  which side has newer bytes   shared_kv_pool  the pool, for transports and tiers
//!   pool_size   number of blocks             kv_pool         the pool, for steps
//! ```
//!
//! One step consists of one copy to the device (its integers), launches, and copies back. The device returns the tokens
//! that it chose, and the logits of rows whose token the host chooses. A step of one token for each sequence is padded
//! to a bucket. Its launches are recorded at the second use of a bucket and replayed as one graph from then on.
//!
//! The KV pool is one plain allocation in the layout of [`KvLayout`], which engines on the same host may read device to
//! device ([`shared_kv_pool`]). The other transports use a mirror of the pool in host memory, which an engine without
//! handoffs does not have. A block is copied to the mirror at the first read of a leased block
//! ([`Executor::mark_leased`]), or to a tier when it is stored ([`Executor::store`]). The thread that needs the block
//! makes the copy, on a stream of its own. A block written from outside ([`Executor::reserve`]) is copied to the device
//! before the first step that reads it. The thread of the steps waits only for copies of blocks that are hashed for
//! debugging ([`Executor::publish`]), and leaves out blocks that other threads are copying.
//!
//! Not exact in the sense of the trait. The matrix library chooses its order of summation by shape, so the rest of the
//! batch may change a row's last bits.

pub mod copy_pieces;
pub mod cubins;
pub mod device;
pub mod driver;
mod forward;
pub mod kernels;
mod kv_pool;
mod mirror_map;
mod model;
pub mod nvrtc;
mod open;
mod plan;
pub mod pool_size;
pub mod shared_kv_pool;
mod supported;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use baton_connector::layout::KvDtype;
use baton_connector::region::Region;
use baton_connector::{BlockId, KvLayout};

pub use self::device::{Device, DeviceError, Element};
pub use self::model::{LoadError, narrow};
pub use self::open::{
    Accelerator, DeviceChoice, GPU_MEMORY_UTILIZATION, OpenExecutor, ProvidedDevice, open, shared_out,
};

use self::device::{DeviceSlice, Graph, HostBuffer, HostSlice, Priority, Stream, StreamEvent};
use self::forward::CudaActivations;
use self::kernels::{DRAW_WORDS, KernelFeatures, KernelShape};
use self::kv_pool::CudaKvPool;
use self::model::CudaNetwork;
use self::plan::{BUCKETS, StepBounds, StepPlan};
pub use self::pool_size::PoolSize;
use self::shared_kv_pool::{SharedKvPool, SyncPlan};
use super::cpu::WeightLoadProgress;
use super::step_hazards::StepHazards;
use super::{Executor, ExecutorError, Logits, LogitsRow, SeqStep};
use crate::model::config::ModelConfig;
use crate::model::weights::Weights;

/// Options of a model on a device.
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
    /// Allocates the mirror, if transports of host memory use the pool: number of zeroed blocks, bytes per block.
    pub mirror: Option<fn(usize, usize) -> Region>,
}

/// Buffers of a step, on the host and on the device.
struct StepBuffers {
    /// The step's integers.
    words_host: HostBuffer,
    words: DeviceSlice,
    /// Results of a step: chosen tokens, then logits.
    results_host: HostBuffer,
    results: DeviceSlice,
    chosen_bytes: usize,
    wanted_max: usize,
}

/// Streams of steps and of copies of blocks, each with an event.
struct Streams {
    compute: Stream,
    copies: Stream,
    computed: StreamEvent,
    copied: StreamEvent,
}

impl Streams {
    fn new(device: &mut impl Device) -> Result<Self, DeviceError> {
        Ok(Self {
            compute: device.stream(Priority::Steps)?,
            copies: device.stream(Priority::Copies)?,
            computed: device.event()?,
            copied: device.event()?,
        })
    }
}

/// Recorded decode steps, by bucket, and by whether any token is chosen on the device.
#[derive(Default)]
struct GraphCache {
    recorded: HashMap<(usize, bool), Graph>,
    /// Buckets that have run once, so their matmul plans exist.
    met: HashSet<(usize, bool)>,
}

/// A model on a device. See the module's documentation.
pub struct CudaExecutor<D: Device> {
    device: D,
    config: ModelConfig,
    layout: KvLayout,
    shape: KernelShape,
    bounds: StepBounds,
    network: CudaNetwork,
    activations: CudaActivations,
    kv: CudaKvPool,
    buffers: StepBuffers,
    hazards: StepHazards,
    streams: Streams,
    graphs: GraphCache,
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
        progress: &mut dyn FnMut(WeightLoadProgress),
    ) -> Result<Self, LoadError> {
        let dtype = match options.element {
            Element::F32 => KvDtype::F32,
            Element::Bf16 => KvDtype::Bf16,
        };
        let layout = config.kv_layout(options.block_tokens, dtype);
        let mut bounds = bounds(config, options)?;
        if options.max_sequences > bounds.bucket {
            tracing::warn!(
                event = "recorded_graphs_exceeded",
                max_num_seqs = options.max_sequences,
                recorded = bounds.bucket,
                "decode steps above the recorded graphs are slower, lower --max-num-seqs to avoid them"
            );
        }
        let shape = kernel_shape(&device, config, options, &layout);
        let streams = Streams::new(&mut device)?;
        let placement = (options.element, options.max_positions);
        let network = CudaNetwork::load(&mut device, streams.compute, weights, config, placement, progress)?;
        let multiprocessors = device.multiprocessors();
        let mut own = network.bytes;
        let mut room = |bytes: usize| {
            own += bytes.max(4);
            device.alloc(bytes.max(4)).map(|buffer| DeviceSlice::of(buffer, bytes.max(4)))
        };
        let wanted_max = bounds.bucket;
        let chosen_bytes = (wanted_max * 4).next_multiple_of(256);
        let results = room(chosen_bytes + wanted_max * config.vocab * 4)?;
        let words = room(bounds.words * 4)?;
        let activations = CudaActivations::new(&mut room, &shape, config, &bounds, multiprocessors)?;
        bounds.blocks = kv_pool::blocks(&device, options, own, layout.block_bytes())?;
        let kv = CudaKvPool::new(&mut device, options, bounds.blocks, layout.block_bytes())?;
        let (words_host, results_host) = (device.host(words.bytes)?, device.host(results.bytes)?);
        Ok(Self {
            hazards: StepHazards::new(bounds.blocks),
            config: config.clone(),
            device,
            layout,
            shape,
            bounds,
            network,
            activations,
            kv,
            buffers: StepBuffers { words_host, words, results_host, results, chosen_bytes, wanted_max },
            streams,
            graphs: GraphCache::default(),
        })
    }

    /// The device.
    pub fn device(&mut self) -> &mut D {
        &mut self.device
    }

    /// Runs and records decode steps of every bucket, with padding only. The first requests then wait neither for the
    /// timing of matmul plans nor for a recording.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn warm_up(&mut self) -> Result<(), DeviceError> {
        let most = self.bounds.bucket;
        for bucket in BUCKETS.into_iter().filter(|bucket| *bucket <= most) {
            for sampled in [true, false] {
                let plan = StepPlan::padding(bucket, sampled);
                // Once without recording, once recorded.
                for _ in 0..2 {
                    self.send(&plan)?;
                    self.decode_step((bucket, sampled), &plan)?;
                    self.device.record(self.streams.computed, self.streams.compute)?;
                    self.device.synchronize(self.streams.computed)?;
                }
            }
        }
        Ok(())
    }

    /// Copies the step's integers to the device.
    fn send(&mut self, plan: &StepPlan) -> Result<(), DeviceError> {
        let bytes: Vec<u8> = plan.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let words = HostSlice { host: self.buffers.words_host, offset: 0 };
        self.device.write_host(words, &bytes)?;
        self.device.upload(self.streams.compute, words, self.buffers.words.part(0, bytes.len()))
    }

    /// Runs `work` unless the device is disabled. Any failure disables the device: blocks count as copied to it before
    /// they are, and a failed step leaves undefined data.
    fn used<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, DeviceError>,
    ) -> Result<T, ExecutorError> {
        let done = self.kv.shared_pool.usable().and_then(|()| work(self));
        done.inspect_err(|error| self.kv.shared_pool.record_failure(error))
            .map_err(|error| ExecutorError::Device(error.to_string()))
    }

    fn step(
        &mut self,
        batch: &[SeqStep<'_>],
        logits: &mut Logits,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), DeviceError> {
        let plan = StepPlan::new(batch, &self.bounds).map_err(DeviceError::Step)?;
        self.hazards.check(batch, self.layout.block_tokens).map_err(DeviceError::Step)?;
        self.upload_for_step(batch)?;
        self.send(&plan)?;
        match plan.bucket.map(|bucket| (bucket, plan.sampled)) {
            Some(key) => self.decode_step(key, &plan)?,
            None => self.layers(&plan)?,
        }
        for seq in batch {
            let (first, end) = (seq.start / self.layout.block_tokens, seq.start + seq.tokens.len());
            let written = &seq.block_table[first..end.div_ceil(self.layout.block_tokens)];
            let mut mirror = self.kv.shared_pool.mirror();
            written.iter().for_each(|block| mirror.mark_device_newer(*block));
        }
        // One piece, unless the logits of a whole prompt are wanted.
        for first in (0..plan.wanted_rows).step_by(self.buffers.wanted_max) {
            let rows = self.buffers.wanted_max.min(plan.wanted_rows - first);
            if plan.bucket.is_none() {
                self.head(&plan, first, rows)?;
            }
            let real = rows.min(plan.wanted_real - first);
            self.fetch(&plan, first, real, logits, meanwhile)?;
        }
        if plan.wanted_rows == 0 {
            self.device.record(self.streams.computed, self.streams.compute)?;
            self.device.synchronize_with(self.streams.computed, meanwhile)?;
        }
        Ok(())
    }

    /// The first time without recording, so that matmul plans exist. The second time recorded, then replayed.
    fn decode_step(&mut self, key: (usize, bool), plan: &StepPlan) -> Result<(), DeviceError> {
        if let Some(graph) = self.graphs.recorded.get(&key) {
            return self.device.replay(*graph, self.streams.compute);
        }
        if !self.graphs.met.contains(&key) {
            self.layers(plan)?;
            self.head(plan, 0, plan.wanted_rows)?;
            self.graphs.met.insert(key);
            return Ok(());
        }
        self.device.begin_capture(self.streams.compute)?;
        let issued = self.layers(plan).and_then(|()| self.head(plan, 0, plan.wanted_rows));
        let graph = self.device.end_capture(self.streams.compute);
        issued?;
        let graph = graph?;
        self.graphs.recorded.insert(key, graph);
        self.device.replay(graph, self.streams.compute)
    }

    /// Copies blocks to the device that were written from outside, are read for the first time, and were not uploaded
    /// ([`SharedKvPool::upload`]).
    fn upload_for_step(&mut self, batch: &[SeqStep<'_>]) -> Result<(), DeviceError> {
        let block_tokens = self.layout.block_tokens;
        // Bytes after the earlier positions are not needed; a failed read may have left them.
        let read = batch.iter().flat_map(|seq| seq.block_table[..seq.start.div_ceil(block_tokens)].iter());
        let landed = self.kv.shared_pool.take_step_uploads(read.copied());
        if landed.is_empty() {
            return Ok(());
        }
        for block in landed {
            let (host, device) = self.kv.both(block);
            self.device.upload(self.streams.copies, host, device)?;
        }
        self.device.record(self.streams.copied, self.streams.copies)?;
        self.device.wait(self.streams.compute, self.streams.copied)
    }

    /// Copies the results of `rows` wanted rows from `first` on to the host and waits: the chosen tokens, and the
    /// logits of the other rows.
    fn fetch(
        &mut self,
        plan: &StepPlan,
        first: usize,
        rows: usize,
        logits: &mut Logits,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), DeviceError> {
        let to_host = plan.rows_to_host(first, rows);
        let row_bytes = self.config.vocab * 4;
        let chosen = plan.sampled.then_some((0, rows * 4));
        let values = to_host
            .iter()
            .map(|run| (self.buffers.chosen_bytes + run.start * row_bytes, run.len() * row_bytes));
        let pieces: Vec<(usize, usize)> = chosen.into_iter().chain(values).collect();
        for &(at, bytes) in &pieces {
            let to = HostSlice { host: self.buffers.results_host, offset: at };
            self.device.download(self.streams.compute, self.buffers.results.part(at, bytes), to)?;
        }
        self.device.record(self.streams.computed, self.streams.compute)?;
        self.device.synchronize_with(self.streams.computed, meanwhile)?;
        let mut raw = Vec::new();
        let (mut earlier, mut tokens) = (logits.rows(), Vec::new());
        for (index, (at, bytes)) in pieces.into_iter().enumerate() {
            raw.resize(bytes, 0);
            self.device.read_host(HostSlice { host: self.buffers.results_host, offset: at }, &mut raw)?;
            let words = raw.as_chunks::<4>().0;
            if plan.sampled && index == 0 {
                let token = |raw: &[u8; 4]| u32::try_from(i32::from_le_bytes(*raw)).ok();
                tokens.extend(words.iter().map(token).map(LogitsRow::Drawn));
            } else {
                logits.values.extend(words.iter().map(|raw| f32::from_le_bytes(*raw)));
            }
        }
        if plan.sampled {
            for row in to_host.into_iter().flatten() {
                tokens[row] = LogitsRow::Values(earlier);
                earlier += 1;
            }
        }
        logits.chosen.extend(tokens);
        Ok(())
    }

    /// Makes both sides of these blocks the same, and waits for the copies. Blocks that another thread is copying are
    /// left out ([`SharedKvPool::begin_sync`]). The host's side is newer only for blocks that were written from outside
    /// and never read by a step.
    fn sync_blocks(&mut self, blocks: &[BlockId]) -> Result<Vec<BlockId>, DeviceError> {
        let plan = self.kv.shared_pool.begin_sync(blocks)?;
        let copied = self.copy_sync_plan(&plan);
        self.kv.shared_pool.end_sync(&plan, &copied);
        copied.map(|()| plan.blocks)
    }

    fn copy_sync_plan(&mut self, plan: &SyncPlan) -> Result<(), DeviceError> {
        if plan.downloads.is_empty() && plan.uploads.is_empty() {
            return Ok(());
        }
        for &block in &plan.downloads {
            let (host, device) = self.kv.both(block);
            self.device.download(self.streams.copies, device, host)?;
        }
        for &block in &plan.uploads {
            let (host, device) = self.kv.both(block);
            self.device.upload(self.streams.copies, host, device)?;
        }
        self.device.record(self.streams.copied, self.streams.copies)?;
        self.device.synchronize(self.streams.copied)
    }
}

/// Sizes of the model for launches.
fn kernel_shape(
    device: &impl Device,
    config: &ModelConfig,
    options: &DeviceOptions,
    layout: &KvLayout,
) -> KernelShape {
    KernelShape {
        element: options.element,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        decode_stages: kernels::decode_stages(config.head_dim, device.shared_bytes_max()),
        block_tokens: options.block_tokens,
        block_stride: layout.block_bytes() / layout.dtype.bytes(),
        norm_eps: config.norm_eps,
        features: KernelFeatures::of(config),
        factor: config.attention.factor,
        score_cap: config.attention.cap.unwrap_or(0.0),
        rotary_dim: config.attention.rotary_dim,
    }
}

/// Upper bounds of a step. The number of blocks is set when the pool is sized.
fn bounds(config: &ModelConfig, options: &DeviceOptions) -> Result<StepBounds, LoadError> {
    let unsupported = |what: String| Err(LoadError::Unsupported(what));
    supported::computed(config, options.element).map_err(LoadError::Unsupported)?;
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
    Ok(StepBounds {
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
        &self.kv.regions
    }

    fn blocks(&self) -> usize {
        self.bounds.blocks
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

    fn reserve(&mut self, blocks: &[BlockId]) {
        self.kv.shared_pool.reserve(blocks);
    }

    /// Without a mirror nothing is copied: [`Self::read_block`] reads the device.
    fn publish(&mut self, blocks: &[BlockId]) -> Result<Vec<BlockId>, ExecutorError> {
        if self.kv.regions.is_empty() {
            return self.usable().map(|()| blocks.to_vec());
        }
        self.used(|executor| executor.sync_blocks(blocks))
    }

    fn read_block(&mut self, block: BlockId) -> Result<Vec<Vec<u8>>, ExecutorError> {
        self.used(|executor| executor.kv.read_block(&mut executor.device, &executor.streams, block))
            .map(|bytes| vec![bytes])
    }

    /// The engine has waited for every step, so the device has finished writing these blocks.
    fn mark_leased(&mut self, blocks: &[BlockId]) -> Result<(), ExecutorError> {
        self.used(|executor| {
            executor.kv.shared_pool.mirror().mark_leased(blocks.iter().copied());
            // Blocks whose newer bytes are on the device stay there. The others are uploaded.
            let only_here = executor.kv.shared_pool.mirror().pending_uploads(blocks);
            // No block is left out: nothing lands in a block before copies from it are over.
            executor.sync_blocks(&only_here).map(drop)
        })
    }

    /// Copies nothing here: the tier copies the blocks out of the device ([`SharedKvPool::store`]).
    fn store(&mut self, _blocks: &[BlockId]) -> Result<(), ExecutorError> {
        self.usable()
    }

    fn usable(&self) -> Result<(), ExecutorError> {
        self.kv.shared_pool.usable().map_err(|error| ExecutorError::Device(error.to_string()))
    }

    fn shared_pool(&self) -> Option<Arc<SharedKvPool>> {
        Some(Arc::clone(&self.kv.shared_pool))
    }
}
