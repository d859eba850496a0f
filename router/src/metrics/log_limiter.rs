//! Trouble that repeats is told seldom: an engine that is down fails every request, and a line for each would bury
//! what matters and cost more than the failures.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// One kind of trouble is told this often.
const PAUSE: Duration = Duration::from_secs(10);

/// Never told.
const NEVER: u64 = u64::MAX;

/// One kind of trouble, of one engine or of the router.
#[derive(Debug)]
pub(crate) struct Seldom {
    /// Milliseconds of the process's clock.
    told_ms: AtomicU64,
    held_back: AtomicU64,
}

impl Default for Seldom {
    fn default() -> Self {
        Self::new()
    }
}

impl Seldom {
    pub(crate) const fn new() -> Self {
        Self { told_ms: AtomicU64::new(NEVER), held_back: AtomicU64::new(0) }
    }

    /// Whether it is to be told now; then how often it was not told since the last time.
    pub(crate) fn due(&self) -> Option<u64> {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        self.due_at(u64::try_from(START.elapsed().as_millis()).unwrap_or(NEVER - 1))
    }

    fn due_at(&self, now_ms: u64) -> Option<u64> {
        let told = self.told_ms.load(Ordering::Relaxed);
        let pause_ms = PAUSE.as_millis() as u64;
        let is_due = told == NEVER || now_ms.saturating_sub(told) >= pause_ms;
        // Of several at once one tells it.
        let won = is_due
            && self.told_ms.compare_exchange(told, now_ms, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !won {
            self.held_back.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(self.held_back.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_told_and_then_one_per_pause_with_the_number_of_those_held_back() {
        let trouble = Seldom::new();
        assert_eq!(trouble.due_at(0), Some(0));
        for ms in 1..10_000 {
            assert_eq!(trouble.due_at(ms), None);
        }
        assert_eq!(trouble.due_at(10_000), Some(9_999));
        assert_eq!(trouble.due_at(10_001), None);
        assert_eq!(trouble.due_at(90_000), Some(1));
    }

    #[test]
    fn of_many_at_once_one_tells_it() {
        let trouble = Seldom::new();
        let told: usize = std::thread::scope(|scope| {
            let ask = || scope.spawn(|| (0..1000).filter(|_| trouble.due_at(5).is_some()).count());
            let threads: Vec<_> = (0..4).map(|_| ask()).collect();
            threads.into_iter().map(|thread| thread.join().expect("it ends")).sum()
        });
        assert_eq!((told, trouble.due_at(60_000)), (1, Some(3_999)));
    }
}
