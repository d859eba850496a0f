//! What is named, and what is not.

use super::*;

#[test]
fn a_lease_that_only_time_ends_is_named() {
    let mut script = storm();
    script.act("phase gap", ActKind::Phase, 2_000, 40_000, |script, act| {
        script.left(act, "held", 1_021, Kind::Fin, Phase::Gap, 0);
    });
    script.told(P, "held", &lends(Cause::Expired.label(), 31_020));
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
fn who_was_told_and_kept_the_blocks_is_told_from_who_was_not() {
    let mut script = storm();
    script.act("phase gap", ActKind::Phase, 2_000, 40_000, |script, act| {
        for tag in ["kept", "kept too", "untold"] {
            script.left(act, tag, 1_021, Kind::Fin, Phase::Gap, 0);
        }
    });
    for tag in ["kept", "kept too"] {
        script.told(P, tag, &[("abort", 1_023, 0, "verb")]);
        script.told(P, tag, &lends(Cause::Expired.label(), 31_020));
    }
    let says = |script: &Script| {
        let summary = script.summary();
        let found = summary.findings.iter().find(|finding| finding.name == "gap_stranded");
        found.expect("it is found").says.clone()
    };
    let all_told = says(&script);
    let kept = "2: engines received the abort and did not free the blocks in time";
    assert!(all_told.contains("2 of 3") && all_told.ends_with(kept), "{all_told}");
    script.told(P, "untold", &lends(Cause::Expired.label(), 31_020));
    let one_was_not = says(&script);
    assert!(one_was_not.contains("3 of 4") && one_was_not.ends_with(kept), "{one_was_not}");
    assert!(one_was_not.contains("1: an engine's event log has no abort"), "{one_was_not}");
    // Who is told late, and gives everything back at once, is not who keeps it.
    let mut late = storm();
    late.act("phase gap", ActKind::Phase, 2_000, 40_000, |script, act| {
        script.left(act, "late", 1_021, Kind::Fin, Phase::Gap, 0);
    });
    late.told(P, "late", &lends("client_gone", 4_020));
    assert!(
        says(&late).ends_with("1: engines received the abort later and freed the blocks then"),
        "{}",
        says(&late)
    );
}

/// A part in which something is broken at 3,000 and mended at 8,000, with these calls.
pub(super) fn broken(script: &mut Script, fault: &str, calls: impl FnOnce(&mut Script, &str)) {
    script.act(&format!("fault {fault}"), ActKind::Fault, 2_000, 20_000, |script, act| {
        for (at, mended) in [(3_000, false), (8_000, true)] {
            script.0.push(Record::Fault {
                act: act.into(),
                fault: fault.into(),
                at_us: at * 1_000,
                mended,
                struck: None,
            });
        }
        calls(script, act);
        for at in [2_500, 2_900, 8_100, 15_000] {
            script.books(P, at, 0, 2, 0);
            script.books(D, at, 0, 0, 0);
        }
    });
}

#[test]
fn a_lease_that_was_open_when_a_router_was_killed_is_excused_and_no_other() {
    let mut script = storm();
    broken(&mut script, "router", |script, act| {
        // Its lease is open from 1,020; and one that broke in that moment, and one that was not there yet.
        script.stayed(act, "lost", 990, &[3_001], "broken");
        script.stayed(act, "late", 10_100, &[10_150], "done");
    });
    script.told(P, "lost", &lends(Cause::Expired.label(), 32_000));
    script.books(P, 33_000, 0, 3, 0);
    script.books(D, 33_000, 0, 0, 0);
    let summary = script.summary();
    assert_eq!(names(&summary), [""; 0], "{:?}", summary.findings);
    assert_eq!(summary.engines[P].excused_at_end, 0);
    // Nothing is found, and that time has ended one is said all the same.
    assert_eq!(summary.excused_leases, 1);
    // Its time was over long after the part of the run in which it was open, and is that part's all the same.
    assert_eq!(summary.faults[0].expired, 1);
    assert!(report::text(&summary).contains("1 expired lease is excused"));
    assert!(report::page(&summary).contains("<b>Excused:</b> 1 expired lease"));
    // One more is somebody else's, and so is one that was lent when all was mended.
    let mut more = Script(script.0.clone());
    more.books(P, 34_000, 0, 4, 0);
    assert_eq!(names(&more.summary()), ["leases_expired"]);
    let later = lends(Cause::Expired.label(), 41_000)
        .map(|(kind, at, number, word)| (kind, if at < 2_000 { at + 9_100 } else { at }, number, word));
    script.told(P, "late", &later);
    script.books(P, 42_000, 0, 4, 0);
    script.books(D, 42_000, 0, 0, 0);
    let summary = script.summary();
    assert_eq!(names(&summary), ["fault_stranded", "leases_expired"]);
    assert!(summary.findings.iter().all(|found| found.shown_by == ["late"]), "{:?}", summary.findings);
}

#[test]
fn what_the_others_hold_for_an_engine_that_was_killed_is_named() {
    let mut script = storm();
    broken(&mut script, "decode engine killed", |script, act| {
        for tag in ["a", "b", "c"] {
            script.stayed(act, tag, 990, &[], "refused");
        }
    });
    // What is held by the one that was killed is gone with it.
    script.told(P, "a", &lends("transfer_done", 1_025));
    script.told(D, "a", &[("queued", 1_022, 0, "decode"), ("fetching", 1_025, 7, "")]);
    // What is given back when it is known, however late that was in the killed part, is well.
    script.told(P, "b", &lends("consumer_failed", 8_100));
    script.0.push(Record::Restarted { engine: D, at_us: 9_000_000 });
    let summary = script.summary();
    assert_eq!(names(&summary), [""; 0], "{:?}", summary.findings);
    let mut held = Script(script.0.clone());
    held.told(P, "c", &lends(Cause::Expired.label(), 31_020));
    let summary = held.summary();
    assert_eq!(names(&summary), ["fault_stranded", "leases_expired"]);
    assert_eq!(summary.findings[0].shown_by, ["c"]);
    // Nobody says whose they are.
    script.books(P, 9_200, 9, 2, 0);
    script.books(P, 9_300, 0, 2, 0);
    let summary = script.summary();
    assert_eq!(names(&summary), ["fault_stranded"]);
    assert!(summary.findings[0].says.starts_with("prefill still held 9 blocks"), "{:?}", summary.findings);
}

#[test]
fn an_event_that_is_told_twice_happened_once() {
    let mut script = storm();
    let events: Vec<_> =
        script.0.iter().filter(|record| matches!(record, Record::Event(_))).cloned().collect();
    script.0.extend(events);
    assert_eq!(names(&script.summary()), [""; 0]);
    // With a number of its own it is another event, and so it is of another process.
    let freed =
        script.0.iter().rposition(|record| matches!(record, Record::Event(event) if event.kind == "freed"));
    let mut again = script.0[freed.expect("something was freed")].clone();
    script.0.push(Record::Restarted { engine: D, at_us: 1_900_000 });
    script.0.push(again.clone());
    assert!(names(&script.summary()).contains(&"freed_twice"));
    script.0.truncate(script.0.len() - 2);
    let Record::Event(event) = &mut again else { panic!("an event") };
    event.seq = 1_000;
    script.0.push(again);
    assert_eq!(names(&script.summary()), ["freed_twice"]);
}

#[test]
fn a_deployment_that_does_not_say_the_same_twice_is_named_or_said_to_be_unjudged() {
    let mut script = storm();
    let replay = |said: Option<&str>, answers: &[&str], unanswered| Record::Replay {
        tag: "s1".into(),
        text: Some("wordword".into()),
        said: said.map(str::to_owned),
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
    // As files from before were written.
    script.0.extend(vec![replay(None, &[], false); 2]);
    // No answer is no word.
    script.0.push(replay(None, &[], true));
    let unknown = |summary: &Summary, what: &str| summary.unknown().iter().any(|said| said.contains(what));
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
        summary.unknown()
    );
}

#[test]
fn wrong_texts_are_named_and_what_was_seen_of_one_must_be_its_beginning() {
    let mut script = storm();
    let replay = |tag: &str, text: &str, said: Option<&str>| Record::Replay {
        tag: tag.into(),
        text: Some(text.into()),
        said: said.map(str::to_owned),
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
    // In the calm, too: of an engine that is exact that is as wrong.
    script.0.push(replay("c3", "drow", Some("word")));
    let summary = script.summary();
    assert_eq!(
        (summary.texts.wrong, summary.texts.wrong_in_calm, names(&summary)),
        (2, 1, vec!["wrong_texts"])
    );
    // Of one that says otherwise, or of which nobody knows, it may be the batch that changes texts.
    let change = |script: &mut Script, change: fn(&mut EngineFacts)| {
        for record in &mut script.0 {
            if let Record::Engine(engine) = record {
                change(engine);
            }
        }
    };
    change(&mut script, |engine| engine.batching_shows = true);
    assert!(!names(&script.summary()).contains(&"wrong_texts"));
    // But not so many more than in the calm: and then those of the calm are not shown.
    let mut broken = Script(script.0.clone());
    for number in 0..60 {
        let (calm, storm) = (format!("calm-{number}"), format!("storm-{number}"));
        broken.stayed("calm", &calm, 110, &[140], "done");
        broken.stayed("storm", &storm, 1_110, &[1_140], "done");
        let said = if number < 12 { "other" } else { "word" };
        broken.0.extend([replay(&calm, "word", Some("word")), replay(&storm, "word", Some(said))]);
    }
    let summary = broken.summary();
    let found = summary.findings.iter().find(|found| found.name == "wrong_texts").expect("it is named");
    assert!(found.shown_by.iter().all(|tag| !tag.starts_with('c')), "{:?}", found.shown_by);
    change(&mut script, |engine| (engine.events, engine.batching_shows) = (false, false));
    assert!(!names(&script.summary()).contains(&"wrong_texts"));
}

#[test]
fn expiries_that_only_counters_tell_are_counted() {
    let mut script = storm();
    script.books(D, 1_600, 0, 3, 0);
    let summary = script.summary();
    assert_eq!(names(&summary), ["leases_expired"]);
    assert_eq!(summary.engines[D].expired, 3);
}
