//! The offer of a pool, which a producer sends to an admitted consumer, as bytes. Pure, except for the random process
//! id. An offer is untrusted until it is decoded.
//!
//! ```text
//! version 1 │ kind 1 │ descriptor 1 │ 5 zero │ uuid 16 │ process 16 │ batch_bytes 8 │ block_bytes 8 │ blocks 8 │ handle 64
//! ```

use std::fmt;
use std::io;
use std::sync::OnceLock;

use baton_connector_shm::PoolShape;

/// Bytes of a device's token: the size of CUDA's.
pub const HANDLE_BYTES: usize = 64;

/// Bytes of an offer.
pub(crate) const OFFER_BYTES: usize = 8 + 16 + 16 + 3 * 8 + HANDLE_BYTES;

const VERSION: u8 = 1;

/// Largest batch that a consumer accepts, in bytes.
const BATCH_MAX_BYTES: u64 = 1 << 30;

/// The kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// An NVIDIA GPU; the handle is a `CUipcMemHandle`.
    Cuda,
    /// A software device with a memfd, whose descriptor is sent with the offer.
    Software,
}

impl DeviceKind {
    fn byte(self) -> u8 {
        match self {
            Self::Cuda => 1,
            Self::Software => 2,
        }
    }
}

/// One device of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId {
    /// The kind of the device.
    pub kind: DeviceKind,
    /// The UUID of a GPU; zeros for the software device, of which each host has one.
    pub uuid: [u8; 16],
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            DeviceKind::Software => write!(f, "software"),
            DeviceKind::Cuda => {
                write!(f, "GPU-")?;
                self.uuid.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }
    }
}

/// A producer's pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The device of the memory.
    pub device: DeviceId,
    /// The random id of the exporting process ([`Self::is_own_process`]).
    pub process: [u8; 16],
    /// Bytes of one batch of a read.
    pub batch_bytes: u64,
    /// The shape of the pool.
    pub pool: PoolShape,
    /// The token that opens the pool.
    pub handle: [u8; HANDLE_BYTES],
    /// Whether a descriptor is sent with the offer.
    pub descriptor: bool,
}

/// Bytes that are not an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid pool offer: {0}")]
pub(crate) struct OfferError(&'static str);

/// The random id of this process. System process ids are not unique across namespaces.
pub(crate) fn process_id() -> io::Result<[u8; 16]> {
    static PROCESS: OnceLock<[u8; 16]> = OnceLock::new();
    if let Some(process) = PROCESS.get() {
        return Ok(*process);
    }
    let mut fresh = [0; 16];
    getrandom::fill(&mut fresh).map_err(io::Error::other)?;
    Ok(*PROCESS.get_or_init(|| fresh))
}

impl Offer {
    /// Whether this process has exported the pool: a GPU driver does not open exports of the same process.
    #[must_use]
    pub fn is_own_process(&self) -> bool {
        process_id().is_ok_and(|process| process == self.process)
    }

    pub(crate) fn encode(&self) -> [u8; OFFER_BYTES] {
        let mut bytes = [0; OFFER_BYTES];
        bytes[..3].copy_from_slice(&[VERSION, self.device.kind.byte(), u8::from(self.descriptor)]);
        bytes[8..24].copy_from_slice(&self.device.uuid);
        bytes[24..40].copy_from_slice(&self.process);
        let numbers = [self.batch_bytes, self.pool.block_bytes, self.pool.blocks];
        for (at, number) in numbers.into_iter().enumerate() {
            bytes[40 + 8 * at..48 + 8 * at].copy_from_slice(&number.to_le_bytes());
        }
        bytes[64..].copy_from_slice(&self.handle);
        bytes
    }

    pub(crate) fn decode(bytes: [u8; OFFER_BYTES]) -> Result<Self, OfferError> {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let sixteen = |at: usize| bytes[at..at + 16].try_into().expect("sixteen bytes");
        if bytes[0] != VERSION || bytes[3..8] != [0; 5] {
            return Err(OfferError("unknown version"));
        }
        let kind = [DeviceKind::Cuda, DeviceKind::Software].into_iter().find(|kind| kind.byte() == bytes[1]);
        let kind = kind.ok_or(OfferError("unknown device kind"))?;
        let descriptor = match bytes[2] {
            0 => false,
            1 => true,
            _ => return Err(OfferError("descriptor flag is neither 0 nor 1")),
        };
        let (batch_bytes, pool) = (number(40), PoolShape { block_bytes: number(48), blocks: number(56) });
        if !(1..=BATCH_MAX_BYTES).contains(&batch_bytes) {
            return Err(OfferError("batch size out of range"));
        }
        // Pointer arithmetic uses signed offsets.
        let bytes_of_pool = pool.bytes().filter(|&bytes| bytes > 0 && isize::try_from(bytes).is_ok());
        bytes_of_pool.ok_or(OfferError("pool size out of range"))?;
        Ok(Self {
            device: DeviceId { kind, uuid: sixteen(8) },
            process: sixteen(24),
            batch_bytes,
            pool,
            handle: bytes[64..].try_into().expect("the rest"),
            descriptor,
        })
    }

    /// Offset in the pool of a part of a block; `None` for a part outside the block or the pool.
    pub(crate) fn offset_of(&self, block: u32, offset: usize, len: usize) -> Option<usize> {
        let end = offset.checked_add(len)?;
        if u64::from(block) >= self.pool.blocks || end as u64 > self.pool.block_bytes {
            return None;
        }
        // No overflow: inside the pool, whose size was checked.
        usize::try_from(u64::from(block) * self.pool.block_bytes + offset as u64).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer() -> Offer {
        Offer {
            device: DeviceId { kind: DeviceKind::Cuda, uuid: [3; 16] },
            process: [5; 16],
            batch_bytes: 1 << 20,
            pool: PoolShape { block_bytes: 4096, blocks: 9 },
            handle: [7; HANDLE_BYTES],
            descriptor: false,
        }
    }

    #[test]
    fn an_offer_round_trips_on_the_wire() {
        for (kind, descriptor) in [(DeviceKind::Cuda, false), (DeviceKind::Software, true)] {
            let offer = Offer { device: DeviceId { kind, uuid: [9; 16] }, descriptor, ..offer() };
            assert_eq!(Offer::decode(offer.encode()), Ok(offer));
        }
    }

    #[test]
    fn an_impossible_offer_is_rejected() {
        let wrong: [fn(&mut Offer); 6] = [
            |offer| offer.pool.block_bytes = u64::MAX,
            |offer| offer.pool = PoolShape { block_bytes: 1 << 62, blocks: 3 },
            |offer| offer.pool.blocks = 0,
            |offer| offer.pool.block_bytes = 0,
            |offer| offer.batch_bytes = 0,
            |offer| offer.batch_bytes = u64::MAX,
        ];
        for (at, change) in wrong.into_iter().enumerate() {
            let mut offer = offer();
            change(&mut offer);
            assert!(Offer::decode(offer.encode()).is_err(), "{at}");
        }
        for (at, byte) in [(0, 0), (0, 2), (1, 0), (1, 9), (2, 2), (3, 1), (7, 255)] {
            let mut bytes = offer().encode();
            bytes[at] = byte;
            assert!(Offer::decode(bytes).is_err(), "byte {at} is {byte}");
        }
    }

    #[test]
    fn only_parts_of_pool_blocks_have_an_offset() {
        let offer = offer();
        assert_eq!(offer.offset_of(0, 0, 4096), Some(0));
        assert_eq!(offer.offset_of(8, 4000, 96), Some(8 * 4096 + 4000));
        for (block, offset, len) in
            [(9, 0, 1), (u32::MAX, 0, 1), (0, 0, 4097), (0, 4096, 1), (8, usize::MAX, 2)]
        {
            assert_eq!(offer.offset_of(block, offset, len), None, "{block} {offset} {len}");
        }
    }

    #[test]
    fn a_process_knows_its_own_exports() {
        let own = Offer { process: process_id().expect("randomness"), ..offer() };
        assert!(own.is_own_process() && !offer().is_own_process());
    }
}
