//! Who stayed, compared one by one: a client that stayed in a storm, and the request of the same moment and kind in the
//! calm of that round, its stand-in. The others of the calm are in neither: a storm is less to do, and what is slow in it
//! would be lost in what is not there.
//!
//! ```text
//!  calm 1    a  b  c  d  e       what b, d and e got
//!  storm 1   ✗  b  ✗  d  e       what b, d and e got     ─▶ one ratio for each round and number ─▶ their median
//! ```
//!
//! All that is said of a number is of one round, the one whose ratio is the median: calm, storm, ratio and difference of
//! different rounds would contradict each other. A number is slower where that ratio is above [`SLOWER`], and the difference
//! above the noise: what the same number usually differs by from one calm to another, where nobody leaves; in that round, and
//! in three of four.

use crate::common::stats::Spread;
use crate::disconnect::analyse::dist::Dist;
use crate::disconnect::analyse::summary::{Compared, Measure, UNCANCELLED_FEW, Uncancelled};
use crate::disconnect::analyse::{Act, Facts, series};
use crate::disconnect::record::raw::{ActKind, CallRecord};

/// The target: those who stay get their first token within this many times what it took in the calm.
pub(crate) const SLOWER: f64 = 1.2;
/// What differs by less is noise, whatever the calms say: a machine's timer and scheduler alone do that, milliseconds.
pub(crate) const NOISE_MS: f64 = 2.0;
/// Times are told to a microsecond: what is none is less than that.
const LEAST_MS: f64 = 1e-3;
/// Of fewer clients in a round a high percentile is one client's bad luck.
const FEW_IN_ROUND: usize = 10;
/// Of fewer clients in a round the 99th percentile is the greatest.
const FEW_FOR_P99: usize = 100;

/// One round: pairs of a request of the calm and the client of the storm that stayed, in the order in which they were due.
pub(crate) struct Round<'a> {
    /// From 1, of all that were begun.
    number: u64,
    pub(crate) pairs: Vec<(&'a CallRecord, &'a CallRecord)>,
}

/// The rounds in which every request of the storm has its stand-in, and how many rounds have not.
pub(crate) fn rounds(facts: &Facts) -> (Vec<Round<'_>>, u64) {
    let acts = |what: ActKind| facts.acts.iter().filter(move |act| act.what == what);
    let mut rounds = Vec::new();
    let mut unpaired = 0;
    for (number, (calm, storm)) in (1..).zip(acts(ActKind::Calm).zip(acts(ActKind::Storm))) {
        let (calm, storm) = (arrivals(facts, calm), arrivals(facts, storm));
        // One that was broken off says nothing of who is whose.
        let same = calm.len() == storm.len()
            && calm.iter().zip(&storm).all(|(calm, storm)| calm.stream == storm.stream);
        if same {
            let pairs = calm.into_iter().zip(storm);
            let pairs = pairs.filter(|(_, storm)| storm.leaves.is_none()).collect();
            rounds.push(Round { number, pairs });
        } else {
            unpaired += 1;
        }
    }
    (rounds, unpaired)
}

/// What was due in a part of the run, in order; what an SDK asks again is no arrival.
fn arrivals<'a>(facts: &'a Facts, act: &Act) -> Vec<&'a CallRecord> {
    let ours = facts.calls.iter().filter(|call| call.act == act.name && call.retries.is_none());
    let mut ours: Vec<_> = ours.collect();
    ours.sort_by_key(|call| call.due_us);
    ours
}

impl Round<'_> {
    /// Pairs that both have their answer, and something of this measure.
    fn whole(&self, measure: Measure) -> impl Iterator<Item = [&CallRecord; 2]> {
        let whole = move |call: &CallRecord| call.outcome == "done" && !of(measure, call).is_empty();
        let pairs = self.pairs.iter().map(|(calm, storm)| [*calm, *storm]);
        pairs.filter(move |pair| pair.iter().all(|call| whole(call)))
    }

    fn clients(&self, measure: Measure) -> usize {
        self.whole(measure).count()
    }

    /// Of the calm, and of the storm.
    fn samples(&self, measure: Measure) -> [Vec<f64>; 2] {
        [0, 1].map(|side| self.whole(measure).flat_map(|pair| of(measure, pair[side])).collect())
    }
}

/// What one call brings to a measure, ms.
pub(crate) fn of(measure: Measure, call: &CallRecord) -> Vec<f64> {
    match measure {
        Measure::Ttft => series::ttft(call).into_iter().collect(),
        Measure::Itl => series::gaps(call).collect(),
        Measure::Tpot => series::tpot(call).into_iter().collect(),
        Measure::E2e => vec![call.ended_us.saturating_sub(call.due_us) as f64 / 1e3],
    }
}

/// Every number of those who stayed beside the same requests' in the calm.
pub(crate) fn compared(facts: &Facts) -> Uncancelled {
    let (rounds, unpaired) = rounds(facts);
    let rows = Measure::ALL.into_iter().flat_map(|measure| of_measure(&rounds, measure));
    Uncancelled {
        requests: rounds.iter().map(|round| round.pairs.len() as u64).sum(),
        rounds: rounds.len() as u64,
        unpaired_rounds: unpaired,
        numbers: rows.collect(),
    }
}

/// The median and a high percentile of one measure, of the time between tokens the latter alone; nothing of too few.
fn of_measure(rounds: &[Round<'_>], measure: Measure) -> Vec<Compared> {
    let samples: Vec<_> = rounds.iter().map(|round| round.samples(measure)).collect();
    let clients = || rounds.iter().map(|round| round.clients(measure));
    let least = clients().min().unwrap_or(0);
    if least < FEW_IN_ROUND || clients().sum::<usize>() < UNCANCELLED_FEW {
        return Vec::new();
    }
    let high = if least < FEW_FOR_P99 { 90 } else { 99 };
    let number = |percentile: u32| {
        let of = |samples: &[f64]| at(&Dist::of(samples), percentile);
        let pairs: Vec<_> = samples.iter().map(|[calm, storm]| (of(calm), of(storm))).collect();
        let (over, shown) = middle(pairs.iter().map(|(calm, storm)| ratio(*calm, *storm)).collect());
        let (calm_ms, storm_ms) = pairs[shown];
        let by_ms = storm_ms - calm_ms;
        let noise_ms = match &samples[..] {
            // Of one calm, its first half and its second.
            [[calm, _]] => {
                let (first, second) = calm.split_at(calm.len() / 2);
                (of(first) - of(second)).abs()
            }
            _ => from_calm_to_calm(&pairs.iter().map(|(calm, _)| *calm).collect::<Vec<_>>()),
        };
        let noise_ms = noise_ms.max(NOISE_MS);
        // Both limits have to be passed.
        let named_from = |calm_ms: f64| (SLOWER * calm_ms.max(LEAST_MS)).max(calm_ms + noise_ms);
        let passed = pairs.iter().filter(|(calm, storm)| *storm > named_from(*calm)).count();
        let named_by_ms = named_from(calm_ms) - storm_ms;
        // A high percentile of some hundred clients is that of a few of them: two rounds of three may have it so by chance.
        let slower = named_by_ms < 0.0 && passed * 4 >= pairs.len() * 3;
        let named_by_ms = (named_by_ms >= 0.0).then_some(named_by_ms);
        let rounds_above = over.runs.iter().filter(|ratio| **ratio > SLOWER).count() as u64;
        let round = rounds[shown].number;
        Compared {
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
    // Most events come with others in one read of the socket: what is between two of them in the middle is nothing.
    let percentiles = if measure == Measure::Itl { &[high][..] } else { &[50, high] };
    percentiles.iter().map(|percentile| number(*percentile)).collect()
}

fn ratio(calm: f64, storm: f64) -> f64 {
    storm.max(LEAST_MS) / calm.max(LEAST_MS)
}

/// What the rounds' ratios spread over, and which of them is their median, by nearest rank: of an even number the lower of
/// the two in the middle, for what lies between two rounds was measured in none.
fn middle(ratios: Vec<f64>) -> (Spread, usize) {
    let mut ranks: Vec<usize> = (0..ratios.len()).collect();
    ranks.sort_by(|one, other| ratios[*one].total_cmp(&ratios[*other]));
    let shown = ranks[(ranks.len() - 1) / 2];
    let median = ratios[shown];
    (Spread { median, ..Spread::of(ratios).expect("there are rounds") }, shown)
}

/// By how much two calms differ, the median of all pairs of them. One calm that was disturbed is in few of the pairs; the
/// widest of all would grow with every round.
fn from_calm_to_calm(calms: &[f64]) -> f64 {
    let pairs =
        calms.iter().enumerate().flat_map(|(at, one)| calms[..at].iter().map(move |other| one - other));
    Spread::of(pairs.map(f64::abs).collect()).map_or(0.0, |spread| spread.median)
}

/// One of the percentiles that a distribution knows.
fn at(dist: &Dist, percentile: u32) -> f64 {
    match percentile {
        50 => dist.p50,
        90 => dist.p90,
        _ => dist.p99,
    }
}

/// The 99th percentile of the time to first token, each round's storm over the same requests of its calm.
pub(crate) fn ttft_p99_over_calm_paired(facts: &Facts) -> Option<Spread> {
    let (rounds, _) = rounds(facts);
    let of = |round: &Round<'_>| {
        let [calm, storm] = round.samples(Measure::Ttft).map(|samples| Dist::of(&samples));
        (calm.n > 0).then(|| ratio(calm.p99, storm.p99))
    };
    let ratios: Vec<_> = rounds.iter().filter_map(of).collect();
    (!ratios.is_empty()).then(|| middle(ratios).0)
}
