//! The tier index: where blocks are, which are evicted, and that no copy in use is ever reused.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn hash(n: u8) -> BlockHash {
    BlockHash([n; 32])
}

fn tier_index(host_blocks: usize, disk_blocks: usize) -> TierIndex {
    TierIndex::new(TierConfig { host_blocks, disk_blocks })
}

/// Stores a block. Its write, if it gets one, succeeds.
fn store(index: &mut TierIndex, n: u8) {
    index.begin_store(hash(n)).expect("a slot");
    if let Some(write) = index.end_store(hash(n), OrderOutcome::Complete) {
        index.end_write(hash(n), &write.evict, OrderOutcome::Complete);
    }
}

#[test]
fn the_least_recently_used_block_makes_room_in_the_host_tier() {
    let mut index = tier_index(2, 0);
    store(&mut index, 1);
    store(&mut index, 2);
    let from = index.begin_load(hash(1)).expect("it is there");
    index.end_load(hash(1), from, LoadOutcome::Complete);
    store(&mut index, 3);
    assert_eq!([1, 2, 3].map(|n| index.prefix_len(&[hash(n)])), [1, 0, 1]);
    assert_eq!(index.counts(Tier::Host).evicted, 1);
}

#[test]
fn the_tail_of_a_prefix_is_evicted_first() {
    let mut index = tier_index(3, 0);
    for n in 1..=3 {
        store(&mut index, n);
    }
    index.touch(&[1, 2, 3].map(hash));
    store(&mut index, 4);
    assert_eq!([1, 2, 3].map(|n| index.prefix_len(&[hash(n)])), [1, 1, 0]);
}

#[test]
fn blocks_evicted_from_the_host_tier_are_loaded_from_disk() {
    let mut index = tier_index(1, 4);
    store(&mut index, 1);
    store(&mut index, 2);
    let Some(LoadSource::Disk { slot: Some(slot) }) = index.begin_load(hash(1)) else {
        panic!("from the disk")
    };
    index.end_load(hash(1), LoadSource::Disk { slot: Some(slot) }, LoadOutcome::Complete);
    assert!(matches!(index.begin_load(hash(1)), Some(LoadSource::Host(again)) if again == slot));
}

#[test]
fn a_block_that_is_read_or_written_is_never_evicted() {
    let mut index = tier_index(1, 1);
    let slot = index.begin_store(hash(1)).expect("a slot");
    assert_eq!(index.begin_store(hash(2)), None, "it is being filled");
    let write = index.end_store(hash(1), OrderOutcome::Complete).expect("to disk");
    assert_eq!((write.slot, index.begin_store(hash(2))), (slot, None), "it is being written");
    index.end_write(hash(1), &write.evict, OrderOutcome::Complete);
    let from = index.begin_load(hash(1)).expect("there");
    assert_eq!(index.begin_store(hash(2)), None, "it is being read");
    index.end_load(hash(1), from, LoadOutcome::Complete);
    assert_eq!(index.begin_store(hash(2)), Some(slot));
}

#[test]
fn a_full_disk_tier_deletes_its_oldest_file_with_the_next_write() {
    let mut index = tier_index(4, 2);
    for n in 1..=2 {
        store(&mut index, n);
    }
    index.begin_store(hash(3)).expect("a slot");
    let write = index.end_store(hash(3), OrderOutcome::Complete).expect("to disk");
    assert_eq!(write.evict, [hash(1)]);
    index.end_write(hash(3), &write.evict, OrderOutcome::Failed);
    index.begin_store(hash(4)).expect("a slot");
    let write = index.end_store(hash(4), OrderOutcome::Complete).expect("to disk");
    assert_eq!(write.evict, [hash(1), hash(3)], "still pending, with the rest of the failed write");
    index.end_write(hash(4), &write.evict, OrderOutcome::Complete);
    assert_eq!(index.counts(Tier::Disk).blocks, 2);
}

#[test]
fn a_missing_file_is_not_found_even_while_another_load_reads_it() {
    let mut index = tier_index(0, 4);
    index.adopt([hash(1)]);
    let (one, two) = (index.begin_load(hash(1)).expect("a"), index.begin_load(hash(1)).expect("b"));
    index.end_load(hash(1), one, LoadOutcome::Lost);
    assert_eq!(index.prefix_len(&[hash(1)]), 0);
    index.end_load(hash(1), two, LoadOutcome::Lost);
    assert!(!index.contains(hash(1)), "it can be stored again");
    store(&mut index, 1);
    assert_eq!(index.prefix_len(&[hash(1)]), 1);
}

#[test]
fn a_suspended_disk_is_neither_written_nor_searched() {
    let mut index = tier_index(1, 4);
    store(&mut index, 1);
    store(&mut index, 2);
    index.set_disk_suspended(true);
    assert_eq!([1, 2].map(|n| index.prefix_len(&[hash(n)])), [0, 1]);
    index.begin_store(hash(3)).expect("a slot");
    assert_eq!(index.end_store(hash(3), OrderOutcome::Complete), None);
    assert!(index.lacks_file(hash(3)));
    index.set_disk_suspended(false);
    assert_eq!(index.prefix_len(&[hash(1)]), 1);
}

#[test]
fn adopted_files_are_bounded_and_the_newest_stay() {
    let mut index = tier_index(0, 2);
    index.adopt((1..=4).map(hash));
    assert_eq!([1, 2, 3, 4].map(|n| index.prefix_len(&[hash(n)])), [0, 0, 1, 1]);
    index.begin_store(hash(9)).expect("a staging slot");
    assert_eq!(
        index.end_store(hash(9), OrderOutcome::Complete).expect("to disk").evict,
        [hash(1), hash(2), hash(3)]
    );
}

#[test]
fn a_backlog_of_deletions_goes_before_the_next_write() {
    let mut index = tier_index(0, 100);
    index.adopt((0..100).map(hash));
    index.clear();
    index.begin_store(hash(200)).expect("a staging slot");
    assert!(
        index.end_store(hash(200), OrderOutcome::Complete).is_some(),
        "there is space besides the pending deletes"
    );
    let pending = index.begin_delete().expect("many are pending");
    assert_eq!((pending.len(), index.begin_delete()), (100, None));
    index.end_delete(&pending, OrderOutcome::Failed);
    let pending = index.begin_delete().expect("they are pending until it is done");
    index.end_delete(&pending, OrderOutcome::Complete);
    assert_eq!(index.begin_delete(), None);
}

#[test]
fn cleared_files_are_deleted_also_below_a_batch() {
    let mut index = tier_index(2, 8);
    index.adopt((0..3).map(hash));
    assert_eq!(index.begin_delete(), None);
    index.clear();
    let pending = index.begin_delete().expect("cleared files are deleted");
    index.end_delete(&pending, OrderOutcome::Complete);
    assert_eq!((pending.len(), index.begin_delete()), (3, None));
}

#[test]
fn blocks_in_use_at_a_clear_are_dropped_after_their_use() {
    let mut index = tier_index(2, 2);
    store(&mut index, 1);
    let from = index.begin_load(hash(1)).expect("there");
    index.begin_store(hash(2)).expect("a slot");
    index.clear();
    assert_eq!(index.prefix_len(&[hash(1)]), 0);
    assert_eq!(index.end_store(hash(2), OrderOutcome::Complete), None);
    index.end_load(hash(1), from, LoadOutcome::Complete);
    assert_eq!((index.counts(Tier::Host).blocks, index.counts(Tier::Disk).blocks), (0, 0));
    assert!(!index.contains(hash(1)) && !index.contains(hash(2)));
}

#[derive(Debug)]
enum PendingTransfer {
    Store(BlockHash, HostSlot),
    Write(BlockHash, WritePlan),
    Load(BlockHash, LoadSource),
    Delete(Vec<BlockHash>),
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Random stores, loads, endings of both kinds, suspensions and clears. No slot is used twice: one order at most
    /// writes a slot, and then none reads it. At the end no copy is in use.
    #[test]
    fn no_slot_is_ever_used_twice(
        sizes in (0_usize..4, 0_usize..4),
        steps in prop::collection::vec((0_u8..9, 0_u8..6, 0_usize..8, 0_u8..4), 1..200),
    ) {
        let (host, disk) = sizes;
        let mut index = tier_index(host, disk);
        let mut orders: Vec<PendingTransfer> = Vec::new();
        let end = |index: &mut TierIndex, order: PendingTransfer, how: u8| -> Vec<PendingTransfer> {
            let ended = if how == 0 { OrderOutcome::Failed } else { OrderOutcome::Complete };
            match order {
                PendingTransfer::Store(hash, _) => {
                    index.end_store(hash, ended).map(|write| PendingTransfer::Write(hash, write)).into_iter().collect()
                }
                PendingTransfer::Write(hash, write) => { index.end_write(hash, &write.evict, ended); vec![] }
                PendingTransfer::Load(hash, from) => {
                    let how = match (how, from) {
                        (0, _) => LoadOutcome::Failed,
                        (1, LoadSource::Disk { .. }) => LoadOutcome::Lost,
                        _ => LoadOutcome::Complete,
                    };
                    index.end_load(hash, from, how);
                    vec![]
                }
                PendingTransfer::Delete(hashes) => { index.end_delete(&hashes, ended); vec![] }
            }
        };
        for (kind, n, pick, how) in steps {
            match kind {
                0..=2 => if !index.contains(hash(n)) && let Some(slot) = index.begin_store(hash(n)) {
                    orders.push(PendingTransfer::Store(hash(n), slot));
                },
                3..=4 => if let Some(from) = index.begin_load(hash(n)) { orders.push(PendingTransfer::Load(hash(n), from)) },
                5..=6 => if !orders.is_empty() {
                    let order = orders.swap_remove(pick % orders.len());
                    let more = end(&mut index, order, how);
                    orders.extend(more);
                },
                7 => index.set_disk_suspended(how == 0),
                _ => {
                    if how == 0 { index.clear() }
                    orders.extend(index.begin_delete().map(PendingTransfer::Delete));
                }
            }
            // The orders that read and write each slot now.
            let mut writers: BTreeMap<HostSlot, usize> = BTreeMap::new();
            let mut readers: BTreeMap<HostSlot, BlockHash> = BTreeMap::new();
            for order in &orders {
                match order {
                    PendingTransfer::Store(_, slot) | PendingTransfer::Load(_, LoadSource::Disk { slot: Some(slot) }) => {
                        *writers.entry(*slot).or_default() += 1;
                    }
                    PendingTransfer::Write(hash, WritePlan { slot, .. }) | PendingTransfer::Load(hash, LoadSource::Host(slot)) => {
                        let before = readers.insert(*slot, *hash);
                        prop_assert!(before.is_none_or(|before| before == *hash));
                    }
                    PendingTransfer::Load(_, LoadSource::Disk { slot: None }) | PendingTransfer::Delete(_) => {}
                }
            }
            prop_assert!(writers.iter().all(|(slot, count)| *count == 1 && !readers.contains_key(slot)));
            prop_assert!(index.counts(Tier::Disk).blocks <= disk);
            prop_assert!(index.counts(Tier::Host).blocks <= index.config.slots());
        }
        while let Some(order) = orders.pop() {
            let more = end(&mut index, order, 1);
            orders.extend(more);
        }
        prop_assert_eq!(index.in_use(), 0);
        index.clear();
        prop_assert_eq!((index.counts(Tier::Host).blocks, index.counts(Tier::Disk).blocks), (0, 0));
        prop_assert!(index.entries.is_empty() && index.host.idle.is_empty() && index.disk.idle.is_empty());
    }
}
