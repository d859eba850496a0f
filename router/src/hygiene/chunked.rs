//! A body in chunks, read strictly: hexadecimal sizes, CRLF and nothing else.
//!
//! Extensions and trailers are refused. Nobody sends them to an API like this, and everything that smuggles through
//! chunks needs one of them, or a lenient reader of line ends.
//!
//! Pure: bytes in, data out. Called again with more bytes until it has ended.

use bytes::{Buf, BytesMut};

/// 8 digits: up to 4 GiB, over any limit.
const SIZE_DIGITS_MAX: usize = 8;

/// Where the reader is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Chunked {
    /// Before a size.
    #[default]
    Size,
    /// So many bytes of a chunk are still to come.
    Data(usize),
    /// Before the end of a chunk's line.
    DataEnd,
    /// Behind the last size: before the empty line.
    End,
    /// Everything was read.
    Done,
}

/// The bytes are not chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotChunks;

/// The body is over its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkError {
    NotChunks,
    TooLarge,
}

impl From<NotChunks> for ChunkError {
    fn from(NotChunks: NotChunks) -> Self {
        Self::NotChunks
    }
}

impl Chunked {
    /// Moves data from `input` to `out` as far as it goes. Whether the body has ended; what is then left of `input` is
    /// behind it.
    ///
    /// # Errors
    /// [`ChunkError`]; a chunk that would lead beyond `limit_bytes` is refused at its size.
    pub(crate) fn decode(
        &mut self,
        input: &mut BytesMut,
        out: &mut BytesMut,
        limit_bytes: usize,
    ) -> Result<bool, ChunkError> {
        loop {
            match *self {
                Self::Size => {
                    let Some((size, line_bytes)) = size(input)? else { return Ok(false) };
                    if size > limit_bytes - out.len().min(limit_bytes) {
                        return Err(ChunkError::TooLarge);
                    }
                    input.advance(line_bytes);
                    *self = if size == 0 { Self::End } else { Self::Data(size) };
                }
                Self::Data(left) => {
                    let here = left.min(input.len());
                    out.extend_from_slice(&input[..here]);
                    input.advance(here);
                    if here < left {
                        *self = Self::Data(left - here);
                        return Ok(false);
                    }
                    *self = Self::DataEnd;
                }
                Self::DataEnd | Self::End => {
                    if !b"\r\n".starts_with(&input[..input.len().min(2)]) {
                        return Err(ChunkError::NotChunks);
                    }
                    if input.len() < 2 {
                        return Ok(false);
                    }
                    input.advance(2);
                    *self = if *self == Self::End { Self::Done } else { Self::Size };
                }
                Self::Done => return Ok(true),
            }
        }
    }
}

/// A size and the bytes of its line; `None` where the line is not whole yet.
fn size(input: &[u8]) -> Result<Option<(usize, usize)>, NotChunks> {
    let digits = input.iter().take(SIZE_DIGITS_MAX + 1).take_while(|byte| byte.is_ascii_hexdigit()).count();
    if digits > SIZE_DIGITS_MAX || (digits == 0 && !input.is_empty()) {
        return Err(NotChunks);
    }
    let rest = &input[digits..];
    if !b"\r\n".starts_with(&rest[..rest.len().min(2)]) {
        return Err(NotChunks);
    }
    if digits == 0 || rest.len() < 2 {
        return Ok(None);
    }
    let text = std::str::from_utf8(&input[..digits]).map_err(|_| NotChunks)?;
    let size = usize::from_str_radix(text, 16).map_err(|_| NotChunks)?;
    Ok(Some((size, digits + 2)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The data, and what is behind it.
    type Whole = (Vec<u8>, Vec<u8>);

    fn all(text: &[u8], limit: usize) -> Result<Option<Whole>, ChunkError> {
        let (mut input, mut out) = (BytesMut::from(text), BytesMut::new());
        let done = Chunked::default().decode(&mut input, &mut out, limit)?;
        Ok(done.then(|| (out.to_vec(), input.to_vec())))
    }

    #[test]
    fn every_split_gives_the_same_data() {
        let text = b"5\r\nhello\r\n00a\r\n, world...\r\n0\r\n\r\nGET";
        let whole = Some((b"hello, world...".to_vec(), b"GET".to_vec()));
        assert_eq!(all(text, 15), Ok(whole.clone()));
        for first in 0..text.len() {
            let (mut input, mut out) = (BytesMut::from(&text[..first]), BytesMut::new());
            let mut chunks = Chunked::default();
            let early = chunks.decode(&mut input, &mut out, 15).unwrap();
            input.extend_from_slice(&text[first..]);
            assert!(chunks.decode(&mut input, &mut out, 15).unwrap(), "{first} {early}");
            assert_eq!(Some((out.to_vec(), input.to_vec())), whole);
        }
    }

    #[test]
    fn nothing_but_plain_chunks_is_read() {
        for odd in [
            "5;a=b\r\nhello\r\n0\r\n\r\n",
            "5 \r\nhello\r\n",
            " 5\r\nhello\r\n",
            "5\nhello\n0\n\n",
            "0x5\r\nhello\r\n",
            "+5\r\nhello\r\n",
            "-1\r\n",
            "g\r\n",
            "\r\n",
            "5\r\nhelloX\r\n",
            "5\r\nhello\r0\r\n\r\n",
            "5\r\nhello\n",
            "000000005\r\nhello",
            "fffffffff\r\n",
            "0\r\nA: b\r\n\r\n",
            "0\r\n\n",
            "0;x\r\n\r\n",
            "5\r\r\nhello",
        ] {
            assert_eq!(all(odd.as_bytes(), 100), Err(ChunkError::NotChunks), "{odd:?}");
        }
        assert_eq!(all(b"6\r\n", 5), Err(ChunkError::TooLarge));
        assert_eq!(all(b"3\r\nabc\r\n3\r\n", 5), Err(ChunkError::TooLarge));
        for partial in ["", "5", "5\r", "5\r\n", "5\r\nhel", "5\r\nhello\r", "0\r\n", "0\r\n\r"] {
            assert_eq!(all(partial.as_bytes(), 5), Ok(None), "{partial:?}");
        }
    }
}
