//! Child processes that run this program in other roles and end with the benchmark.

use std::io::{self, BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::machine::resident_bytes;

/// Time that a process has to end after its standard input is closed.
const END_WITHIN: Duration = Duration::from_secs(5);

/// A process that is ended when this value is dropped.
pub(crate) struct ChildProcess {
    child: Child,
}

impl ChildProcess {
    /// Starts this program's engine on a free port of loopback, with these options added.
    pub(crate) fn start(options: &[String]) -> io::Result<Self> {
        let engine = ["engine", "--listen", "127.0.0.1:0"].map(str::to_owned);
        Self::run(&[&engine, options].concat(), Stdio::inherit())
    }

    /// Starts this program with these arguments. Its log goes to `log`.
    pub(crate) fn run(arguments: &[String], log: impl Into<Stdio>) -> io::Result<Self> {
        let child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .arg("--until-stdin-ends")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            // Signals of a terminal are for the benchmark only. The child ends when its standard input is closed.
            .process_group(0)
            .spawn()?;
        Ok(Self { child })
    }

    /// The address in the "ready" line.
    pub(crate) fn ready(&mut self) -> io::Result<SocketAddr> {
        let line = self.ready_line()?;
        word(&line, "http")?.parse().map_err(io::Error::other)
    }

    /// Waits for the line `ready NAME=VALUE …`. See [`word`].
    pub(crate) fn ready_line(&mut self) -> io::Result<String> {
        let out = self.child.stdout.take().ok_or_else(|| io::Error::other("no output"))?;
        let mut lines = BufReader::new(out).lines();
        while let Some(line) = lines.next() {
            let line = line?;
            if line.contains("ready http=") || line.contains("ready prefill=") {
                // Later output must not fill the pipe.
                std::thread::Builder::new().name("bench-drain".into()).spawn(move || lines.for_each(drop))?;
                return Ok(line);
            }
        }
        Err(io::Error::other("it ended before it was ready"))
    }

    /// Kills the process, as a crash does.
    pub(crate) fn kill(&mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait().map(drop)
    }

    /// Resident memory, bytes.
    pub(crate) fn resident(&self) -> io::Result<u64> {
        resident_bytes(self.child.id())
    }
}

/// A value of a "ready" line.
pub(crate) fn word<'a>(line: &'a str, name: &str) -> io::Result<&'a str> {
    let value = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    value.ok_or_else(|| io::Error::other(format!("`{line}` does not say its {name}")))
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let begun = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if begun.elapsed() > END_WITHIN {
                let _ = self.child.kill();
            }
            #[allow(clippy::disallowed_methods, reason = "between two looks at whether a process has ended")]
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
