//! `baton up`: its printed command works, a dead process is restarted, and nothing remains after its end.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use crate::harness::{PATIENCE, PendingCall, Reply, Signal, ends, eventually, signal};

/// Both engines load, one after the other on a small machine.
const UP_WITHIN: Duration = Duration::from_secs(60);

/// `baton up`, as a person starts it.
pub(crate) struct UpProcess {
    child: Child,
    lines: Receiver<String>,
}

#[test]
fn an_error_of_both_engines_is_printed_once() {
    let up = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(["up", "--listen", "127.0.0.1:0", "--", "--device", "software", "--kv-cache-dtype", "f16"])
        .stdin(Stdio::null())
        .output()
        .expect("the binary under test can be started");
    let printed = String::from_utf8_lossy(&up.stderr);
    assert!(!up.status.success(), "{printed}");
    assert_eq!(printed.matches("--kv-cache-dtype must be f32 or bf16").count(), 1, "{printed}");
    assert_eq!(printed.matches("ended before it was ready").count(), 1, "{printed}");
}

/// The printed curl line.
struct Curl {
    address: String,
    path: String,
    body: String,
}

impl UpProcess {
    pub(crate) fn start() -> Self {
        Self::with(&[])
    }

    /// With this checkpoint.
    pub(crate) fn serving(model: &Path) -> Self {
        Self::launch(Command::new(env!("CARGO_BIN_EXE_baton")).arg("up").arg("--model").arg(model), &[])
    }

    /// With more options for both engines.
    fn with(options: &[&str]) -> Self {
        Self::launch(Command::new(env!("CARGO_BIN_EXE_baton")).arg("up"), options)
    }

    fn launch(up: &mut Command, options: &[&str]) -> Self {
        let mut child = up
            .args(["--listen", "127.0.0.1:0", "--", "--kv-cache-mib", "32", "--threads", "1"])
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary under test can be started");
        let stdout = child.stdout.take().expect("stdout is a pipe");
        let (tell, lines) = sync_channel(64);
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        Self { child, lines }
    }

    /// Waits for the banner and parses its curl line.
    fn curl(&self) -> Curl {
        let next = || self.lines.recv_timeout(UP_WITHIN).expect("the banner has a curl line");
        let url = loop {
            let line = next();
            if let Some((_, rest)) = line.split_once("curl -s http://") {
                break rest.split(' ').next().unwrap_or_default().to_owned();
            }
        };
        let line = next();
        let body = line.trim().strip_prefix("-d '").and_then(|rest| rest.strip_suffix('\''));
        let (address, path) = url.split_once('/').expect("a URL with a path");
        let body = body.unwrap_or_else(|| panic!("no body: {line}")).to_owned();
        Curl { address: address.to_owned(), path: format!("/{path}"), body }
    }

    /// The addresses of the banner: for clients, and of the admin listener.
    pub(crate) fn addresses(&self) -> (String, String) {
        let curl = self.curl();
        let admin = loop {
            let line = self.lines.recv_timeout(UP_WITHIN).expect("the banner names the admin listener");
            if let Some((_, rest)) = line.split_once("Watch it: http://") {
                break rest.split('/').next().unwrap_or_default().to_owned();
            }
        };
        (curl.address, admin)
    }

    /// The child processes by name: `router`, `prefill`, `decode`.
    fn children(&self) -> Vec<(String, u32)> {
        let ours = self.child.id();
        let entries = std::fs::read_dir("/proc").expect("/proc is there").flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let of_ours = |pid: u32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let mut fields = stat.rsplit_once(") ")?.1.split(' ');
            let (state, parent) = (fields.next()?, fields.next()?);
            if parent.parse() != Ok(ours) || state == "Z" {
                return None;
            }
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
            let role = ["prefill", "decode", "router"]
                .into_iter()
                .find(|role| line.split('\0').any(|word| word == *role))?;
            Some((role.to_owned(), pid))
        };
        pids.filter_map(of_ours).collect()
    }

    fn child(&self, role: &str) -> u32 {
        let found = self.children().into_iter().find(|(name, _)| name == role);
        found.unwrap_or_else(|| panic!("no {role} among {:?}", self.children())).1
    }
}

impl Drop for UpProcess {
    fn drop(&mut self) {
        // The process has ended already if the test passed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Curl {
    fn run(&self) -> std::io::Result<Reply> {
        PendingCall::new(&self.address, "POST", &self.path, self.body.as_bytes()).try_reply()
    }
}

#[test]
fn the_printed_curl_line_works_and_ctrl_c_ends_every_process() {
    let mut up = UpProcess::start();
    let curl = up.curl();
    let answer = curl.run().expect("an answer").text();
    assert!(!answer.trim().is_empty());
    let children = up.children();
    assert_eq!(children.len(), 3, "{children:?}");
    signal(up.child.id(), Signal::Interrupt);
    let status = up.child.wait().expect("it ends");
    assert!(status.success(), "{status}");
    for (_, pid) in children {
        ends(pid, PATIENCE);
    }
}

#[test]
fn an_engine_that_dies_is_started_again_where_it_was() {
    dies_and_is_started_again(&[]);
}

#[test]
fn an_engine_of_several_ranks_that_dies_is_started_again_where_it_was() {
    dies_and_is_started_again(&["--kv-ranks", "2", "--data-parallel-size", "2"]);
}

fn dies_and_is_started_again(options: &[&str]) {
    let up = UpProcess::with(options);
    let curl = up.curl();
    let answer = curl.run().expect("an answer").text();
    for role in ["decode", "prefill"] {
        let dead = up.child(role);
        signal(dead, Signal::Kill);
        ends(dead, PATIENCE);
        let again = || match up.children().into_iter().find(|(name, _)| name == role) {
            Some((_, pid)) if pid != dead => Ok(()),
            other => Err(format!("{other:?}")),
        };
        eventually(PATIENCE, "it is started again", again);
        let served = || match curl.run() {
            Ok(reply) if reply.status == 200 => Ok(reply.text()),
            other => Err(format!("{other:?}")),
        };
        assert_eq!(eventually(PATIENCE, "a request is served", served), answer);
    }
    // Restarted processes end as well, however recently they started.
    let children = up.children();
    drop(up);
    for (_, pid) in children {
        ends(pid, PATIENCE);
    }
}

#[test]
fn killed_it_takes_its_children_along() {
    let mut up = UpProcess::start();
    let curl = up.curl();
    assert_eq!(curl.run().expect("an answer").status, 200);
    let children = up.children();
    assert_eq!(children.len(), 3, "{children:?}");
    signal(up.child.id(), Signal::Kill);
    up.child.wait().expect("it was killed");
    for (_, pid) in children {
        ends(pid, PATIENCE);
    }
}

#[test]
fn a_second_ctrl_c_removes_every_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut child = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(["up", "--listen", "127.0.0.1:0", "--", "--kv-cache-mib", "32", "--threads", "1"])
        .env("TMPDIR", folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary under test can be started");
    let stdout = child.stdout.take().expect("stdout is a pipe");
    let (_tell, lines) = sync_channel(1);
    let mut up = UpProcess { child, lines };
    let banner = BufReader::new(stdout).lines().map_while(Result::ok).find(|line| line.contains("Watch it"));
    assert!(banner.is_some(), "it is up");
    let left = || std::fs::read_dir(folder.path()).expect("a folder").count();
    assert_eq!(left(), 0, "its configuration has no name");
    signal(up.child.id(), Signal::Interrupt);
    signal(up.child.id(), Signal::Interrupt);
    up.child.wait().expect("it ends");
    assert_eq!(left(), 0);
}
