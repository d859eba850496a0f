//! During a run: a line on a terminal, and every call in its file.

use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::load::runner::{MeasuredCall, RunObserver, UnsentRequest};

/// Minimum interval of the line.
const EVERY: Duration = Duration::from_millis(200);

/// The progress of one run.
pub(super) struct RunProgress {
    planned: usize,
    sent: usize,
    ended: usize,
    failed: usize,
    tokens: u64,
    run: usize,
    began: Instant,
    shown: Option<Instant>,
    terminal: bool,
    calls: Option<BufWriter<File>>,
    /// The first error of writing calls.
    broken: Option<std::io::Error>,
    name: String,
}

impl RunProgress {
    /// # Errors
    /// If the file of the calls cannot be created.
    pub(super) fn start(folder: Option<&Path>, run: usize, planned: usize) -> Result<Self, String> {
        let file = folder.map(|folder| folder.join(format!("calls-{run}.jsonl")));
        let name = file.as_ref().map(|file| file.display().to_string()).unwrap_or_default();
        let calls = file.map(File::create).transpose().map_err(|error| format!("{name}: {error}"))?;
        Ok(Self {
            planned,
            sent: 0,
            ended: 0,
            failed: 0,
            tokens: 0,
            run,
            began: Instant::now(),
            shown: None,
            terminal: std::io::stderr().is_terminal(),
            calls: calls.map(BufWriter::new),
            broken: None,
            name,
        })
    }

    /// # Errors
    /// If calls could not be written.
    pub(super) fn finish(mut self) -> Result<(), String> {
        if self.terminal {
            // A closed terminal shows nothing.
            let _ = write!(std::io::stderr(), "\r\x1b[2K");
        }
        let flushed = self.calls.as_mut().map_or(Ok(()), Write::flush);
        self.broken.map_or(flushed, Err).map_err(|error| format!("{}: {error}", self.name))
    }

    /// Writes a line of the file.
    fn write(&mut self, what: &impl serde::Serialize) {
        if let Some(calls) = self.calls.as_mut().filter(|_| self.broken.is_none()) {
            let line = serde_json::to_string(what).map_err(std::io::Error::other);
            let written = line.and_then(|line| writeln!(calls, "{line}"));
            self.broken = written.err();
        }
    }

    fn show(&mut self) {
        let now = Instant::now();
        if !self.terminal || self.shown.is_some_and(|shown| now.duration_since(shown) < EVERY) {
            return;
        }
        self.shown = Some(now);
        let seconds = self.began.elapsed().as_secs_f64();
        let (ended, rate) = (self.ended, self.tokens as f64 / seconds.max(0.001));
        let failed = if self.failed > 0 { format!(", {} FAILED", self.failed) } else { String::new() };
        let in_flight = self.sent - ended;
        let _ = write!(
            std::io::stderr(),
            "\r\x1b[2Krun {}: {ended} of {}{failed}, {in_flight} in flight, {rate:.0} tok/s, {seconds:.0} s",
            self.run + 1,
            self.planned
        );
    }
}

impl RunObserver for RunProgress {
    fn sent(&mut self) {
        self.sent += 1;
        self.show();
    }

    fn ended(&mut self, measured: &mut MeasuredCall) {
        self.ended += 1;
        self.failed += usize::from(measured.failure().is_some());
        self.tokens += u64::from(measured.call.completion_tokens());
        self.write(measured);
        // The text is in the file, if any. It is dropped because a long run would keep too much text.
        measured.call.text = String::new();
        self.show();
    }

    fn waited(&mut self, waited: &UnsentRequest) {
        self.write(waited);
    }
}
