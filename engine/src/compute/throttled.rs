//! An executor that takes its time: for demonstrations and for tests that must meet a request in a certain phase.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::region::Region;
use baton_connector::{BlockId, KvLayout};

use super::cuda::port::Port;
use super::{Executor, ExecutorError, Logits, SeqStep};

/// While it waits it looks so often at what there is to do meanwhile.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Waits before every step of the executor inside.
pub struct Paced {
    inner: Box<dyn Executor>,
    pace: Duration,
}

impl Paced {
    /// Waits `pace` before each step.
    #[must_use]
    pub fn new(inner: Box<dyn Executor>, pace: Duration) -> Self {
        Self { inner, pace }
    }
}

impl Executor for Paced {
    fn layout(&self) -> KvLayout {
        self.inner.layout()
    }

    fn regions(&self) -> &[Region] {
        self.inner.regions()
    }

    fn vocab(&self) -> usize {
        self.inner.vocab()
    }

    #[allow(clippy::disallowed_methods)] // waiting is what it is for
    fn run(
        &mut self,
        batch: &[SeqStep<'_>],
        logits: &mut Logits,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExecutorError> {
        let begun = Instant::now();
        while let Some(left) = self.pace.checked_sub(begun.elapsed()).filter(|left| !left.is_zero()) {
            std::thread::sleep(left.min(LOOK_AGAIN));
            meanwhile();
        }
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
