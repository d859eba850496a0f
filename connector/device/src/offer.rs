//! What a producer says of its pool to an admitted consumer, as bytes. Pure but for the process's own number, and
//! hostile until decoded.
//!
//! ```text
//! version 1 │ kind 1 │ descriptor 1 │ 5 zero │ uuid 16 │ process 16 │ batch_bytes 8 │ block_bytes 8 │ blocks 8 │ handle 64
//! ```

use std::fmt;
use std::io;
use std::sync::OnceLock;

use baton_connector_shm::Pool;

/// Bytes of a device's token. CUDA's has as many.
pub const HANDLE_BYTES: usize = 64;

/// Bytes of an offer.
pub(crate) const OFFER_BYTES: usize = 8 + 16 + 16 + 3 * 8 + HANDLE_BYTES;

const VERSION: u8 = 1;

/// Most bytes of one batch that a consumer goes along with.
const BATCH_MAX_BYTES: u64 = 1 << 30;

/// What memory an offer is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// An NVIDIA GPU's; the handle is a `CUipcMemHandle`.
    Cuda,
    /// A software device's, in a memfd whose descriptor comes with the offer.
    Software,
}

impl Kind {
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
    /// What it is.
    pub kind: Kind,
    /// Which one: a GPU's own number; of software devices there is one for each host.
    pub uuid: [u8; 16],
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Software => write!(f, "software"),
            Kind::Cuda => {
                write!(f, "GPU-")?;
                self.uuid.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }
    }
}

/// A producer's pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Whose memory it is in.
    pub device: DeviceId,
    /// Which process has exported it ([`Self::is_ours`]).
    pub process: [u8; 16],
    /// How reads are cut.
    pub batch_bytes: u64,
    /// Its shape.
    pub pool: Pool,
    /// What opens it.
    pub handle: [u8; HANDLE_BYTES],
    /// Whether a descriptor comes with it.
    pub descriptor: bool,
}

/// Bytes that are no offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid pool offer: {0}")]
pub(crate) struct NoOffer(&'static str);

/// This process, as nobody else: process ids mean nothing between namespaces.
pub(crate) fn process() -> io::Result<[u8; 16]> {
    static PROCESS: OnceLock<[u8; 16]> = OnceLock::new();
    if let Some(process) = PROCESS.get() {
        return Ok(*process);
    }
    let mut fresh = [0; 16];
    getrandom::fill(&mut fresh).map_err(io::Error::other)?;
    Ok(*PROCESS.get_or_init(|| fresh))
}

impl Offer {
    /// Whether this very process has exported it: a GPU's driver does not open its own exports.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        process().is_ok_and(|process| process == self.process)
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

    pub(crate) fn decode(bytes: [u8; OFFER_BYTES]) -> Result<Self, NoOffer> {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let sixteen = |at: usize| bytes[at..at + 16].try_into().expect("sixteen bytes");
        if bytes[0] != VERSION || bytes[3..8] != [0; 5] {
            return Err(NoOffer("unknown version"));
        }
        let kind = [Kind::Cuda, Kind::Software].into_iter().find(|kind| kind.byte() == bytes[1]);
        let kind = kind.ok_or(NoOffer("unknown device kind"))?;
        let descriptor = match bytes[2] {
            0 => false,
            1 => true,
            _ => return Err(NoOffer("descriptor flag is neither 0 nor 1")),
        };
        let (batch_bytes, pool) = (number(40), Pool { block_bytes: number(48), blocks: number(56) });
        if !(1..=BATCH_MAX_BYTES).contains(&batch_bytes) {
            return Err(NoOffer("batch size out of range"));
        }
        // Offsets are computed as signed numbers by some who take pointers.
        let bytes_of_pool = pool.bytes().filter(|&bytes| bytes > 0 && isize::try_from(bytes).is_ok());
        bytes_of_pool.ok_or(NoOffer("pool size out of range"))?;
        Ok(Self {
            device: DeviceId { kind, uuid: sixteen(8) },
            process: sixteen(24),
            batch_bytes,
            pool,
            handle: bytes[64..].try_into().expect("the rest"),
            descriptor,
        })
    }

    /// Where a part of one of its blocks begins in the pool; `None` when there is no such part.
    pub(crate) fn at(&self, block: u32, offset: usize, len: usize) -> Option<usize> {
        let end = offset.checked_add(len)?;
        if u64::from(block) >= self.pool.blocks || end as u64 > self.pool.block_bytes {
            return None;
        }
        // Inside the pool, whose size is a number.
        usize::try_from(u64::from(block) * self.pool.block_bytes + offset as u64).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer() -> Offer {
        Offer {
            device: DeviceId { kind: Kind::Cuda, uuid: [3; 16] },
            process: [5; 16],
            batch_bytes: 1 << 20,
            pool: Pool { block_bytes: 4096, blocks: 9 },
            handle: [7; HANDLE_BYTES],
            descriptor: false,
        }
    }

    #[test]
    fn an_offer_survives_the_wire() {
        for (kind, descriptor) in [(Kind::Cuda, false), (Kind::Software, true)] {
            let offer = Offer { device: DeviceId { kind, uuid: [9; 16] }, descriptor, ..offer() };
            assert_eq!(Offer::decode(offer.encode()), Ok(offer));
        }
    }

    #[test]
    fn what_cannot_be_is_no_offer() {
        let wrong: [fn(&mut Offer); 6] = [
            |offer| offer.pool.block_bytes = u64::MAX,
            |offer| offer.pool = Pool { block_bytes: 1 << 62, blocks: 3 },
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
    fn only_parts_of_blocks_of_the_pool_are_somewhere() {
        let offer = offer();
        assert_eq!(offer.at(0, 0, 4096), Some(0));
        assert_eq!(offer.at(8, 4000, 96), Some(8 * 4096 + 4000));
        for (block, offset, len) in
            [(9, 0, 1), (u32::MAX, 0, 1), (0, 0, 4097), (0, 4096, 1), (8, usize::MAX, 2)]
        {
            assert_eq!(offer.at(block, offset, len), None, "{block} {offset} {len}");
        }
    }

    #[test]
    fn a_process_knows_its_own_exports() {
        let ours = Offer { process: process().expect("randomness"), ..offer() };
        assert!(ours.is_ours() && !offer().is_ours());
    }
}
