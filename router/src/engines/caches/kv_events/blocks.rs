//! Translation of an engine's block names to the router's.
//!
//! The router's name of a block is the chained hash of all tokens up to its end. So it can be computed from a
//! prompt as well as from events. A block with an unknown parent has no name, and neither have the blocks that
//! follow it.

use std::collections::HashMap;

use super::batch::{AttentionKind, KvEvent, StoredBlocks};
use crate::engines::caches::prefix_index::CacheChange;
use crate::message::block_chain::{chain, root};
use crate::metrics::kv_events::IgnoredEventReason;

/// Maximum tokens of one block. No engine has larger ones.
const BLOCK_TOKENS_MAX: usize = 65_536;
/// Maximum cache groups of one engine whose kind is stored. Models have fewer than ten.
const GROUPS_MAX: usize = 64;

/// One engine's blocks.
#[derive(Debug, Default)]
pub(super) struct EngineBlocks {
    /// From the engine's name to the router's.
    names: HashMap<u64, u64>,
    /// The kinds of the engine's cache groups, if the engine sends them. Two groups may use one name for a block.
    groups: HashMap<u64, AttentionKind>,
    /// The sequence number of the last message.
    last: Option<u64>,
}

/// The place of a message in the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SequenceCheck {
    /// The next message.
    InOrder,
    /// Messages are missing before this one, or the engine has restarted.
    Gap,
    /// A message that was received before.
    Duplicate,
}

/// Changes of an engine's known cache by one event.
#[derive(Debug, Default, PartialEq)]
pub(super) struct CacheUpdate {
    /// All earlier knowledge is invalid.
    pub forget: bool,
    pub list: Vec<CacheChange>,
    /// The size of the stored blocks.
    pub block_size: Option<usize>,
    /// Why the event, or a part of it, changes nothing.
    pub left_out: Option<IgnoredEventReason>,
}

impl EngineBlocks {
    /// Checks and stores a message's sequence number.
    pub(super) fn check_sequence(&mut self, sequence: u64) -> SequenceCheck {
        let check = match self.last {
            None => SequenceCheck::InOrder,
            Some(last) if sequence == last.wrapping_add(1) => SequenceCheck::InOrder,
            Some(last) if sequence == last => SequenceCheck::Duplicate,
            Some(_) => SequenceCheck::Gap,
        };
        self.last = Some(sequence);
        check
    }

    /// Number of named blocks.
    pub(super) fn count(&self) -> usize {
        self.names.len()
    }

    /// Applies an event. At most `most` blocks have names.
    pub(super) fn take(&mut self, event: &KvEvent, most: usize) -> CacheUpdate {
        let mut changes = CacheUpdate::default();
        changes.left_out = self.apply(event, most, &mut changes).err();
        changes
    }

    /// Forgets all events of the engine.
    pub(super) fn forget(&mut self) {
        (self.names, self.groups) = Default::default();
    }

    fn apply(
        &mut self,
        event: &KvEvent,
        most: usize,
        changes: &mut CacheUpdate,
    ) -> Result<(), IgnoredEventReason> {
        match event {
            KvEvent::Stored(stored) => self.store(stored, most, changes),
            KvEvent::Removed { hashes, group } => {
                if !self.is_full_attention(*group) {
                    return Err(IgnoredEventReason::Attention);
                }
                let names = hashes.iter().filter_map(|hash| self.names.remove(hash));
                changes.list.extend(names.map(CacheChange::Removed));
                Ok(())
            }
            KvEvent::Cleared => {
                self.names = HashMap::new();
                changes.forget = true;
                Ok(())
            }
            KvEvent::UnreadableRemoval => {
                self.forget();
                changes.forget = true;
                Err(IgnoredEventReason::Malformed)
            }
            KvEvent::LeftOut(reason) => Err(*reason),
        }
    }

    /// Whether any prompt that begins with blocks of a group can use them. For an engine that sends no kinds, the
    /// first group has full attention.
    fn is_full_attention(&self, group: Option<u64>) -> bool {
        match group {
            None => true,
            Some(group) if self.groups.is_empty() => group == 0,
            Some(group) => self.groups.get(&group) == Some(&AttentionKind::Full),
        }
    }

    fn store(
        &mut self,
        stored: &StoredBlocks,
        most: usize,
        changes: &mut CacheUpdate,
    ) -> Result<(), IgnoredEventReason> {
        if let Some(attention) = stored.attention {
            let group = stored.group.unwrap_or(0);
            if self.groups.len() < GROUPS_MAX || self.groups.contains_key(&group) {
                self.groups.insert(group, attention);
            }
        }
        if stored.attention == Some(AttentionKind::Other) || !self.is_full_attention(stored.group) {
            return Err(IgnoredEventReason::Attention);
        }
        if stored.has_extra_keys {
            return Err(IgnoredEventReason::ExtraKeys);
        }
        let size = stored.block_size;
        if !(1..=BLOCK_TOKENS_MAX).contains(&size)
            || stored.hashes.len().checked_mul(size) != Some(stored.tokens.len())
        {
            return Err(IgnoredEventReason::Malformed);
        }
        let parent = match stored.parent {
            None => root(size),
            Some(parent) => *self.names.get(&parent).ok_or(IgnoredEventReason::Parent)?,
        };
        changes.block_size = Some(size);
        for (&hash, name) in stored.hashes.iter().zip(chain(parent, &stored.tokens, size)) {
            if self.names.len() >= most && !self.names.contains_key(&hash) {
                return Err(IgnoredEventReason::Bound);
            }
            if let Some(other) = self.names.insert(hash, name).filter(|other| *other != name) {
                // The engine uses this name for other tokens now.
                changes.list.push(CacheChange::Removed(other));
            }
            changes.list.push(CacheChange::Added(name));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::caches::prefix_index::PrefixIndex;
    use crate::message::block_chain::links;

    fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> StoredBlocks {
        StoredBlocks {
            hashes: hashes.to_vec(),
            parent,
            tokens: tokens.to_vec(),
            block_size: 2,
            ..StoredBlocks::default()
        }
    }

    fn of_group(group: u64, attention: Option<AttentionKind>, hashes: &[u64], tokens: &[u32]) -> KvEvent {
        KvEvent::Stored(StoredBlocks { group: Some(group), attention, ..stored(hashes, None, tokens) })
    }

    fn removed(hashes: &[u64], group: Option<u64>) -> KvEvent {
        KvEvent::Removed { hashes: hashes.to_vec(), group }
    }

    /// Two engines' blocks, and the index that they change.
    struct BlockFixture {
        index: PrefixIndex,
        of: [EngineBlocks; 2],
    }

    impl BlockFixture {
        fn new() -> Self {
            Self { index: PrefixIndex::new(100, 100), of: Default::default() }
        }

        /// Returns why each event of a message was ignored.
        fn take(&mut self, engine: u32, events: Vec<KvEvent>) -> Vec<IgnoredEventReason> {
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
    fn equal_tokens_match_across_block_names_of_engines() {
        let mut fixture = BlockFixture::new();
        let events =
            [stored(&[11, 12], None, &[1, 2, 3, 4]), stored(&[13], Some(12), &[5, 6])].map(KvEvent::Stored);
        assert_eq!(fixture.take(0, events.into()), []);
        let events = [stored(&[901], None, &[1, 2]), stored(&[905], Some(777), &[5, 6])].map(KvEvent::Stored);
        assert_eq!(fixture.take(1, events.into()), [IgnoredEventReason::Parent]);
        let prompt = links(&[1, 2, 3, 4, 5, 6, 7], 2, 100);
        assert_eq!(prompt.len(), 3, "whole blocks");
        assert_eq!((fixture.index.length(0, &prompt), fixture.index.length(1, &prompt)), (3, 1));
        assert_eq!(fixture.index.length(0, &links(&[1, 2, 3, 4], 4, 100)), 0, "another block size");
        fixture.take(0, vec![removed(&[13, 99], None)]);
        assert_eq!(fixture.index.length(0, &prompt), 2);
        let again = KvEvent::Stored(stored(&[21], None, &[1, 2]));
        fixture.take(0, vec![KvEvent::Stored(stored(&[14], None, &[9, 9])), KvEvent::Cleared, again]);
        assert_eq!((fixture.index.length(0, &prompt), fixture.index.length(1, &prompt)), (1, 1));
        assert_eq!(fixture.index.len(), 2);
    }

    #[test]
    fn only_groups_of_kind_full_attention_count() {
        use AttentionKind::{Full, Other};
        let prompt = links(&[1, 2, 3, 4], 2, 100);
        let mut fixture = BlockFixture::new();
        // A window in group 0 and full attention in group 1, with the same names for the same tokens.
        let both = |kinds: [Option<AttentionKind>; 2]| {
            vec![of_group(0, kinds[0], &[1, 2], &[1, 2, 3, 4]), of_group(1, kinds[1], &[1, 2], &[1, 2, 3, 4])]
        };
        assert_eq!(fixture.take(0, both([Some(Other), Some(Full)])), [IgnoredEventReason::Attention]);
        assert_eq!(fixture.index.length(0, &prompt), 2);
        assert_eq!(fixture.take(0, vec![removed(&[1, 2], Some(0))]), [IgnoredEventReason::Attention]);
        assert_eq!(fixture.index.length(0, &prompt), 2, "the window moved on, and full attention holds all");
        assert_eq!(fixture.take(0, vec![removed(&[2], Some(1))]), []);
        assert_eq!(fixture.index.length(0, &prompt), 1);
        // A state in the only group.
        let state = of_group(0, Some(Other), &[1, 2], &[1, 2, 3, 4]);
        assert_eq!(fixture.take(1, vec![state, removed(&[1], Some(0))]), [IgnoredEventReason::Attention; 2]);
        assert_eq!(fixture.index.length(1, &prompt), 0);
        // An older version sends no kinds.
        let mut fixture = BlockFixture::new();
        assert_eq!(fixture.take(0, both([None, None])), [IgnoredEventReason::Attention]);
        assert_eq!(fixture.take(0, vec![removed(&[1, 2], Some(1))]), [IgnoredEventReason::Attention]);
        assert_eq!(fixture.index.length(0, &prompt), 2);
        // A removal in a group whose kind is unknown, of an engine that sent another group's kind.
        let full = of_group(1, Some(Full), &[1, 2], &[1, 2, 3, 4]);
        assert_eq!(fixture.take(1, vec![full, removed(&[1, 2], Some(0))]), [IgnoredEventReason::Attention]);
        assert_eq!(fixture.index.length(1, &prompt), 2);
    }

    #[test]
    fn blocks_without_a_parent_or_with_a_wrong_length_are_ignored() {
        let mut fixture = BlockFixture::new();
        let zero = StoredBlocks { hashes: vec![1], ..StoredBlocks::default() };
        let apart = StoredBlocks { has_extra_keys: true, ..stored(&[1], None, &[1, 2]) };
        let events = [zero, apart, stored(&[1, 2], None, &[1, 2, 3]), stored(&[3], Some(1), &[3, 4])]
            .map(KvEvent::Stored);
        use IgnoredEventReason::{ExtraKeys, Malformed, Parent};
        assert_eq!(fixture.take(0, events.into()), [Malformed, ExtraKeys, Malformed, Parent]);
        assert_eq!(fixture.index.len(), 0);
    }

    #[test]
    fn a_reused_block_name_means_its_latest_tokens_only() {
        let mut fixture = BlockFixture::new();
        let first = KvEvent::Stored(stored(&[1], None, &[1, 2]));
        fixture.take(0, vec![first, KvEvent::Stored(stored(&[1], None, &[3, 4]))]);
        let held = |fixture: &BlockFixture, tokens: &[u32]| fixture.index.length(0, &links(tokens, 2, 9));
        assert_eq!((held(&fixture, &[1, 2]), held(&fixture, &[3, 4])), (0, 1));
        fixture.take(0, vec![removed(&[1], None)]);
        assert_eq!(fixture.index.len(), 0);
    }

    #[test]
    fn an_unreadable_removal_clears_blocks_and_group_kinds() {
        let mut fixture = BlockFixture::new();
        let window = of_group(0, Some(AttentionKind::Other), &[1], &[1, 2]);
        let full = of_group(1, Some(AttentionKind::Full), &[1], &[1, 2]);
        assert_eq!(
            fixture.take(0, vec![window, full, KvEvent::UnreadableRemoval]),
            [IgnoredEventReason::Attention, IgnoredEventReason::Malformed]
        );
        assert_eq!(fixture.index.len(), 0);
        // Another version at the same address sends no kinds.
        assert_eq!(fixture.take(0, vec![of_group(0, None, &[1], &[1, 2])]), []);
        assert_eq!(fixture.index.len(), 1);
    }

    #[test]
    fn the_known_blocks_are_bounded() {
        let mut blocks = EngineBlocks::default();
        let hashes: Vec<u64> = (0..50).collect();
        let tokens: Vec<u32> = (0..100).collect();
        let changes = blocks.take(&KvEvent::Stored(stored(&hashes, None, &tokens)), 8);
        assert_eq!((blocks.count(), changes.list.len()), (8, 8));
        assert_eq!(changes.left_out, Some(IgnoredEventReason::Bound));
        // The kinds of groups are bounded too.
        for group in 0..1_000 {
            blocks.take(&of_group(group, Some(AttentionKind::Other), &[], &[]), 8);
        }
        assert_eq!(blocks.groups.len(), GROUPS_MAX);
    }

    #[test]
    fn a_gap_and_a_new_beginning_are_noticed() {
        let mut blocks = EngineBlocks::default();
        let checks: Vec<_> = [5, 6, 6, 7, 9, 10, 0, 1].map(|sequence| blocks.check_sequence(sequence)).into();
        use SequenceCheck::{Duplicate, Gap, InOrder};
        assert_eq!(checks, [InOrder, InOrder, Duplicate, InOrder, Gap, InOrder, Gap, InOrder]);
    }
}
