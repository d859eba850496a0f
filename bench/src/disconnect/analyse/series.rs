//! What the report draws: samples and curves out of the raw events.

use crate::disconnect::analyse::summary::Series;
use crate::disconnect::analyse::{Facts, Victim, faults, uncancelled};
use crate::disconnect::plan::phase::Phase;
use crate::disconnect::record::raw::CallRecord;
use crate::disconnect::record::timeline::Timeline;

/// Points of a curve.
const POINTS_MAX: usize = 800;

/// From the moment at which a call was due to its first token, ms; where it streams.
pub(crate) fn ttft(call: &CallRecord) -> Option<f64> {
    let first = call.began_us + call.tokens_us.first()?;
    call.stream.then_some(first.saturating_sub(call.due_us) as f64 / 1e3)
}

/// Between each two events with text, ms.
pub(crate) fn gaps(call: &CallRecord) -> impl Iterator<Item = f64> {
    call.tokens_us.windows(2).map(|pair| pair[1].saturating_sub(pair[0]) as f64 / 1e3)
}

/// Of gaps between events, how many are none at all, as a share: their events came with one read of the socket.
pub(crate) fn within_one_read(gaps: &[f64]) -> f64 {
    gaps.iter().filter(|gap| **gap <= 0.0).count() as f64 / gaps.len().max(1) as f64
}

/// From the first event with text to the last, for each token after the first, ms; of a stream of at least two tokens.
pub(crate) fn tpot(call: &CallRecord) -> Option<f64> {
    let (first, last) = (call.tokens_us.first()?, call.tokens_us.last()?);
    // One event may bring several.
    let tokens = (call.tokens_us.len() as u64).max(u64::from(call.generated));
    (call.stream && tokens > 1).then(|| last.saturating_sub(*first) as f64 / 1e3 / (tokens - 1) as f64)
}

pub(crate) fn of(facts: &Facts, victims: &[Victim<'_>], vanished: &[Victim<'_>]) -> Series {
    let began = facts.acts.iter().map(|act| act.began).min().unwrap_or(0);
    let seconds = |at: u64| at.saturating_sub(began) as f64 / 1e6;
    let back = |phase: Phase| {
        let ours = victims.iter().filter(|victim| victim.phase == Some(phase));
        let times = ours.filter_map(|victim| match victim.timeline?.home_at() {
            None => Some(f64::INFINITY),
            Some(home) => (home > victim.gone).then(|| (home - victim.gone) as f64 / 1e3),
        });
        let mut times: Vec<f64> = times.collect();
        times.sort_by(f64::total_cmp);
        (!times.is_empty()).then_some((phase, times))
    };
    // Who stayed, and the same requests of the calm: those that are compared.
    let (rounds, _) = uncancelled::rounds(facts);
    let both = |of: &dyn Fn(&CallRecord) -> Vec<f64>| {
        let pairs = || rounds.iter().flat_map(|round| &round.pairs);
        let sorted = |calls: &mut dyn Iterator<Item = &CallRecord>| {
            let mut samples: Vec<f64> = calls.filter(|call| call.outcome == "done").flat_map(of).collect();
            samples.sort_by(f64::total_cmp);
            samples
        };
        [sorted(&mut pairs().map(|(calm, _)| *calm)), sorted(&mut pairs().map(|(_, storm)| *storm))]
    };
    let pools = facts.engines.iter().map(|engine| {
        let ours = facts.books.iter().filter(|books| books.engine == engine.engine && books.total > 0);
        let points = ours.map(|books| (seconds(books.at_us), books.held as f64 / books.total as f64));
        (engine.name.clone(), thinned(&points.collect::<Vec<_>>()))
    });
    let gone = |victims: &'_ [Victim<'_>]| {
        let gone = victims.iter().filter_map(|victim| Some((victim.gone, victim.timeline?.clone())));
        gone.collect::<Vec<_>>()
    };
    let (ours, vanished) = (gone(victims), gone(vanished));
    let broken = faults::gone(facts);
    let watched = facts.watched_until();
    let last = facts.calls.iter().map(|call| call.ended_us).max().unwrap_or(began);
    Series {
        back: Phase::ALL.into_iter().filter_map(back).collect(),
        stranded: held(&ours, watched, &seconds),
        stranded_in_broken_parts: held(&broken, watched, &seconds),
        vanished: held(&vanished, watched, &seconds),
        pools: pools.collect(),
        acts: facts
            .acts
            .iter()
            .map(|act| {
                let ended = if act.ended == u64::MAX { last } else { act.ended };
                (act.name.clone(), seconds(act.began), seconds(ended))
            })
            .collect(),
        ttft: both(&|call| ttft(call).into_iter().collect()),
        itl: both(&|call| gaps(call).collect()),
    }
}

/// Blocks that are held for clients that have gone, as a curve of steps.
fn held(of: &[(u64, Timeline)], watched_until: u64, seconds: &dyn Fn(u64) -> f64) -> Vec<(f64, f64)> {
    let mut changes: Vec<(u64, i64)> = Vec::new();
    for (gone, timeline) in of {
        for leg in &timeline.legs {
            let back = leg.freed.first().map_or(watched_until, |(at, _)| *at);
            let begins = leg.queued.unwrap_or(*gone).max(*gone);
            if back > begins && leg.held() > 0 {
                let blocks = leg.held() as i64;
                changes.extend([(begins, blocks), (back, -blocks)]);
            }
        }
    }
    changes.sort_unstable();
    let (mut held, mut points) = (0, Vec::new());
    for (at, change) in changes {
        held += change;
        points.push((seconds(at), held as f64));
    }
    thinned(&points)
}

/// At most [`POINTS_MAX`] points. Of those within the same slice of time the highest stays, so that no peak is lost, and the
/// last, so that what holds until the next point is what was so: a slice is narrower than the plot can show.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= POINTS_MAX {
        return points.to_vec();
    }
    let (from, to) = (points[0].0, points[points.len() - 1].0);
    let slices = (POINTS_MAX / 2) as f64;
    let slice = |at: f64| {
        (((at - from) / (to - from).max(f64::MIN_POSITIVE) * slices) as usize).min(POINTS_MAX / 2 - 1)
    };
    let highest_and_last = |chunk: &[(f64, f64)]| {
        let highest = *chunk.iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("chunks are not empty");
        let last = *chunk.last().expect("chunks are not empty");
        if highest == last { vec![last] } else { vec![highest, last] }
    };
    points.chunk_by(|a, b| slice(a.0) == slice(b.0)).flat_map(highest_and_last).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thinned_curve_keeps_its_peaks_and_rests_where_the_whole_one_does() {
        // 2,000 short holds in the first ten seconds, one peak among them; then nothing for ninety, and one more.
        let mut points: Vec<(f64, f64)> = Vec::new();
        for hold in 0..2_000 {
            let at = f64::from(hold) * 0.005;
            points.extend([(at, if hold == 777 { 99.0 } else { 13.0 }), (at + 0.001, 0.0)]);
        }
        points.extend([(100.0, 5.0), (100.001, 0.0)]);
        let thin = thinned(&points);
        assert!(thin.len() <= POINTS_MAX, "{}", thin.len());
        assert!(thin.is_sorted_by(|a, b| a.0 <= b.0));
        assert!(thin.iter().any(|(_, blocks)| *blocks == 99.0), "the peak is there");
        let resting = thin.iter().rfind(|(at, _)| *at < 99.0).expect("a point");
        assert_eq!(resting.1, 0.0, "nothing is held while nothing happens: {thin:?}");
        assert_eq!(thin.last(), points.last());
    }
}
