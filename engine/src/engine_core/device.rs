//! What an engine core has its device do beside forward passes, and what becomes of everybody when it fails.

use baton_connector::BlockId;

use super::{EngineCore, Fact, SeqEvent, Surroundings};
use crate::compute::ExecutorError;
use crate::offload::Order;
use crate::scheduler::sequence::FinishReason;

impl<S: Surroundings> EngineCore<S> {
    /// Says whether the device's side of an order is ready for the workers.
    pub(super) fn prepare(&mut self, order: &Order) -> bool {
        match order {
            Order::Load { block, .. } => {
                self.executor.landing(&[*block]);
                true
            }
            Order::Store { block, .. } => self.storable(*block),
            Order::Write { .. } | Order::Delete { .. } => true,
        }
    }

    /// Leaves a block to the worker that stores it, which copies it out of the device itself: up to hundreds are stored
    /// between two steps, and the next step waits for none. False: nobody may store it.
    fn storable(&mut self, block: BlockId) -> bool {
        let stored = self.executor.store(&[block]);
        if let Err(error) = &stored {
            tracing::error!(%error, "cannot store computed blocks");
        }
        stored.is_ok()
    }

    /// Makes blocks readable from outside, and says which are. `None`: none may be read.
    pub(super) fn publish(&mut self, blocks: &[BlockId]) -> Option<Vec<BlockId>> {
        let published = self.executor.publish(blocks);
        published.inspect_err(|error| tracing::error!(%error, "cannot publish computed blocks")).ok()
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
        tracing::error!(%error, "device failed, all requests ended");
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
    use crate::compute::cuda::software::SoftDevice;
    use crate::compute::cuda::{CudaExecutor, DeviceOptions, Element, PoolSize};
    use crate::compute::{Executor, Logits, LogitsWanted, SeqStep};
    use crate::engine_core::fetch_target::FetchTarget;
    use crate::engine_core::mailbox::Mail;
    use crate::engine_core::{ProducerAddress, Submission};
    use crate::event_log::What;
    use crate::model::config::ModelConfig;
    use crate::model::generation::GenerationDefaults;
    use crate::model::weights::Weights;
    use crate::offload::arena::Arena;
    use crate::offload::tier_index::TierConfig;
    use crate::sampling::SamplingParams;
    use crate::scheduler::sequence::{NewSequence, Purpose, SeqId, StopRule};
    use crate::scheduler::{Scheduler, SchedulerConfig};

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

    /// Nobody is around; what is counted, told and ordered is kept.
    struct Alone {
        told: Told,
        orders: Arc<Mutex<Vec<Order>>>,
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
        fn offload(&mut self, order: Order) -> bool {
            self.orders.lock().unwrap().push(order);
            true
        }
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
        let scheduler = Scheduler::new(scheduler(8, 16), 8);
        let core = EngineCore::new(Box::new(device), scheduler, alone(&told, &Arc::default()));
        Bench { core, given_up, told, told_in_step }
    }

    fn scheduler(max_num_batched_tokens: usize, max_model_len: usize) -> SchedulerConfig {
        SchedulerConfig {
            block_tokens: 4,
            max_num_seqs: 2,
            max_num_batched_tokens,
            max_waiting: 2,
            max_model_len,
        }
    }

    fn alone(told: &Told, orders: &Arc<Mutex<Vec<Order>>>) -> Alone {
        let address = ProducerAddress {
            engine_id: EngineId("p".into()),
            host: "127.0.0.1".into(),
            ports: vec![1],
            block_tokens: 4,
        };
        Alone { told: Arc::clone(told), orders: Arc::clone(orders), address }
    }

    fn request(id: u64, purpose: Purpose, max_new: usize) -> (Mail, Receiver<(u32, SeqEvent)>) {
        asking(id, vec![1, 2, 3, 4, 5], purpose, max_new)
    }

    fn asking(
        id: u64,
        prompt: Vec<u32>,
        purpose: Purpose,
        max_new: usize,
    ) -> (Mail, Receiver<(u32, SeqEvent)>) {
        let (outbox, inbox) = channel(8);
        let sequence = NewSequence {
            id: SeqId(id),
            request: RequestId::new(&format!("r{id}")).expect("a test id"),
            prompt,
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
    fn the_thread_of_the_steps_waits_for_steps_alone_and_for_none_of_the_blocks_that_are_stored() {
        let text = br#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32,
            "vocab_size": 64, "eos_token_id": 1}"#;
        let config = ModelConfig::parse(text, GenerationDefaults::default()).expect("a model");
        let options = DeviceOptions {
            pool_size: PoolSize::Blocks(128),
            block_tokens: 4,
            element: Element::F32,
            max_rows: 64,
            max_sequences: 2,
            max_positions: 96,
            pool: Region::allocate,
        };
        let device = SoftDevice::new(16 << 20, options.element, config.head_dim);
        let waits = Arc::clone(&device.waits);
        let waited = || waits.load(Ordering::Acquire);
        let device = CudaExecutor::load(device, &Weights::random(5), &config, &options, &mut |_| ());
        let device = device.expect("it fits");
        let (port, region) = (device.port(), device.regions()[0].clone());
        let (told, orders) = (Told::default(), Arc::<Mutex<Vec<Order>>>::default());
        let tiers = TierConfig { host_blocks: 64, disk_blocks: 0 };
        let scheduler = Scheduler::new(scheduler(64, 96), 128).with_tiers(tiers, []);
        let mut core = EngineCore::new(Box::new(device), scheduler, alone(&told, &orders));
        let prompt = (0..62).map(|n| n * 7 % 60 + 2).collect();
        let (mail, _inbox) = asking(1, prompt, Purpose::Plain, 8);
        core.take_in(mail);
        let before = waited();
        // What a step has completed is ordered when the next one is planned.
        for (steps, stores) in [0, 15, 15, 16].into_iter().enumerate() {
            let (plan, _) = core.schedule();
            assert_eq!((orders.lock().unwrap().len(), waited() - before), (stores, steps as u64));
            assert!(core.execute(&plan, &mut Vec::new));
            core.finish_step(&plan, Mail::default());
        }
        assert!(told.lock().unwrap().is_empty());
        // A worker takes them, past the mirror.
        let arena = Arena::new(64, vec![region.clone()]).mirroring(port);
        let mut stored = Vec::new();
        for order in orders.lock().unwrap().drain(..) {
            let Order::Store { block, slot, .. } = order else { panic!("{order:?}") };
            arena.store(block, slot).expect("the device gives it");
            assert!(region.read_block(block).iter().all(|byte| *byte == 0), "nobody has asked for it there");
            stored.push((block, arena.bytes(slot)));
        }
        assert_eq!((stored.len(), waited() - before), (16, 4));
        for (block, bytes) in stored {
            assert_eq!(core.publish(&[block]), Some(vec![block]));
            assert!(bytes == region.read_block(block) && bytes.iter().any(|byte| *byte != 0));
        }
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
