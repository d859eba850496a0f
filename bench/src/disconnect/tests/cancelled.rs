//! Cancels in storms, retries, and what reports show of both.

use super::super::analyse::summary::StormCancels;
use super::super::record::retries::RetryCounts;
use super::*;

#[test]
fn cancels_in_time_are_counted_per_storm() {
    let mut script = storm();
    script.segment("storm 2", SegmentKind::Storm, 2_000, 2_500, |script, segment| {
        script.stayed(segment, "s2", 2_100, &[2_160], "done");
        // One is half-closed in time and completed, one has its response before its cancel, and one is a retry.
        for (tag, left) in [("served", Some(2_140_000)), ("had-it", None)] {
            script.stayed(segment, tag, 2_100, &[2_130, 2_160], "done");
            let Some(Record::Call(call)) = script.0.last_mut() else { panic!("a call") };
            (call.leaves, call.left_us) =
                (Some(CancelPlan { phase: None, kind: CancelKind::HalfClose }), left);
        }
        script.stayed(segment, "queued-again", 2_200, &[2_210], "done");
        let Some(Record::Call(call)) = script.0.last_mut() else { panic!("a call") };
        call.retries = Some("queued".into());
    });
    let summary = script.summary();
    let cancels = summary.storm_cancels.expect("there were storms");
    // Of the first storm five of six, one of them too late.
    let expected = StormCancels { requests: 9, drawn: 7, in_time: 5, share_in_time: 5.0 / 9.0 };
    assert_eq!(cancels, expected);
    let says =
        "7 of 9 requests were selected for a cancel. 5 were cancelled before they completed (55.6 % of all)";
    assert!(report::text(&summary).contains(says) && report::page(&summary).contains(says));
    let json = serde_json::to_value(&summary).expect("JSON");
    assert_eq!((&json["storm_cancels"]["drawn"], &json["storm_cancels"]["in_time"]), (&7.into(), &5.into()));
    assert!(Script::new().summary().storm_cancels.is_none());
}

/// A client with a timeout, and the outcomes of its retries.
fn retried_request(script: &mut Script, segment: &str, tag: &str, outcomes: &[&str]) {
    script.cancelled(segment, tag, 1_060, CancelKind::Timeout, Phase::Stream, 3);
    for (turn, outcome) in outcomes.iter().enumerate() {
        let again = format!("{tag}{}", "-again".repeat(turn + 1));
        let due = 2_000 + 1_000 * turn as u64;
        script.stayed(segment, &again, due, &[due + 10], outcome);
        let Some(Record::Call(call)) = script.0.last_mut() else { panic!("a call") };
        call.retries = Some(tag.into());
    }
}

#[test]
fn retries_are_counted_by_cancel_kind_and_by_fault() {
    let mut script = storm();
    script.segment("phase stream", SegmentKind::Phase, 2_000, 4_900, |script, segment| {
        retried_request(script, segment, "one", &["done"]);
        retried_request(script, segment, "two", &["refused", "done"]);
        retried_request(script, segment, "three", &["refused", "broken"]);
    });
    script.segment("fault x", SegmentKind::Fault, 5_000, 9_000, |script, segment| {
        retried_request(script, segment, "four", &["broken"]);
    });
    let summary = script.summary();
    let of = |kind: CancelKind| summary.kinds.iter().find(|row| row.kind == kind).expect("a row").retries;
    assert_eq!(of(CancelKind::Timeout), RetryCounts { asked: 5, failed: 3, gave_up: 1 });
    assert_eq!(of(CancelKind::Fin), RetryCounts::default());
    assert_eq!(summary.faults[0].retries, RetryCounts { asked: 1, failed: 1, gave_up: 1 });
    // Retries count neither as uncancelled nor as cancelled.
    assert_eq!(summary.faults[0].stayed.requests, 0);
    let json = serde_json::to_value(&summary).expect("JSON");
    assert_eq!(json["faults"][0]["retries"]["failed"], 1);
    assert!(json["kinds"].as_array().expect("kinds").iter().any(|row| row["retries"]["asked"] == 5));
    let (text, page) = (report::text(&summary), report::page(&summary));
    let kind = |name: &str| {
        let row = page.split_once(&format!("<tr><td>{name}</td>")).expect("a row").1;
        row[..row.find("</tr>").expect("its end") + 5].to_owned()
    };
    assert!(text.contains("timeout: 5 retries, 3 of them failed, 1 clients without a response"), "{text}");
    assert!(text.contains("\n  1 retries, 1 of them failed, 1 clients without a response"), "{text}");
    assert!(kind("timeout").ends_with("<td>0</td><td>0</td><td>5</td><td>3</td></tr>"), "{page}");
    assert!(kind("FIN").ends_with("<td>0</td><td>1</td><td>–</td><td>–</td></tr>"), "{page}");
}

#[test]
fn the_reports_contain_command_niceness_and_comparison() {
    let mut script = storm();
    let Some(Record::Run(run)) = script.0.first_mut() else { panic!("a run") };
    (run.command, run.nice) = ("baton bench disconnect".into(), Some(-15));
    let summary = script.summary();
    for shown in [report::text(&summary), report::page(&summary)] {
        assert!(shown.contains(", at nice -15") && shown.contains("--compare-with FILE"), "{shown}");
    }
    script.0.push(Record::ComparedWith { compared: serde_json::json!({"targets": []}) });
    let summary = script.summary();
    for shown in [report::text(&summary), report::page(&summary)] {
        assert!(!shown.contains("--compare-with"), "{shown}");
    }
    // As in older files.
    let Some(Record::Run(run)) = script.0.first_mut() else { panic!("a run") };
    run.nice = None;
    assert!(!report::text(&script.summary()).contains("nice"));
}

#[test]
fn every_plot_has_its_numbers_as_json() {
    let series = report::series(&storm().summary());
    assert_eq!(series["segments"][1], serde_json::json!({"name": "storm", "from_s": 1.0, "to_s": 2.0}));
    // Three requests whose blocks were freed after 5, 3 and 11 ms, each in another phase.
    let stream = serde_json::json!({"phase": "stream", "n": 1, "never": 0, "ms_percent": [[11.0, 100.0]]});
    assert_eq!(series["time_to_free"].as_array().map(Vec::len), Some(3));
    assert!(series["time_to_free"].as_array().expect("phases").contains(&stream), "{series:#}");
    assert_eq!(series["ttft_ms_percent"]["storm"], serde_json::json!([[12.0, 100.0]]));
    // The calm request whose paired request in the storm is uncancelled; it has one token.
    assert_eq!(series["ttft_ms_percent"]["calm"], serde_json::json!([[40.0, 100.0]]));
    assert_eq!(series["itl_ms_percent"], serde_json::json!({"calm": [], "storm": [[10.0, 100.0]]}));
    assert_eq!(series["pools"][P]["engine"], "prefill");
    let held = series["stranded_s_blocks"].as_array().expect("points");
    assert_eq!(held.last().map(|point| &point[1]), Some(&0.0.into()));
}

#[test]
fn a_server_side_drop_is_distinct_from_a_late_cancel() {
    let mut script = storm();
    // Both clients read nothing from 1,060 on and reset at 1,400. One response had completed before that.
    script.segment("phase stream", SegmentKind::Phase, 2_000, 5_000, |script, segment| {
        for tag in ["let go", "over by itself"] {
            script.cancelled(segment, tag, 1_060, CancelKind::Stall, Phase::Stream, 3);
            let Some(Record::Call(call)) = script.0.last_mut() else { panic!("a call") };
            call.ended_us = 1_400_000;
        }
    });
    let decode =
        [("queued", 1_022, 0, "decode"), ("fetching", 1_025, 7, ""), ("fetched", 1_030, 0, "landed")];
    for tag in ["let go", "over by itself"] {
        script.engine_events(P, tag, &prefill_leg("transfer_done", 1_031));
        script.engine_events(D, tag, &decode);
    }
    script.engine_events(
        D,
        "let go",
        &[("abort", 1_300, 0, "disconnect"), ("ended", 1_301, 9, "abort"), ("freed", 1_302, 8, "")],
    );
    script.engine_events(D, "over by itself", &[("ended", 1_301, 9, "length"), ("freed", 1_302, 8, "")]);
    let summary = script.summary();
    let row = summary.kinds.iter().find(|row| row.kind == CancelKind::Stall).expect("a row");
    assert_eq!((row.group.cancelled, row.too_late, row.dropped_by_server), (0, 2, 1));
}

#[test]
fn a_served_half_close_is_counted_separately() {
    let mut script = storm();
    script.segment("phase stream", SegmentKind::Phase, 2_000, 5_000, |script, segment| {
        script.cancelled(segment, "h", 1_060, CancelKind::HalfClose, Phase::Stream, 3);
        let Some(Record::Call(call)) = script.0.last_mut() else { panic!("a call") };
        call.outcome = "done".into();
    });
    let summary = script.summary();
    let row = summary.kinds.iter().find(|row| row.kind == CancelKind::HalfClose).expect("a row");
    assert_eq!((row.served, row.group.cancelled), (1, 0));
}
