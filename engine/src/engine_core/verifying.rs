//! The verification of drafts: the tokens of a step that has computed several positions of one sequence.
//!
//! Each position is recorded like a step of one token, with the same choice, counts, log-probabilities and events. The
//! next position counts only if the chosen token equals its draft. So the texts are those without drafts.

use std::ops::Range;

use super::{CoreEvent, EngineCore, EngineEnv};
use crate::scheduler::StepPart;
use crate::scheduler::sequence::SeqId;

impl<S: EngineEnv> EngineCore<S> {
    /// Records one planned part, whose logits are in `rows`, and sends its events.
    pub(super) fn commit_part(&mut self, part: &StepPart, rows: Range<usize>) {
        let Some(tokens) = self.scheduler.take_drafted(part) else {
            return self.commit(part, rows, &[]);
        };
        let mut accepted = 0;
        for (offset, row) in rows.enumerate() {
            let position = StepPart { start: part.start + offset, count: 1, ..*part };
            let drafts = &tokens[offset + 1..];
            self.commit(&position, row..row + 1, drafts);
            let next = drafts.first().copied();
            if next.is_none() || self.token_after(&position) != next {
                break;
            }
            accepted += 1;
            if !self.is_chosen_alike(part.id, row + 1) {
                break;
            }
        }
        let drafted = tokens.len() - 1;
        self.env.record(CoreEvent::DraftVerified { drafted, accepted });
        self.scheduler.drafts_verified(part.id, drafted, accepted);
    }

    /// The token that was chosen after a position, if its sequence continues.
    fn token_after(&self, position: &StepPart) -> Option<u32> {
        let sequence = self.scheduler.sequence(position.id)?;
        sequence.tokens().get(position.start + position.count).copied()
    }

    /// Whether the next token of a sequence is chosen from this row as when the step was planned: on the device or on
    /// the host. Otherwise a later step computes the position again.
    fn is_chosen_alike(&self, id: SeqId, row: usize) -> bool {
        let (Some(live), Some(sequence)) = (self.live.get(&id), self.scheduler.sequence(id)) else {
            return false;
        };
        self.sampler.logits.drawn(row).is_none() || live.sampling_row(sequence).draw().is_some()
    }
}
