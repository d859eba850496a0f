//! Finished requests of which a connector still holds blocks, and the release of those blocks. They can be released
//! while a step is computed, because the step reads none of them.

use std::collections::HashMap;

use baton_connector::BlockId;
use baton_connector::multi::{Action, Child, Event, MultiConnectorRequest};

use super::drafting::Drafting;
use super::offloading::HANDOFF;
use super::{Scheduler, StepPart};
use crate::blocks::pool::{BlockPool, Hold};
use crate::scheduler::sequence::{SeqId, Sequence};

/// Finished sequences whose blocks are not all released.
#[derive(Debug, Default)]
pub(super) struct PendingReleases {
    /// Finished while a connector held their blocks: a lease, a fetch that stops, or a store.
    pending: HashMap<SeqId, MultiConnectorRequest>,
    /// The owner of a lease, by the last block of its prompt. That block is never shared when it is leased, because
    /// at least one token of every prompt is computed for the prompt itself.
    leased_by: HashMap<BlockId, SeqId>,
    /// Finished sequences whose last block was released since the last look.
    released: Vec<SeqId>,
}

impl PendingReleases {
    /// Adds a finished request, with the replies of its connectors.
    pub(super) fn add(&mut self, id: SeqId, connectors: MultiConnectorRequest) {
        if connectors.is_free() {
            self.released.push(id);
        } else {
            self.pending.insert(id, connectors);
        }
    }

    /// Records that this request's lease holds the blocks of a prompt.
    pub(super) fn add_lease(&mut self, blocks: &[BlockId], id: SeqId) {
        self.leased_by.insert(*blocks.last().expect("a prompt has blocks"), id);
    }

    /// The request whose lease ends with this block.
    pub(super) fn lease_of(&self, last: BlockId) -> Option<SeqId> {
        self.leased_by.get(&last).copied()
    }

    /// A connector has released all blocks of a finished request.
    pub(super) fn release(&mut self, id: SeqId, child: Child) {
        if let Some(connectors) = self.pending.get_mut(&id)
            && connectors.apply(Event::Released(child)).contains(&Action::FreeBlocks)
        {
            self.pending.remove(&id);
            self.released.push(id);
        }
    }

    /// Finished requests of which a connector still holds blocks.
    pub(super) fn len(&self) -> usize {
        self.pending.len()
    }
}

/// The part of the scheduler that a running step reads.
#[derive(Clone, Copy)]
pub struct StepSequences<'a> {
    sequences: &'a HashMap<SeqId, Sequence>,
    drafting: &'a Drafting,
}

impl<'a> StepSequences<'a> {
    /// A sequence that has not finished.
    #[must_use]
    pub fn get(&self, id: SeqId) -> Option<&'a Sequence> {
        self.sequences.get(&id)
    }

    /// The tokens of a planned part, and whether those after the first are drafts.
    ///
    /// # Panics
    /// When the part is of no known sequence: a bug of the caller.
    #[must_use]
    pub fn tokens(&self, part: &StepPart) -> (&'a [u32], bool) {
        match self.drafting.tokens(part) {
            Some(drafted) => (drafted, true),
            None => (&self.sequences[&part.id].tokens[part.start..part.start + part.count], false),
        }
    }
}

/// The part of the scheduler that a running step does not read, and that may change during it.
pub struct OutsideStep<'a> {
    pool: &'a mut BlockPool,
    releases: &'a mut PendingReleases,
}

impl OutsideStep<'_> {
    /// Releases the blocks of a lease that has ended. A block that the running step uses too is held by its sequence.
    /// No block is allocated before the next step is planned.
    pub fn lease_ended(&mut self, blocks: &[BlockId]) {
        self.pool.release(blocks, Hold::Leased);
        if let Some(id) = blocks.last().and_then(|block| self.releases.leased_by.remove(block)) {
            self.releases.release(id, HANDOFF);
        }
    }

    /// As [`Scheduler::take_released`].
    pub fn take_released(&mut self) -> Vec<SeqId> {
        std::mem::take(&mut self.releases.released)
    }
}

impl Scheduler {
    /// The sequences, which a step reads, and the rest, which may change meanwhile.
    pub fn in_step(&mut self) -> (StepSequences<'_>, OutsideStep<'_>) {
        let sequences = StepSequences { sequences: &self.sequences, drafting: &self.admitted.drafting };
        (sequences, OutsideStep { pool: &mut self.pool, releases: &mut self.pending_releases })
    }

    /// Releases the blocks of a lease that has ended.
    pub fn lease_ended(&mut self, blocks: &[BlockId]) {
        self.in_step().1.lease_ended(blocks);
    }

    /// Finished sequences whose last hold was released since the last look: their own, their lease's, a stopping
    /// fetch's and a store's. Each sequence is returned once.
    pub fn take_released(&mut self) -> Vec<SeqId> {
        self.in_step().1.take_released()
    }
}
