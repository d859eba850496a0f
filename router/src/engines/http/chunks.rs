//! Decoder of chunked replies, in place.
//!
//! An engine writes each event as a chunk. When the router is busy, one read contains many of them, and they are
//! forwarded together. Their data is moved up over the framing in between, so that it is contiguous. A single
//! chunk is not copied.
//!
//! Pure: bytes in, the range of data out. Chunk extensions and trailers are skipped, and everything is bounded.

/// Maximum digits of a size: up to 2^60 bytes.
const DIGITS_MAX: usize = 15;
/// Maximum bytes of a size with its extensions, or of one trailer line.
const LINE_BYTES_MAX: usize = 4096;
/// Maximum lines of a trailer.
const TRAILER_LINES_MAX: u8 = 32;

/// State of the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChunkDecoder {
    /// At a size.
    Size,
    /// So many bytes of data are missing.
    Data(u64),
    /// At the line end behind data.
    DataEnd,
    /// Behind the last size, after so many lines.
    Trailer(u8),
    /// Behind the empty line: the reply has ended.
    Done,
}

/// The result of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DecodedRange {
    /// Where data begins.
    pub from: usize,
    /// Where data ends. All bytes in between are data.
    pub to: usize,
    /// Bytes that are no longer needed. The rest waits for more.
    pub consumed: usize,
}

/// The bytes are not chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReplyChunkError;

impl ChunkDecoder {
    /// Moves the data in `bytes` together.
    ///
    /// # Errors
    /// [`ReplyChunkError`]. The connection is then unusable.
    pub(super) fn decode(&mut self, bytes: &mut [u8]) -> Result<DecodedRange, ReplyChunkError> {
        let (mut from, mut to, mut at) = (0, 0, 0);
        loop {
            match *self {
                Self::Size => {
                    let Some(line) = line(&bytes[at..])? else { break };
                    let size = size(&bytes[at..at + line])?;
                    at += line;
                    *self = if size == 0 { Self::Trailer(0) } else { Self::Data(size) };
                }
                Self::Data(left) => {
                    let here = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len() - at);
                    if here == 0 {
                        break;
                    }
                    if to == from {
                        // The first data stays in place.
                        (from, to) = (at, at + here);
                    } else {
                        bytes.copy_within(at..at + here, to);
                        to += here;
                    }
                    at += here;
                    let left = left - here as u64;
                    *self = if left == 0 { Self::DataEnd } else { Self::Data(left) };
                }
                Self::DataEnd => match &bytes[at..] {
                    [b'\r', b'\n', ..] => {
                        at += 2;
                        *self = Self::Size;
                    }
                    [] | [b'\r'] => break,
                    _ => return Err(ReplyChunkError),
                },
                Self::Trailer(lines) => {
                    let Some(line) = line(&bytes[at..])? else { break };
                    at += line;
                    *self = match line {
                        2 => Self::Done,
                        _ if lines == TRAILER_LINES_MAX => return Err(ReplyChunkError),
                        _ => Self::Trailer(lines + 1),
                    };
                }
                Self::Done => break,
            }
        }
        Ok(DecodedRange { from, to, consumed: at })
    }
}

/// Length of the first line with its end; `None` while it is incomplete.
fn line(bytes: &[u8]) -> Result<Option<usize>, ReplyChunkError> {
    let within = &bytes[..bytes.len().min(LINE_BYTES_MAX)];
    match memchr::memchr(b'\n', within) {
        Some(at) if at > 0 && bytes[at - 1] == b'\r' => Ok(Some(at + 1)),
        Some(_) => Err(ReplyChunkError),
        None if bytes.len() >= LINE_BYTES_MAX => Err(ReplyChunkError),
        None => Ok(None),
    }
}

/// Parses the size in a line.
fn size(line: &[u8]) -> Result<u64, ReplyChunkError> {
    let mut size = 0;
    for (digits, &byte) in line.iter().enumerate() {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            b'A'..=b'F' => byte - b'A' + 10,
            // The end of the line, or an extension.
            b'\r' | b';' | b' ' | b'\t' if digits > 0 => return Ok(size),
            _ => return Err(ReplyChunkError),
        };
        if digits == DIGITS_MAX {
            return Err(ReplyChunkError);
        }
        size = size << 4 | u64::from(digit);
    }
    Err(ReplyChunkError)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes pieces as reads would return them.
    fn decode(pieces: &[&[u8]]) -> Result<(Vec<u8>, Vec<u8>, bool), ReplyChunkError> {
        let (mut chunks, mut waiting, mut data) = (ChunkDecoder::Size, Vec::new(), Vec::new());
        for piece in pieces {
            waiting.extend_from_slice(piece);
            let decoded = chunks.decode(&mut waiting)?;
            data.extend_from_slice(&waiting[decoded.from..decoded.to]);
            waiting.drain(..decoded.consumed);
        }
        Ok((data, waiting, chunks == ChunkDecoder::Done))
    }

    #[test]
    fn every_split_gives_the_same_data_and_keeps_bytes_after_the_end() {
        let whole = b"5\r\nhello\r\n00A;x=y\r\n, world...\r\n0\r\nA: b\r\n\r\nNEXT";
        let expected = (b"hello, world...".to_vec(), b"NEXT".to_vec(), true);
        assert_eq!(decode(&[whole]), Ok(expected.clone()));
        for first in 0..whole.len() {
            for second in first..whole.len() {
                let pieces = [&whole[..first], &whole[first..second], &whole[second..]];
                assert_eq!(decode(&pieces), Ok(expected.clone()), "{first} {second}");
            }
        }
    }

    #[test]
    fn a_single_chunk_is_not_copied() {
        let mut bytes = *b"3\r\nabc\r\n";
        let decoded = ChunkDecoder::Size.decode(&mut bytes);
        assert_eq!(decoded, Ok(DecodedRange { from: 3, to: 6, consumed: 8 }));
    }

    #[test]
    fn malformed_chunks_are_an_error() {
        for odd in [
            &b"\r\n"[..],
            b"g\r\n",
            b"+3\r\nabc\r\n",
            b"-1\r\n",
            b" 3\r\nabc\r\n",
            b"0x3\r\nabc\r\n",
            b"3\nabc\n",
            b"3\r\nabcd\r\n",
            b"3\r\nabc\n",
            b"1000000000000000\r\n",
            b"0\r\n\n",
            &[b'1'; LINE_BYTES_MAX],
            &[b';'; LINE_BYTES_MAX],
        ] {
            assert_eq!(decode(&[odd]), Err(ReplyChunkError), "{:?}", String::from_utf8_lossy(odd));
        }
        let trailer = [b"0\r\n".to_vec(), b"a: b\r\n".repeat(usize::from(TRAILER_LINES_MAX) + 1)].concat();
        assert_eq!(decode(&[&trailer]), Err(ReplyChunkError));
    }
}
