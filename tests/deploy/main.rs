//! What operators are given: every file below `deploy/`, against the real binary and the tools that will read it.
//!
//! | file | what it shows |
//! |---|---|
//! | `kustomize` | composes an overlay as kustomize does, and knows whether it was done right where `kubectl` is installed |
//! | `manifests` | every document is what the Kubernetes API says, to the last field; every file is used |
//! | `references` | what one document says of another: labels, ports, volumes, keys, accounts, times that add up |
//! | `processes` | what documents say of our binary: arguments, configurations, ports, probes |
//! | `systemd` | units, as `systemd-analyze` sees them; their commands and times |
//! | `promql`, `metrics` | every metric and label that a rule or a panel names is on a live `/metrics` |
//! | `container` | the image's contents, built and run without a container engine |
//! | `examples` | every router configuration of this repository, also those in pages, passes `baton check` |
//! | `doctor` | `baton doctor --strict` is content with a router and engines that are set up as the example says |
//! | `collector`, `traces` | the OpenTelemetry collector's configuration; one request's trace, from its client to both engines |
//! | `files` | which test reads which file: none is without |
//! | `runbook` | what the runbook names exists |
//!
//! What cannot be shown on a machine says `SKIPPED`, loudly, and why.

#![allow(clippy::print_stdout)] // what a test measured is shown with --nocapture

mod collector;
mod container;
mod doctor;
mod examples;
mod files;
#[path = "../harness/mod.rs"]
mod harness;
mod kustomize;
mod manifests;
mod metrics;
mod processes;
mod promql;
mod receiver;
mod references;
mod runbook;
mod systemd;
mod traces;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// A file or folder of the repository.
fn ours(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The documents of a YAML file.
fn documents(path: &Path) -> Vec<Value> {
    let text = read(path);
    let parsed = text.split("\n---\n").map(|document| parsed(document, path));
    parsed.filter(|document| !document.is_null()).collect()
}

fn parsed(text: &str, path: &Path) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every file below a folder, by its path; secrets that somebody made for himself are none of ours.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.expect("an entry can be read").path();
        match path.is_dir() {
            true if path.ends_with("secrets") => {}
            true => found.extend(files_below(&path)),
            false => found.push(path),
        }
    }
    found.sort();
    found
}

/// Whether a program is installed.
fn installed(program: &str) -> bool {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders).any(|folder| folder.join(program).is_file())
}

/// Says that something was not shown.
fn skipped(why: &str) {
    eprintln!(
        "########################################################\n## SKIPPED: {why}\n########################################################"
    );
}

/// Runs a command to its end: whether it succeeded, and all that it said.
fn run(command: &mut Command) -> (bool, String) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

/// The binary under test.
fn baton(arguments: &[String]) -> (bool, String) {
    run(Command::new(env!("CARGO_BIN_EXE_baton")).args(arguments))
}
