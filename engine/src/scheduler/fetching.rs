//! How a sequence with a handoff gets its blocks: the scheduler's part of a [`Fetch`].

use baton_connector::fetch::{Action, Event, Fetch, FetchActions};
use baton_connector::multi;

use super::offloading::HANDOFF;
use super::{Admission, Effect, Scheduler};
use crate::blocks::pool::Hold;
use crate::scheduler::sequence::{Phase, Purpose, SeqId, Sequence};

impl Scheduler {
    /// Applies an event of a sequence's fetch: a worker's report, or a heartbeat's answer "gone".
    ///
    /// Late and repeated events are counted and ignored. They can never end the engine (invariant 9).
    pub fn fetch_event(&mut self, id: SeqId, event: Event) {
        if let Some(mut sequence) = self.stopping.remove(&id) {
            let actions = fetch_of(&mut sequence).apply(event);
            self.carry_out_stopping(id, &mut sequence, actions);
            if fetch_of(&mut sequence).is_over() {
                self.pending_releases.release(id, HANDOFF);
            } else {
                self.stopping.insert(id, sequence);
            }
            return;
        }
        let Some(Purpose::Consume(fetch)) = self.sequences.get_mut(&id).map(|s| &mut s.purpose) else {
            self.ignored += 1;
            return;
        };
        let ignored = fetch.ignored();
        let actions = fetch.apply(event);
        self.ignored += u64::from(fetch.ignored() - ignored);
        self.carry_out(id, actions);
    }

    /// Allocates landing blocks for a waiting consumer and starts the read. The sequence already holds the blocks
    /// that it shares with the prefix cache.
    pub(super) fn begin_fetch(&mut self, id: SeqId, fresh: usize) -> Admission {
        let block_tokens = self.config.block_tokens;
        let sequence = self.sequences.get_mut(&id).expect("a waiting sequence is known");
        let cached = sequence.blocks.shared * block_tokens;
        if sequence.prompt_len - cached.min(sequence.prompt_len) <= 1 {
            // Only the last token would be fetched, which is computed anyway.
            let taken = self.pool.allocate(fresh, Hold::Landing).expect("room was checked");
            sequence.blocks.table.extend(taken);
            self.start_fetching(id);
            let actions = self.fetch(id).apply(Event::AlreadyCached);
            self.carry_out(id, actions);
            return Admission::Fetch(0);
        }
        let into = self.pool.allocate(fresh, Hold::Landing).expect("room was checked");
        sequence.blocks.table.extend(&into);
        sequence.reuse.fetched = sequence.prompt_len - cached;
        let first = sequence.blocks.shared;
        self.start_fetching(id);
        self.fetch(id).apply(Event::Admitted);
        let actions = self.fetch(id).apply(Event::BlocksReserved);
        if actions.contains(Action::StartRead) {
            self.effects.push(Effect::StartRead { id, first, into });
        }
        Admission::Fetch(0)
    }

    /// Ends a consumer's sequence. If a transfer still writes into its landing blocks, they stay held until it has
    /// stopped (invariant 3).
    pub(super) fn abandon_fetch(&mut self, mut sequence: Sequence) {
        let id = sequence.id;
        let fetching = sequence.phase == Phase::Fetching;
        self.admitted.fetching -= usize::from(fetching);
        let actions = fetch_of(&mut sequence).apply(Event::Abort);
        self.carry_out_stopping(id, &mut sequence, actions);
        if !fetch_of(&mut sequence).is_over() {
            self.stopping.insert(id, sequence);
        }
    }

    fn carry_out(&mut self, id: SeqId, actions: FetchActions) {
        for action in actions {
            match action {
                Action::StartRead | Action::AskVerdict => {
                    // `begin_fetch` starts the read, because it knows the blocks. The read's worker asks for the
                    // verdict, because a forward pass may occupy this thread for seconds.
                }
                Action::StopRead => self.effects.push(Effect::StopRead(id)),
                Action::StopHeartbeat => self.effects.push(Effect::StopHeartbeat(id)),
                Action::ReleaseAtProducer(reason) => self.effects.push(Effect::ReleaseAtProducer(id, reason)),
                Action::Land => self.finish_fetch(id),
                Action::FreeLanding => {
                    let mut sequence = self.sequences.remove(&id).expect("a fetching sequence is known");
                    self.free_landing(&mut sequence);
                    self.sequences.insert(id, sequence);
                }
                Action::Recompute => self.recompute(id),
                Action::Fail(kind) => self.effects.push(Effect::FetchFailed(id, kind)),
            }
        }
    }

    /// The same for a removed sequence: nothing lands and nothing is recomputed.
    fn carry_out_stopping(&mut self, id: SeqId, sequence: &mut Sequence, actions: FetchActions) {
        for action in actions {
            match action {
                Action::StopRead => self.effects.push(Effect::StopRead(id)),
                Action::StopHeartbeat => self.effects.push(Effect::StopHeartbeat(id)),
                Action::ReleaseAtProducer(reason) => self.effects.push(Effect::ReleaseAtProducer(id, reason)),
                Action::FreeLanding => self.free_landing(sequence),
                Action::StartRead
                | Action::AskVerdict
                | Action::Land
                | Action::Recompute
                | Action::Fail(_) => {}
            }
        }
    }

    fn finish_fetch(&mut self, id: SeqId) {
        let sequence = self.sequences.get_mut(&id).expect("a fetching sequence is known");
        self.pool.finish_landing(&sequence.blocks.table[sequence.blocks.shared..]);
        // The last token is computed here, for the logits of the first new token.
        sequence.computed = sequence.prompt_len - 1;
        sequence.connectors.apply(multi::Event::Loaded(HANDOFF));
        sequence.phase = Phase::Running;
        sequence.purpose = Purpose::Plain;
        self.admitted.fetching -= 1;
        self.admitted.running.push(id);
        self.register(id);
    }

    /// Queues the sequence at the head again, without a handoff. [`Action::FreeLanding`] has released its blocks.
    fn recompute(&mut self, id: SeqId) {
        let sequence = self.sequences.get_mut(&id).expect("a fetching sequence is known");
        sequence.purpose = Purpose::Plain;
        // The tiers are asked when the sequence is admitted again.
        sequence.connectors.apply(multi::Event::LoadFailed(HANDOFF));
        sequence.reuse.fetched = 0;
        if sequence.phase == Phase::Fetching {
            sequence.phase = Phase::Waiting;
            self.admitted.fetching -= 1;
            self.enqueue_again(id);
        }
        self.effects.push(Effect::Recomputing(id));
    }

    fn start_fetching(&mut self, id: SeqId) {
        let sequence = self.sequences.get_mut(&id).expect("the sequence is known");
        sequence.phase = Phase::Fetching;
        self.admitted.fetching += 1;
    }

    /// Releases all blocks of a fetching sequence: the shared ones and the landing ones.
    fn free_landing(&mut self, sequence: &mut Sequence) {
        let landing = sequence.blocks.table.split_off(sequence.blocks.shared);
        self.pool.release(&landing, Hold::Landing);
        self.pool.release(&sequence.blocks.table, Hold::Active);
        sequence.blocks.begin_with(Vec::new());
    }

    fn fetch(&mut self, id: SeqId) -> &mut Fetch {
        fetch_of(self.sequences.get_mut(&id).expect("the sequence is known"))
    }
}

fn fetch_of(sequence: &mut Sequence) -> &mut Fetch {
    match &mut sequence.purpose {
        Purpose::Consume(fetch) => fetch,
        Purpose::Plain | Purpose::Produce { .. } | Purpose::Pool(_) => unreachable!("only consumers fetch"),
    }
}
