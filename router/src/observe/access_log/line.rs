//! One line of the access log. `docs/reference/access-log.md` describes the fields; a test compares the two.

use std::io::Write;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use baton_connector::exchange::Span;
use hyper::Version;
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;

use crate::observe::finished_request::FinishedRequest;

/// The fields in the order of the line; unknown ones are omitted.
#[derive(Serialize)]
struct LogLine<'a> {
    time: String,
    request_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    client_request_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    client: Option<IpAddr>,
    method: &'a str,
    path: &'a str,
    protocol: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    user_agent: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a str>,
    status: u16,
    outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    disconnect_phase: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_engine: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    decode_engine: Option<&'a str>,
    retries: u16,
    streamed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    queue_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gap_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    accept_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_byte_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_ms: Option<f64>,
    total_ms: f64,
    request_bytes: u64,
    response_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cached_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    finish_reason: Option<&'static str>,
}

fn protocol(version: Version) -> &'static str {
    match version {
        Version::HTTP_2 => "HTTP/2",
        Version::HTTP_10 => "HTTP/1.0",
        _ => "HTTP/1.1",
    }
}

fn ms(time: Duration) -> f64 {
    time.as_micros() as f64 / 1000.0
}

/// Writes one line.
pub(super) fn write(finished: &FinishedRequest, to: &mut dyn Write) -> std::io::Result<()> {
    let line = &finished.line;
    let span = |span: Option<Span>| span.and_then(Span::duration).map(ms);
    let engine = |n: usize| finished.engines[n].as_deref().map(|engine| engine.authority());
    let (usage, attempts) = (finished.usage_scan.usage, finished.attempts);
    let echoed = finished.echoed.to_str().ok();
    let line = LogLine {
        time: rfc3339(finished.calendar(finished.begun)),
        request_id: finished.id.as_str(),
        client_request_id: echoed.filter(|echoed| *echoed != finished.id.as_str()),
        trace_id: finished.trace.id().map(|id| format!("{id:032x}")),
        client: finished.head.client,
        method: finished.head.method.as_str(),
        path: &finished.head.path,
        protocol: protocol(finished.head.version),
        user_agent: finished.head.user_agent.as_deref(),
        tenant: finished.tenant.as_deref(),
        model: finished.model.as_ref().map(|model| model.name.as_str()),
        status: finished.status,
        outcome: finished.end.label(),
        disconnect_phase: finished.cancel_phase().map(|phase| phase.label()),
        prefill_engine: engine(0),
        decode_engine: engine(1),
        retries: attempts.iter().map(|attempts| attempts.saturating_sub(1)).sum(),
        streamed: finished.streamed,
        queue_ms: line.first_sent().map(|sent| ms(sent.since(finished.begun))),
        prefill_ms: span(line.prefill()),
        gap_ms: span(line.gap()),
        accept_ms: span(line.accept()),
        first_byte_ms: span(line.first_byte()),
        stream_ms: span(line.stream()),
        total_ms: ms(finished.over.since(finished.begun)),
        request_bytes: finished.request_bytes,
        response_bytes: finished.response_bytes,
        prompt_tokens: usage.map(|usage| usage.prompt),
        cached_tokens: usage.map(|usage| usage.cached),
        completion_tokens: finished.usage_scan.completion(),
        finish_reason: finished.usage_scan.finish.map(|finish| finish.label()),
    };
    // Written in one call: a line cut in two would be read as two lines.
    let mut text = serde_json::to_vec(&line).map_err(std::io::Error::other)?;
    text.push(b'\n');
    to.write_all(&text)
}

/// `2026-11-20T17:00:00.123456Z`.
fn rfc3339(at: SystemTime) -> String {
    const FORM: &[BorrowedFormatItem<'_>] =
        format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z");
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let nanos = i128::try_from(since.as_nanos()).unwrap_or(i128::MAX);
    // A clock beyond the year 9999 has no such form.
    OffsetDateTime::from_unix_timestamp_nanos(nanos)
        .ok()
        .and_then(|at| at.format(FORM).ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_the_calendar_has_them() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000Z"),
            (1_709_251_199, "2024-02-29T23:59:59.000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000Z"),
        ] {
            assert_eq!(rfc3339(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
        let micros = SystemTime::UNIX_EPOCH + Duration::from_micros(1_763_658_000_123_456);
        assert_eq!(rfc3339(micros), "2025-11-20T17:00:00.123456Z");
        assert_eq!(rfc3339(SystemTime::UNIX_EPOCH - Duration::from_secs(1)), "1970-01-01T00:00:00.000000Z");
        assert_eq!(rfc3339(SystemTime::UNIX_EPOCH + Duration::from_secs(400_000_000_000)), "");
    }
}
