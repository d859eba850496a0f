//! The order in which the rows of a step are sampled: rows with a late mask come last.
//!
//! A mask is normally computed while the device runs the step. One that is late delays the others by at most
//! [`MASK_WAIT`] in total, the only wait of the core. Its sequence then computes its last token again in the next
//! step, with the same result.

use std::ops::Range;
use std::time::Duration;

use super::EngineCore;
use super::env::EngineEnv;
use super::mailbox::MailBatch;
use super::messages::SeqEvent;
use crate::grammar::{GrammarFault, MASK_WAIT, MaskReadiness};
use crate::log_span::request_span;
use crate::scheduler::StepPart;
use crate::scheduler::sequence::{FinishReason, SeqId};

impl<S: EngineEnv> EngineCore<S> {
    /// Records the results of a forward pass. `mail` arrived during the pass: abort wins over finish.
    pub fn finish_step(&mut self, plan: &[StepPart], mail: MailBatch) {
        self.take_in(mail);
        let mut late = Vec::new();
        for (part, rows) in plan.iter().zip(self.sampler.take_rows()) {
            let readiness = match part.samples {
                true => self.mask_of(part.id, Duration::ZERO),
                false => MaskReadiness::Ready,
            };
            match readiness {
                MaskReadiness::Late => late.push((part, rows)),
                readiness => self.commit_masked(part, rows, readiness),
            }
        }
        if late.is_empty() {
            return;
        }
        let deadline = self.env.now() + MASK_WAIT;
        for (part, rows) in late {
            let left = deadline.saturating_duration_since(self.env.now());
            let readiness = self.mask_of(part.id, left);
            self.commit_masked(part, rows, readiness);
        }
    }

    /// Whether the next token of a sequence can be sampled.
    fn mask_of(&mut self, id: SeqId, wait: Duration) -> MaskReadiness {
        let grammar = self.live.get_mut(&id).and_then(|live| live.grammar.as_mut());
        grammar.map_or(MaskReadiness::Ready, |grammar| grammar.wait(wait))
    }

    fn commit_masked(&mut self, part: &StepPart, rows: Range<usize>, readiness: MaskReadiness) {
        match readiness {
            MaskReadiness::Ready => self.commit_part(part, rows),
            // Without its last token the part is one that samples nothing.
            MaskReadiness::Late if part.count > 1 => {
                let rest = StepPart { count: part.count - 1, samples: false, ..*part };
                self.commit(&rest, rows, &[]);
            }
            MaskReadiness::Late => {}
            MaskReadiness::Failed(fault) => self.end_unmasked(part.id, fault),
        }
    }

    /// Ends a sequence that its grammar cannot continue.
    pub(super) fn end_unmasked(&mut self, id: SeqId, fault: GrammarFault) {
        tracing::warn!(parent: request_span!(self.request_of(id)), event = "grammar_failed", seq = id.0,
            reason = fault.text(), "structured output ended early");
        let event = match fault {
            GrammarFault::DeadEnd | GrammarFault::Excluded => SeqEvent::DeadEnd(fault.text()),
            GrammarFault::Stopped => SeqEvent::Unavailable(fault.text()),
        };
        self.end_with(id, FinishReason::Error, event);
    }
}
