//! Renews the leases of sequences that wait for their blocks, on a thread of its own: a decode engine in a long
//! forward pass keeps what it has been promised.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::Rank;
use baton_connector::fetch::Event;
use baton_connector::ledger::HeartbeatReply;
use baton_connector::limits::{HEARTBEAT_HANDLES_MAX, HEARTBEATS_PER_LEASE, RENEWED_FOR_MAX};
use baton_connector::transport::{Peer, Transport};

use super::FetchTarget;
use crate::mailbox::Mailbox;
use crate::sequence::SeqId;

/// The shortest interval between two beats of one lease, however short the lease.
const INTERVAL_MIN: Duration = Duration::from_millis(20);

struct Entry {
    target: FetchTarget,
    /// Which of the producer's ranks is asked: any of them knows the lease, and one that does not answer is
    /// followed by the next.
    rank: Rank,
    interval: Duration,
    due: Instant,
    /// From then on it is not renewed any more: see [`RENEWED_FOR_MAX`].
    until: Instant,
}

#[derive(Default)]
pub(super) struct Heartbeat {
    entries: Mutex<HashMap<SeqId, Entry>>,
    changed: Condvar,
}

impl Heartbeat {
    pub(super) fn add(&self, id: SeqId, target: FetchTarget) {
        let interval = (target.lease / HEARTBEATS_PER_LEASE).max(INTERVAL_MIN);
        // The first beat at once: the request may have been on its way for most of the lease.
        let (now, rank) = (Instant::now(), Rank(0));
        let entry = Entry { rank, interval, due: now, until: now + target.lease * RENEWED_FOR_MAX, target };
        self.lock().insert(id, entry);
        self.changed.notify_one();
    }

    pub(super) fn remove(&self, id: SeqId) {
        self.lock().remove(&id);
    }

    pub(super) fn wake(&self) {
        self.changed.notify_all();
    }

    pub(super) fn run(&self, transport: &dyn Transport, mailbox: &Mailbox, stop: &AtomicBool) {
        while !stop.load(Ordering::Acquire) {
            for id in self.given_up() {
                tracing::warn!(seq = id.0, "no room for this handoff for too long; it is given up");
                mailbox.fetch(id, Event::LeaseGone);
            }
            for (peer, members) in self.due() {
                for batch in members.chunks(HEARTBEAT_HANDLES_MAX) {
                    let handles: Vec<_> = batch.iter().map(|(_, target)| target.handle).collect();
                    match transport.heartbeat(&peer, &handles) {
                        Ok(replies) => {
                            let gone = replies.iter().zip(batch).filter(|(r, _)| **r == HeartbeatReply::Gone);
                            gone.for_each(|(_, (id, _))| mailbox.fetch(*id, Event::LeaseGone));
                        }
                        Err(error) => {
                            tracing::debug!(peer = %peer.address, %error, "heartbeat not delivered");
                            self.ask_next_rank(batch);
                        }
                    }
                }
            }
            self.sleep();
        }
    }

    /// The producer's next rank gets the beat that was not delivered: at once, unless all have been tried.
    fn ask_next_rank(&self, members: &[(SeqId, FetchTarget)]) {
        let mut entries = self.lock();
        for (id, _) in members {
            if let Some(entry) = entries.get_mut(id) {
                entry.rank = entry.target.rank_after(entry.rank);
                if entry.rank != Rank(0) {
                    entry.due = Instant::now();
                }
            }
        }
    }

    /// Takes out what has been renewed for long enough.
    fn given_up(&self) -> Vec<SeqId> {
        let (now, mut entries) = (Instant::now(), self.lock());
        let over: Vec<SeqId> =
            entries.iter().filter(|(_, entry)| entry.until <= now).map(|(&id, _)| id).collect();
        over.iter().for_each(|id| drop(entries.remove(id)));
        over
    }

    /// Takes what is due, grouped by producer, and sets the next time.
    fn due(&self) -> HashMap<Peer, Vec<(SeqId, FetchTarget)>> {
        let now = Instant::now();
        let mut ripe = Vec::new();
        for (&id, entry) in self.lock().iter_mut().filter(|(_, entry)| entry.due <= now) {
            entry.due = now + entry.interval;
            ripe.push((id, entry.rank, entry.target.clone()));
        }
        let mut groups: HashMap<Peer, Vec<_>> = HashMap::new();
        for (id, rank, target) in ripe {
            // A name that does not resolve now is tried again at the next beat.
            if let Ok(peer) = target.peer(rank) {
                groups.entry(peer).or_default().push((id, target));
            }
        }
        groups
    }

    fn sleep(&self) {
        let entries = self.lock();
        let next = entries.values().map(|entry| entry.due).min();
        let nap = next.map_or(Duration::from_secs(1), |due| due.saturating_duration_since(Instant::now()));
        drop(self.changed.wait_timeout(entries, nap.min(Duration::from_secs(1))));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<SeqId, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
