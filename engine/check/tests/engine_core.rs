//! Failures and waits of the device, as the engine core handles them.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use baton_connector::layout::KvDtype;
use baton_connector::lease::CloseCause;
use baton_connector::ledger::{ClosedLease, LeaseOpenError, LeaseSpec};
use baton_connector::region::Region;
use baton_connector::{BlockId, EngineId, Epoch, Handle, KvLayout, RequestId};
use baton_connector_leases::event_log::RequestEvent;
use baton_engine::compute::cuda::{CudaExecutor, DeviceOptions, Element, PoolSize};
use baton_engine::compute::{Executor, ExecutorError, Logits, LogitsRequest, SeqStep};
use baton_engine::engine_core::fetch_target::FetchTarget;
use baton_engine::engine_core::mailbox::MailBatch;
use baton_engine::engine_core::{
    CoreEvent, DeadlineKind, Deadlines, EngineCore, EngineEnv, ProducerAddress, SeqEvent, Submission,
};
use baton_engine::model::config::ModelConfig;
use baton_engine::model::generation::GenerationDefaults;
use baton_engine::model::weights::Weights;
use baton_engine::offload::OffloadOrder;
use baton_engine::offload::host_arena::{HostArena, TieredPool};
use baton_engine::offload::tier_index::TierConfig;
use baton_engine::sampling::SamplingParams;
use baton_engine::scheduler::sequence::{FinishReason, NewSequence, Purpose, SeqId, StopRule};
use baton_engine::scheduler::{Refusal, Scheduler, SchedulerConfig};
use baton_engine_check::software::SoftwareDevice;
use tokio::sync::mpsc::{Receiver, channel};

type EmittedLines = Arc<Mutex<Vec<String>>>;

/// Fails when the test sets `failed` and computes nothing. During a step it moves the lines that the step emits
/// to `emitted_in_step`.
struct StubDevice {
    region: Region,
    failed: Arc<AtomicBool>,
    emitted: EmittedLines,
    emitted_in_step: EmittedLines,
}

impl Executor for StubDevice {
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
        let before = self.emitted.lock().unwrap().len();
        meanwhile();
        self.emitted_in_step.lock().unwrap().extend(self.emitted.lock().unwrap().drain(before..));
        let rows = batch.iter().filter(|step| step.logits != LogitsRequest::No).count();
        (logits.vocab, logits.values) = (8, vec![0.0; rows * 8]);
        Ok(())
    }

    fn usable(&self) -> Result<(), ExecutorError> {
        match self.failed.load(Ordering::Acquire) {
            true => Err(ExecutorError::Device("a copy has hung".into())),
            false => Ok(()),
        }
    }
}

/// An environment without peers. It records counted events, emitted events and orders.
struct RecordingEnv {
    /// Added to the clock.
    ahead: Duration,
    emitted: EmittedLines,
    orders: Arc<Mutex<Vec<OffloadOrder>>>,
    address: ProducerAddress,
}

impl EngineEnv for RecordingEnv {
    fn now(&self) -> Instant {
        Instant::now() + self.ahead
    }
    fn fresh_handle(&mut self) -> Option<Handle> {
        Some(Handle(7))
    }
    fn open_lease(&mut self, _: LeaseSpec) -> Result<Duration, LeaseOpenError> {
        Ok(Duration::ZERO)
    }
    fn open_growing_lease(&mut self, _: LeaseSpec, _: usize) -> Result<Duration, LeaseOpenError> {
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
    fn stop_renewing(&mut self, _: SeqId) {}
    fn read(&mut self, _: SeqId, _: &FetchTarget, _: usize, _: Vec<BlockId>) {}
    fn stop_read(&mut self, _: SeqId) {}
    fn release_at_producer(&mut self, _: &FetchTarget, _: &'static str) {}
    fn offload(&mut self, order: OffloadOrder) -> bool {
        self.orders.lock().unwrap().push(order);
        true
    }
    fn record(&self, event: CoreEvent<'_>) {
        if let CoreEvent::DeviceFailed(why) = event {
            self.emitted.lock().unwrap().push(why.to_owned());
        }
    }
    fn emit(&self, request: &RequestId, _: u32, event: RequestEvent) {
        if let RequestEvent::Freed(blocks) = event {
            self.emitted.lock().unwrap().push(format!("{request}: {blocks} blocks freed"));
        }
    }
}

struct DeviceBench {
    core: EngineCore<RecordingEnv>,
    device_failed: Arc<AtomicBool>,
    emitted: EmittedLines,
    emitted_in_step: EmittedLines,
}

fn bench() -> DeviceBench {
    let (device_failed, emitted, emitted_in_step) =
        <(Arc<AtomicBool>, EmittedLines, EmittedLines)>::default();
    let device = StubDevice {
        region: Region::allocate(8, 16),
        failed: Arc::clone(&device_failed),
        emitted: Arc::clone(&emitted),
        emitted_in_step: Arc::clone(&emitted_in_step),
    };
    let scheduler = Scheduler::new(scheduler(8, 16), 8);
    let core = EngineCore::new(Box::new(device), scheduler, recording_env(&emitted, &Arc::default()));
    DeviceBench { core, device_failed, emitted, emitted_in_step }
}

fn scheduler(max_num_batched_tokens: usize, max_model_len: usize) -> SchedulerConfig {
    SchedulerConfig {
        block_tokens: 4,
        max_num_seqs: 2,
        max_num_batched_tokens,
        max_waiting: 2,
        max_model_len,
        window: None,
    }
}

fn recording_env(emitted: &EmittedLines, orders: &Arc<Mutex<Vec<OffloadOrder>>>) -> RecordingEnv {
    let address = ProducerAddress {
        engine_id: EngineId("p".into()),
        host: "127.0.0.1".into(),
        ports: vec![1],
        block_tokens: 4,
    };
    let (emitted, orders) = (Arc::clone(emitted), Arc::clone(orders));
    RecordingEnv { ahead: Duration::ZERO, emitted, orders, address }
}

fn request(id: u64, purpose: Purpose, max_new: usize) -> (MailBatch, Receiver<(u32, SeqEvent)>) {
    submission_mail(id, vec![1, 2, 3, 4, 5], purpose, max_new)
}

fn submission_mail(
    id: u64,
    prompt: Vec<u32>,
    purpose: Purpose,
    max_new: usize,
) -> (MailBatch, Receiver<(u32, SeqEvent)>) {
    let (outbox, inbox) = channel(8);
    let sequence = NewSequence {
        id: SeqId(id),
        request: RequestId::new(&format!("r{id}")).expect("a test id"),
        prompt,
        stop: StopRule { max_new, stop_ids: Vec::new(), min_new: 0 },
        purpose,
        follows: None,
        admitted_with_first: false,
        cache_salt: None,
        adapter: None,
        prompt_logprobs: None,
        priority: 0,
    };
    let submission = Submission {
        sequence,
        sampling: SamplingParams::default(),
        grammar: None,
        index: 0,
        tag: None,
        outbox,
        target: None,
        arrived: Instant::now(),
        deadlines: Deadlines::default(),
    };
    let mut mail = MailBatch::default();
    mail.submissions.push_back(submission);
    (mail, inbox)
}

#[test]
fn a_disabled_device_ends_waiting_sequences_without_a_step() {
    let DeviceBench { mut core, device_failed, emitted, .. } = bench();
    let (mail, mut inbox) = request(1, Purpose::Plain, 2);
    core.take_in(mail);
    assert!(core.live() == 1 && emitted.lock().unwrap().is_empty());
    device_failed.store(true, Ordering::Release);
    for _ in 0..2 {
        core.take_in(MailBatch::default());
    }
    assert!(matches!(inbox.try_recv(), Ok((0, SeqEvent::Unavailable(_)))));
    assert_eq!((core.live(), emitted.lock().unwrap().len()), (0, 1));
}

#[test]
fn the_step_loop_waits_for_steps_and_not_for_offloads() {
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
        mirror: Some(Region::allocate),
    };
    let device = SoftwareDevice::new(16 << 20, options.element, config.head_dim);
    let waits = Arc::clone(&device.waits);
    let waited = || waits.load(Ordering::Acquire);
    let device = CudaExecutor::load(device, &Weights::random(5), &config, &options, &mut |_| ());
    let device = device.expect("the model fits");
    let (shared_pool, region) = (device.shared_pool(), device.regions()[0].clone());
    let (emitted, orders) = (EmittedLines::default(), Arc::<Mutex<Vec<OffloadOrder>>>::default());
    let tiers = TierConfig { host_blocks: 64, disk_blocks: 0 };
    let scheduler = Scheduler::new(scheduler(64, 96), 128).with_tiers(tiers, []);
    let mut core = EngineCore::new(Box::new(device), scheduler, recording_env(&emitted, &orders));
    let prompt = (0..62).map(|n| n * 7 % 60 + 2).collect();
    let (mail, _inbox) = submission_mail(1, prompt, Purpose::Plain, 8);
    core.take_in(mail);
    let before = waited();
    // The store of a completed block is ordered when the next step is planned.
    for (steps, stores) in [0, 15, 15, 16].into_iter().enumerate() {
        let (plan, _) = core.schedule();
        assert_eq!((orders.lock().unwrap().len(), waited() - before), (stores, steps as u64));
        assert!(core.execute(&plan, &mut Vec::new));
        core.finish_step(&plan, MailBatch::default());
    }
    assert!(emitted.lock().unwrap().is_empty());
    // A worker copies the blocks from the device, without the mirror.
    let arena = HostArena::new(64, TieredPool::new(vec![region.clone()], shared_pool));
    let mut stored = Vec::new();
    for order in orders.lock().unwrap().drain(..) {
        let OffloadOrder::Store { block, slot, .. } = order else { panic!("{order:?}") };
        arena.store(block, slot).expect("the block is copied from the device");
        assert!(
            region.read_block(block).iter().all(|byte| *byte == 0),
            "a block was copied to the mirror before its publication"
        );
        stored.push((block, arena.bytes(slot)));
    }
    assert_eq!((stored.len(), waited() - before), (16, 4));
    for (block, bytes) in stored {
        assert_eq!(core.publish(&[block]), Some(vec![block]));
        assert!(bytes == region.read_block(block) && bytes.iter().any(|byte| *byte != 0));
    }
}

#[test]
fn a_lease_that_ends_during_a_step_frees_its_blocks_before_the_step_ends() {
    let DeviceBench { mut core, emitted, emitted_in_step, .. } = bench();
    let no_closed_leases = &mut Vec::new;
    let (mail, mut producer) = request(1, Purpose::Produce { consumers: 1, early: false }, 1);
    core.take_in(mail);
    let (plan, _) = core.schedule();
    assert!(core.execute(&plan, no_closed_leases));
    core.finish_step(&plan, MailBatch::default());
    core.schedule();
    let Some(handoff) = std::iter::from_fn(|| producer.try_recv().ok()).find_map(|(_, event)| match event {
        SeqEvent::Finished(end) => end.handoff,
        _ => None,
    }) else {
        panic!("the prefill returned no handoff");
    };
    assert_eq!(core.usage_and_load().0.leased, 2);
    // Another sequence computes when the first one's lease ends. Both have the same prompt and share a block.
    let (mail, _inbox) = request(2, Purpose::Plain, 2);
    core.take_in(mail);
    let (plan, _) = core.schedule();
    let mut ended = vec![ClosedLease {
        handle: handoff.handle,
        request: RequestId::new("r1").expect("a test id"),
        blocks: handoff.blocks.clone(),
        cause: CloseCause::Released,
        reason: "aborted".into(),
        lifetime: Duration::ZERO,
        readers: (0, 1),
    }];
    assert!(core.execute(&plan, &mut || std::mem::take(&mut ended)));
    assert_eq!((core.usage_and_load().0.leased, core.usage_and_load().0.active), (0, 2));
    assert_eq!(*emitted_in_step.lock().unwrap(), ["r1: 2 blocks freed"]);
    core.finish_step(&plan, MailBatch::default());
    assert!(emitted.lock().unwrap().is_empty() && core.live() == 1);
}

/// Lets a core act until a sequence has ended.
fn last_event(core: &mut EngineCore<RecordingEnv>, inbox: &mut Receiver<(u32, SeqEvent)>) -> SeqEvent {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(60) {
        core.take_in(MailBatch::default());
        if let Ok((_, event)) = inbox.try_recv() {
            return event;
        }
        std::thread::yield_now();
    }
    panic!("the sequence has not ended");
}

#[test]
fn a_sequence_ends_at_its_deadline_and_frees_its_blocks() {
    let DeviceBench { mut core, .. } = bench();
    let soon = || Some(Instant::now() + Duration::from_millis(20));
    let with = |id, deadlines| {
        let (mut mail, inbox) = request(id, Purpose::Plain, 2);
        mail.submissions[0].deadlines = deadlines;
        (mail, inbox)
    };
    let whole = soon();
    let (mail, mut running) = with(1, Deadlines { first_token: None, whole });
    core.take_in(mail);
    assert_eq!((core.schedule().0.len(), core.wake_at()), (1, whole));
    let (mail, _second) = with(2, Deadlines::default());
    core.take_in(mail);
    core.schedule();
    // Two sequences have all places.
    let (mail, mut waiting) = with(3, Deadlines { first_token: soon(), whole: None });
    core.take_in(mail);
    core.schedule();
    assert_eq!((core.usage_and_load().1.waiting, core.live()), (1, 3));
    let ended = last_event(&mut core, &mut running);
    assert!(matches!(ended, SeqEvent::TimedOut(DeadlineKind::Whole)), "{ended:?}");
    let ended = last_event(&mut core, &mut waiting);
    assert!(matches!(ended, SeqEvent::TimedOut(DeadlineKind::FirstToken)), "{ended:?}");
    let (usage, load) = core.usage_and_load();
    assert_eq!((core.live(), usage.active, load.waiting, load.running), (1, 2, 0, 1));
    assert_eq!(core.wake_at(), None, "no deadline is left");
    // A request without time is refused at once.
    let (mail, mut late) = with(4, Deadlines { first_token: None, whole: Some(Instant::now()) });
    core.take_in(mail);
    assert!(matches!(late.try_recv(), Ok((0, SeqEvent::TimedOut(DeadlineKind::Whole)))));
    assert_eq!(core.live(), 1);
}

/// Computes one step, and then takes this mail in.
fn step(core: &mut EngineCore<RecordingEnv>, mail: MailBatch) -> usize {
    let (plan, _) = core.schedule();
    assert!(core.execute(&plan, &mut Vec::new));
    core.finish_step(&plan, mail);
    plan.len()
}

#[test]
fn a_request_that_the_queue_would_make_late_is_refused_and_an_empty_queue_has_no_pace() {
    let DeviceBench { mut core, .. } = bench();
    // Each prompt fills a step and ends with it.
    let prompt = |id: u64| -> Vec<u32> { (0..8).map(|at| 100 * id as u32 + at).collect() };
    let ask = |core: &mut EngineCore<RecordingEnv>, id, left: Option<Duration>| {
        let (mut mail, inbox) = submission_mail(id, prompt(id), Purpose::Plain, 1);
        let whole = left.map(|left| core.env().now() + left);
        mail.submissions[0].deadlines = Deadlines { first_token: None, whole };
        (mail, inbox)
    };
    let mut inboxes = Vec::new();
    for id in 1..=2 {
        let (mail, inbox) = ask(&mut core, id, None);
        inboxes.push(inbox);
        core.take_in(mail);
    }
    for id in 3..=11 {
        core.env().ahead += Duration::from_millis(100);
        let (mail, inbox) = ask(&mut core, id, None);
        inboxes.push(inbox);
        assert_eq!(step(&mut core, mail), 1);
    }
    assert_eq!(core.usage_and_load().1.waiting, 2);
    // Two gaps of 100 ms are before it.
    let (mail, mut late) = ask(&mut core, 12, Some(Duration::from_millis(150)));
    core.take_in(mail);
    let (_, refused) = late.try_recv().expect("an event");
    let SeqEvent::Refused(Refusal::TooLate { ahead: 2, wait }) = refused else { panic!("{refused:?}") };
    assert!(wait >= Duration::from_millis(199), "{wait:?}");
    // The two leave, and after an hour there is a queue again.
    let mut mail = MailBatch::default();
    mail.endings.extend([10, 11].map(|id| (SeqId(id), FinishReason::Abort)));
    core.take_in(mail);
    assert_eq!((core.schedule().0.len(), core.live()), (0, 0));
    core.env().ahead += Duration::from_secs(3_600);
    for id in 13..=14 {
        let (mail, inbox) = ask(&mut core, id, Some(Duration::from_secs(30)));
        inboxes.push(inbox);
        core.take_in(mail);
    }
    assert_eq!((step(&mut core, MailBatch::default()), core.live()), (1, 1));
    let (mail, mut last) = ask(&mut core, 15, Some(Duration::from_secs(30)));
    core.take_in(mail);
    assert!(last.try_recv().is_err(), "the hour is no gap of the queue");
    assert_eq!(core.live(), 2);
}
