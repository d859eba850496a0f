//! The engine's state as others may look at it at any time: a copy, made before and after each step.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::blocks::pool::BlockUsage;
use crate::scheduler::Load;

/// A copy of the books.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// Blocks by state.
    pub usage: BlockUsage,
    /// Requests by phase.
    pub load: Load,
    /// Forward passes so far; tells that the device is alive.
    pub steps: u64,
    /// Set when the device has failed.
    pub failed: Option<String>,
}

/// Where the step loop hangs out its status.
#[derive(Debug, Default)]
pub struct StatusBoard(Mutex<Status>);

impl StatusBoard {
    /// Replaces what is shown.
    pub fn publish(&self, usage: BlockUsage, load: Load) {
        let mut status = self.lock();
        status.usage = usage;
        status.load = load;
    }

    /// Counts a forward pass.
    pub fn stepped(&self) {
        self.lock().steps += 1;
    }

    /// The device has failed; the engine is unhealthy from now on.
    pub fn set_failed(&self, why: String) {
        self.lock().failed = Some(why);
    }

    /// Whether the device has failed.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.lock().failed.is_some()
    }

    /// The latest copy.
    #[must_use]
    pub fn look(&self) -> Status {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Status> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
