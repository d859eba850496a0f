//! A prefill's reply that begins before the prefill has ended, for a router that asked for it
//! (`x-baton-early-handoff`): server-sent events, of which the first has `kv_transfer_params` and the second is the reply
//! that would have come in one piece, or an error. Dropping it before its end ends prefill and lease.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use baton_openai::{ApiError, sse};
use bytes::Bytes;
use hyper::body::{Body, Frame};
use serde_json::json;

use super::{Exchange, Progress};
use crate::server::guard::LentGuard;

type Rest = dyn Future<Output = Result<Bytes, ApiError>> + Send + Sync;

pub(super) struct EarlyBody {
    lent: LentGuard,
    frames: VecDeque<Bytes>,
    /// What comes after the handoff; `None` once it is in `frames`.
    rest: Option<Pin<Box<Rest>>>,
}

impl EarlyBody {
    /// Of an exchange that has just heard of its handoff.
    pub(super) fn new(mut exchange: Exchange) -> Self {
        let params = json!({ "kv_transfer_params": exchange.params() });
        let lent =
            LentGuard::new(exchange.guard.core(), exchange.handoff.take().map(|handoff| handoff.handle));
        let rest = async move { exchange.collect(Progress::Nothing).await.map(|(reply, _)| reply) };
        let frames = VecDeque::from([sse::frame(params.to_string().as_bytes())]);
        Self { lent, frames, rest: Some(Box::pin(rest)) }
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
            self.lent.delivered();
        }
        Poll::Ready(frame.map(|frame| Ok(Frame::data(frame))))
    }
}
