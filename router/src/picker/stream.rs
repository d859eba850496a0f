//! Drives one ext_proc stream: reads its messages, applies them to [`StreamProtocol`], and carries out the actions.
//!
//! The stream owns the request and its reservations. Dropping it releases them: at the end of the response, at the
//! client's cancel, at the gateway's reset, and when the connection breaks.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_openai::{ApiError, Code};
use bytes::Bytes;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use tonic::{Status, Streaming};

use super::choice::PickedEngines;
use super::messages::{self, PickHead, ResponseResult};
use super::protocol::{Action, Direction, Event, Rest, StreamProtocol};
use super::request::PickRequest;
use crate::engines::health::FailureKind;
use crate::metrics::Leg;
use crate::metrics::log_limiter::LogLimiter;
use crate::metrics::picker::PickOutcome;
use crate::state::shared::Shared;

/// One stream of a gateway.
pub(super) struct PickStream {
    shared: Arc<Shared>,
    gateway: IpAddr,
    inbound: Streaming<ProcessingRequest>,
    protocol: StreamProtocol,
    /// End of the time for the request's messages.
    request_until: tokio::time::Instant,
    request_within: Duration,
    request: Option<PickRequest>,
    choice: Option<PickedEngines>,
    /// `None` until the first message.
    outcome: Option<PickOutcome>,
}

impl PickStream {
    pub(super) fn new(shared: &Arc<Shared>, gateway: IpAddr, inbound: Streaming<ProcessingRequest>) -> Self {
        let generation = shared.generation();
        let request_within = Duration::from_millis(generation.config.timeouts.body_ms);
        Self {
            shared: Arc::clone(shared),
            gateway,
            inbound,
            protocol: StreamProtocol::new(generation.config.limits.body_bytes),
            request_until: tokio::time::Instant::now() + request_within,
            request_within,
            request: None,
            choice: None,
            outcome: None,
        }
    }

    /// The next message for the gateway; `None` at the end of the stream.
    ///
    /// # Errors
    /// The gateway does not keep to the protocol. The stream has ended.
    pub(super) async fn next(&mut self) -> Result<Option<ProcessingResponse>, Status> {
        loop {
            let Some(action) = self.protocol.next_action() else {
                let event = self.receive().await?;
                self.apply(event)?;
                continue;
            };
            return Ok(Some(match action {
                Action::Choose(body) => {
                    self.choose(body).await?;
                    continue;
                }
                Action::Headers(Direction::Request) => {
                    let choice = self.choice.as_ref().expect("the reply follows the choice");
                    messages::destination(&choice.endpoints)
                }
                Action::Headers(Direction::Response) => messages::response_headers(),
                Action::Body(direction, bytes, rest) => {
                    if (direction, rest) == (Direction::Request, Rest::End) {
                        self.drop_body();
                    }
                    messages::piece(direction, bytes, rest)
                }
                Action::Trailers(direction) => {
                    if direction == Direction::Request {
                        self.drop_body();
                    }
                    messages::trailers(direction)
                }
                Action::Refuse(error) => {
                    self.refuse(&error);
                    messages::immediate(&error)
                }
                Action::End => return Ok(None),
            }));
        }
    }

    fn drop_body(&mut self) {
        self.request.iter_mut().for_each(PickRequest::drop_body);
    }

    fn refuse(&mut self, error: &ApiError) {
        self.outcome = Some(match error.status {
            429 => PickOutcome::Shed,
            503 => PickOutcome::Unavailable,
            _ => PickOutcome::Rejected,
        });
        self.request.iter_mut().for_each(PickRequest::return_tokens);
        self.record_end(error.status);
    }

    fn record_end(&self, status: u16) {
        if let Some(explanation) = self.request.as_ref().and_then(|request| request.explanation.as_ref()) {
            explanation.record_end(status, None, self.shared.now());
        }
    }

    fn apply(&mut self, event: Event) -> Result<(), Status> {
        self.protocol.apply(event).map_err(|error| {
            self.outcome = Some(PickOutcome::ProtocolError);
            Status::invalid_argument(error.to_string())
        })
    }

    /// Chooses the engines. Any message of the gateway meanwhile ends the choice: the client left, or the gateway
    /// answered the request itself.
    async fn choose(&mut self, body: Bytes) -> Result<(), Status> {
        let complete_at = Instant::now();
        let request = self.request.as_mut().expect("a complete request has a head");
        let chosen = tokio::select! {
            biased;
            message = self.inbound.message() => Err(message),
            chosen = request.choose(body) => Ok(chosen),
        };
        let event = match chosen {
            Err(message) => {
                self.request.iter_mut().for_each(PickRequest::return_tokens);
                self.read(message.ok().flatten()).await?
            }
            Ok(Err(error)) => Event::Refused(error),
            Ok(Ok((choice, body))) => {
                self.choice = Some(choice);
                self.outcome = Some(PickOutcome::Forwarded);
                self.shared.metrics.picker.record_choice(complete_at.elapsed());
                Event::Chosen(body)
            }
        };
        self.apply(event)
    }

    async fn receive(&mut self) -> Result<Event, Status> {
        let message = self.inbound.message();
        let message = if self.protocol.is_receiving() {
            match tokio::time::timeout_at(self.request_until, message).await {
                Ok(message) => message,
                Err(_elapsed) => return Ok(Event::Refused(ApiError::request_timeout(self.request_within))),
            }
        } else {
            message.await
        };
        self.read(message.ok().flatten()).await
    }

    /// The event of a message; a stream that ended or broke is closed.
    async fn read(&mut self, message: Option<ProcessingRequest>) -> Result<Event, Status> {
        let Some(message) = message else { return Ok(Event::Closed) };
        if let Some(why) = messages::unusable_mode(&message) {
            static LOG_LIMITER: LogLimiter = LogLimiter::new();
            if let Some(held_back) = LOG_LIMITER.allow() {
                tracing::error!(event = "gateway_misconfigured", why, held_back, "gateway is misconfigured");
            }
            self.outcome = Some(PickOutcome::ProtocolError);
            return Err(Status::failed_precondition(why));
        }
        let ProcessingRequest { metadata_context, request, .. } = message;
        let request = match request {
            Some(Request::RequestHeaders(headers)) if self.request.is_none() => {
                self.outcome = Some(PickOutcome::ClientGone);
                let bytes_max = self.shared.generation().config.limits.head_bytes;
                let end = if headers.end_of_stream { Rest::End } else { Rest::Follows };
                let head = PickHead::read(headers, metadata_context.as_ref(), bytes_max);
                let head = head.map_err(|error| ApiError::of(Code::MalformedRequest, error.to_string()));
                let begun = match head {
                    Ok(head) => PickRequest::begin(&self.shared, head, self.gateway).await,
                    Err(error) => Err(error),
                };
                return Ok(match begun {
                    Err(error) => Event::Refused(error),
                    Ok(request) => {
                        self.request = Some(request);
                        Event::RequestHeaders(end)
                    }
                });
            }
            Some(Request::RequestBody(body)) => {
                if let Some(Err(error)) = self.request.as_mut().map(|request| request.hold(body.body.len())) {
                    return Ok(Event::Refused(error));
                }
                Some(Request::RequestBody(body))
            }
            Some(Request::ResponseHeaders(headers)) => {
                self.record_response(ResponseResult::read(&headers));
                Some(Request::ResponseHeaders(headers))
            }
            other => other,
        };
        messages::event(request).ok_or_else(|| {
            self.outcome = Some(PickOutcome::ProtocolError);
            Status::invalid_argument("a message without content")
        })
    }

    /// Records a response's head: the prefill is over, and an error may be the fault of an engine.
    fn record_response(&mut self, result: Option<ResponseResult>) {
        let (Some(choice), Some(result)) = (&mut self.choice, result) else { return };
        let (decode, prefill) = (choice.decode.engine(), choice.prefill.take());
        if choice.endpoints.destination.contains(',') {
            // Another endpoint may have served the request.
            return self.record_end(result.status);
        }
        let possible = FailureKind::PossibleFault(choice.source);
        match result {
            // The sidecar is reachable and its engine is not. The sidecar's own health shows nothing about it.
            ResponseResult { status: 503, failed_leg: Some(Leg::Decode) } => {
                decode.failed(Leg::Decode, FailureKind::Unreachable);
            }
            ResponseResult { failed_leg: Some(Leg::Prefill), .. } => {
                prefill.iter().for_each(|prefill| prefill.engine().failed(Leg::Prefill, possible));
            }
            ResponseResult { failed_leg: Some(Leg::Decode), .. }
            | ResponseResult { status: 500 | 502 | 504, .. } => decode.failed(Leg::Decode, possible),
            // A 503 without an engine's fault is usual: the engine is full, or the gateway could not connect, which
            // health checks find out.
            ResponseResult { status: 500.., .. } => {}
            // The sidecar or the gateway may have refused the request, and no engine has it.
            ResponseResult { status: 400..500, .. } => {}
            ResponseResult { .. } => {
                decode.responded(Leg::Decode, choice.chosen_at.elapsed());
                // The rest of the response passes the picker by, so its head is all that ends a trial.
                decode.completed(Leg::Decode);
                // The time includes the decode engine's, so it is no latency of the prefill engine.
                prefill.iter().for_each(|prefill| prefill.engine().completed(Leg::Prefill));
            }
        }
        self.record_end(result.status);
    }
}

impl Drop for PickStream {
    fn drop(&mut self) {
        if let Some(outcome) = self.outcome {
            self.shared.metrics.picker.count(outcome);
        }
        if self.choice.is_none() {
            self.request.iter_mut().for_each(PickRequest::return_tokens);
        }
    }
}
