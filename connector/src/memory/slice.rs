//! Which bytes of which block go where when two engines cut their KV caches differently. Pure geometry.
//!
//! An engine of R ranks has R shards: shard `r` holds the KV heads `r·H/R .. (r+1)·H/R` of every block, in a
//! region of its own, under the same block ids. Two ranks that hold a common head have a [`Link`]; over it the
//! consumer reads a [`Slice`]: a range of heads for a range of tokens.
//!
//! ```text
//! producer, 2 ranks, blocks of 4 tokens      consumer, 1 rank, blocks of 8 tokens
//!   rank 0  h0 h1 │ t0-3 │ t4-7 │ …  ──link 0──▶  h0 h1 ┐
//!   rank 1  h2 h3 │ t0-3 │ t4-7 │ …  ──link 1──▶  h2 h3 ┘ t0-7 │ t8-15 │ …
//! ```
//!
//! The order of the bytes on the wire is the producer's: block by block ([`Piece`]), and in a block
//! `[layer][K|V][head][token][dim]`, cut to the slice. Each end finds its own [`Run`]s of that order from the
//! two layouts and the slice with one function, [`Slice::runs`], so nothing about memory travels.
//!
//! Invariants:
//! - Both ends' runs of a piece have the same length in sum: [`Slice::piece_bytes`].
//! - A slice that passed [`Cut::check`] and [`Slice::check`] never leads outside a block or a table.

use std::ops::Range;

use sha2::{Digest, Sha256};

use crate::limits::{BLOCKS_PER_HANDOFF_MAX, RANKS_MAX};
use crate::{KvLayout, Rank};

/// How an engine's KV cache is cut: blocks of some tokens, heads over some ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    whole: KvLayout,
    ranks: u16,
}

/// Why a cut of the KV cache, or a slice of it, is not possible. The numbers are those that were compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SliceError {
    /// Ranks hold whole heads, all the same number of them.
    #[error("{heads} KV heads cannot be sharded over {ranks} ranks")]
    Ranks {
        /// Heads of the model.
        heads: usize,
        /// Ranks asked for.
        ranks: usize,
    },
    /// Two engines' blocks differ by more than a whole factor.
    #[error("blocks of {theirs} tokens and of {ours} tokens: one must be a multiple of the other")]
    BlockSizes {
        /// The producer's.
        theirs: usize,
        /// The consumer's.
        ours: usize,
    },
    /// The layouts differ in more than block size and heads.
    #[error("the two layouts differ in layers, head size or element type")]
    Layouts,
    /// Tokens that are not there, or none at all.
    #[error("tokens {start}..{end} are not in blocks of {held} tokens")]
    Tokens {
        /// First token asked for.
        start: usize,
        /// The one after the last.
        end: usize,
        /// Tokens there are.
        held: usize,
    },
    /// Heads that are not there, or none at all.
    #[error("heads {start}..{end} are not in a cache of {held} heads")]
    Heads {
        /// First head asked for.
        start: usize,
        /// The one after the last.
        end: usize,
        /// Heads there are.
        held: usize,
    },
}

impl Geometry {
    /// A cache of this layout (over all heads) in `ranks` shards.
    ///
    /// # Errors
    /// [`SliceError::Ranks`] when there are none or more than [`RANKS_MAX`], or they do not divide the heads.
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

    /// What the two ends of a link compare before a byte is read: the model and its shape, as in
    /// [`KvLayout::fingerprint`] (`base`), and with them this cut of it and which of the ranks it is. A consumer
    /// computes it from what the handoff says, the producer's rank from what is so: a handoff that gives a wrong
    /// number of ranks, a wrong block size, or the ports in a wrong order is refused in the handshake.
    #[must_use]
    pub fn rank_fingerprint(&self, base: u64, rank: Rank) -> u64 {
        rank_fingerprint(base, self.ranks(), self.whole.block_tokens, rank)
    }

    /// The pairs of ranks that share heads, in the order of the heads; every head is in exactly one. The position
    /// of a link in this list is its number ([`crate::Reader::rank`]).
    ///
    /// # Errors
    /// [`SliceError::Layouts`] or [`SliceError::BlockSizes`] when `consumer` cannot use blocks of `self` at all.
    pub fn links(&self, consumer: &Self) -> Result<Vec<Link>, SliceError> {
        fits(&self.whole, &consumer.whole)?;
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

    /// Whether a block here is, byte for byte, a block there: then whole blocks are read.
    #[must_use]
    pub fn same_blocks(&self, consumer: &Self) -> bool {
        self == consumer
    }
}

/// [`Geometry::rank_fingerprint`] of a geometry that is not known to be possible: what a handoff says of it.
#[must_use]
pub fn rank_fingerprint(base: u64, ranks: usize, block_tokens: usize, rank: Rank) -> u64 {
    let mut hash = Sha256::new();
    hash.update(b"baton-kv-rank-1");
    let numbers = [base, ranks as u64, u64::from(rank.0), block_tokens as u64];
    numbers.iter().for_each(|number| hash.update(number.to_le_bytes()));
    u64::from_le_bytes(hash.finalize()[..8].try_into().expect("a SHA-256 digest has 32 bytes"))
}

/// The same layers, head size and element type, and block sizes that differ by a whole factor.
fn fits(producer: &KvLayout, consumer: &KvLayout) -> Result<(), SliceError> {
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

/// Two ranks that hold common heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The rank that is read.
    pub producer: Rank,
    /// The rank that reads.
    pub consumer: Rank,
    /// The common heads, as the producer's rank counts its own.
    pub heads: Range<usize>,
    /// The first of them, as the consumer's rank counts its own.
    pub into_head: usize,
}

/// What a slice is on the wire: some heads of some tokens of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Positions in the sequence whose KV was handed off.
    pub tokens: Range<usize>,
    /// Heads, as the producer's rank counts its own.
    pub heads: Range<usize>,
}

impl Cut {
    /// Whether a rank of this layout can serve it at all. Whether the lease has so many blocks is the ledger's to
    /// say: it is asked for [`Self::entries`].
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

    /// The entries of the producer's block table that hold it.
    #[must_use]
    pub fn entries(&self, producer: &KvLayout) -> Range<usize> {
        self.tokens.start / producer.block_tokens..self.tokens.end.div_ceil(producer.block_tokens)
    }

    /// Its tokens, one producer's block at a time.
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

    /// Bytes of all of it.
    #[must_use]
    pub fn bytes(&self, producer: &KvLayout) -> usize {
        self.piece_bytes(producer, &Piece { tokens: self.tokens.clone() })
    }

    /// Where a piece lies in the producer's blocks, in the order of the wire; entries count from
    /// [`Self::entries`]' first. Appends to `runs`.
    pub fn runs(&self, producer: &KvLayout, piece: &Piece, runs: &mut Vec<Run>) {
        let origin = self.entries(producer).start * producer.block_tokens;
        End { layout: producer, head: self.heads.start, origin }.runs(self.heads.len(), piece, runs);
    }
}

/// The tokens of a slice that lie in one block of the producer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Positions in the sequence.
    pub tokens: Range<usize>,
}

/// Bytes that lie together in one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Which of the blocks: an entry of the landing blocks, or of the table's part that was asked for.
    pub entry: usize,
    /// First byte in the block.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}

/// A slice as its consumer knows it: what to read, from blocks of which shape, and where it goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// What to read.
    pub cut: Cut,
    /// A block in the producer's rank.
    pub producer: KvLayout,
    /// A block in the consumer's rank.
    pub consumer: KvLayout,
    /// Where the first head goes, as the consumer's rank counts its own.
    pub into_head: usize,
    /// The position that the first token of the first landing block has. A multiple of the consumer's block size.
    pub origin: usize,
}

impl Slice {
    /// The slice of a link that has everything of `tokens` land in blocks whose first starts at `origin`.
    #[must_use]
    pub fn of(
        link: &Link,
        producer: &Geometry,
        consumer: &Geometry,
        tokens: Range<usize>,
        origin: usize,
    ) -> Self {
        Self {
            cut: Cut { tokens, heads: link.heads.clone() },
            producer: producer.shard(),
            consumer: consumer.shard(),
            into_head: link.into_head,
            origin,
        }
    }

    /// Whether it is possible, and lands inside `landing` blocks.
    ///
    /// # Errors
    /// Any [`SliceError`].
    pub fn check(&self, landing: usize) -> Result<(), SliceError> {
        fits(&self.producer, &self.consumer)?;
        self.cut.check(&self.producer)?;
        let Range { start, end } = self.cut.tokens;
        let held = landing.saturating_mul(self.consumer.block_tokens);
        if start < self.origin || end - self.origin > held {
            return Err(SliceError::Tokens { start, end, held });
        }
        let end = self.into_head.saturating_add(self.cut.heads.len());
        if end > self.consumer.kv_heads {
            return Err(SliceError::Heads { start: self.into_head, end, held: self.consumer.kv_heads });
        }
        Ok(())
    }

    /// Its pieces, in the order of the wire.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + use<'_> {
        self.cut.pieces(&self.producer)
    }

    /// Bytes of one piece.
    #[must_use]
    pub fn piece_bytes(&self, piece: &Piece) -> usize {
        self.cut.piece_bytes(&self.producer, piece)
    }

    /// Where a piece lies in the landing blocks, in the order of the wire. Appends to `runs`.
    pub fn runs(&self, piece: &Piece, runs: &mut Vec<Run>) {
        let end = End { layout: &self.consumer, head: self.into_head, origin: self.origin };
        end.runs(self.cut.heads.len(), piece, runs);
    }

    /// The same for a transport that sees both ends' memory: which bytes of the producer's blocks go to which of
    /// the consumer's. The two runs of a pair are equally long.
    #[must_use]
    pub fn copies(&self, piece: &Piece) -> Vec<(Run, Run)> {
        let (mut from, mut into) = (Vec::new(), Vec::new());
        self.cut.runs(&self.producer, piece, &mut from);
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
    /// Takes `len` bytes off its front; true when none are left.
    fn advance(&mut self, len: usize) -> bool {
        self.offset += len;
        self.len -= len;
        self.len == 0
    }
}

/// One end of a slice: blocks of a shape, the slice's first head in them, and the position of their first token.
struct End<'a> {
    layout: &'a KvLayout,
    head: usize,
    origin: usize,
}

impl End<'_> {
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

/// Appends a run; neighbours in a block become one.
fn push(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.entry == run.entry && last.offset + last.len == run.offset => last.len += run.len,
        _ => runs.push(run),
    }
}

#[cfg(test)]
mod tests;
