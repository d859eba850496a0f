//! An engine as a process of its own, that ends with whoever measures it.

use std::io::{self, BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A process that ends with this value.
pub(crate) struct Running {
    child: Child,
}

impl Running {
    /// Starts this program's engine on a free port of loopback, with these options besides.
    pub(crate) fn start(options: &[String]) -> io::Result<Self> {
        let child = Command::new(std::env::current_exe()?)
            .args(["engine", "--listen", "127.0.0.1:0", "--until-stdin-ends"])
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()?;
        Ok(Self { child })
    }

    /// The address it says it serves.
    pub(crate) fn ready(&mut self) -> io::Result<SocketAddr> {
        let out = self.child.stdout.take().ok_or_else(|| io::Error::other("no output"))?;
        for line in BufReader::new(out).lines() {
            if let Some((_, rest)) = line?.split_once("ready http=") {
                return rest.split(' ').next().unwrap_or_default().parse().map_err(io::Error::other);
            }
        }
        Err(io::Error::other("it ended before it was ready"))
    }

    /// Resident memory, bytes.
    pub(crate) fn resident(&self) -> io::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = resident.and_then(|rest| rest.trim().split(' ').next()?.parse::<u64>().ok());
        kib.map(|kib| kib << 10).ok_or_else(|| io::Error::other("no VmRSS"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let begun = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if begun.elapsed() > Duration::from_secs(5) {
                let _ = self.child.kill();
            }
            #[allow(clippy::disallowed_methods)] // between two looks at whether a process has ended
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
