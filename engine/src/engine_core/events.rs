//! What an engine core writes into the event log about its requests.

use std::collections::HashMap;
use std::sync::Arc;

use baton_connector::RequestId;
use baton_connector::fetch::{Answer, Event, FailureKind};

use super::{EngineCore, Live, Surroundings};
use crate::event_log::What;
use crate::scheduler::Planned;
use crate::scheduler::sequence::{FinishReason, NewSequence, Purpose, SeqId, Sequence};

/// Who has left the books while blocks of theirs are still held, and how many they were.
pub(super) struct Resting {
    request: RequestId,
    index: u32,
    blocks: usize,
}

/// What is told of a sequence at its end.
pub(super) struct ToldAtEnd {
    generated: usize,
    computed: usize,
    blocks: usize,
}

pub(super) fn queued(sequence: &NewSequence, tag: Option<Arc<str>>) -> What {
    let leg = match sequence.purpose {
        Purpose::Plain => "whole",
        Purpose::Produce { .. } => "prefill",
        Purpose::Consume(_) => "decode",
    };
    What::Queued { leg, prompt: sequence.prompt.len(), tag }
}

pub(super) fn told_at_end(sequence: &Sequence) -> ToldAtEnd {
    let (cached, fetched) = sequence.reused();
    let prompt = sequence.computed.min(sequence.prompt_len());
    ToldAtEnd {
        generated: sequence.generated(),
        computed: prompt.saturating_sub(cached + fetched),
        blocks: sequence.blocks().len(),
    }
}

impl<S: Surroundings> EngineCore<S> {
    /// Writes down something about a live sequence.
    pub(super) fn tell_of(&self, id: SeqId, what: What) {
        if let Some(live) = self.live.get(&id) {
            self.surroundings.tell(&live.request, live.index, what);
        }
    }

    pub(super) fn tell_started(&mut self, plan: &[Planned]) {
        for part in plan {
            if let Some(live) = self.live.get_mut(&part.id)
                && !std::mem::replace(&mut live.started, true)
            {
                self.surroundings.tell(&live.request, live.index, What::Started(part.start));
            }
        }
    }

    /// A step over a prompt has ended.
    pub(super) fn tell_computed(&self, part: &Planned) {
        if let Some(live) = self.live.get(&part.id).filter(|live| live.last_token.is_none()) {
            let computed = What::Computed(part.start + part.count);
            self.surroundings.tell(&live.request, live.index, computed);
        }
    }

    /// A fetch worker has reported the end of a read.
    pub(super) fn tell_fetched(&self, id: SeqId, event: Event) {
        let result = match event {
            Event::Verdict(Answer::Valid) => "landed",
            Event::Verdict(Answer::Gone) | Event::TransferFailed(FailureKind::Gone) => "gone",
            Event::TransferFailed(_) | Event::Verdict(_) => "failed",
            Event::Quiet => "stopped",
            Event::Admitted
            | Event::BlocksReserved
            | Event::AlreadyHere
            | Event::TransferDone
            // A heartbeat's answer: of a handoff in the queue, or late, of one that was read to its end.
            | Event::LeaseGone
            | Event::Abort
            | Event::Reject => return,
        };
        match self.resting.get(&id) {
            // Its client has left in the meantime, and the read was stopped for that.
            Some(rests) => self.surroundings.tell(&rests.request, rests.index, What::Fetched("stopped")),
            None => self.tell_of(id, What::Fetched(result)),
        }
    }

    pub(super) fn tell_ended(&mut self, id: SeqId, live: &Live, reason: FinishReason, told: ToldAtEnd) {
        let ToldAtEnd { generated, computed, blocks } = told;
        let ended = What::Ended { outcome: reason.label(), generated, computed, blocks };
        self.surroundings.tell(&live.request, live.index, ended);
        if blocks > 0 {
            self.resting.insert(id, Resting { request: live.request.clone(), index: live.index, blocks });
        }
    }
}

/// Tells whose blocks have come back.
pub(super) fn tell_home(
    home: Vec<SeqId>,
    resting: &mut HashMap<SeqId, Resting>,
    surroundings: &impl Surroundings,
) {
    for id in home {
        if let Some(rested) = resting.remove(&id) {
            surroundings.tell(&rested.request, rested.index, What::Freed(rested.blocks));
        }
    }
}
