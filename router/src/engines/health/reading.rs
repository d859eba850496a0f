//! What is believed of an engine's load between two readings: what it said last, and what this router has sent there
//! since, less what has ended.
//!
//! Without what was sent since, whoever said least would get every request until it speaks again. An engine in which somebody
//! waits runs as many as it can, so that what is sent since waits there, too. Nothing is kept from one reading to the next:
//! what is wrong is wrong for so long.

use std::time::{Duration, Instant};

use super::EngineLoad;

/// The last reading of an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Reading {
    pub said: EngineLoad,
    /// Requests of this router there when it was made.
    ours: u32,
}

impl Reading {
    /// `ours` were there when it was asked and when it had answered. The lesser counts: taken to be missing in what was said are
    /// those that came meanwhile, and not missing those that ended.
    pub(crate) fn new(said: EngineLoad, ours: [u32; 2]) -> Self {
        Self { said, ours: ours[0].min(ours[1]) }
    }

    /// `said` then, while `ours` are this router's.
    fn since(&self, said: u32, ours: u32) -> u32 {
        said.saturating_add(ours).saturating_sub(self.ours)
    }

    /// Requests of everybody there, while `ours` are this router's.
    pub(crate) fn requests(&self, ours: u32) -> u32 {
        // Whatever was said and has ended since, ours are there.
        ours.max(self.since(self.said.running.saturating_add(self.said.waiting), ours))
    }

    /// How many of them wait.
    pub(crate) fn waiting(&self, ours: u32) -> u32 {
        if self.said.waiting == 0 { 0 } else { self.since(self.said.waiting, ours) }
    }

    /// The same, unless it is too old to say anything.
    pub(super) fn fresh(self, now: Instant, stale: Duration) -> Option<Self> {
        self.said.fresh(now, stale).map(|_| self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(running: u32, waiting: u32, ours: [u32; 2]) -> Reading {
        Reading::new(EngineLoad { running, waiting, kv_usage: 0.0, at: Instant::now() }, ours)
    }

    #[test]
    fn what_was_sent_since_counts_and_what_has_ended_does_not() {
        let one_of_several = reading(90, 10, [40, 40]);
        assert_eq!([40, 45, 35].map(|ours| one_of_several.requests(ours)), [100, 105, 95]);
        assert_eq!([40, 45, 35, 20].map(|ours| one_of_several.waiting(ours)), [10, 15, 5, 0]);
        let nobody_waits = reading(90, 0, [40, 40]);
        assert_eq!((nobody_waits.requests(60), nobody_waits.waiting(60)), (110, 0), "nobody knows its room");
    }

    #[test]
    fn ours_are_there_whatever_was_said_and_no_sum_is_too_large() {
        let restarted = reading(0, 0, [9, 9]);
        assert_eq!([9, 10, 0].map(|ours| restarted.requests(ours)), [9, 10, 0]);
        let nonsense = reading(u32::MAX, u32::MAX, [3, 3]);
        assert_eq!((nonsense.requests(u32::MAX), nonsense.waiting(u32::MAX)), (u32::MAX, u32::MAX - 3));
        assert_eq!(reading(5, 5, [u32::MAX; 2]).requests(0), 0);
    }

    #[test]
    fn what_changed_while_it_answered_is_not_taken_for_room() {
        // Ten when it was asked, eight when it had answered: perhaps all ten are in what it said.
        assert_eq!(reading(10, 0, [10, 8]).requests(8), 10);
        // Perhaps the two that came are not.
        assert_eq!(reading(10, 0, [10, 12]).requests(12), 12);
    }
}
