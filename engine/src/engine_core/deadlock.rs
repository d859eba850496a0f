//! The end of a deadlock between engines that serve both legs.

use baton_connector::fetch::Event;
use baton_connector::limits::DRAIN_DEADLINE;

use super::{EngineCore, EngineEnv};
use crate::log_span::request_span;

impl<S: EngineEnv> EngineCore<S> {
    /// Breaks a deadlock of an engine that serves both legs. Such an engine can wait for blocks that only leases
    /// hold. The consumers of those leases may wait for blocks here, or on an engine that waits for this one. After
    /// [`DRAIN_DEADLINE`] the engine gives up its first handoff. The producer then frees the blocks, and a sequence
    /// can proceed.
    pub(super) fn break_deadlock(&mut self, idle: bool) -> bool {
        if !(idle && self.scheduler.waits_for_leases()) {
            self.timers.stalled_since = None;
            return false;
        }
        let now = self.env.now();
        let since = *self.timers.stalled_since.get_or_insert(now);
        if now.saturating_duration_since(since) < DRAIN_DEADLINE {
            return false;
        }
        self.timers.stalled_since = None;
        let Some(id) = self.scheduler.first_waiting_consumer() else { return false };
        tracing::warn!(
            parent: request_span!(self.request_of(id)), event = "handoff_deadlock_broken", seq = id.0,
            "handoff given up: leases hold all blocks and no sequence can proceed"
        );
        self.scheduler.fetch_event(id, Event::LeaseGone);
        self.carry_out_effects();
        true
    }
}
