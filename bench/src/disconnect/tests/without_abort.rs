//! Whether engines receive aborts: what is judged, what is a finding, and what may be a lost race.

use super::*;
use crate::load::rng::Rng;

/// A request is cancelled at 1,000 ms. Its leg is aborted, or completes, at this time after it, microseconds.
#[derive(Clone, Copy)]
enum LegBehaviour {
    Aborted(u64),
    Completes(u64),
}

const CANCELLED_AT: u64 = 1_000_000;

/// Cancelled requests with work at one engine, P or D.
fn run(legs: &[(usize, LegBehaviour)]) -> Script {
    let mut script = Script::new();
    script.segment("phase prefill", SegmentKind::Phase, 0, 5_000, |script, segment| {
        for (number, (engine, then)) in legs.iter().enumerate() {
            let tag = format!("t{number}");
            script.cancelled(segment, &tag, CANCELLED_AT / 1_000, CancelKind::Fin, Phase::Prefill, 0);
            let leg = if *engine == P { "prefill" } else { "decode" };
            let mut event = |kind: &str, at_us: u64, word: Option<&str>| {
                let (seq, word) = (script.0.len() as u64, word.map(str::to_owned));
                script.0.push(Record::Event(EventRecord {
                    engine: *engine,
                    at_us,
                    seq,
                    tag: tag.clone(),
                    kind: kind.into(),
                    leg: (kind == "queued").then(|| leg.to_owned()),
                    outcome: word.filter(|_| kind == "ended"),
                    blocks: (kind == "freed").then_some(7),
                    ..EventRecord::default()
                }));
            };
            event("queued", CANCELLED_AT - 3_000, None);
            event("started", CANCELLED_AT - 1_000, None);
            let (ended, how) = match then {
                LegBehaviour::Aborted(after) => {
                    event("abort", CANCELLED_AT + after, None);
                    (after + 100, "abort")
                }
                LegBehaviour::Completes(after) => (*after, "length"),
            };
            event("ended", CANCELLED_AT + ended, Some(how));
            event("freed", CANCELLED_AT + ended, None);
        }
    });
    script.engine_state(P, 5_000, 0, 0, 0);
    script.engine_state(D, 5_000, 0, 0, 0);
    script
}

/// Twenty decode legs that are aborted within 1 ms, most of them much earlier.
fn quick_aborts() -> Vec<(usize, LegBehaviour)> {
    (1..=20).map(|at| (D, LegBehaviour::Aborted(at * 50))).collect()
}

fn legs(count: usize, leg: (usize, LegBehaviour)) -> Vec<(usize, LegBehaviour)> {
    vec![leg; count]
}

#[test]
fn short_prefills_without_aborts_are_a_finding() {
    // 4 ms of work were left: less than a limit in milliseconds would show, and more than an abort takes here.
    let completed = legs(20, (P, LegBehaviour::Completes(4_000)));
    let summary = run(&[quick_aborts(), completed].concat()).summary();
    assert_eq!(names(&summary), ["prefill_not_aborted"]);
    let says = &summary.findings[0].says;
    assert!(
        says.contains("20 of 20 cancelled requests") && says.contains("20 of them without an abort"),
        "{says}"
    );
    // Completed within 20 ms: an abort was not needed.
    assert_eq!((summary.all.cancelled, summary.all.abort_not_received, summary.all.abort_ms.n), (40, 0, 20));
    near(summary.all.abort_ms.max, 1.0);
    let ran_on = summary.all.ran_on.expect("it is judged");
    assert_eq!((ran_on.completed_without_abort, ran_on.judged), (20, 40));
    let json = serde_json::to_value(&summary).expect("JSON");
    assert_eq!(json["all"]["ran_on"], serde_json::json!({"completed_without_abort": 20, "judged": 40}));
    assert!(
        report::text(&summary).contains("20 of 40") && report::page(&summary).contains("<td>20 of 40</td>")
    );
    assert!(
        !summary.describe_unknown().iter().any(|what| what.contains("aborts at")),
        "{:?}",
        summary.describe_unknown()
    );
}

#[test]
fn a_leg_that_ends_before_an_abort_can_arrive_is_not_judged() {
    let short = legs(20, (P, LegBehaviour::Completes(800)));
    let summary = run(&[quick_aborts(), short].concat()).summary();
    assert_eq!(names(&summary), [""; 0]);
    let row = &summary.work[0];
    assert_eq!((row.leg, row.at_work, row.judged, row.completed_without_abort), ("prefill", 20, 0, 0));
    // Nine of ten were aborted within 0.9 ms.
    near(row.abort_delivery_ms, 0.9);
    let unknown = summary.describe_unknown().join("; ");
    assert!(unknown.contains("aborts at prefill engines: only 0 of 20"), "{unknown}");
    // Without aborts their usual delay is unknown.
    let summary = run(&legs(20, (P, LegBehaviour::Completes(19_000)))).summary();
    assert_eq!((names(&summary), summary.work[0].judged), (vec![], 0));
    let summary = run(&legs(20, (P, LegBehaviour::Completes(21_000)))).summary();
    assert_eq!(names(&summary), ["prefill_not_aborted"]);
}

#[test]
fn a_few_missed_aborts_are_races_when_aborts_are_slow() {
    let aborted = |count| legs(count, (P, LegBehaviour::Aborted(200)));
    let completed = |count, left| legs(count, (P, LegBehaviour::Completes(left)));
    // Two are chance; three of 103 are more than one in fifty, three of 203 are fewer.
    for (completed_legs, aborted_legs, named) in [(2, 20, false), (3, 100, true), (3, 200, false)] {
        let summary = run(&[aborted(aborted_legs), completed(completed_legs, 5_000)].concat()).summary();
        assert_eq!(
            !names(&summary).is_empty(),
            named,
            "{completed_legs} of {aborted_legs}: {:?}",
            summary.findings
        );
    }
    // One of ten aborts takes 8 ms: of the legs with 5 ms left a correct engine misses one of ten too.
    let slow = legs(10, (P, LegBehaviour::Aborted(8_000)));
    let summary = run(&[aborted(90), slow.clone(), completed(9, 5_000)].concat()).summary();
    assert_eq!((names(&summary), summary.work[0].completed_without_abort), (vec![], 9));
    near(summary.work[0].by_chance, 0.1);
    // Twice as many are more than that, and more than chance.
    let many = [aborted(90), slow.clone(), completed(60, 5_000)].concat();
    assert_eq!(names(&run(&many).summary()), ["prefill_not_aborted"]);
    // Of the legs with 9 ms left it misses none.
    assert_eq!(
        names(&run(&[aborted(90), slow.clone(), completed(9, 9_000)].concat()).summary()),
        ["prefill_not_aborted"]
    );
    // No leg needs more than 20 ms, however slow the other aborts are.
    let slower = legs(40, (P, LegBehaviour::Aborted(60_000)));
    let summary = run(&[aborted(60), slower, completed(9, 21_000)].concat()).summary();
    near(summary.work[0].abort_delivery_ms, 20.0);
    assert_eq!(names(&summary), ["prefill_not_aborted"]);
}

#[test]
fn a_leg_that_completes_at_once_needs_no_abort() {
    // A leg that completes within 19 ms needs no abort, one that completes after 21 ms received none, and one between
    // them was aborted.
    for (then, never, delay) in [
        (LegBehaviour::Completes(19_000), 0, None),
        (LegBehaviour::Completes(21_000), 1, Some(f64::INFINITY)),
        (LegBehaviour::Aborted(15_000), 0, Some(15.0)),
    ] {
        let all = run(&[(P, then)]).summary().all;
        assert_eq!(
            (all.abort_not_received, all.abort_ms.n),
            (never, usize::from(delay.is_some())),
            "{all:?}"
        );
        assert_eq!((all.abort_ms.max, all.abort_ms.never as u64), (delay.unwrap_or(0.0), never));
        assert_eq!(all.time_to_free_ms.n, 1, "its blocks were back all the same");
    }
}

/// An engine that stops its work at random delays, for any amount of work: missed aborts are no finding.
#[test]
fn correct_engines_pass_and_engines_that_miss_a_quarter_fail() {
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        // An abort takes 0.3 ms, and sometimes 6 ms. The work varies from very short to long.
        let work = 1_000 + seed * 500;
        let mut engines = |misses: f64| {
            let mut leg = |engine: usize, work: u64, misses: f64| {
                let delay = (rng.exponential() * if rng.chance(0.1) { 6_000.0 } else { 300.0 }) as u64;
                let left = rng.below(work);
                let aborted = delay < left && !rng.chance(misses);
                (
                    engine,
                    if aborted { LegBehaviour::Aborted(delay) } else { LegBehaviour::Completes(left + 1) },
                )
            };
            let mut all: Vec<_> = (0..300).map(|_| leg(P, work, misses)).collect();
            all.extend((0..300).map(|_| leg(D, 60_000, 0.0)));
            run(&all).summary()
        };
        let summary = engines(0.0);
        assert_eq!(names(&summary), [""; 0], "work up to {work} µs: {:?}", summary.work);
        if work >= 4_000 {
            let summary = engines(0.25);
            assert_eq!(names(&summary), ["prefill_not_aborted"], "work up to {work} µs: {:?}", summary.work);
        }
    }
}

#[test]
fn a_leg_that_failed_or_ended_before_is_no_finding() {
    let mut script = run(&legs(20, (P, LegBehaviour::Completes(9_000))));
    for record in &mut script.0 {
        if let Record::Event(event) = record
            && event.kind == "ended"
        {
            event.outcome = Some("error".into());
        }
    }
    let summary = script.summary();
    assert_eq!((names(&summary), summary.work[0].at_work), (vec![], 0));
}

#[test]
fn late_cancels_are_counted_and_reported() {
    let mut script = storm();
    script.segment("phase stream", SegmentKind::Phase, 2_000, 5_000, |script, segment| {
        for number in 0..12 {
            let tag = format!("stall-{number}");
            script.cancelled(segment, &tag, 1_090, CancelKind::Stall, Phase::Stream, 3);
            script.engine_events(P, &tag, &prefill_leg("transfer_done", 1_031));
            // Two were active; the others had completed.
            let (ended, how) = if number < 2 { (1_095, "abort") } else { (1_080, "length") };
            let says = [
                ("queued", 1_022, 0, "decode"),
                ("fetching", 1_025, 7, ""),
                ("fetched", 1_030, 0, "landed"),
                ("first_token", 1_035, 0, ""),
                ("ended", ended, 9, how),
                ("freed", ended, 8, ""),
            ];
            script.engine_events(D, &tag, &says);
        }
        // One that completed before its cancel, and one that failed.
        script.cancelled(segment, "had-it", 1_090, CancelKind::Stall, Phase::Stream, 3);
        let Some(Record::Call(call)) = script.0.last_mut() else { panic!("a call") };
        (call.outcome, call.left_us) = ("done".into(), None);
    });
    let summary = script.summary();
    let row = summary.kinds.iter().find(|row| row.kind == CancelKind::Stall).expect("a row");
    assert_eq!((row.group.cancelled, row.served, row.too_late), (2, 0, 11));
    let fin = summary.kinds.iter().find(|row| row.kind == CancelKind::Fin).expect("a row");
    assert_eq!((fin.group.cancelled, fin.too_late), (3, 1));
    let unknown = summary.describe_unknown().join("; ");
    assert!(unknown.contains("cancel by stall: only 2 of 13 were measured"), "{unknown}");
    assert!(report::page(&summary).contains("<th>too late</th>"));
    // Tokens that a stalled client does not read have still reached it.
    let mut unread = Script(script.0.clone());
    for record in &mut unread.0 {
        if let Record::Call(call) = record {
            call.tokens_us.retain(|_| !call.tag.starts_with("stall"));
        }
    }
    let hit = |summary: &Summary| {
        let row = summary.phases.iter().find(|row| row.phase == Phase::Stream);
        row.map(|row| row.group.cancelled)
    };
    assert_eq!((hit(&summary), hit(&unread.summary())), (Some(3), Some(3)));
}
