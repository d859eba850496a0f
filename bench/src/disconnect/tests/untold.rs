//! Whether engines are told: what is judged, what is named, and what may be an honest race.

use super::*;
use crate::load::rng::Rng;

/// A client that leaves at 1,000 ms, and what becomes of the leg that works for it then, microseconds after: told, or at its
/// own end.
#[derive(Clone, Copy)]
enum Then {
    Told(u64),
    Ends(u64),
}

const GONE: u64 = 1_000_000;

/// Clients that leave while one engine, P or D, works for them.
fn run(legs: &[(usize, Then)]) -> Script {
    let mut script = Script::new();
    script.act("phase prefill", ActKind::Phase, 0, 5_000, |script, act| {
        for (number, (engine, then)) in legs.iter().enumerate() {
            let tag = format!("t{number}");
            script.left(act, &tag, GONE / 1_000, Kind::Fin, Phase::Prefill, 0);
            let leg = if *engine == P { "prefill" } else { "decode" };
            let mut told = |kind: &str, at_us: u64, word: Option<&str>| {
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
            told("queued", GONE - 3_000, None);
            told("started", GONE - 1_000, None);
            let (ended, how) = match then {
                Then::Told(after) => {
                    told("abort", GONE + after, None);
                    (after + 100, "abort")
                }
                Then::Ends(after) => (*after, "length"),
            };
            told("ended", GONE + ended, Some(how));
            told("freed", GONE + ended, None);
        }
    });
    script.books(P, 5_000, 0, 0, 0);
    script.books(D, 5_000, 0, 0, 0);
    script
}

/// Twenty decode legs that are told within 1 ms, most of them far sooner.
fn telling() -> Vec<(usize, Then)> {
    (1..=20).map(|at| (D, Then::Told(at * 50))).collect()
}

fn legs(count: usize, leg: (usize, Then)) -> Vec<(usize, Then)> {
    vec![leg; count]
}

#[test]
fn short_prefills_that_nobody_stops_are_named() {
    // 4 ms of work were left: less than any limit in milliseconds would see, and more than telling takes here.
    let untold = legs(20, (P, Then::Ends(4_000)));
    let summary = run(&[telling(), untold].concat()).summary();
    assert_eq!(names(&summary), ["prefill_not_aborted"]);
    let says = &summary.findings[0].says;
    assert!(
        says.contains("20 of 20 cancelled requests") && says.contains("20 of them without an abort"),
        "{says}"
    );
    // Over by themselves within 20 ms: neither told nor never told.
    assert_eq!((summary.all.cancelled, summary.all.abort_not_received, summary.all.abort_ms.n), (40, 0, 20));
    near(summary.all.abort_ms.max, 1.0);
    let ran_on = summary.all.ran_on.expect("it is judged");
    assert_eq!((ran_on.completed_without_abort, ran_on.judged), (20, 40));
    let json = serde_json::to_value(&summary).expect("JSON");
    assert_eq!(json["all"]["ran_on"], serde_json::json!({"completed_without_abort": 20, "judged": 40}));
    assert!(
        report::text(&summary).contains("20 of 40") && report::page(&summary).contains("<td>20 of 40</td>")
    );
    assert!(!summary.unknown().iter().any(|what| what.contains("aborts at")), "{:?}", summary.unknown());
}

#[test]
fn a_leg_that_is_over_sooner_than_anybody_can_be_told_is_not_judged() {
    let short = legs(20, (P, Then::Ends(800)));
    let summary = run(&[telling(), short].concat()).summary();
    assert_eq!(names(&summary), [""; 0]);
    let row = &summary.work[0];
    assert_eq!((row.leg, row.at_work, row.judged, row.completed_without_abort), ("prefill", 20, 0, 0));
    // Nine of ten were told within 0.9 ms.
    near(row.abort_delivery_ms, 0.9);
    let unknown = summary.unknown().join("; ");
    assert!(unknown.contains("aborts at prefill engines: only 0 of 20"), "{unknown}");
    // Where nobody was told anything, nothing is known of how long that takes.
    let summary = run(&legs(20, (P, Then::Ends(19_000)))).summary();
    assert_eq!((names(&summary), summary.work[0].judged), (vec![], 0));
    let summary = run(&legs(20, (P, Then::Ends(21_000)))).summary();
    assert_eq!(names(&summary), ["prefill_not_aborted"]);
}

#[test]
fn a_few_that_were_not_told_are_races_as_long_as_telling_is_as_slow() {
    let told = |count| legs(count, (P, Then::Told(200)));
    let untold = |count, left| legs(count, (P, Then::Ends(left)));
    // Two are chance, three of 103 are more than one in fifty, and of 203 less.
    for (untold_legs, told_legs, named) in [(2, 20, false), (3, 100, true), (3, 200, false)] {
        let summary = run(&[told(told_legs), untold(untold_legs, 5_000)].concat()).summary();
        assert_eq!(
            !names(&summary).is_empty(),
            named,
            "{untold_legs} of {told_legs}: {:?}",
            summary.findings
        );
    }
    // One of ten takes 8 ms to be told: of those that had 5 ms left one of ten is missed by honest engines too.
    let slow = legs(10, (P, Then::Told(8_000)));
    let summary = run(&[told(90), slow.clone(), untold(9, 5_000)].concat()).summary();
    assert_eq!((names(&summary), summary.work[0].completed_without_abort), (vec![], 9));
    near(summary.work[0].by_chance, 0.1);
    // And twice as many are more than that, and than chance.
    let many = [told(90), slow.clone(), untold(60, 5_000)].concat();
    assert_eq!(names(&run(&many).summary()), ["prefill_not_aborted"]);
    // Of those that had 9 ms none.
    assert_eq!(
        names(&run(&[told(90), slow.clone(), untold(9, 9_000)].concat()).summary()),
        ["prefill_not_aborted"]
    );
    // Nobody needs more than 20 ms, however slow the others are told.
    let slower = legs(40, (P, Then::Told(60_000)));
    let summary = run(&[told(60), slower, untold(9, 21_000)].concat()).summary();
    near(summary.work[0].abort_delivery_ms, 20.0);
    assert_eq!(names(&summary), ["prefill_not_aborted"]);
}

#[test]
fn who_is_done_by_itself_is_told_only_where_it_was() {
    // 19 ms are over too soon to ask; after 21 ms it was never told; and what was told in between was told.
    for (then, never, told) in [
        (Then::Ends(19_000), 0, None),
        (Then::Ends(21_000), 1, Some(f64::INFINITY)),
        (Then::Told(15_000), 0, Some(15.0)),
    ] {
        let all = run(&[(P, then)]).summary().all;
        assert_eq!((all.abort_not_received, all.abort_ms.n), (never, usize::from(told.is_some())), "{all:?}");
        assert_eq!((all.abort_ms.max, all.abort_ms.never as u64), (told.unwrap_or(0.0), never));
        assert_eq!(all.time_to_free_ms.n, 1, "its blocks were back all the same");
    }
}

/// An engine that stops what it should, told after random times, whatever its work is: what is missed is not named.
#[test]
fn honest_engines_are_not_named_and_those_that_miss_a_quarter_are() {
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        // Telling takes 0.3 ms, and now and then 6 ms; work is from very short to long.
        let work = 1_000 + seed * 500;
        let mut engines = |misses: f64| {
            let mut leg = |engine: usize, work: u64, misses: f64| {
                let telling = (rng.exponential() * if rng.chance(0.1) { 6_000.0 } else { 300.0 }) as u64;
                let left = rng.below(work);
                let told = telling < left && !rng.chance(misses);
                (engine, if told { Then::Told(telling) } else { Then::Ends(left + 1) })
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
fn what_ends_by_an_error_or_was_over_before_is_nobodys_fault() {
    let mut script = run(&legs(20, (P, Then::Ends(9_000))));
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
fn who_came_too_late_is_counted_and_said() {
    let mut script = storm();
    script.act("phase stream", ActKind::Phase, 2_000, 5_000, |script, act| {
        for number in 0..12 {
            let tag = format!("stall-{number}");
            script.left(act, &tag, 1_090, Kind::Stall, Phase::Stream, 3);
            script.told(P, &tag, &lends("transfer_done", 1_031));
            // Two were in the midst of it; the others had come to their own end.
            let (ended, how) = if number < 2 { (1_095, "abort") } else { (1_080, "length") };
            let says = [
                ("queued", 1_022, 0, "decode"),
                ("fetching", 1_025, 7, ""),
                ("fetched", 1_030, 0, "landed"),
                ("first_token", 1_035, 0, ""),
                ("ended", ended, 9, how),
                ("freed", ended, 8, ""),
            ];
            script.told(D, &tag, &says);
        }
        // One that had it all before it could leave, and one that failed.
        script.left(act, "had-it", 1_090, Kind::Stall, Phase::Stream, 3);
        let Some(Record::Call(call)) = script.0.last_mut() else { panic!("a call") };
        (call.outcome, call.left_us) = ("done".into(), None);
    });
    let summary = script.summary();
    let row = summary.kinds.iter().find(|row| row.kind == Kind::Stall).expect("a row");
    assert_eq!((row.group.cancelled, row.served, row.too_late), (2, 0, 11));
    let fin = summary.kinds.iter().find(|row| row.kind == Kind::Fin).expect("a row");
    assert_eq!((fin.group.cancelled, fin.too_late), (3, 1));
    let unknown = summary.unknown().join("; ");
    assert!(unknown.contains("cancel by stall: only 2 of 13 were measured"), "{unknown}");
    assert!(report::page(&summary).contains("<th>too late</th>"));
    // Tokens that a stalled client does not look at have reached it all the same.
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
