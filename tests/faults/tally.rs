//! Counts of injected faults and of outcomes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::plan::{Phase, Round};
use crate::prompt::ClientOutcome;

#[derive(Default)]
pub(crate) struct Tally(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    /// Injected faults by target and kind, and the phases of the requests at that moment.
    injections: BTreeMap<(&'static str, &'static str), BTreeMap<Phase, u64>>,
    rounds: BTreeMap<(&'static str, &'static str), u64>,
    outcomes: BTreeMap<String, u64>,
    settled: Vec<Duration>,
    expired: f64,
}

impl Tally {
    pub(crate) fn record_injection(&self, round: &Round, seen: &BTreeSet<Phase>) {
        let mut counts = self.lock();
        let cell = (round.target.name(), round.injection.name());
        *counts.rounds.entry(cell).or_default() += 1;
        let row = counts.injections.entry(cell).or_default();
        for phase in seen {
            *row.entry(*phase).or_default() += 1;
        }
    }

    pub(crate) fn record_outcome(&self, outcome: ClientOutcome) {
        let name = match outcome {
            ClientOutcome::Right => "right".to_owned(),
            ClientOutcome::Refused(status) => format!("error {status}"),
            ClientOutcome::BrokenOff => "broken off by an error event".to_owned(),
            ClientOutcome::Cut => "cut in its answer".to_owned(),
            ClientOutcome::Unanswered => "no answer".to_owned(),
            ClientOutcome::Left => "left by itself".to_owned(),
        };
        *self.lock().outcomes.entry(name).or_default() += 1;
    }

    pub(crate) fn settled(&self, within: Duration) {
        self.lock().settled.push(within);
    }

    pub(crate) fn expired(&self, leases: f64) {
        self.lock().expired += leases;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut counts = self.lock();
        write!(f, "{:<16}{:<20}{:>7} |", "target", "harm", "rounds")?;
        for phase in Phase::ALL {
            write!(f, "{:>9}", phase.name())?;
        }
        writeln!(f, "   (rounds with a request in that phase at the moment of the harm)")?;
        for (cell, phases) in &counts.injections {
            write!(f, "{:<16}{:<20}{:>7} |", cell.0, cell.1, counts.rounds[cell])?;
            for phase in Phase::ALL {
                write!(f, "{:>9}", phases.get(&phase).copied().unwrap_or(0))?;
            }
            writeln!(f)?;
        }
        let outcomes: Vec<String> =
            counts.outcomes.iter().map(|(what, count)| format!("{what}: {count}")).collect();
        writeln!(f, "clients: {}", outcomes.join(", "))?;
        writeln!(f, "leases that ended by expiry: {}", counts.expired)?;
        counts.settled.sort();
        let at = |part: usize| {
            counts
                .settled
                .get((counts.settled.len() * part / 100).min(counts.settled.len().saturating_sub(1)))
                .copied()
                .unwrap_or_default()
        };
        write!(
            f,
            "everything back after the last answer: half of the rounds within {:.1?}, 99 % within {:.1?}, all within {:.1?}",
            at(50),
            at(99),
            at(100)
        )
    }
}
