//! How a client stalls so that it can be measured: what it asks for has to outlast its stall. An answer of the usual length
//! is over within milliseconds, and waits in the sockets' buffers; its engines have nothing left of which they could be told.

use std::time::Duration;

use crate::disconnect::drive::clients::Made;
use crate::disconnect::record::watch::room::Room;

/// A shorter stall is none.
const HOLD_MIN: Duration = Duration::from_millis(20);
/// The answer goes on for so many times the stall, as a call alone has it: in company it takes longer.
const OUTLASTS: u32 = 2;
/// The next prompt may have so many tokens more than those before it.
const PROMPT_GROWS: u64 = 32;

/// What a client that stalls in a phase asks for, and for how long it stalls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stall {
    pub(crate) hold: Duration,
    pub(crate) max_tokens: u32,
}

/// What calls alone have taught.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pace {
    /// From one token to the next, of each call.
    tokens: Vec<Duration>,
    /// The longest prompt.
    pub(crate) prompt_tokens: u64,
}

impl Pace {
    /// Learns from a call that nobody had company in.
    pub(crate) fn learn(&mut self, made: &Made) {
        let (call, tokens) = (&made.record, &made.record.tokens_us);
        self.prompt_tokens =
            self.prompt_tokens.max(made.call.usage.map_or(0, |usage| u64::from(usage.prompt_tokens)));
        if let (true, [first, .., last]) = (call.stream, tokens.as_slice()) {
            // One event may bring several.
            let count = (tokens.len() as u64).max(u64::from(call.generated));
            self.tokens.push(Duration::from_micros((last - first) / (count - 1)));
        }
    }

    /// From one token to the next. The median: a client that was late to read has all tokens of a quick answer at once.
    fn token(&self) -> Option<Duration> {
        let mut tokens = self.tokens.clone();
        tokens.sort_unstable();
        tokens.get(tokens.len() / 2).copied()
    }
}

#[cfg(test)]
impl Pace {
    pub(crate) fn of_tokens(token: Duration, prompt_tokens: u64) -> Self {
        Self { tokens: vec![token], prompt_tokens }
    }
}

impl Stall {
    /// Where nothing is known: the usual answer, and so long unread.
    pub(crate) fn usual(max_tokens: u32, hold: Duration) -> Self {
        Self { hold, max_tokens }
    }

    /// The usual one, of an answer that outlasts it, if there is room for that, and a shorter one where there is not. `at_once` such
    /// clients leave half of each pool to the others.
    pub(crate) fn of(self, pace: &Pace, room: Room, at_once: usize) -> Self {
        let (Some(token), Some(context)) = (pace.token(), room.context) else { return self };
        let usual = self.max_tokens;
        let prompt = pace.prompt_tokens + PROMPT_GROWS;
        let of_pool = room.pool.map_or(u64::MAX, |pool| pool / 2 / at_once.max(1) as u64);
        let most = u32::try_from(context.min(of_pool).saturating_sub(prompt)).unwrap_or(u32::MAX);
        let token = token.max(Duration::from_micros(1));
        let tokens = |time: Duration| (time.as_secs_f64() / token.as_secs_f64()).ceil() as u32;
        let wanted = usual.saturating_add(tokens(self.hold * OUTLASTS));
        let max_tokens = wanted.min(most);
        // What is left of it when as much as usual has been read.
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
        let pace = |us| Pace { tokens: vec![Duration::from_micros(us)], prompt_tokens: 168 };
        let room = |context, pool| Room { context: Some(context), pool };
        // 5 ms a token: a second is 200 of them.
        assert_eq!(usual.of(&pace(5_000), room(32_768, None), 10), Stall { hold: ms(500), max_tokens: 248 });
        // Whoever wants to see what becomes of one that never reads again waits longer.
        assert_eq!(
            Stall::usual(48, ms(20_000)).of(&pace(5_000), room(32_768, None), 10),
            Stall { hold: ms(20_000), max_tokens: 8_048 }
        );
        // 1,848 tokens fit beside the prompt: 1,800 beyond the usual ones, of 200 µs, are 360 ms.
        assert_eq!(usual.of(&pace(200), room(2_048, None), 10), Stall { hold: ms(180), max_tokens: 1_848 });
        // One of them was read late, and one was slow to begin: it is what most were.
        let us = [0, 200, 200, 210, 9_000].map(Duration::from_micros);
        let seen = Pace { tokens: us.to_vec(), prompt_tokens: 168 };
        assert_eq!(usual.of(&seen, room(2_048, None), 10), Stall { hold: ms(180), max_tokens: 1_848 });
        // Ten of them may have half of the pool: 700 tokens each.
        let small = usual.of(&pace(1_000), room(2_048, Some(14_000)), 10);
        assert_eq!(small, Stall { hold: ms(226), max_tokens: 500 });
        // No room, or nothing known.
        assert_eq!(usual.of(&pace(200), room(256, None), 10), usual);
        assert_eq!(usual.of(&Pace::default(), room(2_048, None), 10), usual);
        assert_eq!(usual.of(&pace(200), Room::default(), 10), usual);
        for (us, context, pool) in [(0, 2_048, 0), (1, u64::MAX, u64::MAX), (60_000_000, 100_000, 1 << 40)] {
            let stall = usual.of(&pace(us), room(context, Some(pool)), 0);
            assert!(stall.max_tokens >= 48 && stall.hold <= ms(500), "{stall:?}");
        }
    }
}
