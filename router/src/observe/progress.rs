//! What is noted of one request while it runs, and counted when it is over.
//!
//! The exchange's own timeline says when each phase began; beside it stand only a few numbers that it does not know.
//! Nothing here takes a lock or allocates.

use std::sync::Arc;

use baton_connector::Time;
use baton_connector::exchange::{Event, Span, Timeline};

use crate::engines::http::Engine;
use crate::message::sse::Reading;
use crate::message::trace_context::Trace;
use crate::message::usage::Seen;
use crate::metrics::{End, Leg, ModelMetrics, Reason};
use crate::observe::in_flight::Entry;

/// What the engines of one request did.
#[derive(Default)]
pub(crate) struct Watched {
    /// When the last attempt began.
    asked: Time,
    /// When the last piece of a streamed answer came.
    last_piece: Option<Time>,
    /// One engine answers it by itself: nothing is generated.
    pub passes: bool,
    /// The answer is a stream of events.
    pub streamed: bool,
    /// How a streamed answer is read.
    pub reading: Reading,
    /// What the answer said of itself.
    pub seen: Seen,
    /// The next failure of an engine is that nothing came of it in time.
    pub silent: bool,
    /// Attempts of each leg.
    pub attempts: [u16; 2],
    /// Whose trace it is.
    pub trace: Trace,
    /// What is told of the request while it is in flight.
    pub entry: Option<Arc<Entry>>,
}

impl Watched {
    /// Counts an event at its engine; `engines` are those of the attempts, by number.
    pub(crate) fn event(&mut self, event: Event, now: Time, engines: &[Arc<Engine>]) {
        let at = |attempt: baton_connector::exchange::Attempt| engines.get(usize::from(attempt.0));
        let (attempt, leg, reason) = match event {
            Event::PrefillSent(to) => return self.sent(now, at(to), Leg::Prefill),
            Event::DecodeSent(to) => return self.sent(now, at(to), Leg::Decode),
            Event::PrefillLent(by, _) | Event::PrefillEmpty(by) => {
                return self.answered(now, at(by), Leg::Prefill);
            }
            Event::DecodeAccepted(by) => return self.answered(now, at(by), Leg::Decode),
            Event::PrefillRefused(by) => (by, Leg::Prefill, Reason::Refused),
            Event::PrefillFailed(by, failure) => (by, Leg::Prefill, self.reason(failure.into())),
            Event::DecodeRefused(by) => (by, Leg::Decode, Reason::Refused),
            Event::DecodeFailed(by, failure) => (by, Leg::Decode, self.reason(failure.into())),
            Event::StreamBroken(by) | Event::StreamCut(by) => (by, Leg::Decode, self.reason(Reason::Died)),
            Event::NotAdmitted
            | Event::NoEngine
            | Event::PrefillEnded(_)
            | Event::PrefillSkipped
            | Event::FirstChunk(_)
            | Event::StreamEnded(_)
            | Event::HandoffSpent
            | Event::GaveUp
            | Event::GaveUpFor(_)
            | Event::ClientGone
            | Event::Dropped => return,
        };
        let Some(engine) = at(attempt) else { return };
        engine.metrics.failed(leg, reason);
        // A request that is itself wrong is nobody's trouble.
        if reason != Reason::Refused
            && let Some(held_back) = engine.trouble.due()
        {
            tracing::warn!(
                request = self.entry.as_ref().map(|entry| entry.id.as_str()),
                engine = engine.authority(),
                leg = leg.label(),
                reason = reason.label(),
                held_back,
                "engine failed a request"
            );
        }
    }

    fn reason(&mut self, otherwise: Reason) -> Reason {
        if std::mem::take(&mut self.silent) { Reason::Silent } else { otherwise }
    }

    fn sent(&mut self, now: Time, to: Option<&Arc<Engine>>, leg: Leg) {
        self.asked = now;
        self.attempts[leg as usize] += 1;
        if let Some(engine) = to {
            engine.metrics.leg(leg).requests.increment(1);
            if let Some(entry) = &self.entry {
                entry.asks(leg, engine);
            }
        }
    }

    fn answered(&self, now: Time, by: Option<&Arc<Engine>>, leg: Leg) {
        if let Some(engine) = by {
            engine.metrics.leg(leg).response.record(now.since(self.asked));
        }
    }

    /// A piece of a streamed answer came.
    pub(crate) fn piece(&mut self, now: Time, model: &ModelMetrics) {
        if let Some(last) = self.last_piece.replace(now) {
            model.inter_token.record(now.since(last));
        }
    }

    /// Counts a request that is over.
    pub(crate) fn ended(&self, model: &ModelMetrics, end: End, status: u16, line: &Timeline, begun: Time) {
        model.ended(end, status);
        if let Some(asked) = line.asked() {
            model.queue.record(asked.since(begun));
        }
        // What one engine answers by itself has no phases, and would only dilute those of what generates.
        if !self.passes {
            self.phases(model, line, begun);
        }
        let (prompt, cached) = self.seen.usage.map_or((0, 0), |usage| (usage.prompt, usage.cached));
        model.tokens(prompt, cached, self.seen.completion().unwrap_or(0));
        if self.streamed
            && let (Some(usage), Some(first), Some(last)) =
                (self.seen.usage, line.first_chunk, self.last_piece)
            && let Ok(others @ 1..) = u32::try_from(usage.completion.saturating_sub(1))
        {
            model.per_token.record(last.since(first) / others);
        }
        if let Some(ended) = line.ended {
            model.duration.record(ended.since(begun));
        }
    }

    fn phases(&self, model: &ModelMetrics, line: &Timeline, begun: Time) {
        for (histogram, span) in [
            (&model.prefill, line.prefill()),
            (&model.gap, line.gap()),
            (&model.accept, line.accept()),
            (&model.decode, line.decode()),
        ] {
            if let Some(took) = span.and_then(Span::took) {
                histogram.record(took);
            }
        }
        if let Some(first) = line.first_chunk {
            model.first_token(self.streamed).record(first.since(begun));
        }
    }
}
