//! Ids of requests, leases, engines, readers and blocks, each with a type of its own.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::limits::{LINKS_MAX, REQUEST_ID_MAX_BYTES};

/// A block's index in its engine's paged pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The block's index as a `usize`.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One shard of an engine's KV cache, counted from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub u16);

/// One reader of a lease: one link of one decode request.
///
/// A consumer has one link to a producer per pair of ranks that share heads
/// ([`crate::memory::slice::Geometry::links`]). Leases keep *sets* of readers, never counts, so that a repeated
/// acknowledgement counts once. A consumer has everything when all its links have. `(consumer, of)` together identify
/// the consumer, so all readers of one consumer agree on the number of its links.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Reader {
    /// Random 64-bit id that a decode engine generates for one fetch.
    pub consumer: u64,
    /// Number of this consumer's links for this lease, 1 to [`LINKS_MAX`].
    pub of: u16,
    /// The link that reads, counted from 0.
    pub rank: Rank,
}

impl Reader {
    /// The reader of a consumer with one link.
    #[must_use]
    pub const fn sole(consumer: u64) -> Self {
        Self { consumer, of: 1, rank: Rank(0) }
    }

    /// Link `rank` of `of`; `None` for an invalid number.
    #[must_use]
    pub fn link(consumer: u64, rank: Rank, of: u16) -> Option<Self> {
        let one_of_them = rank.0 < of && usize::from(of) <= LINKS_MAX;
        one_of_them.then_some(Self { consumer, of, rank })
    }
}

/// A random number per engine start. A handoff from an earlier epoch is always gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Epoch(pub u64);

/// The secret 128-bit name of one lease. It grants the right to read and to release the lease.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(pub u128);

/// The id of a request at router, producer and consumer. The router creates it.
///
/// At most [`REQUEST_ID_MAX_BYTES`] bytes of printable ASCII without spaces. Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(Arc<str>);

/// The id of an engine in its cluster, unique per engine start.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct EngineId(pub Box<str>);

/// Why a text is not a valid id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// A handle is 32 hexadecimal digits, an epoch 16.
    #[error("expected {expected} hexadecimal digits, found {found} bytes")]
    NotHex {
        /// Digits required.
        expected: usize,
        /// Bytes found.
        found: usize,
    },
    /// Request ids are 1 to [`REQUEST_ID_MAX_BYTES`] bytes of printable ASCII without spaces.
    #[error("a request id is 1 to {REQUEST_ID_MAX_BYTES} printable ASCII characters without spaces")]
    RequestId,
}

impl RequestId {
    /// Checks a request id.
    ///
    /// # Errors
    /// [`IdError::RequestId`] when it is empty, too long, or not printable ASCII.
    pub fn new(text: &str) -> Result<Self, IdError> {
        let printable = text.bytes().all(|b| b.is_ascii_graphic());
        if text.is_empty() || text.len() > REQUEST_ID_MAX_BYTES || !printable {
            return Err(IdError::RequestId);
        }
        Ok(Self(text.into()))
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Serialize for RequestId {
    fn serialize<S: serde::Serializer>(&self, into: S) -> Result<S::Ok, S::Error> {
        into.serialize_str(&self.0)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Log lines must not contain the secret: only the first 8 digits are shown.
impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle({:08x}…)", self.0 >> 96)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

fn hex(text: &str, digits: usize) -> Result<u128, IdError> {
    let wrong = IdError::NotHex { expected: digits, found: text.len() };
    if text.len() != digits || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(wrong);
    }
    u128::from_str_radix(text, 16).map_err(|_| wrong)
}

impl FromStr for Handle {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        hex(text, 32).map(Self)
    }
}

impl FromStr for Epoch {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        hex(text, 16).map(|v| Self(v as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_and_epochs_round_trip_and_reject_other_text() {
        let handle = Handle(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
        assert_eq!(handle.to_string().parse(), Ok(handle));
        assert_eq!(Epoch(7).to_string().parse(), Ok(Epoch(7)));
        for bad in ["", "0", "+0000000000000000000000000000001", "zz", "0123456789abcdef0011223344556677aa"] {
            assert!(bad.parse::<Handle>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_handle_in_a_log_line_is_not_the_key() {
        let handle = Handle(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
        assert!(!format!("{handle:?}").contains("4455"));
    }

    #[test]
    fn request_ids_are_short_printable_ascii() {
        assert!(RequestId::new("0f2c-1").is_ok());
        for bad in ["", "a b", "a\r\nb", "é", &"x".repeat(REQUEST_ID_MAX_BYTES + 1)] {
            assert_eq!(RequestId::new(bad), Err(IdError::RequestId));
        }
    }
}
