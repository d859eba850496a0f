//! The table of protocols, from runs with known events.

use super::super::analyse::cells;
use super::super::plan::options::StartedEngines;
use super::super::protocols::{ProtocolRun, table};
use super::*;

fn of(protocol: StartedEngines, script: &Script) -> ProtocolRun {
    ProtocolRun::new(protocol, &script.summary(), cells(&script.0))
}

/// A prefill whose client leaves and whose lease expires.
fn stranded() -> Script {
    let mut script = storm();
    script.segment("phase prefill", SegmentKind::Phase, 3_000, 40_000, |script, segment| {
        script.cancelled(segment, "left", 3_010, CancelKind::HalfClose, Phase::Prefill, 0);
        let Some(Record::Call(call)) = script.0.last_mut() else { panic!("a call") };
        (call.due_us, call.began_us) = (3_000_000, 3_000_000);
    });
    script.engine_events(
        P,
        "left",
        &[
            ("queued", 3_002, 0, "prefill"),
            ("started", 3_005, 0, ""),
            ("computed", 3_008, 60, ""),
            ("computed", 3_020, 100, ""),
            ("ended", 3_020, 1, "length"),
            ("lease_opened", 3_020, 7, ""),
            ("lease_ended", 33_020, 7, CloseCause::Expired.label()),
            ("freed", 33_020, 7, ""),
        ],
    );
    script.engine_state(P, 40_000, 0, 1, 0);
    script.engine_state(D, 40_000, 0, 0, 0);
    script
}

#[test]
fn each_phase_and_way_of_leaving_is_a_row_and_what_remains_has_a_reason() {
    let runs = [of(StartedEngines::SimBaton, &storm()), of(StartedEngines::Vllm, &stranded())];
    let text = table(&runs);
    let row = |protocol: &str, phase: &str, kind: &str| {
        let found = text.lines().find(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            words.starts_with(&[protocol, phase, kind])
        });
        let numbers = found.unwrap_or_else(|| panic!("{protocol} {phase} {kind}: {text}")).split_whitespace();
        numbers.skip(3).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(row("sim-baton", "prefill", "RST"), "1 0 5.0 ms 5.0 ms 5.0 ms 60 + 0");
    assert_eq!(row("vllm", "prefill", "half-close"), "1 1 30.0 s 30.0 s 30.0 s 40 + 0");
    // The events of the storm are those of both.
    assert_eq!(row("vllm", "prefill", "RST"), row("sim-baton", "prefill", "RST"));
    let line = |protocol: &str| text.lines().find(|line| line.starts_with(&format!("{protocol}: ")));
    assert!(
        line("sim-baton")
            .expect("a line")
            .contains("0 of 4 stranded, 0 of 0 texts wrong. Commands: abort and release")
    );
    let vllm = line("vllm").expect("a line");
    assert!(
        vllm.contains("1 of 5 stranded (prefill 1)")
            && vllm.contains("keeps the blocks until the lease ends"),
        "{vllm}"
    );
    assert!(vllm.contains("Findings: "), "{vllm}");
    let json = serde_json::to_value(&runs).expect("JSON");
    assert_eq!((&json[1]["protocol"], &json[1]["stranded"]), (&"vllm".into(), &1.into()));
    let cell = &json[0]["cells"][0];
    assert_eq!(
        (&cell["phase"], &cell["kind"], &cell["cancelled"]),
        (&"queued".into(), &"fin".into(), &1.into())
    );
}
