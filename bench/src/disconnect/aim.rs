//! When a client leaves so that its request is in a certain phase: learnt from the requests before it.
//!
//! A long phase is waited for: the engine says that it has begun, and the client leaves somewhere in it. A phase of less
//! than a few milliseconds is over before that word has come; it is aimed at by the clock, from the moment at which the
//! request began. Where the client really was is judged afterwards, from the engines' own times; what missed counts for
//! the phase that it hit.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::phase::Phase;
use super::raw::CallRecord;
use super::timeline::Timeline;
use super::watch::Mark;
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
    pub(crate) fn learn(&mut self, call: &CallRecord, timeline: Option<&Timeline>) {
        let since = |at: u64| at.saturating_sub(call.began_us);
        let mut saw = |phase: Phase, from: Option<u64>, to: Option<u64>| {
            let Some((from, to)) = from.zip(to).filter(|(from, to)| from <= to) else { return };
            let seen = self.seen.entry(phase).or_default();
            if seen.len() == REMEMBERED {
                seen.pop_front();
            }
            seen.push_back((since(from), since(to)));
        };
        let token = |after: Option<&u64>| after.map(|after| call.began_us + after);
        let (first, last) = (token(call.tokens_us.first()), token(call.tokens_us.last()));
        if call.stream {
            saw(Phase::Stream, first, last);
        }
        let Some(timeline) = timeline else {
            // Nobody tells: the client's own view.
            let half = first.map(|first| call.began_us + since(first) / 2);
            saw(Phase::Queued, Some(call.began_us), half.map(|half| call.began_us + since(half) / 4));
            saw(Phase::Prefill, Some(call.began_us), half);
            saw(Phase::FirstToken, half, first);
            if call.outcome == "done" && !call.stream {
                saw(Phase::Unary, Some(call.began_us), Some(call.ended_us));
            }
            return;
        };
        let lender = timeline.legs.iter().find(|leg| leg.lends);
        let reader = timeline.legs.iter().find(|leg| leg.fetches);
        let only = timeline.legs.iter().find(|leg| !leg.lends && !leg.fetches);
        let before = lender.or(only);
        saw(Phase::Queued, before.and_then(|leg| leg.queued), before.and_then(|leg| leg.started));
        let lent = lender.and_then(|leg| leg.lent).map(|(at, _)| at);
        let computed = lent.or(only.and_then(|leg| leg.first_token));
        saw(Phase::Prefill, before.and_then(|leg| leg.started), computed);
        let fetching = reader.and_then(|leg| leg.fetching);
        let fetched = reader.and_then(|leg| leg.fetched.as_ref()).map(|(at, _)| *at);
        saw(Phase::Gap, lent, fetching);
        saw(Phase::Fetch, fetching, fetched);
        let landed = fetched.or(only.and_then(|leg| leg.first_token));
        saw(Phase::FirstToken, landed, first);
        if call.outcome == "done" && !call.stream {
            let decodes = reader.or(only).and_then(|leg| leg.first_token);
            saw(Phase::Unary, decodes, Some(call.ended_us));
        }
    }

    /// When to leave for this phase; `None` where it has not been seen yet.
    pub(crate) fn at(&self, phase: Phase, told: bool, rng: &mut Rng) -> Option<Aim> {
        let seen = self.seen.get(&phase).filter(|seen| !seen.is_empty())?;
        let median = |of: &dyn Fn(&(u64, u64)) -> u64| {
            let mut values: Vec<u64> = seen.iter().map(of).collect();
            values.sort_unstable();
            values[values.len() / 2]
        };
        let length = median(&|(from, to)| to - from);
        let mark = match phase {
            Phase::Queued => Mark::Queued,
            Phase::Prefill => Mark::PrefillStarted,
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

/// Waits as exactly as a thread can: the last millisecond it looks at the clock.
pub(crate) async fn until(moment: Instant) {
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
    use super::super::raw::EventRecord;
    use super::*;

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
        let told = timeline(&[
            (0, "queued", 1_100),
            (0, "started", 1_200),
            (0, "ended", 21_200),
            (0, "lent", 21_200),
            (1, "queued", 21_300),
            (1, "fetching", 21_500),
            (1, "fetched", 21_900),
        ]);
        let call = CallRecord {
            began_us: 1_000,
            stream: true,
            tokens_us: vec![22_000, 90_000],
            ..CallRecord::default()
        };
        aims.learn(&call, Some(&told));
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
}
