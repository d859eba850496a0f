//! The guarantees of slices, between different ranks and block sizes. See `mod.rs`.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

use baton_connector::layout::KvDtype;
use baton_connector::lease::{CloseCause, LeaseTerms};
use baton_connector::ledger::ReleaseReply;
use baton_connector::region::Region;
use baton_connector::slice::{Geometry, Link, Slice, SliceRange};
use baton_connector::transport::{Part, ReadOrder, TransportError, Verdict};
use baton_connector::{BlockId, Handle, KvLayout, Rank, Reader};

use super::cases::Start;
use super::producer::contents;
use super::{GatePoint, TestProducer, TransportHarness};

static GO: AtomicBool = AtomicBool::new(false);
const HEADS: usize = 4;
/// Tokens of the handoff. They fill a part of the last block at every block size.
const TOKENS: usize = 77;
/// Content of the landing blocks before the read.
const BEFORE: u8 = 0xee;

fn geometry(ranks: usize, block_tokens: usize) -> Geometry {
    let whole = KvLayout { layers: 2, kv_heads: HEADS, head_dim: 8, block_tokens, dtype: KvDtype::F16 };
    Geometry::new(whole, ranks).expect("ranks that divide the heads")
}

/// Byte range of one token's vector of one of a rank's own heads, from the definition of the layout.
fn vector(layout: &KvLayout, half: usize, head: usize, slot: usize) -> Range<usize> {
    let bytes = layout.head_dim * layout.dtype.bytes();
    let at = ((half * layout.kv_heads + head) * layout.block_tokens + slot) * bytes;
    at..at + bytes
}

/// A block table of `count` blocks in mixed order.
fn table(count: usize, seed: usize) -> Vec<u32> {
    (0..count).map(|i| ((i * 5 + seed) % count) as u32).collect()
}

/// Reads one link of a handoff and compares every byte of the consumer's rank.
#[track_caller]
fn read_link(
    harness: &dyn TransportHarness,
    producer: &TestProducer,
    from: &Geometry,
    to: &Geometry,
    link: &Link,
    first_block: usize,
) {
    let (theirs, ours) = (from.shard(), to.shard());
    // Five is not a factor of these counts, so the tables are permutations.
    let leased = table(theirs.blocks_for(TOKENS).next_multiple_of(4), 3);
    let leased = &leased[..theirs.blocks_for(TOKENS)];
    let origin = first_block * ours.block_tokens;
    let landing = ours.blocks_for(TOKENS) - first_block;
    let all = table(landing.next_multiple_of(4), 1);
    let into: Vec<BlockId> = all[..landing].iter().map(|&block| BlockId(block)).collect();
    let region = Region::allocate(all.len(), ours.block_bytes());
    all.iter().for_each(|&block| region.write_block(BlockId(block), &vec![BEFORE; ours.block_bytes()]));

    let (handle, reader) = (producer.lease(leased, 1), Reader::sole(9));
    let slice = Slice::of(link, from, to, origin..TOKENS, origin);
    let order = ReadOrder { handle, reader, part: Part::Slice(Box::new(slice)), into: into.clone() };
    harness.transport().read(&harness.peer(), &order, &region, &GO).expect("a live lease");
    assert_eq!(harness.transport().finish(&harness.peer(), handle, reader), Ok(Verdict::Valid));

    let mut expected = vec![vec![BEFORE; ours.block_bytes()]; all.len()];
    for half in 0..theirs.layers * 2 {
        for (i, head) in link.heads.clone().enumerate() {
            for token in origin..TOKENS {
                let source = contents(leased[token / theirs.block_tokens], theirs.block_bytes());
                let sent = &source[vector(&theirs, half, head, token % theirs.block_tokens)];
                let block = into[(token - origin) / ours.block_tokens];
                expected[block.index()][vector(&ours, half, link.into_head + i, token % ours.block_tokens)]
                    .copy_from_slice(sent);
            }
        }
    }
    for &block in &all {
        let same = region.read_block(BlockId(block)) == expected[block as usize];
        assert!(same, "block {block} of rank {:?} from rank {:?}", link.consumer, link.producer);
    }
}

pub fn slices_arrive_byte_by_byte_for_all_ranks_and_block_sizes(start: Start<'_>) {
    for their_ranks in [1, 2, 4] {
        for their_block in [8, 16, 32] {
            let from = geometry(their_ranks, their_block);
            for rank in from.each_rank() {
                let producer = TestProducer::shaped(16, from.shard(), LeaseTerms::default());
                let harness = start(Arc::clone(&producer));
                for (our_ranks, our_block) in [1, 2, 4].into_iter().flat_map(|r| [8, 16, 32].map(|b| (r, b)))
                {
                    let to = geometry(our_ranks, our_block);
                    for link in from.links(&to).expect("they fit").iter().filter(|l| l.producer == rank) {
                        // From the start, and from the middle of a larger block of the producer.
                        for first_block in [0, 1] {
                            read_link(&*harness, &producer, &from, &to, link, first_block);
                        }
                    }
                }
            }
        }
    }
}

/// A rank whose slices of half its heads have 512 KiB per block, so that a batch has two.
fn large(start: Start<'_>, terms: LeaseTerms) -> (Arc<TestProducer>, Box<dyn TransportHarness>, Geometry) {
    let whole = KvLayout { layers: 2, kv_heads: 4, head_dim: 64, block_tokens: 256, dtype: KvDtype::F32 };
    let geometry = Geometry::new(whole, 1).expect("one rank");
    let producer = TestProducer::shaped(8, whole, terms);
    let harness = start(Arc::clone(&producer));
    (producer, harness, geometry)
}

/// Reads the first half of the heads of an eight-block lease into eight blocks of a rank with only these heads.
fn half_of_the_heads(from: &Geometry, handle: Handle) -> (ReadOrder, Region) {
    let to = Geometry::new(from.whole(), 2).expect("two ranks");
    let links = from.links(&to).expect("they fit");
    let slice = Slice::of(&links[0], from, &to, 0..8 * 256, 0);
    let reader = Reader::link(7, Rank(0), 2).expect("the first of two");
    let into = (0..8).map(BlockId).collect();
    let region = Region::allocate(8, to.shard().block_bytes());
    (ReadOrder { handle, reader, part: Part::Slice(Box::new(slice)), into }, region)
}

pub fn a_slice_whose_lease_ends_in_mid_read_is_gone_and_the_connection_stays_in_step(start: Start<'_>) {
    let terms = LeaseTerms { drain: std::time::Duration::ZERO, ..LeaseTerms::default() };
    let (producer, harness, geometry) = large(start, terms);
    let handle = producer.lease(&[0, 1, 2, 3, 4, 5, 6, 7], 1);
    let (order, region) = half_of_the_heads(&geometry, handle);
    producer.gate(GatePoint::Look(3));
    thread::scope(|scope| {
        let read = scope.spawn(|| harness.transport().read(&harness.peer(), &order, &region, &GO));
        producer.await_gate();
        assert_eq!(harness.transport().release(&harness.peer(), handle, "gone"), Ok(ReleaseReply::Draining));
        producer.open_gate();
        assert_eq!(read.join().unwrap(), Err(TransportError::Gone));
    });
    assert_eq!(harness.transport().finish(&harness.peer(), handle, order.reader), Ok(Verdict::Gone));
    let next = ReadOrder { handle: producer.lease(&[0, 1, 2, 3, 4, 5, 6, 7], 1), ..order };
    harness.transport().read(&harness.peer(), &next, &region, &GO).expect("a live lease");
    assert_eq!(harness.transport().finish(&harness.peer(), next.handle, next.reader), Ok(Verdict::Valid));
    let half_block = geometry.whole().block_bytes() / 2;
    let layer_half = half_block / 4;
    for block in 0..8_u32 {
        let (sent, landed) = (contents(block, 2 * half_block), region.read_block(BlockId(block)));
        for half in 0..4 {
            let theirs = &sent[half * 2 * layer_half..][..layer_half];
            assert!(landed[half * layer_half..][..layer_half] == *theirs, "block {block}");
        }
    }
}

pub fn a_slice_outside_the_lease_or_the_rank_is_refused_and_the_next_read_works(start: Start<'_>) {
    let (producer, harness, geometry) = large(start, LeaseTerms::default());
    let handle = producer.lease(&[0, 1], 1);
    let (order, region) = half_of_the_heads(&geometry, handle);
    let Part::Slice(slice) = &order.part else { panic!("a slice") };
    let with = |range: SliceRange, into_head: usize| ReadOrder {
        part: Part::Slice(Box::new(Slice { range, into_head, ..(**slice).clone() })),
        ..order.clone()
    };
    let wrong = [
        // More tokens than the lease has, none, or a reversed range.
        with(SliceRange { tokens: 0..2 * 256 + 1, heads: 0..2 }, 0),
        with(SliceRange { tokens: 5..5, heads: 0..2 }, 0),
        with(SliceRange { tokens: Range { start: 9, end: 5 }, heads: 0..2 }, 0),
        with(SliceRange { tokens: 0..usize::MAX, heads: 0..2 }, 0),
        // Heads that one of the two ends does not have.
        with(SliceRange { tokens: 0..256, heads: 3..5 }, 0),
        with(SliceRange { tokens: 0..256, heads: 2..2 }, 0),
        with(SliceRange { tokens: 0..256, heads: 0..2 }, 1),
    ];
    for order in wrong {
        let read = harness.transport().read(&harness.peer(), &order, &region, &GO);
        assert!(matches!(read, Err(TransportError::Refused(_))), "{:?}: {read:?}", order.part);
    }
    let right = with(SliceRange { tokens: 100..2 * 256, heads: 1..3 }, 0);
    harness.transport().read(&harness.peer(), &right, &region, &GO).expect("in range");
}

pub fn whole_blocks_only_means_no_slices(start: Start<'_>) {
    let producer = TestProducer::new(8, 4096, LeaseTerms::default());
    let harness = start(Arc::clone(&producer));
    let handle = producer.lease(&[0, 1, 2, 3, 4, 5, 6, 7], 1);
    let (order, region) = half_of_the_heads(&geometry_of_large(), handle);
    let read = harness.transport().read(&harness.peer(), &order, &region, &GO);
    assert!(matches!(read, Err(TransportError::Refused(_))), "{read:?}");
}

fn geometry_of_large() -> Geometry {
    let whole = KvLayout { layers: 2, kv_heads: 4, head_dim: 64, block_tokens: 256, dtype: KvDtype::F32 };
    Geometry::new(whole, 1).expect("one rank")
}

pub fn a_consumer_of_two_links_has_everything_after_both(start: Start<'_>) {
    let (producer, harness, geometry) = large(start, LeaseTerms::default());
    let handle = producer.lease(&[0, 1, 2, 3, 4, 5, 6, 7], 1);
    let (first, region) = half_of_the_heads(&geometry, handle);
    let second = ReadOrder { reader: Reader { rank: Rank(1), ..first.reader }, ..first.clone() };
    for _ in 0..2 {
        harness.transport().read(&harness.peer(), &first, &region, &GO).expect("a live lease");
        assert_eq!(harness.transport().finish(&harness.peer(), handle, first.reader), Ok(Verdict::Valid));
        assert_eq!(producer.live_leases(), 1, "one link twice is not two links");
    }
    harness.transport().read(&harness.peer(), &second, &region, &GO).expect("a live lease");
    assert_eq!(harness.transport().finish(&harness.peer(), handle, second.reader), Ok(Verdict::Valid));
    let settled = producer.closed_leases();
    assert_eq!((settled[0].cause, settled[0].readers), (CloseCause::Fetched, (2, 2)));
}

pub fn one_of_several_consumers_leaves_and_the_others_read_on(start: Start<'_>) {
    let producer = TestProducer::new(8, 4096, LeaseTerms::default());
    let harness = start(Arc::clone(&producer));
    let (transport, peer) = (harness.transport(), harness.peer());
    let region = Region::allocate(8, 4096);
    let handle = producer.lease(&[1, 2], 3);
    assert_eq!(transport.leave(&peer, handle, 1, "consumer_rejected"), Ok(ReleaseReply::Draining));
    assert_eq!(transport.leave(&peer, handle, 1, "consumer_rejected"), Ok(ReleaseReply::Already));
    for consumer in [2, 3] {
        let (reader, into) = (Reader::sole(consumer), vec![BlockId(0), BlockId(5)]);
        let order = ReadOrder { handle, reader, part: Part::Blocks { first: 0 }, into };
        transport.read(&peer, &order, &region, &GO).expect("a live lease");
        assert_eq!(transport.finish(&peer, handle, reader), Ok(Verdict::Valid));
        assert_eq!(region.read_block(BlockId(5)), contents(2, 4096));
    }
    assert_eq!(producer.closed_leases()[0].readers, (2, 3));
    assert_eq!(transport.leave(&peer, handle, 1, "consumer_rejected"), Ok(ReleaseReply::Already));
    assert_eq!(transport.leave(&peer, Handle(5), 1, "consumer_rejected"), Ok(ReleaseReply::Unknown));
}
