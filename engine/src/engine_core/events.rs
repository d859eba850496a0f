//! The events that an engine core writes into the event log about its requests.

use std::collections::HashMap;
use std::sync::Arc;

use baton_connector::RequestId;
use baton_connector::fetch::{Event, FailureKind, Verification};
use baton_connector_leases::event_log::RequestEvent;

use super::{EngineCore, EngineEnv, LiveSequence};
use crate::blocks::cache_events::CacheEvent;
use crate::scheduler::StepPart;
use crate::scheduler::sequence::{FinishReason, NewSequence, Purpose, SeqId, Sequence};

/// A removed sequence whose blocks are still held, with their number.
pub(super) struct PendingFree {
    request: RequestId,
    index: u32,
    blocks: usize,
}

/// The values of a sequence's `ended` event.
pub(super) struct EndSummary {
    generated: usize,
    computed: usize,
    blocks: usize,
}

pub(super) fn queued(sequence: &NewSequence, tag: Option<Arc<str>>) -> RequestEvent {
    let leg = match sequence.purpose {
        Purpose::Plain | Purpose::Pool(_) => "whole",
        Purpose::Produce { .. } => "prefill",
        Purpose::Consume(_) => "decode",
    };
    RequestEvent::Queued { leg, prompt: sequence.prompt.len(), tag }
}

pub(super) fn end_summary(sequence: &Sequence) -> EndSummary {
    let (cached, fetched) = sequence.reused();
    let prompt = sequence.computed.min(sequence.prompt_len());
    EndSummary {
        generated: sequence.generated(),
        computed: prompt.saturating_sub(cached + fetched),
        blocks: sequence.held_blocks(),
    }
}

impl<S: EngineEnv> EngineCore<S> {
    /// Later changes of the caches are for this audience.
    pub fn set_event_audience(&mut self, audience: u64) {
        self.scheduler.set_event_audience(audience);
    }

    /// The changes of the caches since the last call, in order, if the scheduler records them.
    pub fn take_cache_events(&mut self) -> Vec<CacheEvent> {
        self.scheduler.take_cache_events()
    }

    /// The request of a live sequence.
    pub(super) fn request_of(&self, id: SeqId) -> Option<&RequestId> {
        self.live.get(&id).map(|live| &live.request)
    }

    /// Emits an event of a live sequence.
    pub(super) fn emit_for(&self, id: SeqId, event: RequestEvent) {
        if let Some(live) = self.live.get(&id) {
            self.env.emit(&live.request, live.index, event);
        }
    }

    /// Emits the starts of sequences, and returns their number.
    pub(super) fn emit_started(&mut self, plan: &[StepPart]) -> usize {
        let mut started = 0;
        for part in plan {
            if let Some(live) = self.live.get_mut(&part.id)
                && !std::mem::replace(&mut live.start_emitted, true)
            {
                self.env.emit(&live.request, live.index, RequestEvent::Started(part.start));
                started += 1;
            }
        }
        started
    }

    /// Emits the end of a step over a prompt.
    pub(super) fn emit_computed(&self, part: &StepPart) {
        if let Some(live) = self.live.get(&part.id).filter(|live| live.last_token.is_none()) {
            let computed = RequestEvent::Computed(part.start + part.count);
            self.env.emit(&live.request, live.index, computed);
        }
    }

    /// Emits the end of a read that a fetch worker has reported.
    pub(super) fn emit_fetched(&self, id: SeqId, event: Event) {
        let result = match event {
            Event::Verdict(Verification::Valid) => "landed",
            Event::Verdict(Verification::Gone) | Event::TransferFailed(FailureKind::Gone) => "gone",
            Event::TransferFailed(_) | Event::Verdict(_) => "failed",
            Event::WorkerLost => "stopped",
            Event::Admitted
            | Event::BlocksReserved
            | Event::AlreadyCached
            | Event::TransferDone
            // A heartbeat's answer: for a queued handoff, or late, for one that was read completely.
            | Event::LeaseGone
            | Event::Abort
            | Event::Reject => return,
        };
        match self.pending_free.get(&id) {
            // The client has left in the meantime, which stopped the read.
            Some(entry) => self.env.emit(&entry.request, entry.index, RequestEvent::Fetched("stopped")),
            None => self.emit_for(id, RequestEvent::Fetched(result)),
        }
    }

    pub(super) fn emit_ended(
        &mut self,
        id: SeqId,
        live: &LiveSequence,
        reason: FinishReason,
        summary: EndSummary,
    ) {
        let EndSummary { generated, computed, blocks } = summary;
        let ended = RequestEvent::Ended { outcome: reason.as_str(), generated, computed, blocks };
        self.env.emit(&live.request, live.index, ended);
        if blocks > 0 {
            self.pending_free
                .insert(id, PendingFree { request: live.request.clone(), index: live.index, blocks });
        }
    }
}

/// Emits `freed` for sequences whose last block is free.
pub(super) fn emit_freed(
    released: Vec<SeqId>,
    pending_free: &mut HashMap<SeqId, PendingFree>,
    env: &impl EngineEnv,
) {
    for id in released {
        if let Some(entry) = pending_free.remove(&id) {
            env.emit(&entry.request, entry.index, RequestEvent::Freed(entry.blocks));
        }
    }
}
