//! The geometry compared with an element-by-element copy, which uses no runs.

use proptest::prelude::*;

use super::*;
use crate::memory::layout::KvDtype;

fn layout(kv_heads: usize, block_tokens: usize) -> KvLayout {
    KvLayout { layers: 2, kv_heads, head_dim: 3, block_tokens, dtype: KvDtype::F16 }
}

fn geometry(heads: usize, ranks: usize, block_tokens: usize) -> Geometry {
    Geometry::new(layout(heads, block_tokens), ranks).expect("ranks that divide the heads")
}

/// A sharded cache as plain bytes: `[rank][block]`, every block of the sequence in order.
struct ShardedCache {
    geometry: Geometry,
    ranks: Vec<Vec<Vec<u8>>>,
}

impl ShardedCache {
    fn empty(geometry: Geometry, tokens: usize) -> Self {
        let shard = geometry.shard();
        let blocks = vec![vec![0; shard.block_bytes()]; shard.blocks_for(tokens)];
        Self { geometry, ranks: vec![blocks; geometry.ranks()] }
    }

    /// One byte of an element, located by the definition of the layout.
    fn byte(&mut self, half: usize, head: usize, token: usize, dim: usize, byte: usize) -> &mut u8 {
        let shard = self.geometry.shard();
        let (rank, own) = (head / shard.kv_heads, head % shard.kv_heads);
        let (block, slot) = (token / shard.block_tokens, token % shard.block_tokens);
        let element = ((half * shard.kv_heads + own) * shard.block_tokens + slot) * shard.head_dim + dim;
        &mut self.ranks[rank][block][element * 2 + byte]
    }

    fn each(geometry: &Geometry, tokens: usize, mut f: impl FnMut(usize, usize, usize, usize, usize)) {
        let whole = geometry.whole();
        for half in 0..whole.layers * 2 {
            for head in 0..whole.kv_heads {
                for token in 0..tokens {
                    for dim in 0..whole.head_dim {
                        (0..2).for_each(|byte| f(half, head, token, dim, byte));
                    }
                }
            }
        }
    }

    /// A cache with pseudo-random bytes other than 0.
    fn filled(geometry: Geometry, tokens: usize) -> Self {
        let mut cache = Self::empty(geometry, tokens);
        let mut next = 1_u32;
        Self::each(&geometry, tokens, |half, head, token, dim, byte| {
            next = next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *cache.byte(half, head, token, dim, byte) = (next >> 24) as u8 | 1;
        });
        cache
    }
}

/// Reads every link of a handoff through a buffer, as between a producer and a consumer without shared memory.
fn transfer(from: &ShardedCache, to: &mut ShardedCache, tokens: Range<usize>, first_block: usize) {
    let (producer, consumer) = (from.geometry, to.geometry);
    let origin = first_block * consumer.shard().block_tokens;
    for link in producer.links(&consumer).expect("layouts that fit") {
        let slice = Slice::of(&link, &producer, &consumer, tokens.clone(), origin);
        let landing = to.ranks[usize::from(link.consumer.0)].len() - first_block;
        slice.check(landing).expect("a slice that fits");
        let entries = slice.range.entries(&slice.producer);
        for piece in slice.pieces() {
            let (mut wire, mut runs) = (Vec::new(), Vec::new());
            slice.range.runs(&producer.shard(), &piece, &mut runs);
            for run in &runs {
                let block = &from.ranks[usize::from(link.producer.0)][entries.start + run.entry];
                wire.extend_from_slice(&block[run.offset..run.offset + run.len]);
            }
            assert_eq!(wire.len(), slice.piece_bytes(&piece));
            let mut rest = &wire[..];
            runs.clear();
            slice.runs(&piece, &mut runs);
            for run in &runs {
                let block = &mut to.ranks[usize::from(link.consumer.0)][first_block + run.entry];
                let (now, later) = rest.split_at(run.len);
                block[run.offset..run.offset + run.len].copy_from_slice(now);
                rest = later;
            }
            assert!(rest.is_empty(), "both ends agree on the length of a piece");
        }
    }
}

/// A number of heads, and two numbers of ranks that divide it.
fn shards() -> impl Strategy<Value = (usize, usize, usize)> {
    let ranks = |heads: usize| (1..=heads).filter(move |r| heads.is_multiple_of(*r)).collect::<Vec<_>>();
    prop_oneof![Just(1_usize), Just(2), Just(4), Just(6), Just(8), Just(12)].prop_flat_map(move |heads| {
        (Just(heads), prop::sample::select(ranks(heads)), prop::sample::select(ranks(heads)))
    })
}

/// Two block sizes, one a multiple of the other.
fn blocks() -> impl Strategy<Value = (usize, usize)> {
    (1_usize..=6, prop_oneof![Just(1_usize), Just(2), Just(3), Just(4)], any::<bool>()).prop_map(
        |(small, factor, swap)| if swap { (small * factor, small) } else { (small, small * factor) },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_element_arrives_where_it_belongs_and_nothing_else_is_touched(
        (heads, theirs, ours) in shards(), (block, our_block) in blocks(), len in 1_usize..40, start in 0_usize..40,
    ) {
        let (producer, consumer) = (geometry(heads, theirs, block), geometry(heads, ours, our_block));
        // The consumer has cached whole blocks of its own.
        let first_block = start % (len.div_ceil(our_block));
        let tokens = first_block * our_block..len;
        let mut from = ShardedCache::filled(producer, len);
        let mut to = ShardedCache::empty(consumer, len);
        transfer(&from, &mut to, tokens.clone(), first_block);
        ShardedCache::each(&producer, len, |half, head, token, dim, byte| {
            let sent = if tokens.contains(&token) { *from.byte(half, head, token, dim, byte) } else { 0 };
            assert_eq!(*to.byte(half, head, token, dim, byte), sent, "half {half} head {head} token {token}");
        });
        let read: usize = to.ranks.iter().flatten().flatten().filter(|byte| **byte != 0).count();
        let expected = producer.whole().layers * 2 * heads * tokens.len() * producer.whole().head_dim * 2;
        prop_assert_eq!(read, expected, "bytes outside the slice were written");
    }

    #[test]
    fn copies_between_two_memories_are_the_two_ends_runs_side_by_side(
        (heads, theirs, ours) in shards(), (block, our_block) in blocks(), len in 1_usize..40,
    ) {
        let (producer, consumer) = (geometry(heads, theirs, block), geometry(heads, ours, our_block));
        let from = ShardedCache::filled(producer, len);
        let (mut by_wire, mut by_copy) = (ShardedCache::empty(consumer, len), ShardedCache::empty(consumer, len));
        transfer(&from, &mut by_wire, 0..len, 0);
        for link in producer.links(&consumer).expect("layouts that fit") {
            let slice = Slice::of(&link, &producer, &consumer, 0..len, 0);
            let first = slice.range.entries(&slice.producer).start;
            for (source, target) in slice.pieces().flat_map(|piece| slice.copies(&piece)) {
                assert_eq!(source.len, target.len);
                let block = &from.ranks[usize::from(link.producer.0)][first + source.entry];
                let bytes = &block[source.offset..source.offset + source.len];
                let block = &mut by_copy.ranks[usize::from(link.consumer.0)][target.entry];
                block[target.offset..target.offset + target.len].copy_from_slice(bytes);
            }
        }
        prop_assert!(by_wire.ranks == by_copy.ranks);
    }

    #[test]
    fn every_head_has_exactly_one_link((heads, theirs, ours) in shards()) {
        let (producer, consumer) = (geometry(heads, theirs, 4), geometry(heads, ours, 4));
        let links = producer.links(&consumer).expect("layouts that fit");
        prop_assert!(links.len() < theirs + ours && links.len() >= theirs.max(ours));
        let (per_p, per_d) = (heads / theirs, heads / ours);
        let of_p = links.iter().flat_map(|l| l.heads.clone().map(|h| usize::from(l.producer.0) * per_p + h));
        let of_d = links.iter().flat_map(|l| {
            (0..l.heads.len()).map(|h| usize::from(l.consumer.0) * per_d + l.into_head + h)
        });
        prop_assert!(of_p.eq(0..heads));
        prop_assert!(of_d.eq(0..heads));
    }
}

#[test]
fn a_whole_block_of_all_heads_is_one_run() {
    let layout = layout(2, 4);
    let range = SliceRange { tokens: 4..8, heads: 0..2 };
    let mut runs = Vec::new();
    range.runs(&layout, &range.pieces(&layout).next().expect("a piece"), &mut runs);
    assert_eq!(runs, [Run { entry: 0, offset: 0, len: layout.block_bytes() }]);
}

#[test]
fn a_cut_that_does_not_divide_the_heads_is_refused() {
    for ranks in [0, 3, 5, 8, usize::MAX] {
        let refused = Geometry::new(layout(4, 16), ranks);
        assert_eq!(refused, Err(SliceError::Ranks { heads: 4, ranks }));
    }
    assert!(Geometry::new(layout(128, 16), 128).is_err(), "more than RANKS_MAX");
}

#[test]
fn engines_whose_blocks_cannot_be_cut_into_each_other_have_no_links() {
    let here = geometry(4, 2, 16);
    let sizes = SliceError::BlockSizes { theirs: 16, ours: 24 };
    assert_eq!(here.links(&geometry(4, 2, 24)), Err(sizes));
    assert_eq!(here.links(&geometry(8, 2, 16)), Err(SliceError::Layouts));
    let other = Geometry::new(KvLayout { dtype: KvDtype::F32, ..layout(4, 16) }, 2).expect("a geometry");
    assert_eq!(here.links(&other), Err(SliceError::Layouts));
}

#[test]
fn a_hostile_cut_is_refused_before_anything_is_computed_from_it() {
    let layout = layout(2, 16);
    let held = BLOCKS_PER_HANDOFF_MAX * 16;
    for (start, end) in [(0, 0), (5, 4), (0, held + 1), (0, usize::MAX), (usize::MAX, 0)] {
        let tokens = start..end;
        assert!(matches!(SliceRange { tokens, heads: 0..1 }.check(&layout), Err(SliceError::Tokens { .. })));
    }
    for (start, end) in [(0, 0), (1, 0), (0, 3), (2, 3), (0, usize::MAX)] {
        let heads = start..end;
        assert!(matches!(SliceRange { tokens: 0..1, heads }.check(&layout), Err(SliceError::Heads { .. })));
    }
    assert_eq!(SliceRange { tokens: held - 1..held, heads: 1..2 }.check(&layout), Ok(()));
}

#[test]
fn each_rank_and_sharding_of_an_engine_has_its_own_fingerprint() {
    let here = geometry(4, 2, 16);
    let all = [
        here.rank_fingerprint(7, Rank(0)),
        here.rank_fingerprint(7, Rank(1)),
        here.rank_fingerprint(8, Rank(0)),
        geometry(4, 4, 16).rank_fingerprint(7, Rank(0)),
        geometry(4, 2, 32).rank_fingerprint(7, Rank(0)),
    ];
    let different: std::collections::BTreeSet<_> = all.iter().collect();
    assert_eq!(different.len(), all.len());
}
