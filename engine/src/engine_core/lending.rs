//! How a finished prefill becomes a lease.

use baton_connector::ledger::Grant;
use baton_connector::{BlockId, Handoff};

use super::{EngineCore, Live, Surroundings};
use crate::block_hash::prompt_fingerprint;
use crate::sequence::SeqId;

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
        if !self.publish(&blocks) {
            self.scheduler.lease_ended(&blocks);
            return None;
        }
        let Some(handle) = self.surroundings.fresh_handle() else {
            tracing::error!("no randomness for a handle; the blocks are freed");
            self.scheduler.lease_ended(&blocks);
            return None;
        };
        let grant = Grant {
            handle,
            request: live.request.clone(),
            blocks: blocks.clone(),
            expected: usize::from(prompt.consumers),
        };
        match self.surroundings.lend(grant) {
            Ok(left) => {
                let address = self.surroundings.address();
                Some(Box::new(Handoff {
                    handle,
                    epoch: self.surroundings.epoch(),
                    engine_id: address.engine_id.to_string(),
                    request: live.request.clone(),
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
                }))
            }
            Err(refused) => {
                tracing::debug!(request = %live.request, why = ?refused.why, "not lent");
                self.scheduler.lease_ended(&refused.grant.blocks);
                None
            }
        }
    }
}
