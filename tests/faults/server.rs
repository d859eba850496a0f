//! A process under test that can be killed and restarted with the same addresses, and its resources.

use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crate::harness::{EngineSnapshot, PATIENCE, PendingCall, Process, Signal, eventually, metric};

/// Descriptors above the count at the start of a process: 8 idle connections of the side channel per peer (the pool's
/// bound), 8 of HTTP that are about to be closed, and 4 that a runtime opens when it first needs them.
const DESCRIPTORS_ABOVE: usize = 20;

/// Resident memory above the baseline. Allocators keep freed memory. A leak of 16 KiB a round shows within a thousand
/// rounds.
const RESIDENT_ABOVE_KIB: u64 = 16 * 1024;

/// Rounds until a process has touched all memory that it needs. The baseline is the maximum in these rounds.
const WARM_ROUNDS: usize = 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessState {
    Runs,
    Paused,
    Dead,
}

/// The process of the module's documentation.
pub(crate) struct Server {
    pub(crate) name: String,
    args: Vec<String>,
    folder: PathBuf,
    process: Process,
    pub(crate) state: ProcessState,
    /// The HTTP address.
    pub(crate) address: String,
    /// The second address: the side channel of an engine, the admin listener of a router.
    pub(crate) second: String,
    incarnation: u32,
    descriptors_at_start: usize,
    /// Resident memory after each round of this process, in KiB.
    resident: Vec<u64>,
    log_read: u64,
}

/// Maximum resources over all restarts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ResourceUsage {
    pub(crate) descriptors_at_start: usize,
    pub(crate) descriptors_now: usize,
    pub(crate) resident_warm_kib: u64,
    pub(crate) resident_now_kib: u64,
    pub(crate) rounds: usize,
}

impl Server {
    pub(crate) fn start(name: &str, args: Vec<String>, second: &str, folder: &Path) -> Self {
        let mut process = Process::start(name, &args, folder);
        process.wait_ready();
        let (address, second) = (process.fact("http"), process.fact(second));
        Self {
            name: name.to_owned(),
            descriptors_at_start: process.descriptors(),
            args,
            folder: folder.to_owned(),
            process,
            state: ProcessState::Runs,
            address,
            second,
            incarnation: 0,
            resident: Vec::new(),
            log_read: 0,
        }
    }

    /// Sets the options of later starts, so that the process restarts with the same addresses.
    pub(crate) fn restarts_with(&mut self, args: Vec<String>) {
        self.args = args;
    }

    pub(crate) fn kill(&mut self) {
        self.process.signal(Signal::Kill);
        self.state = ProcessState::Dead;
    }

    pub(crate) fn pause(&mut self) {
        if self.state == ProcessState::Runs {
            self.process.signal(Signal::Pause);
            self.state = ProcessState::Paused;
        }
    }

    /// Continues a paused process, or restarts a dead one.
    pub(crate) fn revive(&mut self) {
        match self.state {
            ProcessState::Runs => {}
            ProcessState::Paused => self.process.signal(Signal::Continue),
            ProcessState::Dead => {
                self.incarnation += 1;
                let name = format!("{}.{}", self.name, self.incarnation);
                self.process = Process::start(&name, &self.args, &self.folder);
                self.process.wait_ready();
                assert_eq!(self.process.fact("http"), self.address, "{} has another address", self.name);
                self.descriptors_at_start = self.process.descriptors();
                self.resident.clear();
                self.log_read = 0;
            }
        }
        self.state = ProcessState::Runs;
    }

    /// The engine's snapshot, if it responds.
    pub(crate) fn snapshot(&self) -> Option<EngineSnapshot> {
        if self.state != ProcessState::Runs {
            return None;
        }
        let reply = PendingCall::try_new(&self.address, "GET", "/debug/kv", b"").ok()?.try_reply().ok()?;
        (reply.status == 200).then(|| EngineSnapshot::read(&reply.json()))
    }

    pub(crate) fn metric(&self, address: &str, name: &str, labels: &str) -> f64 {
        let reply = PendingCall::new(address, "GET", "/metrics", b"").reply();
        metric(&String::from_utf8_lossy(&reply.body), name, labels)
    }

    /// Checks that the process lives, has not panicked, and holds no more descriptors and memory than at its baseline.
    ///
    /// # Errors
    /// The check that failed.
    pub(crate) fn is_well(&mut self) -> Result<(), String> {
        if let Some(status) = self.process.ended() {
            return Err(format!("{} has ended by itself: {status}\n{}", self.name, self.process.log()));
        }
        let printed = self.new_log();
        if let Some(line) = printed.lines().find(|line| line.contains("panicked at")) {
            return Err(format!("{}: a thread panicked: {line}", self.name));
        }
        let bound = self.descriptors_at_start + DESCRIPTORS_ABOVE;
        eventually(PATIENCE, &format!("the descriptors of {} are closed", self.name), || {
            let open = self.process.descriptors();
            if open <= bound { Ok(()) } else { Err(format!("{open} are open, {bound} may be")) }
        });
        let now = self.process.resident_kib();
        self.resident.push(now);
        let warm = self.warm();
        if self.resident.len() > WARM_ROUNDS && now > warm + RESIDENT_ABOVE_KIB {
            return Err(format!("{}: {now} KiB are resident, {warm} KiB were when it was warm", self.name));
        }
        Ok(())
    }

    fn warm(&self) -> u64 {
        self.resident.iter().take(WARM_ROUNDS).copied().max().unwrap_or(0)
    }

    pub(crate) fn vitals(&self) -> ResourceUsage {
        ResourceUsage {
            descriptors_at_start: self.descriptors_at_start,
            descriptors_now: self.process.descriptors(),
            resident_warm_kib: self.warm(),
            resident_now_kib: self.process.resident_kib(),
            rounds: self.resident.len(),
        }
    }

    /// The log lines since the last call.
    fn new_log(&mut self) -> String {
        let mut text = Vec::new();
        if let Ok(mut log) = std::fs::File::open(self.process.log_file()) {
            let read = log.seek(SeekFrom::Start(self.log_read)).and_then(|_| log.read_to_end(&mut text));
            self.log_read += read.unwrap_or(0) as u64;
        }
        String::from_utf8_lossy(&text).into_owned()
    }
}
