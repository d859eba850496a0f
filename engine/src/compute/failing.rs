//! An executor whose device fails: for tests of what becomes of requests and leases then.

use std::sync::Arc;

use baton_connector::region::Region;
use baton_connector::{BlockId, KvLayout};

use super::cuda::port::Port;
use super::{Executor, ExecutorError, Logits, SeqStep};

/// Fails from a certain step on.
pub struct Failing {
    inner: Box<dyn Executor>,
    good_steps: u64,
}

impl Failing {
    /// The first `good_steps` steps are the inner executor's.
    #[must_use]
    pub fn new(inner: Box<dyn Executor>, good_steps: u64) -> Self {
        Self { inner, good_steps }
    }
}

impl Executor for Failing {
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

    fn landing(&mut self, blocks: &[BlockId]) {
        self.inner.landing(blocks);
    }

    fn publish(&mut self, blocks: &[BlockId]) -> Result<Vec<BlockId>, ExecutorError> {
        self.inner.publish(blocks)
    }

    fn lend(&mut self, blocks: &[BlockId]) -> Result<(), ExecutorError> {
        self.inner.lend(blocks)
    }

    fn store(&mut self, blocks: &[BlockId]) -> Result<(), ExecutorError> {
        self.inner.store(blocks)
    }

    fn usable(&self) -> Result<(), ExecutorError> {
        self.inner.usable()
    }

    fn port(&self) -> Option<Arc<Port>> {
        self.inner.port()
    }
}
