//! Clients whose host vanishes: a deployment cannot notice at once, and has to notice within a limit.

use super::*;

/// A stream whose client vanishes at 1,060. Its decode leg ends and frees its blocks at `back`.
fn vanishes(script: &mut Script, tag: &str, back: u64, aborted: bool) {
    let segment = format!("phase of {tag}");
    script.segment(&segment, SegmentKind::Phase, 1_000, 2_000, |script, segment| {
        script.cancelled(segment, tag, 1_060, CancelKind::Vanish, Phase::Stream, 3);
    });
    script.engine_events(P, tag, &prefill_leg("transfer_done", 1_031));
    let begins =
        [("queued", 1_022, 0, "decode"), ("fetching", 1_025, 7, ""), ("fetched", 1_030, 0, "landed")];
    script.engine_events(D, tag, &begins);
    script.engine_events(D, tag, &[("first_token", 1_040, 0, "")]);
    if aborted {
        script.engine_events(D, tag, &[("abort", back - 2, 0, "disconnect")]);
    }
    let how = if aborted { "abort" } else { "length" };
    script.engine_events(D, tag, &[("ended", back - 1, 64, how), ("freed", back, 8, "")]);
}

fn vanish_row(summary: &Summary) -> &super::super::analyse::summary::KindRow {
    summary.kinds.iter().find(|row| row.kind == CancelKind::Vanish).expect("a row")
}

#[test]
fn a_vanished_client_is_a_finding_only_after_the_bound() {
    let healthy = storm().summary();
    for (back, aborted, found) in [
        // Completed; noticed just in time, after 22.5 s and one; and too late.
        (1_100, false, false),
        (24_560, true, false),
        (24_561, true, true),
        (90_000, false, true),
    ] {
        let mut script = storm();
        vanishes(&mut script, "v", back, aborted);
        script.engine_state(P, 100_000, 0, 2, 0);
        script.engine_state(D, 100_000, 0, 0, 0);
        let summary = script.summary();
        let expected: &[&str] = if found { &["vanished_stranded"] } else { &[] };
        assert_eq!(names(&summary), expected, "{back}: {:?}", summary.findings);
        // The client counts separately, and in its kind.
        let vanished = summary.vanished.as_ref().expect("one");
        for group in [&vanished.group, &vanished.phases[0].group, &vanish_row(&summary).group] {
            assert_eq!((group.cancelled, group.stranded), (1, u64::from(found)), "{back}");
            near(group.time_to_free_ms.max, (back - 1_060) as f64);
            assert!(group.wasted_response_tokens > 0);
        }
        let (noticed, by_itself) = (vanished.noticed_ms.n, vanished.by_itself_ms.n);
        assert_eq!((noticed, by_itself), (usize::from(aborted && !found), usize::from(!aborted && !found)));
        // And in no number of other cancels.
        assert_eq!((summary.cancelled, &summary.all.abort_ms), (healthy.cancelled, &healthy.all.abort_ms));
        near(summary.all.block_seconds, healthy.all.block_seconds);
        let of = |summary: &Summary| summary.phases.iter().map(|row| row.group.cancelled).collect::<Vec<_>>();
        assert_eq!((of(&summary), &summary.work), (of(&healthy), &healthy.work));
        // A request that completed does not show whether the deployment would have noticed.
        let unjudged = "detection of vanished clients";
        let shown = summary.describe_unknown().iter().any(|what| what.contains(unjudged));
        assert_eq!(shown, !aborted && !found, "{:?}", summary.describe_unknown());
        let (text, page) = (report::text(&summary), report::page(&summary));
        for shown in ["22.5 s to notice", "vanish"] {
            assert!(text.contains(shown) && page.contains(shown), "{shown}: {text}");
        }
        let series = report::series(&summary);
        assert!(series["held_for_vanished_s_blocks"].as_array().is_some_and(|points| points.len() == 2));
    }
    for shown in [report::text(&healthy), report::page(&healthy), report::series(&healthy).to_string()] {
        assert!(!shown.to_lowercase().contains("vanish"), "{shown}");
    }
}

#[test]
fn the_vanish_bound_is_the_option() {
    let mut script = storm();
    let Some(Record::Run(run)) = script.0.first_mut() else { panic!("a run") };
    run.options = serde_json::json!({"vanish_noticed_ms": 2_000});
    vanishes(&mut script, "v", 1_060 + 3_000 + 1_000 + 1, true);
    script.engine_state(P, 100_000, 0, 2, 0);
    script.engine_state(D, 100_000, 0, 0, 0);
    let summary = script.summary();
    assert_eq!(names(&summary), ["vanished_stranded"]);
    assert!(summary.findings[0].says.contains("for more than 4 s"), "{}", summary.findings[0].says);
}

#[test]
fn blocks_held_at_an_interrupt_may_belong_to_a_vanished_client() {
    // The engines were watched for 5 s after it, then for 30 s.
    for (watched, left_behind) in [(6_060, false), (31_060, true)] {
        let mut script = storm();
        vanishes(&mut script, "v", 90_000, false);
        script.0.retain(|record| !matches!(record, Record::Event(event) if event.at_us > 50_000_000));
        script.0.push(Record::Interrupted { at_us: 5_000_000 });
        script.engine_state(P, watched, 0, 2, 0);
        script.engine_state(D, watched, 7, 0, 0);
        let summary = script.summary();
        let expected: &[&str] = if left_behind { &["vanished_stranded", "blocks_not_freed"] } else { &[] };
        assert_eq!(names(&summary), expected);
        let vanished = &summary.vanished.as_ref().expect("one").group;
        assert_eq!((vanished.never_freed, vanished.stranded), (1, u64::from(left_behind)));
        let shown = summary
            .describe_unknown()
            .iter()
            .any(|what| what.contains("still holds 7 blocks at the end for"));
        assert_eq!(shown, !left_behind, "{:?}", summary.describe_unknown());
    }
}

#[test]
fn metrics_only_engines_are_judged_on_vanished_clients_after_the_bound() {
    for (vanishing, found) in [(true, false), (false, true)] {
        let mut script = Script::new();
        let Some(Record::Engine(engine)) = script.0.get_mut(1) else { panic!("an engine") };
        engine.events = false;
        script.segment("phase stream", SegmentKind::Phase, 0, 60_000, |script, segment| {
            let kind = if vanishing { CancelKind::Vanish } else { CancelKind::Fin };
            script.cancelled(segment, "v", 1_060, kind, Phase::Stream, 3);
        });
        // Until 20 s after it. Blocks that are held for longer are a finding, with or without a vanished client.
        for at in (2_000..=21_000).step_by(500) {
            script.engine_state(D, at, 8, 0, 0);
        }
        script.engine_state(D, 21_500, 0, 0, 0);
        let named = |script: &Script| names(&script.summary()).contains(&"orphaned_blocks");
        assert_eq!(named(&script), found);
        for at in (22_000..=40_000).step_by(500) {
            script.engine_state(D, at, 8, 0, 0);
        }
        script.engine_state(D, 41_000, 0, 0, 0);
        assert!(named(&script));
    }
}

#[test]
fn a_cancel_kind_that_could_not_run_is_reported() {
    let mut script = storm();
    script.0.push(Record::NotPlayed { kind: CancelKind::Vanish, why: "it needs <root>".into() });
    let summary = script.summary();
    let shown = "cancel by vanish: not possible here: it needs ";
    assert!(summary.describe_unknown().iter().any(|what| what.contains(shown)));
    assert!(report::text(&summary).contains(shown) && report::page(&summary).contains(shown));
    assert!(!summary.kinds.iter().any(|row| row.kind == CancelKind::Vanish) && summary.vanished.is_none());
    let json = serde_json::to_value(&summary).expect("JSON");
    assert_eq!(json["not_played"], serde_json::json!([{"kind": "vanish", "why": "it needs <root>"}]));
}
