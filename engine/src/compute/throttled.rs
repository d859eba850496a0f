//! An executor with an artificial delay, for demonstrations and for tests that need a request in a certain phase.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::region::Region;
use baton_connector::{BlockId, KvLayout};

use super::cuda::shared_kv_pool::SharedKvPool;
use super::{Executor, ExecutorError, Logits, SeqStep};

/// Interval between calls of `meanwhile` during the wait.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Waits before every step of the inner executor.
pub struct ThrottledExecutor {
    inner: Box<dyn Executor>,
    pace: Duration,
}

impl ThrottledExecutor {
    /// Waits `pace` before each step.
    #[must_use]
    pub fn new(inner: Box<dyn Executor>, pace: Duration) -> Self {
        Self { inner, pace }
    }
}

impl Executor for ThrottledExecutor {
    fn layout(&self) -> KvLayout {
        self.inner.layout()
    }

    fn regions(&self) -> &[Region] {
        self.inner.regions()
    }

    fn vocab(&self) -> usize {
        self.inner.vocab()
    }

    #[allow(clippy::disallowed_methods, reason = "the delay is the purpose")]
    fn run(
        &mut self,
        batch: &[SeqStep<'_>],
        logits: &mut Logits,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExecutorError> {
        let begun = Instant::now();
        while let Some(left) = self.pace.checked_sub(begun.elapsed()).filter(|left| !left.is_zero()) {
            std::thread::sleep(left.min(POLL_INTERVAL));
            meanwhile();
        }
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
