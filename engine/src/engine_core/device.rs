//! The core's use of its device outside forward passes, and the handling of a device failure.

use std::collections::HashSet;

use baton_connector::BlockId;

use super::{CoreEvent, EngineCore, EngineEnv, SeqEvent};
use crate::blocks::digests::{DigestPage, DigestRequest, page_blocks};
use crate::compute::ExecutorError;
use crate::offload::OffloadOrder;
use crate::scheduler::sequence::FinishReason;

impl<S: EngineEnv> EngineCore<S> {
    /// Prepares the device for an order. Returns whether the workers may begin it.
    pub(super) fn prepare(&mut self, order: &OffloadOrder) -> bool {
        match order {
            OffloadOrder::Load { block, .. } => {
                self.executor.reserve(&[*block]);
                true
            }
            OffloadOrder::Store { block, .. } => self.prepare_store(*block),
            OffloadOrder::Write { .. } | OffloadOrder::Delete { .. } => true,
        }
    }

    /// Leaves a block to the worker that stores it, which copies the block from the device itself. Up to hundreds are
    /// stored between two steps, and the next step waits for none. False: the block may not be stored.
    fn prepare_store(&mut self, block: BlockId) -> bool {
        let stored = self.executor.store(&[block]);
        if let Err(error) = &stored {
            tracing::error!(event = "block_store_failed", %error, "cannot store computed blocks");
        }
        stored.is_ok()
    }

    /// Makes blocks readable from outside. Returns the readable ones, or `None` if none may be read.
    pub fn publish(&mut self, blocks: &[BlockId]) -> Option<Vec<BlockId>> {
        self.executor.publish(blocks).inspect_err(log_unpublished).ok()
    }

    /// Hashes a page of the cached blocks. If the device cannot copy a block, the request gets no answer.
    pub(super) fn answer_digests(&mut self, request: DigestRequest) {
        let geometry = self.executor.geometry();
        // The last one is not part of the page: it shows that there is another page.
        let limit = page_blocks(geometry.whole().block_bytes()) + 1;
        let cached = self.scheduler.cached_blocks(request.after, limit);
        let blocks: Vec<_> = cached.iter().map(|&(_, block)| block).collect();
        let Some(readable) = self.publish(&blocks) else { return };
        let readable: HashSet<BlockId> = readable.into_iter().collect();
        let is_readable = |block| readable.contains(&block);
        let page = DigestPage::of(&cached, is_readable, &geometry, |block| self.executor.read_block(block));
        if let Ok(page) = page.inspect_err(log_unpublished) {
            // A requester that has left needs no answer.
            let _ = request.reply.send(page);
        }
    }

    /// Handles a device failure that other threads have found, before their mail. Waiting requests have no step that
    /// could report the failure.
    pub(super) fn check_device(&mut self) {
        if self.live.is_empty() {
            return;
        }
        if let Err(error) = self.executor.usable() {
            self.device_failed(&error);
        }
    }

    /// Ends every request; the engine is unhealthy from now on.
    pub(super) fn device_failed(&mut self, error: &ExecutorError) {
        let why = error.to_string();
        tracing::error!(event = "device_failed", %error, "device failed, all requests ended");
        self.env.record(CoreEvent::DeviceFailed(&why));
        self.end_all(FinishReason::Error, || SeqEvent::Unavailable("the engine's device failed"));
    }
}

fn log_unpublished(error: &ExecutorError) {
    tracing::error!(event = "block_publish_failed", %error, "cannot publish computed blocks");
}
