//! The access log: one line of JSON per request that is over, written by a thread of its own.
//!
//! ```text
//! request ends ── try_send, never waits ──▶ [queue] ──▶ thread: line, buffer, file or standard output
//!                    └ full: dropped, counted
//! ```
//!
//! A slow or full disk costs lines, never requests. A file is opened anew on SIGUSR1, and when it is found renamed or
//! removed, which is looked for once a second: both ways of rotating logs work. The thread ends with the last
//! configuration that names the log.

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

use crate::config::{AccessLogConfig, named_file};
use crate::metrics::Metrics;
use crate::metrics::log_limiter::Seldom;
use crate::observe::finished::Finished;

/// How often a file is looked for under its name, and how long a line may wait in the buffer.
const LOOK: Duration = Duration::from_secs(1);
/// Before a full queue is tried again at the end, and a full pipe.
const FULL_PAUSE: Duration = Duration::from_millis(5);
/// Bytes that are gathered before they are written.
const BUFFER_BYTES: usize = 64 * 1024;

/// What the thread is sent.
enum Message {
    Line(Arc<Finished>),
    Reopen,
    Flush(oneshot::Sender<()>),
}

/// A log in use.
pub(crate) struct AccessLog {
    pub config: AccessLogConfig,
    messages: SyncSender<Message>,
    metrics: Arc<Metrics>,
    /// Requests answered well so far, for [`AccessLogConfig::sample`].
    seen: AtomicU64,
}

impl AccessLog {
    /// # Errors
    /// The file cannot be opened, or no thread can be started.
    pub(crate) fn open(config: AccessLogConfig, metrics: &Arc<Metrics>) -> std::io::Result<Arc<Self>> {
        let (messages, received) = sync_channel(config.queue);
        let target = Target::open(config.path.clone())?;
        let writer = Writer { target, metrics: Arc::clone(metrics), complained: Seldom::new() };
        std::thread::Builder::new().name("access-log".to_owned()).spawn(move || writer.run(&received))?;
        Ok(Arc::new(Self { config, messages, metrics: Arc::clone(metrics), seen: AtomicU64::new(0) }))
    }

    /// Logs a request, if it is in the sample.
    pub(crate) fn log(&self, finished: &Arc<Finished>) {
        if finished.went_well() && !self.is_sampled() {
            return;
        }
        if self.messages.try_send(Message::Line(Arc::clone(finished))).is_err() {
            self.metrics.observers.lines_dropped.increment(1);
        }
    }

    fn is_sampled(&self) -> bool {
        if self.config.sample >= 1.0 {
            return true;
        }
        // Multiples of the golden ratio are spread evenly: no run of requests is left out.
        let nth = self.seen.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (nth as f64) < self.config.sample * u64::MAX as f64
    }

    /// Opens the file anew. Does nothing while the queue is full; the file is looked for anyway.
    pub(crate) fn reopen(&self) {
        let _ = self.messages.try_send(Message::Reopen);
    }

    /// Waits until what was logged so far is written, but not for long.
    pub(crate) async fn flush(&self, within: Duration) {
        let (done, written) = oneshot::channel();
        let flushed = async {
            let mut message = Message::Flush(done);
            while let Err(TrySendError::Full(back)) = self.messages.try_send(message) {
                message = back;
                tokio::time::sleep(FULL_PAUSE).await;
            }
            let _ = written.await;
        };
        let _ = tokio::time::timeout(within, flushed).await;
    }
}

/// Where lines go.
enum Target {
    Stdout(BufWriter<std::io::Stdout>),
    File { path: PathBuf, to: BufWriter<Bounded>, identity: (u64, u64) },
}

/// A file that may be a pipe or a terminal: each write waits so long for room, and then fails. Its thread goes on, to be
/// told of another file, or of the end.
struct Bounded(File);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let begun = Instant::now();
        loop {
            match self.0.write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock && begun.elapsed() < LOOK => {
                    #[allow(clippy::disallowed_methods)] // between two tries, on the log's own thread
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

impl Target {
    fn open(path: Option<PathBuf>) -> std::io::Result<Self> {
        let Some(path) = path else {
            return Ok(Self::Stdout(BufWriter::with_capacity(BUFFER_BYTES, std::io::stdout())));
        };
        let file = named_file::append(&path)?;
        let identity = identity(&file.metadata()?);
        Ok(Self::File { path, to: BufWriter::with_capacity(BUFFER_BYTES, Bounded(file)), identity })
    }

    fn to(&mut self) -> &mut dyn Write {
        match self {
            Self::Stdout(to) => to,
            Self::File { to, .. } => to,
        }
    }

    /// Whether the file is no longer the one under its name.
    fn is_gone(&self) -> bool {
        match self {
            Self::Stdout(_) => false,
            Self::File { path, identity: ours, .. } => {
                !matches!(std::fs::metadata(Path::new(path)), Ok(found) if identity(&found) == *ours)
            }
        }
    }

    fn reopen(&mut self) -> std::io::Result<()> {
        if let Self::File { path, to, .. } = self {
            let path = path.clone();
            // What is buffered belongs to the old file; what cannot be written there is lost with it.
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

/// The thread.
struct Writer {
    target: Target,
    metrics: Arc<Metrics>,
    complained: Seldom,
}

impl Writer {
    fn run(mut self, messages: &Receiver<Message>) {
        let mut looked = Instant::now();
        loop {
            let message = match messages.try_recv() {
                Ok(message) => Ok(message),
                // Nothing waits: what is buffered is written now.
                Err(_) => {
                    self.flush();
                    messages.recv_timeout(LOOK)
                }
            };
            match message {
                Ok(Message::Line(finished)) => self.write(&finished),
                Ok(Message::Reopen) => self.reopen(),
                Ok(Message::Flush(done)) => {
                    self.flush();
                    let _ = done.send(());
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return self.flush(),
            }
            if looked.elapsed() >= LOOK {
                looked = Instant::now();
                if self.target.is_gone() {
                    self.reopen();
                }
            }
        }
    }

    fn write(&mut self, finished: &Finished) {
        let written = line::write(finished, self.target.to());
        match written {
            Ok(()) => self.metrics.observers.lines.increment(1),
            Err(error) => {
                self.metrics.observers.lines_dropped.increment(1);
                self.complain(&error);
            }
        }
    }

    fn flush(&mut self) {
        if let Err(error) = self.target.to().flush() {
            self.complain(&error);
        }
    }

    fn reopen(&mut self) {
        if let Err(error) = self.target.reopen() {
            self.complain(&error);
        }
    }

    fn complain(&self, error: &std::io::Error) {
        if let Some(held_back) = self.complained.due() {
            tracing::warn!(%error, held_back, "cannot write the access log");
        }
    }
}
