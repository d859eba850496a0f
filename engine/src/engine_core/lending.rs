//! How a prefill becomes a lease: when it is finished, or, where that was asked for, while it still computes.

use baton_connector::ledger::Grant;
use baton_connector::{BlockId, Handle, Handoff, RequestId};

use super::{EngineCore, Live, SeqEvent, Surroundings};
use crate::blocks::hash::prompt_fingerprint;
use crate::scheduler::sequence::{FinishReason, SeqId};

/// A lease that was opened while its prompt is computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct EarlyLease {
    pub(super) handle: Handle,
    /// Blocks that its readers have been told are final.
    ready: usize,
}

/// What a handoff says of its prompt.
pub(super) struct Prompt {
    pub(super) tokens: usize,
    pub(super) fingerprint: u64,
    pub(super) cached: usize,
    pub(super) consumers: u16,
}

impl<S: Surroundings> EngineCore<S> {
    pub(super) fn prompt_of(&self, id: SeqId) -> Option<Prompt> {
        let sequence = self.scheduler.sequence(id)?;
        let prompt = &sequence.tokens()[..sequence.prompt_len()];
        sequence.is_producer().then(|| Prompt {
            tokens: prompt.len(),
            fingerprint: prompt_fingerprint(prompt),
            cached: sequence.reused().0,
            consumers: sequence.consumers(),
        })
    }

    /// Opens the lease of a finished producer's sequence.
    pub(super) fn lend(&mut self, live: &Live, blocks: Vec<BlockId>, prompt: Prompt) -> Option<Box<Handoff>> {
        if !self.make_lendable(&blocks) {
            self.scheduler.lease_ended(&blocks);
            return None;
        }
        self.open_lease(&live.request.clone(), blocks, prompt, None)
    }

    /// Opens a lease of blocks that are held for it; of all of them, or of the first `ready` while the others are still
    /// computed. Without one the blocks go back.
    fn open_lease(
        &mut self,
        request: &RequestId,
        blocks: Vec<BlockId>,
        prompt: Prompt,
        ready: Option<usize>,
    ) -> Option<Box<Handoff>> {
        let Some(handle) = self.surroundings.fresh_handle() else {
            tracing::error!("no randomness for a lease handle, blocks freed");
            self.scheduler.lease_ended(&blocks);
            return None;
        };
        let grant = Grant {
            handle,
            request: request.clone(),
            blocks: blocks.clone(),
            expected: usize::from(prompt.consumers),
        };
        let opened = match ready {
            None => self.surroundings.lend(grant),
            Some(ready) => self.surroundings.lend_growing(grant, ready),
        };
        match opened {
            Ok(left) => {
                let address = self.surroundings.address();
                Some(Box::new(Handoff {
                    handle,
                    epoch: self.surroundings.epoch(),
                    engine_id: address.engine_id.to_string(),
                    request: request.clone(),
                    host: address.host.clone(),
                    ports: address.ports.clone(),
                    blocks,
                    block_tokens: address.block_tokens,
                    tokens: prompt.tokens,
                    lease_left: Some(left),
                    layout: self.surroundings.fingerprint(),
                    prompt: prompt.fingerprint,
                    cached: prompt.cached,
                    consumers: prompt.consumers,
                    growing: ready.is_some(),
                }))
            }
            Err(refused) => {
                tracing::debug!(%request, why = ?refused.why, "lease not opened");
                self.scheduler.lease_ended(&refused.grant.blocks);
                None
            }
        }
    }

    /// Makes final blocks readable by their leases' readers. False: nobody may read them.
    fn make_lendable(&mut self, blocks: &[BlockId]) -> bool {
        let lent = self.executor.lend(blocks);
        if let Err(error) = &lent {
            tracing::error!(%error, "cannot lease computed blocks");
        }
        lent.is_ok()
    }

    /// Opens the lease of a sequence whose prompt takes more than the step that is about to run. Where that fails
    /// it is lent at its end, or not at all, as if nobody had asked.
    pub(super) fn lend_early(&mut self, id: SeqId) {
        let (Some(live), Some(prompt)) = (self.live.get(&id), self.prompt_of(id)) else { return };
        let request = live.request.clone();
        let done = self.scheduler.final_blocks(id).to_vec();
        if !self.make_lendable(&done) {
            return;
        }
        let Some(blocks) = self.scheduler.lend_early(id) else { return };
        let Some(handoff) = self.open_lease(&request, blocks, prompt, Some(done.len())) else {
            return self.scheduler.not_lent_early(id);
        };
        let handle = handoff.handle;
        let early = EarlyLease { handle, ready: done.len() };
        let live = self.live.get_mut(&id).expect("it was there just now");
        live.early = Some(early);
        if live.outbox.try_send((live.index, SeqEvent::Lending(handoff))).is_err() {
            // Nobody will ever learn this handle. The sequence ends with the mail: it may be part of a plan.
            self.surroundings.release(handle, "client_gone");
        }
    }

    /// A lease has ended before its prefill.
    pub(super) fn end_prefill_of(&mut self, handle: Handle) {
        let ours = |live: &Live| live.early.is_some_and(|early| early.handle == handle);
        if let Some(id) = self.live.iter().find(|(_, live)| ours(live)).map(|(id, _)| *id) {
            self.end(id, FinishReason::Abort);
        }
    }

    /// A step of a prompt is over: what it completed can be read.
    pub(super) fn grow(&mut self, id: SeqId) {
        let Some(EarlyLease { handle, ready }) = self.live.get(&id).and_then(|live| live.early) else {
            return;
        };
        let fresh = self.scheduler.final_blocks(id)[ready..].to_vec();
        if fresh.is_empty() {
            return;
        }
        if !self.make_lendable(&fresh) {
            let why = "the engine cannot publish computed blocks";
            return self.end_with(id, FinishReason::Error, SeqEvent::Unavailable(why));
        }
        let ready = ready + fresh.len();
        self.surroundings.grow(handle, ready);
        let live = self.live.get_mut(&id).expect("it was there just now");
        live.early = Some(EarlyLease { handle, ready });
    }

    /// The prompt of a lease that was opened early is computed: its handle, if the lease lives.
    pub(super) fn seal(&mut self, live: &Live, prompt: &[BlockId]) -> Option<Handle> {
        let EarlyLease { handle, ready } = live.early?;
        if !self.make_lendable(&prompt[ready.min(prompt.len())..]) {
            self.surroundings.release(handle, "not_lent");
            return None;
        }
        self.surroundings.seal(handle).then_some(handle)
    }
}
