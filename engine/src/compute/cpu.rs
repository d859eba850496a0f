//! The CPU executor: f32 arithmetic on bf16 or f32 weights, exact in the sense of the trait, or products in bf16 or
//! in integers.
//!
//! ```text
//!   isa     instruction sets              thread_pool  threads that compute one step together
//!   arena   aligned memory                matrix       packed weights and products with them
//!   kernel  rows × panel of 32 columns    attention    paged attention on the same kernel
//!   vector  norms, activation, softmax    network      layers and their loading
//!   bf16    products in bf16              forward      one step: phases over rows, items and units
//!   routing the rows of each expert
//! ```
//!
//! Exactness comes from one rule: the order in which an output is computed depends on nothing but its own sequence. The
//! rule holds across batches, chunks, thread counts, block sizes and instruction sets, and tests compare bits.

mod activations;
mod arena;
mod attention;
mod bf16;
mod convert;
mod forward;
mod isa;
mod kernel;
mod matrix;
mod network;
mod routing;
mod rows;
mod thread_pool;
mod vector;

use std::sync::{Arc, Mutex};

use baton_connector::BlockId;
use baton_connector::layout::{KvDtype, KvLayout};
use baton_connector::region::Region;
use baton_connector::slice::Geometry;

pub use self::bf16::Bf16Unit;
pub use self::isa::Isa;
pub use self::matrix::WeightMode;

use self::activations::CpuActivations;
use self::forward::{BatchPlan, WorkerScratch};
use self::network::CpuNetwork;
use self::thread_pool::ThreadPool;
use super::step_hazards::StepHazards;
use super::{Executor, ExecutorError, Logits, SeqStep};
use crate::model::config::ModelConfig;
use crate::model::lora::LoraAdapter;
use crate::model::weights::Weights;
use crate::model::{ModelError, ModelFiles};

/// Options of a model on this machine's CPU.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Blocks of the KV pool; at least one.
    pub blocks: usize,
    /// Tokens of one block; at least one.
    pub block_tokens: usize,
    /// Shards of the pool, by KV heads; at least one. The number must divide the heads. It does not change results.
    pub kv_ranks: usize,
    /// Threads that compute, including the caller of `execute`; at least one.
    pub threads: usize,
    /// Element type of the KV cache. F32 is exact. F16 and Bf16 halve its memory and change logits by up to about 0.03
    /// and 0.5 on the oracle models.
    pub kv_dtype: KvDtype,
    /// Element type of packed weights.
    pub weights: WeightMode,
    /// Instruction set.
    pub isa: Isa,
    /// The unit that multiplies with [`WeightMode::Bf16`].
    pub bf16_unit: Bf16Unit,
    /// Allocates the KV pool: number of zeroed blocks, bytes per block.
    pub pool: fn(usize, usize) -> Region,
    /// Adapters of the model, by their index in steps. They stay f32 with every [`Self::weights`].
    pub adapters: Arc<[LoraAdapter]>,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self {
            blocks: 256,
            block_tokens: 16,
            kv_ranks: 1,
            threads: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            kv_dtype: KvDtype::F32,
            weights: WeightMode::Stored,
            isa: Isa::detect(),
            bf16_unit: Bf16Unit::detect(),
            pool: Region::allocate,
            adapters: Arc::default(),
        }
    }
}

/// Progress of loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightLoadProgress {
    /// Bytes of the checkpoint that have been read.
    pub bytes_done: u64,
    /// Bytes of all tensors of the checkpoint that are used.
    pub bytes_total: u64,
}

/// A model on this machine's CPU.
#[derive(Debug)]
pub struct CpuExecutor {
    /// Shared by the executors of one process.
    network: Arc<CpuNetwork>,
    geometry: Geometry,
    regions: Vec<Region>,
    isa: Isa,
    threads: ThreadPool,
    activations: CpuActivations,
    scratch: Vec<Mutex<WorkerScratch>>,
    hazards: StepHazards,
}

impl CpuExecutor {
    /// Reads the weights of a checkpoint and allocates the KV pool. `progress` is called after each tensor.
    ///
    /// # Errors
    /// [`ModelError`] for files that are missing, damaged or inconsistent with the configuration.
    pub fn load(
        files: &ModelFiles,
        config: &ModelConfig,
        options: &CpuOptions,
        progress: &mut dyn FnMut(WeightLoadProgress),
    ) -> Result<Self, ModelError> {
        Self::with_weights(&Weights::open(files)?, config, options, progress)
    }

    /// As [`Self::load`], with weights from anywhere.
    ///
    /// # Errors
    /// As [`Self::load`].
    ///
    /// # Panics
    /// When an option is zero where it may not be, the ranks do not divide the KV heads, or the pool does not fit into
    /// memory. Also when this machine lacks the instruction set or the unit that multiplies bf16.
    pub fn with_weights(
        weights: &Weights,
        config: &ModelConfig,
        options: &CpuOptions,
        progress: &mut dyn FnMut(WeightLoadProgress),
    ) -> Result<Self, ModelError> {
        // The call also requests the permission to use tiles in this process.
        assert!(Bf16Unit::available().contains(&options.bf16_unit), "a unit that this machine has");
        let mut threads = start_threads(options)?;
        let mut network =
            CpuNetwork::load(weights, config, options.weights, options.bf16_unit, &mut threads, progress)?;
        network.adapters = Arc::clone(&options.adapters);
        Ok(Self::assemble(Arc::new(network), threads, options))
    }

    /// Another executor over the same weights, with a KV pool and threads of its own: one more data-parallel rank.
    ///
    /// # Errors
    /// [`ModelError`] when its threads cannot be started.
    ///
    /// # Panics
    /// As [`Self::with_weights`].
    pub fn sibling(&self, options: &CpuOptions) -> Result<Self, ModelError> {
        Ok(Self::assemble(Arc::clone(&self.network), start_threads(options)?, options))
    }

    fn assemble(network: Arc<CpuNetwork>, threads: ThreadPool, options: &CpuOptions) -> Self {
        // Every function that is compiled for an instruction set relies on this check.
        assert!(Isa::available().contains(&options.isa), "an instruction set that this machine has");
        assert!(options.block_tokens > 0 && options.blocks > 0, "a pool has blocks, and blocks have tokens");
        let config = &network.config;
        let layout = config.kv_layout(options.block_tokens, options.kv_dtype);
        let geometry = Geometry::new(layout, options.kv_ranks).expect("ranks that divide the heads");
        let regions = geometry.each_rank().map(|_| allocate(options, geometry.shard().block_bytes()));
        Self {
            network,
            regions: regions.collect(),
            geometry,
            isa: options.isa,
            scratch: (0..threads.size()).map(|_| Mutex::new(WorkerScratch::new())).collect(),
            threads,
            activations: CpuActivations::default(),
            hazards: StepHazards::new(options.blocks),
        }
    }

    /// Bytes of weights that one decode step reads, whatever its batch: all projections and the output matrix.
    #[must_use]
    pub fn streamed_bytes(&self) -> usize {
        self.network.streamed_bytes()
    }

    /// The instruction set in use.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Whether matrices of integers are multiplied as integers.
    #[must_use]
    pub fn multiplies_integers(&self) -> bool {
        self.network.integers
    }

    /// The unit that multiplies, if that is bf16.
    #[must_use]
    pub fn bf16_unit(&self) -> Option<Bf16Unit> {
        self.network.bf16
    }
}

/// The memory of one rank.
fn allocate(options: &CpuOptions, block_bytes: usize) -> Region {
    let region = (options.pool)(options.blocks, block_bytes);
    arena::collapse_into_huge_pages(region.block_ptr(BlockId(0)), options.blocks * block_bytes);
    region
}

fn start_threads(options: &CpuOptions) -> Result<ThreadPool, ModelError> {
    ThreadPool::new(options.threads)
        .map_err(|source| ModelError::File { path: "the executor's threads".into(), source })
}

impl Executor for CpuExecutor {
    fn layout(&self) -> KvLayout {
        self.geometry.whole()
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn vocab(&self) -> usize {
        self.network.config.vocab
    }

    fn computes_hidden(&self) -> bool {
        true
    }

    /// When a step has no tokens, a token outside the vocabulary, an unknown adapter, a block table that is too short, or
    /// a block that one sequence writes and another uses. All are bugs of the scheduler, found before anything is
    /// computed.
    fn run(
        &mut self,
        batch: &[SeqStep<'_>],
        logits: &mut Logits,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExecutorError> {
        let plan = BatchPlan::new(
            batch,
            &self.geometry.shard(),
            &self.regions,
            &self.network.config,
            self.threads.size(),
        );
        assert!(plan.fits(&self.network.adapters), "an adapter of the executor");
        if let Err(mistake) = self.hazards.check(batch, self.geometry.shard().block_tokens) {
            panic!("{mistake}");
        }
        logits.vocab = self.network.config.vocab;
        logits.values.clear();
        logits.chosen.clear();
        logits.hidden.clear();
        logits.hidden_width = self.network.config.hidden;
        if plan.is_empty() {
            return Ok(());
        }
        logits.values.resize(plan.wanted_rows() * logits.vocab, 0.0);
        logits.hidden.resize(plan.hidden_rows() * logits.hidden_width, 0.0);
        self.activations.fit(&self.network, plan.rows());
        forward::run(
            &self.network,
            &self.geometry.shard(),
            self.isa,
            &plan,
            &mut self.activations,
            &self.scratch,
            &mut self.threads,
            &mut logits.values,
            &mut logits.hidden,
            meanwhile,
        )
        .map_err(|panic| ExecutorError::Device(panic.0))
    }
}

#[cfg(test)]
mod tests;
