//! The I/O layer of a simulated SGLang engine: its ranks behind locks, the clock, messages and the requests in flight.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_connector::Epoch;
use baton_connector_leases::event_log::EventLog;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use super::super::plan::EnginePlan;
use super::super::role::Role;
use super::links::PeerLinks;
use super::message::{Envelope, PeerMessage};
use super::plan::{SglangPlan, Waits};
use super::prefills::KnownPrefills;
use super::rank::{EndCause, RankAction, RankTraits, SglangRank};

/// Least timeout of a heartbeat, for small time scales on a busy machine.
const HEARTBEAT_WITHIN_MIN: Duration = Duration::from_millis(250);

/// Names and addresses of an engine.
pub(super) struct SglangIdentity {
    pub role: Role,
    /// Unique id of the engine, new after each start.
    pub id: String,
    pub epoch: Epoch,
    pub address: SocketAddr,
    /// For messages of other engines.
    pub peer_address: SocketAddr,
    /// P's bootstrap server.
    pub bootstrap: Option<SocketAddr>,
}

/// A simulated engine. See the module documentation.
pub(super) struct SglangEngine {
    pub plan: EnginePlan,
    pub waits: Waits,
    pub identity: SglangIdentity,
    pub log: Arc<EventLog>,
    pub stop: CancellationToken,
    /// Requests that were given a rank in turn, and requests that were or were not refused.
    counted: [AtomicU64; 2],
    ranks: Vec<Mutex<SglangRank>>,
    /// Requests in flight at the HTTP server, by `rid`.
    rids: Mutex<HashSet<String>>,
    links: PeerLinks,
    undelivered: Mutex<Option<mpsc::Receiver<(SocketAddr, Envelope)>>>,
    prefills: KnownPrefills,
    wake: Notify,
    runtime: tokio::runtime::Handle,
}

/// A `rid` in flight. Dropping removes it.
pub(super) struct RidGuard<'a> {
    engine: &'a SglangEngine,
    pub rid: String,
}

impl Drop for RidGuard<'_> {
    fn drop(&mut self) {
        self.engine.rids().remove(&self.rid);
    }
}

impl SglangEngine {
    pub(super) fn new(
        fleet: &SglangPlan,
        plan: EnginePlan,
        identity: SglangIdentity,
        runtime: tokio::runtime::Handle,
    ) -> Arc<Self> {
        let (waits, log, stop) = (fleet.waits(), Arc::new(EventLog::default()), CancellationToken::new());
        let rank = |number| {
            let traits = RankTraits {
                plan: plan.clone(),
                waits,
                aborts: fleet.aborts,
                role: identity.role,
                number,
                ranks: fleet.ranks,
                at: identity.peer_address,
            };
            // Half of the range, so that numbers do not wrap.
            Mutex::new(SglangRank::new(traits, Arc::clone(&log), super::super::random() >> 1))
        };
        let (links, undelivered) = PeerLinks::new(runtime.clone(), stop.clone());
        Arc::new(Self {
            waits,
            ranks: (0..fleet.ranks).map(rank).collect(),
            plan,
            identity,
            log,
            links,
            undelivered: Mutex::new(Some(undelivered)),
            stop,
            counted: Default::default(),
            rids: Mutex::default(),
            prefills: KnownPrefills::default(),
            wake: Notify::new(),
            runtime,
        })
    }

    /// Number of data-parallel ranks.
    pub(super) fn ranks(&self) -> usize {
        self.ranks.len()
    }

    fn rank(&self, rank: usize) -> MutexGuard<'_, SglangRank> {
        self.ranks[rank].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rids(&self) -> MutexGuard<'_, HashSet<String>> {
        self.rids.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads each rank.
    pub(super) fn inspect<T>(&self, at: impl Fn(&SglangRank) -> T) -> Vec<T> {
        (0..self.ranks()).map(|rank| at(&self.rank(rank))).collect()
    }

    /// Changes a rank and runs the resulting actions.
    pub(super) fn drive<T>(
        self: &Arc<Self>,
        number: usize,
        what: impl FnOnce(&mut SglangRank, u64) -> T,
    ) -> T {
        let (result, actions, earlier) = {
            let mut rank = self.rank(number);
            let now_us = self.log.now_us();
            let result = what(&mut rank, now_us);
            rank.advance(now_us);
            let next_us = rank.next_us().unwrap_or(u64::MAX);
            let earlier = next_us < rank.sleeps_until_us;
            rank.sleeps_until_us = rank.sleeps_until_us.min(next_us);
            (result, rank.take_actions(), earlier)
        };
        if earlier {
            self.wake.notify_one();
        }
        for action in actions {
            self.act(number, action);
        }
        result
    }

    fn act(self: &Arc<Self>, number: usize, action: RankAction) {
        match action {
            RankAction::Send(to, envelope) => self.links.send(to, envelope),
            RankAction::Resolve { ticket, bootstrap, room, prefill_rank } => {
                let engine = Arc::clone(self);
                self.runtime.spawn(async move {
                    let size = engine.plan.block_tokens;
                    let found = engine.prefills.resolve(&bootstrap, room, prefill_rank, size).await;
                    engine.drive(number, |rank, now_us| rank.resolved(ticket, found, now_us));
                });
            }
        }
    }

    /// A message of another engine. One for a rank that does not exist is dropped.
    pub(super) fn deliver(self: &Arc<Self>, envelope: Envelope) {
        if envelope.rank < self.ranks() {
            self.drive(envelope.rank, |rank, now_us| rank.receive(envelope.message, now_us));
        }
    }

    /// Drives the engine until it is stopped.
    pub(super) async fn run(self: Arc<Self>) {
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = self.run_ranks() => {}
            () = self.run_heartbeats() => {}
            () = self.run_undelivered() => {}
        }
    }

    async fn run_ranks(self: &Arc<Self>) {
        loop {
            let mut next_us = u64::MAX;
            for rank in 0..self.ranks() {
                let of_rank = self.drive(rank, |rank, now_us| {
                    rank.advance(now_us);
                    rank.sleeps_until_us = rank.next_us().unwrap_or(u64::MAX);
                    rank.sleeps_until_us
                });
                next_us = next_us.min(of_rank);
            }
            let left = Duration::from_micros(next_us.saturating_sub(self.log.now_us()));
            tokio::select! {
                () = self.wake.notified() => {}
                () = tokio::time::sleep(left), if next_us < u64::MAX => {}
            }
        }
    }

    async fn run_heartbeats(self: &Arc<Self>) {
        let within = self.waits.heartbeat.mul_f64(0.6).max(HEARTBEAT_WITHIN_MIN);
        loop {
            tokio::time::sleep(self.waits.heartbeat).await;
            for lost in self.prefills.heartbeat(within).await {
                for rank in 0..self.ranks() {
                    self.drive(rank, |rank, now_us| rank.prefill_lost(&lost, now_us));
                }
            }
        }
    }

    /// Ends the legs whose metadata reached no engine.
    async fn run_undelivered(self: &Arc<Self>) {
        let receiver = self.undelivered.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut receiver = receiver.expect("an engine is driven once");
        while let Some((at, envelope)) = receiver.recv().await {
            self.prefills.forget_address(at);
            if let PeerMessage::Metadata { from, .. } = envelope.message {
                self.drive(from.peer.rank, |rank, now_us| rank.metadata_lost(from.leg, now_us));
            }
        }
    }

    /// Reserves a `rid`. `None` if it is in use.
    pub(super) fn reserve_rid(&self, rid: &str) -> Option<RidGuard<'_>> {
        let fresh = self.rids().insert(rid.to_owned());
        fresh.then(|| RidGuard { engine: self, rid: rid.to_owned() })
    }

    /// `/abort_request`: the server knows the exact `rid` of a request in flight, the ranks match by prefix.
    pub(super) fn abort(self: &Arc<Self>, rid: &str, cause: EndCause) {
        if !rid.is_empty() && self.rids().contains(rid) {
            self.abort_prefix(rid, cause);
        }
    }

    /// Aborts every leg whose `rid` begins with this text.
    pub(super) fn abort_prefix(self: &Arc<Self>, prefix: &str, cause: EndCause) {
        for rank in 0..self.ranks() {
            self.drive(rank, |rank, now_us| rank.abort_prefix(prefix, cause, now_us));
        }
    }

    /// The rank of a request without one: P's follows the room, D's ranks take turns.
    pub(super) fn next_rank(&self, room: u64) -> usize {
        let turn = match self.identity.role {
            Role::Prefill => room,
            Role::Decode => self.counted[0].fetch_add(1, Ordering::Relaxed),
        };
        (turn % self.ranks() as u64) as usize
    }

    /// Whether this request is refused, so that the fraction of refusals is as planned.
    pub(super) fn refuses(&self) -> bool {
        let share = self.plan.faults.refuses.unwrap_or(0.0);
        let number = self.counted[1].fetch_add(1, Ordering::Relaxed) as f64;
        ((number + 1.0) * share).floor() > (number * share).floor()
    }

    /// The request of one token behind `/health`.
    pub(super) fn generate_for_health(self: &Arc<Self>) {
        self.drive(0, |rank, _| rank.counts.generation_tokens += 1);
    }
}
