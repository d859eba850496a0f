//! Where requests wait for an engine when all of a model's are full: for a decode engine first, and then, with that one
//! set aside, for a prefill engine. Each leg has a queue of its own, with the same bounds, and both first waits have one
//! deadline. After an engine failed it, a request waits again, for as long as any may: its first deadline ran while
//! engines worked for it.
//!
//! A request that waits for a prefill engine holds a place at a decode engine. So it waits only for engines whose own
//! requests wait for no other engine: those that do not decode for the same model. See `exchange/driver/choosing.rs`.
//!
//! ```text
//!  enter ──▶ nobody waits and there is room ──▶ dispatched            (no lock, no queue)
//!    │
//!    ├─▶ no engine can serve the model ─▶ 503
//!    ├─▶ queue full, share used, deadline out of reach ─▶ 429
//!    └─▶ waits ── its turn and there is room ──▶ dispatched
//!            ├──── deadline ──▶ 429
//!            └──── dropped (client gone, shutdown) ──▶ out of the queue
//! ```
//!
//! Who is next is decided in [`queue`], which is pure. Only the next one tries to reserve an engine; it is called
//! when one has room again ([`Freed`]), and a request that leaves the queue in any way calls the next. If the next one
//! finds no room among the engines that it can be given to, the next that can be given to another one is called: one
//! round, which ends with a request that could have any engine. Room that comes meanwhile begins another round: at
//! once, so that the first one has the first try, but after a round that was broken off only when the next has ended.
//! So every request that another engine could serve has its try, however often engines become free.
//!
//! No wake-up is lost: a waiter counts itself among the waiting before it tries, and an engine takes a request
//! off its load before it looks whether anybody waits. Health that changes with time alone wakes nobody, so the
//! next one also tries again every [`TRY_AGAIN`].

pub(crate) mod deadline;
mod drain;
mod queue;
mod turns;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use baton_openai::{ApiError, Code};
use tokio::sync::Notify;

use crate::config::{Priority, QueueConfig};
use crate::engines::listeners::{CapacityListener, Freed};
use crate::metrics::Leg;
use crate::metrics::admission::{AdmissionMetrics, Outcome};
use drain::Drain;
pub(crate) use queue::{Claim, Wants};
use queue::{FairQueue, Full, Lane, Place};

/// How often the next one tries without having been woken.
const TRY_AGAIN: Duration = Duration::from_millis(50);
/// When to come back while no engine can serve the model: about as long as one rests or restarts.
const NO_CAPACITY: Duration = Duration::from_secs(2);

/// What a request brings to the queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    pub claim: Claim,
    /// Until when it may wait.
    pub deadline: Instant,
    /// Beyond that it has no use for an answer: its client gives up, or its model's requests may take no longer.
    pub ends: Option<Instant>,
}

/// Why a request is not let in.
#[derive(Debug)]
pub(crate) struct NotLetIn {
    /// Whether it could have waited for an engine.
    pub scarce: Scarce,
    /// What its client is told.
    pub error: ApiError,
}

/// The queues of all models. They outlive configurations.
pub(crate) struct Admission {
    queues: Mutex<HashMap<(String, Leg), Arc<ModelQueue>>>,
    freed: Arc<Freed>,
    metrics: Arc<AdmissionMetrics>,
}

/// The queue of one leg of one model.
pub(crate) struct ModelQueue {
    waiting: AtomicUsize,
    /// Whoever tried last found no engine at all.
    deserted: AtomicBool,
    inner: Mutex<Inner>,
    freed: Arc<Freed>,
    metrics: Arc<AdmissionMetrics>,
}

#[derive(Default)]
struct Inner {
    queue: FairQueue,
    drain: Drain,
    bells: HashMap<Place, Arc<Notify>>,
    /// Whose try it is in a round that goes on.
    called: Option<Place>,
    /// Another round follows.
    again: bool,
    /// The last round was broken off; this one is not.
    broken_off: bool,
    /// Engines that may have room after the tries of this round, or of the last one; `None`: any.
    room: Option<Lane>,
}

/// What a wait in the queue gives.
pub(crate) trait Found {
    /// Whether it has an engine. What goes on without one is not charged for a turn.
    fn has_engine(&self) -> bool {
        true
    }
}

/// A request in the queue. Dropping it takes it out.
struct Waiting<'a> {
    queue: &'a ModelQueue,
    terms: &'a QueueConfig,
    place: Place,
    priority: Priority,
    since: Instant,
    bell: Arc<Notify>,
    outcome: Outcome,
}

impl NotLetIn {
    fn full(error: ApiError) -> Self {
        Self { scarce: Scarce::Full, error }
    }
}

impl Admission {
    pub(crate) fn new(freed: Arc<Freed>, metrics: Arc<AdmissionMetrics>) -> Self {
        Self { queues: Mutex::default(), freed, metrics }
    }

    /// The queue of a model's leg, which is the same one in every generation that serves it.
    pub(crate) fn queue(&self, model: &str, leg: Leg) -> Arc<ModelQueue> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody but this table holds the queue of a model that is gone.
        queues.retain(|(name, _), queue| name == model || Arc::strong_count(queue) > 1);
        let key = (model.to_owned(), leg);
        if let Some(queue) = queues.get(&key) {
            return Arc::clone(queue);
        }
        let queue = Arc::new(ModelQueue::new(Arc::clone(&self.freed), Arc::clone(&self.metrics)));
        let listener: Weak<dyn CapacityListener> = Arc::<ModelQueue>::downgrade(&queue);
        self.freed.listen(listener);
        queues.insert(key, Arc::clone(&queue));
        queue
    }
}

impl CapacityListener for ModelQueue {
    fn capacity_freed(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.lock().ring();
        }
    }
}

impl ModelQueue {
    fn new(freed: Arc<Freed>, metrics: Arc<AdmissionMetrics>) -> Self {
        Self {
            waiting: AtomicUsize::new(0),
            deserted: AtomicBool::new(false),
            inner: Mutex::default(),
            freed,
            metrics,
        }
    }

    /// Waits until `reserve` gives something, in turn with the others who wait for this model. `reserve` is
    /// called only when it is this request's turn, never while anything is locked.
    ///
    /// # Errors
    /// 429 while engines are full: no place in the queue, or none before the deadline. 503 when no engine can
    /// serve the model, at once where nobody waits, and else instead of the 429. Both say when to come back.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the queue; nothing is reserved.
    pub(crate) async fn enter<T: Found>(
        &self,
        ticket: Ticket,
        wants: Wants,
        terms: &QueueConfig,
        mut reserve: impl FnMut() -> Result<T, Scarce>,
    ) -> Result<T, NotLetIn> {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            match self.tried(reserve()) {
                Ok(reserved) => return Ok(reserved),
                Err(Scarce::NoEngine) => return Err(self.nobody()),
                Err(Scarce::Full) => {}
            }
        }
        let mut waiting = self.join(ticket, wants, terms)?;
        let deadline = tokio::time::Instant::from_std(ticket.deadline);
        loop {
            let bell = waiting.bell.notified();
            let now = tokio::time::Instant::now();
            let mut again = deadline;
            if waiting.is_called() {
                if let Ok(found) = self.tried(reserve()) {
                    waiting.outcome =
                        if found.has_engine() { Outcome::Dispatched } else { Outcome::NoCapacity };
                    return Ok(found);
                }
                if waiting.give_way() {
                    again = deadline.min(now + TRY_AGAIN);
                }
            }
            if now >= deadline {
                waiting.outcome = Outcome::Expired;
                // Those behind wait for what the first one waits for.
                return Err(match self.deserted.load(Ordering::Relaxed) {
                    true => self.nobody(),
                    false => self.expired(waiting.since.elapsed()),
                });
            }
            // Woken or not, there is a reason to look.
            let _ = tokio::time::timeout_at(again, bell).await;
        }
    }

    fn join<'a>(
        &'a self,
        ticket: Ticket,
        wants: Wants,
        terms: &'a QueueConfig,
    ) -> Result<Waiting<'a>, NotLetIn> {
        let Ticket { claim, deadline, .. } = ticket;
        let now = Instant::now();
        let mut inner = self.lock();
        let ahead = inner.queue.ahead_of(&claim, &wants, terms);
        let in_time = inner.drain.wait(ahead).is_none_or(|wait| now + wait < deadline);
        let place = inner.queue.enter(claim, wants, terms);
        // The next one may always try: what is known of the pace may be out of date.
        let may_try = |place| ahead == 0 || inner.queue.next_within(inner.room.as_ref()) == Some(place);
        let is_late = deadline <= now || (!in_time && !place.is_ok_and(may_try));
        if is_late {
            place.iter().for_each(|place| inner.queue.leave(*place));
            let back = inner.drain.come_back(ahead);
            drop(inner);
            if self.deserted.load(Ordering::Relaxed) {
                return Err(self.nobody());
            }
            self.metrics.outcome(Outcome::RejectedLate);
            let message = "all engines are busy and the request's deadline would pass before its turn";
            return Err(NotLetIn::full(ApiError::overloaded(message, back)));
        }
        let place = match place {
            Ok(place) => place,
            Err(full) => {
                let back = inner.drain.come_back(ahead);
                drop(inner);
                if self.deserted.load(Ordering::Relaxed) {
                    return Err(self.nobody());
                }
                self.metrics.outcome(Outcome::RejectedFull);
                let message = match full {
                    Full::Total => "all engines are busy and too many requests wait already",
                    Full::Tenant => "all engines are busy and too many of your requests wait already",
                };
                return Err(NotLetIn::full(ApiError::overloaded(message, back)));
            }
        };
        let bell = Arc::<Notify>::default();
        inner.bells.insert(place, Arc::clone(&bell));
        // Before the first try; see the promise about wake-ups above.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.freed.begin_waiting();
        drop(inner);
        self.metrics.waiting(claim.priority).increment(1.0);
        let (priority, since, outcome) = (claim.priority, now, Outcome::ClientGone);
        Ok(Waiting { queue: self, terms, place, priority, since, bell, outcome })
    }

    /// Keeps whether there was any engine, for those who have not tried.
    fn tried<T>(&self, reserved: Result<T, Scarce>) -> Result<T, Scarce> {
        let deserted = matches!(reserved, Err(Scarce::NoEngine));
        if self.deserted.load(Ordering::Relaxed) != deserted {
            self.deserted.store(deserted, Ordering::Relaxed);
        }
        reserved
    }

    fn nobody(&self) -> NotLetIn {
        self.metrics.outcome(Outcome::NoCapacity);
        let error = ApiError::unavailable("no engine can serve this model at the moment", NO_CAPACITY);
        NotLetIn { scarce: Scarce::NoEngine, error }
    }

    fn expired(&self, waited: Duration) -> NotLetIn {
        let mut inner = self.lock();
        let ahead = inner.queue.len();
        let back = inner.drain.come_back(ahead);
        let message =
            format!("all engines were busy for the {} ms that the request could wait", waited.as_millis());
        NotLetIn::full(ApiError::overloaded(message, back).with_code(Code::QueueTimeout))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// An engine may have room.
    fn ring(&mut self) {
        match self.called {
            None => self.begin(),
            Some(called) if self.broken_off || self.queue.next() == Some(called) => self.again = true,
            Some(_) => {
                self.broken_off = true;
                self.begin();
            }
        }
    }

    /// Begins a round.
    fn begin(&mut self) {
        self.again = false;
        self.room = None;
        self.call(self.queue.next());
    }

    /// Goes on with a round after one try, or begins the round that was asked for meanwhile.
    fn go_on(&mut self) {
        let next = self.queue.next_within(self.room.as_ref());
        self.broken_off &= next.is_some();
        if next.is_none() && self.again { self.begin() } else { self.call(next) }
    }

    fn call(&mut self, place: Option<Place>) {
        self.called = place;
        if let Some(bell) = place.and_then(|place| self.bells.get(&place)) {
            bell.notify_one();
        }
    }
}

impl Waiting<'_> {
    /// Whether it may try now. While no request is called, the first one may whenever it looks.
    fn is_called(&self) -> bool {
        let mut inner = self.queue.lock();
        let is_first = inner.queue.next() == Some(self.place);
        match inner.called {
            Some(called) => {
                // It came to be the first while another one tries.
                inner.again |= is_first && called != self.place;
                called == self.place
            }
            None if is_first => {
                (inner.again, inner.broken_off) = (false, false);
                inner.room = None;
                inner.called = Some(self.place);
                true
            }
            None if inner.queue.next_within(inner.room.as_ref()) == Some(self.place) => {
                inner.called = Some(self.place);
                true
            }
            None => false,
        }
    }

    /// It was called and found no room: the next one tries that can be given to another engine. Whether it is the first.
    fn give_way(&self) -> bool {
        let mut inner = self.queue.lock();
        // Not while another round has begun: that one has its own tries.
        if inner.called == Some(self.place) {
            inner.room = inner.queue.lane(self.place).map(|lane| queue::narrowed(inner.room.clone(), lane));
            inner.called = None;
            inner.go_on();
        }
        inner.queue.next() == Some(self.place)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut inner = self.queue.lock();
        let first = inner.queue.next();
        if self.outcome == Outcome::Dispatched {
            inner.queue.dispatched(self.place, self.terms);
            // Of those that wait for engines that are full, nothing is learnt of the others' pace.
            let others_wait = inner.queue.next_within(inner.room.as_ref()).is_some();
            inner.drain.served(Instant::now(), others_wait);
        } else {
            inner.queue.leave(self.place);
        }
        inner.bells.remove(&self.place);
        self.queue.waiting.fetch_sub(1, Ordering::SeqCst);
        self.queue.freed.end_waiting();
        if inner.called == Some(self.place) {
            inner.called = None;
        }
        // There may be room for more than one, or this one was called and leaves without having tried.
        let is_same = inner.queue.next() == first;
        match inner.called {
            Some(_) => inner.again |= !is_same,
            None if is_same => inner.go_on(),
            None => inner.begin(),
        }
        drop(inner);
        self.queue.metrics.waiting(self.priority).decrement(1.0);
        self.queue.metrics.left(self.outcome, self.since.elapsed());
    }
}

/// Why no engine can be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scarce {
    /// Those that could be asked have as much as they take. It will pass.
    Full,
    /// There is none that could be asked.
    NoEngine,
}

#[cfg(test)]
mod tests;
