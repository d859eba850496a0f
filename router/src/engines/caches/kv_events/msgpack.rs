//! A reader for the part of MessagePack that events use: one item after the other, borrowed from the message.
//!
//! No allocation depends on a claimed length, and nesting is bounded.

/// Maximum levels of arrays and maps that are skipped.
const NESTING_MAX: u32 = 16;

/// The bytes are not MessagePack, or not the expected item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed MessagePack")]
pub(super) struct MsgpackError;

/// One item. For arrays and maps: the number of items or pairs that follow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum MsgpackItem<'a> {
    Nil,
    Boolean,
    /// Negative numbers as their two's complement.
    Integer(u64),
    Float,
    Text(&'a [u8]),
    Bytes(&'a [u8]),
    Array(usize),
    Map(usize),
    /// An application's own type.
    Extension,
}

/// Reads items from the front.
#[derive(Clone, Copy, Debug)]
pub(super) struct MsgpackReader<'a> {
    bytes: &'a [u8],
}

impl<'a> MsgpackReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The next item, which stays unread.
    pub(super) fn peek(&self) -> Result<MsgpackItem<'a>, MsgpackError> {
        Self { ..*self }.item()
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], MsgpackError> {
        let (taken, rest) = self.bytes.split_at_checked(count).ok_or(MsgpackError)?;
        self.bytes = rest;
        Ok(taken)
    }

    /// A big-endian number of so many bytes.
    fn number(&mut self, bytes: usize) -> Result<u64, MsgpackError> {
        Ok(self.take(bytes)?.iter().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    fn length(&mut self, bytes: usize) -> Result<usize, MsgpackError> {
        usize::try_from(self.number(bytes)?).map_err(|_| MsgpackError)
    }

    /// Checks a claimed number of items: each needs at least one byte.
    fn count(&self, count: usize) -> Result<usize, MsgpackError> {
        if count <= self.bytes.len() { Ok(count) } else { Err(MsgpackError) }
    }

    pub(super) fn item(&mut self) -> Result<MsgpackItem<'a>, MsgpackError> {
        let tag = self.take(1)?[0];
        Ok(match tag {
            0x00..=0x7f => MsgpackItem::Integer(u64::from(tag)),
            0xe0..=0xff => MsgpackItem::Integer(i64::from(tag as i8) as u64),
            0x80..=0x8f => MsgpackItem::Map(self.count(usize::from(tag & 0x0f))?),
            0x90..=0x9f => MsgpackItem::Array(self.count(usize::from(tag & 0x0f))?),
            0xa0..=0xbf => MsgpackItem::Text(self.take(usize::from(tag & 0x1f))?),
            0xc0 => MsgpackItem::Nil,
            0xc2 | 0xc3 => MsgpackItem::Boolean,
            0xc4..=0xc6 => {
                let length = self.length(1 << (tag - 0xc4))?;
                MsgpackItem::Bytes(self.take(length)?)
            }
            0xca => self.take(4).map(|_| MsgpackItem::Float)?,
            0xcb => self.take(8).map(|_| MsgpackItem::Float)?,
            0xcc..=0xcf => MsgpackItem::Integer(self.number(1 << (tag - 0xcc))?),
            0xd0..=0xd3 => {
                let bytes = 1_u32 << (tag - 0xd0);
                let unused = 64 - 8 * bytes;
                let number = self.number(bytes as usize)?;
                // Sign extension to 64 bits.
                MsgpackItem::Integer(((number << unused) as i64 >> unused) as u64)
            }
            0xd9..=0xdb => {
                let length = self.length(1 << (tag - 0xd9))?;
                MsgpackItem::Text(self.take(length)?)
            }
            0xdc | 0xdd => {
                let count = self.length(2 << (tag - 0xdc))?;
                MsgpackItem::Array(self.count(count)?)
            }
            0xde | 0xdf => {
                let count = self.length(2 << (tag - 0xde))?;
                MsgpackItem::Map(self.count(count)?)
            }
            // One byte contains an extension's type.
            0xc7..=0xc9 => {
                let length = self.length(1 << (tag - 0xc7))?;
                self.take(1)?;
                self.take(length).map(|_| MsgpackItem::Extension)?
            }
            0xd4..=0xd8 => self.take(1 + (1 << (tag - 0xd4))).map(|_| MsgpackItem::Extension)?,
            // Reserved.
            0xc1 => return Err(MsgpackError),
        })
    }

    /// Skips one item with all its contents.
    pub(super) fn skip(&mut self) -> Result<(), MsgpackError> {
        self.skip_within(NESTING_MAX)
    }

    fn skip_within(&mut self, levels: u32) -> Result<(), MsgpackError> {
        let inside = match self.item()? {
            MsgpackItem::Array(count) => count,
            MsgpackItem::Map(count) => count.checked_mul(2).ok_or(MsgpackError)?,
            _ => return Ok(()),
        };
        let levels = levels.checked_sub(1).ok_or(MsgpackError)?;
        (0..inside).try_for_each(|_| self.skip_within(levels))
    }

    /// An array's length.
    pub(super) fn array(&mut self) -> Result<usize, MsgpackError> {
        match self.item()? {
            MsgpackItem::Array(count) => Ok(count),
            _ => Err(MsgpackError),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_length_of_every_kind_is_read() {
        let one = |bytes: &[u8]| {
            let mut reader = MsgpackReader::new(bytes);
            let item = reader.item().ok().map(|item| format!("{item:?}"));
            item.filter(|_| reader.is_empty())
        };
        let integer = |n: i64| Some(format!("{:?}", MsgpackItem::Integer(n as u64)));
        for (bytes, n) in [
            (&[0x7f][..], 127),
            (&[0xff], -1),
            (&[0xcc, 200], 200),
            (&[0xcd, 1, 0], 256),
            (&[0xce, 0, 1, 0, 0], 65_536),
            (&[0xcf, 0, 0, 0, 1, 0, 0, 0, 0], 1 << 32),
            (&[0xd0, 0x80], -128),
            (&[0xd1, 0xff, 0], -256),
            (&[0xd2, 0xff, 0xff, 0xff, 0xfe], -2),
            (&[0xd3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfd], -3),
        ] {
            assert_eq!(one(bytes), integer(n), "{bytes:x?}");
        }
        for (bytes, text) in
            [(&[0xa2, b'h', b'i'][..], "hi"), (&[0xd9, 1, b'x'], "x"), (&[0xda, 0, 1, b'y'], "y")]
        {
            assert_eq!(one(bytes), Some(format!("{:?}", MsgpackItem::Text(text.as_bytes()))));
        }
        assert_eq!(one(&[0xc4, 1, 9]), Some(format!("{:?}", MsgpackItem::Bytes(&[9]))));
        assert_eq!(one(&[0xca, 0, 0, 0, 0]), Some("Float".into()));
        assert_eq!(one(&[0xcb, 0, 0, 0, 0, 0, 0, 0, 0]), Some("Float".into()));
        for bytes in [&[0xc7, 2, 5, 1, 1][..], &[0xc8, 0, 1, 5, 1], &[0xd4, 5, 1], &[0xd6, 255, 1, 2, 3, 4]] {
            assert_eq!(one(bytes), Some("Extension".into()), "{bytes:x?}");
        }
        assert_eq!((one(&[0xc0]), one(&[0xc3])), (Some("Nil".into()), Some("Boolean".into())));
    }

    #[test]
    fn claimed_lengths_and_deep_nesting_are_refused() {
        assert_eq!(MsgpackReader::new(&[0xdd, 0xff, 0xff, 0xff, 0xff]).item(), Err(MsgpackError));
        assert_eq!(MsgpackReader::new(&[0xdf, 0xff, 0xff, 0xff, 0xff]).item(), Err(MsgpackError));
        assert_eq!(MsgpackReader::new(&[0xc6, 0xff, 0xff, 0xff, 0xff, 1]).item(), Err(MsgpackError));
        assert_eq!(MsgpackReader::new(&[0x91; 1000]).skip(), Err(MsgpackError));
        let mut deep = vec![0x91; 16];
        deep.push(0xc0);
        assert_eq!(MsgpackReader::new(&deep).skip(), Ok(()));
        assert_eq!(MsgpackReader::new(&[]).item(), Err(MsgpackError));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut reader = MsgpackReader::new(&bytes);
            while !reader.is_empty() && reader.skip().is_ok() {}
        }
    }
}
