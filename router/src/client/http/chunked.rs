//! Strict reader of chunked bodies: hexadecimal sizes, CRLF, and exactly the grammar of RFC 9112, 7.1.
//!
//! Extensions and trailers are checked, bounded and dropped: no engine receives them. Smuggling through chunks
//! needs a lenient reader. So a bare CR or LF, a folded line, an open quote and a framing field in a trailer are
//! refused.
//!
//! Pure: bytes in, data out. The caller passes more bytes until the body has ended.

use bytes::{Buf, BytesMut};
use memchr::memchr2;

use super::head;

/// 8 digits: up to 4 GiB, above any limit.
const SIZE_DIGITS_MAX: usize = 8;
/// Maximum extension bytes of one chunk. A chunk signature, the only extension in use, takes 81.
const EXTENSION_BYTES_MAX: usize = 256;
/// Maximum extension bytes of one body, as in hyper.
const EXTENSIONS_BYTES_MAX: usize = 16 << 10;
/// Maximum trailer bytes of one body.
const TRAILER_BYTES_MAX: usize = 4 << 10;
const TRAILER_FIELDS_MAX: usize = 32;

/// Fields that frame or route a message. RFC 9110, 6.5.1, allows them in no trailer, and another reader might act
/// on them.
const NOT_IN_TRAILERS: [&[u8]; 8] = [
    b"content-length",
    b"transfer-encoding",
    b"host",
    b"connection",
    b"upgrade",
    b"expect",
    b"te",
    b"trailer",
];

/// Reader of one body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChunkedReader {
    state: ChunkState,
    /// Extension bytes so far.
    extension_bytes: usize,
    /// Bytes and fields of trailers so far.
    trailer_bytes: usize,
    trailer_fields: usize,
}

/// State of the reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ChunkState {
    /// Before a size.
    #[default]
    Size,
    /// So many bytes of a chunk are missing.
    Data(usize),
    /// Before the end of a chunk's line.
    DataEnd,
    /// Behind the last size: before a trailer, or the empty line.
    Trailer,
    /// The body is complete.
    Done,
}

/// Why a body is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkError {
    /// The bytes are not chunks.
    Malformed,
    TooLarge,
}

impl ChunkedReader {
    /// Moves data from `input` to `out` as far as possible. Returns whether the body has ended. The rest of
    /// `input` is then behind it.
    ///
    /// # Errors
    /// [`ChunkError`]. A chunk that would exceed `limit_bytes` is refused at its size.
    pub(crate) fn decode(
        &mut self,
        input: &mut BytesMut,
        out: &mut BytesMut,
        limit_bytes: usize,
    ) -> Result<bool, ChunkError> {
        loop {
            match self.state {
                ChunkState::Size => {
                    let Some(ChunkHeader { size, extension_bytes, line_bytes }) = size(input)? else {
                        return Ok(false);
                    };
                    self.extension_bytes += extension_bytes;
                    if self.extension_bytes > EXTENSIONS_BYTES_MAX {
                        return Err(ChunkError::Malformed);
                    }
                    if size > limit_bytes - out.len().min(limit_bytes) {
                        return Err(ChunkError::TooLarge);
                    }
                    input.advance(line_bytes);
                    self.state = if size == 0 { ChunkState::Trailer } else { ChunkState::Data(size) };
                }
                ChunkState::Data(left) => {
                    let here = left.min(input.len());
                    out.extend_from_slice(&input[..here]);
                    input.advance(here);
                    if here < left {
                        self.state = ChunkState::Data(left - here);
                        return Ok(false);
                    }
                    self.state = ChunkState::DataEnd;
                }
                ChunkState::DataEnd => {
                    if !b"\r\n".starts_with(&input[..input.len().min(2)]) {
                        return Err(ChunkError::Malformed);
                    }
                    if input.len() < 2 {
                        return Ok(false);
                    }
                    input.advance(2);
                    self.state = ChunkState::Size;
                }
                ChunkState::Trailer => {
                    let Some(line_bytes) = self.trailer(input)? else { return Ok(false) };
                    input.advance(line_bytes);
                }
                ChunkState::Done => return Ok(true),
            }
        }
    }

    /// Checks one line behind the last chunk. Returns its length with its end; `None` for an incomplete line.
    fn trailer(&mut self, input: &[u8]) -> Result<Option<usize>, ChunkError> {
        let left = TRAILER_BYTES_MAX.saturating_sub(self.trailer_bytes);
        let Some(line) = line(input, left)? else { return Ok(None) };
        let line_bytes = line.len() + 2;
        if line.is_empty() {
            self.state = ChunkState::Done;
            return Ok(Some(line_bytes));
        }
        let (name, _) = head::field(line).map_err(|_| ChunkError::Malformed)?;
        self.trailer_bytes += line_bytes;
        self.trailer_fields += 1;
        let frames = NOT_IN_TRAILERS.iter().any(|field| name.eq_ignore_ascii_case(field));
        if frames || self.trailer_fields > TRAILER_FIELDS_MAX {
            return Err(ChunkError::Malformed);
        }
        Ok(Some(line_bytes))
    }
}

/// The first line of a chunk.
struct ChunkHeader {
    size: usize,
    extension_bytes: usize,
    /// Length of the whole line, with its end.
    line_bytes: usize,
}

/// Parses the first line of a chunk; `None` for an incomplete line.
fn size(input: &[u8]) -> Result<Option<ChunkHeader>, ChunkError> {
    let digits = input.iter().take(SIZE_DIGITS_MAX + 1).take_while(|byte| byte.is_ascii_hexdigit()).count();
    if digits > SIZE_DIGITS_MAX || (digits == 0 && !input.is_empty()) {
        return Err(ChunkError::Malformed);
    }
    let Some(line) = line(input, digits + EXTENSION_BYTES_MAX)? else { return Ok(None) };
    let (digits, rest) = line.split_at(digits);
    extensions(rest)?;
    let text = std::str::from_utf8(digits).map_err(|_| ChunkError::Malformed)?;
    let size = usize::from_str_radix(text, 16).map_err(|_| ChunkError::Malformed)?;
    Ok(Some(ChunkHeader { size, extension_bytes: rest.len(), line_bytes: line.len() + 2 }))
}

/// The first line without its end, of at most so many bytes; `None` for an incomplete line. A CR or an LF that is
/// not part of CRLF is refused, also inside a quoted string.
fn line(input: &[u8], bytes_max: usize) -> Result<Option<&[u8]>, ChunkError> {
    let Some(end) = memchr2(b'\r', b'\n', &input[..input.len().min(bytes_max + 1)]) else {
        return if input.len() > bytes_max { Err(ChunkError::Malformed) } else { Ok(None) };
    };
    match &input[end..] {
        [b'\r', b'\n', ..] => Ok(Some(&input[..end])),
        [b'\r'] => Ok(None),
        _ => Err(ChunkError::Malformed),
    }
}

/// `*( BWS ";" BWS token [ BWS "=" BWS ( token / quoted-string ) ] )`: RFC 9112, 7.1.1.
fn extensions(mut rest: &[u8]) -> Result<(), ChunkError> {
    while !rest.is_empty() {
        let extension = behind_blanks(rest).strip_prefix(b";").ok_or(ChunkError::Malformed)?;
        rest = behind_token(behind_blanks(extension))?;
        if let Some(value) = behind_blanks(rest).strip_prefix(b"=") {
            let value = behind_blanks(value);
            rest = match value.strip_prefix(b"\"") {
                Some(quoted) => behind_quote(quoted)?,
                None => behind_token(value)?,
            };
        }
    }
    Ok(())
}

fn behind_blanks(bytes: &[u8]) -> &[u8] {
    let blanks = bytes.iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
    &bytes[blanks..]
}

fn behind_token(bytes: &[u8]) -> Result<&[u8], ChunkError> {
    let token = bytes.iter().take_while(|&&byte| head::is_token(byte)).count();
    if token == 0 { Err(ChunkError::Malformed) } else { Ok(&bytes[token..]) }
}

/// The bytes behind the quote that ends a quoted string: RFC 9110, 5.6.4.
fn behind_quote(mut bytes: &[u8]) -> Result<&[u8], ChunkError> {
    let is_text = |byte: u8| byte == b'\t' || byte >= b' ' && byte != 0x7f;
    loop {
        bytes = match *bytes {
            [b'"', ref rest @ ..] => return Ok(rest),
            [b'\\', escaped, ref rest @ ..] if is_text(escaped) => rest,
            [byte, ref rest @ ..] if is_text(byte) && byte != b'\\' => rest,
            _ => return Err(ChunkError::Malformed),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The data, and the bytes behind it.
    type BodyAndRest = (Vec<u8>, Vec<u8>);

    fn all(text: &[u8], limit: usize) -> Result<Option<BodyAndRest>, ChunkError> {
        let (mut input, mut out) = (BytesMut::from(text), BytesMut::new());
        let done = ChunkedReader::default().decode(&mut input, &mut out, limit)?;
        Ok(done.then(|| (out.to_vec(), input.to_vec())))
    }

    fn every_split(text: &[u8]) {
        let whole = Some((b"hello, world...".to_vec(), b"GET".to_vec()));
        assert_eq!(all(text, 15), Ok(whole.clone()), "{}", text.escape_ascii());
        for first in 0..text.len() {
            let (mut input, mut out) = (BytesMut::from(&text[..first]), BytesMut::new());
            let mut chunks = ChunkedReader::default();
            let early = chunks.decode(&mut input, &mut out, 15).unwrap();
            input.extend_from_slice(&text[first..]);
            assert!(chunks.decode(&mut input, &mut out, 15).unwrap(), "{first} {early}");
            assert_eq!(Some((out.to_vec(), input.to_vec())), whole);
        }
    }

    #[test]
    fn every_split_gives_the_same_data() {
        every_split(b"5\r\nhello\r\n00a\r\n, world...\r\n0\r\n\r\nGET");
        every_split(
            b"5;a;b=c \t; d = \"e\\\"; \\\\\xff\"\r\nhello\r\n00a ;x=\"\"\r\n, world...\r\n0;z\r\n\
              x-checksum: \"1\"\r\nServer-Timing:\r\n\r\nGET",
        );
    }

    #[test]
    fn only_grammatical_chunks_are_accepted() {
        for odd in [
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
            "0\r\n\n",
            "5\r\r\nhello",
            // Extensions.
            "5;\r\nhello",
            "5;;a\r\nhello",
            "5 a\r\nhello",
            "5;a=\r\nhello",
            "5;=a\r\nhello",
            "5;a=b c\r\nhello",
            "5;a=b;\r\nhello",
            "5; \r\nhello",
            "5;a\nhello",
            "5;a\rb\r\nhello",
            "5;a=\"b\r\nhello",
            "5;a=\"b\\\r\nhello",
            "5;a=\"b\rc\"\r\nhello",
            "5;a=\"b\nc\"\r\nhello",
            "5;a=\"b\"c\r\nhello",
            "5;a=\"b\0\"\r\nhello",
            "5;a=\"\\\u{7f}\"\r\nhello",
            "5;a\0\r\nhello",
            // Trailers.
            "0\r\nA\r\n\r\n",
            "0\r\nA : b\r\n\r\n",
            "0\r\n: b\r\n\r\n",
            "0\r\nA: b\r\n c\r\n\r\n",
            "0\r\n A: b\r\n\r\n",
            "0\r\nA: b\n\r\n",
            "0\r\nA: b\rC: d\r\n\r\n",
            "0\r\nA: b\0\r\n\r\n",
            "0\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n",
            "0\r\nContent-Length: 5\r\n\r\n",
            "0\r\nA: b\r\nTRANSFER-ENCODING: chunked\r\n\r\n",
            "0\r\nhost: x\r\n\r\n",
            "0\r\nconnection: close\r\n\r\n",
            "0\r\nTrailer: a\r\n\r\n",
        ] {
            assert_eq!(all(odd.as_bytes(), 100), Err(ChunkError::Malformed), "{odd:?}");
        }
        assert_eq!(all(b"6\r\n", 5), Err(ChunkError::TooLarge));
        assert_eq!(all(b"3\r\nabc\r\n3\r\n", 5), Err(ChunkError::TooLarge));
        for partial in [
            "",
            "5",
            "5\r",
            "5\r\n",
            "5\r\nhel",
            "5\r\nhello\r",
            "0\r\n",
            "0\r\n\r",
            "5;a=\"b",
            "5;a\r",
            "0\r\nA: b",
            "0\r\nA: b\r",
            "0\r\nA: b\r\n",
            "0\r\nA: b\r\n\r",
        ] {
            assert_eq!(all(partial.as_bytes(), 5), Ok(None), "{partial:?}");
        }
    }

    #[test]
    fn extensions_and_trailers_are_bounded_by_themselves_and_in_sum() {
        let extended = |bytes: usize, chunks: usize| {
            let chunk = format!("1;{}\r\nx\r\n", "a".repeat(bytes - 1));
            all(format!("{}0\r\n\r\n", chunk.repeat(chunks)).as_bytes(), 1000).is_ok()
        };
        assert!(extended(EXTENSION_BYTES_MAX, 1) && !extended(EXTENSION_BYTES_MAX + 1, 1));
        let most = EXTENSIONS_BYTES_MAX / EXTENSION_BYTES_MAX;
        assert!(extended(EXTENSION_BYTES_MAX, most) && !extended(EXTENSION_BYTES_MAX, most + 1));
        let endless = format!("5;{}", "a".repeat(EXTENSION_BYTES_MAX));
        assert_eq!(all(endless.as_bytes(), 5), Err(ChunkError::Malformed), "not waited for");

        let trailers = |fields: usize, bytes: usize| {
            let field = format!("a:{}\r\n", "b".repeat(bytes - 4));
            all(format!("0\r\n{}\r\n", field.repeat(fields)).as_bytes(), 1000).is_ok()
        };
        assert!(trailers(TRAILER_FIELDS_MAX, 8) && !trailers(TRAILER_FIELDS_MAX + 1, 8));
        assert!(trailers(2, TRAILER_BYTES_MAX / 2) && !trailers(2, TRAILER_BYTES_MAX / 2 + 2));
        let endless = format!("0\r\na:{}", "b".repeat(TRAILER_BYTES_MAX));
        assert_eq!(all(endless.as_bytes(), 5), Err(ChunkError::Malformed), "not waited for");
    }
}
