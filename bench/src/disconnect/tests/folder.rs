//! What a run that cannot begin leaves of its folder: what was there before.

use std::fs;
use std::path::Path;

use clap::Parser;

use crate::disconnect::plan::options::DisconnectOptions;
use crate::disconnect::{folder, run};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    options: DisconnectOptions,
}

/// Runs against a deployment that is not there: what it said of it.
fn fails(out: &Path) -> String {
    // A port that was free a moment ago, and that nobody listens on.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let dead = format!("http://{}", listener.local_addr().expect("an address"));
    drop(listener);
    let line = ["disconnect", "--url", &dead, "--admin", &dead, "--out", out.to_str().expect("it is text")];
    let options = Line::try_parse_from(line).expect("options").options;
    let mut said = Vec::new();
    let error = run(&options, &mut said).expect_err("nobody answers").to_string();
    assert!(said.is_empty(), "{}", String::from_utf8_lossy(&said));
    error
}

#[test]
fn a_run_that_cannot_begin_takes_back_the_folders_that_it_made_and_no_other() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let (there, made) = (home.path().join("there"), home.path().join("made"));
    fs::create_dir(&there).expect("it can be made");
    for out in [there.clone(), there.join("a/b"), made.join("c")] {
        let error = fails(&out);
        assert!(error.contains("cannot connect"), "{error}");
    }
    assert!(there.exists() && !there.join("a").exists() && !made.exists());
}

#[test]
fn a_run_that_cannot_begin_tells_nothing_of_the_run_before_it() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let events = home.path().join("events.jsonl");
    let mut calm = super::Script::new();
    calm.act("calm 1", super::ActKind::Calm, 0, 1_000, |script, act| {
        script.stayed(act, "a", 10, &[20, 30], "complete");
    });
    let mut before = Vec::new();
    calm.0.iter().for_each(|record| super::raw::write(&mut before, record).expect("a record"));
    fs::write(&events, &before).expect("it can be written");
    fails(home.path());
    assert_eq!(fs::read(&events).expect("it is there"), before);
    assert_eq!(fs::read_dir(home.path()).expect("a folder").count(), 1, "and no report of it is written");
}

#[test]
fn a_folder_that_cannot_be_written_is_said_before_anything_is_asked() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let file = home.path().join("file");
    fs::write(&file, "").expect("it can be written");
    // In the last one nobody can make a file, whoever they are.
    for out in [file.clone(), file.join("below"), "/proc/self".into()] {
        assert!(folder(&out).is_err());
        let error = fails(&out);
        assert!(error.starts_with(&out.display().to_string()), "{error}");
    }
    assert!(file.is_file());
}
