//! The mapping of bytes between two engines whose KV caches are cut differently. Pure geometry.
//!
//! An engine of R ranks has R shards. Shard `r` holds the KV heads `r·H/R .. (r+1)·H/R` of every block. Each shard has
//! a region of its own, with the same block ids. Two ranks with a common head have a [`Link`]. Over a link the consumer
//! reads a [`Slice`]: a range of heads for a range of tokens.
//!
//! ```text
//! producer, 2 ranks, blocks of 4 tokens      consumer, 1 rank, blocks of 8 tokens
//!   rank 0  h0 h1 │ t0-3 │ t4-7 │ …  ──link 0──▶  h0 h1 ┐
//!   rank 1  h2 h3 │ t0-3 │ t4-7 │ …  ──link 1──▶  h2 h3 ┘ t0-7 │ t8-15 │ …
//! ```
//!
//! The order of the bytes on the wire is the producer's: block by block ([`Piece`]), and in a block
//! `[layer][K|V][head][token][dim]`, cut to the slice. Each end computes its own [`Run`]s of that order from the
//! layouts and the slice ([`SliceRange::runs`], [`Slice::runs`]). So no memory offsets are sent.
//!
//! Invariants:
//! - The runs of a piece have the same total length at both ends: [`Slice::piece_bytes`].
//! - A slice that passed [`SliceRange::check`] and [`Slice::check`] never leads outside a block or a table.

use std::ops::Range;

use sha2::{Digest, Sha256};

use crate::limits::{BLOCKS_PER_HANDOFF_MAX, RANKS_MAX};
use crate::{KvLayout, Rank};

/// The cut of an engine's KV cache: tokens per block, and ranks that share the heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    whole: KvLayout,
    ranks: u16,
}

/// Why a cut of the KV cache, or a slice of it, is not possible, with the compared numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SliceError {
    /// The heads cannot be divided evenly among the ranks.
    #[error("{heads} KV heads cannot be sharded over {ranks} ranks")]
    Ranks {
        /// Heads of the model.
        heads: usize,
        /// Requested ranks.
        ranks: usize,
    },
    /// Neither block size of the two engines is a multiple of the other.
    #[error("blocks of {theirs} tokens and of {ours} tokens: one must be a multiple of the other")]
    BlockSizes {
        /// The producer's block size.
        theirs: usize,
        /// The consumer's block size.
        ours: usize,
    },
    /// The layouts differ in more than block size and heads.
    #[error("the two layouts differ in layers, head size or element type")]
    Layouts,
    /// The range of tokens is empty or outside the blocks.
    #[error("tokens {start}..{end} are not in blocks of {held} tokens")]
    Tokens {
        /// First requested token.
        start: usize,
        /// End of the requested range.
        end: usize,
        /// Tokens that the blocks hold.
        held: usize,
    },
    /// The range of heads is empty or outside the cache.
    #[error("heads {start}..{end} are not in a cache of {held} heads")]
    Heads {
        /// First requested head.
        start: usize,
        /// End of the requested range.
        end: usize,
        /// Heads of the cache.
        held: usize,
    },
}

impl Geometry {
    /// A cache of this layout (over all heads) in `ranks` shards.
    ///
    /// # Errors
    /// [`SliceError::Ranks`] if `ranks` is 0, above [`RANKS_MAX`], or does not divide the heads.
    pub fn new(whole: KvLayout, ranks: usize) -> Result<Self, SliceError> {
        match u16::try_from(ranks) {
            Ok(count)
                if (1..=RANKS_MAX).contains(&ranks)
                    && whole.kv_heads > 0
                    && whole.kv_heads.is_multiple_of(ranks) =>
            {
                Ok(Self { whole, ranks: count })
            }
            _ => Err(SliceError::Ranks { heads: whole.kv_heads, ranks }),
        }
    }

    /// The layout over all heads.
    #[must_use]
    pub fn whole(&self) -> KvLayout {
        self.whole
    }

    /// The layout of a block in one rank.
    #[must_use]
    pub fn shard(&self) -> KvLayout {
        KvLayout { kv_heads: self.whole.kv_heads / usize::from(self.ranks), ..self.whole }
    }

    /// Number of shards.
    #[must_use]
    pub fn ranks(&self) -> usize {
        usize::from(self.ranks)
    }

    /// Every rank, in order.
    pub fn each_rank(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.ranks).map(Rank)
    }

    /// The fingerprint that the two ends of a link compare before a byte is read. It covers the model and its shape
    /// ([`KvLayout::fingerprint`], `base`), this cut of the cache, and the number of the rank. A consumer computes it
    /// from the handoff, and the producer's rank from its own configuration. So the handshake refuses a handoff with a
    /// wrong number of ranks, a wrong block size, or the ports in a wrong order.
    #[must_use]
    pub fn rank_fingerprint(&self, base: u64, rank: Rank) -> u64 {
        rank_fingerprint(base, self.ranks(), self.whole.block_tokens, rank)
    }

    /// The pairs of ranks that share heads, in the order of the heads. Every head is in exactly one link. The position
    /// of a link in this list is its number ([`crate::Reader::rank`]).
    ///
    /// # Errors
    /// [`SliceError::Layouts`] or [`SliceError::BlockSizes`] if `consumer` cannot use blocks of `self`.
    pub fn links(&self, consumer: &Self) -> Result<Vec<Link>, SliceError> {
        check_compatible(&self.whole, &consumer.whole)?;
        if self.whole.kv_heads != consumer.whole.kv_heads {
            return Err(SliceError::Layouts);
        }
        let (theirs, ours) = (self.shard().kv_heads, consumer.shard().kv_heads);
        let mut links = Vec::with_capacity(self.ranks().max(consumer.ranks()));
        let mut head = 0;
        while head < self.whole.kv_heads {
            let (from, into) = (head % theirs, head % ours);
            let count = (theirs - from).min(ours - into);
            let rank = |at: usize| Rank(u16::try_from(at).expect("there are at most RANKS_MAX ranks"));
            links.push(Link {
                producer: rank(head / theirs),
                consumer: rank(head / ours),
                heads: from..from + count,
                into_head: into,
            });
            head += count;
        }
        Ok(links)
    }

    /// Whether blocks of both are equal byte for byte. Then whole blocks are read.
    #[must_use]
    pub fn same_blocks(&self, consumer: &Self) -> bool {
        self == consumer
    }
}

/// [`Geometry::rank_fingerprint`] from the unchecked numbers of a handoff.
#[must_use]
pub fn rank_fingerprint(base: u64, ranks: usize, block_tokens: usize, rank: Rank) -> u64 {
    let mut hash = Sha256::new();
    hash.update(b"baton-kv-rank-1");
    let numbers = [base, ranks as u64, u64::from(rank.0), block_tokens as u64];
    numbers.iter().for_each(|number| hash.update(number.to_le_bytes()));
    u64::from_le_bytes(hash.finalize()[..8].try_into().expect("a SHA-256 digest has 32 bytes"))
}

/// Checks for the same layers, head size and element type, and for block sizes that differ by a whole factor.
fn check_compatible(producer: &KvLayout, consumer: &KvLayout) -> Result<(), SliceError> {
    let alike = |layout: &KvLayout| (layout.layers, layout.head_dim, layout.dtype);
    if alike(producer) != alike(consumer) {
        return Err(SliceError::Layouts);
    }
    let (theirs, ours) = (producer.block_tokens, consumer.block_tokens);
    if theirs == 0 || ours == 0 || !(theirs.is_multiple_of(ours) || ours.is_multiple_of(theirs)) {
        return Err(SliceError::BlockSizes { theirs, ours });
    }
    Ok(())
}

/// Two ranks with common heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The producer's rank.
    pub producer: Rank,
    /// The consumer's rank.
    pub consumer: Rank,
    /// The common heads, as head numbers of the producer's rank.
    pub heads: Range<usize>,
    /// The first common head, as a head number of the consumer's rank.
    pub into_head: usize,
}

/// A slice on the wire: some heads of some tokens of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceRange {
    /// Positions in the sequence whose KV was handed off.
    pub tokens: Range<usize>,
    /// Head numbers of the producer's rank.
    pub heads: Range<usize>,
}

impl SliceRange {
    /// Checks whether a rank of this layout can serve the range. The ledger checks the number of blocks, when
    /// [`Self::entries`] are requested.
    ///
    /// # Errors
    /// [`SliceError::Tokens`] or [`SliceError::Heads`].
    pub fn check(&self, producer: &KvLayout) -> Result<(), SliceError> {
        let (tokens, heads) = (&self.tokens, &self.heads);
        let held = BLOCKS_PER_HANDOFF_MAX.saturating_mul(producer.block_tokens);
        if tokens.start >= tokens.end || tokens.end > held {
            return Err(SliceError::Tokens { start: tokens.start, end: tokens.end, held });
        }
        if heads.start >= heads.end || heads.end > producer.kv_heads {
            return Err(SliceError::Heads { start: heads.start, end: heads.end, held: producer.kv_heads });
        }
        Ok(())
    }

    /// The entries of the producer's block table that contain the range.
    #[must_use]
    pub fn entries(&self, producer: &KvLayout) -> Range<usize> {
        self.tokens.start / producer.block_tokens..self.tokens.end.div_ceil(producer.block_tokens)
    }

    /// The tokens, split by blocks of the producer.
    pub fn pieces<'a>(&'a self, producer: &'a KvLayout) -> impl Iterator<Item = Piece> + use<'a> {
        (0..self.entries(producer).len()).map(|index| self.piece(producer, index))
    }

    /// One of [`Self::pieces`].
    #[must_use]
    pub fn piece(&self, producer: &KvLayout, index: usize) -> Piece {
        let size = producer.block_tokens;
        let start = (self.tokens.start / size + index) * size;
        Piece { tokens: self.tokens.start.max(start)..self.tokens.end.min(start + size) }
    }

    /// Bytes of one piece.
    #[must_use]
    pub fn piece_bytes(&self, producer: &KvLayout, piece: &Piece) -> usize {
        let vectors = producer.layers * 2 * self.heads.len() * piece.tokens.len();
        vectors * producer.head_dim * producer.dtype.bytes()
    }

    /// Bytes of the whole range.
    #[must_use]
    pub fn bytes(&self, producer: &KvLayout) -> usize {
        self.piece_bytes(producer, &Piece { tokens: self.tokens.clone() })
    }

    /// Appends to `runs` the runs of a piece in the producer's blocks, in the order of the wire. Entry 0 is the first
    /// of [`Self::entries`].
    pub fn runs(&self, producer: &KvLayout, piece: &Piece, runs: &mut Vec<Run>) {
        let origin = self.entries(producer).start * producer.block_tokens;
        SliceEnd { layout: producer, head: self.heads.start, origin }.runs(self.heads.len(), piece, runs);
    }
}

/// The tokens of a slice in one block of the producer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Positions in the sequence.
    pub tokens: Range<usize>,
}

/// Contiguous bytes in one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Index of the block: in the landing blocks, or in the requested part of the table.
    pub entry: usize,
    /// First byte in the block.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
}

/// A slice at its consumer: the range, the layouts of both ends, and the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The range to read.
    pub range: SliceRange,
    /// Layout of a block in the producer's rank.
    pub producer: KvLayout,
    /// Layout of a block in the consumer's rank.
    pub consumer: KvLayout,
    /// Destination of the first head, as a head number of the consumer's rank.
    pub into_head: usize,
    /// Position of the first token of the first landing block: a multiple of the consumer's block size.
    pub origin: usize,
}

impl Slice {
    /// The slice of a link for all of `tokens`. The first landing block starts at position `origin`.
    #[must_use]
    pub fn of(
        link: &Link,
        producer: &Geometry,
        consumer: &Geometry,
        tokens: Range<usize>,
        origin: usize,
    ) -> Self {
        Self {
            range: SliceRange { tokens, heads: link.heads.clone() },
            producer: producer.shard(),
            consumer: consumer.shard(),
            into_head: link.into_head,
            origin,
        }
    }

    /// Checks that the slice is possible and fits into `landing` blocks.
    ///
    /// # Errors
    /// Any [`SliceError`].
    pub fn check(&self, landing: usize) -> Result<(), SliceError> {
        check_compatible(&self.producer, &self.consumer)?;
        self.range.check(&self.producer)?;
        let Range { start, end } = self.range.tokens;
        let held = landing.saturating_mul(self.consumer.block_tokens);
        if start < self.origin || end - self.origin > held {
            return Err(SliceError::Tokens { start, end, held });
        }
        let end = self.into_head.saturating_add(self.range.heads.len());
        if end > self.consumer.kv_heads {
            return Err(SliceError::Heads { start: self.into_head, end, held: self.consumer.kv_heads });
        }
        Ok(())
    }

    /// The pieces, in the order of the wire.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + use<'_> {
        self.range.pieces(&self.producer)
    }

    /// Bytes of one piece.
    #[must_use]
    pub fn piece_bytes(&self, piece: &Piece) -> usize {
        self.range.piece_bytes(&self.producer, piece)
    }

    /// Appends to `runs` the runs of a piece in the landing blocks, in the order of the wire.
    pub fn runs(&self, piece: &Piece, runs: &mut Vec<Run>) {
        let end = SliceEnd { layout: &self.consumer, head: self.into_head, origin: self.origin };
        end.runs(self.range.heads.len(), piece, runs);
    }

    /// The copies of a piece, for a transport with access to the memory of both ends. Each is a pair of a run in the
    /// producer's blocks and one in the consumer's, of the same length.
    #[must_use]
    pub fn copies(&self, piece: &Piece) -> Vec<(Run, Run)> {
        let (mut from, mut into) = (Vec::new(), Vec::new());
        self.range.runs(&self.producer, piece, &mut from);
        self.runs(piece, &mut into);
        let mut copies = Vec::with_capacity(from.len().max(into.len()));
        let (mut from, mut into) = (from.into_iter().peekable(), into.into_iter().peekable());
        while let (Some(source), Some(target)) = (from.peek_mut(), into.peek_mut()) {
            let len = source.len.min(target.len);
            copies.push((Run { len, ..*source }, Run { len, ..*target }));
            if source.advance(len) {
                from.next();
            }
            if target.advance(len) {
                into.next();
            }
        }
        copies
    }
}

impl Run {
    /// Removes `len` bytes from the front; true when none are left.
    fn advance(&mut self, len: usize) -> bool {
        self.offset += len;
        self.len -= len;
        self.len == 0
    }
}

/// One end of a slice: the layout of its blocks, the slice's first head in them, and the position of their first token.
struct SliceEnd<'a> {
    layout: &'a KvLayout,
    head: usize,
    origin: usize,
}

impl SliceEnd<'_> {
    fn runs(&self, heads: usize, piece: &Piece, runs: &mut Vec<Run>) {
        let KvLayout { layers, kv_heads, head_dim, block_tokens, dtype } = *self.layout;
        let vector = head_dim * dtype.bytes();
        for half in 0..layers * 2 {
            for head in self.head..self.head + heads {
                let mut token = piece.tokens.start - self.origin;
                let end = piece.tokens.end - self.origin;
                while token < end {
                    let (entry, slot) = (token / block_tokens, token % block_tokens);
                    let count = (block_tokens - slot).min(end - token);
                    let offset = ((half * kv_heads + head) * block_tokens + slot) * vector;
                    push(runs, Run { entry, offset, len: count * vector });
                    token += count;
                }
            }
        }
    }
}

/// Appends a run, or extends the last one if they are contiguous.
fn push(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.entry == run.entry && last.offset + last.len == run.offset => last.len += run.len,
        _ => runs.push(run),
    }
}

#[cfg(test)]
mod tests;
