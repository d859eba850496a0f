//! What is in flight now, as far as engines have told it.

use std::time::Duration;

use super::Feed;
use crate::disconnect::plan::phase::Phase;
use crate::disconnect::record::flight::InFlight;
use crate::disconnect::record::timeline::{Seen, Timeline};

/// Between two looks where no engine tells anything.
const LOOK_EVERY: Duration = Duration::from_millis(2);

impl Feed {
    /// Waits until what is in flight of the open requests is what is wanted, at most so long, and says what is in flight
    /// then. `open`: each with its tag, and whether it streams; `exact`: engines tell where they are.
    pub(crate) async fn until_in_flight(
        &self,
        within: Duration,
        exact: bool,
        open: impl Fn() -> Vec<(String, bool)>,
        is_wanted: impl Fn(&InFlight) -> bool,
    ) -> InFlight {
        let until = tokio::time::Instant::now() + within;
        loop {
            let news = self.news.notified();
            tokio::pin!(news);
            // From here on an event that comes is not missed.
            news.as_mut().enable();
            let flight = self.in_flight(&open(), exact);
            if is_wanted(&flight) || tokio::time::Instant::now() >= until {
                return flight;
            }
            let _ = tokio::time::timeout(LOOK_EVERY, news).await;
        }
    }

    fn in_flight(&self, open: &[(String, bool)], exact: bool) -> InFlight {
        let (state, mut flight) = (self.lock(), InFlight::default());
        for (tag, stream) in open {
            if !exact {
                flight.add(None);
                continue;
            }
            let phase = match state.timelines.get(tag) {
                // On its way.
                None => Some(Phase::Queued),
                Some(timeline) => phase(timeline, *stream),
            };
            // Otherwise it is over on the engines, and its end is on its way to its client.
            if phase.is_some() {
                flight.add(phase);
            }
        }
        flight
    }
}

/// Where a request is by everything that is known of it. Its client is taken to have what the decode engine has said.
fn phase(timeline: &Timeline, stream: bool) -> Option<Phase> {
    let first_token = timeline.legs.iter().filter(|leg| !leg.lends).find_map(|leg| leg.first_token);
    timeline.phase_at(&Seen { stream, first_token, ..Seen::default() }, u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disconnect::record::raw::EventRecord;

    fn tell(feed: &Feed, tag: &str, engine: usize, kinds: &[&str]) {
        for kind in kinds {
            let leg = (*kind == "queued").then(|| if engine == 0 { "prefill" } else { "decode" }.to_owned());
            let (tag, kind) = (tag.to_owned(), (*kind).to_owned());
            feed.take(&EventRecord { engine, tag, kind, leg, ..EventRecord::default() });
        }
    }

    #[tokio::test]
    async fn what_is_in_flight_is_known_by_phase_and_waited_for() {
        let feed = Feed::default();
        let open = || ["new", "p", "d", "over", "whole"].map(|tag| (tag.to_owned(), tag != "whole")).to_vec();
        let prefill = ["queued", "started"];
        let lent = [prefill.as_slice(), &["ended", "lent"]].concat();
        let decode = ["queued", "fetching", "fetched", "started", "first_token"];
        tell(&feed, "p", 0, &prefill);
        for tag in ["d", "over", "whole"] {
            tell(&feed, tag, 0, &lent);
            tell(&feed, tag, 1, &decode);
        }
        tell(&feed, "over", 1, &["ended", "freed"]);
        // Somebody else's, and one whose client has gone.
        tell(&feed, "gone", 0, &prefill);
        let flight = feed.until_in_flight(Duration::ZERO, true, open, |_| false).await;
        assert_eq!(
            (flight.requests, flight.by_phase().as_str()),
            (4, "1 queued, 1 prefill, 1 mid-stream, 1 unary")
        );
        let flight = feed.until_in_flight(Duration::ZERO, false, open, |_| false).await;
        assert_eq!((flight.requests, flight.by_phase().as_str()), (5, ""));
        // An event of the one that has just been sent ends the wait for it.
        let two = |flight: &InFlight| flight.phases.get(&Phase::Prefill) == Some(&2);
        let waiting = feed.until_in_flight(Duration::from_secs(60), true, open, two);
        let (flight, ()) = tokio::join!(waiting, async { tell(&feed, "new", 0, &prefill) });
        assert!(two(&flight), "{flight:?}");
    }
}
