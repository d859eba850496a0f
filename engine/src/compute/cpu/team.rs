//! The threads of one executor: a team that runs one job together, phase by phase.
//!
//! A forward pass has about eight phases per layer and lasts a few milliseconds, so the team is woken once
//! per pass, not once per phase; inside, members claim items, and a phase is over when all of its items are done. Which member
//! computes an item never changes the item's result. These are the two levels: threads that are woken for a pass, and items that
//! they claim in it. A level between, members by socket or by shared cache, has not been needed on the machines that there were.
//!
//! **Items are waited for, not members.** Where somebody else uses a core, a member stands still for milliseconds wherever it
//! happens to be. If it has no item in hand, nobody misses it: the others take its part, go on through the phases, and end the
//! job without it if it has not come in; when it runs again it passes over what is done. If it has one, the others spin for as
//! long as a healthy wait takes, by what waits have taken lately, and then sleep. They do not yield: on Linux's scheduler
//! (EEVDF) each yield puts a thread off by a turn, and who sleeps is let in soon after it is woken.
//!
//! Each member begins with its own part of a phase's items, in their order, and helps the others when it is done: so
//! that it reads memory forward, and what it requests ahead is its own. Claiming item by item from one counter, eight
//! sequences' products streamed 27 to 29 GB/s of weights where parts streamed 36 (2-core Xeon guest, 2026-11-21).
//!
//! ```text
//!   idle ── run(job) ──▶ each member: each(items) ▶ all done ▶ each(items) ▶ … ──▶ idle
//!      └── comes when the job is over: missed it, idle
//!   a member panics ──▶ poisoned: the others leave at their next wait, `run` reports it
//! ```
#![allow(unsafe_code)] // a borrowed job is handed to threads that `run` waits for; see each block

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Rounds of the pause instruction before a waiting member goes to sleep: about 50 µs. Longer than the
/// gap between two steps of a busy engine and than most waits for an item, far shorter than a scheduler's time slice.
const SPINS: u32 = 1500;
/// As many at most, where waits have been a little longer lately: the large items of a long prefill.
const MOST_SPINS: u32 = 8 * SPINS;
/// Who has slept no longer than this would rather have gone on spinning: to be woken takes about 50 µs itself.
/// Somebody else's turn on the core is longer.
const NAP: Duration = Duration::from_micros(300);

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
    /// The phase that this member comes to next.
    phase: Cell<u32>,
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
    /// The job that may be joined.
    open: Mutex<Open>,
    /// Threads that have left the job again.
    left: AtomicUsize,
    closing: AtomicBool,
    /// First panic of the current run.
    panic: Mutex<Option<String>>,
    poisoned: AtomicBool,
    /// Phases of the job that are over. The next one's items can be claimed.
    passed: AtomicU32,
    /// Items of the current phase that are done, by members that found no more to claim.
    done: AtomicUsize,
    /// How far each member's part is claimed.
    parts: Box<[Part]>,
    /// Where threads sleep that have no job.
    idle: Room,
    /// Where members sleep that wait for another's items, and the caller until all have left.
    waiting: Room,
}

/// Items claimed of a part in a phase, in a cache line of its own (two, because they are fetched in pairs).
#[derive(Debug, Default)]
#[repr(align(128))]
struct Part {
    /// The phase in the upper half, how many in the lower. Whoever comes late from an earlier phase sees by it that there
    /// is nothing to claim.
    claimed: AtomicU64,
}

#[derive(Debug, Default)]
struct Open {
    /// None: between jobs.
    job: Option<JobPointer>,
    /// Threads that have come in.
    joined: usize,
}

/// Where threads sleep until something is so.
#[derive(Debug)]
struct Room {
    /// Rounds of spinning before sleep, by what the last sleeps were good for.
    patience: AtomicU32,
    /// Somebody may be asleep, or about to be.
    asleep: AtomicBool,
    door: Mutex<()>,
    bell: Condvar,
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
            open: Mutex::default(),
            left: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            panic: Mutex::new(None),
            poisoned: AtomicBool::new(false),
            passed: AtomicU32::new(0),
            done: AtomicUsize::new(0),
            parts: (0..size).map(|_| Part::default()).collect(),
            idle: Room::new(),
            waiting: Room::new(),
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

    /// Runs `job` on every member that comes in before it is done, and waits for all of them. Every member calls
    /// [`Member::each`] with the same numbers of items in the same order; what it keeps for itself from one phase to the
    /// next must not count, because it may have no part in any of them.
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
        // SAFETY: only the lifetime changes. Threads take the pointer where they join, which is refused once the job is
        // taken out below, and this function does not return before all that joined have left.
        let pointer: *const Job = unsafe { std::mem::transmute(pointer) };
        // Nobody is in a job now.
        shared.passed.store(0, Ordering::Relaxed);
        shared.done.store(0, Ordering::Relaxed);
        shared.left.store(0, Ordering::Relaxed);
        for part in &shared.parts {
            part.claimed.store(0, Ordering::Relaxed);
        }
        {
            let mut open = lock(&shared.open);
            *open = Open { job: Some(JobPointer(pointer)), joined: 0 };
            shared.begun.fetch_add(1, Ordering::Release);
        }
        shared.idle.ring();
        work(&Member { shared, index: 0, phase: Cell::new(0), beside: Some(RefCell::new(beside)) }, job);
        let joined = std::mem::take(&mut *lock(&shared.open)).joined;
        shared.waiting.wait(|| shared.left.load(Ordering::Acquire) == joined);
        if shared.poisoned.swap(false, Ordering::Relaxed) {
            return Err(JobPanicked(lock(&shared.panic).take().unwrap_or_default()));
        }
        Ok(())
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        self.shared.begun.fetch_add(1, Ordering::Release);
        self.shared.idle.ring();
        for thread in self.threads.drain(..) {
            // A thread's own panics are caught inside; nothing is lost by ignoring the result here.
            let _ = thread.join();
        }
    }
}

impl Room {
    fn new() -> Self {
        let (asleep, door, bell) = (AtomicBool::new(false), Mutex::default(), Condvar::new());
        Self { patience: AtomicU32::new(SPINS), asleep, door, bell }
    }

    /// Waits until `so`: spinning first, asleep after that.
    fn wait(&self, so: impl Fn() -> bool) {
        let patience = self.patience.load(Ordering::Relaxed);
        for _ in 0..patience {
            if so() {
                return;
            }
            std::hint::spin_loop();
        }
        let start = Instant::now();
        self.sleep(so);
        self.patience.store(patience_after(patience, start.elapsed()), Ordering::Relaxed);
    }

    fn sleep(&self, so: impl Fn() -> bool) {
        let mut guard = lock(&self.door);
        loop {
            // Said before the look: either who rings sees the sleeper, or the sleeper sees what was rung for.
            self.asleep.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if so() {
                return;
            }
            guard = self.bell.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Wakes who sleeps here. What they wait for was stored before.
    fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            let guard = lock(&self.door);
            self.asleep.store(false, Ordering::Relaxed);
            drop(guard);
            self.bell.notify_all();
        }
    }
}

impl Part {
    /// The next item of this part, of `items`, if in `phase` there is one left.
    fn claim(&self, phase: u32, items: usize) -> Option<usize> {
        let first = u64::from(phase) << 32;
        // Looked at first: of many members all come by at the end, and a look can be shared.
        let mut seen = self.claimed.load(Ordering::Relaxed);
        loop {
            // What an earlier phase has left is nothing; what a later one has begun is not for this member.
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

    /// Calls `item` for some of `0..items`, each index on exactly one member, and waits until all are done. A member that
    /// comes when they are may be asked for none.
    pub(super) fn each(&self, items: usize, mut item: impl FnMut(usize)) {
        if items == 0 {
            return;
        }
        assert!(u32::try_from(items).is_ok(), "{items} items of one phase");
        let (shared, size) = (self.shared, self.shared.size);
        let phase = self.phase.get();
        self.phase.set(phase + 1);
        let over = || shared.passed.load(Ordering::Acquire) > phase;
        if over() {
            return;
        }
        let mut mine = 0;
        for turn in 0..size {
            let owner = (self.index + turn) % size;
            let (begin, end) = (owner * items / size, (owner + 1) * items / size);
            while let Some(index) = shared.parts[owner].claim(phase, end - begin) {
                item(begin + index);
                mine += 1;
                if index.is_multiple_of(LOOK_EVERY) {
                    self.meanwhile();
                }
            }
        }
        // Who has none may be late, and must not touch the count of a later phase.
        if mine > 0 && shared.done.fetch_add(mine, Ordering::AcqRel) + mine == items {
            shared.done.store(0, Ordering::Relaxed);
            shared.passed.store(phase + 1, Ordering::Release);
            shared.waiting.ring();
            return;
        }
        shared.waiting.wait(|| over() || shared.poisoned.load(Ordering::Relaxed));
        if shared.poisoned.load(Ordering::Relaxed) {
            resume_unwind(Box::new(Poisoned));
        }
    }
}

/// The life of one thread.
fn serve(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        shared.idle.wait(|| shared.begun.load(Ordering::Acquire) != seen);
        let job = {
            let mut open = lock(&shared.open);
            seen = shared.begun.load(Ordering::Acquire);
            open.joined += usize::from(open.job.is_some());
            open.job
        };
        if shared.closing.load(Ordering::Relaxed) {
            return;
        }
        // Without one, it was over before this thread came.
        let Some(job) = job else { continue };
        // SAFETY: this thread has joined: `run` keeps the job alive until it has left.
        work(&Member { shared, index, phase: Cell::new(0), beside: None }, unsafe { &*job.0 });
        shared.left.fetch_add(1, Ordering::Release);
        shared.waiting.ring();
    }
}

/// Rounds of spinning before the next sleep, after one that followed on `patience` rounds.
fn patience_after(patience: u32, slept: Duration) -> u32 {
    if slept <= NAP { (2 * patience).min(MOST_SPINS) } else { SPINS }
}

/// Runs the job as this member and notes a panic.
fn work(member: &Member<'_>, job: &(dyn Fn(&Member<'_>) + Sync)) {
    let shared = member.shared;
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(member))) {
        if !payload.is::<Poisoned>() {
            lock(&shared.panic).get_or_insert_with(|| describe(payload.as_ref()));
        }
        shared.poisoned.store(true, Ordering::Relaxed);
        shared.waiting.ring();
    }
}

fn describe(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without words".into())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits for something that must come; that it does not is a failed test, not one that hangs.
    fn until(so: impl Fn() -> bool) {
        let start = Instant::now();
        while !so() {
            assert!(start.elapsed() < Duration::from_secs(30), "waited in vain");
            std::thread::yield_now();
        }
    }

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
                    until(|| done.load(Ordering::Relaxed) == 8);
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

    #[test]
    fn who_has_no_item_is_not_waited_for() {
        let mut team = Team::new(3).unwrap();
        for _ in 0..3 {
            let done = AtomicUsize::new(0);
            team.run(&|member| {
                if member.index() > 0 {
                    until(|| done.load(Ordering::Relaxed) == 140);
                }
                for _ in 0..20 {
                    member.each(7, |_| {
                        assert_eq!(member.index(), 0, "all was done when the others came");
                        done.fetch_add(1, Ordering::Relaxed);
                    });
                }
            })
            .unwrap();
            assert_eq!(done.into_inner(), 140);
        }
    }

    #[test]
    fn who_comes_late_joins_the_others_where_they_are() {
        let mut team = Team::new(2).unwrap();
        let done: Vec<AtomicUsize> = (0..8).map(|_| AtomicUsize::new(0)).collect();
        team.run(&|member| {
            if member.index() == 1 {
                until(|| done[4].load(Ordering::Relaxed) == 9);
            }
            for (phase, done) in done.iter().enumerate() {
                member.each(9, |_| {
                    if phase == 5 && member.index() == 0 {
                        // All others of this phase are left to the other member.
                        until(|| done.load(Ordering::Relaxed) == 8);
                    }
                    assert!(phase >= 5 || member.index() == 0, "phase {phase} was over");
                    done.fetch_add(1, Ordering::Relaxed);
                });
            }
        })
        .unwrap();
        assert!(done.into_iter().all(|done| done.into_inner() == 9));
    }

    #[test]
    fn a_part_is_claimed_once_in_each_phase() {
        let part = Part::default();
        assert_eq!([part.claim(0, 2), part.claim(0, 2), part.claim(0, 2)], [Some(0), Some(1), None]);
        assert_eq!(part.claim(1, 2), Some(0));
        assert_eq!(part.claim(0, 9), None, "who comes from an earlier phase has nothing to do with this one");
        assert_eq!([part.claim(1, 2), part.claim(1, 2), part.claim(3, 1)], [Some(1), None, Some(0)]);
    }

    #[test]
    fn a_job_may_be_over_before_a_thread_has_come() {
        let mut team = Team::new(5).unwrap();
        let done = AtomicUsize::new(0);
        for round in 1..=5000 {
            team.run(&|member| {
                member.each(0, |_| unreachable!());
                member.each(1, |_| {
                    done.fetch_add(1, Ordering::Relaxed);
                });
            })
            .unwrap();
            assert_eq!(done.load(Ordering::Relaxed), round);
        }
    }

    #[test]
    fn who_sleeps_is_woken() {
        let mut team = Team::new(2).unwrap();
        for round in 0..60 {
            let joined = AtomicBool::new(false);
            let result = team.run(&|member| {
                let asleep = || member.shared.waiting.asleep.load(Ordering::Relaxed);
                if member.index() == 1 {
                    joined.store(true, Ordering::Relaxed);
                }
                member.each(1, |_| {
                    until(|| joined.load(Ordering::Relaxed) && asleep());
                    assert!(round % 3 != 1, "while the other sleeps");
                });
                if round % 3 == 2 && member.index() == 1 {
                    // The caller waits for this thread to leave.
                    until(asleep);
                }
            });
            assert_eq!(result.is_err(), round % 3 == 1);
        }
    }

    #[test]
    fn naps_make_patient_up_to_a_bound_and_a_long_sleep_ends_it() {
        let (nap, long) = (NAP, NAP + Duration::from_micros(1));
        let mut seen = vec![SPINS];
        for slept in [nap, nap, nap, nap, nap, long, nap] {
            seen.push(patience_after(*seen.last().unwrap(), slept));
        }
        let times = [1, 2, 4, 8, 8, 8, 1, 2];
        assert_eq!(seen, times.map(|times| times * SPINS));
    }
}
