//! Faults against real processes: `kill -9`, SIGSTOP, and links that are slow, cut or half-open, in every phase of a
//! request. After each round all blocks are free, and no client got a wrong text.
//!
//! ```text
//! cargo test --test faults                                    a small number of rounds, within a minute
//! cargo test --test faults -- --rounds 1000 [--seed S]        the real thing
//! cargo test --test faults -- --seed S --from R --rounds 1    one round again, with the same choices
//! BATON_NIXL_LIBRARY=FILE cargo test --test faults            with NIXL instead of shared memory: docs/how-to/nixl.md
//! ```
//!
//! | file | what |
//! |---|---|
//! | `plan` | the events of a round, chosen from the seed |
//! | `cluster` | the cluster of a lane, and a round on it |
//! | `server` | a process that restarts at its address; its descriptors and its memory |
//! | `prompt` | the clients' questions, the right responses, and the comparison |
//! | `tally` | counts |
//!
//! In a round some clients send requests. When a request is in the chosen phase, a fault hits a process or a link. The
//! fault ends after a while. Then must hold:
//!
//! 1. Every client got the right response (text, tokens, log probabilities to the last digit, usage), or an error that
//!    cannot be taken for a response, in a bounded time. Its connection breaks only if the fault hit the router or that
//!    very connection.
//! 2. Every engine's `/debug/kv` is at its baseline: no leases, no requests, every block free (invariant 5).
//! 3. A block has the same bytes in every prefix cache, and plain requests that use cached blocks get the right
//!    response.
//! 4. Every process lives (unless it was killed here), no thread of it panicked, and its descriptors and its resident
//!    memory are at their baseline.

#![allow(clippy::print_stdout, reason = "a target without the libtest harness prints its own report")]

mod cluster;
#[path = "../harness/mod.rs"]
mod harness;
mod plan;
mod prompt;
mod rng;
mod server;
mod tally;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cluster::FaultCluster;
use harness::Process;
use plan::{Lane, Round};
use prompt::CheckedPrompt;
use tally::Tally;

/// Rounds of a run without `--rounds`, and the time after which no further round begins.
const FEW: u64 = 24;
const FEW_WITHIN: Duration = Duration::from_secs(45);

/// A run ends early after this many violations.
const VIOLATIONS_MAX: u64 = 5;

struct Options {
    rounds: u64,
    seed: u64,
    from: u64,
    verbose: bool,
    /// After this time no round begins.
    within: Option<Duration>,
}

fn main() -> ExitCode {
    let options = match options(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => return ExitCode::SUCCESS,
        Err(why) => {
            println!("faults: {why}");
            return ExitCode::FAILURE;
        }
    };
    if !cfg!(target_os = "linux") {
        println!("faults: SKIPPED: needs Linux (/proc, and all of 127/8 as loopback)");
        return ExitCode::SUCCESS;
    }
    run(&options)
}

/// `None` if there is nothing to run.
fn options(args: impl Iterator<Item = String>) -> Result<Option<Options>, String> {
    let (mut rounds, mut seed, mut from, mut verbose) = (None, 1, 0, false);
    let mut args = args.peekable();
    while let Some(arg) = args.next() {
        let mut number = || {
            let value = args.next().ok_or(format!("{arg} needs a number"))?;
            value.parse::<u64>().map_err(|error| format!("{arg} {value}: {error}"))
        };
        match arg.as_str() {
            "--rounds" => rounds = Some(number()?),
            "--seed" => seed = number()?,
            "--from" => from = number()?,
            "--verbose" => verbose = true,
            "--list" => {
                println!("faults: test");
                return Ok(None);
            }
            // Options that `cargo test` passes to every target.
            "--nocapture" | "--no-capture" | "--quiet" | "-q" | "--include-ignored" => {}
            flag if flag.starts_with("--test-threads") || flag.starts_with("--format") => {
                if !flag.contains('=') {
                    args.next();
                }
            }
            filter if !filter.starts_with('-') => {
                if !"faults".contains(filter) {
                    println!("faults: SKIPPED: not meant by the filter {filter:?}");
                    return Ok(None);
                }
            }
            other => return Err(format!("unknown option {other}")),
        }
    }
    let within = rounds.is_none().then_some(FEW_WITHIN);
    Ok(Some(Options { rounds: rounds.unwrap_or(FEW), seed, from, verbose, within }))
}

fn run(options: &Options) -> ExitCode {
    let &Options { rounds, seed, from, verbose, within } = options;
    let begun = Instant::now();
    let questions = questions();
    let plans: Vec<Round> =
        (from..from + rounds).map(|number| Round::new(seed, number, questions.len())).collect();
    println!("faults: rounds {from}..{} of seed {seed}, {} questions", from + rounds, questions.len());
    if let Some(within) = within {
        println!("faults: the small run; no round is begun after {within:?}. The real one: -- --rounds 1000");
    }
    let (tally, played, violations) = (Tally::default(), AtomicU64::new(0), AtomicU64::new(0));
    let vitals = Mutex::new(Vec::new());
    let lane = |lane: Lane| {
        let mine: Vec<&Round> = plans.iter().filter(|round| round.lane == lane).collect();
        if mine.is_empty() {
            return;
        }
        let start = || {
            let mut site = FaultCluster::start(lane);
            site.warm_up(&questions);
            site
        };
        let mut site = start();
        for round in mine {
            let late = within.is_some_and(|within| begun.elapsed() > within);
            if late || violations.load(Ordering::Relaxed) >= VIOLATIONS_MAX {
                break;
            }
            let since = Instant::now();
            let played_round = catch_unwind(AssertUnwindSafe(|| site.play(round, &questions, &tally)));
            let verdict = played_round.unwrap_or_else(|panic| Err(panic_text(&*panic)));
            played.fetch_add(1, Ordering::Relaxed);
            if verbose {
                println!("{round}: {:.2?}", since.elapsed());
            }
            if let Err(violation) = verdict {
                violations.fetch_add(1, Ordering::Relaxed);
                println!("VIOLATION in {round}\n{violation}");
                println!(
                    "replay: cargo test --test faults -- --seed {seed} --from {} --rounds 1",
                    round.number
                );
                site = start();
            }
        }
        vitals.lock().expect("no holder panics").push((lane, site.vitals()));
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = Lane::ALL.into_iter().map(|which| scope.spawn(move || lane(which))).collect();
        for joined in lanes {
            if joined.join().is_err() {
                println!("VIOLATION: a lane could not be started or ended");
                violations.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    println!("{tally}");
    for (lane, servers) in vitals.lock().expect("no holder panics").iter() {
        for (name, held) in servers {
            println!(
                "{} {name}: {} descriptors ({} at its start), {} KiB resident ({} when warm), {} rounds since its start",
                lane.name(),
                held.descriptors_now,
                held.descriptors_at_start,
                held.resident_now_kib,
                held.resident_warm_kib,
                held.rounds
            );
        }
    }
    let (played, violations) = (played.into_inner(), violations.into_inner());
    if played < rounds {
        println!("faults: NOT PLAYED: {} of {rounds} rounds", rounds - played);
    }
    let minutes = begun.elapsed().as_secs_f64() / 60.0;
    println!("{:.1} rounds/min, {minutes:.1} min", played as f64 / minutes);
    println!("rounds {played} violations {violations}");
    if violations == 0 && played > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The questions, with the responses of a separate engine.
fn questions() -> Vec<CheckedPrompt> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let args = "engine --role both --threads 1 --kv-blocks 256 --listen 127.0.0.1:0";
    let args: Vec<String> = args.split(' ').map(str::to_owned).collect();
    let mut oracle = Process::start("oracle", &args, folder.path());
    oracle.wait_ready();
    prompt::questions(&oracle.fact("http"))
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}
