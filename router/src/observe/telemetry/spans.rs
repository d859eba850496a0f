//! A request as spans.
//!
//! ```text
//! POST /v1/chat/completions   (server)
//! ├─ queue      until the first engine is asked
//! ├─ prefill    (client)  the first prefill attempt to the handoff
//! ├─ gap        the handoff until a decode engine is asked
//! └─ decode     (client)  the first decode attempt to the end
//!    └─ fetch   until a decode engine took the request: its queue, the blocks' way, its first event
//! ```
//!
//! What follows one another is cut at the same moments, so queue, prefill, gap and decode add up to the exchange's
//! part of the server span. Names of attributes are those of OpenTelemetry's conventions for HTTP and GenAI.

use baton_connector::Time;
use baton_connector::exchange::{Outcome, Phase, Span};
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{Array, InstrumentationScope, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use crate::message::trace_context::SpanOf;
use crate::metrics::End;
use crate::observe::finished::Finished;

/// A part of a request: which, its name, its parent, and when it was.
struct Part {
    of: SpanOf,
    name: &'static str,
    parent: SpanOf,
    from: Time,
    to: Time,
}

/// The parts that came about.
fn parts(finished: &Finished) -> impl Iterator<Item = Part> + use<> {
    let line = finished.line;
    let end = line.ended.unwrap_or(finished.over);
    let part = |of, name, parent, span: Option<Span>, until: Option<Time>| {
        let Span { from, to } = span?;
        Some(Part { of, name, parent, from, to: to.or(until).unwrap_or(end) })
    };
    let server = SpanOf::Server;
    let queue = Span { from: finished.begun, to: line.asked() };
    let decode = line.decode_sent.map(|from| Span { from, to: None });
    [
        part(SpanOf::Queue, "queue", server, Some(queue), None),
        // Where no prefill engine answered, the tries ended when a decode engine was asked instead.
        part(SpanOf::Prefill, "prefill", server, line.prefill(), line.decode_sent),
        part(SpanOf::Gap, "gap", server, line.gap(), None),
        part(SpanOf::Decode, "decode", server, decode, None),
        part(SpanOf::Fetch, "fetch", SpanOf::Decode, line.accept(), None),
    ]
    .into_iter()
    .flatten()
}

/// How many spans a request has.
pub(super) fn count(finished: &Finished) -> u64 {
    1 + parts(finished).count() as u64
}

/// Adds a request's spans.
pub(super) fn add(finished: &Finished, scope: &InstrumentationScope, to: &mut Vec<SpanData>) {
    let trace = TraceId::from(finished.trace.id().unwrap_or_default());
    let context = |of| {
        let id = SpanId::from(finished.trace.span(of));
        SpanContext::new(trace, id, TraceFlags::SAMPLED, false, TraceState::default())
    };
    let server = SpanData {
        span_context: context(SpanOf::Server),
        parent_span_id: SpanId::from(finished.trace.parent()),
        parent_span_is_remote: finished.trace.parent() != 0,
        span_kind: SpanKind::Server,
        name: format!("{} {}", finished.head.method, finished.head.path).into(),
        start_time: finished.calendar(finished.begun),
        end_time: finished.at,
        attributes: of_request(finished),
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: status(finished),
        instrumentation_scope: scope.clone(),
    };
    to.extend(parts(finished).map(|part| SpanData {
        span_context: context(part.of),
        parent_span_id: SpanId::from(finished.trace.span(part.parent)),
        parent_span_is_remote: false,
        span_kind: match part.of {
            SpanOf::Prefill | SpanOf::Decode => SpanKind::Client,
            SpanOf::Server | SpanOf::Queue | SpanOf::Gap | SpanOf::Fetch => SpanKind::Internal,
        },
        name: part.name.into(),
        start_time: finished.calendar(part.from),
        end_time: finished.calendar(part.to),
        attributes: of_part(finished, part.of),
        status: status_of_part(finished, part.of),
        ..server.clone()
    }));
    to.push(server);
}

fn number(name: &'static str, value: u64) -> KeyValue {
    KeyValue::new(name, i64::try_from(value).unwrap_or(i64::MAX))
}

fn of_request(finished: &Finished) -> Vec<KeyValue> {
    let head = &finished.head;
    let mut attributes = vec![
        KeyValue::new("http.request.method", head.method.as_str().to_owned()),
        KeyValue::new("url.path", head.path.to_string()),
        number("http.request.body.size", finished.request_bytes),
        number("http.response.body.size", finished.response_bytes),
        KeyValue::new("baton.request_id", finished.id.as_str().to_owned()),
    ];
    if let 100.. = finished.status {
        attributes.push(number("http.response.status_code", u64::from(finished.status)));
    }
    if let Some(agent) = &head.user_agent {
        attributes.push(KeyValue::new("user_agent.original", agent.to_string()));
    }
    attributes.push(KeyValue::new("baton.outcome", finished.end.label()));
    if let Some(wrong) = wrong(finished) {
        attributes.push(KeyValue::new("error.type", wrong));
    }
    if let Some(model) = &finished.model {
        attributes.extend(operation(&head.path).map(|name| KeyValue::new("gen_ai.operation.name", name)));
        attributes.push(KeyValue::new("gen_ai.request.model", model.name.clone()));
    }
    if let Some(usage) = finished.seen.usage {
        attributes.push(number("gen_ai.usage.input_tokens", usage.prompt));
        attributes.push(number("gen_ai.usage.cache_read.input_tokens", usage.cached));
        attributes.push(number("gen_ai.usage.output_tokens", usage.completion));
    }
    if let Some(finish) = finished.seen.finish {
        let reasons = Value::Array(Array::String(vec![StringValue::from(finish.label())]));
        attributes.push(KeyValue::new("gen_ai.response.finish_reasons", reasons));
    }
    if let Some(first) = finished.line.first_chunk {
        let seconds = first.since(finished.begun).as_secs_f64();
        attributes.push(KeyValue::new("gen_ai.response.time_to_first_chunk", seconds));
    }
    attributes
}

/// As the conventions name it; they have no name for tokens and scores.
fn operation(path: &str) -> Option<&'static str> {
    match path {
        "/v1/chat/completions" => Some("chat"),
        "/v1/completions" | "/v1/responses" => Some("text_completion"),
        "/v1/embeddings" => Some("embeddings"),
        _ => None,
    }
}

/// An engine's address, and how often one was asked.
fn of_part(finished: &Finished, of: SpanOf) -> Vec<KeyValue> {
    let leg = match of {
        SpanOf::Prefill => 0,
        SpanOf::Decode => 1,
        SpanOf::Server | SpanOf::Queue | SpanOf::Gap | SpanOf::Fetch => return Vec::new(),
    };
    let mut attributes = vec![number("baton.attempts", u64::from(finished.attempts[leg]))];
    if let Some(engine) = &finished.engines[leg] {
        attributes.push(KeyValue::new("server.address", engine.authority().to_owned()));
    }
    attributes
}

/// What went wrong, as a class.
fn wrong(finished: &Finished) -> Option<String> {
    match finished.end {
        _ if finished.went_well() => None,
        End::Exchange(Outcome::Completed) | End::Passed | End::Rejected => Some(finished.status.to_string()),
        end => Some(end.label().to_owned()),
    }
}

/// An error, unless the request itself was wrong: that is its sender's.
fn status(finished: &Finished) -> Status {
    match finished.end {
        End::Exchange(Outcome::ClientGone(phase) | Outcome::Dropped(phase)) => {
            Status::error(format!("{} in {}", finished.end.label(), phase.label()))
        }
        _ if finished.went_well() || (400..500).contains(&finished.status) => Status::Unset,
        _ => Status::error(wrong(finished).unwrap_or_default()),
    }
}

/// A leg that the request ended in, other than well, is where it went wrong.
fn status_of_part(finished: &Finished, of: SpanOf) -> Status {
    let End::Exchange(outcome) = finished.end else { return Status::Unset };
    let line = &finished.line;
    if of == SpanOf::Prefill && line.prefilled.is_none() && line.decode_sent.is_some() {
        return Status::error("no prefill engine answered");
    }
    let at = match outcome {
        Outcome::Completed => return Status::Unset,
        Outcome::NotAdmitted | Outcome::NoEngine => SpanOf::Queue,
        Outcome::PrefillRefused | Outcome::PrefillExhausted => SpanOf::Prefill,
        Outcome::DecodeRefused | Outcome::DecodeExhausted | Outcome::StreamBroken => SpanOf::Decode,
        Outcome::ClientGone(phase) | Outcome::Dropped(phase) => match phase {
            Phase::Queue => SpanOf::Queue,
            Phase::Prefill => SpanOf::Prefill,
            Phase::Gap => SpanOf::Gap,
            Phase::DecodePreFirst | Phase::DecodeStream => SpanOf::Decode,
        },
    };
    if at == of { Status::error(outcome.label()) } else { Status::Unset }
}
