//! Requests in flight now, from the events of the engines.

use std::collections::BTreeMap;
use std::time::Duration;

use super::TimelineFeed;
use crate::disconnect::plan::phase::Phase;
use crate::disconnect::record::in_flight::InFlight;
use crate::disconnect::record::raw::ClientTimes;
use crate::disconnect::record::timeline::Timeline;
use crate::load::Streaming;

/// The interval between checks without engine events.
const LOOK_EVERY: Duration = Duration::from_millis(2);

impl TimelineFeed {
    /// Waits until the open requests meet the condition or the time is over, and returns them. `open`: open requests
    /// by tag. `exact`: the engines have event logs.
    pub(crate) async fn until_in_flight(
        &self,
        within: Duration,
        exact: bool,
        open: impl Fn() -> BTreeMap<String, Streaming>,
        is_wanted: impl Fn(&InFlight) -> bool,
    ) -> InFlight {
        let until = tokio::time::Instant::now() + within;
        loop {
            let news = self.news.notified();
            tokio::pin!(news);
            // From here on no event is missed.
            news.as_mut().enable();
            let flight = self.in_flight(&open(), exact);
            if is_wanted(&flight) || tokio::time::Instant::now() >= until {
                return flight;
            }
            let _ = tokio::time::timeout(LOOK_EVERY, news).await;
        }
    }

    fn in_flight(&self, open: &BTreeMap<String, Streaming>, exact: bool) -> InFlight {
        let (state, mut flight) = (self.lock(), InFlight::default());
        for (tag, streaming) in open {
            if !exact {
                flight.add(None);
                continue;
            }
            let phase = match state.timelines.get(tag) {
                // The request has not reached an engine.
                None => Some(Phase::Queued),
                Some(timeline) => phase(timeline, *streaming),
            };
            // Otherwise the request has ended on its engines, and its end is on the way to the client.
            if phase.is_some() {
                flight.add(phase);
            }
        }
        flight
    }
}

/// The phase of a request by all known events. The client counts as having received the tokens of the decode engine.
fn phase(timeline: &Timeline, streaming: Streaming) -> Option<Phase> {
    let stream = streaming != Streaming::Whole;
    let first_token = timeline.legs.iter().filter(|leg| !leg.produces).find_map(|leg| leg.first_token);
    timeline.phase_at(&ClientTimes { stream, first_token, ..ClientTimes::default() }, u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disconnect::record::raw::EventRecord;

    fn tell(feed: &TimelineFeed, tag: &str, engine: usize, kinds: &[&str]) {
        for kind in kinds {
            let leg = (*kind == "queued").then(|| if engine == 0 { "prefill" } else { "decode" }.to_owned());
            let (tag, kind) = (tag.to_owned(), (*kind).to_owned());
            feed.publish(&EventRecord { engine, tag, kind, leg, ..EventRecord::default() });
        }
    }

    #[tokio::test]
    async fn requests_in_flight_are_counted_by_phase_and_awaited() {
        let feed = TimelineFeed::default();
        let streaming = |tag: &str| if tag == "whole" { Streaming::Whole } else { Streaming::Streamed };
        let tags = ["new", "p", "d", "over", "whole"];
        let open = || BTreeMap::from(tags.map(|tag| (tag.to_owned(), streaming(tag))));
        let prefill = ["queued", "started"];
        let lent = [prefill.as_slice(), &["ended", "lent"]].concat();
        let decode = ["queued", "fetching", "fetched", "started", "first_token"];
        tell(&feed, "p", 0, &prefill);
        for tag in ["d", "over", "whole"] {
            tell(&feed, tag, 0, &lent);
            tell(&feed, tag, 1, &decode);
        }
        tell(&feed, "over", 1, &["ended", "freed"]);
        // The request of another client, and one that was cancelled.
        tell(&feed, "gone", 0, &prefill);
        let flight = feed.until_in_flight(Duration::ZERO, true, open, |_| false).await;
        assert_eq!(
            (flight.requests, flight.by_phase().as_str()),
            (4, "1 queued, 1 prefill, 1 mid-stream, 1 unary")
        );
        let flight = feed.until_in_flight(Duration::ZERO, false, open, |_| false).await;
        assert_eq!((flight.requests, flight.by_phase().as_str()), (5, ""));
        // An event of the new request ends the wait.
        let two = |flight: &InFlight| flight.phases.get(&Phase::Prefill) == Some(&2);
        let waiting = feed.until_in_flight(Duration::from_secs(60), true, open, two);
        let (flight, ()) = tokio::join!(waiting, async { tell(&feed, "new", 0, &prefill) });
        assert!(two(&flight), "{flight:?}");
    }
}
