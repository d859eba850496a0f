//! Settles abandoned prefills: ends the computation, and releases the lease of a reply that still arrives.
//!
//! ```text
//! P has the abort verb ──▶ POST /abort_requests ─ confirmed ──▶ read P's connection for a bounded time ─▶ release
//!    │                                          └ failed ─▶ half-close it first               late handles
//!    └ P lacks it
//!        ├ P has the release verb ──▶ POST /kv/release with the request id, then half-close
//!        ├ P's reply is due ──▶ wait for it, at most `timeouts.abandon_wait_ms`; then half-close
//!        └ else ──▶ half-close at once: this aborts, and a reply that P has written still arrives
//! ```
//!
//! A stock engine's HTTP server drops a finished reply if it sees the half-close before it has written the reply. The
//! reply is the only copy of the handle, and without it the blocks stay pinned for the whole lease. So the router does
//! not half-close in the milliseconds in which the reply is due (`engines/prefill_times.rs`).
//!
//! A prefill without a confirmed abort may run to its end. Its reply is therefore read for as long as a prefill may
//! take. Such a reader occupies no settlement worker, and delays a shutdown by one attempt's timeout at most.

use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::exchange::{Attempt, Settlement, SettlementCause};

use super::{
    LeaseRelease, SettlementContext, SettlementJob, Settler, may_support, may_support_abort, request_of,
    supports,
};
use crate::config::ReleaseMode;
use crate::engines::http::Engine;
use crate::engines::protocol::Verb;
use crate::legs::liveness::wait_while_alive;
use crate::legs::prefill::{PrefillCall, PrefillResult};
use crate::metrics::log_span::request_span;
use crate::metrics::{AbandonWaitResult, Leg, ReleaseMethod, SettlementResult};

/// One of the [`Settler::active_readers`].
struct ReaderGuard(Arc<Settler>);

impl Drop for ReaderGuard {
    fn drop(&mut self) {
        self.0.active_readers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One of the [`Settler::pending_writes`].
struct WriteGuard(Arc<Settler>);

impl Drop for WriteGuard {
    fn drop(&mut self) {
        self.0.pending_writes.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Most cancelled prefills that are awaited for their write, each with a connection of an engine.
const WRITES_MAX: usize = 16_384;
/// Pause between the probes of an engine that is awaited for its write.
const WRITE_PROBE: Duration = Duration::from_secs(5);
/// Longest wait for a write. No client waits for an hour in an engine's queue.
const WRITE_WAIT_MAX: Duration = Duration::from_secs(3600);

impl Settler {
    /// Aborts a prefill and keeps reading its connection, so that a late handle is released: the reply in transit is
    /// its only copy.
    pub(crate) fn abort_and_read(self: &Arc<Self>, call: PrefillCall, context: SettlementContext) {
        if !call.was_sent() {
            return;
        }
        call.disable_replay();
        if context.ends_by_write() {
            self.await_write(call, context);
            return;
        }
        self.metrics.count_abort(Leg::Prefill);
        let engine = call.engine();
        let has_verb = may_support_abort(engine, &context) || has_release_verb(engine);
        if !has_verb && self.reply_wait(&call).is_none() {
            // The half-close is the only abort for this engine, so it is sent at once.
            call.half_close();
        }
        self.enqueue(SettlementJob::AbandonedPrefill(call, context));
    }

    pub(super) async fn settle_abandoned_prefill(
        self: &Arc<Self>,
        mut call: PrefillCall,
        context: SettlementContext,
    ) {
        let engine = Arc::clone(call.engine());
        let abort = self.abort_prefill(&engine, &context);
        // If the reply arrives first, the abort continues, because the engine may receive no other command.
        let (mut result, mut reply, mut late) = (None, None, false);
        let mut waiting_since: Option<Instant> = None;
        let deadline = tokio::time::sleep(self.terms.load().try_timeout);
        let bound = tokio::time::sleep(Duration::ZERO);
        tokio::pin!(abort, deadline, bound);
        while reply.is_none() && (waiting_since.is_some() || !late || result.is_none()) {
            tokio::select! {
                biased;
                prefilled = call.receive_response() => reply = Some(prefilled),
                (done, verb) = &mut abort, if result.is_none() => {
                    let has_verb = done != SettlementResult::Unsupported;
                    if let Some(wait) = self.reply_wait(&call).filter(|_| !has_verb) {
                        waiting_since = Some(Instant::now());
                        bound.as_mut().reset(tokio::time::Instant::now() + wait);
                    } else if done != SettlementResult::Confirmed || verb == Verb::Release {
                        // A release ends no computation.
                        call.half_close();
                    }
                    result = Some(done);
                }
                () = &mut bound, if waiting_since.is_some() => {
                    call.half_close();
                    self.end_wait(waiting_since.take(), AbandonWaitResult::Timeout);
                }
                // After this time the half-close aborts as well.
                () = &mut deadline, if !late => {
                    late = true;
                    if waiting_since.is_none() {
                        call.half_close();
                    }
                }
            }
        }
        self.end_wait(waiting_since, AbandonWaitResult::Reply);
        let unanswered = match reply {
            Some(prefilled) => {
                let attempt = call.attempt();
                drop(call);
                self.release_reply(&engine, attempt, prefilled, &context).await;
                None
            }
            None => Some(call),
        };
        let result = match result {
            Some(result) => result,
            None => abort.await.0,
        };
        let is_read = unanswered.filter(|_| result != SettlementResult::Confirmed).is_none_or(|call| {
            call.half_close();
            self.read_late_reply(call, context.clone())
        });
        self.metrics.legs.count_settlement(if is_read { result } else { SettlementResult::Refused });
    }

    /// Ends a prefill by its request id. An engine that has only the release verb opens no lease for the id after it.
    /// Returns the result, and the verb that had it.
    async fn abort_prefill(
        &self,
        engine: &Arc<Engine>,
        context: &SettlementContext,
    ) -> (SettlementResult, Verb) {
        let aborted = self.abort_leg(engine, context, Leg::Prefill).await;
        if aborted != SettlementResult::Unsupported || !has_release_verb(engine) {
            return (aborted, Verb::Abort);
        }
        let Some(command) = engine.protocol().release_by_request(&context.request, SettlementCause::Late)
        else {
            return (aborted, Verb::Abort);
        };
        let message = request_of(command, &context.request);
        (self.send_with_retries(engine, Verb::Release, &message).await, Verb::Release)
    }

    /// The longest wait for a reply before the half-close. `None` if the reply is not due, or if its lease could not
    /// be released.
    fn reply_wait(&self, call: &PrefillCall) -> Option<Duration> {
        let bound = self.terms.load().abandon_wait;
        let is_released =
            matches!(call.engine().release_mode(), ReleaseMode::Auto | ReleaseMode::RefusedDecode);
        (is_released && !call.is_half_closed() && call.is_reply_due(bound)).then_some(bound)
    }

    fn end_wait(&self, since: Option<Instant>, result: AbandonWaitResult) {
        if let Some(since) = since {
            self.metrics.legs.record_abandon_wait(result, since.elapsed());
        }
    }

    /// Keeps the connection of a prefill whose write frees the decode engine's blocks, until the engine answers or no
    /// longer responds. An engine that only has other work may take as long as it needs.
    fn await_write(self: &Arc<Self>, mut call: PrefillCall, context: SettlementContext) {
        let waiting = WriteGuard(Arc::clone(self));
        if self.pending_writes.fetch_add(1, Ordering::Relaxed) >= WRITES_MAX {
            self.report_lost_write(&context);
            return;
        }
        let settler = Arc::clone(self);
        let wait = async move {
            let engine = Arc::clone(call.engine());
            let reply = {
                let reply = pin!(call.receive_response());
                wait_while_alive(&engine, WRITE_PROBE, WRITE_WAIT_MAX, reply).await
            };
            let attempt = call.attempt();
            drop(call);
            drop(waiting);
            match reply {
                Ok(prefilled) => {
                    if !matches!(prefilled, PrefillResult::Leased(..)) {
                        settler.report_lost_write(&context);
                    }
                    settler.release_reply(&engine, attempt, prefilled, &context).await;
                }
                Err(_) => settler.report_lost_write(&context),
            }
        };
        self.readers.spawn_on(wait, &self.runtime);
    }

    /// The decode engine may keep its blocks until it restarts.
    fn report_lost_write(&self, context: &SettlementContext) {
        self.metrics.legs.count_settlement(SettlementResult::Failed);
        if let Some(held_back) = self.late_response_log.allow() {
            tracing::warn!(
                parent: request_span!(&context.request), event = "write_lost", held_back,
                "no write follows the prefill of a cancelled request, decode engine may keep its blocks"
            );
        }
    }

    /// Reads the reply of a prefill that its engine may still compute. `false` if too many readers run.
    fn read_late_reply(self: &Arc<Self>, mut call: PrefillCall, context: SettlementContext) -> bool {
        let Some(model) = context.model.clone() else { return true };
        let reading = ReaderGuard(Arc::clone(self));
        if self.active_readers.fetch_add(1, Ordering::Relaxed) >= self.terms.load().at_once {
            if let Some(held_back) = self.late_response_log.allow() {
                tracing::warn!(
                    parent: request_span!(&context.request), event = "late_response_not_read", held_back,
                    "too many pending responses, lease ends by expiry"
                );
            }
            return false;
        }
        let settler = Arc::clone(self);
        let rest = async move {
            let engine = Arc::clone(call.engine());
            let reply = tokio::time::timeout(model.bounds.prefill_silence, call.receive_response()).await;
            let attempt = call.attempt();
            drop(call);
            if let Ok(prefilled) = reply {
                let settling = Arc::clone(&settler);
                let settle = async move {
                    // The reader's slot is held until the reply's lease is released.
                    let _reading = reading;
                    settling.release_reply(&engine, attempt, prefilled, &context).await;
                };
                settler.tasks.spawn_on(settle, &settler.runtime);
            }
        };
        self.readers.spawn_on(rest, &self.runtime);
        true
    }

    /// Releases the lease of an abandoned prefill's reply.
    async fn release_reply(
        self: &Arc<Self>,
        engine: &Arc<Engine>,
        attempt: Attempt,
        prefilled: PrefillResult,
        context: &SettlementContext,
    ) {
        let event = prefilled.exchange_event(attempt);
        let params = match prefilled {
            PrefillResult::Leased(handoff, ..) => Some(handoff.params),
            PrefillResult::NoLease | PrefillResult::Refused(_) | PrefillResult::Failed(..) => None,
        };
        let now = self.clock.now();
        let step = context.exchange.lock().unwrap_or_else(PoisonError::into_inner).apply(event, now);
        for settlement in step.settlements {
            match settlement {
                Settlement::ReleasePrefill(lease, cause) => {
                    let params = params.clone();
                    if context.ends_by_write() {
                        self.metrics.legs.count_release(cause, ReleaseMethod::Lease);
                        continue;
                    }
                    self.release_lease(engine, LeaseRelease { lease, params, cause }, context).await;
                }
                Settlement::AbortPrefill(_) | Settlement::AbortDecode(_) => {
                    unreachable!("a late reply brings nothing but a handle")
                }
            }
        }
    }
}

/// Whether the engine is known to have the release verb, and its configuration allows it.
fn has_release_verb(engine: &Engine) -> bool {
    may_support(engine, Verb::Release) && supports(engine, Verb::Release) == Some(true)
}
