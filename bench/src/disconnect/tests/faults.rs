//! What a fault met, and what became of whom.

use super::super::record::flight::{InFlight, Struck, Wanted};
use super::*;

/// Something that breaks at 3,000 and is mended at 4,000.
fn struck(script: &mut Script, act: &str, fault: &str, wanted: Option<Wanted>) {
    let struck = wanted.map(|wanted| Struck { wanted, waited_us: 1_500, known: InFlight::default() });
    for (at_us, mended, struck) in [(3_000_000, false, struck), (4_000_000, true, None)] {
        let (act, fault) = (act.to_owned(), fault.to_owned());
        script.0.push(Record::Fault { act, fault, at_us, mended, struck });
    }
}

/// The decode engine, which says tokens from `from` on.
fn decodes(from: u64) -> [(&'static str, u64, u64, &'static str); 5] {
    [
        ("queued", from - 20, 0, "decode"),
        ("fetching", from - 15, 7, ""),
        ("fetched", from - 10, 0, "landed"),
        ("started", from - 5, 0, ""),
        ("first_token", from, 0, ""),
    ]
}

/// A decode engine that is killed while four requests are in flight.
fn killed() -> Script {
    let mut script = storm();
    script.act("fault decode", ActKind::Fault, 2_000, 9_000, |script, act| {
        struck(script, act, "decode engine killed", Some(Wanted::Stream));
        // In prefill, at its answer, and not yet with any engine.
        script.stayed(act, "p", 2_980, &[3_030], "done");
        script.stayed(act, "d", 2_900, &[2_950, 3_020], "broken");
        script.stayed(act, "new", 2_998, &[3_001], "failed");
        // Over on its engine, and its client does not know it yet.
        script.stayed(act, "whole", 2_900, &[2_990, 3_000], "done");
        script.stayed(act, "later", 4_100, &[], "refused");
        // The one left before, with its answer on the engine that was killed; the other in the gap, after it was.
        script.left(act, "gone", 2_980, Kind::Fin, Phase::Stream, 3);
        script.left(act, "held", 3_500, Kind::Rst, Phase::Gap, 0);
        script.stayed(act, "gone-again", 2_990, &[], "broken");
        let Some(Record::Call(again)) = script.0.last_mut() else { panic!("a call") };
        again.retries = Some("gone".into());
        for engine in [P, D] {
            for at in [2_500, 8_000] {
                script.books(engine, at, 0, 2 * u64::from(engine == P), 0);
            }
        }
    });
    script.told(
        P,
        "p",
        &[("queued", 2_990, 0, "prefill"), ("started", 2_995, 0, ""), ("ended", 3_010, 1, "length")],
    );
    for tag in ["d", "whole", "gone"] {
        script.told(P, tag, &lends("transfer_done", 2_935));
        script.told(D, tag, &decodes(2_945));
    }
    script.told(D, "whole", &[("ended", 2_999, 2, "length"), ("freed", 2_999, 8, "")]);
    script.told(P, "held", &lends("consumer_failed", 3_900));
    script.0.push(Record::Restarted { engine: D, at_us: 4_050_000 });
    script
}

#[test]
fn a_fault_is_told_with_what_it_met_and_what_became_of_that() {
    let summary = killed().summary();
    let [fault] = &summary.faults[..] else { panic!("{:?}", summary.faults) };
    let met = fault.met.as_ref().expect("it struck");
    assert_eq!((met.requests, met.by_phase().as_str()), (4, "1 queued, 1 prefill, 1 gap, 1 mid-stream"));
    assert_eq!((fault.missed, fault.waited_ms, fault.failed_in_flight), (None, Some(1.5), 2));
    assert_eq!(fault.stayed_in_flight, 3);
    // P held 7 blocks from 3,500 to 3,900 for one that left; what its engine held for the others died with it. Seconds
    // count from the beginning of the calm.
    assert_eq!(summary.series.stranded_in_broken_parts, [(3.5, 7.0), (3.9, 0.0)]);
    let stayed = &fault.stayed;
    assert_eq!((stayed.requests, stayed.errors, fault.errors_after), (5, 3, 1));
    near(stayed.e2e_ms.p50, 51.0);
    near(stayed.e2e_ms.max, 101.0);
    // What was held by the engine that was killed is gone with it.
    assert_eq!(
        (fault.cancelled.cancelled, fault.cancelled.stranded, fault.cancelled.time_to_free_ms.n),
        (2, 0, 1)
    );
    near(fault.cancelled.time_to_free_ms.max, 400.0);
    assert_eq!((summary.cancelled, names(&summary)), (4, vec!["not_recovered"]));
    let told = serde_json::to_value(fault).expect("JSON");
    assert_eq!((&told["in_flight"], &told["phases"]["prefill"]), (&4.into(), &1.into()));
    assert_eq!((&told["requests"], &told["cancelled"]["cancelled"]), (&5.into(), &2.into()));
    for said in [report::text(&summary), report::page(&summary)] {
        assert!(said.contains("1 queued, 1 prefill, 1 gap, 1 mid-stream"), "{said}");
    }
    // Where nobody tells of single requests, only that they were open.
    let mut blind = killed();
    blind.0.retain(|record| !matches!(record, Record::Event(_)));
    for record in &mut blind.0 {
        match record {
            Record::Engine(engine) => engine.events = false,
            Record::Fault { struck: Some(struck), .. } => struck.wanted = Wanted::Open,
            _ => {}
        }
    }
    let summary = blind.summary();
    let met = summary.faults[0].met.as_ref().expect("it struck");
    assert_eq!((met.requests, met.phases.len(), summary.faults[0].missed), (5, 0, None));
}

#[test]
fn a_fault_that_met_nothing_is_said_to_be_unjudged() {
    let unjudged = |wanted, calls: &dyn Fn(&mut Script, &str)| {
        let mut script = storm();
        script.act("fault x", ActKind::Fault, 2_000, 9_000, |script, act| {
            struck(script, act, "x", wanted);
            calls(script, act);
        });
        let unknown = script.summary().unknown();
        unknown.into_iter().filter(|what| what.contains("`x`")).collect::<Vec<_>>()
    };
    // As files from before were written, and as they are now.
    for wanted in [None, Some(Wanted::Prefill)] {
        let said = unjudged(wanted, &|script, act| script.stayed(act, "before", 2_900, &[2_910], "done"));
        assert!(matches!(&said[..], [one] if one.contains("none was in flight")), "{wanted:?}: {said:?}");
    }
    let streams = |script: &mut Script, act: &str| {
        script.stayed(act, "d", 2_900, &[2_950, 3_020], "done");
        script.told(D, "d", &decodes(2_945));
    };
    assert_eq!(unjudged(Some(Wanted::Stream), &streams), [""; 0]);
    let said = unjudged(Some(Wanted::Prefill), &streams);
    assert!(matches!(&said[..], [one] if one.contains("no request in prefill, with 1")), "{said:?}");
    let older = br#"{"record":"fault","segment":"a","fault":"x","at_us":1,"mended":false}"#;
    let read = raw::read(&mut &older[..]).expect("a record");
    assert!(matches!(&read[..], [Record::Fault { struck: None, .. }]), "{read:?}");
}

#[test]
fn a_client_that_leaves_while_a_router_is_killed_is_excused_and_none_that_leaves_later() {
    for (gone, named) in [(3_015, vec![]), (3_100, vec!["fault_stranded", "leases_expired"])] {
        let mut script = storm();
        super::findings::broken(&mut script, "router", |script, act| {
            script.left(act, "left", gone, Kind::Fin, Phase::Gap, 0);
        });
        // Lent when the killing had begun.
        let lent = lends(Cause::Expired.label(), 32_000)
            .map(|(kind, at, number, word)| (kind, if at < 2_000 { at + 1_985 } else { at }, number, word));
        script.told(P, "left", &lent);
        script.books(P, 33_000, 0, 3, 0);
        script.books(D, 33_000, 0, 0, 0);
        assert_eq!(names(&script.summary()), named, "gone at {gone}");
    }
}

/// A router that is killed at 3,000, with a lease of 7 blocks open from 1,020 to 31,020 and its client there until `gone`.
fn orphaned(gone: u64) -> Script {
    let mut script = storm();
    super::findings::broken(&mut script, "router", |script, act| {
        script.stayed(act, "lost", 990, &[gone - 1], "broken");
    });
    script.told(P, "lost", &lends("", 0)[..6]);
    // Within the part of the run these are not what is found, either.
    script.books(P, 16_000, 7, 2, 0);
    script
}

/// What is found when P holds so many blocks when it is last looked at, and how many of them are excused.
fn held(script: &Script, at: u64, held: u64) -> (Vec<&'static str>, u64, Summary) {
    let mut script = Script(script.0.clone());
    script.books(P, at, held, 2, 0);
    script.books(D, at, 0, 0, 0);
    let summary = script.summary();
    assert_eq!(summary.engines[P].held_at_end, Some(held));
    let names = summary.findings.iter().map(|finding| finding.name).collect();
    (names, summary.engines[P].excused_at_end, summary)
}

#[test]
fn blocks_of_a_lease_that_a_killed_router_owed_are_not_judged_before_its_time_is_over() {
    let script = orphaned(3_002);
    let (found, excused, summary) = held(&script, 21_000, 7);
    assert_eq!((found, excused), (vec![], 7));
    let said = |summary: &Summary| summary.unknown().iter().any(|what| what.contains("still holds 7 blocks"));
    assert!(said(&summary), "{:?}", summary.unknown());
    // Nobody says whose the others are.
    let (found, excused, summary) = held(&script, 21_000, 9);
    assert_eq!((found, excused, summary.findings[0].count), (vec!["blocks_not_freed"], 7, 2));
    // They were back when P was looked at, and that is not told of yet.
    let (found, excused, summary) = held(&script, 21_000, 0);
    assert_eq!((found, excused, said(&summary)), (vec![], 0, false));
    // Nothing ended it when its time was over.
    assert_eq!(held(&script, 31_900, 7).1, 7);
    let (found, excused, _) = held(&script, 32_100, 7);
    assert_eq!((found, excused), (vec!["blocks_not_freed"], 0));
}

#[test]
fn what_a_killed_router_does_not_owe_is_not_excused() {
    // It was there for two seconds after the client had gone.
    assert_eq!(held(&orphaned(1_000), 21_000, 7).0, ["fault_stranded", "blocks_not_freed"]);
    // The lease is over, and its blocks stayed; or came back with it.
    for (kept, expected) in [(true, vec!["fault_stranded", "blocks_not_freed"]), (false, vec![])] {
        let mut script = orphaned(3_002);
        let ended = lends("consumer_failed", 3_010);
        script.told(P, "lost", &ended[6..if kept { 7 } else { 8 }]);
        if !kept {
            script
                .0
                .retain(|record| !matches!(record, Record::EngineState(books) if books.at_us == 16_000_000));
        }
        assert_eq!(held(&script, 21_000, if kept { 7 } else { 0 }).0, expected);
    }
    // P itself was killed in a later part.
    let mut script = orphaned(3_002);
    script.act("fault prefill", ActKind::Fault, 20_000, 23_000, |script, act| {
        for (at_us, mended) in [(20_500_000, false), (21_000_000, true)] {
            let (act, fault) = (act.to_owned(), "prefill engine killed".to_owned());
            script.0.push(Record::Fault { act, fault, at_us, mended, struck: None });
        }
        script.books(D, 20_600, 0, 0, 0);
    });
    script.0.push(Record::Restarted { engine: P, at_us: 21_050_000 });
    let (found, excused, _) = held(&script, 24_000, 7);
    assert_eq!((found, excused), (vec!["blocks_not_freed"], 0));
}

/// What an engine lent that was itself killed is in no books of the one that came after it.
#[test]
fn what_died_with_an_engine_excuses_nothing_of_the_one_that_follows() {
    let mut script = storm();
    super::findings::broken(&mut script, "prefill engine killed", |script, act| {
        script.stayed(act, "lost", 990, &[], "failed");
    });
    script.told(P, "lost", &lends("", 0)[..6]);
    script.books(P, 18_000, 7, 2, 0);
    script.0.push(Record::Restarted { engine: P, at_us: 8_050_000 });
    let (found, excused, _) = held(&script, 21_000, 7);
    assert_eq!((found, excused), (vec!["fault_stranded", "blocks_not_freed"], 0));
}
