//! The threads of one executor. All threads run one job together, phase by phase.
//!
//! A forward pass has about eight phases per layer and lasts a few milliseconds. The threads are therefore woken once
//! per pass, not once per phase. Inside a pass, workers claim items, and a phase is over when all of its items are
//! done. The worker that computes an item never changes the item's result. There is no level between threads and items,
//! such as workers by socket or by shared cache.
//!
//! **Workers wait for items, not for other workers.** If another process uses a core, its worker can be stopped for
//! milliseconds at any point. If the stopped worker has no item in hand, the others claim its part, finish the phases
//! and end the job without it. When it runs again, it skips what is done. If it has an item, the others spin for a
//! limited time that adapts to recent waits, and then sleep. They do not yield: on Linux's scheduler (EEVDF) each yield
//! delays a thread by a time slice, while a sleeping thread runs soon after it is woken.
//!
//! Each worker begins with its own part of a phase's items, in their order, and then helps the others. A worker
//! therefore reads memory forward and uses its own prefetches. With one counter for all items, eight sequences lose
//! about a quarter of the memory bandwidth.
//!
//! ```text
//!   idle ── run(job) ──▶ each worker: each(items) ▶ all done ▶ each(items) ▶ … ──▶ idle
//!      └── arrives after the job is over: skips it, idle
//!   a worker panics ──▶ poisoned: the others leave at their next wait, `run` reports it
//! ```
#![allow(unsafe_code, reason = "a borrowed job is handed to threads that `run` waits for; see each block")]

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Rounds of the pause instruction before a waiting worker goes to sleep: about 50 µs. Longer than the gap between two
/// steps of a busy engine and than most waits for an item, far shorter than a scheduler's time slice.
const SPINS: u32 = 1500;
/// Largest number of rounds, for waits that were a little longer lately: the large items of a long prefill.
const SPINS_MAX: u32 = 8 * SPINS;
/// After a sleep of at most this duration, spinning would have been better: a wake-up takes about 50 µs itself. A time
/// slice of another process on the core is longer.
const SPIN_INSTEAD_BELOW: Duration = Duration::from_micros(300);

/// The caller of a job polls its own task after this number of items. A poll takes a few instructions if there is
/// nothing to do. The smallest item is a panel of weights multiplied with one row, or one row's norm.
const POLL_EVERY: usize = 8;

/// A job as seen by the pool's threads.
type PoolJob = dyn Fn(&Worker<'_>) + Sync;

/// Threads that compute together. The caller of [`ThreadPool::run`] is one of them.
#[derive(Debug)]
pub(super) struct ThreadPool {
    shared: Arc<PoolShared>,
    threads: Vec<JoinHandle<()>>,
}

/// One worker's view of a running job.
pub(super) struct Worker<'a> {
    shared: &'a PoolShared,
    index: usize,
    /// The next phase of this worker.
    phase: Cell<u32>,
    /// Task of the caller beside the job, on its own thread.
    caller_task: Option<RefCell<&'a mut dyn FnMut()>>,
}

/// A worker panicked. The job's results must not be used.
#[derive(Debug)]
pub(super) struct JobPanicked(pub(super) String);

#[derive(Debug)]
struct PoolShared {
    size: usize,
    /// Number of jobs begun.
    jobs_begun: AtomicU64,
    /// The job that may be joined.
    open: Mutex<OpenJob>,
    /// Threads that joined the job and have left it.
    exited: AtomicUsize,
    closing: AtomicBool,
    /// First panic of the current run.
    panic: Mutex<Option<String>>,
    poisoned: AtomicBool,
    /// Phases of the job that are over. The items of the next phase can be claimed.
    phases_done: AtomicU32,
    /// Items of the current phase that are done, added by each worker that finds no more to claim.
    done: AtomicUsize,
    /// Claimed items of each worker's part.
    claims: Box<[ClaimCounter]>,
    /// Threads without a job sleep here.
    idle: Parker,
    /// Workers that wait for another worker's items sleep here, and the caller until all workers have left.
    waiting: Parker,
}

/// Items claimed of a part in a phase. Aligned to two cache lines, because lines are fetched in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct ClaimCounter {
    /// The phase in the upper half, the number of claimed items in the lower half. A worker that is still in an earlier
    /// phase sees from it that there is nothing to claim.
    claimed: AtomicU64,
}

#[derive(Debug, Default)]
struct OpenJob {
    /// None: between jobs.
    job: Option<JobPointer>,
    /// Threads that have joined.
    joined: usize,
}

/// Threads sleep here until a condition holds.
#[derive(Debug)]
struct Parker {
    /// Rounds of spinning before sleep, adapted to the duration of recent sleeps.
    spins: AtomicU32,
    /// A thread may be asleep, or about to sleep.
    asleep: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
}

#[derive(Clone, Copy, Debug)]
struct JobPointer(*const PoolJob);

// SAFETY: the pointee is `Sync`, and `run` keeps it alive until every thread has finished with it.
unsafe impl Send for JobPointer {}

/// The panic payload of workers that leave a job after another worker has panicked.
struct JobAborted;

impl ThreadPool {
    /// Starts `size - 1` threads.
    pub(super) fn new(size: usize) -> std::io::Result<Self> {
        let size = size.max(1);
        let shared = Arc::new(PoolShared {
            size,
            jobs_begun: AtomicU64::new(0),
            open: Mutex::default(),
            exited: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            panic: Mutex::new(None),
            poisoned: AtomicBool::new(false),
            phases_done: AtomicU32::new(0),
            done: AtomicUsize::new(0),
            claims: (0..size).map(|_| ClaimCounter::default()).collect(),
            idle: Parker::new(),
            waiting: Parker::new(),
        });
        let mut pool = Self { shared, threads: Vec::new() };
        for index in 1..size {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new()
                .name(format!("cpu-{index}"))
                .spawn(move || run_worker(&shared, index))?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Workers, including the caller.
    pub(super) fn size(&self) -> usize {
        self.shared.size
    }

    /// Phases of the last job.
    #[cfg(test)]
    pub(super) fn phases(&self) -> u32 {
        self.shared.phases_done.load(Ordering::Relaxed)
    }

    /// Runs `job` on every worker that joins before the job is done, and waits for all of them. Every worker calls
    /// [`Worker::each`] with the same numbers of items in the same order. Results must not depend on state that a
    /// worker keeps from one phase to the next, because a worker may get no item in any phase.
    pub(super) fn run(&mut self, job: &(dyn Fn(&Worker<'_>) + Sync)) -> Result<(), JobPanicked> {
        self.run_with(&mut || (), job)
    }

    /// As [`Self::run`]. Calls `caller_task` on this thread between items, repeatedly.
    pub(super) fn run_with(
        &mut self,
        caller_task: &mut dyn FnMut(),
        job: &(dyn Fn(&Worker<'_>) + Sync),
    ) -> Result<(), JobPanicked> {
        let shared = &*self.shared;
        let pointer: *const (dyn Fn(&Worker<'_>) + Sync + '_) = job;
        // SAFETY: only the lifetime changes. Threads take the pointer where they join. No thread can join once the job
        // is taken out below, and this function does not return before all that joined have left.
        let pointer: *const PoolJob = unsafe { std::mem::transmute(pointer) };
        // No thread is in a job here.
        shared.phases_done.store(0, Ordering::Relaxed);
        shared.done.store(0, Ordering::Relaxed);
        shared.exited.store(0, Ordering::Relaxed);
        for part in &shared.claims {
            part.claimed.store(0, Ordering::Relaxed);
        }
        {
            let mut open = lock(&shared.open);
            *open = OpenJob { job: Some(JobPointer(pointer)), joined: 0 };
            shared.jobs_begun.fetch_add(1, Ordering::Release);
        }
        shared.idle.notify();
        run_job(
            &Worker { shared, index: 0, phase: Cell::new(0), caller_task: Some(RefCell::new(caller_task)) },
            job,
        );
        let joined = std::mem::take(&mut *lock(&shared.open)).joined;
        shared.waiting.wait(|| shared.exited.load(Ordering::Acquire) == joined);
        if shared.poisoned.swap(false, Ordering::Relaxed) {
            return Err(JobPanicked(lock(&shared.panic).take().unwrap_or_default()));
        }
        Ok(())
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        self.shared.jobs_begun.fetch_add(1, Ordering::Release);
        self.shared.idle.notify();
        for thread in self.threads.drain(..) {
            // A thread's own panics are caught inside, so the result here contains no error to report.
            let _ = thread.join();
        }
    }
}

impl Parker {
    fn new() -> Self {
        let (asleep, lock, wake) = (AtomicBool::new(false), Mutex::default(), Condvar::new());
        Self { spins: AtomicU32::new(SPINS), asleep, lock, wake }
    }

    /// Waits until `condition` holds: first spins, then sleeps.
    fn wait(&self, condition: impl Fn() -> bool) {
        let spins = self.spins.load(Ordering::Relaxed);
        for _ in 0..spins {
            if condition() {
                return;
            }
            std::hint::spin_loop();
        }
        let start = Instant::now();
        self.sleep(condition);
        self.spins.store(spins_after(spins, start.elapsed()), Ordering::Relaxed);
    }

    fn sleep(&self, condition: impl Fn() -> bool) {
        let mut guard = lock(&self.lock);
        loop {
            // Stored before the condition is checked. So either the notifier sees the sleeper, or the sleeper sees the
            // new state.
            self.asleep.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if condition() {
                return;
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Wakes the sleeping threads. The state that they wait for was stored before.
    fn notify(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            let guard = lock(&self.lock);
            self.asleep.store(false, Ordering::Relaxed);
            drop(guard);
            self.wake.notify_all();
        }
    }
}

impl ClaimCounter {
    /// The next of the `items` of this part, if one is left in `phase`.
    fn claim(&self, phase: u32, items: usize) -> Option<usize> {
        let first = u64::from(phase) << 32;
        // The load comes first: at the end all workers check every part, and loads can share a cache line.
        let mut seen = self.claimed.load(Ordering::Relaxed);
        loop {
            // Claims of an earlier phase count as zero. Claims of a later phase leave nothing for this worker.
            let next = seen.max(first);
            let index = usize::try_from(next - first).unwrap_or(usize::MAX);
            if index >= items {
                return None;
            }
            match self.claimed.compare_exchange_weak(seen, next + 1, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(index),
                Err(changed) => seen = changed,
            }
        }
    }
}

impl Worker<'_> {
    /// Index of this worker, below the pool's size.
    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// Runs the caller's own task. Does nothing on all other workers.
    fn poll_caller_task(&self) {
        if let Some(caller_task) = &self.caller_task {
            (caller_task.borrow_mut())();
        }
    }

    /// Calls `item` for some of `0..items`, each index on exactly one worker, and waits until all are done. A worker
    /// that arrives after that gets no item.
    pub(super) fn each(&self, items: usize, mut item: impl FnMut(usize)) {
        if items == 0 {
            return;
        }
        assert!(u32::try_from(items).is_ok(), "{items} items of one phase");
        let (shared, size) = (self.shared, self.shared.size);
        let phase = self.phase.get();
        self.phase.set(phase + 1);
        let over = || shared.phases_done.load(Ordering::Acquire) > phase;
        if over() {
            return;
        }
        let mut claimed = 0;
        for offset in 0..size {
            let owner = (self.index + offset) % size;
            let (begin, end) = (owner * items / size, (owner + 1) * items / size);
            while let Some(index) = shared.claims[owner].claim(phase, end - begin) {
                item(begin + index);
                claimed += 1;
                if index.is_multiple_of(POLL_EVERY) {
                    self.poll_caller_task();
                }
            }
        }
        // A worker without items may be late. It must not change the count of a later phase.
        if claimed > 0 && shared.done.fetch_add(claimed, Ordering::AcqRel) + claimed == items {
            shared.done.store(0, Ordering::Relaxed);
            shared.phases_done.store(phase + 1, Ordering::Release);
            shared.waiting.notify();
            return;
        }
        shared.waiting.wait(|| over() || shared.poisoned.load(Ordering::Relaxed));
        if shared.poisoned.load(Ordering::Relaxed) {
            resume_unwind(Box::new(JobAborted));
        }
    }
}

/// The main loop of one thread.
fn run_worker(shared: &PoolShared, index: usize) {
    let mut seen = 0;
    loop {
        shared.idle.wait(|| shared.jobs_begun.load(Ordering::Acquire) != seen);
        let job = {
            let mut open = lock(&shared.open);
            seen = shared.jobs_begun.load(Ordering::Acquire);
            open.joined += usize::from(open.job.is_some());
            open.job
        };
        if shared.closing.load(Ordering::Relaxed) {
            return;
        }
        // No job: it was over before this thread arrived.
        let Some(job) = job else { continue };
        // SAFETY: this thread has joined: `run` keeps the job alive until it has left.
        run_job(&Worker { shared, index, phase: Cell::new(0), caller_task: None }, unsafe { &*job.0 });
        shared.exited.fetch_add(1, Ordering::Release);
        shared.waiting.notify();
    }
}

/// Rounds of spinning before the next sleep, after a sleep that followed `spins` rounds.
fn spins_after(spins: u32, slept: Duration) -> u32 {
    if slept <= SPIN_INSTEAD_BELOW { (2 * spins).min(SPINS_MAX) } else { SPINS }
}

/// Runs the job as this worker and records a panic.
fn run_job(worker: &Worker<'_>, job: &(dyn Fn(&Worker<'_>) + Sync)) {
    let shared = worker.shared;
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(worker))) {
        if !payload.is::<JobAborted>() {
            lock(&shared.panic).get_or_insert_with(|| describe(payload.as_ref()));
        }
        shared.poisoned.store(true, Ordering::Relaxed);
        shared.waiting.notify();
    }
}

fn describe(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".into())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits for a condition that must come true. A test that waits too long fails instead of hanging.
    fn until(condition: impl Fn() -> bool) {
        let start = Instant::now();
        while !condition() {
            assert!(start.elapsed() < Duration::from_secs(30), "waited in vain");
            std::thread::yield_now();
        }
    }

    #[test]
    fn every_item_is_done_once_and_phases_do_not_overlap() {
        let mut pool = ThreadPool::new(3).unwrap();
        let cells: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        for round in 0..50 {
            pool.run(&|worker| {
                worker.each(cells.len(), |i| assert_eq!(cells[i].fetch_add(1, Ordering::Relaxed), round * 2));
                worker.each(cells.len(), |i| {
                    assert_eq!(cells[i].fetch_add(1, Ordering::Relaxed), round * 2 + 1)
                });
            })
            .unwrap();
        }
    }

    #[test]
    fn a_finished_worker_takes_items_of_the_others() {
        let mut pool = ThreadPool::new(2).unwrap();
        let done = AtomicUsize::new(0);
        pool.run(&|worker| {
            worker.each(9, |i| {
                if i == 0 {
                    // This item is of the first part. The other worker has to take the rest of the part.
                    until(|| done.load(Ordering::Relaxed) == 8);
                }
                done.fetch_add(1, Ordering::Relaxed);
            });
        })
        .unwrap();
        assert_eq!(done.into_inner(), 9);
    }

    #[test]
    fn a_panicking_worker_fails_the_job_and_not_the_pool() {
        let mut pool = ThreadPool::new(3).unwrap();
        for _ in 0..10 {
            let error = pool
                .run(&|worker| {
                    worker.each(9, |i| assert!(i != 4, "item four"));
                    worker.each(9, |_| ());
                })
                .unwrap_err();
            assert!(error.0.contains("item four"), "{}", error.0);
            assert!(pool.run(&|worker| worker.each(9, |_| ())).is_ok());
        }
    }

    #[test]
    fn a_worker_without_items_is_not_awaited() {
        let mut pool = ThreadPool::new(3).unwrap();
        for _ in 0..3 {
            let done = AtomicUsize::new(0);
            pool.run(&|worker| {
                if worker.index() > 0 {
                    until(|| done.load(Ordering::Relaxed) == 140);
                }
                for _ in 0..20 {
                    worker.each(7, |_| {
                        assert_eq!(worker.index(), 0, "all was done when the others came");
                        done.fetch_add(1, Ordering::Relaxed);
                    });
                }
            })
            .unwrap();
            assert_eq!(done.into_inner(), 140);
        }
    }

    #[test]
    fn a_late_worker_joins_the_current_phase() {
        let mut pool = ThreadPool::new(2).unwrap();
        let done: Vec<AtomicUsize> = (0..8).map(|_| AtomicUsize::new(0)).collect();
        pool.run(&|worker| {
            if worker.index() == 1 {
                until(|| done[4].load(Ordering::Relaxed) == 9);
            }
            for (phase, done) in done.iter().enumerate() {
                worker.each(9, |_| {
                    if phase == 5 && worker.index() == 0 {
                        // The other worker has to take all other items of this phase.
                        until(|| done.load(Ordering::Relaxed) == 8);
                    }
                    assert!(phase >= 5 || worker.index() == 0, "phase {phase} was over");
                    done.fetch_add(1, Ordering::Relaxed);
                });
            }
        })
        .unwrap();
        assert!(done.into_iter().all(|done| done.into_inner() == 9));
    }

    #[test]
    fn a_part_is_claimed_once_in_each_phase() {
        let part = ClaimCounter::default();
        assert_eq!([part.claim(0, 2), part.claim(0, 2), part.claim(0, 2)], [Some(0), Some(1), None]);
        assert_eq!(part.claim(1, 2), Some(0));
        assert_eq!(part.claim(0, 9), None, "a worker of an earlier phase gets no item of this one");
        assert_eq!([part.claim(1, 2), part.claim(1, 2), part.claim(3, 1)], [Some(1), None, Some(0)]);
    }

    #[test]
    fn a_job_may_end_before_a_worker_joins() {
        let mut pool = ThreadPool::new(5).unwrap();
        let done = AtomicUsize::new(0);
        for round in 1..=5000 {
            pool.run(&|worker| {
                worker.each(0, |_| unreachable!());
                worker.each(1, |_| {
                    done.fetch_add(1, Ordering::Relaxed);
                });
            })
            .unwrap();
            assert_eq!(done.load(Ordering::Relaxed), round);
        }
    }

    #[test]
    fn a_sleeping_worker_is_woken() {
        let mut pool = ThreadPool::new(2).unwrap();
        for round in 0..60 {
            let joined = AtomicBool::new(false);
            let result = pool.run(&|worker| {
                let asleep = || worker.shared.waiting.asleep.load(Ordering::Relaxed);
                if worker.index() == 1 {
                    joined.store(true, Ordering::Relaxed);
                }
                worker.each(1, |_| {
                    until(|| joined.load(Ordering::Relaxed) && asleep());
                    assert!(round % 3 != 1, "while the other sleeps");
                });
                if round % 3 == 2 && worker.index() == 1 {
                    // The caller waits for this thread to leave.
                    until(asleep);
                }
            });
            assert_eq!(result.is_err(), round % 3 == 1);
        }
    }

    #[test]
    fn short_sleeps_lengthen_the_spin_up_to_a_bound_and_a_long_sleep_resets_it() {
        let (nap, long) = (SPIN_INSTEAD_BELOW, SPIN_INSTEAD_BELOW + Duration::from_micros(1));
        let mut seen = vec![SPINS];
        for slept in [nap, nap, nap, nap, nap, long, nap] {
            seen.push(spins_after(*seen.last().unwrap(), slept));
        }
        let times = [1, 2, 4, 8, 8, 8, 1, 2];
        assert_eq!(seen, times.map(|times| times * SPINS));
    }
}
