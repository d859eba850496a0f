//! The deadline and the priority of a request: the values of its headers and body, within its bounds.

use std::time::{Duration, Instant};

use hyper::header::HeaderMap;

use crate::config::Priority;

/// Header of OpenAI's SDKs: seconds until the client gives up.
const READ_TIMEOUT: &str = "x-stainless-read-timeout";
/// The same, in milliseconds, for any client.
const REQUEST_TIMEOUT: &str = "x-request-timeout-ms";
/// `high`, `normal`, `low`, or vLLM's numbers: the lower, the earlier.
const PRIORITY: &str = "x-priority";

/// When the client of a request that began then gives up, according to its headers. A header that is not a number
/// is no deadline.
pub(crate) fn client_deadline(headers: &HeaderMap, begun: Instant) -> Option<Instant> {
    let number = |name: &str| headers.get(name)?.to_str().ok()?.trim().parse::<f64>().ok();
    let seconds = number(READ_TIMEOUT);
    let millis = number(REQUEST_TIMEOUT).map(|ms| ms / 1000.0);
    let asked = [seconds, millis].into_iter().flatten().filter(|s| s.is_finite() && *s >= 0.0);
    // A value beyond the clock's range is no deadline either.
    begun.checked_add(Duration::try_from_secs_f64(asked.reduce(f64::min)?).ok()?)
}

/// The priority that a request asks for, at most `most`. Without a header or field it is normal.
pub(crate) fn priority(headers: &HeaderMap, body: Option<i64>, most: Priority) -> Priority {
    let header = headers.get(PRIORITY).and_then(|value| value.to_str().ok()).map(str::trim);
    let header =
        header.and_then(|text| Priority::named(text).or_else(|| text.parse().ok().map(Priority::of_number)));
    let asked = header.or_else(|| body.map(Priority::of_number)).unwrap_or_default();
    // A more urgent priority is the smaller value.
    asked.max(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (name.parse().expect("a name"), value.parse().expect("a value")))
            .collect()
    }

    #[test]
    fn the_shortest_deadline_applies_and_an_invalid_one_is_ignored() {
        let begun = Instant::now();
        let within = |pairs: &[(&'static str, &str)]| {
            client_deadline(&headers(pairs), begun).map(|until| (until - begun).as_millis())
        };
        assert_eq!(within(&[]), None);
        assert_eq!(within(&[(READ_TIMEOUT, "600")]), Some(600_000));
        assert_eq!(within(&[(READ_TIMEOUT, "2.5")]), Some(2500));
        assert_eq!(within(&[(READ_TIMEOUT, "2.5"), (REQUEST_TIMEOUT, "40")]), Some(40));
        assert_eq!(within(&[(REQUEST_TIMEOUT, "0")]), Some(0));
        for nonsense in ["", "-1", "NaN", "inf", "1e999", "1e300", "soon"] {
            assert_eq!(within(&[(READ_TIMEOUT, nonsense)]), None, "{nonsense}");
        }
    }

    #[test]
    fn a_priority_is_the_requested_one_up_to_the_allowed_maximum() {
        let asks = |value: &str, body, most| priority(&headers(&[(PRIORITY, value)]), body, most);
        assert_eq!(priority(&HeaderMap::new(), None, Priority::High), Priority::Normal);
        assert_eq!(asks("high", None, Priority::High), Priority::High);
        assert_eq!(asks("high", None, Priority::Normal), Priority::Normal);
        assert_eq!(asks("-5", None, Priority::Low), Priority::Low);
        assert_eq!(asks("Low", Some(-1), Priority::High), Priority::Low);
        assert_eq!(asks("urgent!", Some(-1), Priority::High), Priority::High);
        assert_eq!(priority(&HeaderMap::new(), Some(3), Priority::High), Priority::Low);
    }
}
