//! The lease: how a prefill engine lends the blocks it computed to a decode engine.
//!
//! ```text
//! Offered ─ read begun(reader) ───▶ Reading{readers}
//! Offered ─ release ──────────────▶ Closed(Released)
//! Offered ─ expired ──────────────▶ Closed(Expired)
//! Reading ─ read done by every expected reader ─▶ Closed(Fetched)
//! Reading ─ last reader in flight done or failed, others still expected ─▶ Offered
//! Reading ─ release / expired ────▶ Draining     no new reader; wait for those in flight
//! Draining ─ last reader done or failed, or the drain deadline ─▶ Closed(Fetched|Released|Expired)
//! Closed  ─ anything ─────────────▶ ignored; a new read is answered Gone
//! ```
//!
//! Invariants:
//! - [`Step::closed`] is `Some` exactly once in the life of a lease: then, and only then, the blocks go back.
//! - Until then they are neither written nor given out again.
//! - Every event is allowed in every state: the network may repeat, delay and reorder them.
//!
//! The table of every state and event is a golden file, `connector/tests/golden/lease.txt`.

mod portrait;

use std::collections::BTreeSet;
use std::time::Duration;

use crate::limits::{DRAIN_DEADLINE, HEARTBEAT_EXTENSION, KV_LEASE_DURATION, READERS_MAX};
use crate::{Reader, Time};

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
    /// Every expected reader has everything.
    Fetched,
    /// Somebody gave it up.
    Released,
    /// Nobody came in time.
    Expired,
}

impl Cause {
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
    /// A reader asks to start.
    ReadBegun(Reader),
    /// A reader has everything.
    ReadDone(Reader),
    /// A reader's connection broke, or it gave up.
    ReadFailed(Reader),
    /// A sign of life of a consumer.
    Heartbeat,
    /// Somebody gives the lease up.
    Release,
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
    terms: LeaseTerms,
    expiry: Time,
    drain_deadline: Time,
    expected: usize,
    reading: BTreeSet<Reader>,
    done: BTreeSet<Reader>,
}

impl Lease {
    /// Opens a lease for `expected` readers (at least one).
    #[must_use]
    pub fn open(terms: LeaseTerms, expected: usize, now: Time) -> Self {
        Self {
            state: State::Offered,
            terms,
            expiry: now.after(terms.duration),
            drain_deadline: Time::ZERO,
            expected: expected.max(1),
            reading: BTreeSet::new(),
            done: BTreeSet::new(),
        }
    }

    /// Where it stands.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// When [`Event::Tick`] will next change something; `None` once closed.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        match self.state {
            State::Offered | State::Reading => Some(self.expiry),
            State::Draining(_) => Some(self.drain_deadline),
            State::Closed(_) => None,
        }
    }

    /// Readers that have everything, of those expected.
    #[must_use]
    pub fn progress(&self) -> (usize, usize) {
        (self.done.len(), self.expected)
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
            (State::Offered | State::Reading, Event::ReadBegun(reader)) => {
                if self.reading.len() >= READERS_MAX && !self.reading.contains(&reader) {
                    return reply(Reply::Busy);
                }
                self.reading.insert(reader);
                self.state = State::Reading;
                reply(Reply::Granted)
            }
            (State::Draining(_) | State::Closed(_), Event::ReadBegun(_)) => reply(Reply::Gone),

            (State::Reading, Event::ReadDone(reader)) => {
                if !self.reading.remove(&reader) {
                    return reply(self.verdict_of_absent(reader));
                }
                self.done.insert(reader);
                if self.done.len() >= self.expected && self.reading.is_empty() {
                    return self.close(Cause::Fetched, Reply::Valid);
                }
                self.rest();
                reply(Reply::Valid)
            }
            (State::Draining(cause), Event::ReadDone(reader)) => {
                if !self.reading.remove(&reader) {
                    return reply(self.verdict_of_absent(reader));
                }
                self.done.insert(reader);
                self.drained(cause, Reply::Valid)
            }
            (State::Offered | State::Closed(_), Event::ReadDone(reader)) => {
                reply(self.verdict_of_absent(reader))
            }

            (State::Reading, Event::ReadFailed(reader)) => {
                self.reading.remove(&reader);
                if self.done.len() >= self.expected && self.reading.is_empty() {
                    return self.close(Cause::Fetched, Reply::None);
                }
                self.rest();
                reply(Reply::None)
            }
            (State::Draining(cause), Event::ReadFailed(reader)) => {
                self.reading.remove(&reader);
                self.drained(cause, Reply::None)
            }
            (State::Offered | State::Closed(_), Event::ReadFailed(_)) => reply(Reply::None),

            (State::Offered | State::Reading, Event::Heartbeat) => {
                self.expiry = self.expiry.max(now.after(self.terms.extension()));
                reply(Reply::Valid)
            }
            (State::Draining(_) | State::Closed(_), Event::Heartbeat) => reply(Reply::Gone),

            (State::Offered, Event::Release) => self.close(Cause::Released, Reply::Released),
            (State::Reading, Event::Release) => {
                self.drain(Cause::Released, now);
                reply(Reply::Draining)
            }
            (State::Draining(_) | State::Closed(_), Event::Release) => reply(Reply::Already),

            (State::Offered | State::Reading | State::Draining(_) | State::Closed(_), Event::Tick) => {
                reply(Reply::None)
            }
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
            State::Closed(_) => None,
        }
    }

    /// A repeated "done" is valid if the first one was: its reader's bytes were checked then.
    fn verdict_of_absent(&self, reader: Reader) -> Reply {
        if self.done.contains(&reader) { Reply::Valid } else { Reply::Gone }
    }

    fn rest(&mut self) {
        if self.reading.is_empty() {
            self.state = State::Offered;
        }
    }

    fn drain(&mut self, cause: Cause, now: Time) {
        self.drain_deadline = now.after(self.terms.drain);
        self.state = State::Draining(cause);
    }

    fn drained(&mut self, cause: Cause, reply: Reply) -> Step {
        if !self.reading.is_empty() {
            return Step { reply, closed: None };
        }
        let fetched = self.done.len() >= self.expected;
        self.close(if fetched { Cause::Fetched } else { cause }, reply)
    }

    fn close(&mut self, cause: Cause, reply: Reply) -> Step {
        self.state = State::Closed(cause);
        Step { reply, closed: Some(cause) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rank;

    const A: Reader = Reader { consumer: 1, rank: Rank(0) };
    const B: Reader = Reader { consumer: 2, rank: Rank(0) };

    fn lease(expected: usize) -> Lease {
        Lease::open(LeaseTerms::default(), expected, Time::ZERO)
    }

    #[test]
    fn an_offered_lease_that_is_released_gives_its_blocks_back_in_the_same_step() {
        let step = lease(1).apply(Event::Release, Time(1));
        assert_eq!(step, Step { reply: Reply::Released, closed: Some(Cause::Released) });
    }

    #[test]
    fn a_release_during_a_read_waits_for_the_reader() {
        let mut lease = lease(1);
        lease.apply(Event::ReadBegun(A), Time(1));
        assert_eq!(lease.apply(Event::Release, Time(2)).closed, None);
        assert_eq!(lease.apply(Event::ReadBegun(B), Time(3)).reply, Reply::Gone);
        let last = lease.apply(Event::ReadDone(A), Time(4));
        assert_eq!(last, Step { reply: Reply::Valid, closed: Some(Cause::Fetched) });
    }

    #[test]
    fn a_repeated_acknowledgement_is_one_reader() {
        let mut lease = lease(2);
        for _ in 0..3 {
            lease.apply(Event::ReadBegun(A), Time(1));
            assert_eq!(lease.apply(Event::ReadDone(A), Time(1)), Step { reply: Reply::Valid, closed: None });
        }
        lease.apply(Event::ReadBegun(B), Time(2));
        assert_eq!(lease.apply(Event::ReadDone(B), Time(2)).closed, Some(Cause::Fetched));
        assert_eq!(
            lease.apply(Event::ReadDone(A), Time(3)).reply,
            Reply::Valid,
            "it was checked when it was live"
        );
    }

    #[test]
    fn a_failed_read_leaves_the_lease_for_another_engine() {
        let mut lease = lease(1);
        lease.apply(Event::ReadBegun(A), Time(1));
        lease.apply(Event::ReadFailed(A), Time(2));
        assert_eq!(lease.state(), State::Offered);
        assert_eq!(lease.apply(Event::ReadDone(A), Time(3)).reply, Reply::Gone);
        lease.apply(Event::ReadBegun(B), Time(4));
        assert_eq!(lease.apply(Event::ReadDone(B), Time(5)).closed, Some(Cause::Fetched));
    }

    #[test]
    fn a_heartbeat_moves_the_expiry_forward_only_and_never_wakes_the_dead() {
        let mut lease = lease(1);
        lease.apply(Event::Heartbeat, Time(1));
        assert_eq!(
            lease.deadline(),
            Some(Time::ZERO.after(KV_LEASE_DURATION)),
            "20 s from now is earlier than 30 s"
        );
        let late = Time::ZERO.after(Duration::from_secs(29));
        lease.apply(Event::Heartbeat, late);
        assert_eq!(lease.deadline(), Some(late.after(Duration::from_secs(20))));
        let after = Time::ZERO.after(Duration::from_secs(49));
        let step = lease.apply(Event::Heartbeat, after);
        assert_eq!(step, Step { reply: Reply::Gone, closed: Some(Cause::Expired) });
    }

    #[test]
    fn a_stuck_reader_cannot_hold_blocks_past_the_drain_deadline() {
        let mut lease = lease(1);
        lease.apply(Event::ReadBegun(A), Time(1));
        let expired = Time::ZERO.after(KV_LEASE_DURATION);
        assert_eq!(lease.apply(Event::Tick, expired).closed, None);
        assert_eq!(lease.state(), State::Draining(Cause::Expired));
        let deadline = expired.after(DRAIN_DEADLINE);
        assert_eq!(lease.apply(Event::Tick, deadline).closed, Some(Cause::Expired));
        assert!(!lease.serves(A));
        assert_eq!(lease.apply(Event::ReadDone(A), deadline).reply, Reply::Gone, "its bytes may be stale");
    }

    /// Every order of six events out of ten kinds (two readers, two clock jumps): a million runs.
    #[test]
    fn blocks_are_released_exactly_once_whatever_the_network_does() {
        let readers = [A, B];
        let mut events =
            vec![(Event::Heartbeat, 1), (Event::Release, 1), (Event::Tick, 6), (Event::Tick, 31)];
        for reader in readers {
            events.push((Event::ReadBegun(reader), 1));
            events.push((Event::ReadDone(reader), 1));
            events.push((Event::ReadFailed(reader), 1));
        }
        let mut runs = 0_u64;
        let mut order = [0_usize; 6];
        loop {
            run(&events, &order);
            runs += 1;
            let Some(digit) = order.iter().position(|&d| d + 1 < events.len()) else {
                break;
            };
            order[digit] += 1;
            order[..digit].fill(0);
        }
        assert_eq!(runs, 1_000_000);
    }

    fn run(events: &[(Event, u64)], order: &[usize]) {
        let mut lease = lease(2);
        let (mut now, mut closings) = (Time::ZERO, 0);
        let mut valid_before_close = BTreeSet::new();
        for &i in order {
            let (event, seconds) = events[i];
            now = now.after(Duration::from_secs(seconds));
            let step = lease.apply(event, now);
            closings += usize::from(step.closed.is_some());
            let over = matches!(lease.state(), State::Closed(_));
            assert_eq!(closings == 1, over, "blocks go back when, and only when, the lease closes");
            if let Event::ReadDone(reader) = event {
                if step.reply == Reply::Valid && (!over || step.closed.is_some()) {
                    valid_before_close.insert(reader);
                }
                let known = valid_before_close.contains(&reader);
                assert_eq!(
                    step.reply == Reply::Valid,
                    known,
                    "valid only for a reader that was checked while live"
                );
            }
            if let (Event::ReadBegun(reader), Reply::Granted) = (event, step.reply) {
                assert!(lease.serves(reader));
            }
        }
        for wait in [31, 6] {
            now = now.after(Duration::from_secs(wait));
            closings += usize::from(lease.apply(Event::Tick, now).closed.is_some());
        }
        assert_eq!(closings, 1, "no lease outlives its expiry and its drain");
    }
}
