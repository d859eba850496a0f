//! Renews the leases of sequences that wait for their blocks, on threads of its own. A long forward pass or a silent
//! producer therefore loses no other lease.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::Rank;
use baton_connector::fetch::Event;
use baton_connector::ledger::HeartbeatReply;
use baton_connector::limits::{HEARTBEAT_HANDLES_MAX, HEARTBEATS_PER_LEASE, RENEWAL_DURATIONS_MAX};
use baton_connector::transport::{Transport, TransportError};

use super::Producer;
use super::producer_turns::Turns;
use crate::engine_core::fetch_target::FetchTarget;
use crate::engine_core::mailbox::Mailbox;
use crate::scheduler::sequence::SeqId;

/// The shortest interval between two heartbeats of one lease, however short the lease.
const INTERVAL_MIN: Duration = Duration::from_millis(20);

/// The interval of sweeps over the state of producers. They run here because these threads wake anyway.
const SWEEP: Duration = Duration::from_secs(1);

/// Heartbeat threads.
pub(super) const THREADS: usize = 4;

/// Limit of the producers whose next rank to ask is not the first.
const RANKS_KEPT_MAX: usize = 1_024;

struct Renewal {
    target: FetchTarget,
    interval: Duration,
    due: Instant,
    /// The sequence is given up then if its read has not begun: see [`RENEWAL_DURATIONS_MAX`].
    until: Option<Instant>,
}

struct Renewals {
    by_sequence: HashMap<SeqId, Renewal>,
    turns: Turns<Producer>,
    /// The rank to ask of a producer, if it is not the first. Every rank knows every lease, and after a failure the
    /// next rank is asked. At [`RANKS_KEPT_MAX`] the map is cleared, and all start from the first rank again.
    ranks: HashMap<Producer, Rank>,
    swept: Instant,
}

pub(super) struct Heartbeat {
    entries: Mutex<Renewals>,
    changed: Condvar,
}

/// The members of one producer whose heartbeats are due.
struct RenewalBatch {
    producer: Producer,
    rank: Rank,
    members: Vec<(SeqId, FetchTarget)>,
}

impl Default for Heartbeat {
    fn default() -> Self {
        let entries = Renewals {
            by_sequence: HashMap::new(),
            turns: Turns::new(THREADS, 1),
            ranks: HashMap::new(),
            swept: Instant::now(),
        };
        Self { entries: Mutex::new(entries), changed: Condvar::new() }
    }
}

impl Heartbeat {
    pub(super) fn add(&self, id: SeqId, target: FetchTarget) {
        let interval = (target.lease / HEARTBEATS_PER_LEASE).max(INTERVAL_MIN);
        // The first heartbeat is due at once: the request may have been on its way for most of the lease.
        let now = Instant::now();
        let entry = Renewal {
            interval,
            due: now,
            until: now.checked_add(target.lease * RENEWAL_DURATIONS_MAX),
            target,
        };
        self.lock().by_sequence.insert(id, entry);
        self.changed.notify_all();
    }

    pub(super) fn remove(&self, id: SeqId) {
        self.lock().by_sequence.remove(&id);
    }

    pub(super) fn wake(&self) {
        self.changed.notify_all();
    }

    /// Sends heartbeats until `stop`. [`THREADS`] threads run this loop, and each producer occupies one at most.
    pub(super) fn run(&self, transport: &dyn Transport, mailbox: &Mailbox, stop: &AtomicBool) {
        while !stop.load(Ordering::Acquire) {
            if self.sweep_is_due() {
                transport.sweep();
                for id in self.take_expired() {
                    tracing::warn!(
                        event = "handoff_wait_expired",
                        seq = id.0,
                        "handoff given up, no free blocks in time"
                    );
                    mailbox.fetch(id, Event::LeaseGone);
                }
            }
            let Some(RenewalBatch { producer, rank, members }) = self.next() else { continue };
            let beaten = beat(transport, mailbox, rank, &members);
            if let Err(error) = &beaten {
                let peer = &members[0].1.producer.host;
                tracing::debug!(event = "heartbeat_failed", %peer, %error, "heartbeat not delivered");
            }
            let mut entries = self.lock();
            entries.turns.ended(&producer, beaten.is_ok());
            if beaten.is_err() {
                entries.ask_next_rank(producer, rank, &members);
            }
            drop(entries);
            self.changed.notify_all();
        }
    }

    /// True for one of the threads, every [`SWEEP`].
    fn sweep_is_due(&self) -> bool {
        let mut entries = self.lock();
        let due = entries.swept.elapsed() >= SWEEP;
        if due {
            entries.swept = Instant::now();
        }
        due
    }

    /// Sequences that have been renewed for long enough, each once. A read that has begun ignores this and is renewed
    /// further.
    fn take_expired(&self) -> Vec<SeqId> {
        let (now, mut entries) = (Instant::now(), self.lock());
        let over = entries.by_sequence.iter_mut().filter(|(_, entry)| entry.until.is_some_and(|u| u <= now));
        over.map(|(&id, entry)| (id, entry.until.take()).0).collect()
    }

    /// Takes the due renewals of one producer, the longest due first, and sets their next time. Waits a little if
    /// none is due.
    fn next(&self) -> Option<RenewalBatch> {
        let mut entries = self.lock();
        let now = Instant::now();
        let Renewals { by_sequence, turns, ranks, .. } = &mut *entries;
        let ripe = by_sequence.values().filter(|entry| entry.due <= now);
        let longest_due =
            ripe.filter(|entry| turns.may_start(&entry.target.producer.key())).min_by_key(|e| e.due);
        if let Some(producer) = longest_due.map(|entry| entry.target.producer.key()) {
            turns.started(&producer);
            let mut members = Vec::new();
            for (&id, entry) in by_sequence.iter_mut() {
                if entry.due <= now && entry.target.producer.key() == producer {
                    entry.due = now + entry.interval;
                    members.push((id, entry.target.clone()));
                }
            }
            let rank = ranks.get(&producer).copied().unwrap_or_default();
            return Some(RenewalBatch { producer, rank, members });
        }
        // Due renewals wait for a turn, and its end wakes this thread.
        let next = by_sequence.values().map(|entry| entry.due).filter(|due| *due > now).min();
        let nap = next.map_or(Duration::from_secs(1), |due| due.saturating_duration_since(now));
        drop(self.changed.wait_timeout(entries, nap.min(Duration::from_secs(1))));
        None
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Renewals> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Renewals {
    /// Moves the failed heartbeats to the producer's next rank. They are due at once, unless all ranks have been
    /// tried.
    fn ask_next_rank(&mut self, producer: Producer, rank: Rank, members: &[(SeqId, FetchTarget)]) {
        let next = members.first().map_or(Rank(0), |(_, target)| target.producer.rank_after(rank));
        if next == Rank(0) {
            self.ranks.remove(&producer);
            return;
        }
        if self.ranks.len() >= RANKS_KEPT_MAX {
            self.ranks.clear();
        }
        self.ranks.insert(producer, next);
        for (id, _) in members {
            if let Some(entry) = self.by_sequence.get_mut(id) {
                entry.due = Instant::now();
            }
        }
    }
}

/// Renews leases of one producer, at one of its ranks. Leases of an earlier epoch are gone.
fn beat(
    transport: &dyn Transport,
    mailbox: &Mailbox,
    rank: Rank,
    members: &[(SeqId, FetchTarget)],
) -> Result<(), TransportError> {
    // One address may have had several epochs: each epoch is a peer of its own.
    let mut peers: HashMap<_, Vec<&(SeqId, FetchTarget)>> = HashMap::new();
    for member in members {
        // A name that does not resolve now is resolved again at the next heartbeat.
        peers.entry(member.1.producer.peer(rank)?).or_default().push(member);
    }
    for (peer, members) in peers {
        for batch in members.chunks(HEARTBEAT_HANDLES_MAX) {
            let handles: Vec<_> = batch.iter().map(|(_, target)| target.handle).collect();
            let replies = transport.heartbeat(&peer, &handles)?;
            let gone = replies.iter().zip(batch).filter(|(reply, _)| **reply == HeartbeatReply::Gone);
            gone.for_each(|(_, (id, _))| mailbox.fetch(*id, Event::LeaseGone));
        }
    }
    Ok(())
}
