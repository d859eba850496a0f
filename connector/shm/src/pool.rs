//! What a consumer must know of a pool to find a block in it, as it travels. Pure.

/// A pool's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Bytes of one block.
    pub block_bytes: u64,
    /// Blocks.
    pub blocks: u64,
}

/// Bytes of a pool's description, which travels with its descriptor.
pub(crate) const POOL_BYTES: usize = 16;

impl Pool {
    pub(crate) fn encode(self) -> [u8; POOL_BYTES] {
        let mut bytes = [0; POOL_BYTES];
        bytes[..8].copy_from_slice(&self.block_bytes.to_le_bytes());
        bytes[8..].copy_from_slice(&self.blocks.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: [u8; POOL_BYTES]) -> Self {
        let number = |at| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        Self { block_bytes: number(0), blocks: number(8) }
    }

    /// Bytes of all of it; `None` when that is no number.
    #[must_use]
    pub fn bytes(self) -> Option<usize> {
        self.block_bytes.checked_mul(self.blocks).and_then(|bytes| usize::try_from(bytes).ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_survives_the_wire() {
        let pool = Pool { block_bytes: 3 << 40, blocks: 77 };
        assert_eq!(Pool::decode(pool.encode()), pool);
        assert_eq!(Pool { block_bytes: u64::MAX, blocks: 2 }.bytes(), None);
    }
}
