//! One process: started with a pipe on its stdin, identified by its "ready" line, stopped or killed by the test.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use super::{PATIENCE, eventually};

/// Maximum time for a process to load and to print its "ready" line.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// A signal that a test sends to a process.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Signal {
    /// Ends the process at once: `kill -9`.
    Kill,
    /// Stops the process. Its sockets stay open.
    Pause,
    /// Ends a pause.
    Continue,
    /// Requests the end: Ctrl-C.
    Interrupt,
    /// Requests the end as a supervisor does: SIGTERM.
    Terminate,
}

/// The binary under test: the one that was built with the tests, or another if the tests run on a machine that did not
/// build them.
fn binary() -> std::ffi::OsString {
    std::env::var_os("BATON_TEST_BINARY").unwrap_or(env!("CARGO_BIN_EXE_baton").into())
}

/// A running process. Dropping it ends the process.
pub(crate) struct Process {
    name: String,
    child: Child,
    /// A mutex only so that threads of a test can share a cluster.
    ready: Mutex<Option<Receiver<String>>>,
    facts: String,
    log: PathBuf,
}

impl Process {
    /// Starts `baton` with these arguments, supervised by a pipe on its stdin.
    pub(crate) fn start(name: &str, args: &[String], folder: &Path) -> Self {
        Self::spawn(name, Command::new(binary()), args, folder)
    }

    /// As [`Self::start`], with a trace of its system calls in a file.
    pub(crate) fn traced(name: &str, args: &[String], folder: &Path, calls: &Path) -> Self {
        let mut strace = Command::new("strace");
        strace.args(["-f", "-o"]).arg(calls).arg(binary());
        Self::spawn(name, strace, args, folder)
    }

    /// As [`Self::start`], with a command that gets these further arguments.
    pub(crate) fn spawn(name: &str, mut command: Command, args: &[String], folder: &Path) -> Self {
        let log = folder.join(format!("{name}.log"));
        let stderr = File::create(&log).expect("the test's folder can be written");
        // On a machine with a GPU, tests of the software device run on the GPU.
        let device = std::env::var("BATON_TEST_DEVICE").unwrap_or("software".into());
        let args = args.iter().map(|arg| if arg == "software" { &device } else { arg });
        let mut child = command
            .args(args)
            .arg("--until-stdin-ends")
            .env(
                "RUST_LOG",
                "baton=info,baton_connector_leases=debug,baton_engine=debug,baton_router=debug,warn",
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .expect("the binary under test can be started");
        let stdout = child.stdout.take().expect("stdout is a pipe");
        let (tell, ready) = sync_channel(1);
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let facts =
                    line.split_once(": ready ").map(|(_, facts)| facts).or(line.strip_prefix("ready "));
                if let Some(facts) = facts {
                    // The receiver is gone if the test has failed already.
                    let _ = tell.send(facts.to_owned());
                }
            }
        });
        Self { name: name.to_owned(), child, ready: Mutex::new(Some(ready)), facts: String::new(), log }
    }

    /// Waits for the "ready" line.
    pub(crate) fn wait_ready(&mut self) {
        let ready = self.ready.get_mut().expect("no holder panics").take().expect("waited for once");
        let facts = ready.recv_timeout(READY_WITHIN);
        self.facts = facts.unwrap_or_else(|_| panic!("{} is not ready:\n{}", self.name, self.log()));
    }

    /// A value of the "ready" line.
    pub(crate) fn fact(&self, key: &str) -> String {
        let value = self.facts.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        value.unwrap_or_else(|| panic!("{} did not say its {key}: {}", self.name, self.facts)).to_owned()
    }

    pub(crate) fn signal(&mut self, what: Signal) {
        signal(self.child.id(), what);
        if matches!(what, Signal::Kill) {
            let _ = self.child.wait();
        }
    }

    /// The process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The exit status, once the process has ended.
    pub(crate) fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.child.try_wait().expect("it is our child")
    }

    /// The process's resident memory in KiB; 0 after its end.
    pub(crate) fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    }

    /// The number of open file descriptors.
    pub(crate) fn descriptors(&self) -> usize {
        let open = std::fs::read_dir(format!("/proc/{}/fd", self.child.id()));
        open.map_or(0, Iterator::count)
    }

    /// Waits until the process ends by itself with success.
    pub(crate) fn ends_well(&mut self, within: Duration) {
        let ended = || match self.child.try_wait().expect("it is our child") {
            Some(status) => Ok(status),
            None => Err("it runs".to_owned()),
        };
        let status = eventually(within, &format!("{} ends", self.name), ended);
        assert!(status.success(), "{}: {status}", self.name);
    }

    /// Closes the stdin pipe and waits for the end.
    pub(crate) fn stop(&mut self) {
        drop(self.child.stdin.take());
        self.ends_well(PATIENCE);
    }

    /// The path of the log file.
    pub(crate) fn log_file(&self) -> &Path {
        &self.log
    }

    /// The contents of the log.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let tail: Vec<&str> = log.lines().rev().take(40).collect();
            // The exit status, if the process had ended by itself.
            let ended = self.child.try_wait().ok().flatten();
            eprintln!(
                "--- log of {} ({})",
                self.name,
                ended.map_or("alive".to_owned(), |how| how.to_string())
            );
            tail.iter().rev().for_each(|line| eprintln!("{line}"));
        }
        // The process may have ended already, and the end of a test needs no drain.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal with the system's `kill` command, which needs no unsafe code here.
pub(crate) fn signal(pid: u32, what: Signal) {
    let flag = match what {
        Signal::Kill => "-KILL",
        Signal::Pause => "-STOP",
        Signal::Continue => "-CONT",
        Signal::Interrupt => "-INT",
        Signal::Terminate => "-TERM",
    };
    let status = Command::new("kill").args([flag, &pid.to_string()]).status();
    assert!(status.expect("kill is part of every system").success(), "{flag} {pid}");
    if matches!(what, Signal::Pause) {
        // A signal is delivered, but not handled, when `kill` returns.
        let stopped = || match state(pid) {
            Some('T') => Ok(()),
            other => Err(format!("{other:?}")),
        };
        eventually(PATIENCE, "the process stands still", stopped);
    }
}

/// Waits for the end of a process that is not a child. A zombie has ended: its parent has not waited for it yet.
pub(crate) fn ends(pid: u32, within: Duration) {
    let ended = || match state(pid) {
        None | Some('Z' | 'X') => Ok(()),
        other => Err(format!("process {pid} is in state {other:?}")),
    };
    eventually(within, "the process ends", ended);
}

/// The state letter of `/proc/PID/stat`.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}
