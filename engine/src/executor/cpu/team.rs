//! The threads of one executor: a team that runs one job together and meets at barriers.
//!
//! A forward pass has about eight phases per layer and lasts a few milliseconds, so the team is woken once
//! per pass, not once per phase; inside, members claim items and meet at a spinning barrier. Which member computes
//! an item never changes the item's result. These are the two levels: threads that are woken for a pass, and items that they
//! claim in it. A level between, members by socket or by shared cache, has not been needed on the machines that there were.
//!
//! Each member begins with its own part of a phase's items, in their order, and helps the others when it is done: so
//! that it reads memory forward, and what it requests ahead is its own. Claiming item by item from one counter, eight
//! sequences' products streamed 27 to 29 GB/s of weights where parts streamed 36 (2-core Xeon guest, 2026-11-21).
//!
//! ```text
//!   idle ── run(job) ──▶ each member: each(items) ▶ barrier ▶ each(items) ▶ … ──▶ idle
//!   a member panics ──▶ poisoned: the others leave at their next barrier, `run` reports it
//! ```
#![allow(unsafe_code)] // a borrowed job is handed to threads that `run` waits for; see each block

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Rounds of the pause instruction before a waiting member gives its core away: about 50 µs. Longer than the
/// gap between two steps of a busy engine, far shorter than a scheduler's time slice.
const SPINS: u32 = 1500;

/// After so many items the caller of a job looks after what it does beside it: the look is a few instructions where there is
/// nothing to do, and the smallest item is a panel of weights multiplied with one row, or one row's norm.
const LOOK_EVERY: usize = 8;

/// A job as seen by the team's threads.
type Job = dyn Fn(&Member<'_>) + Sync;

/// Threads that compute together; the caller of [`Team::run`] is one of them.
#[derive(Debug)]
pub(super) struct Team {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// One member's view of a running job.
pub(super) struct Member<'a> {
    shared: &'a Shared,
    index: usize,
    /// What the caller does beside the job, on its own thread.
    beside: Option<RefCell<&'a mut dyn FnMut()>>,
}

/// A member panicked; the job's results are worthless.
#[derive(Debug)]
pub(super) struct JobPanicked(pub(super) String);

#[derive(Debug)]
struct Shared {
    size: usize,
    /// Number of jobs begun.
    begun: AtomicU64,
    /// The job of the current run; valid from the increment of `begun` until all have finished.
    job: Mutex<Option<JobPointer>>,
    finished: AtomicUsize,
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    closing: AtomicBool,
    /// First panic of the current run.
    panic: Mutex<Option<String>>,
    poisoned: AtomicBool,
    /// Members that have arrived at the current barrier.
    arrived: AtomicUsize,
    /// Barriers passed.
    generation: AtomicUsize,
    /// How far each member's part of the current phase is claimed.
    parts: Box<[Part]>,
}

/// Items claimed of a part, in a cache line of its own (two, because they are fetched in pairs).
#[derive(Debug, Default)]
#[repr(align(128))]
struct Part {
    claimed: AtomicUsize,
}

#[derive(Clone, Copy, Debug)]
struct JobPointer(*const Job);

// SAFETY: the pointee is `Sync`, and `run` keeps it alive until every thread has finished with it.
unsafe impl Send for JobPointer {}

/// The payload with which members leave a job that another member's panic has made pointless.
struct Poisoned;

impl Team {
    /// Starts `size - 1` threads.
    pub(super) fn new(size: usize) -> std::io::Result<Self> {
        let size = size.max(1);
        let shared = Arc::new(Shared {
            size,
            begun: AtomicU64::new(0),
            job: Mutex::new(None),
            finished: AtomicUsize::new(0),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            closing: AtomicBool::new(false),
            panic: Mutex::new(None),
            poisoned: AtomicBool::new(false),
            arrived: AtomicUsize::new(0),
            generation: AtomicUsize::new(0),
            parts: (0..size).map(|_| Part::default()).collect(),
        });
        let mut team = Self { shared, threads: Vec::new() };
        for index in 1..size {
            let shared = Arc::clone(&team.shared);
            let thread = std::thread::Builder::new()
                .name(format!("cpu-{index}"))
                .spawn(move || serve(&shared, index))?;
            team.threads.push(thread);
        }
        Ok(team)
    }

    /// Members, the caller included.
    pub(super) fn size(&self) -> usize {
        self.shared.size
    }

    /// Runs `job` on every member and waits for all of them.
    pub(super) fn run(&mut self, job: &(dyn Fn(&Member<'_>) + Sync)) -> Result<(), JobPanicked> {
        self.run_beside(&mut || (), job)
    }

    /// As [`Self::run`]; `beside` is called on this thread between two items, again and again.
    pub(super) fn run_beside(
        &mut self,
        beside: &mut dyn FnMut(),
        job: &(dyn Fn(&Member<'_>) + Sync),
    ) -> Result<(), JobPanicked> {
        let shared = &*self.shared;
        let pointer: *const (dyn Fn(&Member<'_>) + Sync + '_) = job;
        // SAFETY: only the lifetime changes. Threads use the pointer between the increment of `begun` and
        // their increment of `finished`, and this function does not return before all have done the latter.
        let pointer: *const Job = unsafe { std::mem::transmute(pointer) };
        *lock(&shared.job) = Some(JobPointer(pointer));
        shared.finished.store(0, Ordering::Relaxed);
        shared.begun.fetch_add(1, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = lock(&shared.sleep);
            shared.wake.notify_all();
        }
        work(&Member { shared, index: 0, beside: Some(RefCell::new(beside)) }, job);
        spin_until(|| shared.finished.load(Ordering::Acquire) == shared.size - 1);
        *lock(&shared.job) = None;
        if shared.poisoned.swap(false, Ordering::Relaxed) {
            shared.arrived.store(0, Ordering::Relaxed);
            shared.begin_phase();
            return Err(JobPanicked(lock(&shared.panic).take().unwrap_or_default()));
        }
        Ok(())
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        {
            let _guard = lock(&self.shared.sleep);
            self.shared.begun.fetch_add(1, Ordering::SeqCst);
            self.shared.wake.notify_all();
        }
        for thread in self.threads.drain(..) {
            // A thread's own panics are caught inside; nothing is lost by ignoring the result here.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Nothing is claimed.
    fn begin_phase(&self) {
        for part in &self.parts {
            part.claimed.store(0, Ordering::Relaxed);
        }
    }
}

impl Member<'_> {
    /// Which member this is, below the team's size.
    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// Lets the caller of the job do what it does beside it. On all other members, nothing.
    fn meanwhile(&self) {
        if let Some(beside) = &self.beside {
            (beside.borrow_mut())();
        }
    }

    /// Calls `item` for some of `0..items`, each index on exactly one member, and waits until all are done.
    pub(super) fn each(&self, items: usize, mut item: impl FnMut(usize)) {
        let size = self.shared.size;
        for turn in 0..size {
            let owner = (self.index + turn) % size;
            let (begin, end) = (owner * items / size, (owner + 1) * items / size);
            let claimed = &self.shared.parts[owner].claimed;
            // Looked at first: of many members all come by at the end, and a look can be shared.
            while begin + claimed.load(Ordering::Relaxed) < end {
                let index = begin + claimed.fetch_add(1, Ordering::Relaxed);
                if index < end {
                    item(index);
                    if (index - begin).is_multiple_of(LOOK_EVERY) {
                        self.meanwhile();
                    }
                }
            }
        }
        self.barrier();
    }

    /// Waits until every member is here.
    fn barrier(&self) {
        let shared = self.shared;
        let generation = shared.generation.load(Ordering::Acquire);
        if shared.arrived.fetch_add(1, Ordering::AcqRel) + 1 == shared.size {
            shared.arrived.store(0, Ordering::Relaxed);
            shared.begin_phase();
            shared.generation.store(generation.wrapping_add(1), Ordering::Release);
            return;
        }
        spin_until(|| {
            shared.generation.load(Ordering::Acquire) != generation || shared.poisoned.load(Ordering::Relaxed)
        });
        if shared.poisoned.load(Ordering::Relaxed) {
            resume_unwind(Box::new(Poisoned));
        }
    }
}

/// The life of one thread.
fn serve(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        seen = next_job(shared, seen);
        if shared.closing.load(Ordering::SeqCst) {
            return;
        }
        let job = lock(&shared.job).expect("a job is set before it is announced");
        // SAFETY: `run` keeps the job alive until `finished` has been counted below.
        work(&Member { shared, index, beside: None }, unsafe { &*job.0 });
        shared.finished.fetch_add(1, Ordering::Release);
    }
}

/// Waits for a job after number `seen`: spinning first, asleep after that.
fn next_job(shared: &Shared, seen: u64) -> u64 {
    for _ in 0..SPINS {
        let begun = shared.begun.load(Ordering::SeqCst);
        if begun != seen {
            return begun;
        }
        std::hint::spin_loop();
    }
    let mut guard = lock(&shared.sleep);
    // Counted before the check: either the announcer sees the sleeper, or the sleeper sees the announcement.
    shared.sleepers.fetch_add(1, Ordering::SeqCst);
    let begun = loop {
        let begun = shared.begun.load(Ordering::SeqCst);
        if begun != seen {
            break begun;
        }
        guard = shared.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
    };
    shared.sleepers.fetch_sub(1, Ordering::SeqCst);
    begun
}

/// Runs the job as this member and notes a panic.
fn work(member: &Member<'_>, job: &(dyn Fn(&Member<'_>) + Sync)) {
    let shared = member.shared;
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(member))) {
        if !payload.is::<Poisoned>() {
            lock(&shared.panic).get_or_insert_with(|| describe(payload.as_ref()));
        }
        shared.poisoned.store(true, Ordering::Relaxed);
    }
}

fn describe(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without words".into())
}

fn spin_until(done: impl Fn() -> bool) {
    let mut spins = 0;
    while !done() {
        if spins < SPINS {
            spins += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once_and_phases_do_not_overlap() {
        let mut team = Team::new(3).unwrap();
        let cells: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        for round in 0..50 {
            team.run(&|member| {
                member.each(cells.len(), |i| assert_eq!(cells[i].fetch_add(1, Ordering::Relaxed), round * 2));
                member.each(cells.len(), |i| {
                    assert_eq!(cells[i].fetch_add(1, Ordering::Relaxed), round * 2 + 1)
                });
            })
            .unwrap();
        }
    }

    #[test]
    fn who_is_done_with_its_own_part_helps_the_others() {
        let mut team = Team::new(2).unwrap();
        let done = AtomicUsize::new(0);
        team.run(&|member| {
            member.each(9, |i| {
                if i == 0 {
                    // Of the first part; the rest of it is left to the other member.
                    spin_until(|| done.load(Ordering::Relaxed) == 8);
                }
                done.fetch_add(1, Ordering::Relaxed);
            });
        })
        .unwrap();
        assert_eq!(done.into_inner(), 9);
    }

    #[test]
    fn a_panicking_member_fails_the_job_and_not_the_team() {
        let mut team = Team::new(3).unwrap();
        for _ in 0..10 {
            let error = team
                .run(&|member| {
                    member.each(9, |i| assert!(i != 4, "item four"));
                    member.each(9, |_| ());
                })
                .unwrap_err();
            assert!(error.0.contains("item four"), "{}", error.0);
            assert!(team.run(&|member| member.each(9, |_| ())).is_ok());
        }
    }
}
