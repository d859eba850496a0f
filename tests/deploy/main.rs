//! The files for operators: every file below `deploy/`, checked with the real binary and with the tools that read the
//! file.
//!
//! | file | subject |
//! |---|---|
//! | `kustomize` | composes an overlay as kustomize does, and compares with `kubectl` where that is installed |
//! | `manifests` | every document conforms to the Kubernetes API in every field; every file is used |
//! | `references` | references between documents: labels, ports, volumes, keys, accounts, times that add up |
//! | `processes` | the binary's arguments, configurations, ports and probes in the documents |
//! | `systemd` | units, checked by `systemd-analyze`; their commands and times |
//! | `promql`, `metrics` | a live `/metrics` has every metric and label of a rule or a panel |
//! | `container` | the image's contents, built and run without a container engine |
//! | `examples` | every router configuration of this repository, also those in pages, passes `baton check` |
//! | `doctor` | `baton doctor --strict` passes for a router and engines with the example's configuration |
//! | `envoy`, `sidecar` | Envoy's configuration and the endpoint picker's agree; the sidecar's manifest fits the pool |
//! | `collector`, `traces` | the OpenTelemetry collector's configuration; one request's trace, from its client to both engines |
//! | `files` | the test that reads each file: every file has one |
//! | `vllm` | the overlay, the image and the pages of the connector for vLLM agree with its package |
//! | `runbook` | everything that the runbook names exists |
//!
//! A check that a machine cannot run prints `SKIPPED` and the reason.

#![allow(clippy::print_stdout, reason = "--nocapture shows the measured times")]

mod collector;
mod container;
mod doctor;
mod envoy;
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
mod sidecar;
mod systemd;
mod traces;
mod vllm;

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

/// Every file below a folder, by its path, without an operator's own secrets.
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

/// Prints that a check was skipped.
fn skipped(why: &str) {
    eprintln!(
        "########################################################\n## SKIPPED: {why}\n########################################################"
    );
}

/// Runs a command to its end. Returns whether it succeeded, and its output.
fn run(command: &mut Command) -> (bool, String) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

/// The binary under test.
fn baton(arguments: &[String]) -> (bool, String) {
    run(Command::new(env!("CARGO_BIN_EXE_baton")).args(arguments))
}
