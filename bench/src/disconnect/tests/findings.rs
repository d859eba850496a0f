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
    let gap = summary.phases.iter().find(|row| row.phase == Phase::Gap).expect("a row");
    assert_eq!((gap.group.left, gap.group.stranded, gap.group.expired, gap.group.never_told), (2, 1, 1, 1));
    near(gap.group.freed_ms.max, 29_999.0);
}

#[test]
fn a_lease_of_a_part_that_was_killed_may_end_after_that() {
    let mut script = storm();
    script.act("fault router", ActKind::Fault, 2_000, 20_000, |script, act| {
        script.stayed(act, "lost", 2_100, &[], "broken");
        script.stayed(act, "later", 10_100, &[10_150], "done");
        for (at, mended) in [(3_000, false), (8_000, true)] {
            script.0.push(Record::Fault {
                act: act.into(),
                fault: "router".into(),
                at_us: at * 1_000,
                mended,
            });
        }
    });
    script.told(P, "lost", &lends(Cause::Expired.label(), 32_000));
    script.books(P, 19_000, 10, 0, 0);
    script.books(P, 33_000, 0, 1, 0);
    assert!(!names(&script.summary()).contains(&"leases_expired"));
    // One more is somebody else's, and so is one of a call that came when all was mended.
    let mut more = Script(script.0.clone());
    more.books(P, 34_000, 0, 2, 0);
    assert!(names(&more.summary()).contains(&"leases_expired"));
    script.told(P, "later", &lends(Cause::Expired.label(), 41_000));
    let summary = script.summary();
    let found = summary.findings.iter().find(|found| found.name == "leases_expired").expect("it is named");
    assert_eq!(found.shown_by, ["later"]);
}

#[test]
fn wrong_texts_are_named_and_what_was_seen_of_one_must_be_its_beginning() {
    let mut script = storm();
    let replay = |tag: &str, text: &str, said: Option<&str>| Record::Replay {
        tag: tag.into(),
        text: Some(text.into()),
        said: said.map(str::to_owned),
    };
    script.0.extend([
        replay("s1", "wordword", Some("wordword")),
        replay("c2", "wordword", Some("wordword")),
        replay("stream", "wor", Some("wordword")),
        replay("over", "old", Some("wordword")),
        // It does not say the same twice.
        replay("c1", "word", None),
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
