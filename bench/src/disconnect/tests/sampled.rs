//! Block-seconds from samples of metrics, compared with the actual ones.

use super::super::analyse::sampled;
use super::*;

/// A sample every 40 ms from 0 to 10 s of an engine with these blocks and requests.
fn samples(script: &mut Script, engine: usize, at: impl Fn(u64) -> (u64, u64)) {
    for at_us in (0..=10_000_000_u64).step_by(40_000) {
        let (held, requests) = at(at_us / 1_000);
        let state = EngineState {
            engine,
            at_us,
            took_us: 2_000,
            total: 100,
            held,
            requests,
            ..EngineState::default()
        };
        script.0.push(Record::EngineState(state));
    }
}

/// One request is cancelled at 1,015 ms, and its 7 blocks are held for 4 s. One client waits from 6,001 to 6,500 ms
/// with 9 blocks.
fn metrics_only_run(blocks: u64) -> Script {
    let mut script = Script::new();
    for record in &mut script.0 {
        if let Record::Engine(engine) = record {
            (engine.events, engine.blocks) = (false, blocks);
        }
    }
    script.segment("phase prefill", SegmentKind::Phase, 0, 9_000, |script, segment| {
        script.cancelled(segment, "left", 1_015, CancelKind::Fin, Phase::Prefill, 0);
        script.stayed(segment, "stayed", 6_000, &[6_500, 6_900], "done");
    });
    // Blocks of refused requests do not count.
    script.segment("refused", SegmentKind::Refused, 9_000, 10_000, |_, _| {});
    samples(&mut script, P, |at| match at {
        1_000..5_015 => (7, u64::from(at < 1_010)),
        // Leased for a client that waits.
        6_010..6_450 => (9, 0),
        9_000.. => (50, 0),
        _ => (0, 0),
    });
    samples(&mut script, D, |at| if (6_450..6_900).contains(&at) { (9, 1) } else { (0, 0) });
    script
}

#[test]
fn blocks_held_in_idle_samples_count_as_orphaned() {
    let summary = metrics_only_run(100).summary();
    let sampled = summary.sampled.expect("it is known");
    // The first quiet sample with the blocks is at 1,040 ms, the last at 5,000: 7 × 3.96 s, and half of 40 ms before
    // and after. The sample at 1,000 is not quiet.
    near(sampled.held.block_seconds, 7.0 * (3.96 + 0.04 + 0.02));
    near(sampled.held.off_by, 7.0 * (0.04 + 0.02));
    let exact = 7.0 * 4.0;
    assert!((sampled.held.block_seconds - exact).abs() <= sampled.held.off_by, "{sampled:?}");
    near(sampled.per_1000, sampled.held.block_seconds * 1_000.0);
    near(sampled.per_1000_off_by, sampled.held.off_by * 1_000.0);
    // During its decode, after the wait of a client.
    near(sampled.held.longest_unseen_s, 0.96);
    let json = serde_json::to_value(&summary).expect("JSON");
    assert_eq!(json["sampled"]["block_seconds"], sampled.held.block_seconds);
    assert_eq!(json["engines"][D]["sampled"]["block_seconds"], 0.0);
    assert!(json["all"]["block_seconds"].is_null(), "of single requests nothing is known");
    let (text, page) = (report::text(&summary), report::page(&summary));
    assert!(text.contains("from samples") && text.contains("28,140.00 ± 420.00"), "{text}");
    assert!(page.contains("from samples") && page.contains("28,140.00"), "{page}");
}

#[test]
fn without_pool_size_or_idle_samples_the_result_is_unknown() {
    let summary = metrics_only_run(0).summary();
    assert!(summary.sampled.is_none());
    let unknown = summary.describe_unknown().join("; ");
    assert!(unknown.contains("prefill does not report the size of its pool"), "{unknown}");
    assert!(report::page(&summary).contains("<td>5.0 %</td>"), "held at most, as a share");
    let busy = |engines: &[usize]| {
        let mut busy = metrics_only_run(100);
        for record in &mut busy.0 {
            if let Record::EngineState(state) = record
                && engines.contains(&state.engine)
            {
                state.requests = 1;
            }
        }
        busy.summary()
    };
    let summary = busy(&[P, D]);
    let unknown = summary.describe_unknown().join("; ");
    assert!(summary.sampled.is_none() && unknown.contains("prefill had a request or a client"), "{unknown}");
    // One engine can be sampled, the other cannot.
    let summary = busy(&[D]);
    let sampled = summary.sampled.expect("it is known of one engine");
    assert_eq!((sampled.unknown_engines, summary.engines[D].sampled), (1, None));
    near(sampled.held.block_seconds, 7.0 * (3.96 + 0.04 + 0.02));
    let unknown = summary.describe_unknown().join("; ");
    assert!(unknown.contains("decode had a request") && !unknown.contains("prefill had"), "{unknown}");
    assert!(report::text(&summary).contains("without 1 engines that cannot be sampled"));
    assert!(report::page(&summary).contains("≥ 28,140.00"));
}

#[test]
fn engines_with_a_log_need_no_samples() {
    let mut script = metrics_only_run(100);
    for record in &mut script.0 {
        if let Record::Engine(engine) = record {
            engine.events = true;
        }
    }
    let data = RunData::of(&script.0);
    assert!(sampled::of(&data, 1).is_some());
    assert!(summary(&script.0).sampled.is_none());
}
