//! `baton check` as people and scripts use it: what it prints, where, and how it exits.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::{Command, Output};

const GOOD: &str = "models:\n  - name: m\n    decode: {engines: [{url: 'http://127.0.0.1:2'}]}\n";

fn baton(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_baton")).args(arguments).output().unwrap()
}

fn out(output: &Output) -> (bool, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

fn file(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn check_prints_what_is_in_effect_and_it_is_a_configuration_again() {
    let folder = tempfile::tempdir().unwrap();
    let good = file(folder.path(), "good.yaml", GOOD);
    let (sound, effective, _) = out(&baton(&["check", &good]));
    assert!(sound && effective.contains("drain_timeout_ms: 30000"), "{effective}");
    let again = file(folder.path(), "again.yaml", &effective);
    let (sound, text, _) = out(&baton(&["check", &again]));
    let below = |text: &str| text.split_once('\n').unwrap().1.to_owned();
    assert!(sound);
    assert_eq!(below(&text), below(&effective));
}

#[test]
fn check_prints_every_problem_with_its_place_and_fails() {
    let folder = tempfile::tempdir().unwrap();
    let bad = file(folder.path(), "bad.yaml", &GOOD.replace("name", "nam").replace("2'", "2', weight: 0"));
    let (sound, nothing, said) = out(&baton(&["check", &bad]));
    assert!(!sound && nothing.is_empty(), "{nothing}");
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(lines.len(), 4, "{said}");
    assert!(lines[0].starts_with(&format!("{bad}:2:5: ")), "{said}");
    assert_eq!(lines[1], format!("{bad}:2:5: unknown key `nam`, did you mean `name`?"));
    assert!(lines[2].starts_with(&format!("{bad}:3:")) && lines[2].ends_with("0 is below 1"), "{said}");
    assert_eq!(lines[3], "baton: 3 problems");
}

#[test]
fn check_prints_the_schema_and_what_changes() {
    let (sound, schema, _) = out(&baton(&["check", "--schema"]));
    let schema: serde_json::Value = serde_json::from_str(&schema).unwrap();
    assert!(sound && schema["properties"]["models"].is_object());
    let folder = tempfile::tempdir().unwrap();
    let old = file(folder.path(), "old.yaml", GOOD);
    let new = file(folder.path(), "new.yaml", &format!("{GOOD}attempts: {{decode: 5}}\n"));
    let (sound, changes, _) = out(&baton(&["check", "--diff", &old, &new]));
    assert!(sound);
    assert_eq!(changes, "- attempts.decode: 3\n+ attempts.decode: 5\n");
}
