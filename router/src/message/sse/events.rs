//! What whole frames say, and what of them the client is sent.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::{self, Finder};

use super::Frames;
use super::lines::{Frame, frames};
use crate::message::error_inside::ErrorInside;
use crate::message::usage::{Seen, Skim};

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\""));
static FINISH: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"finish_reason\""));
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"error\""));
static TOKEN_IDS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"token_ids\""));

/// How a stream is read.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reading {
    pub counts: Counts,
    /// The router asked for usage and the client did not: its event is not for the client.
    pub without_usage: bool,
}

/// How many tokens an event has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Counts {
    /// One.
    #[default]
    Events,
    /// As many as its `token_ids`, and else one.
    TokenIds,
    /// Of responses: one, if it is a delta.
    Deltas,
}

/// What became of whole frames.
#[derive(Debug)]
pub(crate) struct Read {
    /// What the client may be sent: up to an error, and without what it did not ask for.
    pub good: Bytes,
    /// An engine's error in the middle of its stream.
    pub told: Option<ErrorInside>,
}

impl Frames {
    /// Reads what [`Frames::pass`] gave last, and notes what it says.
    pub(crate) fn read(&mut self, whole: Bytes, seen: &mut Seen) -> Read {
        // Few reads say anything but text; they are passed without a look into each event.
        let says = self.ended.is_some() || says_something(&whole) || self.passed.iter().any(is_odd);
        if !says && self.reading.counts == Counts::Events {
            seen.passed += self.passed.iter().filter(|frame| frame.has_data()).count() as u64;
            return Read { good: whole, told: None };
        }
        let mut taken: Vec<Range<usize>> = Vec::new();
        for frame in &self.passed {
            let long = self.ended.take();
            if !frame.has_data() && long.is_none() {
                continue;
            }
            let bytes = &whole[frame.start..frame.end];
            let tokens = self.reading.counts.tokens(bytes);
            if long.is_none() && !is_odd(frame) && !says_something(bytes) {
                seen.passed += tokens;
                continue;
            }
            let is_long = long.is_some();
            let (data, skim) = match long {
                Some(skim) => (Bytes::new(), *skim),
                None => {
                    let data = data(frame, &whole);
                    let skim = Skim::of(&data);
                    (data, skim)
                }
            };
            if let Some(told) = told(frame, data, &skim) {
                // Of a long one the client has the beginning.
                let end = if is_long { frame.end } else { frame.start };
                return Read { good: without(&whole.slice(..end), &taken), told: Some(told) };
            }
            let only_usage = skim.has_usage() && !skim.has_choice() && self.reading.counts != Counts::Deltas;
            if !only_usage {
                seen.passed += tokens;
            }
            seen.note(&skim);
            if let (Some(_), Some(choice), Some(usage)) = (skim.usage(), skim.choice(), &mut seen.usage) {
                usage.completion = self.choices.count(choice, usage.completion, tokens);
            }
            if only_usage && self.reading.without_usage && !is_long {
                taken.push(frame.start..frame.end);
            }
        }
        Read { good: without(&whole, &taken), told: None }
    }
}

impl Counts {
    fn tokens(self, frame: &[u8]) -> u64 {
        match self {
            Self::Events => 1,
            Self::Deltas => u64::from(memmem::find(frame, b".delta\"").is_some()),
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

/// An error in the first event, where it is one.
pub(crate) fn first_error(whole: &Bytes) -> Option<ErrorInside> {
    let frame = frames(whole).find(Frame::has_data)?;
    let data = data(&frame, whole);
    let skim = Skim::of(&data);
    told(&frame, data, &skim)
}

fn told(frame: &Frame, data: Bytes, skim: &Skim) -> Option<ErrorInside> {
    ErrorInside::of(data.clone(), skim).or_else(|| frame.is_error.then(|| ErrorInside::named(data)))
}

/// Whether its words may stand across lines, or its name says what it is.
fn is_odd(frame: &Frame) -> bool {
    frame.fields > 1 || frame.is_error
}

/// Without a copy where it is one line.
pub(super) fn data(frame: &Frame, whole: &Bytes) -> Bytes {
    match frame.data(whole) {
        Cow::Borrowed(data) => whole.slice_ref(data),
        Cow::Owned(data) => data.into(),
    }
}

/// Whether there is a usage, a reason or an error that is not `null`.
fn says_something(bytes: &[u8]) -> bool {
    let has = |name: &Finder<'_>, is: fn(Option<&[u8]>) -> bool| {
        name.find_iter(bytes).any(|at| is(value(&bytes[at + name.needle().len()..])))
    };
    has(&USAGE, |value| value.is_some_and(|value| !value.starts_with(b"null")))
        || has(&FINISH, |value| value.is_some_and(|value| value.starts_with(b"\"")))
        // It may be a value itself.
        || has(&ERROR, |value| value.is_none_or(|value| !value.starts_with(b"null")))
}

/// What follows a name's colon.
fn value(after: &[u8]) -> Option<&[u8]> {
    after.trim_ascii_start().strip_prefix(b":").map(<[u8]>::trim_ascii_start)
}

/// The rest; copied only where something is taken out of its middle.
fn without(whole: &Bytes, taken: &[Range<usize>]) -> Bytes {
    let mut parts: Vec<Range<usize>> = Vec::new();
    let mut from = 0;
    for range in taken.iter().filter(|range| range.end <= whole.len()) {
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
