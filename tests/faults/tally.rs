//! What was done and what came of it, counted.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::plan::{Phase, Round};
use crate::question::Fared;

#[derive(Default)]
pub(crate) struct Tally(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    /// Harms by target and kind, and the phases in which requests were at that moment.
    harms: BTreeMap<(&'static str, &'static str), BTreeMap<Phase, u64>>,
    rounds: BTreeMap<(&'static str, &'static str), u64>,
    fared: BTreeMap<String, u64>,
    settled: Vec<Duration>,
    expired: f64,
}

impl Tally {
    pub(crate) fn harmed(&self, round: &Round, seen: &BTreeSet<Phase>) {
        let mut counts = self.lock();
        let cell = (round.target.name(), round.harm.name());
        *counts.rounds.entry(cell).or_default() += 1;
        let row = counts.harms.entry(cell).or_default();
        for phase in seen {
            *row.entry(*phase).or_default() += 1;
        }
    }

    pub(crate) fn fared(&self, fared: Fared) {
        let name = match fared {
            Fared::Right => "right".to_owned(),
            Fared::Refused(status) => format!("error {status}"),
            Fared::BrokenOff => "broken off by an error event".to_owned(),
            Fared::Cut => "cut in its answer".to_owned(),
            Fared::Unanswered => "no answer".to_owned(),
            Fared::Left => "left by itself".to_owned(),
        };
        *self.lock().fared.entry(name).or_default() += 1;
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
        for (cell, phases) in &counts.harms {
            write!(f, "{:<16}{:<20}{:>7} |", cell.0, cell.1, counts.rounds[cell])?;
            for phase in Phase::ALL {
                write!(f, "{:>9}", phases.get(&phase).copied().unwrap_or(0))?;
            }
            writeln!(f)?;
        }
        let fared: Vec<String> =
            counts.fared.iter().map(|(what, count)| format!("{what}: {count}")).collect();
        writeln!(f, "clients: {}", fared.join(", "))?;
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
