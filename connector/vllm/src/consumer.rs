//! The consumer's side: loads of blocks that another engine leases to this one.
//!
//! The Python half admits a handoff, begins its read, and asks for the verdict after the workers have read. Only
//! verified blocks are used (invariant 3). This side checks the handoff, renews the lease and talks to the producer,
//! on threads of its own. They start with the first load.
//!
//! | module | contents |
//! |---|---|
//! | `loads` | the table of loads; decides |
//! | `check` | the check of a handoff |
//! | `target` | a lease and its producer |
//! | `queues` | the exchanges with each producer that are due |
//! | `workers` | the exchanges with producers |

mod check;
mod loads;
mod queues;
mod target;
mod workers;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

pub(crate) use check::{Invalid, layout};
use loads::LoadTable;
pub(crate) use loads::{Hold, LoadVerdict};
use workers::Caller;

use crate::config::Config;
use crate::ids::{child, random};
use crate::metrics::CoreMetrics;
use crate::ops::AdmitOp;
use crate::signals::{self, Signals};

/// Threads that talk to producers. A silent producer occupies one, and all of those that have not answered occupy at
/// most half of them.
const WORKERS_MAX: usize = 32;

/// Longest wait for verdicts in one call.
const DONE_WAIT_MAX: Duration = Duration::from_millis(100);

/// Interval of sweeps over idle connections, and the longest nap of the timer.
const SWEEP: Duration = Duration::from_secs(1);

/// The shortest nap of the timer.
const NAP_MIN: Duration = Duration::from_millis(1);

/// How long a stop waits for the last notices, and for the threads.
const STOP_WAIT: Duration = Duration::from_millis(300);

/// Bytes of a release's reason.
const REASON_BYTES_MAX: usize = 64;

/// See the module's documentation.
pub(crate) struct ConsumerSide {
    state: Mutex<ConsumerState>,
    /// Wakes a worker.
    work: Condvar,
    /// Wakes the timer for an earlier deadline.
    timer: Condvar,
    /// Wakes callers that wait for an answer.
    answered: Condvar,
    caller: Caller,
    /// This engine's, once it is known.
    layout: OnceLock<u64>,
    signals: Arc<Signals>,
    metrics: Arc<CoreMetrics>,
    stop: AtomicBool,
}

#[derive(Default)]
struct ConsumerState {
    table: LoadTable,
    /// Workers that wait for work.
    idle: usize,
    /// Workers and the timer.
    threads: usize,
    has_timer: bool,
    /// When the timer wakes by itself, while it sleeps.
    nap_until: Option<Instant>,
}

impl ConsumerState {
    /// When the timer has something to do that waits for time only.
    fn next_due(&self, now: Instant) -> Option<Instant> {
        self.table.next_deadline().into_iter().chain(self.table.queues.next_due(now)).min()
    }
}

impl ConsumerSide {
    /// A consumer without loads and threads.
    pub(crate) fn new(config: &Config, signals: Arc<Signals>, metrics: Arc<CoreMetrics>) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            work: Condvar::new(),
            timer: Condvar::new(),
            answered: Condvar::new(),
            caller: Caller::new(config.secret.as_ref()),
            layout: OnceLock::new(),
            signals,
            metrics,
            stop: AtomicBool::new(false),
        })
    }

    /// Sets this engine's layout, once.
    pub(crate) fn set_layout(&self, layout: u64) {
        let _ = self.layout.set(layout);
    }

    /// Checks a handoff, and begins to renew its lease. Returns the parameters for vLLM's connector.
    ///
    /// # Errors
    /// [`Invalid`]: the handoff is not used, and the producer gets its lease back.
    pub(crate) fn admit(self: &Arc<Self>, op: &AdmitOp) -> Result<Value, Invalid> {
        let admitted = self.check_and_admit(op);
        if admitted.is_err() {
            // This engine computes the prompt itself. The handoff may name no lease.
            let _ = self.give_back(&op.params);
        }
        admitted
    }

    fn check_and_admit(self: &Arc<Self>, op: &AdmitOp) -> Result<Value, Invalid> {
        let checked = check::check(op, self.layout.get().copied())?;
        let consumer = random().map(u64::from_ne_bytes).map_err(|why| Invalid { why, stock: false })?;
        let mut state = self.lock();
        let (id, is_child) = (Arc::from(op.id.as_str()), child(&op.id).is_some());
        state.table.admit(&id, is_child, checked.target, consumer, Instant::now())?;
        self.wake(&mut state);
        Ok(checked.params)
    }

    /// The producer's answer about the lease of a load; `None` for an unknown id.
    pub(crate) fn hold(&self, id: &str) -> Option<Hold> {
        let hold = self.lock().table.hold(id);
        if hold.is_none() {
            self.metrics.late();
        }
        hold
    }

    /// As [`Self::hold`], after the producer's answer or at most `wait`.
    pub(crate) fn hold_within(&self, id: &str, wait: Duration) -> Option<Hold> {
        let until = Instant::now() + wait;
        let mut state = self.lock();
        while state.table.hold(id) == Some(Hold::Asking) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.answered.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        self.hold(id)
    }

    /// The workers begin to read.
    pub(crate) fn begin(self: &Arc<Self>, id: &str) {
        let mut state = self.lock();
        if state.table.begin(id).is_err() {
            self.metrics.late();
        }
        self.wake(&mut state);
    }

    /// The workers have read. Returns a verdict for each id, or `None` if it arrives by [`Self::take`].
    pub(crate) fn done(self: &Arc<Self>, ids: &[Arc<str>], wait: Duration) -> Vec<Option<LoadVerdict>> {
        let now = Instant::now();
        let until = now + wait.min(DONE_WAIT_MAX);
        let mut state = self.lock();
        for id in ids {
            if state.table.done(id, now).is_err() {
                self.metrics.late();
            }
        }
        self.wake(&mut state);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !ids.iter().any(|id| state.table.is_asked(id)) {
                break;
            }
            state = self.answered.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let verdicts: Vec<_> = ids.iter().map(|id| state.table.collect(id)).collect();
        drop(state);
        self.count_valid(verdicts.iter().flatten());
        verdicts
    }

    /// Verdicts that [`Self::done`] did not return, each once. The caller has cleared the signal.
    pub(crate) fn take(&self) -> Vec<(Arc<str>, LoadVerdict)> {
        let verdicts = self.lock().table.take_verdicts();
        self.count_valid(verdicts.iter().map(|(_, verdict)| verdict));
        verdicts
    }

    /// A request will not use its load.
    pub(crate) fn leave(self: &Arc<Self>, id: &str, reason: &str) {
        let mut state = self.lock();
        if state.table.leave(&Arc::from(id), reason_word(reason), Instant::now()).is_err() {
            self.metrics.late();
        }
        self.wake(&mut state);
    }

    /// Gives the lease of a handoff back whose request was refused before the scheduler knew it. False: a request of
    /// this engine has used it.
    ///
    /// # Errors
    /// [`Invalid`]: the handoff names no lease.
    pub(crate) fn give_back(self: &Arc<Self>, params: &Value) -> Result<bool, Invalid> {
        let target = check::lease_of(params)?;
        let consumer = random().map(u64::from_ne_bytes).map_err(|why| Invalid { why, stock: false })?;
        let mut state = self.lock();
        let given = state.table.give_back(&target, consumer, "consumer_rejected", Instant::now());
        self.wake(&mut state);
        Ok(given)
    }

    /// Loads, notices that wait, and notices that were dropped.
    pub(crate) fn counts(&self) -> (usize, usize, u64) {
        let state = self.lock();
        let (notices, dropped) = state.table.queues.notices();
        (state.table.len(), notices, dropped)
    }

    /// Leaves every load and ends the threads. Bounded.
    pub(crate) fn stop(self: &Arc<Self>) {
        let mut state = self.lock();
        state.table.leave_all(Instant::now());
        self.wake(&mut state);
        let state = self.wait_for(state, |state| state.threads == 0 || state.table.queues.is_idle());
        self.stop.store(true, Ordering::Release);
        self.caller.stop();
        self.work.notify_all();
        self.timer.notify_all();
        drop(self.wait_for(state, |state| state.threads == 0));
    }

    fn wait_for<'a>(
        &self,
        mut state: MutexGuard<'a, ConsumerState>,
        done: impl Fn(&ConsumerState) -> bool,
    ) -> MutexGuard<'a, ConsumerState> {
        let until = Instant::now() + STOP_WAIT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if done(&state) || left.is_zero() {
                return state;
            }
            state = self.answered.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Starts or wakes the threads that the table needs.
    fn wake(self: &Arc<Self>, state: &mut ConsumerState) {
        if self.stop.load(Ordering::Acquire) {
            return;
        }
        let now = Instant::now();
        if state.table.queues.has_ready(now) {
            if state.idle > 0 {
                self.work.notify_one();
            } else if state.threads < WORKERS_MAX {
                self.spawn(state, "baton-load", Self::run_worker);
            }
        }
        let Some(due) = state.next_due(now) else { return };
        if !state.has_timer {
            state.has_timer = true;
            self.spawn(state, "baton-loads", Self::run_timer);
        } else if state.nap_until.is_some_and(|until| due < until) {
            self.timer.notify_one();
        }
    }

    fn spawn(self: &Arc<Self>, state: &mut ConsumerState, name: &str, run: fn(&Arc<Self>)) {
        let side = Arc::clone(self);
        let thread = thread::Builder::new().name(name.into()).spawn(move || run(&side));
        match thread {
            Ok(_) => state.threads += 1,
            Err(error) => {
                tracing::error!(event = "load_thread_not_started", %error, "cannot start a thread for loads");
            }
        }
    }

    /// Runs exchanges until the stop.
    fn run_worker(self: &Arc<Self>) {
        let mut state = self.lock();
        while !self.stop.load(Ordering::Acquire) {
            let Some(exchange) = workers::next_exchange(&mut state.table, Instant::now()) else {
                // The last answer may have set an earlier deadline.
                self.wake(&mut state);
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            // Another producer may have work for another worker.
            self.wake(&mut state);
            drop(state);
            let answer = self.caller.run(&exchange);
            state = self.lock();
            workers::apply(&mut state.table, exchange, answer, &self.metrics, Instant::now());
            self.announce(&state);
        }
        self.end_thread(state);
    }

    /// Applies deadlines until the stop, and wakes workers for what is due.
    fn run_timer(self: &Arc<Self>) {
        let mut swept = Instant::now();
        let mut state = self.lock();
        while !self.stop.load(Ordering::Acquire) {
            let now = Instant::now();
            state.table.tick(now);
            self.announce(&state);
            if state.table.queues.has_ready(now) {
                self.wake(&mut state);
            }
            if now.duration_since(swept) >= SWEEP {
                swept = now;
                drop(state);
                self.caller.sweep();
                state = self.lock();
                continue;
            }
            let nap = state.next_due(now).map_or(SWEEP, |due| due.saturating_duration_since(now));
            let nap = nap.clamp(NAP_MIN, SWEEP);
            state.nap_until = Some(now + nap);
            state = self.timer.wait_timeout(state, nap).unwrap_or_else(PoisonError::into_inner).0;
            state.nap_until = None;
        }
        self.end_thread(state);
    }

    /// Wakes callers that wait for an answer, and raises the signal for verdicts.
    fn announce(&self, state: &ConsumerState) {
        self.answered.notify_all();
        if state.table.has_verdicts() {
            self.signals.raise(signals::VERDICTS);
        }
    }

    fn end_thread(&self, mut state: MutexGuard<'_, ConsumerState>) {
        state.threads -= 1;
        self.answered.notify_all();
    }

    /// Counts used loads. The Python half reports failed ones, with those that were never asked about.
    fn count_valid<'a>(&self, verdicts: impl Iterator<Item = &'a LoadVerdict>) {
        verdicts.filter(|verdict| verdict.valid).for_each(|_| self.metrics.loaded());
    }

    fn lock(&self) -> MutexGuard<'_, ConsumerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The reason of a release, in the engine's words where there is one.
fn reason_word(reason: &str) -> &str {
    match reason {
        "cached" => "not_needed",
        "request_ended" => "consumer_aborted",
        "lease_gone" => loads::LOAD_FAILED,
        other => {
            let plain = other.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
            if plain && !other.is_empty() && other.len() <= REASON_BYTES_MAX { other } else { "other" }
        }
    }
}
