//! Responses of the admin listener: text, JSON, or an error as JSON.

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::{Method, Response, StatusCode};
use serde_json::{Value, json};

/// A response.
#[derive(Debug)]
pub(crate) struct AdminResponse {
    status: StatusCode,
    content_type: &'static str,
    /// Further headers.
    headers: Vec<(HeaderName, HeaderValue)>,
    body: ResponseBody,
}

#[derive(Debug)]
enum ResponseBody {
    Text(String),
    Json(Value),
}

/// How a JSON response is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonFormat {
    /// On one line.
    Compact,
    /// With indentation.
    Pretty,
}

impl AdminResponse {
    /// Plain text.
    pub(crate) fn text(text: impl Into<String>) -> Self {
        Self {
            status: StatusCode::OK,
            content_type: "text/plain; charset=utf-8",
            headers: Vec::new(),
            body: ResponseBody::Text(text.into()),
        }
    }

    /// JSON, on one line unless the query contains `pretty`.
    pub(crate) fn json(value: Value) -> Self {
        Self { content_type: "application/json", body: ResponseBody::Json(value), ..Self::text("") }
    }

    /// An error, as `{"error": {"code": 404, "message": "…"}}`.
    pub(crate) fn error(status: StatusCode, message: &str) -> Self {
        Self::json(json!({"error": {"code": status.as_u16(), "message": message}})).with_status(status)
    }

    /// 405: the path exists, with another method.
    pub(crate) fn method_not_allowed(allow: &'static str) -> Self {
        Self::error(StatusCode::METHOD_NOT_ALLOWED, &format!("only {allow} is allowed here"))
            .with_headers(vec![(ALLOW, HeaderValue::from_static(allow))])
    }

    pub(crate) fn with_status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }

    pub(crate) fn with_type(self, kind: &'static str) -> Self {
        Self { content_type: kind, ..self }
    }

    pub(crate) fn with_headers(self, headers: Vec<(HeaderName, HeaderValue)>) -> Self {
        Self { headers, ..self }
    }

    pub(super) fn into_response(self, format: JsonFormat, method: &Method) -> Response<Full<Bytes>> {
        let text = match self.body {
            ResponseBody::Text(text) => text,
            ResponseBody::Json(value) if format == JsonFormat::Pretty => format!("{value:#}\n"),
            ResponseBody::Json(value) => format!("{value}\n"),
        };
        let body = if *method == Method::HEAD { Bytes::new() } else { Bytes::from(text) };
        let mut response = Response::new(Full::new(body));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(self.content_type));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        for (name, value) in self.headers {
            headers.insert(name, value);
        }
        response
    }
}
