//! Server-sent events on their way through: whole frames pass as they come, a broken one is never passed.
//!
//! ```text
//! reads ─▶ Frames::pass ─▶ whole frames ─▶ Frames::read ─▶ what the client is sent
//!            │ lines          (a slice)       │ tokens, usage, why it finished, an error
//!            └ an unfinished frame waits      └ a usage that only the router asked for is taken out
//! ```
//!
//! An engine writes whole frames, so in the usual case a read is passed on untouched. When it ends inside a frame, that
//! end waits for the rest: should the engine die there, the client sees the frames before it, then one typed error, then
//! `[DONE]`, and never half a frame. Each byte is looked at once, however the stream is cut.
//!
//! Lines and events are those of a conforming parser ([`lines`]). JSON is followed only in events that say one of a few
//! words: inside a JSON string their quotes would be escaped, so a model's text is not taken for them.

mod events;
mod lines;

use bytes::{Buf, Bytes, BytesMut};

use crate::message::usage::{Choices, Skim};
use lines::{Frame, Scan};

pub(crate) use events::{Counts, Read, Reading, first_error};
pub(crate) use lines::{frames, lines, value};

/// A frame longer than this is passed on in pieces: a bound on memory is worth more than a clean end.
const FRAME_BYTES_MAX: usize = 1 << 20;

/// One stream's frames.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    reading: Reading,
    /// The unfinished frame.
    held: BytesMut,
    scan: Scan,
    done: bool,
    /// The frames of what was passed last; without the one that says `[DONE]`.
    passed: Vec<Frame>,
    /// The unfinished frame, of which pieces were passed on.
    long: Option<Box<Long>>,
    choices: Choices,
    /// What such a frame said, once it has ended; the first one of what was passed last.
    ended: Option<Box<Skim>>,
}

/// A frame too long to be held: its data is followed as it passes.
#[derive(Debug, Default)]
struct Long {
    data: Skim,
    fields: usize,
    line: Line,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Line {
    #[default]
    Begins,
    Data,
    Other,
}

impl Frames {
    pub(crate) fn new(reading: Reading) -> Self {
        Self { reading, ..Self::default() }
    }

    /// Takes what came and gives what may be passed on; empty when no frame has ended.
    pub(crate) fn pass(&mut self, chunk: Bytes) -> Bytes {
        self.passed.clear();
        self.ended = None;
        if self.done {
            return Bytes::new();
        }
        if self.held.is_empty() {
            let end = self.look(&chunk);
            if end < chunk.len() {
                self.held.extend_from_slice(&chunk[end..]);
            }
            return self.with_piece(chunk.slice(..end));
        }
        // Only what is new is copied, and only it is looked at.
        self.held.extend_from_slice(&chunk);
        let held = std::mem::take(&mut self.held);
        let end = self.look(&held);
        self.held = held;
        let whole = self.held.split_to(end).freeze();
        self.with_piece(whole)
    }

    /// Where the last frame ends; what follows it, or what follows `[DONE]`, is not looked at again.
    fn look(&mut self, bytes: &[u8]) -> usize {
        let mut end = 0;
        while let Some(frame) = self.scan.next(bytes) {
            end = frame.end;
            if let Some(mut long) = self.long.take() {
                long.take(&bytes[..end]);
                self.ended = Some(Box::new(long.data));
            } else if frame.is_done(bytes) {
                self.done = true;
                break;
            }
            // A frame too long to be held is the first of them.
            if frame.has_data() || self.ended.is_some() && self.passed.is_empty() {
                self.passed.push(frame);
            }
        }
        self.scan.forget(end);
        end
    }

    /// What is passed on, with what of an unfinished frame is too long to be held.
    fn with_piece(&mut self, whole: Bytes) -> Bytes {
        if self.done {
            // Nothing that follows means anything.
            self.held.clear();
            return whole;
        }
        if self.held.len() <= FRAME_BYTES_MAX && self.long.is_none() {
            return whole;
        }
        let end = self.scan.can_forget();
        if end == 0 {
            return whole;
        }
        self.scan.forget(end);
        let piece = self.held.split_to(end).freeze();
        self.long.get_or_insert_default().take(&piece);
        if whole.is_empty() { piece } else { [whole, piece].concat().into() }
    }

    /// Whether the stream has said `[DONE]`: what comes after it changes nothing.
    pub(crate) fn is_done(&self) -> bool {
        self.done
    }

    /// Whether all that is left is a `[DONE]` without its last line end.
    pub(crate) fn ends_with_done(&self) -> bool {
        let mut lines = lines(&self.held);
        let is_done = |line| value(line, b"data").is_some_and(|data| data.trim_ascii() == b"[DONE]");
        self.long.is_none() && lines.next().is_some_and(is_done) && lines.all(<[u8]>::is_empty)
    }

    /// Whether a piece of an unfinished frame was passed on, so that a blank line must end it.
    pub(crate) fn is_inside(&self) -> bool {
        self.long.is_some()
    }

    /// Whether everything that came was passed on, in whole frames.
    pub(crate) fn is_whole(&self) -> bool {
        self.held.is_empty() && self.long.is_none()
    }
}

impl Long {
    /// Takes bytes that begin where the last ones ended and end at a line's end or inside a line that says what it is.
    fn take(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.line == Line::Begins {
                let end = memchr::memchr2(b'\r', b'\n', bytes).unwrap_or(bytes.len());
                match value(&bytes[..end], b"data") {
                    Some(data) => {
                        if self.fields > 0 {
                            self.data.feed(b"\n");
                        }
                        self.fields += 1;
                        self.line = Line::Data;
                        bytes.advance(end - data.len());
                    }
                    None => self.line = Line::Other,
                }
            }
            let end = memchr::memchr2(b'\r', b'\n', bytes).unwrap_or(bytes.len());
            if self.line == Line::Data {
                self.data.feed(&bytes[..end]);
            }
            bytes.advance(end);
            if !bytes.is_empty() {
                // Of CRLF the second is a line of its own, which says nothing.
                bytes.advance(1);
                self.line = Line::Begins;
            }
        }
    }
}

/// Looks for the end of the first event, in bytes that grow; each of them is looked at once.
#[derive(Debug, Default)]
pub(crate) struct FirstEvent(Scan);

impl FirstEvent {
    /// Just past it, once it is there.
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
