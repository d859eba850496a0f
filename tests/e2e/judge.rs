//! `baton bench disconnect`: what it finds of a healthy deployment is nothing, and of a broken one what is broken.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

/// Everything that is wrong with a deployment, whatever else its machine is busy with.
const UNTRUE: [&str; 8] = [
    "prefill_not_aborted",
    "decode_not_aborted",
    "gap_stranded",
    "stranded",
    "leases_expired",
    "freed_twice",
    "wrong_texts",
    "blocks_not_home",
];

/// Runs the benchmark, short, and reads its summary.
fn judged(folder: &Path, options: &[&str]) -> Value {
    let out = folder.to_str().expect("a path");
    let short = ["bench", "disconnect", "--json", "--out", out, "--seconds", "1.5", "--victims", "5"];
    ran(&[&short, ["--phase-seconds", "4", "--patience", "3"].as_slice(), options].concat())
}

fn ran(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("the binary under test can be started");
    let (out, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {}\n{out}\n{log}", output.status);
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}\n{log}"))
}

fn found(summary: &Value) -> Vec<&str> {
    let findings = summary["findings"].as_array().expect("findings");
    findings.iter().map(|finding| finding["name"].as_str().expect("a name")).collect()
}

#[test]
fn nothing_is_found_of_our_own_deployment_and_the_report_can_be_made_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let engines = ["--", "--kv-cache-mib", "32", "--threads", "1"];
    let options = ["--no-faults", "--rate", "15", "--stranded-after-ms", "10000"];
    let summary = judged(folder.path(), &[&options, engines.as_slice()].concat());
    let found = found(&summary);
    assert!(!found.iter().any(|name| UNTRUE.contains(name)), "{:#}", summary["findings"]);
    assert_eq!(summary["exact"], true);
    assert_eq!(summary["texts"]["wrong"], 0);
    let left = |phase: &str| {
        let rows = summary["phases"].as_array().expect("phases");
        let row = rows.iter().find(|row| row["phase"] == phase);
        row.and_then(|row| row["left"].as_u64()).unwrap_or(0)
    };
    for phase in ["queued", "prefill", "stream"] {
        assert!(left(phase) > 0, "nobody left in phase {phase}: {:#}", summary["phases"]);
    }
    assert!(summary["texts"]["compared"].as_u64() > Some(0) && summary["refused"]["left"].as_u64() > Some(0));
    let page = std::fs::read_to_string(folder.path().join("report.html")).expect("a report");
    assert!(page.starts_with("<!doctype html>") && page.contains("<svg"), "{page}");
    // Every number comes from the raw events.
    let again = ran(&["bench", "report", "--json", folder.path().to_str().expect("a path")]);
    assert_eq!(again, summary);
}
