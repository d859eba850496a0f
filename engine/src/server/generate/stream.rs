//! A reply as server-sent events: a body that polls the engine's events itself. Dropping it, which is what hyper
//! does when the client is gone, drops the guard and so aborts the sequences.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use baton_openai::{ApiError, ChoiceDelta, ChunkEncoder, sse};
use bytes::Bytes;
use hyper::body::{Body, Frame};

use super::{Exchange, Progress, echoed};
use crate::server::follow::Piece;

pub(super) struct StreamBody {
    exchange: Exchange,
    chunks: ChunkEncoder,
    frames: VecDeque<Bytes>,
    /// Choices whose prompt's tokens have been named.
    prompt_named: Vec<bool>,
    /// The last frame is in `frames` or gone.
    complete: bool,
}

impl StreamBody {
    pub(super) fn new(exchange: Exchange, first: Progress) -> Self {
        let chunks = exchange.head.chunks();
        let prompt_named = vec![false; exchange.choices.len()];
        let mut body = Self { chunks, frames: VecDeque::new(), prompt_named, complete: false, exchange };
        body.open();
        body.show(first);
        body
    }

    /// Roles, and echoed prompts, come before the first token.
    fn open(&mut self) {
        let request = &self.exchange.request;
        for index in 0..self.exchange.choices.len() {
            let prompt = &self.exchange.prompts[index / request.n as usize];
            let ids = request.return_token_ids.then_some(prompt.as_slice());
            let role = self.chunks.role(index as u32, ids);
            self.prompt_named[index] = role.is_some();
            self.frames.extend(role);
            if request.echo {
                let text = echoed(&self.exchange.frontend, request, prompt);
                let delta = ChoiceDelta { index: index as u32, text: &text, ..ChoiceDelta::default() };
                self.frames.push_back(self.chunks.delta(&delta, None, None));
                self.exchange.choices[index].characters += text.chars().count();
            }
        }
    }

    fn show(&mut self, progress: Progress) {
        if let Progress::Piece(index, piece) = progress {
            self.piece(index, &piece);
        }
        if self.exchange.open == 0 {
            self.close();
        }
    }

    fn piece(&mut self, index: usize, piece: &Piece) {
        let request = &self.exchange.request;
        let ids = piece.token.filter(|_| request.return_token_ids);
        let silent =
            piece.text.is_empty() && piece.logprob.is_none() && ids.is_none() && piece.finish.is_none();
        if silent {
            return;
        }
        let usage = self.exchange.counted.usage();
        // Completions have no frame of the role: theirs are in the first delta of a choice.
        let unnamed = request.return_token_ids && !std::mem::replace(&mut self.prompt_named[index], true);
        let prompt = &self.exchange.prompts[index / request.n as usize];
        let last = piece.finish.is_some() && self.exchange.open == 0;
        let handoff = if last { self.exchange.params() } else { None };
        let choice = &mut self.exchange.choices[index];
        let delta = ChoiceDelta {
            index: index as u32,
            text: &piece.text,
            logprobs: piece.logprob.as_ref().map(std::slice::from_ref),
            text_offset: choice.characters,
            finish: piece.finish.as_ref(),
            token_ids: ids.as_ref().map(std::slice::from_ref),
            prompt_token_ids: unnamed.then_some(prompt.as_slice()),
        };
        let continuous = request.stream_options.continuous_usage_stats.then_some(&usage);
        self.frames.push_back(self.chunks.delta(&delta, continuous, handoff.as_ref()));
        choice.characters += piece.text.chars().count();
    }

    fn close(&mut self) {
        if self.complete {
            return;
        }
        self.complete = true;
        if self.exchange.request.stream_options.include_usage {
            self.frames.push_back(self.chunks.usage(&self.exchange.counted.usage()));
        }
        self.frames.push_back(sse::DONE);
    }

    fn fail(&mut self, error: &ApiError) {
        self.complete = true;
        self.frames.push_back(error.to_sse());
        self.frames.push_back(sse::DONE);
    }
}

impl Body for StreamBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        loop {
            if let Some(frame) = self.frames.pop_front() {
                if self.frames.is_empty() && self.complete {
                    // The handle, if there is one, is with the connection now.
                    self.exchange.handoff = None;
                }
                return Poll::Ready(Some(Ok(Frame::data(frame))));
            }
            if self.complete {
                return Poll::Ready(None);
            }
            let event = std::task::ready!(self.exchange.events.poll_recv(context));
            match self.exchange.take(event) {
                Ok(progress) => self.show(progress),
                Err(error) => self.fail(&error),
            }
        }
    }
}
