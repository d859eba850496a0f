//! Blocks behind the attention window: they are released while their sequence runs.
//!
//! If every layer has a window, a position sees only the keys of the widest one. Blocks before it are never read again
//! and leave the sequence. They stay in the prefix cache until another sequence needs their place. Blocks contain all
//! layers, so a model with one layer without a window keeps them. So do producers: their whole prompt is leased.

use super::Scheduler;
use crate::blocks::pool::Hold;
use crate::scheduler::sequence::SeqId;

impl Scheduler {
    /// Releases the blocks before the window of a sequence's next position.
    pub(super) fn release_passed(&mut self, id: SeqId) {
        let Some(window) = self.config.window else { return };
        let Some(sequence) = self.sequences.get_mut(&id).filter(|sequence| !sequence.is_producer()) else {
            return;
        };
        let first_seen = (sequence.computed + 1).saturating_sub(window);
        // At least one complete block stays: it takes the places of the others in the table, and no step writes it.
        let most = sequence.blocks.registered.saturating_sub(1);
        let passed = sequence.blocks.pass(most.min(first_seen / self.config.block_tokens));
        self.pool.release(&passed, Hold::Active);
    }
}

#[cfg(test)]
mod tests {
    use baton_connector::RequestId;

    use super::super::{FinishReason, SchedulerConfig};
    use super::*;
    use crate::scheduler::sequence::{NewSequence, Purpose, StopRule};

    const CONFIG: SchedulerConfig = SchedulerConfig {
        block_tokens: 4,
        max_num_seqs: 8,
        max_num_batched_tokens: 16,
        max_waiting: 64,
        max_model_len: 256,
        window: None,
    };

    fn submit(scheduler: &mut Scheduler, id: u64, len: u32, max_new: usize, purpose: Purpose) {
        let new = NewSequence {
            id: SeqId(id),
            request: RequestId::new(&format!("r{id}")).expect("a test id"),
            prompt: (0..len).map(|token| 10 + token).collect(),
            stop: StopRule { max_new, stop_ids: vec![], min_new: 0 },
            purpose,
            follows: None,
            admitted_with_first: false,
            cache_salt: None,
            prompt_logprobs: None,
            adapter: None,
            priority: 0,
        };
        scheduler.submit(new).expect("accepted");
    }

    /// Computes one step. Returns whether there was one.
    fn step(scheduler: &mut Scheduler, window: usize) -> bool {
        let plan = scheduler.schedule();
        for part in &plan {
            // Every block that a position of the part sees is one of its own.
            let sequence = scheduler.sequence(part.id).expect("planned");
            let first_seen = (part.start + 1).saturating_sub(window) / CONFIG.block_tokens;
            assert!(first_seen >= sequence.blocks.table.len() - sequence.blocks.held().len());
            let mut held = sequence.blocks.held().to_vec();
            held.sort_unstable_by_key(|block| block.index());
            assert!(held.windows(2).all(|pair| pair[0] != pair[1]), "{held:?}");
            assert!(sequence.blocks().iter().all(|block| held.contains(block)));
            if let Some(reason) = scheduler.commit(part, part.samples.then_some(5)) {
                scheduler.finish(part.id, reason).expect("once");
            }
            assert!(scheduler.usage().adds_up());
        }
        !plan.is_empty()
    }

    #[test]
    fn a_sequence_holds_the_blocks_of_its_window_only() {
        const WINDOW: usize = 9;
        let mut scheduler = Scheduler::new(SchedulerConfig { window: Some(WINDOW), ..CONFIG }, 64);
        submit(&mut scheduler, 1, 40, 60, Purpose::Plain);
        let mut most = 0;
        while step(&mut scheduler, WINDOW) {
            let decodes = scheduler.sequence(SeqId(1)).is_some_and(|sequence| sequence.generated() > 0);
            most = most.max(if decodes { scheduler.usage().active } else { 0 });
        }
        // Nine keys are in at most three blocks, and the next token may need a fourth.
        assert!((3..=4).contains(&most), "{most}");
        assert_eq!(scheduler.usage().held_share(), 0.0);
        // All blocks are in the cache: a second sequence computes the last token only.
        submit(&mut scheduler, 2, 41, 1, Purpose::Plain);
        assert_eq!(scheduler.schedule()[0].start, 40);
    }

    #[test]
    fn a_preempted_sequence_is_computed_again_without_its_passed_blocks() {
        const WINDOW: usize = 4;
        let mut scheduler = Scheduler::new(SchedulerConfig { window: Some(WINDOW), ..CONFIG }, 10);
        for id in 1..=3 {
            submit(&mut scheduler, id, 7 + id as u32, 20, Purpose::Plain);
        }
        for _ in 0..400 {
            if !step(&mut scheduler, WINDOW) {
                break;
            }
        }
        assert_eq!(scheduler.usage().held_share(), 0.0);
        assert_eq!(scheduler.load().running + scheduler.load().waiting, 0);
    }

    #[test]
    fn a_producer_keeps_its_whole_prompt() {
        let mut scheduler = Scheduler::new(SchedulerConfig { window: Some(4), ..CONFIG }, 64);
        submit(&mut scheduler, 1, 40, 1, Purpose::Produce { consumers: 1, early: false });
        while step(&mut scheduler, 4) {}
        assert_eq!(scheduler.usage().leased, 10);
    }

    #[test]
    fn an_abort_frees_each_block_once() {
        let mut scheduler = Scheduler::new(SchedulerConfig { window: Some(5), ..CONFIG }, 64);
        submit(&mut scheduler, 1, 40, 60, Purpose::Plain);
        for _ in 0..20 {
            step(&mut scheduler, 5);
        }
        scheduler.finish(SeqId(1), FinishReason::Abort).expect("it runs");
        assert!(scheduler.usage().adds_up());
        assert_eq!(scheduler.usage().held_share(), 0.0);
    }
}
