//! `baton bench lease`: what one lease costs the ledger, with any number of others alive.
//!
//! In one run, alternating, for each number of live leases:
//! - **fetched**: open, a read begun, a read done;
//! - **released**: open, release;
//! - **expired**: open, and the time comes that ends it; as many others live, at every age, and one of them, at the
//!   head, is renewed twice for each, so that it never ends;
//! - **renewed**: one heartbeat of any live lease;
//! - **map**: a `HashMap` of handles with values of an entry's size, one insertion and one removal: the least that any
//!   table of leases costs at that size, and what the machine's cache does to it.
//!
//! Handles are random, requests have names of 36 characters, tables have 16 blocks, and ended leases are remembered
//! as in production. What is made for a lease before it is opened, and what is done with its blocks afterwards, is
//! not timed.
//!
//! Times are of the processor that this thread had, so that other work on the machine counts only by what it does to
//! the caches.
//!
//! `--json` prints one object: `leases[]` with `live`, and for `fetched`, `released`, `expired`, `renewed` and `map`
//! the median `ns` and `ratio_to_map` (median of the ratios within each repetition); `growth` with the same names: how
//! much more one costs with the most live leases than with the fewest, likewise; `repetitions`; `rounds`.

#![allow(unsafe_code)] // clock_gettime(2), for a clock that the standard library does not know; one call

use std::collections::HashMap;
use std::io::{self, Write};
use std::mem::size_of;
use std::time::Duration;

use baton_connector::lease::{Lease, LeaseTerms};
use baton_connector::ledger::{Grant, HeartbeatReply, Ledger, ReleaseReply};
use baton_connector::limits::{LEASES_MAX, TOMBSTONES_MAX};
use baton_connector::transport::Verdict;
use baton_connector::{BlockId, Handle, Reader, RequestId, Time};
use serde_json::{Map, Value, json};

const READER: Reader = Reader::sole(1);

/// Blocks of one lease.
const BLOCKS: usize = 16;

/// Bytes of a map's value: those of the lease itself and of what it is opened with.
const VALUE_BYTES: usize = size_of::<Lease>() + size_of::<Grant>();

const WAYS: [&str; 5] = ["fetched", "released", "expired", "renewed", "map"];

/// What to measure.
#[derive(Clone, Debug, clap::Args)]
pub struct LeaseOptions {
    /// Numbers of live leases, separated by commas
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [1, 10, 100, 1_000, 10_000, 100_000])]
    pub live: Vec<usize>,
    /// Leases per repetition of each measurement
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    pub rounds: usize,
    /// Repetitions of each measurement
    #[arg(long, value_name = "N", default_value_t = 11)]
    pub repetitions: usize,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The output failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Nothing to measure, or more than a ledger holds.
    #[error("rounds and repetitions must be positive, and live leases 1 to {}", LEASES_MAX - 1)]
    Options,
}

/// Measures and prints.
///
/// # Errors
/// [`LeaseError`].
///
/// # Panics
/// When the ledger gives another answer than the one that was to be timed.
pub fn run(options: &LeaseOptions, out: &mut dyn Write) -> Result<(), LeaseError> {
    let sizes_fit = options.live.iter().all(|live| (1..LEASES_MAX).contains(live));
    if options.rounds == 0 || options.repetitions == 0 || options.live.is_empty() || !sizes_fit {
        return Err(LeaseError::Options);
    }
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    let mut books: Vec<_> = options.live.iter().map(|&live| Books::filled(live, &mut dice)).collect();
    // By size, by way: nanoseconds per repetition. The first repetition warms up and does not count.
    let mut times = vec![vec![Vec::new(); WAYS.len()]; books.len()];
    for repetition in 0..=options.repetitions {
        for (books, times) in books.iter_mut().zip(&mut times) {
            let rounds = options.rounds;
            let took = [
                books.fetched(rounds, &mut dice),
                books.released(rounds, &mut dice),
                books.expired(rounds, &mut dice),
                books.renewed(rounds, &mut dice),
                books.map(rounds, &mut dice),
            ];
            if repetition > 0 {
                for (list, took) in times.iter_mut().zip(took) {
                    list.push(took.as_secs_f64() * 1e9 / rounds as f64);
                }
            }
        }
    }
    let report = report(options, &times);
    if options.json {
        writeln!(out, "{report:#}")?
    } else {
        print(&report, out)?
    }
    Ok(())
}

/// Ledgers with so many live leases, and a map as large.
struct Books {
    live: usize,
    /// Time stands still.
    still: Ledger,
    handles: Vec<Handle>,
    /// Time goes on: a lease ends whenever one is opened.
    flowing: Ledger,
    now: Time,
    /// The one that never ends.
    head: Handle,
    map: HashMap<Handle, [u8; VALUE_BYTES]>,
}

impl Books {
    fn filled(live: usize, dice: &mut Dice) -> Self {
        let (mut still, mut flowing) =
            (Ledger::new(LeaseTerms::default()), Ledger::new(LeaseTerms::default()));
        // As many as are remembered have ended before.
        for grant in dice.grants(TOMBSTONES_MAX) {
            let handle = grant.handle;
            still.open(grant, Time::ZERO).expect("room");
            still.release(handle, "ended before", Time::ZERO);
            drop(still.take_settled());
        }
        let grants = dice.grants(live);
        let handles: Vec<_> = grants.iter().map(|grant| grant.handle).collect();
        for grant in grants {
            still.open(grant, Time::ZERO).expect("room");
        }
        let head = dice.grants(1).remove(0);
        let head_handle = head.handle;
        flowing.open(head, Time::ZERO).expect("room");
        let map = handles.iter().map(|handle| (*handle, [0; VALUE_BYTES])).collect();
        Self { live, still, handles, flowing, now: Time::ZERO, head: head_handle, map }
    }

    fn fetched(&mut self, rounds: usize, dice: &mut Dice) -> Duration {
        let grants = dice.grants(rounds);
        let mut settled = Vec::with_capacity(rounds);
        let begun = Begun::now();
        for grant in grants {
            let handle = grant.handle;
            self.still.open(grant, Time::ZERO).expect("room");
            let blocks = self.still.read_begun(handle, READER, 0, BLOCKS, Time::ZERO).expect("live");
            assert_eq!(self.still.read_done(handle, READER, Time::ZERO), Verdict::Valid, "{blocks:?}");
            settled.append(&mut self.still.take_settled());
        }
        let took = begun.elapsed();
        assert_eq!((settled.len(), self.still.len()), (rounds, self.live));
        took
    }

    fn released(&mut self, rounds: usize, dice: &mut Dice) -> Duration {
        let grants = dice.grants(rounds);
        let mut settled = Vec::with_capacity(rounds);
        let begun = Begun::now();
        for grant in grants {
            let handle = grant.handle;
            self.still.open(grant, Time::ZERO).expect("room");
            assert_eq!(self.still.release(handle, "measured", Time::ZERO), ReleaseReply::Released);
            settled.append(&mut self.still.take_settled());
        }
        let took = begun.elapsed();
        assert_eq!((settled.len(), self.still.len()), (rounds, self.live));
        took
    }

    /// One is opened every `duration / live`, so that `live` of them are alive. Halfway and then, the head is renewed.
    fn expired(&mut self, rounds: usize, dice: &mut Dice) -> Duration {
        let step = LeaseTerms::default().duration / self.live as u32;
        // Until the first of them end.
        let missing = (self.live + 1).saturating_sub(self.flowing.len());
        self.flow(dice.grants(missing), step);
        let grants = dice.grants(rounds);
        let begun = Begun::now();
        let ended = self.flow(grants, step);
        let took = begun.elapsed();
        assert!(ended.abs_diff(rounds) <= 2 && self.flowing.len().abs_diff(self.live + 1) <= 2, "{ended}");
        took
    }

    fn flow(&mut self, grants: Vec<Grant>, step: Duration) -> usize {
        let mut ended = Vec::with_capacity(grants.len() + 2);
        for grant in grants {
            for _ in 0..2 {
                self.now = self.now.after(step / 2);
                assert_eq!(self.flowing.heartbeat(self.head, self.now), HeartbeatReply::Renewed);
            }
            self.flowing.open(grant, self.now).expect("room");
            ended.append(&mut self.flowing.take_settled());
        }
        ended.len()
    }

    fn renewed(&mut self, rounds: usize, dice: &mut Dice) -> Duration {
        let any: Vec<_> = (0..rounds).map(|_| self.handles[dice.below(self.handles.len())]).collect();
        let begun = Begun::now();
        for handle in any {
            assert_eq!(self.still.heartbeat(handle, Time::ZERO), HeartbeatReply::Renewed);
        }
        begun.elapsed()
    }

    fn map(&mut self, rounds: usize, dice: &mut Dice) -> Duration {
        let handles: Vec<_> = (0..rounds).map(|_| dice.handle()).collect();
        let begun = Begun::now();
        for handle in handles {
            self.map.insert(handle, [1; VALUE_BYTES]);
            assert!(self.map.remove(&handle).is_some());
        }
        begun.elapsed()
    }
}

/// A moment on the clock of the processor time that this thread has had.
struct Begun(Duration);

impl Begun {
    fn now() -> Self {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: a `timespec` that lives through the call.
        let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
        assert_eq!(result, 0, "every Linux has this clock");
        Self(Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32))
    }

    fn elapsed(&self) -> Duration {
        Self::now().0 - self.0
    }
}

/// A number generator for handles: xorshift, always the same.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn handle(&mut self) -> Handle {
        Handle(u128::from(self.next()) << 64 | u128::from(self.next()))
    }

    fn grants(&mut self, count: usize) -> Vec<Grant> {
        let grant = |dice: &mut Self| {
            let handle = dice.handle();
            let request = RequestId::new(&format!("cmpl{handle}")).expect("36 characters");
            let blocks = (0..BLOCKS as u32).map(BlockId).collect();
            Grant { handle, request, blocks, expected: 1 }
        };
        (0..count).map(|_| grant(self)).collect()
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { f64::midpoint(values[middle - 1], values[middle]) }
}

/// The median over the repetitions of how much more `a` took than `b`.
fn ratio(a: &[f64], b: &[f64]) -> f64 {
    (median(a.iter().zip(b).map(|(a, b)| a / b).collect()) * 1000.0).round() / 1000.0
}

fn report(options: &LeaseOptions, times: &[Vec<Vec<f64>>]) -> Value {
    let size = |(live, times): (&usize, &Vec<Vec<f64>>)| {
        let map = times.last().expect("the last way is the map");
        let mut entry = Map::from_iter([("live".to_owned(), json!(live))]);
        for (way, list) in WAYS.iter().zip(times) {
            let ns = (median(list.clone()) * 10.0).round() / 10.0;
            entry.insert((*way).to_owned(), json!({"ns": ns, "ratio_to_map": ratio(list, map)}));
        }
        Value::Object(entry)
    };
    let by_size = |most: bool| {
        let at = options.live.iter().enumerate();
        let place = if most { at.max_by_key(|(_, live)| **live) } else { at.min_by_key(|(_, live)| **live) };
        &times[place.expect("there is a size").0]
    };
    let (most, fewest) = (by_size(true), by_size(false));
    let growth = WAYS.iter().zip(most.iter().zip(fewest));
    let growth: Map<_, _> =
        growth.map(|(way, (most, fewest))| ((*way).to_owned(), json!(ratio(most, fewest)))).collect();
    json!({
        "repetitions": options.repetitions,
        "rounds": options.rounds,
        "leases": options.live.iter().zip(times).map(size).collect::<Vec<_>>(),
        "growth": growth,
    })
}

fn print(report: &Value, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "nanoseconds per lease, median of {} repetitions (× a map)", report["repetitions"])?;
    write!(out, "{:>8}", "live")?;
    WAYS.iter().try_for_each(|way| write!(out, "{way:>16}"))?;
    writeln!(out)?;
    for size in report["leases"].as_array().into_iter().flatten() {
        write!(out, "{:>8}", size["live"].to_string())?;
        for way in WAYS {
            let (ns, times) = (&size[way]["ns"], &size[way]["ratio_to_map"]);
            let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
            write!(out, "{:>16}", format!("{:.0} ({:.1}×)", number(ns), number(times)))?;
        }
        writeln!(out)?;
    }
    write!(out, "{:>8}", "growth")?;
    for way in WAYS {
        write!(out, "{:>16}", format!("{:.2}×", report["growth"][way].as_f64().unwrap_or(f64::NAN)))?;
    }
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_prints_every_documented_number() {
        let options = LeaseOptions { live: vec![1, 50], rounds: 200, repetitions: 2, json: true };
        let mut out = Vec::new();
        run(&options, &mut out).expect("it measures");
        let report: Value = serde_json::from_slice(&out).expect("one JSON object");
        for size in report["leases"].as_array().expect("a list") {
            for way in WAYS {
                assert!(size[way]["ns"].as_f64().expect("a number") > 0.0);
                assert!(size[way]["ratio_to_map"].as_f64().expect("a number") > 0.0);
            }
        }
        assert!(WAYS.iter().all(|way| report["growth"][way].as_f64().expect("a number") > 0.0));
    }

    #[test]
    fn what_a_ledger_cannot_hold_is_an_error() {
        for live in [vec![], vec![0], vec![LEASES_MAX]] {
            let options = LeaseOptions { live, rounds: 1, repetitions: 1, json: true };
            assert!(matches!(run(&options, &mut Vec::new()), Err(LeaseError::Options)));
        }
    }
}
