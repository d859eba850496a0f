//! The requests in flight at a fault, and their outcomes.

use super::super::record::in_flight::{FaultCondition, FaultContext, InFlight};
use super::*;

/// A fault at 3,000 with its recovery at 4,000.
fn fault(script: &mut Script, segment: &str, fault: &str, wanted: Option<FaultCondition>) {
    let struck = wanted.map(|wanted| FaultContext { wanted, waited_us: 1_500, known: InFlight::default() });
    for (at_us, recovered, struck) in [(3_000_000, false, struck), (4_000_000, true, None)] {
        let (segment, fault) = (segment.to_owned(), fault.to_owned());
        script.0.push(Record::Fault { segment, fault, at_us, recovered, struck });
    }
}

/// A decode leg that generates tokens from `from` on.
fn decodes(from: u64) -> [(&'static str, u64, u64, &'static str); 5] {
    [
        ("queued", from - 20, 0, "decode"),
        ("fetching", from - 15, 7, ""),
        ("fetched", from - 10, 0, "landed"),
        ("started", from - 5, 0, ""),
        ("first_token", from, 0, ""),
    ]
}

/// A decode engine that is killed with four requests in flight.
fn killed() -> Script {
    let mut script = storm();
    script.segment("fault decode", SegmentKind::Fault, 2_000, 9_000, |script, segment| {
        fault(script, segment, "decode engine killed", Some(FaultCondition::Stream));
        // In prefill, in its stream, and not at an engine yet.
        script.stayed(segment, "p", 2_980, &[3_030], "done");
        script.stayed(segment, "d", 2_900, &[2_950, 3_020], "broken");
        script.stayed(segment, "new", 2_998, &[3_001], "failed");
        // Completed on its engine; the client has not received the end yet.
        script.stayed(segment, "whole", 2_900, &[2_990, 3_000], "done");
        script.stayed(segment, "later", 4_100, &[], "refused");
        // One was cancelled before, with its response on the killed engine. The other was cancelled in the gap, after
        // the fault.
        script.cancelled(segment, "gone", 2_980, CancelKind::Fin, Phase::Stream, 3);
        script.cancelled(segment, "held", 3_500, CancelKind::Rst, Phase::Gap, 0);
        script.stayed(segment, "gone-again", 2_990, &[], "broken");
        let Some(Record::Call(again)) = script.0.last_mut() else { panic!("a call") };
        again.retries = Some("gone".into());
        for engine in [P, D] {
            for at in [2_500, 8_000] {
                script.engine_state(engine, at, 0, 2 * u64::from(engine == P), 0);
            }
        }
    });
    script.engine_events(
        P,
        "p",
        &[("queued", 2_990, 0, "prefill"), ("started", 2_995, 0, ""), ("ended", 3_010, 1, "length")],
    );
    for tag in ["d", "whole", "gone"] {
        script.engine_events(P, tag, &prefill_leg("transfer_done", 2_935));
        script.engine_events(D, tag, &decodes(2_945));
    }
    script.engine_events(D, "whole", &[("ended", 2_999, 2, "length"), ("freed", 2_999, 8, "")]);
    script.engine_events(P, "held", &prefill_leg("consumer_failed", 3_900));
    script.0.push(Record::Restarted { engine: D, at_us: 4_050_000, seen_us: None });
    script
}

#[test]
fn a_fault_is_reported_with_its_requests_and_their_outcomes() {
    let summary = killed().summary();
    let [fault] = &summary.faults[..] else { panic!("{:?}", summary.faults) };
    let met = fault.met.as_ref().expect("it struck");
    assert_eq!((met.requests, met.by_phase().as_str()), (4, "1 queued, 1 prefill, 1 gap, 1 mid-stream"));
    assert_eq!((fault.missed, fault.waited_ms, fault.failed_in_flight), (None, Some(1.5), 2));
    assert_eq!(fault.stayed_in_flight, 3);
    // P held 7 blocks of a cancelled request from 3,500 to 3,900. The blocks of the killed engine are gone. Seconds
    // count from the begin of the calm.
    assert_eq!(summary.series.stranded_in_faults, [(3.5, 7.0), (3.9, 0.0)]);
    let stayed = &fault.stayed;
    assert_eq!((stayed.requests, stayed.errors, fault.errors_after), (5, 3, 1));
    near(stayed.e2e_ms.p50, 51.0);
    near(stayed.e2e_ms.max, 101.0);
    // Blocks of the killed engine are gone.
    assert_eq!(
        (fault.cancelled.cancelled, fault.cancelled.stranded, fault.cancelled.time_to_free_ms.n),
        (2, 0, 1)
    );
    near(fault.cancelled.time_to_free_ms.max, 400.0);
    assert_eq!((summary.cancelled, names(&summary)), (4, vec!["not_recovered"]));
    let json = serde_json::to_value(fault).expect("JSON");
    assert_eq!((&json["in_flight"], &json["phases"]["prefill"]), (&4.into(), &1.into()));
    assert_eq!((&json["requests"], &json["cancelled"]["cancelled"]), (&5.into(), &2.into()));
    for shown in [report::text(&summary), report::page(&summary)] {
        assert!(shown.contains("1 queued, 1 prefill, 1 gap, 1 mid-stream"), "{shown}");
    }
    // Without event logs only open requests are known.
    let mut blind = killed();
    blind.0.retain(|record| !matches!(record, Record::Event(_)));
    for record in &mut blind.0 {
        match record {
            Record::Engine(engine) => engine.events = false,
            Record::Fault { struck: Some(struck), .. } => struck.wanted = FaultCondition::Open,
            _ => {}
        }
    }
    let summary = blind.summary();
    let met = summary.faults[0].met.as_ref().expect("it struck");
    assert_eq!((met.requests, met.phases.len(), summary.faults[0].missed), (5, 0, None));
}

#[test]
fn a_fault_without_requests_is_unjudged() {
    let unjudged = |wanted, calls: &dyn Fn(&mut Script, &str)| {
        let mut script = storm();
        script.segment("fault x", SegmentKind::Fault, 2_000, 9_000, |script, segment| {
            fault(script, segment, "x", wanted);
            calls(script, segment);
        });
        let unknown = script.summary().describe_unknown();
        unknown.into_iter().filter(|what| what.contains("`x`")).collect::<Vec<_>>()
    };
    // As in older files, and as today.
    for wanted in [None, Some(FaultCondition::Prefill)] {
        let shown =
            unjudged(wanted, &|script, segment| script.stayed(segment, "before", 2_900, &[2_910], "done"));
        assert!(matches!(&shown[..], [one] if one.contains("none was in flight")), "{wanted:?}: {shown:?}");
    }
    let streams = |script: &mut Script, segment: &str| {
        script.stayed(segment, "d", 2_900, &[2_950, 3_020], "done");
        script.engine_events(D, "d", &decodes(2_945));
    };
    assert_eq!(unjudged(Some(FaultCondition::Stream), &streams), [""; 0]);
    let shown = unjudged(Some(FaultCondition::Prefill), &streams);
    assert!(matches!(&shown[..], [one] if one.contains("no request in prefill, with 1")), "{shown:?}");
    let older = br#"{"record":"fault","segment":"a","fault":"x","at_us":1,"mended":false}"#;
    let read = raw::read(&mut &older[..]).expect("a record");
    assert!(matches!(&read[..], [Record::Fault { struck: None, .. }]), "{read:?}");
}

#[test]
fn only_cancels_during_a_router_kill_are_excused() {
    for (until, named) in [(3_015, vec![]), (3_100, vec!["fault_stranded", "leases_expired"])] {
        let mut script = storm();
        super::findings::broken(&mut script, "router", |script, segment| {
            script.cancelled(segment, "left", until, CancelKind::Fin, Phase::Gap, 0);
        });
        // The lease was opened after the fault had begun.
        let leased = prefill_leg(CloseCause::Expired.label(), 32_000)
            .map(|(kind, at, number, word)| (kind, if at < 2_000 { at + 1_985 } else { at }, number, word));
        script.engine_events(P, "left", &leased);
        script.engine_state(P, 33_000, 0, 3, 0);
        script.engine_state(D, 33_000, 0, 0, 0);
        assert_eq!(names(&script.summary()), named, "cancelled at {until}");
    }
}

/// A router that is killed at 3,000. A lease of 7 blocks is open from 1,020 to 31,020, and its client is connected
/// until `until`.
fn orphaned(until: u64) -> Script {
    let mut script = storm();
    super::findings::broken(&mut script, "router", |script, segment| {
        script.stayed(segment, "lost", 990, &[until - 1], "broken");
    });
    script.engine_events(P, "lost", &prefill_leg("", 0)[..6]);
    // Within the segment these blocks are not a finding either.
    script.engine_state(P, 16_000, 7, 2, 0);
    script
}

/// The findings, the excused blocks and the summary if P holds this many blocks in its last state.
fn held(script: &Script, at: u64, held: u64) -> (Vec<&'static str>, u64, Summary) {
    let mut script = Script(script.0.clone());
    script.engine_state(P, at, held, 2, 0);
    script.engine_state(D, at, 0, 0, 0);
    let summary = script.summary();
    assert_eq!(summary.engines[P].held_at_end, Some(held));
    let names = summary.findings.iter().map(|finding| finding.name).collect();
    (names, summary.engines[P].excused_at_end, summary)
}

#[test]
fn leases_of_a_killed_router_are_judged_after_their_expiry() {
    let script = orphaned(3_002);
    let (found, excused, summary) = held(&script, 21_000, 7);
    assert_eq!((found, excused), (vec![], 7));
    let shown = |summary: &Summary| {
        summary.describe_unknown().iter().any(|what| what.contains("still holds 7 blocks"))
    };
    assert!(shown(&summary), "{:?}", summary.describe_unknown());
    // The requests of the other blocks are unknown.
    let (found, excused, summary) = held(&script, 21_000, 9);
    assert_eq!((found, excused, summary.findings[0].count), (vec!["blocks_not_freed"], 7, 2));
    // P had freed the blocks in its last state, before the event arrived.
    let (found, excused, summary) = held(&script, 21_000, 0);
    assert_eq!((found, excused, shown(&summary)), (vec![], 0, false));
    // The lease has expired, and the blocks may be held for a short time after that.
    assert_eq!(held(&script, 31_900, 7).1, 7);
    let (found, excused, _) = held(&script, 32_100, 7);
    assert_eq!((found, excused), (vec!["blocks_not_freed"], 0));
}

#[test]
fn leases_of_other_requests_are_not_excused_by_a_router_kill() {
    // The router was running for two seconds after the cancel.
    assert_eq!(held(&orphaned(1_000), 21_000, 7).0, ["fault_stranded", "blocks_not_freed"]);
    // The lease has ended; its blocks are held, or freed with it.
    for (kept, expected) in [(true, vec!["fault_stranded", "blocks_not_freed"]), (false, vec![])] {
        let mut script = orphaned(3_002);
        let ended = prefill_leg("consumer_failed", 3_010);
        script.engine_events(P, "lost", &ended[6..if kept { 7 } else { 8 }]);
        if !kept {
            script
                .0
                .retain(|record| !matches!(record, Record::EngineState(state) if state.at_us == 16_000_000));
        }
        assert_eq!(held(&script, 21_000, if kept { 7 } else { 0 }).0, expected);
    }
    // P itself is killed in a later segment.
    let mut script = orphaned(3_002);
    script.segment("fault prefill", SegmentKind::Fault, 20_000, 23_000, |script, segment| {
        for (at_us, recovered) in [(20_500_000, false), (21_000_000, true)] {
            let (segment, fault) = (segment.to_owned(), "prefill engine killed".to_owned());
            script.0.push(Record::Fault { segment, fault, at_us, recovered, struck: None });
        }
        script.engine_state(D, 20_600, 0, 0, 0);
    });
    script.0.push(Record::Restarted { engine: P, at_us: 21_050_000, seen_us: None });
    let (found, excused, _) = held(&script, 24_000, 7);
    assert_eq!((found, excused), (vec!["blocks_not_freed"], 0));
}

/// An engine that starts reads a request, and its abort, long after the client has left.
#[test]
fn a_request_holds_nothing_before_its_engine_has_it() {
    for (freed, named) in [(13_000, vec![]), (14_100, vec!["fault_stranded"])] {
        let mut script = storm();
        super::findings::broken(&mut script, "prefill engine killed", |script, segment| {
            script.cancelled(segment, "left", 8_500, CancelKind::Fin, Phase::Prefill, 0);
        });
        let leg = [("queued", 13_000, 0, "prefill"), ("started", 13_000, 0, ""), ("freed", freed, 7, "")];
        script.engine_events(P, "left", &leg);
        assert_eq!(names(&script.summary()), named, "freed at {freed}");
    }
}

/// The new process of P is noticed after the next fault: P is not an engine that this fault has killed.
#[test]
fn a_restart_belongs_to_the_fault_after_the_last_answer() {
    for (seen_us, named) in [(Some(1_994_000), vec![]), (None, vec!["fault_stranded"])] {
        let mut script = storm();
        script.segment("fault prefill", SegmentKind::Fault, 1_990, 2_000, |script, segment| {
            for (at_us, recovered) in [(1_995_000, false), (1_998_000, true)] {
                let (segment, fault) = (segment.to_owned(), "prefill engine killed".to_owned());
                script.0.push(Record::Fault { segment, fault, at_us, recovered, struck: None });
            }
        });
        super::findings::broken(&mut script, "router", |script, segment| {
            script.stayed(segment, "lost", 2_980, &[3_001], "broken");
        });
        let leased = prefill_leg("", 0).map(|(kind, at, number, word)| (kind, at + 1_975, number, word));
        script.0.push(Record::Restarted { engine: P, at_us: 3_050_000, seen_us });
        script.engine_events(P, "lost", &leased[..6]);
        script.engine_state(P, 16_000, 7, 2, 0);
        script.engine_state(P, 33_500, 0, 2, 0);
        script.engine_state(D, 33_500, 0, 0, 0);
        assert_eq!(names(&script.summary()), named, "{seen_us:?}");
    }
}

#[test]
fn a_restart_that_is_noticed_after_its_segment_had_a_fault() {
    for (seen_us, named) in [(2_990_000, vec![]), (20_050_000, vec!["engine_restarted"])] {
        let mut script = storm();
        super::findings::broken(&mut script, "prefill engine killed", |_, _| {});
        script.0.push(Record::Restarted { engine: P, at_us: 20_100_000, seen_us: Some(seen_us) });
        script.engine_state(P, 21_000, 0, 2, 0);
        script.engine_state(D, 21_000, 0, 0, 0);
        assert_eq!(names(&script.summary()), named, "seen at {seen_us}");
    }
}

/// Leases of a killed engine are not in the state of its successor.
#[test]
fn leases_of_a_killed_engine_do_not_excuse_its_successor() {
    let mut script = storm();
    super::findings::broken(&mut script, "prefill engine killed", |script, segment| {
        script.stayed(segment, "lost", 990, &[], "failed");
    });
    script.engine_events(P, "lost", &prefill_leg("", 0)[..6]);
    script.engine_state(P, 18_000, 7, 2, 0);
    script.0.push(Record::Restarted { engine: P, at_us: 8_050_000, seen_us: None });
    let (found, excused, _) = held(&script, 21_000, 7);
    assert_eq!((found, excused), (vec!["fault_stranded", "blocks_not_freed"], 0));
}
