//! An executor with an artificial delay and an artificial failure, for demonstrations and for tests: of a request in a
//! certain phase, and of requests and leases after a failure of the device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::region::Region;
use baton_connector::{BlockId, KvLayout};

use super::cuda::shared_kv_pool::SharedKvPool;
use super::{Executor, ExecutorError, Logits, SeqStep};

/// Interval between calls of `meanwhile` during the wait.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Waits before every step of the inner executor, and fails after a number of steps.
pub struct DegradedExecutor {
    inner: Box<dyn Executor>,
    pace: Duration,
    /// Steps until the failure, if there is one.
    good_steps: Option<u64>,
}

impl DegradedExecutor {
    /// Waits `pace` before each step. Passes `good_steps` steps to the inner executor, then fails.
    #[must_use]
    pub fn new(inner: Box<dyn Executor>, pace: Option<Duration>, good_steps: Option<u64>) -> Self {
        Self { inner, pace: pace.unwrap_or_default(), good_steps }
    }
}

impl Executor for DegradedExecutor {
    fn layout(&self) -> KvLayout {
        self.inner.layout()
    }

    fn regions(&self) -> &[Region] {
        self.inner.regions()
    }

    fn blocks(&self) -> usize {
        self.inner.blocks()
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
        if let Some(left) = &mut self.good_steps {
            let injected = || ExecutorError::Device("injected failure at this step".into());
            *left = left.checked_sub(1).ok_or_else(injected)?;
        }
        let begun = Instant::now();
        while let Some(left) = self.pace.checked_sub(begun.elapsed()).filter(|left| !left.is_zero()) {
            std::thread::sleep(left.min(POLL_INTERVAL));
            meanwhile();
        }
        self.inner.run(batch, logits, meanwhile)
    }

    fn computes_hidden(&self) -> bool {
        self.inner.computes_hidden()
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

    fn read_block(&mut self, block: BlockId) -> Result<Vec<Vec<u8>>, ExecutorError> {
        self.inner.read_block(block)
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
