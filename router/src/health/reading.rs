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
//! restarts or falls silent either: in a full fleet whoever has no bound gets everything. One that is seen to run more has
//! more, and each time in a row by twice as much as the time before, until as many wait again. One that was never seen
//! waiting has the room that others of its leg have on average, once most of them are known; until then it has no bound, so
//! that no cold start waits for anything.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::EngineLoad;
use crate::metrics::Leg;

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
    /// Those in which it may be full.
    legs: [bool; 2],
}

/// How a reading is understood.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// Per leg: requests waiting from which on the engine is full, so that what it runs is its room.
    pub full_from: [Option<u32>; 2],
    /// Requests of everybody for each of this router's.
    pub each: f32,
    /// Room that others have.
    pub others: Option<u32>,
}

/// How many requests an engine runs at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Room {
    requests: u32,
    /// What it is given more once it is seen to run more.
    step: u32,
}

impl Reading {
    pub(super) fn new(said: EngineLoad, ours: u32, terms: &Terms, before: Option<&Self>) -> Self {
        let full_from = terms.full_from.into_iter().flatten().min();
        let legs = terms.full_from.map(|from| from.is_some());
        let known = before.and_then(|before| before.room);
        let room = full_from.and_then(|step| {
            if said.waiting >= step {
                return Some(Room { requests: said.running, step });
            }
            // What others have is not known of this one before it is seen to have more.
            let others = terms.others.filter(|others| said.running > *others);
            known.or(others.map(|requests| Room { requests, step })).map(|room| room.seen(said.running))
        });
        Self { said, ours, each: terms.each, room, legs }
    }

    /// Requests of everybody there, while `ours` are this router's.
    pub(crate) fn believed(&self, ours: u32) -> u32 {
        let since = (f64::from(ours) - f64::from(self.ours)) * f64::from(self.each);
        // Whatever was said and has ended since, ours are there.
        ours.max((f64::from(self.said.all()) + since.round()) as u32)
    }

    /// Requests that it runs at once, as far as it has told.
    pub(super) fn room(&self) -> Option<u32> {
        self.room.map(|room| room.requests)
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

/// What the last readings of all engines say together: which part of all requests is this router's, and how much room an
/// engine has.
#[derive(Debug)]
pub(crate) struct Share {
    said: AtomicU64,
    ours: AtomicU64,
    /// An `f32`, for those who only want to know this.
    each: AtomicU32,
    rooms: [Rooms; 2],
}

/// Engines of one leg.
#[derive(Debug)]
struct Rooms {
    engines: AtomicU64,
    known: AtomicU64,
    room: AtomicU64,
    /// The mean of what is known, for those who only want to know this; [`u32::MAX`]: of too few.
    mean: AtomicU32,
}

impl Default for Share {
    fn default() -> Self {
        let sum = || AtomicU64::new(0);
        let rooms = || Rooms { engines: sum(), known: sum(), room: sum(), mean: AtomicU32::new(u32::MAX) };
        let each = AtomicU32::new(1.0_f32.to_bits());
        Self { said: sum(), ours: sum(), each, rooms: [rooms(), rooms()] }
    }
}

/// Changes a sum by what one engine's part of it was and is.
fn swap(sum: &AtomicU64, before: u64, after: u64) -> u64 {
    let change = after.wrapping_sub(before);
    sum.fetch_add(change, Ordering::Relaxed).wrapping_add(change)
}

impl Rooms {
    /// How many engines, how many whose room is known, and that.
    fn parts(reading: Option<&Reading>, leg: usize) -> [u64; 3] {
        let Some(reading) = reading.filter(|reading| reading.legs[leg]) else { return [0; 3] };
        [1, u64::from(reading.room.is_some()), u64::from(reading.room().unwrap_or(0))]
    }

    fn replace(&self, before: [u64; 3], after: [u64; 3]) {
        let engines = swap(&self.engines, before[0], after[0]);
        let known = swap(&self.known, before[1], after[1]);
        let room = swap(&self.room, before[2], after[2]);
        let mean = if known.saturating_mul(2) > engines { room.checked_div(known) } else { None };
        let mean = mean.and_then(|mean| u32::try_from(mean).ok());
        self.mean.store(mean.unwrap_or(u32::MAX), Ordering::Relaxed);
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

    /// Room of an engine of this leg, as most of them have told.
    pub(super) fn room(&self, leg: Leg) -> Option<u32> {
        let mean = self.rooms[leg as usize].mean.load(Ordering::Relaxed);
        (mean != u32::MAX).then_some(mean)
    }

    /// One engine's reading takes the place of another.
    pub(super) fn replace(&self, before: Option<&Reading>, after: Option<&Reading>) {
        let parts = |reading: Option<&Reading>| {
            reading.map_or((0, 0), |reading| (u64::from(reading.said.all()), u64::from(reading.ours)))
        };
        let ((said_before, ours_before), (said, ours)) = (parts(before), parts(after));
        let (said, ours) = (swap(&self.said, said_before, said), swap(&self.ours, ours_before, ours));
        let each = (said as f32 / ours.max(1) as f32).clamp(1.0, EACH_MAX);
        self.each.store(each.to_bits(), Ordering::Relaxed);
        for (leg, rooms) in self.rooms.iter().enumerate() {
            rooms.replace(Rooms::parts(before, leg), Rooms::parts(after, leg));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(running: u32, waiting: u32) -> EngineLoad {
        EngineLoad { running, waiting, kv_usage: 0.0, at: Instant::now() }
    }

    fn terms(each: f32) -> Terms {
        Terms { full_from: [None, Some(2)], each, others: None }
    }

    /// Requests that an engine with known room is given on a reading that says `running` and `waiting`, of which `ours` are
    /// this router's, until two wait there.
    fn given(before: &Reading, (running, waiting): (u32, u32), ours: u32, each: f32) -> (u32, Reading) {
        let reading = Reading::new(said(running, waiting), ours, &terms(each), Some(before));
        let room = reading.room().expect("it is known");
        let more = (0..1_000).find(|more| reading.believed(ours + more) >= room + 2);
        (more.expect("it has a bound"), reading)
    }

    #[test]
    fn what_an_engine_runs_while_too_many_wait_is_its_room_and_what_is_free_of_it_is_given_and_no_more() {
        let first = Reading::new(said(400, 1), 400, &terms(1.0), None);
        assert_eq!(first.room(), None, "one may wait");
        // 150 run and 30 wait: nothing until 29 of them have ended.
        let (none, full) = given(&first, (150, 30), 180, 1.0);
        assert_eq!((none, full.room(), full.believed(151)), (0, Some(150), 151));
        let (more, next) = given(&full, (140, 0), 140, 1.0);
        assert_eq!((more, next.believed(145)), (12, 145));
    }

    #[test]
    fn what_one_router_sends_the_others_are_taken_to_send_too() {
        let full = Reading::new(said(100, 20), 30, &terms(4.0), None);
        // 20 are free and 2 may wait: six of ours, and with them the others' 18.
        let (more, reading) = given(&full, (80, 0), 20, 4.0);
        assert_eq!((more, reading.believed(23), reading.believed(15)), (6, 92, 60));
        // Nothing is less than ours, and nothing less than nothing.
        assert_eq!((reading.believed(0), reading.believed(500)), (0, 2_000));
        let own = Reading::new(said(3, 0), 9, &terms(1.0), None);
        assert_eq!((own.believed(9), own.believed(10)), (9, 10));
    }

    #[test]
    fn room_that_turns_out_to_be_larger_is_found_in_ever_larger_steps_and_smaller_at_once() {
        // Two waited for a moment, in an engine that could run 300.
        let mut reading = Reading::new(said(3, 2), 5, &terms(1.0), None);
        let (mut running, mut readings) = (3, 0);
        while running < 300 {
            let (more, next) = given(&reading, (running, 0), running, 1.0);
            assert!(more > 0, "{running}: it would stay as it is for ever");
            (running, reading, readings) = (running + more, next, readings + 1);
        }
        assert!(readings < 12, "{readings}");
        // As much as was known is no reason for more.
        let (_, full) = given(&reading, (100, 2), 102, 1.0);
        assert_eq!(given(&full, (100, 1), 101, 1.0).0, 1);
        assert_eq!(given(&full, (100, 0), 100, 1.0).0, 2);
    }

    #[test]
    fn the_share_of_a_router_is_that_of_all_engines_which_were_asked_and_are_still_there() {
        let share = Share::default();
        assert_eq!((share.each(), share.believed(7)), (1.0, 7));
        let reading = |all, ours| Reading::new(said(all, 0), ours, &terms(1.0), None);
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

    #[test]
    fn an_engine_that_was_never_seen_waiting_is_taken_to_be_like_most_of_its_leg() {
        let share = Share::default();
        let full = |running| Reading::new(said(running, 5), 0, &terms(1.0), None);
        let (small, large) = (full(100), full(140));
        let free = Reading::new(said(60, 0), 0, &terms(1.0), None);
        for reading in [&free, &free, &small] {
            share.replace(None, Some(reading));
        }
        assert_eq!(share.room(Leg::Decode), None, "one of three");
        share.replace(Some(&free), Some(&large));
        assert_eq!((share.room(Leg::Decode), share.room(Leg::Prefill)), (Some(120), None));
        let others = Terms { others: Some(120), ..terms(1.0) };
        let like = |running| Reading::new(said(running, 0), 0, &others, Some(&free));
        assert_eq!((like(120).room(), like(121).room()), (None, Some(123)), "it may have more");
        share.replace(Some(&large), None);
        assert_eq!(share.room(Leg::Decode), None);
    }
}
