//! Translation of an engine's block names to the router's.
//!
//! The router's name of a block is the chained hash of all tokens up to its end, from a root that contains the
//! prompt's adapter and salt. So it can be computed from a prompt as well as from events. A block with an unknown
//! parent has no name, and neither have the blocks that follow it.
//!
//! A block is cached while it is on some medium of the engine. Events of another medium than the device may name
//! blocks without their tokens, or with tokens and without their extra keys. Without the keys a salted block looks like
//! one without a salt, so these events name no block: they add a medium to blocks with a name.

use std::collections::HashMap;

use super::batch::{AttentionKind, KvEvent, Medium, StoredBlocks};
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
    /// By the engine's names.
    names: HashMap<u64, NamedBlock>,
    /// The kinds of the engine's cache groups, if the engine sends them. Two groups may use one name for a block.
    groups: HashMap<u64, AttentionKind>,
    /// The engine sends the extra keys of blocks on the device, so an event without them is incomplete.
    sends_keys: bool,
    /// The sequence number of the last message.
    last: Option<u64>,
}

/// A block of an engine.
#[derive(Clone, Copy, Debug)]
struct NamedBlock {
    /// The router's name.
    name: u64,
    /// Where it is; at least on one medium.
    media: BlockMedia,
}

/// The media that have a block. vLLM repeats the store of a block on the device without a removal for each. Each store
/// on another medium has a removal, and chunks of several blocks announce the blocks that they share once each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct BlockMedia {
    device: bool,
    /// Stores without a removal. A count stops at its maximum, and the block may then be forgotten too early.
    host: u16,
    storage: u16,
}

impl BlockMedia {
    fn add(&mut self, medium: Medium) {
        match medium {
            Medium::Device => self.device = true,
            Medium::Host => self.host = self.host.saturating_add(1),
            Medium::Storage => self.storage = self.storage.saturating_add(1),
        }
    }

    /// Removes one store of a medium, or all of them.
    fn remove(&mut self, medium: Medium, all: bool) {
        let rest = |count: u16| if all { 0 } else { count.saturating_sub(1) };
        match medium {
            Medium::Device => self.device = false,
            Medium::Host => self.host = rest(self.host),
            Medium::Storage => self.storage = rest(self.storage),
        }
    }
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
    /// The adapter of the stored blocks.
    pub adapter: Option<Box<[u8]>>,
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
        (self.names, self.groups, self.sends_keys) = Default::default();
    }

    fn apply(
        &mut self,
        event: &KvEvent,
        most: usize,
        changes: &mut CacheUpdate,
    ) -> Result<(), IgnoredEventReason> {
        match event {
            KvEvent::Stored(stored) => self.store(stored, most, changes),
            KvEvent::Removed { hashes, group, medium } => {
                if !self.is_full_attention(*group) {
                    return Err(IgnoredEventReason::Attention);
                }
                // With several such groups a prompt needs the block of each, so the first removal counts.
                let full = self.groups.values().filter(|kind| **kind == AttentionKind::Full).count();
                let removed = hashes.iter().filter_map(|hash| self.remove(*hash, *medium, full > 1));
                changes.list.extend(removed.map(CacheChange::Removed));
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
        if stored.medium != Medium::Device && stored.tokens.is_empty() {
            return self.copy(&stored.hashes, stored.medium);
        }
        let size = stored.block_size;
        if !(1..=BLOCK_TOKENS_MAX).contains(&size)
            || stored.hashes.len().checked_mul(size) != Some(stored.tokens.len())
        {
            return Err(IgnoredEventReason::Malformed);
        }
        let on_device = stored.medium == Medium::Device;
        if stored.extra_keys.is_given() {
            self.sends_keys |= on_device;
        } else if !on_device || self.sends_keys {
            return self.copy(&stored.hashes, stored.medium);
        }
        let (keys, named) = stored.extra_keys.of_prompt(stored.hashes.len(), stored.parent.is_none());
        let parent = match stored.parent {
            _ if named == 0 && !stored.hashes.is_empty() => return Err(IgnoredEventReason::ExtraKeys),
            None => root(size, keys),
            Some(parent) => self.names.get(&parent).ok_or(IgnoredEventReason::Parent)?.name,
        };
        changes.block_size = Some(size);
        changes.adapter = keys.adapter.map(Into::into);
        for (&hash, name) in stored.hashes[..named].iter().zip(chain(parent, &stored.tokens, size)) {
            if self.names.len() >= most && !self.names.contains_key(&hash) {
                return Err(IgnoredEventReason::Bound);
            }
            let unplaced = NamedBlock { name, media: BlockMedia::default() };
            let block = self.names.entry(hash).or_insert(unplaced);
            if block.name != name {
                // The engine uses this name for other tokens now.
                changes.list.push(CacheChange::Removed(block.name));
                *block = unplaced;
            }
            block.media.add(stored.medium);
            changes.list.push(CacheChange::Added(name));
        }
        if named < stored.hashes.len() { Err(IgnoredEventReason::ExtraKeys) } else { Ok(()) }
    }

    /// Blocks are on a further medium.
    fn copy(&mut self, hashes: &[u64], medium: Medium) -> Result<(), IgnoredEventReason> {
        let mut all = true;
        for hash in hashes {
            match self.names.get_mut(hash) {
                Some(block) => block.media.add(medium),
                None => all = false,
            }
        }
        if all { Ok(()) } else { Err(IgnoredEventReason::Parent) }
    }

    /// A block was removed from a medium. Returns the router's name of a block that is on none.
    fn remove(&mut self, hash: u64, medium: Medium, all: bool) -> Option<u64> {
        let block = self.names.get_mut(&hash)?;
        block.media.remove(medium, all);
        if block.media == BlockMedia::default() {
            self.names.remove(&hash).map(|block| block.name)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::caches::kv_events::extra_keys::{ExtraKey, ExtraKeys};
    use crate::engines::caches::prefix_index::PrefixIndex;
    use crate::message::block_chain::{self, BlockKeys};

    fn links(tokens: &[u32], size: usize, most: usize) -> Vec<u64> {
        block_chain::links(tokens, root(size, BlockKeys::default()), size, most)
    }

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
        removed_from(Medium::Device, hashes, group)
    }

    fn removed_from(medium: Medium, hashes: &[u64], group: Option<u64>) -> KvEvent {
        KvEvent::Removed { hashes: hashes.to_vec(), group, medium }
    }

    /// The keys of so many blocks that have none.
    fn no_keys(blocks: usize) -> ExtraKeys {
        ExtraKeys::of(None, vec![Vec::new(); blocks])
    }

    /// Blocks with tokens and without their keys, as vLLM's offloading connector announces them.
    fn offloaded(medium: Medium, hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> KvEvent {
        KvEvent::Stored(StoredBlocks { medium, ..stored(hashes, parent, tokens) })
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
        let image = ExtraKeys::of(None, vec![vec![ExtraKey::Other]]);
        let apart = StoredBlocks { extra_keys: image, ..stored(&[1], None, &[1, 2]) };
        let events = [zero, apart, stored(&[1, 2], None, &[1, 2, 3]), stored(&[3], Some(1), &[3, 4])]
            .map(KvEvent::Stored);
        use IgnoredEventReason::{ExtraKeys as Keys, Malformed, Parent};
        assert_eq!(fixture.take(0, events.into()), [Malformed, Keys, Malformed, Parent]);
        assert_eq!(fixture.index.len(), 0);
    }

    #[test]
    fn prompts_with_an_adapter_or_a_salt_have_blocks_of_their_own() {
        let mut fixture = BlockFixture::new();
        let text = |text: &str| ExtraKey::Text(text.as_bytes().into());
        let tokens = [1, 2, 3, 4];
        let of = |adapter: Option<&str>, first: Vec<ExtraKey>, second: Vec<ExtraKey>, hashes: &[u64]| {
            KvEvent::Stored(StoredBlocks {
                extra_keys: ExtraKeys::of(adapter, vec![first, second]),
                ..stored(hashes, None, &tokens)
            })
        };
        let both = vec![text("sql"), text("s")];
        let events = vec![
            of(None, vec![text("s")], vec![], &[1, 2]),
            of(Some("sql"), both, vec![text("sql")], &[3, 4]),
            KvEvent::Stored(StoredBlocks { extra_keys: no_keys(1), ..stored(&[5], Some(4), &[5, 6]) }),
        ];
        assert_eq!(fixture.take(0, events), []);
        let held = |adapter: Option<&str>, salt: Option<&str>| {
            let keys = BlockKeys { adapter: adapter.map(str::as_bytes), salt: salt.map(str::as_bytes) };
            let links = block_chain::links(&[1, 2, 3, 4, 5, 6], root(2, keys), 2, 9);
            fixture.index.length(0, &links)
        };
        assert_eq!((held(None, Some("s")), held(Some("sql"), Some("s"))), (2, 3));
        assert_eq!((held(None, None), held(Some("sql"), None), held(None, Some("t"))), (0, 0, 0));
        // An image in the second block ends the part that counts.
        let image = of(None, vec![], vec![ExtraKey::Other], &[7, 8]);
        let behind = KvEvent::Stored(stored(&[9], Some(8), &[5, 6]));
        use IgnoredEventReason::{ExtraKeys as Keys, Parent};
        assert_eq!(fixture.take(1, vec![image, behind]), [Keys, Parent]);
        assert_eq!(fixture.index.length(1, &links(&[1, 2, 3, 4], 2, 9)), 1);
    }

    #[test]
    fn a_block_is_cached_while_some_medium_has_it() {
        let mut fixture = BlockFixture::new();
        let prompt = links(&[1, 2, 3, 4], 2, 9);
        let copy = |hashes: &[u64]| {
            KvEvent::Stored(StoredBlocks { medium: Medium::Host, ..stored(hashes, None, &[]) })
        };
        let first = KvEvent::Stored(stored(&[1, 2], None, &[1, 2, 3, 4]));
        assert_eq!(fixture.take(0, vec![first, copy(&[1])]), []);
        fixture.take(0, vec![removed(&[1, 2], None)]);
        assert_eq!(fixture.index.length(0, &prompt), 1, "the first is on the host");
        fixture.take(0, vec![removed_from(Medium::Host, &[1, 2], None)]);
        assert_eq!((fixture.index.len(), fixture.of[0].count()), (0, 0));
        // Without tokens an unknown block has no name.
        assert_eq!(fixture.take(0, vec![copy(&[3])]), [IgnoredEventReason::Parent]);
        // With tokens and keys it has one, on any medium.
        let on_disk =
            StoredBlocks { medium: Medium::Storage, extra_keys: no_keys(1), ..stored(&[3], None, &[1, 2]) };
        assert_eq!(fixture.take(0, vec![KvEvent::Stored(on_disk)]), []);
        assert_eq!(fixture.index.length(0, &prompt), 1);
    }

    #[test]
    fn an_event_without_keys_names_no_block_and_renames_none() {
        use IgnoredEventReason::Parent;
        for salt in [None, Some("s")] {
            for medium in [Medium::Host, Medium::Storage] {
                let mut fixture = BlockFixture::new();
                let keys = BlockKeys { adapter: None, salt: salt.map(str::as_bytes) };
                let salted = block_chain::links(&[1, 2, 3, 4, 5, 6], root(2, keys), 2, 9);
                let plain = links(&[1, 2, 3, 4, 5, 6], 2, 9);
                let own = salt.map(|salt| ExtraKey::Text(salt.as_bytes().into()));
                let extra_keys = ExtraKeys::of(None, vec![own.into_iter().collect(), Vec::new()]);
                let on_device =
                    KvEvent::Stored(StoredBlocks { extra_keys, ..stored(&[1, 2], None, &[1, 2, 3, 4]) });
                // The medium comes first: the blocks are unknown.
                let chunk = || offloaded(medium, &[1, 2], None, &[1, 2, 3, 4]);
                assert_eq!(fixture.take(0, vec![chunk()]), [Parent]);
                assert_eq!((fixture.index.len(), fixture.of[0].count()), (0, 0));
                // The device names them, and the medium keeps these names.
                assert_eq!(fixture.take(0, vec![on_device, chunk()]), []);
                assert_eq!(fixture.index.length(0, &salted), 2);
                // An unknown block behind a known one may have an image.
                let next = offloaded(medium, &[3], Some(2), &[5, 6]);
                assert_eq!(fixture.take(0, vec![next]), [Parent]);
                assert_eq!(fixture.take(0, vec![removed(&[1, 2], None)]), []);
                assert_eq!(fixture.index.length(0, &salted), 2, "the medium has them");
                if salt.is_some() {
                    assert_eq!(fixture.index.length(0, &plain), 0, "no request without a salt finds them");
                }
                fixture.take(0, vec![removed_from(medium, &[1, 2], None)]);
                assert_eq!((fixture.index.len(), fixture.of[0].count()), (0, 0));
            }
        }
    }

    #[test]
    fn a_device_event_without_keys_of_an_engine_that_sends_them_names_nothing() {
        let mut fixture = BlockFixture::new();
        let keys = ExtraKeys::of(None, vec![vec![ExtraKey::Text(b"s".as_slice().into())]]);
        let salted = KvEvent::Stored(StoredBlocks { extra_keys: keys, ..stored(&[1], None, &[1, 2]) });
        let without = [stored(&[1], None, &[1, 2]), stored(&[2], None, &[1, 2])].map(KvEvent::Stored);
        assert_eq!(fixture.take(0, vec![salted]), []);
        assert_eq!(fixture.take(0, without.into()), [IgnoredEventReason::Parent]);
        assert_eq!(fixture.index.length(0, &links(&[1, 2], 2, 9)), 0);
        let keys = BlockKeys { adapter: None, salt: Some(b"s") };
        assert_eq!(fixture.index.length(0, &block_chain::links(&[1, 2], root(2, keys), 2, 9)), 1);
    }

    #[test]
    fn a_block_of_two_chunks_is_cached_until_both_are_removed() {
        let prompt = links(&[1, 2], 2, 9);
        let both = || {
            let on_device =
                KvEvent::Stored(StoredBlocks { extra_keys: no_keys(1), ..stored(&[1], None, &[1, 2]) });
            // The device repeats its event for a request that uses the block.
            let again =
                KvEvent::Stored(StoredBlocks { extra_keys: no_keys(1), ..stored(&[1], None, &[1, 2]) });
            let chunk = || offloaded(Medium::Host, &[1], None, &[1, 2]);
            vec![on_device, again, chunk(), chunk(), removed(&[1], None)]
        };
        let mut fixture = BlockFixture::new();
        fixture.take(0, both());
        fixture.take(0, vec![removed_from(Medium::Host, &[1], None)]);
        assert_eq!(fixture.index.length(0, &prompt), 1, "the other chunk has it");
        fixture.take(0, vec![removed_from(Medium::Host, &[1], None)]);
        assert_eq!((fixture.index.len(), fixture.of[0].count()), (0, 0));
        // Of two groups with full attention, one has lost it.
        let mut fixture = BlockFixture::new();
        let kinds = [0, 1].map(|group| of_group(group, Some(AttentionKind::Full), &[], &[]));
        fixture.take(0, kinds.into());
        fixture.take(0, both());
        fixture.take(0, vec![removed_from(Medium::Host, &[1], Some(1))]);
        assert_eq!((fixture.index.len(), fixture.of[0].count()), (0, 0));
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
