//! One engine process: the real engine core and the real ledger, with the simulator's device, clock and network.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use baton_connector::fetch::LoadFailurePolicy;
use baton_connector::lease::LeaseTerms;
use baton_connector::ledger::{LeaseOpenError, LeaseSpec, Ledger};
use baton_connector::offload::TransferId;
use baton_connector::{BlockId, EngineId, Epoch, Handle, RequestId, Time};
use baton_engine::engine_core::fetch_target::FetchTarget;
use baton_engine::engine_core::mailbox::MailBatch;
use baton_engine::engine_core::{CoreEvent, EngineCore, EngineEnv, ProducerAddress};
use baton_engine::offload::OffloadOrder;
use baton_engine::offload::tier_index::TierConfig;
use baton_engine::scheduler::sequence::{FinishReason, SeqId};
use baton_engine::scheduler::{PromptLookup, Scheduler, SchedulerConfig, SchedulingPolicy, StepPart};

use crate::consumer::SimConsumer;
use crate::device::{self, Device, DeviceWindow};
use crate::http::EngineRequest;
use crate::messages::Node;
use crate::net::ConnId;
use crate::rng::SimRng;
use crate::setup::{EngineSetup, Mutation, SECOND, Setup};
use crate::sim::{Event, Micros, Sim};
use crate::tiers::{self, Disk, OffloadWorkers};

/// Maximum tokens of a client's sequence.
pub const TOKENS_MAX: usize = 56;

/// All engines have the same layout and model.
pub const FINGERPRINT: u64 = 0x51;

/// The real instant of virtual time 0 in every run.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// An action that the core requests.
#[derive(Debug)]
pub enum EngineAction {
    KeepAlive(SeqId, FetchTarget),
    StopRenewing(SeqId),
    Read(SeqId, FetchTarget, usize, Vec<BlockId>),
    StopRead(SeqId),
    Release(FetchTarget, &'static str),
}

/// The environment of one engine core.
pub struct SimEnv {
    /// Microseconds on this engine's clock.
    local: Micros,
    /// The duration of a lease.
    lease: Micros,
    pub ledger: Ledger,
    pub todo: Vec<EngineAction>,
    pub workers: OffloadWorkers,
    /// The expiry of each live lease, by this engine's clock.
    pub expiries: BTreeMap<Handle, Micros>,
    address: ProducerAddress,
    epoch: Epoch,
    dice: SimRng,
    finished: RefCell<BTreeMap<SeqId, FinishReason>>,
    /// Incidents for the checks, such as a second end of one sequence.
    pub incidents: RefCell<Vec<EngineIncident>>,
}

#[derive(Clone, Copy, Debug)]
pub enum EngineIncident {
    FinishedTwice(SeqId),
    Recomputed,
    LoadFailed,
    DeviceFailed,
}

impl SimEnv {
    pub fn time(&self) -> Time {
        Time(self.local)
    }

    /// Records that a heartbeat renewed a lease.
    pub fn renewed(&mut self, handle: Handle) {
        let expiry = self.local + self.lease * 2 / 3;
        self.expiries.entry(handle).and_modify(|old| *old = expiry.max(*old));
    }

    /// The finish reason of a sequence in the event log.
    pub fn ended(&self, id: SeqId) -> Option<FinishReason> {
        self.finished.borrow().get(&id).copied()
    }
}

impl EngineEnv for SimEnv {
    fn now(&self) -> Instant {
        *START + Duration::from_micros(self.local)
    }

    fn fresh_handle(&mut self) -> Option<Handle> {
        Some(Handle(u128::from(self.dice.roll()) << 64 | u128::from(self.dice.roll())))
    }

    fn open_lease(&mut self, grant: LeaseSpec) -> Result<Duration, LeaseOpenError> {
        let handle = grant.handle;
        let opened = self.ledger.open(grant, Time(self.local));
        if opened.is_ok() {
            self.expiries.insert(handle, self.local + self.lease);
        }
        opened
    }

    fn open_growing_lease(&mut self, grant: LeaseSpec, ready: usize) -> Result<Duration, LeaseOpenError> {
        self.ledger.open_growing(grant, ready, Time(self.local))
    }

    fn grow(&mut self, handle: Handle, ready: usize) {
        self.ledger.grow(handle, ready);
    }

    fn seal(&mut self, handle: Handle) -> bool {
        let sealed = self.ledger.seal(handle, Time(self.local));
        if sealed {
            self.expiries.insert(handle, self.local + self.lease);
        }
        sealed
    }

    fn release(&mut self, handle: Handle, reason: &'static str) {
        self.ledger.release(handle, reason, Time(self.local));
    }

    fn release_all(&mut self, reason: &'static str) {
        let mut handles = self.ledger.handles();
        handles.sort_unstable();
        for handle in handles {
            self.ledger.release(handle, reason, Time(self.local));
        }
    }

    fn was_released_early(&self, request: &RequestId) -> bool {
        self.ledger.was_released_early(request)
    }

    fn live_leases(&self) -> usize {
        self.ledger.len()
    }

    fn address(&self) -> &ProducerAddress {
        &self.address
    }

    fn epoch(&self) -> Epoch {
        self.epoch
    }

    fn fingerprint(&self) -> u64 {
        FINGERPRINT
    }

    fn keep_alive(&mut self, id: SeqId, target: &FetchTarget) {
        self.todo.push(EngineAction::KeepAlive(id, target.clone()));
    }

    fn stop_renewing(&mut self, id: SeqId) {
        self.todo.push(EngineAction::StopRenewing(id));
    }

    fn read(&mut self, id: SeqId, target: &FetchTarget, first: usize, into: Vec<BlockId>) {
        self.todo.push(EngineAction::Read(id, target.clone(), first, into));
    }

    fn stop_read(&mut self, id: SeqId) {
        self.todo.push(EngineAction::StopRead(id));
    }

    fn release_at_producer(&mut self, target: &FetchTarget, reason: &'static str) {
        self.todo.push(EngineAction::Release(target.clone(), reason));
    }

    fn offload(&mut self, order: OffloadOrder) -> bool {
        self.workers.take(order)
    }

    fn revoke(&mut self, id: TransferId) -> bool {
        self.workers.revoke(id)
    }

    fn record(&self, fact: CoreEvent<'_>) {
        let news = match fact {
            CoreEvent::Finished { id, reason, .. } => match self.finished.borrow_mut().insert(id, reason) {
                Some(_) => EngineIncident::FinishedTwice(id),
                None => return,
            },
            CoreEvent::LoadFailed("recompute") => EngineIncident::Recomputed,
            CoreEvent::LoadFailed(_) => EngineIncident::LoadFailed,
            CoreEvent::DeviceFailed(_) => EngineIncident::DeviceFailed,
            _ => return,
        };
        self.incidents.borrow_mut().push(news);
    }
}

pub struct Engine {
    pub index: usize,
    pub life: u32,
    pub setup: EngineSetup,
    pub paused_until: Micros,
    /// Whether this process was stopped at some time.
    pub was_paused: bool,
    /// `None` while the process is down.
    pub core: Option<EngineCore<SimEnv>>,
    pub memory: device::SharedMemory,
    /// The contents of the disk when the process starts.
    disk: Disk,
    pub mail: MailBatch,
    awake: bool,
    step: Option<Vec<StepPart>>,
    lease_timer: Option<Micros>,
    pub fronts: BTreeMap<ConnId, EngineRequest>,
    pub peers: SimConsumer,
    /// Reads that this engine serves, by connection.
    pub serving: BTreeMap<ConnId, crate::producer::ServedRead>,
    pub next_sequence: u64,
    pub closing: bool,
    pub stale: Arc<Mutex<Option<String>>>,
    pub breaks: Arc<AtomicBool>,
    /// Parts of steps behind released blocks, over all processes.
    pub passed: Arc<AtomicU64>,
    pub dice: SimRng,
}

impl Engine {
    pub fn new(setup: &Setup, index: usize) -> Self {
        let mut engine = Self {
            index,
            life: 0,
            setup: setup.engines[index].clone(),
            paused_until: 0,
            was_paused: false,
            core: None,
            memory: device::memory(1, 1, 0),
            disk: Disk::default(),
            mail: MailBatch::default(),
            awake: false,
            step: None,
            lease_timer: None,
            fronts: BTreeMap::new(),
            peers: SimConsumer::default(),
            serving: BTreeMap::new(),
            next_sequence: 1,
            closing: false,
            stale: Arc::default(),
            breaks: Arc::default(),
            passed: Arc::default(),
            dice: SimRng::new(setup.seed, 100 + index as u64),
        };
        engine.start(setup, 0);
        engine
    }

    /// Starts a new process with the same address.
    pub fn start(&mut self, setup: &Setup, now: Micros) {
        let (blocks, block_tokens) = (self.setup.blocks, setup.block_tokens);
        self.life += 1;
        self.memory = device::memory(blocks, block_tokens, self.dice.roll());
        self.breaks = Arc::default();
        let config = SchedulerConfig {
            block_tokens,
            max_num_seqs: self.setup.max_num_seqs,
            max_num_batched_tokens: self.setup.max_batched,
            max_waiting: self.setup.max_waiting,
            max_model_len: TOKENS_MAX,
            window: self.scheduled_window(setup),
        };
        let duration = match setup.mutation {
            Mutation::NoExpiry => Duration::from_secs(1 << 40),
            Mutation::LateExpiry => Duration::from_micros(setup.lease + 60 * SECOND),
            _ => Duration::from_micros(setup.lease),
        };
        let terms = LeaseTerms { duration, ..LeaseTerms::default() };
        let epoch = Epoch(self.dice.roll());
        let window = DeviceWindow {
            keys: setup.window,
            reads_behind: setup.mutation == Mutation::ReadsBehindWindow,
            passed: Arc::clone(&self.passed),
        };
        let (stale, breaks) = (Arc::clone(&self.stale), Arc::clone(&self.breaks));
        let device = Device::new(Arc::clone(&self.memory), blocks, window, stale, breaks);
        let world = SimEnv {
            local: 0,
            lease: setup.lease,
            ledger: Ledger::new(terms),
            todo: Vec::new(),
            expiries: BTreeMap::new(),
            workers: OffloadWorkers::new(Arc::clone(&self.disk), setup.mutation),
            address: ProducerAddress {
                engine_id: EngineId(format!("e{}", self.index).into()),
                host: format!("10.0.0.{}", self.index),
                ports: vec![5600 + self.index as u16],
                block_tokens,
            },
            epoch,
            dice: SimRng::new(self.dice.roll(), 7),
            finished: RefCell::default(),
            incidents: RefCell::default(),
        };
        let tiers = TierConfig { host_blocks: self.setup.host_blocks, disk_blocks: self.setup.disk_blocks };
        let options = &setup.options;
        // With so few kinds of tokens most steps have drafts, and most are rejected.
        let drafts = options.drafts.is_some_and(|first| (first + self.index as u64).is_multiple_of(2));
        // About every second step misses the target.
        let (low, high) = self.setup.step;
        let target = if options.has_target { (low + high) / 2 } else { 0 };
        let scheduler = Scheduler::new(config, blocks)
            .with_tiers(tiers, tiers::found(&self.disk))
            .with_step_target(Duration::from_micros(target));
        let scheduler = match PromptLookup::new(4, 1, 3).filter(|_| drafts) {
            Some(lookup) => scheduler.with_prompt_lookup(lookup),
            None => scheduler,
        };
        let scheduler = match options.has_priorities {
            true => scheduler.with_policy(SchedulingPolicy::Priority),
            false => scheduler,
        };
        let scheduler = if options.has_reserve { scheduler.with_growth_reserve() } else { scheduler };
        self.core = Some(EngineCore::new(Box::new(device), scheduler, world));
        self.mail = MailBatch::default();
        self.step = None;
        self.awake = false;
        self.lease_timer = None;
        self.closing = false;
        self.was_paused = false;
        self.paused_until = 0;
        self.set_clock(now);
    }

    /// The window by which the scheduler releases blocks.
    fn scheduled_window(&self, setup: &Setup) -> Option<usize> {
        let early = usize::from(setup.mutation == Mutation::PassedTooSoon);
        setup.window.map(|keys| keys - early)
    }

    /// Ends the process, with all its state.
    pub fn die(&mut self) {
        self.life += 1;
        self.core = None;
        self.fronts.clear();
        self.serving.clear();
        self.peers = SimConsumer::default();
        self.mail = MailBatch::default();
        self.step = None;
        self.paused_until = 0;
    }

    pub fn local(&self, now: Micros) -> Micros {
        // Every engine's clock has another offset.
        1_000 * SECOND * (self.index as u64 + 1) + now * self.setup.clock_rate / 1_000
    }

    /// The simulator's time at which this engine's clock shows `local`, or a little later.
    pub fn global(&self, local: Micros) -> Micros {
        let since = local.saturating_sub(1_000 * SECOND * (self.index as u64 + 1));
        (u128::from(since) * 1_000 / u128::from(self.setup.clock_rate)) as u64 + 2
    }

    pub fn policy(&self) -> LoadFailurePolicy {
        if self.setup.recompute { LoadFailurePolicy::Recompute } else { LoadFailurePolicy::Fail }
    }

    pub fn set_clock(&mut self, now: Micros) {
        let local = self.local(now);
        if let Some(core) = &mut self.core {
            core.env().local = local;
        }
    }

    pub fn world(&mut self) -> &mut SimEnv {
        self.core.as_mut().expect("only a process that is up is asked").env()
    }
}

impl Sim {
    /// The engine, with its clock set.
    pub fn engine(&mut self, index: usize) -> &mut Engine {
        let now = self.now;
        let engine = &mut self.engines[index];
        engine.set_clock(now);
        engine
    }

    /// Wakes the core, because its mailbox has a message.
    pub fn poke(&mut self, index: usize) {
        let engine = &mut self.engines[index];
        if engine.core.is_some() && !engine.awake && engine.step.is_none() {
            engine.awake = true;
            self.later(Node::Engine(index), 1, Event::Wake(index));
        }
    }

    pub fn wake(&mut self, index: usize) {
        let engine = self.engine(index);
        engine.awake = false;
        if engine.step.is_some() {
            return;
        }
        let mail = std::mem::take(&mut engine.mail);
        let core = engine.core.as_mut().expect("its life goes on");
        core.take_in(mail);
        self.after_core(index);
        self.go_on(index);
    }

    pub fn step_ends(&mut self, index: usize) {
        let engine = self.engine(index);
        let Some(plan) = engine.step.take() else { return };
        let core = engine.core.as_mut().expect("its life goes on");
        // Applies ends during the step before the results of the step.
        let mut ended = 0;
        let mut settled = || {
            ended += engine.mail.settled.len() as u64;
            std::mem::take(&mut engine.mail.settled)
        };
        if core.execute(&plan, &mut settled) {
            let mail = std::mem::take(&mut engine.mail);
            core.finish_step(&plan, mail);
        }
        self.counts.settled_in_step += ended;
        self.after_core(index);
        self.go_on(index);
    }

    /// Runs the next step or sleeps, as the step loop does.
    fn go_on(&mut self, index: usize) {
        loop {
            if self.violation.is_some() || !self.is_up(Node::Engine(index)) {
                return;
            }
            let engine = self.engine(index);
            let before = engine.core.as_ref().map_or(0, |core| core.usage_and_load().1.preemptions);
            let core = engine.core.as_mut().expect("checked above");
            let (plan, acted) = core.schedule();
            let after = core.usage_and_load().1.preemptions;
            let over = core.is_finished();
            let wake_at = core.wake_at();
            self.counts.preempted += after - before;
            self.after_core(index);
            if !plan.is_empty() {
                let engine = &mut self.engines[index];
                let (low, high) = engine.setup.step;
                let takes = engine.dice.between(low, high);
                engine.step = Some(plan);
                return self.later(Node::Engine(index), takes, Event::StepEnds(index));
            }
            if over {
                return self.shut_down(index);
            }
            if !acted {
                if wake_at.is_some() {
                    // A draining engine checks its deadline now and then.
                    self.engines[index].awake = true;
                    self.later(Node::Engine(index), SECOND / 4, Event::Wake(index));
                }
                return;
            }
        }
    }

    /// Carries out the core's requests: to peers, to HTTP clients, and to the ledger's timer.
    pub fn after_core(&mut self, index: usize) {
        self.after_ledger(index);
        self.schedule_orders(index);
        let todo = std::mem::take(&mut self.engine(index).world().todo);
        for task in todo {
            self.narrate(|| format!("  engine {index}: {task:?}"));
            self.carry_out(index, task);
        }
        let news = std::mem::take(&mut *self.engine(index).world().incidents.borrow_mut());
        for item in news {
            match item {
                EngineIncident::FinishedTwice(id) => {
                    self.wrong(format!("I7: sequence {} finished twice", id.0))
                }
                EngineIncident::Recomputed => self.counts.recomputed += 1,
                EngineIncident::LoadFailed => self.counts.load_failed += 1,
                EngineIncident::DeviceFailed => {
                    // The engine's supervisor starts another process.
                    self.later(
                        Node::Engine(index),
                        SECOND,
                        Event::Fault(crate::faults::Fault::Supervise(index)),
                    );
                }
            }
        }
        self.pump_fronts(index);
        self.after_ledger(index);
    }

    /// Returns the blocks of ended leases by the mailbox, and sets the timer.
    pub fn after_ledger(&mut self, index: usize) {
        let calm = self.setup.calm;
        let engine = self.engine(index);
        let unfinished = engine.world().ledger.take_unfinished();
        if !unfinished.is_empty() {
            engine.mail.unfinished.extend(unfinished);
            self.poke(index);
        }
        let settled = self.engine(index).world().ledger.take_closed();
        if !settled.is_empty() {
            for lease in &settled {
                use baton_connector::lease::CloseCause;
                match lease.cause {
                    CloseCause::Fetched => self.counts.fetched += 1,
                    CloseCause::Released => self.counts.released += 1,
                    CloseCause::Expired => self.counts.expired += 1,
                }
                if calm && lease.cause == CloseCause::Expired {
                    self.wrong(format!("nothing went wrong, and the lease of {} expired", lease.request));
                }
                self.narrate(|| {
                    format!("  engine {index}: lease of {} ended, {:?}", lease.request, lease.cause)
                });
            }
            self.settled(index, settled);
            self.poke(index);
        }
        let now = self.now;
        let engine = self.engine(index);
        let Some(due) = engine.world().ledger.next_deadline() else { return };
        let at = engine.global(due.0).max(now + 1);
        if engine.lease_timer.is_none_or(|set| set > at || set <= now) {
            engine.lease_timer = Some(at);
            self.later(Node::Engine(index), at - now, Event::LeaseTimer(index));
        }
    }

    pub fn lease_timer(&mut self, index: usize) {
        let now = self.now;
        let engine = self.engine(index);
        // An earlier timer was set since.
        if engine.lease_timer.is_none_or(|set| set > now) {
            return;
        }
        engine.lease_timer = None;
        let world = engine.world();
        let now = world.time();
        world.ledger.tick(now);
        self.after_ledger(index);
    }
}
