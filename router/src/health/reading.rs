//! What is believed of an engine's load between two readings: what it said last, and what this router has sent there
//! since.
//!
//! ```text
//! believed = said + (ours now − ours when it was asked) × requests of everybody for each of ours
//! full     = believed ≥ its room + max_waiting
//! ```
//!
//! Without what was sent since, whoever said least would get every request until it speaks again. Without the factor it
//! would get them from each of several routers, none of which hears of the others' before that: routers behind one
//! balancer do alike, so what this one sends the others are taken to send, too, each its part.
//!
//! Room is what an engine said that it runs while `max_waiting` waited. It is never forgotten, not when the engine
//! restarts either (whoever had one backlog too many would have the next): one that is seen to run more has more, and
//! each time in a row by twice as much as the time before, until there are as many waiting again.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::EngineLoad;

/// Requests of everybody for each of this router's, at most: beyond as many routers, several may send at once what one
/// could have. A router that has hardly any may still send one at a time.
const EACH_MAX: f32 = 16.0;

/// The last reading of an engine, and what goes with it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Reading {
    pub said: EngineLoad,
    /// Requests of this router there when it was asked.
    ours: u32,
    /// Requests of everybody at all engines for each of this router's.
    each: f32,
    /// None as long as nobody was seen waiting.
    room: Option<Room>,
}

/// How many requests an engine runs at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Room {
    requests: u32,
    /// What it is given more once it is seen to run more.
    step: u32,
}

impl Reading {
    /// `full_from`: requests waiting from which on the engine is full, so that what it runs is its room.
    pub(super) fn new(
        said: EngineLoad,
        ours: u32,
        each: f32,
        full_from: u32,
        before: Option<&Self>,
    ) -> Self {
        let known = before.and_then(|before| before.room);
        let room = if said.waiting >= full_from {
            Some(Room { requests: said.running, step: full_from })
        } else {
            known.map(|room| room.seen(said.running))
        };
        Self { said, ours, each, room }
    }

    /// Requests of everybody there, while `ours` are this router's.
    pub(crate) fn believed(&self, ours: u32) -> u32 {
        let since = (f64::from(ours) - f64::from(self.ours)) * f64::from(self.each);
        // Whatever was said and has ended since, ours are there.
        ours.max((f64::from(self.said.all()) + since.round()) as u32)
    }

    /// Whether `max_waiting` would wait there, while `ours` are this router's.
    pub(crate) fn is_full(&self, ours: u32, max_waiting: u32) -> bool {
        self.room.is_some_and(|room| self.believed(ours) >= room.requests.saturating_add(max_waiting))
    }

    /// The same, unless it is too old to say anything.
    pub(super) fn fresh(self, now: Instant, stale: Duration) -> Option<Self> {
        self.said.fresh(now, stale).map(|_| self)
    }
}

impl Room {
    /// So many run, and not too many wait.
    fn seen(self, running: u32) -> Self {
        if running <= self.requests {
            return self;
        }
        Self { requests: running.saturating_add(self.step), step: self.step.saturating_mul(2) }
    }
}

/// Which part of all requests at all engines is this router's, as the last reading of each says.
#[derive(Debug)]
pub(crate) struct Share {
    said: AtomicU64,
    ours: AtomicU64,
    /// An `f32`, for those who only want to know this.
    each: AtomicU32,
}

impl Default for Share {
    fn default() -> Self {
        Self { said: AtomicU64::new(0), ours: AtomicU64::new(0), each: AtomicU32::new(1.0_f32.to_bits()) }
    }
}

impl Share {
    /// Requests of everybody for each of this router's; 1 where no engine is asked.
    pub(super) fn each(&self) -> f32 {
        f32::from_bits(self.each.load(Ordering::Relaxed))
    }

    /// Requests of everybody where `ours` are this router's and nothing was said.
    pub(super) fn believed(&self, ours: u32) -> u32 {
        (ours as f32 * self.each()).round() as u32
    }

    /// One engine's reading takes the place of another.
    pub(super) fn replace(&self, before: Option<&Reading>, after: Option<&Reading>) {
        let parts = |reading: Option<&Reading>| {
            reading.map_or((0, 0), |reading| (u64::from(reading.said.all()), u64::from(reading.ours)))
        };
        let ((said_before, ours_before), (said, ours)) = (parts(before), parts(after));
        let swap = |sum: &AtomicU64, before: u64, after: u64| {
            let change = after.wrapping_sub(before);
            sum.fetch_add(change, Ordering::Relaxed).wrapping_add(change)
        };
        let (said, ours) = (swap(&self.said, said_before, said), swap(&self.ours, ours_before, ours));
        let each = (said as f32 / ours.max(1) as f32).clamp(1.0, EACH_MAX);
        self.each.store(each.to_bits(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(running: u32, waiting: u32) -> EngineLoad {
        EngineLoad { running, waiting, kv_usage: 0.0, at: Instant::now() }
    }

    /// Requests that an engine is given on a reading that says `running` and `waiting`, of which `ours` are this router's,
    /// until it is full; with `max_waiting` 2.
    fn given(before: Option<&Reading>, (running, waiting): (u32, u32), ours: u32, each: f32) -> (u32, Reading) {
        let reading = Reading::new(said(running, waiting), ours, each, 2, before);
        let more = (0..1_000).find(|more| reading.is_full(ours + more, 2));
        (more.unwrap_or(u32::MAX), reading)
    }

    #[test]
    fn an_engine_that_was_never_seen_waiting_is_never_full_and_one_that_was_until_it_has_run_some_of_it() {
        let (unbounded, first) = given(None, (400, 1), 400, 1.0);
        assert_eq!(unbounded, u32::MAX);
        // 150 run and 30 wait: full until 28 of them have ended, whatever the next reading says.
        let (none, full) = given(Some(&first), (150, 30), 180, 1.0);
        assert_eq!((none, full.believed(180)), (0, 180));
        assert!(full.is_full(152, 2) && !full.is_full(151, 2));
        // What is free is given, and no more than that: the next reading is not waited for.
        let (more, next) = given(Some(&full), (140, 0), 140, 1.0);
        assert_eq!((more, next.believed(145)), (12, 145));
    }

    #[test]
    fn what_one_router_sends_the_others_are_taken_to_send_too() {
        let (_, full) = given(None, (100, 20), 30, 4.0);
        // 20 are free and 2 may wait: six of ours, and with them the others' 18.
        let (more, reading) = given(Some(&full), (80, 0), 20, 4.0);
        assert_eq!((more, reading.believed(23), reading.believed(15)), (6, 92, 60));
        // Nothing is less than ours, and nothing less than nothing.
        assert_eq!((reading.believed(0), reading.believed(500)), (0, 2_000));
        let own = Reading::new(said(3, 0), 9, 1.0, 2, None);
        assert_eq!((own.believed(9), own.believed(10)), (9, 10));
    }

    #[test]
    fn room_that_turns_out_to_be_larger_is_found_in_ever_larger_steps_and_smaller_at_once() {
        // Two waited for a moment, in an engine that could run 300.
        let (_, mut reading) = given(None, (3, 2), 5, 1.0);
        let (mut running, mut readings) = (3, 0);
        while running < 300 {
            let (more, next) = given(Some(&reading), (running, 0), running, 1.0);
            assert!(more > 0, "{running}: it would stay as it is for ever");
            (running, reading, readings) = (running + more, next, readings + 1);
        }
        assert!(readings < 12, "{readings}");
        // As much as was known is no reason for more.
        let (_, full) = given(Some(&reading), (100, 2), 102, 1.0);
        assert_eq!(given(Some(&full), (100, 1), 101, 1.0).0, 1);
        assert_eq!(given(Some(&full), (100, 0), 100, 1.0).0, 2);
    }

    #[test]
    fn the_share_of_a_router_is_that_of_all_engines_which_were_asked_and_are_still_there() {
        let share = Share::default();
        assert_eq!((share.each(), share.believed(7)), (1.0, 7));
        let reading = |all, ours| Reading::new(said(all, 0), ours, 1.0, 2, None);
        let (first, second, third) = (reading(60, 10), reading(30, 20), reading(0, 0));
        share.replace(None, Some(&first));
        assert_eq!(share.each(), 6.0);
        share.replace(None, Some(&second));
        assert_eq!((share.each(), share.believed(7)), (3.0, 21));
        share.replace(Some(&first), Some(&third));
        assert_eq!(share.each(), 1.5);
        share.replace(Some(&second), None);
        assert_eq!(share.each(), 1.0);
        // One that has nothing, and one that has more than what was said has come to yet.
        share.replace(None, Some(&reading(500, 0)));
        assert_eq!(share.each(), EACH_MAX);
        share.replace(None, Some(&reading(0, 900)));
        assert_eq!(share.each(), 1.0);
    }
}
