//! Leases that are opened while their prefill still computes: the blocks of the prompt are then held twice, by the
//! request and by the lease, and each hold is given back by itself.
//!
//! Such a sequence has all of its prompt's blocks from its admission on, so it never waits for one, and it is not
//! preempted: others that run short are, and it is over soon.

use baton_connector::BlockId;

use super::{Finished, Scheduler};
use crate::blocks::pool::Hold;
use crate::scheduler::sequence::{Purpose, SeqId, Sequence};

impl Scheduler {
    /// A lease takes hold of the blocks of a running producer's prompt: those blocks. `None` when it does not run, or
    /// had such a lease before.
    pub fn lend_early(&mut self, id: SeqId) -> Option<Vec<BlockId>> {
        if !self.running.contains(&id) {
            return None;
        }
        let sequence = self.sequences.get_mut(&id).filter(|sequence| sequence.wants_early_lease())?;
        sequence.lent_early = true;
        let count = sequence.prompt_len.div_ceil(self.config.block_tokens);
        let blocks = sequence.blocks[..count].to_vec();
        self.pool.lend_too(&blocks);
        self.departures.lent(&blocks, id);
        Some(blocks)
    }

    /// No lease came of [`Self::lend_early`]: the sequence is lent at its end, as if nobody had asked.
    pub fn not_lent_early(&mut self, id: SeqId) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.lent_early = false;
            if let Purpose::Produce { early, .. } = &mut sequence.purpose {
                *early = false;
            }
        }
    }

    /// The blocks of a sequence's prompt that are final, from the first: those that are computed and full.
    #[must_use]
    pub fn final_blocks(&self, id: SeqId) -> &[BlockId] {
        self.sequences.get(&id).map_or(&[], |sequence| {
            let count = sequence.computed.min(sequence.prompt_len) / self.config.block_tokens;
            &sequence.blocks[..count]
        })
    }

    /// A sequence whose blocks were lent early leaves the books. If that lease has ended before, nobody has them.
    pub(super) fn early_lease_finished(&mut self, sequence: &Sequence, complete: bool) -> Finished {
        let last = sequence.prompt_len.div_ceil(self.config.block_tokens) - 1;
        let (prompt, _) = sequence.blocks.split_at(sequence.blocks.len().min(last + 1));
        let last = sequence.blocks.get(last);
        let lent = last.is_some_and(|last| self.departures.lender(*last) == Some(sequence.id));
        self.pool.give_back(&sequence.blocks, Hold::Active);
        match (lent, complete) {
            (true, true) => Finished::Sealed(prompt.to_vec()),
            (true, false) => Finished::Unfinished,
            (false, _) => Finished::FreeNow,
        }
    }

    /// Who makes room for the sequence at `at` of those that run: the youngest one whose blocks nobody reads.
    pub(super) fn victim(&self, at: usize) -> SeqId {
        let growing = |id: &&SeqId| self.sequences[*id].lent_early;
        let younger = self.running[at..].iter().rev().find(|id| !growing(id));
        *younger.expect("a sequence that wants a block has no lease yet")
    }
}
