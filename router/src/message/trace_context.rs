//! W3C trace context: the trace of a request, and the headers for both legs.
//!
//! ```text
//! client ── traceparent: its span ──▶ server span ─┬─ prefill span ── traceparent ──▶ P
//!                                                  └─ decode span ─── traceparent ──▶ D
//! ```
//!
//! A header is accepted only in the form of the specification (<https://www.w3.org/TR/trace-context/>, version 00,
//! and the shared part of later versions). Any other header is dropped with its `tracestate`. The client decides
//! whether a trace that it began is recorded. Without telemetry a valid context is passed unchanged.

use hyper::header::{HeaderMap, HeaderValue};

use crate::message::hex;
use crate::metrics::Leg;

const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";
/// Bytes of a `traceparent` of version 00.
const PARENT_BYTES: usize = 55;
/// A longer `tracestate` is dropped. The specification requires support for at least 512.
const STATE_BYTES_MAX: usize = 512;
/// More members are dropped, as the specification requires.
const STATE_MEMBERS_MAX: usize = 32;
/// Flag: the caller records this trace.
const SAMPLED: u8 = 1;
/// Flag: the trace's id is random.
const RANDOM: u8 = 2;

/// Spans of one request, as offsets from the id of the first. The sum wraps, so ids stay distinct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestSpan {
    Server = 0,
    Prefill = 1,
    Decode = 2,
    Queue = 3,
    Gap = 4,
    Fetch = 5,
}

/// A request's position in a trace; none for [`TraceContext::default`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TraceContext {
    /// 0: there is none.
    id: u128,
    /// The client's span; 0 where the trace begins here.
    parent: u64,
    /// The first of the router's own spans; 0 without telemetry.
    first: u64,
    flags: u8,
    state: Option<HeaderValue>,
}

/// The trace headers of a request to an engine.
#[derive(Clone, Debug)]
pub(crate) struct TraceParent {
    parent: [u8; PARENT_BYTES],
    state: Option<HeaderValue>,
}

impl TraceParent {
    /// The value of `traceparent`: hexadecimal digits and dashes.
    pub(crate) fn parent(&self) -> &[u8] {
        &self.parent
    }

    /// The value of `tracestate`.
    pub(crate) fn state(&self) -> Option<&HeaderValue> {
        self.state.as_ref()
    }
}

impl TraceContext {
    /// Adopts the client's context, or begins a trace. `ratio` is the share of new traces that are recorded;
    /// `None` without telemetry. `random` fills bytes with random ones.
    pub(crate) fn begin(headers: &HeaderMap, ratio: Option<f64>, random: impl FnOnce(&mut [u8; 24])) -> Self {
        let parent = only(headers, TRACEPARENT).and_then(|value| parent(value.as_bytes()));
        let mut trace = match parent {
            Some((id, parent, flags)) => Self { id, parent, first: 0, flags, state: state(headers) },
            None => Self::default(),
        };
        let Some(ratio) = ratio else { return trace };
        let mut bytes = [0_u8; 24];
        random(&mut bytes);
        let (id, first) = bytes.split_at(16);
        if trace.id == 0 {
            trace.id = u128::from_be_bytes(id.try_into().expect("16 bytes")).max(1);
            trace.flags = RANDOM | (u8::from(is_sampled(trace.id, ratio)) * SAMPLED);
        }
        trace.first = u64::from_be_bytes(first.try_into().expect("8 bytes"));
        trace
    }

    /// Whether the router must record its spans.
    pub(crate) fn is_recorded(&self) -> bool {
        self.first != 0 && self.flags & SAMPLED != 0
    }

    /// The trace's id; `None` without a trace.
    pub(crate) fn id(&self) -> Option<u128> {
        (self.id != 0).then_some(self.id)
    }

    /// The client's span; 0 where the trace begins here.
    pub(crate) fn parent(&self) -> u64 {
        self.parent
    }

    /// The id of one of the router's spans.
    pub(crate) fn span(&self, of: RequestSpan) -> u64 {
        self.first.wrapping_add(of as u64).max(1)
    }

    /// The headers for the engine of a leg; `None` without a trace.
    pub(crate) fn parent_for(&self, leg: Leg) -> Option<TraceParent> {
        if self.id == 0 {
            return None;
        }
        let span = match leg {
            _ if self.first == 0 => self.parent,
            Leg::Prefill => self.span(RequestSpan::Prefill),
            Leg::Decode => self.span(RequestSpan::Decode),
        };
        let mut parent = [b'-'; PARENT_BYTES];
        for (digits, number) in
            [(0..2, 0), (3..35, self.id), (36..52, span.into()), (53..55, self.flags.into())]
        {
            hex::write(&mut parent[digits], number);
        }
        Some(TraceParent { parent, state: self.state.clone() })
    }
}

/// Selects a share of all ids. The result is the same for every caller with the same id.
fn is_sampled(id: u128, ratio: f64) -> bool {
    // The low 63 bits, as in OpenTelemetry's own sampler.
    let low = (id as u64) >> 1;
    ratio >= 1.0 || (low as f64) < ratio * (1_u64 << 63) as f64
}

/// A header that occurs exactly once.
fn only<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a HeaderValue> {
    let mut values = headers.get_all(name).iter();
    values.next().filter(|_| values.next().is_none())
}

/// `VV-TRACE-PARENT-FF`: trace, parent and flags.
fn parent(text: &[u8]) -> Option<(u128, u64, u8)> {
    let (head, rest) = text.split_at_checked(PARENT_BYTES)?;
    let version = hex(&head[..2])? as u8;
    let fits = match version {
        0 => rest.is_empty(),
        0xff => false,
        // A later version may add fields behind a dash.
        _ => rest.is_empty() || rest[0] == b'-',
    };
    if !fits || head[2] != b'-' || head[35] != b'-' || head[52] != b'-' {
        return None;
    }
    let (id, parent, flags) = (hex(&head[3..35])?, hex(&head[36..52])? as u64, hex(&head[53..])? as u8);
    (id != 0 && parent != 0).then_some((id, parent, flags & (SAMPLED | RANDOM)))
}

/// Lower-case hexadecimal digits only.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |value: u128, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(value << 4 | u128::from(digit))
    })
}

/// The vendors' values, joined in one header; `None` if there are too many of them, or they are not text.
fn state(headers: &HeaderMap) -> Option<HeaderValue> {
    let mut all = String::new();
    for value in headers.get_all(TRACESTATE) {
        if !all.is_empty() {
            all.push(',');
        }
        all.push_str(value.to_str().ok()?);
        if all.len() > STATE_BYTES_MAX {
            return None;
        }
    }
    let members = all.split(',').filter(|member| !member.trim().is_empty());
    let (mut count, mut good) = (0, true);
    for member in members {
        count += 1;
        good &= member.trim().split_once('=').is_some_and(|(key, _)| !key.is_empty() && !key.contains(' '));
    }
    let fits = good && (1..=STATE_MEMBERS_MAX).contains(&count);
    fits.then(|| HeaderValue::from_str(&all).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_str(value).expect("a header"));
        }
        headers
    }

    fn begun(pairs: &[(&'static str, &str)], ratio: Option<f64>) -> TraceContext {
        TraceContext::begin(&headers(pairs), ratio, |bytes| bytes.copy_from_slice(&[7; 24]))
    }

    fn headers_for(trace: &TraceContext, leg: Leg) -> (Option<String>, Option<String>) {
        let Some(headers) = trace.parent_for(leg) else { return (None, None) };
        let parent = String::from_utf8(headers.parent().to_vec()).expect("text");
        (Some(parent), headers.state().map(|state| state.to_str().expect("text").to_owned()))
    }

    #[test]
    fn without_telemetry_a_good_context_is_passed_on_and_none_is_made() {
        let trace = begun(&[("traceparent", GOOD), ("tracestate", "a=1"), ("tracestate", "b=2")], None);
        assert_eq!(headers_for(&trace, Leg::Prefill), (Some(GOOD.to_owned()), Some("a=1,b=2".to_owned())));
        assert!(!trace.is_recorded());
        assert_eq!(headers_for(&begun(&[], None), Leg::Decode), (None, None));
    }

    #[test]
    fn with_telemetry_each_leg_gets_its_own_span_of_the_clients_trace() {
        let trace = begun(&[("traceparent", GOOD)], Some(0.0));
        assert!(trace.is_recorded(), "the client decides");
        assert_eq!(trace.id(), Some(0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c));
        let legs = [Leg::Prefill, Leg::Decode].map(|leg| headers_for(&trace, leg).0.expect("a parent"));
        assert_ne!(legs[0], legs[1]);
        for (leg, span) in legs.iter().zip([RequestSpan::Prefill, RequestSpan::Decode]) {
            let ours = format!("00-0af7651916cd43dd8448eb211c80319c-{:016x}-01", trace.span(span));
            assert_eq!(*leg, ours);
        }
        let unsampled = begun(&[("traceparent", &GOOD.replace("-01", "-00"))], Some(1.0));
        assert!(!unsampled.is_recorded());
        assert!(headers_for(&unsampled, Leg::Decode).0.expect("a parent").ends_with("-00"));
    }

    #[test]
    fn a_trace_that_begins_here_is_recorded_by_the_ratio() {
        let trace = begun(&[], Some(1.0));
        assert!(trace.is_recorded() && trace.parent() == 0);
        assert!(headers_for(&trace, Leg::Decode).0.expect("a parent").ends_with("-03"));
        let trace = begun(&[], Some(0.0));
        assert!(!trace.is_recorded());
        assert!(
            headers_for(&trace, Leg::Decode).0.expect("a parent").ends_with("-02"),
            "engines begin none of their own"
        );
        let share =
            (0..10_000_u128).filter(|n| is_sampled(n.wrapping_mul(0x9e37_79b9_7f4a_7c15), 0.25)).count();
        assert!((2_300..2_700).contains(&share), "{share}");
    }

    #[test]
    fn invalid_trace_state_is_dropped() {
        let long = format!("{GOOD}-more");
        for bad in [
            "",
            "00",
            &GOOD[..54],
            &GOOD.to_uppercase(),
            &GOOD.replacen("00-", "ff-", 1),
            &GOOD.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            &GOOD.replace("b7ad6b7169203331", &"0".repeat(16)),
            &GOOD.replace("-b7", "_b7"),
            &GOOD.replace("0af7", "0ag7"),
            &long,
            &format!("{GOOD} "),
            &format!("+{}", &GOOD[1..]),
        ] {
            let trace = begun(&[("traceparent", bad), ("tracestate", "a=1")], None);
            assert_eq!(headers_for(&trace, Leg::Decode), (None, None), "{bad}");
        }
        let twice = begun(&[("traceparent", GOOD), ("traceparent", GOOD)], None);
        assert_eq!(headers_for(&twice, Leg::Decode).0, None);
        let later = begun(&[("traceparent", &long.replacen("00-", "01-", 1))], None);
        assert_eq!(headers_for(&later, Leg::Decode).0.as_deref(), Some(GOOD), "as version 00");
    }

    #[test]
    fn a_hostile_state_is_dropped_and_the_trace_kept() {
        let many = (0..33).map(|n| format!("k{n}=v")).collect::<Vec<_>>().join(",");
        for bad in [many.as_str(), &format!("a={}", "x".repeat(600)), "novalue", "=1", " , ", "a b=1"] {
            let trace = begun(&[("traceparent", GOOD), ("tracestate", bad)], None);
            assert_eq!(headers_for(&trace, Leg::Decode), (Some(GOOD.to_owned()), None), "{bad}");
        }
    }
}
