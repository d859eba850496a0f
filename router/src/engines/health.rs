//! Whether an engine may receive requests: the shell around the pure [`HealthState`].
//!
//! ```text
//! outcomes of requests (exchange, http) ──────────────────────▶ ┌──────────────┐
//! replies to GET /health (process::health_probe, timers.rs) ──▶ │ Health       │ ─▶ Standing per leg, one atomic byte
//! comparison with the pool (outlier.rs) ──────────────────────▶ │ (state.rs)   │       read by Pool::reserve
//! operator, configuration ────────────────────────────────────▶ └──────────────┘
//! ```
//!
//! A successful request costs three relaxed atomic operations. The lock is taken only when something changed. A
//! change of standing is logged once, where it is caused.

pub(crate) mod breaker;
pub(crate) mod checks;
pub(crate) mod load;
pub(crate) mod load_reading;
pub(crate) mod outlier;
pub(crate) mod state;
pub(crate) mod timers;

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use baton_connector::Time;

pub(crate) use breaker::FailureKind;
pub(crate) use load::EngineLoad;
pub(crate) use load_reading::LoadReading;
pub(crate) use state::{HealthState, HealthTerms, OperatorOrder, Standing};
pub(crate) use timers::HealthTimers;

use crate::config::HealthConfig;
use crate::metrics::Leg;

/// The header by which a routing sidecar names the leg whose engine failed. A picker counts the failure there. Clients'
/// requests and engines' responses do not have it: the sidecar removes their own.
pub(crate) const FAILED_LEG: &str = "x-baton-failed-leg";

/// One engine's health.
pub(crate) struct Health {
    state: Mutex<HealthState>,
    /// [`Standing`] per leg, for reads without the lock.
    standing: [AtomicU8; 2],
    /// Legs of the pools that have contained the engine.
    serves: [AtomicBool; 2],
    /// Set while a leg's breaker has nothing to reset, so that a successful reply needs no lock.
    clean: [AtomicBool; 2],
    /// Set while the trial request of a leg in [`Standing::Trial`] is in progress.
    trial: [AtomicBool; 2],
    counters: [LegCounters; 2],
    reading: ArcSwapOption<LoadReading>,
    /// The engine's number in `timers`.
    id: u32,
    /// When its health is due; see [`crate::process::health_probe`].
    timers: Arc<HealthTimers>,
}

/// Outcomes of one leg's requests since the last sample.
#[derive(Default)]
struct LegCounters {
    answers: AtomicU64,
    failures: AtomicU64,
    latency_us: AtomicU64,
}

/// Whether a request may be the trial request of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TrialSlot {
    /// The engine is not on trial.
    NotOnTrial,
    /// This request is the trial request.
    Claimed,
    /// Another request is.
    Taken,
}

/// Microseconds of the process's clock.
pub(crate) fn now() -> Time {
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    Time(u64::try_from(START.elapsed().as_micros()).unwrap_or(u64::MAX))
}

impl Health {
    pub(crate) fn new(terms: &HealthTerms, id: u32, timers: Arc<HealthTimers>) -> Self {
        let standing = HealthState::default().standing(Leg::Decode, terms);
        Self {
            state: Mutex::default(),
            standing: std::array::from_fn(|_| AtomicU8::new(standing as u8)),
            serves: Default::default(),
            clean: std::array::from_fn(|_| AtomicBool::new(true)),
            trial: Default::default(),
            counters: Default::default(),
            reading: ArcSwapOption::empty(),
            id,
            timers,
        }
    }

    /// Schedules the next check of the engine.
    pub(crate) fn arm(&self, terms: &HealthTerms) {
        let machine = self.state();
        self.timers.set(self.id, machine.due(terms));
    }

    fn state(&self) -> MutexGuard<'_, HealthState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Called when a pool of this leg contains the engine.
    pub(crate) fn add_leg(&self, leg: Leg) {
        self.serves[leg as usize].store(true, Ordering::Relaxed);
    }

    /// Whether changes of this leg are logged: a pool contains the engine for it, or no pool contains the engine
    /// yet.
    fn is_reported(&self, leg: Leg) -> bool {
        let serves = |leg: Leg| self.serves[leg as usize].load(Ordering::Relaxed);
        serves(leg) || !Leg::BOTH.into_iter().any(serves)
    }

    pub(crate) fn standing(&self, leg: Leg) -> Standing {
        Standing::of(self.standing[leg as usize].load(Ordering::Relaxed))
    }

    /// Whether a request may be sent to the engine now.
    pub(crate) fn accepts(&self, leg: Leg) -> bool {
        match self.standing(leg) {
            Standing::Usable => true,
            Standing::Trial => !self.trial[leg as usize].load(Ordering::Relaxed),
            Standing::Ejected | Standing::Unresponsive | Standing::Draining => false,
        }
    }

    /// Claims the trial request. After [`TrialSlot::Claimed`] the caller must call [`Self::end_trial`].
    pub(crate) fn claim_trial(&self, leg: Leg) -> TrialSlot {
        if self.standing(leg) != Standing::Trial {
            TrialSlot::NotOnTrial
        } else if self.trial[leg as usize].swap(true, Ordering::Relaxed) {
            TrialSlot::Taken
        } else {
            TrialSlot::Claimed
        }
    }

    /// Ends the trial request, whatever its outcome.
    pub(crate) fn end_trial(&self, leg: Leg) {
        self.trial[leg as usize].store(false, Ordering::Relaxed);
    }

    /// Records that the engine sent a response head or refused a request, `after` this time. Returns whether the
    /// standing may have changed.
    pub(crate) fn responded(&self, leg: Leg, after: Duration, authority: &str, terms: &HealthTerms) -> bool {
        let tally = &self.counters[leg as usize];
        tally.answers.fetch_add(1, Ordering::Relaxed);
        let after_us = u64::try_from(after.as_micros()).unwrap_or(u64::MAX);
        tally.latency_us.fetch_add(after_us, Ordering::Relaxed);
        let may_change = !self.clean[leg as usize].load(Ordering::Relaxed);
        if may_change {
            self.change(authority, terms, |machine, now| machine.responded(now, terms));
        }
        may_change
    }

    /// Records that the engine completed a request. The response head was recorded before. Returns whether the
    /// standing may have changed.
    pub(crate) fn completed(&self, leg: Leg, authority: &str, terms: &HealthTerms) -> bool {
        let may_change = !self.clean[leg as usize].load(Ordering::Relaxed);
        if may_change {
            self.change(authority, terms, |machine, now| machine.completed(leg, now, terms));
        }
        may_change
    }

    /// Records that the engine failed a request.
    pub(crate) fn failed(&self, leg: Leg, kind: FailureKind, authority: &str, terms: &HealthTerms) {
        // A possible fault of one source's requests does not enter the comparison of engines.
        if kind == FailureKind::EngineFault {
            let tally = &self.counters[leg as usize];
            tally.answers.fetch_add(1, Ordering::Relaxed);
            tally.failures.fetch_add(1, Ordering::Relaxed);
        }
        self.change(authority, terms, |machine, now| machine.failed(leg, kind, now, terms));
    }

    /// Changes the state and publishes the change. Returns the closure's result, and whether a standing has
    /// changed.
    pub(crate) fn change<T>(
        &self,
        authority: &str,
        terms: &HealthTerms,
        with: impl FnOnce(&mut HealthState, Time) -> T,
    ) -> (T, bool) {
        let mut machine = self.state();
        let before = *machine;
        let result = with(&mut machine, now());
        machine.forget_obsolete_order(terms);
        let mut moved = false;
        for leg in Leg::BOTH {
            let (was, is) = (self.standing(leg), machine.standing(leg, terms));
            self.standing[leg as usize].store(is as u8, Ordering::Relaxed);
            self.clean[leg as usize].store(machine.is_clean(leg), Ordering::Relaxed);
            moved |= was != is;
            if was != is && self.is_reported(leg) {
                log_change(
                    authority,
                    leg,
                    is,
                    &machine.reasons_of(leg, terms),
                    &before.reasons_of(leg, terms),
                );
            }
        }
        let due = machine.due(terms);
        if due != before.due(terms) {
            self.timers.set(self.id, due);
        }
        (result, moved)
    }

    /// A copy of the state.
    pub(crate) fn snapshot(&self) -> HealthState {
        *self.state()
    }

    /// Outcomes of a leg's requests since the last call.
    pub(crate) fn sample(&self, leg: Leg) -> outlier::OutlierSample {
        let tally = &self.counters[leg as usize];
        let failures = tally.failures.swap(0, Ordering::Relaxed);
        let answers = tally.answers.swap(0, Ordering::Relaxed).max(failures);
        let latency_us = tally.latency_us.swap(0, Ordering::Relaxed);
        outlier::OutlierSample {
            answers,
            failures,
            latency_us,
            is_excluded: self.standing(leg) > Standing::Trial,
        }
    }

    /// The engine's last reported load, unless it is stale.
    pub(crate) fn reading(
        &self,
        now: impl FnOnce() -> Instant,
        stale: impl FnOnce() -> Duration,
    ) -> Option<LoadReading> {
        self.reading.load().as_deref().and_then(|reading| reading.fresh(now(), stale()))
    }

    pub(crate) fn set_reading(&self, reading: LoadReading) {
        self.reading.store(Some(Arc::new(reading)));
    }
}

/// Logs a change of standing: the reasons for it, or the reasons that have ended.
fn log_change(engine: &str, leg: Leg, is: Standing, why: &[&str], was: &[&str]) {
    let (leg, standing) = (leg.label(), is.label());
    match is {
        Standing::Usable => tracing::info!(
            event = "engine_returned",
            engine,
            leg,
            standing,
            ?was,
            "engine returned to rotation"
        ),
        Standing::Trial => {
            tracing::info!(event = "engine_on_trial", engine, leg, standing, ?was, "engine on trial");
        }
        Standing::Ejected | Standing::Unresponsive | Standing::Draining => {
            tracing::warn!(
                event = "engine_removed",
                engine,
                leg,
                standing,
                ?why,
                "engine removed from rotation"
            );
        }
    }
}

impl HealthConfig {
    /// The terms of an engine that the configuration does not drain.
    pub(crate) fn terms(&self) -> state::HealthTerms {
        let ms = Duration::from_millis;
        state::HealthTerms {
            breaker: breaker::BreakerTerms {
                failures: self.breaker.failures,
                cool_down: ms(self.breaker.cool_down_ms),
                cool_down_max: ms(self.breaker.cool_down_max_ms.max(self.breaker.cool_down_ms)),
            },
            checks: checks::CheckTerms { healthy: self.active.healthy, unhealthy: self.active.unhealthy },
            check_every: ms(self.active.interval_ms),
            ejection: ms(self.outlier.ejection_ms),
            drain: false,
            load_stale: ms(self.load.stale_ms),
        }
    }

    /// The terms of the comparison with the other engines of the pool.
    pub(crate) fn outlier_terms(&self) -> outlier::OutlierTerms {
        outlier::OutlierTerms {
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
    fn a_leg_without_a_pool_of_the_engine_is_not_reported() {
        let health = Health::new(&state::tests::TERMS, 0, Arc::default());
        assert_eq!(Leg::BOTH.map(|leg| health.is_reported(leg)), [true, true], "it is in none yet");
        health.add_leg(Leg::Decode);
        assert_eq!(Leg::BOTH.map(|leg| health.is_reported(leg)), [false, true]);
        health.add_leg(Leg::Prefill);
        assert_eq!(Leg::BOTH.map(|leg| health.is_reported(leg)), [true, true]);
    }

    #[test]
    fn failures_that_may_be_the_requests_fault_are_no_outlier_samples() {
        let terms = state::tests::TERMS;
        let health = Health::new(&terms, 0, Arc::default());
        for _ in 0..5 {
            health.failed(Leg::Decode, FailureKind::PossibleFault(1), "x:1", &terms);
        }
        assert_eq!(health.sample(Leg::Decode), outlier::OutlierSample::default());
        health.responded(Leg::Decode, Duration::from_micros(7), "x:1", &terms);
        health.completed(Leg::Decode, "x:1", &terms);
        health.failed(Leg::Decode, FailureKind::EngineFault, "x:1", &terms);
        let sample = outlier::OutlierSample { answers: 2, failures: 1, latency_us: 7, is_excluded: false };
        assert_eq!(health.sample(Leg::Decode), sample);
    }
}
