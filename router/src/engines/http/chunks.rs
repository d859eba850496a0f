//! A chunked answer's framing, taken out in place.
//!
//! An engine writes each event as a chunk. What one read brings is many of them when the router is busy, and they are
//! passed on together: their data is moved up over the framing between them, so that they are one piece of memory, and
//! nothing is copied when there is only one.
//!
//! Pure: bytes in, how many of them are data out. Chunk extensions and trailers are skipped; everything is bounded.

/// Digits of a size: up to 2^60 bytes.
const DIGITS_MAX: usize = 15;
/// A size with its extensions, or one line of a trailer.
const LINE_BYTES_MAX: usize = 4096;
/// Lines of a trailer.
const TRAILER_LINES_MAX: u8 = 32;

/// Where in the framing the next byte is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chunks {
    /// At a size.
    Size,
    /// So many bytes of data are still to come.
    Data(u64),
    /// At the line end behind data.
    DataEnd,
    /// Behind the last size, after so many lines.
    Trailer(u8),
    /// Behind the empty line: the answer has ended.
    Done,
}

/// What was made of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Decoded {
    /// Where data begins.
    pub from: usize,
    /// Where data ends: it is all in between.
    pub to: usize,
    /// Bytes that are done with; what follows them waits for more.
    pub taken: usize,
}

/// The bytes are not chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotChunks;

impl Chunks {
    /// Moves the data in `bytes` together.
    ///
    /// # Errors
    /// [`NotChunks`]: the connection is of no further use.
    pub(super) fn decode(&mut self, bytes: &mut [u8]) -> Result<Decoded, NotChunks> {
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
                        // Nothing is before it: it stays where it is.
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
                    _ => return Err(NotChunks),
                },
                Self::Trailer(lines) => {
                    let Some(line) = line(&bytes[at..])? else { break };
                    at += line;
                    *self = match line {
                        2 => Self::Done,
                        _ if lines == TRAILER_LINES_MAX => return Err(NotChunks),
                        _ => Self::Trailer(lines + 1),
                    };
                }
                Self::Done => break,
            }
        }
        Ok(Decoded { from, to, taken: at })
    }
}

/// Bytes of the first line with its end; `None` while it has none.
fn line(bytes: &[u8]) -> Result<Option<usize>, NotChunks> {
    let within = &bytes[..bytes.len().min(LINE_BYTES_MAX)];
    match memchr::memchr(b'\n', within) {
        Some(at) if at > 0 && bytes[at - 1] == b'\r' => Ok(Some(at + 1)),
        Some(_) => Err(NotChunks),
        None if bytes.len() >= LINE_BYTES_MAX => Err(NotChunks),
        None => Ok(None),
    }
}

/// The size that a line says.
fn size(line: &[u8]) -> Result<u64, NotChunks> {
    let mut size = 0;
    for (digits, &byte) in line.iter().enumerate() {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            b'A'..=b'F' => byte - b'A' + 10,
            // The end of the line, or an extension.
            b'\r' | b';' | b' ' | b'\t' if digits > 0 => return Ok(size),
            _ => return Err(NotChunks),
        };
        if digits == DIGITS_MAX {
            return Err(NotChunks);
        }
        size = size << 4 | u64::from(digit);
    }
    Err(NotChunks)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds pieces as reads would bring them.
    fn decode(pieces: &[&[u8]]) -> Result<(Vec<u8>, Vec<u8>, bool), NotChunks> {
        let (mut chunks, mut waiting, mut data) = (Chunks::Size, Vec::new(), Vec::new());
        for piece in pieces {
            waiting.extend_from_slice(piece);
            let decoded = chunks.decode(&mut waiting)?;
            data.extend_from_slice(&waiting[decoded.from..decoded.to]);
            waiting.drain(..decoded.taken);
        }
        Ok((data, waiting, chunks == Chunks::Done))
    }

    #[test]
    fn every_split_gives_the_same_data_and_leaves_what_is_behind_the_end() {
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
    fn one_chunk_is_not_moved() {
        let mut bytes = *b"3\r\nabc\r\n";
        let decoded = Chunks::Size.decode(&mut bytes);
        assert_eq!(decoded, Ok(Decoded { from: 3, to: 6, taken: 8 }));
    }

    #[test]
    fn what_is_not_chunks_is_an_error_and_not_data() {
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
            assert_eq!(decode(&[odd]), Err(NotChunks), "{:?}", String::from_utf8_lossy(odd));
        }
        let trailer = [b"0\r\n".to_vec(), b"a: b\r\n".repeat(usize::from(TRAILER_LINES_MAX) + 1)].concat();
        assert_eq!(decode(&[&trailer]), Err(NotChunks));
    }
}
