//! The lease: a prefill engine keeps the blocks that it computed for a decode engine.
//!
//! ```text
//! Growing ─ the prefill is done ──▶ Offered, or Reading with readers in flight
//! Growing ─ release, abort ───────▶ Closed(Released), or Draining with readers in flight
//! Offered ─ read begun(reader) ───▶ Reading{readers}
//! Offered ─ release ──────────────▶ Closed(Released)
//! Offered ─ expired ──────────────▶ Closed(Expired)
//! Reading ─ every expected consumer has everything ─▶ Closed(Fetched)
//! Reading ─ last reader in flight done or failed, others still expected ─▶ Offered
//! Offered, Reading ─ one of several consumers leaves ─▶ the same; Closed(Released) if it was the last
//! Reading ─ release / expired ────▶ Draining     no new reader; wait for those in flight
//! Draining ─ last reader done or failed, or the drain deadline ─▶ Closed(Fetched|Released|Expired)
//! Closed  ─ any event ────────────▶ ignored; a new read is answered Gone
//! ```
//!
//! A reader is one link of one consumer ([`Reader`]). A consumer has everything when all its links are done. The lease
//! ends by itself when as many consumers as expected have everything or have left. A consumer that fails half-way
//! blocks no other one: another consumer can take its place until the lease expires.
//!
//! A lease may be opened while its prefill still computes ([`Lease::growing`]). Blocks can be read as soon as the owner
//! marks them final. A read is "valid" only once all blocks are final. Until then the lease does not expire: the
//! prefill is bounded, and its end ends the lease.
//!
//! Invariants:
//! - [`Step::closed`] is `Some` exactly once in the life of a lease. Only then are the blocks freed.
//! - Until then they are neither written nor allocated again.
//! - Every event is allowed in every state: the network may repeat, delay and reorder them.
//!
//! The table of every state and event is a golden file, `connector/tests/golden/lease.txt`.

mod snapshot;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::limits::{CONSUMERS_MAX, DRAIN_DEADLINE, HEARTBEAT_EXTENSION, KV_LEASE_DURATION, READERS_MAX};
use crate::{Rank, Reader, Time};

pub use snapshot::LeaseSnapshot;

/// The durations of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTerms {
    /// Time to expiry without a heartbeat (`kv_lease_duration`).
    pub duration: Duration,
    /// Longest wait for readers in flight after release or expiry.
    pub drain: Duration,
}

impl Default for LeaseTerms {
    fn default() -> Self {
        Self { duration: KV_LEASE_DURATION, drain: DRAIN_DEADLINE }
    }
}

impl LeaseTerms {
    /// What one heartbeat adds: two thirds of the duration.
    #[must_use]
    pub fn extension(&self) -> Duration {
        self.duration * HEARTBEAT_EXTENSION.0 / HEARTBEAT_EXTENSION.1
    }
}

crate::labelled! {
    /// Why a lease ended.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum CloseCause {
        /// Every expected consumer has everything.
        Fetched => "transfer_done",
        /// The lease was released.
        Released => "released",
        /// The lease expired.
        Expired => "lease_expired",
    }
}

/// State of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Its prefill still computes, with or without readers in flight.
    Growing,
    /// No reader is in flight.
    Offered,
    /// At least one reader is in flight.
    Reading,
    /// Released or expired while readers were in flight.
    Draining(CloseCause),
    /// Ended; the blocks are freed.
    Closed(CloseCause),
}

/// What can happen to a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The prefill is done: every block is final, and the lease duration starts.
    Sealed,
    /// A reader asks to start.
    ReadBegun(Reader),
    /// A reader has everything.
    ReadDone(Reader),
    /// The connection of a reader broke, or the reader stopped.
    ReadFailed(Reader),
    /// A consumer renews the lease.
    Heartbeat,
    /// The lease is released for all its consumers.
    Release,
    /// One consumer does not read any more. Others may.
    Leave(u64),
    /// Time has passed; see [`Lease::deadline`].
    Tick,
}

/// The answer to the sender of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// No answer.
    None,
    /// The read may start.
    Granted,
    /// The read is valid, or the lease is renewed.
    Valid,
    /// The lease has ended, or does not know this reader.
    Gone,
    /// Too many readers at once.
    Busy,
    /// The release took effect; the blocks are freed.
    Released,
    /// The release took effect; the lease waits for readers in flight.
    Draining,
    /// A repetition, without effect.
    Already,
}

/// The outcome of one event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The answer to the sender.
    pub reply: Reply,
    /// Set exactly once per lease: the blocks are freed now, for this cause.
    pub closed: Option<CloseCause>,
}

/// One lease. Not `Clone`: its blocks are freed once.
#[derive(Debug)]
pub struct Lease {
    state: State,
    /// Whether every block is final. A lease that begins to end before that never answers "valid".
    sealed: bool,
    terms: LeaseTerms,
    expiry: Time,
    drain_deadline: Time,
    /// Number of expected consumers.
    expected: usize,
    reading: BTreeSet<Reader>,
    done: BTreeSet<Reader>,
    /// Consumers whose links are all done.
    complete: BTreeSet<u64>,
    /// Consumers that have left, and are not complete.
    left: BTreeSet<u64>,
}

impl Lease {
    /// Opens a lease for `expected` consumers (at least one, at most [`CONSUMERS_MAX`]).
    #[must_use]
    pub fn open(terms: LeaseTerms, expected: usize, now: Time) -> Self {
        Self {
            state: State::Offered,
            sealed: true,
            terms,
            expiry: now.after(terms.duration),
            drain_deadline: Time::ZERO,
            expected: expected.clamp(1, CONSUMERS_MAX),
            reading: BTreeSet::new(),
            done: BTreeSet::new(),
            complete: BTreeSet::new(),
            left: BTreeSet::new(),
        }
    }

    /// Opens a lease whose prefill still computes.
    #[must_use]
    pub fn growing(terms: LeaseTerms, expected: usize) -> Self {
        Self { state: State::Growing, sealed: false, ..Self::open(terms, expected, Time::ZERO) }
    }

    /// Current state.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// When [`Event::Tick`] next changes something; `None` while the lease grows, and once it is closed.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        match self.state {
            State::Growing => None,
            State::Offered | State::Reading => Some(self.expiry),
            State::Draining(_) => Some(self.drain_deadline),
            State::Closed(_) => None,
        }
    }

    /// Readers that have everything, of those expected. A consumer without a read so far counts as one reader, because
    /// its number of links is not known.
    #[must_use]
    pub fn progress(&self) -> (usize, usize) {
        let mut consumers: BTreeMap<(u64, u16), usize> = BTreeMap::new();
        for reader in self.done.union(&self.reading) {
            *consumers.entry((reader.consumer, reader.of)).or_default() +=
                usize::from(self.done.contains(reader));
        }
        // Consumers that failed half-way may be among more than were expected.
        let mut shown: Vec<_> =
            consumers.into_iter().map(|((_, of), done)| (done, usize::from(of))).collect();
        shown.sort_unstable_by(|a, b| b.cmp(a));
        shown.truncate(self.expected);
        let unseen = self.expected - shown.len();
        let (done, of) = shown.into_iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        (done, of + unseen)
    }

    /// Consumers that this lease was opened for.
    #[must_use]
    pub fn expected(&self) -> usize {
        self.expected
    }

    /// Readers with the verdict "valid".
    #[must_use]
    pub fn finished_readers(&self) -> Vec<Reader> {
        self.done.iter().copied().collect()
    }

    /// Whether bytes may still be sent to this reader.
    #[must_use]
    pub fn serves(&self, reader: Reader) -> bool {
        !matches!(self.state, State::Closed(_)) && self.reading.contains(&reader)
    }

    /// Applies one event and returns what the owner must do.
    ///
    /// A passed deadline takes effect before the event. So a heartbeat after the expiry does not renew the lease.
    pub fn apply(&mut self, event: Event, now: Time) -> Step {
        let expired =
            if self.deadline().is_some_and(|deadline| now >= deadline) { self.expire(now) } else { None };
        let step = self.transition(event, now);
        Step { reply: step.reply, closed: expired.or(step.closed) }
    }

    fn transition(&mut self, event: Event, now: Time) -> Step {
        let reply = |reply| Step { reply, closed: None };
        match (self.state, event) {
            (State::Growing, Event::Sealed) => {
                self.sealed = true;
                self.expiry = now.after(self.terms.duration);
                self.state = if self.reading.is_empty() { State::Offered } else { State::Reading };
                reply(Reply::Valid)
            }
            (State::Offered | State::Reading, Event::Sealed) => reply(Reply::Already),
            (State::Draining(_) | State::Closed(_), Event::Sealed) => reply(Reply::Gone),

            (State::Growing | State::Offered | State::Reading, Event::ReadBegun(reader)) => {
                if self.left.contains(&reader.consumer) {
                    return reply(Reply::Gone);
                }
                let known = self.reading.contains(&reader) || self.done.contains(&reader);
                if self.reading.len() + self.done.len() >= READERS_MAX && !known {
                    return reply(Reply::Busy);
                }
                self.reading.insert(reader);
                if self.state != State::Growing {
                    self.state = State::Reading;
                }
                reply(Reply::Granted)
            }
            (State::Draining(_) | State::Closed(_), Event::ReadBegun(_)) => reply(Reply::Gone),

            (State::Growing, Event::ReadDone(reader)) => {
                // The prefill still computes, so the reader cannot have every block.
                self.reading.remove(&reader);
                self.close_if_complete(Reply::Gone)
            }
            (State::Reading, Event::ReadDone(reader)) => {
                if !self.reading.remove(&reader) {
                    return reply(self.verdict_of_absent(reader));
                }
                self.record_done(reader);
                self.close_if_complete(Reply::Valid)
            }
            (State::Draining(cause), Event::ReadDone(reader)) if !self.sealed => {
                self.reading.remove(&reader);
                self.close_if_drained(cause, Reply::Gone)
            }
            (State::Draining(cause), Event::ReadDone(reader)) => {
                if !self.reading.remove(&reader) {
                    return reply(self.verdict_of_absent(reader));
                }
                self.record_done(reader);
                self.close_if_drained(cause, Reply::Valid)
            }
            (State::Offered | State::Closed(_), Event::ReadDone(reader)) => {
                reply(self.verdict_of_absent(reader))
            }

            (State::Growing | State::Reading, Event::ReadFailed(reader)) => {
                self.reading.remove(&reader);
                self.close_if_complete(Reply::None)
            }
            (State::Draining(cause), Event::ReadFailed(reader)) => {
                self.reading.remove(&reader);
                self.close_if_drained(cause, Reply::None)
            }
            (State::Offered | State::Closed(_), Event::ReadFailed(_)) => reply(Reply::None),

            (State::Growing, Event::Heartbeat) => reply(Reply::Valid),
            (State::Offered | State::Reading, Event::Heartbeat) => {
                self.expiry = self.expiry.max(now.after(self.terms.extension()));
                reply(Reply::Valid)
            }
            (State::Draining(_) | State::Closed(_), Event::Heartbeat) => reply(Reply::Gone),

            (State::Offered, Event::Release) => self.close(CloseCause::Released, Reply::Released),
            (State::Growing, Event::Release) if self.reading.is_empty() => {
                self.close(CloseCause::Released, Reply::Released)
            }
            (State::Growing | State::Reading, Event::Release) => {
                self.drain(CloseCause::Released, now);
                reply(Reply::Draining)
            }
            (State::Draining(_) | State::Closed(_), Event::Release | Event::Leave(_)) => {
                reply(Reply::Already)
            }

            (State::Growing | State::Offered | State::Reading, Event::Leave(consumer)) => {
                let full = self.left.len() >= CONSUMERS_MAX;
                if full || self.complete.contains(&consumer) || !self.left.insert(consumer) {
                    return reply(Reply::Already);
                }
                let step = self.close_if_complete(Reply::Draining);
                if step.closed.is_some() { Step { reply: Reply::Released, ..step } } else { step }
            }

            (_, Event::Tick) => reply(Reply::None),
        }
    }

    /// The transition of a deadline that `now` has reached.
    fn expire(&mut self, now: Time) -> Option<CloseCause> {
        match self.state {
            State::Offered => self.close(CloseCause::Expired, Reply::None).closed,
            State::Reading => {
                self.drain(CloseCause::Expired, now);
                None
            }
            State::Draining(cause) => {
                self.reading.clear();
                self.close(cause, Reply::None).closed
            }
            State::Growing | State::Closed(_) => None,
        }
    }

    /// A repeated "done" is valid if the first one was: the reader's bytes were checked then.
    fn verdict_of_absent(&self, reader: Reader) -> Reply {
        if self.done.contains(&reader) { Reply::Valid } else { Reply::Gone }
    }

    /// Records that a reader is done, and its consumer if that was the last link.
    fn record_done(&mut self, reader: Reader) {
        self.done.insert(reader);
        let Reader { consumer, of, rank: _ } = reader;
        let links = Reader { consumer, of, rank: Rank(0) }..=Reader { consumer, of, rank: Rank(u16::MAX) };
        if self.done.range(links).count() >= usize::from(of) {
            self.complete.insert(consumer);
            self.left.remove(&consumer);
        }
    }

    /// Closes the lease if no reader is in flight and no further consumer is expected.
    fn close_if_complete(&mut self, reply: Reply) -> Step {
        if !self.reading.is_empty() {
            return Step { reply, closed: None };
        }
        if self.complete.len() + self.left.len() < self.expected {
            if self.state != State::Growing {
                self.state = State::Offered;
            }
            return Step { reply, closed: None };
        }
        let fetched = self.complete.len() >= self.expected;
        self.close(if fetched { CloseCause::Fetched } else { CloseCause::Released }, reply)
    }

    fn drain(&mut self, cause: CloseCause, now: Time) {
        self.drain_deadline = now.after(self.terms.drain);
        self.state = State::Draining(cause);
    }

    fn close_if_drained(&mut self, cause: CloseCause, reply: Reply) -> Step {
        if !self.reading.is_empty() {
            return Step { reply, closed: None };
        }
        let fetched = self.complete.len() >= self.expected;
        self.close(if fetched { CloseCause::Fetched } else { cause }, reply)
    }

    fn close(&mut self, cause: CloseCause, reply: Reply) -> Step {
        self.state = State::Closed(cause);
        Step { reply, closed: Some(cause) }
    }
}

#[cfg(test)]
mod tests;
