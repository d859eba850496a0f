//! Contents of whole frames, and the parts that the client receives.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::{self, Finder};
use serde_json::Value;

use super::FrameBuffer;
use super::frames::{EventName, Frame, RESPONSE_ENDS, frames};
use crate::message::embedded_error::{EmbeddedError, has_no_output};
use crate::message::usage::{JsonScanner, UsageScan};

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\""));
static FINISH: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"finish_reason\""));
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"error\""));
static STOP: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"stop_reason\""));
static KIND: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"type\""));
static TOKEN_IDS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"token_ids\""));

/// How a stream is read.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StreamReadOptions {
    pub counts: TokenCountRule,
    /// Only the router asked for usage, so its event is not for the client.
    pub without_usage: bool,
    pub ending: StreamEnding,
}

/// What ends a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum StreamEnding {
    /// `[DONE]`.
    #[default]
    Done,
    /// The event `message_stop`. Anthropic's SDK takes a stream that is cut before it as complete (2.14).
    MessageStop,
    /// The event `response.completed`, `response.incomplete` or `response.failed`, or `[DONE]`. A body that ends before
    /// it is cut.
    ResponseEnd,
}

impl StreamEnding {
    /// Whether this frame ends a stream.
    pub(super) fn is_end(self, frame: &Frame, bytes: &[u8]) -> bool {
        match self {
            Self::MessageStop => frame.name == EventName::MessageStop && frame.has_data(),
            Self::ResponseEnd => match frame.name {
                EventName::ResponseEnd => frame.has_data(),
                // A reader takes the kind of an event from its data, so the name may be missing.
                EventName::None => frame.is_done(bytes) || is_response_end(&bytes[frame.start..frame.end]),
                EventName::Error | EventName::MessageStop | EventName::Other => false,
            },
            Self::Done => frame.is_done(bytes),
        }
    }

    /// Whether an event of Messages contains the reason of the end.
    fn has_reason(self, event: &[u8]) -> bool {
        let has = |at: usize| {
            value(&event[at + STOP.needle().len()..]).is_some_and(|reason| reason.starts_with(b"\""))
        };
        self == Self::MessageStop && STOP.find_iter(event).any(has)
    }
}

/// The number of tokens that an event counts as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TokenCountRule {
    /// One.
    #[default]
    Events,
    /// The number of its `token_ids`, or else one.
    TokenIds,
    /// For responses: one, if it is a delta.
    Deltas,
    /// For Messages: one, if it is a delta of a content block.
    BlockDeltas,
}

/// The result of reading whole frames.
#[derive(Debug)]
pub(crate) struct FilteredFrames {
    /// Bytes for the client: up to an error, and without events that it did not ask for.
    pub forwarded: Bytes,
    /// An engine's error in the middle of its stream.
    pub error: Option<EmbeddedError>,
}

impl FrameBuffer {
    /// Reads the result of the last [`FrameBuffer::pass`], and records its contents.
    pub(crate) fn read(&mut self, whole: Bytes, usage: &mut UsageScan) -> FilteredFrames {
        // Few reads contain anything but text. The others pass without a scan of each event.
        let has_content =
            self.long_scan.is_some() || has_value(&whole) || self.complete.iter().any(needs_parsing);
        if !has_content && self.reading.counts == TokenCountRule::Events {
            usage.streamed += self.complete.iter().filter(|frame| frame.has_data()).count() as u64;
            return FilteredFrames { forwarded: whole, error: None };
        }
        let mut removed: Vec<Range<usize>> = Vec::new();
        for (at, frame) in self.complete.iter().enumerate() {
            // The last event of a response.
            let is_last = self.last.is_some() && at + 1 == self.complete.len();
            let is_end = is_last && self.reading.ending == StreamEnding::ResponseEnd;
            let long = self.long_scan.take();
            if !frame.has_data() && long.is_none() {
                continue;
            }
            let bytes = &whole[frame.start..frame.end];
            let tokens = self.reading.counts.tokens(bytes);
            let has_value = || has_value(bytes) || is_end || self.reading.ending.has_reason(bytes);
            if long.is_none() && !needs_parsing(frame) && !has_value() {
                usage.streamed += tokens;
                continue;
            }
            let is_long = long.is_some();
            let (data, scanner) = match long {
                Some(scanner) => (Bytes::new(), *scanner),
                None => {
                    let data = data(frame, &whole);
                    let scanner = JsonScanner::of(&data);
                    (data, scanner)
                }
            };
            let is_aborted = is_end && is_aborted(&data, &scanner, usage);
            let aborted = || is_aborted.then(EmbeddedError::of_abort);
            if let Some(error) = embedded_error(frame, data, &scanner).or_else(aborted) {
                // The client has the beginning of a long frame.
                let end = if is_long { frame.end } else { frame.start };
                return FilteredFrames {
                    forwarded: without(&whole.slice(..end), &removed),
                    error: Some(error),
                };
            }
            let only_usage =
                scanner.has_usage() && !scanner.has_choice() && self.reading.counts.has_usage_events();
            if !only_usage {
                usage.streamed += tokens;
            }
            usage.note(&scanner);
            if let (Some(_), Some(choice), Some(usage)) =
                (scanner.usage(), scanner.choice(), &mut usage.usage)
            {
                usage.completion = self.choices.count(choice, usage.completion, tokens);
            }
            if only_usage && self.reading.without_usage && !is_long {
                removed.push(frame.start..frame.end);
            }
        }
        // vLLM reports its own abort by an end without a reason.
        let last = self.last.filter(|_| self.reading.ending == StreamEnding::MessageStop);
        match last.filter(|_| usage.finish.is_none()) {
            Some(start) => FilteredFrames {
                forwarded: without(&whole.slice(..start), &removed),
                error: Some(EmbeddedError::of_abort()),
            },
            None => FilteredFrames { forwarded: without(&whole, &removed), error: None },
        }
    }
}

/// Whether the last event of a response reports the engine's own abort: by its status, or because there was no token. The
/// data of a long event is empty here.
fn is_aborted(event: &[u8], scanner: &JsonScanner, before: &UsageScan) -> bool {
    let has_tokens = before.streamed > 0 || scanner.usage().is_none_or(|usage| usage.completion > 0);
    let is_empty =
        || serde_json::from_slice(event).is_ok_and(|event: Value| has_no_output(&event["response"]));
    scanner.is_cancelled() || !has_tokens && is_empty()
}

impl TokenCountRule {
    /// Whether an event with usage and no choice contains nothing else.
    fn has_usage_events(self) -> bool {
        matches!(self, Self::Events | Self::TokenIds)
    }

    fn tokens(self, frame: &[u8]) -> u64 {
        match self {
            Self::Events => 1,
            Self::Deltas => u64::from(memmem::find(frame, b".delta\"").is_some()),
            Self::BlockDeltas => u64::from(memmem::find(frame, b"\"content_block_delta\"").is_some()),
            Self::TokenIds => {
                let ids = TOKEN_IDS.find(frame).and_then(|at| value(&frame[at + TOKEN_IDS.needle().len()..]));
                let Some([b'[', ids @ ..]) = ids else { return 1 };
                let ids = &ids[..memchr::memchr(b']', ids).unwrap_or(ids.len())];
                let commas = memchr::memchr_iter(b',', ids).count();
                if ids.trim_ascii().is_empty() { 0 } else { commas as u64 + 1 }
            }
        }
    }
}

/// The error in the first event, if it is one.
pub(crate) fn first_error(whole: &Bytes) -> Option<EmbeddedError> {
    let frame = frames(whole).find(Frame::has_data)?;
    let data = data(&frame, whole);
    let scanner = JsonScanner::of(&data);
    embedded_error(&frame, data, &scanner)
}

fn embedded_error(frame: &Frame, data: Bytes, scanner: &JsonScanner) -> Option<EmbeddedError> {
    EmbeddedError::of(data.clone(), scanner)
        .or_else(|| frame.is_error().then(|| EmbeddedError::of_error_event(data)))
}

/// Whether the keywords may span lines, or the event's name is `error`.
fn needs_parsing(frame: &Frame) -> bool {
    frame.fields > 1 || frame.is_error()
}

/// Whether an event without a name is the last one of a response.
fn is_response_end(frame: &[u8]) -> bool {
    let kind =
        |at: usize| value(&frame[at + KIND.needle().len()..]).and_then(|kind| kind.strip_prefix(b"\""));
    let is_end = |kind: &[u8]| {
        RESPONSE_ENDS.iter().any(|end| kind.strip_prefix(*end).is_some_and(|rest| rest.starts_with(b"\"")))
    };
    KIND.find_iter(frame).filter_map(kind).any(is_end)
}

/// The data of a frame, without a copy if it is one line.
pub(super) fn data(frame: &Frame, whole: &Bytes) -> Bytes {
    match frame.data(whole) {
        Cow::Borrowed(data) => whole.slice_ref(data),
        Cow::Owned(data) => data.into(),
    }
}

/// Whether there is a usage, a finish reason or an error that is not `null`.
fn has_value(bytes: &[u8]) -> bool {
    // Without `find_iter`, which copies the searcher: events are short.
    let has = |name: &Finder<'_>, is: fn(Option<&[u8]>) -> bool| {
        let mut rest = bytes;
        while let Some(at) = name.find(rest) {
            rest = &rest[at + name.needle().len()..];
            if is(value(rest)) {
                return true;
            }
        }
        false
    };
    has(&USAGE, |value| value.is_some_and(|value| !value.starts_with(b"null")))
        || has(&FINISH, |value| value.is_some_and(|value| value.starts_with(b"\"")))
        // The keyword may be a value itself.
        || has(&ERROR, |value| value.is_none_or(|value| !value.starts_with(b"null")))
}

/// The value behind a name's colon.
fn value(after: &[u8]) -> Option<&[u8]> {
    after.trim_ascii_start().strip_prefix(b":").map(<[u8]>::trim_ascii_start)
}

/// `whole` without the `removed` ranges; copied only if a range in its middle is removed.
fn without(whole: &Bytes, removed: &[Range<usize>]) -> Bytes {
    let mut parts: Vec<Range<usize>> = Vec::new();
    let mut from = 0;
    for range in removed.iter().filter(|range| range.end <= whole.len()) {
        parts.push(from..range.start);
        from = range.end;
    }
    parts.push(from..whole.len());
    parts.retain(|part| !part.is_empty());
    match &parts[..] {
        [] => Bytes::new(),
        [part] => whole.slice(part.clone()),
        parts => {
            let mut rest = BytesMut::with_capacity(whole.len());
            parts.iter().for_each(|part| rest.extend_from_slice(&whole[part.clone()]));
            rest.freeze()
        }
    }
}
