//! An executor whose device fails, for tests of requests and leases after a failure.

use std::sync::Arc;

use baton_connector::region::Region;
use baton_connector::{BlockId, KvLayout};

use super::cuda::shared_kv_pool::SharedKvPool;
use super::{Executor, ExecutorError, Logits, SeqStep};

/// Fails after a number of steps.
pub struct FailingExecutor {
    inner: Box<dyn Executor>,
    good_steps: u64,
}

impl FailingExecutor {
    /// Passes `good_steps` steps to the inner executor, then fails.
    #[must_use]
    pub fn new(inner: Box<dyn Executor>, good_steps: u64) -> Self {
        Self { inner, good_steps }
    }
}

impl Executor for FailingExecutor {
    fn layout(&self) -> KvLayout {
        self.inner.layout()
    }

    fn regions(&self) -> &[Region] {
        self.inner.regions()
    }

    fn vocab(&self) -> usize {
        self.inner.vocab()
    }

    fn run(
        &mut self,
        batch: &[SeqStep<'_>],
        logits: &mut Logits,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExecutorError> {
        self.good_steps = self
            .good_steps
            .checked_sub(1)
            .ok_or_else(|| ExecutorError::Device("injected failure at this step".into()))?;
        self.inner.run(batch, logits, meanwhile)
    }

    fn is_batch_invariant(&self) -> bool {
        self.inner.is_batch_invariant()
    }

    fn reserve(&mut self, blocks: &[BlockId]) {
        self.inner.reserve(blocks);
    }

    fn publish(&mut self, blocks: &[BlockId]) -> Result<Vec<BlockId>, ExecutorError> {
        self.inner.publish(blocks)
    }

    fn mark_leased(&mut self, blocks: &[BlockId]) -> Result<(), ExecutorError> {
        self.inner.mark_leased(blocks)
    }

    fn store(&mut self, blocks: &[BlockId]) -> Result<(), ExecutorError> {
        self.inner.store(blocks)
    }

    fn usable(&self) -> Result<(), ExecutorError> {
        self.inner.usable()
    }

    fn shared_pool(&self) -> Option<Arc<SharedKvPool>> {
        self.inner.shared_pool()
    }
}
