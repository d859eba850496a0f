//! Boundaries of events, as the HTML standard defines them (9.2.6, "Interpreting an event stream"). LF, CRLF or CR
//! ends a line, and a blank line ends an event. The values of its `data` fields are joined by LF. A byte order
//! mark may come first.
//!
//! Incremental: each byte is scanned once, however the stream is split.

use std::borrow::Cow;

use memchr::memchr2;

const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";
/// The last events of a response. vLLM 0.32 sends the first one for an incomplete response, too.
pub(super) const RESPONSE_ENDS: [&[u8]; 3] =
    [b"response.completed", b"response.incomplete", b"response.failed"];

/// The name of an event, as far as it matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum EventName {
    /// It has none.
    #[default]
    None,
    Error,
    MessageStop,
    /// One of [`RESPONSE_ENDS`].
    ResponseEnd,
    Other,
}

impl EventName {
    fn of(name: &[u8]) -> Self {
        match name {
            b"" => Self::None,
            b"error" => Self::Error,
            b"message_stop" => Self::MessageStop,
            _ if RESPONSE_ENDS.contains(&name) => Self::ResponseEnd,
            _ => Self::Other,
        }
    }
}

/// Lines up to and including a blank one. A frame has an event if it has data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Frame {
    pub start: usize,
    pub end: usize,
    /// Range of the value of its first `data` field.
    data: (usize, usize),
    /// Number of `data` fields.
    pub fields: usize,
    /// The value of its last `event` field.
    pub name: EventName,
}

/// State of the scan of bytes that grow.
#[derive(Debug, Default)]
pub(super) struct FrameScanner {
    scanned: usize,
    /// Start of the unfinished line.
    line: usize,
    /// The beginning of that line was removed.
    is_cut: bool,
    /// A byte order mark is no longer expected.
    begun: bool,
    /// The last line ended with CR alone.
    had_cr: bool,
    /// The last frame ended with a CR as the last byte. An LF that follows belongs to it.
    after_cr: bool,
    frame: Frame,
}

impl Frame {
    /// Whether it has an event.
    pub(crate) fn has_data(&self) -> bool {
        self.fields > 0
    }

    /// Whether its event is named `error`.
    pub(crate) fn is_error(&self) -> bool {
        self.name == EventName::Error
    }

    /// The data of its event. `bytes` are those that were scanned.
    pub(crate) fn data<'a>(&self, bytes: &'a [u8]) -> Cow<'a, [u8]> {
        if self.fields == 1 {
            return Cow::Borrowed(&bytes[self.data.0..self.data.1]);
        }
        let mut joined = Vec::new();
        for line in lines(&bytes[self.start..self.end]) {
            if let Some(value) = value(line, b"data") {
                joined.extend_from_slice(value);
                joined.push(b'\n');
            }
        }
        joined.pop();
        Cow::Owned(joined)
    }

    /// Whether its event is `[DONE]`.
    pub(super) fn is_done(&self, bytes: &[u8]) -> bool {
        self.fields == 1 && bytes[self.data.0..self.data.1].trim_ascii() == b"[DONE]"
    }

    fn read(&mut self, bytes: &[u8], start: usize, end: usize) {
        let line = &bytes[start..end];
        if let Some(value) = value(line, b"data") {
            if self.fields == 0 {
                self.data = (end - value.len(), end);
            }
            self.fields += 1;
        } else if let Some(value) = value(line, b"event") {
            self.name = EventName::of(value);
        }
    }
}

impl FrameScanner {
    /// The next complete frame; `None` if there is none. The next call must pass the same bytes and those that
    /// follow.
    pub(super) fn next(&mut self, bytes: &[u8]) -> Option<Frame> {
        if !self.begun {
            if bytes.len() < BYTE_ORDER_MARK.len() && BYTE_ORDER_MARK.starts_with(bytes) {
                return None;
            }
            self.begun = true;
            if bytes.starts_with(BYTE_ORDER_MARK) {
                (self.line, self.scanned) = (BYTE_ORDER_MARK.len(), BYTE_ORDER_MARK.len());
            }
        }
        if self.after_cr && self.scanned < bytes.len() {
            self.after_cr = false;
            if bytes[self.scanned] == b'\n' {
                return Some(self.ended(self.scanned + 1));
            }
        }
        while let Some(found) = memchr2(b'\r', b'\n', &bytes[self.scanned..]) {
            let at = self.scanned + found;
            let is_blank = at == self.line && !self.is_cut;
            let end = match (bytes[at], bytes.get(at + 1)) {
                (b'\n', _) | (_, Some(b'\r')) => at + 1,
                (_, Some(b'\n')) => at + 2,
                (_, Some(_)) => at + 1,
                // An event does not wait for an LF where earlier lines had none.
                (_, None) if is_blank && self.had_cr => {
                    self.after_cr = true;
                    at + 1
                }
                (_, None) => {
                    self.scanned = at;
                    return None;
                }
            };
            self.had_cr = bytes[at] == b'\r' && end == at + 1;
            if is_blank {
                return Some(self.ended(end));
            }
            if !self.is_cut {
                self.frame.read(bytes, self.line, at);
            }
            (self.line, self.scanned, self.is_cut) = (end, end, false);
        }
        self.scanned = bytes.len();
        None
    }

    fn ended(&mut self, end: usize) -> Frame {
        (self.line, self.scanned) = (end, end);
        let next = Frame { start: end, ..Frame::default() };
        Frame { end, ..std::mem::replace(&mut self.frame, next) }
    }

    /// Removes the first bytes, at most the scanned ones.
    pub(super) fn forget(&mut self, bytes: usize) {
        self.scanned -= bytes;
        self.is_cut |= self.line < bytes;
        self.line = self.line.saturating_sub(bytes);
        let frame = &mut self.frame;
        frame.start = frame.start.saturating_sub(bytes);
        frame.data = (frame.data.0.saturating_sub(bytes), frame.data.1.saturating_sub(bytes));
    }

    /// How many bytes can be removed. A short beginning of a line stays, because it contains the field's name.
    pub(super) fn can_forget(&self) -> usize {
        const SHORT: usize = 64;
        if self.scanned - self.line < SHORT && !self.is_cut { self.line } else { self.scanned }
    }
}

/// The frames of bytes that contain whole ones.
pub(crate) fn frames(bytes: &[u8]) -> impl Iterator<Item = Frame> {
    let mut scan = FrameScanner::default();
    std::iter::from_fn(move || scan.next(bytes))
}

/// Lines without their ends, and without a byte order mark.
pub(crate) fn lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut bytes = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let end = memchr2(b'\r', b'\n', bytes).unwrap_or(bytes.len());
        let line = &bytes[..end];
        let next = if bytes[end..].starts_with(b"\r\n") { end + 2 } else { end + 1 };
        bytes = bytes.get(next..).unwrap_or_default();
        Some(line)
    })
}

/// The value of a line with this field, without one blank before it.
pub(crate) fn value<'a>(line: &'a [u8], field: &[u8]) -> Option<&'a [u8]> {
    match line.strip_prefix(field)? {
        [b':', b' ', value @ ..] | [b':', value @ ..] => Some(value),
        [] => Some(b""),
        _ => None,
    }
}
