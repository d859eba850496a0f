//! Server-sent events on their way through: whole frames pass as they come, a broken one is never passed.
//!
//! An engine writes whole frames, so in the usual case a chunk is passed on untouched. When a chunk ends
//! inside a frame, that end waits for the rest: should the engine die there, the client sees the frames
//! before it, then one typed error, then `[DONE]`, and never half a frame.

use bytes::{Bytes, BytesMut};

/// A frame longer than this is passed on in pieces: a bound on memory is worth more than a clean end.
const FRAME_BYTES_MAX: usize = 1 << 20;

/// One stream's frames.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    tail: BytesMut,
    done: bool,
    inside: bool,
}

impl Frames {
    /// Takes what came and gives what may be passed on; empty when no frame has ended.
    pub(crate) fn pass(&mut self, chunk: Bytes) -> Bytes {
        let whole = if self.tail.is_empty() { chunk } else { self.joined(&chunk) };
        let end = match last_frame_end(&whole) {
            Some(end) => end,
            None if whole.len() > FRAME_BYTES_MAX => whole.len(),
            None => 0,
        };
        self.tail.extend_from_slice(&whole[end..]);
        if end > 0 {
            self.inside = !(whole[..end].ends_with(b"\n\n") || whole[..end].ends_with(b"\n\r\n"));
        }
        let frames = whole.slice(..end);
        self.done |= ends_with_done(&frames);
        frames
    }

    /// Whether the stream has said `[DONE]`: what comes after it changes nothing.
    pub(crate) fn is_done(&self) -> bool {
        self.done
    }

    /// Whether a piece of an unfinished frame was passed on, so that a blank line must end it.
    pub(crate) fn is_inside(&self) -> bool {
        self.inside
    }

    /// Whether everything that came was passed on, in whole frames.
    pub(crate) fn is_whole(&self) -> bool {
        self.tail.is_empty() && !self.inside
    }

    fn joined(&mut self, chunk: &[u8]) -> Bytes {
        self.tail.extend_from_slice(chunk);
        std::mem::take(&mut self.tail).freeze()
    }
}

/// Just past the last blank line.
fn last_frame_end(bytes: &[u8]) -> Option<usize> {
    let newline = |at: &usize| bytes[*at] == b'\n';
    let ends_frame = |&at: &usize| bytes[..at].ends_with(b"\n") || bytes[..at].ends_with(b"\n\r");
    (1..bytes.len()).rev().filter(newline).find(ends_frame).map(|at| at + 1)
}

fn ends_with_done(frames: &[u8]) -> bool {
    let last = frames.trim_ascii_end();
    last.strip_suffix(b"[DONE]").is_some_and(|rest| {
        let line = rest.trim_ascii_end();
        line == b"data:" || line.ends_with(b"\ndata:")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &[u8] = b"data: {\"a\":1}\n\n: keep-alive\n\ndata: {\"b\":2}\r\n\r\ndata: [DONE]\n\n";

    #[test]
    fn every_split_gives_the_same_bytes_and_only_whole_frames() {
        for first in 0..STREAM.len() {
            for second in first..STREAM.len() {
                let mut frames = Frames::default();
                let mut passed = Vec::new();
                for piece in [&STREAM[..first], &STREAM[first..second], &STREAM[second..]] {
                    let out = frames.pass(Bytes::copy_from_slice(piece));
                    let whole = out.is_empty() || out.ends_with(b"\n\n") || out.ends_with(b"\r\n\r\n");
                    assert!(whole, "half a frame at {first}/{second}: {out:?}");
                    passed.extend_from_slice(&out);
                }
                assert_eq!(passed, STREAM, "split at {first} and {second}");
                assert!(frames.is_done() && !frames.is_inside());
            }
        }
    }

    #[test]
    fn whole_frames_pass_without_being_held_or_copied() {
        let chunk = Bytes::from_static(b"data: 1\n\n");
        let passed = Frames::default().pass(chunk.clone());
        assert_eq!(passed.as_ptr(), chunk.as_ptr());
    }

    #[test]
    fn done_is_a_frame_of_its_own_and_not_a_word_in_a_text() {
        let mut frames = Frames::default();
        frames.pass(Bytes::from_static(b"data: {\"text\":\"data: [DONE]\"}\n\n"));
        assert!(!frames.is_done());
        frames.pass(Bytes::from_static(b"data: [DONE]\n"));
        assert!(!frames.is_done());
        frames.pass(Bytes::from_static(b"\n"));
        assert!(frames.is_done());
    }

    #[test]
    fn a_frame_without_an_end_is_bounded() {
        let mut frames = Frames::default();
        let piece = Bytes::from(vec![b'x'; FRAME_BYTES_MAX]);
        assert!(frames.pass(piece.clone()).is_empty());
        assert_eq!(frames.pass(piece).len(), 2 * FRAME_BYTES_MAX);
        assert!(frames.is_inside());
    }
}
