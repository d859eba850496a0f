//! Uncancelled requests compared with their paired requests of the calm.

use super::super::analyse::summary::{Measure, PairedComparison};
use super::*;
use crate::load::rng::Rng;

/// A request of a round: its due time, and its time to first token in calm and in storm, microseconds. Each response
/// has two more tokens, 1 ms apart.
#[derive(Clone, Copy)]
struct Arrival {
    due: u64,
    calm: u64,
    storm: u64,
    leaves: bool,
}

fn call(segment: &str, at: usize, due_us: u64, ttft: u64) -> CallRecord {
    CallRecord {
        segment: segment.into(),
        tag: format!("{segment}-{at}"),
        stream: true,
        due_us,
        // The client starts late.
        began_us: due_us + 300,
        ended_us: due_us + ttft + 2_500,
        tokens_us: (0..3).map(|token| ttft - 300 + token * 1_000).collect(),
        outcome: "done".into(),
        generated: 3,
        text: "word".into(),
        ..CallRecord::default()
    }
}

/// Calm and storm of each round; every other round begins with the storm.
fn run(rounds: &[Vec<Arrival>]) -> Script {
    let mut script = Script::new();
    for (round, arrivals) in rounds.iter().enumerate() {
        let mut of = |what: SegmentKind, second: u64| {
            let segment =
                format!("{} {}", if what == SegmentKind::Calm { "calm" } else { "storm" }, round + 1);
            let from = (round as u64 * 2 + second) * 10_000;
            script.segment(&segment, what, from, from + 9_000, |script, segment| {
                for (at, arrival) in arrivals.iter().enumerate() {
                    let due = from * 1_000 + arrival.due;
                    let storms = what == SegmentKind::Storm;
                    let mut call = call(segment, at, due, if storms { arrival.storm } else { arrival.calm });
                    if storms && arrival.leaves {
                        call.leaves = Some(CancelPlan { phase: None, kind: CancelKind::Timeout });
                        (call.outcome, call.left_us) = ("left".into(), Some(call.ended_us));
                        let again =
                            CallRecord { leaves: None, retries: Some(call.tag.clone()), ..call.clone() };
                        // A retry is not an arrival.
                        script.0.push(Record::Call(CallRecord {
                            tag: format!("{}-again", call.tag),
                            outcome: "done".into(),
                            due_us: due + 1,
                            ..again
                        }));
                    }
                    script.0.push(Record::Call(call));
                }
            });
        };
        let order = if round % 2 == 0 {
            [SegmentKind::Calm, SegmentKind::Storm]
        } else {
            [SegmentKind::Storm, SegmentKind::Calm]
        };
        for (second, what) in order.into_iter().enumerate() {
            of(what, second as u64);
        }
    }
    script
}

/// `each` returns the times of an arrival; every other one is cancelled.
fn rounds(count: usize, of: usize, mut each: impl FnMut(usize, usize) -> (u64, u64)) -> Vec<Vec<Arrival>> {
    let arrival = |round, at, (calm, storm)| Arrival {
        due: at as u64 * 20_000 + round as u64,
        calm,
        storm,
        leaves: at % 2 == 0,
    };
    (0..count).map(|round| (0..of).map(|at| arrival(round, at, each(round, at))).collect()).collect()
}

fn number(summary: &Summary, measure: Measure, percentile: u32) -> &PairedComparison {
    let numbers = &summary.uncancelled.numbers;
    let ours = |number: &&PairedComparison| (number.measure, number.percentile) == (measure, percentile);
    numbers.iter().find(ours).unwrap_or_else(|| panic!("{measure:?} {percentile}: {numbers:?}"))
}

fn slowed(summary: &Summary) -> Vec<&str> {
    let slowed = summary.findings.iter().filter(|found| found.name == "uncancelled_slowed");
    slowed.map(|found| found.says.as_str()).collect()
}

#[test]
fn uncancelled_requests_are_compared_with_their_paired_requests() {
    // The cancelled requests were slow in the calm: the whole calm is slower than the storm.
    let rounds = rounds(
        3,
        60,
        |round, at| if at % 2 == 0 { (90_000, 1_000) } else { (10_000 + round as u64, 14_000) },
    );
    let summary = run(&rounds).summary();
    let (calm, same) =
        (summary.calm.as_ref().expect("calm"), summary.calm_paired.as_ref().expect("stand-ins"));
    let storm = summary.storm.as_ref().expect("storm");
    assert_eq!((calm.requests, same.requests, storm.requests), (180, 90, 90));
    assert_eq!((summary.uncancelled.requests, summary.uncancelled.rounds), (90, 3));
    near(calm.ttft_ms.p99, 90.0);
    near(same.ttft_ms.max, 10.002);
    near(storm.ttft_ms.max, 14.0);
    let ttft = number(&summary, Measure::Ttft, 90);
    assert_eq!((ttft.calm_ms, ttft.storm_ms, ttft.noise_ms, ttft.slower), (10.001, 14.0, 2.0, true));
    near(ttft.over.median, 14.0 / 10.001);
    near(ttft.by_ms, 3.999);
    near(summary.ttft_p99_over_calm_paired.as_ref().expect("rounds").median, 14.0 / 10.001);
    // Three tokens, 1 ms apart.
    for (measure, percentile) in [(Measure::Itl, 90), (Measure::Tpot, 50), (Measure::Tpot, 90)] {
        near(number(&summary, measure, percentile).storm_ms, 1.0);
    }
    assert_eq!(summary.uncancelled.numbers.len(), 7, "of the time between tokens the high percentile alone");
    // The first token, and with it the complete response; not the time between tokens.
    let slowed = slowed(&summary);
    let [first, whole] = slowed[..] else { panic!("{slowed:?}") };
    assert!(first.contains("14.0 ms for the first token at p90"), "{first}");
    assert!(first.contains("10.0 ms in the calm") && first.contains("1.40 times"), "{first}");
    assert!(whole.contains("whole answer"), "{whole}");
    assert!(
        summary.findings[0].shown_by.iter().all(|tag| tag.starts_with("storm") && !tag.ends_with("again"))
    );
    let (text, page) = (report::text(&summary), report::page(&summary));
    assert!(text.contains("calm, paired requests") && page.contains("calm, paired requests"));
    assert!(
        text.contains("first token p90: calm 10.0 ms, storm 14.0 ms in round 2, +4.0 ms, 1.40 times: SLOWER"),
        "{text}"
    );
}

#[test]
fn a_difference_within_a_fifth_or_the_noise_is_no_finding() {
    // The calms of the three rounds differ by 3, 3 and 6 ms. Each storm is slower by less than their median.
    let noisy = |more: u64| {
        rounds(3, 60, move |round, _| (10_000 + 3_000 * round as u64, 10_000 + 3_000 * round as u64 + more))
    };
    assert_eq!(slowed(&run(&noisy(2_900)).summary()), [""; 0]);
    // And by a fifth of each calm.
    assert_ne!(slowed(&run(&noisy(3_300)).summary()), [""; 0]);
    // With a single calm its halves are compared.
    let halves = |more: u64| {
        rounds(1, 120, move |_, at| {
            let calm = if at < 60 { 10_000 } else { 14_000 };
            (calm, calm + more)
        })
    };
    assert_eq!(slowed(&run(&halves(3_900)).summary()), [""; 0]);
    assert_ne!(slowed(&run(&halves(4_100)).summary()), [""; 0]);
    // Beyond the noise and within a fifth; twice as much and within 2 ms.
    assert_eq!(slowed(&run(&rounds(3, 60, |_, _| (40_000, 47_900))).summary()), [""; 0]);
    assert_ne!(slowed(&run(&rounds(3, 60, |_, _| (40_000, 48_200))).summary()), [""; 0]);
    assert_eq!(slowed(&run(&rounds(3, 60, |_, _| (1_500, 3_400))).summary()), [""; 0]);
    // One slow round of three is a slow moment of the machine.
    let once = rounds(3, 60, |round, _| (10_000, if round == 1 { 90_000 } else { 10_000 }));
    assert_eq!(slowed(&run(&once).summary()), [""; 0]);
    // If noise hides the slowest requests, the median may still show the effect.
    let middle = rounds(3, 60, |round, at| match at {
        1 | 3 | 5 | 7 => (20_000 * (round as u64 + 1), 20_000 * (round as u64 + 1)),
        _ => (10_000, 15_000),
    });
    let summary = run(&middle).summary();
    assert!(slowed(&summary)[0].contains("first token at p50"), "{:?}", slowed(&summary));
}

#[test]
fn a_shown_number_comes_from_one_round() {
    // The medians are 100 ms of the calms, 95 ms of the storms and 1.1 of the ratios.
    let times = [(100_000, 90_000), (110_000, 121_000), (70_000, 95_000)];
    let summary = run(&rounds(3, 60, |round, _| times[round])).summary();
    let shown = number(&summary, Measure::Ttft, 90);
    assert_eq!((shown.round, shown.calm_ms, shown.storm_ms, shown.slower), (2, 110.0, 121.0, false));
    near(shown.over.median, 1.1);
    near(shown.by_ms, 11.0);
    // The calms differ by 10, 30 and 40 ms: 30 ms more than the calm exceed both the noise and the target.
    near(shown.noise_ms, 30.0);
    near(shown.named_by_ms.expect("it is not named"), 19.0);
    let (text, page) = (report::text(&summary), report::page(&summary));
    let says = "first token p90: calm 110 ms, storm 121 ms in round 2, +11.0 ms, 1.10 times: a finding from 19.0 ms more";
    assert!(text.contains(says), "{text}");
    let cells =
        "<td>2</td><td>110 ms</td><td>121 ms</td><td>+11.0 ms</td><td>1.10 ×</td><td>0.90 to 1.36</td>";
    assert!(page.contains(cells), "{page}");
    // Of two rounds the lower one: a value between them was not measured.
    let summary = run(&rounds(2, 60, |round, _| times[round + 1])).summary();
    let shown = number(&summary, Measure::Ttft, 90);
    assert_eq!((shown.round, shown.noise_ms), (1, 40.0));
}

#[test]
fn the_printed_threshold_is_the_threshold_of_the_finding() {
    // Within the target; within the noise; and a few milliseconds.
    for (calm, apart) in [(40_000, 0), (40_000, 15_000), (3_000, 500)] {
        let calm = |round: usize| calm + round as u64 * apart;
        // Two of the other rounds are above this one and one is below, for any `more`.
        let with = |more: u64| {
            let storm = |round| [900_000, calm(round) + 300 + more, 1_000, 900_000][round];
            let summary = run(&rounds(4, 60, |round, _| (calm(round), storm(round)))).summary();
            number(&summary, Measure::Ttft, 90).clone()
        };
        let shown = with(0);
        assert_eq!(shown.round, 2);
        let more = (shown.named_by_ms.expect("it is not named") * 1e3).round() as u64;
        assert!(!with(more - 50).slower && with(more + 50).slower, "{shown:?}");
    }
}

#[test]
fn a_number_above_the_target_is_printed_even_without_a_finding() {
    // In the median round 1.25 times the calm, and less than the calms differ by.
    let times = [(100_000, 172_000), (160_000, 180_000), (100_000, 125_000)];
    let summary = run(&rounds(3, 60, |round, _| times[round])).summary();
    assert_eq!((slowed(&summary).len(), number(&summary, Measure::Ttft, 90).rounds_above), (0, 2));
    let says = "first token p90 1.25 × (100 ms to 125 ms; 2 of 3 rounds; no finding: within chance)";
    let (text, page) = (report::text(&summary), report::page(&summary));
    assert!(text.contains(says) && page.contains(says), "{text}");
    assert!(page.contains("<td>4 of 7: "), "first token and whole answer, both percentiles: {page}");
    let named = run(&rounds(3, 60, |_, _| (100_000, 150_000))).summary();
    assert!(
        report::text(&named).contains("first token p90 1.50 × (100 ms to 150 ms; 3 of 3 rounds; a finding)")
    );
    let healthy = run(&rounds(3, 60, |_, _| (100_000, 119_000))).summary();
    assert!(report::text(&healthy).contains("in the median round: nothing"));
}

#[test]
fn tokens_of_one_read_have_no_gap() {
    let mut script = run(&rounds(3, 60, |_, _| (10_000, 10_000)));
    for record in &mut script.0 {
        if let Record::Call(call) = record {
            call.tokens_us[1] = call.tokens_us[0];
            // The calm reports five tokens.
            call.generated = if call.segment.starts_with("calm") { 5 } else { 3 };
        }
    }
    let summary = script.summary();
    let (calm, storm) = (summary.calm.as_ref().expect("calm"), summary.storm.as_ref().expect("storm"));
    near(calm.itl_within_one_read, 0.5);
    assert_eq!((calm.itl_ms.p50, calm.itl_ms.max), (0.0, 2.0));
    assert_eq!((calm.tpot_ms.n, calm.tpot_ms.p50, storm.tpot_ms.p50), (180, 0.5, 1.0));
    assert!(report::page(&summary).contains("50 % of the calm events and 50 % of the storm events"));
}

#[test]
fn two_rounds_of_three_may_be_slower_by_chance() {
    let storms = |third: u64| move |round: usize, _| (40_000, [60_000, 60_000, third][round]);
    assert_eq!(slowed(&run(&rounds(3, 60, storms(41_000))).summary()), [""; 0]);
    assert_ne!(slowed(&run(&rounds(3, 60, storms(60_000))).summary()), [""; 0]);
}

#[test]
fn one_disturbed_calm_does_not_hide_a_slower_storm() {
    // Five calms of 40 to 44 ms and one of 200 ms; every storm is slower by 30 ms.
    let calm = |round: usize| if round == 3 { 200_000 } else { 40_000 + 1_000 * round as u64 };
    let summary = run(&rounds(6, 60, |round, _| (calm(round), calm(round) + 30_000))).summary();
    assert!(slowed(&summary)[0].contains("first token at p90"), "{:?}", summary.findings);
    let shown = number(&summary, Measure::Ttft, 90);
    assert!(shown.slower && shown.noise_ms < 10.0, "{shown:?}");
    // Without slower storms the same calms show nothing.
    assert_eq!(slowed(&run(&rounds(6, 60, |round, _| (calm(round), calm(round)))).summary()), [""; 0]);
}

#[test]
fn unpaired_requests_are_reported_and_not_compared() {
    let not_judged = |script: &Script, what: &str| {
        let summary = script.summary();
        let unknown = summary.describe_unknown();
        assert!(unknown.iter().any(|line| line.contains(what)), "{what}: {unknown:?}");
        summary
    };
    // Nine pairs per round.
    let few = run(&rounds(3, 18, |_, _| (10_000, 90_000)));
    let summary = not_judged(&few, "27 uncancelled requests in 3 storms are too few");
    assert_eq!((slowed(&summary), summary.uncancelled.numbers.len()), (vec![], 0));
    // A ratio that is not judged is not shown.
    assert!(summary.ttft_p99_over_calm_paired.is_some());
    assert!(
        !report::text(&summary).contains("TTFT p99, storm over")
            && !report::page(&summary).contains("time to first token of uncancelled requests")
    );
    // A stopped round has no pairs.
    let mut broken = run(&rounds(3, 60, |_, _| (10_000, 90_000)));
    let last = broken.0.iter().rposition(|record| matches!(record, Record::Call(_))).expect("a call");
    broken.0.remove(last);
    let summary = not_judged(&broken, "1 rounds: calm and storm have different requests");
    assert_eq!((summary.uncancelled.rounds, slowed(&summary).is_empty()), (2, false));
    // A failed request is in neither.
    let mut failed = run(&rounds(3, 60, |_, _| (10_000, 10_000)));
    for record in &mut failed.0 {
        if let Record::Call(call) = record
            && call.tag.ends_with("-7")
        {
            call.outcome = if call.segment.starts_with("calm") { "broken" } else { "done" }.into();
            call.tokens_us = if call.segment.starts_with("calm") { Vec::new() } else { vec![900_000] };
        }
    }
    let summary = failed.summary();
    near(number(&summary, Measure::Ttft, 90).storm_ms, 10.0);
}

#[test]
fn numbers_of_uncancelled_requests_match_a_recount() {
    let mut rng = Rng::new(23);
    for turn in 0..24 {
        let (count, of) = (1 + turn % 5, if turn % 3 == 0 { 260 } else { 70 });
        let mut time = |least: u64| least + rng.below(30_000);
        let rounds = rounds(count, of, |_, _| (time(5_000), time(8_000)));
        let summary = run(&rounds).summary();
        let percentile = if of / 2 < 100 { 90 } else { 99 };
        for (measure, added) in [(Measure::Ttft, 0.0), (Measure::E2e, 2.5)] {
            for percentile in [50, percentile] {
                let share = f64::from(percentile) / 100.0;
                let of = |round: &[Arrival], time: &dyn Fn(&Arrival) -> u64| {
                    let stayed = round.iter().filter(|arrival| !arrival.leaves);
                    let times: Vec<f64> = stayed.map(|arrival| time(arrival) as f64 / 1e3 + added).collect();
                    by_counting(&times, share)
                };
                let calms: Vec<f64> = rounds.iter().map(|round| of(round, &|arrival| arrival.calm)).collect();
                let storms: Vec<f64> =
                    rounds.iter().map(|round| of(round, &|arrival| arrival.storm)).collect();
                let ratios: Vec<f64> = storms.iter().zip(&calms).map(|(storm, calm)| storm / calm).collect();
                let more: Vec<f64> = storms.iter().zip(&calms).map(|(storm, calm)| storm - calm).collect();
                let apart = |at: usize| (0..at).map(move |other| (at, other));
                let apart = (0..calms.len()).flat_map(apart);
                let apart: Vec<f64> = apart.map(|(one, other)| (calms[one] - calms[other]).abs()).collect();
                let noise = if let [round] = &rounds[..] {
                    let (first, second) = round.split_at(round.len() / 2);
                    (of(first, &|arrival| arrival.calm) - of(second, &|arrival| arrival.calm)).abs()
                } else {
                    middle(&apart)
                };
                let found = number(&summary, measure, percentile);
                let shown = found.round as usize - 1;
                near(found.calm_ms, calms[shown]);
                near(found.storm_ms, storms[shown]);
                near(found.by_ms, more[shown]);
                near(found.over.median, ratios[shown]);
                // At least half of the rounds are not above the shown one, and fewer than half are below it.
                let up_to = ratios.iter().filter(|ratio| **ratio <= ratios[shown]).count();
                let below = ratios.iter().filter(|ratio| **ratio < ratios[shown]).count();
                assert!(2 * up_to >= ratios.len() && 2 * below < ratios.len(), "{shown} of {ratios:?}");
                near(found.noise_ms, noise.max(2.0));
                let is_slower = |round: usize| ratios[round] > 1.2 && more[round] > noise.max(2.0);
                let passed = (0..ratios.len()).filter(|round| is_slower(*round)).count();
                assert_eq!(found.slower, is_slower(shown) && passed as f64 >= 0.75 * ratios.len() as f64);
            }
        }
    }
}

/// The median by counting: as many values are below as above.
fn middle(values: &[f64]) -> f64 {
    let rank = |value: f64| values.iter().filter(|other| **other < value).count();
    let at = |wanted: usize| {
        let not_above = values.iter().copied().filter(|value| rank(*value) <= wanted);
        not_above.fold(f64::NEG_INFINITY, f64::max)
    };
    let (low, high) = ((values.len() - 1) / 2, values.len() / 2);
    f64::midpoint(at(low), at(high))
}
