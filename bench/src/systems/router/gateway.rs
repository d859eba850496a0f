//! A gateway under test: a proxy in its own processes, or the router on threads of this process.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::RouterBenchError;
use super::connection::{self, KeptConnection};
use crate::common::machine;
use crate::load::Streaming;

/// Maximum time until a started proxy forwards a request. Some check their engines' health first.
const START_WITHIN: Duration = Duration::from_secs(60);
/// The kernel's name of the threads of a router in this process (at most 15 bytes).
pub(super) const THREADS: &str = "bench-router";
/// Those of one with HTTP/2 to its engines.
pub(super) const HTTP2_THREADS: &str = "bench-router-h2";

/// A running gateway.
pub(crate) struct Gateway {
    pub name: &'static str,
    pub version: String,
    pub address: SocketAddr,
    /// Whether the gateway uses a prefill engine. A plain reverse proxy does not.
    pub disaggregates: bool,
    runs: GatewayHandle,
}

enum GatewayHandle {
    Process { child: Child, files: Vec<PathBuf> },
    Threads { name: &'static str, stop: Box<dyn FnOnce() + Send> },
}

impl Gateway {
    /// Starts a program and waits until it forwards a request.
    ///
    /// # Errors
    /// If the program cannot be started or does not respond within a minute. The error contains its last output.
    pub(super) async fn process(
        name: &'static str,
        version: String,
        address: SocketAddr,
        mut command: Command,
        files: Vec<PathBuf>,
    ) -> Result<Self, RouterBenchError> {
        let log = std::env::temp_dir().join(format!("baton-bench-{}-{name}.log", std::process::id()));
        let output =
            std::fs::File::create(&log).map_err(|error| RouterBenchError::System("no log", error))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(output)
            .spawn()
            .map_err(|error| RouterBenchError::System("a program does not start", error))?;
        let files = files.into_iter().chain([log.clone()]).collect();
        let runs = GatewayHandle::Process { child, files };
        let subject = Self { name, version, address, disaggregates: true, runs };
        let begun = Instant::now();
        loop {
            let refusal = match subject.answers().await {
                Ok(()) => return Ok(subject),
                Err(refusal) => refusal,
            };
            if begun.elapsed() > START_WITHIN {
                let output = std::fs::read_to_string(&log).unwrap_or_default();
                let last = output.lines().rev().take(5).collect::<Vec<_>>().join(" / ");
                subject.stop();
                return Err(RouterBenchError::Router(format!("{name}: {refusal}; last output: {last}")));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// A gateway on named threads of this process. `start` runs on them and returns its address and its service.
    pub(crate) async fn threads<F, S>(
        name: &'static str,
        threads: &'static str,
        start: impl FnOnce() -> F + Send + 'static,
    ) -> Result<Self, RouterBenchError>
    where
        F: Future<Output = Result<(SocketAddr, S), RouterBenchError>> + 'static,
        S: Future<Output: Send> + Send + 'static,
    {
        let (stop, stopped) = oneshot::channel::<()>();
        let (listens, address) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name(threads)
            .enable_all()
            .build()
            .map_err(|error| RouterBenchError::System("no runtime", error))?;
        let ended = std::thread::spawn(move || {
            // The runtime's threads do the work, and their CPU time is counted. This thread only waits.
            runtime.block_on(async move {
                match start().await {
                    Ok((address, service)) => {
                        let _ = listens.send(Ok(address));
                        let running = tokio::spawn(service);
                        let _ = stopped.await;
                        running.abort();
                    }
                    Err(error) => drop(listens.send(Err(error))),
                }
            });
            runtime.shutdown_background();
        });
        let address = address.await.map_err(|error| RouterBenchError::Router(error.to_string()))??;
        let stop = Box::new(move || {
            let _ = stop.send(());
            // A panic was already printed to standard error.
            let _ = ended.join();
        });
        let runs = GatewayHandle::Threads { name: threads, stop };
        Ok(Self { name, version: String::from("threads"), address, disaggregates: true, runs })
    }

    async fn answers(&self) -> Result<(), RouterBenchError> {
        let mut connection = KeptConnection::connect(self.address).await?;
        let request = connection::default_request(Streaming::Whole);
        let answered = tokio::time::timeout(Duration::from_secs(5), connection.post(&request)).await;
        answered.map_err(connection::failed)?.map(drop)
    }

    /// CPU time so far: user and system, of all processes and threads.
    pub(crate) fn cpu(&self) -> Result<Duration, RouterBenchError> {
        let only = match &self.runs {
            GatewayHandle::Threads { name, .. } => Some(*name),
            GatewayHandle::Process { .. } => None,
        };
        let mut used = Duration::ZERO;
        for process in self.processes() {
            used +=
                thread_time(process, only).map_err(|error| RouterBenchError::System("no CPU time", error))?;
        }
        Ok(used)
    }

    /// Resident memory of all processes, in KiB.
    pub(super) fn resident_kib(&self) -> Result<u64, RouterBenchError> {
        let mut kib = 0;
        for process in self.processes() {
            let rollup = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup"));
            let rollup = rollup.map_err(|error| RouterBenchError::System("no smaps_rollup", error))?;
            kib += machine::kib(&rollup, "Rss:").unwrap_or(0);
        }
        Ok(kib)
    }

    /// The started process and its descendants.
    fn processes(&self) -> Vec<u32> {
        let GatewayHandle::Process { child, .. } = &self.runs else { return vec![std::process::id()] };
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

    /// Whether the gateway's memory is separate from the benchmark's own.
    pub(super) fn is_process(&self) -> bool {
        matches!(self.runs, GatewayHandle::Process { .. })
    }

    pub(crate) fn stop(self) {
        match self.runs {
            GatewayHandle::Process { mut child, files } => {
                // Only an orderly stop ends nginx's workers and Python's threads.
                let _ = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
                let begun = Instant::now();
                while matches!(child.try_wait(), Ok(None)) {
                    if begun.elapsed() > Duration::from_secs(3) {
                        let _ = child.kill();
                    }
                    #[allow(
                        clippy::disallowed_methods,
                        reason = "between two looks at whether a process has ended"
                    )]
                    std::thread::sleep(Duration::from_millis(10));
                }
                for file in files {
                    let _ = std::fs::remove_file(file);
                }
            }
            GatewayHandle::Threads { stop, .. } => stop(),
        }
    }
}

pub(crate) fn any() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// A port that was just free.
pub(crate) fn free() -> Result<SocketAddr, RouterBenchError> {
    let address = TcpListener::bind(any()).and_then(|listener| listener.local_addr());
    address.map_err(|error| RouterBenchError::System("no free port", error))
}

/// User and system time of a process's threads, or of those with a name: the first number of `schedstat`, in
/// nanoseconds.
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
