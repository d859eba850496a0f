//! The shape of a pool, with which a consumer finds a block, as bytes. Pure.

/// A pool's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolShape {
    /// Bytes of one block.
    pub block_bytes: u64,
    /// Number of blocks.
    pub blocks: u64,
}

/// Bytes of an encoded shape, which is sent with the pool's descriptor.
pub(crate) const POOL_BYTES: usize = 16;

impl PoolShape {
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

    /// Bytes of the pool; `None` on overflow.
    #[must_use]
    pub fn bytes(self) -> Option<usize> {
        self.block_bytes.checked_mul(self.blocks).and_then(|bytes| usize::try_from(bytes).ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_round_trips_on_the_wire() {
        let pool = PoolShape { block_bytes: 3 << 40, blocks: 77 };
        assert_eq!(PoolShape::decode(pool.encode()), pool);
        assert_eq!(PoolShape { block_bytes: u64::MAX, blocks: 2 }.bytes(), None);
    }
}
