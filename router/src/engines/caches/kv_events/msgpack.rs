//! As much of MessagePack as events are made of: one item after the other, borrowed from the message.
//!
//! Nothing is allocated by a length that is only claimed, and nesting is bounded.

/// Levels of arrays and maps that are skipped at most.
const NESTING_MAX: u32 = 16;

/// The bytes are not MessagePack, or not the item that was wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed MessagePack")]
pub(super) struct Malformed;

/// One item; of arrays and maps, how many items (or pairs) follow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Item<'a> {
    Nil,
    Boolean,
    /// Negative numbers by their two's complement.
    Integer(u64),
    Float,
    Text(&'a [u8]),
    Bytes(&'a [u8]),
    Array(usize),
    Map(usize),
    /// A type of an application's own.
    Extension,
}

/// Reads items from the front.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Bytes that are left.
    pub(super) fn left(&self) -> &'a [u8] {
        self.bytes
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.bytes.split_at_checked(count).ok_or(Malformed)?;
        self.bytes = rest;
        Ok(taken)
    }

    /// A big-endian number of so many bytes.
    fn number(&mut self, bytes: usize) -> Result<u64, Malformed> {
        Ok(self.take(bytes)?.iter().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    fn length(&mut self, bytes: usize) -> Result<usize, Malformed> {
        usize::try_from(self.number(bytes)?).map_err(|_| Malformed)
    }

    /// As many items as are claimed need at least as many bytes.
    fn count(&self, count: usize) -> Result<usize, Malformed> {
        if count <= self.bytes.len() { Ok(count) } else { Err(Malformed) }
    }

    pub(super) fn item(&mut self) -> Result<Item<'a>, Malformed> {
        let tag = self.take(1)?[0];
        Ok(match tag {
            0x00..=0x7f => Item::Integer(u64::from(tag)),
            0xe0..=0xff => Item::Integer(i64::from(tag as i8) as u64),
            0x80..=0x8f => Item::Map(self.count(usize::from(tag & 0x0f))?),
            0x90..=0x9f => Item::Array(self.count(usize::from(tag & 0x0f))?),
            0xa0..=0xbf => Item::Text(self.take(usize::from(tag & 0x1f))?),
            0xc0 => Item::Nil,
            0xc2 | 0xc3 => Item::Boolean,
            0xc4..=0xc6 => {
                let length = self.length(1 << (tag - 0xc4))?;
                Item::Bytes(self.take(length)?)
            }
            0xca => self.take(4).map(|_| Item::Float)?,
            0xcb => self.take(8).map(|_| Item::Float)?,
            0xcc..=0xcf => Item::Integer(self.number(1 << (tag - 0xcc))?),
            0xd0..=0xd3 => {
                let bytes = 1_u32 << (tag - 0xd0);
                let unused = 64 - 8 * bytes;
                let number = self.number(bytes as usize)?;
                // Its sign is spread over the bits that it has not.
                Item::Integer(((number << unused) as i64 >> unused) as u64)
            }
            0xd9..=0xdb => {
                let length = self.length(1 << (tag - 0xd9))?;
                Item::Text(self.take(length)?)
            }
            0xdc | 0xdd => {
                let count = self.length(2 << (tag - 0xdc))?;
                Item::Array(self.count(count)?)
            }
            0xde | 0xdf => {
                let count = self.length(2 << (tag - 0xde))?;
                Item::Map(self.count(count)?)
            }
            // A byte names an extension's type.
            0xc7..=0xc9 => {
                let length = self.length(1 << (tag - 0xc7))?;
                self.take(1)?;
                self.take(length).map(|_| Item::Extension)?
            }
            0xd4..=0xd8 => self.take(1 + (1 << (tag - 0xd4))).map(|_| Item::Extension)?,
            // Reserved.
            0xc1 => return Err(Malformed),
        })
    }

    /// Passes one item over, with everything in it.
    pub(super) fn skip(&mut self) -> Result<(), Malformed> {
        self.skip_within(NESTING_MAX)
    }

    fn skip_within(&mut self, levels: u32) -> Result<(), Malformed> {
        let inside = match self.item()? {
            Item::Array(count) => count,
            Item::Map(count) => count.checked_mul(2).ok_or(Malformed)?,
            _ => return Ok(()),
        };
        let levels = levels.checked_sub(1).ok_or(Malformed)?;
        (0..inside).try_for_each(|_| self.skip_within(levels))
    }

    /// An array's length.
    pub(super) fn array(&mut self) -> Result<usize, Malformed> {
        match self.item()? {
            Item::Array(count) => Ok(count),
            _ => Err(Malformed),
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
            let mut reader = Reader::new(bytes);
            let item = reader.item().ok().map(|item| format!("{item:?}"));
            item.filter(|_| reader.is_empty())
        };
        let integer = |n: i64| Some(format!("{:?}", Item::Integer(n as u64)));
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
            assert_eq!(one(bytes), Some(format!("{:?}", Item::Text(text.as_bytes()))));
        }
        assert_eq!(one(&[0xc4, 1, 9]), Some(format!("{:?}", Item::Bytes(&[9]))));
        assert_eq!(one(&[0xca, 0, 0, 0, 0]), Some("Float".into()));
        assert_eq!(one(&[0xcb, 0, 0, 0, 0, 0, 0, 0, 0]), Some("Float".into()));
        for bytes in [&[0xc7, 2, 5, 1, 1][..], &[0xc8, 0, 1, 5, 1], &[0xd4, 5, 1], &[0xd6, 255, 1, 2, 3, 4]] {
            assert_eq!(one(bytes), Some("Extension".into()), "{bytes:x?}");
        }
        assert_eq!((one(&[0xc0]), one(&[0xc3])), (Some("Nil".into()), Some("Boolean".into())));
    }

    #[test]
    fn claimed_lengths_and_deep_nesting_are_refused() {
        assert_eq!(Reader::new(&[0xdd, 0xff, 0xff, 0xff, 0xff]).item(), Err(Malformed));
        assert_eq!(Reader::new(&[0xdf, 0xff, 0xff, 0xff, 0xff]).item(), Err(Malformed));
        assert_eq!(Reader::new(&[0xc6, 0xff, 0xff, 0xff, 0xff, 1]).item(), Err(Malformed));
        assert_eq!(Reader::new(&[0x91; 1000]).skip(), Err(Malformed));
        let mut deep = vec![0x91; 16];
        deep.push(0xc0);
        assert_eq!(Reader::new(&deep).skip(), Ok(()));
        assert_eq!(Reader::new(&[]).item(), Err(Malformed));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut reader = Reader::new(&bytes);
            while !reader.is_empty() && reader.skip().is_ok() {}
        }
    }
}
