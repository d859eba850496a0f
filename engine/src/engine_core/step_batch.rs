//! The parts of a step for the device: tokens, blocks, and the rows that are wanted.

use super::LiveSequence;
use crate::compute::{LogitsRequest, SeqStep};
use crate::scheduler::{StepPart, StepSequences};

/// One planned part. `live` is its sequence, unless that has ended.
pub(super) fn step_of<'a>(
    part: &StepPart,
    sequences: StepSequences<'a>,
    live: Option<&LiveSequence>,
) -> SeqStep<'a> {
    let sequence = sequences.get(part.id).expect("a planned sequence is known");
    let (tokens, has_drafts) = sequences.tokens(part);
    let row = live.filter(|live| live.is_unmasked()).map(|live| live.sampling_row(sequence));
    let logits = match part.samples {
        _ if sequence.scores_prompt(part.start, part.count) => LogitsRequest::All,
        samples if sequence.pools(samples) => LogitsRequest::Hidden,
        true if has_drafts => {
            row.and_then(|row| row.draws()).map_or(LogitsRequest::All, LogitsRequest::DrawEach)
        }
        true => row.and_then(|row| row.draw()).map_or(LogitsRequest::Last, LogitsRequest::Draw),
        false => LogitsRequest::No,
    };
    let adapter = sequence.adapter().map(|adapter| adapter.index);
    SeqStep { tokens, start: part.start, block_table: sequence.blocks(), logits, adapter }
}
