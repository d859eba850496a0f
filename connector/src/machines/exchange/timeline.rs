//! When each part of a request began and ended. Metrics, logs, traces and `Server-Timing` report the same spans.

use std::time::Duration;

use crate::Time;

/// When each phase began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Timeline {
    /// First prefill attempt.
    pub prefill_sent: Option<Time>,
    /// First successful reply of a prefill engine, with or without a lease.
    pub prefilled: Option<Time>,
    /// Whether the prefill still computed after its reply (an early handoff).
    pub computes_on: bool,
    /// The end of such a prefill.
    pub prefill_ended: Option<Time>,
    /// First decode attempt.
    pub decode_sent: Option<Time>,
    /// A decode engine accepted the request.
    pub accepted: Option<Time>,
    /// First byte of the response.
    pub first_chunk: Option<Time>,
    /// The end.
    pub ended: Option<Time>,
}

/// A phase: when it began, and when it ended normally, if it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The start.
    pub from: Time,
    /// The normal end, if any.
    pub to: Option<Time>,
}

impl Span {
    fn between(from: Option<Time>, to: Option<Time>) -> Option<Self> {
        Some(Self { from: from?, to })
    }

    /// Duration of a phase that ended.
    #[must_use]
    pub fn duration(self) -> Option<Duration> {
        Some(self.to?.since(self.from))
    }
}

impl Timeline {
    /// When the request was first sent to an engine.
    #[must_use]
    pub fn first_sent(&self) -> Option<Time> {
        self.prefill_sent.or(self.decode_sent)
    }

    /// From the first prefill attempt, failed ones included, to the reply, or to the end of the prefill after an early
    /// handoff.
    #[must_use]
    pub fn prefill(&self) -> Option<Span> {
        let ended = if self.computes_on { self.prefill_ended } else { self.prefilled };
        Span::between(self.prefill_sent, ended)
    }

    /// From the prefill reply to the first decode attempt. Legs that were sent at once have no gap.
    #[must_use]
    pub fn gap(&self) -> Option<Span> {
        Span::between(self.prefilled, self.decode_sent).filter(|gap| gap.to.is_none_or(|to| gap.from <= to))
    }

    /// From the first decode attempt to the acceptance by a decode engine.
    #[must_use]
    pub fn accept(&self) -> Option<Span> {
        Span::between(self.decode_sent, self.accepted)
    }

    /// From the acceptance to the first byte of the response.
    #[must_use]
    pub fn first_byte(&self) -> Option<Span> {
        Span::between(self.accepted, self.first_chunk)
    }

    /// From the acceptance to the end of the request, for any outcome.
    #[must_use]
    pub fn decode(&self) -> Option<Span> {
        Span::between(self.accepted, self.ended)
    }

    /// From the first byte of the response to the end of the request, for any outcome.
    #[must_use]
    pub fn stream(&self) -> Option<Span> {
        Span::between(self.first_chunk, self.ended)
    }
}
