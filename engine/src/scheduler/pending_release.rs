//! Finished requests of which a connector still holds blocks, and how those come back: also while a step is computed,
//! which looks at none of them.

use std::collections::HashMap;

use baton_connector::BlockId;
use baton_connector::multi::{Action, Child, Event, Multi};

use super::Scheduler;
use super::offloading::HANDOFF;
use crate::blocks::pool::{BlockPool, Hold};
use crate::scheduler::sequence::{SeqId, Sequence};

/// Who has finished and is not home.
#[derive(Debug, Default)]
pub(super) struct Departures {
    /// Finished while a connector held blocks of theirs: the lease, a fetch that stops, or a store.
    departing: HashMap<SeqId, Multi>,
    /// Whose lease a lent prompt is, by its last block: that one is never shared when it is lent, because at least one
    /// token of every prompt is computed for itself.
    lent_by: HashMap<BlockId, SeqId>,
    /// Finished sequences whose last block has come back since the last look.
    home: Vec<SeqId>,
}

impl Departures {
    /// A finished request, as its connectors have answered.
    pub(super) fn finished(&mut self, id: SeqId, connectors: Multi) {
        if connectors.is_free() {
            self.home.push(id);
        } else {
            self.departing.insert(id, connectors);
        }
    }

    /// The blocks of a prompt are lent for this request.
    pub(super) fn lent(&mut self, blocks: &[BlockId], id: SeqId) {
        self.lent_by.insert(*blocks.last().expect("a prompt has blocks"), id);
    }

    /// Whose lease ends with this block.
    pub(super) fn lender(&self, last: BlockId) -> Option<SeqId> {
        self.lent_by.get(&last).copied()
    }

    /// A connector holds nothing of a finished request any more.
    pub(super) fn let_go(&mut self, id: SeqId, child: Child) {
        if let Some(connectors) = self.departing.get_mut(&id)
            && connectors.apply(Event::LetGo(child)).contains(&Action::FreeBlocks)
        {
            self.departing.remove(&id);
            self.home.push(id);
        }
    }

    /// Finished requests of which a connector holds blocks.
    pub(super) fn held(&self) -> usize {
        self.departing.len()
    }
}

/// The books beside a step that is being computed: what it does not look at, and may change.
pub struct Beside<'a> {
    pool: &'a mut BlockPool,
    departures: &'a mut Departures,
}

impl Beside<'_> {
    /// A lease has ended: its blocks come back. A block that the step in hand uses too is held by its sequence, and
    /// nobody is given a block before the next step is planned.
    pub fn lease_ended(&mut self, blocks: &[BlockId]) {
        self.pool.give_back(blocks, Hold::Leased);
        if let Some(id) = blocks.last().and_then(|block| self.departures.lent_by.remove(block)) {
            self.departures.let_go(id, HANDOFF);
        }
    }

    /// As [`Scheduler::take_home`].
    pub fn take_home(&mut self) -> Vec<SeqId> {
        std::mem::take(&mut self.departures.home)
    }
}

impl Scheduler {
    /// The sequences, which a step reads, and the books beside it.
    pub fn in_step(&mut self) -> (&HashMap<SeqId, Sequence>, Beside<'_>) {
        (&self.sequences, Beside { pool: &mut self.pool, departures: &mut self.departures })
    }

    /// A lease has ended: its blocks come back.
    pub fn lease_ended(&mut self, blocks: &[BlockId]) {
        self.in_step().1.lease_ended(blocks);
    }

    /// Finished sequences that hold no block any more, since the last look: neither they nor their lease, nor a fetch
    /// that comes to rest, nor a store. Each is told once.
    pub fn take_home(&mut self) -> Vec<SeqId> {
        self.in_step().1.take_home()
    }
}
