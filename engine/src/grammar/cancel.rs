//! The end of a compilation whose request has ended, or whose time is over.
//!
//! The compiler's parser checks for it in every mask and after every token. Before there is a parser, the work is
//! bounded by the compiler's counted limits, and is not interrupted.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use llguidance::CancellationHandle;

/// What a request shares with the thread that compiles its constraint.
#[derive(Debug, Default)]
pub(super) struct CompileControl {
    begun: OnceLock<Instant>,
    parser: Mutex<ParserControl>,
}

#[derive(Debug, Default)]
struct ParserControl {
    cancelled: bool,
    handle: Option<CancellationHandle>,
}

impl CompileControl {
    /// A thread takes the constraint.
    pub(super) fn begin(&self, now: Instant) {
        let _ = self.begun.set(now);
    }

    /// When a thread has taken the constraint. The request reads it when its time in the queue is over.
    pub(super) fn begun(&self) -> Option<Instant> {
        self.begun.get().copied()
    }

    /// Ends the compilation at its next check.
    pub(super) fn cancel(&self) {
        let mut parser = self.parser.lock().unwrap_or_else(PoisonError::into_inner);
        parser.cancelled = true;
        if let Some(handle) = parser.handle.take() {
            handle.cancel();
        }
    }

    /// Cancels this parser, too, with the compilation. Copies of the parser are independent of it.
    pub(super) fn watch(&self, handle: CancellationHandle) {
        let mut parser = self.parser.lock().unwrap_or_else(PoisonError::into_inner);
        if parser.cancelled {
            handle.cancel();
        } else {
            parser.handle = Some(handle);
        }
    }
}

/// Cancels a compilation when its request no longer waits for it. After the answer this changes nothing.
pub(super) struct CancelOnDrop(pub(super) Arc<CompileControl>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}
