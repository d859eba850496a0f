//! `baton bench lease`: the cost of one lease in the ledger, with any number of other live leases.
//!
//! Each repetition alternates, for each number of live leases:
//!
//! - **fetched**: open, begin a read, finish the read;
//! - **released**: open, release;
//! - **expired**: open, and expiry of another lease. The live leases have all ages. The lease at the head is renewed
//!   twice for each, so that it never expires;
//! - **renewed**: one heartbeat of a random live lease;
//! - **map**: one insertion and one removal in a `HashMap` of handles with values of an entry's size. This is the
//!   minimum cost of any table of leases of that size on this machine.
//!
//! Handles are random, request names have 36 characters, block tables have 16 blocks, and ended leases are
//! remembered as in production. The time excludes preparation before a lease is opened and work with its blocks
//! afterwards.
//!
//! Times are CPU times of this thread, so that other processes affect them only through the caches.
//!
//! `--json` prints one object:
//!
//! - `leases[]` with `live`, and for `fetched`, `released`, `expired`, `renewed` and `map` the median `ns`;
//! - the same with `ratio_to_map`, the median of the ratios within each repetition;
//! - `growth` with the same names: the cost with the most live leases over the cost with the fewest;
//! - `repetitions`, `rounds`.

#![allow(
    unsafe_code,
    reason = "clock_gettime(2), for a clock that the standard library does not know; one call"
)]

use std::collections::HashMap;
use std::io::{self, Write};
use std::mem::size_of;
use std::time::Duration;

use baton_connector::lease::{Lease, LeaseTerms};
use baton_connector::ledger::{HeartbeatReply, LeaseSpec, Ledger, ReleaseReply};
use baton_connector::limits::{LEASES_MAX, TOMBSTONES_MAX};
use baton_connector::transport::Verdict;
use baton_connector::{BlockId, Handle, Reader, RequestId, Time};
use serde_json::{Map, Value, json};

use crate::common::report::print_report;
use crate::common::stats::{median, thousandths};
use crate::load::rng::Rng;

const READER: Reader = Reader::sole(1);

/// Blocks of one lease.
const BLOCKS: usize = 16;

/// Bytes of a map's value: the size of a lease and its specification.
const VALUE_BYTES: usize = size_of::<Lease>() + size_of::<LeaseSpec>();

const WAYS: [&str; 5] = ["fetched", "released", "expired", "renewed", "map"];

/// Options of `baton bench lease`.
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

/// Why the benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The output failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The options leave nothing to measure, or exceed a ledger's limit.
    #[error("rounds and repetitions must be positive, and live leases 1 to {}", LEASES_MAX - 1)]
    Options,
}

/// Measures and prints.
///
/// # Errors
/// [`LeaseError`].
///
/// # Panics
/// If the ledger returns another result than expected.
pub fn run(options: &LeaseOptions, out: &mut dyn Write) -> Result<(), LeaseError> {
    let sizes_fit = options.live.iter().all(|live| (1..LEASES_MAX).contains(live));
    if options.rounds == 0 || options.repetitions == 0 || options.live.is_empty() || !sizes_fit {
        return Err(LeaseError::Options);
    }
    let mut rng = Rng::new(0x9e37_79b9_7f4a_7c15);
    let mut fixtures: Vec<_> =
        options.live.iter().map(|&live| LedgerFixture::filled(live, &mut rng)).collect();
    // By size and kind: nanoseconds per repetition. The first repetition warms up and does not count.
    let mut times = vec![vec![Vec::new(); WAYS.len()]; fixtures.len()];
    for repetition in 0..=options.repetitions {
        for (fixture, times) in fixtures.iter_mut().zip(&mut times) {
            let rounds = options.rounds;
            let took = [
                fixture.fetched(rounds, &mut rng),
                fixture.released(rounds, &mut rng),
                fixture.expired(rounds, &mut rng),
                fixture.renewed(rounds, &mut rng),
                fixture.map(rounds, &mut rng),
            ];
            if repetition > 0 {
                for (list, took) in times.iter_mut().zip(took) {
                    list.push(took.as_secs_f64() * 1e9 / rounds as f64);
                }
            }
        }
    }
    Ok(print_report(&report(options, &times), options.json, out, print)?)
}

/// Ledgers with `live` live leases, and a map of that size.
struct LedgerFixture {
    live: usize,
    /// The ledger whose time does not advance.
    idle: Ledger,
    handles: Vec<Handle>,
    /// The ledger whose time advances: a lease expires whenever one is opened.
    busy: Ledger,
    now: Time,
    /// The lease that never expires.
    head: Handle,
    map: HashMap<Handle, [u8; VALUE_BYTES]>,
}

impl LedgerFixture {
    fn filled(live: usize, rng: &mut Rng) -> Self {
        let (mut still, mut flowing) =
            (Ledger::new(LeaseTerms::default()), Ledger::new(LeaseTerms::default()));
        // The maximum number of ended leases is remembered.
        for grant in random_grants(TOMBSTONES_MAX, rng) {
            let handle = grant.handle;
            still.open(grant, Time::ZERO).expect("room");
            still.release(handle, "ended before", Time::ZERO);
            drop(still.take_closed());
        }
        let grants = random_grants(live, rng);
        let handles: Vec<_> = grants.iter().map(|grant| grant.handle).collect();
        for grant in grants {
            still.open(grant, Time::ZERO).expect("room");
        }
        let head = random_grants(1, rng).remove(0);
        let head_handle = head.handle;
        flowing.open(head, Time::ZERO).expect("room");
        let map = handles.iter().map(|handle| (*handle, [0; VALUE_BYTES])).collect();
        Self { live, idle: still, handles, busy: flowing, now: Time::ZERO, head: head_handle, map }
    }

    fn fetched(&mut self, rounds: usize, rng: &mut Rng) -> Duration {
        let grants = random_grants(rounds, rng);
        let mut settled = Vec::with_capacity(rounds);
        let begun = ThreadTimer::now();
        for grant in grants {
            let handle = grant.handle;
            self.idle.open(grant, Time::ZERO).expect("room");
            let blocks = self.idle.begin_read(handle, READER, 0, BLOCKS, Time::ZERO).expect("live");
            assert_eq!(self.idle.finish_read(handle, READER, Time::ZERO), Verdict::Valid, "{blocks:?}");
            settled.append(&mut self.idle.take_closed());
        }
        let took = begun.elapsed();
        assert_eq!((settled.len(), self.idle.len()), (rounds, self.live));
        took
    }

    fn released(&mut self, rounds: usize, rng: &mut Rng) -> Duration {
        let grants = random_grants(rounds, rng);
        let mut settled = Vec::with_capacity(rounds);
        let begun = ThreadTimer::now();
        for grant in grants {
            let handle = grant.handle;
            self.idle.open(grant, Time::ZERO).expect("room");
            assert_eq!(self.idle.release(handle, "measured", Time::ZERO), ReleaseReply::Released);
            settled.append(&mut self.idle.take_closed());
        }
        let took = begun.elapsed();
        assert_eq!((settled.len(), self.idle.len()), (rounds, self.live));
        took
    }

    /// One lease is opened every `duration / live`, so that `live` leases exist. The head is renewed twice per
    /// interval.
    fn expired(&mut self, rounds: usize, rng: &mut Rng) -> Duration {
        let step = LeaseTerms::default().duration / self.live as u32;
        // Until the first leases expire.
        let missing = (self.live + 1).saturating_sub(self.busy.len());
        self.flow(random_grants(missing, rng), step);
        let grants = random_grants(rounds, rng);
        let begun = ThreadTimer::now();
        let ended = self.flow(grants, step);
        let took = begun.elapsed();
        assert!(ended.abs_diff(rounds) <= 2 && self.busy.len().abs_diff(self.live + 1) <= 2, "{ended}");
        took
    }

    fn flow(&mut self, grants: Vec<LeaseSpec>, step: Duration) -> usize {
        let mut ended = Vec::with_capacity(grants.len() + 2);
        for grant in grants {
            for _ in 0..2 {
                self.now = self.now.after(step / 2);
                assert_eq!(self.busy.heartbeat(self.head, self.now), HeartbeatReply::Renewed);
            }
            self.busy.open(grant, self.now).expect("room");
            ended.append(&mut self.busy.take_closed());
        }
        ended.len()
    }

    fn renewed(&mut self, rounds: usize, rng: &mut Rng) -> Duration {
        let any: Vec<_> =
            (0..rounds).map(|_| self.handles[rng.below(self.handles.len() as u64) as usize]).collect();
        let begun = ThreadTimer::now();
        for handle in any {
            assert_eq!(self.idle.heartbeat(handle, Time::ZERO), HeartbeatReply::Renewed);
        }
        begun.elapsed()
    }

    fn map(&mut self, rounds: usize, rng: &mut Rng) -> Duration {
        let handles: Vec<_> = (0..rounds).map(|_| random_handle(rng)).collect();
        let begun = ThreadTimer::now();
        for handle in handles {
            self.map.insert(handle, [1; VALUE_BYTES]);
            assert!(self.map.remove(&handle).is_some());
        }
        begun.elapsed()
    }
}

/// A point of this thread's CPU time.
struct ThreadTimer(Duration);

impl ThreadTimer {
    fn now() -> Self {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: a `timespec` that outlives the call.
        let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
        assert_eq!(result, 0, "every Linux has this clock");
        Self(Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32))
    }

    fn elapsed(&self) -> Duration {
        Self::now().0 - self.0
    }
}

fn random_handle(rng: &mut Rng) -> Handle {
    Handle(u128::from(rng.next()) << 64 | u128::from(rng.next()))
}

fn random_grants(count: usize, rng: &mut Rng) -> Vec<LeaseSpec> {
    let grant = |rng: &mut Rng| {
        let handle = random_handle(rng);
        let request = RequestId::new(&format!("cmpl{handle}")).expect("36 characters");
        let blocks = (0..BLOCKS as u32).map(BlockId).collect();
        LeaseSpec { handle, request, blocks, expected: 1 }
    };
    (0..count).map(|_| grant(rng)).collect()
}

/// The median over the repetitions of the ratio of `a` to `b`.
fn ratio(a: &[f64], b: &[f64]) -> f64 {
    let ratio = median(a.iter().zip(b).map(|(a, b)| a / b).collect()).expect("there is a repetition");
    thousandths(ratio)
}

fn report(options: &LeaseOptions, times: &[Vec<Vec<f64>>]) -> Value {
    let size = |(live, times): (&usize, &Vec<Vec<f64>>)| {
        let map = times.last().expect("the last way is the map");
        let mut entry = Map::from_iter([("live".to_owned(), json!(live))]);
        for (way, list) in WAYS.iter().zip(times) {
            let ns = median(list.clone()).expect("there is a repetition");
            let ns = (ns * 10.0).round() / 10.0;
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
    fn lease_counts_outside_the_ledgers_range_are_an_error() {
        for live in [vec![], vec![0], vec![LEASES_MAX]] {
            let options = LeaseOptions { live, rounds: 1, repetitions: 1, json: true };
            assert!(matches!(run(&options, &mut Vec::new()), Err(LeaseError::Options)));
        }
    }
}
