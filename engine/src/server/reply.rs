//! Reading request bodies within bounds, and building responses.

use std::sync::Arc;

use baton_openai::ApiError;
use baton_openai::translate::messages;
use bytes::{Bytes, BytesMut};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body as _, Incoming};
use hyper::header::{CONTENT_TYPE, EXPECT, HeaderValue};
use hyper::{Request, Response, StatusCode};

use super::BODY_TIMEOUT;
use super::body_budget::{BodyBudget, RequestBody};

/// How much of an oversized body is read: enough for any handoff, which Baton's router sends before the prompt.
const READ_OF_TOO_LARGE: usize = 1 << 20;

/// The body type of all responses.
pub(super) type ReplyBody = BoxBody<Bytes, std::convert::Infallible>;

/// The response type of all endpoints.
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
    error_with_body(error, error.to_bytes())
}

/// An error in the envelope of Anthropic's paths.
pub(super) fn message_error(error: &ApiError) -> Reply {
    error_with_body(error, messages::error_body(error))
}

fn error_with_body(error: &ApiError, body: Bytes) -> Reply {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut reply = json(status, body);
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
    bodies: &Arc<BodyBudget>,
) -> Result<RequestBody, ApiError> {
    if request.body().size_hint().lower() > limit as u64 {
        return Err(ApiError::payload_too_large(limit));
    }
    read_remaining(request, limit, bodies).await.map_err(|unread| unread.error)
}

/// Why a body was not read completely, and the part that was.
pub(super) struct BodyError {
    pub(super) error: ApiError,
    pub(super) read: RequestBody,
}

/// As [`read_body`], for requests that may contain a handoff: on an error the read part is returned, so that the
/// handoff can be released. The first [`READ_OF_TOO_LARGE`] bytes of an oversized body are read.
pub(super) async fn read_remaining(
    request: Request<Incoming>,
    limit: usize,
    bodies: &Arc<BodyBudget>,
) -> Result<RequestBody, BodyError> {
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
                        // A router sends the handoff first: it is read and released although the body is refused.
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
        // A body of exactly the limit is accepted if it ends there.
        if !complete && !too_large {
            complete = body.frame().await.is_none();
        }
        if complete && !too_large { Ok(()) } else { Err(ApiError::payload_too_large(limit)) }
    };
    let read = tokio::time::timeout(BODY_TIMEOUT, read).await;
    let read = read.unwrap_or_else(|_| Err(ApiError::request_timeout(BODY_TIMEOUT)));
    let body = share.into_body(bytes.freeze());
    match read {
        Ok(()) => Ok(body),
        Err(error) => Err(BodyError { error, read: body }),
    }
}
