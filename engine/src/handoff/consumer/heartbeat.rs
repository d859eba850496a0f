//! Renews the leases of sequences that wait for their blocks, on threads of its own: a decode engine in a long
//! forward pass keeps what it has been promised, and so does one that waits for a producer that says nothing.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::Rank;
use baton_connector::fetch::Event;
use baton_connector::ledger::HeartbeatReply;
use baton_connector::limits::{HEARTBEAT_HANDLES_MAX, HEARTBEATS_PER_LEASE, RENEWED_FOR_MAX};
use baton_connector::transport::{Transport, TransportError};

use super::Producer;
use super::turns::Turns;
use crate::engine_core::fetch_target::FetchTarget;
use crate::engine_core::mailbox::Mailbox;
use crate::scheduler::sequence::SeqId;

/// The shortest interval between two beats of one lease, however short the lease.
const INTERVAL_MIN: Duration = Duration::from_millis(20);

/// What is kept of producers is looked through this often. It is done here because these threads wake anyway.
const SWEEP: Duration = Duration::from_secs(1);

/// Threads that beat.
pub(super) const THREADS: usize = 4;

/// Producers of which another rank than the first is asked.
const RANKS_KEPT_MAX: usize = 1_024;

struct Entry {
    target: FetchTarget,
    interval: Duration,
    due: Instant,
    /// Then it is given up if its read has not begun: see [`RENEWED_FOR_MAX`].
    until: Option<Instant>,
}

struct Entries {
    by_sequence: HashMap<SeqId, Entry>,
    turns: Turns<Producer>,
    /// Which of a producer's ranks is asked, where it is not the first: any of them knows every lease, and one that
    /// does not answer is followed by the next. At most [`RANKS_KEPT_MAX`]; beyond it all start from the first again.
    ranks: HashMap<Producer, Rank>,
    swept: Instant,
}

pub(super) struct Heartbeat {
    entries: Mutex<Entries>,
    changed: Condvar,
}

/// The members of one producer whose beats are due.
struct Beat {
    producer: Producer,
    rank: Rank,
    members: Vec<(SeqId, FetchTarget)>,
}

impl Default for Heartbeat {
    fn default() -> Self {
        let entries = Entries {
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
        // The first beat at once: the request may have been on its way for most of the lease.
        let now = Instant::now();
        let entry =
            Entry { interval, due: now, until: now.checked_add(target.lease * RENEWED_FOR_MAX), target };
        self.lock().by_sequence.insert(id, entry);
        self.changed.notify_all();
    }

    pub(super) fn remove(&self, id: SeqId) {
        self.lock().by_sequence.remove(&id);
    }

    pub(super) fn wake(&self) {
        self.changed.notify_all();
    }

    /// Beats until `stop`; on [`THREADS`] threads at once, one for each producer at most.
    pub(super) fn run(&self, transport: &dyn Transport, mailbox: &Mailbox, stop: &AtomicBool) {
        while !stop.load(Ordering::Acquire) {
            if self.sweep_is_due() {
                transport.sweep();
                for id in self.given_up() {
                    tracing::warn!(seq = id.0, "handoff given up, no free blocks in time");
                    mailbox.fetch(id, Event::LeaseGone);
                }
            }
            let Some(Beat { producer, rank, members }) = self.next() else { continue };
            let beaten = beat(transport, mailbox, rank, &members);
            if let Err(error) = &beaten {
                tracing::debug!(host = %members[0].1.host, %error, "heartbeat not delivered");
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

    /// What has been renewed for long enough, each once. A read that has begun does not heed it, and goes on being
    /// renewed.
    fn given_up(&self) -> Vec<SeqId> {
        let (now, mut entries) = (Instant::now(), self.lock());
        let over = entries.by_sequence.iter_mut().filter(|(_, entry)| entry.until.is_some_and(|u| u <= now));
        over.map(|(&id, entry)| (id, entry.until.take()).0).collect()
    }

    /// Takes what is due of one producer, the longest due first, and sets the next time; waits a little when nothing
    /// is.
    fn next(&self) -> Option<Beat> {
        let mut entries = self.lock();
        let now = Instant::now();
        let Entries { by_sequence, turns, ranks, .. } = &mut *entries;
        let ripe = by_sequence.values().filter(|entry| entry.due <= now);
        let longest_due =
            ripe.filter(|entry| turns.may_start(&entry.target.producer())).min_by_key(|e| e.due);
        if let Some(producer) = longest_due.map(|entry| entry.target.producer()) {
            turns.started(&producer);
            let mut members = Vec::new();
            for (&id, entry) in by_sequence.iter_mut() {
                if entry.due <= now && entry.target.producer() == producer {
                    entry.due = now + entry.interval;
                    members.push((id, entry.target.clone()));
                }
            }
            let rank = ranks.get(&producer).copied().unwrap_or_default();
            return Some(Beat { producer, rank, members });
        }
        // Those that are due wait for a turn, whose end wakes.
        let next = by_sequence.values().map(|entry| entry.due).filter(|due| *due > now).min();
        let nap = next.map_or(Duration::from_secs(1), |due| due.saturating_duration_since(now));
        drop(self.changed.wait_timeout(entries, nap.min(Duration::from_secs(1))));
        None
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    /// The producer's next rank gets the beats that were not delivered: at once, unless all have been tried.
    fn ask_next_rank(&mut self, producer: Producer, rank: Rank, members: &[(SeqId, FetchTarget)]) {
        let next = members.first().map_or(Rank(0), |(_, target)| target.rank_after(rank));
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

/// Renews leases of one producer, at one of its ranks. Those of an earlier epoch are gone.
fn beat(
    transport: &dyn Transport,
    mailbox: &Mailbox,
    rank: Rank,
    members: &[(SeqId, FetchTarget)],
) -> Result<(), TransportError> {
    // One address may have had several epochs: each is a peer of its own.
    let mut peers: HashMap<_, Vec<&(SeqId, FetchTarget)>> = HashMap::new();
    for member in members {
        // A name that does not resolve now is tried again at the next beat.
        peers.entry(member.1.peer(rank)?).or_default().push(member);
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
