//! The lease: how a prefill engine lends the blocks it computed to a decode engine.
//!
//! ```text
//! Growing ─ the prefill is done ──▶ Offered, or Reading if somebody reads already
//! Growing ─ release, abort ───────▶ Closed(Released), or Draining if somebody reads
//! Offered ─ read begun(reader) ───▶ Reading{readers}
//! Offered ─ release ──────────────▶ Closed(Released)
//! Offered ─ expired ──────────────▶ Closed(Expired)
//! Reading ─ every expected consumer has everything ─▶ Closed(Fetched)
//! Reading ─ last reader in flight done or failed, others still expected ─▶ Offered
//! Offered, Reading ─ one of several consumers leaves ─▶ the same; Closed(Released) if it was the last
//! Reading ─ release / expired ────▶ Draining     no new reader; wait for those in flight
//! Draining ─ last reader done or failed, or the drain deadline ─▶ Closed(Fetched|Released|Expired)
//! Closed  ─ anything ─────────────▶ ignored; a new read is answered Gone
//! ```
//!
//! A reader is one link of one consumer ([`Reader`]); a consumer has everything when all its links are done, and
//! the lease ends by itself when as many consumers as were expected have everything or have left. A consumer that
//! fails half-way stands in nobody's way: another one takes its place, until time is up.
//!
//! A lease may be opened while its prefill still computes ([`Lease::growing`]): it can be read from then on, as far as
//! its owner says that blocks are final, and a reader is told "valid" only once all of them are. Until then no clock
//! runs: the prefill itself is bounded, and whatever ends it ends the lease.
//!
//! Invariants:
//! - [`Step::closed`] is `Some` exactly once in the life of a lease: then, and only then, the blocks go back.
//! - Until then they are neither written nor given out again.
//! - Every event is allowed in every state: the network may repeat, delay and reorder them.
//!
//! The table of every state and event is a golden file, `connector/tests/golden/lease.txt`.

mod portrait;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::limits::{CONSUMERS_MAX, DRAIN_DEADLINE, HEARTBEAT_EXTENSION, KV_LEASE_DURATION, READERS_MAX};
use crate::{Rank, Reader, Time};

pub use portrait::LeasePortrait;

/// How long a lease lives and drains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTerms {
    /// Life without a heartbeat (`kv_lease_duration`).
    pub duration: Duration,
    /// Wait for readers in flight after release or expiry.
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

/// Why a lease ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// Every expected consumer has everything.
    Fetched,
    /// Somebody gave it up.
    Released,
    /// Nobody came in time.
    Expired,
}

impl Cause {
    /// Every cause.
    pub const ALL: [Self; 3] = [Self::Fetched, Self::Released, Self::Expired];

    /// The metric label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Fetched => "transfer_done",
            Self::Released => "released",
            Self::Expired => "lease_expired",
        }
    }
}

/// Where a lease stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Its prefill still computes; whether anybody reads already makes no difference.
    Growing,
    /// Nobody reads.
    Offered,
    /// At least one reader is in flight.
    Reading,
    /// Given up or expired while readers were in flight.
    Draining(Cause),
    /// Over; the blocks are back.
    Closed(Cause),
}

/// What can happen to a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The prefill is done: every block is final, and the clock starts.
    Sealed,
    /// A reader asks to start.
    ReadBegun(Reader),
    /// A reader has everything.
    ReadDone(Reader),
    /// A reader's connection broke, or it gave up.
    ReadFailed(Reader),
    /// A sign of life of a consumer.
    Heartbeat,
    /// Somebody gives the lease up, for all its consumers.
    Release,
    /// A consumer will not read (any more); others may.
    Leave(u64),
    /// Time has passed; see [`Lease::deadline`].
    Tick,
}

/// The answer to whoever sent an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Nothing to say.
    None,
    /// The read may start.
    Granted,
    /// The read is valid, or the heartbeat counted.
    Valid,
    /// The lease is over, or never knew this reader.
    Gone,
    /// Too many readers at once.
    Busy,
    /// The release took effect; blocks are back.
    Released,
    /// The release took effect; readers in flight are waited for.
    Draining,
    /// A repetition: whatever it asks has already happened.
    Already,
}

/// The outcome of one event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// For the sender.
    pub reply: Reply,
    /// Set exactly once per lease: the blocks go back now, for this cause.
    pub closed: Option<Cause>,
}

/// One lease. Not `Clone`: it stands for blocks that are given back once.
#[derive(Debug)]
pub struct Lease {
    state: State,
    /// Whether every block is final. One that began to end before that never says "valid".
    sealed: bool,
    terms: LeaseTerms,
    expiry: Time,
    drain_deadline: Time,
    /// Consumers.
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

    /// Where it stands.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// When [`Event::Tick`] will next change something; `None` while it grows, and once closed.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        match self.state {
            State::Growing => None,
            State::Offered | State::Reading => Some(self.expiry),
            State::Draining(_) => Some(self.drain_deadline),
            State::Closed(_) => None,
        }
    }

    /// Readers that have everything, of those expected. A consumer that has not shown up yet counts as one
    /// reader: how many links it has is not known.
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

    /// Readers whose "done" was answered "valid".
    #[must_use]
    pub fn finished_readers(&self) -> Vec<Reader> {
        self.done.iter().copied().collect()
    }

    /// Whether this reader may still be sent bytes.
    #[must_use]
    pub fn serves(&self, reader: Reader) -> bool {
        !matches!(self.state, State::Closed(_)) && self.reading.contains(&reader)
    }

    /// Moves the lease by one event and says what its owner must do.
    ///
    /// A lease whose time is up is moved by the clock first, whatever the event: a heartbeat that arrives
    /// after the expiry does not bring it back.
    pub fn apply(&mut self, event: Event, now: Time) -> Step {
        let lapsed =
            if self.deadline().is_some_and(|deadline| now >= deadline) { self.lapse(now) } else { None };
        let step = self.transition(event, now);
        Step { reply: step.reply, closed: lapsed.or(step.closed) }
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
                // Not all of it can be there: whoever says so is not believed.
                self.reading.remove(&reader);
                self.rest(Reply::Gone)
            }
            (State::Reading, Event::ReadDone(reader)) => {
                if !self.reading.remove(&reader) {
                    return reply(self.verdict_of_absent(reader));
                }
                self.book(reader);
                self.rest(Reply::Valid)
            }
            (State::Draining(cause), Event::ReadDone(reader)) if !self.sealed => {
                self.reading.remove(&reader);
                self.drained(cause, Reply::Gone)
            }
            (State::Draining(cause), Event::ReadDone(reader)) => {
                if !self.reading.remove(&reader) {
                    return reply(self.verdict_of_absent(reader));
                }
                self.book(reader);
                self.drained(cause, Reply::Valid)
            }
            (State::Offered | State::Closed(_), Event::ReadDone(reader)) => {
                reply(self.verdict_of_absent(reader))
            }

            (State::Growing | State::Reading, Event::ReadFailed(reader)) => {
                self.reading.remove(&reader);
                self.rest(Reply::None)
            }
            (State::Draining(cause), Event::ReadFailed(reader)) => {
                self.reading.remove(&reader);
                self.drained(cause, Reply::None)
            }
            (State::Offered | State::Closed(_), Event::ReadFailed(_)) => reply(Reply::None),

            (State::Growing, Event::Heartbeat) => reply(Reply::Valid),
            (State::Offered | State::Reading, Event::Heartbeat) => {
                self.expiry = self.expiry.max(now.after(self.terms.extension()));
                reply(Reply::Valid)
            }
            (State::Draining(_) | State::Closed(_), Event::Heartbeat) => reply(Reply::Gone),

            (State::Offered, Event::Release) => self.close(Cause::Released, Reply::Released),
            (State::Growing, Event::Release) if self.reading.is_empty() => {
                self.close(Cause::Released, Reply::Released)
            }
            (State::Growing | State::Reading, Event::Release) => {
                self.drain(Cause::Released, now);
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
                let step = self.rest(Reply::Draining);
                if step.closed.is_some() { Step { reply: Reply::Released, ..step } } else { step }
            }

            (_, Event::Tick) => reply(Reply::None),
        }
    }

    /// The clock's own transition, due when `now` has reached the deadline.
    fn lapse(&mut self, now: Time) -> Option<Cause> {
        match self.state {
            State::Offered => self.close(Cause::Expired, Reply::None).closed,
            State::Reading => {
                self.drain(Cause::Expired, now);
                None
            }
            State::Draining(cause) => {
                self.reading.clear();
                self.close(cause, Reply::None).closed
            }
            State::Growing | State::Closed(_) => None,
        }
    }

    /// A repeated "done" is valid if the first one was: its reader's bytes were checked then.
    fn verdict_of_absent(&self, reader: Reader) -> Reply {
        if self.done.contains(&reader) { Reply::Valid } else { Reply::Gone }
    }

    /// A reader is done, and with it perhaps its consumer.
    fn book(&mut self, reader: Reader) {
        self.done.insert(reader);
        let Reader { consumer, of, rank: _ } = reader;
        let links = Reader { consumer, of, rank: Rank(0) }..=Reader { consumer, of, rank: Rank(u16::MAX) };
        if self.done.range(links).count() >= usize::from(of) {
            self.complete.insert(consumer);
            self.left.remove(&consumer);
        }
    }

    /// After a reader or a consumer has gone: the lease is over when nobody else is expected.
    fn rest(&mut self, reply: Reply) -> Step {
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
        self.close(if fetched { Cause::Fetched } else { Cause::Released }, reply)
    }

    fn drain(&mut self, cause: Cause, now: Time) {
        self.drain_deadline = now.after(self.terms.drain);
        self.state = State::Draining(cause);
    }

    fn drained(&mut self, cause: Cause, reply: Reply) -> Step {
        if !self.reading.is_empty() {
            return Step { reply, closed: None };
        }
        let fetched = self.complete.len() >= self.expected;
        self.close(if fetched { Cause::Fetched } else { cause }, reply)
    }

    fn close(&mut self, cause: Cause, reply: Reply) -> Step {
        self.state = State::Closed(cause);
        Step { reply, closed: Some(cause) }
    }
}

#[cfg(test)]
mod tests;
