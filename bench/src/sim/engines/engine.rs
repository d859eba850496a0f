//! A simulated engine's shell: its core behind a lock, the clock that drives it, and reads between engines.
//!
//! Nobody holds two cores' locks: what one engine wants of another is an [`Action`], done after its own lock is free.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use baton_connector::Epoch;
use baton_engine::event_log::EventLog;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::core::{Action, Core, Source, Ticket};
use super::faults::READS_LATER;
use super::plan::{Dialect, EnginePlan, Role};
use super::pool::Contents;

/// Engines by their ids: how a consumer finds its producer.
#[derive(Default)]
pub(super) struct Peers(RwLock<HashMap<String, Arc<Engine>>>);

impl Peers {
    pub(super) fn add(&self, engine: &Arc<Engine>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(engine.id.clone(), Arc::clone(engine));
    }

    pub(super) fn remove(&self, id: &str) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    pub(super) fn find(&self, id: &str) -> Option<Arc<Engine>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }
}

/// See the module's documentation.
pub(super) struct Engine {
    pub plan: EnginePlan,
    pub role: Role,
    /// Its name among engines; another one after each start.
    pub id: String,
    pub epoch: Epoch,
    pub address: SocketAddr,
    pub log: Arc<EventLog>,
    pub stop: CancellationToken,
    contents: Contents,
    peers: Arc<Peers>,
    core: Mutex<Core>,
    wake: Notify,
    runtime: tokio::runtime::Handle,
    reads: Mutex<HashMap<Ticket, CancellationToken>>,
}

impl Engine {
    pub(super) fn new(
        plan: EnginePlan,
        (role, number): (Role, usize),
        address: SocketAddr,
        peers: &Arc<Peers>,
        runtime: tokio::runtime::Handle,
    ) -> Arc<Self> {
        let epoch = super::random();
        let log = Arc::new(EventLog::default());
        let core = Core::new(plan.clone(), Arc::clone(&log), super::random());
        let engine = Arc::new(Self {
            plan,
            role,
            id: format!("sim-{}-{number}-{epoch:016x}", role.label()),
            epoch: Epoch(epoch),
            address,
            log,
            stop: CancellationToken::new(),
            contents: core.contents().clone(),
            peers: Arc::clone(peers),
            core: Mutex::new(core),
            wake: Notify::new(),
            runtime,
            reads: Mutex::default(),
        });
        peers.add(&engine);
        engine
    }

    fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the books.
    pub(super) fn look<T>(&self, at: impl FnOnce(&Core) -> T) -> T {
        at(&self.core())
    }

    /// Does something to the core, and what follows from it now.
    pub(super) fn drive<T>(self: &Arc<Self>, what: impl FnOnce(&mut Core, u64) -> T) -> T {
        let (result, actions, earlier) = {
            let mut core = self.core();
            let now_us = self.log.now_us();
            let result = what(&mut core, now_us);
            core.advance(now_us);
            let next_us = core.next_us().unwrap_or(u64::MAX);
            let earlier = next_us < core.sleeps_until_us;
            core.sleeps_until_us = core.sleeps_until_us.min(next_us);
            (result, core.take_actions(), earlier)
        };
        if earlier {
            self.wake.notify_one();
        }
        for action in actions {
            self.act(action);
        }
        result
    }

    /// Keeps the engine going until it is stopped.
    pub(super) async fn run(self: Arc<Self>) {
        let mut beats = tokio::time::interval(self.plan.lease / 6);
        beats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let next_us = self.drive(|core, now_us| {
                core.advance(now_us);
                core.sleeps_until_us = core.next_us().unwrap_or(u64::MAX);
                core.sleeps_until_us
            });
            let left = Duration::from_micros(next_us.saturating_sub(self.log.now_us()));
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = self.wake.notified() => {}
                () = tokio::time::sleep(left), if next_us < u64::MAX => {}
                _ = beats.tick(), if self.plan.heartbeats => self.beat(),
            }
        }
    }

    /// Signs of life of the requests that wait.
    fn beat(&self) {
        for source in self.look(Core::awaited) {
            if let Some(producer) = self.peers.find(&source.engine) {
                producer.drive(|core, now_us| core.renew(&source.lease, now_us));
            }
        }
    }

    fn act(self: &Arc<Self>, action: Action) {
        match action {
            Action::Release(source, reason) => self.release_at(&source, reason),
            Action::StopFetch(ticket) => {
                let read = self.reads.lock().unwrap_or_else(PoisonError::into_inner).get(&ticket).cloned();
                if let Some(read) = read {
                    read.cancel();
                }
            }
            Action::Fetch(ticket, source) => self.fetch(ticket, source),
        }
    }

    /// Tells a producer that nobody will read.
    pub(super) fn release_at(&self, source: &Source, reason: &str) {
        if let Some(producer) = self.peers.find(&source.engine) {
            producer.drive(|core, now_us| core.release(&source.lease, reason, now_us));
        }
    }

    fn fetch(self: &Arc<Self>, ticket: Ticket, source: Source) {
        let Some(producer) = self.peers.find(&source.engine) else {
            return self.fetched(ticket, Err("failed"));
        };
        // vLLM's reads ask nobody.
        let granted = producer.drive(|core, _| core.begin_read(&source.lease));
        if !granted && self.plan.dialect == Dialect::Baton {
            return self.fetched(ticket, Err("gone"));
        }
        let micros = (source.blocks.len() as u64 * 1_000_000).checked_div(self.plan.fetch_rate).unwrap_or(0);
        let (takes, stale) = (Duration::from_micros(micros), self.plan.faults.stale_blocks);
        if takes.is_zero() && !stale {
            return self.read(ticket, &producer, &source);
        }
        let stopped = CancellationToken::new();
        self.reads.lock().unwrap_or_else(PoisonError::into_inner).insert(ticket, stopped.clone());
        let engine = Arc::clone(self);
        self.runtime.spawn(async move {
            if stale {
                // The planted fault: done is said before it is.
                producer.drive(|core, now_us| core.end_read(&source.lease, true, now_us));
                tokio::time::sleep(takes + READS_LATER).await;
                let contents = engine.contents_of(&producer, &source);
                return engine.fetched(ticket, Ok(contents));
            }
            tokio::select! {
                () = engine.stop.cancelled() => drop(producer.drive(|core, now_us| core.end_read(&source.lease, false, now_us))),
                () = stopped.cancelled() => {
                    producer.drive(|core, now_us| {
                        core.end_read(&source.lease, false, now_us);
                        core.release(&source.lease, "consumer_aborted", now_us);
                    });
                    engine.fetched(ticket, Err("stopped"));
                }
                () = tokio::time::sleep(takes) => engine.read(ticket, &producer, &source),
            }
        });
    }

    /// The end of a read: what is in the blocks now, and whether it was lent all the while.
    fn read(self: &Arc<Self>, ticket: Ticket, producer: &Arc<Self>, source: &Source) {
        if producer.stop.is_cancelled() {
            return self.fetched(ticket, Err("failed"));
        }
        let contents = self.contents_of(producer, source);
        let valid = producer.drive(|core, now_us| core.end_read(&source.lease, true, now_us));
        let unverified = !valid && self.plan.dialect == Dialect::Baton;
        self.fetched(ticket, if unverified { Err("gone") } else { Ok(contents) });
    }

    fn contents_of(&self, producer: &Self, source: &Source) -> Vec<u64> {
        source.blocks.iter().map(|&block| producer.contents.read(block)).collect()
    }

    fn fetched(self: &Arc<Self>, ticket: Ticket, result: Result<Vec<u64>, &'static str>) {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner).remove(&ticket);
        self.drive(|core, _| core.fetched(ticket, result));
    }
}
