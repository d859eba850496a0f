//! Guards that settle a task's leases and sequences on `Drop`, however the task ends.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use baton_connector::fetch::ReleaseReason;
use baton_connector::{Handle, Handoff, RequestId};
use baton_connector_leases::event_log::{RankLog, RequestEvent};
use baton_connector_leases::service::LeaseService;
use baton_openai::ApiError;
use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use crate::engine_core::fetch_target::FetchTarget;
use crate::run::rank::{DpRank, RequestGuard};
use crate::scheduler::sequence::{FinishReason, SeqId};

/// The sequences of one request. If it is dropped, the client is gone, and the sequences that have not ended are
/// aborted.
pub(super) struct SequenceGuard {
    request_guard: RequestGuard,
    request: RequestId,
    /// Each sequence with its choice.
    open: Vec<(SeqId, u32)>,
}

impl SequenceGuard {
    pub(super) fn new(request_guard: RequestGuard, request: RequestId, sequences: Vec<SeqId>) -> Self {
        Self { request_guard, request, open: sequences.into_iter().zip(0..).collect() }
    }

    /// The core that runs the sequences.
    pub(super) fn core(&self) -> &Arc<DpRank> {
        &self.request_guard
    }

    /// The sequence has ended by itself.
    pub(super) fn ended(&mut self, id: SeqId) {
        self.open.retain(|(open, _)| *open != id);
    }

    /// Ends a sequence that needs no more tokens, because of a stop string.
    pub(super) fn finish(&mut self, id: SeqId) {
        self.ended(id);
        self.request_guard.mailbox.end(id, FinishReason::Stop);
    }
}

impl Drop for SequenceGuard {
    fn drop(&mut self) {
        for (id, index) in self.open.drain(..) {
            self.request_guard.log.emit(&self.request, index, RequestEvent::Abort("disconnect"));
            self.request_guard.mailbox.end(id, FinishReason::Abort);
        }
    }
}

/// The handoff of a request that has not been queued yet. If it is dropped before that, it releases the lease at the
/// producer (vLLM #41269).
pub(super) struct HandoffGuard {
    core: Arc<DpRank>,
    target: Option<FetchTarget>,
    cause: RejectionCause,
}

impl HandoffGuard {
    pub(super) fn new(core: Arc<DpRank>, target: FetchTarget) -> Self {
        Self { core, target: Some(target), cause: RejectionCause::DROPPED }
    }

    /// Refuses the request. A router that settles keeps the lease if another engine might take the request.
    pub(super) fn refuse(mut self, error: &ApiError) {
        self.cause = RejectionCause::of(error);
        if self.cause.is_retryable && self.target.as_ref().is_some_and(|target| target.survives_refusal) {
            self.core.metrics.early_rejection("left_to_router");
            self.target = None;
        }
    }

    /// Hands the lease to the step loop with the queued request. If queueing fails, the caller must create a new
    /// guard.
    pub(super) fn into_target(mut self) -> FetchTarget {
        self.target.take().expect("taken once")
    }
}

impl Drop for HandoffGuard {
    fn drop(&mut self) {
        if let Some(target) = self.target.take() {
            self.core.metrics.early_rejection(self.cause.label);
            self.core.consumer.release(&target, ReleaseReason::Rejected.label());
        }
    }
}

/// A lease whose handle has not been sent yet. If it is dropped before that, no client can use the handle, and the
/// lease is released.
pub(super) struct LeaseGuard {
    leases: Arc<LeaseService>,
    handle: Option<Handle>,
    /// The log and the request of a unary reply. An event stream has no `replied`.
    unary: Option<(RankLog, RequestId)>,
}

impl LeaseGuard {
    /// The lease of an event stream.
    pub(super) fn of_stream(core: &DpRank, handle: Option<Handle>) -> Self {
        Self { leases: Arc::clone(&core.leases), handle, unary: None }
    }

    /// The lease of a unary reply.
    pub(super) fn of_unary(core: &DpRank, handoff: &Handoff) -> Self {
        let unary = Some((core.log.clone(), handoff.request.clone()));
        Self { leases: Arc::clone(&core.leases), handle: Some(handoff.handle), unary }
    }

    /// The connection now has the handle.
    pub(super) fn mark_delivered(&mut self) {
        if self.handle.take().is_some() {
            self.log_reply("sent");
        }
    }

    fn log_reply(&self, result: &'static str) {
        if let Some((log, request)) = &self.unary {
            log.emit(request, 0, RequestEvent::Replied(result));
        }
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            self.log_reply("dropped");
            self.leases.release_here(handle, "client_gone");
        }
    }
}

/// A reply with the only copy of a handle.
pub(super) struct LeaseReplyBody {
    lease: LeaseGuard,
    bytes: Option<Bytes>,
}

impl LeaseReplyBody {
    pub(super) fn new(core: &DpRank, handoff: &Handoff, bytes: Bytes) -> Self {
        Self { lease: LeaseGuard::of_unary(core, handoff), bytes: Some(bytes) }
    }
}

impl Body for LeaseReplyBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let bytes = self.bytes.take();
        self.lease.mark_delivered();
        Poll::Ready(bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}

/// Why a request with a handoff was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RejectionCause {
    /// The label of `baton_early_rejections_total`.
    pub(super) label: &'static str,
    /// Whether another engine might take the request, with the same handoff.
    pub(super) is_retryable: bool,
}

impl RejectionCause {
    /// The request's task was dropped because its connection was closed.
    const DROPPED: Self = Self::of_request("dropped");

    /// A cause that is the same on every engine.
    const fn of_request(label: &'static str) -> Self {
        Self { label, is_retryable: false }
    }

    /// A cause of this engine.
    const fn of_engine(label: &'static str) -> Self {
        Self { label, is_retryable: true }
    }

    pub(super) fn of(error: &ApiError) -> Self {
        match (error.status, error.code.as_deref()) {
            (401 | 403, _) => Self::of_engine("unauthorized"),
            // Another engine may have the adapter.
            (404, Some("model_not_found")) => Self::of_engine("unknown_model"),
            (404 | 405, _) => Self::of_request("unknown_path"),
            (413, _) => Self::of_request("too_large"),
            (408, _) => Self::of_request("slow_body"),
            (499, _) => Self::of_request("cut_off"),
            (429, _) => Self::of_engine("queue_full"),
            (503, Some("draining")) => Self::of_engine("draining"),
            (504, Some("request_timeout")) => Self::of_request("timed_out"),
            (500.., _) => Self::of_engine("engine_failed"),
            (_, Some("malformed_body" | "duplicate_field")) => Self::of_request("unreadable"),
            (_, Some("context_length_exceeded")) => Self::of_request("too_long"),
            (_, Some("kv_wrong_role")) => Self::of_engine("wrong_role"),
            (_, Some("kv_layout_mismatch")) => Self::of_engine("layout"),
            (_, Some("kv_prompt_mismatch")) => Self::of_engine("prompt"),
            (_, Some("kv_unsupported")) => Self::of_request("unsupported"),
            _ => Self::of_request("invalid"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use baton_connector::lease::LeaseTerms;
    use baton_connector::ledger::LeaseSpec;
    use baton_connector::{BlockId, Epoch};
    use baton_connector_leases::event_log::EventLog;
    use serde_json::{Value, json};

    use super::*;
    use crate::engine_core::mailbox::Mailbox;
    use crate::handoff::producer::EngineLeaseOwner;
    use crate::metrics::EngineMetrics;

    /// The events of a lease whose reply is read by the connection or not, with their results and reasons.
    fn events(is_unary: bool, is_read: bool) -> Vec<Value> {
        let (log, handle) = (Arc::<EventLog>::default(), Handle(7));
        let request = RequestId::new("a").expect("an id");
        let rank = RankLog::new(&log, 0);
        let owner = EngineLeaseOwner::new(Arc::new(Mailbox::new(1)), Arc::new(EngineMetrics::new("m")));
        let leases = LeaseService::new(LeaseTerms::default(), Epoch(1), 2, Arc::new(owner), rank.clone());
        let blocks = vec![BlockId(0)];
        leases.open(LeaseSpec { handle, request: request.clone(), blocks, expected: 1 }).expect("room");
        let unary = is_unary.then_some((rank, request));
        let lease = LeaseGuard { leases: Arc::new(leases), handle: Some(handle), unary };
        let mut body = LeaseReplyBody { lease, bytes: Some(Bytes::from_static(b"{}")) };
        let mut context = Context::from_waker(Waker::noop());
        let frames: &[bool] = if is_read { &[true, false] } else { &[] };
        for has_bytes in frames {
            let frame = Pin::new(&mut body).poll_frame(&mut context);
            assert_eq!(matches!(frame, Poll::Ready(Some(Ok(_)))), *has_bytes, "one frame, then the end");
        }
        drop(body);
        let found = log.page(0, 10).events;
        found.iter().map(|event| json!([event["kind"], event["result"], event["reason"]])).collect()
    }

    #[test]
    fn a_unary_reply_is_sent_when_the_connection_reads_it_and_dropped_otherwise() {
        let opened = json!(["lease_opened", null, null]);
        let (sent, dropped) = (json!(["replied", "sent", null]), json!(["replied", "dropped", null]));
        let ended = json!(["lease_ended", null, "client_gone"]);
        assert_eq!(events(true, true), [opened.clone(), sent]);
        assert_eq!(events(true, false), [opened.clone(), dropped, ended.clone()]);
        // The lease of a stream.
        assert_eq!((events(false, true), events(false, false)), (vec![opened.clone()], vec![opened, ended]));
    }
}
