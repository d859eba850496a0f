//! Responses to clients: whole responses, errors, and relayed responses of decode engines.
//!
//! The head of a response is sent only after a decode engine has accepted the request. A streamed response is then
//! relayed frame by frame, unbuffered. Any other response is buffered until it is complete, up to a limit, so that a
//! failure of the engine still becomes a 502.

mod buffered;
mod stream;

use std::time::Duration;

use baton_openai::{ApiError, TranslatedApi, Translation, sse};
use bytes::Bytes;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use pingora::http::ResponseHeader;

use crate::client::session::{BodyPiece, ClientGone, ResponseLength, Session};
use crate::client::stream_comments::StreamComments;
use crate::engines::health::FAILED_LEG;
use crate::envelope::Envelope;
use crate::exchange::driver::{DecodeResponse, ExchangeDriver};
use crate::exchange::resume::ResumeState;
use crate::legs::Refusal;
use crate::legs::request_error::RequestError;
use crate::message::path::Dialect;
use crate::message::sse::FrameBuffer;
use crate::metrics::Leg;
use stream::{IdleTimer, ResponsePump, StreamError};

/// Describes the format of vLLM's binary embeddings.
const METADATA: HeaderName = HeaderName::from_static("metadata");

const NO_CACHE: HeaderValue = HeaderValue::from_static("no-cache");

/// The time limits of a response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamTimeouts {
    /// For the next chunk.
    pub silence: Duration,
    /// For the whole response; `None`: no limit.
    pub deadline: Option<std::time::Instant>,
}

/// The form of the engine's replies, and that of the response.
#[derive(Clone, Debug)]
pub(crate) struct ReplyFormat {
    pub dialect: Dialect,
    pub translation: Option<Translation>,
}

impl ReplyFormat {
    /// The form of errors.
    fn envelope(&self) -> Envelope {
        match self.translation.as_ref().map(Translation::api) {
            Some(TranslatedApi::Messages) => Envelope::Anthropic,
            Some(TranslatedApi::Responses) => Envelope::Responses,
            None => Envelope::at(self.dialect.path()),
        }
    }
}

/// What every response to a client has in common.
pub(crate) struct CommonHeaders {
    /// Sent as `x-request-id`, and to Anthropic's clients as `request-id` too.
    pub id: HeaderValue,
    /// The form of errors.
    pub envelope: Envelope,
    /// `x-ratelimit-*`, if the client has limits.
    pub limits: Vec<(HeaderName, HeaderValue)>,
    /// For pages of other origins.
    pub cors: Vec<(HeaderName, HeaderValue)>,
    /// The leg whose engine failed, in a sidecar's error.
    pub failed_leg: Option<Leg>,
}

impl CommonHeaders {
    fn insert_into(&self, head: &mut ResponseHeader) -> pingora::Result<()> {
        head.insert_header("x-request-id", &self.id)?;
        if self.envelope == Envelope::Anthropic {
            head.insert_header("request-id", &self.id)?;
        }
        for (name, value) in self.limits.iter().chain(&self.cors) {
            head.insert_header(name, value)?;
        }
        if let Some(leg) = self.failed_leg {
            head.insert_header(FAILED_LEG, leg.label())?;
        }
        Ok(())
    }
}

/// Sends a whole response.
pub(crate) async fn send_whole(
    session: &mut Session,
    status: u16,
    headers: &[(&'static str, String)],
    common: &CommonHeaders,
    body: Bytes,
) -> Result<(), ClientGone> {
    let head = whole_head(status, headers, common).map_err(|_| ClientGone)?;
    session.write_head(head, ResponseLength::Known(body.len())).await?;
    session.send(&body, BodyPiece::Last).await.map(drop)
}

fn whole_head(
    status: u16,
    headers: &[(&'static str, String)],
    common: &CommonHeaders,
) -> pingora::Result<ResponseHeader> {
    let mut head = ResponseHeader::build_no_case(status, Some(headers.len() + 5))?;
    for (name, value) in headers {
        head.insert_header(*name, value.as_str())?;
    }
    common.insert_into(&mut head)?;
    Ok(head)
}

/// The head and the comments of a stream that waits.
pub(crate) fn comments(
    common: &CommonHeaders,
    dialect: Dialect,
    interval: Duration,
) -> Option<StreamComments> {
    let head = whole_head(200, &[], common).and_then(|mut head| {
        head.insert_header(CONTENT_TYPE, sse::CONTENT_TYPE)?;
        head.insert_header(CACHE_CONTROL, NO_CACHE)?;
        Ok(head)
    });
    // Without comments the stream is valid, too.
    Some(StreamComments::new(head.ok()?, dialect.comment(), interval))
}

/// Ends a stream that has begun: one typed error at a frame boundary.
pub(crate) async fn end_with_error(
    session: &mut Session,
    error: &ApiError,
    common: &CommonHeaders,
) -> Result<(), ClientGone> {
    session.send(&common.envelope.last_event(error), BodyPiece::Last).await.map(drop)
}

/// Sends an error.
pub(crate) async fn send_error(
    session: &mut Session,
    error: &ApiError,
    common: &CommonHeaders,
) -> Result<(), ClientGone> {
    send_whole(session, error.status, &error.headers(), common, common.envelope.body(error)).await
}

/// Relays a decode engine's response to its end.
pub(crate) async fn relay(
    session: &mut Session,
    driver: &mut ExchangeDriver,
    answer: DecodeResponse,
    common: &CommonHeaders,
    timeouts: StreamTimeouts,
    resume_state: Option<Box<ResumeState>>,
    format: ReplyFormat,
) -> Result<u16, RequestError> {
    let DecodeResponse { attempt, reply, load } = answer;
    let dialect = format.dialect;
    let idle = IdleTimer::new(timeouts);
    let content_type = reply.content_type().cloned();
    let metadata = reply.metadata().filter(|_| !dialect.generates()).cloned();
    let status = reply.status().as_u16();
    let streamed = dialect.generates() && reply.is_stream();
    let head = || -> pingora::Result<ResponseHeader> {
        let mut head = ResponseHeader::build_no_case(status, Some(8))?;
        let json = HeaderValue::from_static("application/json");
        head.insert_header(CONTENT_TYPE, content_type.unwrap_or(json))?;
        if let Some(metadata) = metadata {
            head.insert_header(METADATA, metadata)?;
        }
        common.insert_into(&mut head)?;
        if let Some(timing) = driver.server_timing() {
            head.insert_header("server-timing", timing)?;
        }
        if streamed {
            head.insert_header(CACHE_CONTROL, NO_CACHE)?;
        }
        Ok(head)
    };
    let head = head().map_err(|_| Refusal::broken())?;
    // A comment may have begun a stream.
    let has_begun = session.has_begun();
    driver.progress.streamed = streamed || has_begun;
    driver.progress.passes = !dialect.generates();
    let (reply, load) = (Some(reply), Some(load));
    let translation = format.translation.as_ref().filter(|_| streamed);
    let translator = translation.and_then(Translation::stream).map(Box::new);
    let mut pump = ResponsePump {
        session,
        driver,
        attempt,
        reply,
        load,
        idle,
        resume_state,
        has_first_chunk: false,
        format,
        translator,
    };
    if streamed {
        pump.relay_stream(head).await?;
    } else if has_begun {
        // The engine's response is no stream.
        Box::pin(pump.end_with_error(StreamError::EngineDied, &FrameBuffer::default())).await?;
        return Ok(200);
    } else {
        pump.session.send_comments(None);
        // Boxed, so that a stream has no memory for it.
        Box::pin(pump.relay_buffered(head)).await?;
    }
    Ok(status)
}
