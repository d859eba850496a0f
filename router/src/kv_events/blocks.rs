//! Where an engine's blocks belong: its names of them, and the router's.
//!
//! The router's name of a block is the chained hash of all tokens up to its end, so it can be made of a prompt as
//! well as of events. A block whose parent is not known has no place, and what follows it has none either.

use std::collections::HashMap;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::batch::{Event, Stored};
use crate::prefix_index::PrefixIndex;

/// Tokens of one block; larger ones are no engine's.
const BLOCK_TOKENS_MAX: usize = 65_536;

/// One engine's blocks.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// The engine's name to the router's.
    names: HashMap<u64, u64>,
    /// The sequence number of the last message.
    last: Option<u64>,
}

/// What a message was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// The next one.
    InOrder,
    /// The first one after others that were missed, or of an engine that began anew.
    Gap,
    /// One that was heard before.
    Repeated,
}

impl Blocks {
    /// Notes a message's sequence number.
    pub(super) fn heard(&mut self, sequence: u64) -> Heard {
        let heard = match self.last {
            None => Heard::InOrder,
            Some(last) if sequence == last.wrapping_add(1) => Heard::InOrder,
            Some(last) if sequence == last => Heard::Repeated,
            Some(_) => Heard::Gap,
        };
        self.last = Some(sequence);
        heard
    }

    /// Blocks whose place is known.
    pub(super) fn count(&self) -> usize {
        self.names.len()
    }

    /// Forgets every block.
    pub(super) fn forget(&mut self, engine: u32, index: &mut PrefixIndex) {
        self.names = HashMap::new();
        index.forget(engine);
    }

    /// Takes an event into the index; the size of the blocks that it told of, if it did. At most `most` blocks are
    /// known by name.
    pub(super) fn apply(
        &mut self,
        engine: u32,
        event: &Event,
        index: &mut PrefixIndex,
        most: usize,
    ) -> Option<usize> {
        match event {
            Event::Stored(stored) => self.store(engine, stored, index, most),
            Event::Removed(hashes) => {
                for name in hashes.iter().filter_map(|hash| self.names.remove(hash)) {
                    index.remove(engine, name);
                }
                None
            }
            Event::Cleared => {
                self.forget(engine, index);
                None
            }
            Event::Other => None,
        }
    }

    fn store(&mut self, engine: u32, stored: &Stored, index: &mut PrefixIndex, most: usize) -> Option<usize> {
        let size = stored.block_size;
        let whole = (1..=BLOCK_TOKENS_MAX).contains(&size)
            && stored.hashes.len().checked_mul(size) == Some(stored.tokens.len());
        if !whole || stored.apart {
            return None;
        }
        let parent = match stored.parent {
            None => root(size),
            Some(parent) => *self.names.get(&parent)?,
        };
        for (&hash, name) in stored.hashes.iter().zip(chain(parent, &stored.tokens, size)) {
            if self.names.len() >= most && !self.names.contains_key(&hash) {
                // The engine has more blocks than the router wants to know of.
                break;
            }
            self.names.insert(hash, name);
            index.add_one(engine, name);
        }
        Some(size)
    }
}

/// The router's names of a prompt's whole blocks, at most so many.
pub(crate) fn links(tokens: &[u32], block_size: usize, most: usize) -> Vec<u64> {
    if block_size == 0 {
        return Vec::new();
    }
    chain(root(block_size), tokens, block_size).take(most).collect()
}

fn chain(parent: u64, tokens: &[u32], size: usize) -> impl Iterator<Item = u64> + '_ {
    let mut link = parent;
    let mut bytes = Vec::with_capacity(size * 4);
    tokens.chunks_exact(size).map(move |block| {
        bytes.clear();
        bytes.extend(block.iter().flat_map(|token| token.to_le_bytes()));
        link = xxh3_64_with_seed(&bytes, link);
        link
    })
}

/// What comes before the first block. Blocks of different sizes never meet.
fn root(block_size: usize) -> u64 {
    0x6b76_5f72_6f6f_7421 ^ block_size as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> Event {
        Event::Stored(Stored {
            hashes: hashes.to_vec(),
            parent,
            tokens: tokens.to_vec(),
            block_size: 2,
            apart: false,
        })
    }

    #[test]
    fn equal_tokens_are_found_whatever_the_engines_call_their_blocks() {
        let mut index = PrefixIndex::new(100, 100);
        let (mut one, mut two) = (Blocks::default(), Blocks::default());
        let mut apply = |blocks: &mut Blocks, engine, event| blocks.apply(engine, &event, &mut index, 100);
        assert_eq!(apply(&mut one, 1, stored(&[11, 12], None, &[1, 2, 3, 4])), Some(2));
        apply(&mut one, 1, stored(&[13], Some(12), &[5, 6]));
        apply(&mut two, 2, stored(&[901], None, &[1, 2]));
        apply(&mut two, 2, stored(&[905], Some(777), &[5, 6]));
        let prompt = links(&[1, 2, 3, 4, 5, 6, 7], 2, 100);
        assert_eq!(prompt.len(), 3, "whole blocks");
        assert_eq!((index.length(1, &prompt), index.length(2, &prompt)), (3, 1));
        assert_eq!(index.length(1, &links(&[1, 2, 3, 4], 4, 100)), 0, "another block size");
        one.apply(1, &Event::Removed(vec![13, 99]), &mut index, 100);
        assert_eq!(index.length(1, &prompt), 2);
        one.apply(1, &Event::Cleared, &mut index, 100);
        assert_eq!((index.length(1, &prompt), index.length(2, &prompt)), (0, 1));
    }

    #[test]
    fn blocks_without_a_place_and_blocks_that_do_not_add_up_are_left_out() {
        let mut index = PrefixIndex::new(100, 100);
        let mut blocks = Blocks::default();
        let zero = Event::Stored(Stored { hashes: vec![1], ..Stored::default() });
        let apart = Event::Stored(Stored {
            hashes: vec![1],
            tokens: vec![1, 2],
            block_size: 2,
            apart: true,
            parent: None,
        });
        for event in [zero, apart, stored(&[1, 2], None, &[1, 2, 3]), stored(&[3], Some(1), &[3, 4])] {
            assert_eq!(blocks.apply(1, &event, &mut index, 100), None);
        }
        assert_eq!(index.len(), 0);
    }

    #[test]
    fn no_more_blocks_are_known_than_allowed() {
        let mut index = PrefixIndex::new(100, 100);
        let mut blocks = Blocks::default();
        let hashes: Vec<u64> = (0..50).collect();
        let tokens: Vec<u32> = (0..100).collect();
        blocks.apply(1, &stored(&hashes, None, &tokens), &mut index, 8);
        assert_eq!((blocks.names.len(), index.len()), (8, 8));
    }

    #[test]
    fn a_gap_and_a_new_beginning_are_noticed() {
        let mut blocks = Blocks::default();
        let heard: Vec<_> = [5, 6, 6, 7, 9, 10, 0, 1].map(|sequence| blocks.heard(sequence)).into();
        use Heard::{Gap, InOrder, Repeated};
        assert_eq!(heard, [InOrder, InOrder, Repeated, InOrder, Gap, InOrder, Gap, InOrder]);
    }
}
