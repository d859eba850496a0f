//! Server-sent events in transit: whole frames pass unchanged, and a broken frame never passes.
//!
//! ```text
//! reads ─▶ FrameBuffer::pass ─▶ whole frames ─▶ FrameBuffer::read ─▶ bytes for the client
//!            │ lines               (a slice)       │ tokens, usage, finish reason, an error
//!            └ an unfinished frame waits           └ a usage that only the router asked for is removed
//! ```
//!
//! An engine writes whole frames, so a read usually passes unchanged. If it ends inside a frame, the part waits
//! for the rest. If the engine dies there, the client receives the frames before it, then one typed error, then
//! `[DONE]`, and never half a frame. Each byte is scanned once, however the stream is split.
//!
//! Lines and events are those of a conforming parser ([`lines`]). JSON is scanned only in events that contain one
//! of a few words. Inside a JSON string their quotes would be escaped, so a model's text cannot match them.

mod events;
mod frames;

use bytes::{Buf, Bytes, BytesMut};

use crate::message::usage::{ChoiceTokens, JsonScanner};
use frames::{EventName, Frame, FrameScanner};

pub(crate) use events::{FilteredFrames, StreamEnding, StreamReadOptions, TokenCountRule, first_error};
pub(crate) use frames::{frames, lines, value};

/// A longer frame is passed in pieces, because the bound on memory is more important than a clean end.
const FRAME_BYTES_MAX: usize = 1 << 20;

/// The buffer of one stream's frames.
#[derive(Debug, Default)]
pub(crate) struct FrameBuffer {
    reading: StreamReadOptions,
    /// The unfinished frame.
    partial: BytesMut,
    scan: FrameScanner,
    /// Where the last frame of the stream begins in the bytes of the last pass, once it has arrived.
    last: Option<usize>,
    /// The frames of the last pass, without the last one of the stream. That of a response is among them: it has the
    /// usage.
    complete: Vec<Frame>,
    /// The unfinished frame, if pieces of it were passed.
    long_frame: Option<Box<LongFrame>>,
    choices: ChoiceTokens,
    /// The scan of such a frame after its end: the first frame of the last pass.
    long_scan: Option<Box<JsonScanner>>,
}

/// A frame that is too long for the buffer. Its data is scanned as it passes.
#[derive(Debug, Default)]
struct LongFrame {
    data: JsonScanner,
    fields: usize,
    line: LineKind,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum LineKind {
    #[default]
    Begins,
    Data,
    Other,
}

impl FrameBuffer {
    pub(crate) fn new(reading: StreamReadOptions) -> Self {
        Self { reading, ..Self::default() }
    }

    /// Adds received bytes and returns those that may pass; empty if no frame has ended.
    pub(crate) fn pass(&mut self, chunk: Bytes) -> Bytes {
        self.complete.clear();
        self.long_scan = None;
        if self.is_done() {
            return Bytes::new();
        }
        if self.partial.is_empty() {
            let end = self.scan_frames(&chunk);
            if end < chunk.len() {
                self.partial.extend_from_slice(&chunk[end..]);
            }
            return self.with_piece(chunk.slice(..end));
        }
        // Only new bytes are copied and scanned.
        self.partial.extend_from_slice(&chunk);
        let buffered = std::mem::take(&mut self.partial);
        let end = self.scan_frames(&buffered);
        self.partial = buffered;
        let complete = self.partial.split_to(end).freeze();
        self.with_piece(complete)
    }

    /// Returns the end of the last frame. Bytes behind it, or behind `[DONE]`, are not scanned again.
    fn scan_frames(&mut self, bytes: &[u8]) -> usize {
        let mut end = 0;
        while let Some(frame) = self.scan.next(bytes) {
            end = frame.end;
            let is_response = self.reading.ending == StreamEnding::ResponseEnd;
            let is_last = match self.long_frame.take() {
                Some(mut long) => {
                    long.take(&bytes[..end]);
                    self.long_scan = Some(Box::new(long.data));
                    is_response && frame.name == EventName::ResponseEnd
                }
                None => self.reading.ending.is_end(&frame, bytes),
            };
            self.last = is_last.then_some(frame.start);
            // A frame that was too long for the buffer is the first of them.
            let is_read = frame.has_data() || self.long_scan.is_some() && self.complete.is_empty();
            if is_read && (is_response || !is_last) {
                self.complete.push(frame);
            }
            if is_last {
                break;
            }
        }
        self.scan.forget(end);
        end
    }

    /// Returns the bytes that pass, with the part of an unfinished frame that is too long for the buffer.
    fn with_piece(&mut self, whole: Bytes) -> Bytes {
        if self.is_done() {
            // Nothing that follows has a meaning.
            self.partial.clear();
            return whole;
        }
        if self.partial.len() <= FRAME_BYTES_MAX && self.long_frame.is_none() {
            return whole;
        }
        let end = self.scan.can_forget();
        if end == 0 {
            return whole;
        }
        self.scan.forget(end);
        let piece = self.partial.split_to(end).freeze();
        self.long_frame.get_or_insert_default().take(&piece);
        if whole.is_empty() { piece } else { [whole, piece].concat().into() }
    }

    /// Whether the stream has contained its last event, usually `[DONE]`. Bytes behind it change nothing.
    pub(crate) fn is_done(&self) -> bool {
        self.last.is_some()
    }

    /// Whether the rest is only a `[DONE]` without its last line end.
    pub(crate) fn ends_with_done(&self) -> bool {
        let mut lines = lines(&self.partial);
        let is_done = |line| value(line, b"data").is_some_and(|data| data.trim_ascii() == b"[DONE]");
        let ends_so = self.reading.ending != StreamEnding::MessageStop && self.long_frame.is_none();
        ends_so && lines.next().is_some_and(is_done) && lines.all(<[u8]>::is_empty)
    }

    /// Whether a piece of an unfinished frame has passed, so that a blank line must end it.
    pub(crate) fn is_inside(&self) -> bool {
        self.long_frame.is_some()
    }

    /// Whether all received bytes have passed, in whole frames.
    pub(crate) fn is_whole(&self) -> bool {
        self.partial.is_empty() && self.long_frame.is_none()
    }
}

impl LongFrame {
    /// Adds bytes that begin where the last ones ended. They end at a line's end, or inside a line whose field is
    /// known.
    fn take(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.line == LineKind::Begins {
                let end = memchr::memchr2(b'\r', b'\n', bytes).unwrap_or(bytes.len());
                match value(&bytes[..end], b"data") {
                    Some(data) => {
                        if self.fields > 0 {
                            self.data.feed(b"\n");
                        }
                        self.fields += 1;
                        self.line = LineKind::Data;
                        bytes.advance(end - data.len());
                    }
                    None => self.line = LineKind::Other,
                }
            }
            let end = memchr::memchr2(b'\r', b'\n', bytes).unwrap_or(bytes.len());
            if self.line == LineKind::Data {
                self.data.feed(&bytes[..end]);
            }
            bytes.advance(end);
            if !bytes.is_empty() {
                // The second byte of CRLF counts as an empty line, without effect.
                bytes.advance(1);
                self.line = LineKind::Begins;
            }
        }
    }
}

/// Searches for the end of the first event in bytes that grow. Each byte is scanned once.
#[derive(Debug, Default)]
pub(crate) struct FirstEvent(FrameScanner);

impl FirstEvent {
    /// The end of the first event, if it is complete.
    pub(crate) fn end(&mut self, bytes: &[u8]) -> Option<usize> {
        while let Some(frame) = self.0.next(bytes) {
            if frame.has_data() {
                return Some(frame.end);
            }
        }
        None
    }
}

/// The data of the first event of whole frames.
pub(crate) fn data_of(whole: &Bytes) -> Option<Bytes> {
    let frame = frames(whole).find(Frame::has_data)?;
    Some(events::data(&frame, whole))
}

#[cfg(test)]
mod tests;
