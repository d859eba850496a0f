//! A prefill's reply that begins before the prefill has ended, for a router that requests it
//! (`x-baton-early-handoff`). The first server-sent event contains `kv_transfer_params`; the second is the complete
//! reply, or an error. Dropping the body before its end ends prefill and lease.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use baton_openai::{ApiError, sse};
use bytes::Bytes;
use hyper::body::{Body, Frame};
use serde_json::json;

use super::{GenerateProgress, GenerateTask};
use crate::server::guard::LeaseGuard;

type FinalReply = dyn Future<Output = Result<Bytes, ApiError>> + Send + Sync;

pub(super) struct EarlyBody {
    lease: LeaseGuard,
    frames: VecDeque<Bytes>,
    /// The reply after the handoff; `None` once it is in `frames`.
    rest: Option<Pin<Box<FinalReply>>>,
}

impl EarlyBody {
    /// The body of a task that has just received its early handoff.
    pub(super) fn new(mut task: GenerateTask) -> Self {
        let params = json!({ "kv_transfer_params": task.params() });
        let handle = task.handoff.take().map(|handoff| handoff.handle);
        let lease = LeaseGuard::of_stream(task.guard.core(), handle);
        let rest = async move { task.collect(GenerateProgress::Nothing).await.map(|(reply, _)| reply) };
        let frames = VecDeque::from([sse::frame(params.to_string().as_bytes())]);
        Self { lease, frames, rest: Some(Box::pin(rest)) }
    }
}

impl Body for EarlyBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.frames.is_empty()
            && let Some(rest) = &mut self.rest
        {
            let reply = std::task::ready!(rest.as_mut().poll(context));
            self.rest = None;
            let last = reply.map_or_else(|error| error.to_sse(), |reply| sse::frame(&reply));
            self.frames.extend([last, sse::DONE]);
        }
        let frame = self.frames.pop_front();
        if frame.is_none() {
            self.lease.mark_delivered();
        }
        Poll::Ready(frame.map(|frame| Ok(Frame::data(frame))))
    }
}
