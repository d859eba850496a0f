//! Limits repeated log lines: an engine that is down fails every request. A line for each failure would hide other
//! lines and cost more than the failures.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Shortest interval between two lines of one limiter.
const PAUSE: Duration = Duration::from_secs(10);

/// No line was logged yet.
const NEVER: u64 = u64::MAX;

/// The limiter for one kind of failure, of one engine or of the router.
#[derive(Debug)]
pub(crate) struct LogLimiter {
    /// Time of the last line, in milliseconds since the process's start.
    last_ms: AtomicU64,
    held_back: AtomicU64,
}

impl Default for LogLimiter {
    fn default() -> Self {
        Self::new()
    }
}

impl LogLimiter {
    pub(crate) const fn new() -> Self {
        Self { last_ms: AtomicU64::new(NEVER), held_back: AtomicU64::new(0) }
    }

    /// Permits a line now or not; if so, returns the number of suppressed lines since the last one.
    pub(crate) fn allow(&self) -> Option<u64> {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        self.allow_at(u64::try_from(START.elapsed().as_millis()).unwrap_or(NEVER - 1))
    }

    fn allow_at(&self, now_ms: u64) -> Option<u64> {
        let last = self.last_ms.load(Ordering::Relaxed);
        let pause_ms = PAUSE.as_millis() as u64;
        let is_due = last == NEVER || now_ms.saturating_sub(last) >= pause_ms;
        // Of several concurrent callers one logs the line.
        let won = is_due
            && self.last_ms.compare_exchange(last, now_ms, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !won {
            self.held_back.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(self.held_back.swap(0, Ordering::Relaxed))
    }
}

/// The limiters of the log lines about one engine: one per event, so that no event hides another.
#[derive(Debug, Default)]
pub(crate) struct EngineLogLimiters {
    pub attempt_failed: LogLimiter,
    pub endpoint_unsupported: LogLimiter,
    pub http2_missing: LogLimiter,
    pub response_undecodable: LogLimiter,
    pub settlement_attempt_failed: LogLimiter,
    pub sockets_exhausted: LogLimiter,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_is_logged_and_then_one_per_pause_with_the_suppressed_count() {
        let limiter = LogLimiter::new();
        assert_eq!(limiter.allow_at(0), Some(0));
        for ms in 1..10_000 {
            assert_eq!(limiter.allow_at(ms), None);
        }
        assert_eq!(limiter.allow_at(10_000), Some(9_999));
        assert_eq!(limiter.allow_at(10_001), None);
        assert_eq!(limiter.allow_at(90_000), Some(1));
    }

    #[test]
    fn one_of_concurrent_calls_logs() {
        let limiter = LogLimiter::new();
        let logged: usize = std::thread::scope(|scope| {
            let count = || scope.spawn(|| (0..1000).filter(|_| limiter.allow_at(5).is_some()).count());
            let threads: Vec<_> = (0..4).map(|_| count()).collect();
            threads.into_iter().map(|thread| thread.join().expect("it ends")).sum()
        });
        assert_eq!((logged, limiter.allow_at(60_000)), (1, Some(3_999)));
    }
}
