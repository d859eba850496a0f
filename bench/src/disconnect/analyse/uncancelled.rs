//! Compares each uncancelled request of a storm with its paired request: the request of the same time and kind in the
//! calm of that round. The other requests of the calm are left out. A storm has less work, which would hide slower
//! requests.
//!
//! ```text
//!  calm 1    a  b  c  d  e       service levels of b, d and e
//!  storm 1   ✗  b  ✗  d  e       service levels of b, d and e     ─▶ one ratio per round and number ─▶ their median
//! ```
//!
//! All values of a number are from one round, the one with the median ratio. Values of different rounds would
//! contradict each other. A number is slower if its ratio is above [`SLOWER`] and its difference is above the noise, in
//! that round and in three of four. The noise is the usual difference of the number between two calms.

use crate::common::stats::Spread;
use crate::disconnect::analyse::call_times;
use crate::disconnect::analyse::dist::Dist;
use crate::disconnect::analyse::run_data::{RunData, Segment};
use crate::disconnect::analyse::summary::{
    Measure, PairedComparison, SLOWER, UNCANCELLED_FEW, UncancelledSummary,
};
use crate::disconnect::record::raw::{CallRecord, SegmentKind};

/// A smaller difference is noise, whatever the calms show: timers and scheduler of a machine cause it, milliseconds.
pub(crate) const NOISE_MS: f64 = 2.0;
/// Times are exact to a microsecond: a zero is less than that.
const LEAST_MS: f64 = 1e-3;
/// With fewer requests in a round a high percentile is a single request.
const FEW_IN_ROUND: usize = 10;
/// With fewer requests in a round the 99th percentile is the maximum.
const FEW_FOR_P99: usize = 100;

/// One round: pairs of a calm request and an uncancelled storm request, by due time.
pub(crate) struct PairedRound<'a> {
    /// From 1, of all rounds that began.
    number: u64,
    pub(crate) pairs: Vec<(&'a CallRecord, &'a CallRecord)>,
}

/// The rounds in which every storm request has a paired request, and the number of other rounds.
pub(crate) fn rounds(data: &RunData) -> (Vec<PairedRound<'_>>, u64) {
    let segments = |what: SegmentKind| data.segments.iter().filter(move |segment| segment.what == what);
    let mut rounds = Vec::new();
    let mut unpaired = 0;
    for (number, (calm, storm)) in (1..).zip(segments(SegmentKind::Calm).zip(segments(SegmentKind::Storm))) {
        let (calm, storm) = (arrivals(data, calm), arrivals(data, storm));
        // The requests of a stopped segment cannot be paired.
        let same = calm.len() == storm.len()
            && calm.iter().zip(&storm).all(|(calm, storm)| calm.stream == storm.stream);
        if same {
            let pairs = calm.into_iter().zip(storm);
            let pairs = pairs.filter(|(_, storm)| storm.leaves.is_none()).collect();
            rounds.push(PairedRound { number, pairs });
        } else {
            unpaired += 1;
        }
    }
    (rounds, unpaired)
}

/// Requests of a segment by due time, without retries.
fn arrivals<'a>(data: &'a RunData, segment: &Segment) -> Vec<&'a CallRecord> {
    let ours = data.calls.iter().filter(|call| call.segment == segment.name && call.retries.is_none());
    let mut ours: Vec<_> = ours.collect();
    ours.sort_by_key(|call| call.due_us);
    ours
}

impl PairedRound<'_> {
    /// Pairs of completed requests with samples of this measure.
    fn complete_pairs(&self, measure: Measure) -> impl Iterator<Item = [&CallRecord; 2]> {
        let whole = move |call: &CallRecord| call.outcome == "done" && !of(measure, call).is_empty();
        let pairs = self.pairs.iter().map(|(calm, storm)| [*calm, *storm]);
        pairs.filter(move |pair| pair.iter().all(|call| whole(call)))
    }

    fn clients(&self, measure: Measure) -> usize {
        self.complete_pairs(measure).count()
    }

    /// Samples of the calm and of the storm.
    fn samples(&self, measure: Measure) -> [Vec<f64>; 2] {
        [0, 1].map(|side| self.complete_pairs(measure).flat_map(|pair| of(measure, pair[side])).collect())
    }
}

/// The samples of one call for a measure, ms.
pub(crate) fn of(measure: Measure, call: &CallRecord) -> Vec<f64> {
    match measure {
        Measure::Ttft => call_times::ttft(call).into_iter().collect(),
        Measure::Itl => call_times::gaps(call).collect(),
        Measure::Tpot => call_times::tpot(call).into_iter().collect(),
        Measure::E2e => vec![call.ended_us.saturating_sub(call.due_us) as f64 / 1e3],
    }
}

/// All numbers of uncancelled requests, compared with their paired requests.
pub(crate) fn compare(data: &RunData) -> UncancelledSummary {
    let (rounds, unpaired) = rounds(data);
    let rows = Measure::ALL.into_iter().flat_map(|measure| of_measure(&rounds, measure));
    UncancelledSummary {
        requests: rounds.iter().map(|round| round.pairs.len() as u64).sum(),
        rounds: rounds.len() as u64,
        unpaired_rounds: unpaired,
        numbers: rows.collect(),
    }
}

/// The median and a high percentile of one measure; only the latter for the time between tokens. Empty with too few
/// requests.
fn of_measure(rounds: &[PairedRound<'_>], measure: Measure) -> Vec<PairedComparison> {
    let samples: Vec<_> = rounds.iter().map(|round| round.samples(measure)).collect();
    let clients = || rounds.iter().map(|round| round.clients(measure));
    let least = clients().min().unwrap_or(0);
    if least < FEW_IN_ROUND || clients().sum::<usize>() < UNCANCELLED_FEW {
        return Vec::new();
    }
    let high = if least < FEW_FOR_P99 { 90 } else { 99 };
    let number = |percentile: u32| {
        let of = |samples: &[f64]| percentile_of(&Dist::of(samples), percentile);
        let pairs: Vec<_> = samples.iter().map(|[calm, storm]| (of(calm), of(storm))).collect();
        let (over, shown) = median_ratio(pairs.iter().map(|(calm, storm)| ratio(*calm, *storm)).collect());
        let (calm_ms, storm_ms) = pairs[shown];
        let by_ms = storm_ms - calm_ms;
        let noise_ms = match &samples[..] {
            // With a single calm, its halves are compared.
            [[calm, _]] => {
                let (first, second) = calm.split_at(calm.len() / 2);
                (of(first) - of(second)).abs()
            }
            _ => calm_noise(&pairs.iter().map(|(calm, _)| *calm).collect::<Vec<_>>()),
        };
        let noise_ms = noise_ms.max(NOISE_MS);
        // A number has to exceed both limits.
        let named_from = |calm_ms: f64| (SLOWER * calm_ms.max(LEAST_MS)).max(calm_ms + noise_ms);
        let passed = pairs.iter().filter(|(calm, storm)| *storm > named_from(*calm)).count();
        let named_by_ms = named_from(calm_ms) - storm_ms;
        // A high percentile of some hundred requests depends on a few of them: two rounds of three may exceed the
        // limits by chance.
        let slower = named_by_ms < 0.0 && passed * 4 >= pairs.len() * 3;
        let named_by_ms = (named_by_ms >= 0.0).then_some(named_by_ms);
        let rounds_above = over.runs.iter().filter(|ratio| **ratio > SLOWER).count() as u64;
        let round = rounds[shown].number;
        PairedComparison {
            measure,
            percentile,
            round,
            calm_ms,
            storm_ms,
            over,
            rounds_above,
            by_ms,
            noise_ms,
            slower,
            named_by_ms,
        }
    };
    // Most events arrive with others in one read of the socket: the median time between them is zero.
    let percentiles = if measure == Measure::Itl { &[high][..] } else { &[50, high] };
    percentiles.iter().map(|percentile| number(*percentile)).collect()
}

fn ratio(calm: f64, storm: f64) -> f64 {
    storm.max(LEAST_MS) / calm.max(LEAST_MS)
}

/// The spread of the ratios, and the index of their median by nearest rank. Of an even number it is the lower of the
/// middle two: a value between them was measured in no round.
fn median_ratio(ratios: Vec<f64>) -> (Spread, usize) {
    let mut ranks: Vec<usize> = (0..ratios.len()).collect();
    ranks.sort_by(|one, other| ratios[*one].total_cmp(&ratios[*other]));
    let shown = ranks[(ranks.len() - 1) / 2];
    let median = ratios[shown];
    (Spread { median, ..Spread::of(ratios).expect("there are rounds") }, shown)
}

/// The difference between two calms, as the median of all pairs. A disturbed calm is in few of the pairs. The largest
/// difference would grow with each round.
fn calm_noise(calms: &[f64]) -> f64 {
    let pairs =
        calms.iter().enumerate().flat_map(|(at, one)| calms[..at].iter().map(move |other| one - other));
    Spread::of(pairs.map(f64::abs).collect()).map_or(0.0, |spread| spread.median)
}

/// A percentile of a distribution.
fn percentile_of(dist: &Dist, percentile: u32) -> f64 {
    match percentile {
        50 => dist.p50,
        90 => dist.p90,
        _ => dist.p99,
    }
}

/// The ratio of storm to calm per round, for the p99 time to first token of paired requests.
pub(crate) fn ttft_p99_over_calm_paired(data: &RunData) -> Option<Spread> {
    let (rounds, _) = rounds(data);
    let of = |round: &PairedRound<'_>| {
        let [calm, storm] = round.samples(Measure::Ttft).map(|samples| Dist::of(&samples));
        (calm.n > 0).then(|| ratio(calm.p99, storm.p99))
    };
    let ratios: Vec<_> = rounds.iter().filter_map(of).collect();
    (!ratios.is_empty()).then(|| median_ratio(ratios).0)
}
