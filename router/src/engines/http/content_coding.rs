//! Content codings of an engine's reply. The router asks for uncompressed replies, but a proxy in front of an
//! engine may compress them all the same. Compressed data is decoded here as it arrives, so that all other code
//! reads plain bytes.
//!
//! Invariants:
//! - A piece of decoded data has at most [`PIECE_BYTES`], whatever the compressed bytes expand to: the bounds of
//!   the reader count decoded bytes.
//! - One poll begins at most [`MEMBERS_PER_POLL_MAX`] decoders, however many members without data the bytes have.
//! - Windows of all decoders together take at most [`WINDOWS_BYTES_MAX`].
//! - Data that ends before its coding does, or continues behind it, is an error and never a reply.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use brotli_decompressor::{BrotliDecompressStream, BrotliResult, BrotliState, StandardAlloc};
use bytes::{Buf, Bytes};
use flate2::{Decompress, FlushDecompress, Status};
use tokio::task::coop;
use zstd::stream::raw::{DParameter, Decoder as Zstd, Operation};

use super::{CallError, ConnectionError};

/// Decoded data of one piece: as much as one read of a socket returns uncompressed.
const PIECE_BYTES: usize = 16 << 10;
/// The window of gzip and deflate is 32 KiB; the tables of a decoder take about as much.
const DEFLATE_WINDOW_BYTES: usize = 64 << 10;
/// The largest window of zstd over HTTP: RFC 9659.
const ZSTD_WINDOW_LOG_MAX: u32 = 23;
/// All windows together: 128 concurrent replies in zstd, 2,000 in brotli with a proxy's usual 512 KiB, 16,000 in
/// gzip.
const WINDOWS_BYTES_MAX: usize = 1 << 30;
/// Maximum gzip members or zstd frames that one poll begins. A member without data takes a few bytes, and its
/// decoder takes about as long to create as a piece to decode.
const MEMBERS_PER_POLL_MAX: usize = 16;
/// Window size of gzip and deflate, in bits.
const DEFLATE_WINDOW_LOG: u8 = 15;

/// The coding of a reply, as its head names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Coding {
    #[default]
    Identity,
    Gzip,
    Deflate,
    Brotli,
    Zstd,
    /// An unknown coding, or several on top of each other.
    Unknown,
}

impl Coding {
    /// Adds another `Content-Encoding` field.
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
pub(crate) enum ContentCodingError {
    /// An unknown coding, or several.
    #[error("unknown content coding")]
    Unknown,
    /// The data is not of the coding that the head names.
    #[error("the data does not match the content coding")]
    Malformed,
    /// Other replies use all windows.
    #[error("too many compressed answers at once")]
    TooMany,
}

/// The decoder of one reply.
pub(super) struct Decoder {
    coding: Coding,
    /// Set from the first byte on.
    codec: Option<(Codec, WindowReservation)>,
    /// Bytes that are not decoded yet.
    input: Bytes,
    /// The last piece was full, so there may be more data without further input.
    is_full: bool,
    /// The coding's own end was read.
    is_finished: bool,
}

enum Codec {
    Deflate(Decompress),
    Brotli(Box<BrotliState<StandardAlloc, StandardAlloc, StandardAlloc>>),
    Zstd(Zstd<'static>),
}

/// The result of one step.
struct DecodeStep {
    consumed: usize,
    produced: usize,
    is_finished: bool,
}

impl Decoder {
    /// `None` for an uncompressed reply.
    pub(super) fn of(coding: Coding) -> Option<Box<Self>> {
        let decoder = Self { coding, codec: None, input: Bytes::new(), is_full: false, is_finished: false };
        (coding != Coding::Identity).then(|| Box::new(decoder))
    }

    /// Whether all data of the pieces so far was returned.
    pub(super) fn is_done(&self) -> bool {
        self.input.is_empty() && !self.is_full && (self.is_finished || self.codec.is_none())
    }

    /// The next piece of decoded data. `pieces` returns the compressed ones.
    pub(super) fn poll_piece(
        &mut self,
        context: &mut Context<'_>,
        mut pieces: impl FnMut(&mut Context<'_>) -> Poll<Option<Result<Bytes, ConnectionError>>>,
    ) -> Poll<Option<Result<Bytes, CallError>>> {
        // A small piece can expand to many, so other tasks get turns in between.
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
                        return Poll::Ready(Some(piece.map_err(CallError::Undecodable)));
                    }
                }
            }
            match ready!(pieces(context)) {
                Some(Ok(piece)) => self.input = piece,
                Some(Err(error)) => return Poll::Ready(Some(Err(CallError::Broken(error)))),
                None if self.is_done() => return Poll::Ready(None),
                None => return Poll::Ready(Some(Err(CallError::Undecodable(ContentCodingError::Malformed)))),
            }
        }
    }

    /// Decodes the input into one piece. An empty piece needs more input, or another poll if input is left.
    /// `members` counts those that this poll has begun.
    fn decode(&mut self, members: &mut usize) -> Result<Bytes, ContentCodingError> {
        let mut buffer = [0; PIECE_BYTES];
        loop {
            if self.is_finished && !self.input.is_empty() {
                // Gzip members and zstd frames may follow each other.
                match self.coding {
                    Coding::Gzip | Coding::Zstd if *members == MEMBERS_PER_POLL_MAX => {
                        return Ok(Bytes::new());
                    }
                    Coding::Gzip | Coding::Zstd => {
                        *members += 1;
                        self.codec = None;
                    }
                    _ => return Err(ContentCodingError::Malformed),
                }
            }
            let (codec, _) = match &mut self.codec {
                Some(codec) => codec,
                none => {
                    let Some(&first) = self.input.first() else { return Ok(Bytes::new()) };
                    none.insert(Codec::begin(self.coding, first)?)
                }
            };
            let DecodeStep { consumed, produced, is_finished } = codec.step(&self.input, &mut buffer)?;
            self.input.advance(consumed);
            (self.is_full, self.is_finished) = (produced == buffer.len() && !is_finished, is_finished);
            if produced > 0 {
                return Ok(Bytes::copy_from_slice(&buffer[..produced]));
            }
            if self.input.is_empty() {
                return Ok(Bytes::new());
            }
            if consumed == 0 && !is_finished {
                return Err(ContentCodingError::Malformed);
            }
        }
    }
}

impl Codec {
    fn begin(coding: Coding, first: u8) -> Result<(Self, WindowReservation), ContentCodingError> {
        let window = WindowReservation::take(match coding {
            Coding::Gzip | Coding::Deflate => DEFLATE_WINDOW_BYTES,
            Coding::Brotli => brotli_window(first),
            Coding::Zstd => 1 << ZSTD_WINDOW_LOG_MAX,
            Coding::Identity | Coding::Unknown => return Err(ContentCodingError::Unknown),
        })?;
        let codec = match coding {
            Coding::Gzip => Self::Deflate(Decompress::new_gzip(DEFLATE_WINDOW_LOG)),
            // The coding is zlib's format. Some senders use bare deflate, whose first byte never looks like
            // zlib's.
            Coding::Deflate => Self::Deflate(Decompress::new(first & 0x0f == 8)),
            Coding::Brotli => {
                let alloc = StandardAlloc::default;
                Self::Brotli(Box::new(BrotliState::new_strict(alloc(), alloc(), alloc())))
            }
            Coding::Zstd => {
                let mut zstd = Zstd::new().map_err(|_| ContentCodingError::TooMany)?;
                let bounded = zstd.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_LOG_MAX));
                bounded.map_err(|_| ContentCodingError::Malformed)?;
                Self::Zstd(zstd)
            }
            Coding::Identity | Coding::Unknown => return Err(ContentCodingError::Unknown),
        };
        Ok((codec, window))
    }

    fn step(&mut self, input: &[u8], buffer: &mut [u8]) -> Result<DecodeStep, ContentCodingError> {
        match self {
            Self::Deflate(deflate) => {
                let (read, written) = (deflate.total_in(), deflate.total_out());
                let status = deflate.decompress(input, buffer, FlushDecompress::None);
                let is_finished =
                    matches!(status.map_err(|_| ContentCodingError::Malformed)?, Status::StreamEnd);
                let bytes = |now: u64, before: u64| usize::try_from(now - before).unwrap_or(usize::MAX);
                let (consumed, produced) =
                    (bytes(deflate.total_in(), read), bytes(deflate.total_out(), written));
                Ok(DecodeStep { consumed, produced, is_finished })
            }
            Self::Brotli(state) => {
                let (mut left, mut consumed) = (input.len(), 0);
                let (mut space, mut produced, mut total) = (buffer.len(), 0, 0);
                let result = BrotliDecompressStream(
                    &mut left,
                    &mut consumed,
                    input,
                    &mut space,
                    &mut produced,
                    buffer,
                    &mut total,
                    state,
                );
                match result {
                    BrotliResult::ResultFailure => Err(ContentCodingError::Malformed),
                    result => Ok(DecodeStep {
                        consumed,
                        produced,
                        is_finished: matches!(result, BrotliResult::ResultSuccess),
                    }),
                }
            }
            Self::Zstd(zstd) => {
                let status = zstd.run_on_buffers(input, buffer).map_err(|_| ContentCodingError::Malformed)?;
                let (consumed, produced) = (status.bytes_read, status.bytes_written);
                Ok(DecodeStep { consumed, produced, is_finished: status.remaining == 0 })
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

/// Bytes of all windows.
static WINDOWS: AtomicUsize = AtomicUsize::new(0);

/// One decoder's part of [`WINDOWS`]. Dropping it frees the part.
struct WindowReservation(usize);

impl WindowReservation {
    fn take(bytes: usize) -> Result<Self, ContentCodingError> {
        let window = Self(bytes);
        match WINDOWS.fetch_add(bytes, Ordering::Relaxed) + bytes > WINDOWS_BYTES_MAX {
            true => Err(ContentCodingError::TooMany),
            false => Ok(window),
        }
    }
}

impl Drop for WindowReservation {
    fn drop(&mut self) {
        WINDOWS.fetch_sub(self.0, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[path = "tests/content_coding.rs"]
mod tests;
