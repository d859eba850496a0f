//! When each engine's health is due, the earliest first. One check costs as much as one engine, whatever their
//! number.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use baton_connector::Time;
use tokio::sync::Notify;

/// One entry per engine. An entry is removed when it is due, and when the engine is removed.
#[derive(Debug, Default)]
pub(crate) struct HealthTimers {
    due: Mutex<DueTimes>,
    /// Notified when the earliest time becomes earlier.
    sooner: Notify,
}

#[derive(Debug, Default)]
struct DueTimes {
    in_order: BTreeSet<(Time, u32)>,
    by_engine: HashMap<u32, Time>,
}

impl HealthTimers {
    /// Replaces an engine's time; `None`: no check is due.
    pub(crate) fn set(&self, engine: u32, at: Option<Time>) {
        let mut due = self.due();
        let first = due.in_order.first().copied();
        let before = match at {
            Some(at) => due.by_engine.insert(engine, at),
            None => due.by_engine.remove(&engine),
        };
        if before == at {
            return;
        }
        if let Some(before) = before {
            due.in_order.remove(&(before, engine));
        }
        if let Some(at) = at {
            due.in_order.insert((at, engine));
            if first.is_none_or(|(first, _)| at < first) {
                self.sooner.notify_one();
            }
        }
    }

    /// Removes and returns an engine that is due, the earliest first.
    pub(crate) fn take(&self, now: Time) -> Option<u32> {
        let mut due = self.due();
        let (_, engine) = due.in_order.first().copied().filter(|(at, _)| *at <= now)?;
        due.in_order.pop_first();
        due.by_engine.remove(&engine);
        Some(engine)
    }

    /// The earliest time.
    pub(crate) fn next(&self) -> Option<Time> {
        self.due().in_order.first().map(|(at, _)| *at)
    }

    /// Waits until the earliest time becomes earlier.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(crate) async fn sooner(&self) {
        self.sooner.notified().await;
    }

    fn due(&self) -> MutexGuard<'_, DueTimes> {
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn was_notified(timers: &HealthTimers) -> bool {
        let sooner = std::pin::pin!(timers.sooner());
        sooner.poll(&mut Context::from_waker(Waker::noop())) == Poll::Ready(())
    }

    #[test]
    fn engines_are_taken_in_the_order_of_their_times_and_each_once() {
        let timers = HealthTimers::default();
        for (engine, at) in [(1, 30), (2, 10), (3, 20), (2, 40), (3, 5)] {
            timers.set(engine, Some(Time(at)));
        }
        assert_eq!(timers.next(), Some(Time(5)));
        assert_eq!(timers.take(Time(4)), None);
        assert_eq!([100; 4].map(|now| timers.take(Time(now))), [Some(3), Some(1), Some(2), None]);
        assert_eq!(timers.next(), None);
        timers.set(1, Some(Time(1)));
        timers.set(1, None);
        assert_eq!(timers.take(Time(9)), None, "an engine that is gone wants nothing");
        assert!(timers.due().by_engine.is_empty());
    }

    #[test]
    fn only_an_earlier_time_than_the_first_wakes_the_loop() {
        let timers = HealthTimers::default();
        timers.set(1, Some(Time(100)));
        assert!(was_notified(&timers));
        for engine in 2..1000 {
            timers.set(engine, Some(Time(100 + u64::from(engine))));
        }
        timers.set(1, Some(Time(5000)));
        assert!(!was_notified(&timers), "checks that are put off wake nothing");
        timers.set(500, Some(Time(1)));
        assert!(was_notified(&timers));
    }
}
