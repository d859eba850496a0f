//! Converts a request to spans.
//!
//! ```text
//! POST /v1/chat/completions   (server)
//! ├─ queue      until the first attempt
//! ├─ prefill    (client)  from the first prefill attempt to the handoff
//! ├─ gap        from the handoff to the first decode attempt
//! └─ decode     (client)  from the first decode attempt to the end
//!    └─ fetch   until a decode engine accepts the request: its queue, the transfer of blocks, its first event
//! ```
//!
//! Consecutive spans share their boundaries, so queue, prefill, gap and decode add up to the exchange's part of the
//! server span. Attribute names are those of OpenTelemetry's conventions for HTTP and GenAI.

use baton_connector::Time;
use baton_connector::exchange::{Outcome, Phase, Span};
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{Array, InstrumentationScope, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use crate::message::trace_context::RequestSpan;
use crate::metrics::RequestOutcome;
use crate::observe::finished_request::FinishedRequest;

/// One span of a request: its identity, name, parent and times.
struct SpanPart {
    of: RequestSpan,
    name: &'static str,
    parent: RequestSpan,
    from: Time,
    to: Time,
}

/// The spans that exist for a request.
fn parts(finished: &FinishedRequest) -> impl Iterator<Item = SpanPart> + use<> {
    let line = finished.line;
    let end = line.ended.unwrap_or(finished.over);
    let part = |of, name, parent, span: Option<Span>, until: Option<Time>| {
        let Span { from, to } = span?;
        Some(SpanPart { of, name, parent, from, to: to.or(until).unwrap_or(end) })
    };
    let server = RequestSpan::Server;
    let queue = Span { from: finished.begun, to: line.first_sent() };
    let decode = line.decode_sent.map(|from| Span { from, to: None });
    [
        part(RequestSpan::Queue, "queue", server, Some(queue), None),
        // Without a prefill response, the prefill span ends with the first decode attempt.
        part(RequestSpan::Prefill, "prefill", server, line.prefill(), line.decode_sent),
        part(RequestSpan::Gap, "gap", server, line.gap(), None),
        part(RequestSpan::Decode, "decode", server, decode, None),
        part(RequestSpan::Fetch, "fetch", RequestSpan::Decode, line.accept(), None),
    ]
    .into_iter()
    .flatten()
}

/// Number of spans of a request.
pub(super) fn count(finished: &FinishedRequest) -> u64 {
    1 + parts(finished).count() as u64
}

/// Adds a request's spans.
pub(super) fn add(finished: &FinishedRequest, scope: &InstrumentationScope, to: &mut Vec<SpanData>) {
    let trace = TraceId::from(finished.trace.id().unwrap_or_default());
    let context = |of| {
        let id = SpanId::from(finished.trace.span(of));
        SpanContext::new(trace, id, TraceFlags::SAMPLED, false, TraceState::default())
    };
    let server = SpanData {
        span_context: context(RequestSpan::Server),
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
            RequestSpan::Prefill | RequestSpan::Decode => SpanKind::Client,
            RequestSpan::Server | RequestSpan::Queue | RequestSpan::Gap | RequestSpan::Fetch => {
                SpanKind::Internal
            }
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

fn of_request(finished: &FinishedRequest) -> Vec<KeyValue> {
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
    if let Some(error_type) = error_type(finished) {
        attributes.push(KeyValue::new("error.type", error_type));
    }
    if let Some(model) = &finished.model {
        attributes.extend(operation(&head.path).map(|name| KeyValue::new("gen_ai.operation.name", name)));
        attributes.push(KeyValue::new("gen_ai.request.model", model.name.clone()));
    }
    if let Some(usage) = finished.usage_scan.usage {
        attributes.push(number("gen_ai.usage.input_tokens", usage.prompt));
        attributes.push(number("gen_ai.usage.cache_read.input_tokens", usage.cached));
        attributes.push(number("gen_ai.usage.output_tokens", usage.completion));
    }
    if let Some(finish) = finished.usage_scan.finish {
        let reasons = Value::Array(Array::String(vec![StringValue::from(finish.label())]));
        attributes.push(KeyValue::new("gen_ai.response.finish_reasons", reasons));
    }
    if let Some(first) = finished.line.first_chunk {
        let seconds = first.since(finished.begun).as_secs_f64();
        attributes.push(KeyValue::new("gen_ai.response.time_to_first_chunk", seconds));
    }
    attributes
}

/// The name of the operation in the conventions, which have none for tokens and scores.
fn operation(path: &str) -> Option<&'static str> {
    match path {
        "/v1/chat/completions" => Some("chat"),
        "/v1/completions" | "/v1/responses" => Some("text_completion"),
        "/v1/embeddings" => Some("embeddings"),
        _ => None,
    }
}

/// The attributes of a leg: its engine's address and the number of attempts.
fn of_part(finished: &FinishedRequest, of: RequestSpan) -> Vec<KeyValue> {
    let leg = match of {
        RequestSpan::Prefill => 0,
        RequestSpan::Decode => 1,
        RequestSpan::Server | RequestSpan::Queue | RequestSpan::Gap | RequestSpan::Fetch => {
            return Vec::new();
        }
    };
    let mut attributes = vec![number("baton.attempts", u64::from(finished.attempts[leg]))];
    if let Some(engine) = &finished.engines[leg] {
        attributes.push(KeyValue::new("server.address", engine.authority().to_owned()));
    }
    attributes
}

/// The class of the error.
fn error_type(finished: &FinishedRequest) -> Option<String> {
    match finished.end {
        _ if finished.is_success() => None,
        RequestOutcome::Exchange(Outcome::Completed) | RequestOutcome::Passed | RequestOutcome::Rejected => {
            Some(finished.status.to_string())
        }
        end => Some(end.label().to_owned()),
    }
}

/// The status of the server span: an error, unless the client's request is at fault.
fn status(finished: &FinishedRequest) -> Status {
    match finished.end {
        RequestOutcome::Exchange(Outcome::ClientGone(phase) | Outcome::Dropped(phase)) => {
            Status::error(format!("{} in {}", finished.end.label(), phase.label()))
        }
        _ if finished.is_success() || (400..500).contains(&finished.status) => Status::Unset,
        _ => Status::error(error_type(finished).unwrap_or_default()),
    }
}

/// The status of a leg's span: an error if the request failed in that leg.
fn status_of_part(finished: &FinishedRequest, of: RequestSpan) -> Status {
    let RequestOutcome::Exchange(outcome) = finished.end else { return Status::Unset };
    let line = &finished.line;
    if of == RequestSpan::Prefill && line.prefilled.is_none() && line.decode_sent.is_some() {
        return Status::error("no prefill engine answered");
    }
    let at = match outcome {
        Outcome::Completed => return Status::Unset,
        Outcome::NotAdmitted | Outcome::NoEngine => RequestSpan::Queue,
        Outcome::PrefillRefused | Outcome::PrefillExhausted => RequestSpan::Prefill,
        Outcome::DecodeRefused | Outcome::DecodeExhausted | Outcome::StreamBroken => RequestSpan::Decode,
        Outcome::ClientGone(phase) | Outcome::Dropped(phase) => match phase {
            Phase::Queue => RequestSpan::Queue,
            Phase::Prefill => RequestSpan::Prefill,
            Phase::Gap => RequestSpan::Gap,
            Phase::DecodePreFirst | Phase::DecodeStream => RequestSpan::Decode,
        },
    };
    if at == of { Status::error(outcome.label()) } else { Status::Unset }
}
