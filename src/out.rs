//! Standard output and standard error of every command.
//!
//! A reader may close either: `baton check FILE | head -1`. A command whose standard output is closed ends and exits with
//! [`CLOSED`], without a message. `up`, `engine` and `router` serve on. Nothing ends because standard error is closed.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit code of a command whose output nothing reads: as a shell reports a process that SIGPIPE ended.
pub(crate) const CLOSED: u8 = 128 + 13;

/// Set by the write that failed. An error of a command may have passed through several types by then, and a
/// connection that broke is the same [`io::ErrorKind`].
static IS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Standard output that remembers whether its reader closed it.
#[derive(Debug)]
pub(crate) struct Out;

impl Write for Out {
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

/// Whether a write of this process found its reader gone. Writes what is still buffered first.
pub(crate) fn is_closed() -> bool {
    // Another failure to write is the command's own, or it was the last line.
    let _ = Out.flush();
    IS_CLOSED.load(Ordering::Relaxed)
}

/// One line on standard output for people and supervisors, at once. One that has left reads no more, which a server
/// does not end for.
pub(crate) fn say(line: impl Display) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// One line on standard error.
pub(crate) fn note(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}
