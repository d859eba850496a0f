//! Whether an engine accepts `stream_options.include_usage`, which the router adds where the client does not ask
//! for it. The value is learnt from replies and valid for a minute, because another version may start at the same
//! address.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::verbs::Support;

/// Time for which a learnt value is valid.
const TTL_MS: u64 = 60_000;

/// The learnt value; 0 at first. The lowest bit is the value, the others are its time.
#[derive(Debug, Default)]
pub(crate) struct UsageOption(AtomicU64);

impl UsageOption {
    /// Whether the engine accepts the option, if known.
    pub(crate) fn is_taken(&self) -> Option<bool> {
        self.is_taken_at(now_ms())
    }

    pub(crate) fn learn(&self, support: Support) {
        self.learn_at(support, now_ms());
    }

    fn is_taken_at(&self, now_ms: u64) -> Option<bool> {
        let learnt = self.0.load(Ordering::Relaxed);
        let is_fresh = learnt > 0 && now_ms.saturating_sub(learnt >> 1) < TTL_MS;
        is_fresh.then_some(learnt & 1 == 1)
    }

    fn learn_at(&self, support: Support, now_ms: u64) {
        let before = self.0.load(Ordering::Relaxed);
        let value = u64::from(support == Support::Present);
        let is_new = before & 1 != value || now_ms.saturating_sub(before >> 1) > TTL_MS / 2;
        // Each stream confirms the value. Most of them write nothing, so that the cache line stays shared.
        if before == 0 || is_new {
            self.0.store(now_ms << 1 | value, Ordering::Relaxed);
        }
    }
}

/// Milliseconds of the process's clock; never 0.
fn now_ms() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX >> 1) + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn learned_usage_support_expires_after_a_minute_unless_confirmed() {
        let option = UsageOption::default();
        assert_eq!(option.is_taken_at(1), None);
        option.learn_at(Support::Missing, 1);
        assert_eq!((option.is_taken_at(60_000), option.is_taken_at(60_001)), (Some(false), None));
        option.learn_at(Support::Present, 60_001);
        (60_001..160_000).step_by(100).for_each(|now| option.learn_at(Support::Present, now));
        assert_eq!(option.is_taken_at(170_000), Some(true));
        option.learn_at(Support::Missing, 170_000);
        assert_eq!(option.is_taken_at(170_000), Some(false), "the last word counts");
    }
}
