//! Summaries of runs with known events.

use baton_connector::lease::CloseCause;

use super::analyse::dist::{Dist, DurationSamples};
use super::analyse::run_data::RunData;
use super::analyse::summary;
use super::analyse::summary::{Finding, Summary};
use super::plan::phase::{CancelKind, Phase};
use super::record::raw::{
    self, CallRecord, CancelPlan, EngineRecord, EngineState, EventRecord, Record, RunRecord, SegmentKind,
};
use super::report;

mod abort_delivery;
mod cancelled;
mod faults;
mod findings;
mod folder;
mod protocols;
mod sampled;
mod uncancelled;
mod vanish;
mod without_abort;

const P: usize = 0;
const D: usize = 1;

/// The raw events of a run, written by the test. Times are in milliseconds.
#[derive(Default)]
struct Script(Vec<Record>);

impl Script {
    fn new() -> Self {
        let run = RunRecord { stranded_after_us: 1_000_000, model: "<b>".into(), ..RunRecord::default() };
        let engine = |engine, name: &str| {
            let (name, role) = (name.to_owned(), name.to_owned());
            Record::Engine(EngineRecord {
                engine,
                name,
                role,
                events: true,
                blocks: 100,
                ..EngineRecord::default()
            })
        };
        Self(vec![Record::Run(run), engine(P, "prefill"), engine(D, "decode")])
    }

    fn segment(
        &mut self,
        segment: &str,
        what: SegmentKind,
        from: u64,
        to: u64,
        calls: impl FnOnce(&mut Self, &str),
    ) {
        self.0.push(Record::SegmentBegan { segment: segment.into(), at_us: from * 1_000, what });
        calls(self, segment);
        self.0.push(Record::SegmentEnded { segment: segment.into(), at_us: to * 1_000 });
    }

    /// An uncancelled stream that is due at `due`, begins 1 ms later, and has tokens at these times.
    fn stayed(&mut self, segment: &str, tag: &str, due: u64, tokens: &[u64], outcome: &str) {
        let began = due + 1;
        let ended = tokens.last().copied().unwrap_or(began) + 1;
        self.0.push(Record::Call(CallRecord {
            segment: segment.into(),
            tag: tag.into(),
            stream: true,
            due_us: due * 1_000,
            began_us: began * 1_000,
            ended_us: ended * 1_000,
            tokens_us: tokens.iter().map(|at| (at - began) * 1_000).collect(),
            outcome: outcome.into(),
            generated: tokens.len() as u32,
            text: "word".repeat(tokens.len()),
            ..CallRecord::default()
        }));
    }

    fn cancelled(
        &mut self,
        segment: &str,
        tag: &str,
        cancelled_at: u64,
        kind: CancelKind,
        phase: Phase,
        tokens: u32,
    ) {
        self.0.push(Record::Call(CallRecord {
            segment: segment.into(),
            tag: tag.into(),
            leaves: Some(CancelPlan { phase: Some(phase), kind }),
            stream: true,
            due_us: 1_000_000,
            began_us: 1_000_000,
            left_us: Some(cancelled_at * 1_000),
            ended_us: cancelled_at * 1_000,
            tokens_us: (0..u64::from(tokens)).map(|_| 0).collect(),
            outcome: "left".into(),
            generated: tokens,
            ..CallRecord::default()
        }));
    }

    /// Events of one engine: kind, time, a number and a word.
    fn engine_events(&mut self, engine: usize, tag: &str, events: &[(&str, u64, u64, &str)]) {
        for &(kind, at, number, word) in events {
            let some = |of: &[&str]| of.contains(&kind).then_some(number);
            let text = |of: &[&str]| of.contains(&kind).then(|| word.to_owned());
            let seq = self.0.len() as u64;
            self.0.push(Record::Event(EventRecord {
                engine,
                at_us: at * 1_000,
                seq,
                tag: tag.into(),
                kind: kind.into(),
                leg: text(&["queued"]),
                blocks: some(&["lease_opened", "freed", "fetching"]),
                left_ms: (kind == "lease_opened").then_some(30_000),
                tokens: some(&["computed"]),
                generated: (kind == "ended").then_some(number),
                computed: (kind == "ended").then_some(100),
                outcome: text(&["ended"]),
                reason: text(&["lease_ended", "abort"]),
                result: text(&["fetched", "replied"]),
                ..EventRecord::default()
            }));
        }
    }

    fn engine_state(&mut self, engine: usize, at: u64, held: u64, expired: u64, askew: i64) {
        let (at_us, total) = (at * 1_000, 100);
        self.0.push(Record::EngineState(EngineState {
            engine,
            at_us,
            total,
            held,
            askew,
            expired,
            ..EngineState::default()
        }));
    }

    fn summary(&self) -> Summary {
        // Written and read as a file, like every run.
        let mut file = Vec::new();
        for record in &self.0 {
            raw::write(&mut file, record).expect("a record");
        }
        let read = raw::read(&mut file.as_slice()).expect("what was written");
        assert_eq!(read, self.0);
        summary(&read)
    }
}

/// A prefill leg that leases 7 blocks at 1,020 and frees them at `back`.
fn prefill_leg(reason: &'static str, back: u64) -> [(&'static str, u64, u64, &'static str); 8] {
    [
        ("queued", 1_002, 0, "prefill"),
        ("started", 1_005, 0, ""),
        ("computed", 1_010, 60, ""),
        ("computed", 1_020, 100, ""),
        ("ended", 1_020, 1, "length"),
        ("lease_opened", 1_020, 7, ""),
        ("lease_ended", back, 7, reason),
        ("freed", back, 7, ""),
    ]
}

/// A healthy storm: one request is cancelled in each of five phases.
fn storm() -> Script {
    let mut script = Script::new();
    script.segment("calm", SegmentKind::Calm, 0, 500, |script, segment| {
        for (tag, due) in [("c4", 10), ("c5", 20), ("c6", 30)] {
            script.stayed(segment, tag, due, &[due + 10], "done");
        }
        script.stayed(segment, "c1", 100, &[110, 120, 140], "done");
        script.stayed(segment, "c2", 200, &[220, 230], "done");
        script.stayed(segment, "c3", 300, &[340], "done");
    });
    script.segment("storm", SegmentKind::Storm, 1_000, 2_000, |script, segment| {
        script.stayed(segment, "s1", 1_100, &[1_112, 1_122], "done");
        script.cancelled(segment, "queued", 1_001, CancelKind::Fin, Phase::Queued, 0);
        script.cancelled(segment, "prefill", 1_006, CancelKind::Rst, Phase::Prefill, 0);
        script.cancelled(segment, "gap", 1_021, CancelKind::Fin, Phase::Fetch, 0);
        script.cancelled(segment, "stream", 1_060, CancelKind::Fin, Phase::Stream, 3);
        script.cancelled(segment, "over", 1_090, CancelKind::Fin, Phase::Stream, 3);
    });
    script.engine_events(
        P,
        "prefill",
        &[
            ("queued", 1_002, 0, "prefill"),
            ("started", 1_005, 0, ""),
            ("abort", 1_008, 0, "disconnect"),
            ("computed", 1_010, 60, ""),
            ("ended", 1_011, 0, "abort"),
            ("freed", 1_011, 7, ""),
        ],
    );
    script.engine_events(P, "gap", &prefill_leg("client_gone", 1_024));
    script.engine_events(P, "stream", &prefill_leg("transfer_done", 1_031));
    script.engine_events(P, "over", &prefill_leg("transfer_done", 1_031));
    for (tag, aborted, ended) in [("stream", Some(1_062), 1_070), ("over", None, 1_080)] {
        let decode =
            [("queued", 1_022, 0, "decode"), ("fetching", 1_025, 7, ""), ("fetched", 1_030, 0, "landed")];
        script.engine_events(D, tag, &decode);
        if let Some(at) = aborted {
            script.engine_events(D, tag, &[("abort", at, 0, "disconnect")]);
        }
        let end = [
            ("ended", ended, 9, if aborted.is_some() { "abort" } else { "length" }),
            ("freed", ended + 1, 8, ""),
        ];
        script.engine_events(D, tag, &end);
    }
    script.engine_state(P, 1_000, 0, 2, 0);
    script.engine_state(P, 1_500, 0, 2, 0);
    script.engine_state(D, 1_500, 0, 0, 0);
    script
}

#[test]
fn a_request_aborted_for_its_cancel_counts_as_cancelled() {
    // The engine aborted it 1 ms before the client's cancel, or so long before it that the abort had another reason.
    for (aborted, left) in [(1_024, 1), (1_000, 0)] {
        let mut script = Script::new();
        script.segment("phase gap", SegmentKind::Phase, 900, 2_000, |script, segment| {
            script.cancelled(segment, "left", 1_025, CancelKind::Rst, Phase::Gap, 0);
        });
        script.engine_events(P, "left", &prefill_leg("lease_expired", 5_025));
        let decode =
            [("queued", 999, 0, "decode"), ("abort", aborted, 0, ""), ("ended", aborted, 0, "abort")];
        script.engine_events(D, "left", &decode);
        script.engine_state(P, 6_000, 0, 0, 0);
        let summary = script.summary();
        assert_eq!((summary.cancelled, summary.all.expired), (left, left));
        near(summary.all.block_seconds, left as f64 * 7.0 * 4.0);
    }
}

#[track_caller]
fn near(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-9, "{a} is not {b}");
}

#[test]
fn a_healthy_storm_has_the_expected_numbers() {
    let summary = storm().summary();
    assert!(summary.exact);
    assert_eq!((summary.requests, summary.cancelled), (12, 4));
    assert_eq!(summary.findings, []);
    let hit: Vec<_> = summary.phases.iter().map(|row| (row.phase, row.aimed, row.group.cancelled)).collect();
    // The cancel for the fetch phase hit the gap. A late cancel counts nowhere.
    let expected = [
        (Phase::Queued, 1, 1),
        (Phase::Prefill, 1, 1),
        (Phase::Gap, 0, 1),
        (Phase::Fetch, 1, 0),
        (Phase::Stream, 2, 1),
    ];
    assert_eq!(hit, expected);
    let group = |phase: Phase| &summary.phases.iter().find(|row| row.phase == phase).expect("a row").group;

    let prefill = group(Phase::Prefill);
    near(prefill.abort_ms.p50, 2.0);
    near(prefill.time_to_free_ms.p50, 5.0);
    near(prefill.time_to_free_at_prefill_ms.p50, 5.0);
    near(prefill.block_seconds, 7.0 * 0.005);
    assert_eq!((prefill.wasted_prompt_tokens, prefill.wasted_response_tokens), (60, 0));

    let gap = group(Phase::Gap);
    near(gap.abort_ms.p50, 3.0);
    near(gap.time_to_free_ms.p99, 3.0);
    near(gap.block_seconds_per_1000, 7.0 * 0.003 * 1_000.0);
    assert_eq!((gap.wasted_prompt_tokens, gap.abort_not_received, gap.stranded), (0, 0, 0));

    let stream = group(Phase::Stream);
    near(stream.abort_ms.p50, 2.0);
    near(stream.time_to_free_ms.p50, 11.0);
    // P had freed its blocks long before.
    assert_eq!((stream.time_to_free_at_prefill_ms.n, stream.wasted_response_tokens), (0, 6));
    near(stream.block_seconds, 8.0 * 0.011);

    // The queued request never reached an engine.
    assert_eq!(group(Phase::Queued).time_to_free_ms.n, 0);
    let all = &summary.all;
    assert_eq!((all.cancelled, all.time_to_free_ms.n, all.abort_ms.n, all.expired), (4, 3, 3, 0));
    near(all.time_to_free_ms.max, 11.0);
    near(all.time_to_free_ms.mean, 19.0 / 3.0);
    near(all.block_seconds, 7.0 * 0.005 + 7.0 * 0.003 + 8.0 * 0.011);
    near(all.block_seconds_per_1000, all.block_seconds * 250.0);
    let kinds: Vec<_> = summary.kinds.iter().map(|row| (row.kind, row.group.cancelled)).collect();
    assert_eq!(kinds, [(CancelKind::Fin, 3), (CancelKind::Rst, 1)]);

    let (calm, storm) = (summary.calm.as_ref().expect("calm"), summary.storm.as_ref().expect("storm"));
    assert_eq!((calm.requests, calm.errors, storm.requests), (6, 0, 1));
    // From the due time: four times 10 ms, and 20 and 40 ms.
    near(calm.ttft_ms.p50, 10.0);
    near(calm.ttft_ms.p90, 40.0);
    near(calm.ttft_ms.mean, 100.0 / 6.0);
    assert_eq!(calm.itl_ms.n, 3);
    near(calm.itl_ms.p50, 10.0);
    near(calm.itl_ms.max, 20.0);
    near(calm.e2e_ms.max, 41.0);
    // 9 tokens from 10 to 341.
    near(calm.tokens_per_second, 9.0 / 0.331);
    near(storm.ttft_ms.p50, 12.0);
    assert_eq!(summary.ttft_p99_over_calm_paired.as_ref().expect("a round").runs, [0.3]);
    // Counters from before the run do not count.
    assert_eq!(summary.engines.iter().map(|engine| engine.expired).sum::<u64>(), 0);
    // No blocks were held between two samples without a request.
    near(summary.engines[P].idle_block_seconds, 0.0);
    let stranded = &summary.series.stranded;
    near(stranded.iter().map(|(_, blocks)| *blocks).fold(0.0, f64::max), 8.0);
    assert_eq!(stranded.last().map(|(_, blocks)| *blocks), Some(0.0));
}

#[test]
fn rounds_of_calm_and_storm_are_compared_pair_by_pair() {
    let mut script = storm();
    script.segment("storm 2", SegmentKind::Storm, 2_000, 2_500, |script, segment| {
        script.stayed(segment, "s2", 2_100, &[2_160], "done");
    });
    script.segment("calm 2", SegmentKind::Calm, 3_000, 3_500, |script, segment| {
        script.stayed(segment, "c4", 3_100, &[3_140], "done");
    });
    let summary = script.summary();
    let spread = summary.ttft_p99_over_calm_paired.expect("rounds");
    assert_eq!(spread.runs, [0.3, 1.5]);
    // Of two ratios the lower one, which was measured.
    near(spread.median, 0.3);
    let calm = summary.calm.expect("calm");
    assert_eq!((calm.requests, calm.ttft_ms.n), (7, 7));
    // 10 tokens, from 10 to 341 and from 3,100 to 3,141. The time between the rounds does not count.
    near(calm.tokens_per_second, 10.0 / 0.372);
}

fn names(summary: &Summary) -> Vec<&str> {
    summary.findings.iter().map(|finding| finding.name).collect()
}

#[test]
fn blocks_that_are_never_freed_count_until_the_last_sample() {
    let mut script = storm();
    script.segment("phase gap", SegmentKind::Phase, 2_000, 5_000, |script, segment| {
        script.cancelled(segment, "held", 1_021, CancelKind::Fin, Phase::Gap, 0);
    });
    script.engine_events(P, "held", &prefill_leg("", 0)[..6]);
    script.engine_state(P, 6_021, 7, 2, 0);
    script.engine_state(D, 6_021, 0, 0, 0);
    let summary = script.summary();
    assert_eq!(names(&summary), ["gap_stranded", "blocks_not_freed"]);
    let gap = summary.phases.iter().find(|row| row.phase == Phase::Gap).expect("a row");
    assert_eq!((gap.group.never_freed, gap.group.stranded), (1, 1));
    near(gap.group.block_seconds, 7.0 * 0.003 + 7.0 * 5.0);
    // The blocks of the other request were freed after 3 ms; these were not freed while they were watched.
    let at_prefill = &gap.group.time_to_free_at_prefill_ms;
    assert_eq!((at_prefill.n, at_prefill.never, at_prefill.watched_ms), (2, 1, 5_000.0));
    assert_eq!((at_prefill.min, at_prefill.p50, at_prefill.p99), (3.0, 3.0, f64::INFINITY));
    let written = serde_json::to_value(at_prefill).expect("JSON");
    assert_eq!((&written["p50"], &written["p99"]), (&3.0.into(), &serde_json::Value::Null));
    assert!(report::page(&summary).contains("<td>never</td>"));
    assert_eq!(*at_prefill, gap.group.time_to_free_ms);
    assert_eq!(summary.engines[P].held_at_end, Some(7));
}

#[test]
fn legs_that_compute_after_a_cancel_are_findings() {
    let mut script = storm();
    script.segment("phase prefill", SegmentKind::Phase, 2_000, 5_000, |script, segment| {
        for (p, d) in [("p1", "d1"), ("p2", "d2"), ("p3", "d3")] {
            script.cancelled(segment, p, 1_006, CancelKind::Fin, Phase::Prefill, 0);
            script.cancelled(segment, d, 1_060, CancelKind::Fin, Phase::Stream, 3);
        }
    });
    // P computes to its end and leases its blocks, and the lease is released late.
    let mut on = prefill_leg("client_gone", 1_090);
    for event in &mut on[3..6] {
        event.1 = 1_080;
    }
    let decode = [
        ("queued", 1_022, 0, "decode"),
        ("fetching", 1_025, 7, ""),
        ("fetched", 1_030, 0, "landed"),
        ("ended", 1_900, 64, "length"),
        ("freed", 1_901, 8, ""),
    ];
    for (p, d) in [("p1", "d1"), ("p2", "d2"), ("p3", "d3")] {
        script.engine_events(P, p, &on);
        script.engine_events(P, d, &prefill_leg("transfer_done", 1_031));
        script.engine_events(D, d, &decode);
    }
    let summary = script.summary();
    assert_eq!(names(&summary), ["prefill_not_aborted", "decode_not_aborted"]);
    let shown = |at: usize| summary.findings[at].shown_by.as_slice();
    assert_eq!(
        (shown(0), shown(1)),
        (&["p1", "p2", "p3"].map(str::to_owned)[..], &["d1", "d2", "d3"].map(str::to_owned)[..])
    );
    assert_eq!(summary.all.wasted_response_tokens, 6 + 3 * 61);
    assert_eq!(summary.all.abort_not_received, 3);
}

#[test]
fn a_double_free_or_a_wrong_block_sum_is_a_finding() {
    let mut script = storm();
    script.engine_events(P, "gap", &[("freed", 1_025, 7, "")]);
    script.engine_state(P, 1_600, 0, 2, 1);
    script.engine_state(D, 1_600, 0, 0, -1);
    let summary = script.summary();
    assert_eq!(names(&summary), ["freed_twice", "freed_twice", "blocks_lost"]);
    assert_eq!(summary.findings[0].shown_by, ["gap"]);
}

#[test]
fn slower_uncancelled_requests_are_a_finding() {
    let mut script = storm();
    script.segment("storm 2", SegmentKind::Storm, 3_000, 5_000, |script, segment| {
        script.stayed(segment, "slow", 3_000, &[3_400, 3_700], "done");
        script.stayed(segment, "failed", 3_100, &[], "broken");
    });
    let summary = script.summary();
    // Two against three requests: too few to compare.
    assert_eq!(names(&summary), ["uncancelled_failed"]);
    assert!(summary.describe_unknown().iter().any(|what| what.contains("are too few")));
    assert_eq!(summary.findings[0].shown_by, ["failed"]);
}

#[test]
fn faults_and_refusals_are_counted_for_themselves() {
    let mut script = storm();
    script.segment("refused", SegmentKind::Refused, 3_000, 4_000, |script, segment| {
        script.stayed(segment, "no", 3_000, &[], "refused");
    });
    script.engine_events(P, "no", &prefill_leg("consumer_rejected", 3_004));
    script.segment("fault decode", SegmentKind::Fault, 5_000, 9_000, |script, segment| {
        for (fault, at_us, recovered) in
            [("decode killed", 5_500_000, false), ("decode killed", 6_000_000, true)]
        {
            let (segment, fault) = (segment.to_owned(), fault.to_owned());
            script.0.push(Record::Fault { segment, fault, at_us, recovered, struck: None });
        }
        script.stayed(segment, "f1", 5_400, &[], "broken");
        script.stayed(segment, "f2", 6_500, &[], "refused");
        script.stayed(segment, "f3", 6_600, &[6_700], "done");
        for (at, held) in [(6_600, 4), (6_800, 4), (6_900, 0), (7_000, 0)] {
            script.engine_state(P, at, 0, 2, 0);
            script.engine_state(D, at, held, 0, 0);
        }
    });
    let summary = script.summary();
    let refused = summary.refused.as_ref().expect("refused");
    // From the refusal, at 3,002.
    assert_eq!((refused.cancelled, refused.stranded), (1, 0));
    near(refused.time_to_free_ms.p50, 2.0);
    let [fault] = &summary.faults[..] else { panic!("{:?}", summary.faults) };
    assert_eq!(
        (fault.fault.as_str(), fault.stayed.requests, fault.stayed.errors, fault.errors_after),
        ("decode killed", 3, 2, 1)
    );
    // The last request ended at 6,701.
    near(fault.all_free_ms.expect("blocks are free"), 199.0);
    assert_eq!(names(&summary), ["not_recovered"]);
    // Refused requests and faults do not count as cancelled.
    assert_eq!(summary.cancelled, 4);
}

/// Percentiles by counting; the implementation sorts.
fn by_counting(samples: &[f64], share: f64) -> f64 {
    let enough = |value: f64| {
        let at_most = samples.iter().filter(|sample| **sample <= value).count();
        at_most as f64 >= share * samples.len() as f64
    };
    samples.iter().copied().filter(|sample| enough(*sample)).fold(f64::INFINITY, f64::min)
}

#[test]
fn percentiles_agree_with_counting() {
    let mut rng = crate::load::rng::Rng::new(7);
    assert_eq!(Dist::of(&[]), Dist::default());
    for n in [1, 2, 3, 9, 10, 99, 100, 101, 1000] {
        // Every third duration did not end: it is longer than all others.
        let mut times = DurationSamples::default();
        let mut all = Vec::new();
        for turn in 0..n {
            let ms = rng.below(50) as f64;
            if turn % 3 == 2 {
                times.add_unended(ms + 7.0);
            } else {
                times.add_ended(ms);
            }
            all.push(if turn % 3 == 2 { f64::INFINITY } else { ms });
        }
        let dist = times.dist();
        assert_eq!((dist.n, dist.never), (n, n / 3));
        for (share, found) in [(0.5, dist.p50), (0.9, dist.p90), (0.99, dist.p99), (1.0, dist.max)] {
            assert_eq!(found, by_counting(&all, share));
        }
        // Few values: many ties.
        for values in [3, 1 << 16] {
            let samples: Vec<f64> = (0..n).map(|_| rng.below(values) as f64 / 7.0).collect();
            let dist = Dist::of(&samples);
            for (share, found) in [(0.5, dist.p50), (0.9, dist.p90), (0.99, dist.p99), (1.0, dist.max)] {
                near(found, by_counting(&samples, share));
            }
            near(dist.min, samples.iter().copied().fold(f64::INFINITY, f64::min));
            near(dist.mean, samples.iter().sum::<f64>() / n as f64);
        }
    }
}

#[test]
fn the_reports_match_the_summary_and_escape_names() {
    let mut script = storm();
    script.engine_events(P, "gap", &[("freed", 1_025, 7, "")]);
    let summary = script.summary();
    let (text, page) = (report::text(&summary), report::page(&summary));
    assert!(text.contains("freed_twice") && page.contains("freed_twice"));
    assert!(!page.contains("<script") && !page.contains("http://") && !page.contains("https://"));
    assert!(page.contains("&lt;b&gt;") && !page.contains("to <b><b>"));
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    // Without event logs the same run has a report by metrics.
    let mut blind = Script(script.0.clone());
    blind.0.retain(|record| !matches!(record, Record::Event(_)));
    for record in &mut blind.0 {
        if let Record::Engine(engine) = record {
            engine.events = false;
        }
    }
    let summary = blind.summary();
    assert!(!summary.exact && report::page(&summary).contains("metrics only"));
}

#[test]
fn a_foreign_event_file_is_refused_with_its_line() {
    let text = b"{\"record\":\"segment_ended\",\"segment\":\"a\",\"at_us\":1}\nnonsense\n";
    let error = raw::read(&mut &text[..]).expect_err("no record").to_string();
    assert!(error.starts_with("line 2: "), "{error}");
    assert_eq!(RunData::of(&[]).cancelled_calls().len(), 0);
}

#[test]
fn failed_requests_and_lost_engines_are_findings() {
    let mut script = storm();
    script.segment("phase gap", SegmentKind::Phase, 2_000, 5_000, |script, segment| {
        script.stayed(segment, "again", 2_000, &[], "refused");
        script.cancelled(segment, "held", 2_100, CancelKind::Fin, Phase::Gap, 0);
    });
    script.0.push(Record::Restarted { engine: D, at_us: 3_000_000, seen_us: None });
    script.engine_state(P, 9_000, 0, 2, 0);
    let summary = script.summary();
    assert_eq!(names(&summary), ["requests_failed", "engine_restarted", "engine_gone"]);
    assert_eq!(
        (summary.findings[0].shown_by.as_slice(), summary.engines[D].held_at_end),
        (["again".to_owned()].as_slice(), None)
    );
}

#[test]
fn the_summary_lists_what_could_not_be_judged() {
    let mut script = storm();
    script.segment("storm 2", SegmentKind::Storm, 3_000, 5_000, |script, segment| {
        script.stayed(segment, "cut", 3_400, &[], "broken");
    });
    script.0.push(Record::Interrupted { at_us: 3_400_000 });
    script.0.push(Record::Lost { engine: P, events: 3 });
    script.0.push(Record::Failed { at_us: 3_500_000, why: "no more room".into() });
    let summary = script.summary();
    let unknown = summary.describe_unknown().join("; ");
    // No cancel was in the fetch phase, although one had it as its intended phase.
    for shown in ["broken off", "no more room", "3 engine events", "none could be compared", "phase fetch"] {
        assert!(unknown.contains(shown), "{shown}: {unknown}");
    }
    // Calls that end after the interruption do not count.
    assert_eq!((names(&summary), summary.requests), (Vec::new(), 12));
    let (text, page) = (report::text(&summary), report::page(&summary));
    assert!(text.contains("in what was judged") && page.contains("in what was judged"));
}
