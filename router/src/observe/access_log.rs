//! The access log: one line of JSON per ended request, written by its own thread.
//!
//! ```text
//! request ends ── try_send, never waits ──▶ [queue] ──▶ thread: line, buffer, file or standard output
//!                    └ full: dropped, counted
//! ```
//!
//! A slow or full disk costs lines, never requests. The file is opened again on SIGUSR1, and when a check once a second
//! finds it renamed or removed. Both ways of log rotation therefore work. The thread ends with the last configuration
//! that contains the log.

mod line;

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::config::AccessLogConfig;
use crate::config::read::named_file;
use crate::metrics::Metrics;
use crate::metrics::log_limiter::LogLimiter;
use crate::observe::finished_request::FinishedRequest;

/// Interval of the check for a renamed file, and longest time of a line in the buffer.
const LOOK: Duration = Duration::from_secs(1);
/// Pause before a full queue (at the end) or a full pipe is tried again.
const FULL_PAUSE: Duration = Duration::from_millis(5);
/// Size of the write buffer.
const BUFFER_BYTES: usize = 64 * 1024;

/// A message to the thread.
enum AccessLogMessage {
    Line(Arc<FinishedRequest>),
    Reopen,
    Flush(oneshot::Sender<()>),
}

/// An open access log.
pub(crate) struct AccessLog {
    pub config: AccessLogConfig,
    messages: SyncSender<AccessLogMessage>,
    metrics: Arc<Metrics>,
    /// Number of successful requests so far, for [`AccessLogConfig::sample`].
    seen: AtomicU64,
}

impl AccessLog {
    /// # Errors
    /// The file cannot be opened, or no thread can be started.
    pub(crate) fn open(config: AccessLogConfig, metrics: &Arc<Metrics>) -> std::io::Result<Arc<Self>> {
        let (messages, received) = sync_channel(config.queue);
        let target = LogTarget::open(config.path.clone())?;
        let writer = LogWriter { target, metrics: Arc::clone(metrics), error_log: LogLimiter::new() };
        std::thread::Builder::new().name("access-log".to_owned()).spawn(move || writer.run(&received))?;
        Ok(Arc::new(Self { config, messages, metrics: Arc::clone(metrics), seen: AtomicU64::new(0) }))
    }

    /// Logs a request, if it is in the sample.
    pub(crate) fn log(&self, finished: &Arc<FinishedRequest>) {
        if finished.is_success() && !self.is_sampled() {
            return;
        }
        if self.messages.try_send(AccessLogMessage::Line(Arc::clone(finished))).is_err() {
            self.metrics.observers.lines_dropped.increment(1);
        }
    }

    fn is_sampled(&self) -> bool {
        if self.config.sample >= 1.0 {
            return true;
        }
        // Multiples of the golden ratio are evenly spread, so no run of requests is omitted.
        let nth = self.seen.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (nth as f64) < self.config.sample * u64::MAX as f64
    }

    /// Opens the file again. Has no effect while the queue is full; the periodic check still finds a renamed file.
    pub(crate) fn reopen(&self) {
        let _ = self.messages.try_send(AccessLogMessage::Reopen);
    }

    /// Waits until all lines so far are written, for a limited time.
    pub(crate) async fn flush(&self, within: Duration) {
        let (done, written) = oneshot::channel();
        let flushed = async {
            let mut message = AccessLogMessage::Flush(done);
            while let Err(TrySendError::Full(back)) = self.messages.try_send(message) {
                message = back;
                tokio::time::sleep(FULL_PAUSE).await;
            }
            let _ = written.await;
        };
        let _ = tokio::time::timeout(within, flushed).await;
    }
}

/// The destination of lines.
enum LogTarget {
    Stdout(BufWriter<std::io::Stdout>),
    File { path: PathBuf, to: BufWriter<TimedFile>, identity: (u64, u64) },
}

/// A file, possibly a pipe or a terminal: each write waits a limited time for space, and then fails. The thread
/// continues, so that it can receive another file or its end.
struct TimedFile(File);

impl Write for TimedFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let begun = Instant::now();
        loop {
            match self.0.write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock && begun.elapsed() < LOOK => {
                    #[allow(
                        clippy::disallowed_methods,
                        reason = "between two tries, on the log's own thread"
                    )]
                    std::thread::sleep(FULL_PAUSE);
                }
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

impl LogTarget {
    fn open(path: Option<PathBuf>) -> std::io::Result<Self> {
        let Some(path) = path else {
            return Ok(Self::Stdout(BufWriter::with_capacity(BUFFER_BYTES, std::io::stdout())));
        };
        let file = named_file::append(&path)?;
        let identity = identity(&file.metadata()?);
        Ok(Self::File { path, to: BufWriter::with_capacity(BUFFER_BYTES, TimedFile(file)), identity })
    }

    fn to(&mut self) -> &mut dyn Write {
        match self {
            Self::Stdout(to) => to,
            Self::File { to, .. } => to,
        }
    }

    /// Whether the path no longer leads to the open file.
    fn is_gone(&self) -> bool {
        match self {
            Self::Stdout(_) => false,
            Self::File { path, identity: own, .. } => {
                !matches!(std::fs::metadata(Path::new(path)), Ok(found) if identity(&found) == *own)
            }
        }
    }

    fn reopen(&mut self) -> std::io::Result<()> {
        if let Self::File { path, to, .. } = self {
            let path = path.clone();
            // The buffer belongs to the old file; a part that cannot be written there is lost.
            let flushed = to.flush();
            *self = Self::open(Some(path))?;
            return flushed;
        }
        Ok(())
    }
}

fn identity(of: &std::fs::Metadata) -> (u64, u64) {
    (of.dev(), of.ino())
}

/// The writing thread.
struct LogWriter {
    target: LogTarget,
    metrics: Arc<Metrics>,
    error_log: LogLimiter,
}

impl LogWriter {
    fn run(mut self, messages: &Receiver<AccessLogMessage>) {
        let mut checked = Instant::now();
        loop {
            let message = match messages.try_recv() {
                Ok(message) => Ok(message),
                // No message is pending, so the buffer is written now.
                Err(_) => {
                    self.flush();
                    messages.recv_timeout(LOOK)
                }
            };
            match message {
                Ok(AccessLogMessage::Line(finished)) => self.write(&finished),
                Ok(AccessLogMessage::Reopen) => self.reopen(),
                Ok(AccessLogMessage::Flush(done)) => {
                    self.flush();
                    let _ = done.send(());
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return self.flush(),
            }
            if checked.elapsed() >= LOOK {
                checked = Instant::now();
                if self.target.is_gone() {
                    self.reopen();
                }
            }
        }
    }

    fn write(&mut self, finished: &FinishedRequest) {
        let written = line::write(finished, self.target.to());
        match written {
            Ok(()) => self.metrics.observers.lines.increment(1),
            Err(error) => {
                self.metrics.observers.lines_dropped.increment(1);
                self.log_error(&error);
            }
        }
    }

    fn flush(&mut self) {
        if let Err(error) = self.target.to().flush() {
            self.log_error(&error);
        }
    }

    fn reopen(&mut self) {
        if let Err(error) = self.target.reopen() {
            self.log_error(&error);
        }
    }

    fn log_error(&self, error: &std::io::Error) {
        if let Some(held_back) = self.error_log.allow() {
            tracing::warn!(
                event = "access_log_write_failed", %error, held_back,
                "cannot write the access log"
            );
        }
    }
}
