//! Blocks that engines held without a request, from samples of their metrics. For engines that report only sums, such
//! as stock vLLM.
//!
//! A sample is *quiet* if the engine has no running or waiting request and no client waits for its first token. A
//! waiting client may have leased blocks, which the metrics do not assign to it. Blocks in a quiet sample are held for
//! no request. Between two quiet samples the mean is used; the error covers both values ([`HeldBlocks::off_by`]).
//!
//! The result is too low for two reasons: the work after a cancel still counts as a running request, and blocks that
//! were held and freed between two quiet samples do not show. It is too high by blocks of other clients, and by blocks
//! of completed requests that the engine frees late.

use crate::disconnect::analyse::run_data::{RunData, cancelled_at};
use crate::disconnect::analyse::summary::{HeldBlocks, SampledSummary};
use crate::disconnect::record::raw::{CallRecord, EngineState, SegmentKind};

/// Of the whole run; `None` if no engine can be sampled.
pub(crate) fn of(data: &RunData, left: u64) -> Option<SampledSummary> {
    let mut all = HeldBlocks::default();
    let mut unknown_engines = 0;
    for engine in &data.engines {
        let Some(held) = of_engine(data, engine.engine) else {
            unknown_engines += 1;
            continue;
        };
        all.block_seconds += held.block_seconds;
        all.off_by += held.off_by;
        (all.looks, all.quiet_looks) = (all.looks + held.looks, all.quiet_looks + held.quiet_looks);
        all.longest_unseen_s = all.longest_unseen_s.max(held.longest_unseen_s);
    }
    let per_1000 = |of: f64| of * 1_000.0 / left.max(1) as f64;
    let (per_1000, per_1000_off_by) = (per_1000(all.block_seconds), per_1000(all.off_by));
    (all.looks > 0).then_some(SampledSummary { held: all, unknown_engines, per_1000, per_1000_off_by })
}

/// Of one engine, in the segments whose cancels count: before refused requests and faults.
pub(crate) fn of_engine(data: &RunData, engine: usize) -> Option<HeldBlocks> {
    let has_size = data.engines.iter().any(|known| known.engine == engine && known.blocks > 0);
    let apart = |what| matches!(what, SegmentKind::Refused | SegmentKind::Fault);
    let from = data.segments.iter().map(|segment| segment.began).min().filter(|_| has_size)?;
    let until = data.segments.iter().filter(|segment| apart(segment.what)).map(|segment| segment.began).min();
    let until = until.or(data.segments.iter().map(|segment| segment.ended).max())?.min(data.watched_until());
    let waits = waits(data);
    let ours = |state: &&EngineState| state.engine == engine && from <= state.at_us && state.at_us < until;
    let samples: Vec<_> = data.engine_states.iter().filter(ours).collect();
    let quiet: Vec<_> =
        samples.iter().filter(|state| state.requests == 0 && !waits.overlap(state)).copied().collect();
    let (first, last) = (quiet.first()?, quiet.last()?);
    let mut held =
        HeldBlocks { looks: samples.len() as u64, quiet_looks: quiet.len() as u64, ..HeldBlocks::default() };
    let seconds = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e6;
    held.longest_unseen_s = seconds(from, first.at_us).max(seconds(last.at_us, until));
    for pair in quiet.windows(2) {
        let (lasted, blocks) = (seconds(pair[0].at_us, pair[1].at_us), [pair[0].held, pair[1].held]);
        held.block_seconds += lasted * (blocks[0] + blocks[1]) as f64 / 2.0;
        held.off_by += lasted * blocks[0].abs_diff(blocks[1]) as f64 / 2.0;
        held.longest_unseen_s = held.longest_unseen_s.max(lasted);
    }
    Some(held)
}

/// When clients waited for their first tokens: disjoint intervals, sorted.
struct WaitIntervals(Vec<(u64, u64)>);

/// From the start of each call to its first token, or to the end of a response in one piece. A wait ends when the
/// client is gone.
fn waits(data: &RunData) -> WaitIntervals {
    let wait = |call: &CallRecord| {
        let token = call.client_times().first_token.unwrap_or(u64::MAX);
        // For the deployment, a vanished client still waits.
        let left = cancelled_at(call).filter(|_| !call.vanishes());
        (call.began_us, token.min(left.unwrap_or(u64::MAX)).min(data.present_until(call)))
    };
    let mut all: Vec<_> = data.calls.iter().map(wait).collect();
    all.sort_unstable();
    let mut apart: Vec<(u64, u64)> = Vec::new();
    for (from, to) in all {
        match apart.last_mut().filter(|last| from <= last.1) {
            Some(last) => last.1 = last.1.max(to),
            None => apart.push((from, to)),
        }
    }
    WaitIntervals(apart)
}

impl WaitIntervals {
    /// Whether a client waited during the sample, which is from a moment before its response.
    fn overlap(&self, look: &EngineState) -> bool {
        let next = self.0.partition_point(|(_, to)| *to < look.at_us);
        self.0.get(next).is_some_and(|(from, _)| *from <= look.at_us + look.took_us)
    }
}
