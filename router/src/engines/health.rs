//! Whether an engine is given requests: the shell around the pure [`EngineHealth`].
//!
//! ```text
//! what became of requests (exchange, http) ──────────────────▶ ┌──────────────┐
//! answers to GET /health (process::health_probe, timers.rs) ─▶ │ EngineHealth │ ─▶ Standing per leg, one atomic byte
//! comparison with the pool (outlier.rs) ─────────────────────▶ │ (state.rs)   │       read by Pool::reserve
//! operator, configuration ───────────────────────────────────▶ └──────────────┘
//! ```
//!
//! A request that goes well costs three relaxed atomic operations; the lock is taken only when something
//! changed. A change of standing is logged once, where it is caused.

pub(crate) mod breaker;
pub(crate) mod checks;
pub(crate) mod load;
pub(crate) mod outlier;
pub(crate) mod reading;
pub(crate) mod state;
pub(crate) mod timers;

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use baton_connector::Time;

pub(crate) use breaker::Sign;
pub(crate) use load::EngineLoad;
pub(crate) use reading::Reading;
pub(crate) use state::{EngineHealth, Order, Standing, Terms};
pub(crate) use timers::Timers;

use crate::config::HealthConfig;
use crate::metrics::Leg;

/// One engine's health.
pub(crate) struct Health {
    machine: Mutex<EngineHealth>,
    /// [`Standing`] per leg, for those who only want to know whether.
    standing: [AtomicU8; 2],
    /// Legs that it has been in a pool for.
    serves: [AtomicBool; 2],
    /// Set while a leg's breaker has nothing to forget, so that a good answer needs no lock.
    clean: [AtomicBool; 2],
    /// Taken while a leg in [`Standing::Trial`] has its one request.
    trial: [AtomicBool; 2],
    tallies: [Tally; 2],
    reading: ArcSwapOption<Reading>,
    /// The engine's number in `timers`.
    id: u32,
    /// When it wants looking after; see [`crate::process::health_probe`].
    timers: Arc<Timers>,
}

/// What became of one leg's requests since it was last taken.
#[derive(Default)]
struct Tally {
    answers: AtomicU64,
    failures: AtomicU64,
    latency_us: AtomicU64,
}

/// Whether a request may be an engine's one while it is on trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TryOut {
    /// It is not on trial.
    NotOnTrial,
    /// This request is the one.
    Mine,
    /// Another is.
    Taken,
}

/// Microseconds of the process's clock.
pub(crate) fn now() -> Time {
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    Time(u64::try_from(START.elapsed().as_micros()).unwrap_or(u64::MAX))
}

impl Health {
    pub(crate) fn new(terms: &Terms, id: u32, timers: Arc<Timers>) -> Self {
        let standing = EngineHealth::default().standing(Leg::Decode, terms);
        Self {
            machine: Mutex::default(),
            standing: std::array::from_fn(|_| AtomicU8::new(standing as u8)),
            serves: Default::default(),
            clean: std::array::from_fn(|_| AtomicBool::new(true)),
            trial: Default::default(),
            tallies: Default::default(),
            reading: ArcSwapOption::empty(),
            id,
            timers,
        }
    }

    /// Has it looked after when that is due.
    pub(crate) fn arm(&self, terms: &Terms) {
        let machine = self.machine();
        self.timers.set(self.id, machine.due(terms));
    }

    fn machine(&self) -> MutexGuard<'_, EngineHealth> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A pool of this leg has it.
    pub(crate) fn serve(&self, leg: Leg) {
        self.serves[leg as usize].store(true, Ordering::Relaxed);
    }

    /// Whether anybody wants to hear of this leg: it is in a pool for it, or in none yet.
    fn is_told(&self, leg: Leg) -> bool {
        let serves = |leg: Leg| self.serves[leg as usize].load(Ordering::Relaxed);
        serves(leg) || !Leg::BOTH.into_iter().any(serves)
    }

    pub(crate) fn standing(&self, leg: Leg) -> Standing {
        Standing::of(self.standing[leg as usize].load(Ordering::Relaxed))
    }

    /// Whether a request may be sent to it now.
    pub(crate) fn takes(&self, leg: Leg) -> bool {
        match self.standing(leg) {
            Standing::Usable => true,
            Standing::Trial => !self.trial[leg as usize].load(Ordering::Relaxed),
            Standing::Out | Standing::Silent | Standing::Draining => false,
        }
    }

    /// Marks the one request of a trial. Whoever got [`TryOut::Mine`] calls [`Self::tried`].
    pub(crate) fn try_out(&self, leg: Leg) -> TryOut {
        if self.standing(leg) != Standing::Trial {
            TryOut::NotOnTrial
        } else if self.trial[leg as usize].swap(true, Ordering::Relaxed) {
            TryOut::Taken
        } else {
            TryOut::Mine
        }
    }

    /// The one request of a trial is over, however it ended.
    pub(crate) fn tried(&self, leg: Leg) {
        self.trial[leg as usize].store(false, Ordering::Relaxed);
    }

    /// It sent the head of an answer, or refused a request, so long after that was sent. Whether that may have changed
    /// its standing.
    pub(crate) fn spoke(&self, leg: Leg, after: Duration, authority: &str, terms: &Terms) -> bool {
        let tally = &self.tallies[leg as usize];
        tally.answers.fetch_add(1, Ordering::Relaxed);
        let after_us = u64::try_from(after.as_micros()).unwrap_or(u64::MAX);
        tally.latency_us.fetch_add(after_us, Ordering::Relaxed);
        let may_change = !self.clean[leg as usize].load(Ordering::Relaxed);
        if may_change {
            self.change(authority, terms, |machine, now| machine.spoke(now, terms));
        }
        may_change
    }

    /// It answered a request, well and to the end; that it spoke is known already. Whether that may have changed its
    /// standing.
    pub(crate) fn served(&self, leg: Leg, authority: &str, terms: &Terms) -> bool {
        let may_change = !self.clean[leg as usize].load(Ordering::Relaxed);
        if may_change {
            self.change(authority, terms, |machine, now| machine.answered(leg, now, terms));
        }
        may_change
    }

    /// It failed a request.
    pub(crate) fn failed(&self, leg: Leg, sign: Sign, authority: &str, terms: &Terms) {
        // What may be the fault of one source's requests is no comparison of engines.
        if sign == Sign::Trouble {
            let tally = &self.tallies[leg as usize];
            tally.answers.fetch_add(1, Ordering::Relaxed);
            tally.failures.fetch_add(1, Ordering::Relaxed);
        }
        self.change(authority, terms, |machine, now| machine.failed(leg, sign, now, terms));
    }

    /// Changes the machine and makes the change known; with what came of it, whether a standing has changed.
    pub(crate) fn change<T>(
        &self,
        authority: &str,
        terms: &Terms,
        with: impl FnOnce(&mut EngineHealth, Time) -> T,
    ) -> (T, bool) {
        let mut machine = self.machine();
        let before = *machine;
        let result = with(&mut machine, now());
        machine.forget_spent_order(terms);
        let mut moved = false;
        for leg in Leg::BOTH {
            let (was, is) = (self.standing(leg), machine.standing(leg, terms));
            self.standing[leg as usize].store(is as u8, Ordering::Relaxed);
            self.clean[leg as usize].store(machine.is_clean(leg), Ordering::Relaxed);
            moved |= was != is;
            if was != is && self.is_told(leg) {
                told(authority, leg, is, &machine.reasons_of(leg, terms), &before.reasons_of(leg, terms));
            }
        }
        let due = machine.due(terms);
        if due != before.due(terms) {
            self.timers.set(self.id, due);
        }
        (result, moved)
    }

    /// A copy, for people.
    pub(crate) fn snapshot(&self) -> EngineHealth {
        *self.machine()
    }

    /// What became of a leg's requests since the last call.
    pub(crate) fn sample(&self, leg: Leg) -> outlier::Sample {
        let tally = &self.tallies[leg as usize];
        let failures = tally.failures.swap(0, Ordering::Relaxed);
        let answers = tally.answers.swap(0, Ordering::Relaxed).max(failures);
        let latency_us = tally.latency_us.swap(0, Ordering::Relaxed);
        outlier::Sample { answers, failures, latency_us, out: self.standing(leg) > Standing::Trial }
    }

    /// What the engine last said of its load, unless that is too long ago.
    pub(crate) fn reading(
        &self,
        now: impl FnOnce() -> Instant,
        stale: impl FnOnce() -> Duration,
    ) -> Option<Reading> {
        self.reading.load().as_deref().and_then(|reading| reading.fresh(now(), stale()))
    }

    pub(crate) fn set_reading(&self, reading: Reading) {
        self.reading.store(Some(Arc::new(reading)));
    }
}

/// Says that a standing has changed: why it is what it is, or what has ended.
fn told(engine: &str, leg: Leg, is: Standing, why: &[&str], was: &[&str]) {
    let (leg, standing) = (leg.label(), is.label());
    match is {
        Standing::Usable => tracing::info!(engine, leg, standing, ?was, "engine returned to rotation"),
        Standing::Trial => tracing::info!(engine, leg, standing, ?was, "engine on trial"),
        Standing::Out | Standing::Silent | Standing::Draining => {
            tracing::warn!(engine, leg, standing, ?why, "engine removed from rotation");
        }
    }
}

impl HealthConfig {
    /// The terms of one engine.
    pub(crate) fn terms(&self, drain: bool) -> state::Terms {
        let ms = Duration::from_millis;
        state::Terms {
            breaker: breaker::Terms {
                failures: self.breaker.failures,
                cool_down: ms(self.breaker.cool_down_ms),
                cool_down_max: ms(self.breaker.cool_down_max_ms.max(self.breaker.cool_down_ms)),
            },
            checks: checks::Terms { healthy: self.active.healthy, unhealthy: self.active.unhealthy },
            check_every: ms(self.active.interval_ms),
            ejection: ms(self.outlier.ejection_ms),
            drain,
            load_stale: ms(self.load.stale_ms),
        }
    }

    /// The terms of the comparison with the other engines of the pool.
    pub(crate) fn outlier_terms(&self) -> outlier::Terms {
        outlier::Terms {
            requests_min: self.outlier.requests_min,
            failure_percent: u64::from(self.outlier.failure_percent),
            latency_factor: self.outlier.latency_factor,
            max_ejected_percent: usize::from(self.outlier.max_ejected_percent),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leg_that_an_engine_is_in_no_pool_for_is_not_told() {
        let health = Health::new(&state::tests::TERMS, 0, Arc::default());
        assert_eq!(Leg::BOTH.map(|leg| health.is_told(leg)), [true, true], "it is in none yet");
        health.serve(Leg::Decode);
        assert_eq!(Leg::BOTH.map(|leg| health.is_told(leg)), [false, true]);
        health.serve(Leg::Prefill);
        assert_eq!(Leg::BOTH.map(|leg| health.is_told(leg)), [true, true]);
    }

    #[test]
    fn what_may_be_its_requests_fault_is_not_compared_with_other_engines() {
        let terms = state::tests::TERMS;
        let health = Health::new(&terms, 0, Arc::default());
        for _ in 0..5 {
            health.failed(Leg::Decode, Sign::Suspect(1), "x:1", &terms);
        }
        assert_eq!(health.sample(Leg::Decode), outlier::Sample::default());
        health.spoke(Leg::Decode, Duration::from_micros(7), "x:1", &terms);
        health.served(Leg::Decode, "x:1", &terms);
        health.failed(Leg::Decode, Sign::Trouble, "x:1", &terms);
        let sample = outlier::Sample { answers: 2, failures: 1, latency_us: 7, out: false };
        assert_eq!(health.sample(Leg::Decode), sample);
    }
}
