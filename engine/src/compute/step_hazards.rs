//! Checks that no sequence of a step touches a block that another sequence of the step writes ([`SeqStep::start`]).
//! Pure.
//!
//! A device reads the keys and values of earlier positions before the step has begun, and sequences in any order. A
//! block that one sequence writes and another reads or writes could be read half written, and no other check would find
//! it. Such a step is refused before anything of it is computed. The cost is one bit per block of the pool, and one
//! look at each block of each table.

use baton_connector::BlockId;

use super::SeqStep;

/// Blocks that a step writes; empty between steps.
#[derive(Debug)]
pub struct StepHazards(Vec<u64>);

impl StepHazards {
    /// For a pool of `blocks` blocks.
    #[must_use]
    pub fn new(blocks: usize) -> Self {
        Self(vec![0; blocks.div_ceil(64)])
    }

    /// Checks a step. All its blocks are in the pool, and its block tables are long enough.
    ///
    /// # Errors
    /// The block that belongs to two of the step's sequences: a bug of the scheduler.
    pub fn check(&mut self, batch: &[SeqStep<'_>], block_tokens: usize) -> Result<(), String> {
        let tables = || batch.iter().map(|step| parts(step, block_tokens));
        let again = tables().flat_map(|(_, written)| written).find(|block| !self.mark(**block));
        let read = || tables().flat_map(|(read, _)| read).find(|block| self.is_marked(**block));
        let shared = again
            .map(|block| (block, "written twice"))
            .or_else(|| read().map(|block| (block, "written by one sequence and read by another")));
        tables().flat_map(|(_, written)| written).for_each(|block| self.0[block.index() / 64] = 0);
        match shared {
            None => Ok(()),
            Some((block, how)) => Err(format!("block {} is {how} in one step", block.0)),
        }
    }

    /// Marks the block; false if it was marked already.
    fn mark(&mut self, block: BlockId) -> bool {
        let was = self.is_marked(block);
        self.0[block.index() / 64] |= 1 << (block.index() % 64);
        !was
    }

    fn is_marked(&self, block: BlockId) -> bool {
        self.0[block.index() / 64] >> (block.index() % 64) & 1 == 1
    }
}

/// The blocks that a sequence only reads, and the blocks that it writes.
fn parts<'a>(step: &SeqStep<'a>, block_tokens: usize) -> (&'a [BlockId], &'a [BlockId]) {
    let end = (step.start + step.tokens.len()).div_ceil(block_tokens);
    step.block_table[..end].split_at(step.start / block_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::LogitsRequest;

    const BLOCK_TOKENS: usize = 4;

    fn step<'a>(tokens: &'a [u32], start: usize, block_table: &'a [BlockId]) -> SeqStep<'a> {
        SeqStep { tokens, start, block_table, logits: LogitsRequest::No, adapter: None }
    }

    fn table(ids: &[u32]) -> Vec<BlockId> {
        ids.iter().map(|id| BlockId(*id)).collect()
    }

    #[test]
    fn sequences_share_only_blocks_of_earlier_steps() {
        let mut hazards = StepHazards::new(200);
        let (a, b, c) = (table(&[7, 130, 9, 11]), table(&[7, 130, 10]), table(&[7, 9, 12]));
        // Two full blocks are shared, and each sequence continues in a block of its own. The rest of a table is not
        // checked.
        let fine = [step(&[1], 8, &a), step(&[1, 2, 3], 8, &b)];
        for _ in 0..3 {
            assert_eq!(hazards.check(&fine, BLOCK_TOKENS), Ok(()));
        }
        // The third sequence reads block 9, which the first one writes: in the middle of it, and from its beginning.
        for start in [9, 8] {
            let wrong = [step(&[1], start, &a), step(&[1], 8, &b), step(&[1], 8, &c)];
            let why = hazards.check(&wrong, BLOCK_TOKENS).unwrap_err();
            assert!(why.contains("block 9") && why.contains("read by another"), "{why}");
        }
        // A chunk that begins in a shared block writes there.
        assert_eq!(hazards.check(&fine, BLOCK_TOKENS), Ok(()));
        let wrong = [step(&[1], 8, &a), step(&[1, 2], 7, &b)];
        let why = hazards.check(&wrong, BLOCK_TOKENS).unwrap_err();
        assert!(why.contains("block 130"), "{why}");
        assert_eq!(hazards.check(&fine, BLOCK_TOKENS), Ok(()));
    }

    #[test]
    fn a_block_that_is_written_twice_is_refused() {
        let mut hazards = StepHazards::new(64);
        let (a, twice) = (table(&[1, 2]), table(&[63, 63]));
        for wrong in [&[step(&[1], 0, &a), step(&[1], 0, &a)][..], &[step(&[1; 8], 0, &twice)]] {
            let why = hazards.check(wrong, BLOCK_TOKENS).unwrap_err();
            assert!(why.contains("written twice"), "{why}");
        }
        assert_eq!(hazards.check(&[step(&[1; 8], 0, &a)], BLOCK_TOKENS), Ok(()));
        assert_eq!(hazards.check(&[], BLOCK_TOKENS), Ok(()));
    }
}
