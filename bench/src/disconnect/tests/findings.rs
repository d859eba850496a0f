//! What is a finding, and what is not.

use super::*;

#[test]
fn a_lease_that_ends_by_expiry_is_a_finding() {
    let mut script = storm();
    script.segment("phase gap", SegmentKind::Phase, 2_000, 40_000, |script, segment| {
        script.cancelled(segment, "held", 1_021, CancelKind::Fin, Phase::Gap, 0);
    });
    script.engine_events(P, "held", &prefill_leg(CloseCause::Expired.label(), 31_020));
    let summary = script.summary();
    assert_eq!(names(&summary), ["gap_stranded", "leases_expired"]);
    assert_eq!(summary.findings[0].shown_by, ["held"]);
    assert!(
        summary.findings[0].says.contains("1: an engine's event log has no abort"),
        "{}",
        summary.findings[0].says
    );
    let gap = summary.phases.iter().find(|row| row.phase == Phase::Gap).expect("a row");
    assert_eq!(
        (gap.group.cancelled, gap.group.stranded, gap.group.expired, gap.group.abort_not_received),
        (2, 1, 1, 1)
    );
    near(gap.group.time_to_free_ms.max, 29_999.0);
}

#[test]
fn a_reply_that_is_dropped_is_a_finding_of_its_own_phase() {
    let mut script = storm();
    script.segment("phase reply", SegmentKind::Phase, 2_000, 40_000, |script, segment| {
        for tag in ["lost", "aborted", "written"] {
            script.cancelled(segment, tag, 1_021, CancelKind::Fin, Phase::Reply, 0);
        }
    });
    script.engine_events(P, "lost", &prefill_leg(CloseCause::Expired.label(), 31_020));
    script.engine_events(P, "lost", &[("replied", 1_025, 0, "dropped")]);
    // No `replied`: the abort by id shows that the router had no reply.
    script.engine_events(P, "aborted", &prefill_leg("aborted", 1_024));
    // This reply was written before the cancel, which therefore counts for the gap.
    script.engine_events(P, "written", &prefill_leg("client_gone", 1_024));
    script.engine_events(P, "written", &[("replied", 1_020, 0, "sent")]);
    let summary = script.summary();
    assert_eq!(names(&summary), ["reply_stranded", "leases_expired"]);
    let Finding { says, shown_by, .. } = &summary.findings[0];
    assert!(says.contains("1 of 2 requests") && says.ends_with("(the reply window)"), "{says}");
    assert_eq!(*shown_by, ["lost"]);
    let row = |phase| summary.phases.iter().find(|row| row.phase == phase).expect("a row");
    let (reply, gap) = (row(Phase::Reply), row(Phase::Gap));
    assert_eq!((reply.aimed, reply.group.cancelled, reply.group.stranded), (3, 2, 1));
    assert_eq!((gap.aimed, gap.group.cancelled, gap.group.stranded), (0, 2, 0));
    let json = serde_json::to_value(&summary).expect("JSON");
    let phases = json["phases"].as_array().expect("phases");
    assert!(phases.iter().any(|row| row["phase"] == "reply" && row["stranded"] == 1), "{phases:#?}");
    let (text, page) = (report::text(&summary), report::page(&summary));
    assert!(text.lines().any(|line| line.starts_with("reply ")), "{text}");
    assert!(page.contains("<tr><td>reply</td>"), "{page}");
}

#[test]
fn stranded_blocks_are_split_by_whether_the_abort_arrived() {
    let mut script = storm();
    script.segment("phase gap", SegmentKind::Phase, 2_000, 40_000, |script, segment| {
        for tag in ["kept", "kept too", "no abort"] {
            script.cancelled(segment, tag, 1_021, CancelKind::Fin, Phase::Gap, 0);
        }
    });
    for tag in ["kept", "kept too"] {
        script.engine_events(P, tag, &[("abort", 1_023, 0, "verb")]);
        script.engine_events(P, tag, &prefill_leg(CloseCause::Expired.label(), 31_020));
    }
    let says = |script: &Script| {
        let summary = script.summary();
        let found = summary.findings.iter().find(|finding| finding.name == "gap_stranded");
        found.expect("it is found").says.clone()
    };
    let all_kept = says(&script);
    let kept = "2: engines received the abort and did not free the blocks in time";
    assert!(all_kept.contains("2 of 3") && all_kept.ends_with(kept), "{all_kept}");
    script.engine_events(P, "no abort", &prefill_leg(CloseCause::Expired.label(), 31_020));
    let one_without_abort = says(&script);
    assert!(one_without_abort.contains("3 of 4") && one_without_abort.ends_with(kept), "{one_without_abort}");
    assert!(one_without_abort.contains("1: an engine's event log has no abort"), "{one_without_abort}");
    // An engine that receives the abort late and frees the blocks at once differs from one that keeps them.
    let mut late = storm();
    late.segment("phase gap", SegmentKind::Phase, 2_000, 40_000, |script, segment| {
        script.cancelled(segment, "late", 1_021, CancelKind::Fin, Phase::Gap, 0);
    });
    late.engine_events(P, "late", &prefill_leg("client_gone", 4_020));
    assert!(
        says(&late).ends_with("1: engines received the abort later and freed the blocks then"),
        "{}",
        says(&late)
    );
}

/// A segment with a fault at 3,000 and its recovery at 8,000, with these calls.
pub(super) fn broken(script: &mut Script, fault: &str, calls: impl FnOnce(&mut Script, &str)) {
    script.segment(&format!("fault {fault}"), SegmentKind::Fault, 2_000, 20_000, |script, segment| {
        for (at, recovered) in [(3_000, false), (8_000, true)] {
            script.0.push(Record::Fault {
                segment: segment.into(),
                fault: fault.into(),
                at_us: at * 1_000,
                recovered,
                struck: None,
            });
        }
        calls(script, segment);
        for at in [2_500, 2_900, 8_100, 15_000] {
            script.engine_state(P, at, 0, 2, 0);
            script.engine_state(D, at, 0, 0, 0);
        }
    });
}

#[test]
fn only_leases_open_at_a_router_kill_are_excused() {
    let mut script = storm();
    broken(&mut script, "router", |script, segment| {
        // Its lease is open from 1,020. The second call began after the recovery.
        script.stayed(segment, "lost", 990, &[3_001], "broken");
        script.stayed(segment, "late", 10_100, &[10_150], "done");
    });
    script.engine_events(P, "lost", &prefill_leg(CloseCause::Expired.label(), 32_000));
    script.engine_state(P, 33_000, 0, 3, 0);
    script.engine_state(D, 33_000, 0, 0, 0);
    let summary = script.summary();
    assert_eq!(names(&summary), [""; 0], "{:?}", summary.findings);
    assert_eq!(summary.engines[P].excused_at_end, 0);
    // There is no finding, and the expired lease is still reported.
    assert_eq!(summary.excused_leases, 1);
    // The lease expired long after its segment and still counts there.
    assert_eq!(summary.faults[0].expired, 1);
    assert!(report::text(&summary).contains("1 expired lease is excused"));
    assert!(report::page(&summary).contains("<b>Excused:</b> 1 expired lease"));
    // Another expired lease is not excused, and neither is one that was opened after the recovery.
    let mut more = Script(script.0.clone());
    more.engine_state(P, 34_000, 0, 4, 0);
    assert_eq!(names(&more.summary()), ["leases_expired"]);
    let later = prefill_leg(CloseCause::Expired.label(), 41_000)
        .map(|(kind, at, number, word)| (kind, if at < 2_000 { at + 9_100 } else { at }, number, word));
    script.engine_events(P, "late", &later);
    script.engine_state(P, 42_000, 0, 4, 0);
    script.engine_state(D, 42_000, 0, 0, 0);
    let summary = script.summary();
    assert_eq!(names(&summary), ["fault_stranded", "leases_expired"]);
    assert!(summary.findings.iter().all(|found| found.shown_by == ["late"]), "{:?}", summary.findings);
}

#[test]
fn blocks_held_for_a_killed_engine_are_a_finding() {
    let mut script = storm();
    broken(&mut script, "decode engine killed", |script, segment| {
        for tag in ["a", "b", "c"] {
            script.stayed(segment, tag, 990, &[], "refused");
        }
    });
    // Blocks of the killed engine are gone.
    script.engine_events(P, "a", &prefill_leg("transfer_done", 1_025));
    script.engine_events(D, "a", &[("queued", 1_022, 0, "decode"), ("fetching", 1_025, 7, "")]);
    // Blocks that are freed when the fault is detected are no finding, however late that is in the segment.
    script.engine_events(P, "b", &prefill_leg("consumer_failed", 8_100));
    script.0.push(Record::Restarted { engine: D, at_us: 9_000_000, seen_us: None });
    let summary = script.summary();
    assert_eq!(names(&summary), [""; 0], "{:?}", summary.findings);
    let mut held = Script(script.0.clone());
    held.engine_events(P, "c", &prefill_leg(CloseCause::Expired.label(), 31_020));
    let summary = held.summary();
    assert_eq!(names(&summary), ["fault_stranded", "leases_expired"]);
    assert_eq!(summary.findings[0].shown_by, ["c"]);
    // The requests of these blocks are unknown.
    script.engine_state(P, 9_200, 9, 2, 0);
    script.engine_state(P, 9_300, 0, 2, 0);
    let summary = script.summary();
    assert_eq!(names(&summary), ["fault_stranded"]);
    assert!(summary.findings[0].says.starts_with("prefill still held 9 blocks"), "{:?}", summary.findings);
}

#[test]
fn a_repeated_event_counts_once() {
    let mut script = storm();
    let events: Vec<_> =
        script.0.iter().filter(|record| matches!(record, Record::Event(_))).cloned().collect();
    script.0.extend(events);
    assert_eq!(names(&script.summary()), [""; 0]);
    // An event with another number is another event, and so is one of another process.
    let freed =
        script.0.iter().rposition(|record| matches!(record, Record::Event(event) if event.kind == "freed"));
    let mut again = script.0[freed.expect("something was freed")].clone();
    script.0.push(Record::Restarted { engine: D, at_us: 1_900_000, seen_us: None });
    script.0.push(again.clone());
    assert!(names(&script.summary()).contains(&"freed_twice"));
    script.0.truncate(script.0.len() - 2);
    let Record::Event(event) = &mut again else { panic!("an event") };
    event.seq = 1_000;
    script.0.push(again);
    assert_eq!(names(&script.summary()), ["freed_twice"]);
}

#[test]
fn a_nondeterministic_deployment_is_a_finding_or_unjudged() {
    let mut script = storm();
    let replay = |expected: Option<&str>, answers: &[&str], unanswered| Record::Replay {
        tag: "s1".into(),
        text: Some("wordword".into()),
        said: expected.map(str::to_owned),
        answers: answers.iter().map(|answer| (*answer).to_owned()).collect(),
        unanswered,
    };
    script.0.extend(vec![replay(Some("wordword"), &[], false); 96]);
    script.0.push(replay(None, &["word", "other"], false));
    let summary = script.summary();
    assert_eq!((summary.texts.compared, summary.texts.wrong, summary.texts.nondeterministic), (96, 0, 1));
    assert_eq!(
        (names(&summary), summary.findings[0].shown_by.as_slice()),
        (vec!["texts_nondeterministic"], &["s1".to_owned()][..])
    );
    assert!(
        report::text(&summary).contains("1 more cannot be compared")
            && report::page(&summary).contains("several without load</td><td>1</td>")
    );
    // As in older files.
    script.0.extend(vec![replay(None, &[], false); 2]);
    // A missing response is not a different one.
    script.0.push(replay(None, &[], true));
    let unknown =
        |summary: &Summary, what: &str| summary.describe_unknown().iter().any(|line| line.contains(what));
    for record in &mut script.0 {
        if let Record::Engine(engine) = record {
            engine.batching_shows = true;
        }
    }
    let summary = script.summary();
    assert_eq!((summary.texts.nondeterministic, summary.texts.unanswered, names(&summary)), (3, 1, vec![]));
    assert!(
        unknown(&summary, "3 of 100 responses: ") && !unknown(&summary, "1 of 100"),
        "{:?}",
        summary.describe_unknown()
    );
}

#[test]
fn wrong_texts_are_named_and_what_was_seen_of_one_must_be_its_beginning() {
    let mut script = storm();
    let replay = |tag: &str, text: &str, expected: Option<&str>| Record::Replay {
        tag: tag.into(),
        text: Some(text.into()),
        said: expected.map(str::to_owned),
        answers: Vec::new(),
        unanswered: false,
    };
    script.0.extend([
        replay("s1", "wordword", Some("wordword")),
        replay("c2", "wordword", Some("wordword")),
        replay("stream", "wor", Some("wordword")),
        replay("over", "old", Some("wordword")),
    ]);
    let summary = script.summary();
    assert_eq!((summary.texts.compared, summary.texts.wrong), (4, 1));
    assert_eq!(names(&summary), ["wrong_texts"]);
    assert_eq!(summary.findings[0].shown_by, ["over"]);
    // A wrong response in the calm counts too, for an exact engine.
    script.0.push(replay("c3", "drow", Some("word")));
    let summary = script.summary();
    assert_eq!(
        (summary.texts.wrong, summary.texts.wrong_in_calm, names(&summary)),
        (2, 1, vec!["wrong_texts"])
    );
    // An engine that reports inexact batching, or reports nothing, may change responses by batching.
    let change = |script: &mut Script, change: fn(&mut EngineRecord)| {
        for record in &mut script.0 {
            if let Record::Engine(engine) = record {
                change(engine);
            }
        }
    };
    change(&mut script, |engine| engine.batching_shows = true);
    assert!(!names(&script.summary()).contains(&"wrong_texts"));
    // An excess over the calm is a finding. It does not show the calls of the calm.
    let mut broken = Script(script.0.clone());
    for number in 0..60 {
        let (calm, storm) = (format!("calm-{number}"), format!("storm-{number}"));
        broken.stayed("calm", &calm, 110, &[140], "done");
        broken.stayed("storm", &storm, 1_110, &[1_140], "done");
        let expected = if number < 12 { "other" } else { "word" };
        broken.0.extend([replay(&calm, "word", Some("word")), replay(&storm, "word", Some(expected))]);
    }
    let summary = broken.summary();
    let found = summary.findings.iter().find(|found| found.name == "wrong_texts").expect("it is named");
    assert!(found.shown_by.iter().all(|tag| !tag.starts_with('c')), "{:?}", found.shown_by);
    // Not if as many differ when the prompts are repeated in parallel.
    let parallel = |wrong: usize, of: usize| {
        let repeated = (0..of).map(|number| Record::ParallelReplay {
            tag: format!("calm-{number}"),
            text: if number < wrong { "other" } else { "word" }.to_owned(),
        });
        Script(broken.0.iter().cloned().chain(repeated).collect()).summary()
    };
    let summary = parallel(12, 60);
    assert_eq!((summary.texts.wrong_in_parallel, summary.texts.compared_in_parallel), (12, 60));
    assert!(!names(&summary).contains(&"wrong_texts"));
    let text = report::text(&summary);
    assert!(text.contains("texts in parallel, without cancels and faults: 12 of 60 differ"));
    assert!(
        text.contains("not judged: 14 of 125 responses, which differ: 12 of 60 also differ in parallel"),
        "{text}"
    );
    let summary = parallel(1, 60);
    assert!(names(&summary).contains(&"wrong_texts"));
    assert!(!report::text(&summary).contains("also differ in parallel"));
    // Few repetitions excuse nothing.
    assert!(names(&parallel(6, 19)).contains(&"wrong_texts"));
    assert!(names(&parallel(6, 31)).contains(&"wrong_texts"));
    assert!(!names(&parallel(6, 32)).contains(&"wrong_texts"));
    // With few responses of the calm many differences are a finding, if repetitions in parallel have less.
    let few = |wrong: usize| {
        let mut few = Script(script.0.clone());
        for number in 0..60 {
            let tag = format!("storm-{number}");
            few.stayed("storm", &tag, 1_110, &[1_140], "done");
            let expected = if number < 12 { "other" } else { "word" };
            few.0.push(replay(&tag, "word", Some(expected)));
            let text = if number < wrong { "drow" } else { expected }.to_owned();
            few.0.push(Record::ParallelReplay { tag, text });
        }
        few.summary()
    };
    assert!(names(&few(1)).contains(&"wrong_texts"));
    assert!(!names(&few(12)).contains(&"wrong_texts"));
    change(&mut script, |engine| (engine.events, engine.batching_shows) = (false, false));
    assert!(!names(&script.summary()).contains(&"wrong_texts"));
}

#[test]
fn expiries_seen_only_in_counters_are_counted() {
    let mut script = storm();
    script.engine_state(D, 1_600, 0, 3, 0);
    let summary = script.summary();
    assert_eq!(names(&summary), ["leases_expired"]);
    assert_eq!(summary.engines[D].expired, 3);
}

#[test]
fn a_leg_that_computes_after_its_abort_is_a_finding() {
    let mut script = storm();
    let tags = ["d1", "d2", "d3"];
    script.segment("phase stream", SegmentKind::Phase, 2_000, 5_000, |script, segment| {
        for tag in tags {
            script.cancelled(segment, tag, 1_060, CancelKind::Fin, Phase::Stream, 3);
        }
    });
    let decode = [
        ("queued", 1_022, 0, "decode"),
        ("fetching", 1_025, 7, ""),
        ("fetched", 1_030, 0, "landed"),
        ("first_token", 1_040, 0, ""),
        ("abort", 1_061, 0, "verb"),
        ("ended", 1_140, 50, "length"),
        ("freed", 1_141, 8, ""),
    ];
    for tag in tags {
        script.engine_events(P, tag, &prefill_leg("transfer_done", 1_031));
        script.engine_events(D, tag, &decode);
    }
    let summary = script.summary();
    assert_eq!(names(&summary), ["decode_not_aborted"]);
    assert_eq!((summary.work[1].completed_without_abort, summary.work[1].continued_after_abort), (0, 3));
    // 80 of the 100 ms in which each generated fifty tokens, and six tokens of the request that was aborted in time.
    assert_eq!(summary.all.wasted_response_tokens, 3 * 40 + 6);
}
