//! Content codings of an engine's answer. The router asks for answers as they are, and a proxy in front of an engine may
//! compress them all the same: what is compressed is decoded here as it comes, so that everything above reads plain bytes.
//!
//! Invariants:
//! - A piece of decoded data is at most [`PIECE_BYTES`] large, whatever the compressed bytes expand to: the bounds of the
//!   reader count decoded bytes.
//! - One poll begins at most [`MEMBERS_AT_ONCE`] decoders, however many members without data the bytes have.
//! - Windows of all decoders together take at most [`WINDOWS_BYTES_MAX`].
//! - Data that ends before its coding does, or goes on behind it, is an error and never an answer.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use brotli_decompressor::{BrotliDecompressStream, BrotliResult, BrotliState, StandardAlloc};
use bytes::{Buf, Bytes};
use flate2::{Decompress, FlushDecompress, Status};
use tokio::task::coop;
use zstd::stream::raw::{DParameter, Decoder as Zstd, Operation};

use super::{CallError, Lost};

/// Decoded data of one piece; as much as one read of a socket brings of what is not compressed.
const PIECE_BYTES: usize = 16 << 10;
/// The window of gzip and deflate is 32 KiB; the tables of a decoder take about as much.
const DEFLATE_WINDOW_BYTES: usize = 64 << 10;
/// The largest window of zstd over HTTP, as RFC 9659 has it.
const ZSTD_WINDOW_LOG_MAX: u32 = 23;
/// All windows together: 128 answers in zstd at once, 2,000 in brotli of a proxy's usual 512 KiB, 16,000 in gzip.
const WINDOWS_BYTES_MAX: usize = 1 << 30;
/// Members of gzip, or frames of zstd, that one poll begins. One without data takes a few bytes, and making a decoder for it
/// about as long as decoding a piece.
const MEMBERS_AT_ONCE: usize = 16;
/// Bits of the largest window of gzip and deflate.
const DEFLATE_WINDOW_LOG: u8 = 15;

/// The coding of an answer, as its head names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Coding {
    #[default]
    Identity,
    Gzip,
    Deflate,
    Brotli,
    Zstd,
    /// One that is not known here, or several on top of each other.
    Unknown,
}

impl Coding {
    /// With another value of `Content-Encoding`, of a field of its own.
    pub(super) fn and(self, value: &[u8]) -> Self {
        let names = value.split(|&byte| byte == b',').map(<[u8]>::trim_ascii);
        names.filter(|name| !name.is_empty()).fold(self, |before, name| {
            let is = |known: &[u8]| name.eq_ignore_ascii_case(known);
            match before {
                _ if is(b"identity") => before,
                Self::Identity if is(b"gzip") || is(b"x-gzip") => Self::Gzip,
                Self::Identity if is(b"deflate") => Self::Deflate,
                Self::Identity if is(b"br") => Self::Brotli,
                Self::Identity if is(b"zstd") => Self::Zstd,
                _ => Self::Unknown,
            }
        })
    }
}

/// Why compressed data cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unreadable {
    /// An unknown coding, or several.
    #[error("unknown content coding")]
    Unknown,
    /// The data is not of the coding that the head names.
    #[error("the data does not match the content coding")]
    Malformed,
    /// Other answers have all windows.
    #[error("too many compressed answers at once")]
    TooMany,
}

/// Decodes one answer.
pub(super) struct Decoder {
    coding: Coding,
    /// From the first byte on.
    codec: Option<(Codec, Window)>,
    /// What came and was not yet decoded.
    input: Bytes,
    /// The last piece had no room for more: there may be some without further input.
    is_full: bool,
    /// The coding's own end was read.
    is_over: bool,
}

enum Codec {
    Deflate(Decompress),
    Brotli(Box<BrotliState<StandardAlloc, StandardAlloc, StandardAlloc>>),
    Zstd(Zstd<'static>),
}

/// What one step did.
struct Step {
    taken: usize,
    made: usize,
    is_over: bool,
}

impl Decoder {
    /// `None` for what is not compressed.
    pub(super) fn of(coding: Coding) -> Option<Box<Self>> {
        let decoder = Self { coding, codec: None, input: Bytes::new(), is_full: false, is_over: false };
        (coding != Coding::Identity).then(|| Box::new(decoder))
    }

    /// Whether everything was given that the pieces so far hold.
    pub(super) fn is_done(&self) -> bool {
        self.input.is_empty() && !self.is_full && (self.is_over || self.codec.is_none())
    }

    /// The next piece of decoded data; `pieces` gives the compressed ones.
    pub(super) fn poll_piece(
        &mut self,
        context: &mut Context<'_>,
        mut pieces: impl FnMut(&mut Context<'_>) -> Poll<Option<Result<Bytes, Lost>>>,
    ) -> Poll<Option<Result<Bytes, CallError>>> {
        // A small piece can become many: others have their turn in between.
        let turn = ready!(coop::poll_proceed(context));
        let mut members = 0;
        loop {
            if !self.input.is_empty() || self.is_full {
                match self.decode(&mut members) {
                    Ok(piece) if piece.is_empty() && self.input.is_empty() => {}
                    Ok(piece) if piece.is_empty() => {
                        turn.made_progress();
                        context.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                    piece => {
                        turn.made_progress();
                        return Poll::Ready(Some(piece.map_err(CallError::Unreadable)));
                    }
                }
            }
            match ready!(pieces(context)) {
                Some(Ok(piece)) => self.input = piece,
                Some(Err(lost)) => return Poll::Ready(Some(Err(CallError::Broken(lost)))),
                None if self.is_done() => return Poll::Ready(None),
                None => return Poll::Ready(Some(Err(CallError::Unreadable(Unreadable::Malformed)))),
            }
        }
    }

    /// Decodes what is here into one piece; an empty one needs more input, or another poll where some is left. `members`
    /// are those that this poll has begun.
    fn decode(&mut self, members: &mut usize) -> Result<Bytes, Unreadable> {
        let mut room = [0; PIECE_BYTES];
        loop {
            if self.is_over && !self.input.is_empty() {
                // Members of gzip and frames of zstd may follow each other.
                match self.coding {
                    Coding::Gzip | Coding::Zstd if *members == MEMBERS_AT_ONCE => return Ok(Bytes::new()),
                    Coding::Gzip | Coding::Zstd => {
                        *members += 1;
                        self.codec = None;
                    }
                    _ => return Err(Unreadable::Malformed),
                }
            }
            let (codec, _) = match &mut self.codec {
                Some(codec) => codec,
                none => {
                    let Some(&first) = self.input.first() else { return Ok(Bytes::new()) };
                    none.insert(Codec::begin(self.coding, first)?)
                }
            };
            let Step { taken, made, is_over } = codec.step(&self.input, &mut room)?;
            self.input.advance(taken);
            (self.is_full, self.is_over) = (made == room.len() && !is_over, is_over);
            if made > 0 {
                return Ok(Bytes::copy_from_slice(&room[..made]));
            }
            if self.input.is_empty() {
                return Ok(Bytes::new());
            }
            if taken == 0 && !is_over {
                return Err(Unreadable::Malformed);
            }
        }
    }
}

impl Codec {
    fn begin(coding: Coding, first: u8) -> Result<(Self, Window), Unreadable> {
        let window = Window::take(match coding {
            Coding::Gzip | Coding::Deflate => DEFLATE_WINDOW_BYTES,
            Coding::Brotli => brotli_window(first),
            Coding::Zstd => 1 << ZSTD_WINDOW_LOG_MAX,
            Coding::Identity | Coding::Unknown => return Err(Unreadable::Unknown),
        })?;
        let codec = match coding {
            Coding::Gzip => Self::Deflate(Decompress::new_gzip(DEFLATE_WINDOW_LOG)),
            // It is zlib's format; some send the bare one, whose first byte never reads so.
            Coding::Deflate => Self::Deflate(Decompress::new(first & 0x0f == 8)),
            Coding::Brotli => {
                let alloc = StandardAlloc::default;
                Self::Brotli(Box::new(BrotliState::new_strict(alloc(), alloc(), alloc())))
            }
            Coding::Zstd => {
                let mut zstd = Zstd::new().map_err(|_| Unreadable::TooMany)?;
                let bounded = zstd.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_LOG_MAX));
                bounded.map_err(|_| Unreadable::Malformed)?;
                Self::Zstd(zstd)
            }
            Coding::Identity | Coding::Unknown => return Err(Unreadable::Unknown),
        };
        Ok((codec, window))
    }

    fn step(&mut self, input: &[u8], room: &mut [u8]) -> Result<Step, Unreadable> {
        match self {
            Self::Deflate(deflate) => {
                let (read, written) = (deflate.total_in(), deflate.total_out());
                let status = deflate.decompress(input, room, FlushDecompress::None);
                let is_over = matches!(status.map_err(|_| Unreadable::Malformed)?, Status::StreamEnd);
                let bytes = |now: u64, before: u64| usize::try_from(now - before).unwrap_or(usize::MAX);
                let (taken, made) = (bytes(deflate.total_in(), read), bytes(deflate.total_out(), written));
                Ok(Step { taken, made, is_over })
            }
            Self::Brotli(state) => {
                let (mut left, mut taken) = (input.len(), 0);
                let (mut space, mut made, mut total) = (room.len(), 0, 0);
                let result = BrotliDecompressStream(
                    &mut left, &mut taken, input, &mut space, &mut made, room, &mut total, state,
                );
                match result {
                    BrotliResult::ResultFailure => Err(Unreadable::Malformed),
                    result => {
                        Ok(Step { taken, made, is_over: matches!(result, BrotliResult::ResultSuccess) })
                    }
                }
            }
            Self::Zstd(zstd) => {
                let status = zstd.run_on_buffers(input, room).map_err(|_| Unreadable::Malformed)?;
                let (taken, made) = (status.bytes_read, status.bytes_written);
                Ok(Step { taken, made, is_over: status.remaining == 0 })
            }
        }
    }
}

/// The window that brotli's first byte announces: RFC 7932, section 9.1.
fn brotli_window(first: u8) -> usize {
    let (low, high) = (first >> 1 & 7, first >> 4 & 7);
    1 << match (first & 1, low, high) {
        (0, ..) => 16,
        (_, 1.., _) => 17 + low,
        (_, 0, 2..) => 8 + high,
        (_, 0, _) => 17,
    }
}

/// What all decoders hold.
static WINDOWS: AtomicUsize = AtomicUsize::new(0);

/// What one decoder holds of [`WINDOWS`], given back when dropped.
struct Window(usize);

impl Window {
    fn take(bytes: usize) -> Result<Self, Unreadable> {
        let window = Self(bytes);
        match WINDOWS.fetch_add(bytes, Ordering::Relaxed) + bytes > WINDOWS_BYTES_MAX {
            true => Err(Unreadable::TooMany),
            false => Ok(window),
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        WINDOWS.fetch_sub(self.0, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[path = "coding_tests.rs"]
mod tests;
