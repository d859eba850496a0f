//! The step loop: the one thread that owns an engine's state. It drives the [`EngineCore`], sleeps while there is
//! only to wait for mail, and hangs out the books before and after each step.
//!
//! An engine with leases but no work sleeps.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::ledger::{Grant, OpenRefused};
use baton_connector::offload::TransferId;
use baton_connector::{BlockId, Epoch, Handle, RequestId};

use crate::compute::Executor;
use crate::engine_core::fetch_target::FetchTarget;
use crate::engine_core::mailbox::Mailbox;
use crate::engine_core::status::StatusBoard;
use crate::engine_core::{EngineCore, Fact, ProducerAddress, Surroundings};
use crate::event_log::{RankLog, What};
use crate::handoff::consumer::Peers;
use crate::handoff::producer::LeaseDesk;
use crate::metrics::{EngineMetrics, TierMetrics};
use crate::offload::Order;
use crate::offload::workers::Workers;
use crate::scheduler::Scheduler;
use crate::scheduler::sequence::SeqId;

/// The parts a step loop is made of.
pub struct Parts {
    /// The device.
    pub executor: Box<dyn Executor>,
    /// The scheduler over the device's blocks.
    pub scheduler: Scheduler,
    /// Where messages arrive.
    pub mailbox: Arc<Mailbox>,
    /// This engine's leases.
    pub desk: Arc<LeaseDesk>,
    /// Dealings with other engines.
    pub peers: Arc<Peers>,
    /// Counters.
    pub metrics: Arc<EngineMetrics>,
    /// What is shown at `/debug/kv`.
    pub status: Arc<StatusBoard>,
    /// How peers reach the leases.
    pub address: ProducerAddress,
    /// What moves blocks between the tiers, if there are any.
    pub offload: Option<Arc<Workers>>,
    /// Where it is written down what happens to requests.
    pub log: RankLog,
}

/// See the module's documentation.
pub struct StepLoop {
    core: EngineCore<World>,
    mailbox: Arc<Mailbox>,
    metrics: Arc<EngineMetrics>,
    tier_metrics: Option<TierMetrics>,
    status: Arc<StatusBoard>,
}

impl StepLoop {
    /// A loop that has not started.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let Parts { executor, scheduler, mailbox, desk, peers, metrics, status, address, offload, log } =
            parts;
        let tier_metrics = offload.is_some().then(|| metrics.tiers(executor.layout().block_bytes()));
        let world = World {
            desk,
            peers,
            metrics: Arc::clone(&metrics),
            status: Arc::clone(&status),
            address,
            offload,
            log,
        };
        Self { core: EngineCore::new(executor, scheduler, world), mailbox, metrics, tier_metrics, status }
    }

    /// Runs until the mailbox is closed and the books are empty, or the drain deadline has passed.
    pub fn run(mut self) {
        let mut blocked = true;
        // An engine that nobody has asked yet has blocks too.
        self.publish();
        loop {
            let mail = if blocked { self.mailbox.wait(self.core.wake_at()) } else { self.mailbox.collect() };
            self.core.take_in(mail);
            let (plan, acted) = self.core.schedule();
            // Without a plan only mail can change anything, unless an effect has freed blocks just now.
            blocked = plan.is_empty() && !acted;
            if !plan.is_empty() {
                // A forward pass takes its time: who looks meanwhile must see who is in it.
                self.publish();
                if self.core.execute(&plan, &mut || self.mailbox.take_settled()) {
                    self.core.finish_step(&plan, self.mailbox.collect());
                }
                self.status.stepped();
            }
            self.publish();
            if self.core.over() {
                return;
            }
        }
    }

    fn publish(&mut self) {
        let (usage, load) = self.core.books();
        self.metrics.publish(usage, load, self.core.surroundings().live_leases());
        self.status.publish(usage, load);
        if let (Some(metrics), Some(counts)) = (&self.tier_metrics, &load.tiers) {
            metrics.publish(counts);
        }
    }
}

/// The world as it is.
struct World {
    desk: Arc<LeaseDesk>,
    peers: Arc<Peers>,
    metrics: Arc<EngineMetrics>,
    status: Arc<StatusBoard>,
    address: ProducerAddress,
    offload: Option<Arc<Workers>>,
    log: RankLog,
}

impl Surroundings for World {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn fresh_handle(&mut self) -> Option<Handle> {
        let mut random = [0; 16];
        getrandom::fill(&mut random).ok()?;
        Some(Handle(u128::from_ne_bytes(random)))
    }

    fn lend(&mut self, grant: Grant) -> Result<Duration, OpenRefused> {
        self.desk.open(grant)
    }

    fn lend_growing(&mut self, grant: Grant, ready: usize) -> Result<Duration, OpenRefused> {
        self.desk.open_growing(grant, ready)
    }

    fn grow(&mut self, handle: Handle, ready: usize) {
        self.desk.grow(handle, ready);
    }

    fn seal(&mut self, handle: Handle) -> bool {
        self.desk.seal(handle)
    }

    fn release(&mut self, handle: Handle, reason: &'static str) {
        self.desk.release(handle, reason);
    }

    fn release_all(&mut self, reason: &'static str) {
        self.desk.release_all(reason);
    }

    fn was_released_early(&self, request: &RequestId) -> bool {
        self.desk.was_released_early(request)
    }

    fn live_leases(&self) -> usize {
        self.desk.live()
    }

    fn address(&self) -> &ProducerAddress {
        &self.address
    }

    fn epoch(&self) -> Epoch {
        self.desk.epoch()
    }

    fn fingerprint(&self) -> u64 {
        self.desk.fingerprint()
    }

    fn keep_alive(&mut self, id: SeqId, target: &FetchTarget) {
        self.peers.keep_alive(id, target);
    }

    fn let_go(&mut self, id: SeqId) {
        self.peers.let_go(id);
    }

    fn read(&mut self, id: SeqId, target: &FetchTarget, first: usize, into: Vec<BlockId>) {
        self.peers.read(id, target, first, into);
    }

    fn stop_read(&mut self, id: SeqId) {
        self.peers.stop_read(id);
    }

    fn release_at_producer(&mut self, target: &FetchTarget, reason: &'static str) {
        self.peers.release(target, reason);
    }

    fn offload(&mut self, order: Order) -> bool {
        self.offload.as_ref().is_some_and(|workers| workers.order(order))
    }

    fn revoke(&mut self, id: TransferId) -> bool {
        self.offload.as_ref().is_some_and(|workers| workers.revoke(id))
    }

    fn tell(&self, request: &RequestId, index: u32, what: What) {
        self.log.tell(request, index, what);
    }

    fn note(&self, fact: Fact<'_>) {
        match fact {
            Fact::FirstToken { after, prompt, cached, fetched } => {
                self.metrics.first_token(after, prompt, cached, fetched);
            }
            Fact::NextToken(after) => self.metrics.next_token(after),
            Fact::HandedOff(tokens) => self.metrics.handed_off(tokens),
            Fact::EarlyRejection(reason) => self.metrics.early_rejection(reason),
            Fact::LoadFailed(policy) => self.metrics.load_failed(policy),
            Fact::Finished { reason, after, .. } => self.metrics.finished(reason, after),
            Fact::DeviceFailed(why) => self.status.set_failed(why.to_owned()),
        }
    }
}
