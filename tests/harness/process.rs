//! One process of ours: started with a pipe as its lifeline, known by its "ready" line, stopped or killed at will.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use super::{PATIENCE, eventually};

/// A process gets this long to load and to say that it is ready.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// What a test does to a process.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Signal {
    /// Ends it where it stands: `kill -9`.
    Kill,
    /// It computes and answers nothing, but its sockets are open.
    Pause,
    /// Ends a pause.
    Continue,
    /// Asks it to end: Ctrl-C.
    Interrupt,
    /// Asks it to end, as a supervisor does: SIGTERM.
    Terminate,
}

/// The binary under test: the one that was built with the tests, or another where those are run on a machine that did not
/// build them.
fn binary() -> std::ffi::OsString {
    std::env::var_os("BATON_TEST_BINARY").unwrap_or(env!("CARGO_BIN_EXE_baton").into())
}

/// A running process; it is ended when this is dropped.
pub(crate) struct Process {
    name: String,
    child: Child,
    /// In a mutex only so that a cluster can be shared by the threads of a test.
    ready: Mutex<Option<Receiver<String>>>,
    facts: String,
    log: PathBuf,
}

impl Process {
    /// Starts `baton` with these arguments, supervised by a pipe on its stdin.
    pub(crate) fn start(name: &str, args: &[String], folder: &Path) -> Self {
        Self::spawn(name, Command::new(binary()), args, folder)
    }

    /// As [`Self::start`], with its system calls in a file.
    pub(crate) fn traced(name: &str, args: &[String], folder: &Path, calls: &Path) -> Self {
        let mut strace = Command::new("strace");
        strace.args(["-f", "-o"]).arg(calls).arg(binary());
        Self::spawn(name, strace, args, folder)
    }

    /// As [`Self::start`], by a command whose further arguments are those.
    pub(crate) fn spawn(name: &str, mut command: Command, args: &[String], folder: &Path) -> Self {
        let log = folder.join(format!("{name}.log"));
        let stderr = File::create(&log).expect("the test's folder can be written");
        // Where there is a GPU, what would run on the software device runs on that.
        let device = std::env::var("BATON_TEST_DEVICE").unwrap_or("software".into());
        let args = args.iter().map(|arg| if arg == "software" { &device } else { arg });
        let mut child = command
            .args(args)
            .arg("--until-stdin-ends")
            .env("RUST_LOG", "baton=info,baton_engine=debug,baton_router=debug,warn")
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
                    // Nobody waits for it when the test has failed already.
                    let _ = tell.send(facts.to_owned());
                }
            }
        });
        Self { name: name.to_owned(), child, ready: Mutex::new(Some(ready)), facts: String::new(), log }
    }

    /// Waits for its "ready" line.
    pub(crate) fn wait_ready(&mut self) {
        let ready = self.ready.get_mut().expect("nobody panics with it").take().expect("waited for once");
        let facts = ready.recv_timeout(READY_WITHIN);
        self.facts = facts.unwrap_or_else(|_| panic!("{} is not ready:\n{}", self.name, self.log()));
    }

    /// A value of its "ready" line.
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

    /// Its number.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.child.try_wait().expect("it is our child")
    }

    /// Its resident memory, in KiB; 0 when it has ended.
    pub(crate) fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    }

    /// Its open file descriptors.
    pub(crate) fn descriptors(&self) -> usize {
        let open = std::fs::read_dir(format!("/proc/{}/fd", self.child.id()));
        open.map_or(0, Iterator::count)
    }

    /// Waits until it has ended by itself, and well.
    pub(crate) fn ends_well(&mut self, within: Duration) {
        let ended = || match self.child.try_wait().expect("it is our child") {
            Some(status) => Ok(status),
            None => Err("it runs".to_owned()),
        };
        let status = eventually(within, &format!("{} ends", self.name), ended);
        assert!(status.success(), "{}: {status}", self.name);
    }

    /// Asks it to end, by its lifeline, and waits until it has.
    pub(crate) fn stop(&mut self) {
        drop(self.child.stdin.take());
        self.ends_well(PATIENCE);
    }

    /// Where it logs.
    pub(crate) fn log_file(&self) -> &Path {
        &self.log
    }

    /// What it has logged.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let tail: Vec<&str> = log.lines().rev().take(40).collect();
            // Whether it had ended by itself, and how.
            let ended = self.child.try_wait().ok().flatten();
            eprintln!(
                "--- log of {} ({})",
                self.name,
                ended.map_or("alive".to_owned(), |how| how.to_string())
            );
            tail.iter().rev().for_each(|line| eprintln!("{line}"));
        }
        // It may be dead already, and a test that ends owes it no drain.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal by the system's own `kill`, which needs no unsafe code here.
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
        // A signal is delivered, not done, when `kill` returns.
        let stopped = || match state(pid) {
            Some('T') => Ok(()),
            other => Err(format!("{other:?}")),
        };
        eventually(PATIENCE, "the process stands still", stopped);
    }
}

/// Waits for the end of a process that is not our child. A zombie has ended: its parent has not looked yet.
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
