//! How a client stalls so that the effect is measurable: its response has to last longer than the stall. A response of
//! the usual length ends within milliseconds and fits into the buffers of the sockets. Its engines have no work left
//! that could be aborted.

use std::time::Duration;

use crate::disconnect::drive::call::CompletedCall;
use crate::disconnect::record::watch::token_capacity::TokenCapacity;

/// The shortest stall that counts.
const HOLD_MIN: Duration = Duration::from_millis(20);
/// The response of a single call lasts this many times the stall. Under load it takes longer.
const OUTLASTS: u32 = 2;
/// The next prompt may have this many tokens more than earlier ones.
const PROMPT_GROWS: u64 = 32;

/// The length of the request of a client that stalls in a phase, and the length of its stall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stall {
    pub(crate) hold: Duration,
    pub(crate) max_tokens: u32,
}

/// The times of calls without load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CallPace {
    /// The time per token of each call.
    tokens: Vec<Duration>,
    /// The longest prompt, tokens.
    pub(crate) prompt_tokens: u64,
}

impl CallPace {
    /// Adds a call that had no concurrent calls.
    pub(crate) fn learn(&mut self, completed: &CompletedCall) {
        let (call, tokens) = (&completed.record, &completed.record.tokens_us);
        self.prompt_tokens =
            self.prompt_tokens.max(completed.call.usage.map_or(0, |usage| u64::from(usage.prompt_tokens)));
        if let (true, [first, .., last]) = (call.stream, tokens.as_slice()) {
            // One event may have several tokens.
            let count = (tokens.len() as u64).max(u64::from(call.generated));
            self.tokens.push(Duration::from_micros((last - first) / (count - 1)));
        }
    }

    /// The median time per token. A client that reads late gets all tokens of a fast response at once.
    fn token(&self) -> Option<Duration> {
        let mut tokens = self.tokens.clone();
        tokens.sort_unstable();
        tokens.get(tokens.len() / 2).copied()
    }
}

#[cfg(test)]
impl CallPace {
    pub(crate) fn of_tokens(token: Duration, prompt_tokens: u64) -> Self {
        Self { tokens: vec![token], prompt_tokens }
    }
}

impl Stall {
    /// The usual response length and stall time.
    pub(crate) fn usual(max_tokens: u32, hold: Duration) -> Self {
        Self { hold, max_tokens }
    }

    /// A stall with a response that outlasts it, if there is room. With less room the stall is shorter. `at_once` such
    /// clients use at most half of each pool.
    pub(crate) fn of(self, pace: &CallPace, capacity: TokenCapacity, at_once: usize) -> Self {
        let (Some(token), Some(context)) = (pace.token(), capacity.context) else { return self };
        let usual = self.max_tokens;
        let prompt = pace.prompt_tokens + PROMPT_GROWS;
        let of_pool = capacity.pool.map_or(u64::MAX, |pool| pool / 2 / at_once.max(1) as u64);
        let most = u32::try_from(context.min(of_pool).saturating_sub(prompt)).unwrap_or(u32::MAX);
        let token = token.max(Duration::from_micros(1));
        let tokens = |time: Duration| (time.as_secs_f64() / token.as_secs_f64()).ceil() as u32;
        let wanted = usual.saturating_add(tokens(self.hold * OUTLASTS));
        let max_tokens = wanted.min(most);
        // The time that remains after the usual number of tokens.
        let hold = self.hold.min(token * max_tokens.saturating_sub(usual) / OUTLASTS);
        if max_tokens <= usual || hold < HOLD_MIN.min(self.hold) { self } else { Self { hold, max_tokens } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn an_answer_outlasts_its_stall_as_far_as_there_is_room() {
        let usual = Stall::usual(48, ms(500));
        let pace = |us| CallPace { tokens: vec![Duration::from_micros(us)], prompt_tokens: 168 };
        let capacity = |context, pool| TokenCapacity { context: Some(context), pool };
        // 5 ms per token: a second is 200 tokens.
        assert_eq!(
            usual.of(&pace(5_000), capacity(32_768, None), 10),
            Stall { hold: ms(500), max_tokens: 248 }
        );
        // A longer stall shows a client that never reads again.
        assert_eq!(
            Stall::usual(48, ms(20_000)).of(&pace(5_000), capacity(32_768, None), 10),
            Stall { hold: ms(20_000), max_tokens: 8_048 }
        );
        // 1,848 tokens fit beside the prompt: 1,800 beyond the usual ones, at 200 µs, are 360 ms.
        assert_eq!(
            usual.of(&pace(200), capacity(2_048, None), 10),
            Stall { hold: ms(180), max_tokens: 1_848 }
        );
        // One call was read late and one began slowly: the median ignores both.
        let us = [0, 200, 200, 210, 9_000].map(Duration::from_micros);
        let seen = CallPace { tokens: us.to_vec(), prompt_tokens: 168 };
        assert_eq!(usual.of(&seen, capacity(2_048, None), 10), Stall { hold: ms(180), max_tokens: 1_848 });
        // Ten of them use at most half of the pool: 700 tokens each.
        let small = usual.of(&pace(1_000), capacity(2_048, Some(14_000)), 10);
        assert_eq!(small, Stall { hold: ms(226), max_tokens: 500 });
        // No room, or unknown times.
        assert_eq!(usual.of(&pace(200), capacity(256, None), 10), usual);
        assert_eq!(usual.of(&CallPace::default(), capacity(2_048, None), 10), usual);
        assert_eq!(usual.of(&pace(200), TokenCapacity::default(), 10), usual);
        for (us, context, pool) in [(0, 2_048, 0), (1, u64::MAX, u64::MAX), (60_000_000, 100_000, 1 << 40)] {
            let stall = usual.of(&pace(us), capacity(context, Some(pool)), 0);
            assert!(stall.max_tokens >= 48 && stall.hold <= ms(500), "{stall:?}");
        }
    }
}
