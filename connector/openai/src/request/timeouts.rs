//! How long a client waits for its response, in headers of a request.

use std::time::Duration;

use crate::error::{ApiError, shortened};

/// The header with the milliseconds in which the whole response must be there.
pub const REQUEST_TIMEOUT: &str = "x-request-timeout-ms";

/// The header with the milliseconds in which its first token must be there.
pub const FIRST_TOKEN_TIMEOUT: &str = "x-first-token-timeout-ms";

/// The longest time that a header may give: a week.
pub const TIMEOUT_MAX_MS: u32 = 604_800_000;

/// The time that is left for a response when its request arrives. It is no moment, because clocks differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeLeft {
    /// For the first token.
    pub first_token: Option<Duration>,
    /// For all of it.
    pub whole: Option<Duration>,
}

impl TimeLeft {
    /// Reads the headers that `header` finds. An empty value is as none.
    ///
    /// # Errors
    /// 400 with the header.
    pub fn read<'a>(header: impl Fn(&str) -> Option<&'a [u8]>) -> Result<Self, ApiError> {
        let read = |name: &str| header(name).map_or(Ok(None), |value| milliseconds(name, value));
        Ok(Self { first_token: read(FIRST_TOKEN_TIMEOUT)?, whole: read(REQUEST_TIMEOUT)? })
    }
}

fn milliseconds(name: &str, value: &[u8]) -> Result<Option<Duration>, ApiError> {
    let text = std::str::from_utf8(value).unwrap_or("…").trim();
    if text.is_empty() {
        return Ok(None);
    }
    let number = text.parse::<f64>().ok().filter(|number| (0.0..=f64::from(TIMEOUT_MAX_MS)).contains(number));
    let time = number.map(|number| Duration::from_secs_f64(number / 1_000.0));
    time.map(Some).ok_or_else(|| {
        let got = shortened(text);
        let got = got.escape_debug();
        let message =
            format!("`{name}` must be a number of milliseconds from 0 to {TIMEOUT_MAX_MS}, got \"{got}\"");
        ApiError::invalid(name, message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(first_token: Option<&'static str>, whole: Option<&'static str>) -> Result<TimeLeft, ApiError> {
        TimeLeft::read(|name| {
            let text = if name == FIRST_TOKEN_TIMEOUT { first_token } else { whole };
            text.map(str::as_bytes)
        })
    }

    #[test]
    fn each_header_gives_a_time_or_is_refused_by_name() {
        let ms = |ms: u64| Some(Duration::from_millis(ms));
        assert_eq!(read(None, None), Ok(TimeLeft::default()));
        assert_eq!(read(Some(""), Some(" 250 ")), Ok(TimeLeft { first_token: None, whole: ms(250) }));
        assert_eq!(read(Some("0"), Some("604800000")).map(|time| time.first_token), Ok(ms(0)));
        assert_eq!(
            read(Some("1.5"), None).map(|time| time.first_token),
            Ok(Some(Duration::from_micros(1_500)))
        );
        for nonsense in ["-1", "NaN", "inf", "1e999", "604800001", "soon", "1 2"] {
            let error = read(None, Some(nonsense)).expect_err(nonsense);
            assert_eq!((error.status, error.param.as_deref()), (400, Some(REQUEST_TIMEOUT)), "{nonsense}");
            let error = read(Some(nonsense), None).expect_err(nonsense);
            assert_eq!(error.param.as_deref(), Some(FIRST_TOKEN_TIMEOUT));
        }
    }
}
