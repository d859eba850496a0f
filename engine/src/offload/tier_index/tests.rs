//! The tiers' books: what is where, what makes room, and that nothing in use is ever given away.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn hash(n: u8) -> BlockHash {
    BlockHash([n; 32])
}

fn books(host_blocks: usize, disk_blocks: usize) -> TierBooks {
    TierBooks::new(TierConfig { host_blocks, disk_blocks })
}

/// Stores a block and lets its write, if it gets one, succeed.
fn store(books: &mut TierBooks, n: u8) {
    books.begin_store(hash(n)).expect("a slot");
    if let Some(write) = books.end_store(hash(n), true) {
        books.end_write(hash(n), &write.evict, true);
    }
}

#[test]
fn the_least_recently_used_block_makes_room_in_the_host_tier() {
    let mut books = books(2, 0);
    store(&mut books, 1);
    store(&mut books, 2);
    let from = books.begin_load(hash(1)).expect("it is there");
    books.end_load(hash(1), from, Loaded::Whole);
    store(&mut books, 3);
    assert_eq!([1, 2, 3].map(|n| books.run(&[hash(n)])), [1, 0, 1]);
    assert_eq!(books.counts(Tier::Host).evicted, 1);
}

#[test]
fn a_prefix_outlives_its_tail() {
    let mut books = books(3, 0);
    for n in 1..=3 {
        store(&mut books, n);
    }
    books.touch(&[1, 2, 3].map(hash));
    store(&mut books, 4);
    assert_eq!([1, 2, 3].map(|n| books.run(&[hash(n)])), [1, 1, 0]);
}

#[test]
fn what_the_host_tier_evicts_lives_on_on_disk_and_comes_back_into_a_slot() {
    let mut books = books(1, 4);
    store(&mut books, 1);
    store(&mut books, 2);
    let Some(Source::Disk { keep: Some(slot) }) = books.begin_load(hash(1)) else { panic!("from the disk") };
    books.end_load(hash(1), Source::Disk { keep: Some(slot) }, Loaded::Whole);
    assert!(matches!(books.begin_load(hash(1)), Some(Source::Host(again)) if again == slot));
}

#[test]
fn a_block_that_is_read_or_written_is_never_evicted() {
    let mut books = books(1, 1);
    let slot = books.begin_store(hash(1)).expect("a slot");
    assert_eq!(books.begin_store(hash(2)), None, "it is being filled");
    let write = books.end_store(hash(1), true).expect("to disk");
    assert_eq!((write.slot, books.begin_store(hash(2))), (slot, None), "it is being written");
    books.end_write(hash(1), &write.evict, true);
    let from = books.begin_load(hash(1)).expect("there");
    assert_eq!(books.begin_store(hash(2)), None, "it is being read");
    books.end_load(hash(1), from, Loaded::Whole);
    assert_eq!(books.begin_store(hash(2)), Some(slot));
}

#[test]
fn a_full_disk_tier_deletes_its_oldest_file_with_the_next_write_and_owes_it_until_then() {
    let mut books = books(4, 2);
    for n in 1..=2 {
        store(&mut books, n);
    }
    books.begin_store(hash(3)).expect("a slot");
    let write = books.end_store(hash(3), true).expect("to disk");
    assert_eq!(write.evict, [hash(1)]);
    books.end_write(hash(3), &write.evict, false);
    books.begin_store(hash(4)).expect("a slot");
    let write = books.end_store(hash(4), true).expect("to disk");
    assert_eq!(write.evict, [hash(1), hash(3)], "still owed, with what the failed write may have left");
    books.end_write(hash(4), &write.evict, true);
    assert_eq!(books.counts(Tier::Disk).blocks, 2);
}

#[test]
fn a_file_that_was_found_gone_is_offered_to_nobody_even_while_others_still_read_it() {
    let mut books = books(0, 4);
    books.adopt([hash(1)]);
    let (one, two) = (books.begin_load(hash(1)).expect("a"), books.begin_load(hash(1)).expect("b"));
    books.end_load(hash(1), one, Loaded::Gone);
    assert_eq!(books.run(&[hash(1)]), 0);
    books.end_load(hash(1), two, Loaded::Gone);
    assert!(!books.knows(hash(1)), "it can be stored again");
    store(&mut books, 1);
    assert_eq!(books.run(&[hash(1)]), 1);
}

#[test]
fn a_disk_that_rests_is_neither_written_nor_offered() {
    let mut books = books(1, 4);
    store(&mut books, 1);
    store(&mut books, 2);
    books.set_disk_rests(true);
    assert_eq!([1, 2].map(|n| books.run(&[hash(n)])), [0, 1]);
    books.begin_store(hash(3)).expect("a slot");
    assert_eq!(books.end_store(hash(3), true), None);
    assert!(books.lacks_file(hash(3)));
    books.set_disk_rests(false);
    assert_eq!(books.run(&[hash(1)]), 1);
}

#[test]
fn what_was_found_at_the_start_is_bounded_and_the_newest_is_kept() {
    let mut books = books(0, 2);
    books.adopt((1..=4).map(hash));
    assert_eq!([1, 2, 3, 4].map(|n| books.run(&[hash(n)])), [0, 0, 1, 1]);
    books.begin_store(hash(9)).expect("a staging slot");
    assert_eq!(books.end_store(hash(9), true).expect("to disk").evict, [hash(1), hash(2), hash(3)]);
}

#[test]
fn more_than_goes_along_with_a_write_is_deleted_first() {
    let mut books = books(0, 100);
    books.adopt((0..100).map(hash));
    books.clear();
    books.begin_store(hash(200)).expect("a staging slot");
    assert!(books.end_store(hash(200), true).is_some(), "there is room beside what is owed");
    let owed = books.begin_delete().expect("many are owed");
    assert_eq!((owed.len(), books.begin_delete()), (100, None));
    books.end_delete(&owed, false);
    let owed = books.begin_delete().expect("they are owed until it is done");
    books.end_delete(&owed, true);
    assert_eq!(books.begin_delete(), None);
}

#[test]
fn what_is_forgotten_is_deleted_also_when_it_is_little() {
    let mut books = books(2, 8);
    books.adopt((0..3).map(hash));
    assert_eq!(books.begin_delete(), None);
    books.clear();
    let owed = books.begin_delete().expect("nothing is kept that was to be forgotten");
    books.end_delete(&owed, true);
    assert_eq!((owed.len(), books.begin_delete()), (3, None));
}

#[test]
fn what_is_in_use_when_everything_is_forgotten_goes_when_it_is_not() {
    let mut books = books(2, 2);
    store(&mut books, 1);
    let from = books.begin_load(hash(1)).expect("there");
    books.begin_store(hash(2)).expect("a slot");
    books.clear();
    assert_eq!(books.run(&[hash(1)]), 0);
    assert_eq!(books.end_store(hash(2), true), None);
    books.end_load(hash(1), from, Loaded::Whole);
    assert_eq!((books.counts(Tier::Host).blocks, books.counts(Tier::Disk).blocks), (0, 0));
    assert!(!books.knows(hash(1)) && !books.knows(hash(2)));
}

#[derive(Debug)]
enum Flight {
    Store(BlockHash, HostSlot),
    Write(BlockHash, Write),
    Load(BlockHash, Source),
    Delete(Vec<BlockHash>),
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Random stores, loads, endings of both kinds, rests and resets: no slot is used twice, a slot is written only by
    /// one order and read by nobody meanwhile, and when everything is over nothing is in use.
    #[test]
    fn no_slot_is_ever_used_twice(
        sizes in (0_usize..4, 0_usize..4),
        steps in prop::collection::vec((0_u8..9, 0_u8..6, 0_usize..8, 0_u8..4), 1..200),
    ) {
        let (host, disk) = sizes;
        let mut books = books(host, disk);
        let mut flights: Vec<Flight> = Vec::new();
        let end = |books: &mut TierBooks, flight: Flight, how: u8| -> Vec<Flight> {
            match flight {
                Flight::Store(hash, _) => {
                    books.end_store(hash, how != 0).map(|write| Flight::Write(hash, write)).into_iter().collect()
                }
                Flight::Write(hash, write) => { books.end_write(hash, &write.evict, how != 0); vec![] }
                Flight::Load(hash, from) => {
                    let how = match (how, from) {
                        (0, _) => Loaded::Not,
                        (1, Source::Disk { .. }) => Loaded::Gone,
                        _ => Loaded::Whole,
                    };
                    books.end_load(hash, from, how);
                    vec![]
                }
                Flight::Delete(hashes) => { books.end_delete(&hashes, how != 0); vec![] }
            }
        };
        for (kind, n, pick, how) in steps {
            match kind {
                0..=2 => if !books.knows(hash(n)) && let Some(slot) = books.begin_store(hash(n)) {
                    flights.push(Flight::Store(hash(n), slot));
                },
                3..=4 => if let Some(from) = books.begin_load(hash(n)) { flights.push(Flight::Load(hash(n), from)) },
                5..=6 => if !flights.is_empty() {
                    let flight = flights.swap_remove(pick % flights.len());
                    let more = end(&mut books, flight, how);
                    flights.extend(more);
                },
                7 => books.set_disk_rests(how == 0),
                _ => {
                    if how == 0 { books.clear() }
                    flights.extend(books.begin_delete().map(Flight::Delete));
                }
            }
            // Who reads and writes each slot now.
            let mut writers: BTreeMap<HostSlot, usize> = BTreeMap::new();
            let mut readers: BTreeMap<HostSlot, BlockHash> = BTreeMap::new();
            for flight in &flights {
                match flight {
                    Flight::Store(_, slot) | Flight::Load(_, Source::Disk { keep: Some(slot) }) => {
                        *writers.entry(*slot).or_default() += 1;
                    }
                    Flight::Write(hash, Write { slot, .. }) | Flight::Load(hash, Source::Host(slot)) => {
                        let before = readers.insert(*slot, *hash);
                        prop_assert!(before.is_none_or(|before| before == *hash));
                    }
                    Flight::Load(_, Source::Disk { keep: None }) | Flight::Delete(_) => {}
                }
            }
            prop_assert!(writers.iter().all(|(slot, count)| *count == 1 && !readers.contains_key(slot)));
            prop_assert!(books.counts(Tier::Disk).blocks <= disk);
            prop_assert!(books.counts(Tier::Host).blocks <= books.config.slots());
        }
        while let Some(flight) = flights.pop() {
            let more = end(&mut books, flight, 1);
            flights.extend(more);
        }
        prop_assert_eq!(books.in_use(), 0);
        books.clear();
        prop_assert_eq!((books.counts(Tier::Host).blocks, books.counts(Tier::Disk).blocks), (0, 0));
        prop_assert!(books.entries.is_empty() && books.host_idle.is_empty() && books.disk_idle.is_empty());
    }
}
