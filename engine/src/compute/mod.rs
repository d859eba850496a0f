//! What runs a forward pass: the trait, with one implementation per device below it.
//!
//! The step loop owns the executor and calls it from its one thread; what an executor does inside
//! (threads, streams, graphs) is its own affair. KV blocks live in a [`Region`] that transports share.

pub mod cpu;
pub mod cuda;
pub mod failing;
pub mod shared_pool;
pub mod step_hazards;
pub mod throttled;

use std::sync::Arc;

use baton_connector::region::Region;
use baton_connector::slice::Geometry;
use baton_connector::{BlockId, KvLayout};

use crate::sampling::Draw;

/// One sequence's part of a step.
#[derive(Clone, Debug)]
pub struct SeqStep<'a> {
    /// Tokens to process, at positions `start .. start + tokens.len()`; at least one.
    pub tokens: &'a [u32],
    /// Position of the first of them; KV of all earlier positions is in the block table, where earlier steps put it: a device
    /// may read it before this step has begun. A step in which one sequence writes a block that another reads is refused
    /// ([`step_hazards`]).
    pub start: usize,
    /// Blocks that hold positions `0 .. start + tokens.len()`, in order; this step writes its own KV there.
    pub block_table: &'a [BlockId],
    /// Which positions' logits are wanted.
    pub logits: LogitsWanted,
}

/// Which positions of a step's tokens get logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LogitsWanted {
    /// None: a prefill chunk that is not the last.
    No,
    /// The last token: the next token is sampled from it.
    Last,
    /// As `Last`; an executor that can may draw the token itself, see [`Logits::chosen`].
    Draw(Draw),
    /// Every token of the step (prompt log-probabilities, parity checks).
    All,
}

/// Rows of logits, in the order of the sequences that wanted them.
#[derive(Debug, Default)]
pub struct Logits {
    /// Entries of one row: the model's vocabulary, padding included.
    pub vocab: usize,
    /// `vocab` values of each row that is not drawn.
    pub values: Vec<f32>,
    /// What became of each row, where the executor has drawn any; empty where all of them are values.
    pub chosen: Vec<Row>,
}

/// One row of a step in which the executor has drawn tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// The token itself: the row was wanted as [`LogitsWanted::Draw`]. `None`: it has no number.
    Drawn(Option<u32>),
    /// It is this row of the values.
    Values(usize),
}

impl Logits {
    /// Values of row `index`.
    ///
    /// # Panics
    /// When the row was drawn: it has none.
    #[must_use]
    pub fn row(&self, index: usize) -> &[f32] {
        let at = match self.chosen.get(index) {
            Some(Row::Drawn(_)) => panic!("row {index} was drawn where it was computed"),
            Some(Row::Values(at)) => *at,
            None => index,
        };
        &self.values[at * self.vocab..][..self.vocab]
    }

    /// The token of row `index`, where the executor has drawn it. The inner `None`: the row has no number.
    #[must_use]
    pub fn drawn(&self, index: usize) -> Option<Option<u32>> {
        match self.chosen.get(index) {
            Some(Row::Drawn(token)) => Some(*token),
            Some(Row::Values(_)) | None => None,
        }
    }

    /// Number of rows that have values.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.values.len().checked_div(self.vocab).unwrap_or(0)
    }
}

/// Why a forward pass failed. Nothing of the step may be used then.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    /// The device is out of order; the engine cannot go on.
    #[error("device failed: {0}")]
    Device(String),
}

/// A device with a model and a paged KV pool.
pub trait Executor: Send {
    /// Shape of one KV block, over all heads.
    fn layout(&self) -> KvLayout;

    /// The pool's memory: one region for each rank that the KV heads are sharded over, at least one. A block is its
    /// shards under one id in every region.
    fn regions(&self) -> &[Region];

    /// How the pool is cut: [`Self::layout`] over [`Self::regions`].
    ///
    /// # Panics
    /// When there are not as many regions as the heads can be sharded over: the executor's mistake.
    fn geometry(&self) -> Geometry {
        Geometry::new(self.layout(), self.regions().len()).expect("an executor shards whole heads")
    }

    /// Blocks of the pool.
    fn blocks(&self) -> usize {
        self.regions()[0].blocks()
    }

    /// Entries of one row of logits.
    fn vocab(&self) -> usize;

    /// Runs one step over `batch` and leaves the wanted rows in `logits` (cleared first).
    ///
    /// Deterministic: a row depends only on its own sequence's tokens, never on what is batched beside it,
    /// nor on how its prompt was cut into chunks (exact mode), unless [`Self::is_batch_invariant`] says otherwise.
    ///
    /// `meanwhile` is called on this thread, again and again while the step is computed: for what need not wait for its
    /// end. It is quick where there is nothing to do.
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

    /// Whether a row's bits are the same whatever is batched beside it.
    fn is_batch_invariant(&self) -> bool {
        true
    }

    /// These blocks may be written through [`Self::regions`] from now on, by a transport or a tier, until the next step
    /// that has them in a block table. For an executor that computes in the regions themselves that is nothing new. It
    /// waits for nothing: the step loop calls it.
    fn landing(&mut self, blocks: &[BlockId]) {
        let _ = blocks;
    }

    /// Makes the bytes of these blocks in [`Self::regions`] what was computed. Called before they are hashed, and before
    /// they are lent or stored unless [`Self::lend`] and [`Self::store`] know better. For an executor that computes in
    /// the regions themselves they are. Returns the blocks of which that holds: without those of which another thread's copy
    /// is under way, for the step loop waits for none.
    ///
    /// # Errors
    /// [`ExecutorError`]; nobody may read the blocks then.
    fn publish(&mut self, blocks: &[BlockId]) -> Result<Vec<BlockId>, ExecutorError> {
        Ok(blocks.to_vec())
    }

    /// These blocks are final and will be lent. Whoever reads them in [`Self::regions`] asks [`Self::port`] first, if there
    /// is one; otherwise they are published.
    ///
    /// # Errors
    /// As [`Self::publish`].
    fn lend(&mut self, blocks: &[BlockId]) -> Result<(), ExecutorError> {
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

    /// These blocks are final and will be stored. Whoever stores them copies them by [`Self::port`], if there is one, and from
    /// [`Self::regions`] otherwise, where they are then published.
    ///
    /// # Errors
    /// As [`Self::publish`].
    fn store(&mut self, blocks: &[BlockId]) -> Result<(), ExecutorError> {
        self.publish_all(blocks)
    }

    /// Whether the device can still be used: other threads' copies may have found out that it cannot.
    ///
    /// # Errors
    /// [`ExecutorError`]; it computes nothing any more.
    fn usable(&self) -> Result<(), ExecutorError> {
        Ok(())
    }

    /// The pool for other threads, where it is in a device's own memory. There is one region then.
    fn port(&self) -> Option<Arc<cuda::port::Port>> {
        None
    }
}
