//! What a task owes when it ends, whatever ends it: guards whose `Drop` settles.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use baton_connector::fetch::Reason;
use baton_connector::{Handle, RequestId};
use baton_openai::ApiError;
use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use crate::engine_core::fetch_target::FetchTarget;
use crate::event_log::What;
use crate::run::rank::{DpRank, Seat};
use crate::scheduler::sequence::{FinishReason, SeqId};

/// The sequences of one request. Those that have not ended when it is dropped are aborted: the client is gone.
pub(super) struct SequenceGuard {
    seat: Seat,
    request: RequestId,
    /// With which choice each is.
    open: Vec<(SeqId, u32)>,
}

impl SequenceGuard {
    pub(super) fn new(seat: Seat, request: RequestId, sequences: Vec<SeqId>) -> Self {
        Self { seat, request, open: sequences.into_iter().zip(0..).collect() }
    }

    /// The core that has the sequences.
    pub(super) fn core(&self) -> &Arc<DpRank> {
        &self.seat
    }

    /// The sequence has ended by itself.
    pub(super) fn ended(&mut self, id: SeqId) {
        self.open.retain(|(open, _)| *open != id);
    }

    /// The front end has what it wants of this sequence (a stop string was found).
    pub(super) fn content(&mut self, id: SeqId) {
        self.ended(id);
        self.seat.mailbox.end(id, FinishReason::Stop);
    }
}

impl Drop for SequenceGuard {
    fn drop(&mut self) {
        for (id, index) in self.open.drain(..) {
            self.seat.log.tell(&self.request, index, What::Abort("disconnect"));
            self.seat.mailbox.end(id, FinishReason::Abort);
        }
    }
}

/// A handoff that came with a request which has not been queued yet. Dropped before that, for whatever reason,
/// it releases the lease at the producer (vLLM #41269).
pub(super) struct HandoffGuard {
    core: Arc<DpRank>,
    target: Option<FetchTarget>,
    cause: Cause,
}

impl HandoffGuard {
    pub(super) fn new(core: Arc<DpRank>, target: FetchTarget) -> Self {
        Self { core, target: Some(target), cause: Cause::Dropped }
    }

    /// The request is refused, and the answer says why: a router that settles itself keeps the lease where another
    /// engine might take the request.
    pub(super) fn refuse(mut self, error: &ApiError) {
        self.cause = Cause::of(error);
        if self.cause.another_may_take_it() && self.target.as_ref().is_some_and(FetchTarget::survives_refusal)
        {
            self.core.metrics.early_rejection("left_to_router");
            self.target = None;
        }
    }

    /// The request is about to be queued: from then on the step loop answers for the lease. If it is not queued
    /// after all, make a new guard of it.
    pub(super) fn into_target(mut self) -> FetchTarget {
        self.target.take().expect("taken once")
    }
}

impl Drop for HandoffGuard {
    fn drop(&mut self) {
        if let Some(target) = self.target.take() {
            self.core.metrics.early_rejection(self.cause.label());
            self.core.peers.release(&target, Reason::Rejected.label());
        }
    }
}

/// A lease whose handle nobody has learned yet. If it is dropped before that, nobody can come for the blocks, and it
/// is released.
pub(super) struct LentGuard {
    core: Arc<DpRank>,
    handle: Option<Handle>,
}

impl LentGuard {
    pub(super) fn new(core: &Arc<DpRank>, handle: Option<Handle>) -> Self {
        Self { core: Arc::clone(core), handle }
    }

    /// The handle is with the connection now.
    pub(super) fn delivered(&mut self) {
        self.handle = None;
    }
}

impl Drop for LentGuard {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            self.core.desk.release_here(handle, "client_gone");
        }
    }
}

/// A reply that carries the only copy of a handle.
pub(super) struct HandoffBody {
    lent: LentGuard,
    bytes: Option<Bytes>,
}

impl HandoffBody {
    pub(super) fn new(core: &Arc<DpRank>, handle: Handle, bytes: Bytes) -> Self {
        Self { lent: LentGuard::new(core, Some(handle)), bytes: Some(bytes) }
    }
}

impl Body for HandoffBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let bytes = self.bytes.take();
        self.lent.delivered();
        Poll::Ready(bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}

/// Why a request with a handoff was refused: the label of `baton_early_rejections_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    Unauthorized,
    UnknownModel,
    UnknownPath,
    TooLarge,
    SlowBody,
    CutOff,
    Unreadable,
    TooLong,
    WrongRole,
    Layout,
    Prompt,
    Unsupported,
    Invalid,
    QueueFull,
    Draining,
    EngineFailed,
    /// The request's task ended without a word: its connection was closed.
    Dropped,
}

impl Cause {
    pub(super) fn of(error: &ApiError) -> Self {
        match (error.status, error.code.as_deref()) {
            (401 | 403, _) => Self::Unauthorized,
            (404, Some("model_not_found")) => Self::UnknownModel,
            (404 | 405, _) => Self::UnknownPath,
            (413, _) => Self::TooLarge,
            (408, _) => Self::SlowBody,
            (499, _) => Self::CutOff,
            (429, _) => Self::QueueFull,
            (503, Some("draining")) => Self::Draining,
            (500.., _) => Self::EngineFailed,
            (_, Some("malformed_body" | "duplicate_field")) => Self::Unreadable,
            (_, Some("context_length_exceeded")) => Self::TooLong,
            (_, Some("kv_wrong_role")) => Self::WrongRole,
            (_, Some("kv_layout_mismatch")) => Self::Layout,
            (_, Some("kv_prompt_mismatch")) => Self::Prompt,
            (_, Some("kv_unsupported")) => Self::Unsupported,
            _ => Self::Invalid,
        }
    }

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Unauthorized => "unauthorized",
            Self::UnknownModel => "unknown_model",
            Self::UnknownPath => "unknown_path",
            Self::TooLarge => "too_large",
            Self::SlowBody => "slow_body",
            Self::CutOff => "cut_off",
            Self::Unreadable => "unreadable",
            Self::TooLong => "too_long",
            Self::WrongRole => "wrong_role",
            Self::Layout => "layout",
            Self::Prompt => "prompt",
            Self::Unsupported => "unsupported",
            Self::Invalid => "invalid",
            Self::QueueFull => "queue_full",
            Self::Draining => "draining",
            Self::EngineFailed => "engine_failed",
            Self::Dropped => "dropped",
        }
    }

    /// Whether another engine might take the request, with the same handoff.
    pub(super) fn another_may_take_it(self) -> bool {
        matches!(
            self,
            Self::Unauthorized
                | Self::WrongRole
                | Self::Layout
                | Self::Prompt
                | Self::QueueFull
                | Self::Draining
                | Self::EngineFailed
        )
    }
}
