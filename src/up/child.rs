//! One supervised process: its pipe, its lines, its end.

use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout, Command};

use crate::Failure;
use crate::output::note;

pub(super) struct Child {
    name: String,
    process: tokio::process::Child,
    /// Not part of `process`: waiting for a process closes the pipe that it holds.
    pipe: Option<ChildStdin>,
    lines: Option<Lines<BufReader<ChildStdout>>>,
    /// The words of the "ready" line; `None` before that line.
    ready: Option<String>,
}

impl Child {
    /// Starts this binary again with other arguments. The child's stdin is a pipe that closes when this process ends.
    pub(super) fn spawn(name: &str, args: &[&str]) -> Result<Self, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(args).arg("--until-stdin-ends");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0).kill_on_drop(true);
        let mut process =
            command.spawn().map_err(|error| format!("cannot start the {name} process: {error}"))?;
        let stdout = process.stdout.take().ok_or("a child without stdout")?;
        let pipe = process.stdin.take();
        let lines = Some(BufReader::new(stdout).lines());
        Ok(Self { name: name.to_owned(), process, pipe, lines, ready: None })
    }

    /// Waits for the child's first line, which shows that options, device and model are valid.
    pub(super) async fn begun(&mut self, limit: Duration) -> Result<(), Failure> {
        self.line(limit).await
    }

    /// Waits for the "ready" line and prints the progress.
    pub(super) async fn ready(&mut self, limit: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + limit;
        while self.ready.is_none() {
            self.line(deadline.saturating_duration_since(Instant::now())).await?;
        }
        let mut lines = self.lines.take().ok_or("a child is waited for once")?;
        // Reads later output, so that the pipe cannot fill.
        tokio::spawn(async move { while matches!(lines.next_line().await, Ok(Some(_))) {} });
        Ok(())
    }

    /// Reads one line and prints it, unless it is the "ready" line.
    async fn line(&mut self, limit: Duration) -> Result<(), Failure> {
        let (name, lines) = (&self.name, self.lines.as_mut().ok_or("a child is waited for once")?);
        let line = tokio::time::timeout(limit, lines.next_line()).await;
        let line = line.map_err(|_| format!("the {name} process was not ready in time"))??;
        let line = line.ok_or_else(|| format!("the {name} process ended before it was ready"))?;
        let words = line.split_once(": ").map_or(line.as_str(), |(_, words)| words);
        match words.strip_prefix("ready ") {
            Some(ready) => self.ready = Some(ready.to_owned()),
            None => note(format_args!("baton: {name}: {words}")),
        }
        Ok(())
    }

    /// A value of the "ready" line.
    pub(super) fn field(&self, key: &str) -> Result<&str, Failure> {
        let words = self.ready.iter().flat_map(|ready| ready.split(' '));
        let value = words.filter_map(|word| word.strip_prefix(key)?.strip_prefix('=')).next();
        value.ok_or_else(|| format!("the {} process did not report its {key}", self.name).into())
    }

    /// Waits for the end of the process and describes its status.
    pub(super) async fn wait(&mut self) -> String {
        match self.process.wait().await {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        }
    }

    /// Closes the pipe, waits for the child to drain, and kills it after `limit`.
    pub(super) async fn stop(&mut self, limit: Duration) {
        drop(self.pipe.take());
        if tokio::time::timeout(limit, self.process.wait()).await.is_err() {
            note(format_args!("baton: the {} process does not end; killing it", self.name));
            // The child may have ended already.
            let _ = self.process.kill().await;
        }
    }
}
