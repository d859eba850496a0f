//! Requests of a cluster's routers and tools. Clients never send them.
//!
//! | request | contents |
//! |---|---|
//! | `POST /kv/release` | [`handle`] or [`request_id`], [`reason`] |
//! | `POST /abort_requests` | [`request_ids`], [`legs`] |
//! | `GET /debug/kv/events` | [`EventQuery`] |
//!
//! If the cluster has a secret, its callers send it in the header [`SECRET_HEADER`]; see [`check_secret`].
//!
//! The types of handles and request ids are the caller's, because this crate imports no other crate of Baton.

use std::str::FromStr;
use std::time::Duration;

use serde_json::Value;
use subtle::{Choice, ConstantTimeEq};

use crate::Object;
use crate::code::Code;
use crate::error::ApiError;
use crate::field::Fields;

/// The header with the cluster's secret.
pub const SECRET_HEADER: &str = "x-baton-cluster-secret";

/// Limit of the request ids in one abort.
const ABORT_IDS_MAX: usize = 1_024;

/// Limit of the bytes of a release reason.
const REASON_BYTES_MAX: usize = 64;

/// The longest wait of a request for an event or for another change.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Limit of the events that a request may ask for.
const EVENTS_ASKED_MAX: u64 = 10_000;

/// Limit of the events of one answer. The next request gets the following ones.
const EVENTS_SHOWN: u64 = 2_000;

/// The legs that an abort ends: one engine can hold both legs of a request under one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegFilter {
    /// The prefill legs.
    Prefill,
    /// The decode legs.
    Decode,
    /// All.
    Both,
}

/// A query of the event log: `after=SEQ&wait_ms=MS&limit=N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventQuery {
    /// The events after this number (0: the oldest retained). `None` for `latest`: no event, only the latest number.
    pub after: Option<u64>,
    /// The longest wait for an event.
    pub wait: Duration,
    /// Limit of the events of the answer.
    pub limit: usize,
}

impl EventQuery {
    /// Reads a request's query.
    ///
    /// # Errors
    /// 400 with the field.
    pub fn parse(query: &str) -> Result<Self, ApiError> {
        let wait = wait(query)?;
        let limit = number(query, "limit", EVENTS_SHOWN, EVENTS_ASKED_MAX)?.clamp(1, EVENTS_SHOWN);
        let after = match query_field(query, "after") {
            Some("latest") => None,
            _ => Some(number(query, "after", 0, u64::MAX)?),
        };
        Ok(Self { after, wait, limit: limit as usize })
    }
}

/// Refuses a caller without an accepted secret of the cluster. Every secret is compared. A comparison takes constant
/// time for texts of equal length.
///
/// # Errors
/// 401 with a code of its own: a router must not report it as a wrong API key of the client.
pub fn check_secret<'a>(shown: &[u8], accepted: impl IntoIterator<Item = &'a [u8]>) -> Result<(), ApiError> {
    let known = accepted.into_iter().fold(Choice::from(0), |known, secret| known | shown.ct_eq(secret));
    if bool::from(known) {
        return Ok(());
    }
    let message = format!("missing or wrong cluster secret in the header {SECRET_HEADER}");
    Err(ApiError::of(Code::InvalidClusterSecret, message))
}

/// The handle of the lease that a release ends.
///
/// # Errors
/// 400 if there is none, or the text is not a handle.
pub fn handle<H: FromStr>(map: &Object) -> Result<H, ApiError> {
    let handle =
        Fields::new(map).get("handle").and_then(Value::as_str).and_then(|text| text.parse::<H>().ok());
    handle.ok_or_else(|| ApiError::invalid("handle", "`handle` must be 32 hexadecimal digits"))
}

/// The request whose lease a release ends, if it names no handle. `read` checks a text.
///
/// # Errors
/// 400 if `read` refuses the id.
pub fn request_id<R>(map: &Object, read: impl Fn(&str) -> Option<R>) -> Result<Option<R>, ApiError> {
    let fields = Fields::new(map);
    let Some(id) = fields.get("request_id").filter(|_| fields.get("handle").is_none()) else {
        return Ok(None);
    };
    let id = id.as_str().and_then(read);
    id.map(Some).ok_or_else(|| ApiError::invalid("request_id", "`request_id` must be a request id"))
}

/// Why a lease ends early: a word for logs and metrics.
///
/// # Errors
/// 400 if it is not a short word.
pub fn reason<'a>(map: &'a Object, default: &'static str) -> Result<&'a str, ApiError> {
    let Some(reason) = Fields::new(map).get("reason") else { return Ok(default) };
    let is_word = |text: &&str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let reason = reason.as_str().filter(|text| text.len() <= REASON_BYTES_MAX).filter(is_word);
    reason.ok_or_else(|| {
        let message = format!("`reason` must be at most {REASON_BYTES_MAX} letters, digits and `_`");
        ApiError::invalid("reason", message)
    })
}

/// The requests that an abort ends. `read` checks a text.
///
/// # Errors
/// 400 if there are none or too many, or `read` refuses one.
pub fn request_ids<R>(map: &Object, read: impl Fn(&str) -> Option<R>) -> Result<Vec<R>, ApiError> {
    let ids = map.get("request_ids").and_then(Value::as_array);
    let ids = ids.filter(|ids| (1..=ABORT_IDS_MAX).contains(&ids.len()));
    let read = |id: &Value| id.as_str().and_then(&read);
    let ids = ids.and_then(|ids| ids.iter().map(read).collect::<Option<Vec<_>>>());
    ids.ok_or_else(|| {
        let message = format!("`request_ids` must be a list of 1 to {ABORT_IDS_MAX} request ids");
        ApiError::invalid("request_ids", message)
    })
}

/// The legs that an abort ends: both without `leg`. `null` is refused: it must not end both.
///
/// # Errors
/// 400 if `leg` names no leg.
pub fn legs(map: &Object) -> Result<LegFilter, ApiError> {
    match map.get("leg").map(Value::as_str) {
        None => Ok(LegFilter::Both),
        Some(Some("prefill")) => Ok(LegFilter::Prefill),
        Some(Some("decode")) => Ok(LegFilter::Decode),
        Some(_) => Err(ApiError::invalid("leg", "`leg` must be \"prefill\" or \"decode\"")),
    }
}

/// How long a request waits: `wait_ms` of its query.
///
/// # Errors
/// 400 if it is no number, or over the limit.
pub fn wait(query: &str) -> Result<Duration, ApiError> {
    number(query, "wait_ms", 0, WAIT_MAX.as_millis() as u64).map(Duration::from_millis)
}

/// The value of a field of a query.
#[must_use]
pub fn query_field<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
}

fn number(query: &str, name: &str, default: u64, most: u64) -> Result<u64, ApiError> {
    match query_field(query, name).map(str::parse::<u64>) {
        None => Ok(default),
        Some(Ok(number)) if number <= most => Ok(number),
        Some(_) => Err(ApiError::invalid(name, format!("`{name}` must be a number of at most {most}"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn map(value: &Value) -> Object {
        value.as_object().cloned().expect("an object")
    }

    /// An id of the tests: a text without spaces.
    fn id(text: &str) -> Option<String> {
        (!text.contains(' ')).then(|| text.to_owned())
    }

    /// The refused field of a request, with its status.
    fn refused<T>(read: Result<T, ApiError>) -> Option<String> {
        let error = read.err()?;
        assert_eq!(error.status, 400, "{error}");
        error.param
    }

    #[test]
    fn a_release_names_a_handle_or_a_request() {
        let both = map(&json!({"handle": "7", "request_id": "r"}));
        assert_eq!(handle::<u32>(&both), Ok(7));
        assert_eq!(request_id(&both, id), Ok(None), "the handle counts");
        for value in [json!({"request_id": "r"}), json!({"handle": null, "request_id": "r"})] {
            assert_eq!(request_id(&map(&value), id), Ok(Some("r".to_owned())));
            assert_eq!(refused(handle::<u32>(&map(&value))).as_deref(), Some("handle"));
        }
        for wrong in [json!({}), json!({"handle": 7}), json!({"handle": ""}), json!({"handle": "x"})] {
            assert_eq!(request_id(&map(&wrong), id), Ok(None), "{wrong}");
            assert_eq!(refused(handle::<u32>(&map(&wrong))).as_deref(), Some("handle"), "{wrong}");
        }
        for wrong in [json!(7), json!("a b"), json!(["r"])] {
            let named = refused(request_id(&map(&json!({"request_id": wrong})), id));
            assert_eq!(named.as_deref(), Some("request_id"), "{wrong}");
        }
    }

    #[test]
    fn a_reason_is_a_short_word_and_no_other_value_becomes_the_default() {
        let long = "x".repeat(REASON_BYTES_MAX);
        for (given, expected) in [
            (json!({}), "by_default"),
            (json!({"reason": null}), "by_default"),
            (json!({"reason": "client_gone2"}), "client_gone2"),
            (json!({"reason": long}), long.as_str()),
        ] {
            assert_eq!(reason(&map(&given), "by_default"), Ok(expected));
        }
        for wrong in [json!(7), json!(["x"]), json!("no spaces"), json!("é"), json!(format!("{long}x"))] {
            let named = refused(reason(&map(&json!({"reason": wrong})), "by_default"));
            assert_eq!(named.as_deref(), Some("reason"), "{wrong}");
        }
    }

    #[test]
    fn an_abort_names_one_to_a_thousand_requests_and_a_leg() {
        let ids = |ids: &Value| request_ids(&map(&json!({"request_ids": ids})), id);
        assert_eq!(ids(&json!(["a", "b", "a"])).map(|ids| ids.len()), Ok(3));
        assert_eq!(ids(&json!(vec!["a"; ABORT_IDS_MAX])).map(|ids| ids.len()), Ok(ABORT_IDS_MAX));
        let many = json!(vec!["a"; ABORT_IDS_MAX + 1]);
        for wrong in [json!(null), json!("a"), json!([]), json!(["a", 1]), json!(["a", "b c"]), many] {
            assert_eq!(refused(ids(&wrong)).as_deref(), Some("request_ids"));
        }
        assert_eq!(refused(request_ids(&map(&json!({})), id)).as_deref(), Some("request_ids"));
        assert_eq!(legs(&map(&json!({}))), Ok(LegFilter::Both));
        assert_eq!(legs(&map(&json!({"leg": "prefill"}))), Ok(LegFilter::Prefill));
        assert_eq!(legs(&map(&json!({"leg": "decode"}))), Ok(LegFilter::Decode));
        for wrong in [json!(null), json!("both"), json!("Prefill"), json!(["prefill"])] {
            assert_eq!(refused(legs(&map(&json!({"leg": wrong})))).as_deref(), Some("leg"), "{wrong}");
        }
    }

    #[test]
    fn an_event_query_is_bounded() {
        let query = |after, wait_ms, limit| EventQuery { after, wait: Duration::from_millis(wait_ms), limit };
        for (text, expected) in [
            ("", query(Some(0), 0, 2_000)),
            ("after=latest", query(None, 0, 2_000)),
            ("after=7&wait_ms=10000&limit=5", query(Some(7), 10_000, 5)),
            ("limit=10000&other=x&after=18446744073709551615", query(Some(u64::MAX), 0, 2_000)),
            ("limit=0&afterwards=x", query(Some(0), 0, 1)),
        ] {
            assert_eq!(EventQuery::parse(text), Ok(expected), "{text}");
        }
        for (wrong, field) in [
            ("after=x", "after"),
            ("after=-1", "after"),
            ("after=18446744073709551616", "after"),
            ("wait_ms=10001", "wait_ms"),
            ("wait_ms=", "wait_ms"),
            ("limit=-1", "limit"),
            ("limit=10001", "limit"),
        ] {
            assert_eq!(refused(EventQuery::parse(wrong)).as_deref(), Some(field), "{wrong}");
        }
    }

    #[test]
    fn a_wrong_cluster_secret_is_no_wrong_api_key() {
        let accepted = ["a secret of this cluster", "the previous secret"].map(str::as_bytes);
        assert_eq!(check_secret(accepted[0], accepted), Ok(()));
        assert_eq!(check_secret(accepted[1], accepted), Ok(()));
        assert!(check_secret(accepted[1], [accepted[0]]).is_err(), "no longer accepted");
        for wrong in ["", "a secret of this cluster ", "a secret of that cluster", "the previous secre"] {
            let error = check_secret(wrong.as_bytes(), accepted).expect_err(wrong);
            assert_eq!((error.status, error.code.as_deref()), (401, Some("invalid_cluster_secret")));
        }
    }
}
