//! One engine process: the real engine core and the real ledger, with the simulator's device, clock and network
//! around them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use baton_connector::fetch::LoadFailurePolicy;
use baton_connector::lease::LeaseTerms;
use baton_connector::ledger::{Grant, Ledger, OpenRefused};
use baton_connector::offload::TransferId;
use baton_connector::{BlockId, EngineId, Epoch, Handle, RequestId, Time};
use baton_engine::engine_core::fetch_target::FetchTarget;
use baton_engine::engine_core::mailbox::Mail;
use baton_engine::engine_core::{EngineCore, Fact, ProducerAddress, Surroundings};
use baton_engine::offload::Order;
use baton_engine::offload::tier_index::TierConfig;
use baton_engine::scheduler::sequence::{FinishReason, SeqId};
use baton_engine::scheduler::{Planned, Scheduler, SchedulerConfig};

use crate::consumer::Peers;
use crate::device::{self, Device};
use crate::dice::Dice;
use crate::front::Front;
use crate::net::ConnId;
use crate::setup::{EngineSetup, SECOND, Setup};
use crate::sim::{Event, Micros, Sim};
use crate::tiers::{self, Disk, Workers};
use crate::words::Node;

/// The longest sequence of any client.
pub const TOKENS_MAX: usize = 56;

/// All engines' layout and model are one.
pub const FINGERPRINT: u64 = 0x51;

/// Where every clock of every run starts.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// What the core wants done in the world.
#[derive(Debug)]
pub enum Todo {
    KeepAlive(SeqId, FetchTarget),
    LetGo(SeqId),
    Read(SeqId, FetchTarget, usize, Vec<BlockId>),
    StopRead(SeqId),
    Release(FetchTarget, &'static str),
}

/// The world around one engine core.
pub struct World {
    /// Microseconds on this engine's clock.
    local: Micros,
    /// How long a lease should live.
    lease: Micros,
    pub ledger: Ledger,
    pub todo: Vec<Todo>,
    pub workers: Workers,
    /// When each live lease runs out, by this engine's clock.
    pub expiries: BTreeMap<Handle, Micros>,
    address: ProducerAddress,
    epoch: Epoch,
    dice: Dice,
    finished: RefCell<BTreeMap<SeqId, FinishReason>>,
    /// Sequences whose end was told twice, and other news for the checks.
    pub news: RefCell<Vec<News>>,
}

#[derive(Clone, Copy, Debug)]
pub enum News {
    FinishedTwice(SeqId),
    Recomputed,
    LoadFailed,
    DeviceFailed,
}

impl World {
    pub fn time(&self) -> Time {
        Time(self.local)
    }

    /// A heartbeat counted.
    pub fn renewed(&mut self, handle: Handle) {
        let expiry = self.local + self.lease * 2 / 3;
        self.expiries.entry(handle).and_modify(|old| *old = expiry.max(*old));
    }

    /// How the books say that a sequence ended.
    pub fn ended(&self, id: SeqId) -> Option<FinishReason> {
        self.finished.borrow().get(&id).copied()
    }
}

impl Surroundings for World {
    fn now(&self) -> Instant {
        *START + Duration::from_micros(self.local)
    }

    fn fresh_handle(&mut self) -> Option<Handle> {
        Some(Handle(u128::from(self.dice.roll()) << 64 | u128::from(self.dice.roll())))
    }

    fn lend(&mut self, grant: Grant) -> Result<Duration, OpenRefused> {
        let handle = grant.handle;
        let opened = self.ledger.open(grant, Time(self.local));
        if opened.is_ok() {
            self.expiries.insert(handle, self.local + self.lease);
        }
        opened
    }

    fn lend_growing(&mut self, grant: Grant, ready: usize) -> Result<Duration, OpenRefused> {
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
        self.todo.push(Todo::KeepAlive(id, target.clone()));
    }

    fn let_go(&mut self, id: SeqId) {
        self.todo.push(Todo::LetGo(id));
    }

    fn read(&mut self, id: SeqId, target: &FetchTarget, first: usize, into: Vec<BlockId>) {
        self.todo.push(Todo::Read(id, target.clone(), first, into));
    }

    fn stop_read(&mut self, id: SeqId) {
        self.todo.push(Todo::StopRead(id));
    }

    fn release_at_producer(&mut self, target: &FetchTarget, reason: &'static str) {
        self.todo.push(Todo::Release(target.clone(), reason));
    }

    fn offload(&mut self, order: Order) -> bool {
        self.workers.take(order)
    }

    fn revoke(&mut self, id: TransferId) -> bool {
        self.workers.revoke(id)
    }

    fn note(&self, fact: Fact<'_>) {
        let news = match fact {
            Fact::Finished { id, reason, .. } => match self.finished.borrow_mut().insert(id, reason) {
                Some(_) => News::FinishedTwice(id),
                None => return,
            },
            Fact::LoadFailed("recompute") => News::Recomputed,
            Fact::LoadFailed(_) => News::LoadFailed,
            Fact::DeviceFailed(_) => News::DeviceFailed,
            _ => return,
        };
        self.news.borrow_mut().push(news);
    }
}

pub struct Engine {
    pub index: usize,
    pub life: u32,
    pub setup: EngineSetup,
    pub paused_until: Micros,
    /// In this life.
    pub was_paused: bool,
    /// `None` while the process is down.
    pub core: Option<EngineCore<World>>,
    pub memory: device::Shared,
    /// What it finds when it starts.
    disk: Disk,
    pub mail: Mail,
    awake: bool,
    step: Option<Vec<Planned>>,
    lease_timer: Option<Micros>,
    pub fronts: BTreeMap<ConnId, Front>,
    pub peers: Peers,
    /// Reads that this engine serves, by connection.
    pub serving: BTreeMap<ConnId, crate::producer::Serving>,
    pub next_sequence: u64,
    pub closing: bool,
    pub stale: Arc<Mutex<Option<String>>>,
    pub breaks: Arc<AtomicBool>,
    pub dice: Dice,
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
            mail: Mail::default(),
            awake: false,
            step: None,
            lease_timer: None,
            fronts: BTreeMap::new(),
            peers: Peers::default(),
            serving: BTreeMap::new(),
            next_sequence: 1,
            closing: false,
            stale: Arc::default(),
            breaks: Arc::default(),
            dice: Dice::new(setup.seed, 100 + index as u64),
        };
        engine.start(setup, 0);
        engine
    }

    /// A new process on the same address.
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
        };
        let duration = match setup.mutation {
            crate::setup::Mutation::NoExpiry => Duration::from_secs(1 << 40),
            crate::setup::Mutation::LateExpiry => Duration::from_micros(setup.lease + 60 * SECOND),
            _ => Duration::from_micros(setup.lease),
        };
        let terms = LeaseTerms { duration, ..LeaseTerms::default() };
        let epoch = Epoch(self.dice.roll());
        let device =
            Device::new(Arc::clone(&self.memory), blocks, Arc::clone(&self.stale), Arc::clone(&self.breaks));
        let world = World {
            local: 0,
            lease: setup.lease,
            ledger: Ledger::new(terms),
            todo: Vec::new(),
            expiries: BTreeMap::new(),
            workers: Workers::new(Arc::clone(&self.disk), setup.mutation),
            address: ProducerAddress {
                engine_id: EngineId(format!("e{}", self.index).into()),
                host: format!("10.0.0.{}", self.index),
                ports: vec![5600 + self.index as u16],
                block_tokens,
            },
            epoch,
            dice: Dice::new(self.dice.roll(), 7),
            finished: RefCell::default(),
            news: RefCell::default(),
        };
        let tiers = TierConfig { host_blocks: self.setup.host_blocks, disk_blocks: self.setup.disk_blocks };
        let scheduler = Scheduler::new(config, blocks).with_tiers(tiers, tiers::found(&self.disk));
        self.core = Some(EngineCore::new(Box::new(device), scheduler, world));
        self.mail = Mail::default();
        self.step = None;
        self.awake = false;
        self.lease_timer = None;
        self.closing = false;
        self.was_paused = false;
        self.paused_until = 0;
        self.set_clock(now);
    }

    /// The process is gone, with all it knew.
    pub fn die(&mut self) {
        self.life += 1;
        self.core = None;
        self.fronts.clear();
        self.serving.clear();
        self.peers = Peers::default();
        self.mail = Mail::default();
        self.step = None;
        self.paused_until = 0;
    }

    pub fn local(&self, now: Micros) -> Micros {
        // Every engine's clock started at another time.
        1_000 * SECOND * (self.index as u64 + 1) + now * self.setup.clock_rate / 1_000
    }

    /// The world's time at which this engine's clock shows `local`, or a little later.
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
            core.surroundings().local = local;
        }
    }

    pub fn world(&mut self) -> &mut World {
        self.core.as_mut().expect("only a process that is up is asked").surroundings()
    }
}

impl Sim {
    /// The engine, its clock set.
    pub fn engine(&mut self, index: usize) -> &mut Engine {
        let now = self.now;
        let engine = &mut self.engines[index];
        engine.set_clock(now);
        engine
    }

    /// There is mail: the core looks at it when it can.
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
        // What ended while the step was computed comes back before its results are booked.
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

    /// As the step loop: the next step, or sleep.
    fn go_on(&mut self, index: usize) {
        loop {
            if self.violation.is_some() || !self.is_up(Node::Engine(index)) {
                return;
            }
            let engine = self.engine(index);
            let before = engine.core.as_ref().map_or(0, |core| core.books().1.preemptions);
            let core = engine.core.as_mut().expect("checked above");
            let (plan, acted) = core.schedule();
            let after = core.books().1.preemptions;
            let over = core.over();
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
                    // A draining engine looks up now and then until its deadline.
                    self.engines[index].awake = true;
                    self.later(Node::Engine(index), SECOND / 4, Event::Wake(index));
                }
                return;
            }
        }
    }

    /// What the core has left to be done: to peers, to front ends, to the ledger's timer.
    pub fn after_core(&mut self, index: usize) {
        self.after_ledger(index);
        self.schedule_orders(index);
        let todo = std::mem::take(&mut self.engine(index).world().todo);
        for task in todo {
            self.narrate(|| format!("  engine {index}: {task:?}"));
            self.carry_out(index, task);
        }
        let news = std::mem::take(&mut *self.engine(index).world().news.borrow_mut());
        for item in news {
            match item {
                News::FinishedTwice(id) => self.wrong(format!("I7: sequence {} finished twice", id.0)),
                News::Recomputed => self.counts.recomputed += 1,
                News::LoadFailed => self.counts.load_failed += 1,
                News::DeviceFailed => {
                    // Its supervisor starts another.
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

    /// Blocks of ended leases go back by mail, and the timer is set.
    pub fn after_ledger(&mut self, index: usize) {
        let calm = self.setup.calm;
        let engine = self.engine(index);
        let unfinished = engine.world().ledger.take_unfinished();
        if !unfinished.is_empty() {
            engine.mail.unfinished.extend(unfinished);
            self.poke(index);
        }
        let settled = self.engine(index).world().ledger.take_settled();
        if !settled.is_empty() {
            for lease in &settled {
                use baton_connector::lease::Cause;
                match lease.cause {
                    Cause::Fetched => self.counts.fetched += 1,
                    Cause::Released => self.counts.released += 1,
                    Cause::Expired => self.counts.expired += 1,
                }
                if calm && lease.cause == Cause::Expired {
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
        // An earlier one was set since.
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
