//! The router that is measured: a process of its own, or threads of this one.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use baton_router::{Router, RouterConfig};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use super::RouterBenchError;

/// The name of the router's threads when it runs in this process (the kernel keeps 15 bytes).
const THREADS: &str = "bench-router";
/// A router process has this long to listen.
const START_WITHIN: Duration = Duration::from_secs(10);

/// A running router.
pub(super) struct Subject {
    pub(super) address: SocketAddr,
    runs: Runs,
}

enum Runs {
    Process { child: Child, file: PathBuf },
    Threads { stop: oneshot::Sender<()>, ended: std::thread::JoinHandle<()> },
}

impl Subject {
    pub(super) async fn start(
        binary: Option<&Path>,
        prefill: SocketAddr,
        decode: SocketAddr,
    ) -> Result<Self, RouterBenchError> {
        let yaml = |listen: SocketAddr, admin: SocketAddr| {
            format!(
                "listen: {listen}\nadmin: {{listen: '{admin}'}}\nmodels:\n  - name: sim\n    \
                 prefill: {{engines: [{{url: 'http://{prefill}'}}]}}\n    \
                 decode: {{engines: [{{url: 'http://{decode}'}}]}}\n"
            )
        };
        match binary {
            Some(binary) => Self::process(binary, yaml).await,
            None => Self::threads(&yaml(any(), any())).await,
        }
    }

    pub(super) fn kind(&self) -> &'static str {
        match self.runs {
            Runs::Process { .. } => "process",
            Runs::Threads { .. } => "threads",
        }
    }

    /// CPU time that the router has used so far.
    pub(super) fn cpu(&self) -> Result<Duration, RouterBenchError> {
        let (process, only) = match &self.runs {
            Runs::Process { child, .. } => (child.id(), None),
            Runs::Threads { .. } => (std::process::id(), Some(THREADS)),
        };
        thread_time(process, only).map_err(|error| RouterBenchError::System("no CPU time", error))
    }

    pub(super) async fn stop(self) {
        match self.runs {
            Runs::Process { mut child, file } => {
                // Nothing is in flight: there is nothing that a gentler end would save.
                let _ = child.kill();
                let _ = child.wait();
                let _ = std::fs::remove_file(file);
            }
            Runs::Threads { stop, ended } => {
                let _ = stop.send(());
                let _ = tokio::task::spawn_blocking(move || ended.join()).await;
            }
        }
    }

    async fn process(
        binary: &Path,
        yaml: impl Fn(SocketAddr, SocketAddr) -> String,
    ) -> Result<Self, RouterBenchError> {
        let system = |what| move |error| RouterBenchError::System(what, error);
        let (address, admin) = (free()?, free()?);
        let file = std::env::temp_dir().join(format!("baton-bench-router-{}.yaml", std::process::id()));
        std::fs::write(&file, yaml(address, admin)).map_err(system("no configuration"))?;
        let child = Command::new(binary)
            .args(["router", "-c"])
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(system("the binary"))?;
        let begun = Instant::now();
        let subject = Self { address, runs: Runs::Process { child, file } };
        while TcpStream::connect(address).await.is_err() {
            if begun.elapsed() > START_WITHIN {
                subject.stop().await;
                return Err(RouterBenchError::Router(format!("nothing listens on {address}")));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(subject)
    }

    async fn threads(yaml: &str) -> Result<Self, RouterBenchError> {
        let told = |error: &dyn std::fmt::Display| RouterBenchError::Router(error.to_string());
        let config = RouterConfig::from_yaml(yaml, "bench").map_err(|error| told(&error))?;
        let (stop, stopped) = oneshot::channel();
        let (listens, address) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name(THREADS)
            .enable_all()
            .build()
            .map_err(|error| RouterBenchError::System("no runtime", error))?;
        let ended = std::thread::spawn(move || {
            // The router's work is done on the runtime's threads, whose time is counted; this one waits.
            runtime.block_on(async move {
                match Router::bind(config).await {
                    Ok(router) => {
                        let _ = listens.send(Ok(router.local_addr()));
                        let running = tokio::spawn(router.run(Default::default()));
                        let _ = stopped.await;
                        running.abort();
                    }
                    Err(error) => drop(listens.send(Err(error.to_string()))),
                }
            });
            runtime.shutdown_background();
        });
        let address = address.await.map_err(|error| told(&error))?.map_err(RouterBenchError::Router)?;
        Ok(Self { address, runs: Runs::Threads { stop, ended } })
    }
}

fn any() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// A port that was free a moment ago.
fn free() -> Result<SocketAddr, RouterBenchError> {
    let address = TcpListener::bind(any()).and_then(|listener| listener.local_addr());
    address.map_err(|error| RouterBenchError::System("no free port", error))
}

/// User and system time of the threads of a process, or of those with a name: the first number of
/// `schedstat`, in nanoseconds.
fn thread_time(process: u32, only: Option<&str>) -> std::io::Result<Duration> {
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
