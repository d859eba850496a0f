//! A run that cannot start leaves its folder as it was.

use std::fs;
use std::path::Path;

use clap::Parser;

use crate::disconnect::plan::options::DisconnectOptions;
use crate::disconnect::{folder, run};

#[derive(Parser)]
struct DisconnectCli {
    #[command(flatten)]
    options: DisconnectOptions,
}

/// Runs against a deployment that does not exist, and returns the error.
fn fails(out: &Path) -> String {
    // A port without a listener.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let dead = format!("http://{}", listener.local_addr().expect("an address"));
    drop(listener);
    let line = ["disconnect", "--url", &dead, "--admin", &dead, "--out", out.to_str().expect("it is text")];
    let options = DisconnectCli::try_parse_from(line).expect("options").options;
    let mut output = Vec::new();
    let error = run(&options, &mut output).expect_err("no deployment responds").to_string();
    assert!(output.is_empty(), "{}", String::from_utf8_lossy(&output));
    error
}

#[test]
fn a_run_that_cannot_start_removes_only_folders_it_created() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let (existing, missing) = (root.path().join("there"), root.path().join("made"));
    fs::create_dir(&existing).expect("it can be made");
    for out in [existing.clone(), existing.join("a/b"), missing.join("c")] {
        let error = fails(&out);
        assert!(error.contains("cannot connect"), "{error}");
    }
    assert!(existing.exists() && !existing.join("a").exists() && !missing.exists());
}

#[test]
fn a_run_that_cannot_start_leaves_no_earlier_report() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let events = root.path().join("events.jsonl");
    let mut calm = super::Script::new();
    calm.segment("calm 1", super::SegmentKind::Calm, 0, 1_000, |script, segment| {
        script.stayed(segment, "a", 10, &[20, 30], "complete");
    });
    let mut before = Vec::new();
    calm.0.iter().for_each(|record| super::raw::write(&mut before, record).expect("a record"));
    fs::write(&events, &before).expect("it can be written");
    fails(root.path());
    assert_eq!(fs::read(&events).expect("it is there"), before);
    assert_eq!(fs::read_dir(root.path()).expect("a folder").count(), 1, "and no report of it is written");
}

#[test]
fn an_unwritable_folder_is_an_error_before_the_first_request() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let file = root.path().join("file");
    fs::write(&file, "").expect("it can be written");
    // No user can create a file in the last one.
    for out in [file.clone(), file.join("below"), "/proc/self".into()] {
        assert!(folder(&out).is_err());
        let error = fails(&out);
        assert!(error.starts_with(&out.display().to_string()), "{error}");
    }
    assert!(file.is_file());
}
