//! Opening leases: when a prefill is finished, or while it computes if the request asks for an early handoff.

use baton_connector::ledger::LeaseSpec;
use baton_connector::{BlockId, Handle, Handoff, RequestId};

use super::{EngineCore, EngineEnv, LiveSequence, SeqEvent};
use crate::blocks::hash::prompt_fingerprint_with;
use crate::log_span::request_span;
use crate::scheduler::sequence::{FinishReason, SeqId};

/// A lease that was opened while its prompt is computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct EarlyLease {
    pub(super) handle: Handle,
    /// Blocks that the ledger already reports as final.
    ready: usize,
}

/// The handoff's data about its prompt.
pub(super) struct PromptInfo {
    pub(super) tokens: usize,
    pub(super) fingerprint: u64,
    pub(super) cached: usize,
    pub(super) consumers: u16,
}

impl<S: EngineEnv> EngineCore<S> {
    pub(super) fn prompt_of(&self, id: SeqId) -> Option<PromptInfo> {
        let sequence = self.scheduler.sequence(id)?;
        let prompt = &sequence.tokens()[..sequence.prompt_len()];
        let adapter = sequence.adapter().map(|adapter| &adapter.digest);
        sequence.is_producer().then(|| PromptInfo {
            tokens: prompt.len(),
            fingerprint: prompt_fingerprint_with(prompt, adapter),
            cached: sequence.reused().0,
            consumers: sequence.consumers(),
        })
    }

    /// Opens the lease of a finished producer's sequence.
    pub(super) fn open_lease(
        &mut self,
        live: &LiveSequence,
        blocks: Vec<BlockId>,
        prompt: PromptInfo,
    ) -> Option<Box<Handoff>> {
        if !self.make_readable(&blocks) {
            self.scheduler.lease_ended(&blocks);
            return None;
        }
        self.grant_lease(&live.request.clone(), blocks, prompt, None)
    }

    /// Opens a lease of blocks that are held for it. With `ready`, only the first `ready` blocks are final and the
    /// others are still computed. If no lease opens, the blocks are freed.
    fn grant_lease(
        &mut self,
        request: &RequestId,
        blocks: Vec<BlockId>,
        prompt: PromptInfo,
        ready: Option<usize>,
    ) -> Option<Box<Handoff>> {
        let Some(handle) = self.env.fresh_handle() else {
            tracing::error!(
                parent: request_span!(request), event = "lease_handle_missing",
                "no randomness for a lease handle, blocks freed"
            );
            self.scheduler.lease_ended(&blocks);
            return None;
        };
        let grant = LeaseSpec {
            handle,
            request: request.clone(),
            blocks: blocks.clone(),
            expected: usize::from(prompt.consumers),
        };
        let opened = match ready {
            None => self.env.open_lease(grant),
            Some(ready) => self.env.open_growing_lease(grant, ready),
        };
        match opened {
            Ok(left) => {
                let address = self.env.address();
                Some(Box::new(Handoff {
                    handle,
                    epoch: self.env.epoch(),
                    engine_id: address.engine_id.to_string(),
                    request: request.clone(),
                    host: address.host.clone(),
                    ports: address.ports.clone(),
                    blocks,
                    block_tokens: address.block_tokens,
                    tokens: prompt.tokens,
                    lease_left: Some(left),
                    layout: self.env.fingerprint(),
                    prompt: prompt.fingerprint,
                    cached: prompt.cached,
                    consumers: prompt.consumers,
                    growing: ready.is_some(),
                }))
            }
            Err(refused) => {
                tracing::debug!(
                    parent: request_span!(request), event = "lease_not_opened", reason = ?refused.kind,
                    "lease not opened"
                );
                self.scheduler.lease_ended(&refused.spec.blocks);
                None
            }
        }
    }

    /// Makes final blocks readable by their leases' readers. False: they may not be read.
    fn make_readable(&mut self, blocks: &[BlockId]) -> bool {
        let leased = self.executor.mark_leased(blocks);
        if let Err(error) = &leased {
            tracing::error!(event = "block_lease_failed", %error, "cannot lease computed blocks");
        }
        leased.is_ok()
    }

    /// Opens the lease of a sequence whose prompt needs more than the next step. If this fails, the lease opens at
    /// the end of the prefill, or not at all, as without the request for an early handoff.
    pub(super) fn open_lease_early(&mut self, id: SeqId) {
        let (Some(live), Some(prompt)) = (self.live.get(&id), self.prompt_of(id)) else { return };
        let request = live.request.clone();
        let done = self.scheduler.final_blocks(id).to_vec();
        if !self.make_readable(&done) {
            return;
        }
        let Some(blocks) = self.scheduler.open_lease_early(id) else { return };
        let Some(handoff) = self.grant_lease(&request, blocks, prompt, Some(done.len())) else {
            return self.scheduler.cancel_early_lease(id);
        };
        let handle = handoff.handle;
        let early = EarlyLease { handle, ready: done.len() };
        let live = self.live.get_mut(&id).expect("it was there just now");
        live.early = Some(early);
        if live.outbox.try_send((live.index, SeqEvent::EarlyHandoff(handoff))).is_err() {
            // No client receives this handle. The sequence ends with the mail, because it may be part of a plan.
            self.env.release(handle, "client_gone");
        }
    }

    /// Ends the prefill of a lease that has ended.
    pub(super) fn end_prefill(&mut self, handle: Handle) {
        let ours = |live: &LiveSequence| live.early.is_some_and(|early| early.handle == handle);
        if let Some(id) = self.live.iter().find(|(_, live)| ours(live)).map(|(id, _)| *id) {
            self.end(id, FinishReason::Abort);
        }
    }

    /// After a step of a prompt: makes its new final blocks readable.
    pub(super) fn grow(&mut self, id: SeqId) {
        let Some(EarlyLease { handle, ready }) = self.live.get(&id).and_then(|live| live.early) else {
            return;
        };
        let fresh = self.scheduler.final_blocks(id)[ready..].to_vec();
        if fresh.is_empty() {
            return;
        }
        if !self.make_readable(&fresh) {
            let why = "the engine cannot publish computed blocks";
            return self.end_with(id, FinishReason::Error, SeqEvent::Unavailable(why));
        }
        let ready = ready + fresh.len();
        self.env.grow(handle, ready);
        let live = self.live.get_mut(&id).expect("it was there just now");
        live.early = Some(EarlyLease { handle, ready });
    }

    /// The prompt of an early lease is computed. Returns its handle if the lease lives.
    pub(super) fn seal(&mut self, live: &LiveSequence, prompt: &[BlockId]) -> Option<Handle> {
        let EarlyLease { handle, ready } = live.early?;
        if !self.make_readable(&prompt[ready.min(prompt.len())..]) {
            self.env.release(handle, "not_lent");
            return None;
        }
        self.env.seal(handle).then_some(handle)
    }
}
