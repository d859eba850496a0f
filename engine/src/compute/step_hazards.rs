//! Whether the sequences of a step leave each other's blocks alone: what [`SeqStep::start`] promises, looked after. Pure.
//!
//! A device reads the keys and values of earlier positions before the step has begun, and sequences in any order. A block that
//! one sequence writes while another reads it, or writes it too, would be read half written now and then, and nothing else
//! would tell. So such a step is refused before anything of it is computed. One bit per block of the pool, and one look
//! at each block of each table.

use baton_connector::BlockId;

use super::SeqStep;

/// Blocks that a step writes; empty between steps.
#[derive(Debug)]
pub struct Apart(Vec<u64>);

impl Apart {
    /// For a pool of so many blocks.
    #[must_use]
    pub fn new(blocks: usize) -> Self {
        Self(vec![0; blocks.div_ceil(64)])
    }

    /// Looks at a step whose blocks are all of the pool, and whose tables are long enough.
    ///
    /// # Errors
    /// Which block belongs to two of its sequences: the scheduler's mistake.
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

    /// False: it is marked already.
    fn mark(&mut self, block: BlockId) -> bool {
        let was = self.is_marked(block);
        self.0[block.index() / 64] |= 1 << (block.index() % 64);
        !was
    }

    fn is_marked(&self, block: BlockId) -> bool {
        self.0[block.index() / 64] >> (block.index() % 64) & 1 == 1
    }
}

/// The blocks that a sequence only reads, and those that it writes.
fn parts<'a>(step: &SeqStep<'a>, block_tokens: usize) -> (&'a [BlockId], &'a [BlockId]) {
    let end = (step.start + step.tokens.len()).div_ceil(block_tokens);
    step.block_table[..end].split_at(step.start / block_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::LogitsWanted;

    const BLOCK_TOKENS: usize = 4;

    fn step<'a>(tokens: &'a [u32], start: usize, block_table: &'a [BlockId]) -> SeqStep<'a> {
        SeqStep { tokens, start, block_table, logits: LogitsWanted::No }
    }

    fn table(ids: &[u32]) -> Vec<BlockId> {
        ids.iter().map(|id| BlockId(*id)).collect()
    }

    #[test]
    fn sequences_share_what_earlier_steps_have_written_and_nothing_else() {
        let mut apart = Apart::new(200);
        let (a, b, c) = (table(&[7, 130, 9, 11]), table(&[7, 130, 10]), table(&[7, 9, 12]));
        // Two full blocks are common, and each goes on in a block of its own; what follows in a table is not looked at.
        let fine = [step(&[1], 8, &a), step(&[1, 2, 3], 8, &b)];
        for _ in 0..3 {
            assert_eq!(apart.check(&fine, BLOCK_TOKENS), Ok(()));
        }
        // The third reads block 9, in which the first writes: in the middle of it, and from its beginning.
        for start in [9, 8] {
            let wrong = [step(&[1], start, &a), step(&[1], 8, &b), step(&[1], 8, &c)];
            let why = apart.check(&wrong, BLOCK_TOKENS).unwrap_err();
            assert!(why.contains("block 9") && why.contains("read by another"), "{why}");
        }
        // As before it; and a chunk that begins in a shared block writes there.
        assert_eq!(apart.check(&fine, BLOCK_TOKENS), Ok(()));
        let wrong = [step(&[1], 8, &a), step(&[1, 2], 7, &b)];
        let why = apart.check(&wrong, BLOCK_TOKENS).unwrap_err();
        assert!(why.contains("block 130"), "{why}");
        assert_eq!(apart.check(&fine, BLOCK_TOKENS), Ok(()));
    }

    #[test]
    fn a_block_that_is_written_twice_is_refused() {
        let mut apart = Apart::new(64);
        let (a, twice) = (table(&[1, 2]), table(&[63, 63]));
        for wrong in [&[step(&[1], 0, &a), step(&[1], 0, &a)][..], &[step(&[1; 8], 0, &twice)]] {
            let why = apart.check(wrong, BLOCK_TOKENS).unwrap_err();
            assert!(why.contains("written twice"), "{why}");
        }
        assert_eq!(apart.check(&[step(&[1; 8], 0, &a)], BLOCK_TOKENS), Ok(()));
        assert_eq!(apart.check(&[], BLOCK_TOKENS), Ok(()));
    }
}
