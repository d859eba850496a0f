//! Estimate of an engine's load between two readings: the last reading, plus the requests that this router has
//! sent since, less those that have ended.
//!
//! Without the requests sent since, the engine with the lowest reported load would receive all requests until its
//! next reading. An engine with waiting requests runs as many as it can, so new requests wait there too. No state
//! is kept from one reading to the next, so an error lasts no longer than a reading.

use std::time::{Duration, Instant};

use super::EngineLoad;

/// The last reading of an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LoadReading {
    pub reported: EngineLoad,
    /// Requests of this router there at the time of the reading.
    own_requests: u32,
}

impl LoadReading {
    /// `own_requests`: this router's requests there when the query was sent, and when the reply arrived. The
    /// minimum counts: the reading may lack requests that came meanwhile, and may contain those that ended.
    pub(crate) fn new(reported: EngineLoad, own_requests: [u32; 2]) -> Self {
        Self { reported, own_requests: own_requests[0].min(own_requests[1]) }
    }

    /// The estimate for a `reported` number while this router has `own_requests` there.
    fn since(&self, reported: u32, own_requests: u32) -> u32 {
        reported.saturating_add(own_requests).saturating_sub(self.own_requests)
    }

    /// Requests of all sources there, while this router has `own_requests` there.
    pub(crate) fn requests(&self, own_requests: u32) -> u32 {
        // This router's requests are there in any case, whatever the reading and the ends since.
        own_requests
            .max(self.since(self.reported.running.saturating_add(self.reported.waiting), own_requests))
    }

    /// The number of waiting requests.
    pub(crate) fn waiting(&self, own_requests: u32) -> u32 {
        if self.reported.waiting == 0 { 0 } else { self.since(self.reported.waiting, own_requests) }
    }

    /// The reading, unless it is stale.
    pub(super) fn fresh(self, now: Instant, stale: Duration) -> Option<Self> {
        self.reported.fresh(now, stale).map(|_| self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(running: u32, waiting: u32, own_requests: [u32; 2]) -> LoadReading {
        LoadReading::new(EngineLoad { running, waiting, kv_usage: 0.0, at: Instant::now() }, own_requests)
    }

    #[test]
    fn load_counts_requests_sent_since_the_reading_without_ended_ones() {
        let one_of_several = reading(90, 10, [40, 40]);
        assert_eq!([40, 45, 35].map(|own_requests| one_of_several.requests(own_requests)), [100, 105, 95]);
        assert_eq!([40, 45, 35, 20].map(|own_requests| one_of_several.waiting(own_requests)), [10, 15, 5, 0]);
        let empty_queue = reading(90, 0, [40, 40]);
        assert_eq!((empty_queue.requests(60), empty_queue.waiting(60)), (110, 0), "its capacity is unknown");
    }

    #[test]
    fn own_requests_always_count_and_sums_saturate() {
        let restarted = reading(0, 0, [9, 9]);
        assert_eq!([9, 10, 0].map(|own_requests| restarted.requests(own_requests)), [9, 10, 0]);
        let nonsense = reading(u32::MAX, u32::MAX, [3, 3]);
        assert_eq!((nonsense.requests(u32::MAX), nonsense.waiting(u32::MAX)), (u32::MAX, u32::MAX - 3));
        assert_eq!(reading(5, 5, [u32::MAX; 2]).requests(0), 0);
    }

    #[test]
    fn changes_during_a_query_do_not_count_as_free_capacity() {
        // Ten at the query and eight at the reply: all ten may be in the reading.
        assert_eq!(reading(10, 0, [10, 8]).requests(8), 10);
        // The two that came may not be in it.
        assert_eq!(reading(10, 0, [10, 12]).requests(12), 12);
    }
}
