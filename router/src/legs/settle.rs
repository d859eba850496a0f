//! Settles requests: bounded workers send aborts and releases with a bounded number of attempts.
//!
//! ```text
//! abort to P, and P's reply ──▶ see `abandoned_prefill.rs`
//!
//! release to P ─▶ POST /kv/release, or the abort by request id if P returned no handle
//!    └ P lacks the verb ──▶ a decode request that must be refused (`refused_decode.rs`), or the lease's expiry
//! abort to D ───▶ POST /abort_requests; its connection is already closed
//! ```
//!
//! An engine's `release` setting selects the method of a release. Both verbs are idempotent, so every failed attempt is
//! repeated. An engine that lacks a verb (404, 405, 501) does not receive it for a minute, or until another process
//! answers at its address (`engines/http/verbs.rs`). A lease with a handle is always released by the verb first: its
//! engine has just shown that it is no stock engine. A process that once had the verb counts as lacking it only if
//! every attempt reports so.
//!
//! At most `limits.settlements` settlements run at once. Further ones wait in a queue, releases before aborts. The
//! queue has two places per request in flight: if all clients disconnect at once, each request needs one abort and one
//! release at most. A settlement beyond the limit is counted, and its lease ends by expiry. The drain at shutdown
//! includes the queue.

mod abandoned_prefill;
mod pending_prefill;
mod refused_decode;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use baton_connector::RequestId;
use baton_connector::exchange::{Exchange, PrefillLease, SettlementCause};
use hyper::StatusCode;
use hyper::header::HeaderValue;
use tokio_util::task::TaskTracker;

use super::clock::Clock;
use crate::config::ReleaseMode;
use crate::engines::http::{Engine, EngineRequest, Support};
use crate::engines::protocol::{Command, PushIdentity, Verb};
use crate::legs::prefill::PrefillCall;
use crate::message::turn::EndedTurn;
use crate::metrics::log_limiter::LogLimiter;
use crate::metrics::log_span::request_span;
use crate::metrics::{Leg, Metrics, ReleaseMethod, SettlementResult};
use crate::routing::models::Model;
pub(crate) use pending_prefill::PendingPrefill;
use refused_decode::RefusedDecode;

/// First pause between two attempts, doubled up to the longest. A lease expires after about half a minute; longer
/// pauses would only occupy a worker.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Limit on the engine's answer to a settlement.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// The limits of settlements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SettlementTerms {
    pub at_once: usize,
    /// Limit on the queue.
    pub waiting: usize,
    pub tries: u16,
    pub try_timeout: Duration,
    /// Longest wait for a due reply before the half-close, at engines without the abort verb.
    pub abandon_wait: Duration,
}

/// Settles requests in the background.
pub(crate) struct Settler {
    terms: ArcSwap<SettlementTerms>,
    backlog: Mutex<SettlementQueue>,
    /// Number of pending replies of abandoned prefills. Each has a connection; the limit is that of settlements at
    /// once.
    active_readers: AtomicUsize,
    /// Number of cancelled prefills that are awaited for their write.
    pending_writes: AtomicUsize,
    readers: TaskTracker,
    tasks: TaskTracker,
    runtime: tokio::runtime::Handle,
    metrics: Arc<Metrics>,
    clock: Clock,
    refusal_log: LogLimiter,
    late_response_log: LogLimiter,
}

/// The data that every settlement of one request needs.
#[derive(Clone)]
pub(crate) struct SettlementContext {
    pub request: RequestId,
    pub exchange: Arc<Mutex<Exchange>>,
    /// The model whose decode engines may receive a request to refuse; set once the model is known.
    pub model: Option<Arc<Model>>,
    /// The client's credentials, which engines may require.
    pub authorization: Option<HeaderValue>,
    /// A decode engine may hold blocks that only the prefill engine's write frees: the prefill runs to its end, and no
    /// release precedes its write.
    pub ends_by_write: Arc<AtomicBool>,
    /// The engines know the legs by `request`.
    pub is_named: bool,
}

impl SettlementContext {
    /// See the field.
    pub(crate) fn ends_by_write(&self) -> bool {
        self.ends_by_write.load(Ordering::Relaxed)
    }

    /// The next legs have another id. Settlements of the ones before keep theirs.
    pub(crate) fn rename(&mut self, request: RequestId) {
        self.request = request;
        self.ends_by_write = Arc::default();
        self.is_named = true;
    }
}

/// A lease to release, with its engine's handoff parameters if they were readable.
pub(crate) struct LeaseRelease {
    pub lease: PrefillLease,
    pub params: Option<Arc<str>>,
    pub cause: SettlementCause,
}

/// Blocks that a decode engine keeps for a next turn that does not come.
pub(crate) struct TurnRelease {
    pub model: Arc<Model>,
    /// The transfer parameters of the decode engine.
    pub params: String,
    /// The request whose response the turn ended with.
    pub request: RequestId,
    pub authorization: Option<HeaderValue>,
}

/// One pending settlement.
enum SettlementJob {
    /// An abandoned prefill that its engine may have received.
    AbandonedPrefill(PrefillCall, SettlementContext),
    Release(Arc<Engine>, LeaseRelease, SettlementContext),
    Abort(Arc<Engine>, Leg, SettlementContext),
    Turn(TurnRelease),
}

impl SettlementJob {
    fn request(&self) -> &RequestId {
        match self {
            Self::AbandonedPrefill(_, context)
            | Self::Release(_, _, context)
            | Self::Abort(_, _, context) => &context.request,
            Self::Turn(release) => &release.request,
        }
    }
}

/// Pending settlements. While some of them wait, the maximum number of workers runs.
#[derive(Default)]
struct SettlementQueue {
    working: usize,
    /// Releases have priority: each one frees a lease, and an unresponsive engine's aborts must not delay them.
    releases: VecDeque<SettlementJob>,
    aborts: VecDeque<SettlementJob>,
}

impl SettlementQueue {
    fn waiting(&self) -> usize {
        self.releases.len() + self.aborts.len()
    }

    fn push(&mut self, job: SettlementJob) {
        match job {
            SettlementJob::Release(..) | SettlementJob::Turn(_) => self.releases.push_back(job),
            SettlementJob::AbandonedPrefill(..) | SettlementJob::Abort(..) => self.aborts.push_back(job),
        }
    }

    fn pop(&mut self) -> Option<SettlementJob> {
        self.releases.pop_front().or_else(|| self.aborts.pop_front())
    }
}

/// A worker that settles one job after the other.
struct SettlementWorker {
    settler: Arc<Settler>,
    /// Nothing is left to do.
    is_over: bool,
}

impl SettlementWorker {
    async fn work(mut self, first: SettlementJob) {
        let mut job = Some(first);
        while let Some(current) = job {
            self.settler.settle(current).await;
            job = self.settler.next_job();
        }
        self.is_over = true;
    }
}

impl Drop for SettlementWorker {
    fn drop(&mut self) {
        if !self.is_over {
            self.settler.backlog().working -= 1;
            // Otherwise the runtime shuts down, and all other workers with it.
            if std::thread::panicking() {
                self.settler.metrics.legs.count_settlement(SettlementResult::Failed);
                self.settler.start_workers();
            }
        }
        self.settler.metrics.legs.settling.decrement(1.0);
    }
}

impl Settler {
    /// Must be called on the runtime that will run the settlements.
    pub(crate) fn new(terms: SettlementTerms, metrics: Arc<Metrics>, clock: Clock) -> Arc<Self> {
        metrics.legs.abandon_wait_bound.set(terms.abandon_wait.as_secs_f64());
        Arc::new(Self {
            terms: ArcSwap::from_pointee(terms),
            backlog: Mutex::default(),
            active_readers: AtomicUsize::new(0),
            pending_writes: AtomicUsize::new(0),
            readers: TaskTracker::new(),
            tasks: TaskTracker::new(),
            runtime: tokio::runtime::Handle::current(),
            metrics,
            clock,
            refusal_log: LogLimiter::new(),
            late_response_log: LogLimiter::new(),
        })
    }

    /// Replaces the limits for new settlements.
    pub(crate) fn set_terms(self: &Arc<Self>, terms: SettlementTerms) {
        self.metrics.legs.abandon_wait_bound.set(terms.abandon_wait.as_secs_f64());
        self.terms.store(Arc::new(terms));
        self.start_workers();
    }

    /// Releases a lease.
    pub(crate) fn release(
        self: &Arc<Self>,
        engine: Arc<Engine>,
        release: LeaseRelease,
        context: SettlementContext,
    ) {
        if context.ends_by_write() {
            self.metrics.legs.count_release(release.cause, ReleaseMethod::Lease);
            return;
        }
        self.enqueue(SettlementJob::Release(engine, release, context));
    }

    /// Releases the blocks of a turn.
    pub(crate) fn release_turn(self: &Arc<Self>, release: TurnRelease) {
        self.enqueue(SettlementJob::Turn(release));
    }

    /// Aborts one leg by request id.
    pub(crate) fn abort(self: &Arc<Self>, engine: Arc<Engine>, leg: Leg, context: SettlementContext) {
        self.metrics.count_abort(leg);
        self.enqueue(SettlementJob::Abort(engine, leg, context));
    }

    /// Waits until all settlements are done or the time is up. Replies of abandoned prefills are awaited for one
    /// attempt's timeout at most; leases that arrive until then are released. `false`: leases may be left.
    pub(crate) async fn drained(&self, within: Duration) -> bool {
        let trackers = [&self.tasks, &self.readers];
        trackers.iter().for_each(|tracker| _ = tracker.close());
        let all = async {
            self.tasks.wait().await;
            // The remaining readers end with the runtime.
            let read = tokio::time::timeout(self.terms.load().try_timeout, self.readers.wait()).await;
            self.tasks.wait().await;
            read.is_ok()
        };
        let drained = tokio::time::timeout(within, all).await.unwrap_or(false);
        trackers.iter().for_each(|tracker| _ = tracker.reopen());
        drained
    }

    /// The longest duration of one settlement.
    pub(crate) fn max_duration(&self) -> Duration {
        let SettlementTerms { tries, try_timeout, .. } = **self.terms.load();
        (try_timeout * (u32::from(tries) + 1) + retry_pauses().take(usize::from(tries)).sum::<Duration>()) * 3
    }

    /// Settles a job at once or queues it.
    fn enqueue(self: &Arc<Self>, job: SettlementJob) {
        let SettlementTerms { at_once, waiting, .. } = **self.terms.load();
        let mut backlog = self.backlog();
        if backlog.working >= at_once && backlog.waiting() >= waiting {
            drop(backlog);
            self.metrics.legs.count_settlement(SettlementResult::Refused);
            if let Some(held_back) = self.refusal_log.allow() {
                tracing::warn!(
                    parent: request_span!(job.request()), event = "settlement_refused", held_back,
                    "too many pending settlements, lease ends by expiry"
                );
            }
            return;
        }
        backlog.push(job);
        drop(backlog);
        self.start_workers();
    }

    /// Starts workers for queued jobs, up to the limit.
    fn start_workers(self: &Arc<Self>) {
        let at_once = self.terms.load().at_once;
        loop {
            let mut backlog = self.backlog();
            let job = if backlog.working < at_once { backlog.pop() } else { None };
            self.metrics.legs.settlements_waiting.set(backlog.waiting() as f64);
            let Some(job) = job else { return };
            backlog.working += 1;
            drop(backlog);
            self.metrics.legs.settling.increment(1.0);
            let worker = SettlementWorker { settler: Arc::clone(self), is_over: false };
            self.tasks.spawn_on(worker.work(job), &self.runtime);
        }
    }

    /// The worker's next job; `None` ends the worker, because the queue is empty or too many workers run.
    fn next_job(&self) -> Option<SettlementJob> {
        let mut backlog = self.backlog();
        let may_stay = backlog.working <= self.terms.load().at_once;
        let job = if may_stay { backlog.pop() } else { None };
        match &job {
            Some(_) => self.metrics.legs.settlements_waiting.set(backlog.waiting() as f64),
            None => backlog.working -= 1,
        }
        job
    }

    fn backlog(&self) -> MutexGuard<'_, SettlementQueue> {
        self.backlog.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn settle(self: &Arc<Self>, job: SettlementJob) {
        match job {
            SettlementJob::AbandonedPrefill(call, context) => {
                self.settle_abandoned_prefill(call, context).await
            }
            SettlementJob::Release(engine, release, context) => {
                self.release_lease(&engine, release, &context).await
            }
            SettlementJob::Turn(release) => {
                let result = self.release_kept_turn(&release).await;
                self.metrics.legs.count_settlement(result);
            }
            SettlementJob::Abort(engine, leg, context) => {
                let result = self.abort_leg(&engine, &context, leg).await;
                self.metrics.legs.count_settlement(result);
            }
        }
    }

    /// A prefill engine refuses to read the blocks, and their owner frees them.
    async fn release_kept_turn(&self, release: &TurnRelease) -> SettlementResult {
        let Some(params) = EndedTurn::release_params(&release.params) else {
            return SettlementResult::Failed;
        };
        let refusable = RefusedDecode {
            model: &release.model,
            pool: &release.model.prefill,
            params: &params,
            authorization: release.authorization.as_ref(),
            request: &release.request,
        };
        let SettlementTerms { tries, try_timeout, .. } = **self.terms.load();
        match refusable.send(tries, try_timeout).await {
            true => SettlementResult::Confirmed,
            false => SettlementResult::Failed,
        }
    }

    async fn release_lease(&self, engine: &Arc<Engine>, release: LeaseRelease, context: &SettlementContext) {
        let LeaseRelease { lease, params, cause } = release;
        let (via, result) = self.try_release(engine, lease, cause, params.as_deref(), context).await;
        self.metrics.legs.count_release(cause, via);
        tracing::debug!(
            parent: request_span!(&context.request), event = "lease_released",
            engine = engine.authority(), cause = cause.label(), ?via, ?result, "lease released"
        );
        self.metrics.legs.count_settlement(result);
    }

    /// Uses the first method that the engine supports and its configuration allows.
    async fn try_release(
        &self,
        engine: &Arc<Engine>,
        lease: PrefillLease,
        cause: SettlementCause,
        params: Option<&str>,
        context: &SettlementContext,
    ) -> (ReleaseMethod, SettlementResult) {
        let mode = engine.release_mode();
        if matches!(mode, ReleaseMode::Auto | ReleaseMode::Verb) {
            let (via, result) = match lease.handle {
                Some(handle) => {
                    let command = engine.protocol().release(handle, cause);
                    let command = command.map(|command| request_of(command, &context.request));
                    let result = match command {
                        Some(message) => self.send_with_retries(engine, Verb::Release, &message).await,
                        None => SettlementResult::Unsupported,
                    };
                    (ReleaseMethod::Release, result)
                }
                // An engine maps a request id to the lease opened for that request.
                None => (ReleaseMethod::Abort, self.send_abort(engine, context, Leg::Prefill).await),
            };
            if result != SettlementResult::Unsupported {
                return (via, result);
            }
        }
        // A decode engine of the push connector notifies no producer.
        if matches!(mode, ReleaseMode::Auto | ReleaseMode::RefusedDecode)
            && let (Some(model), Some(params)) = (context.model.as_deref(), params)
            && PushIdentity::read(params).is_none()
        {
            let authorization = context.authorization.as_ref();
            let pool = &model.decode;
            let refusable = RefusedDecode { model, pool, params, authorization, request: &context.request };
            let SettlementTerms { tries, try_timeout, .. } = **self.terms.load();
            let refused = refusable.send(tries, try_timeout).await;
            return (
                ReleaseMethod::RefusedDecode,
                if refused { SettlementResult::Confirmed } else { SettlementResult::Failed },
            );
        }
        (ReleaseMethod::Lease, SettlementResult::Unsupported)
    }

    async fn abort_leg(
        &self,
        engine: &Arc<Engine>,
        context: &SettlementContext,
        leg: Leg,
    ) -> SettlementResult {
        let begun = Instant::now();
        let result = self.send_abort(engine, context, leg).await;
        if result == SettlementResult::Confirmed {
            self.metrics.record_abort_propagation(leg, begun.elapsed());
            for pause in engine.protocol().abort_repeats() {
                tokio::time::sleep(*pause).await;
                self.send_abort(engine, context, leg).await;
            }
        }
        result
    }

    /// Aborts by request id, if the engine may have the verb.
    async fn send_abort(
        &self,
        engine: &Arc<Engine>,
        context: &SettlementContext,
        leg: Leg,
    ) -> SettlementResult {
        if !may_support_abort(engine, context) {
            return SettlementResult::Unsupported;
        }
        let message = request_of(engine.protocol().abort(&context.request, leg), &context.request);
        self.send_with_retries(engine, Verb::Abort, &message).await
    }

    async fn send_with_retries(
        &self,
        engine: &Arc<Engine>,
        verb: Verb,
        message: &EngineRequest,
    ) -> SettlementResult {
        let SettlementTerms { tries, try_timeout, .. } = **self.terms.load();
        let mut missing = 0;
        for (left, pause) in (0..tries).rev().zip(retry_pauses()) {
            let call = async { engine.call_control(message).await?.read_whole(ANSWER_BYTES_MAX).await };
            match tokio::time::timeout(try_timeout, call).await {
                Ok(Ok(answer))
                    if answer.status.is_success() && engine.protocol().confirms(verb, &answer.body) =>
                {
                    engine.verbs().learn(verb, Support::Present, Instant::now());
                    return SettlementResult::Confirmed;
                }
                // If the engine had the verb, this may be a proxy's answer or a temporary one.
                Ok(Ok(answer)) if is_missing(answer.status) || answer.status.is_success() => {
                    missing += 1;
                    if missing == tries || supports(engine, verb) != Some(true) {
                        engine.verbs().learn(verb, Support::Missing, Instant::now());
                        return SettlementResult::Unsupported;
                    }
                    log_failed_try(engine, message, left, &format!("status {}", answer.status));
                }
                Ok(Ok(answer)) => log_failed_try(engine, message, left, &format!("status {}", answer.status)),
                Ok(Err(error)) => log_failed_try(engine, message, left, &error.to_string()),
                Err(_elapsed) => log_failed_try(engine, message, left, "no answer in time"),
            }
            if left > 0 {
                tokio::time::sleep(pause).await;
            }
        }
        SettlementResult::Failed
    }
}

/// Logs, rate-limited, a failed attempt.
fn log_failed_try(engine: &Engine, message: &EngineRequest, left: u16, error: &str) {
    if let Some(held_back) = engine.log_limiters.settlement_attempt_failed.allow() {
        let (engine, path) = (engine.authority(), &*message.path);
        tracing::warn!(
            parent: request_span!(&message.id), event = "settlement_attempt_failed",
            engine, path, error, left, held_back, "abort or release failed"
        );
    }
}

/// The pauses between attempts.
fn retry_pauses() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(PAUSE), |pause| Some((*pause * 2).min(PAUSE_MAX)))
}

/// Whether an engine may abort a leg of the request by its id.
fn may_support_abort(engine: &Engine, context: &SettlementContext) -> bool {
    context.is_named && may_support(engine, Verb::Abort)
}

/// Whether an engine may have a verb, according to its configuration and its earlier answers.
fn may_support(engine: &Engine, verb: Verb) -> bool {
    let stock = matches!(engine.release_mode(), ReleaseMode::RefusedDecode | ReleaseMode::Lease);
    !stock && supports(engine, verb) != Some(false)
}

fn supports(engine: &Engine, verb: Verb) -> Option<bool> {
    engine.verbs().has(verb, Instant::now())
}

fn is_missing(status: StatusCode) -> bool {
    matches!(status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED)
}

fn request_of(command: Command, request: &RequestId) -> EngineRequest {
    EngineRequest { id: Some(request.clone()), ..EngineRequest::post(command.path, command.body) }
}

#[cfg(test)]
mod tests;
