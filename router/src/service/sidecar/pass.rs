//! Requests that no prefill engine shares: the decode engine gets them as they are, and its response is relayed as it is.
//!
//! Hop-by-hop headers and routing headers are removed. Bodies of JSON lose the fields that choose engines and blocks, as
//! on every other path. Each request has a connection of its own, which its client's disconnect closes.

use std::pin::pin;
use std::time::Duration;

use baton_openai::{ApiError, Code, RawBody, path};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue,
};
use hyper::{Method, Request, Response, Uri};
use hyper_util::rt::TokioIo;
use pingora::http::ResponseHeader;
use tokio::net::TcpStream;
use tokio_util::either::Either;
use tokio_util::task::AbortOnDropHandle;

use super::{ROUTING_HEADERS, decode_unreachable};
use crate::client::disconnect::race;
use crate::client::session::{BodyPiece, ResponseLength, Session};
use crate::config::{EngineHttp2, EngineUrl};
use crate::engines::protocol::{COMMAND_PATHS, is_of_router};
use crate::legs::request_error::RequestError;
use crate::message::rewrite::ClientRules;
use crate::routing::models::Model;
use crate::state::generation::Generation;

/// Headers about one connection (RFC 9110, section 7.6.1), and those that the client of the engine writes itself.
const HOP_HEADERS: [HeaderName; 4] = [CONNECTION, CONTENT_LENGTH, EXPECT, HOST];
const HOP_NAMES: [&str; 8] = [
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];
/// Headers of an engine's response that are relayed at most.
const RESPONSE_HEADERS_MAX: usize = 100;

/// A request for the decode engine.
pub(crate) struct PassedRequest {
    method: Method,
    path: Uri,
    headers: HeaderMap,
    body: Bytes,
}

/// The time limits of a passed request.
struct PassTimeouts {
    connect: Duration,
    head: Duration,
    silence: Duration,
}

/// Refuses the verbs of routers, in every spelling and below every prefix: an engine accepts them from loopback.
///
/// # Errors
/// 404: the path is a verb. 400: it cannot be decoded.
pub(crate) fn check_path(path: &str) -> Result<(), ApiError> {
    let malformed = || ApiError::of(Code::MalformedRequest, "the path must be percent-encoded UTF-8");
    let read = path::normalized(path).ok_or_else(malformed)?;
    match COMMAND_PATHS.iter().any(|command| read.ends_with(command)) {
        true => Err(ApiError::of(Code::NotFound, "the sidecar does not pass this path")),
        false => Ok(()),
    }
}

/// The headers that the other side gets.
fn forwarded(headers: &HeaderMap) -> HeaderMap {
    let named: Vec<_> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect();
    let is_kept = |name: &HeaderName| {
        let text = name.as_str();
        !HOP_HEADERS.contains(name)
            && !HOP_NAMES.contains(&text)
            && !ROUTING_HEADERS.contains(&text)
            && !is_of_router(text)
            && !named.iter().any(|named| named == text)
    };
    let kept = headers.iter().filter(|(name, _)| is_kept(name));
    kept.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Whether an engine may read the body as JSON. Without a type it does.
///
/// # Errors
/// 400: the type is repeated, and servers differ in the line that they use.
fn may_be_json(headers: &HeaderMap) -> Result<bool, ApiError> {
    let mut kinds = headers.get_all(CONTENT_TYPE).iter();
    let (kind, None) = (kinds.next(), kinds.next()) else {
        return Err(ApiError::of(Code::MalformedRequest, "the header content-type must not be repeated"));
    };
    let kind = kind.map(HeaderValue::as_bytes).unwrap_or_default();
    let end = kind.iter().position(|byte| *byte == b';').unwrap_or(kind.len());
    let kind = kind[..end].trim_ascii();
    Ok(kind.is_empty() || kind.to_ascii_lowercase().ends_with(b"json"))
}

/// The body without internal fields. Only JSON can have them.
fn cleaned(headers: &HeaderMap, body: Bytes, generation: &Generation) -> Result<Bytes, ApiError> {
    if !may_be_json(headers)? || body.is_empty() {
        return Ok(body);
    }
    let body = RawBody::any(body, &generation.parse_limits, &ClientRules)?;
    Ok(body.write(&[], &[]).concat().into())
}

impl PassedRequest {
    /// # Errors
    /// 400: the body is declared as JSON and is none, or its type is repeated.
    pub(crate) fn new(session: &Session, body: Bytes, generation: &Generation) -> Result<Self, ApiError> {
        let head = session.req_header();
        let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
        Ok(Self {
            method: head.method.clone(),
            path: path
                .parse()
                .map_err(|_| ApiError::of(Code::MalformedRequest, "the path cannot be forwarded"))?,
            headers: forwarded(&head.headers),
            body: cleaned(&head.headers, body, generation)?,
        })
    }

    /// Sends the request to the only decode engine of `model`, and relays its response. Returns the status.
    ///
    /// # Errors
    /// The client has disconnected, or its error: 503 if no process listens, 502 or 504 if the engine fails before its
    /// response begins. A later failure closes the client's connection.
    pub(crate) async fn relay(
        self,
        session: &mut Session,
        model: &Model,
        generation: &Generation,
    ) -> Result<u16, RequestError> {
        let timeouts = PassTimeouts {
            connect: Duration::from_millis(generation.config.timeouts.connect_ms),
            head: model.bounds.decode_first_byte,
            silence: model.bounds.stream_silence,
        };
        let engine = &model.decode.members().first().expect("a rank has a decode engine").engine;
        let sent = race(session, pin!(self.send(engine.url(), generation, &timeouts))).await;
        let (response, _connection) = sent??;
        let status = response.status().as_u16();
        let (head, body) = response.into_parts();
        let length = head.headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        let length = length.map_or(ResponseLength::Unknown, ResponseLength::Known);
        let head = response_head(status, &forwarded(&head.headers));
        let head =
            head.map_err(|_| ApiError::bad_gateway("the decode engine's response cannot be relayed"))?;
        session.write_head(head, length).await?;
        relay_body(session, body, timeouts.silence).await?;
        Ok(status)
    }

    /// The head of the engine's response. The connection ends with the handle.
    async fn send(
        self,
        url: &EngineUrl,
        generation: &Generation,
        timeouts: &PassTimeouts,
    ) -> Result<(Response<Incoming>, AbortOnDropHandle<()>), RequestError> {
        let (mut sender, connection) = connect(url, generation, timeouts.connect).await?;
        let mut request = Request::new(Full::new(self.body));
        (*request.method_mut(), *request.uri_mut()) = (self.method, self.path);
        *request.headers_mut() = self.headers;
        let host = HeaderValue::from_str(&url.authority()).expect("an EngineUrl is printable ASCII");
        request.headers_mut().insert(HOST, host);
        match tokio::time::timeout(timeouts.head, sender.send_request(request)).await {
            Ok(Ok(response)) => Ok((response, connection)),
            Ok(Err(_)) => Err(ApiError::bad_gateway("the decode engine failed before its response").into()),
            Err(_elapsed) => {
                Err(ApiError::gateway_timeout("the decode engine did not answer in time").into())
            }
        }
    }
}

async fn connect(
    url: &EngineUrl,
    generation: &Generation,
    within: Duration,
) -> Result<(SendRequest<Full<Bytes>>, AbortOnDropHandle<()>), ApiError> {
    let connected = async {
        let stream = TcpStream::connect((url.host(), url.port())).await?;
        stream.set_nodelay(true)?;
        Ok::<_, std::io::Error>(match generation.engine_tls.as_ref().filter(|_| url.is_tls()) {
            None => Either::Left(stream),
            Some(tls) => {
                let tls = tls.named(url).map_err(std::io::Error::other)?;
                Either::Right(tls.connect(stream, EngineHttp2::Off).await?.0)
            }
        })
    };
    let stream = match tokio::time::timeout(within, connected).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            return Err(decode_unreachable());
        }
        Ok(Err(_)) => return Err(ApiError::bad_gateway("the connection to the decode engine failed")),
        Err(_elapsed) => return Err(ApiError::gateway_timeout("the decode engine accepts no connection")),
    };
    let begun = http1::Builder::new().max_headers(RESPONSE_HEADERS_MAX).handshake(TokioIo::new(stream)).await;
    let (sender, connection) =
        begun.map_err(|_| ApiError::bad_gateway("the connection to the decode engine failed"))?;
    let task = tokio::spawn(async move {
        // Its error is that of the request or of the body.
        let _ = connection.await;
    });
    Ok((sender, AbortOnDropHandle::new(task)))
}

fn response_head(status: u16, headers: &HeaderMap) -> pingora::Result<ResponseHeader> {
    let mut head = ResponseHeader::build_no_case(status, Some(headers.len() + 2))?;
    for (name, value) in headers {
        head.append_header(name.clone(), value.clone())?;
    }
    Ok(head)
}

/// Relays a body. If the engine breaks off, the last piece is missing, and so the client's connection is closed.
async fn relay_body(
    session: &mut Session,
    mut body: Incoming,
    silence: Duration,
) -> Result<(), RequestError> {
    loop {
        let frame = race(session, pin!(tokio::time::timeout(silence, body.frame()))).await?;
        match frame {
            Ok(Some(Ok(frame))) => {
                if let Ok(piece) = frame.into_data() {
                    session.send(&piece, BodyPiece::Inner).await?;
                }
            }
            Ok(None) => {
                session.send(b"", BodyPiece::Last).await?;
                return Ok(());
            }
            Ok(Some(Err(_))) | Err(_) => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_one_hop_of_the_gateway_and_of_routers_are_removed() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("host", "a"),
            ("connection", "keep-alive, X-Hop"),
            ("x-hop", "1"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("content-length", "3"),
            ("upgrade", "websocket"),
            ("x-prefiller-host-port", "p:1"),
            ("x-encoder-hosts-ports", "e:1"),
            ("x-kv-cache-source-host-port", "s:1"),
            ("x-data-parallel-host-port", "d:1"),
            ("x-baton-cluster-secret", "s"),
            ("x-override-bootstrap-host", "o"),
            ("x-data-parallel-rank", "7"),
            ("accept", "a"),
            ("x-request-id", "r"),
        ] {
            headers.append(name, value.parse().expect("a value"));
        }
        headers.append("accept", "b".parse().expect("a value"));
        let kept = forwarded(&headers);
        let names: Vec<_> =
            kept.iter().map(|(name, value)| (name.as_str(), value.to_str().expect("text"))).collect();
        assert_eq!(names, [("accept", "a"), ("accept", "b"), ("x-request-id", "r")]);
    }

    #[test]
    fn verbs_of_routers_are_not_passed() {
        let status = |path| check_path(path).map_err(|error| error.status);
        for path in [
            "/abort_requests",
            "/kv/release",
            "/abort_request",
            "/kv/release/",
            "/%61bort_request",
            "/kv/%72elease",
            "/kv%2Frelease",
            "//abort_requests",
            "/kv//release",
            "/inference/v1/abort_requests",
        ] {
            assert_eq!(status(path), Err(404), "{path}");
        }
        assert_eq!(status("/%6"), Err(400));
        for path in ["/", "/metrics", "/v1/models", "/v1/models/a%2Fb", "/v1/embeddings", "/kv"] {
            assert_eq!(status(path), Ok(()), "{path}");
        }
    }

    #[test]
    fn a_body_that_an_engine_may_read_as_json_is_recognized_and_a_repeated_type_is_refused() {
        let of = |kinds: &[&str]| {
            let mut headers = HeaderMap::new();
            for kind in kinds {
                headers.append(CONTENT_TYPE, kind.parse().expect("a value"));
            }
            may_be_json(&headers).map_err(|error| error.status)
        };
        for json in ["application/json", "Application/JSON ;charset=utf-8", "application/x+json", "", " "] {
            assert_eq!(of(&[json]), Ok(true), "{json}");
        }
        assert_eq!(of(&[]), Ok(true));
        assert_eq!(of(&["text/plain"]), Ok(false));
        for repeated in [["text/plain", "application/json"], ["application/json", "application/json"]] {
            assert_eq!(of(&repeated), Err(400), "{repeated:?}");
        }
    }
}
