//! The I/O layer of a simulated engine: its core behind a lock, the clock, and reads between engines.
//!
//! No thread holds the locks of two cores. An [`Action`] on another engine runs after the lock is released.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use baton_connector::Epoch;
use baton_connector_leases::event_log::EventLog;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::core::{Action, Core, Source, Ticket};
use super::faults::READS_LATER;
use super::leases::ReadEnd;
use super::plan::{Dialect, EnginePlan};
use super::pool::Contents;
use super::role::Role;

/// Engines by id, for consumers to find producers.
#[derive(Default)]
pub(super) struct EngineDirectory(RwLock<HashMap<String, Arc<Engine>>>);

impl EngineDirectory {
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

/// A simulated engine. See the module documentation.
pub(super) struct Engine {
    pub plan: EnginePlan,
    pub role: Role,
    /// Unique id of the engine, new after each start.
    pub id: String,
    pub epoch: Epoch,
    pub address: SocketAddr,
    pub log: Arc<EventLog>,
    pub stop: CancellationToken,
    contents: Contents,
    peers: Arc<EngineDirectory>,
    core: Mutex<Core>,
    wake: Notify,
    runtime: tokio::runtime::Handle,
    reads: Mutex<HashMap<Ticket, CancellationToken>>,
}

impl Engine {
    pub(super) fn new(
        plan: EnginePlan,
        role: Role,
        number: usize,
        address: SocketAddr,
        peers: &Arc<EngineDirectory>,
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

    /// Reads the core.
    pub(super) fn inspect<T>(&self, at: impl FnOnce(&Core) -> T) -> T {
        at(&self.core())
    }

    /// Changes the core and runs the resulting actions.
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

    /// Drives the engine until it is stopped.
    pub(super) async fn run(self: Arc<Self>) {
        let mut heartbeats = tokio::time::interval(self.plan.lease / 6);
        heartbeats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
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
                _ = heartbeats.tick(), if self.plan.heartbeats => self.send_heartbeats(),
            }
        }
    }

    /// Renews the leases of waiting requests.
    fn send_heartbeats(&self) {
        for source in self.inspect(Core::pending_sources) {
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
            Action::Register(ticket, source, mut registration) => {
                registration.engine.clone_from(&self.id);
                match self.peers.find(&source.engine) {
                    Some(producer) => producer.drive(|core, now_us| core.register(registration, now_us)),
                    // The handshake fails: another process has the producer's address, or none.
                    None => self.fetched(ticket, Err("failed")),
                }
            }
            Action::Written(registration, contents) => {
                // A write to an engine that has ended lands nowhere.
                if let Some(consumer) = self.peers.find(&registration.engine) {
                    consumer.drive(|core, _| core.land(&registration, contents));
                }
            }
        }
    }

    /// Releases a producer's lease.
    pub(super) fn release_at(&self, source: &Source, reason: &str) {
        if let Some(producer) = self.peers.find(&source.engine) {
            producer.drive(|core, now_us| core.release(&source.lease, reason, now_us));
        }
    }

    fn fetch(self: &Arc<Self>, ticket: Ticket, source: Source) {
        let Some(producer) = self.peers.find(&source.engine) else {
            return self.fetched(ticket, Err("failed"));
        };
        // vLLM's reads need no permission.
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
                // The fault: the read ends before it reads.
                producer.drive(|core, now_us| core.end_read(&source.lease, ReadEnd::Complete, now_us));
                tokio::time::sleep(takes + READS_LATER).await;
                let contents = engine.contents_of(&producer, &source);
                return engine.fetched(ticket, Ok(contents));
            }
            tokio::select! {
                () = engine.stop.cancelled() => drop(producer.drive(|core, now_us| core.end_read(&source.lease, ReadEnd::Stopped, now_us))),
                () = stopped.cancelled() => {
                    producer.drive(|core, now_us| {
                        core.end_read(&source.lease, ReadEnd::Stopped, now_us);
                        core.release(&source.lease, "consumer_aborted", now_us);
                    });
                    engine.fetched(ticket, Err("stopped"));
                }
                () = tokio::time::sleep(takes) => engine.read(ticket, &producer, &source),
            }
        });
    }

    /// Ends a read. Its result is the current contents of the blocks, and whether they were leased all the time.
    fn read(self: &Arc<Self>, ticket: Ticket, producer: &Arc<Self>, source: &Source) {
        if producer.stop.is_cancelled() {
            return self.fetched(ticket, Err("failed"));
        }
        let contents = self.contents_of(producer, source);
        let valid = producer.drive(|core, now_us| core.end_read(&source.lease, ReadEnd::Complete, now_us));
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
