//! When each part of a request began and ended. Metrics, logs, traces and `Server-Timing` all tell of the same spans.

use std::time::Duration;

use crate::Time;

/// When each phase began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Timeline {
    /// First prefill attempt.
    pub prefill_sent: Option<Time>,
    /// A prefill engine answered, with a handoff or with none. Not where all of them failed.
    pub prefilled: Option<Time>,
    /// Whether the prefill that answered computed on.
    pub computes_on: bool,
    /// The end of such a prefill.
    pub prefill_ended: Option<Time>,
    /// First decode attempt.
    pub decode_sent: Option<Time>,
    /// A decode engine took it.
    pub accepted: Option<Time>,
    /// First byte of the answer.
    pub first_chunk: Option<Time>,
    /// The end.
    pub ended: Option<Time>,
}

/// A phase: when it began, and when it ended as it should, if it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its beginning.
    pub from: Time,
    /// Its end; `None` when it never came to that.
    pub to: Option<Time>,
}

impl Span {
    fn between(from: Option<Time>, to: Option<Time>) -> Option<Self> {
        Some(Self { from: from?, to })
    }

    /// How long it took, if it ended.
    #[must_use]
    pub fn took(self) -> Option<Duration> {
        Some(self.to?.since(self.from))
    }
}

impl Timeline {
    /// When the first engine was asked.
    #[must_use]
    pub fn asked(&self) -> Option<Time> {
        self.prefill_sent.or(self.decode_sent)
    }

    /// From the first prefill attempt to the answer of one, or to the end of one that had answered before, attempts that
    /// failed included.
    #[must_use]
    pub fn prefill(&self) -> Option<Span> {
        let ended = if self.computes_on { self.prefill_ended } else { self.prefilled };
        Span::between(self.prefill_sent, ended)
    }

    /// From a prefill engine's answer until a decode engine is asked.
    #[must_use]
    pub fn gap(&self) -> Option<Span> {
        Span::between(self.prefilled, self.decode_sent)
    }

    /// From the first decode attempt until a decode engine took the request.
    #[must_use]
    pub fn accept(&self) -> Option<Span> {
        Span::between(self.decode_sent, self.accepted)
    }

    /// From when a decode engine took it until the first byte of the answer.
    #[must_use]
    pub fn first_byte(&self) -> Option<Span> {
        Span::between(self.accepted, self.first_chunk)
    }

    /// From when a decode engine took it to the end, however it ended.
    #[must_use]
    pub fn decode(&self) -> Option<Span> {
        Span::between(self.accepted, self.ended)
    }

    /// From the first byte of the answer to the end, however it ended.
    #[must_use]
    pub fn stream(&self) -> Option<Span> {
        Span::between(self.first_chunk, self.ended)
    }
}
