//! The queues in which requests wait while all engines of a model are full. A request waits for a decode engine
//! first. With that engine reserved, it then waits for a prefill engine. Each leg has its own queue with the same
//! bounds, and both first waits have one deadline. After an engine failed it, a request waits again, up to the
//! maximum wait: its first deadline ran while engines worked for it.
//!
//! A request that waits for a prefill engine holds a reservation at a decode engine. So it waits only for engines
//! whose own requests wait for no other engine: those that do not decode for the same model. See
//! `exchange/driver/choosing.rs`.
//!
//! ```text
//!  enter ──▶ empty queue and free capacity ──▶ dispatched               (no lock, no queue)
//!    │
//!    ├─▶ no engine can serve the model ─▶ 503
//!    ├─▶ queue full, share used, deadline out of reach ─▶ 429
//!    └─▶ waits ── its turn and free capacity ──▶ dispatched
//!            ├──── deadline ──▶ 429
//!            └──── dropped (client gone, shutdown) ──▶ out of the queue
//! ```
//!
//! [`queue`], which is pure, decides which request is next. Only the next request tries to reserve an engine. It
//! is woken when an engine has capacity again ([`CapacityNotify`]), and every request that leaves the queue wakes
//! the next one. If the next request finds no capacity among its engines, the next request that may use another
//! engine is woken. Such a round ends with a request that may use any engine.
//!
//! Capacity that is freed during a round begins another round. The first interruption does so at once, so that the
//! first request has the first try. After an interrupted round, the other round begins only when the current one
//! has ended. So every request that another engine could serve has its try, however often engines become free.
//!
//! No wake-up is lost. A request counts itself as waiting before it tries, and an engine decrements its load
//! before it reads the number of waiting requests. A change of health by time alone wakes no request, so the next
//! request also tries again every [`RETRY_INTERVAL`].

pub(crate) mod deadline;
mod drain_rate;
mod queue;
mod turn_totals;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use baton_openai::{ApiError, Code};
use tokio::sync::Notify;

use crate::config::{Priority, QueueConfig};
use crate::engines::listeners::{CapacityListener, CapacityNotify};
use crate::metrics::Leg;
use crate::metrics::admission::{AdmissionMetrics, QueueOutcome};
use deadline::ResponseDeadlines;
use drain_rate::DrainRate;
pub(crate) use queue::{Claim, Lane, WaitOptions};
use queue::{FairQueue, QueueBound, QueueEntry};

/// How often the next request tries without a wake-up.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// `Retry-After` while no engine can serve the model: about as long as an ejection or a restart takes.
const NO_ENGINE_RETRY_AFTER: Duration = Duration::from_secs(2);

/// What a request brings to the queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdmissionRequest {
    pub claim: Claim,
    /// End of the wait.
    pub deadline: Instant,
    /// End of the request: its client's timeout, or the maximum duration of its model's requests.
    pub request_deadline: Option<Instant>,
    /// Until when the response is useful.
    pub response: ResponseDeadlines,
}

/// A request that is not admitted.
#[derive(Debug)]
pub(crate) struct AdmissionError {
    /// Whether engines are full or there is none.
    pub cause: Unavailable,
    /// The client's error.
    pub error: ApiError,
}

/// The queues of all models. They outlive configurations.
pub(crate) struct Admission {
    queues: Mutex<HashMap<(String, Leg), Arc<ModelQueue>>>,
    capacity: Arc<CapacityNotify>,
    metrics: Arc<AdmissionMetrics>,
}

/// The queue of one leg of one model.
pub(crate) struct ModelQueue {
    waiting: AtomicUsize,
    /// The last try found no engine at all.
    is_without_engine: AtomicBool,
    state: Mutex<QueueState>,
    capacity: Arc<CapacityNotify>,
    metrics: Arc<AdmissionMetrics>,
}

#[derive(Default)]
struct QueueState {
    queue: FairQueue,
    drain: DrainRate,
    notifiers: HashMap<QueueEntry, Arc<Notify>>,
    /// The request whose try it is in the current round.
    current_try: Option<QueueEntry>,
    /// Another round follows.
    another_round: bool,
    /// The previous round was interrupted, so this one may not be.
    interrupted: bool,
    /// Engines that may have capacity after the tries of this round, or of the last one; `None`: any.
    candidates: Option<Lane>,
}

/// The result of a wait in the queue.
pub(crate) trait Reservation {
    /// Whether it has an engine. A request that proceeds without one is not charged for a turn.
    fn has_engine(&self) -> bool {
        true
    }
}

/// A request in the queue. Dropping it removes the request.
struct QueuedRequest<'a> {
    queue: &'a ModelQueue,
    config: &'a QueueConfig,
    entry: QueueEntry,
    priority: Priority,
    since: Instant,
    notify: Arc<Notify>,
    outcome: QueueOutcome,
}

impl AdmissionError {
    fn full(error: ApiError) -> Self {
        Self { cause: Unavailable::Full, error }
    }
}

impl Admission {
    pub(crate) fn new(capacity: Arc<CapacityNotify>, metrics: Arc<AdmissionMetrics>) -> Self {
        Self { queues: Mutex::default(), capacity, metrics }
    }

    /// The queue of a model's leg. Every generation that serves the model has the same one.
    pub(crate) fn queue(&self, model: &str, leg: Leg) -> Arc<ModelQueue> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        // The queue of a removed model has no other owner than this table.
        queues.retain(|(name, _), queue| name == model || Arc::strong_count(queue) > 1);
        let key = (model.to_owned(), leg);
        if let Some(queue) = queues.get(&key) {
            return Arc::clone(queue);
        }
        let queue = Arc::new(ModelQueue::new(Arc::clone(&self.capacity), Arc::clone(&self.metrics)));
        let listener: Weak<dyn CapacityListener> = Arc::<ModelQueue>::downgrade(&queue);
        self.capacity.listen(listener);
        queues.insert(key, Arc::clone(&queue));
        queue
    }
}

impl CapacityListener for ModelQueue {
    fn capacity_freed(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.lock().capacity_freed();
        }
    }
}

impl ModelQueue {
    fn new(capacity: Arc<CapacityNotify>, metrics: Arc<AdmissionMetrics>) -> Self {
        Self {
            waiting: AtomicUsize::new(0),
            is_without_engine: AtomicBool::new(false),
            state: Mutex::default(),
            capacity,
            metrics,
        }
    }

    /// Waits until `reserve` returns a reservation, in turn with the other requests for this model. `reserve` is
    /// called only when it is this request's turn, and never under a lock.
    ///
    /// # Errors
    /// 429 while engines are full: the queue is full, or the deadline comes before the turn. 503 when no engine
    /// can serve the model: at once where the queue is empty, else instead of the 429. Both have a `Retry-After`.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the queue. Nothing is reserved.
    pub(crate) async fn enter<T: Reservation>(
        &self,
        request: AdmissionRequest,
        options: WaitOptions,
        config: &QueueConfig,
        mut reserve: impl FnMut() -> Result<T, Unavailable>,
    ) -> Result<T, AdmissionError> {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            match self.record_try(reserve()) {
                Ok(reserved) => return Ok(reserved),
                Err(Unavailable::NoEngine) => return Err(self.no_engine_error()),
                Err(Unavailable::Full) => {}
            }
        }
        let mut queued = self.join(request, options, config)?;
        let deadline = tokio::time::Instant::from_std(request.deadline);
        loop {
            let notified = queued.notify.notified();
            let now = tokio::time::Instant::now();
            let mut next_try = deadline;
            if queued.may_try() {
                if let Ok(reservation) = self.record_try(reserve()) {
                    queued.outcome = if reservation.has_engine() {
                        QueueOutcome::Dispatched
                    } else {
                        QueueOutcome::NoCapacity
                    };
                    return Ok(reservation);
                }
                if queued.pass_turn() {
                    next_try = deadline.min(now + RETRY_INTERVAL);
                }
            }
            if now >= deadline {
                queued.outcome = QueueOutcome::Expired;
                // Requests behind the first wait for the same engines as the first.
                return Err(match self.is_without_engine.load(Ordering::Relaxed) {
                    true => self.no_engine_error(),
                    false => self.timeout_error(queued.since.elapsed()),
                });
            }
            // A wake-up and a timeout have the same effect: another try.
            let _ = tokio::time::timeout_at(next_try, notified).await;
        }
    }

    fn join<'a>(
        &'a self,
        request: AdmissionRequest,
        options: WaitOptions,
        config: &'a QueueConfig,
    ) -> Result<QueuedRequest<'a>, AdmissionError> {
        let AdmissionRequest { claim, deadline, .. } = request;
        let now = Instant::now();
        let mut state = self.lock();
        let ahead = state.queue.ahead_of(&claim, &options, config);
        let in_time = state.drain.expected_wait(ahead).is_none_or(|wait| now + wait < deadline);
        let entry = state.queue.enter(claim, options, config);
        // The next request may always try, because the known pace may be out of date.
        let may_try =
            |entry| ahead == 0 || state.queue.next_eligible(state.candidates.as_ref()) == Some(entry);
        let is_late = deadline <= now || (!in_time && !entry.is_ok_and(may_try));
        if is_late {
            entry.iter().for_each(|entry| state.queue.leave(*entry));
            let retry_after = state.drain.retry_after(ahead);
            drop(state);
            if self.is_without_engine.load(Ordering::Relaxed) {
                return Err(self.no_engine_error());
            }
            self.metrics.count_outcome(QueueOutcome::RejectedLate);
            let message = "all engines are busy and the request's deadline would pass before its turn";
            return Err(AdmissionError::full(ApiError::overloaded(message, retry_after)));
        }
        let entry = match entry {
            Ok(entry) => entry,
            Err(full) => {
                let retry_after = state.drain.retry_after(ahead);
                drop(state);
                if self.is_without_engine.load(Ordering::Relaxed) {
                    return Err(self.no_engine_error());
                }
                self.metrics.count_outcome(QueueOutcome::RejectedFull);
                let message = match full {
                    QueueBound::Total => "all engines are busy and too many requests wait already",
                    QueueBound::Tenant => "all engines are busy and too many of your requests wait already",
                };
                return Err(AdmissionError::full(ApiError::overloaded(message, retry_after)));
            }
        };
        let notify = Arc::<Notify>::default();
        state.notifiers.insert(entry, Arc::clone(&notify));
        // Before the first try; see the module's documentation on wake-ups.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.capacity.begin_waiting();
        drop(state);
        self.metrics.waiting(claim.priority).increment(1.0);
        let (priority, since, outcome) = (claim.priority, now, QueueOutcome::ClientGone);
        Ok(QueuedRequest { queue: self, config, entry, priority, since, notify, outcome })
    }

    /// Stores whether the try found any engine, for requests that have not tried.
    fn record_try<T>(&self, reserved: Result<T, Unavailable>) -> Result<T, Unavailable> {
        let is_without_engine = matches!(reserved, Err(Unavailable::NoEngine));
        if self.is_without_engine.load(Ordering::Relaxed) != is_without_engine {
            self.is_without_engine.store(is_without_engine, Ordering::Relaxed);
        }
        reserved
    }

    fn no_engine_error(&self) -> AdmissionError {
        self.metrics.count_outcome(QueueOutcome::NoCapacity);
        let error =
            ApiError::unavailable("no engine can serve this model at the moment", NO_ENGINE_RETRY_AFTER);
        AdmissionError { cause: Unavailable::NoEngine, error }
    }

    fn timeout_error(&self, waited: Duration) -> AdmissionError {
        let mut state = self.lock();
        let ahead = state.queue.len();
        let retry_after = state.drain.retry_after(ahead);
        let message =
            format!("all engines were busy for the {} ms that the request could wait", waited.as_millis());
        AdmissionError::full(ApiError::overloaded(message, retry_after).with_code(Code::QueueTimeout))
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QueueState {
    /// An engine may have capacity.
    fn capacity_freed(&mut self) {
        match self.current_try {
            None => self.begin_round(),
            Some(called) if self.interrupted || self.queue.next() == Some(called) => {
                self.another_round = true
            }
            Some(_) => {
                self.interrupted = true;
                self.begin_round();
            }
        }
    }

    /// Begins a round.
    fn begin_round(&mut self) {
        self.another_round = false;
        self.candidates = None;
        self.notify_entry(self.queue.next());
    }

    /// Continues a round after one try, or begins the round that was requested meanwhile.
    fn advance_round(&mut self) {
        let next = self.queue.next_eligible(self.candidates.as_ref());
        self.interrupted &= next.is_some();
        if next.is_none() && self.another_round { self.begin_round() } else { self.notify_entry(next) }
    }

    fn notify_entry(&mut self, entry: Option<QueueEntry>) {
        self.current_try = entry;
        if let Some(notify) = entry.and_then(|entry| self.notifiers.get(&entry)) {
            notify.notify_one();
        }
    }
}

impl QueuedRequest<'_> {
    /// Whether this request may try now. While no request is woken, the first one may try at any time.
    fn may_try(&self) -> bool {
        let mut state = self.queue.lock();
        let is_first = state.queue.next() == Some(self.entry);
        match state.current_try {
            Some(called) => {
                // This request became the first while another one tries.
                state.another_round |= is_first && called != self.entry;
                called == self.entry
            }
            None if is_first => {
                (state.another_round, state.interrupted) = (false, false);
                state.candidates = None;
                state.current_try = Some(self.entry);
                true
            }
            None if state.queue.next_eligible(state.candidates.as_ref()) == Some(self.entry) => {
                state.current_try = Some(self.entry);
                true
            }
            None => false,
        }
    }

    /// Ends a try that found no capacity, and wakes the next request that may use another engine. Returns whether
    /// this request is the first.
    fn pass_turn(&self) -> bool {
        let mut state = self.queue.lock();
        // Another round, if it has begun, has its own tries.
        if state.current_try == Some(self.entry) {
            state.candidates = state
                .queue
                .lane(self.entry)
                .map(|lane| queue::narrow_candidates(state.candidates.clone(), lane));
            state.current_try = None;
            state.advance_round();
        }
        state.queue.next() == Some(self.entry)
    }
}

impl Drop for QueuedRequest<'_> {
    fn drop(&mut self) {
        let mut state = self.queue.lock();
        let first = state.queue.next();
        if self.outcome == QueueOutcome::Dispatched {
            state.queue.record_dispatch(self.entry, self.config);
            state.drain.served(Instant::now());
            // Requests that wait for full engines show nothing of the others' pace.
            if state.queue.next_eligible(state.candidates.as_ref()).is_none() {
                state.drain.pause();
            }
        } else {
            state.queue.leave(self.entry);
        }
        state.notifiers.remove(&self.entry);
        self.queue.waiting.fetch_sub(1, Ordering::SeqCst);
        self.queue.capacity.end_waiting();
        if state.current_try == Some(self.entry) {
            state.current_try = None;
        }
        // There may be capacity for more than one request, or this one was woken and leaves without a try.
        let is_same = state.queue.next() == first;
        match state.current_try {
            Some(_) => state.another_round |= !is_same,
            None if is_same => state.advance_round(),
            None => state.begin_round(),
        }
        drop(state);
        self.queue.metrics.waiting(self.priority).decrement(1.0);
        self.queue.metrics.record_wait(self.outcome, self.since.elapsed());
    }
}

/// Why no engine is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unavailable {
    /// All eligible engines are full. The state passes.
    Full,
    /// No engine is eligible.
    NoEngine,
}

#[cfg(test)]
mod tests;
