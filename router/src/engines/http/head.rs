//! The head of a request to an engine, as bytes. Names are constants here. Values are digits, ids and
//! `HeaderValue`s, which cannot contain a line end: nothing that a client sent can begin another header or another
//! request.

use hyper::Method;
use hyper::header::HeaderValue;

use super::EngineRequest;

/// Capacity for a usual head.
const USUAL_BYTES: usize = 512;

/// Writes the head. The router's own key replaces the client's credentials.
pub(super) fn request(
    host: &HeaderValue,
    secret: Option<&HeaderValue>,
    api_key: Option<&HeaderValue>,
    request: &EngineRequest,
) -> Vec<u8> {
    let mut head = Vec::with_capacity(USUAL_BYTES);
    for part in [request.method.as_str(), " ", &*request.path, " HTTP/1.1\r\n"] {
        head.extend_from_slice(part.as_bytes());
    }
    field(&mut head, "host", host);
    // Without this header any coding would be acceptable.
    head.extend_from_slice(b"accept-encoding: identity\r\n");
    let body_bytes: usize = request.pieces().iter().map(bytes::Bytes::len).sum();
    if body_bytes > 0 || request.method != Method::GET {
        head.extend_from_slice(b"content-type: application/json\r\n");
        number(&mut head, "content-length", body_bytes);
    }
    if let Some(id) = &request.id {
        field(&mut head, "x-request-id", id.as_str());
    }
    if let Some(credentials) = api_key.or(request.authorization.as_ref()) {
        field(&mut head, "authorization", credentials);
    }
    if let Some(trace) = &request.trace {
        field(&mut head, "traceparent", trace.parent());
        trace.state().into_iter().for_each(|state| field(&mut head, "tracestate", state));
    }
    if let Some(rank) = request.rank {
        number(&mut head, "x-data-parallel-rank", rank.into());
    }
    if request.router_settles {
        field(&mut head, "x-baton-router-settles", "1");
    }
    if request.early_handoff {
        field(&mut head, "x-baton-early-handoff", "1");
    }
    if let Some(secret) = secret {
        field(&mut head, "x-baton-cluster-secret", secret);
    }
    head.extend_from_slice(b"\r\n");
    head
}

fn field(head: &mut Vec<u8>, name: &str, value: impl AsRef<[u8]>) {
    for part in [name.as_bytes(), b": ", value.as_ref(), b"\r\n"] {
        head.extend_from_slice(part);
    }
}

fn number(head: &mut Vec<u8>, name: &str, mut number: usize) {
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
    field(head, name, &text[from..]);
}

#[cfg(test)]
mod tests {
    use baton_connector::RequestId;
    use bytes::Bytes;
    use hyper::header::HeaderMap;

    use super::*;
    use crate::message::trace_context::TraceContext;
    use crate::metrics::Leg;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_head_contains_each_header_once_and_the_routers_key() {
        let mut traced = HeaderMap::new();
        traced.insert("traceparent", HeaderValue::from_static(PARENT));
        traced.insert("tracestate", HeaderValue::from_static("a=1"));
        let outgoing = EngineRequest {
            id: RequestId::new("cmpl-7").ok(),
            authorization: Some(HeaderValue::from_static("Bearer client")),
            trace: TraceContext::begin(&traced, None, |_| ()).parent_for(Leg::Decode),
            rank: Some(10),
            router_settles: true,
            early_handoff: true,
            ..EngineRequest::post("/p", Bytes::from(vec![0; 1203]))
        };
        let (host, secret) = (HeaderValue::from_static("h:1"), HeaderValue::from_static("s"));
        let expected = |key: &str| {
            format!(
                "POST /p HTTP/1.1\r\nhost: h:1\r\naccept-encoding: identity\r\ncontent-type: application/json\r\ncontent-length: 1203\r\n\
                 x-request-id: cmpl-7\r\nauthorization: {key}\r\ntraceparent: {PARENT}\r\ntracestate: a=1\r\n\
                 x-data-parallel-rank: 10\r\nx-baton-router-settles: 1\r\nx-baton-early-handoff: 1\r\nx-baton-cluster-secret: s\r\n\r\n"
            )
        };
        let head = request(&host, Some(&secret), None, &outgoing);
        assert_eq!(String::from_utf8_lossy(&head), expected("Bearer client"));
        let key = HeaderValue::from_static("Bearer router");
        let head = request(&host, Some(&secret), Some(&key), &outgoing);
        assert_eq!(String::from_utf8_lossy(&head), expected("Bearer router"));
    }

    #[test]
    fn a_request_without_a_body_has_no_content_length() {
        let head = request(&HeaderValue::from_static("h"), None, None, &EngineRequest::get("/health"));
        assert_eq!(head, b"GET /health HTTP/1.1\r\nhost: h\r\naccept-encoding: identity\r\n\r\n");
        let head =
            request(&HeaderValue::from_static("h"), None, None, &EngineRequest::post("/p", Bytes::new()));
        assert!(String::from_utf8_lossy(&head).contains("content-length: 0\r\n"));
    }
}
