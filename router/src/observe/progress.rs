//! Values recorded of one request while it runs, and counted when it ends.
//!
//! The exchange's own timeline contains the start of each phase; this module adds the few values that it lacks. No
//! function here takes a lock or allocates.

use std::sync::Arc;

use baton_connector::Time;
use baton_connector::exchange::{Event, Span, Timeline};

use crate::engines::http::Engine;
use crate::message::sse::StreamReadOptions;
use crate::message::trace_context::TraceContext;
use crate::message::usage::UsageScan;
use crate::metrics::log_span::request_span;
use crate::metrics::{AttemptFailure, Leg, ModelMetrics, RequestOutcome};
use crate::observe::in_flight::InFlightRequest;

/// The progress of one request at its engines.
#[derive(Default)]
pub(crate) struct RequestProgress {
    /// The start of the last attempt.
    sent_at: Time,
    /// The arrival of the last chunk of a streamed response.
    last_piece: Option<Time>,
    /// One engine serves the request without generating tokens.
    pub passes: bool,
    /// The response is an event stream.
    pub streamed: bool,
    /// How a streamed response is read.
    pub reading: StreamReadOptions,
    /// The usage in the response.
    pub usage_scan: UsageScan,
    /// The next failure of an engine is a timeout.
    pub timed_out: bool,
    /// Attempts per leg.
    pub attempts: [u16; 2],
    /// The leg of the last failure.
    pub failed: Option<Leg>,
    /// The request's trace.
    pub trace: TraceContext,
    /// The request's entry in the table of requests in flight.
    pub entry: Option<Arc<InFlightRequest>>,
}

impl RequestProgress {
    /// Counts an event at its engine; `engines` are those of the attempts, by number.
    pub(crate) fn record_event(&mut self, event: Event, now: Time, engines: &[Arc<Engine>]) {
        let at = |attempt: baton_connector::exchange::Attempt| engines.get(usize::from(attempt.0));
        let (attempt, leg, reason) = match event {
            Event::PrefillSent(to) => return self.record_sent(now, at(to), Leg::Prefill),
            Event::DecodeSent(to) => return self.record_sent(now, at(to), Leg::Decode),
            Event::PrefillLeased(by, _) | Event::PrefillEmpty(by) => {
                return self.record_response(now, at(by), Leg::Prefill);
            }
            Event::DecodeAccepted(by) => return self.record_response(now, at(by), Leg::Decode),
            Event::PrefillRefused(by) => (by, Leg::Prefill, AttemptFailure::Refused),
            Event::PrefillFailed(by, failure) => (by, Leg::Prefill, self.reason(failure.into())),
            Event::DecodeRefused(by) => (by, Leg::Decode, AttemptFailure::Refused),
            Event::DecodeFailed(by, failure) => (by, Leg::Decode, self.reason(failure.into())),
            Event::StreamBroken(by) | Event::StreamCut(by) => {
                (by, Leg::Decode, self.reason(AttemptFailure::Died))
            }
            Event::NotAdmitted
            | Event::DecodeDeclined(_)
            | Event::NoEngine
            | Event::PrefillEnded(_)
            | Event::PrefillSkipped
            | Event::FirstChunk(_)
            | Event::StreamEnded(_)
            | Event::HandoffUnusable
            | Event::Exhausted
            | Event::ExhaustedFor(_)
            | Event::ClientGone
            | Event::Dropped => return,
        };
        self.failed = Some(leg);
        let Some(engine) = at(attempt) else { return };
        engine.metrics.count_failure(leg, reason);
        // A faulty request is no failure of an engine.
        if reason != AttemptFailure::Refused
            && let Some(held_back) = engine.log_limiters.attempt_failed.allow()
        {
            tracing::warn!(
                parent: request_span!(self.entry.as_ref().map(|entry| &entry.id)), event = "attempt_failed",
                engine = engine.authority(), leg = leg.label(), reason = reason.label(), held_back,
                "engine failed a request"
            );
        }
    }

    fn reason(&mut self, otherwise: AttemptFailure) -> AttemptFailure {
        if std::mem::take(&mut self.timed_out) { AttemptFailure::Silent } else { otherwise }
    }

    fn record_sent(&mut self, now: Time, to: Option<&Arc<Engine>>, leg: Leg) {
        self.sent_at = now;
        self.attempts[leg as usize] += 1;
        if let Some(engine) = to {
            engine.metrics.leg(leg).requests.increment(1);
            if let Some(entry) = &self.entry {
                entry.set_engine(leg, engine);
            }
        }
    }

    fn record_response(&self, now: Time, by: Option<&Arc<Engine>>, leg: Leg) {
        if let Some(engine) = by {
            engine.metrics.leg(leg).response.record(now.since(self.sent_at));
        }
    }

    /// Records a chunk of a streamed response.
    pub(crate) fn record_piece(&mut self, now: Time, model: &ModelMetrics) {
        if let Some(last) = self.last_piece.replace(now) {
            model.inter_token.record(now.since(last));
        }
    }

    /// Counts a request that has ended.
    pub(crate) fn record_end(
        &self,
        model: &ModelMetrics,
        end: RequestOutcome,
        status: u16,
        line: &Timeline,
        begun: Time,
    ) {
        model.count_end(end, status);
        if let Some(first_sent) = line.first_sent() {
            model.queue.record(first_sent.since(begun));
        }
        // A request served by one engine has no phases, and would distort the distribution of generating requests.
        if !self.passes {
            self.record_phases(model, line, begun);
        }
        let [prompt, cached, completion] = self.usage_scan.known_tokens();
        model.count_tokens(prompt, cached, completion);
        if self.streamed
            && let (Some(usage), Some(first), Some(last)) =
                (self.usage_scan.usage, line.first_chunk, self.last_piece)
            && let Ok(others @ 1..) = u32::try_from(usage.completion.saturating_sub(1))
        {
            model.per_token.record(last.since(first) / others);
        }
        if let Some(ended) = line.ended {
            model.duration.record(ended.since(begun));
        }
    }

    fn record_phases(&self, model: &ModelMetrics, line: &Timeline, begun: Time) {
        for (histogram, span) in [
            (&model.prefill, line.prefill()),
            (&model.gap, line.gap()),
            (&model.accept, line.accept()),
            (&model.decode, line.decode()),
        ] {
            if let Some(took) = span.and_then(Span::duration) {
                histogram.record(took);
            }
        }
        if let Some(first) = line.first_chunk {
            model.first_token(self.streamed).record(first.since(begun));
        }
    }
}
