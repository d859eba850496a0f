//! One ext_proc stream, pure: the messages of one HTTP request in, the messages to the gateway out.
//!
//! ```text
//! Idle ─ request headers ─▶ Receiving ─ last body piece or trailers ─▶ Choosing ─ endpoint ─▶ Forwarded
//!  │                            │                                         │                      │
//!  │                            └── refused: immediate response ──────────┴───▶ Ended            │
//!  └──── response headers, also of a response that the gateway makes itself ──▶ Responding ◀─────┘
//!                                                  last piece, trailers, or the stream's end ──▶ Ended
//! ```
//!
//! Envoy sends both bodies in pieces and waits for each of them to be sent back (FULL_DUPLEX_STREAMED). The reply to
//! the request's headers contains the endpoint, so it follows the request's last piece. The whole body then goes back.
//!
//! The stream stays open until the response ends. So the caller, which holds the engine's reservation for as long as
//! the stream, releases it at the end of the response, at the client's cancel and at a reset by the engine. A gateway
//! that sends no response bodies closes the stream at the end of the HTTP request. Envoy 1.40 does so if its mode for
//! response trailers is SEND. With SKIP it closes the stream as soon as no message can follow.
//!
//! Invariants:
//! - [`Action::Choose`] is returned at most once, and only with a complete request.
//! - The reply to the request's headers precedes every piece of its body.
//! - After [`Action::Refuse`] or [`Action::End`] nothing follows.

use std::collections::VecDeque;

use baton_openai::ApiError;
use bytes::{Bytes, BytesMut};

use crate::message::payload::Payload;

/// Maximum bytes of one piece of a body. Envoy's queue for a piece is 64 KiB, and llm-d's picker uses the same number.
pub(super) const PIECE_BYTES_MAX: usize = 62_000;

/// The direction of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Request,
    Response,
}

/// Whether more messages of a direction follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    Follows,
    /// This was the last message.
    End,
}

/// A message of the gateway, or a result of the caller.
#[derive(Debug)]
pub(super) enum Event {
    RequestHeaders(Rest),
    RequestBody(Bytes, Rest),
    RequestTrailers,
    /// An endpoint is chosen, and receives this body.
    Chosen(Payload),
    /// The client gets this error.
    Refused(ApiError),
    ResponseHeaders(Rest),
    ResponseBody(Bytes, Rest),
    ResponseTrailers,
    /// The gateway ended the stream.
    Closed,
}

/// What the caller does next.
#[derive(Debug)]
pub(super) enum Action {
    /// Choose an endpoint for this request body.
    Choose(Bytes),
    /// Reply to headers. Those of a request get the chosen endpoint.
    Headers(Direction),
    /// Send a piece of a body.
    Body(Direction, Bytes, Rest),
    /// Reply to trailers.
    Trailers(Direction),
    /// Send the error as the response to the client.
    Refuse(ApiError),
    /// End the stream.
    End,
}

/// A message that the protocol does not allow in this place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct ProtocolError(&'static str);

/// What the request has brought so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Idle,
    Receiving,
    Choosing(RequestShape),
    Forwarded,
    Responding,
    Ended,
}

/// The messages of a complete request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestShape {
    Headers,
    Body,
    BodyAndTrailers,
}

/// The state of one stream.
#[derive(Debug)]
pub(super) struct StreamProtocol {
    phase: Phase,
    body: BodyBuffer,
    body_bytes_max: usize,
    /// At most the pieces of one body, which is bounded, and three messages.
    actions: VecDeque<Action>,
}

/// A body that arrives in pieces. A body of one piece is not copied.
#[derive(Debug, Default)]
struct BodyBuffer {
    first: Bytes,
    rest: BytesMut,
}

impl BodyBuffer {
    fn len(&self) -> usize {
        self.first.len().max(self.rest.len())
    }

    fn push(&mut self, piece: Bytes) {
        if self.len() == 0 {
            self.first = piece;
        } else if !piece.is_empty() {
            if self.rest.is_empty() {
                self.rest.extend_from_slice(&std::mem::take(&mut self.first));
            }
            self.rest.extend_from_slice(&piece);
        }
    }

    fn take(&mut self) -> Bytes {
        let Self { first, rest } = std::mem::take(self);
        if rest.is_empty() { first } else { rest.freeze() }
    }
}

impl StreamProtocol {
    pub(super) fn new(body_bytes_max: usize) -> Self {
        Self { phase: Phase::Idle, body: BodyBuffer::default(), body_bytes_max, actions: VecDeque::new() }
    }

    /// Whether the gateway still sends the request.
    pub(super) fn is_receiving(&self) -> bool {
        matches!(self.phase, Phase::Idle | Phase::Receiving)
    }

    /// The next action, if there is one before the next event.
    pub(super) fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Moves the stream by one event.
    ///
    /// # Errors
    /// The message is not allowed here: the gateway does not speak the protocol, and the stream must end.
    pub(super) fn apply(&mut self, event: Event) -> Result<(), ProtocolError> {
        match (self.phase, event) {
            (Phase::Ended, _) => {}
            (_, Event::Closed) => self.end(),
            (Phase::Idle, Event::RequestHeaders(Rest::Follows)) => self.phase = Phase::Receiving,
            (Phase::Idle, Event::RequestHeaders(Rest::End)) => self.complete(RequestShape::Headers),
            (_, Event::RequestHeaders(_)) => {
                return Err(ProtocolError("a second message of request headers"));
            }
            (Phase::Receiving, Event::RequestBody(piece, rest)) => self.receive(piece, rest),
            (Phase::Receiving, Event::RequestTrailers) => self.complete(RequestShape::BodyAndTrailers),
            // The gateway answered the request itself, so the rest of the request goes nowhere.
            (Phase::Responding, Event::RequestBody(..) | Event::RequestTrailers) => {}
            (_, Event::RequestBody(..) | Event::RequestTrailers) => {
                return Err(ProtocolError("a piece of the request outside its body"));
            }
            (Phase::Choosing(shape), Event::Chosen(body)) => self.forward(shape, &body),
            (Phase::Idle | Phase::Receiving | Phase::Choosing(_), Event::Refused(error)) => {
                self.actions.push_back(Action::Refuse(error));
                self.end();
            }
            // The result is late: the gateway answered the request meanwhile.
            (_, Event::Chosen(_) | Event::Refused(_)) => {}
            (Phase::Responding, Event::ResponseHeaders(_)) => {
                return Err(ProtocolError("a second message of response headers"));
            }
            (_, Event::ResponseHeaders(rest)) => {
                self.phase = Phase::Responding;
                drop(self.body.take());
                self.reply(Action::Headers(Direction::Response), rest);
            }
            (Phase::Responding, Event::ResponseBody(piece, rest)) => {
                self.echo(Direction::Response, std::iter::once(&piece), rest);
                if rest == Rest::End {
                    self.end();
                }
            }
            (Phase::Responding, Event::ResponseTrailers) => {
                self.reply(Action::Trailers(Direction::Response), Rest::End);
            }
            (_, Event::ResponseBody(..) | Event::ResponseTrailers) => {
                return Err(ProtocolError("a piece of a response without its headers"));
            }
        }
        Ok(())
    }

    fn receive(&mut self, piece: Bytes, rest: Rest) {
        if self.body.len().saturating_add(piece.len()) > self.body_bytes_max {
            self.actions.push_back(Action::Refuse(ApiError::payload_too_large(self.body_bytes_max)));
            return self.end();
        }
        self.body.push(piece);
        if rest == Rest::End {
            self.complete(RequestShape::Body);
        }
    }

    fn complete(&mut self, shape: RequestShape) {
        self.phase = Phase::Choosing(shape);
        self.actions.push_back(Action::Choose(self.body.take()));
    }

    fn forward(&mut self, shape: RequestShape, body: &Payload) {
        self.phase = Phase::Forwarded;
        self.actions.push_back(Action::Headers(Direction::Request));
        let pieces = body.pieces().iter();
        match shape {
            RequestShape::Headers => {}
            RequestShape::Body => self.echo(Direction::Request, pieces, Rest::End),
            RequestShape::BodyAndTrailers => {
                self.echo(Direction::Request, pieces, Rest::Follows);
                self.actions.push_back(Action::Trailers(Direction::Request));
            }
        }
    }

    /// Sends a body back. Its last message is marked, also if the body is empty.
    fn echo<'a>(&mut self, direction: Direction, body: impl Iterator<Item = &'a Bytes>, rest: Rest) {
        let mut pieces = body
            .flat_map(|bytes| {
                let starts = (0..bytes.len()).step_by(PIECE_BYTES_MAX);
                starts.map(|start| bytes.slice(start..bytes.len().min(start + PIECE_BYTES_MAX)))
            })
            .peekable();
        if pieces.peek().is_none() {
            self.actions.push_back(Action::Body(direction, Bytes::new(), rest));
        }
        while let Some(piece) = pieces.next() {
            let rest = if pieces.peek().is_none() { rest } else { Rest::Follows };
            self.actions.push_back(Action::Body(direction, piece, rest));
        }
    }

    fn reply(&mut self, action: Action, rest: Rest) {
        self.actions.push_back(action);
        if rest == Rest::End {
            self.end();
        }
    }

    fn end(&mut self) {
        self.phase = Phase::Ended;
        self.actions.push_back(Action::End);
    }
}

#[cfg(test)]
mod tests;
