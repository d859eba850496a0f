//! Ids of requests: random, minted by the router, and the same on both legs. A client's own id is only echoed to
//! the client.

use baton_connector::RequestId;
use hyper::header::{HeaderMap, HeaderValue};

use crate::message::{hex, random};

/// A random id in the shape of a version 4 UUID.
pub(crate) fn generate() -> RequestId {
    let mut bytes = random::id();
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let number = u128::from_be_bytes(bytes);
    let mut text = [b'-'; 36];
    for (digits, shift) in [(0..8, 96), (9..13, 80), (14..18, 64), (19..23, 48), (24..36, 0)] {
        hex::write(&mut text[digits], number >> shift);
    }
    let text = std::str::from_utf8(&text).expect("hexadecimal digits and dashes");
    RequestId::new(text).expect("36 bytes of printable ASCII")
}

/// The id under which a request is recomputed. Engines remember aborted ids for a while, and aborts of the first
/// round are repeated until they are answered. Under the old id they would end the second round too.
pub(crate) fn next_round(id: &RequestId) -> RequestId {
    derived(id, "-2")
}

/// The id of one attempt at a pair of engines. All have the same length: SGLang aborts every request whose id begins
/// with the given one.
pub(crate) fn of_pair(id: &RequestId, number: u8) -> RequestId {
    derived(id, &format!("-p{number:02x}"))
}

/// A minted id with a suffix.
pub(crate) fn derived(id: &RequestId, suffix: &str) -> RequestId {
    let text = [id.as_str(), suffix].concat();
    RequestId::new(&text).expect("what is minted here is far shorter than a request id may be")
}

/// The client's id, if it is valid.
pub(crate) fn client_id(headers: &HeaderMap) -> Option<HeaderValue> {
    let mut values = headers.get_all("x-request-id").iter();
    let (Some(value), None) = (values.next(), values.next()) else { return None };
    RequestId::new(value.to_str().ok()?).ok()?;
    Some(value.clone())
}

/// The id of the request, also from an id under which its prompt is recomputed.
#[must_use]
pub fn bare_id(id: &str) -> &str {
    let id = match id.strip_prefix("chatcmpl-").or_else(|| id.strip_prefix("cmpl-")) {
        // The id of an engine's reply: the suffix distinguishes replies to one request.
        Some(reply) => {
            reply.rsplit_once('.').filter(|(_, mark)| mark.len() == 16).map_or(reply, |(name, _)| name)
        }
        None => id,
    };
    let is_pair = |mark: &str| mark.len() == 2 && mark.bytes().all(|digit| digit.is_ascii_hexdigit());
    let id = id.rsplit_once("-p").filter(|(_, mark)| is_pair(mark)).map_or(id, |(id, _)| id);
    id.trim_end_matches("-r").trim_end_matches("-2")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_look_like_uuids_and_differ() {
        let ids: std::collections::HashSet<_> =
            (0..10 * random::ID_BATCH).map(|_| generate().as_str().to_owned()).collect();
        assert_eq!(ids.len(), 10 * random::ID_BATCH);
        let a = generate();
        assert_eq!(a.as_str().len(), 36);
        assert_eq!(&a.as_str()[14..15], "4");
    }

    #[test]
    fn a_clients_id_is_echoed_only_if_valid() {
        let with = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("x-request-id", HeaderValue::from_str(value).expect("a header"));
            client_id(&headers)
        };
        assert!(with("mine-1").is_some());
        assert!(with("with space").is_none() && with(&"x".repeat(4096)).is_none() && with("").is_none());
    }

    #[test]
    fn all_ids_of_one_request_have_the_same_base() {
        for name in [
            "a-1",
            "a-1-2",
            "a-1-p0a",
            "chatcmpl-a-1-p01.0123456789abcdef",
            "a-1-2-2",
            "cmpl-a-1",
            "a-1-2-r",
            "chatcmpl-a-1-2.0123456789abcdef",
        ] {
            assert_eq!(bare_id(name), "a-1", "{name}");
        }
    }
}
