//! Costs of decisions: wall-clock time of each, without the time of reading the clock.
//!
//! A decision takes about a microsecond. Reading the clock of a thread's CPU time is a system call that takes a
//! quarter of that. The wall clock is therefore used. Interruptions are included and affect the mean more than the
//! median.

use std::time::Instant;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

/// The kinds of timed decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DecisionKind {
    /// Choice and reservation of a decode engine.
    ChooseDecode,
    /// Decision whether a prefill engine is used, its choice and reservation.
    ChoosePrefill,
    /// Reports that both engines served, release of both reservations and of the request's entry.
    Finish,
    /// All calls of the ledger for one lease, from opening to end.
    Lease,
}

impl DecisionKind {
    pub(crate) const ALL: [Self; 4] = [Self::ChooseDecode, Self::ChoosePrefill, Self::Finish, Self::Lease];

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::ChooseDecode => "choose_decode",
            Self::ChoosePrefill => "choose_prefill",
            Self::Finish => "finish",
            Self::Lease => "lease",
        }
    }
}

/// All times of one run, in nanoseconds.
#[derive(Debug)]
pub(crate) struct DecisionCosts {
    times: [Histogram<u64>; 4],
    /// Time of two reads of the clock.
    clock_ns: u64,
    /// Whether times count. They do not until the fleet has all its requests.
    pub(crate) counting: bool,
}

impl Default for DecisionCosts {
    fn default() -> Self {
        let histogram = || Histogram::new_with_max(10_000_000_000, 3).expect("bounds that are in order");
        let mut samples: Vec<u64> = (0..2_001).map(|_| nanoseconds(Instant::now())).collect();
        samples.sort_unstable();
        Self { times: std::array::from_fn(|_| histogram()), clock_ns: samples[1_000], counting: false }
    }
}

impl DecisionCosts {
    /// Runs a closure and returns its duration in nanoseconds.
    pub(crate) fn timed<T>(&self, run: impl FnOnce() -> T) -> (T, u64) {
        let begun = Instant::now();
        let result = run();
        (result, nanoseconds(begun).saturating_sub(self.clock_ns))
    }

    pub(crate) fn count(&mut self, kind: DecisionKind, ns: u64) {
        if self.counting {
            self.times[kind as usize].saturating_record(ns.max(1));
        }
    }

    /// Mean and percentiles of one kind.
    pub(crate) fn of(&self, kind: DecisionKind) -> Value {
        let times = &self.times[kind as usize];
        json!({
            "count": times.len(),
            "mean_ns": times.mean().round(),
            "p50_ns": times.value_at_quantile(0.5),
            "p99_ns": times.value_at_quantile(0.99),
        })
    }

    pub(crate) fn clock_ns(&self) -> u64 {
        self.clock_ns
    }
}

fn nanoseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
