//! Leases that are opened while their prefill still computes. The request and the lease then both hold the blocks of
//! the prompt, and each hold is released separately.
//!
//! Such a sequence has all of its prompt's blocks from its admission on. It therefore never waits for a block, and is
//! never preempted: the scheduler preempts others, and the sequence ends soon.

use baton_connector::BlockId;

use super::{FinishOutcome, Scheduler};
use crate::blocks::pool::Hold;
use crate::scheduler::sequence::{Purpose, SeqId, Sequence};

impl Scheduler {
    /// Adds a lease to the blocks of a running producer's prompt, and returns them. `None` when the sequence does not
    /// run, or had such a lease before.
    pub fn open_lease_early(&mut self, id: SeqId) -> Option<Vec<BlockId>> {
        if !self.admitted.running.contains(&id) {
            return None;
        }
        let sequence = self.sequences.get_mut(&id).filter(|sequence| sequence.wants_early_lease())?;
        sequence.leased_early = true;
        let count = sequence.prompt_len.div_ceil(self.config.block_tokens);
        let blocks = sequence.blocks.table[..count].to_vec();
        self.pool.add_lease(&blocks);
        self.pending_releases.add_lease(&blocks, id);
        Some(blocks)
    }

    /// [`Self::open_lease_early`] led to no lease: the lease opens at the end, as without the request for an early
    /// handoff.
    pub fn cancel_early_lease(&mut self, id: SeqId) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.leased_early = false;
            if let Purpose::Produce { early, .. } = &mut sequence.purpose {
                *early = false;
            }
        }
    }

    /// The final blocks of a sequence's prompt, from the first: full and computed.
    #[must_use]
    pub fn final_blocks(&self, id: SeqId) -> &[BlockId] {
        self.sequences.get(&id).map_or(&[], |sequence| {
            let count = sequence.computed.min(sequence.prompt_len) / self.config.block_tokens;
            &sequence.blocks.table[..count]
        })
    }

    /// Ends a sequence whose blocks were leased early. If that lease has ended before, the blocks are free.
    pub(super) fn finish_early_lease(&mut self, sequence: &Sequence, complete: bool) -> FinishOutcome {
        let last = sequence.prompt_len.div_ceil(self.config.block_tokens) - 1;
        let table = sequence.blocks();
        let (prompt, _) = table.split_at(table.len().min(last + 1));
        let last = table.get(last);
        let leased = last.is_some_and(|last| self.pending_releases.lease_of(*last) == Some(sequence.id));
        self.pool.release(table, Hold::Active);
        match (leased, complete) {
            (true, true) => FinishOutcome::Sealed(prompt.to_vec()),
            (true, false) => FinishOutcome::Unfinished,
            (false, _) => FinishOutcome::Freed,
        }
    }
}
