//! One block on disk: a header and the block's bytes. Each file can be verified by itself.
//!
//! ```text
//!   0  magic "BATONKV\x01"      16  layout fingerprint (u64)     40  block hash (32 bytes)
//!   8  CRC-32 of all the rest   24  model (16 bytes)             72  bytes that follow (u64)
//!  12  version (u32)                                             80  the block, rank by rank
//! ```
//! Numbers are little-endian. The checksum detects damage, not forgery. A process with write access to the directory
//! is as trusted as one with write access to the engine's memory.

use sha2::{Digest, Sha256};

use crate::blocks::hash::BlockHash;

/// Bytes before those of the block.
pub const HEADER_BYTES: usize = 80;

const MAGIC: [u8; 8] = *b"BATONKV\x01";
const VERSION: u32 = 1;

/// The identity of a tier's blocks. Engines with different identities never read each other's records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierIdentity {
    /// The layout fingerprint of one rank's block, which covers the model too.
    pub layout: u64,
    /// The model and the number of ranks.
    pub model: [u8; 16],
}

impl TierIdentity {
    /// The identity of a layout, a model, and the ranks whose shards form a block.
    #[must_use]
    pub fn new(layout: u64, model: &str, ranks: usize) -> Self {
        let mut hash = Sha256::new();
        hash.update((ranks as u64).to_le_bytes());
        hash.update(model.as_bytes());
        let digest = hash.finalize();
        Self { layout, model: digest[..16].try_into().expect("a SHA-256 digest has 32 bytes") }
    }

    /// The folder of its records.
    #[must_use]
    pub fn folder(&self) -> String {
        let model: String = self.model.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("kv{VERSION}-{:016x}-{model}", self.layout)
    }
}

/// Why a file is not the expected record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Its length is not that of a record.
    #[error("record has {bytes} bytes, expected {wanted}")]
    Length {
        /// Length of the file.
        bytes: usize,
        /// Length of a record.
        wanted: usize,
    },
    /// The file does not begin with the magic number.
    #[error("not a record")]
    Magic,
    /// Another version.
    #[error("unknown version {0}")]
    Version(u32),
    /// The bytes differ from the written ones.
    #[error("wrong checksum")]
    Checksum,
    /// The record belongs to another layout or model.
    #[error("record of another layout or model")]
    Identity,
    /// The record contains another block.
    #[error("record of another block")]
    Hash,
}

/// The header of a block's record.
#[must_use]
pub fn header(identity: &TierIdentity, hash: BlockHash, block: &[u8]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[12..16].copy_from_slice(&VERSION.to_le_bytes());
    header[16..24].copy_from_slice(&identity.layout.to_le_bytes());
    header[24..40].copy_from_slice(&identity.model);
    header[40..72].copy_from_slice(&hash.0);
    header[72..80].copy_from_slice(&(block.len() as u64).to_le_bytes());
    let checksum = checksum(&header, block);
    header[8..12].copy_from_slice(&checksum.to_le_bytes());
    header
}

/// The block's bytes in a file, if the file is exactly the record of this block.
///
/// # Errors
/// [`RecordError`]; then no part of the file may be used.
pub fn verify<'a>(
    identity: &TierIdentity,
    hash: BlockHash,
    block_bytes: usize,
    file: &'a [u8],
) -> Result<&'a [u8], RecordError> {
    let wanted = HEADER_BYTES + block_bytes;
    if file.len() != wanted {
        return Err(RecordError::Length { bytes: file.len(), wanted });
    }
    let (header, block) = file.split_at(HEADER_BYTES);
    let header: &[u8; HEADER_BYTES] = header.try_into().expect("it was split there");
    if header[..8] != MAGIC {
        return Err(RecordError::Magic);
    }
    let number = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
    if number(12) != VERSION {
        return Err(RecordError::Version(number(12)));
    }
    if number(8) != checksum(header, block) {
        return Err(RecordError::Checksum);
    }
    if header[16..24] != identity.layout.to_le_bytes() || header[24..40] != identity.model {
        return Err(RecordError::Identity);
    }
    if header[40..72] != hash.0 || header[72..80] != (block_bytes as u64).to_le_bytes() {
        return Err(RecordError::Hash);
    }
    Ok(block)
}

fn checksum(header: &[u8; HEADER_BYTES], block: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&header[12..]);
    crc.update(block);
    crc.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: [u8; 24] = [7; 24];

    fn record(identity: &TierIdentity, hash: BlockHash) -> Vec<u8> {
        [&header(identity, hash, &BLOCK)[..], &BLOCK].concat()
    }

    #[test]
    fn a_record_round_trips_and_every_flipped_bit_is_detected() {
        let (identity, hash) = (TierIdentity::new(5, "model", 1), BlockHash([3; 32]));
        let good = record(&identity, hash);
        assert_eq!(verify(&identity, hash, BLOCK.len(), &good), Ok(&BLOCK[..]));
        for at in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[at / 8] ^= 1 << (at % 8);
            assert!(verify(&identity, hash, BLOCK.len(), &bad).is_err(), "bit {at}");
        }
        for len in 0..good.len() {
            assert!(verify(&identity, hash, BLOCK.len(), &good[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn a_record_of_another_block_layout_model_or_rank_count_is_rejected() {
        let (identity, hash) = (TierIdentity::new(5, "model", 1), BlockHash([3; 32]));
        let good = record(&identity, hash);
        let of = |identity: TierIdentity, hash| verify(&identity, hash, BLOCK.len(), &good);
        assert_eq!(of(identity, BlockHash([4; 32])), Err(RecordError::Hash));
        for other in [
            TierIdentity::new(6, "model", 1),
            TierIdentity::new(5, "modem", 1),
            TierIdentity::new(5, "model", 2),
        ] {
            assert_eq!(of(other, hash), Err(RecordError::Identity));
            assert_ne!(other.folder(), identity.folder());
        }
        assert!(verify(&identity, hash, BLOCK.len() + 1, &good).is_err());
    }

    #[test]
    fn an_older_or_newer_version_is_not_read() {
        let (identity, hash) = (TierIdentity::new(5, "model", 1), BlockHash([3; 32]));
        let mut other = record(&identity, hash);
        other[12] = 2;
        let crc = {
            let header: &[u8; HEADER_BYTES] = other[..HEADER_BYTES].try_into().expect("a header");
            checksum(header, &BLOCK)
        };
        other[8..12].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(verify(&identity, hash, BLOCK.len(), &other), Err(RecordError::Version(2)));
    }
}
