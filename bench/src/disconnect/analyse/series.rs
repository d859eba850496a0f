//! The data of the plots: samples and curves from the raw events.

use crate::disconnect::analyse::call_times::{gaps, ttft};
use crate::disconnect::analyse::run_data::{CancelledCall, RunData};
use crate::disconnect::analyse::summary::PlotData;
use crate::disconnect::analyse::{faults, uncancelled};
use crate::disconnect::plan::phase::Phase;
use crate::disconnect::record::raw::CallRecord;
use crate::disconnect::record::timeline::Timeline;

/// Maximum points of a curve.
const POINTS_MAX: usize = 800;

pub(crate) fn of(
    data: &RunData,
    cancelled: &[CancelledCall<'_>],
    vanished: &[CancelledCall<'_>],
) -> PlotData {
    let began = data.segments.iter().map(|segment| segment.began).min().unwrap_or(0);
    let seconds = |at: u64| at.saturating_sub(began) as f64 / 1e6;
    let time_to_free = |phase: Phase| {
        let ours = cancelled.iter().filter(|request| request.phase == Some(phase));
        let times = ours.filter_map(|request| match request.timeline?.all_freed_at() {
            None => Some(f64::INFINITY),
            Some(freed_at) => {
                (freed_at > request.cancelled_at).then(|| (freed_at - request.cancelled_at) as f64 / 1e3)
            }
        });
        let mut times: Vec<f64> = times.collect();
        times.sort_by(f64::total_cmp);
        (!times.is_empty()).then_some((phase, times))
    };
    // The uncancelled requests and their paired requests, which are compared.
    let (rounds, _) = uncancelled::rounds(data);
    let both = |of: &dyn Fn(&CallRecord) -> Vec<f64>| {
        let pairs = || rounds.iter().flat_map(|round| &round.pairs);
        let sorted = |calls: &mut dyn Iterator<Item = &CallRecord>| {
            let mut samples: Vec<f64> = calls.filter(|call| call.outcome == "done").flat_map(of).collect();
            samples.sort_by(f64::total_cmp);
            samples
        };
        [sorted(&mut pairs().map(|(calm, _)| *calm)), sorted(&mut pairs().map(|(_, storm)| *storm))]
    };
    let pools = data.engines.iter().map(|engine| {
        let ours = data.engine_states.iter().filter(|state| state.engine == engine.engine && state.total > 0);
        let points = ours.map(|state| (seconds(state.at_us), state.held as f64 / state.total as f64));
        (engine.name.clone(), thinned(&points.collect::<Vec<_>>()))
    });
    let timelines = |cancelled: &'_ [CancelledCall<'_>]| {
        let timelines =
            cancelled.iter().filter_map(|request| Some((request.cancelled_at, request.timeline?.clone())));
        timelines.collect::<Vec<_>>()
    };
    let (cancelled, vanished) = (timelines(cancelled), timelines(vanished));
    let in_faults = faults::cancelled_in_faults(data);
    let watched = data.watched_until();
    let last = data.calls.iter().map(|call| call.ended_us).max().unwrap_or(began);
    PlotData {
        time_to_free: Phase::ALL.into_iter().filter_map(time_to_free).collect(),
        stranded: held(&cancelled, watched, &seconds),
        stranded_in_faults: held(&in_faults, watched, &seconds),
        vanished: held(&vanished, watched, &seconds),
        pools: pools.collect(),
        segments: data
            .segments
            .iter()
            .map(|segment| {
                let ended = if segment.ended == u64::MAX { last } else { segment.ended };
                (segment.name.clone(), seconds(segment.began), seconds(ended))
            })
            .collect(),
        ttft: both(&|call| ttft(call).into_iter().collect()),
        itl: both(&|call| gaps(call).collect()),
    }
}

/// Blocks held for cancelled requests, as a step curve.
fn held(of: &[(u64, Timeline)], watched_until: u64, seconds: &dyn Fn(u64) -> f64) -> Vec<(f64, f64)> {
    let mut changes: Vec<(u64, i64)> = Vec::new();
    for (cancelled_at, timeline) in of {
        for leg in &timeline.legs {
            let freed_at = leg.freed_at().unwrap_or(watched_until);
            let begins = leg.queued.unwrap_or(*cancelled_at).max(*cancelled_at);
            if freed_at > begins && leg.held() > 0 {
                let blocks = leg.held() as i64;
                changes.extend([(begins, blocks), (freed_at, -blocks)]);
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

/// Reduces a curve to at most [`POINTS_MAX`] points. Each slice of time keeps two points: the highest one, so that no
/// peak is lost, and the last one, whose value lasts until the next slice. A slice is narrower than a plot can show.
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
        // 2,000 short holds in the first ten seconds with one peak, then a pause of ninety seconds, then one more.
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
