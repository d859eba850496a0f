//! The trait [`Executor`], which runs forward passes. Each module below implements it for one device.
//!
//! The step loop owns the executor and calls it from its one thread. Threads, streams and graphs inside an executor are
//! private to it. KV blocks live in a [`Region`] that transports share.

pub mod cpu;
pub mod cuda;
pub mod degraded;
pub mod shared_pool;
pub mod step_hazards;

use std::sync::Arc;

use baton_connector::region::Region;
use baton_connector::slice::Geometry;
use baton_connector::{BlockId, KvLayout};

use crate::model::lora::AdapterIndex;
use crate::sampling::{Draw, DrawSeries};

/// One sequence's part of a step.
#[derive(Clone, Debug)]
pub struct SeqStep<'a> {
    /// Tokens to process, at positions `start .. start + tokens.len()`; at least one.
    pub tokens: &'a [u32],
    /// Position of the first token. Earlier steps have written the KV of all earlier positions to the block table, and
    /// a device may read it before this step has begun. An executor refuses a step in which one sequence writes a block
    /// that another one reads ([`step_hazards`]).
    pub start: usize,
    /// Blocks that hold positions `0 .. start + tokens.len()`, in order. This step writes its own KV there.
    pub block_table: &'a [BlockId],
    /// The positions whose logits are wanted.
    pub logits: LogitsRequest,
    /// The adapter of the sequence, in every step of it; `None` for the model alone. Only the CPU has adapters.
    pub adapter: Option<AdapterIndex>,
}

/// The positions of a step's tokens that get logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LogitsRequest {
    /// None: a prefill chunk that is not the last.
    No,
    /// The last token: the next token is sampled from it.
    Last,
    /// As `Last`. The executor may draw the token itself, see [`Logits::chosen`].
    Draw(Draw),
    /// Every token of the step (prompt log-probabilities, drafts, parity checks).
    All,
    /// As `All`. The executor may draw the tokens itself.
    DrawEach(DrawSeries),
    /// None. The hidden states of every token of the step are wanted instead ([`Logits::hidden`]), if
    /// [`Executor::computes_hidden`].
    Hidden,
}

/// Rows of logits, in the order of the sequences that wanted them.
#[derive(Debug, Default)]
pub struct Logits {
    /// Entries of one row: the model's vocabulary, padding included.
    pub vocab: usize,
    /// `vocab` values of each row that is not drawn.
    pub values: Vec<f32>,
    /// Result of each row, if the executor has drawn any. Empty if all rows are values.
    pub chosen: Vec<LogitsRow>,
    /// The hidden states behind the final norm, one row after the other, in the order of the sequences that wanted them.
    pub hidden: Vec<f32>,
    /// Values of one row of `hidden`.
    pub hidden_width: usize,
}

/// One row of a step in which the executor has drawn tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsRow {
    /// The row was requested as [`LogitsRequest::Draw`] or [`LogitsRequest::DrawEach`], and this is its token. `None`:
    /// the row contains no number.
    Drawn(Option<u32>),
    /// The row has this index in the values.
    Values(usize),
}

impl Logits {
    /// The hidden states of row `index`.
    #[must_use]
    pub fn hidden_row(&self, index: usize) -> &[f32] {
        &self.hidden[index * self.hidden_width..][..self.hidden_width]
    }

    /// Values of row `index`.
    ///
    /// # Panics
    /// When the row was drawn: a drawn row has no values.
    #[must_use]
    pub fn row(&self, index: usize) -> &[f32] {
        let at = match self.chosen.get(index) {
            Some(LogitsRow::Drawn(_)) => panic!("row {index} was drawn where it was computed"),
            Some(LogitsRow::Values(at)) => *at,
            None => index,
        };
        &self.values[at * self.vocab..][..self.vocab]
    }

    /// The token of row `index`, if the executor has drawn it. The inner `None`: the row contains no number.
    #[must_use]
    pub fn drawn(&self, index: usize) -> Option<Option<u32>> {
        match self.chosen.get(index) {
            Some(LogitsRow::Drawn(token)) => Some(*token),
            Some(LogitsRow::Values(_)) | None => None,
        }
    }

    /// Number of rows that have values.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.values.len().checked_div(self.vocab).unwrap_or(0)
    }
}

/// Why a forward pass failed. No result of the step may be used then.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    /// The device has failed; the engine cannot continue.
    #[error("device failed: {0}")]
    Device(String),
}

/// A device with a model and a paged KV pool.
pub trait Executor: Send {
    /// Shape of one KV block, over all heads.
    fn layout(&self) -> KvLayout;

    /// The pool's memory that the host can read: one region per rank over which the KV heads are sharded. The shards of
    /// a block have the same id in every region. Empty if the pool is in a device's memory and has no mirror. An
    /// executor without regions overrides [`Self::blocks`] and [`Self::read_block`].
    fn regions(&self) -> &[Region];

    /// How the pool is divided: [`Self::layout`] over [`Self::regions`], or in one shard without regions.
    ///
    /// # Panics
    /// When the heads cannot be sharded over this number of regions: a bug of the executor.
    fn geometry(&self) -> Geometry {
        Geometry::new(self.layout(), self.regions().len().max(1)).expect("an executor shards whole heads")
    }

    /// Blocks of the pool.
    fn blocks(&self) -> usize {
        self.regions()[0].blocks()
    }

    /// Entries of one row of logits.
    fn vocab(&self) -> usize;

    /// Runs one step over `batch` and leaves the requested rows in `logits` (cleared first).
    ///
    /// Deterministic: a row depends only on its own sequence's tokens. Neither the other sequences of the batch nor the
    /// chunks of the prompt change it (exact mode), unless [`Self::is_batch_invariant`] is false.
    ///
    /// The executor calls `meanwhile` on this thread repeatedly while it computes the step, for work that need not wait
    /// for the end of the step. `meanwhile` returns quickly if there is nothing to do.
    ///
    /// # Errors
    /// [`ExecutorError`]; the KV of the batch's positions is then undefined.
    fn run(
        &mut self,
        batch: &[SeqStep<'_>],
        logits: &mut Logits,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExecutorError>;

    /// As [`Self::run`], with nothing to do meanwhile.
    ///
    /// # Errors
    /// As [`Self::run`].
    fn execute(&mut self, batch: &[SeqStep<'_>], logits: &mut Logits) -> Result<(), ExecutorError> {
        self.run(batch, logits, &mut || ())
    }

    /// Whether the executor computes [`LogitsRequest::Hidden`].
    fn computes_hidden(&self) -> bool {
        false
    }

    /// Whether the rest of the batch never changes the bits of a row.
    fn is_batch_invariant(&self) -> bool {
        true
    }

    /// From now on, transports and tiers may write these blocks through [`Self::regions`], until the next step that has
    /// them in a block table. An executor that computes in the regions has nothing to do here. Never blocks: the step
    /// loop calls it.
    fn reserve(&mut self, blocks: &[BlockId]) {
        let _ = blocks;
    }

    /// Makes the computed bytes of these blocks visible in [`Self::regions`], if there are any. The engine calls it
    /// before it hashes blocks, and before it leases or stores them, unless [`Self::mark_leased`] and [`Self::store`]
    /// are overridden. An executor that computes in the regions has nothing to do.
    ///
    /// Returns the published blocks. Blocks that another thread is copying are left out, because the step loop waits
    /// for no copy.
    ///
    /// # Errors
    /// [`ExecutorError`]. The blocks must not be read then.
    fn publish(&mut self, blocks: &[BlockId]) -> Result<Vec<BlockId>, ExecutorError> {
        Ok(blocks.to_vec())
    }

    /// The bytes of a published block, by rank, for digests.
    ///
    /// # Errors
    /// [`ExecutorError`]: the device could not copy them.
    fn read_block(&mut self, block: BlockId) -> Result<Vec<Vec<u8>>, ExecutorError> {
        Ok(self.regions().iter().map(|region| region.read_block(block)).collect())
    }

    /// These blocks are final and will be leased. A reader of [`Self::regions`] first calls [`Self::shared_pool`], if
    /// there is one. Without a shared pool the blocks are published.
    ///
    /// # Errors
    /// As [`Self::publish`].
    fn mark_leased(&mut self, blocks: &[BlockId]) -> Result<(), ExecutorError> {
        self.publish_all(blocks)
    }

    /// Publishes all of these blocks.
    ///
    /// # Errors
    /// As [`Self::publish`], and where some are left out.
    fn publish_all(&mut self, blocks: &[BlockId]) -> Result<(), ExecutorError> {
        let published = self.publish(blocks)?.len();
        if published == blocks.len() {
            return Ok(());
        }
        Err(ExecutorError::Device(format!("{published} of {} blocks could be published", blocks.len())))
    }

    /// These blocks are final and will be stored. The tier copies them through [`Self::shared_pool`], if there is one.
    /// Without a shared pool the blocks are published, and the tier copies from [`Self::regions`].
    ///
    /// # Errors
    /// As [`Self::publish`].
    fn store(&mut self, blocks: &[BlockId]) -> Result<(), ExecutorError> {
        self.publish_all(blocks)
    }

    /// Whether the device can still be used. A copy of another thread may have failed.
    ///
    /// # Errors
    /// [`ExecutorError`]. The device computes nothing any more.
    fn usable(&self) -> Result<(), ExecutorError> {
        Ok(())
    }

    /// The pool for other threads, if it is in a device's own memory. There is at most one region then: the mirror.
    fn shared_pool(&self) -> Option<Arc<cuda::shared_kv_pool::SharedKvPool>> {
        None
    }
}
