//! What is measured: a proxy that runs as processes of its own, or the router on threads of this one.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::RouterBenchError;
use super::wire::{self, Wire};

/// A proxy has this long until it passes a request on: some look at their engines' health first.
const START_WITHIN: Duration = Duration::from_secs(60);
/// The kernel's name for the threads of a router in this process (it keeps 15 bytes).
pub(super) const THREADS: &str = "bench-router";

/// A running proxy.
pub(crate) struct Subject {
    pub name: &'static str,
    pub version: String,
    pub address: SocketAddr,
    /// Whether it asks a prefill engine first; a plain reverse proxy does not.
    pub disaggregates: bool,
    runs: Runs,
}

enum Runs {
    Process { child: Child, files: Vec<PathBuf> },
    Threads { name: &'static str, stop: Box<dyn FnOnce() + Send> },
}

impl Subject {
    /// Starts a program and waits until a request through it is answered.
    ///
    /// # Errors
    /// When it cannot be started or does not answer within a minute; what it said last is in the error.
    pub(super) async fn process(
        name: &'static str,
        version: String,
        address: SocketAddr,
        mut command: Command,
        files: Vec<PathBuf>,
    ) -> Result<Self, RouterBenchError> {
        let log = std::env::temp_dir().join(format!("baton-bench-{}-{name}.log", std::process::id()));
        let said = std::fs::File::create(&log).map_err(|error| RouterBenchError::System("no log", error))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(said)
            .spawn()
            .map_err(|error| RouterBenchError::System("a program does not start", error))?;
        let files = files.into_iter().chain([log.clone()]).collect();
        let runs = Runs::Process { child, files };
        let subject = Self { name, version, address, disaggregates: true, runs };
        let begun = Instant::now();
        loop {
            let refusal = match subject.answers().await {
                Ok(()) => return Ok(subject),
                Err(refusal) => refusal,
            };
            if begun.elapsed() > START_WITHIN {
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                let last = said.lines().rev().take(5).collect::<Vec<_>>().join(" / ");
                subject.stop();
                return Err(RouterBenchError::Router(format!("{name}: {refusal}; it said: {last}")));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Something on threads of this process that have a name of their own, and how to stop it.
    pub(crate) fn threads(
        name: &'static str,
        threads: &'static str,
        address: SocketAddr,
        stop: impl FnOnce() + Send + 'static,
    ) -> Self {
        let runs = Runs::Threads { name: threads, stop: Box::new(stop) };
        Self { name, version: String::from("threads"), address, disaggregates: true, runs }
    }

    async fn answers(&self) -> Result<(), RouterBenchError> {
        let mut wire = Wire::connect(self.address).await?;
        let request = wire::request(&wire::body(false));
        let answered = tokio::time::timeout(Duration::from_secs(5), wire.post(&request)).await;
        answered.map_err(wire::failed)?.map(drop)
    }

    /// CPU time that it has used so far: user and system, of all its processes and threads.
    pub(crate) fn cpu(&self) -> Result<Duration, RouterBenchError> {
        let only = match &self.runs {
            Runs::Threads { name, .. } => Some(*name),
            Runs::Process { .. } => None,
        };
        let mut used = Duration::ZERO;
        for process in self.processes() {
            used +=
                thread_time(process, only).map_err(|error| RouterBenchError::System("no CPU time", error))?;
        }
        Ok(used)
    }

    /// Resident memory of all its processes, in KiB.
    pub(super) fn resident_kib(&self) -> Result<u64, RouterBenchError> {
        let mut kib = 0;
        for process in self.processes() {
            let rollup = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup"));
            let rollup = rollup.map_err(|error| RouterBenchError::System("no smaps_rollup", error))?;
            let resident = rollup.lines().find_map(|line| line.strip_prefix("Rss:"));
            let number = resident.and_then(|rest| rest.trim().split(' ').next()?.parse::<u64>().ok());
            kib += number.unwrap_or(0);
        }
        Ok(kib)
    }

    /// Its processes: the one that was started and what that has started.
    fn processes(&self) -> Vec<u32> {
        let Runs::Process { child, .. } = &self.runs else { return vec![std::process::id()] };
        let mut found = vec![child.id()];
        let mut looked = 0;
        while looked < found.len() {
            let process = found[looked];
            let children = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children"));
            found.extend(children.unwrap_or_default().split(' ').filter_map(|id| id.parse::<u32>().ok()));
            looked += 1;
        }
        found
    }

    /// Whether its memory can be told from the benchmark's own.
    pub(super) fn is_process(&self) -> bool {
        matches!(self.runs, Runs::Process { .. })
    }

    pub(crate) fn stop(self) {
        match self.runs {
            Runs::Process { mut child, files } => {
                // nginx's workers and Python's threads end with an orderly stop, and only with that.
                let _ = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
                let begun = Instant::now();
                while matches!(child.try_wait(), Ok(None)) {
                    if begun.elapsed() > Duration::from_secs(3) {
                        let _ = child.kill();
                    }
                    #[allow(clippy::disallowed_methods)] // between two looks at whether a process has ended
                    std::thread::sleep(Duration::from_millis(10));
                }
                for file in files {
                    let _ = std::fs::remove_file(file);
                }
            }
            Runs::Threads { stop, .. } => stop(),
        }
    }
}

pub(crate) fn any() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// A port that was free a moment ago.
pub(crate) fn free() -> Result<SocketAddr, RouterBenchError> {
    let address = TcpListener::bind(any()).and_then(|listener| listener.local_addr());
    address.map_err(|error| RouterBenchError::System("no free port", error))
}

/// User and system time of the threads of a process, or of those with a name: the first number of
/// `schedstat`, in nanoseconds.
pub(crate) fn thread_time(process: u32, only: Option<&str>) -> std::io::Result<Duration> {
    let mut nanoseconds = 0;
    for task in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let task = task?.path();
        // A thread may end while the list is read.
        let read = |name: &str| std::fs::read_to_string(task.join(name)).unwrap_or_default();
        if only.is_none_or(|only| read("comm").trim() == only) {
            let used = read("schedstat");
            nanoseconds += used.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
        }
    }
    Ok(Duration::from_nanos(nanoseconds))
}
