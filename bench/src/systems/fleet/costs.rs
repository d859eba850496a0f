//! What decisions cost: the time that each took, on the wall clock, less what the clock itself takes.
//!
//! A decision takes a microsecond and the clock of a thread's processor time is a system call of a quarter of that, so
//! the wall clock it is. What interrupts the thread meanwhile counts too: it shows in the mean more than in the median.

use std::time::Instant;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The decode engine is chosen and its place taken.
    ChooseDecode,
    /// Whether another engine prefills is decided, it is chosen and its place taken.
    ChoosePrefill,
    /// Both engines are said to have served the request, and its places and its entry are given back.
    Finish,
    /// One lease, from its opening to its end: everything that its ledger does for it.
    Lease,
}

impl Kind {
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
pub(crate) struct Costs {
    times: [Histogram<u64>; 4],
    /// What it takes to read the clock twice.
    clock_ns: u64,
    /// Nothing counts until the fleet is as full as it is meant to be.
    pub(crate) counting: bool,
}

impl Costs {
    pub(crate) fn new() -> Self {
        let histogram = || Histogram::new_with_max(10_000_000_000, 3).expect("bounds that are in order");
        let mut samples: Vec<u64> = (0..2_001).map(|_| nanoseconds(Instant::now())).collect();
        samples.sort_unstable();
        Self { times: std::array::from_fn(|_| histogram()), clock_ns: samples[1_000], counting: false }
    }

    /// Runs something, and says how long it took, in nanoseconds.
    pub(crate) fn timed<T>(&self, run: impl FnOnce() -> T) -> (T, u64) {
        let begun = Instant::now();
        let result = run();
        (result, nanoseconds(begun).saturating_sub(self.clock_ns))
    }

    pub(crate) fn count(&mut self, kind: Kind, ns: u64) {
        if self.counting {
            self.times[kind as usize].saturating_record(ns.max(1));
        }
    }

    /// Mean and percentiles of one kind.
    pub(crate) fn of(&self, kind: Kind) -> Value {
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
