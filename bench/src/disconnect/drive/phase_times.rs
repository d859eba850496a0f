//! When a request has to be cancelled to be in a certain phase, by the times of earlier requests.
//!
//! For a long phase, the client waits for the engine's event at its begin and cancels at a random time in it. A phase
//! of a few milliseconds would end before that event arrives. For such a phase the client uses the time since the start
//! of the request. The actual phase is determined afterwards from the times of the engines. A cancel that missed its
//! phase counts for the phase that it hit.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::disconnect::plan::phase::Phase;
use crate::disconnect::record::raw::ClientTimes;
use crate::disconnect::record::timeline::Timeline;
use crate::disconnect::record::watch::{Milestone, TimelineFeed};
use crate::load::rng::Rng;
use crate::load::{CancelTrigger, Streaming};

/// Requests that are kept per phase.
const REMEMBERED: usize = 48;
/// The client waits for the event of a phase that lasts this long, microseconds.
const LONG_US: u64 = 4_000;
/// The usual maximum delay of a system timer. The remaining time is spent in a busy loop.
const TIMER_IS_LATE: Duration = Duration::from_micros(1_300);

/// Begin and end of phases, microseconds after the start of a call.
#[derive(Default)]
pub(crate) struct PhaseTimes {
    seen: HashMap<Phase, VecDeque<(u64, u64)>>,
    /// The prefill engine logs when its reply is written.
    logs_replies: bool,
}

/// When to cancel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CancelPoint {
    /// A time after the start of the call.
    At(Duration),
    /// A time after the milestone.
    After(Milestone, Duration),
}

impl PhaseTimes {
    /// Adds the phases of a call.
    pub(crate) fn learn(&mut self, client: &ClientTimes, timeline: Option<&Timeline>) {
        let spans = match timeline {
            Some(timeline) => timeline.spans(client),
            None => client_phases(client),
        };
        let stream =
            client.first_token.zip(client.last_token).map(|(first, last)| (Phase::Stream, first, last));
        self.logs_replies |= timeline.is_some_and(Timeline::logs_reply);
        for (phase, from, to) in spans.into_iter().chain(stream) {
            let seen = self.seen.entry(phase).or_default();
            if seen.len() == REMEMBERED {
                seen.pop_front();
            }
            let since = |at: u64| at.saturating_sub(client.began);
            seen.push_back((since(from), since(to)));
        }
    }

    /// Begin and end of a phase after the start of a call, as medians.
    pub(crate) fn median(&self, phase: Phase) -> Option<(Duration, Duration)> {
        let seen = self.seen.get(&phase).filter(|seen| !seen.is_empty())?;
        let middle = |of: &dyn Fn(&(u64, u64)) -> u64| {
            let mut values: Vec<u64> = seen.iter().map(of).collect();
            values.sort_unstable();
            values[values.len() / 2]
        };
        let (from, length) = (middle(&|(from, _)| *from), middle(&|(from, to)| to - from));
        Some((Duration::from_micros(from), Duration::from_micros(from + length)))
    }

    /// A time after the start at which most requests have not ended: three quarters of the duration of the fastest
    /// quarter.
    pub(crate) fn usual_lifetime(&self, streaming: Streaming) -> Option<Duration> {
        let phase = if streaming == Streaming::Whole { Phase::Unary } else { Phase::Stream };
        let seen = self.seen.get(&phase)?;
        let mut whole: Vec<u64> = seen.iter().map(|(_, to)| *to).collect();
        whole.sort_unstable();
        Some(Duration::from_micros(whole.get(whole.len() / 4)? * 3 / 4))
    }

    /// When to cancel in this phase; `None` without observed times.
    pub(crate) fn at(&self, phase: Phase, exact: bool, rng: &mut Rng) -> Option<CancelPoint> {
        let seen = self.seen.get(&phase).filter(|seen| !seen.is_empty())?;
        let (from, to) = self.median(phase)?;
        let length = (to - from).as_micros() as u64;
        let milestone = match phase {
            Phase::Queued => Milestone::Queued,
            Phase::Prefill => Milestone::PrefillStarted,
            Phase::Reply => Milestone::Lent,
            Phase::Gap if self.logs_replies => Milestone::Replied,
            Phase::Gap => Milestone::Lent,
            Phase::Fetch => Milestone::Fetching,
            Phase::FirstToken => Milestone::Fetched,
            Phase::Stream | Phase::Unary => Milestone::FirstToken,
        };
        let within = |length: u64| Duration::from_micros((rng.unit() * length as f64) as u64);
        if exact && length >= LONG_US {
            let mut within = within;
            return Some(CancelPoint::After(milestone, within(length * 3 / 4)));
        }
        // The phase varies between requests: use the times of a random one, with a margin around it.
        let (from, to) = seen[rng.below(seen.len() as u64) as usize];
        let around = (to - from).max(60);
        let at = (from + (rng.unit() * 1.5 * around as f64) as u64).saturating_sub(around / 4);
        Some(CancelPoint::At(Duration::from_micros(at)))
    }
}

/// The phases by the times of the client, without engine events.
fn client_phases(client: &ClientTimes) -> Vec<(Phase, u64, u64)> {
    let Some(first) = client.first_token else {
        return client.done.map(|done| (Phase::Unary, client.began, done)).into_iter().collect();
    };
    let at = |share: u64| client.began + first.saturating_sub(client.began) * share / 8;
    vec![
        (Phase::Queued, client.began, at(1)),
        (Phase::Prefill, client.began, at(4)),
        (Phase::FirstToken, at(4), first),
    ]
}

impl CancelPoint {
    /// Limits the time after the start, or halves the delay after a milestone. Most requests have not ended by then.
    pub(crate) fn limited_to(self, at_most: Option<Duration>) -> Self {
        match self {
            Self::At(delay) => Self::At(at_most.map_or(delay, |at_most| delay.min(at_most))),
            Self::After(milestone, delay) => Self::After(milestone, delay / 2),
        }
    }

    /// Plans the cancel of the client with this tag. The caller aborts the task after the call.
    pub(crate) fn leave(
        self,
        began: Instant,
        feed: &TimelineFeed,
        tag: &str,
    ) -> (CancelTrigger, JoinHandle<()>) {
        let leaving = CancellationToken::new();
        let leave = CancelTrigger::When(leaving.clone());
        let milestone = match self {
            Self::At(_) => None,
            Self::After(milestone, _) => Some(feed.when(tag, milestone)),
        };
        let timer = tokio::spawn(async move {
            match (self, milestone) {
                (Self::After(_, delay), Some(milestone)) => {
                    milestone.cancelled().await;
                    until(Instant::now() + delay).await;
                }
                (Self::At(delay) | Self::After(_, delay), _) => until(began + delay).await,
            }
            leaving.cancel();
        });
        (leave, timer)
    }
}

/// Waits as exactly as possible: the last millisecond is a busy loop.
async fn until(moment: Instant) {
    if let Some(early) = moment.checked_sub(TIMER_IS_LATE)
        && early > Instant::now()
    {
        tokio::time::sleep_until(early.into()).await;
    }
    while Instant::now() < moment {
        tokio::task::yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disconnect::record::raw::EventRecord;

    fn timeline(events: &[(usize, &str, u64)]) -> Timeline {
        let mut timeline = Timeline::default();
        for &(engine, kind, at_us) in events {
            let leg = (kind == "queued").then(|| if engine == 0 { "prefill" } else { "decode" }.to_owned());
            timeline.apply(&EventRecord { engine, at_us, kind: kind.into(), leg, ..EventRecord::default() });
        }
        timeline
    }

    #[test]
    fn long_phases_are_waited_for_and_short_ones_aimed_at() {
        let (mut times, mut rng) = (PhaseTimes::default(), Rng::new(1));
        assert_eq!(times.at(Phase::Gap, true, &mut rng), None);
        assert_eq!(times.median(Phase::Gap), None);
        let known = timeline(&[
            (0, "queued", 1_100),
            (0, "started", 1_200),
            (0, "ended", 21_200),
            (0, "lease_opened", 21_200),
            (1, "queued", 21_300),
            (1, "fetching", 21_500),
            (1, "fetched", 21_900),
        ]);
        let (first_token, last_token) = (Some(23_000), Some(91_000));
        let seen = ClientTimes { began: 1_000, stream: true, first_token, last_token, done: None };
        times.learn(&seen, Some(&known));
        let us = Duration::from_micros;
        assert_eq!(times.median(Phase::Gap), Some((us(20_200), us(20_500))));
        // The engine does not log its reply, which the decode engine has at 21.3 ms.
        assert_eq!(times.median(Phase::Reply), Some((us(20_200), us(20_300))));
        for _ in 0..100 {
            let Some(CancelPoint::After(Milestone::PrefillStarted, delay)) =
                times.at(Phase::Prefill, true, &mut rng)
            else {
                panic!("a long phase is waited for");
            };
            assert!(delay <= Duration::from_millis(15));
            let Some(CancelPoint::At(delay)) = times.at(Phase::Gap, true, &mut rng) else {
                panic!("a short phase is aimed at")
            };
            // 300 µs from 20.2 ms on, with a quarter of that as margin on both sides.
            assert!((20_125..=20_575).contains(&(delay.as_micros() as u64)), "{delay:?}");
        }
        // Without engine events only the time since the start is used.
        assert!(matches!(times.at(Phase::Prefill, false, &mut rng), Some(CancelPoint::At(_))));
    }

    #[test]
    fn a_long_gap_begins_with_the_reply_if_the_engine_logs_it() {
        for logs in [false, true] {
            let mut events = vec![
                (0, "queued", 1_100),
                (0, "started", 1_200),
                (0, "ended", 5_000),
                (0, "lease_opened", 5_000),
            ];
            events.extend([(1, "queued", 40_000), (1, "fetching", 60_000)]);
            let mut known = timeline(&events);
            if logs {
                let (kind, result) = ("replied".into(), Some("sent".into()));
                known.apply(&EventRecord { at_us: 30_000, kind, result, ..EventRecord::default() });
            }
            let (mut times, mut rng) = (PhaseTimes::default(), Rng::new(1));
            times.learn(&ClientTimes { began: 1_000, stream: true, ..ClientTimes::default() }, Some(&known));
            let milestone = |point| match point {
                Some(CancelPoint::After(milestone, _)) => Some(milestone),
                _ => None,
            };
            let begin = if logs { Milestone::Replied } else { Milestone::Lent };
            assert_eq!(milestone(times.at(Phase::Gap, true, &mut rng)), Some(begin));
            // A reply that is not logged is aimed at: it is written soon after its lease is opened.
            let logged = logs.then_some(Milestone::Lent);
            assert_eq!(milestone(times.at(Phase::Reply, true, &mut rng)), logged);
        }
    }

    #[test]
    fn an_untimed_cancel_falls_within_the_usual_lifetime() {
        let mut times = PhaseTimes::default();
        assert_eq!(times.usual_lifetime(Streaming::Whole), None);
        for done in [9_000, 5_000, 30_000, 7_000, 40_000, 8_000, 50_000, 60_000] {
            times.learn(
                &ClientTimes { began: 1_000, done: Some(1_000 + done), ..ClientTimes::default() },
                None,
            );
        }
        // A quarter of them took less than 8 ms.
        let us = Duration::from_micros;
        assert_eq!(times.usual_lifetime(Streaming::Whole), Some(us(6_000)));
        assert_eq!(times.usual_lifetime(Streaming::Streamed), None);
        assert_eq!(CancelPoint::At(us(9_000)).limited_to(Some(us(6_000))), CancelPoint::At(us(6_000)));
        assert_eq!(CancelPoint::At(us(900)).limited_to(Some(us(6_000))), CancelPoint::At(us(900)));
        assert_eq!(CancelPoint::At(us(9_000)).limited_to(None), CancelPoint::At(us(9_000)));
        let point = CancelPoint::After(Milestone::Queued, us(900));
        assert_eq!(point.limited_to(Some(us(6_000))), CancelPoint::After(Milestone::Queued, us(450)));
    }
}
