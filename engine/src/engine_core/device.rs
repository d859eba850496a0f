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
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, Instant};

    use baton_connector::layout::KvDtype;
    use baton_connector::lease::Cause;
    use baton_connector::ledger::{Grant, OpenRefused, Settled};
    use baton_connector::region::Region;
    use baton_connector::{EngineId, Epoch, Handle, KvLayout, RequestId};
    use tokio::sync::mpsc::{Receiver, channel};

    use super::*;
    use crate::engine_core::{ProducerAddress, Submission};
    use crate::event_log::What;
    use crate::executor::{Executor, Logits, LogitsWanted, SeqStep};
    use crate::mailbox::Mail;
    use crate::peers::FetchTarget;
    use crate::sampling::SamplingParams;
    use crate::scheduler::{Scheduler, SchedulerConfig};
    use crate::sequence::{NewSequence, Purpose, SeqId, StopRule};

    type Told = Arc<Mutex<Vec<String>>>;

    /// Is given up when the test says so, computes nothing, and looks at the end of a step at what has been told.
    struct Device {
        region: Region,
        given_up: Arc<AtomicBool>,
        told: Told,
        told_in_step: Told,
    }

    impl Executor for Device {
        fn layout(&self) -> KvLayout {
            KvLayout { layers: 1, kv_heads: 1, head_dim: 1, block_tokens: 4, dtype: KvDtype::F32 }
        }

        fn regions(&self) -> &[Region] {
            std::slice::from_ref(&self.region)
        }

        fn vocab(&self) -> usize {
            8
        }

        fn run(
            &mut self,
            batch: &[SeqStep<'_>],
            logits: &mut Logits,
            meanwhile: &mut dyn FnMut(),
        ) -> Result<(), ExecutorError> {
            let before = self.told.lock().unwrap().len();
            meanwhile();
            self.told_in_step.lock().unwrap().extend(self.told.lock().unwrap().drain(before..));
            let rows = batch.iter().filter(|step| step.logits != LogitsWanted::No).count();
            (logits.vocab, logits.values) = (8, vec![0.0; rows * 8]);
            Ok(())
        }

        fn usable(&self) -> Result<(), ExecutorError> {
            match self.given_up.load(Ordering::Acquire) {
                true => Err(ExecutorError::Device("a copy has hung".into())),
                false => Ok(()),
            }
        }
    }

    /// Nobody is around; what is counted and told is kept.
    struct Alone {
        told: Told,
        address: ProducerAddress,
    }

    impl Surroundings for Alone {
        fn now(&self) -> Instant {
            Instant::now()
        }
        fn fresh_handle(&mut self) -> Option<Handle> {
            Some(Handle(7))
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
            &self.address
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
                self.told.lock().unwrap().push(why.to_owned());
            }
        }
        fn tell(&self, request: &RequestId, _: u32, what: What) {
            if let What::Freed(blocks) = what {
                self.told.lock().unwrap().push(format!("{request}: {blocks} blocks freed"));
            }
        }
    }

    struct Bench {
        core: EngineCore<Alone>,
        given_up: Arc<AtomicBool>,
        told: Told,
        told_in_step: Told,
    }

    fn bench() -> Bench {
        let (given_up, told, told_in_step) = <(Arc<AtomicBool>, Told, Told)>::default();
        let device = Device {
            region: Region::allocate(8, 16),
            given_up: Arc::clone(&given_up),
            told: Arc::clone(&told),
            told_in_step: Arc::clone(&told_in_step),
        };
        let config = SchedulerConfig {
            block_tokens: 4,
            max_num_seqs: 2,
            max_num_batched_tokens: 8,
            max_waiting: 2,
            max_model_len: 16,
        };
        let address = ProducerAddress {
            engine_id: EngineId("p".into()),
            host: "127.0.0.1".into(),
            ports: vec![1],
            block_tokens: 4,
        };
        let alone = Alone { told: Arc::clone(&told), address };
        let core = EngineCore::new(Box::new(device), Scheduler::new(config, 8), alone);
        Bench { core, given_up, told, told_in_step }
    }

    fn request(id: u64, purpose: Purpose, max_new: usize) -> (Mail, Receiver<(u32, SeqEvent)>) {
        let (outbox, inbox) = channel(8);
        let sequence = NewSequence {
            id: SeqId(id),
            request: RequestId::new(&format!("r{id}")).expect("a test id"),
            prompt: vec![1, 2, 3, 4, 5],
            stop: StopRule { max_new, stop_ids: Vec::new(), min_new: 0 },
            purpose,
            follows: None,
            rides: false,
            cache_salt: None,
        };
        let submission = Submission {
            sequence,
            sampling: SamplingParams::default(),
            index: 0,
            tag: None,
            outbox,
            target: None,
            arrived: Instant::now(),
        };
        let mut mail = Mail::default();
        mail.submissions.push_back(submission);
        (mail, inbox)
    }

    #[test]
    fn who_waits_is_ended_without_a_step_when_other_threads_have_given_the_device_up() {
        let Bench { mut core, given_up, told, .. } = bench();
        let (mail, mut inbox) = request(1, Purpose::Plain, 2);
        core.take_in(mail);
        assert!(core.live() == 1 && told.lock().unwrap().is_empty());
        given_up.store(true, Ordering::Release);
        for _ in 0..2 {
            core.take_in(Mail::default());
        }
        assert!(matches!(inbox.try_recv(), Ok((0, SeqEvent::Unavailable(_)))));
        assert_eq!((core.live(), told.lock().unwrap().len()), (0, 1));
    }

    #[test]
    fn blocks_of_a_lease_that_ends_during_a_step_do_not_wait_for_its_end() {
        let Bench { mut core, told, told_in_step, .. } = bench();
        let nothing = &mut Vec::new;
        let (mail, mut lent_to) = request(1, Purpose::Produce { consumers: 1, early: false }, 1);
        core.take_in(mail);
        let (plan, _) = core.schedule();
        assert!(core.execute(&plan, nothing));
        core.finish_step(&plan, Mail::default());
        core.schedule();
        let Some(handoff) =
            std::iter::from_fn(|| lent_to.try_recv().ok()).find_map(|(_, event)| match event {
                SeqEvent::Finished(end) => end.handoff,
                _ => None,
            })
        else {
            panic!("nothing was lent");
        };
        assert_eq!(core.books().0.leased, 2);
        // Another computes when the first one's lease ends; both prompts begin alike, so that they share a block.
        let (mail, _inbox) = request(2, Purpose::Plain, 2);
        core.take_in(mail);
        let (plan, _) = core.schedule();
        let mut ended = vec![Settled {
            handle: handoff.handle,
            request: RequestId::new("r1").expect("a test id"),
            blocks: handoff.blocks.clone(),
            cause: Cause::Released,
            reason: "aborted".into(),
            held: Duration::ZERO,
            readers: (0, 1),
        }];
        assert!(core.execute(&plan, &mut || std::mem::take(&mut ended)));
        assert_eq!((core.books().0.leased, core.books().0.active), (0, 2));
        assert_eq!(*told_in_step.lock().unwrap(), ["r1: 2 blocks freed"]);
        core.finish_step(&plan, Mail::default());
        assert!(told.lock().unwrap().is_empty() && core.live() == 1);
    }
}
