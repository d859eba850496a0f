//! What an engine core has its device do beside forward passes, and what becomes of everybody when it fails.

use baton_connector::BlockId;

use super::{EngineCore, Fact, SeqEvent, Surroundings};
use crate::executor::ExecutorError;
use crate::offload::Order;
use crate::sequence::FinishReason;

impl<S: Surroundings> EngineCore<S> {
    /// Says whether the device's side of an order is ready for the workers.
    pub(super) fn prepare(&mut self, order: &Order) -> bool {
        match order {
            Order::Load { block, .. } => {
                self.executor.landing(&[*block]);
                true
            }
            Order::Store { block, .. } => self.publish(&[*block]),
            Order::Write { .. } | Order::Delete { .. } => true,
        }
    }

    /// Makes blocks readable from outside. False: nobody may read them.
    pub(super) fn publish(&mut self, blocks: &[BlockId]) -> bool {
        let published = self.executor.publish(blocks);
        if let Err(error) = &published {
            tracing::error!(%error, "computed blocks cannot be read from outside");
        }
        published.is_ok()
    }

    /// A device that other threads have found out of order is found so before their mail is: who waits for it has no
    /// step to hear of it by.
    pub(super) fn look_after_device(&mut self) {
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
        tracing::error!(%error, "the device has failed; ending every request");
        self.surroundings.note(Fact::DeviceFailed(&why));
        self.end_all(FinishReason::Error, || SeqEvent::Unavailable("the engine's device failed"));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use baton_connector::ledger::{Grant, OpenRefused};
    use baton_connector::region::Region;
    use baton_connector::{Epoch, Handle, KvLayout, RequestId};
    use tokio::sync::mpsc::channel;

    use super::*;
    use crate::engine_core::{ProducerAddress, Submission};
    use crate::executor::{Executor, Logits, SeqStep};
    use crate::mailbox::Mail;
    use crate::peers::FetchTarget;
    use crate::sampling::SamplingParams;
    use crate::scheduler::{Scheduler, SchedulerConfig};
    use crate::sequence::{NewSequence, Purpose, SeqId, StopRule};

    /// Is given up when the test says so, and computes nothing.
    struct Device {
        region: Region,
        given_up: Arc<AtomicBool>,
    }

    impl Executor for Device {
        fn layout(&self) -> KvLayout {
            let dtype = baton_connector::layout::KvDtype::F32;
            KvLayout { layers: 1, kv_heads: 1, head_dim: 1, block_tokens: 4, dtype }
        }

        fn regions(&self) -> &[Region] {
            std::slice::from_ref(&self.region)
        }

        fn vocab(&self) -> usize {
            8
        }

        fn execute(&mut self, _: &[SeqStep<'_>], _: &mut Logits) -> Result<(), ExecutorError> {
            panic!("nothing is computed here");
        }

        fn usable(&self) -> Result<(), ExecutorError> {
            match self.given_up.load(Ordering::Acquire) {
                true => Err(ExecutorError::Device("a copy has hung".into())),
                false => Ok(()),
            }
        }
    }

    /// Nobody is around; what is counted is kept.
    struct Alone(Rc<RefCell<Vec<String>>>);

    impl Surroundings for Alone {
        fn now(&self) -> Instant {
            Instant::now()
        }
        fn fresh_handle(&mut self) -> Option<Handle> {
            None
        }
        fn lend(&mut self, _: Grant) -> Result<Duration, OpenRefused> {
            Ok(Duration::ZERO)
        }
        fn lend_growing(&mut self, _: Grant, _: usize) -> Result<Duration, OpenRefused> {
            Ok(Duration::ZERO)
        }
        fn grow(&mut self, _: Handle, _: usize) {}
        fn seal(&mut self, _: Handle) -> bool {
            false
        }
        fn release(&mut self, _: Handle, _: &'static str) {}
        fn release_all(&mut self, _: &'static str) {}
        fn was_released_early(&self, _: &RequestId) -> bool {
            false
        }
        fn live_leases(&self) -> usize {
            0
        }
        fn address(&self) -> &ProducerAddress {
            panic!("nobody asks");
        }
        fn epoch(&self) -> Epoch {
            Epoch(1)
        }
        fn fingerprint(&self) -> u64 {
            1
        }
        fn keep_alive(&mut self, _: SeqId, _: &FetchTarget) {}
        fn let_go(&mut self, _: SeqId) {}
        fn read(&mut self, _: SeqId, _: &FetchTarget, _: usize, _: Vec<BlockId>) {}
        fn stop_read(&mut self, _: SeqId) {}
        fn release_at_producer(&mut self, _: &FetchTarget, _: &'static str) {}
        fn note(&self, fact: Fact<'_>) {
            if let Fact::DeviceFailed(why) = fact {
                self.0.borrow_mut().push(why.to_owned());
            }
        }
    }

    #[test]
    fn who_waits_is_ended_without_a_step_when_other_threads_have_given_the_device_up() {
        let (given_up, told) = (Arc::new(AtomicBool::new(false)), Rc::default());
        let device = Device { region: Region::allocate(8, 16), given_up: Arc::clone(&given_up) };
        let config = SchedulerConfig {
            block_tokens: 4,
            max_num_seqs: 2,
            max_num_batched_tokens: 8,
            max_waiting: 2,
            max_model_len: 16,
        };
        let mut core = EngineCore::new(Box::new(device), Scheduler::new(config, 8), Alone(Rc::clone(&told)));
        let (outbox, mut inbox) = channel(8);
        let sequence = NewSequence {
            id: SeqId(1),
            request: RequestId::new("r").expect("a test id"),
            prompt: vec![1, 2, 3],
            stop: StopRule { max_new: 2, stop_ids: Vec::new(), min_new: 0 },
            purpose: Purpose::Plain,
            follows: None,
            rides: false,
            cache_salt: None,
        };
        let sampling = SamplingParams::default();
        let submission = Submission {
            sequence,
            sampling,
            index: 0,
            tag: None,
            outbox,
            target: None,
            arrived: Instant::now(),
        };
        let mut mail = Mail::default();
        mail.submissions.push_back(submission);
        core.take_in(mail);
        assert!(core.live() == 1 && told.borrow().is_empty());
        given_up.store(true, Ordering::Release);
        for _ in 0..2 {
            core.take_in(Mail::default());
        }
        assert!(matches!(inbox.try_recv(), Ok((0, SeqEvent::Unavailable(_)))));
        assert_eq!((core.live(), told.borrow().len()), (0, 1));
    }
}
