//! The offer of a pool, which a producer sends to an admitted consumer, as bytes. Pure. An offer is untrusted until it
//! is decoded.
//!
//! ```text
//! a pool in host memory   block_bytes 8 │ blocks 8 │ base 8 │ name 2 │ metadata 4 │ the name │ the metadata
//! a device's pool         version 1 │ kind 1 │ 2 zero │ ordinal 4 │ batch_bytes 8, and the same
//! ```
//!
//! The requested service determines the form.

use crate::api::Segment;

/// Bytes of the header of a device's pool.
pub(crate) const DEVICE_BYTES: usize = 16;

const VERSION: u8 = 1;
/// Maximum number of devices of one process.
const ORDINALS: u32 = 256;
/// Largest batch that a consumer accepts, in bytes.
const BATCH_MAX_BYTES: u64 = 1 << 30;

/// Bytes before the name.
pub(crate) const HEAD_BYTES: usize = 8 + 8 + 8 + 2 + 4;

/// Longest name of an agent, in bytes.
pub(crate) const NAME_MAX_BYTES: usize = 96;

/// Longest metadata, in bytes. NIXL 1.5.1 writes about 400 bytes for one region over one device, and some hundred bytes
/// for each further device.
pub(crate) const METADATA_MAX_BYTES: usize = 64 * 1024;

/// A producer's pool and agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) segment: Segment,
    pub(crate) block_bytes: u64,
    pub(crate) blocks: u64,
    /// Address of the pool in the producer's process.
    pub(crate) base: u64,
    pub(crate) name: String,
    pub(crate) metadata: Vec<u8>,
}

/// The head of an offer, checked.
pub(crate) struct OfferHeader {
    offer: Offer,
    name: usize,
    metadata: usize,
}

/// Bytes that are not an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid pool offer: {0}")]
pub(crate) struct OfferError(&'static str);

/// Encodes the header of a device's pool.
pub(crate) fn encode_device_header(segment: Segment, batch_bytes: usize) -> [u8; DEVICE_BYTES] {
    let (kind, ordinal) = match segment {
        Segment::Host => (0, 0),
        Segment::Cuda(ordinal) => (1, ordinal),
    };
    let mut bytes = [0; DEVICE_BYTES];
    (bytes[0], bytes[1]) = (VERSION, kind);
    bytes[4..8].copy_from_slice(&ordinal.to_le_bytes());
    bytes[8..].copy_from_slice(&(batch_bytes as u64).to_le_bytes());
    bytes
}

/// Decodes the header of a device's pool: its kind of memory, and the bytes of a batch.
pub(crate) fn decode_device_header(bytes: [u8; DEVICE_BYTES]) -> Result<(Segment, usize), OfferError> {
    let [VERSION, kind, 0, 0, a, b, c, d, batch @ ..] = bytes else {
        return Err(OfferError("unknown version"));
    };
    let segment = match (kind, u32::from_le_bytes([a, b, c, d])) {
        (0, 0) => Segment::Host,
        (1, ordinal) if ordinal < ORDINALS => Segment::Cuda(ordinal),
        _ => return Err(OfferError("unknown memory kind")),
    };
    let batch = Some(u64::from_le_bytes(batch)).filter(|batch| (1..=BATCH_MAX_BYTES).contains(batch));
    let batch = batch.and_then(|batch| usize::try_from(batch).ok());
    Ok((segment, batch.ok_or(OfferError("batch size out of range"))?))
}

impl Offer {
    /// Encodes the offer without the header of a device's pool; `None` if it is longer than a consumer accepts.
    pub(crate) fn encode(&self) -> Option<Vec<u8>> {
        let (name, metadata) = (self.name.len(), self.metadata.len());
        if name > NAME_MAX_BYTES || metadata > METADATA_MAX_BYTES {
            return None;
        }
        let mut bytes = Vec::with_capacity(HEAD_BYTES + name + metadata);
        for number in [self.block_bytes, self.blocks, self.base] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(u16::try_from(name).ok()?.to_le_bytes());
        bytes.extend(u32::try_from(metadata).ok()?.to_le_bytes());
        bytes.extend(self.name.as_bytes());
        bytes.extend(&self.metadata);
        Some(bytes)
    }

    /// Address of a part of a block in the producer's process; `None` for a part outside the block or the pool.
    pub(crate) fn address(&self, block: u32, offset: usize, len: usize) -> Option<usize> {
        let end = offset.checked_add(len)?;
        if u64::from(block) >= self.blocks || end as u64 > self.block_bytes {
            return None;
        }
        // No overflow: inside the pool, which was checked to end inside the address space.
        usize::try_from(self.base + u64::from(block) * self.block_bytes + offset as u64).ok()
    }
}

impl OfferHeader {
    /// Decodes the header of an offer for a pool in this kind of memory.
    pub(crate) fn decode(segment: Segment, bytes: [u8; HEAD_BYTES]) -> Result<Self, OfferError> {
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let (block_bytes, blocks, base) = (u64_at(0), u64_at(8), u64_at(16));
        let name = usize::from(u16::from_le_bytes([bytes[24], bytes[25]]));
        let metadata = u32::from_le_bytes(bytes[26..30].try_into().expect("four bytes")) as usize;
        let pool = block_bytes.checked_mul(blocks).filter(|&bytes| bytes > 0);
        let end = pool.ok_or(OfferError("pool size out of range"))?.checked_add(base);
        end.and_then(|end| usize::try_from(end).ok())
            .ok_or(OfferError("pool ends outside the address space"))?;
        if base == 0 {
            return Err(OfferError("pool begins at address 0"));
        }
        if !(1..=NAME_MAX_BYTES).contains(&name) || !(1..=METADATA_MAX_BYTES).contains(&metadata) {
            return Err(OfferError("length of name or metadata out of range"));
        }
        let offer = Offer { segment, block_bytes, blocks, base, name: String::new(), metadata: Vec::new() };
        Ok(Self { offer, name, metadata })
    }

    /// Bytes after the header.
    pub(crate) fn rest_bytes(&self) -> usize {
        self.name + self.metadata
    }

    /// The whole offer, from the [`Self::rest_bytes`] after the header.
    pub(crate) fn complete(mut self, rest: &[u8]) -> Result<Offer, OfferError> {
        let (name, metadata) = rest.split_at_checked(self.name).ok_or(OfferError("truncated"))?;
        if metadata.len() != self.metadata {
            return Err(OfferError("truncated"));
        }
        // Names are passed to C, logged and used as keys.
        let plain = name.iter().all(|byte| byte.is_ascii_graphic());
        let name = std::str::from_utf8(name).ok().filter(|_| plain);
        self.offer.name = name.ok_or(OfferError("name is not printable ASCII"))?.to_owned();
        self.offer.metadata = metadata.to_vec();
        Ok(self.offer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer() -> Offer {
        let (name, metadata) = ("baton-1-2".to_owned(), vec![0, 255, 7]);
        Offer { segment: Segment::Host, block_bytes: 4096, blocks: 9, base: 1 << 32, name, metadata }
    }

    fn decode(bytes: &[u8]) -> Result<Offer, OfferError> {
        let (head, rest) = bytes.split_first_chunk().expect("a head");
        OfferHeader::decode(Segment::Host, *head)?.complete(rest)
    }

    #[test]
    fn an_offer_round_trips_on_the_wire() {
        let bytes = offer().encode().expect("it is short");
        assert_eq!(decode(&bytes), Ok(offer()));
        let head = bytes.first_chunk().expect("a head");
        let head = OfferHeader::decode(Segment::Host, *head).expect("an offer");
        assert_eq!(head.rest_bytes(), bytes.len() - HEAD_BYTES);
    }

    #[test]
    fn the_memory_kind_round_trips_and_an_unknown_kind_is_rejected() {
        for segment in [Segment::Host, Segment::Cuda(0), Segment::Cuda(7), Segment::Cuda(255)] {
            assert_eq!(decode_device_header(encode_device_header(segment, 1 << 20)), Ok((segment, 1 << 20)));
        }
        for (at, byte) in [(0, 0), (0, 2), (1, 2), (2, 1), (3, 1), (5, 1), (7, 255), (15, 1)] {
            let mut bytes = encode_device_header(Segment::Cuda(3), 1 << 20);
            bytes[at] = byte;
            assert!(decode_device_header(bytes).is_err(), "byte {at} is {byte}");
        }
        assert!(decode_device_header(encode_device_header(Segment::Host, 0)).is_err(), "batches of nothing");
        let mut host = encode_device_header(Segment::Host, 1 << 20);
        host[4] = 1;
        assert!(decode_device_header(host).is_err(), "host memory of a device");
    }

    #[test]
    fn an_impossible_offer_is_rejected() {
        let wrong: [fn(&mut Offer); 7] = [
            |offer| offer.block_bytes = u64::MAX,
            |offer| offer.blocks = 0,
            |offer| offer.base = u64::MAX - 100,
            |offer| offer.base = 0,
            |offer| offer.name = String::new(),
            |offer| offer.name = "a\0b".into(),
            |offer| offer.metadata = Vec::new(),
        ];
        for (at, change) in wrong.into_iter().enumerate() {
            let mut offer = offer();
            change(&mut offer);
            assert!(decode(&offer.encode().expect("it is short")).is_err(), "{at}");
        }
        let bytes = offer().encode().expect("it is short");
        for cut in 1..bytes.len() - HEAD_BYTES {
            assert!(decode(&bytes[..bytes.len() - cut]).is_err(), "{cut} bytes less");
        }
        let long = Offer { metadata: vec![0; METADATA_MAX_BYTES + 1], ..offer() };
        assert_eq!(long.encode(), None);
    }

    #[test]
    fn only_parts_of_blocks_of_the_pool_have_an_address() {
        let offer = offer();
        assert_eq!(offer.address(0, 0, 4096), Some(1 << 32));
        assert_eq!(offer.address(8, 4000, 96), Some((1 << 32) + 8 * 4096 + 4000));
        for (block, offset, len) in
            [(9, 0, 1), (u32::MAX, 0, 1), (0, 0, 4097), (0, 4096, 1), (8, usize::MAX, 2)]
        {
            assert_eq!(offer.address(block, offset, len), None, "{block} {offset} {len}");
        }
    }
}
