//! The prefill half of a pair whose decode engine has begun its response: a task reads the rest of the prefill engine's
//! reply. It outlives a completed request, and it aborts a prefill that falls silent.

use std::pin::pin;
use std::sync::{Arc, PoisonError};

use baton_connector::exchange::{Event, Failure, Settlement};
use tokio::sync::oneshot;

use super::{LeaseRelease, SettlementContext, Settler};
use crate::legs::liveness::wait_while_alive;
use crate::legs::prefill::{PrefillCall, PrefillResult, PrefillTimeouts};
use crate::metrics::Leg;

/// A prefill that has not answered yet. Dropping it lets the prefill end by itself.
pub(crate) struct PendingPrefill(oneshot::Sender<()>);

impl PendingPrefill {
    /// Aborts the prefill.
    pub(crate) fn abort(self) {
        // A prefill that has ended needs no abort.
        let _ = self.0.send(());
    }
}

impl Settler {
    /// Reads the reply of a prefill whose decode engine has begun its response.
    pub(crate) fn follow_prefill(
        self: &Arc<Self>,
        call: PrefillCall,
        timeouts: PrefillTimeouts,
        context: SettlementContext,
    ) -> PendingPrefill {
        let (sender, aborted) = oneshot::channel();
        let settler = Arc::clone(self);
        self.readers.spawn_on(settler.read_pending_prefill(call, timeouts, context, aborted), &self.runtime);
        PendingPrefill(sender)
    }

    async fn read_pending_prefill(
        self: Arc<Self>,
        mut call: PrefillCall,
        timeouts: PrefillTimeouts,
        context: SettlementContext,
        mut aborted: oneshot::Receiver<()>,
    ) {
        let engine = Arc::clone(call.engine());
        let PrefillTimeouts { sent_at, silence, probe_interval } = timeouts;
        let is_aborted = async {
            if (&mut aborted).await.is_err() {
                // The request has ended otherwise.
                std::future::pending::<()>().await;
            }
        };
        let left = silence.saturating_sub(sent_at.elapsed());
        let reply = {
            let reply = pin!(call.receive_response());
            tokio::select! {
                biased;
                reply = wait_while_alive(&engine, probe_interval, left, reply) => Some(reply),
                () = is_aborted => None,
            }
        };
        let attempt = call.attempt();
        let (event, params, mut unread) = match reply {
            None => return self.abort_and_read(call, context),
            Some(Ok(result)) => {
                if matches!(result, PrefillResult::NoLease | PrefillResult::Leased(..)) {
                    engine.responded(Leg::Prefill, sent_at.elapsed());
                    engine.completed(Leg::Prefill);
                }
                let event = result.exchange_event(attempt);
                let params =
                    if let PrefillResult::Leased(handoff, ..) = result { Some(handoff.params) } else { None };
                (event, params, None)
            }
            Some(Err(_unresponsive)) => (Event::PrefillFailed(attempt, Failure::Unknown), None, Some(call)),
        };
        let is_unknown = matches!(event, Event::PrefillFailed(_, Failure::Unknown));
        let now = self.clock.now();
        let step = context.exchange.lock().unwrap_or_else(PoisonError::into_inner).apply(event, now);
        if step.settlements.is_empty() && is_unknown && aborted.try_recv().is_ok() {
            // The driver's abort came after the failure, and has found no call.
            self.abort(Arc::clone(&engine), Leg::Prefill, context.clone());
        }
        for settlement in step.settlements {
            let (engine, context) = (Arc::clone(&engine), context.clone());
            match (settlement, unread.take()) {
                (Settlement::AbortPrefill(_), Some(call)) => self.abort_and_read(call, context),
                (Settlement::AbortPrefill(_), None) => self.abort(engine, Leg::Prefill, context),
                (Settlement::ReleasePrefill(lease, cause), _) => {
                    let params = params.clone();
                    self.release(engine, LeaseRelease { lease, params, cause }, context);
                }
                (Settlement::AbortDecode(_), _) => {
                    unreachable!("the response has begun, so the prefill no longer ends the decode leg")
                }
            }
        }
    }
}
