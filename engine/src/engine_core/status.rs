//! A copy of the engine's state for other threads, made before and after each step.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::blocks::pool::BlockUsage;
use crate::scheduler::SchedulerLoad;

/// A copy of the scheduler's counts.
#[derive(Clone, Debug, Default)]
pub struct CoreStatus {
    /// Blocks by state.
    pub usage: BlockUsage,
    /// Requests by phase.
    pub load: SchedulerLoad,
    /// Forward passes so far. A growing number shows that the device works.
    pub steps: u64,
    /// Set when the device has failed.
    pub failed: Option<String>,
}

/// The shared status of the step loop.
#[derive(Debug, Default)]
pub struct SharedStatus(Mutex<CoreStatus>);

impl SharedStatus {
    /// Replaces the published copy.
    pub fn publish(&self, usage: BlockUsage, load: SchedulerLoad) {
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
    pub fn snapshot(&self) -> CoreStatus {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, CoreStatus> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
