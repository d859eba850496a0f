//! Standard output and standard error of every command.
//!
//! A reader may close either of them, as in `baton check FILE | head -1`. A command whose standard output is closed
//! ends with exit code [`CLOSED`], without a message. `up`, `engine` and `router` continue to serve. No command ends
//! because standard error is closed.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit code of a command whose standard output is closed, as a shell reports a process that SIGPIPE ended.
pub(crate) const CLOSED: u8 = 128 + 13;

/// Set by the write that failed. The error itself cannot show this: it may have passed through several types, and a
/// broken connection has the same [`io::ErrorKind`].
static IS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Standard output that records whether its reader closed it.
#[derive(Debug)]
pub(crate) struct CommandOutput;

impl Write for CommandOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        io::stdout().write(bytes).inspect_err(remember)
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().flush().inspect_err(remember)
    }
}

fn remember(error: &io::Error) {
    if error.kind() == io::ErrorKind::BrokenPipe {
        IS_CLOSED.store(true, Ordering::Relaxed);
    }
}

/// Whether a write of this process failed because the reader closed the output. Flushes the buffer first.
pub(crate) fn is_closed() -> bool {
    // The command reports other write errors itself, or this was the last line.
    let _ = CommandOutput.flush();
    IS_CLOSED.load(Ordering::Relaxed)
}

/// Prints one line to standard output and flushes it. A server does not end because the reader has closed the pipe.
pub(crate) fn say(line: impl Display) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Prints one line to standard error.
pub(crate) fn note(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}
