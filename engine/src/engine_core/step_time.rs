//! The measured duration of steps: from the plan of one step to that of the next, as a client sees it between two
//! tokens. It includes the forward pass, the choice of tokens and the mail in between.

use super::{CoreEvent, EngineCore, EngineEnv};
use crate::scheduler::StepPart;

impl<S: EngineEnv> EngineCore<S> {
    /// Plans the next step, and records the duration of the one before.
    pub(super) fn plan_step(&mut self) -> Vec<StepPart> {
        if let Some(timing) = self.scheduler.begin_step(self.env.now()) {
            self.env.record(CoreEvent::Step(timing));
        }
        self.scheduler.schedule()
    }
}
