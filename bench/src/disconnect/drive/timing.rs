//! When a client leaves so that its request is in a certain phase: learnt from the requests before it.
//!
//! A long phase is waited for: the engine says that it has begun, and the client leaves somewhere in it. A phase of less
//! than a few milliseconds is over before that word has come; it is aimed at by the clock, from the moment at which the
//! request began. Where the client really was is judged afterwards, from the engines' own times; what missed counts for
//! the phase that it hit.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::disconnect::plan::phase::Phase;
use crate::disconnect::record::timeline::{Seen, Timeline};
use crate::disconnect::record::watch::{Feed, Mark};
use crate::load::Leave;
use crate::load::rng::Rng;

/// Requests that are remembered of each phase.
const REMEMBERED: usize = 48;
/// A phase as long as this is waited for, microseconds.
const LONG_US: u64 = 4_000;
/// A timer of the system is this late at most, as a rule. The rest is spun.
const TIMER_IS_LATE: Duration = Duration::from_micros(1_300);

/// Where phases have been: begin and end, microseconds after a call began.
#[derive(Default)]
pub(crate) struct Aims {
    seen: HashMap<Phase, VecDeque<(u64, u64)>>,
}

/// When to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aim {
    /// So long after the call began.
    At(Duration),
    /// So long after engines have told this.
    After(Mark, Duration),
}

impl Aims {
    /// Learns from a call.
    pub(crate) fn learn(&mut self, client: &Seen, timeline: Option<&Timeline>) {
        let spans = match timeline {
            Some(timeline) => timeline.spans(client),
            None => alone(client),
        };
        let stream =
            client.first_token.zip(client.last_token).map(|(first, last)| (Phase::Stream, first, last));
        for (phase, from, to) in spans.into_iter().chain(stream) {
            let seen = self.seen.entry(phase).or_default();
            if seen.len() == REMEMBERED {
                seen.pop_front();
            }
            let since = |at: u64| at.saturating_sub(client.began);
            seen.push_back((since(from), since(to)));
        }
    }

    /// Where a phase begins and ends after a call's beginning, in the middle of those that were seen.
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

    /// When most requests are not over yet, so long after they began: three quarters of what the quickest quarter of whole answers
    /// has taken.
    pub(crate) fn while_it_lives(&self, stream: bool) -> Option<Duration> {
        let seen = self.seen.get(&if stream { Phase::Stream } else { Phase::Unary })?;
        let mut whole: Vec<u64> = seen.iter().map(|(_, to)| *to).collect();
        whole.sort_unstable();
        Some(Duration::from_micros(whole.get(whole.len() / 4)? * 3 / 4))
    }

    /// When to leave for this phase; `None` where it has not been seen yet.
    pub(crate) fn at(&self, phase: Phase, told: bool, rng: &mut Rng) -> Option<Aim> {
        let seen = self.seen.get(&phase).filter(|seen| !seen.is_empty())?;
        let (from, to) = self.median(phase)?;
        let length = (to - from).as_micros() as u64;
        let mark = match phase {
            Phase::Queued => Mark::Queued,
            Phase::Prefill => Mark::PrefillStarted,
            Phase::Reply => Mark::Lent,
            Phase::Gap if self.seen.contains_key(&Phase::Reply) => Mark::Replied,
            Phase::Gap => Mark::Lent,
            Phase::Fetch => Mark::Fetching,
            Phase::FirstToken => Mark::Fetched,
            Phase::Stream | Phase::Unary => Mark::FirstToken,
        };
        let within = |length: u64| Duration::from_micros((rng.unit() * length as f64) as u64);
        if told && length >= LONG_US {
            let mut within = within;
            return Some(Aim::After(mark, within(length * 3 / 4)));
        }
        // The phase moves from one request to the next: aim at where it was in one of them, and a little around it.
        let (from, to) = seen[rng.below(seen.len() as u64) as usize];
        let around = (to - from).max(60);
        let at = (from + (rng.unit() * 1.5 * around as f64) as u64).saturating_sub(around / 4);
        Some(Aim::At(Duration::from_micros(at)))
    }
}

/// The phases in the client's own view, where nobody tells.
fn alone(client: &Seen) -> Vec<(Phase, u64, u64)> {
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

impl Aim {
    /// No later than this after the call began, and in the first half of what it waits for: by then most requests are not over.
    pub(crate) fn in_time(self, at_most: Option<Duration>) -> Self {
        match self {
            Self::At(delay) => Self::At(at_most.map_or(delay, |at_most| delay.min(at_most))),
            Self::After(mark, delay) => Self::After(mark, delay / 2),
        }
    }

    /// Arranges for the client with this tag to leave then. Abort the task when the call is over.
    pub(crate) fn leave(self, began: Instant, feed: &Feed, tag: &str) -> (Leave, JoinHandle<()>) {
        let leaving = CancellationToken::new();
        let leave = Leave::When(leaving.clone());
        let told = match self {
            Self::At(_) => None,
            Self::After(mark, _) => Some(feed.when(tag, mark)),
        };
        let aiming = tokio::spawn(async move {
            match (self, told) {
                (Self::After(_, delay), Some(told)) => {
                    told.cancelled().await;
                    until(Instant::now() + delay).await;
                }
                (Self::At(delay) | Self::After(_, delay), _) => until(began + delay).await,
            }
            leaving.cancel();
        });
        (leave, aiming)
    }
}

/// Waits as exactly as a thread can: the last millisecond it looks at the clock.
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
            timeline.take(&EventRecord { engine, at_us, kind: kind.into(), leg, ..EventRecord::default() });
        }
        timeline
    }

    #[test]
    fn long_phases_are_waited_for_and_short_ones_aimed_at() {
        let (mut aims, mut rng) = (Aims::default(), Rng::new(1));
        assert_eq!(aims.at(Phase::Gap, true, &mut rng), None);
        assert_eq!(aims.median(Phase::Gap), None);
        let told = timeline(&[
            (0, "queued", 1_100),
            (0, "started", 1_200),
            (0, "ended", 21_200),
            (0, "lease_opened", 21_200),
            (1, "queued", 21_300),
            (1, "fetching", 21_500),
            (1, "fetched", 21_900),
        ]);
        let (first_token, last_token) = (Some(23_000), Some(91_000));
        let seen = Seen { began: 1_000, stream: true, first_token, last_token, done: None };
        aims.learn(&seen, Some(&told));
        let us = Duration::from_micros;
        assert_eq!(aims.median(Phase::Gap), Some((us(20_200), us(20_500))));
        for _ in 0..100 {
            let Some(Aim::After(Mark::PrefillStarted, delay)) = aims.at(Phase::Prefill, true, &mut rng)
            else {
                panic!("a long phase is waited for");
            };
            assert!(delay <= Duration::from_millis(15));
            let Some(Aim::At(delay)) = aims.at(Phase::Gap, true, &mut rng) else {
                panic!("a short phase is aimed at")
            };
            // 300 µs from 20.2 ms on, and a quarter of that on both sides.
            assert!((20_125..=20_575).contains(&(delay.as_micros() as u64)), "{delay:?}");
        }
        // Nobody tells: only the clock.
        assert!(matches!(aims.at(Phase::Prefill, false, &mut rng), Some(Aim::At(_))));
    }

    #[test]
    fn who_leaves_anywhere_leaves_while_most_requests_live() {
        let mut aims = Aims::default();
        assert_eq!(aims.while_it_lives(false), None);
        for done in [9_000, 5_000, 30_000, 7_000, 40_000, 8_000, 50_000, 60_000] {
            aims.learn(&Seen { began: 1_000, done: Some(1_000 + done), ..Seen::default() }, None);
        }
        // A quarter of them are quicker than 8 ms.
        let us = Duration::from_micros;
        assert_eq!((aims.while_it_lives(false), aims.while_it_lives(true)), (Some(us(6_000)), None));
        assert_eq!(Aim::At(us(9_000)).in_time(Some(us(6_000))), Aim::At(us(6_000)));
        assert_eq!(Aim::At(us(900)).in_time(Some(us(6_000))), Aim::At(us(900)));
        assert_eq!(Aim::At(us(9_000)).in_time(None), Aim::At(us(9_000)));
        let told = Aim::After(Mark::Queued, us(900));
        assert_eq!(told.in_time(Some(us(6_000))), Aim::After(Mark::Queued, us(450)));
    }
}
