//! The deadline and the priority of a request: the values of its headers and body, within its bounds.

use std::time::{Duration, Instant};

use baton_openai::{FIRST_TOKEN_TIMEOUT, REQUEST_TIMEOUT, TimeLeft};
use hyper::header::HeaderMap;

use crate::config::Priority;

/// Header of OpenAI's SDKs: seconds until the client gives up.
const READ_TIMEOUT: &str = "x-stainless-read-timeout";
/// `high`, `normal`, `low`, or vLLM's numbers: the lower, the earlier.
const PRIORITY: &str = "x-priority";

/// When the client of a request that began then gives up, according to its headers: at the first of its deadlines,
/// because nothing is there before an engine is chosen.
pub(crate) fn client_deadline(headers: &HeaderMap, begun: Instant) -> Option<Instant> {
    let asked = [(READ_TIMEOUT, 1.0), (REQUEST_TIMEOUT, 1000.0), (FIRST_TOKEN_TIMEOUT, 1000.0)];
    asked.into_iter().filter_map(|(name, per_second)| header_deadline(headers, begun, name, per_second)).min()
}

/// The deadline of one header. A header that is not a number is no deadline, and one beyond the clock's range neither.
fn header_deadline(headers: &HeaderMap, begun: Instant, name: &str, per_second: f64) -> Option<Instant> {
    let number = headers.get(name)?.to_str().ok()?.trim().parse::<f64>().ok()?;
    let time = Some(number / per_second).filter(|seconds| seconds.is_finite() && *seconds >= 0.0)?;
    begun.checked_add(Duration::try_from_secs_f64(time).ok()?)
}

/// How a response is sent. The SDKs' read timeout is a time between two reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResponseForm {
    /// In one piece.
    Whole,
    /// As a stream, with comments after silences of this time, if any.
    Stream { comments: Option<Duration> },
}

/// Until when the parts of a response are useful to its client. Engines get the time that is left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ResponseDeadlines {
    pub first_token: Option<Instant>,
    pub whole: Option<Instant>,
}

impl ResponseDeadlines {
    /// Those of a request that began then. `most` bounds the whole request. The first token of a stream must come within
    /// the read timeout, unless a comment comes before, and otherwise the whole response.
    pub(crate) fn read(
        headers: &HeaderMap,
        begun: Instant,
        form: ResponseForm,
        most: Option<Duration>,
    ) -> Self {
        let read = header_deadline(headers, begun, READ_TIMEOUT, 1.0);
        let (read_token, read_whole) = match form {
            ResponseForm::Whole => (None, read),
            ResponseForm::Stream { comments } => {
                let is_silent = |until: &Instant| {
                    comments.is_none_or(|every| until.saturating_duration_since(begun) <= every)
                };
                (read.filter(is_silent), None)
            }
        };
        let first_token = header_deadline(headers, begun, FIRST_TOKEN_TIMEOUT, 1000.0);
        let whole = header_deadline(headers, begun, REQUEST_TIMEOUT, 1000.0);
        let most = most.and_then(|most| begun.checked_add(most));
        let least = |deadlines: [Option<Instant>; 3]| deadlines.into_iter().flatten().min();
        Self { first_token: least([first_token, read_token, None]), whole: least([whole, most, read_whole]) }
    }

    /// The first of them: before an engine is chosen, nothing is there.
    pub(crate) fn first(&self) -> Option<Instant> {
        self.first_token.into_iter().chain(self.whole).min()
    }

    /// The time that is left now.
    pub(crate) fn left(&self, now: Instant) -> TimeLeft {
        let left = |until: Option<Instant>| until.map(|until| until.saturating_duration_since(now));
        TimeLeft { first_token: left(self.first_token), whole: left(self.whole) }
    }
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

/// vLLM's number of a request, for engines that schedule by it. As [`priority`], but a number keeps its value as far as
/// `most` permits.
pub(crate) fn priority_number(headers: &HeaderMap, body: Option<i64>, most: Priority) -> i32 {
    let header = headers.get(PRIORITY).and_then(|value| value.to_str().ok()).map(str::trim);
    let header = header.and_then(|text| {
        Priority::named(text).map(|named| i64::from(named.number())).or_else(|| text.parse().ok())
    });
    let asked = header.or(body).unwrap_or_default().clamp(i32::MIN.into(), i32::MAX.into());
    let asked = i32::try_from(asked).expect("within a range of i32");
    match most {
        Priority::High => asked,
        Priority::Normal | Priority::Low => asked.max(most.number()),
    }
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
    fn a_response_has_a_deadline_for_its_first_token_and_for_all_of_it() {
        let begun = Instant::now();
        let (whole, stream) = (ResponseForm::Whole, ResponseForm::Stream { comments: None });
        let commented = |seconds| ResponseForm::Stream { comments: Some(Duration::from_secs(seconds)) };
        let left = |pairs: &[(&'static str, &str)], form, most| {
            let deadlines = ResponseDeadlines::read(&headers(pairs), begun, form, most);
            let ends = [deadlines.first_token, deadlines.whole];
            assert_eq!(deadlines.first(), ends.into_iter().flatten().min());
            let left = deadlines.left(begun + Duration::from_millis(10));
            (left.first_token.map(|left| left.as_millis()), left.whole.map(|left| left.as_millis()))
        };
        assert_eq!(left(&[], stream, None), (None, None));
        assert_eq!(left(&[(READ_TIMEOUT, "2")], stream, None), (Some(1990), None));
        assert_eq!(left(&[(READ_TIMEOUT, "2")], whole, None), (None, Some(1990)));
        assert_eq!(
            left(&[(READ_TIMEOUT, "2")], commented(1), None),
            (None, None),
            "a comment is read before"
        );
        assert_eq!(left(&[(READ_TIMEOUT, "2")], commented(2), None), (Some(1990), None));
        assert_eq!(left(&[(FIRST_TOKEN_TIMEOUT, "60")], commented(1), None), (Some(50), None));
        let both = [(FIRST_TOKEN_TIMEOUT, "60"), (REQUEST_TIMEOUT, "5")];
        assert_eq!(left(&both, stream, Some(Duration::from_secs(1))), (Some(50), Some(0)), "none is left");
        let longer = [(REQUEST_TIMEOUT, "9000")];
        assert_eq!(left(&longer, whole, Some(Duration::from_secs(1))), (None, Some(990)));
        assert_eq!(client_deadline(&headers(&both), begun), Some(begun + Duration::from_millis(5)));
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

    #[test]
    fn a_number_for_engines_is_no_more_urgent_than_the_key() {
        let asks = |value: &str, body, most| priority_number(&headers(&[(PRIORITY, value)]), body, most);
        assert_eq!(priority_number(&HeaderMap::new(), None, Priority::High), 0);
        assert_eq!(priority_number(&HeaderMap::new(), None, Priority::Low), 1);
        assert_eq!(priority_number(&HeaderMap::new(), Some(-7), Priority::High), -7);
        assert_eq!(priority_number(&HeaderMap::new(), Some(-7), Priority::Normal), 0);
        assert_eq!(priority_number(&HeaderMap::new(), Some(12), Priority::Low), 12);
        assert_eq!(priority_number(&HeaderMap::new(), Some(i64::MIN), Priority::High), i32::MIN);
        assert_eq!(asks("low", Some(-3), Priority::High), 1);
        assert_eq!(asks("-3", None, Priority::Low), 1);
        assert_eq!(asks("high", None, Priority::High), -1);
        assert_eq!(asks("urgent!", Some(4), Priority::High), 4);
    }
}
