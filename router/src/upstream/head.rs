//! The head of a request to an engine, as bytes. Names and values are `HeaderName`s and `HeaderValue`s: neither can hold
//! a line end, so that nothing a client sent can begin another header or another request.

use hyper::Method;
use hyper::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderName, HeaderValue, TRANSFER_ENCODING,
};

use super::Outgoing;

/// What is said here and nowhere else.
const OWN: [HeaderName; 5] = [HOST, CONTENT_TYPE, CONTENT_LENGTH, TRANSFER_ENCODING, CONNECTION];
const SECRET: &str = "x-baton-cluster-secret";
/// Room for a head as it usually is.
const USUAL_BYTES: usize = 512;

/// Writes the head.
pub(super) fn request(
    host: &HeaderValue,
    secret: Option<&HeaderValue>,
    api_key: Option<&HeaderValue>,
    outgoing: &Outgoing,
) -> Vec<u8> {
    let mut head = Vec::with_capacity(USUAL_BYTES);
    for part in [outgoing.method.as_str(), " ", outgoing.path, " HTTP/1.1\r\nhost: "] {
        head.extend_from_slice(part.as_bytes());
    }
    head.extend_from_slice(host.as_bytes());
    head.extend_from_slice(b"\r\n");
    let body_bytes: usize = outgoing.pieces().iter().map(bytes::Bytes::len).sum();
    if body_bytes > 0 || outgoing.method != Method::GET {
        head.extend_from_slice(b"content-type: application/json\r\ncontent-length: ");
        digits(&mut head, body_bytes);
        head.extend_from_slice(b"\r\n");
    }
    for (name, value) in &outgoing.headers {
        let said_here = OWN.contains(name)
            || (secret.is_some() && name == SECRET)
            || (api_key.is_some() && name == AUTHORIZATION);
        if !said_here {
            field(&mut head, name.as_str(), value);
        }
    }
    if let Some(secret) = secret {
        field(&mut head, SECRET, secret);
    }
    if let Some(key) = api_key {
        field(&mut head, AUTHORIZATION.as_str(), key);
    }
    head.extend_from_slice(b"\r\n");
    head
}

fn field(head: &mut Vec<u8>, name: &str, value: &HeaderValue) {
    head.extend_from_slice(name.as_bytes());
    head.extend_from_slice(b": ");
    head.extend_from_slice(value.as_bytes());
    head.extend_from_slice(b"\r\n");
}

fn digits(head: &mut Vec<u8>, mut number: usize) {
    let mut text = [b'0'; 20];
    let mut from = text.len();
    loop {
        from -= 1;
        text[from] = b'0' + u8::try_from(number % 10).expect("one digit");
        number /= 10;
        if number == 0 {
            break;
        }
    }
    head.extend_from_slice(&text[from..]);
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use hyper::header::HeaderMap;

    use super::*;

    #[test]
    fn a_head_says_one_length_and_one_host_whatever_headers_it_is_given() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("host", "evil"),
            ("content-length", "9"),
            ("transfer-encoding", "chunked"),
            ("x-a", "1"),
            (SECRET, "?"),
        ] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let outgoing =
            Outgoing { method: Method::POST, path: "/p", headers, body: Bytes::from(vec![0; 1203]).into() };
        let secret = HeaderValue::from_static("s");
        let head = request(&HeaderValue::from_static("h:1"), Some(&secret), None, &outgoing);
        let expected = "POST /p HTTP/1.1\r\nhost: h:1\r\ncontent-type: application/json\r\n\
                        content-length: 1203\r\nx-a: 1\r\nx-baton-cluster-secret: s\r\n\r\n";
        assert_eq!(String::from_utf8_lossy(&head), expected);
    }

    #[test]
    fn a_question_without_a_body_says_no_length() {
        let outgoing = Outgoing {
            method: Method::GET,
            path: "/health",
            headers: HeaderMap::new(),
            body: Bytes::new().into(),
        };
        let head = request(&HeaderValue::from_static("h"), None, None, &outgoing);
        assert_eq!(head, b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n");
    }
}
