//! A reply as server-sent events: a body that polls the engine's events. When the client is gone, hyper drops the
//! body and with it the guard, which aborts the sequences.

use std::pin::Pin;
use std::task::{Context, Poll};

use baton_openai::{ApiError, ChoiceDelta, ChunkEncoder, sse};
use bytes::Bytes;
use hyper::body::{Body, Frame};

use super::api::FrameQueue;
use super::parsed::ParsedChoice;
use super::prompt_logprobs::echoed_tokens;
use super::{GenerateProgress, GenerateTask, echoed};
use crate::server::choice::ChoiceUpdate;

pub(super) struct StreamBody {
    task: GenerateTask,
    chunks: ChunkEncoder,
    frames: FrameQueue,
    /// Choices whose prompt tokens have been sent.
    prompt_named: Vec<bool>,
    /// Choices whose echo waits for the log-probabilities of their prompt.
    echo_due: Vec<bool>,
    /// The last frame is in `frames` or sent.
    complete: bool,
}

impl StreamBody {
    pub(super) fn new(task: GenerateTask, first: GenerateProgress) -> Self {
        let chunks = task.form.chunks();
        let prompt_named = vec![false; task.choices.len()];
        let echo_due = vec![task.request.echo && task.request.logprobs.is_some(); task.choices.len()];
        let frames = task.form.frames();
        let mut body = Self { chunks, frames, prompt_named, echo_due, complete: false, task };
        body.open();
        body.show(first);
        body
    }

    /// Sends roles, and the echoed prompts that wait for nothing, before the first token.
    fn open(&mut self) {
        for index in 0..self.task.choices.len() {
            let request = &self.task.request;
            let prompt = &self.task.prompts[index / request.n as usize];
            let ids = request.return_token_ids.then_some(prompt.as_slice());
            let reasons = self.task.parsed[index].as_ref().is_some_and(ParsedChoice::may_reason);
            let role = match reasons {
                true => Some(self.chunks.reasoning_role(index as u32, ids)),
                false => self.chunks.role(index as u32, ids),
            };
            self.prompt_named[index] = role.is_some();
            if let Some(role) = role {
                self.frames.push(role);
            }
            if request.echo && !self.echo_due[index] {
                self.echo(index);
            }
        }
    }

    /// Sends the prompt of a choice.
    fn echo(&mut self, index: usize) {
        let GenerateTask { request, frontend, prompts, prompt_scores, .. } = &self.task;
        let at = index / request.n as usize;
        let text = echoed(frontend, request, &prompts[at]);
        let tokens = |top| echoed_tokens(&frontend.model.tokenizer, &prompts[at], &prompt_scores[at], top);
        let tokens = request.logprobs.map(tokens);
        let delta = ChoiceDelta {
            index: index as u32,
            text: &text,
            logprobs: tokens.as_deref(),
            ..ChoiceDelta::default()
        };
        self.frames.push(self.chunks.delta(&delta, None, None));
        self.task.choices[index].characters += text.chars().count();
    }

    fn show(&mut self, progress: GenerateProgress) {
        if let GenerateProgress::Piece(index, piece) = progress {
            // The prompt is computed before its first token is sent.
            if std::mem::take(&mut self.echo_due[index]) {
                self.echo(index);
            }
            self.piece(index, &piece);
        }
        if self.task.open == 0 {
            self.close();
        }
    }

    fn piece(&mut self, index: usize, piece: &ChoiceUpdate) {
        let request = &self.task.request;
        let ids = piece.token.filter(|_| request.return_token_ids);
        let parts = !(piece.reasoning.is_empty() && piece.calls.is_empty());
        let shown = parts || piece.logprob.is_some() || ids.is_some() || piece.finish.is_some();
        let silent = piece.text.is_empty() && !shown;
        if silent {
            return;
        }
        let usage = self.task.usage.usage();
        // Completions have no frame for the role: their prompt tokens are in the first delta of a choice.
        let unnamed = request.return_token_ids && !std::mem::replace(&mut self.prompt_named[index], true);
        let prompt = &self.task.prompts[index / request.n as usize];
        let last = piece.finish.is_some() && self.task.open == 0;
        let handoff = if last { self.task.params() } else { None };
        let choice = &mut self.task.choices[index];
        let delta = ChoiceDelta {
            index: index as u32,
            text: &piece.text,
            reasoning: Some(piece.reasoning.as_str()).filter(|text| !text.is_empty()),
            calls: &piece.calls,
            called: piece.called,
            logprobs: piece.logprob.as_ref().map(std::slice::from_ref),
            text_offset: choice.characters,
            finish: piece.finish.as_ref(),
            token_ids: ids.as_ref().map(std::slice::from_ref),
            prompt_token_ids: unnamed.then_some(prompt.as_slice()),
        };
        let continuous = request.stream_options.continuous_usage_stats.then_some(&usage);
        self.frames.push(self.chunks.delta(&delta, continuous, handoff.as_ref()));
        choice.characters += piece.text.chars().count();
    }

    fn close(&mut self) {
        if self.complete {
            return;
        }
        self.complete = true;
        if self.task.request.stream_options.include_usage {
            self.frames.push(self.chunks.usage(&self.task.usage.usage()));
        }
        self.frames.push(sse::DONE);
    }

    fn fail(&mut self, error: &ApiError) {
        self.complete = true;
        self.frames.fail(error);
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
            if let Some(frame) = self.frames.pop() {
                if self.frames.is_empty() && self.complete && self.frames.has_handoff() {
                    // The connection now has the handle, if there is one.
                    self.task.handoff = None;
                }
                return Poll::Ready(Some(Ok(Frame::data(frame))));
            }
            if self.complete || self.frames.has_failed() {
                return Poll::Ready(None);
            }
            let event = std::task::ready!(self.task.events.poll_recv(context));
            match self.task.take(event) {
                Ok(progress) => self.show(progress),
                Err(error) => self.fail(&error),
            }
        }
    }
}
