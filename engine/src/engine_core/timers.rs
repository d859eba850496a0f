//! The moments at which a core acts without mail: deadlines of requests, the end of a shutdown, a deadlock.
//!
//! A request may say until when its first token and its whole response must be there. A sequence whose deadline passes
//! ends with [`SeqEvent::TimedOut`], whether it waits, fetches or runs, and its blocks and its lease are released as by
//! an abort. A step is not interrupted: deadlines apply between steps, before the results of the last one.
//!
//! A sequence that cannot be in time is refused when it arrives: the queue has a pace, and a place in it takes as many
//! gaps as there are sequences ahead. It leaves a router time to ask another engine.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use baton_connector::limits::DRAIN_DEADLINE;

use super::{CoreEvent, EngineCore, EngineEnv, QUIET_GRACE, SeqEvent};
use crate::engine_core::messages::{DeadlineKind, Deadlines};
use crate::scheduler::Refusal;
use crate::scheduler::sequence::{FinishReason, NewSequence, Phase, SeqId};

/// The label of a request that is refused because its deadline is out of reach here.
pub(super) const TOO_LATE: &str = "too_late";

/// The label of a request whose deadline had passed when it arrived.
pub(super) const TIMED_OUT: &str = "timed_out";

/// Gaps between two starts before the pace of the queue is known.
const GAPS_MIN: u32 = 8;

/// The newest gap counts as one of so many.
const GAPS_AVERAGED: u64 = 5;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct CoreTimers {
    /// When the engine ends, once it is shutting down.
    pub(super) closing: Option<Instant>,
    /// Since when only leases hold blocks and no sequence can proceed.
    pub(super) stalled_since: Option<Instant>,
    pub(super) deadlines: DeadlineQueue,
    pub(super) pace: QueuePace,
}

/// The deadlines of live sequences.
#[derive(Debug, Default)]
pub(super) struct DeadlineQueue {
    queue: BTreeSet<(Instant, SeqId, DeadlineKind)>,
    of_sequence: HashMap<SeqId, Deadlines>,
}

impl DeadlineQueue {
    pub(super) fn add(&mut self, id: SeqId, deadlines: Deadlines) {
        if deadlines != Deadlines::default() {
            self.queue.extend(deadlines.each().map(|(at, kind)| (at, id, kind)));
            self.of_sequence.insert(id, deadlines);
        }
    }

    /// The sequence has ended.
    pub(super) fn remove(&mut self, id: SeqId) {
        if let Some(deadlines) = self.of_sequence.remove(&id) {
            for (at, kind) in deadlines.each() {
                self.queue.remove(&(at, id, kind));
            }
        }
    }

    /// Takes a deadline that has passed.
    fn take_due(&mut self, now: Instant) -> Option<(SeqId, DeadlineKind)> {
        let (at, id, kind) = *self.queue.first()?;
        (at <= now).then(|| {
            self.queue.remove(&(at, id, kind));
            (id, kind)
        })
    }

    fn next(&self) -> Option<Instant> {
        self.queue.first().map(|(at, _, _)| *at)
    }
}

/// How fast sequences leave a queue in which others wait.
#[derive(Debug, Default)]
pub(super) struct QueuePace {
    gap_us: u64,
    gaps: u32,
    /// The last start while others waited; `None` once the queue is empty.
    last: Option<Instant>,
}

impl QueuePace {
    /// A step was planned: so many sequences have begun, and `others_wait`. The queue may also have become empty by aborts
    /// and deadlines, without a start.
    pub(super) fn planned(&mut self, begun: usize, others_wait: bool, now: Instant) {
        if begun > 0
            && let Some(last) = self.last
        {
            let elapsed = now.saturating_duration_since(last).as_micros() / begun as u128;
            let gap = u64::try_from(elapsed).unwrap_or(u64::MAX / 8).min(u64::MAX / 8);
            for _ in 0..begun.min(GAPS_MIN as usize) {
                let others = self.gap_us.saturating_mul(GAPS_AVERAGED - 1);
                self.gap_us = if self.gaps == 0 { gap } else { others.saturating_add(gap) / GAPS_AVERAGED };
                self.gaps = self.gaps.saturating_add(1);
            }
        }
        // Without waiting sequences the next gap shows nothing of the pace.
        if begun > 0 || !others_wait {
            self.last = others_wait.then_some(now);
        }
    }

    /// The expected wait behind so many sequences; `None` while the pace is unknown. A queue from which no sequence has
    /// begun yet has no pace: the one of an earlier queue may be out of date.
    pub(super) fn expected_wait(&self, ahead: usize) -> Option<Duration> {
        let known = self.last.is_some() && self.gaps >= GAPS_MIN && ahead > 0;
        known.then(|| Duration::from_micros(self.gap_us.saturating_mul(ahead as u64)))
    }
}

impl<S: EngineEnv> EngineCore<S> {
    /// Why a new sequence cannot be in time: its last event, and a label.
    pub(super) fn refuses_late(
        &self,
        sequence: &NewSequence,
        deadlines: Deadlines,
    ) -> Option<(SeqEvent, &'static str)> {
        // The others of a request are accepted with its first.
        let (first, kind) = deadlines.each().min().filter(|_| !sequence.admitted_with_first)?;
        let left = first.saturating_duration_since(self.env.now());
        if left.is_zero() {
            return Some((SeqEvent::TimedOut(kind), TIMED_OUT));
        }
        let ahead = self.scheduler.waiting_ahead(sequence.priority);
        let wait = self.timers.pace.expected_wait(ahead)?;
        (wait > left).then_some((SeqEvent::Refused(Refusal::TooLate { ahead, wait }), TOO_LATE))
    }

    /// Ends the sequences whose deadline has passed.
    pub(super) fn end_late(&mut self) {
        if self.timers.deadlines.next().is_none() {
            return;
        }
        let now = self.env.now();
        while let Some((id, kind)) = self.timers.deadlines.take_due(now) {
            let has_token = self.live.get(&id).is_none_or(|live| live.last_token.is_some());
            if kind == DeadlineKind::FirstToken && has_token {
                continue;
            }
            let Some(sequence) = self.scheduler.sequence(id) else { continue };
            let phase = match sequence.phase {
                Phase::Waiting => "waiting",
                Phase::Fetching | Phase::Loading(_) => "fetching",
                Phase::Running => "running",
            };
            self.env.record(CoreEvent::TimedOut(phase));
            self.end_with(id, FinishReason::Error, SeqEvent::TimedOut(kind));
        }
    }

    /// Measures the pace of the queue after a plan, with which so many sequences begin to compute.
    pub(super) fn measure_pace(&mut self, begun: usize) {
        let others_wait = self.scheduler.has_queue();
        self.timers.pace.planned(begun, others_wait, self.env.now());
    }

    /// The time until which the loop may sleep without mail.
    #[must_use]
    pub fn wake_at(&self) -> Option<Instant> {
        let stuck = self.timers.stalled_since.map(|since| since + DRAIN_DEADLINE);
        let closing = self
            .timers
            .closing
            .map(|deadline| if self.env.now() < deadline { deadline } else { deadline + QUIET_GRACE });
        stuck.into_iter().chain(closing).chain(self.timers.deadlines.next()).min()
    }

    /// Whether the engine is closing, and has no work left or no time left.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        let Some(deadline) = self.timers.closing else { return false };
        let load = self.scheduler.load();
        let settled =
            self.live.is_empty() && load.stopping == 0 && load.offloading == 0 && self.env.live_leases() == 0;
        settled || self.env.now() >= deadline + QUIET_GRACE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_pass_in_order_and_end_with_their_sequence() {
        let now = Instant::now();
        let after = |ms: u64| now + Duration::from_millis(ms);
        let mut queue = DeadlineQueue::default();
        queue.add(SeqId(1), Deadlines { first_token: Some(after(30)), whole: Some(after(50)) });
        queue.add(SeqId(2), Deadlines { first_token: None, whole: Some(after(20)) });
        queue.add(SeqId(3), Deadlines::default());
        queue.add(SeqId(4), Deadlines { first_token: Some(after(10)), whole: None });
        queue.remove(SeqId(4));
        assert_eq!((queue.next(), queue.take_due(after(19))), (Some(after(20)), None));
        assert_eq!(queue.take_due(after(40)), Some((SeqId(2), DeadlineKind::Whole)));
        assert_eq!(queue.take_due(after(40)), Some((SeqId(1), DeadlineKind::FirstToken)));
        assert_eq!(queue.take_due(after(40)), None);
        queue.remove(SeqId(1));
        queue.remove(SeqId(2));
        assert!(queue.queue.is_empty() && queue.of_sequence.is_empty());
    }

    #[test]
    fn the_wait_is_as_many_gaps_as_there_are_sequences_ahead() {
        let (mut pace, start) = (QueuePace::default(), Instant::now());
        let after = |ms: u64| start + Duration::from_millis(ms);
        for at in 0..8 {
            assert_eq!(pace.expected_wait(5), None, "{at} starts have too few gaps between them");
            pace.planned(1, true, after(100 * at));
        }
        pace.planned(1, true, after(800));
        assert_eq!(pace.expected_wait(5), Some(Duration::from_millis(500)));
        assert_eq!(pace.expected_wait(0), None, "the first does not wait");
        // Two at once, after twice the time, have the same pace. An empty queue shows none.
        pace.planned(2, false, after(1_000));
        assert_eq!(pace.expected_wait(5), None, "a new queue may have another pace");
        pace.planned(1, true, after(90_000));
        assert_eq!(pace.expected_wait(5), Some(Duration::from_millis(500)));
    }

    #[test]
    fn a_queue_that_empties_without_a_start_leaves_no_gap() {
        let (mut pace, start) = (QueuePace::default(), Instant::now());
        let after = |ms: u64| start + Duration::from_millis(ms);
        (0..=8).for_each(|at| pace.planned(1, true, after(100 * at)));
        // Steps without a start change nothing while sequences wait.
        pace.planned(0, true, after(850));
        pace.planned(1, true, after(900));
        assert_eq!(pace.expected_wait(5), Some(Duration::from_millis(500)));
        // The three are aborted, and an hour later a queue forms again.
        pace.planned(0, false, after(950));
        assert_eq!(pace.expected_wait(5), None);
        pace.planned(1, true, after(3_600_000));
        assert_eq!(
            pace.expected_wait(5),
            Some(Duration::from_millis(500)),
            "an hour without a queue is no gap"
        );
    }
}
