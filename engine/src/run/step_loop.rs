//! The step loop: the thread that owns an engine's state. It drives the [`EngineCore`], sleeps while it can only wait
//! for mail, and publishes the status before and after each step.
//!
//! An engine with leases but no work sleeps.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::ledger::{LeaseOpenError, LeaseSpec};
use baton_connector::offload::TransferId;
use baton_connector::{BlockId, Epoch, Handle, RequestId};
use baton_connector_leases::event_log::{RankLog, RequestEvent};
use baton_connector_leases::service::LeaseService;

use crate::compute::Executor;
use crate::engine_core::fetch_target::FetchTarget;
use crate::engine_core::mailbox::Mailbox;
use crate::engine_core::status::SharedStatus;
use crate::engine_core::{CoreEvent, EngineCore, EngineEnv, ProducerAddress};
use crate::handoff::consumer::HandoffConsumer;
use crate::kv_events::EventSender;
use crate::metrics::{DraftMetrics, EngineMetrics, TierMetrics};
use crate::offload::OffloadOrder;
use crate::offload::workers::OffloadWorkers;
use crate::run::random::random_bytes;
use crate::scheduler::Scheduler;
use crate::scheduler::sequence::SeqId;

/// How long an idle engine waits before it shows subscribers of KV events a gap again. The publisher has then encoded
/// some messages of a full queue.
const GAP_PERIOD: Duration = Duration::from_millis(100);

/// See the module's documentation.
pub struct StepLoop {
    core: EngineCore<LiveEnv>,
    mailbox: Arc<Mailbox>,
    metrics: Arc<EngineMetrics>,
    tier_metrics: Option<TierMetrics>,
    status: Arc<SharedStatus>,
    /// Receives the changes of the caches, if they are published.
    events: Option<EventSender>,
}

impl StepLoop {
    /// A loop that has not started, over the device's blocks.
    #[must_use]
    pub fn new(
        executor: Box<dyn Executor>,
        scheduler: Scheduler,
        mailbox: Arc<Mailbox>,
        env: LiveEnv,
        events: Option<EventSender>,
    ) -> Self {
        let (metrics, status) = (Arc::clone(&env.metrics), Arc::clone(&env.status));
        let tier_metrics = env.offload.is_some().then(|| metrics.tiers(executor.layout().block_bytes()));
        Self {
            core: EngineCore::new(executor, scheduler, env),
            mailbox,
            metrics,
            tier_metrics,
            status,
            events,
        }
    }

    /// Runs until the mailbox is closed and no work is left, or the drain deadline has passed.
    pub fn run(mut self) {
        let mut blocked = true;
        // Publishes the block counts before the first request.
        self.publish();
        loop {
            let mail = if blocked { self.mailbox.wait(self.wake_at()) } else { self.mailbox.collect() };
            if let Some(events) = &self.events {
                self.core.set_event_audience(events.audience());
            }
            self.core.take_in(mail);
            let (plan, acted) = self.core.schedule();
            // Without a plan only mail can change the state, unless an effect has just freed blocks.
            blocked = plan.is_empty() && !acted;
            if !plan.is_empty() {
                // A forward pass takes long: the status must show its requests meanwhile.
                self.publish();
                if self.core.execute(&plan, &mut || self.mailbox.take_settled()) {
                    self.core.finish_step(&plan, self.mailbox.collect());
                }
                self.status.stepped();
            }
            self.publish();
            if self.core.is_finished() {
                return;
            }
        }
    }

    /// When an idle loop continues without mail.
    fn wake_at(&self) -> Option<Instant> {
        let hides_gap = self.events.as_ref().is_some_and(EventSender::hides_gap);
        let gap = hides_gap.then(|| Instant::now() + GAP_PERIOD);
        self.core.wake_at().into_iter().chain(gap).min()
    }

    fn publish(&mut self) {
        let (usage, load) = self.core.usage_and_load();
        self.metrics.publish(usage, load, self.core.env().live_leases());
        self.status.publish(usage, load);
        if let (Some(metrics), Some(counts)) = (&self.tier_metrics, &load.tiers) {
            metrics.publish(counts);
        }
        if let Some(events) = &mut self.events {
            events.send(self.core.take_cache_events());
        }
    }
}

/// The environment of a running engine.
pub struct LiveEnv {
    /// This engine's leases.
    pub leases: Arc<LeaseService>,
    /// The consumer of other engines' handoffs.
    pub consumer: Arc<HandoffConsumer>,
    /// Counters.
    pub metrics: Arc<EngineMetrics>,
    /// Counters of drafts, if the engine drafts.
    pub drafts: Option<DraftMetrics>,
    /// The status that `/debug/kv` returns.
    pub status: Arc<SharedStatus>,
    /// How peers reach the leases.
    pub address: ProducerAddress,
    /// The workers that move blocks between the tiers, if there are any.
    pub offload: Option<Arc<OffloadWorkers>>,
    /// The event log of this rank.
    pub log: RankLog,
}

impl EngineEnv for LiveEnv {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn fresh_handle(&mut self) -> Option<Handle> {
        random_bytes().ok().map(|bytes| Handle(u128::from_ne_bytes(bytes)))
    }

    fn open_lease(&mut self, grant: LeaseSpec) -> Result<Duration, LeaseOpenError> {
        self.leases.open(grant)
    }

    fn open_growing_lease(&mut self, grant: LeaseSpec, ready: usize) -> Result<Duration, LeaseOpenError> {
        self.leases.open_growing(grant, ready)
    }

    fn grow(&mut self, handle: Handle, ready: usize) {
        self.leases.grow(handle, ready);
    }

    fn seal(&mut self, handle: Handle) -> bool {
        self.leases.seal(handle)
    }

    fn release(&mut self, handle: Handle, reason: &'static str) {
        self.leases.release(handle, reason);
    }

    fn release_all(&mut self, reason: &'static str) {
        self.leases.release_all(reason);
    }

    fn was_released_early(&self, request: &RequestId) -> bool {
        self.leases.was_released_early(request)
    }

    fn live_leases(&self) -> usize {
        self.leases.live()
    }

    fn address(&self) -> &ProducerAddress {
        &self.address
    }

    fn epoch(&self) -> Epoch {
        self.leases.epoch()
    }

    fn fingerprint(&self) -> u64 {
        self.leases.fingerprint()
    }

    fn keep_alive(&mut self, id: SeqId, target: &FetchTarget) {
        self.consumer.keep_alive(id, target);
    }

    fn stop_renewing(&mut self, id: SeqId) {
        self.consumer.stop_renewing(id);
    }

    fn read(&mut self, id: SeqId, target: &FetchTarget, first: usize, into: Vec<BlockId>) {
        self.consumer.read(id, target, first, into);
    }

    fn stop_read(&mut self, id: SeqId) {
        self.consumer.stop_read(id);
    }

    fn release_at_producer(&mut self, target: &FetchTarget, reason: &'static str) {
        self.consumer.release(target, reason);
    }

    fn offload(&mut self, order: OffloadOrder) -> bool {
        self.offload.as_ref().is_some_and(|workers| workers.submit(order))
    }

    fn revoke(&mut self, id: TransferId) -> bool {
        self.offload.as_ref().is_some_and(|workers| workers.revoke(id))
    }

    fn emit(&self, request: &RequestId, index: u32, event: RequestEvent) {
        self.log.emit(request, index, event);
    }

    fn record(&self, event: CoreEvent<'_>) {
        match event {
            CoreEvent::FirstToken { after, prompt, cached, fetched } => {
                self.metrics.first_token(after, prompt, cached, fetched);
            }
            CoreEvent::NextToken(after) => self.metrics.next_token(after),
            CoreEvent::DraftVerified { drafted, accepted } => {
                if let Some(drafts) = &self.drafts {
                    drafts.verified(drafted, accepted);
                }
            }
            CoreEvent::HandoffQueued(tokens) => self.metrics.handed_off(tokens),
            CoreEvent::EarlyRejection(reason) => self.metrics.early_rejection(reason),
            CoreEvent::LoadFailed(policy) => self.metrics.load_failed(policy),
            CoreEvent::Finished { reason, after, .. } => self.metrics.finished(reason, after),
            CoreEvent::Step(timing) => self.metrics.step(timing),
            CoreEvent::TimedOut(phase) => self.metrics.timed_out(phase),
            CoreEvent::DeviceFailed(why) => self.status.set_failed(why.to_owned()),
        }
    }
}
