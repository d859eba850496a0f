//! How slowly a client may read its response. Pure: bytes and times in.
//!
//! Only time counts in which the response waits for the client. Within `timeouts.client_stall_ms` of it the client must
//! take [`BYTES_PER_SECOND`], or have taken everything so far. One byte now and then would hold the request's decode
//! place for ever.

use std::time::Duration;

use tokio::time::Instant;

/// The slowest client: a sixteenth of a bad mobile connection (1 KiB/s), and some tokens per second.
const BYTES_PER_SECOND: u128 = 64;

/// The waits of one response.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientStall {
    bound: Duration,
    /// Earlier waits of this period.
    waited: Duration,
    /// The current wait.
    since: Option<Instant>,
    /// Bytes that the client took after a wait of this period.
    taken: usize,
}

impl ClientStall {
    /// A client may make the response wait for `bound`.
    pub(super) fn new(bound: Duration) -> Self {
        Self { bound, waited: Duration::ZERO, since: None, taken: 0 }
    }

    /// The response waits for the client. Returns when the client has stalled.
    pub(super) fn wait(&mut self, now: Instant) -> Instant {
        *self.since.get_or_insert(now) + self.bound.saturating_sub(self.waited)
    }

    /// Whether the response has waited in this period.
    pub(super) fn has_waited(&self) -> bool {
        self.since.is_some() || !self.waited.is_zero()
    }

    /// The client took bytes. Enough of them begin another period.
    pub(super) fn took(&mut self, bytes: usize, now: Instant) {
        if let Some(since) = self.since.take() {
            self.waited += now.saturating_duration_since(since);
        }
        self.taken = self.taken.saturating_add(bytes);
        if self.taken as u128 >= self.enough() {
            self.restart();
        }
    }

    /// The client took a piece without a wait.
    pub(super) fn restart(&mut self) {
        *self = Self::new(self.bound);
    }

    /// Bytes that a client must take in one period.
    fn enough(&self) -> u128 {
        (self.bound.as_millis() * BYTES_PER_SECOND / 1_000).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: Duration = Duration::from_secs(60);

    /// The seconds after which a client has stalled that takes so many bytes each `every`; `None`: not in an hour.
    fn stalls(bytes: usize, every: Duration) -> Option<u64> {
        let begun = Instant::now();
        let (mut stall, mut now) = (ClientStall::new(BOUND), begun);
        while now < begun + 60 * BOUND {
            let due = stall.wait(now);
            now += every;
            if due <= now {
                return Some((due - begun).as_secs());
            }
            stall.took(bytes, now);
        }
        None
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_must_take_a_minimum_and_a_slow_one_does() {
        let seconds = Duration::from_secs;
        assert_eq!(stalls(1, seconds(59)), Some(60), "a byte now and then");
        assert_eq!(stalls(1, Duration::from_millis(100)), Some(60));
        assert_eq!(stalls(60, seconds(1)), Some(60));
        assert_eq!(stalls(70, seconds(1)), None);
        assert_eq!(stalls(1 << 10, seconds(1)), None, "a bad mobile connection");
        assert_eq!(stalls(50 << 10, seconds(50)), None, "a client that pauses");
        assert_eq!(stalls(0, seconds(70)), Some(60));
    }

    #[tokio::test(start_paused = true)]
    async fn only_waits_count_and_a_client_without_them_begins_again() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut stall = ClientStall::new(BOUND);
        assert_eq!(stall.wait(at(0)), at(60));
        assert_eq!(stall.wait(at(5)), at(60), "the same wait");
        stall.took(1, at(20));
        assert!(stall.has_waited());
        // The engine was silent in between.
        assert_eq!(stall.wait(at(500)), at(540));
        stall.took(1, at(530));
        assert_eq!(stall.wait(at(530)), at(540));
        stall.restart();
        assert!(!stall.has_waited());
        assert_eq!(stall.wait(at(600)), at(660));
    }

    #[tokio::test(start_paused = true)]
    async fn the_minimum_follows_the_bound() {
        let now = Instant::now();
        for (bound, enough) in [(60_000, 3_840), (100, 6), (1, 1)] {
            let mut stall = ClientStall::new(Duration::from_millis(bound));
            stall.wait(now);
            stall.took(enough - 1, now + Duration::from_micros(1));
            assert!(stall.has_waited());
            stall.took(1, now + Duration::from_micros(1));
            assert!(!stall.has_waited(), "{bound}");
        }
    }
}
