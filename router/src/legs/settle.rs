//! Paying what is owed: aborts and releases, by bounded workers with bounded tries.
//!
//! ```text
//! abort to P ──▶ POST /abort_requests ─ confirmed ──▶ read P's connection on for a bounded time ─▶ release
//!    │                                └ unsupported, failed ─▶ half-close it first            late handles
//!    └ P is known not to have the verb ──▶ half-close it at once: that aborts, and a reply that crosses it arrives
//!
//! A prefill whose abort is not confirmed may run to its end, so its reply is read for as long as a prefill may take: the
//! reply is the only copy of the handle, and without it the blocks stay pinned for the whole lease. Such a reader holds
//! no settlement's place, and a shutdown for one try's time at most.
//!
//! release to P ─▶ POST /kv/release, or the abort by request id where P gave no handle
//!    └ P does not have the verb ──▶ a decode request that must be refused (`refused_decode.rs`), or the lease's end
//! abort to D ───▶ POST /abort_requests; its connection is cut already
//! ```
//!
//! Which of the ways of a release is taken is `release` in an engine's configuration. Both verbs are idempotent,
//! so every failed try is repeated. An engine without a verb (404, 405, 501) is remembered and not asked again
//! for a minute, or until its address could not be reached once (`engines/http/verbs.rs`). An engine that had the verb is
//! believed to lack it only if every try says so.
//!
//! So many settlements are carried out at once (`limits.settlements`). Further ones wait, releases before aborts, in a queue with two
//! places for each request that may be in flight: when all of their clients leave at once, each owes an abort and a
//! release at most. One beyond that is counted and left to the lease's expiry. The drain at shutdown waits for the queue
//! too.

mod refused_decode;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use baton_connector::exchange::{Attempt, Cause, Exchange, Lent, Settlement};
use baton_connector::{Handle, RequestId};
use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::HeaderValue;
use serde_json::json;
use tokio_util::task::TaskTracker;

use super::clock::Clock;
use crate::config::ReleaseMode;
use crate::engines::http::{Engine, Outgoing, Verb};
use crate::legs::prefill::{PrefillCall, Prefilled};
use crate::metrics::log_limiter::Seldom;
use crate::metrics::{Leg, Metrics, Settled, Via};
use crate::routing::models::Model;
use refused_decode::Refusable;

/// First pause between two tries; doubled each time, up to the longest. A lease ends by itself after half a minute or so:
/// longer pauses would only hold a settlement's place.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// An engine's answer to a settlement is not read beyond this.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// The bounds of settlements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SettleTerms {
    pub at_once: usize,
    /// Further ones that wait.
    pub waiting: usize,
    pub tries: u16,
    pub try_timeout: Duration,
}

/// Pays debts in the background.
pub(crate) struct Settler {
    terms: ArcSwap<SettleTerms>,
    backlog: Mutex<Backlog>,
    /// Replies of abandoned prefills that are still awaited. Each has a connection; as many as settlements at once.
    reading: AtomicUsize,
    readers: TaskTracker,
    tasks: TaskTracker,
    runtime: tokio::runtime::Handle,
    metrics: Arc<Metrics>,
    clock: Clock,
    /// Settlements beyond the bound.
    refused: Seldom,
}

/// Whose debts: what every settlement of one request needs.
#[derive(Clone)]
pub(crate) struct Debtor {
    pub request: RequestId,
    pub exchange: Arc<Mutex<Exchange>>,
    /// Whose decode engines may be asked to refuse; set once the model is known.
    pub model: Option<Arc<Model>>,
    /// The client's credentials, which engines may ask for.
    pub authorization: Option<HeaderValue>,
}

/// A lease that goes back: its name, and what its engine said of it, where that could be read.
pub(crate) struct Returned {
    pub lent: Lent,
    pub params: Option<Arc<str>>,
    pub cause: Cause,
}

/// What is owed.
enum Debt {
    /// A prefill that was given up while its engine had it.
    Abandoned(PrefillCall, Debtor),
    Release(Arc<Engine>, Returned, Debtor),
    Abort(Arc<Engine>, Leg, Debtor),
}

/// Settlements that are not over. As long as some wait, as many as may work at once do.
#[derive(Default)]
struct Backlog {
    working: usize,
    /// They go first: a lease waits for each, and an engine that answers nothing must not hold up another's.
    releases: VecDeque<Debt>,
    aborts: VecDeque<Debt>,
}

impl Backlog {
    fn waiting(&self) -> usize {
        self.releases.len() + self.aborts.len()
    }

    fn push(&mut self, debt: Debt) {
        match debt {
            Debt::Release(..) => self.releases.push_back(debt),
            Debt::Abandoned(..) | Debt::Abort(..) => self.aborts.push_back(debt),
        }
    }

    fn pop(&mut self) -> Option<Debt> {
        self.releases.pop_front().or_else(|| self.aborts.pop_front())
    }
}

/// One who pays debts, one after the other.
struct Worker {
    settler: Arc<Settler>,
    /// It has nothing left to do.
    is_over: bool,
}

impl Worker {
    async fn work(mut self, first: Debt) {
        let mut debt = Some(first);
        while let Some(due) = debt {
            self.settler.pay(due).await;
            debt = self.settler.next();
        }
        self.is_over = true;
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if !self.is_over {
            self.settler.backlog().working -= 1;
            // Otherwise the runtime ends, and every other worker with it.
            if std::thread::panicking() {
                self.settler.metrics.settled(Settled::Failed);
                self.settler.hire();
            }
        }
        self.settler.metrics.legs.settling.decrement(1.0);
    }
}

/// One reader among those of [`Settler::reading`].
struct Reading(Arc<Settler>);

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.reading.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Settler {
    /// Must be called on the runtime that will run the settlements.
    pub(crate) fn new(terms: SettleTerms, metrics: Arc<Metrics>, clock: Clock) -> Arc<Self> {
        Arc::new(Self {
            terms: ArcSwap::from_pointee(terms),
            backlog: Mutex::default(),
            reading: AtomicUsize::new(0),
            readers: TaskTracker::new(),
            tasks: TaskTracker::new(),
            runtime: tokio::runtime::Handle::current(),
            metrics,
            clock,
            refused: Seldom::new(),
        })
    }

    /// Replaces the bounds of the settlements that begin from now on.
    pub(crate) fn set_terms(self: &Arc<Self>, terms: SettleTerms) {
        self.terms.store(Arc::new(terms));
        self.hire();
    }

    /// Aborts a prefill by request id and reads its connection on, so that a handle that still arrives is
    /// released: the reply on the wire is its only copy.
    pub(crate) fn abandon(self: &Arc<Self>, call: PrefillCall, debtor: Debtor) {
        self.metrics.abort(Leg::Prefill);
        if !call.was_sent() {
            return;
        }
        call.abandon();
        if !may_have(call.engine(), Verb::Abort) {
            // The only way in which it can hear of it, so the sooner the better.
            call.half_close();
        }
        self.owe(Debt::Abandoned(call, debtor));
    }

    /// Gives a lease back.
    pub(crate) fn release(self: &Arc<Self>, engine: Arc<Engine>, returned: Returned, debtor: Debtor) {
        self.owe(Debt::Release(engine, returned, debtor));
    }

    /// Aborts one leg by request id.
    pub(crate) fn abort(self: &Arc<Self>, engine: Arc<Engine>, leg: Leg, debtor: Debtor) {
        self.metrics.abort(leg);
        self.owe(Debt::Abort(engine, leg, debtor));
    }

    /// Waits until everything is paid, or the time is up. Replies of abandoned prefills are awaited only for as long as one
    /// try may take; what they lend until then is released. `false`: some may still lend.
    pub(crate) async fn paid(&self, within: Duration) -> bool {
        let trackers = [&self.tasks, &self.readers];
        trackers.iter().for_each(|tracker| _ = tracker.close());
        let all = async {
            self.tasks.wait().await;
            // The rest of them ends with the runtime.
            let read = tokio::time::timeout(self.terms.load().try_timeout, self.readers.wait()).await;
            self.tasks.wait().await;
            read.is_ok()
        };
        let paid = tokio::time::timeout(within, all).await.unwrap_or(false);
        trackers.iter().for_each(|tracker| _ = tracker.reopen());
        paid
    }

    /// The longest that one settlement can take.
    pub(crate) fn longest(&self) -> Duration {
        let SettleTerms { tries, try_timeout, .. } = **self.terms.load();
        (try_timeout * (u32::from(tries) + 1) + pauses().take(usize::from(tries)).sum::<Duration>()) * 3
    }

    /// Has a debt paid: now, or in its turn.
    fn owe(self: &Arc<Self>, debt: Debt) {
        let SettleTerms { at_once, waiting, .. } = **self.terms.load();
        let mut backlog = self.backlog();
        if backlog.working >= at_once && backlog.waiting() >= waiting {
            drop(backlog);
            self.metrics.settled(Settled::Refused);
            if let Some(held_back) = self.refused.due() {
                tracing::warn!(held_back, "too many pending settlements, lease ends by expiry");
            }
            return;
        }
        backlog.push(debt);
        drop(backlog);
        self.hire();
    }

    /// Starts workers for what waits, as many as may work at once.
    fn hire(self: &Arc<Self>) {
        let at_once = self.terms.load().at_once;
        loop {
            let mut backlog = self.backlog();
            let debt = if backlog.working < at_once { backlog.pop() } else { None };
            self.metrics.legs.settlements_waiting.set(backlog.waiting() as f64);
            let Some(debt) = debt else { return };
            backlog.working += 1;
            drop(backlog);
            self.metrics.legs.settling.increment(1.0);
            let worker = Worker { settler: Arc::clone(self), is_over: false };
            self.tasks.spawn_on(worker.work(debt), &self.runtime);
        }
    }

    /// What a worker does next; with nothing to do, or too many at it, it goes.
    fn next(&self) -> Option<Debt> {
        let mut backlog = self.backlog();
        let may_stay = backlog.working <= self.terms.load().at_once;
        let debt = if may_stay { backlog.pop() } else { None };
        match &debt {
            Some(_) => self.metrics.legs.settlements_waiting.set(backlog.waiting() as f64),
            None => backlog.working -= 1,
        }
        debt
    }

    fn backlog(&self) -> MutexGuard<'_, Backlog> {
        self.backlog.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn pay(self: &Arc<Self>, debt: Debt) {
        match debt {
            Debt::Abandoned(call, debtor) => self.abandoned(call, debtor).await,
            Debt::Release(engine, returned, debtor) => self.released(&engine, returned, &debtor).await,
            Debt::Abort(engine, leg, debtor) => {
                let result = self.aborted(&engine, &debtor.request, leg).await;
                self.metrics.settled(result);
            }
        }
    }

    async fn abandoned(self: &Arc<Self>, mut call: PrefillCall, debtor: Debtor) {
        let engine = Arc::clone(call.engine());
        let abort = self.aborted(&engine, &debtor.request, Leg::Prefill);
        tokio::pin!(abort);
        // The reply may come first: then the abort is still finished, because it may be all that P hears.
        let (mut result, mut reply, mut late) = (None, None, false);
        let deadline = tokio::time::sleep(self.terms.load().try_timeout);
        tokio::pin!(deadline);
        while reply.is_none() && !(late && result.is_some()) {
            tokio::select! {
                biased;
                prefilled = call.prefilled() => reply = Some(prefilled),
                done = &mut abort, if result.is_none() => {
                    if done != Settled::Confirmed {
                        call.half_close();
                    }
                    result = Some(done);
                }
                // An abort that takes so long is not all that P hears.
                () = &mut deadline, if !late => {
                    late = true;
                    call.half_close();
                }
            }
        }
        let unanswered = match reply {
            Some(prefilled) => {
                let attempt = call.attempt();
                drop(call);
                self.replied(&engine, attempt, prefilled, &debtor).await;
                None
            }
            None => Some(call),
        };
        let result = match result {
            Some(result) => result,
            None => abort.await,
        };
        let is_read = unanswered
            .filter(|_| result != Settled::Confirmed)
            .is_none_or(|call| self.read_on(call, debtor.clone()));
        self.metrics.settled(if is_read { result } else { Settled::Refused });
    }

    /// Reads the reply of a prefill that its engine may not have given up. Whether there was room for that.
    fn read_on(self: &Arc<Self>, mut call: PrefillCall, debtor: Debtor) -> bool {
        let Some(model) = debtor.model.clone() else { return true };
        call.half_close();
        let reading = Reading(Arc::clone(self));
        if self.reading.fetch_add(1, Ordering::Relaxed) >= self.terms.load().at_once {
            if let Some(held_back) = self.refused.due() {
                tracing::warn!(held_back, "too many pending responses, lease ends by expiry");
            }
            return false;
        }
        let settler = Arc::clone(self);
        let rest = async move {
            let engine = Arc::clone(call.engine());
            let reply = tokio::time::timeout(model.bounds.prefill_silence, call.prefilled()).await;
            let attempt = call.attempt();
            drop(call);
            if let Ok(prefilled) = reply {
                let paying = Arc::clone(&settler);
                let pays = async move {
                    // It has its place among the readers until what it lends is given back.
                    let _reading = reading;
                    paying.replied(&engine, attempt, prefilled, &debtor).await;
                };
                settler.tasks.spawn_on(pays, &settler.runtime);
            }
        };
        self.readers.spawn_on(rest, &self.runtime);
        true
    }

    /// Releases what the reply of an abandoned prefill lends.
    async fn replied(
        self: &Arc<Self>,
        engine: &Arc<Engine>,
        attempt: Attempt,
        prefilled: Prefilled,
        debtor: &Debtor,
    ) {
        let event = prefilled.event(attempt);
        let params = match prefilled {
            Prefilled::Lent(params, ..) => Some(params),
            Prefilled::Empty | Prefilled::Refused(_) | Prefilled::Failed(..) => None,
        };
        let now = self.clock.now();
        let step = debtor.exchange.lock().unwrap_or_else(PoisonError::into_inner).apply(event, now);
        for debt in step.settle {
            match debt {
                Settlement::ReleasePrefill(lent, cause) => {
                    let params = params.clone();
                    self.released(engine, Returned { lent, params, cause }, debtor).await;
                }
                Settlement::AbortPrefill(_) | Settlement::AbortDecode(_) => {
                    unreachable!("a late reply brings nothing but a handle")
                }
            }
        }
    }

    async fn released(&self, engine: &Arc<Engine>, returned: Returned, debtor: &Debtor) {
        let Returned { lent, params, cause } = returned;
        let (via, result) = self.released_via(engine, lent, cause, params.as_deref(), debtor).await;
        self.metrics.release(cause, via);
        tracing::debug!(request = %debtor.request, engine = engine.authority(), cause = cause.label(), ?via, ?result,
            "lease released");
        self.metrics.settled(result);
    }

    /// Takes the first way that the engine has and its configuration allows.
    async fn released_via(
        &self,
        engine: &Arc<Engine>,
        lent: Lent,
        cause: Cause,
        params: Option<&str>,
        debtor: &Debtor,
    ) -> (Via, Settled) {
        let mode = engine.release_mode();
        if matches!(mode, ReleaseMode::Auto | ReleaseMode::Verb) {
            let (via, verb, outgoing) = match lent.handle {
                Some(handle) => (Via::Release, Verb::Release, release(handle, cause, &debtor.request)),
                // An engine maps the id of a request to the lease that it opened for it.
                None => (Via::Abort, Verb::Abort, abort(&debtor.request, Leg::Prefill)),
            };
            let result = self.asked(engine, verb, &outgoing).await;
            if result != Settled::Unsupported {
                return (via, result);
            }
        }
        if matches!(mode, ReleaseMode::Auto | ReleaseMode::RefusedDecode)
            && let (Some(model), Some(params)) = (debtor.model.as_deref(), params)
        {
            let authorization = debtor.authorization.as_ref();
            let refusable = Refusable { model, params, authorization, request: &debtor.request };
            let SettleTerms { tries, try_timeout, .. } = **self.terms.load();
            let refused = refusable.refused(tries, try_timeout).await;
            return (Via::RefusedDecode, if refused { Settled::Confirmed } else { Settled::Failed });
        }
        (Via::Lease, Settled::Unsupported)
    }

    async fn aborted(&self, engine: &Arc<Engine>, request: &RequestId, leg: Leg) -> Settled {
        let begun = Instant::now();
        let result = self.asked(engine, Verb::Abort, &abort(request, leg)).await;
        if result == Settled::Confirmed {
            self.metrics.propagated(leg, begun.elapsed());
        }
        result
    }

    async fn asked(&self, engine: &Arc<Engine>, verb: Verb, outgoing: &Outgoing) -> Settled {
        if !may_have(engine, verb) {
            return Settled::Unsupported;
        }
        let SettleTerms { tries, try_timeout, .. } = **self.terms.load();
        let mut missing = 0;
        for (left, pause) in (0..tries).rev().zip(pauses()) {
            let ask = async { engine.call(outgoing, |_| {}).await?.whole(ANSWER_BYTES_MAX).await };
            match tokio::time::timeout(try_timeout, ask).await {
                Ok(Ok(answer)) if answer.status.is_success() => {
                    engine.verbs().learn(verb, true, Instant::now());
                    return Settled::Confirmed;
                }
                // Of an engine that had the verb, it may be a proxy's answer, or one of a moment.
                Ok(Ok(answer)) if is_missing(answer.status) => {
                    missing += 1;
                    if missing == tries || has(engine, verb) != Some(true) {
                        engine.verbs().learn(verb, false, Instant::now());
                        return Settled::Unsupported;
                    }
                    complain(engine, outgoing, left, &format!("status {}", answer.status));
                }
                Ok(Ok(answer)) => complain(engine, outgoing, left, &format!("status {}", answer.status)),
                Ok(Err(error)) => complain(engine, outgoing, left, &error.to_string()),
                Err(_elapsed) => complain(engine, outgoing, left, "no answer in time"),
            }
            if left > 0 {
                tokio::time::sleep(pause).await;
            }
        }
        Settled::Failed
    }
}

/// Says, not too often, that a try did not come to anything.
fn complain(engine: &Engine, outgoing: &Outgoing, left: u16, what: &str) {
    if let Some(held_back) = engine.trouble.due() {
        let request = outgoing.id.as_ref().map(RequestId::as_str);
        let (engine, path) = (engine.authority(), &*outgoing.path);
        tracing::warn!(request, engine, path, what, left, held_back, "abort or release failed");
    }
}

/// The pauses between tries.
fn pauses() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(PAUSE), |pause| Some((*pause * 2).min(PAUSE_MAX)))
}

/// Whether an engine may have a verb: its configuration does not say that it has none, and neither has it.
fn may_have(engine: &Engine, verb: Verb) -> bool {
    let stock = matches!(engine.release_mode(), ReleaseMode::RefusedDecode | ReleaseMode::Lease);
    !stock && has(engine, verb) != Some(false)
}

fn has(engine: &Engine, verb: Verb) -> Option<bool> {
    engine.verbs().has(verb, Instant::now())
}

fn is_missing(status: StatusCode) -> bool {
    matches!(status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED)
}

fn release(handle: Handle, cause: Cause, request: &RequestId) -> Outgoing {
    let body = json!({"handle": handle.to_string(), "reason": cause.label()});
    verb("/kv/release", &body, request)
}

/// Both legs have one id; an engine that serves both must know which one is meant.
fn abort(request: &RequestId, leg: Leg) -> Outgoing {
    verb("/abort_requests", &json!({"request_ids": [request.as_str()], "leg": leg.label()}), request)
}

fn verb(path: &'static str, body: &serde_json::Value, request: &RequestId) -> Outgoing {
    Outgoing { id: Some(request.clone()), ..Outgoing::post(path, Bytes::from(body.to_string())) }
}

#[cfg(test)]
mod tests;
