//! Bodies in and out: how a request's body is read, within bounds, and how a response is made.

use std::sync::Arc;

use baton_openai::ApiError;
use bytes::{Bytes, BytesMut};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body as _, Incoming};
use hyper::header::{CONTENT_TYPE, EXPECT, HeaderValue};
use hyper::{Request, Response, StatusCode};

use super::BODY_TIMEOUT;
use super::bodies::{Bodies, Body};

/// What is read of a body that is too large: enough for any handoff, which routers of ours send before the prompt.
const READ_OF_TOO_LARGE: usize = 1 << 20;

/// Every body this server sends.
pub(super) type ReplyBody = BoxBody<Bytes, std::convert::Infallible>;

/// Every answer of this server.
pub(super) type Reply = Response<ReplyBody>;

/// A JSON answer.
pub(super) fn json(status: StatusCode, body: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(Full::new(body.into()).boxed());
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
}

/// An error in the OpenAI envelope.
pub(super) fn error_reply(error: &ApiError) -> Reply {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut reply = json(status, error.to_bytes());
    for (name, value) in error.headers() {
        if let Ok(value) = HeaderValue::from_str(&value) {
            reply.headers_mut().insert(name, value);
        }
    }
    reply
}

/// Reads a body of at most `limit` bytes.
///
/// A client that leaves before its body is complete is an abort, not a request (hyper keeps the task).
pub(super) async fn read_body(
    request: Request<Incoming>,
    limit: usize,
    bodies: &Arc<Bodies>,
) -> Result<Body, ApiError> {
    if request.body().size_hint().lower() > limit as u64 {
        return Err(ApiError::payload_too_large(limit));
    }
    read_what_comes(request, limit, bodies).await.map_err(|unread| unread.error)
}

/// Why a body was not read to its end, and what had come of it.
pub(super) struct Unread {
    pub(super) error: ApiError,
    pub(super) read: Body,
}

/// As [`read_body`], for requests that may carry a handoff: what was read stays, so that the handoff can be given back.
/// Of a body that is announced as too large the first [`READ_OF_TOO_LARGE`] bytes are read.
pub(super) async fn read_what_comes(
    request: Request<Incoming>,
    limit: usize,
    bodies: &Arc<Bodies>,
) -> Result<Body, Unread> {
    let too_large = request.body().size_hint().lower() > limit as u64;
    // A client that sends `Expect` gets the refusal before it sends a body.
    let asks = request.headers().contains_key(EXPECT);
    let most = match (too_large, asks) {
        (true, true) => 0,
        (true, false) => limit.min(READ_OF_TOO_LARGE),
        (false, _) => limit,
    };
    let mut body = request.into_body();
    let (mut bytes, mut share) = (BytesMut::new(), bodies.begin());
    let read = async {
        let mut complete = false;
        while !complete && bytes.len() < most {
            match body.frame().await {
                None => complete = true,
                Some(Err(_)) => return Err(ApiError::client_gone()),
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { continue };
                    let room = most - bytes.len();
                    if let Err(full) = share.take(data.len().min(room)) {
                        // A router puts the handoff in front: it is given back although the body is refused.
                        let head = READ_OF_TOO_LARGE.saturating_sub(bytes.len()).min(data.len()).min(room);
                        bytes.extend_from_slice(&data[..head]);
                        return Err(full);
                    }
                    bytes.extend_from_slice(&data[..data.len().min(room)]);
                    if data.len() > room {
                        return Err(ApiError::payload_too_large(limit));
                    }
                }
            }
        }
        // A body of exactly the limit is not too large if that was its end.
        if !complete && !too_large {
            complete = body.frame().await.is_none();
        }
        if complete && !too_large { Ok(()) } else { Err(ApiError::payload_too_large(limit)) }
    };
    let read = tokio::time::timeout(BODY_TIMEOUT, read).await;
    let read = read.unwrap_or_else(|_| Err(ApiError::request_timeout(BODY_TIMEOUT)));
    let body = share.of(bytes.freeze());
    match read {
        Ok(()) => Ok(body),
        Err(error) => Err(Unread { error, read: body }),
    }
}
