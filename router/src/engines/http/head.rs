//! The head of a request to an engine: bytes of HTTP/1.1, or fields of HTTP/2. Names are constants here. Values are
//! digits, ids and `HeaderValue`s, which cannot contain a line end: nothing that a client sent can begin another header
//! or another request.

use baton_openai::{FIRST_TOKEN_TIMEOUT, REQUEST_TIMEOUT, TIMEOUT_MAX_MS};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::http::uri::Scheme;
use hyper::{Method, Request, Uri, Version};

use super::{ConnectionError, EngineRequest};

/// Capacity for a usual head.
const USUAL_BYTES: usize = 512;
const USUAL_FIELDS: usize = 12;
/// Fields that HTTP/2 does not keep in its compression tables.
const SECRET_FIELDS: [&str; 2] = ["authorization", SECRET];
const SECRET: &str = "x-baton-cluster-secret";

/// A request, and what the engine's terms add to it.
pub(super) struct EngineRequestHead<'a> {
    pub host: &'a HeaderValue,
    pub secret: Option<&'a HeaderValue>,
    /// The router's own key, which replaces the client's credentials.
    pub api_key: Option<&'a HeaderValue>,
    pub request: &'a EngineRequest,
}

impl EngineRequestHead<'_> {
    /// The bytes of HTTP/1.1.
    pub(super) fn http1(&self) -> Vec<u8> {
        let mut head = Vec::with_capacity(USUAL_BYTES);
        for part in [self.request.method.as_str(), " ", &*self.request.path, " HTTP/1.1\r\n"] {
            head.extend_from_slice(part.as_bytes());
        }
        let mut field = |name: &str, value: &[u8]| {
            for part in [name.as_bytes(), b": ", value, b"\r\n"] {
                head.extend_from_slice(part);
            }
        };
        field("host", self.host.as_bytes());
        self.each_field(field);
        head.extend_from_slice(b"\r\n");
        head
    }

    /// The head of HTTP/2.
    ///
    /// # Errors
    /// [`ConnectionError::Malformed`]: the path or the host cannot be part of a URI.
    pub(super) fn http2(&self, scheme: Scheme) -> Result<Request<()>, ConnectionError> {
        let uri = Uri::builder().scheme(scheme).authority(self.host.as_bytes());
        let uri = uri.path_and_query(&*self.request.path).build();
        let mut request = Request::new(());
        *request.method_mut() = self.request.method.clone();
        *request.uri_mut() = uri.map_err(|_| ConnectionError::Malformed("the path of the request"))?;
        *request.version_mut() = Version::HTTP_2;
        let mut fields = HeaderMap::with_capacity(USUAL_FIELDS);
        self.each_field(|name, value| {
            let mut value =
                HeaderValue::from_bytes(value).expect("it was part of a HeaderValue, or is an id");
            value.set_sensitive(SECRET_FIELDS.contains(&name));
            fields.append(HeaderName::from_static(name), value);
        });
        *request.headers_mut() = fields;
        Ok(request)
    }

    /// Calls `field` for each field but the host.
    fn each_field(&self, mut field: impl FnMut(&'static str, &[u8])) {
        let request = self.request;
        // Without this header any coding would be acceptable.
        field("accept-encoding", b"identity");
        let body_bytes: usize = request.pieces().iter().map(bytes::Bytes::len).sum();
        if body_bytes > 0 || request.method != Method::GET {
            field("content-type", b"application/json");
            number(body_bytes, |digits| field("content-length", digits));
        }
        if let Some(id) = &request.id {
            field("x-request-id", id.as_str().as_bytes());
        }
        if let Some(credentials) = self.api_key.or(request.authorization.as_ref()) {
            field("authorization", credentials.as_bytes());
        }
        if let Some(trace) = &request.trace {
            field("traceparent", trace.parent());
            trace.state().into_iter().for_each(|state| field("tracestate", state.as_bytes()));
        }
        if let Some(rank) = request.rank {
            number(rank.into(), |digits| field("x-data-parallel-rank", digits));
        }
        if request.router_settles {
            field("x-baton-router-settles", b"1");
        }
        if request.early_handoff {
            field("x-baton-early-handoff", b"1");
        }
        let times = [(FIRST_TOKEN_TIMEOUT, request.time.first_token), (REQUEST_TIMEOUT, request.time.whole)];
        for (name, left) in times {
            if let Some(left) = left {
                let millis = usize::try_from(left.as_millis()).unwrap_or(usize::MAX);
                number(millis.min(TIMEOUT_MAX_MS as usize), |digits| field(name, digits));
            }
        }
        if let Some(secret) = self.secret {
            field(SECRET, secret.as_bytes());
        }
    }
}

/// Passes the digits of a number.
fn number(mut number: usize, with: impl FnOnce(&[u8])) {
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
    with(&text[from..]);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_connector::RequestId;
    use baton_openai::TimeLeft;
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
            time: TimeLeft {
                first_token: Some(Duration::from_micros(80_900)),
                whole: Some(Duration::from_secs(1 << 40)),
            },
            ..EngineRequest::post("/p", Bytes::from(vec![0; 1203]))
        };
        let (host, secret) = (HeaderValue::from_static("h:1"), HeaderValue::from_static("s"));
        let expected = |key: &str| {
            format!(
                "POST /p HTTP/1.1\r\nhost: h:1\r\naccept-encoding: identity\r\ncontent-type: application/json\r\ncontent-length: 1203\r\n\
                 x-request-id: cmpl-7\r\nauthorization: {key}\r\ntraceparent: {PARENT}\r\ntracestate: a=1\r\n\
                 x-data-parallel-rank: 10\r\nx-baton-router-settles: 1\r\nx-baton-early-handoff: 1\r\n\
                 x-first-token-timeout-ms: 80\r\nx-request-timeout-ms: 604800000\r\nx-baton-cluster-secret: s\r\n\r\n"
            )
        };
        let head =
            EngineRequestHead { host: &host, secret: Some(&secret), api_key: None, request: &outgoing };
        assert_eq!(String::from_utf8_lossy(&head.http1()), expected("Bearer client"));
        let key = HeaderValue::from_static("Bearer router");
        let head = EngineRequestHead { api_key: Some(&key), ..head };
        assert_eq!(String::from_utf8_lossy(&head.http1()), expected("Bearer router"));
        let two = head.http2(Scheme::HTTP).expect("a URI");
        assert_eq!((two.method(), two.uri().to_string().as_str()), (&Method::POST, "http://h:1/p"));
        let fields =
            two.headers().iter().map(|(name, value)| format!("{name}: {}\r\n", value.to_str().unwrap()));
        let fields: String = fields.collect();
        let lines = expected("Bearer router");
        assert_eq!(lines, format!("POST /p HTTP/1.1\r\nhost: h:1\r\n{fields}\r\n"));
        for (name, value) in two.headers() {
            assert_eq!(value.is_sensitive(), SECRET_FIELDS.contains(&name.as_str()), "{name}");
        }
    }

    #[test]
    fn a_request_without_a_body_has_no_content_length() {
        let head = |request: &EngineRequest| {
            let host = HeaderValue::from_static("h");
            EngineRequestHead { host: &host, secret: None, api_key: None, request }.http1()
        };
        assert_eq!(
            head(&EngineRequest::get("/health")),
            b"GET /health HTTP/1.1\r\nhost: h\r\naccept-encoding: identity\r\n\r\n"
        );
        let head = head(&EngineRequest::post("/p", Bytes::new()));
        assert!(String::from_utf8_lossy(&head).contains("content-length: 0\r\n"));
    }
}
