//! Where an engine's blocks belong: its names of them, and the router's.
//!
//! The router's name of a block is the chained hash of all tokens up to its end, so it can be made of a prompt as
//! well as of events. A block whose parent is not known has no place, and what follows it has none either.

use std::collections::HashMap;

use super::batch::{Attention, Event, Stored};
use crate::engines::caches::prefix_index::Change;
use crate::message::block_chain::{chain, root};
use crate::metrics::kv_events::LeftOut;

/// Tokens of one block; larger ones are no engine's.
const BLOCK_TOKENS_MAX: usize = 65_536;
/// Cache groups of one engine whose kind is kept; models have less than ten.
const GROUPS_MAX: usize = 64;

/// One engine's blocks.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// The engine's name to the router's.
    names: HashMap<u64, u64>,
    /// The kinds of the engine's cache groups, of an engine that sends them. Two groups may use one name for a block.
    groups: HashMap<u64, Attention>,
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

/// What an event changes of what is known of an engine's cache.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Changes {
    /// Everything known before is forgotten.
    pub forget: bool,
    pub list: Vec<Change>,
    /// The size of the blocks that were stored.
    pub block_size: Option<usize>,
    /// Why the event, or a part of it, changes nothing.
    pub left_out: Option<LeftOut>,
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

    /// Takes an event; at most `most` blocks are known by name.
    pub(super) fn take(&mut self, event: &Event, most: usize) -> Changes {
        let mut changes = Changes::default();
        changes.left_out = self.apply(event, most, &mut changes).err();
        changes
    }

    /// Forgets everything that the engine has said.
    pub(super) fn forget(&mut self) {
        (self.names, self.groups) = Default::default();
    }

    fn apply(&mut self, event: &Event, most: usize, changes: &mut Changes) -> Result<(), LeftOut> {
        match event {
            Event::Stored(stored) => self.store(stored, most, changes),
            Event::Removed { hashes, group } => {
                if !self.counts(*group) {
                    return Err(LeftOut::Attention);
                }
                let names = hashes.iter().filter_map(|hash| self.names.remove(hash));
                changes.list.extend(names.map(Change::Removed));
                Ok(())
            }
            Event::Cleared => {
                self.names = HashMap::new();
                changes.forget = true;
                Ok(())
            }
            Event::Lost => {
                self.forget();
                changes.forget = true;
                Err(LeftOut::Malformed)
            }
            Event::LeftOut(why) => Err(*why),
        }
    }

    /// Whether blocks of a group can be used by any prompt that begins with them. An engine that sends no kinds has its
    /// full attention in its first group.
    fn counts(&self, group: Option<u64>) -> bool {
        match group {
            None => true,
            Some(group) if self.groups.is_empty() => group == 0,
            Some(group) => self.groups.get(&group) == Some(&Attention::Full),
        }
    }

    fn store(&mut self, stored: &Stored, most: usize, changes: &mut Changes) -> Result<(), LeftOut> {
        if let Some(attention) = stored.attention {
            let group = stored.group.unwrap_or(0);
            if self.groups.len() < GROUPS_MAX || self.groups.contains_key(&group) {
                self.groups.insert(group, attention);
            }
        }
        if stored.attention == Some(Attention::Other) || !self.counts(stored.group) {
            return Err(LeftOut::Attention);
        }
        if stored.apart {
            return Err(LeftOut::ExtraKeys);
        }
        let size = stored.block_size;
        if !(1..=BLOCK_TOKENS_MAX).contains(&size)
            || stored.hashes.len().checked_mul(size) != Some(stored.tokens.len())
        {
            return Err(LeftOut::Malformed);
        }
        let parent = match stored.parent {
            None => root(size),
            Some(parent) => *self.names.get(&parent).ok_or(LeftOut::Parent)?,
        };
        changes.block_size = Some(size);
        for (&hash, name) in stored.hashes.iter().zip(chain(parent, &stored.tokens, size)) {
            if self.names.len() >= most && !self.names.contains_key(&hash) {
                return Err(LeftOut::Bound);
            }
            if let Some(other) = self.names.insert(hash, name).filter(|other| *other != name) {
                // The engine calls other tokens by this name now.
                changes.list.push(Change::Removed(other));
            }
            changes.list.push(Change::Added(name));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::caches::prefix_index::PrefixIndex;
    use crate::message::block_chain::links;

    fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> Stored {
        Stored {
            hashes: hashes.to_vec(),
            parent,
            tokens: tokens.to_vec(),
            block_size: 2,
            ..Stored::default()
        }
    }

    fn of_group(group: u64, attention: Option<Attention>, hashes: &[u64], tokens: &[u32]) -> Event {
        Event::Stored(Stored { group: Some(group), attention, ..stored(hashes, None, tokens) })
    }

    fn removed(hashes: &[u64], group: Option<u64>) -> Event {
        Event::Removed { hashes: hashes.to_vec(), group }
    }

    /// An engine's blocks, and the index that they change.
    struct Told {
        index: PrefixIndex,
        of: [Blocks; 2],
    }

    impl Told {
        fn new() -> Self {
            Self { index: PrefixIndex::new(100, 100), of: Default::default() }
        }

        /// Why each event of a message was left out.
        fn take(&mut self, engine: u32, events: Vec<Event>) -> Vec<LeftOut> {
            let mut left_out = Vec::new();
            for event in events {
                let changes = self.of[engine as usize].take(&event, 100);
                if changes.forget {
                    self.index.forget(engine);
                }
                self.index.change(engine, &changes.list);
                left_out.extend(changes.left_out);
            }
            left_out
        }
    }

    #[test]
    fn equal_tokens_are_found_whatever_the_engines_call_their_blocks() {
        let mut told = Told::new();
        let events =
            [stored(&[11, 12], None, &[1, 2, 3, 4]), stored(&[13], Some(12), &[5, 6])].map(Event::Stored);
        assert_eq!(told.take(0, events.into()), []);
        let events = [stored(&[901], None, &[1, 2]), stored(&[905], Some(777), &[5, 6])].map(Event::Stored);
        assert_eq!(told.take(1, events.into()), [LeftOut::Parent]);
        let prompt = links(&[1, 2, 3, 4, 5, 6, 7], 2, 100);
        assert_eq!(prompt.len(), 3, "whole blocks");
        assert_eq!((told.index.length(0, &prompt), told.index.length(1, &prompt)), (3, 1));
        assert_eq!(told.index.length(0, &links(&[1, 2, 3, 4], 4, 100)), 0, "another block size");
        told.take(0, vec![removed(&[13, 99], None)]);
        assert_eq!(told.index.length(0, &prompt), 2);
        let again = Event::Stored(stored(&[21], None, &[1, 2]));
        told.take(0, vec![Event::Stored(stored(&[14], None, &[9, 9])), Event::Cleared, again]);
        assert_eq!((told.index.length(0, &prompt), told.index.length(1, &prompt)), (1, 1));
        assert_eq!(told.index.len(), 2);
    }

    #[test]
    fn only_full_attention_counts_by_its_kind_and_not_by_its_index() {
        use Attention::{Full, Other};
        let prompt = links(&[1, 2, 3, 4], 2, 100);
        let mut told = Told::new();
        // A window in group 0 and full attention in group 1, with the same names for the same tokens.
        let both = |kinds: [Option<Attention>; 2]| {
            vec![of_group(0, kinds[0], &[1, 2], &[1, 2, 3, 4]), of_group(1, kinds[1], &[1, 2], &[1, 2, 3, 4])]
        };
        assert_eq!(told.take(0, both([Some(Other), Some(Full)])), [LeftOut::Attention]);
        assert_eq!(told.index.length(0, &prompt), 2);
        assert_eq!(told.take(0, vec![removed(&[1, 2], Some(0))]), [LeftOut::Attention]);
        assert_eq!(told.index.length(0, &prompt), 2, "the window moved on, and full attention holds all");
        assert_eq!(told.take(0, vec![removed(&[2], Some(1))]), []);
        assert_eq!(told.index.length(0, &prompt), 1);
        // A state in the only group.
        let state = of_group(0, Some(Other), &[1, 2], &[1, 2, 3, 4]);
        assert_eq!(told.take(1, vec![state, removed(&[1], Some(0))]), [LeftOut::Attention; 2]);
        assert_eq!(told.index.length(1, &prompt), 0);
        // An older version says no kinds.
        let mut told = Told::new();
        assert_eq!(told.take(0, both([None, None])), [LeftOut::Attention]);
        assert_eq!(told.take(0, vec![removed(&[1, 2], Some(1))]), [LeftOut::Attention]);
        assert_eq!(told.index.length(0, &prompt), 2);
        // A removal by a group of which only another's kind has been heard.
        let full = of_group(1, Some(Full), &[1, 2], &[1, 2, 3, 4]);
        assert_eq!(told.take(1, vec![full, removed(&[1, 2], Some(0))]), [LeftOut::Attention]);
        assert_eq!(told.index.length(1, &prompt), 2);
    }

    #[test]
    fn blocks_without_a_place_and_blocks_that_do_not_add_up_are_left_out() {
        let mut told = Told::new();
        let zero = Stored { hashes: vec![1], ..Stored::default() };
        let apart = Stored { apart: true, ..stored(&[1], None, &[1, 2]) };
        let events = [zero, apart, stored(&[1, 2], None, &[1, 2, 3]), stored(&[3], Some(1), &[3, 4])]
            .map(Event::Stored);
        use LeftOut::{ExtraKeys, Malformed, Parent};
        assert_eq!(told.take(0, events.into()), [Malformed, ExtraKeys, Malformed, Parent]);
        assert_eq!(told.index.len(), 0);
    }

    #[test]
    fn a_name_that_the_engine_gives_to_other_tokens_stands_for_these_alone() {
        let mut told = Told::new();
        let first = Event::Stored(stored(&[1], None, &[1, 2]));
        told.take(0, vec![first, Event::Stored(stored(&[1], None, &[3, 4]))]);
        let held = |told: &Told, tokens: &[u32]| told.index.length(0, &links(tokens, 2, 9));
        assert_eq!((held(&told, &[1, 2]), held(&told, &[3, 4])), (0, 1));
        told.take(0, vec![removed(&[1], None)]);
        assert_eq!(told.index.len(), 0);
    }

    #[test]
    fn a_removal_that_cannot_be_read_takes_everything_and_so_does_a_new_beginning_with_the_kinds() {
        let mut told = Told::new();
        let window = of_group(0, Some(Attention::Other), &[1], &[1, 2]);
        let full = of_group(1, Some(Attention::Full), &[1], &[1, 2]);
        assert_eq!(told.take(0, vec![window, full, Event::Lost]), [LeftOut::Attention, LeftOut::Malformed]);
        assert_eq!(told.index.len(), 0);
        // Another version at the same address sends no kinds.
        assert_eq!(told.take(0, vec![of_group(0, None, &[1], &[1, 2])]), []);
        assert_eq!(told.index.len(), 1);
    }

    #[test]
    fn no_more_blocks_are_known_than_allowed() {
        let mut blocks = Blocks::default();
        let hashes: Vec<u64> = (0..50).collect();
        let tokens: Vec<u32> = (0..100).collect();
        let changes = blocks.take(&Event::Stored(stored(&hashes, None, &tokens)), 8);
        assert_eq!((blocks.count(), changes.list.len()), (8, 8));
        assert_eq!(changes.left_out, Some(LeftOut::Bound));
        // The kinds of groups are bounded too.
        for group in 0..1_000 {
            blocks.take(&of_group(group, Some(Attention::Other), &[], &[]), 8);
        }
        assert_eq!(blocks.groups.len(), GROUPS_MAX);
    }

    #[test]
    fn a_gap_and_a_new_beginning_are_noticed() {
        let mut blocks = Blocks::default();
        let heard: Vec<_> = [5, 6, 6, 7, 9, 10, 0, 1].map(|sequence| blocks.heard(sequence)).into();
        use Heard::{Gap, InOrder, Repeated};
        assert_eq!(heard, [InOrder, InOrder, Repeated, InOrder, Gap, InOrder, Gap, InOrder]);
    }
}
