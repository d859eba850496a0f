//! `bench/gpu/check.sh` on a machine without a GPU: its output and exit code when parts of it do not run. Every program
//! that it calls is a script of the test.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/bench/gpu/check.sh");

/// The output of a test binary that ran this many tests.
fn ran(tests: u32) -> String {
    format!("#!/bin/sh\necho 'test result: ok. {tests} passed; 0 failed; 0 ignored'\n")
}

/// The address of an engine that answers every request until the test ends.
fn engine() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            // Reads the whole request: closing a connection with unread bytes resets it.
            let (mut asked, mut piece) = (Vec::new(), [0; 4096]);
            while !asked.ends_with(b"}") {
                match stream.read(&mut piece) {
                    Ok(bytes @ 1..) => asked.extend_from_slice(&piece[..bytes]),
                    Ok(0) | Err(_) => break,
                }
            }
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}");
        }
    });
    address
}

struct Machine {
    folder: PathBuf,
    variables: Vec<(&'static str, String)>,
}

impl Machine {
    /// A machine with all programs, on which every check passes.
    fn complete(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("gpu-check-{name}"));
        fs::create_dir_all(&folder).expect("a folder");
        let mut machine = Self { folder, variables: Vec::new() };
        machine.baton("exit 0\n");
        machine.program("compute-sanitizer", "#!/bin/sh\nexit 0\n");
        for (variable, name) in [("CONFORMANCE", "conformance"), ("HANDOFF", "handoff"), ("E2E", "e2e")] {
            let path = machine.program(name, &ran(3));
            machine.variables.push((variable, path));
        }
        machine
    }

    /// The binary: an engine that responds, and this script for every other command.
    fn baton(&self, others: &str) -> String {
        let log = "KV cache sized from free device memory";
        let engine = format!("echo '{log}' >&2; echo 'ready http={}'; exec cat >/dev/null", engine());
        self.program("baton", &format!("#!/bin/sh\nif [ \"$1\" = engine ]; then {engine}; fi\n{others}"))
    }

    fn program(&self, name: &str, text: &str) -> String {
        let path = self.folder.join(name);
        fs::write(&path, text).expect("a script");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it can be run");
        path.display().to_string()
    }

    fn set(mut self, variable: &'static str, value: &str) -> Self {
        self.variables.retain(|(name, _)| *name != variable);
        self.variables.push((variable, value.to_owned()));
        self
    }

    /// The script's exit code and last line.
    fn check(&self) -> (Option<i32>, String) {
        let path = format!("{}:{}", self.folder.display(), std::env::var("PATH").unwrap_or_default());
        let mut command = Command::new("bash");
        command.arg("-c").arg(format!("{SCRIPT} \"$0\" \"$1\" 2>&1"));
        command.arg(self.folder.join("baton")).arg(self.folder.join("results")).env("PATH", path);
        for name in ["DEVICE", "STEPS", "CONFORMANCE", "HANDOFF", "E2E", "BATON_GPU_CHECK_LOGGED"] {
            command.env_remove(name);
        }
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        let output = command.output().expect("bash runs");
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code(), printed.lines().last().unwrap_or_default().to_owned())
    }
}

#[test]
fn only_a_complete_run_is_all_right() {
    let whole = Machine::complete("whole");
    assert_eq!(whole.check(), (Some(0), "all right".to_owned()));
    let (code, printed) = whole.set("HANDOFF", "").set("STEPS", "parity nixl handoff e2e").check();
    assert_eq!(code, Some(3), "{printed}");
    assert!(printed.starts_with("NOT CHECKED: pool (not in STEPS); speed (not in STEPS); "), "{printed}");
    assert!(printed.contains("handoff (HANDOFF does not name") && !printed.contains("e2e"), "{printed}");
    let (code, printed) = Machine::complete("software").set("DEVICE", "software").check();
    assert_eq!(code, Some(3), "{printed}");
    for part in ["kernels", "speed", "sanitizer", "disconnect"] {
        assert!(printed.contains(&format!("{part} (not on the software device)")), "{printed}");
    }
}

#[test]
fn all_output_is_kept_in_the_log() {
    let machine = Machine::complete("log");
    let results = machine.folder.join("results");
    if results.exists() {
        fs::remove_dir_all(&results).expect("it is this test's");
    }
    let log = || {
        let files = fs::read_dir(&results).expect("a folder").map(|file| file.expect("a file").path());
        let mut logs = files.filter(|path| path.to_string_lossy().ends_with("-gpu-check.txt"));
        let text = logs.next().map(|path| fs::read_to_string(path).expect("text"));
        assert!(logs.next().is_none(), "one a day");
        text
    };
    let dry = Machine::complete("log").set("DEVICE", "software");
    assert_eq!((dry.check().0, log()), (Some(3), None), "of a dry run nothing is kept");
    let talks = "echo \"called: $*\"\necho a complaint >&2\n";
    machine.baton(talks);
    assert_eq!(machine.check(), (Some(0), "all right".to_owned()));
    let first = log().expect("it is written down");
    for printed in [
        "called: parity ",
        "called: bench handoff --device cuda:0 --transport auto,shm,tcp --json --fail-on-miss\n",
        "--json --fail-on-miss --model DIR --tokens 4096 --chunk 512 --pace-ms 1\n",
        "a complaint\n",
        "test result: ok. 3 passed",
        "== every promise of a transport, between pools in device memory of two processes\n",
        "== a KV pool that takes what the device has left, and an answer from it\n",
    ] {
        assert!(first.contains(printed), "{printed} is missing in {first}");
    }
    assert!(first.ends_with("\nall right\n"), "{first}");
    // Without a GPU the script adds no result and keeps the results of other runs.
    machine.program("baton", "#!/bin/sh\nexit 77\n");
    assert_eq!((machine.check().0, log()), (Some(77), Some(first.clone())));
    machine.baton(talks);
    assert_eq!(machine.check().0, Some(0));
    let both = log().expect("it is written down");
    assert!(both.starts_with(&first) && both.len() > first.len(), "{both}");
}

#[test]
fn a_library_that_is_missing_is_named() {
    let machine = Machine::complete("nixl");
    machine.baton("[ \"$2\" = gpu-nixl ] && exit 77\nexit 0\n");
    let (code, printed) = machine.check();
    assert_eq!((code, printed.as_str()), (Some(3), "NOT CHECKED: nixl (its library is not here, see above)"));
}

#[test]
fn a_filter_that_matches_no_test_is_a_failure() {
    let machine = Machine::complete("none");
    machine.program("handoff", &ran(0));
    assert_eq!(machine.check(), (Some(1), "FAILED: handoff tests (no test was run)".to_owned()));
    machine.program("handoff", "#!/bin/sh\necho 'test result: ok. 3 passed'\nexit 101\n");
    assert_eq!(machine.check(), (Some(1), "FAILED: handoff tests".to_owned()));
}

#[test]
fn nothing_is_checked_without_a_gpu() {
    let machine = Machine::complete("without");
    machine.program("baton", "#!/bin/sh\nexit 77\n");
    assert_eq!(machine.check().0, Some(77));
}
